"""Reports on stored runs: tables beside greedy decoding and the paper, figures, skipped files."""

import gzip
import io
import itertools
import json
import re
import subprocess
import sys
from functools import partial

import matplotlib
import numpy as np
import pandas as pd
import pytest

import evaluate
from paper import printed
from paper.report import figures, paired, stored, tables
from paper.report.frame import make_frame
from paper.tasks import TASKS, metrics
from tests.checkpoints import write_lines

TASK, GROUP, COLUMN = "miniature", "Other tasks", "miniature"
LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
ITI, OTHER = "miniature-iti", [{"file": "other.jsonl"}]


def write_run(folder, method="greedy", n=None, alpha=None, task=TASK, items=40, right=20, **more):
    """A made-up run in evaluate.py's format. right: the number of answers that are correct, the
    first ones, or the set of their indices."""
    header = {
        "task": task,
        "version": TASKS[task].version,
        "n": items,
        "model": "miniature",
        "method": method,
        "num_heads": n,
        "alpha": alpha,
        "seed": 1234,
        "mask": "output" if n else None,
        "dtype": "float32",
        "commit": "0123456789abcdef",
    }
    lines = [{"header": header | more}]
    right = range(right) if isinstance(right, int) else right
    for i in range(items):
        h = 0.1 + 0.01 * (i % 7) + (0 if i in right else 0.05)
        line = {"index": i, "question": f"q{i}", "references": ["Alaria"], "memory": ["Bodun"]}
        line |= {"entropies": [h, h], "stop": "eos" if i in right else "length"}
        lines.append(line | {"prediction": " Alaria." if i in right else " Bodun."})
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
    return stored.describe({"model": LLAMA, "method": "decore-entropy"} | header)


def frame_of(folder):
    return make_frame(stored.collect(folder))


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
def frame(sweep):
    return frame_of(sweep)


@pytest.fixture
def add(tmp_path):
    """write_run into tmp_path."""
    return partial(write_run, tmp_path)


def table(frame, title):
    """({(method, column): text}, notes in one text) of the table of this title."""
    for name, rows, notes in tables.all_tables(frame):
        if name.startswith(title):
            texts = pd.DataFrame(rows).set_index("method")
            texts = texts.rename(columns=lambda column: column.split(" (n")[0])
            return texts.stack().to_dict(), " ".join(notes)


def draw(kind, frame):
    return figures.FIGURES[kind][0](frame)


# Differences to greedy decoding


def test_the_paired_interval_is_that_of_plain_resampling_of_questions(add):
    sides = {*range(0, 40, 3)}, {*range(0, 40, 2)}
    runs = []
    for method, right in zip(("greedy", "masked"), sides):
        path = add(method, right=right)
        path.write_text(re.sub(r'"q(\d*)\d"', r'"q\1"', path.read_text()))  # of 10 items each
        runs.append(stored.read(path))
    greedy, masked = runs
    result = paired.compare([masked], greedy)["exact_match"]
    differences = np.array([(i in sides[1]) - (i in sides[0]) for i in range(40)])
    assert (result.won, result.lost) == ((differences > 0).sum(), (differences < 0).sum())
    assert result[:2] == pytest.approx((50, 100 * differences.mean()))
    by_question = differences.reshape(4, 10).mean(1)
    plain = np.random.default_rng(7).choice(by_question, (4000, 4)).mean(1)
    assert result[2:4] == pytest.approx(tuple(100 * np.percentile(plain, [2.5, 97.5])), abs=2)
    halves = [paired.compare([masked], greedy, half)["exact_match"] for half in (0, 1)]
    assert sum(half.n for half in halves) == 40 and all(half.n % 10 == 0 for half in halves)


def test_runs_are_compared_on_the_items_that_both_have(add, tmp_path):
    masked, greedy = stored.read(add("masked", 1, right=12)), stored.read(add(items=15))
    texts, _ = table(frame_of(tmp_path), GROUP)
    assert texts["masked, N = 1", COLUMN].startswith("30.0; -20.0 [")
    assert texts["masked, N = 1", COLUMN].endswith("], 0 : 3 on 15 items")
    result = paired.compare([masked], greedy)["exact_match"]
    assert (result.n, result.won, result.lost, result.value) == (15, 0, 3, 80)
    masked.lines = [line | {"prompt_sha256": "another prompt"} for line in masked.lines]
    assert paired.compare([masked], greedy) == {}


@pytest.mark.parametrize("right, bold", [(15, True), (14, False), (3, True), (4, False)])
def test_only_what_is_separable_from_greedy_decoding_is_bold(add, tmp_path, right, bold):
    """Greedy decoding answers 9 of 40 items. Five more are too few, though the interval leaves
    out 0."""
    add(right=9)
    add("masked", 1, right=right)
    texts, notes = table(frame_of(tmp_path), GROUP)
    text = texts["masked, N = 1", COLUMN]
    assert text.startswith("**") == bold and "0.0]" not in text
    assert "of 2 comparisons without any real difference, about 0.1 would be bold" in notes


def test_a_setup_is_chosen_on_one_half_and_reported_on_the_other(add, tmp_path):
    halves = [{i for i in range(40) if paired.half_of(f"q{i}") == half} for half in (0, 1)]
    add(right=0)
    add("decore-entropy", 1, right=halves[0])
    add("decore-entropy", 2, right=halves[1], alpha_cap=0.5)
    add("masked", 1)  # a single setup
    texts, notes = table(frame_of(tmp_path), "Chosen on one half")
    nothing = "0.0; +0.0 [+0.0, +0.0], 0 : 0"
    expected = {
        "chosen on the first half": "N = 1",
        "on the second": nothing,
        "chosen on the second half": "N = 2, alpha cap 0.5",
        "on the first": nothing,
    }
    assert {column: texts["DeCoRe entropy", column] for column in expected} == expected
    assert {method for method, _ in texts} == {"DeCoRe entropy"}
    assert "a hash of the question" in notes


# Tables of scores


def test_draws_share_a_line_and_the_paired_difference_is_that_of_their_mean(frame):
    texts, _ = table(frame, GROUP)
    for setup, text in (
        ("greedy", "50.0 [35.0, 65.0]"),
        ("masked, N = 4, random heads", "42.5 (40.0 to 45.0, 3 draws); -7.5 [-15.8, -0.8], 0 : 3"),
        ("DeCoRe entropy, N = 4", "**80.0**; +30.0 [+17.5, +45.0], 12 : 0"),
        ("DeCoRe static, N = 4, α = 2", "**70.0**; +20.0 [+10.0, +32.5], 8 : 0"),
    ):
        assert texts[setup, COLUMN] == text


def test_texts_that_do_not_end_and_their_entropies_are_shown(frame):
    texts, _ = table(frame, "Texts")
    method = "DeCoRe entropy, N = 4"
    assert texts["greedy", f"{COLUMN} % ended"] == "50.0 [35.0, 65.0]"
    assert texts[method, f"{COLUMN} % ended"].startswith("**80.0**; +30.0")
    assert texts[method, f"{COLUMN} entropy"] == "**0.14**; -0.01 [-0.02, -0.01]"
    assert texts[method, f"{COLUMN} tokens"] == "2.0; +0.0 [+0.0, +0.0]"
    # 32 answers of 7 letters and 8 of 6, in place of 20 and 20.
    assert texts[method, f"{COLUMN} letters a word"].startswith("**6.8**; +0.3 [")


@pytest.mark.parametrize(
    "task, header, text",
    [
        ("ifeval", {"method": "decore-static", "num_heads": 10, "alpha": 0.0}, "70.24† at N = ?"),
        ("ifeval", {"method": "greedy", "model": "other"}, "–"),
        ("ifeval", {"method": "greedy", "model": "honest_llama3_8B_instruct"}, "52.31"),  # ITI's
        ("nq-swap", {"num_heads": 20, "model": "tiny", "like": LLAMA}, "65.55"),
        ("nq-swap", {"num_heads": 17}, "66.08 at N = 10"),  # the N of main tables is inferred
        ("popqa", {"num_heads": 10, "random_heads": "published"}, "25.96 ± 0.18†"),
    ],
)
def test_a_run_is_compared_with_the_papers_cell_of_its_setup(task, header, text):
    metric = {"ifeval": "prompt_strict_published"}.get(task, "answer_contained_published")
    assert printed.text(printed.cell(described(task=task, **header), metric)) == text


def test_variants_are_labelled_and_compared_with_greedy_decoding_of_the_same_data(add, tmp_path):
    own = {"source": "file", "file": "demos.jsonl", "sha256": "ab12cd34"}
    run = {"task": "nq-swap", "model": LLAMA}
    add(right=10, dtype="bfloat16", demos=own, **run)
    add(right=20, dtype="float32", demos=own, **run)
    add("masked", 2, right=30, dtype="float32", demos=own, **run)
    add("masked", 2, dtype="float32", demos={"paper": True}, **run)
    add(task="nq-open", model=LLAMA, data=OTHER)
    texts, notes = table(frame_of(tmp_path), "Faithfulness")
    of_setup = {setup: text for (setup, _), text in texts.items() if text != "–"}
    demos = "demonstrations: file demos.jsonl ab12cd"
    assert "; paper 60.62 (-35.6)" in of_setup[f"greedy, bfloat16, {demos}"]
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
        labels.append(f"{measure} heads, heads of {name}.json {6 * name}")
        run = {"head_file": {"file": f"{name}.json", "sha256": 64 * name}, "measure": measure}
        for n in (1, 2):
            add("masked", n, right=number, heads=["0-0"], **run)
            drawn = [f"{number}-1"]  # beside other retrieval heads
            add("masked", n, right=number, random_heads="uniform", heads=drawn, **run)
    add("masked", 1, head_file=None, heads=["1-1"])
    amateur = {"amateur": "small", "head_file": {"file": "small.json", "sha256": 64 * "c"}}
    add("decore-entropy-lite", 1, measure="copy", **amateur)
    frame = frame_of(tmp_path)
    texts, _ = table(frame, GROUP)
    expected = {"greedy", "masked, N = 1, heads as listed"}
    expected.add("DeCoRe entropy-lite, N = 1, amateur small")  # other heads, but of another model
    for n, label in itertools.product((1, 2), [*labels, "random heads"]):
        expected.add(f"masked, N = {n}, {label}")
    assert {setup for setup, _ in texts} == expected
    assert "4 draws" in texts["masked, N = 1, random heads", COLUMN]
    [ax] = draw("heads", frame).axes
    names = ax.get_legend_handles_labels()[1]
    assert "masked, random heads" in names and f"masked, {labels[3]}" in names


def test_macro_needs_all_of_memotraps_splits_and_missing_ones_are_noted(add, tmp_path):
    path = add(task="memotrap", items=8, sample=8, sample_seed=1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines[1:]):
        split = sorted(metrics.SPLITS)[number % 3]
        line |= {"scores_true": [number], "scores_false": [4], "split": split}
    write_lines(path, lines)
    texts, notes = table(frame_of(tmp_path), "Faithfulness")
    assert [column for _, column in texts] == ["MemoTrap micro"]
    assert "1 of 1 runs: memotrap, without the splits proverb-translation." in notes


def test_the_papers_value_is_compared_with_the_metric_as_published(add, tmp_path):
    path = add(task="popqa", model=LLAMA, items=4, right=2)
    # A demonstration counts in the published metric only: 1 of 3 is right, as published 2 of 4.
    path.write_text(path.read_text().replace('"index": 0,', '"index": 0, "demonstration": true,'))
    texts, notes = table(frame_of(tmp_path), "Factuality")
    assert texts["greedy", "PopQA answer contained"] == "33.3 [0.0, 100.0]; paper 26.64† (+23.4)"
    assert "answer contained: the answer contains a reference. The paper calls this EM." in notes


def test_judged_answers_have_columns_without_rejections(add, tmp_path):
    path = add(task="truthfulqa-gen", model=LLAMA, items=2, right=2)
    path.write_text(path.read_text().replace(" Alaria.", " I have no comment.", 1))
    verdicts = []
    for kind, key in itertools.product(("truth", "info"), ("0: I have no comment.", "1: Alaria.")):
        verdicts.append({"judge": kind, "model": "t", "yes": 1, "key": key})
    write_lines(path.with_suffix(".judged.jsonl"), verdicts)
    compress(path)
    texts, notes = table(frame_of(tmp_path), "Factuality")
    text = texts["greedy", "TruthfulQA (Gen) %T∩¬Reject"]
    assert text.startswith("100.0 [") and "paper 65.5 (+34.5)" in text
    assert "1 of 1 runs: judged by t;" in notes


# Settings


MISTRAL = {"model": "Mistral-7B-Instruct-v0.3"}
DOLA = {"method": "dola-low", "dola_layers": "halves"}
QWEN_DOLA = {"method": "dola-low", "model": "Qwen2-7B-Instruct"}


@pytest.mark.parametrize(
    "header, text",
    [
        ({"max_new_tokens": 50, "layout": "plain"}, "layout plain, max new tokens 50; "),
        (MISTRAL | {"layout": "chat"}, "layout chat; "),
        (MISTRAL | {"layout": "mistral", "template_args": {}}, "; "),
        ({"method": "ad", "info_layer": 12}, "; info layer 12"),
        (DOLA, "; dola layers halves"),
        (DOLA | {"task": "memotrap"}, "; "),
        (QWEN_DOLA, "; repetition penalty 1.0"),
        (QWEN_DOLA | {"repetition_penalty": 1.05}, "; "),
    ],
)
def test_settings_that_are_not_the_papers_are_named(header, text):
    run = described(**{"task": "popqa"} | header)
    assert f"{run.conditions}; {run.setup.options}" == text


def test_other_conditions_have_tables_of_their_own_and_other_options_lines(add, tmp_path, call):
    add(right=10, max_new_tokens=50, command="evaluate.py --a")
    add("masked", 2, right=30, max_new_tokens=50)
    for mask in ("output", "query"):
        add("masked", 2, mask=mask)
    for name in ("small", "tiny"):
        add("decore-entropy-lite", 2, amateur=f"models/{name}")
    add(model=f"mine/{ITI}")
    _, out, _ = call(evaluate.main, "report", tmp_path, "--commands")
    parts = dict(part.split("\n", 1) for part in out.split("### ")[1:])
    setups = ["ITI", "masked, N = 2", "masked, N = 2, query mask"]
    setups += [f"DeCoRe entropy-lite, N = 2, amateur {name}" for name in ("small", "tiny")]
    for setup in setups:
        assert f"| {setup} " in parts[f"{GROUP}: miniature"], setup
    assert "| masked, N = 2 | **75.0**; +50.0 [" in parts[f"{GROUP}: miniature, max new tokens 50"]
    assert "* `python evaluate.py --a`: 0.jsonl\n" in parts["Commands"]


def test_csv_has_a_line_per_run_and_metric(add, call, tmp_path):
    add("masked", 2, right=30)
    add()
    _, out, _ = call(evaluate.main, "report", tmp_path, "--csv")
    lines = pd.read_csv(io.StringIO(out)).set_index(["run", "metric"])
    names = ["method", "num_heads", "seed", "n", "value", "low", "versus_difference", "versus_won"]
    line = lines.loc[("0.jsonl", "exact_match"), names]
    assert [*line] == ["masked", 2, 1234, 40, 75.0, 62.5, 25.0, 10]
    assert lines["value"]["0.jsonl", "entropy"] < 0.2


# Files and programs


def test_an_unfinished_run_is_reported_and_a_shorter_one_of_its_setup_is_not(add, call, tmp_path):
    path = add()
    path.write_text(path.read_text()[:-40])  # as a kill leaves it
    shorter = add(items=35)
    compress(shorter)
    status, out, err = call(evaluate.main, "report", tmp_path)
    assert status == 0 and "1 of 1 runs: 0.jsonl is unfinished, 39 of 40." in out
    assert "1.jsonl.gz: the same setup as" in err


@pytest.mark.parametrize(
    "changes, words",
    [
        (None, "its first line has no header"),
        ({"task": "chess"}, "unknown task 'chess'"),
        ({"method": 5.5}, "unknown method 5.5"),
        ({"version": -1}, "made with version -1"),
        ({"seed": "x"}, "'seed' of its header is \"x\""),
        ({"data": [5]}, "'int' object"),
        ({"entropies": ["x"]}, "'entropies' should be a list of numbers"),
    ],
)
def test_a_file_that_cannot_be_reported_costs_one_line(add, call, tmp_path, changes, words):
    add("masked", 2)
    path = add()
    header, first, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    if changes:
        header["header"] |= changes
        write_lines(path, [header, first | changes, *rest])
    else:
        write_lines(path, rest)
    status, out, err = call(evaluate.main, "report", tmp_path)
    assert status == 0 and "| masked, N = 2" in out
    assert err.startswith(f"skipped: {path}: ") and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "without, arguments, status, words",
    [
        ("nothing", ["EMPTY"], 2, "EMPTY: no runs to report"),
        ("matplotlib", ["RUNS"], 0, f"### {GROUP}"),
        ("matplotlib", ["RUNS", "--plots", "x"], 2, "pip install pandas matplotlib"),
        ("pandas", ["heads", "--help"], 0, "usage: evaluate.py report heads [-h]"),
    ],
)
def test_the_program_needs_a_library_only_where_it_uses_it(
    sweep, without, arguments, status, words
):
    code = (
        f"import sys; sys.modules['{without}'] = None; import cli, evaluate\n"
        "sys.argv = ['evaluate.py', 'report', *sys.argv[1:]]; "
        "sys.exit(cli.run_program(evaluate.main))"
    )
    arguments = [sweep if text == "RUNS" else text for text in arguments]
    program = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True
    )
    assert program.returncode == status and words in program.stdout + program.stderr


# Figures


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning", "error::FutureWarning")
def test_figures_show_and_name_their_runs(call, sweep, tmp_path, monkeypatch, frame):
    monkeypatch.setitem(matplotlib.rcParams, "savefig.dpi", 60)
    status, out, _ = call(evaluate.main, "report", sweep, "--plots", tmp_path)
    assert status == 0 and len([*tmp_path.iterdir()]) == len(figures.FIGURES)
    for kind in figures.FIGURES:
        assert f"/{kind}-miniature-other-tasks.png)" in out
        foot = " ".join(draw(kind, frame).get_supxlabel().split())
        assert "n: miniature 40" in foot and "commit: 01234567" in foot
        assert ("seeds of random heads: 0, 1, 2" in foot) == (kind == "heads")


def test_lines_of_a_figure_against_n_can_be_told_apart(add, tmp_path):
    run = {"task": "nq-swap", "model": LLAMA}
    add(**run)
    for n in (10, 20):
        add("masked", n, right=18, **run)
        add("masked", n, random_heads="published", **run)
    add("masked", 10, random_heads="uniform", **run)  # a control, though it has a single N
    add("masked", 10, mask="query", **run)  # a single N is not a line
    [ax] = draw("heads", frame_of(tmp_path)).axes
    looks = {}
    for line in ax.lines:
        looks[line.get_label()] = line.get_color(), line.get_marker(), line.get_linestyle()
    expected = [
        "greedy",
        "masked",
        "masked, random heads",
        "masked, random heads as published",
        "the paper: masked",
        "the paper: masked-random",
    ]
    assert sorted(looks) == expected and len({*looks.values()}) == len(expected)
    assert [label for label in expected if looks[label][2] == "--"] == expected[2:4]


def test_decore_static_has_a_line_over_alpha_per_n(frame):
    [ax] = draw("alpha", frame).axes
    [line] = [line for line in ax.lines if line.get_label() == "DeCoRe static, N = 4"]
    assert [*line.get_ydata()] == [50, 50, 70]
    assert line.get_xdata() == pytest.approx([0, 0.5, 2], abs=0.05)  # beside the other lines
    low, high = ax.collections[2].get_paths()[2].vertices[:, 1]
    assert (low, high) == pytest.approx((60, 82.5))  # 50 and +20 [+10.0, +32.5]


def test_runs_without_data_for_a_figure_have_none(add, tmp_path):
    add(right=40)
    assert [kind for kind in figures.FIGURES if draw(kind, frame_of(tmp_path))] == []


def test_retrieval_scores_by_rank_are_the_papers(call):
    status, out, err = call(evaluate.main, "report", "heads")
    lines = [re.findall(r"0\.\d{4}", line) for line in out.splitlines()[4:14]]
    assert (status, err) == (0, "") and [*map(len, lines)] == [11] * 10
    assert lines[::2] == lines[1::2]


def test_heads_in_common_are_counted_between_files_of_a_measure_and_measures_of_a_file(
    call, tmp_path, monkeypatch
):
    monkeypatch.setattr("paper.report.heads.COMPARED", (1, 3))
    ranked = ["0-0", "0-1", "1-0", "1-1"]
    for name, copied in (("a", ranked), ("b", [*ranked[1:], "0-0"])):
        scores = [dict(zip(heads, (0.9, 0.5, 0.3, 0.1))) for heads in (copied, ranked[::-1])]
        content = dict(zip(("scores", "write"), scores))
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    a, b = (str(tmp_path / f"{name}.json") for name in "ab")
    _, out, _ = call(evaluate.main, "report", "heads", a, b)
    rows = [re.split(r" *\| *", line)[1:4] for line in out.split("### ")[2].splitlines()[4:8]]
    assert rows == [
        [f"{a} copy and {a} write", "0", "2"],
        [f"{a} copy and {b} copy", "0", "2"],
        [f"{a} write and {b} write", "1", "3"],
        [f"{b} copy and {b} write", "0", "3"],
    ]


def test_a_map_of_heads_has_layer_0_at_the_bottom_and_whole_numbers(tmp_path):
    scores = {(0, 0): 0.5, (0, 1): 0.25, (1, 0): 0, (1, 1): 1}
    ax = figures.head_maps({tmp_path: scores}).axes[0]
    [image] = ax.images
    assert image.origin == "lower"
    assert image.get_array().tolist() == [[0.5, 0.25], [0, 1]]
    assert all(tick == int(tick) for tick in [*ax.get_xticks(), *ax.get_yticks()])
