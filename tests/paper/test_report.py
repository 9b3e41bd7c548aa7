"""Reports on stored runs: tables beside greedy decoding and the paper, figures, skipped files."""

import csv
import gzip
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

import evaluate
from paper import printed
from paper.report import figures, results, stored, tables
from paper.tasks import TASKS, metrics
from runtime import statistics
from tests.checkpoints import read_lines, write_lines
from tests.tables import each, rows

STORED = Path(__file__).parents[2] / "results/memory/test/gemma-3-270m.jsonl.xz"
TASK, GROUP, COLUMN = "miniature", "Other tasks", "miniature exact match"
LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
ITI, OTHER = "miniature-iti", [{"file": "other.jsonl"}]


def length_of(task):
    return None if TASKS[task].choice else TASKS[task].max_new_tokens


def write_run(folder, method="greedy", n=None, alpha=None, task=TASK, items=40, right=20, **more):
    """A made-up run in evaluate.py's format. right: the number of answers that are correct, the
    first ones, or the set of their indices."""
    header = dict(task=task, version=TASKS[task].version, n=items, method=method, alpha=alpha)
    header |= dict(num_heads=n, mask="output" if n else None, model="miniature", seed=1234)
    header |= dict(dtype="float32", commit="0123456789abcdef", max_new_tokens=length_of(task))
    lines = [{"header": header | more}]
    right = range(right) if isinstance(right, int) else right
    for i in range(items):
        h = 0.1 + 0.01 * (i % 7) + (0 if i in right else 0.05)
        line = dict(index=i, question=f"q{i}", references=["Alaria"], memory=["Bodun"])
        stop, prediction = ("eos", " Alaria.") if i in right else ("length", " Bodun.")
        lines.append(line | dict(entropies=[h, h], stop=stop, prediction=prediction))
    return write_lines(folder / f"{len([*folder.iterdir()])}.jsonl", lines)


@pytest.fixture(scope="module", autouse=True)
def iti():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stored.ITI, ITI, "miniature")
        yield


def compress(path):
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def described(**header):
    default = dict(model=LLAMA, method="decore-entropy", max_new_tokens=length_of(header["task"]))
    return stored.describe(default | header)


def runs_of(folder):
    return results.select(stored.collect(folder, texts=True))


def short_of(folder):
    """Label → result, of the only short table."""
    [rows] = results.short_tables(runs_of(folder)).values()
    return {row.label: row for row in rows}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Runs of every kind: greedy, sweeps over N and α, random draws by both samplers, ITI, DoLa."""
    folder = tmp_path_factory.mktemp("sweep")
    write_run(folder)
    write_run(folder, "dola-low", items=12, right=2)
    write_run(folder, model=ITI, right=21)
    for n in (1, 2, 4):
        write_run(folder, "masked", n, right=20 - 4 * n)
        write_run(folder, "decore-entropy", n, right=24 + 2 * n)
        for alpha in (0.0, 0.5, 2.0):
            write_run(folder, "decore-static", n, alpha, right=20 + round(alpha) * n)
        for seed in range(3):
            write_run(folder, "masked", n, random_heads="uniform", seed=seed, right=18 - seed)
            write_run(folder, "masked", n, random_heads="published", seed=seed, right=10 - n)
    return folder


@pytest.fixture(scope="module")
def short(sweep):
    return short_of(sweep)


@pytest.fixture
def add(tmp_path):
    """write_run into tmp_path."""
    return partial(write_run, tmp_path)


@pytest.fixture
def report(done, tmp_path):
    """report(*options) → (stdout, stderr) of the report on tmp_path."""
    return partial(done, evaluate.main, "report", tmp_path)


def table(folder, title):
    """({(setup, column): text}, notes in one text) of the table of --all with this title."""
    for name, lines, notes in tables.all_tables(runs_of(folder)):
        if name.startswith(title):
            texts = {}
            for row in lines:
                setup = row.get("setup") or row["method"]
                texts |= {(setup, name.split(" (n")[0]): text for name, text in row.items()}
            return texts, " ".join(notes)


def draw(kind, folder):
    return figures.FIGURES[kind][0]([*results.short_tables(runs_of(folder)).values()], 7)


# Differences to greedy decoding


def test_the_paired_interval_is_that_of_plain_resampling_of_questions(add):
    sides = {*range(0, 40, 3)}, {*range(0, 40, 2)}
    runs = []
    for method, right in zip(("greedy", "masked"), sides):
        path = add(method, right=right)
        path.write_text(re.sub(r'"q(\d*)\d"', r'"q\1"', path.read_text()))  # of 10 items each
        runs.append(stored.read(path))
    greedy, masked = runs
    result = results.compare([masked], [greedy], "exact_match")
    differences = np.array([(i in sides[1]) - (i in sides[0]) for i in range(40)])
    assert (result.won, result.lost) == ((differences > 0).sum(), (differences < 0).sum())
    assert (result.value, result.difference) == pytest.approx((35, 100 * differences.mean()))
    by_question = differences.reshape(4, 10).mean(1)
    plain = np.random.default_rng(7).choice(by_question, (4000, 4)).mean(1)
    assert result.interval == pytest.approx(tuple(100 * np.percentile(plain, [2.5, 97.5])), abs=2)


def test_runs_are_compared_on_the_items_that_both_have(add, report, tmp_path):
    masked, greedy = stored.read(add("masked", 1, right=12)), stored.read(add(items=15))
    add("masked", 2, items=15)
    row = short_of(tmp_path)["masked, N = 1"]
    assert (row.n, row.value) == (15, 80) and row.versus.difference == pytest.approx(-20)
    assert (row.versus.won, row.versus.lost, row.versus.p) == (0, 3, 0.25)
    assert "greedy on them" not in report()[0]
    add("masked", 3, items=12)  # greedy decoding answers other items
    assert re.search(r"\| n +\|.* greedy on them ", report()[0])
    masked.lines = [line | {"prompt_sha256": "another prompt"} for line in masked.lines]
    assert results.compare([masked], [greedy], "exact_match") is None


def test_a_run_is_compared_with_greedy_decoding_of_its_own_sample_and_precision(add, tmp_path):
    """The other sample shares some items; the other kernel and precision share all."""

    def sample(seed, indices, *arguments, **more):
        path = add(*arguments, sample=20, sample_seed=seed, **more)
        header, *lines = path.read_text().splitlines()
        write_lines(path, [json.loads(line) for line in [header, *(lines[i] for i in indices)]])

    first, second = range(20), range(12, 32)
    sample(1, first, right=20, product="packed")
    sample(2, second, right=14, product="packed")
    sample(2, second, right=30, product="packed", dtype="bfloat16")
    sample(2, second, right=31, product="plain")
    for product in ("packed", "filled"):
        sample(2, second, "masked", 1, right=17, product=product)
    rows = short_of(tmp_path)
    label = "masked, N = 1, float32, {} products, sample of seed 2"
    assert len(rows) == 6 and label.format("filled") in rows
    row = rows[label.format("packed")]
    assert (row.n, row.versus.won, row.versus.lost) == (20, 3, 0)
    assert rows[label.format("filled")].versus is None


@pytest.mark.parametrize(
    "right, p, shown", [([14], 0.0625, False), ([15], 0.03125, True), ([15, 9], 0.03125, False)]
)
def test_bold_is_what_mcnemars_test_shows_corrected_for_the_number_of_rows(
    add, tmp_path, right, p, shown
):
    """Greedy decoding answers 9 of 40 items. Five more are too few, though the interval leaves
    out 0."""
    add(right=9)
    for n, number in enumerate(right, 1):
        add("masked", n, right=number)
    row = short_of(tmp_path)["masked, N = 1"]
    assert (row.versus.p, row.shown) == (p, shown) and row.versus.interval[0] > 0
    [cells] = [cells for cells in table_cells(tmp_path) if cells["setup"] == row.label]
    assert (cells["difference"] == f"**+{100 * (right[0] - 9) / 40:.1f}**") == shown


def table_cells(folder):
    [rows] = results.short_tables(runs_of(folder)).values()
    return tables.short_table(rows)[1]


def test_what_has_no_width_has_no_interval(add, tmp_path):
    """Three of three, an answer for each, no item that differs: not [100, 100] or +0.0 to +0.0."""
    add(items=3, right=3)
    add("masked", 1, items=3, right=3)
    add("masked", 2, items=3, right=0)
    rows = short_of(tmp_path)
    assert [rows[f"masked, N = {n}"].versus.interval for n in (1, 2)] == [None, None]
    assert table(tmp_path, GROUP)[0]["greedy", COLUMN] == "100.0 [43.9, 100.0]"  # Wilson's
    assert [cells["95 %"] for cells in table_cells(tmp_path)] == ["", "–", "–"]
    assert results.own_interval(stored.read(add(items=1, right=1)), "exact_match") is None


# Tables of scores


def test_draws_share_a_row_and_their_mean_is_compared(short):
    row = short["masked, N = 4, random heads uniform"]
    assert row.values == [45, 42.5, 40] and row.value == 42.5 and row.n == 40
    assert (row.versus.won, row.versus.lost) == (0, 3)
    assert row.versus.difference == pytest.approx(-7.5)
    assert tables.values_text(row) == "42.5 (45.0, 42.5, 40.0)"
    assert short["decore-entropy, N = 4"].versus[:2] == pytest.approx((50, 30))
    assert short["decore-static, N = 4, α = 2"].versus.p == 2 / 2**8


def test_retrieval_heads_are_compared_with_the_random_heads_of_their_n(short):
    labels = [label for label, row in short.items() if row.beside_random]
    heads = ("random heads uniform", "random heads published")
    assert sorted(labels) == sorted(
        f"masked, N = {n}: retrieval − {sampler}" for n in (1, 2, 4) for sampler in heads
    )
    row = short["masked, N = 4: retrieval − random heads uniform"]
    # Retrieval heads have 4 items right; the draws 18, 17 and 16.
    assert row.versus[:2] == pytest.approx((42.5, -32.5)) and row.versus.lost == 13
    assert row.versus.p == 2 / 2**14  # no item of the 14 that differ is won
    assert row.shown and row.n == 40
    names = list(short)
    place = names.index(row.label)
    assert names[place - 1] == "masked, N = 4, random heads uniform"


def test_rows_of_measures_are_compared_with_the_same_random_heads(add, tmp_path):
    add()
    for measure in ("copy", "mass"):
        file = {"file": "a.json", "sha256": 64 * "a"}
        add("masked", 1, right=9, heads=["0-0"], head_file=file, measure=measure)
    add("masked", 1, right=12, heads=["1-1"], random_heads="uniform")
    rows = short_of(tmp_path)
    for measure in ("", ", mass heads"):
        label = f"masked, N = 1{measure}: retrieval − random heads uniform"
        assert rows[label].versus.difference == pytest.approx(-7.5)


def test_memorised_and_exact_answers_stand_beside_contained_ones(add, report, tmp_path):
    for method, right in (("greedy", 30), ("cad", 38)):
        path = add(method, task="nq-swap", model=LLAMA, right=right, alpha=None)
        path.write_text(path.read_text().replace(" Alaria.", " Alaria, as is said.", 6))
    [cells, cad] = table_cells(tmp_path)
    names = ["answer contained", "exact match", "memory match"]
    assert [cells[name] for name in names] == ["75.0", "60.0", "25.0"]
    assert cells["paper"] == "60.62" and cad["difference"] == "**+20.0**"
    out, _ = report()
    assert "answer contained: the answer contains a reference. The paper calls this EM" in out


def test_the_verdict_says_what_is_shown_and_how_many_items_five_points_need(add, report):
    add(right=9)
    for n, right in enumerate((0, 10, 8), 1):
        add("masked", n, right=right)
    verdict = report()[0].split("### Verdict\n\n")[1]
    assert verdict.startswith("* **miniature, miniature.** Shown: masked, N = 1 (−22.5). ")
    assert "Not shown: the other 2 of 3 differences." in verdict
    assert "2 % of the items differ (median of the rows)" in verdict
    assert f"needs about {statistics.items_needed(1 / 40)} items." in verdict


def test_the_short_table_has_the_paper_metric_of_each_task():
    assert printed.headline("memotrap", ["macro", "micro"]) == "micro"
    assert printed.headline("xsum", ["rougeL"]) == "rougeL"  # without FactKB's model
    assert printed.headline("xsum", ["rougeL", "factkb"]) == "factkb"


def test_texts_that_do_not_end_or_are_empty_and_their_entropies_are_shown(add, tmp_path):
    add()
    path = add("decore-entropy", 4, right=32)
    empty = r'\1], "stop": "eos", "prediction": ""'
    path.write_text(re.sub(r'(\[0.1), 0.1\], .*" Alaria\."', empty, path.read_text()))
    texts, notes = table(tmp_path, "Texts")
    method = "decore-entropy, N = 4"
    assert texts["greedy", "miniature % ended"] == "50.0 [35.0, 65.0]"
    assert texts[method, "miniature % ended"].startswith("80.0; +30.0 [")
    assert texts[method, "miniature % empty"].startswith(f"{100 * 5 / 40}; +12.5 [")
    assert "% empty: texts that their first token ends" in notes


def test_letters_a_word_are_counted_in_scripts_that_separate_words():
    for text, letters in {
        "Бор и сад.": 8 / 3,
        "a 東京 city": 7 / 3,
        "青い石の下です。": None,
    }.items():
        line = {"prediction": text, "entropies": [1.0]}
        assert stored.text_values(line)["letters"] == letters


CELLS = """
ifeval | {"method": "decore-static", "num_heads": 10, "alpha": 0.0} | 70.24† at N = ?
ifeval | {"method": "greedy", "model": "other"} | –
ifeval | {"method": "greedy", "model": "honest_llama3_8B_instruct"} | 52.31
nq-swap | {"num_heads": 20, "model": "tiny", "like": "Meta-Llama-3-8B-Instruct"} | 65.55
nq-swap | {"num_heads": 17} | 66.08 at N = 10
popqa | {"num_heads": 10, "random_heads": "published"} | 25.96 ± 0.18†
"""


@each("task, header, text", CELLS)
def test_a_run_is_compared_with_the_papers_cell_of_its_setup(task, header, text):
    """The honest model is ITI's; the N of main tables is inferred."""
    metric = {"ifeval": "prompt_strict_published"}.get(task, "answer_contained_published")
    cell = printed.cell(described(task=task, **json.loads(header)), metric)
    assert printed.text(cell) == text


def test_variants_are_labelled_and_compared_with_greedy_decoding_of_the_same_data(add, tmp_path):
    own = {"source": "file", "file": "demos.jsonl", "sha256": "ab12cd34"}
    run = {"task": "nq-swap", "model": LLAMA}
    add(right=10, dtype="bfloat16", demos=own, **run)
    add(right=20, dtype="float32", demos=own, **run)
    add("masked", 2, right=30, dtype="float32", demos=own, **run)
    add("masked", 2, dtype="float32", demos={"paper": True}, **run)
    add(task="nq-open", model=LLAMA, data=OTHER)
    texts, notes = table(tmp_path, "Faithfulness")
    filled = {key: text for key, text in texts.items() if text != "–"}
    of_setup = {key[0]: filled[key] for key in filled if key[1].endswith("answer contained")}
    demos = "demonstrations: file demos.jsonl ab12cd"
    assert "; paper 60.62 (−35.6)" in of_setup[f"greedy, bfloat16, {demos}"]
    assert of_setup[f"masked, N = 2, float32, {demos}"].startswith("**75.0**; +25.0 [")
    assert of_setup["masked, N = 2, float32, the paper's demonstrations"] == "50.0 [35.0, 65.0]"
    assert "; paper" in of_setup["greedy"]  # one variant of its task: no label
    assert "in bfloat16, these in bfloat16, float32" in notes
    assert "4 of 5 runs: nq-swap, 40 items of 4,746." in notes
    assert "3 of 5 runs: nq-swap, demonstrations other than the paper's." in notes


def test_runs_of_several_measures_and_head_files_are_labelled_and_random_heads_are_not(
    add, tmp_path
):
    add()
    labels = []
    for number, (measure, name) in enumerate(itertools.product(("copy", "write"), "ab")):
        words = "write heads, " if measure == "write" else ""
        labels.append(f"{words}heads of {name}.json {6 * name}")
        run = {"head_file": {"file": f"{name}.json", "sha256": 64 * name}, "measure": measure}
        for n in (1, 2):
            add("masked", n, right=number, heads=["0-0"], **run)
            drawn = [f"{number}-1"]  # beside other retrieval heads
            add("masked", n, right=number, random_heads="uniform", heads=drawn, **run)
    add("masked", 1, head_file=None, heads=["1-1"])
    amateur = {"amateur": "small", "head_file": {"file": "small.json", "sha256": 64 * "c"}}
    add("decore-entropy-lite", 1, measure="copy", **amateur)
    rows = short_of(tmp_path)
    expected = {"greedy", "masked, N = 1, heads as listed"}
    expected.add("decore-entropy-lite, N = 1, amateur small")  # other heads, but of another model
    for n, label in itertools.product((1, 2), [*labels, "random heads uniform"]):
        expected.add(f"masked, N = {n}, {label}")
    assert {label for label, row in rows.items() if not row.beside_random} == expected
    assert len(rows["masked, N = 1, random heads uniform"].values) == 4
    [ax] = draw("heads", tmp_path).axes
    names = ax.get_legend_handles_labels()[1]
    assert "masked, random heads uniform" in names and f"masked, {labels[3]}" in names


def test_macro_needs_all_of_memotraps_splits_and_missing_ones_are_noted(add, tmp_path):
    path = add(task="memotrap", items=8, sample=8, sample_seed=1)
    lines = read_lines(path)
    for number, line in enumerate(lines[1:]):
        split = sorted(metrics.SPLITS)[number % 3]
        line |= {"scores_true": [number], "scores_false": [4], "split": split}
    write_lines(path, lines)
    texts, notes = table(tmp_path, "Faithfulness")
    assert [column for _, column in texts] == ["setup", "MemoTrap micro"]
    assert "1 of 1 runs: memotrap, without the splits proverb-translation." in notes


def test_the_papers_value_is_compared_with_the_metric_as_published(add, tmp_path):
    path = add(task="popqa", model=LLAMA, items=4, right=2)
    # A demonstration counts in the published metric only: 1 of 3 is right, as published 2 of 4.
    path.write_text(path.read_text().replace('"index": 0,', '"index": 0, "demonstration": true,'))
    texts, notes = table(tmp_path, "Factuality")
    assert texts["greedy", "PopQA answer contained"] == "33.3 [0.0, 100.0]; paper 26.64† (+23.4)"
    assert "answer contained: the answer contains a reference. The paper calls this EM" in notes


def test_judged_answers_have_columns_without_rejections(add, tmp_path):
    path = add(task="truthfulqa-gen", model=LLAMA, items=2, right=2)
    path.write_text(path.read_text().replace(" Alaria.", " I have no comment.", 1))
    verdicts = []
    for kind, key in itertools.product(("truth", "info"), ("0: I have no comment.", "1: Alaria.")):
        verdicts.append({"judge": kind, "model": "t", "yes": 1, "key": key})
    write_lines(path.with_suffix(".judged.jsonl"), verdicts)
    compress(path)
    texts, notes = table(tmp_path, "Factuality")
    text = texts["greedy", "TruthfulQA (Gen) truth not rejected"]
    assert text.startswith("100.0 [") and "paper 65.5 (+34.5)" in text
    assert "1 of 1 runs: judged by t;" in notes


# Settings


NAMED = """
{"max_new_tokens": 50, "layout": "plain"} | layout plain, max new tokens 50; decore-entropy
{"model": "Mistral-7B-Instruct-v0.3", "layout": "chat"} | layout chat; decore-entropy
{"model": "Mistral-7B-Instruct-v0.3", "layout": "mistral", "template_args": {}} | ; decore-entropy
{"method": "ad", "info_layer": 12} | ; ad, α = 0.5, layer 12
{"method": "dola-low", "dola_layers": "halves"} | ; dola-low, halves layers
{"method": "cad", "alpha": 2, "relative_top": 0.1} | ; cad, α = 2, relative top 0.1
"""


@each("header, text", NAMED)
def test_conditions_and_settings_are_named(header, text):
    run = described(task="popqa", **json.loads(header))
    assert f"{run.conditions}; {run.label}" == text


def test_other_conditions_have_tables_of_their_own_and_other_options_lines(add, report):
    add(right=10, max_new_tokens=50, command="evaluate.py --a")
    add("masked", 2, right=30, max_new_tokens=50)
    for mask in ("output", "query"):
        add("masked", 2, mask=mask)
    for name in ("small", "tiny"):
        add("decore-entropy-lite", 2, amateur=f"models/{name}")
    add(model=f"mine/{ITI}")
    parts = dict(part.split("\n", 1) for part in report("--commands")[0].split("### ")[1:])
    setups = "iti", "masked, N = 2", "masked, N = 2, query mask"
    amateurs = [f"decore-entropy-lite, N = 2, amateur {name}" for name in ("small", "tiny")]
    for setup in (*setups, *amateurs):
        assert f"| {setup} " in parts["miniature: miniature"], setup
    fifty = parts["miniature: miniature, max new tokens 50"]
    assert re.search(r"\| masked, N = 2 .* \*\*\+50\.0", fifty)
    assert "* `python evaluate.py --a`: 0.jsonl\n" in parts["Commands"]


def test_csv_has_a_line_per_run_and_metric(add, report):
    add("masked", 2, right=30)
    add()
    lines = [*csv.DictReader(io.StringIO(report("--csv")[0]))]
    of_metric = {(line["run"], line["metric"]): line for line in lines}
    line = of_metric["0.jsonl", "exact_match"]
    names = "method num_heads seed n value low versus_difference versus_won versus_p"
    values = f"masked 2 1234 40 75.0 60.0 25.0 10.0 {2 / 2**10}"
    assert " ".join(line[name] for name in names.split()) == values
    assert float(of_metric["0.jsonl", "entropy"]["value"]) < 0.2


# Files and programs


def test_an_unfinished_run_is_reported_and_a_shorter_one_of_its_setup_is_not(add, report):
    path = add()
    path.write_text(path.read_text()[:-40])  # as a kill leaves it
    compress(add(items=35))
    out, err = report()
    assert "1 of 1 runs: 0.jsonl is unfinished, 39 of 40." in out
    assert "1.jsonl.gz: the same setup as" in err


def test_a_remark_on_each_part_of_a_file_counts_one_run(add, report):
    path = add("cad", task="qa", alpha=0.5)
    path.write_text(path.read_text().replace('"memory": ["Bodun"]', '"memory": []', 5))
    out, _ = report()
    assert "qa: miniature, without memory" in out and "qa: miniature, passages against" in out
    assert out.count("1 of 1 runs: no run of greedy decoding to compare with.") == 2


DAMAGES = """
null | its first line has no header
{"task": "chess"} | unknown task 'chess'
{"method": 5.5} | unknown method 5.5
{"version": -1} | made with version -1
{"method": "cad", "alpha": "x"} | 'alpha' of its header is 'x'
{"data": [5]} | 'int' object
{"id": ["a", 1]} | line 2: id is ["a", 1]; it must be a text or a number
{"entropies": ["x"]} | entropies is ["x"]; it must be a list of numbers
"""


@each("changes, words", DAMAGES)
def test_a_file_that_cannot_be_reported_costs_one_line(add, report, changes, words):
    add("masked", 2)
    path = add()
    header, first, *rest = read_lines(path)
    changes = json.loads(changes)
    if changes:
        header["header"] |= changes
        rest = [header, first | changes, *rest]
    write_lines(path, rest)
    out, err = report("--all")
    assert "| masked, N = 2" in out
    assert err.startswith(f"skipped: {path}: ") and words in err and err.count("\n") == 1


WITHOUT = """
import sys
sys.modules["matplotlib"] = None
import cli.decode, cli.entry, evaluate
for arguments in [sys.argv[1]], [sys.argv[1], "--plots", "x"], ["heads", "--help"]:
    sys.argv = ["evaluate.py", "report", *arguments]
    try:
        print("status", cli.entry.run_program(evaluate.main))
    except SystemExit as end:
        print("status", end.code)
print("huggingface_hub" in sys.modules)
"""


def test_the_program_needs_a_library_only_where_it_uses_it(sweep):
    done = subprocess.run([sys.executable, "-c", WITHOUT, sweep], capture_output=True, text=True)
    report, plots, help_page, _ = done.stdout.split("status ")
    assert "### Verdict" in report
    assert plots == "0\n" and "pip install matplotlib" in done.stderr
    assert help_page.startswith("2\nusage: evaluate.py report heads [-h]")
    assert done.stdout.endswith("status 0\nFalse\n")


def test_a_folder_without_runs_is_said(refused, tmp_path):
    assert f"{tmp_path}: no runs to report" in refused(evaluate.main, "report", tmp_path)


# Figures


@pytest.fixture(scope="module")
def with_memory():
    return [*results.short_tables(runs_of(STORED)).values()]


def boxes_of(path):
    """Box of an SVG's page, and of each of its texts with the text: (x0, y0, x1, y1)."""
    root = ElementTree.parse(path).getroot()
    boxes = []
    for element in root.findall(".//{*}text"):
        style = element.get("style")
        size = float(re.search(r"font-size: ([\d.]+)px", style)[1])
        letters = FontProperties("DejaVu Sans", size=size)
        width, *_ = text_to_path.get_text_width_height_descent(element.text, letters, False)
        moves = element.get("transform")
        *_, x, y = map(float, re.findall(r"-?\d+\.?\d*", moves))
        left = width * {"middle": 0.5, "end": 1}.get(style.partition("anchor: ")[2], 0)
        box = x - left, y - 0.75 * size, x - left + width, y + 0.2 * size
        if "rotate(-90" in moves:
            box = x - 0.75 * size, y - width + left, x + 0.2 * size, y + left
        boxes.append((box, element.text))
    return tuple(map(float, root.get("viewBox").split())), boxes


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning", "error::FutureWarning")
@pytest.mark.parametrize("width", [7, 3.3])
def test_each_text_of_a_figure_is_a_text_inside_the_page_and_beside_the_others(
    done, sweep, with_memory, tmp_path, width
):
    """The figures of made-up runs and of stored ones, with long names."""
    options = f"--format svg --width {width} --plots {tmp_path}/sweep"
    out, _ = done(evaluate.main, "report", sweep, options)
    assert "/differences.svg)" in out and "/heads.svg)" in out
    figures.draw_all(with_memory, tmp_path / "stored", "svg", width)
    for folder, kinds in ("sweep", "differences heads"), ("stored", "differences memory certainty"):
        assert sorted(path.stem for path in (tmp_path / folder).iterdir()) == sorted(kinds.split())
        for kind in kinds.split():
            (_, _, right, bottom), boxes = boxes_of(tmp_path / folder / f"{kind}.svg")
            assert right == 72 * width
            texts = " ".join(text for _, text in boxes)
            assert "commit: " in texts and ("answers" in texts or figures.AGAINST in texts)
            assert folder == "stored" or "seeds of random heads: 0, 1, 2" in texts
            for (x0, y0, x1, y1), text in boxes:
                assert min(x0, y0) >= 0 and x1 <= right and y1 <= bottom, (kind, text)
            for (one, text), (two, other) in itertools.combinations(boxes, 2):
                apart = np.maximum(one[:2], two[:2]) > np.minimum(one[2:], two[2:]) - 0.5
                assert apart.any(), (kind, text, other)


@pytest.mark.parametrize("kind", ["differences", "memory"])
@pytest.mark.parametrize("width", [7, 3.3])
def test_names_leave_room_to_the_bars_and_what_all_share_is_said_once(with_memory, kind, width):
    figure = figures.FIGURES[kind][0](with_memory, width)
    figure.canvas.draw()
    columns = figures.columns_of(with_memory, width)
    assert columns * figure.axes[0].get_position().width > 0.4
    names = [label.get_text() for ax in figure.axes for label in ax.get_yticklabels()]
    assert "cad" in names and not any("α" in name for name in names)
    assert "all setups that have it: α = 0.5" in figure.get_supxlabel()


def test_a_setup_has_one_look_in_all_panels_and_equal_curves_all_show(with_memory):
    figure = figures.FIGURES["certainty"][0](with_memory, 7)
    looks = defaultdict(set)
    for line in (line for ax in figure.axes for line in ax.lines):
        if not line.get_label().startswith("_"):
            looks[line.get_label()].add((line.get_color(), line.get_marker()))
    assert len(looks) > 5 and len(set.union(*looks.values())) == len(looks)
    [legend] = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {*looks}

    def points_of(rows):
        return itertools.product(rows, [(1, 3, None), (9, 3, None)])

    figure = figures.curves_figure([with_memory[0][:3]], 7, figures.RUN, points_of)
    figure.legends.clear()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = {*map(tuple, np.asarray(canvas.buffer_rgba())[..., :3].reshape(-1, 3).tolist())}
    for colour in figures.COLOURS[:3]:
        assert tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) in pixels


def test_options_of_figures_need_a_folder_for_them(refused, sweep):
    for command, option in itertools.product((sweep, "heads"), ("--format=svg", "--width=3")):
        err = refused(evaluate.main, "report", command, option)
        assert f"{option.partition('=')[0]} has no effect without --plots" in err


def test_tables_for_latex_have_their_signs_escaped(report, add):
    add(right=0)
    add("cad", alpha=0.5, right=40, data=[{"file": "50%_{a}&b\\c#1.csv"}])
    add("cad", alpha=0.5, right=40)
    out, _ = report("--latex")
    lines = [line for line in out.splitlines() if line[:1] != "%"]
    assert lines[:2] == [r"\begin{tabular}{lrrrrrrr}", r"\hline"]
    assert r"\textbf{+100.0}" in out and r"$\alpha$ = 0.5" in out and "###" not in out
    assert r"50\%\_\{a\}\&b\textbackslash{}c\#1.csv" in out
    assert {line.count(" & ") for line in lines if line.endswith(r"\\")} == {7}


def test_figures_need_no_backend_and_no_latex_and_tables_come_first(sweep, tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True")
    (tmp_path / "file").touch()
    env = os.environ | dict(MPLBACKEND="module://none", MPLCONFIGDIR=str(tmp_path), PATH="")
    for out, status in ("figures", 0), ("file", 2):
        argv = [sys.executable, evaluate.__file__, "report", sweep, "--plots", tmp_path / out]
        done = subprocess.run(argv, capture_output=True, text=True, env=env)
        assert done.returncode == status and "### miniature" in done.stdout, done.stderr
    assert len([*(tmp_path / "figures").iterdir()]) == 2


def test_a_dollar_in_a_name_does_not_start_a_formula(add, tmp_path):
    add(model="a$_$")
    add("masked", 2, model="a$_$")
    draw("differences", tmp_path).savefig(tmp_path / "a.png")


def test_the_figure_of_differences_has_every_row_with_its_interval_in_the_possible_range(
    add, tmp_path
):
    add(right=39)
    add("masked", 1, right=0)
    add("masked", 2, right=39)
    for seed, right in enumerate((10, 30)):
        add("masked", 1, random_heads="uniform", seed=seed, right=right)
    rows = short_of(tmp_path)
    [ax] = draw("differences", tmp_path).axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["masked, N = 1", "masked, N = 2"]
    lines = [([*line.get_xdata()], line.get_ydata()[0]) for line in ax.lines[1:]]  # after that of 0
    expected = []
    labels = ["masked, N = 1", "masked, N = 1, random heads uniform"]
    labels.append("masked, N = 1: retrieval − random heads uniform")
    for label, y in zip(labels, (-0.25, 0, 0.25)):
        versus = rows[label].versus
        expected += [([*versus.interval], y), ([versus.difference], y)]
        if not y:
            expected.append((pytest.approx([-72.5, -22.5]), y))  # each draw
    assert lines == [*expected, ([0], 1)]  # of N = 2 no item differs
    assert ax.get_xlim()[0] == -100
    [grid] = ax.collections
    assert {y for _, y in lines} == {y for (_, y), _ in grid.get_segments()}
    assert ax.get_title(loc="left").startswith("miniature, exact match, n = 40\n")


def test_lines_of_a_figure_against_n_can_be_told_apart(add, tmp_path):
    run = {"task": "nq-swap", "model": LLAMA}
    add(**run)
    for n in (10, 20):
        add("masked", n, right=18, **run)
        add("masked", n, random_heads="published", **run)
    add("masked", 10, mask="query", **run)  # a single N is not a line
    [ax] = draw("heads", tmp_path).axes
    assert ax.get_title(loc="left").startswith("NQ-Swap, answer contained, n = 40\n")
    one, other = (line for line in ax.lines if not line.get_label().startswith("_"))
    assert one.get_label() == "masked" and other.get_label() == "masked, random heads published"
    assert (one.get_linestyle(), other.get_linestyle()) == ("-", "--")


def test_runs_without_data_for_a_figure_have_none(add, tmp_path):
    add(right=40)
    assert [kind for kind in figures.FIGURES if draw(kind, tmp_path)] == []


def test_retrieval_scores_by_rank_are_the_papers(done):
    out, err = done(evaluate.main, "report", "heads")
    lines = [re.findall(r"0\.\d{4}", line) for line in out.splitlines()[4:14]]
    assert err == "" and [*map(len, lines)] == [11] * 10 and lines[::2] == lines[1::2]


def test_heads_in_common_are_counted_between_files_of_a_measure_and_measures_of_a_file(
    done, tmp_path, monkeypatch
):
    monkeypatch.setattr("paper.report.heads.COMPARED", (1, 3))
    ranked = ["0-0", "0-1", "1-0", "1-1"]
    files = []
    for name, copied in (("a", ranked), ("b", [*ranked[1:], "0-0"])):
        copy, write = (dict(zip(heads, (0.9, 0.5, 0.3, 0.1))) for heads in (copied, ranked[::-1]))
        files.append(write_lines(tmp_path / f"{name}.json", [dict(scores=copy, write=write)]))
    report = partial(done, evaluate.main, "report", "heads", files[0])
    lines = report(files[1])[0].split("### ")[2].splitlines()[4:8]
    common = """
a copy and a write | 0 | 2
a copy and b copy | 0 | 2
a write and b write | 1 | 3
b copy and b write | 0 | 3
"""
    assert [re.split(r" *\| *", line)[1:4] for line in lines] == rows(common)
    (tmp_path / "sub").mkdir()
    other = shutil.copy(files[0], tmp_path / "sub")  # of the same name
    out, _ = report(other)
    assert f"| {files[0]} copy and {other} copy " in out
    assert f"| {files[0]} " in out.split("### ")[1]


def test_a_file_without_copy_and_effect_has_no_map(done, tmp_path):
    path = write_lines(tmp_path / "a.json", [{"mass": {"0-0": 0.5}}])
    assert done(evaluate.main, "report", "heads", path, "--plots", tmp_path / "maps")[0] == ""


def test_a_map_of_heads_has_layer_0_at_the_bottom_and_whole_numbers(tmp_path):
    heads = [*itertools.product(range(2), repeat=2)]
    scores, effects = (dict(zip(heads, x)) for x in ((0.5, 0.25, 0, 1), (0.5, -0.25, 0, -2)))
    figure = figures.head_maps({tmp_path: {"copy": scores, "effect": effects}})
    for ax, measure, values in zip(figure.axes, ("copy", "effect"), (scores, effects)):
        [image] = ax.images
        assert image.origin == "lower"
        assert image.get_array().flatten().tolist() == [*values.values()]
        assert ax.get_title("left") == f"{tmp_path.stem}, {measure}"
        assert all(tick == int(tick) for tick in [*ax.get_xticks(), *ax.get_yticks()])
    assert (image.norm.vmin, image.norm.vmax) == (-2, 2)


def test_maps_of_one_model_stand_beside_each_other():
    scores = {(0, 0): 0.5, (0, 1): 0.25}
    both = {"copy": scores, "effect": scores}
    models = {Path("a"): both, Path("b"): {"copy": scores}, Path("c"): both}
    figure = figures.head_maps(models)
    titles = [ax.get_title("left") for ax in figure.axes[:6]]
    assert titles == ["a, copy", "a, effect", "b, copy", "", "c, copy", "c, effect"]
    places = [ax.get_subplotspec() for ax in figure.axes[:6]]
    assert [(p.rowspan.start, p.colspan.start) for p in places] == [
        *itertools.product(range(3), range(2))
    ]
    of_copy = figures.head_maps({Path(n): {"copy": scores} for n in "abc"})
    assert {ax.get_subplotspec().rowspan.start for ax in of_copy.axes[:3]} == {0}
