"""Run files: reading, the lock, when a run may continue, kills; fingerprints of checkpoints."""

import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import time

import pytest
import rouge_score.rouge_scorer  # noqa: F401 (imported once, before the forks)
import torch
from safetensors.torch import load_file, save_file

import cli
import evaluate
from evaluation.runs import finish, open_run, read_run, remarks
from heads import detect
from runtime.files import append, locked
from runtime.weights import fingerprint
from tests.checkpoints import write_checkpoint, write_lines, write_tokenizer

HEADER = {"task": "nq-swap", "n": 3, "limit": None, "alpha": 0.5, "batch_size": "auto", "device": "cpu (x86_64)",
            "tp": 1, "versions": {"torch": "2"}, "fingerprint": {"weights": "aa", "config.json": "bb"},
            "commit": "c0ffee", "date": "2026-01-01"}
ITEMS = {i: {"index": i, "prompt_sha256": f"p{i}"} for i in range(3)}


def row(index, **more):
    return {"index": index, "prompt_sha256": f"p{index}", "prediction": "é", "ids": [1], "entropies": [0.5]} | more


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(path, *rows, **changes):
    return write_lines(path, [{"header": HEADER | changes}, *rows])


@pytest.mark.parametrize("text, message", [
    (b'{"index": 1, "alphas": [NaN]}', "line 2: not JSON"),
    (b'{"index": 1, "prediction": "\\ud800"}', "line 2: not JSON .*surrogate"),
    (b'{"index": 1, "prediction": "\xff"}', "line 2: not JSON in UTF-8"),
    (b'{"index": 1, "a": ' + b"[" * 100_000, "line 2: not JSON"),
    (b'[1]', "line 2: not JSON .*a list instead of an object"),
    (b'{"index": true}', "line 2: field 'index' should be a whole number from 0, not 'True'"),
    (b'{"prediction": "x"}', "line 2: missing field: 'index'"),
    (b'{"index": 0}', "line 3: the same item as .*line 2"),
])
def test_a_row_that_cannot_be_read_is_named_by_its_line(path, text, message):
    write(path).write_bytes(path.read_bytes() + text + b"\n" + json.dumps(row(0)).encode() + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        read_run(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


# Continuing


def test_a_run_continues_with_the_rows_of_its_file_and_ends_in_the_datas_order(path):
    assert open_run(path, HEADER, ITEMS) == {}
    append(path, [row(2)])
    assert open_run(path, HEADER | {"date": "2027-01-01", "commit": None}, ITEMS) == {2: row(2)}
    append(path, [row(0), row(1)])
    assert finish(path) == [row(0), row(1), row(2)]
    before = path.read_bytes()
    assert open_run(path, HEADER | {"device": "cuda (H100)"}, ITEMS).keys() == {0, 1, 2}
    assert path.read_bytes() == before                      # complete, so no row comes from the other device


def test_another_device_may_continue_a_run_and_the_settings_name_it(path):
    write(path, row(0), n=1, limit=1)
    changes = {"device": "cuda (H100)", "batch_size": 8}
    assert open_run(path, HEADER | changes, ITEMS) == {0: row(0)}
    settings = read_run(path)[0]
    assert settings == HEADER | {"continued": [changes]}
    open_run(path, HEADER | {"batch_size": 2}, ITEMS)
    assert read_run(path)[0] == HEADER | {"continued": [changes, {"batch_size": 2}]}
    assert remarks(settings) == ['continued with another device ("cuda (H100)"), batch_size (8)']


@pytest.mark.parametrize("old, new, items, message", [
    ({}, {"alpha": 1.0}, ITEMS, r"other settings \(alpha: 0.5 there, 1.0 now"),
    ({}, {"fingerprint": {"weights": "ab"}}, ITEMS,
     r'other settings \(fingerprint.weights: "aa" there, "ab" now; fingerprint.config.json: "bb" '),
    ({}, {"n": 2, "limit": 2}, ITEMS, r"other settings \(n: 3 there, 2 now"),
    ({}, {"dtype": "bfloat16"}, ITEMS, r'other settings \(dtype: null there, "bfloat16" now'),
    ({"mask_prompt": False}, {"mask_prompt": True}, ITEMS, r"other settings \(mask_prompt: false there, true now"),
    ({}, {}, ITEMS | {1: {"prompt_sha256": "other"}}, "line 3: item 1 is not that of the data"),
    ({}, {}, {0: ITEMS[0], 2: ITEMS[2]}, "line 3: item 1 is not that of the data"),
])
def test_other_settings_and_items_are_refused_by_name_and_the_file_does_not_change(path, old, new, items, message):
    before = write(path, row(0), row(1), **old).read_bytes()
    with pytest.raises(ValueError, match=message):
        open_run(path, HEADER | new, items)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["my notes", '{"id": 1}\n', "{}"])
def test_a_file_that_is_not_a_run_is_never_overwritten(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="not a run of evaluate.py"):
        open_run(path, HEADER, ITEMS)
    assert path.read_text() == text


# Several processes, and kills


def fork(work):
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    return process


def test_a_second_process_is_refused_until_the_first_has_died(path):
    has_lock = multiprocessing.get_context("fork").Event()

    def hold():
        with locked(path):
            has_lock.set()
            time.sleep(100)

    holder = fork(hold)
    assert has_lock.wait(30)
    with pytest.raises(OSError, match="being written by another process"), locked(path):
        pass
    holder.kill()
    holder.join()
    with locked(path), pytest.raises(OSError, match="being written by another process"), locked(path):
        pass
    assert not list(path.parent.iterdir())                  # no lock file remains


def evaluation(folder, chat_model):
    rows = [{"question": f"{'very ' * (i % 7)}long {i}", "answers": ["a"]} for i in range(24)]
    (folder / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "demos.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    return (f"--model {chat_model} --heads {chat_model}/heads.json --out {folder}/out --task nq-closed --num-heads 2 "
            f"--data {folder}/qa.jsonl --demos {folder}/demos.jsonl --batch-size 3")


def detection(folder, chat_model):
    texts = cli.MINIATURE / "detection"
    return (f"--needles {texts}/needles.jsonl --haystack {texts}/haystack.jsonl --runs 24 --lengths 60:120:2 "
            f"--min-success 1 --out {folder}/out/heads.json --template 'Context: {{context}}\\n{{question}}'")


@pytest.mark.parametrize("main, arguments", [(evaluate.main, evaluation), (detect.main, detection)])
def test_a_program_that_is_killed_at_random_moments_ends_like_an_uninterrupted_one(tmp_path, chat_model, main,
                                                                                   arguments):
    """KILLS=20 pytest -k killed_at_random kills more often."""
    out, dice, kills = tmp_path / "out", random.Random(7), int(os.environ.get("KILLS", 2))
    command = shlex.split(f"--device cpu --max-new-tokens 8 {arguments(tmp_path, chat_model)}")

    def work():
        sys.argv, sys.stdout, sys.stderr = ["program", *command], *[open(os.devnull, "w")] * 2
        os._exit(cli.run(main))

    def attempt(seconds=600):
        """Runs the program for at most so many seconds. Returns its exit status, None if it was killed."""
        process = fork(work)
        process.join(seconds)
        process.kill()
        process.join()
        return None if process.exitcode == -signal.SIGKILL else process.exitcode

    def files():
        return {path.name: re.sub(rb'"seconds": [0-9.e-]+', b"", path.read_bytes()) for path in out.iterdir()}

    start = time.monotonic()
    assert attempt() == 0
    duration, expected, finished = time.monotonic() - start, files(), True
    while kills > 0 or not finished:
        for path in out.iterdir() if finished else ():
            path.unlink()
        # One run in four may finish, so that most files are the work of several killed runs.
        status = attempt() if kills <= 0 or dice.random() < 0.25 else attempt(dice.uniform(0, duration))
        kills, finished = kills - (status is None), status is not None
        assert not finished or (status == 0 and files() == expected)


# Fingerprints


def test_a_fingerprint_says_which_part_of_a_checkpoint_differs(tmp_path):
    folder = write_tokenizer(write_checkpoint(tmp_path, vocab_size=259), "{{ messages }}")
    before = fingerprint(folder)
    assert set(before) == {"config.json", "tokenizer.json", "tokenizer_config.json", "weights"}
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    write_tokenizer(folder, "{{ messages }}?")
    after = fingerprint(folder)
    assert {name for name in after if after[name] != before.get(name)} == \
        {"generation_config.json", "tokenizer_config.json"}


def test_a_fingerprint_depends_on_every_tensor_and_not_on_the_division_into_files(tmp_path):
    folder = write_checkpoint(tmp_path / "model", vocab_size=259)
    weights, before = load_file(folder / "model.safetensors"), fingerprint(folder)["weights"]
    assert fingerprint(write_checkpoint(tmp_path / "shards", vocab_size=259, shards=3))["weights"] == before
    changes = [{name: weight + 1e-3 * (torch.arange(weight.numel()).view_as(weight) == weight.numel() - 1)}
               for name, weight in weights.items()]
    for change in [*changes, {name: weight.bfloat16() for name, weight in weights.items()}]:
        save_file(weights | change, folder / "model.safetensors")
        assert fingerprint(folder)["weights"] != before, list(change)


def test_a_large_tensor_is_sampled_from_its_first_byte_to_its_last(tmp_path):
    write_checkpoint(tmp_path)
    large, seen = torch.zeros(1_000_000), set()                         # 4 MB
    for at in (0, 142_857, 428_571, 999_999):
        for value in (1, 0):
            large[at] = value
            save_file({"large": large}, tmp_path / "model.safetensors")
            seen.add(fingerprint(tmp_path)["weights"])
    assert len(seen) == 5
