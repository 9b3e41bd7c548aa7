"""Head files: their order, shapes, origins, names of models; wrong files; random heads."""

import json
import random
import re
import shutil
from argparse import Namespace
from itertools import chain, combinations

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cli.options import fit
from decoders.setup import Setup
from heads import (
    FOLDER,
    ablation,
    choose_heads,
    head_file,
    head_files,
    load_heads,
    published_random_heads,
    random_heads,
)
from heads.reader import find_file, find_measures, read_scores
from hf import HFModel
from model import Transformer
from runtime.files import read_json
from tests.checkpoints import read_lines, stand_in, write_checkpoint, write_heads, write_lines
from tests.tables import each, rows

README = (FOLDER / "README.md").read_text(encoding="utf-8")
# 40 layers of 8 heads
RANKED = [(i // 8, i % 8) for i in np.random.RandomState(0).permutation(320).tolist()]
BEST = {
    ("Meta-Llama-3-8B-Instruct", 32, 32): "15-30 24-27 16-20 8-1 16-1 27-7 15-1 10-14 27-5 20-14 "
    "5-8 16-23 20-23 19-3 20-1",
    ("Meta-Llama-3-70B-Instruct", 80, 64): "76-57 18-4 77-50 18-45 77-55 52-19 77-53 76-56 56-42 "
    "18-7 77-52 74-7 74-29 18-47",
}


@pytest.mark.parametrize("name, n_layers, n_heads", BEST)
def test_the_best_heads_of_the_papers_models_are_in_the_authors_order(name, n_layers, n_heads):
    ranked = load_heads(stand_in(n_layers, n_heads, f"meta-llama/{name}"))
    best = " ".join(f"{layer}-{head}" for layer, head in ranked)
    assert best.startswith(BEST[name, n_layers, n_heads])


def stored(name):
    return read_json(FOLDER / "scores" / f"{name}.json")


def test_every_file_fits_its_row_of_the_readme():
    lines = re.findall(r"^\| (\S+/(\S+)) \| (\d+)×(\d+) \| (\w+) \| (\d+)", README, re.M)
    for model, name, L, H, measure, samples in lines:
        content = stored(name)
        facts = [content[field] for field in ("model", "n_layers", "n_heads", "samples")]
        assert facts == [model, int(L), int(H), int(samples)]
        kinds = find_measures(FOLDER / "scores" / f"{name}.json")
        assert kinds[:3] == (["copy", "write", "mass"] if measure == "all" else ["copy"])
        for kind in kinds:
            assert load_heads(stand_in(int(L), int(H), model), measure=kind)
    assert len(lines) == len(head_files()) - 2  # without the bundled models


@pytest.mark.parametrize("change", [0, 0.5])
def test_the_same_weights_find_their_heads_under_any_name(change, tmp_path, recwarn):
    folder = tmp_path / "other"
    shutil.copytree(FOLDER.parent / "miniature", folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += change
    save_file(weights, folder / "model.safetensors")
    model = Transformer.load(folder)
    if change:
        with pytest.raises(FileNotFoundError, match="other is neither a head file nor a model"):
            load_heads(model)
    else:
        assert load_heads(model) == load_heads(Transformer.load(FOLDER.parent / "miniature"))
        assert not recwarn.list


# Pairs of files in each row of the README's first table of overlaps.
COMPARED = """
Meta-Llama-3-8B Llama-3.1-8B, Meta-Llama-3-8B-Instruct Llama-3.1-8B-Instruct
Llama-2-7b-hf Llama-2-7b-chat-hf, Llama-3.1-8B Llama-3.1-8B-Instruct, \
    Meta-Llama-3-8B Meta-Llama-3-8B-Instruct, Meta-Llama-3-70B Meta-Llama-3-70B-Instruct, \
    Mistral-7B-v0.2 Mistral-7B-Instruct-v0.2, Mistral-7B-v0.3 Mistral-7B-Instruct-v0.3, \
    Qwen1.5-14B Qwen1.5-14B-Chat, Qwen2.5-3B Qwen2.5-3B-Instruct
Llama-2-7b-hf llama-2-7b-80k, Llama-2-7b-hf Llama-2-7B-32K-Instruct, \
    Meta-Llama-3-8B-Instruct Llama-3-8B-Instruct-Gradient-1048k, \
    Meta-Llama-3-8B-Instruct Llama-3-8B-Instruct-Gradient-4194k, \
    Mistral-7B-Instruct-v0.2 MegaBeam-Mistral-7B-300k
"""


def test_the_overlaps_of_the_readme_are_those_of_the_files():

    def of(name, measure="copy"):
        return read_scores(find_file(name), measure)

    def overlap(n, *rankings):
        a, b = ({*sorted(scores, key=scores.get, reverse=True)[:n]} for scores in rankings)
        return len(a & b)

    def shared(name, *measures):
        both = [of(name, measure) for measure in measures]
        return f"{overlap(10, *both)}, {overlap(20, *both)}"

    lines = re.findall(r"\| (\d) \| (\S+) \| (\S+) \| (\S+) \|$", README, re.M)
    for (number, *cells), names in zip(lines, COMPARED.strip().splitlines(), strict=True):
        pairs = [[of(name) for name in pair.split()] for pair in names.split(", ")]
        assert int(number) == len(pairs)
        for n, cell in zip((10, 20, 50), cells):
            common = [overlap(n, *pair) for pair in pairs]
            assert cell == f"{min(common)}–{max(common)}"
    of_measures = re.findall(
        r"^\| (\S+) .*\| (\d+) of (\d+) \| (\d+) of (\d+) \| (.*) \|$", README, re.M
    )
    for name, *cells, common in of_measures:
        content = stored(name)
        copy = [*of(name).values()]
        above = sum(score > 0.1 for score in copy)
        runs = content["samples"] / content["success_rate"]
        assert [int(x) for x in cells] == [content["samples"], round(runs), above, len(copy)]
        pairs = combinations(("copy", "write", "mass"), 2)
        assert common == " | ".join(shared(name, *pair) for pair in pairs)
    assert len(of_measures) == 4
    pairs = r"(\d, \d) \| (\d, \d) \| (\d, \d)"
    of_effect = re.findall(rf"^\| (\S+) \| (\d+) \| {pairs} \|$", README, re.M)
    for name, n, *cells in of_effect:
        assert int(n) == stored(name)["effect_facts"]["n"]
        for cell, measure in zip(cells, ("copy", "write", "mass")):
            assert cell == shared(name, "effect", measure)
    assert len(of_effect) == 3


def compare(maps, sizes):
    """[correlation, that of the ranks, how many of the best heads are shared, for each of `sizes`]
    of two maps of scores, as the README prints them."""
    assert list(maps[0]) == list(maps[1])
    values = np.array([[*scores.values()] for scores in maps])
    order = values.argsort()
    r, of_ranks = (np.corrcoef(x)[0, 1] for x in (values, order.argsort()))
    shared = [len(np.intersect1d(*order[:, -k:])) for k in sizes]
    return r, of_ranks, ", ".join(map(str, shared))


def test_the_gradient_and_masking_of_the_readme_are_those_of_the_stored_results():
    tokens = "first|all"
    lines = re.findall(rf"^\| (\S+) \| (\d+) \| ({tokens}) \| ({tokens}) \| (.*) \|$", README, re.M)
    results = read_json(FOLDER / "results" / "masking.json")
    for name, n, gradient, masking, cells in lines:
        content = results[name]
        facts = content["facts"]
        measured = stored(name)["effect_facts"]["ids"]
        assert facts["ids"] == measured[: int(n)] and facts["dtype"] == "float32"
        maps = content["gradient"][gradient], content["masking"][masking]
        r, of_ranks, shared = compare(maps, (1, 3, 5, 10))
        assert cells == f"{r:.3f} | {of_ranks:.3f} | {shared}"
    assert results.keys() == {name for name, *_ in lines}
    assert len(lines) == 4 * len(results)


def test_effects_on_several_texts_compare_as_the_readme_says():
    lines = re.findall(
        r"^\| (\S+) \| (.+), (.+) \| (\d+), (\d+) \| (-?[\d.]+) \| ([\d, ]+) \|$", README, re.M
    )

    results = read_json(FOLDER / "results" / "effects.json")

    def of(name, texts):
        """(number of questions or needles, effect)"""
        if texts == "the file":
            content = stored(name)
        elif texts == "implied":
            content = read_json(FOLDER / "results" / "masking.json")[name]
            return content["facts"]["n"], content["gradient"]["all"]
        else:
            content = results[f"{name}.{texts.lower()}"]
        n = content["effect_facts"]["n"] if "effect_facts" in content else content["samples"]
        return n, content["effect"]

    for name, a, b, n, m, *cells in lines:
        (of_a, first), (of_b, second) = of(name, a), of(name, b)
        assert (int(n), int(m)) == (of_a, of_b)
        r, _, shared = compare((first, second), (3, 5, 10))
        assert cells == [f"{r:.2f}", shared]
    used = {f"{name}.{x.lower()}" for name, a, b, *_ in lines for x in (a, b)}
    assert results.keys() <= used and len(lines) > 4


HUB_NAMES = """
meta-llama/Meta-Llama-3-8B | Meta-Llama-3-8B
/data/META-LLAMA-3-8b/ | Meta-Llama-3-8B
meta-llama/Meta-Llama-3.1-8B-Instruct | Llama-3.1-8B-Instruct
meta-llama/Llama-2-7b | Llama-2-7b-hf
alpindale/Mistral-7B-v0.2-hf | Mistral-7B-v0.2
/cache/models--meta-llama--Meta-Llama-3-8B/snapshots/8cde5ca | Meta-Llama-3-8B
"""


@each("name, stem", HUB_NAMES)
def test_every_hub_name_of_a_model_finds_its_file(name, stem):
    assert head_file(name).stem == stem
    assert head_file("someone/another-model") is head_file(".") is None


def test_a_file_of_your_own_comes_before_the_one_in_scores(tmp_path, monkeypatch):
    monkeypatch.setattr("heads.reader.FOLDER", tmp_path)
    (tmp_path / "scores").mkdir()
    for folder in ("scores", "."):
        path = write_heads(tmp_path / folder / "Tiny.json")
        assert head_file("org/tiny") == path


def test_a_link_has_its_own_name_and_finds_the_heads_of_its_target_too(tmp_path, monkeypatch):
    monkeypatch.setattr("heads.reader.FOLDER", tmp_path)
    (tmp_path / "link").symlink_to(
        write_checkpoint(tmp_path / "models--owner--tiny" / "snapshots" / "8cde5ca")
    )
    own, theirs = (load(tmp_path / "link") for load in (Transformer.load, HFModel.load))
    for name in "tiny.json", "link.json":  # the link's name takes precedence
        scores = read_scores(write_heads(tmp_path / name, seed=len(name)))
        expected = sorted(scores, key=scores.get, reverse=True)
        assert load_heads(own) == load_heads(theirs) == choose_heads(own, n=12)[0] == expected
    assert own.name == theirs.name == "link"
    assert Transformer.load((tmp_path / "link").resolve()).name == "owner/tiny"


RELATED = """
meta-llama/Llama-3.2-3B-Instruct | 28 24 | --heads Llama-3.2-3B), give
someone/honest_llama3_8B_instruct | 32 32 | --heads Meta-Llama-3-8B-Instruct
someone/Llama-3.2-3B-Instruct | 30 24 | Instruct: give --heads FILE, or
"""


@each("name, shape, hint", RELATED)
@pytest.mark.parametrize("transformers", [False, True])
def test_a_model_without_a_file_gets_the_names_of_related_ones_and_the_command_that_measures(
    name, shape, hint, transformers
):
    args = Namespace(model=name, heads=None, transformers=transformers)
    with pytest.raises(ValueError) as error:
        fit(Setup.of("masked"), args, stand_in(*map(int, shape.split()), name))
    message, _, command = str(error.value).partition("measure them: ")
    assert hint in message
    more = "--transformers " * transformers
    out = f"heads/scores/{name.rpartition('/')[2]}.json"
    assert command == f"python -m heads.detect --model {name} {more}--out {out}"


def test_the_authors_form_is_ranked_by_means_and_ties_keep_the_order_of_the_file(tmp_path):
    samples = {"1-1": [0.2, 0.4], "0-1": [1, 0], "1-0": [0, 0], "0-0": [0.5, 0.5]}
    samples |= {"0-2": [0.1, 0.1], "1-2": [0.1, 0.1]}
    path = write_lines(tmp_path / "m.json", [samples])
    ranked = [(0, 1), (0, 0), (1, 1), (0, 2), (1, 2), (1, 0)]
    assert [load_heads(stand_in(2, 3), n, path) for n in (None, 0, 3)] == [ranked, [], ranked[:3]]
    ten = [0.1] * 10
    write_lines(path, [{"0-0": ten}])
    assert read_scores(path)[0, 0] == np.mean(ten) != sum(ten) / 10


def test_heads_are_ranked_by_the_measure_of_the_command_line(tmp_path):
    scores = {"0-0": 0.5, "0-1": 0.25, "0-2": 1}
    write = {"0-0": -0.5, "0-1": 3, "0-2": 0}
    path = write_lines(tmp_path / "m.json", [{"scores": scores, "write": write}])
    model = stand_in(1, 3)
    for measure, best in ((None, (0, 2)), ("copy", (0, 2)), ("write", (0, 1))):
        setup = Setup.of("masked", num_heads=1, measure=measure).with_heads(model, source=path)
        assert setup.record().heads == (best,)
    with pytest.raises(ValueError, match='"mass" must be an object .* heads.detect measures it'):
        load_heads(model, name=path, measure="mass")
    # Random heads are none of the best ones of the measure.
    for draw in "uniform", "others":
        drawn = [choose_heads(model, path, 1, draw, seed, "write")[0][0] for seed in range(9)]
        assert set(drawn) == {(0, 0), (0, 2)}


def test_random_heads_leave_out_the_best_half_or_those_that_would_be_masked():
    model = stand_in(4, 8, "miniature")
    for draw, left_out in ("uniform", 16), ("others", 3):
        sets = [choose_heads(model, None, 3, draw, seed)[0] for seed in range(100)]
        assert {*chain(*sets)} == {*load_heads(model)[left_out:]}


def test_a_file_of_another_model_is_a_warning(recwarn):
    load_heads(stand_in(32, 32, "/models/mistral-7b-V0.3"))
    assert not recwarn
    with pytest.warns(UserWarning, match="heads of mistralai/Mistral-7B-v0.3, but the model is"):
        load_heads(stand_in(32, 32, "meta-llama/Meta-Llama-3-8B"), name="Mistral-7B-v0.3")


# Contents of head files, and what is said of them.
WRONG = r"""
[] | must contain a JSON object
{"scores": {"0-0": 1 | Expecting
{} | "scores" must be an object
{"0-0": [1, 2], "0-1": [3]} | heads have [1, 2] samples
{"01-1": 1} | must be a head
{"+0-1": 1} | must be a head
{"0": 1} | must be a head
{"1\u0660-1": 1} | must be a head
{"model": 5, "scores": {"0-0": 1}} | "model" must be the name
{"model": null, "scores": {"0-0": 1}} | "model" must be the name
{"model": ["tiny"], "scores": {"0-0": 1}} | "model" must be the name
{"0-0": NaN} | must be a head
{"0-0": true} | must be a head
{"0-0": "0.9"} | must be a head
{"0-0": []} | must be a head
{"0-0": [0.5, null]} | must be a head
{"0-0": 1, "0-1": 1, "1-0": 1, "1-1": 1, "0-2": 1} | 5 heads instead of 2 layers of 2
{"0-0": 1, "0-1": 1, "0-2": 1, "0-3": 1} | 4 heads instead of 2 layers of 2
"""  # \u0660 is a digit, but not an ASCII one


@pytest.mark.parametrize(
    "content, message",
    [*rows(WRONG), ('{"0-0":' * 5000, "recursion"), ("\xff", "codec can't decode byte 0xff")],
)
def test_a_wrong_file_is_refused(tmp_path, content, message):
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{path}") as error:
        load_heads(stand_in(2, 2), name=path)
    assert message in str(error.value)


REFUSED = """
load_heads(stand_in()) | tiny is neither a head file nor a model of
load_heads(stand_in(), name="mistral-7b-v0.4") | did you mean Mistral-7B-v0.3?
load_heads(stand_in(4, 8, "miniature"), 33) | 33 heads are too many
random_heads(RANKED[:32], 17) | 17 random heads are too many
choose_heads(stand_in(), None, 13, "uniform") | 13 random heads are too many
published_random_heads(20, 80, 4) | a layer has 4 heads
published_random_heads(10, 3, 4) | 10 heads are too many
"""


@each("call, message", REFUSED)
def test_heads_that_do_not_exist_are_refused(call, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        eval(call)
    assert message in str(error.value)


def test_heads_can_be_listed_in_a_text_or_a_file(tmp_path):
    pairs = [(2, 3), (0, 1)]
    files = [tmp_path / "pairs.json", tmp_path / "texts.json"]
    files[0].write_text("[[2, 3], [0, 1]]")
    files[1].write_text('["2-3", "0-1"]')
    for name, file in ("2-3,0-1", None), *((str(file), file) for file in files):
        assert choose_heads(stand_in(), name) == (pairs, file)
        for options in (dict(n=2), dict(draw="uniform")):
            with pytest.raises(ValueError, match="lists the heads to mask"):
                choose_heads(stand_in(), name, **options)
    with pytest.raises(ValueError, match="head 3-0 is outside"):
        choose_heads(stand_in(), "3-0")
    for wrong in ("00-3", "0-+3", "0 - 3", "0-\u0663"):
        files[1].write_text(json.dumps(["2-3", wrong]))
        with pytest.raises(ValueError, match="are not a list of"):
            choose_heads(stand_in(), files[1])


def test_random_heads_are_nested_and_hold_no_retrieval_head():
    for seed in range(20):
        heads = random_heads(RANKED, 100, seed)
        assert len(set(heads)) == 100 and not set(heads) & set(RANKED[:100])
        for n in (1, 10, 50):
            assert random_heads(RANKED, n, seed) == heads[:n]
    assert heads != random_heads(RANKED, 100, 20)
    # Among the heads that are left, the order does not matter.
    assert heads == random_heads(RANKED[:100] + sorted(RANKED[100:]), 100, seed=19)
    # A small model leaves out half of its heads.
    assert set(random_heads(RANKED[:32], 16, seed=3)) == set(RANKED[16:32])


def test_random_heads_without_scores_are_drawn_from_all_heads_with_a_warning():
    with pytest.warns(UserWarning, match="random heads are drawn from all heads"):
        heads, _ = choose_heads(stand_in(), None, 12, "uniform", seed=3)
    assert sorted(heads) == [(layer, head) for layer in range(3) for head in range(4)]


def test_published_random_heads_replay_the_sampler():
    heads = published_random_heads(100, n_layers=32, n_heads=32)  # nine of its draws repeat one
    random.seed(1234)  # the published code seeds the global generator
    numbers = list(range(32))
    random.shuffle(numbers)
    expected = []
    while len(expected) < 100:
        head = tuple(random.choices(numbers, k=2))
        expected += [head] if head not in expected else []
    assert heads == expected
    assert published_random_heads(10, 32, 32) == heads[:10]


def test_the_needles_of_the_readme_are_those_of_the_stored_runs():
    paths = sorted((FOLDER / "results").glob("*.jsonl"))
    for path in paths:
        header, *records = read_lines(path)
        table = "\n".join(ablation.ablation_table(records))
        assert f"(results/{path.name})):\n\n{table}\n" in README
        scores = read_scores(find_file(header["header"]["model"]))
        best = sorted(scores, key=scores.get, reverse=True)[:3]
        best = [f"{layer}-{head}" for layer, head in best]
        masked = header["header"]["masked"]
        assert all(heads[:3] == best for name, heads in masked.items() if name.endswith("copy"))
    assert len(paths) == README.count(".jsonl)):\n")
