"""Which runs a report takes for one, which share a table, and which it compares."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import evaluate
from decoders.setup import HEADS, METHODS, MethodSpec, Setup
from paper.benchmark import Benchmark
from paper.options import make_parser
from paper.report import results, stored
from paper.runfile import make_header
from paper.tasks import TASKS, model_metrics
from runtime.files import read_json
from tests.checkpoints import write_json, write_lines
from tests.tables import each, rows

FILE = {"file": "a.json", "sha256": 64 * "a"}
OTHER = {"file": "b.json", "sha256": 64 * "b"}
LITE = dict(method="decore-entropy-lite", amateur="small", amateur_fingerprint={"weights": "1"})
# A field of a header, what else both runs have, its other value, and what the report does:
# one: takes the runs for one, and says in which fields they differ
# rows: gives each a row, and compares both with greedy decoding
# draws: gives them one row, as draws of random heads
# apart: does not compare the other run with greedy decoding, and says why
# refused: does not read it
FIELDS = """
method | {} | "decore-entropy" | rows
heads | {} | ["0-1"] | rows
num_heads | {} | 2 | rows
measure | {} | "write" | rows
random_heads | {} | "uniform" | rows
seed | {"random_heads": "uniform", "seed": 1} | 2 | draws
alpha | {"method": "decore-static", "alpha": 0.5} | 1.0 | rows
alpha_cap | {"method": "decore-entropy"} | 0.5 | rows
scale_alpha | {"method": "decore-entropy"} | true | rows
alpha_rule | {"method": "decore-entropy"} | "gain" | rows
mask | {} | "query" | rows
mask_prompt | {} | true | rows
amateur | LITE | "tiny" | rows
relative_top | {"method": "cad"} | 0.2 | rows
info_layer | {"method": "ad"} | 5 | rows
renormalise | {"method": "cad", "task": "memotrap", "max_new_tokens": null} | false | rows
dola_layers | {"method": "dola-low"} | "halves" | rows
repetition_penalty | {"method": "dola-low"} | 1.05 | rows
head_file | {} | OTHER | rows
decoder | {"method": "own", "decoder": FILE} | OTHER | rows
amateur_fingerprint | LITE | {"weights": "2"} | rows
sample_seed | {"sample": 8, "sample_seed": 1} | 2 | rows
skip | {"sample": 8, "sample_seed": 1} | 3 | rows
model | {} | "other" | apart
like | {} | "Meta-Llama-3-8B-Instruct" | apart
fingerprint | {} | {"weights": "cc"} | apart
dtype | {} | "bfloat16" | apart
engine | {} | "transformers" | apart
product | {} | "filled" | apart
task | {} | "triviaqa" | apart
layout | {} | "plain" | apart
template | {} | "{question}" | apart
system | {"template": "{question}"} | "Answer." | apart
closed_book | {} | true | apart
known | {"known": {"rows": "known", "file": "a.json", "sha256": "aaaaaa"}} | \
    {"rows": "known", "file": "b.json", "sha256": "bbbbbb"} | apart
eos | {} | ["."] | apart
template_args | {} | {"date": "today"} | apart
data | {} | [OTHER] | apart
demos | {} | OTHER | apart
max_new_tokens | {} | 50 | apart
min_new_tokens | {} | 5 | apart
version | {} | 99 | refused
tp | {} | 2 | one
device | {} | "cuda (H100)" | one
batch_size | {} | 1 | one
draft | {} | 8 | one
versions | {} | {"torch": "3"} | one
commit | {} | "0123" | one
date | {} | "2026-01-01" | one
time | {} | "12:00:00 UTC" | one
command | {} | "evaluate.py --another" | one
n | {} | 9 | one
limit | {} | 8 | one
sample | {"sample": 8, "sample_seed": 1} | 9 | one
paper | {} | {"table": "1"} | one
"""


def value(text):
    for name, record in dict(FILE=FILE, OTHER=OTHER, LITE=LITE).items():
        text = text.replace(name, json.dumps(record))
    return json.loads(text)


@pytest.fixture
def header(monkeypatch):
    """That of a run with a rule of one's own."""
    monkeypatch.setitem(METHODS, "own", MethodSpec("decore.DeCoRe", HEADS, file="own.py"))
    monkeypatch.setattr("paper.runfile.data.file_record", lambda path: FILE)
    bench = Benchmark(TASKS["popqa"], 8, range(8), [FILE], [], FILE, None, None, "chat")
    model = SimpleNamespace(
        name="models/m", device=torch.device("cpu"), dtype=torch.float32, product="packed"
    )
    setup = Setup.of("own", heads=[(0, 0)], num_heads=1, measure="copy")
    setup = replace(setup, head_file="a.json")
    more = {"paper": None, "like": None}
    fingerprints = [{"weights": "aa"}, None]
    how = make_parser().parse_args(["--task", "popqa"])
    header = make_header(bench, setup, how, model, fingerprints, more)
    return header | {"max_new_tokens": TASKS["popqa"].max_new_tokens}


@pytest.fixture
def add(header, tmp_path):
    """add(name, right, **changes of the header) writes a run → its path."""

    def write(run, right=4, **changes):
        lines = [{"header": header | changes}]
        for i in range(8):
            line = dict(index=i, question=f"q{i}", references=["Alaria"], entropies=[0.1])
            line |= dict(scores_true=[i], scores_false=[4], split="proverb-ending", stop="eos")
            lines.append(line | dict(prediction=" Alaria." if i < right else " Bodun."))
        return write_lines(tmp_path / f"{run}.jsonl", lines)

    return write


@each("name, same, other, expected", FIELDS)
def test_two_runs_that_differ_in_one_field(add, tmp_path, capsys, name, same, other, expected):
    """The runs are named by their paths, and what is left out by a line with both and the field."""
    first = dict(method="masked", decoder=None) | value(same)
    greedy = add("greedy", **first | dict(method="greedy"))
    a = add("a", **first)
    b = add("b", 6, **first | {name: value(other)})
    runs = results.select(stored.collect(tmp_path))
    tables = results.short_tables(runs)
    errors = capsys.readouterr().err.splitlines()
    all_rows = [row for table in tables.values() for row in table if not row.beside_random]
    rows_of = {run.path: row for row in all_rows for run in row.runs}
    for table in tables.values():
        assert len({row.label for row in table}) == len(table)
    if expected == "one":
        assert rows_of.keys() == {greedy, a}
        [line] = errors
        assert str(a) in line and str(b) in line and line.endswith(f"differ in {name}")
    elif expected == "refused":
        assert rows_of.keys() == {greedy, a}
        assert len(errors) == 1 and errors[0].startswith(f"skipped: {b}: ")
    else:
        assert rows_of.keys() == {greedy, a, b} and not errors
        assert rows_of[a].versus.difference == pytest.approx(12.5 if expected == "draws" else 0)
        assert (rows_of[a] is rows_of[b]) == (expected == "draws")
        remarks = {run.path: run.remarks for run in runs}
        alone = f"{b} is not compared with {greedy}: {name}"
        if name in ("task", "model", "like"):
            alone = "no run of greedy decoding to compare with"
        assert any(remark.startswith(alone) for remark in remarks[b]) == (expected == "apart")
        assert not any("compare" in remark for remark in remarks[a])
        assert (rows_of[b].versus is None) == (expected == "apart")


def test_the_table_above_has_every_field_of_a_header(header):
    assert sorted(header) == sorted(name for name, *_ in rows(FIELDS))


def test_seed_and_origin_of_heads_are_no_setup_if_they_change_no_head(add, tmp_path, capsys):
    add("a", method="masked", decoder=None)
    add("b", method="masked", decoder=None, seed=5)
    drawn = dict(method="masked", random_heads="uniform", seed=1)
    add("c", **drawn)
    add("d", **drawn, head_file=OTHER, measure="write")
    names = [run.path.name for run in results.select(stored.collect(tmp_path))]
    errors = capsys.readouterr().err
    assert names == ["a.jsonl", "c.jsonl"]
    assert "differ in seed" in errors and "differ in measure, head_file" in errors


def test_a_header_of_earlier_code_lacks_fields_without_a_value(add, header, tmp_path, capsys):
    add("a", method="greedy")
    add("c", 5, method="masked")
    for name in [name for name, value in header.items() if value in (None, "own")]:
        del header[name]
    add("b", 5, method="masked", num_heads=1)
    runs = results.select(stored.collect(tmp_path))
    [table] = results.short_tables(runs).values()
    assert [row.versus and row.versus.won for row in table] == [None, 1]
    assert "c.jsonl: the same setup as" in capsys.readouterr().err


def test_rules_of_ones_own_have_a_row_each(add, tmp_path, done):
    """Two of one file, and one of the same name in another file."""
    add("greedy", method="greedy")
    for number, (method, file) in enumerate((("one", FILE), ("two", FILE), ("one", OTHER))):
        add(number, 5 + number, method=method, decoder=file)
    out, err = done(evaluate.main, "report", tmp_path)
    expected = """
| one, N = 1, decoder a.json aaaaaa | 8 | 62.5
| two, N = 1                        | 8 | 75.0
| one, N = 1, decoder b.json bbbbbb | 8 | 87.5
"""
    assert all(line in out for line in expected.split("\n")) and err == ""
    out, _ = done(evaluate.main, "report", tmp_path, "--csv")
    assert all(f"\n{number}.jsonl," in out for number in range(3))


def test_checkpoints_of_one_name_have_tables_of_their_own(add, tmp_path, done):
    for number, method in enumerate(("greedy", "masked", "greedy", "masked")):
        fingerprint = {"weights": number // 2}
        add(number, 2 + number, method=method, decoder=None, fingerprint=fingerprint)
    out, err = done(evaluate.main, "report", tmp_path)
    titles = [line for line in out.splitlines() if line.startswith("### PopQA: m, checkpoint ")]
    assert len(set(titles)) == 2 and not err
    assert out.count("| +12.5 ") == 2


def test_values_that_other_code_computed_are_computed_again(add, tmp_path, monkeypatch):
    path = add("a", method="greedy")
    monkeypatch.setattr("time.perf_counter", iter(range(0, 1000, 10)).__next__)  # all is slow
    stored.read(path)
    store = tmp_path / "a.scores.json"
    entry = read_json(store)
    for values in entry["values"]:
        values["substring_match"] = values.pop("answer_contained")
    write_json(store, entry)
    assert "answer_contained" not in stored.read(path).values[0]
    with monkeypatch.context() as patch:
        patch.setattr("paper.report.stored.metrics.__file__", __file__)  # another code
        assert stored.read(path).values[0]["answer_contained"] == 1


def test_a_run_without_the_value_of_a_table_is_named(add, tmp_path, done, monkeypatch):
    path = add("a", method="greedy", task="xsum")
    monkeypatch.setattr(model_metrics.rouge, "problem", lambda: "rougeL needs a library")
    _, err = done(evaluate.main, "report", tmp_path)
    assert f"left out: {path}: no values of the task's metrics\n" in err
