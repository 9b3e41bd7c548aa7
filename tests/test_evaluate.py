"""Runs: one line per example, in the data's order, the same for every batch size, after every interruption and on every
number of ranks; then scored again."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

import baselines
import cli
import evaluate
from heads import choose_heads
from model import Transformer
from runtime.jsonl import locked
from tasks import TASKS, sources
from tasks.prompts import encode, end_of_turn
from tasks.runs import prompt_key
from tests.checkpoints import write_checkpoint, write_heads, write_tokenizer
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
TEMPLATE = ("{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content | trim }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}")
SHORT = ["--max-new-tokens", "5", "--num-heads", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Arguments that name a tiny chat model with heads."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(write_checkpoint(folder, vocab_size=259, eos_token_id=257, max_position_embeddings=2048), TEMPLATE)
    return ["--model", str(folder), "--heads", str(write_heads(folder / "heads.json"))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Task → its arguments --data and --demos, files of a few rows."""
    folder = tmp_path_factory.mktemp("data")

    def lines(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(folder / name)

    qa = lines("qa.jsonl", [{"question": f"how {'very ' * (7 * i % 5)}long {i}", "answers": [f"a{i}"]}
                            for i in range(7)])
    swap = lines("swap.jsonl", [{"question": f"who is {i}", "sub_context": f"{i} is New. " * (i % 3 + 1),
                                 "org_answer": ["Old"], "sub_answer": ["New"]} for i in range(5)])
    demos = lines("demos.jsonl", [{"question": "q", "answer": "a", "context": "c"}] * 2)
    (folder / "2-b.csv").write_text("prompt,classes,answer_index\n"
                                    "Say: one,\"[' two', ' three']\",1\nSo,\"[' x', ' yy']\",0\n")
    (folder / "t.csv").write_text("Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
                                  "A,C,Why?,Because,Because; So,No; Never; Not,u\nA,C,Who?,I,I,You,u\n",
                                  encoding="utf-8-sig")
    return {"nq-closed": ["--task", "nq-closed", "--data", qa, "--demos", demos],
            "nq-swap": ["--task", "nq-swap", "--data", swap, "--demos", demos],
            "memotrap": ["--task", "memotrap", "--data", str(folder / "2-b.csv")],
            "truthfulqa-mc": ["--task", "truthfulqa-mc", "--data", str(folder / "t.csv"), "--demos", demos],
            "truthfulqa-gen": ["--task", "truthfulqa-gen", "--data", str(folder / "t.csv"), "--demos", demos]}


@pytest.fixture
def call(monkeypatch, capsys):
    """Run evaluate.py's main → (status, the JSON lines or text of standard output, standard error). The options of
    heads that `model` and SHORT hold are left out where no method masks any."""
    def run(*args):
        args = [*map(str, args)]
        if "--method" in args and not set(args[args.index("--method") + 1].split(",")) & set(cli.MASKING):
            args = [x for i, x in enumerate(args) if not {x, args[i - 1]} & {"--heads", "--num-heads"}]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *args])
        status = cli.run(evaluate.main)
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()] if out.startswith("{") else out, err
    return run


def content(path):
    """The file's lines without what differs from run to run."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    settings = {name: value for name, value in lines[0]["settings"].items()
                if name not in ("command", "commit", "date", "batch_size")}
    return [settings] + [{name: value for name, value in line.items() if name != "seconds"} for line in lines[1:]]


def test_a_run_holds_its_settings_and_one_line_per_example_in_the_datas_order(call, model, data, tmp_path):
    status, [out], _ = call(*model, *data["nq-closed"], *SHORT, "--method", "decore-entropy", "--batch-size", 3,
                            "--out", tmp_path)
    assert status == 0 and out["n"] == 7 and set(out["metrics"]) >= {"exact_match", "substring_match"}
    settings, *lines = content(out["run"])
    assert settings["method"] == "decore-entropy" and settings["num_heads"] == 2 and len(settings["heads"]) == 2
    assert settings["task"] == "nq-closed" and settings["layout"] == "chat"
    assert settings["version"] == TASKS["nq-closed"].version
    assert len(settings["data"][0]["sha256"]) == 64 and settings["demos"]["file"] == "demos.jsonl"
    assert settings["versions"]["torch"] == torch.__version__ and settings["dtype"] == "float32"
    assert [line["id"] for line in lines] == list(range(7)) and [line["references"] for line in lines][2] == ["a2"]
    for line in lines:
        assert len(line["ids"]) == len(line["alphas"]) == len(line["entropies"]) <= 5
        assert line["stop"] in ("eos", "length")


@pytest.mark.parametrize("method", ["greedy", "decore-entropy"])
def test_predictions_do_not_depend_on_the_batch_size(call, model, data, tmp_path, method):
    runs = []
    for size in (1, 3, 16):
        _, [out], _ = call(*model, *data["nq-closed"], *SHORT, "--method", method, "--batch-size", size,
                           "--out", tmp_path / str(size))
        runs.append([(line["ids"], line["prompt_sha256"]) for line in content(out["run"])[1:]])
    assert runs[0] == runs[1] == runs[2]


def test_a_run_that_stopped_anywhere_ends_like_an_uninterrupted_one(call, model, data, tmp_path):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--batch-size", 2, "--out", tmp_path]
    _, [out], _ = call(*args)
    whole, path = content(out["run"]), Path(out["run"])
    raw = path.read_bytes()
    first = raw.index(b"\n") + 1
    for kept in (0, first // 2, first, first + 10, len(raw) // 2, len(raw) - 3, len(raw)):
        path.write_bytes(raw[:kept])
        status, _, _ = call(*args)
        assert status == 0 and content(path) == whole, kept


def test_a_run_says_when_it_began_and_goes_on_on_another_day(call, model, data, tmp_path):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--batch-size", 2, "--out", tmp_path]
    _, [out], _ = call(*args)
    whole, path = content(out["run"]), Path(out["run"])
    began = json.loads(path.read_text().splitlines()[0])["settings"]["date"]
    assert abs((datetime.date.today() - datetime.date.fromisoformat(began)).days) <= 1
    raw = path.read_text().replace(f'"date": "{began}"', '"date": "2024-12-31"')
    path.write_text(raw[:len(raw) // 2])
    assert call(*args)[0] == 0 and content(path) == whole and '"date": "2024-12-31"' in path.read_text()


def test_a_run_may_be_killed_again_after_it_was_continued(call, model, data, tmp_path, monkeypatch):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--batch-size", 2, "--out", tmp_path]
    _, [out], _ = call(*args)
    whole, path = content(out["run"]), Path(out["run"])
    raw = path.read_bytes()
    path.write_bytes(raw[:len(raw) // 2])                   # within a line
    with monkeypatch.context() as killed:
        killed.setattr("tasks.runs.finish", lambda path, lines: None)
        call(*args)
    assert len(path.read_text().splitlines()) == len(whole) and call(*args)[0] == 0
    assert content(path) == whole


def test_what_is_there_is_not_decoded_again(call, model, data, tmp_path, monkeypatch):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path]
    call(*args)
    monkeypatch.setattr(baselines, "generate", lambda *a, **k: pytest.fail("decoded again"))
    assert call(*args)[0] == 0


def test_a_killed_process_loses_nothing_that_was_written(call, model, data, tmp_path):
    command = [sys.executable, "evaluate.py", *model, *data["nq-closed"], "--method", "decore-entropy",
               "--num-heads", "2", "--max-new-tokens", "60", "--batch-size", "1"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--out", tmp_path / "killed"], cwd=ROOT, env=env, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    path = tmp_path / "killed" / f"nq-closed.{Path(model[1]).name}.decore-entropy.n2.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = path.read_text().splitlines()[1:]
    assert 2 <= len(written) <= 7
    for folder in ("killed", "whole"):
        call(*command[2:], "--out", tmp_path / folder)
    assert content(path) == content(tmp_path / "whole" / path.name)
    assert {line for line in written if line.endswith("}")} <= set(path.read_text().splitlines())


def test_other_settings_in_the_same_file_are_refused(call, model, data, tmp_path):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path]
    _, [out], _ = call(*args)
    before = Path(out["run"]).read_bytes()
    status, _, err = call(*args, "--limit", 3)
    assert status == 2 and "was made with other settings (n: 7 there, 3 now)" in err
    assert Path(out["run"]).read_bytes() == before
    Path(out["run"]).write_text('{"id": 1}\n')
    status, _, err = call(*args)
    assert status == 2 and "its first line has no settings" in err


def test_a_run_that_another_process_writes_is_refused_in_one_line(call, model, data, tmp_path):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path]
    _, [out], _ = call(*args)
    before = Path(out["run"]).read_bytes()
    with locked(out["run"]):
        status, said, err = call(*args)
    assert status == 2 and said == "" and Path(out["run"]).read_bytes() == before
    assert err.endswith(f"error: {out['run']} is being written by another process; wait for it, or write to another "
                        "place (--out)\n")


def test_a_model_that_was_trained_again_in_place_does_not_get_the_old_numbers(call, data, tmp_path):
    folder, args = tmp_path / "model", [*data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path / "out"]
    for seed, wanted in ((0, 0), (0, 0), (1, 2)):
        write_tokenizer(write_checkpoint(folder, seed=seed, vocab_size=259, max_position_embeddings=2048), TEMPLATE)
        status, _, err = call("--model", folder, *args)
        assert status == wanted
    assert "was made with other settings (fingerprint.weights: " in err
    write_tokenizer(write_checkpoint(folder, seed=0, vocab_size=259, max_position_embeddings=2048), TEMPLATE + " ")
    assert "(fingerprint.tokenizer_config.json: " in call("--model", folder, *args)[2]


def test_an_amateur_that_was_trained_again_is_refused_where_it_counts(call, model, data, tmp_path):
    folder = tmp_path / "amateur"
    args = [*model, *data["nq-closed"], *SHORT, "--amateur", folder, "--out", tmp_path / "out",
            "--method", "greedy,cd"]
    for seed, wanted, runs in ((0, 0, 2), (1, 2, 1)):           # greedy has no amateur
        write_tokenizer(write_checkpoint(folder, seed=seed, vocab_size=259, max_position_embeddings=2048), TEMPLATE)
        status, out, err = call(*args)
        assert (status, len(out)) == (wanted, runs), err
    assert "(amateur_fingerprint.weights: " in err


def test_a_run_grows_and_ends_like_one_that_was_made_at_once(call, model, data, tmp_path):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--batch-size", 2]
    for limit in (3, 5):
        status, [out], _ = call(*args, "--limit", limit, "--out", tmp_path / "grown")
        assert status == 0 and out["n"] == limit
    _, [whole], _ = call(*args, "--limit", 5, "--out", tmp_path / "whole")
    (settings, *rows), (other, *others) = content(out["run"]), content(whole["run"])
    assert settings == other and [row["ids"] for row in rows] == [row["ids"] for row in others]


def test_rows_of_another_batch_size_are_accepted_and_marked(call, model, data, tmp_path):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path]
    call(*args, "--limit", 3)
    status, [out], _ = call(*args, "--batch-size", 2)
    settings, *lines = content(out["run"])
    assert status == 0 and settings["continued"] == [{"rows": 3, "batch_size": 2}]
    assert [line.get("continued") for line in lines] == [None] * 3 + [1] * 4


@pytest.mark.parametrize("old, new, said", [
    ('"references": ["a2"]', '"references": ["b"]', 'line 4: references of item 2 is ["b"] and would be ["a2"] now'),
    ('"prompt_sha256": "', '"prompt_sha256": "0', "line 2: prompt_sha256 of item 0 is "),
    ('"prediction": ', '"predicted": ', "line 2: field 'prediction' is missing"),
    ('"index": 3', '"index": 2', "line 5: item 2 again, which line 4 holds"),
])
def test_a_row_that_was_edited_by_hand_is_named_by_its_line(call, model, data, tmp_path, old, new, said):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path]
    _, [out], _ = call(*args)
    path = Path(out["run"])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    status, _, err = call(*args)
    assert status == 2 and said in err and len(err.splitlines()[-1]) < 400


def test_a_template_that_prints_the_date_prints_that_of_the_runs_first_day(call, data, tmp_path, monkeypatch):
    folder, surroundings = tmp_path / "model", evaluate.surroundings
    write_tokenizer(write_checkpoint(folder, vocab_size=259, max_position_embeddings=2048),
                    "{{ strftime_now('%d %b %Y') }}" + TEMPLATE)

    def run_on(day, out):
        monkeypatch.setattr(evaluate, "surroundings", lambda model: surroundings(model) | {"date": day})
        status, [done], _ = call("--model", folder, *data["nq-closed"], *SHORT, "--method", "greedy", "--batch-size", 2,
                                 "--limit", 3, "--out", tmp_path / out)
        assert status == 0
        return Path(done["run"])

    path, other = run_on("2024-12-31", "one"), run_on("2025-01-01", "other")
    for one, two in zip(content(path)[1:], content(other)[1:], strict=True):
        assert one["prompt_sha256"] != two["prompt_sha256"] and prompt_key(one) == prompt_key(two)
    whole, lines = content(path), path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    run_on("2025-01-01", "one")                             # killed, and started again on the next day
    assert content(path) == whole and '"date": "2024-12-31"' in path.read_text()


def test_a_template_without_a_date_needs_no_second_hash(call, model, data, tmp_path):
    _, [out], _ = call(*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path)
    line = content(out["run"])[1]
    assert "undated_sha256" not in line and prompt_key(line) == line["prompt_sha256"]


def test_a_sweep_runs_every_combination_once(call, model, data, tmp_path):
    status, out, _ = call(*model, *data["nq-closed"], "--method", "greedy,masked,decore-static", "--num-heads", "1,2",
                          "--alpha", "0.5,1", "--max-new-tokens", 2, "--limit", 2, "--out", tmp_path)
    tails = [Path(one["run"]).name.split(".", 2)[2] for one in out]
    assert status == 0 and tails == [
        "greedy.jsonl", "masked.n1.jsonl", "masked.n2.jsonl",
        "decore-static.n1.a0.5.jsonl", "decore-static.n1.a1.jsonl",
        "decore-static.n2.a0.5.jsonl", "decore-static.n2.a1.jsonl"]


def test_random_heads_are_swept_by_seed(call, model, data, tmp_path):
    _, out, _ = call(*model, *data["nq-closed"], "--method", "greedy,masked", "--num-heads", 2, "--random-heads",
                     "uniform", "--seed", "1,3", "--max-new-tokens", 2, "--limit", 1, "--out", tmp_path)
    heads = [content(one["run"])[0]["heads"] for one in out]
    assert len(out) == 3 and heads[0] is None and heads[1] != heads[2]
    assert "seed3" in out[2]["run"]


def test_the_readmes_command_runs_as_it_stands(call, tmp_path, monkeypatch):
    """With small stand-ins for what it fetches: a model of as many heads, and six items, of which four are shown."""
    [command] = [line.split()[2:] for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
                 if line.startswith("python evaluate.py --task")]
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                              head_dim=2, vocab_size=259, eos_token_id=257, max_position_embeddings=2048)
    write_tokenizer(folder, TEMPLATE)
    (tmp_path / "dev.jsonl").write_text("".join(
        json.dumps({"question": f"who is {i}", "sub_context": f"{i} is New.", "org_answer": ["Old"],
                    "sub_answer": ["New"]}) + "\n" for i in range(6)))
    monkeypatch.setattr("runtime.weights.download", lambda name, patterns: folder)
    monkeypatch.setattr("tasks.sources.from_hub", lambda home, *_: (tmp_path / "dev.jsonl", "main"))
    monkeypatch.chdir(tmp_path)
    status, out, err = call(*command)
    assert status == 0 and [one["n"] for one in out] == [2, 2] and "4 demonstrations" in err
    assert [one["run"] for one in out] == ["results/8b/nq-swap.Meta-Llama-3-8B-Instruct.greedy.jsonl",
                                           "results/8b/nq-swap.Meta-Llama-3-8B-Instruct.decore-entropy.n10.query.jsonl"]
    settings, *rows = content(out[1]["run"])
    assert settings["demos"]["source"] == "first items" and settings["demos"]["paper"] is False
    assert [row["id"] for row in rows] == [4, 5]


def test_every_task_is_loaded_before_the_first_run(call, model, data, tmp_path):
    status, _, err = call(*model, *data["nq-closed"], "--task", "nq-closed,xsum", "--method", "greedy",
                          "--out", tmp_path)
    assert status == 2 and "xsum takes no demonstrations" in err and not list(tmp_path.iterdir())


def test_prompts_longer_than_the_context_are_refused_before_the_first(call, data, tmp_path):
    folder = tmp_path / "small"
    write_tokenizer(write_checkpoint(folder, vocab_size=259, max_position_embeddings=64), TEMPLATE)
    status, _, err = call("--model", folder, *data["nq-closed"], "--method", "greedy", "--out", tmp_path / "out")
    assert status == 2 and "7 of 7 prompts are longer than the 64 positions" in err


def test_a_device_that_runs_out_of_memory_gets_smaller_batches(call, model, data, tmp_path, monkeypatch):
    sizes, generate = [], baselines.generate

    def scarce(model, prompts, **rest):
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError
        return generate(model, prompts, **rest)
    monkeypatch.setattr(baselines, "generate", scarce)
    args = [*model, *data["nq-closed"], *SHORT, "--method", "greedy"]
    _, [out], _ = call(*args, "--out", tmp_path)
    # Sixteen at most at first; halved until they fit.
    assert out["n"] == 7 and sizes == [7, 7, 4, 2, 2, 2, 1]
    assert call(*args, "--batch-size", 4, "--out", tmp_path / "fixed")[0] == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("MPS backend out of memory"),
                                   RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")])
def test_nothing_of_a_batch_that_did_not_fit_is_kept(call, model, data, tmp_path, monkeypatch, error):
    kept, alive, generate = [], [], baselines.generate

    def scarce(model, prompts, **rest):
        alive.append(sum(one() is not None for one in kept))
        large = torch.zeros(len(prompts))
        kept.append(weakref.ref(large))
        if len(prompts) > 4:
            raise error
        return generate(model, prompts, **rest)
    monkeypatch.setattr(baselines, "generate", scarce)
    status, [out], _ = call(*model, *data["nq-closed"], *SHORT, "--method", "greedy", "--out", tmp_path)
    assert status == 0 and out["n"] == 7 and alive == [0] * 4


SCARCE = """
import os, sys
import torch
import baselines, evaluate
import cli
generate = baselines.generate

def scarce(model, prompts, **rest):
    out = generate(model, prompts, **rest)
    if os.environ["RANK"] == "1" and len(prompts) > 2:
        raise torch.OutOfMemoryError
    return out

baselines.generate = scarce
sys.exit(cli.run(evaluate.main))
"""


def test_ranks_that_share_a_model_agree_on_smaller_batches(call, model, data, tmp_path):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "decore-entropy"]
    _, [one], _ = call(*args, "--out", tmp_path / "one")
    (tmp_path / "scarce.py").write_text(SCARCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               tmp_path / "scarce.py", *args, "--tp", "2", "--out", tmp_path / "two"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    [path] = (tmp_path / "two").glob("*.jsonl")
    ids = [[(line["id"], line["ids"]) for line in content(file)[1:]] for file in (one["run"], path)]
    assert ids[0] == ids[1]


# Options

@pytest.mark.parametrize("task, options, message", [
    ("nq-closed", ["--method", "greedy,ad", "--mask", "query"], "--mask has no effect on greedy, ad; it is"),
    ("nq-closed", ["--method", "decore-entropy", "--alpha", "1,2"], "--alpha has no effect on decore-entropy"),
    ("nq-closed", ["--amateur", "x", "--random-heads", "uniform"], "--random-heads has no effect on decore-e"),
    ("nq-closed", ["--amateur", "x", "--heads", "y"], "--heads has no effect on decore-entropy-lite; the"),
    ("nq-closed", ["--method", "masked,greedy", "--num-heads", "0,2"], "--num-heads 0 masks nothing"),
    ("nq-closed", ["--no-renormalise"], "--no-renormalise has no effect on nq-closed"),
    ("nq-closed", ["--judge"], "--judge has no effect on nq-closed"),
    ("nq-closed", ["--seed", "3"], "--seed has no effect without --random-heads"),
    ("truthfulqa-mc", ["--max-new-tokens", "9"], "--max-new-tokens has no effect on truthfulqa-mc"),
    ("truthfulqa-mc", ["--mask-prompt"], "--mask-prompt has no effect on truthfulqa-mc"),
    ("truthfulqa-mc", ["--method", "greedy", "--no-renormalise"], "--no-renormalise has no effect on greedy"),
    ("truthfulqa-gen", ["--judge-models", "a,b"], "--judge-models has no effect without --judge or --judge-url"),
    ("memotrap", ["--batch-size", "4"], "--batch-size has no effect on memotrap"),
    ("nq-closed", ["--alpha", "1,inf", "--method", "greedy"], "'inf' is no finite number"),
    ("nq-closed", ["--limit", "-1"], "'-1' is no whole number from 1"),
])
def test_an_option_without_effect_is_refused_before_anything_is_loaded(call, data, monkeypatch, task, options, message):
    monkeypatch.setattr(cli, "load_model", lambda *a: pytest.fail("a model was loaded"))
    status, out, err = call(*data[task], *options)
    assert status == 2 and out == "" and message in err.splitlines()[-1]


def test_an_option_that_one_method_of_a_sweep_uses_is_no_mistake(call, model, data, tmp_path):
    status, out, _ = call(*model, *data["nq-closed"], *SHORT, "--method", "greedy,masked,decore-static", "--alpha", "2",
                          "--limit", 1, "--out", tmp_path)
    assert status == 0 and len(out) == 3


def test_entropy_lite_has_its_own_name_in_files_and_settings(call, model, data, tmp_path):
    args = [*model[:2], *data["nq-closed"], *SHORT, "--limit", 1, "--out", tmp_path]
    status, out, err = call(*args, "--method", "masked,decore-entropy", "--heads", model[3], "--amateur", model[1],
                            "--amateur-heads", model[3])
    assert status == 0, err
    name = Path(model[1]).name
    assert [Path(one["run"]).name for one in out] == [f"nq-closed.{name}.masked.n2.jsonl",
                                                      f"nq-closed.{name}.decore-entropy-lite.n2.{name}.jsonl"]
    masked, lite = (content(one["run"])[0] for one in out)
    assert (lite["method"], lite["amateur"], masked["amateur"]) == ("decore-entropy-lite", name, None)
    assert lite["random_heads"] is None and len(lite["heads"]) == 2


def test_thinking_is_off_unless_asked_for_and_settings_say_so(call, data, tmp_path):
    folder = write_tokenizer(write_checkpoint(tmp_path / "thinking", vocab_size=259, max_position_embeddings=2048),
                             TEMPLATE + "{% if enable_thinking is not defined or enable_thinking %}think{% endif %}")
    prompts, said = [], []
    for number, more in enumerate(([], ["--template-args", '{"enable_thinking": true}'])):
        _, [out], _ = call("--model", folder, *data["nq-closed"], "--max-new-tokens", 2, "--limit", 1, "--method",
                           "greedy", "--out", tmp_path / str(number), *more)
        settings, line = content(out["run"])
        prompts.append(line["prompt_tokens"])
        said.append(settings["template_args"])
    assert said == [{"enable_thinking": False}, {"enable_thinking": True}] and prompts[1] == prompts[0] + len("think")
    status, _, err = call("--model", folder, *data["nq-closed"], "--method", "greedy", "--layout", "plain",
                          "--template-args", '{"a": 1}', "--out", tmp_path)
    assert status == 2 and "--template-args has no effect" in err


# Multiple choice and CAD

@pytest.mark.parametrize("method", ["greedy", "decore-entropy", "dola-high"])
def test_choices_are_scored_as_the_assistants_turn_with_its_end(call, model, data, tmp_path, method):
    _, [out], _ = call(*model, *data["truthfulqa-mc"], "--num-heads", 2, "--method", method, "--out", tmp_path)
    line = content(out["run"])[1]
    tokenizer, loaded = Tokenizer.load(model[1]), Transformer.load(model[1])
    items, _, demos, _ = sources.load(TASKS["truthfulqa-mc"], data["truthfulqa-mc"][3], data["truthfulqa-mc"][5])
    prompt = encode(TASKS["truthfulqa-mc"], items[0], demos, tokenizer, "chat", end_of_turn(tokenizer)).prompt
    # The template strips the candidate's leading blank; the end of the turn is a token of its own.
    answers = [tokenizer.encode(text) + [257] for text in ("Because.", "So.", "No.", "Never.", "Not.")]
    heads = {} if method != "decore-entropy" else {"heads": choose_heads(loaded, model[3], 2)}
    scores = baselines.score(loaded, prompt, answers, method=method, **heads)
    assert line["scores_true"] == pytest.approx(scores[:2]) and line["scores_false"] == pytest.approx(scores[2:])
    assert line["best_position"] == 0 and line["merged"] == 0


def test_an_answer_whose_beginning_merges_with_the_prompts_end_is_scored_in_full(tmp_path):
    write_tokenizer(write_checkpoint(tmp_path, vocab_size=260))
    core = json.loads((tmp_path / "tokenizer.json").read_text())
    core["model"]["vocab"]["ox"] = 259
    core["model"]["merges"] = [["o", "x"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(core))
    tokenizer = Tokenizer.load(tmp_path)
    item = {"index": 0, "question": "So", "without_context": "", "candidates": ["x", "y"]}
    got = encode(TASKS["memotrap"], item, [], tokenizer, "plain")
    # Behind the length of "So" there is nothing left of "Sox", and an empty sum would be the best score there is.
    assert len(tokenizer.encode("Sox")) == len(got.prompt)
    assert got.answers == [tokenizer.encode("x"), tokenizer.encode("y")] and got.merged == 1


def test_the_answers_end_is_what_the_template_puts_there(model):
    assert end_of_turn(Tokenizer.load(model[1])) == [257]


def test_cad_contrasts_with_the_prompt_without_context(call, model, data, tmp_path):
    _, [out], _ = call(*model, *data["nq-swap"], "--max-new-tokens", 3, "--method", "cad", "--out", tmp_path)
    tokenizer, loaded = Tokenizer.load(model[1]), Transformer.load(model[1])
    demos = "".join("<|turn|>user:Context: c\nQuestion: q\nAnswer:<|end|><|turn|>assistant:a<|end|>" for _ in range(2))
    front = "<|turn|>system:Answer the following question based on the provided context:<|end|>" + demos
    ask = [tokenizer.core.encode(front + f"<|turn|>user:{text}Question: who is 0\nAnswer:<|end|><|turn|>assistant:").ids
           for text in ("Context: 0 is New. \n", "")]
    g = baselines.generate(loaded, ask[0], method="cad", ids_without_context=ask[1], max_new_tokens=3,
                           eos_ids=tokenizer.eos_ids)
    assert content(out["run"])[1]["ids"] == g.ids


def test_cad_is_refused_where_a_task_has_no_context(call, model, data, tmp_path):
    status, _, err = call(*model, *data["truthfulqa-mc"], "--method", "cad", "--out", tmp_path)
    assert status == 2 and "truthfulqa-mc has no prompt without context" in err


# Without a model

def test_a_dry_run_loads_no_model_and_prints_every_item(call, data, monkeypatch):
    monkeypatch.setattr(cli, "load_model", lambda *a: pytest.fail("a model was loaded"))
    status, out, _ = call(*data["truthfulqa-mc"], "--dry-run")
    assert status == 0 and [line["index"] for line in out] == [0, 1]
    assert set(out[0]) >= {"id", "messages", "messages_without_context", "text", "references", "candidates"}
    assert out[0]["candidates"] == [" Because.", " So.", " No.", " Never.", " Not."]


def test_a_run_scored_again_gives_its_metrics(call, model, data, tmp_path):
    _, [out], _ = call(*model, *data["memotrap"], "--method", "greedy", "--out", tmp_path)
    status, again, _ = call("rescore", "--rows", out["run"])
    assert status == 0 and again[-1] == {"metrics": out["metrics"], "n": 2}
    assert [row["id"] for row in again[:-1]] == ["b-0", "b-1"] and sum(row["micro"] for row in again[:-1]) / 2 == (
        out["metrics"]["micro"])


def test_all_runs_of_a_folder_are_scored_again(call, model, data, tmp_path):
    runs = [call(*model, *data[task], "--method", "greedy", "--max-new-tokens", 2, "--out", tmp_path)[1][0]
            if task != "memotrap" else call(*model, *data[task], "--method", "greedy", "--out", tmp_path)[1][0]
            for task in ("memotrap", "nq-closed")]
    status, again, _ = call("rescore", tmp_path)
    assert status == 0 and again == runs
    (tmp_path / "empty").mkdir()
    status, _, err = call("rescore", tmp_path / "empty")
    assert status == 2 and "empty: no runs here" in err


def test_items_that_are_in_no_mean_are_counted(call, tmp_path):
    row = {"prediction": "a", "references": ["a"], "demonstration": True}
    (tmp_path / "r.jsonl").write_text((json.dumps(row) + "\n") * 2)
    status, [found], err = call("rescore", "--task", "popqa", tmp_path / "r.jsonl")
    assert status == 0 and found["metrics"]["exact_match"] is None
    assert "2 of 2 items are demonstrations: only the published scores count them" in err


@pytest.mark.parametrize("text, options, message", [
    ('{"id": 1, "prediction": "a"}\n', ["--task", "triviaqa"], "line 1: field 'references' is missing"),
    ('{"id": 1, "prediction": "a", "references": []}\n', ["--task", "triviaqa"], "should be a filled list"),
    ('{"id": 1, "prediction": null, "references": ["a"]}\n', ["--task", "triviaqa"], "should be str, found 'None'"),
    ('{"id": 1, "prediction": "a", "references": ["a"], "memory": [1]}\n', ["--task", "nq-swap"], "'memory' should"),
    ('{"id": 1, "prediction": "a", "references": [0.5]}\n', ["--task", "triviaqa"], "should hold texts, found '[0.5]'"),
    ('{"a": 1}\nnonsense\n{}\n', ["--task", "triviaqa"], "line 2: not JSON"),
    ("", ["--task", "triviaqa"], "holds no rows"),
    ('{"id": 1}\n', [], "give --task"),
    ('{"id": 1, "scores_true": [1.0]}\n', ["--task", "memotrap"], "field 'scores_false' is missing"),
    ('{"scores_true": ["x"], "scores_false": [1]}\n', ["--task", "memotrap"], "'scores_true' should hold numbers"),
    ('{"prediction": "", "prompt": "", "instruction_id_list": ["a"], "kwargs": [{}, {}]}\n', ["--task", "ifeval"],
     "one object for each instruction"),
])
def test_lines_that_cannot_be_scored_are_said_with_field_and_line(call, tmp_path, text, options, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    status, _, err = call("rescore", *options, path)
    assert status == 2 and message in err and err.count("\n") == 1


def test_the_last_line_needs_no_newline_to_be_scored(call, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('\n{"id": "a", "prediction": "Paris", "references": ["paris"]}')
    assert call("rescore", "--task", "popqa", path)[1] == [
        {"metrics": {"exact_match": 1.0, "substring_match": 1.0, "substring_match_published": 1.0}, "n": 1}]


# Several ranks

@pytest.mark.parametrize("more", [[], ["--tp", "2"]], ids=["examples", "model"])
def test_two_ranks_write_the_same_file_as_one(call, model, data, tmp_path, more):
    args = [*model, *data["nq-closed"], *SHORT, "--method", "decore-entropy", "--batch-size", "2"]
    _, [one], _ = call(*args, "--out", tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "evaluate.py",
               *args, *more, "--out", tmp_path / "two"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("\n") == 1
    [path] = (tmp_path / "two").glob("*.jsonl")
    ids = [[(line["id"], line["ids"]) for line in content(file)[1:]] for file in (one["run"], path)]
    assert ids[0] == ids[1]


def test_only_rejections_are_known_without_a_judge(call, model, data, tmp_path):
    _, [out], _ = call(*model, *data["truthfulqa-gen"], *SHORT, "--method", "greedy", "--out", tmp_path)
    assert list(out["metrics"]) == ["rejection"]
