"""The miniature's world and its test splits; the checkpoint, with tolerances that a new training run would pass."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decore import generate
from heads import load_heads
from miniature import claims, data, train
from model import Transformer
from runtime.config import Config
from runtime.weights import named_tensors
from tokenizer import Tokenizer

FOLDER = Path(data.__file__).parent
FACT = re.compile(rf"({'|'.join(data.RELATIONS)}) of (\w+) is (\w+)")


@pytest.fixture(scope="module")
def world():
    return data.make_world()


@pytest.fixture(scope="module")
def stream(world):
    """The beginning of what train.py reads in each of its stages."""
    return [document for first, mixture, most in train.STAGES
            for document in itertools.islice(data.documents(world, mixture, f"0/{first}", most), 3000)]


def pairs(world, items):
    """What passages say against the world's facts: {(country, relation, value)}."""
    known = {fact[:2]: fact.value for fact in world.facts}
    stated = [(country, relation, value) for item in items for relation, country, value in FACT.findall(item.prompt)]
    return {pair for pair in stated if known.get(pair[:2], pair[2]) != pair[2]}


def test_the_world_is_the_same_on_every_machine(world):
    assert world.facts[0] == ("Norpilmar", "capital", "Piport")
    assert world.facts[-1] == ("Moltthendmar", "founder", "Denric")


def test_another_process_prints_the_same_items():
    command = [sys.executable, "-m", "miniature.data", "--split", "conflict", "--n", "3", "--seed", "5"]
    out = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=True).stdout
    items = [item._asdict() for item in data.make_split("conflict", 3, 5)]
    assert [json.loads(line) for line in out.splitlines()] == items


def test_every_fact_has_a_name_of_its_own(world):
    assert len(world.facts) == 320 and len(world.names) == 64 + 320
    assert not any(data.held_out(name) for name in world.names)


def test_about_a_fifth_of_names_is_held_out():
    names = {fact.value for fact in data.make_world(1).facts} | {fact.value for fact in data.make_world(2).facts}
    assert not any(map(data.held_out, names))
    rng = data.random.Random(0)
    stems = ["".join(rng.choice(data.ONSETS) + rng.choice(data.VOWELS) for _ in range(3)) for _ in range(4000)]
    assert 0.17 < sum(map(data.held_out, stems)) / len(stems) < 0.23


def test_no_conflict_of_a_test_split_occurs_in_training(world, stream):
    trained = pairs(world, [item for _, _, item in stream])
    assert len(trained) > 50       # the pattern finds them
    for split in ("conflict", "conflict-known"):
        tested = pairs(world, data.make_split(split, 1024))
        assert len(tested) > 900
        assert not trained & tested
        assert not {pair[:2] for pair in trained} & {pair[:2] for pair in tested}      # not even about the same fact


def test_training_contradicts_only_the_facts_set_aside_for_it(world, stream):
    contradicted = {pair[:2] for pair in pairs(world, [item for _, _, item in stream])}
    assert contradicted <= {fact[:2] for fact in world.conflicts}


def test_training_never_shows_a_held_out_name(stream):
    words = {word for _, _, item in stream for word in re.findall(r"\w+", item.prompt + " " + item.answer)}
    shown = {word for word in words if word[0].isupper() and data.held_out(word)}
    assert shown <= {word for text in (*data.FILLERS, *data.OPENERS, "Context Answer The") for word in text.split()}


def test_kinds_of_documents_are_as_defined(world, stream):
    known = {fact[:2]: fact.value for fact in world.facts}
    for kind, fact, item in stream:
        context, question = item.prompt.split("Answer: ")
        relation, country = re.fullmatch(r"The (.+) of (\w+) is", question).groups()
        stated = [v for r, c, v in FACT.findall(context) if (r, c) == (relation, country)]
        assert (country, relation) == fact[:2]
        assert stated == ([] if kind in ("closed", "irrelevant") else [item.answer])
        assert (known.get((country, relation)) == item.answer) == (kind in ("closed", "agree", "irrelevant"))
        assert item.memory == known.get((country, relation))


@pytest.mark.parametrize("split", data.SPLITS)
def test_splits_are_as_defined(world, split):
    known = {fact[:2]: fact.value for fact in world.facts}
    for item in data.make_split(split, 320):
        context, question = item.prompt.split("Answer: ")
        relation, country = re.fullmatch(r"The (.+) of (\w+) is", question).groups()
        stated = [v for r, c, v in FACT.findall(context) if (r, c) == (relation, country)]
        assert item.memory == known.get((country, relation))
        if split in ("closed", "irrelevant"):
            assert not stated and item.answer == item.memory
        else:
            assert stated == [item.answer] and item.answer != item.memory
            assert data.held_out(item.answer) == (split != "conflict-known")


def test_splits_refuse_what_they_do_not_have():
    with pytest.raises(ValueError, match="320 facts; 321"):
        data.make_split("closed", 321)
    with pytest.raises(ValueError, match="no split 'other'"):
        data.make_split("other", 1)


def test_another_seed_gives_other_items():
    assert data.make_split("open", 8, seed=1) != data.make_split("open", 8, seed=2)


# ------------------------------------------------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def tokenizer(world):
    return train.make_tokenizer(world, 300)


def test_a_prompt_and_its_answer_are_tokenized_as_one_text(tokenizer):
    for item in data.make_split("conflict", 50):
        apart = tokenizer.encode(item.prompt).ids + tokenizer.encode(f" {item.answer}.", add_special_tokens=False).ids
        assert tokenizer.encode(f"{item.prompt} {item.answer}.").ids == apart


def test_loss_counts_answers_and_their_end_fully(world, tokenizer):
    tokens, weights = next(train.batches(tokenizer, data.documents(world, {"closed": 1.0}, "test")))
    assert tokens.shape == weights.shape == (train.ROWS, train.LENGTH + 1)
    ends = tokens == tokenizer.token_to_id(train.EOS)
    assert ends.sum() > 50 and (weights[ends] == 1).all()
    assert (weights[tokens == tokenizer.token_to_id(train.BOS)] == 0).all()
    counted = tokenizer.decode(tokens[0][weights[0] == 1].tolist()).split(".")
    values = {fact.value for fact in world.facts}
    assert all(word.strip() in values for word in counted[:-1])


def test_orthogonal_gives_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((32, 32), (16, 48), (48, 16)):
        s = torch.linalg.svdvals(train.orthogonal(torch.randn(shape)))
        assert s.min() > 0.3 and s.max() < 1.3      # the iteration is tuned for speed, not for exactly 1


def test_training_lowers_the_loss_and_repeats_exactly(world, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "ROWS", 2)
    monkeypatch.setattr(train, "WARMUP", 1)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(train.CONFIG | shape))
    tokens, weights = next(train.batches(tokenizer, data.documents(world, data.COPYING, "test")))
    trained = []
    for _ in range(2):
        model = Transformer(Config.from_checkpoint(tmp_path))
        train.initialise(named_tensors(model), seed=0)
        before, _ = train.loss_of(model(tokens[:, :-1]), tokens, weights)
        train.train(model, world, tokenizer, steps=20)
        after, _ = train.loss_of(model(tokens[:, :-1]), tokens, weights)
        trained.append(after.item())
    assert trained[0] == trained[1]
    assert trained[0] < before.item() - 0.4


@pytest.fixture
def small(tmp_path):
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(train.CONFIG | shape))
    model = Transformer(Config.from_checkpoint(tmp_path))
    train.initialise(named_tensors(model), seed=0)
    return model


def test_the_needed_head_is_the_one_without_whose_output_the_loss_is_highest(small, world, tokenizer):
    tokens, weights = next(train.batches(tokenizer, data.documents(world, data.COPYING, "test")))
    found, o = set(), small.layers[-1].attn.o.weight
    with torch.no_grad():
        for _ in range(4):
            o.normal_(0, 0.5)
            losses = []
            for head in range(4):
                kept, o[:, head * 16:(head + 1) * 16] = o.clone(), 0
                losses.append(train.loss_of(small(tokens[:, :-1]), tokens, weights)[0].item())
                o.copy_(kept)
            found.add(train.needed_head(small, tokens, weights))
            assert losses[train.needed_head(small, tokens, weights)] == max(losses)
    assert len(found) > 1


def test_the_other_heads_of_the_last_layer_start_anew(small):
    before = {name: parameter.clone() for name, parameter in named_tensors(small).items()}
    train.renew_others(small, 2, torch.Generator().manual_seed(1))
    changed = {name: (parameter != before[name]) for name, parameter in named_tensors(small).items()}
    q, o = (f"model.layers.1.self_attn.{x}_proj.weight" for x in "qo")
    assert {name for name, x in changed.items() if x.any()} == {q, o}
    of_head = [changed[q].unflatten(0, (4, 16)).float().mean((1, 2)),
               changed[o].unflatten(1, (4, 16)).float().mean((0, 2))]
    for share in of_head:
        assert share[2] == 0 and (share[[0, 1, 3]] > 0.99).all()
    assert named_tensors(small)[q].std().item() == pytest.approx(0.02, rel=0.1)


def test_every_head_but_one_is_silent_now_and_then(small):
    generator = torch.Generator().manual_seed(0)
    masks = torch.cat([train.silence_others(small, 2, generator) for _ in range(2000)])
    assert masks.shape == (2000, 2, 4) and set(masks.unique().tolist()) == {0, 1}
    silent = 1 - masks.mean(0)
    assert silent[1, 2] == 0
    silent[1, 2] = train.SILENT
    assert (silent - train.SILENT).abs().max() < 0.035


def test_one_head_alone_is_never_silent_and_never_renewed(small, world, tokenizer, monkeypatch):
    """The masks that training runs with, and what becomes of the weights in its last steps."""
    monkeypatch.setattr(train, "ROWS", 2)
    monkeypatch.setattr(train, "ALONE", 3)
    monkeypatch.setattr(train, "needed_head", lambda *_: 1)
    seen, renewed, forward, renew_others = [], [], small.forward, train.renew_others
    monkeypatch.setattr(small, "forward", lambda *args: (seen.append(args[2]), forward(*args))[1])
    monkeypatch.setattr(train, "renew_others", lambda *args: (renewed.append(args[1]), renew_others(*args)))
    train.train(small, world, tokenizer, steps=40)
    assert renewed == [1] and [mask is None for mask in seen] == [True] * 3 + [False] * 37
    assert all(mask[0, 1, 1] == 1 for mask in seen[3:])
    assert 0.05 < (torch.cat(seen[3:]) == 0).float().mean() < 0.25


# ---------------------------------------------------------------------------------------------------------- checkpoint


@pytest.fixture(scope="module")
def miniature():
    return Transformer.load(FOLDER, dtype=torch.float32), Tokenizer.load(FOLDER)


def share_right(miniature, split, n=96, **method):
    model, tokenizer = miniature
    items = data.make_split(split, n)
    out = generate(model, [tokenizer.encode(item.prompt) for item in items], max_new_tokens=12,
                   eos_ids=tokenizer.eos_ids, **method)
    return sum(tokenizer.decode(g.ids) == f" {item.answer}." for g, item in zip(out, items, strict=True)) / n


def test_the_miniature_knows_its_facts_and_reads_passages(miniature):
    assert share_right(miniature, "closed", method="greedy") > 0.97
    assert share_right(miniature, "open", method="greedy") > 0.9


def test_the_amateur_shares_the_vocabulary_and_knows_less(miniature):
    amateur = Transformer.load(FOLDER / "amateur", dtype=torch.float32), Tokenizer.load(FOLDER / "amateur")
    assert amateur[1].vocabulary() == miniature[1].vocabulary()
    assert 0.1 < share_right(amateur, "closed", method="greedy") < 0.8
    best = load_heads("miniature-amateur", 4, 4)[:4]
    assert share_right(amateur, "open", method="masked", heads=best) < 0.2 < 0.6 < share_right(
        amateur, "open", method="greedy")


def test_without_its_retrieval_heads_the_miniature_remembers_but_does_not_read(miniature):
    heads = load_heads("miniature", 4, 8)[:4]
    assert share_right(miniature, "open", method="masked", heads=heads) < 0.2
    assert share_right(miniature, "closed", method="masked", heads=heads) > 0.5


def test_decore_answers_from_a_contradicting_passage_more_often_than_greedy(miniature):
    heads = load_heads("miniature", 4, 8)[:4]
    greedy = share_right(miniature, "conflict", method="greedy")
    assert share_right(miniature, "conflict", method="decore-entropy", heads=heads) > greedy + 0.03


def test_the_checkpoint_is_small():
    assert (FOLDER / "model.safetensors").stat().st_size < 8_000_000


# -------------------------------------------------------------------------------------------------------------- claims


@pytest.fixture(scope="module")
def lab():
    return claims.Lab(FOLDER, "miniature", n=12, seed=0, draws=2)


def test_remembered_prompts_change_no_answer(lab, miniature):
    heads = lab.top(4)
    for method in ("greedy", "masked", "decore-entropy"):
        right = lab.right("conflict", method, None if method == "greedy" else heads)
        again = share_right(miniature, "conflict", n=12, method=method, heads=heads)
        assert right.mean() == pytest.approx(again)


def test_random_heads_are_others_than_those_that_retrieve(lab):
    drawn = {head for draws in lab.random.values() for heads in draws for head in heads}
    assert drawn and all(lab.scores[head] < claims.RETRIEVES <= lab.scores[lab.top(1)[0]] for head in drawn)


def test_intervals_hold_the_mean_and_narrow_with_more_items(lab):
    few, many = (lab.interval(np.tile([0.0, 1.0, 1.0, 1.0], n)) for n in (5, 500))
    assert few[0] == many[0] == 75.0
    assert few[1] < many[1] < 75 < many[2] < few[2]
    assert many[2] - many[1] == pytest.approx(2 * 196 * (0.75 * 0.25 / 2000) ** 0.5, rel=0.1)     # the normal interval


def test_the_stored_claims_are_the_checkpoints(lab):
    stored = json.loads((FOLDER / "claims.json").read_text())
    for n in (1, 2, 4, 8):
        assert {tuple(head) for head in stored["heads"][:n]} == set(lab.top(n))
    assert min(n for split, n in stored["items"].items() if split != "closed") >= 1000
    assert stored["items"]["closed"] == 320
