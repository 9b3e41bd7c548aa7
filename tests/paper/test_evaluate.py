"""evaluate.py: run files that do not depend on batch sizes, interruptions and ranks; sweeps."""

import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cli
from heads import choose_heads
from model import Transformer
from paper import decoders
from paper.tasks import TASKS
from runtime.weights import fingerprint
from tests.checkpoints import write_checkpoint, write_tokenizer
from tests.conftest import TEMPLATE
from tokenizer import Tokenizer

GREEDY = ["--method", "greedy", "--max-new-tokens", "5"]
DECORE = ["--method", "decore-entropy", "--max-new-tokens", "5", "--num-heads", "2"]


@pytest.fixture(scope="module")
def model(chat_model):
    """Arguments that name the tiny chat model."""
    return ["--model", str(chat_model)]


@pytest.fixture(scope="module")
def heads(chat_model):
    return ["--heads", str(chat_model / "heads.json")]


def write_model(folder, template=TEMPLATE, **config):
    return write_tokenizer(
        write_checkpoint(folder, **dict(vocab_size=259, max_position_embeddings=2048) | config),
        template,
    )


def content(path):
    """The lines of a run without what differs from process to process."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    settings = {
        name: value
        for name, value in lines[0]["header"].items()
        if name not in ("command", "commit", "date", "batch_size", "tp")
    }
    return [settings] + [
        {name: value for name, value in line.items() if name != "seconds"} for line in lines[1:]
    ]


# One run


def test_a_run_holds_its_settings_and_rows_that_do_not_depend_on_the_batch_size(
    start, model, heads, data, tmp_path
):
    results = []
    for size in (3, 1, 16):
        options = ["--batch-size", size, "--out", tmp_path / str(size)]
        status, [out], _ = start(*model, *heads, *data["nq-closed"], *DECORE, *options)
        assert (
            status == 0
            and out["n"] == 7
            and set(out["metrics"]) >= {"exact_match", "substring_match"}
        )
        settings, *rows = content(out["run"])
        results.append([(row["ids"], row["prompt_sha256"]) for row in rows])
    assert results[0] == results[1] == results[2]
    assert (
        settings["method"] == "decore-entropy"
        and settings["num_heads"] == 2
        and len(settings["heads"]) == 2
    )
    assert settings["task"] == "nq-closed" and settings["layout"] == "chat"
    assert settings["product"] == "plain"
    assert settings["version"] == TASKS["nq-closed"].version and settings[
        "fingerprint"
    ] == fingerprint(model[1])
    assert len(settings["data"][0]["sha256"]) == 64 and settings["demos"]["file"] == "demos.jsonl"
    assert settings["versions"]["torch"] == torch.__version__ and settings["dtype"] == "float32"
    assert [row["id"] for row in rows] == list(range(7)) and rows[2]["references"] == ["a2"]
    for row in rows:
        assert len(row["ids"]) == len(row["alphas"]) == len(row["entropies"]) <= 5
        assert row["stop"] in ("eos", "length")


def test_a_run_that_stopped_anywhere_ends_like_an_uninterrupted_one(
    start, model, data, tmp_path, monkeypatch
):
    arguments = [*model, *data["nq-closed"], *GREEDY, "--batch-size", 2, "--out", tmp_path]
    path = Path(start(*arguments)[1][0]["run"])
    complete, raw = content(path), path.read_bytes()
    first = raw.index(b"\n") + 1
    for length in (first, len(raw) // 2, len(raw) - 3):
        path.write_bytes(raw[:length])
        assert start(*arguments)[0] == 0 and content(path) == complete, length
    monkeypatch.setattr(
        "paper.decoding.answer", lambda *_: pytest.fail("a stored row was decoded again")
    )
    assert start(*arguments)[0] == 0 and content(path) == complete


def test_ctrl_c_says_that_the_same_command_continues(start, model, data, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("paper.decoding.answer", interrupt)
    status, _, err = start(*model, *data["nq-closed"], *GREEDY, "--out", tmp_path)
    assert status == 130 and err.rstrip().endswith("interrupted: the same command continues")


def test_templates_print_one_day_and_think_only_if_their_arguments_say_so(
    start, data, tmp_path, monkeypatch
):
    folder = write_model(
        tmp_path / "model",
        "{{ strftime_now('%d %b %Y') }}"
        + TEMPLATE
        + "{% if enable_thinking is not defined or enable_thinking %}think{% endif %}",
    )
    arguments, rows = ["--model", folder, *data["nq-closed"], *GREEDY, "--limit", 1], []
    for more, thinking in (
        ([], False),
        ([], False),
        (["--template-args", '{"enable_thinking": true}'], True),
    ):
        _, [out], _ = start(*arguments, *more, "--out", tmp_path / str(len(rows)))
        settings, row = content(out["run"])
        assert settings["template_args"] == {"enable_thinking": thinking}
        rows.append(row)
        monkeypatch.setattr(
            "tokenizer.datetime", SimpleNamespace(now=lambda: datetime.datetime(2031, 12, 31))
        )
    assert rows[0] == rows[1] and rows[2]["prompt_tokens"] == rows[0]["prompt_tokens"] + len(
        "think"
    )
    status, _, err = start(
        *arguments, "--layout", "plain", "--template-args", '{"a": 1}', "--out", tmp_path
    )
    assert status == 2 and "--template-args has no effect" in err


@pytest.mark.parametrize(
    "template, family, layout", [(None, "llama3", "plain"), (TEMPLATE, "mistral", "mistral")]
)
def test_the_layout_is_the_models(start, data, tmp_path, template, family, layout):
    write_tokenizer(
        write_checkpoint(tmp_path, family, vocab_size=259, max_position_embeddings=2048), template
    )
    _, [out], _ = start(
        "--model", tmp_path, *data["nq-closed"], *GREEDY, "--limit", 1, "--out", tmp_path / "out"
    )
    assert content(out["run"])[0]["layout"] == layout


# Several ranks


@pytest.mark.parametrize("more", [[], ["--tp", "2"]], ids=["replicas", "one model"])
def test_two_ranks_write_the_same_rows_as_one(start, model, heads, data, tmp_path, more):
    arguments = [
        *model,
        *heads,
        *data["nq-closed"],
        *DECORE,
        "--batch-size",
        "3",
    ]  # 3 batches, 2 replicas
    _, [one], _ = start(*arguments, "--out", tmp_path / "one")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "evaluate.py",
    ]
    done = subprocess.run(
        [*torchrun, *map(str, [*arguments, *more, "--out", tmp_path / "two"])],
        text=True,
        cwd=cli.MINIATURE.parent,
        capture_output=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr  # rank 0 alone prints
    [path] = (tmp_path / "two").glob("*.jsonl")
    ids = [[(row["id"], row["ids"]) for row in content(file)[1:]] for file in (one["run"], path)]
    assert ids[0] == ids[1]


# Sweeps


@pytest.mark.parametrize(
    "options, names, draws",
    [
        (
            "--method greedy,masked,decore-static --num-heads 1,2 --alpha 0,1",
            "greedy masked.n1 masked.n2 "
            "decore-static.n1.a0 decore-static.n1.a1 decore-static.n2.a0 decore-static.n2.a1",
            3,
        ),
        (
            "--method greedy,masked --num-heads 2 --random-heads uniform --seed 1,3",
            "greedy masked.n2.random-uniform-seed1 masked.n2.random-uniform-seed3",
            3,
        ),
        (
            "--method masked,decore-entropy --num-heads 2 --mask query --mask-prompt "
            "--amateur {model} --amateur-heads {heads}",
            "masked.n2.query.mask-prompt decore-entropy-lite.n2.query.mask-prompt.{name}",
            1,
        ),
    ],
)
def test_a_sweep_runs_every_combination_once_under_its_own_name(
    start, model, heads, data, tmp_path, options, names, draws
):
    """draws: different sets of heads, none included."""
    places = {"model": model[1], "name": Path(model[1]).name, "heads": heads[1]}
    options = [
        *options.format(**places).split(),
        "--max-new-tokens",
        2,
        "--limit",
        1,
        "--out",
        tmp_path,
    ]
    status, out, err = start(*model, *heads, *data["nq-closed"], *options)
    assert status == 0 and [Path(one["run"]).name for one in out] == [
        f"nq-closed.{places['name']}.{name}.jsonl" for name in names.format(**places).split()
    ], err
    runs = [content(one["run"])[0] for one in out]
    assert [settings["method"] for settings in runs] == [
        name.split(".")[0] for name in names.split()
    ]
    assert len({str(settings["heads"]) for settings in runs}) == draws
    for settings in runs:
        lite = "lite" in settings["method"]
        assert settings["amateur"] == (places["name"] if lite else None)
        assert settings["amateur_fingerprint"] == (fingerprint(model[1]) if lite else None)
        assert settings["random_heads"] == (
            "uniform" if settings["heads"] and "seed" in out[-1]["run"] else None
        )


def test_a_task_and_a_method_that_do_not_fit_are_left_out_before_the_first_run(
    start, model, data, tmp_path
):
    for name in ("TruthfulQA.csv", "demos.jsonl"):
        (tmp_path / name).write_bytes(
            Path(data["truthfulqa-gen"][3 if name == "TruthfulQA.csv" else 5]).read_bytes()
        )
    (tmp_path / "1-a.csv").write_bytes(Path(data["memotrap"][3]).read_bytes())
    arguments = [*model, "--data", tmp_path, "--limit", 1, "--out", tmp_path / "out"]
    status, out, err = start(
        *arguments, "--task", "truthfulqa-mc,memotrap", "--method", "greedy,cad"
    )
    name, line = (
        Path(model[1]).name,
        "truthfulqa-mc with cad is left out: its prompts have no context to leave out",
    )
    assert status == 0 and [Path(one["run"]).name for one in out] == [
        f"truthfulqa-mc.{name}.greedy.jsonl",
        f"memotrap.{name}.greedy.jsonl",
        f"memotrap.{name}.cad.a0.5.jsonl",
    ]
    assert err.count("left out") == 1 and err.index(line) < err.index(
        f"truthfulqa-mc.{name}.greedy"
    )
    status, out, err = start(*arguments, "--task", "truthfulqa-mc", "--method", "cad")
    assert status == 2 and out == [] and err.splitlines()[-1].endswith(line)


@pytest.mark.parametrize(
    "context, task, options, message",
    [
        (
            64,
            "nq-closed",
            ["--task", "nq-closed,xsum", "--method", "greedy"],
            "missing field: 'document', 'summary'",
        ),
        (64, "nq-closed", ["--method", "greedy,ad"], "info_layer 24 is outside"),
        (
            64,
            "nq-closed",
            ["--method", "greedy"],
            "7 of 7 prompts are longer than the 64 positions of small",
        ),
        (
            64,
            "nq-closed",
            ["--method", "cd", "--model", "large", "--amateur", "small"],
            "than the 64 positions of small",
        ),
        # A prompt of 26 tokens and "three": 26 + 5, and the end of the turn, which is not read.
        (
            30,
            "memotrap",
            ["--method", "greedy"],
            "1 of 2 prompts are longer than the 30 positions of small",
        ),
        (31, "memotrap", ["--method", "greedy"], None),
    ],
)
def test_data_and_options_are_checked_before_the_first_run(
    start, data, tmp_path, monkeypatch, context, task, options, message
):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "small", max_position_embeddings=context)
    write_model(tmp_path / "large")
    status, _, err = start("--model", "small", *data[task], *options, "--out", tmp_path / "out")
    assert (status, (tmp_path / "out").exists()) == ((2, False) if message else (0, True)), err
    assert message is None or message in err


@pytest.mark.parametrize(
    "task, options, message",
    [
        ("nq-closed", ["--seed", "3"], "--seed has no effect without --random-heads"),
        ("truthfulqa-mc", ["--mask-prompt"], "--mask-prompt has no effect on truthfulqa-mc"),
        (
            "truthfulqa-mc",
            ["--method", "greedy", "--no-renormalise"],
            "--no-renormalise has no effect on greedy",
        ),
        ("nq-closed", ["--no-renormalise"], "--no-renormalise has no effect on nq-closed"),
        ("nq-closed", ["--task", "nq-closed,x"], "unknown task 'x'"),
    ],
)
def test_an_option_without_effect_is_refused_before_a_model_is_loaded(
    start, data, monkeypatch, task, options, message
):
    monkeypatch.setattr(cli, "load_weights", lambda *a: pytest.fail("a model was loaded"))
    status, out, err = start(*data[task], *options)
    assert status == 2 and out == [] and message in err.splitlines()[-1]


# Multiple choice and CAD


@pytest.mark.parametrize(
    "method, more",
    [("greedy", []), ("decore-entropy", []), ("decore-entropy", ["--no-renormalise"])],
)
def test_choices_are_scored_as_the_assistants_turn_with_its_end(
    start, model, heads, data, tmp_path, method, more
):
    options = [*heads, "--num-heads", 2, *more] if method == "decore-entropy" else []
    _, [out], _ = start(
        *model, *options, *data["truthfulqa-mc"], "--method", method, "--out", tmp_path
    )
    settings, row = content(out["run"])[:2]
    assert settings["mask_prompt"] is None and settings["max_new_tokens"] is None
    assert settings["renormalise"] == (not more)
    tokenizer, loaded = Tokenizer.load(model[1]), Transformer.load(model[1])
    demo = "<|turn|>user:Q: q\nA:<|end|><|turn|>assistant:a<|end|>"
    system = f"<|turn|>system:{TASKS['truthfulqa-mc'].instruction}<|end|>"
    text = f"{system}{demo * 2}<|turn|>user:Q: Why?\nA:<|end|>"
    prompt = tokenizer.core.encode(text + "<|turn|>assistant:").ids
    # The template strips the blank before a candidate. The end of the turn is one token.
    answers = [
        tokenizer.encode(text, bos=False) + [257]
        for text in ("Because.", "So.", "No.", "Never.", "Not.")
    ]
    arguments = {"heads": choose_heads(loaded, heads[1], 2)} if options else {}
    scores = decoders.score(
        loaded, prompt, answers, method=method, renormalise=not more, **arguments
    )
    assert row["scores_true"] == pytest.approx(scores[:2]) and row["scores_false"] == pytest.approx(
        scores[2:]
    )
    assert row["best_position"] == 0 and row["merged"] == 0


def test_cad_is_left_out_if_a_prompt_without_context_ends_in_another_token(start, model, tmp_path):
    """Some of MemoTrap's are empty. A chat template ends every prompt in the same way."""
    (tmp_path / "2-b.csv").write_text(
        "prompt,classes,answer_index\nSay it twice:,\"[' two', ' three']\",1\n"
    )
    arguments = (
        *model,
        "--task",
        "memotrap",
        "--data",
        tmp_path / "2-b.csv",
        "--method",
        "cad",
        "--out",
        tmp_path,
    )
    status, _, err = start(*arguments, "--layout", "plain")
    assert (
        status == 2
        and "without context 1 of its prompts end in another token (--layout plain)" in err
    )
    assert start(*arguments)[0] == 0


def test_cad_contrasts_with_the_prompt_without_context(start, model, data, tmp_path):
    _, [out], _ = start(
        *model, *data["nq-swap"], "--max-new-tokens", 3, "--method", "cad", "--out", tmp_path
    )
    tokenizer, loaded = Tokenizer.load(model[1]), Transformer.load(model[1])
    demos = "".join(
        "<|turn|>user:Context: c\nQuestion: q\nAnswer:<|end|><|turn|>assistant:a<|end|>"
        for _ in range(2)
    )
    front = (
        "<|turn|>system:Answer the following question based on the provided context:<|end|>" + demos
    )
    ids = [
        tokenizer.core.encode(
            front + f"<|turn|>user:{text}Question: who is 0\nAnswer:<|end|><|turn|>assistant:"
        ).ids
        for text in ("Context: 0 is New. \n", "")
    ]
    expected = decoders.generate(
        loaded,
        ids[0],
        method="cad",
        ids_without_context=ids[1],
        max_new_tokens=3,
        eos_ids=tokenizer.eos_ids,
    )
    assert content(out["run"])[1]["ids"] == expected.ids


def test_heads_are_looked_up_before_weights_are_read(start, chat_model, data, tmp_path):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "model.safetensors").write_text("damaged")
    options = "--model", folder, *data["nq-closed"], "--out", tmp_path / "runs"
    for heads, words in (
        ([], "no head scores are known"),
        (["--heads", "none"], "none is neither"),
    ):
        status, _, err = start(*options, *heads)
        assert status == 2 and words in err.splitlines()[-1]
    _, _, err = start(*options, "--method", "greedy")
    assert "model.safetensors" in err.splitlines()[-1]


def test_a_dry_run_prints_every_item_without_a_model(start, data, monkeypatch):
    monkeypatch.setattr(cli, "load_weights", lambda *a: pytest.fail("a model was loaded"))
    status, out, _ = start(*data["truthfulqa-mc"], "--dry-run")
    assert status == 0 and [line["index"] for line in out] == [0, 1]
    assert set(out[0]) >= {
        "id",
        "messages",
        "messages_without_context",
        "text",
        "references",
        "candidates",
    }
    assert out[0]["candidates"] == [" Because.", " So.", " No.", " Never.", " Not."]
