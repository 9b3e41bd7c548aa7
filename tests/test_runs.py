"""Run files: reading, the lock, when a run may continue; fingerprints of checkpoints."""

import json
import multiprocessing
import os
import random
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.jsonl import append, locked
from runtime.weights import fingerprint
from tasks.runs import finish, open_run, read_run, remarks
from tests import kill
from tests.checkpoints import write_checkpoint, write_tokenizer

SETTINGS = {"task": "nq-swap", "n": 3, "limit": None, "alpha": 0.5, "batch_size": "auto", "device": "cpu (x86_64)",
            "tp": 1, "versions": {"torch": "2"}, "fingerprint": {"weights": "aa", "config.json": "bb"},
            "commit": "c0ffee", "date": "2026-01-01"}
ITEMS = {i: {"index": i, "prompt_sha256": f"p{i}"} for i in range(3)}


def row(index, **more):
    return {"index": index, "prompt_sha256": f"p{index}", "prediction": "é", "ids": [1], "entropies": [0.5]} | more


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(path, *rows, **changes):
    append(path, [{"settings": SETTINGS | changes}, *rows])
    return path


# Reading


def test_a_last_row_that_was_cut_off_anywhere_is_skipped(path):
    content = write(path, row(2), row(0)).read_bytes()
    for cut in range(0, 20, 3):
        path.write_bytes(content[:-1 - cut])
        settings, rows = read_run(path)
        assert settings == SETTINGS and rows == [row(2) | {"line": 2}, row(0) | {"line": 3}][:2 if cut == 0 else 1]


@pytest.mark.parametrize("text, message", [
    (b'{"index": 1, "alphas": [NaN]}', "line 2: not JSON"),
    (b'{"index": 1, "prediction": "\\ud800"}', "line 2: not JSON .*surrogate"),
    (b'{"index": 1, "prediction": "\xff"}', "line 2: not JSON in UTF-8"),
    (b'{"index": 1, "a": ' + b"[" * 100_000, "line 2: not JSON"),
    (b'[1]', "line 2: not JSON .*a list instead of an object"),
    (b'{"index": true}', "line 2: 'index' cannot be true"),
    (b'{"index": 1, "ids": [1, null]}', "line 2: 'ids' cannot be "),
    (b'{"prediction": "x"}', "line 2: 'index' is missing"),
    (b'{"index": 0}', "line 3: item 0 is also in line 2"),
])
def test_a_row_that_cannot_be_read_is_named_by_its_line(path, text, message):
    write(path)
    path.write_bytes(path.read_bytes() + text + b"\n" + json.dumps(row(0)).encode() + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        read_run(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


# Continuing


def test_a_run_continues_with_the_rows_of_its_file_and_ends_in_the_datas_order(path):
    assert open_run(path, SETTINGS, ITEMS) == {}
    append(path, [row(2)])
    assert open_run(path, SETTINGS | {"date": "2027-01-01", "commit": None}, ITEMS) == {2: row(2)}
    append(path, [row(0), row(1)])
    assert finish(path) == [row(0), row(1), row(2)]
    before = path.read_bytes()
    assert read_run(path)[0] == SETTINGS
    assert open_run(path, SETTINGS | {"device": "cuda (H100)"}, ITEMS).keys() == {0, 1, 2}
    assert path.read_bytes() == before                      # complete, so no row comes from the other device


def test_another_device_may_continue_a_run_and_the_settings_name_it(path):
    write(path, row(0), n=1, limit=1)
    changes = {"device": "cuda (H100)", "batch_size": 8}
    assert open_run(path, SETTINGS | changes, ITEMS) == {0: row(0)}
    settings = read_run(path)[0]
    assert settings == SETTINGS | {"continued": [changes]}
    assert remarks(settings) == ['continued with another device ("cuda (H100)"), batch_size (8)']


@pytest.mark.parametrize("changes, message", [
    ({"alpha": 1.0}, "alpha: 0.5 there, 1.0 now"),
    ({"fingerprint": {"weights": "ab", "config.json": "bb"}}, 'fingerprint.weights: "aa" there, "ab" now'),
    ({"fingerprint": {"weights": "aa"}}, 'fingerprint.config.json: "bb" there, null now'),
    ({"n": 2, "limit": 2}, "n: 3 there, 2 now"),
    ({"dtype": "bfloat16"}, 'dtype: null there, "bfloat16" now'),
])
def test_settings_that_change_numbers_are_refused_by_name_and_the_file_does_not_change(path, changes, message):
    before = write(path, row(0)).read_bytes()
    with pytest.raises(ValueError, match=f"made with other settings \\({message}\\)"):
        open_run(path, SETTINGS | changes, ITEMS)
    assert path.read_bytes() == before


def test_rows_of_other_data_are_refused(path):
    write(path, row(0), row(1))
    for items in (ITEMS | {1: {"prompt_sha256": "other"}}, {0: ITEMS[0], 2: ITEMS[2]}):
        with pytest.raises(ValueError, match="line 3: item 1 is not that of the data"):
            open_run(path, SETTINGS, items)


def test_a_run_of_an_earlier_version_is_read_and_not_continued(path):
    old = {name: value for name, value in SETTINGS.items() if name != "fingerprint"}
    history = {"continued": [{"rows": 1, "batch_size": 8}]}
    append(path, [{"settings": old | history}, row(0, continued=1, undated_sha256="q")])
    settings, rows = read_run(path)
    assert len(rows) == 1
    assert remarks(settings) == ["does not say which weights made it", "continued with another batch_size (8)"]
    with pytest.raises(ValueError, match="fingerprint.weights: null there"):
        open_run(path, SETTINGS, ITEMS)


@pytest.mark.parametrize("text", ["my notes", '{"id": 1}\n', "{}"])
def test_a_file_that_is_not_a_run_is_never_overwritten(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="not a run of evaluate.py"):
        open_run(path, SETTINGS, ITEMS)
    assert path.read_text() == text


def test_a_file_that_cannot_be_replaced_does_not_change(path, monkeypatch):
    before = write(path, row(0)).read_bytes()

    def fail(*arguments):
        raise OSError("no space left")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        finish(path)
    assert path.read_bytes() == before


def test_a_second_process_is_refused_until_the_first_has_died(path):
    context = multiprocessing.get_context("fork")
    has_lock = context.Event()

    def hold():
        with locked(path):
            has_lock.set()
            time.sleep(100)

    holder = context.Process(target=hold, daemon=True)
    holder.start()
    assert has_lock.wait(30)
    with pytest.raises(OSError, match="being written by another process"), locked(path):
        pass
    holder.kill()
    holder.join()
    with locked(path), pytest.raises(OSError, match="being written by another process"), locked(path):
        pass
    assert not list(path.parent.iterdir())                  # no lock file remains


@pytest.mark.parametrize("program", [0, 1], ids=["evaluate", "detect"])
def test_a_program_that_is_killed_at_random_moments_ends_like_an_uninterrupted_one(tmp_path, program):
    finished, wrong = kill.kill(*kill.programs(tmp_path)[program], times=2, dice=random.Random(7))
    assert finished and not wrong


# Fingerprints


def test_a_fingerprint_says_which_part_of_a_checkpoint_differs(tmp_path):
    folder = write_tokenizer(write_checkpoint(tmp_path, vocab_size=259), "{{ messages }}")
    before = fingerprint(folder)
    assert set(before) == {"config.json", "tokenizer.json", "tokenizer_config.json", "weights"}
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    (folder / "chat_template.jinja").write_text("{{ messages }}!")
    write_tokenizer(folder, "{{ messages }}?")
    after = fingerprint(folder)
    assert {name for name in after if after[name] != before.get(name)} == \
        {"generation_config.json", "chat_template.jinja", "tokenizer_config.json"}


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
    seen = set()
    for at in (None, 0, 1 / 7, 3 / 7, 1):
        large = torch.zeros(1000, 1000)                                 # 4 MB
        if at is not None:
            large.view(-1)[min(int(at * 1e6), 999_999)] = 1
        save_file({"large": large}, tmp_path / "model.safetensors")
        seen.add(fingerprint(tmp_path)["weights"])
    assert len(seen) == 5
