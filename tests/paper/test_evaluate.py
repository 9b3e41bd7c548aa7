"""evaluate.py: run files that do not depend on batch sizes, interruptions and ranks; sweeps."""

import datetime
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import evaluate
from cli import decode
from cli.entry import run_program
from cli.options import MINIATURE
from decoders.baselines import CAD
from decoders.scoring import score
from decoders.setup import METHODS, MethodSpec
from decore import DeCoRe, generate
from hf import HFModel
from model import Transformer
from paper.running import missing_batches
from paper.tasks import PAPER, TASKS, metrics
from paper.tasks.data import draw_items, load_data
from paper.tasks.prompts import item_to_ids
from runtime.checkpoint import Checkpoint
from runtime.files import read_json
from tests.checkpoints import read_lines, write_checkpoint, write_tokenizer
from tests.conftest import TEMPLATE
from tests.paper.test_tasks import DEMOS, write, write_tasks
from tests.ranks import on_processes
from tests.tables import cells, each

GREEDY = "--method greedy --max-new-tokens 5"
DECORE = "--method decore-entropy --max-new-tokens 5 --num-heads 2"
VARYING = ("command", "commit", "date", "time", "batch_size", "draft", "tp")  # fields of a header


@pytest.fixture(scope="module")
def bare(chat_model):
    """Options that name the tiny chat model."""
    return f"--model {chat_model}"


@pytest.fixture(scope="module")
def model(bare, chat_model):
    """Options that name it and its head scores."""
    return f"{bare} --heads {chat_model}/heads.json"


def write_model(folder, template=TEMPLATE, family="llama3", **config):
    config = dict(vocab_size=259, max_position_embeddings=2048) | config
    return write_tokenizer(write_checkpoint(folder, family, **config), template)


def content(path):
    """The lines of a run without what differs from process to process."""
    first, *lines = read_lines(path)
    header = {name: value for name, value in first["header"].items() if name not in VARYING}
    for line in lines:
        del line["seconds"]
    return [header, *lines]


@pytest.fixture
def runs(start, tmp_path):
    """runs(*arguments) → the contents of the runs that evaluate.py writes; tmp_path / "out" is
    their folder if none is given."""

    def run(*arguments):
        status, out, err = start(f"--out {tmp_path}/out", *arguments)
        assert status == 0, err
        return [content(one["run"]) for one in out]

    return run


@pytest.fixture
def refusal(refused, tmp_path):
    """refusal(*arguments) → the last line of evaluate.py's refusal."""

    def run(*arguments):
        return refused(evaluate.main, *arguments, f"--out {tmp_path}/out").splitlines()[-1]

    return run


# One run


def test_a_run_holds_its_settings_and_rows_that_do_not_depend_on_the_batch_size(
    start, chat_model, model, data, tmp_path
):
    results = []
    for size in (3, 16):
        options = f"--batch-size {size} --out {tmp_path}/{size}"
        _, [out], _ = start(model, data["nq-closed"], DECORE, options)
        settings, *lines = content(out["run"])
        results.append([(line["ids"], line["prompt_sha256"]) for line in lines])
    assert results[0] == results[1]
    assert out["n"] == 7 and set(out["metrics"]) >= {"exact_match", "answer_contained"}
    expected = dict(task="nq-closed", layout="chat", product="plain", dtype="float32")
    assert settings.items() >= expected.items() and len(settings["heads"]) == 2
    assert settings["version"] == TASKS["nq-closed"].version
    assert settings["fingerprint"] == Checkpoint(chat_model).fingerprint
    assert len(settings["data"][0]["sha256"]) == 64 and settings["demos"]["file"] == "demos.jsonl"
    assert [line["id"] for line in lines] == list(range(7)) and lines[2]["references"] == ["a2"]
    for line in lines:
        assert len(line["ids"]) == len(line["alphas"]) == len(line["entropies"]) <= 5
        assert line["stop"] in ("eos", "length")


def test_a_run_that_stopped_anywhere_ends_like_an_uninterrupted_one(
    start, bare, data, tmp_path, monkeypatch
):
    arguments = [bare, data["nq-closed"], GREEDY, f"--batch-size 2 --out {tmp_path}"]
    path = Path(start(*arguments)[1][0]["run"])
    complete, raw = content(path), path.read_bytes()
    first = raw.index(b"\n") + 1
    for length in (first, len(raw) // 2, len(raw) - 3):
        path.write_bytes(raw[:length])
        assert start(*arguments)[0] == 0 and content(path) == complete, length
    monkeypatch.setattr("paper.running.answers_of", Mock(side_effect=KeyboardInterrupt))
    assert start(*arguments)[0] == 0 and content(path) == complete  # no stored row is decoded again
    path.write_bytes(raw[:first])
    status, _, err = start(*arguments)
    assert status == 130 and "stopped; the same command continues" in err
    monkeypatch.setattr("cli.models.load_models", Mock(side_effect=KeyboardInterrupt))
    assert "stopped; the same command continues" in start(*arguments)[2]


def test_templates_print_one_day_and_think_only_if_their_arguments_say_so(
    runs, data, tmp_path, monkeypatch
):
    thinks = "{% if enable_thinking is not defined or enable_thinking %}think{% endif %}"
    template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE + thinks
    folder = write_model(tmp_path / "model", template)
    arguments = [f"--model {folder}", data["nq-closed"], GREEDY, "--limit 1"]
    lines, think = [], """--template-args '{"enable_thinking": true}'"""
    another_day = datetime.datetime(2031, 12, 31)
    for k, more in enumerate(("", "", think)):
        [[settings, line]] = runs(*arguments, f"--out {tmp_path}/{k} {more}")
        assert settings["template_args"] == {"enable_thinking": more == think}
        lines.append(line)
        monkeypatch.setattr("tokenizer.datetime", SimpleNamespace(now=lambda: another_day))
    assert lines[0] == lines[1]
    assert lines[2]["prompt_tokens"] == lines[0]["prompt_tokens"] + len("think")


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
LAYOUTS = """
None | llama3 | plain
TEMPLATE | mistral | mistral
REFUSES + TEMPLATE | llama3 | user
"""


@each("template, family, layout", LAYOUTS)
def test_the_layout_is_the_models(runs, data, tmp_path, template, family, layout):
    write_model(tmp_path, eval(template), family)
    [[settings, _]] = runs(f"--model {tmp_path}", data["nq-closed"], GREEDY, "--limit 1")
    assert settings["layout"] == layout


def test_a_sample_is_the_same_for_every_method_and_grows(
    start, refusal, bare, model, chat_model, data, tmp_path
):
    arguments = data["nq-closed"], f"--max-new-tokens 2 --out {tmp_path}/out"
    greedy = f"{bare} --method greedy"
    random_heads = f"{model} --method masked --num-heads 2 --random-heads --seed 5"
    samples = []
    for options in (greedy, random_heads):
        for size in (2, 4):
            _, [out], _ = start(options, *arguments, f"--sample {size}")
            header, *lines = content(out["run"])
            assert (header["n"], header["sample"], header["sample_seed"]) == (size, size, 1234)
            samples.append([line["id"] for line in lines])
    assert samples[0] == samples[2] == samples[1][:2] and samples[1] == samples[3]
    digest = hashlib.sha256((chat_model / "heads.json").read_bytes()).hexdigest()
    assert header["head_file"] == {"file": "heads.json", "sha256": digest}
    assert header["measure"] == "copy"
    noted = read_lines(out["run"])[0]["header"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d UTC", noted["time"])
    assert noted["command"].endswith("--sample 4")  # not that of the first start
    err = refusal(greedy, *arguments, "--sample 4 --seed 3")
    assert "sample_seed: 1234 there, 3 now" in err


def test_the_first_items_can_be_left_out_so_that_none_was_seen_before(
    runs, refusal, bare, data, tmp_path
):
    arguments = bare, data["nq-closed"], "--method greedy --max-new-tokens 2"
    [[_, *all_lines]] = runs(*arguments, "--sample 4")
    [[header, *lines]] = runs(*arguments, f"--sample 2 --skip 2 --out {tmp_path}/skip")
    assert [line["id"] for line in lines] == [line["id"] for line in all_lines[2:]]
    assert header["skip"] == 2
    words = "--skip 500 leaves none of nq-closed's"
    assert words in refusal(*arguments, "--limit 2 --skip 500")


def test_answers_have_at_least_the_tokens_that_are_asked_for(runs, refusal, bare, data, tmp_path):
    eos = ",".join(map(str, range(200)))  # most answers end at once
    options = bare, data["nq-closed"], f"--method greedy --eos {eos} --max-new-tokens 4"
    [[_, *lines]] = runs(*options)
    assert min(len(line["ids"]) for line in lines) == 1
    [[header, *lines]] = runs(*options, f"--min-new-tokens 3 --out {tmp_path}/least")
    assert header["min_new_tokens"] == 3 and min(len(line["ids"]) for line in lines) >= 3
    words = "--min-new-tokens 5 is above nq-closed's 4 new tokens"
    assert words in refusal(*options, "--min-new-tokens 5")


BATCHES = """
[] | [[5, 4], [3, 2], [1, 0]]
[5, 4, 3] | [[3, 2], [1, 0]]  # an interrupted run: the batches stay the same
[5, 2, 1] | [[4, 3], [0]]  # a run that grows: no answer is computed again
"""


@each("known, batches", BATCHES, cells)
def test_batches_of_a_run_that_continues(known, batches):
    encoded = [SimpleNamespace(index=i, prompt=[0] * i) for i in range(6)]
    left = missing_batches(encoded, 2, {*known}, SimpleNamespace(replicas=1))
    assert [[e.index for e in batch] for batch in left] == batches


def test_runs_with_drafts_have_the_same_answers_in_fewer_passes(runs, model, data, tmp_path, steps):
    arguments = model, data["nq-closed"], "--method greedy,decore-entropy --num-heads 2"
    answers, passes = [], []
    for k, more in enumerate(("", "--batch-size 1 --draft 1", "--batch-size 1 --draft 8")):
        steps.clear()
        contents = runs(*arguments, f"--max-new-tokens 40 --out {tmp_path}/{k} {more}")
        answers.append([[line["ids"] for line in lines] for _, *lines in contents])
        passes.append(len(steps))
    assert answers[0] == answers[1] == answers[2]
    assert sum(map(len, sum(answers[0], []))) > passes[1] > passes[2]


# Several ranks


@pytest.mark.parametrize("more", ["", "--tp 2"], ids=["replicas", "one model"])
def test_two_ranks_write_the_same_rows_as_one(model, data, tmp_path, monkeypatch, capfd, more):
    # 3 batches, 2 replicas
    command = f"evaluate.py {model} {data['nq-closed']} {DECORE} --batch-size 3 --out"
    files = []
    for ranks, options in ((1, ""), (2, more)):
        folder = tmp_path / str(ranks)
        monkeypatch.setattr("sys.argv", f"{command} {folder} {options}".split())
        on_processes(ranks, lambda: run_program(evaluate.main))
        out, err = capfd.readouterr()
        assert out.count("\n") == 1, err  # rank 0 alone prints
        files += folder.glob("*.jsonl")
    ids = [[(row["id"], row["ids"]) for row in content(file)[1:]] for file in files]
    assert ids[0] == ids[1]


# Sweeps


SWEEPS = """
--method greedy,masked,decore-static --num-heads 1,2 --alpha 0,1 | greedy masked.n1 masked.n2 \
    decore-static.n1.a0 decore-static.n1.a1 decore-static.n2.a0 decore-static.n2.a1 | 3
--method greedy,masked --num-heads 2 --random-heads uniform --seed 1,3 | \
    greedy masked.n2.random-uniform-seed1 masked.n2.random-uniform-seed3 | 3
--method masked --num-heads 2 --measure copy,mass --heads {measured} | masked.n2 masked.n2.mass | 2
--method masked,decore-entropy --num-heads 2 --mask query --mask-prompt --alpha-cap 2 \
    --scale-alpha --amateur {model} --amateur-heads {model}/heads.json | \
    masked.n2.query.mask-prompt decore-entropy-lite.n2.cap2.scaled.query.mask-prompt.{name} | 1
"""


@each("options, names, draws", SWEEPS)
def test_a_sweep_runs_every_combination_once_under_its_own_name(
    start, model, chat_model, data, tmp_path, options, names, draws
):
    """draws: different sets of heads, none included."""
    scores = read_json(chat_model / "heads.json")
    reverse = dict(zip(scores, [*scores.values()][::-1]))
    measured = write(tmp_path / "measured.json", {"scores": scores, "mass": reverse})
    places = {"model": chat_model, "name": chat_model.name, "measured": measured}
    options = f"{options} --max-new-tokens 2 --limit 1 --out {tmp_path}".format(**places)
    _, out, err = start(model, data["nq-closed"], options)
    names = names.format(**places).split()
    files = [f"nq-closed.{chat_model.name}.{name}.jsonl" for name in names]
    assert [Path(one["run"]).name for one in out] == files, err
    headers = [content(one["run"])[0] for one in out]
    assert len({str(settings["heads"]) for settings in headers}) == int(draws)
    fingerprint = Checkpoint(chat_model).fingerprint
    for settings in headers:
        lite = "lite" in settings["method"]
        assert settings["amateur_fingerprint"] == (fingerprint if lite else None)


SHARED = """
own | nq-swap | --mask output | 2
own | nq-swap | --mask query | 2
own | nq-swap | --mask-prompt | 10
transformers | nq-swap | --mask output | 2
own | memotrap | --mask output | 4
transformers | memotrap | --mask output | 4
"""


@each("engine, task, masking, reads", SHARED)
def test_a_sweep_reads_its_prompts_once_and_writes_what_single_runs_do(
    start, bare, chat_model, data, tmp_path, monkeypatch, engine, task, masking, reads
):
    """Each batch of NQ-Swap is read, and cad's prompts without context; with --mask-prompt the 8
    sets of masked rows read the prompts themselves. Multiple choice: once for each set of heads."""
    kind, engine = engine, {"own": Transformer, "transformers": HFModel}[engine]
    masking += f" --heads {chat_model}/heads.json"
    read = Mock(return_value=None)
    prefill = engine.prefill
    monkeypatch.setattr(HFModel, "check", lambda *args: True)  # reads two prompts
    monkeypatch.setattr(engine, "prefill", lambda *args: read() or prefill(*args))
    options = f"{bare} {data[task]} --batch-size 4"
    options += " --max-new-tokens 3" * (task == "nq-swap")
    options += " --transformers" * (engine is HFModel)
    methods = "--method greedy,masked,decore-static,decore-entropy,cad,dola-low"
    more = f"--num-heads 1,3 --alpha 0.5,2 --out {tmp_path}/sweep"
    _, out, err = start(options, masking, methods, more)
    batches = -(-out[0]["n"] // 4)
    assert batches == (2 if task == "nq-swap" else 1) and len(out) == 12, err
    assert read.call_count == int(reads) * batches
    for one in out:
        header, *lines = content(one["run"])
        assert header["engine"] == kind
        assert ("transformers" in header["versions"]) == (kind != "own")
        single = f"--method {header['method']} --out {tmp_path}/single"
        if header["heads"]:
            single += f" {masking} --num-heads {header['num_heads']}"
        if header["alpha"]:
            single += f" --alpha {header['alpha']}"
        _, [again], err = start(options, single)
        alone, *lines_alone = content(again["run"])
        assert alone == header
        for line, expected in zip(lines, lines_alone, strict=True):
            for name in ("alphas", "entropies", "scores_true", "scores_false"):
                assert line.pop(name, ()) == pytest.approx(expected.pop(name, ()), abs=2e-5)
            assert line == expected


def test_every_task_runs_and_what_does_not_fit_is_said_before_the_first_run(
    start, bare, tmp_path, monkeypatch
):
    write_tasks([task.name for task in PAPER], tmp_path)
    demos = write(tmp_path / "demos.jsonl", *DEMOS)
    monkeypatch.setattr(metrics, "problems", lambda task: [f"{task.name} needs more"])
    options = "--task all --method greedy,cad --max-new-tokens 2 --limit 1"
    _, out, err = start(bare, options, f"--data {tmp_path} --demos {demos} --out {tmp_path}/out")
    headers = [content(one["run"])[0] for one in out]
    fitting = [task.name for task in PAPER if task.without_context]
    expected = {(task.name, "greedy") for task in PAPER} | {(name, "cad") for name in fitting}
    assert {(header["task"], header["method"]) for header in headers} == expected, err
    first = err.index(f"{PAPER[0].name}, ")
    for task in PAPER:
        line = f"{task.name} with cad is left out: its prompts have no context to leave out"
        assert (line in err[:first]) == (task.name not in fitting)
        assert f"{task.name} needs more" in err[:first]


def test_values_that_agree_in_six_digits_have_files_of_their_own(start, bare, data, tmp_path):
    options = f"--method cad --alpha 0.1234567,0.1234568,1 --max-new-tokens 1 --out {tmp_path}"
    _, out, _ = start(bare, data["nq-swap"], options)
    names = [Path(one["run"]).stem.partition(".cad.")[2] for one in out]
    assert names == ["a0.1234567", "a0.1234568", "a1"]
    assert [content(one["run"])[0]["alpha"] for one in out] == [0.1234567, 0.1234568, 1]


def test_a_stored_run_of_a_later_task_is_compared_before_the_first_run(
    start, refusal, bare, tmp_path
):
    write_tasks(["nq-swap", "memotrap"], tmp_path)
    demos = write(tmp_path / "demos.jsonl", *DEMOS)
    options = f"{bare} --data {tmp_path} --method greedy --out {tmp_path}/out"
    [one] = start(options, "--task memotrap")[1]
    err = refusal(options, f"--task nq-swap,memotrap --demos {demos} --dtype bfloat16")
    assert 'dtype: "float32" there, "bfloat16" now' in err
    assert list((tmp_path / "out").iterdir()) == [Path(one["run"])]


def test_decoders_of_ones_own_run_in_sweeps_and_are_reported(
    start, refusal, done, refused, model, data, tmp_path, monkeypatch
):
    """The two of CONTRIBUTING.md."""
    for name in "surprise", "sharp":
        monkeypatch.setitem(METHODS, name, MethodSpec("", file="own.py"))  # undone after the test
    page = (MINIATURE.parent / "CONTRIBUTING.md").read_text("utf-8")
    code = re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.M)
    code = "\n".join(textwrap.dedent(block) for block in code if "class " in block)
    file = tmp_path / "own.py"
    file.write_text(code, "utf-8")
    classes = f"--decoder {file}:Surprise --decoder {file}:Sharp"
    methods = "--method decore-entropy,surprise,sharp,greedy --alpha 1,2"
    options = f"{model} {methods} --num-heads 2 {classes} --out {tmp_path}/out"
    _, out, err = start(data["nq-swap"], options, "--max-new-tokens 3")
    names = [Path(one["run"]).stem.split(".", 2)[2] for one in out]
    expected = "decore-entropy.n2 surprise.n2.a1 surprise.n2.a2 sharp.a1 sharp.a2 greedy"
    assert names == expected.split(), err
    contents = [content(one["run"]) for one in out]
    assert contents[1][0]["decoder"]["file"] == "own.py" and "decoder" not in contents[0][0]
    for line, sharp, greedy in zip(contents[1][1:], contents[3][1:], contents[5][1:]):
        assert min(line["alphas"]) > 0 and line["alphas"] != line["entropies"]
        assert sharp["ids"] == greedy["ids"]
    prompt = f"{model} --prompt Hi {classes} --method"
    options_of_prompt = "surprise,sharp,greedy --num-heads 2 --max-new-tokens 3 --json"
    out, _ = done(decode.main, f"{prompt} {options_of_prompt}")
    surprise, sharp, greedy = map(json.loads, out.splitlines())
    assert surprise["method"] == "surprise" and sharp["ids"] == greedy["ids"]
    assert min(surprise["alphas"]) > 0 and surprise["alphas"] != surprise["entropies"]
    words = ":Surprise has no effect: add surprise to --method"
    assert words in refused(decode.main, f"{prompt} sharp")
    del METHODS["surprise"], METHODS["sharp"]  # a report does not load own decoders
    report, _ = done(evaluate.main, "report", tmp_path / "out")
    assert "| surprise, N = 2, α = 1 " in report and "| sharp, α = 2 " in report
    _, out, err = start(data["truthfulqa-mc"], options)
    choices = [content(one["run"])[1]["scores_true"] for one in out]
    assert len(choices) == 6 and choices[0] != choices[1], err
    file.write_text(code + "# another rule\n", "utf-8")
    assert "decoder.sha256" in refusal(data["nq-swap"], options, "--max-new-tokens 3")


OWN = """
from dataclasses import dataclass
from decore import DeCoRe, Greedy

class Mine(DeCoRe):
    def rule(self, h, base, other):
        return {alpha}

@dataclass(frozen=True)
class Needy(Greedy):
    beta: float

class Plain:
    pass
"""


UNFIT = """
o.py:Mine | greedy | h | o.py:Mine has no effect: add mine to --method
o.py:Mine | mine | base | Mine.rule gives [1, 1, 259]; it must give a tensor of sha
o.py:Mine | mine | 0.5 | Mine.rule gives 0.5; it must give a tensor of shape [1, 1]
o.py:Mine | mine | h.sum() | Mine.rule gives []; it must
o.py:Plain | greedy | h | o.py:Plain: Plain is not a record; derive it from DeCoRe
o.py:Needy | needy | h | o.py:Needy: field 'beta' needs a default
o.txt:Mine | mine | h | o.txt:Mine: give FILE.py:CLASS
b/o.py:Mine | mine | h | /o.py:Mine are both called mine
"""


@each("name, method, alpha, words", UNFIT)
def test_a_decoder_of_ones_own_that_cannot_be_used_is_named(
    refusal, model, data, tmp_path, monkeypatch, name, method, alpha, words
):
    for own in "mine", "needy":
        monkeypatch.setitem(METHODS, own, MethodSpec("", file="o.py"))  # undone after the test
    for file in {"o.py", name.split(":")[0]}:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(OWN.format(alpha=alpha))
    decoders = f"--decoder {tmp_path}/{name}"
    if name.startswith("b/"):
        decoders += f" --decoder {tmp_path}/o.py:Mine"
    options = f"--limit 1 --method {method} --num-heads 2 {decoders}"
    assert words in refusal(model, data["nq-swap"], options)


# Refusals


@pytest.fixture(scope="module")
def places(bare, chat_model, data, tmp_path_factory):
    """Names in the commands of MISTAKES → paths; tasks → their arguments."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "little", max_position_embeddings=64)
    write_model(folder / "plain", None)
    write_model(folder / "tied", tie_word_embeddings=True)
    shutil.copytree(chat_model, folder / "damaged")
    (folder / "damaged" / "model.safetensors").write_text("damaged")
    # Some of MemoTrap's prompts without context are empty.
    empty = "prompt,classes,answer_index\nSay it twice:,\"[' two', ' three']\",1\n"
    (folder / "2-b.csv").write_text(empty)
    names = {name.replace("-", "_"): options for name, options in data.items()}
    return names | {"m": folder, "chat": bare}


MISTAKES = """
{nq_closed} --seed 3 | --seed has no effect without --random-heads
{nq_closed} --sample 2 --seed 3,4 | several numbers with --random-heads only
{truthfulqa_mc} --mask-prompt | --mask-prompt has no effect on truthfulqa-mc
{truthfulqa_mc} --batch-size 1 --draft 4 | --draft has no effect on truthfulqa-mc
{nq_closed} --draft 4 | --draft has no effect on several prompts at once: add --batch-
{chat} {nq_closed} --method dola-low --batch-size 1 --draft 4 | \
    --draft is for methods that are rows of passes; DoLa is not
--task miniature --layout chat | --layout has no effect on miniature
--task miniature | --data: no file for miniature (*.jsonl); name one with --data
{truthfulqa_mc} --method greedy --no-renormalise | has no effect on greedy
{nq_closed} --no-renormalise | --no-renormalise has no effect on nq-closed
--model {m}/little {nq_closed} --method greedy --layout plain --template-args {{}} | \
    tokens, but little only 64 positions
--model {m}/plain {nq_closed} --method greedy --template-args '{{"a": 1}}' | \
    --template-args has no effect
{chat} {nq_closed} --method cd --amateur {m}/little | little only 64 positions
repot {m} | unknown command 'repot', did you mean report?; known: choose, fetch,
--tp 2 | the following arguments are required: --task
{chat} {nq_closed} --task nq-closed,xsum --method greedy | document is missing
{chat} {nq_closed} --method greedy,ad | --info-layer 24 is outside
--model {m}/damaged {nq_closed} --method ad --info-layer 0 | --info-layer 0 is not a
--model {m}/damaged {nq_closed} --method dola-low --repetition-penalty 0 | \
    --repetition-penalty 0.0 is not a finite number of at least 0.01
{nq_closed} --decoder {m}/own.py:Mine | own.py:Mine: give FILE.py:CLASS
{nq_closed} --method mine | method 'mine' is unknown
--model {m}/tied {nq_closed} --method dola-low | tied has no layer from 2 to its middle
--model {m}/plain --task memotrap --data {m}/2-b.csv --method cad | \
    without context 1 of its prompts end in another token (--layout plain)
--model {m}/plain {nq_closed} | no head scores are known
--model {m}/damaged {nq_closed} --method greedy | model.safetensors
paper --data {m} --plan | the paper has no numbers of miniature
paper --data {m} --like Meta-Llama-3-8B-Instruct --json | --json has no effect without --plan
paper --data {m} --like Meta-Llama-3-8B-Instruct --table mian | \
    table 'mian' is unknown, did you mean main?
paper --data {m} --like Meta-Llama-3-8B-Instruct --task= | unknown task ''
paper --data {m} --like Meta-Llama-3-8B-Instruct --task xsum --method cd | \
    no numbers of Meta-Llama-3-8B-Instruct for these
paper --data {m} --like Meta-Llama-3-8B-Instruct | \
    {m}: no file for xsum (xsum-1000.jsonl, there or in xsum/); evaluate.py
"""


@each("command, words", MISTAKES)
def test_a_mistake_is_one_line_before_the_first_run(refusal, places, tmp_path, command, words):
    last = refusal(*shlex.split(command.format(**places)))
    assert last.startswith("evaluate.py: error: ")
    assert words.format(**places) in last and not (tmp_path / "out").exists()


def test_the_last_token_of_an_answer_needs_no_position(start, data, tmp_path):
    """A prompt of 26 tokens and "three": 26 + 5, and the end of the turn, which is not read."""
    for context, expected in ((30, 2), (31, 0)):
        folder = write_model(tmp_path / str(context), max_position_embeddings=context)
        options = f"--model {folder} {data['memotrap']} --method greedy --out {tmp_path}/out"
        assert start(options)[0] == expected


# Multiple choice and CAD


def encoded(tokenizer, options):
    """The token ids of the first item of a task's data."""
    _, name, _, path, _, demos = options.split()
    task = TASKS[name]
    items, _, demos, _ = load_data(task, path, demos)
    [first] = draw_items(items, 1)
    return item_to_ids(task, first, demos, tokenizer, "chat")


@pytest.mark.parametrize("more", ["", "--no-renormalise"])
def test_choices_are_scored_the_true_ones_first(runs, chat, model, data, more):
    options = f"--method decore-entropy --num-heads 2 {more}"
    [[settings, row, _]] = runs(model, data["truthfulqa-mc"], options)
    assert settings["mask_prompt"] is None and settings["max_new_tokens"] is None
    assert settings["renormalise"] == (not more)
    loaded, tokenizer = chat
    item = encoded(tokenizer, data["truthfulqa-mc"])
    method = DeCoRe(settings["heads"])
    scores = score(loaded, item.prompt, item.answers, method, renormalise=not more)
    assert row["scores_true"] + row["scores_false"] == pytest.approx(scores)
    assert len(row["scores_true"]) == 2 and row["best_position"] == 0 and row["merged"] == 0


def test_cad_contrasts_with_the_prompt_without_context(runs, chat, bare, data):
    [[_, first, *_]] = runs(bare, data["nq-swap"], "--max-new-tokens 3 --method cad")
    model, tokenizer = chat
    item = encoded(tokenizer, data["nq-swap"])
    expected = generate(model, item.prompt, CAD(item.without_context), max_new_tokens=3)
    assert first["ids"] == expected.ids


@pytest.mark.parametrize("name, part", [("nq-swap", 1 / 4), ("memotrap", 2)])
def test_the_bar_moves_with_each_token_and_with_each_question_of_multiple_choice(
    start, data, model, moves, tmp_path, name, part
):
    options = f"{model} {data[name]} --out {tmp_path} --method greedy,masked --num-heads 2"
    options += "" if name == "memotrap" else " --max-new-tokens 4 --eos 0"
    status, _, err = start(options)
    n = 2 if name == "memotrap" else 5
    assert status == 0 and sum(moves) == pytest.approx(2 * n), err
    assert moves == pytest.approx([part] * round(2 * n / part) + [0])
    moves.clear()
    torn = next(tmp_path.glob("*.greedy.jsonl"))
    torn.write_bytes(torn.read_bytes()[:-9])
    assert start(options)[0] == 0 and sum(moves) == pytest.approx(1)
    assert max(accumulate(moves)) <= 1  # though the batch is decoded again


WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
NO_TENSORS = """
evaluate --help | 0 | usage:
evaluate --task nq | 2 | unknown task 'nq'
evaluate {nq_closed} --dry-run | 0 | how long 0
evaluate report miniature/detection | 2 | needles.jsonl: its first line has no header
evaluate paper --like Meta-Llama-3-8B-Instruct {nq_closed} --plan | 0 | nq-closed
heads.detect --help | 0 | --questions FILE
heads.detect --task qa --help | 0 | --questions FILE
heads.detect --lengths 999 --out x | 2 | 999 tokens do not fit
"""


@each("command, status, words", NO_TENSORS)
def test_help_mistakes_prompts_plans_and_reports_need_no_tensors(places, command, status, words):
    """torch takes two seconds to import."""
    command = shlex.split(command.format(**places))
    command = [sys.executable, "-c", WITHOUT_TORCH, *command]
    out = subprocess.run(command, capture_output=True, text=True, cwd=MINIATURE.parent)
    assert out.returncode == int(status) and words in out.stdout + out.stderr, out
