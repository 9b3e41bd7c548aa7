"""Run files: reading, the lock, when a run may continue; fingerprints of checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paper.runs import finish, open_run, read_run, remarks
from runtime.files import append, locked
from runtime.weights import fingerprint
from tests.checkpoints import write_checkpoint, write_lines, write_tokenizer

HEADER = {
    "task": "nq-swap",
    "n": 3,
    "limit": None,
    "alpha": 0.5,
    "batch_size": "auto",
    "max_new_tokens": 5,
    "device": "cpu (x86_64)",
    "tp": 1,
    "versions": {"torch": "2"},
    "fingerprint": {"weights": "aa", "config.json": "bb"},
    "commit": "c0ffee",
    "date": "2026-01-01",
}
ITEMS = {i: {"index": i, "prompt_sha256": f"p{i}"} for i in range(3)}


def row(index, **more):
    return {
        "index": index,
        "prompt_sha256": f"p{index}",
        "prediction": "é",
        "ids": [1],
        "alphas": [0.5],
        "entropies": [0.5],
        "stop": "length",
    } | more


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write(path, *rows, **changes):
    return write_lines(path, [{"header": HEADER | changes}, *rows])


@pytest.mark.parametrize(
    "text, message",
    [
        (b'{"index": 1, "alphas": [NaN]}', "line 2: not JSON"),
        (b'{"index": 1, "prediction": "\\ud800"}', "line 2: not JSON .*surrogate"),
        (b'{"index": 1, "prediction": "\xff"}', "line 2: not JSON in UTF-8"),
        (b'{"index": 1, "a": ' + b"[" * 100_000, "line 2: not JSON"),
        (b"[1]", "line 2: not JSON .*a list instead of an object"),
        (b'{"index": true}', "line 2: field 'index' should be a whole number from 0, not 'True'"),
        (b'{"prediction": "x"}', "line 2: missing field: 'index'"),
        (b'{"index": 0}', "line 3: the same item as .*line 2"),
    ],
)
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
    assert path.read_bytes() == before  # complete, so no row comes from the other device


def test_another_device_may_continue_a_run_and_the_settings_name_it(path):
    write(path, row(0), n=1, limit=1)
    changes = {"device": "cuda (H100)", "batch_size": 8}
    assert open_run(path, HEADER | changes, ITEMS) == {0: row(0)}
    settings = read_run(path)[0]
    assert settings == HEADER | {"continued": [changes]}
    open_run(path, HEADER | {"batch_size": 2}, ITEMS)
    assert read_run(path)[0] == HEADER | {"continued": [changes, {"batch_size": 2}]}
    assert remarks(settings) == ['continued with another device ("cuda (H100)"), batch_size (8)']


@pytest.mark.parametrize(
    "changes",
    [
        {"alphas": None},
        {"alphas": [0.5, 0.5]},
        {"ids": 1},
        {"stop": "end"},
        {"stop": None},
        {"prediction": None},
    ],
)
def test_an_incomplete_answer_is_not_continued(path, changes):
    before = write(path, row(0), row(1, **changes)).read_bytes()
    with pytest.raises(ValueError, match="line 3: item 1 has no complete answer"):
        open_run(path, HEADER, ITEMS)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "new, items, message",
    [
        ({"alpha": 1.0}, ITEMS, r"other settings \(alpha: 0.5 there, 1.0 now"),
        (
            {"fingerprint": {"weights": "ab"}},
            ITEMS,
            r'other settings \(fingerprint.weights: "aa" there, "ab" now; '
            r'fingerprint.config.json: "bb" ',
        ),
        ({"n": 2, "limit": 2}, ITEMS, r"other settings \(n: 3 there, 2 now"),
        ({"dtype": "bfloat16"}, ITEMS, r'other settings \(dtype: null there, "bfloat16" now'),
        ({}, ITEMS | {1: {"prompt_sha256": "other"}}, "line 3: item 1 is not that of the data"),
        ({}, {0: ITEMS[0], 2: ITEMS[2]}, "line 3: item 1 is not that of the data"),
    ],
)
def test_other_settings_and_items_are_refused_by_name_and_the_file_does_not_change(
    path, new, items, message
):
    before = write(path, row(0), row(1)).read_bytes()
    with pytest.raises(ValueError, match=message):
        open_run(path, HEADER | new, items)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["my notes", '{"id": 1}\n', "{}"])
def test_a_file_that_is_not_a_run_is_never_overwritten(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match="not a run of evaluate.py"):
        open_run(path, HEADER, ITEMS)
    assert path.read_text() == text


def test_a_file_that_is_being_written_is_refused_and_its_lock_goes(path):
    with (
        locked(path),
        pytest.raises(OSError, match="being written by another process"),
        locked(path),
    ):
        pass
    assert not list(path.parent.iterdir())  # no lock file remains


# Fingerprints


def test_a_fingerprint_depends_on_every_tensor_and_not_on_the_division_into_files(tmp_path):
    folder = write_checkpoint(tmp_path / "model", vocab_size=259)
    weights, before = load_file(folder / "model.safetensors"), fingerprint(folder)["weights"]
    write_tokenizer(folder, "{{ messages }}")
    assert set(fingerprint(folder)) == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights",
    }
    assert (
        fingerprint(write_checkpoint(tmp_path / "shards", vocab_size=259, shards=3))["weights"]
        == before
    )
    changes = [
        {name: weight + 1e-3 * (torch.arange(weight.numel()).view_as(weight) == weight.numel() - 1)}
        for name, weight in weights.items()
    ]
    for change in [*changes, {name: weight.bfloat16() for name, weight in weights.items()}]:
        save_file(weights | change, folder / "model.safetensors")
        assert fingerprint(folder)["weights"] != before, list(change)


def test_a_large_tensor_is_sampled_from_its_first_byte_to_its_last(tmp_path):
    write_checkpoint(tmp_path)
    large, seen = torch.zeros(1_000_000), set()  # 4 MB
    for at in (0, 142_857, 428_571, 999_999):
        for value in (1, 0):
            large[at] = value
            save_file({"large": large}, tmp_path / "model.safetensors")
            seen.add(fingerprint(tmp_path)["weights"])
    assert len(seen) == 5
