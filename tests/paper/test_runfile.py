"""Run files: reading, the lock, when a run may continue."""

import datetime
import json
import lzma
import math
import os
import re
from functools import partial
from pathlib import Path

import pytest

import evaluate
from cli import page
from cli.entry import explain
from decoders.setup import Setup
from paper.runfile import finish, open_run, packed_paths, read_run, remarks, unpacked
from runtime.errors import InputError
from runtime.files import append, draft, locked, write
from tests.checkpoints import write_lines
from tests.tables import rows

HEADER = json.loads("""
{"task": "nq-swap", "method": "cad", "n": 3, "limit": null, "sample": null,
"command": "evaluate.py", "alpha": 0.5, "batch_size": "auto", "draft": null, "max_new_tokens": 5,
"device": "cpu (x86_64)", "product": "plain", "tp": 1, "versions": {"torch": "2"},
"fingerprint": {"weights": "aa", "config.json": "bb"}, "template_args": {"a": {"b": 1}},
"commit": "c0ffee", "date": "2026-01-01"}
""")
ITEMS = {i: {"index": i, "prompt_sha256": f"p{i}"} for i in range(3)}


def row(index, **more):
    answer = dict(prediction="é", ids=[1], alphas=[0.5], entropies=[0.5], stop="length")
    return ITEMS[index] | answer | more


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_a_complete_run_is_in_the_datas_order_and_stays_as_it_is(path):
    write_lines(path, [{"header": HEADER}, row(2), row(0), row(1)])
    assert finish(path) == [row(0), row(1), row(2)]
    before = path.read_bytes()
    later = HEADER | {"date": "2027-01-01", "commit": None, "device": "cuda (H100)"}
    assert open_run(path, later, ITEMS).keys() == {0, 1, 2}
    assert path.read_bytes() == before  # no row comes from the other device


def test_another_machine_may_continue_a_run_and_the_header_names_it_with_its_items(path):
    write_lines(path, [{"header": HEADER | {"n": 1, "limit": 1, "command": "old"}}, row(0)])
    gpu = {"device": "cuda (H100)", "batch_size": 8, "product": "packed"}
    assert open_run(path, HEADER | gpu | {"commit": "beef"}, ITEMS) == {0: row(0)}
    origin = {"commit": "beef", "date": "2026-01-01"}
    parts = [{"items": [1, 2]} | origin | gpu]
    assert read_run(path)[0] == HEADER | {"continued": parts}
    open_run(path, HEADER | gpu | origin, ITEMS)  # as before
    assert read_run(path)[0] == HEADER | {"continued": parts}
    with open(path, "a") as file:
        file.write(json.dumps(row(1)) + "\n")
    open_run(path, HEADER | {"date": "2026-01-02"}, ITEMS)  # on the first machine again
    back = {name: HEADER[name] for name in gpu} | {"commit": "c0ffee", "date": "2026-01-02"}
    settings = read_run(path)[0]
    assert settings == HEADER | {"continued": [*parts, {"items": [2, 2]} | back]}
    assert remarks(settings)[0] == (
        'continued with another device ("cuda (H100)"), batch_size (8), product ("packed")'
    )
    open_run(path, HEADER | {"date": "2026-01-03"}, ITEMS)
    assert len(read_run(path)[0]["continued"]) == 3
    assert len(remarks(read_run(path)[0])) == 2  # another day is none


def test_a_run_whose_header_lacks_settings_without_effect_continues(path):
    """As stored before headers held every setting."""
    old = HEADER | {"method": "dola-low", "alpha": None, "seed": 1234}
    write_lines(path, [{"header": old}, row(0)])
    new = HEADER | Setup.of("dola-low").header()
    assert new["repetition_penalty"] == 1.0 and new["seed"] is None
    assert open_run(path, new, ITEMS) == {0: row(0)}
    with pytest.raises(ValueError, match="repetition_penalty: 1.0 there, 1.05 now"):
        open_run(path, new | {"repetition_penalty": 1.05}, ITEMS)


START = json.dumps({"header": HEADER}) + "\n"
LINES = r"""
{"index": 1, "alphas": [NaN]} | line 2: not JSON
{"index": 1, "prediction": "\ud800"} | surrogate
{"index": 1, "prediction": "\xff"} | line 2: not JSON in UTF-8
[1] | a list instead of an object
{"index": true} | line 2: index is true; it must be a whole number from 0
{"prediction": "x"} | line 2: index is missing
{"index": 1, "prompt_sha256": "x"} | line 2: item 1 is not that of the data
{"index": 7} | line 2: item 7 is not that of the data
"""
LINES = [
    *rows(LINES),
    ('{"index": 1, "a": ' + "[" * 100_000, "line 2: not JSON"),
    (json.dumps(row(0)), "line 3: the same item as"),
]
for change in dict(alphas=None), dict(alphas=[]), dict(prediction=1), dict(stop="x"):
    LINES.append((json.dumps(row(1, **change)), "line 2: item 1 has no complete answer"))
HEADERS = """
{"alpha": 1.0} | other settings (alpha: 0.5 there, 1.0 now)
{"n": 2} | other settings (n: 3 there, 2 now)
{"dtype": "float16"} | other settings (dtype: null there, "float16" now)
{"fingerprint": {"weights": "ab"}} | fingerprint.weights: "aa" there, "ab" now
{"template_args": {"a": {"b": 2}}} | (template_args.a.b: 1 there, 2 now)
"""


@pytest.mark.parametrize(
    "stored, new, words",
    [(START + line, "{}", words) for line, words in LINES]
    + [(START, new, words) for new, words in rows(HEADERS)]
    + [('{"id": 1}', "{}", "not a run of evaluate.py")],
)
def test_a_file_that_does_not_fit_is_refused_and_not_changed(path, stored, new, words):
    before = f"{stored}\n{json.dumps(row(0))}\n".encode().replace(rb"\xff", b"\xff")
    path.write_bytes(before)
    with pytest.raises(ValueError) as error:
        open_run(path, HEADER | json.loads(new), ITEMS)
    message = str(error.value)
    assert words in message and "\n" not in message and len(message) < 400
    assert path.read_bytes() == before


def test_scores_of_minus_infinity_are_stored_and_other_constants_are_refused(path):
    """An answer that holds a token of probability 0 scores −∞."""
    choice = HEADER | {"max_new_tokens": None, "n": 1, "renormalise": True}
    line = ITEMS[0] | {"scores_true": [-math.inf, -1.5], "scores_false": [-2.0]}
    open_run(path, choice, ITEMS)
    append(path, [line])
    assert finish(path) == [line]
    assert open_run(path, choice, {0: ITEMS[0]}) == {0: line}
    before = path.read_bytes()
    for value in (math.nan, math.inf, datetime.date(2026, 1, 1), b"x"):
        with pytest.raises(ValueError):
            append(path, [line | {"x": value}])
    assert path.read_bytes() == before
    append(path, [{"index": 1, "text": "NaN, -Infinity"}])
    assert read_run(path)[1][1]["text"] == "NaN, -Infinity"


def test_a_finished_run_in_a_read_only_folder_is_read_and_nothing_is_written(path, monkeypatch):
    write(path, [{"header": HEADER}, row(0), row(1), row(2)])
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("os.replace", None)
    monkeypatch.setattr("filelock.FileLock", None)
    with locked(path):
        assert open_run(path, HEADER, ITEMS).keys() == {0, 1, 2}
        assert finish(path) == [row(0), row(1), row(2)]


NAME = "nq-swap.M.cad.a0.5.jsonl"


@pytest.fixture
def packed(path):
    """A packed file of two runs of one name, on two files of data."""
    content = b""
    for file in ("a.true.json", "b.jsonl.gz"):
        header = HEADER | {"model": "models/M", "data": [{"file": file}]}
        write_lines(path, [{"header": header}, row(0, prediction=file), row(1)])
        content += path.read_bytes()
    packed = path.with_name("M.jsonl.xz")
    packed.write_bytes(lzma.compress(content))
    return packed


def test_packed_runs_are_read_like_a_folder_and_taken_out_as_they_were(packed, path, done, refused):
    inside = [packed / "a.true" / NAME, packed / "b" / NAME]
    assert packed_paths(packed) == inside and packed_paths(packed / "b") == inside[1:]
    for run, file in zip([*inside, packed / "b"], ("a.true.json", *["b.jsonl.gz"] * 2)):
        header, lines = read_run(run)
        assert (header["data"], lines[0]["prediction"]) == ([{"file": file}], file)
        assert lines[1].place == f"{run}, line 3"
    out = packed.parent / "out"
    unpack = evaluate.main, "unpack", packed.parent, out, "--only"
    assert done(*unpack, "b/*")[0] == f"1 runs in {out}\n"
    assert refused(*unpack, "*.cad.*") and not (out / "a.true").exists()
    assert (out / "b" / NAME).read_bytes() == path.read_bytes()
    assert "holds no packed run x*" in refused(*unpack, "x*")


def test_a_packed_file_that_does_not_hold_a_run_is_refused(packed):
    good = packed.read_bytes()
    for content, words in (
        (good, f"holds 2 runs; name one of them: {packed / 'a.true' / NAME}, "),
        (good[:-20], "M.jsonl.xz: a damaged xz file"),
        (b"{}", "M.jsonl.xz: a damaged xz file"),
        (lzma.compress(b'{"index": 0}'), "its first line has no header, so it holds no runs"),
    ):
        packed.write_bytes(content)
        unpacked.cache_clear()
        with pytest.raises(InputError, match=re.escape(words)):
            read_run(packed)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_disk_is_named_with_the_file(tmp_path):
    full = Path("/dev/full")

    def in_a_draft(path):
        with draft(path), open(full, "w") as file:
            file.write("text")

    for write_to, path in (
        (partial(append, objects=[{"a": 1}]), full),
        (partial(page.write, text="text"), full),
        (in_a_draft, tmp_path / "new"),
    ):
        with pytest.raises(OSError) as error:
            write_to(path)
        assert explain(error.value) == f"{path}: no space left on device"


def test_a_text_that_cannot_be_written_leaves_no_draft(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "x.jsonl", [{"text": "half a pair: \ud800"}])
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_being_written_is_refused_and_its_lock_goes(path):
    with locked(path), pytest.raises(OSError, match="written by another process"), locked(path):
        pass
    assert not list(path.parent.iterdir())  # no lock file remains
