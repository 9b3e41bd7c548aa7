"""Run files: what is read from them, who may write them, and when a run may go on; fingerprints of checkpoints."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.jsonl import append, locked
from runtime.weights import fingerprint
from tasks.runs import continue_run, finish, read_run, remarks
from tests.checkpoints import write_checkpoint, write_tokenizer

ROOT = Path(__file__).parent.parent
SETTINGS = {"task": "nq-swap", "n": 3, "limit": None, "alpha": 0.5, "batch_size": "auto", "device": "cpu (x86_64)",
            "tp": 1, "versions": {"torch": "2"}, "fingerprint": {"weights": "aa", "config.json": "bb"},
            "commit": "c0ffee", "date": "2026-01-01"}
ASKED = {i: {"index": i, "prompt_sha256": f"p{i}"} for i in range(3)}


def row(index, **more):
    return {"index": index, "prompt_sha256": f"p{index}", "prediction": "é", "ids": [1], "entropies": [0.5]} | more


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(path, *rows, **changes):
    append(path, [{"settings": SETTINGS | changes}, *rows])
    return path


# Reading

def test_what_was_written_is_read_with_its_lines(path):
    settings, rows = read_run(write(path, row(2), row(0)))
    assert settings == SETTINGS and rows == [row(2) | {"line": 2}, row(0) | {"line": 3}]


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_last_line_that_was_cut_off_is_dropped_wherever_it_was_cut(path, cut):
    write(path, row(2), row(0))
    path.write_bytes(path.read_bytes()[:-1 - cut])
    assert [one["index"] for one in read_run(path)[1]] == [2]


@pytest.mark.parametrize("text, said", [
    ('{"index": 1, "prediction": "x", "index": 2}', "line 2: 'index' is there twice"),
    ('{"index": 1, "a": {"b": 1, "b": 1}}', "line 2: 'b' is there twice"),
    ('{"index": 1, "alphas": [NaN]}', "line 2: NaN is not a finite number"),
    ('{"index": 1, "alphas": [-1e999]}', "line 2: -1e999 is not a finite number"),
    ('{"index": 1, "prediction": "\\ud800"}', "line 2: half of a surrogate pair"),
    ('{"index": 1, "stop": 3}', "line 2: 'stop' should be a text, found 3"),
    ('{"index": "1"}', "line 2: 'index' should be a number, found \"1\""),
    ('{"index": true}', "line 2: 'index' should be a number, found true"),
    ('{"index": -1}', "line 2: 'index' is -1, below zero"),
    ('{"prediction": "x"}', "line 2: no 'index'"),
    ('{"index": 1, "entropies": "high"}', "line 2: 'entropies' should be a list of numbers"),
    ('{"index": 1, "ids": [1, null]}', "line 2: 'ids' should be a list of numbers"),
    ('[1]', "line 2: should be a JSON object, found list"),
    ('{"index": 1', "line 2: not JSON"),
    ('{"index": ' + "9" * 5000 + "}", "line 2: Exceeds the limit"),
    ('{"index": 1, "a": ' + "[" * 100_000, "line 2: nested too deeply"),
    ('{"index": 0}', "line 3: item 0 again, which line 2 holds"),
    ('{"settings": {}}', "line 2: no 'index'"),
])
def test_a_line_that_is_no_row_is_named(path, text, said):
    write(path)
    with open(path, "a") as file:
        file.write(text + "\n" + json.dumps(row(0)) + "\n")
    with pytest.raises(ValueError, match=said) as caught:
        read_run(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_bytes_that_are_not_utf8_and_a_folder_are_named(path):
    path.write_bytes(b'{"id": 1}\n{"id": "\xff"}\n{"id": 2}\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        read_run(path)
    with pytest.raises(FileNotFoundError, match="a folder, where a file is needed"):
        read_run(path.parent)


# Going on

def test_a_run_goes_on_with_the_rows_it_has(path):
    assert continue_run(path, SETTINGS, ASKED) == ({}, {})
    append(path, [row(2)])
    assert continue_run(path, SETTINGS | {"date": "2027-01-01", "commit": None}, ASKED) == ({2: row(2)}, {})
    append(path, [row(0), row(1)])
    finish(path, [row(0), row(1), row(2)])
    assert read_run(path)[0] == SETTINGS and [one["index"] for one in read_run(path)[1]] == [0, 1, 2]
    before = path.read_bytes()
    assert continue_run(path, SETTINGS | {"device": "cuda (H100)"}, ASKED)[0].keys() == {0, 1, 2}
    assert path.read_bytes() == before                      # nothing was missing: nothing was made on another device


@pytest.mark.parametrize("changes, said", [
    ({"alpha": 1.0}, "alpha: 0.5 there, 1.0 now"),
    ({"fingerprint": {"weights": "ab", "config.json": "bb"}}, 'fingerprint.weights: "aa" there, "ab" now'),
    ({"fingerprint": {"weights": "aa"}}, 'fingerprint.config.json: "bb" there, null now'),
    ({"n": 2, "limit": 2}, "n: 3 there, 2 now"),
    ({"dtype": "bfloat16"}, 'dtype: null there, "bfloat16" now'),
])
def test_what_changes_a_number_is_refused_by_name_and_the_file_is_left_as_it_is(path, changes, said):
    before = write(path, row(0)).read_bytes()
    with pytest.raises(ValueError, match=f"made with other settings \\({said}\\)"):
        continue_run(path, SETTINGS | changes, ASKED)
    assert path.read_bytes() == before


def test_another_prompt_and_a_row_of_no_item_are_refused_with_their_line(path):
    write(path, row(0), row(1))
    with pytest.raises(ValueError, match="line 3: prompt_sha256 of item 1 is \"p1\" and would be \"other\" now"):
        continue_run(path, SETTINGS, ASKED | {1: {"prompt_sha256": "other"}})
    with pytest.raises(ValueError, match="line 3: item 1 is none of the run's 2"):
        continue_run(path, SETTINGS, {0: ASKED[0], 2: ASKED[2]})


def test_a_field_that_no_row_has_is_refused_with_its_line(path):
    write(path, row(0), row(1, Alphas=[0.5]))
    with pytest.raises(ValueError, match="line 3: no row of a run has a field 'Alphas'"):
        continue_run(path, SETTINGS, ASKED)


def test_a_run_of_an_earlier_version_is_read_and_not_continued(path):
    old = {name: value for name, value in SETTINGS.items() if name != "fingerprint"}
    append(path, [{"settings": old}, row(0)])
    assert read_run(path) == (old, [row(0) | {"line": 2}])
    assert remarks(old) == ["does not say which weights made it"] and remarks(SETTINGS) == []
    with pytest.raises(ValueError, match="does not say which weights made it"):
        continue_run(path, SETTINGS, ASKED)


def test_a_run_may_grow(path):
    write(path, row(0), n=1, limit=1)
    rows, more = continue_run(path, SETTINGS | {"n": 3, "limit": 3}, ASKED)
    assert rows == {0: row(0)} and more == {}
    settings = read_run(path)[0]
    assert (settings["n"], settings["limit"]) == (3, 3) and "continued" not in settings


def test_rows_of_another_device_are_marked_and_the_settings_say_which(path):
    write(path, row(0))
    other = {"device": "cuda (H100)", "batch_size": 8}
    rows, more = continue_run(path, SETTINGS | other, ASKED)
    assert rows == {0: row(0)} and more == {"continued": 1}
    append(path, [row(1) | more])
    assert continue_run(path, SETTINGS | other, ASKED)[1] == {"continued": 1}         # killed, started again
    assert continue_run(path, SETTINGS, ASKED)[1] == {"continued": 2}                 # and back to the first
    settings = read_run(path)[0]
    assert settings["device"] == SETTINGS["device"]
    assert settings["continued"] == [{"rows": 1, **other}, {"rows": 2, "device": "cpu (x86_64)", "batch_size": "auto"}]
    assert remarks(settings)[0] == 'continued after 1 of 3 rows with another device ("cuda (H100)"), batch_size (8)'


@pytest.mark.parametrize("text", ["", '{"sett', '{"settings": {"task": "nq-sw'])
def test_a_first_line_that_was_cut_off_is_no_run_yet(path, text):
    path.write_text(text)
    assert continue_run(path, SETTINGS, ASKED) == ({}, {}) and read_run(path) == (SETTINGS, [])


@pytest.mark.parametrize("text", ["my notes", '{"id": 1}\n', "{}"])
def test_a_file_that_is_no_run_is_never_overwritten(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="no run of evaluate.py"):
        continue_run(path, SETTINGS, ASKED)
    assert path.read_text() == text


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_at_any_step_leaves_the_file_as_it_was(path, monkeypatch, step):
    before = write(path, row(0)).read_bytes()
    monkeypatch.setattr(os, step, lambda *args: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        finish(path, [row(0)])
    assert path.read_bytes() == before


# The lock

HOLD = """
import sys, time
from runtime.jsonl import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_second_process_is_refused_until_the_first_has_died(path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OSError, match="being written by another process"), locked(path):
            pass
        (path.parent / f"{path.name}.{holder.pid}.draft").write_text("half")
    finally:
        holder.kill()
        holder.communicate()
    with locked(path):
        assert not list(path.parent.glob("*.draft"))        # the dead process's
    assert not list(path.parent.iterdir())                  # no lock file is left behind


def test_a_lock_file_that_its_owner_removes_meanwhile_does_not_count(path, monkeypatch):
    lock, flock, calls = Path(f"{path}.lock"), fcntl.flock, []

    def late(file, how):
        calls.append(how)
        if len(calls) == 1:
            lock.unlink()                                   # the owner ended between open and flock,
            lock.touch()                                    # and somebody else has begun
        flock(file, how)
    monkeypatch.setattr(fcntl, "flock", late)
    with locked(path):
        assert len(calls) == 2 and lock.exists()
        with pytest.raises(OSError, match="being written"), locked(path):
            pass


# Fingerprints

@pytest.fixture
def checkpoint(tmp_path):
    return write_tokenizer(write_checkpoint(tmp_path / "model", vocab_size=259), "{{ messages }}")


def test_a_fingerprint_says_which_part_of_a_checkpoint_is_another(checkpoint):
    before = fingerprint(checkpoint)
    assert set(before) == {"config.json", "tokenizer.json", "tokenizer_config.json", "weights"}
    assert fingerprint(checkpoint) == before
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 5}')
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}!")
    write_tokenizer(checkpoint, "{{ messages }}?")
    after = fingerprint(checkpoint)
    assert {name for name in after if after[name] != before.get(name)} == \
        {"generation_config.json", "chat_template.jinja", "tokenizer_config.json"}


def test_a_fingerprint_sees_every_tensor_and_no_division_into_files(checkpoint, tmp_path):
    weights = load_file(checkpoint / "model.safetensors")
    before = fingerprint(checkpoint)["weights"]
    assert fingerprint(write_checkpoint(tmp_path / "shards", vocab_size=259, shards=3))["weights"] == before
    for name in weights:
        changed = weights | {name: weights[name].clone()}
        changed[name].flatten()[-1] += 1e-3
        save_file(changed, checkpoint / "model.safetensors")
        assert fingerprint(checkpoint)["weights"] != before, name
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, checkpoint / "model.safetensors")
    assert fingerprint(checkpoint)["weights"] != before


@pytest.mark.parametrize("at", [0, 1 / 7, 3 / 7, 1])
def test_a_large_tensor_is_sampled_from_its_first_byte_to_its_last(tmp_path, at):
    write_checkpoint(tmp_path)
    large = torch.zeros(1000, 1000)                                     # 4 MB
    save_file({"large": large}, tmp_path / "model.safetensors")
    before = fingerprint(tmp_path)["weights"]
    large.view(-1)[min(int(at * 1e6), 999_999)] = 1
    save_file({"large": large}, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path)["weights"] != before


# Killed; tests/kill.py does more of it on demand

def test_programs_that_are_killed_at_random_moments_end_like_uninterrupted_ones():
    done = subprocess.run([sys.executable, "-m", "tests.kill", "--times", "3", "--seed", "7"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 of them wrong") == 2
