"""Reports on stored runs: tables with the paper's values, statistics, figures, skipped files."""

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
from matplotlib.image import imread
from scipy.stats import ttest_ind

import evaluate
from heads import load_scores
from paper import printed
from paper.report import figures, significance, stored, tables
from paper.report.frame import make_frame, typical
from paper.tasks import TASKS
from tests.checkpoints import write_lines

TASK, LLAMA = "miniature", "meta-llama/Meta-Llama-3-8B-Instruct"
ITI, OTHER = "miniature-iti", [{"file": "other.jsonl"}]


def write_run(folder, method="greedy", n=None, alpha=None, task=TASK, items=40, right=20, **more):
    """A made-up run in evaluate.py's format; the first `right` answers are correct."""
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
    for i in range(items):
        h = 0.1 + 0.01 * (i % 7) + (0 if i < right else 0.05)
        line = {"index": i, "references": ["Alaria"], "memory": ["Bodun"], "entropies": [h, h]}
        lines.append(line | {"prediction": " Alaria." if i < right else " Bodun."})
    return write_lines(folder / f"{len([*folder.iterdir()])}.jsonl", lines)


def described(**header):
    return stored.describe({"model": LLAMA, "method": "decore-entropy"} | header)


@pytest.fixture(scope="module", autouse=True)
def iti():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stored.ITI, ITI, "miniature")
        yield


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


# Statistics


def test_a_logistic_fit_does_not_depend_on_the_unit():
    # x = 0: 3 of 4 right, x = 1: 1 of 4. The fit meets both shares, so its slope is ln(1/3) − ln 3,
    # and R² = 1 − (6 ln 0.75 + 2 ln 0.25) / (8 ln 0.5).
    x = np.repeat([0.0, 1.0], 4)
    right = np.array([1, 1, 1, 0, 0, 0, 0, 1]) == 1
    for unit in (1, 1e-5):
        expected = np.log(3), -2 * np.log(3) / unit, 0.188722
        assert significance.logistic(x * unit, right) == pytest.approx(expected, abs=1e-5)
    assert significance.logistic(np.arange(8), x == 0) is None  # separated


def test_58_of_the_papers_60_values_of_random_heads_are_means_of_three_draws():
    sizes = {"mc1": 817, "instruction_strict_published": 834, "prompt_strict_published": 541}
    fits = []
    for row in printed.table("paper"):
        if row["method"].endswith("-random") and row["metric"] in sizes:
            value, n = float(row["value"]), 3 * sizes[row["metric"]]
            fits.append(abs(100 * round(value / 100 * n) / n - value) <= 0.005)
    assert (sum(fits), len(fits)) == (58, 60)


def test_entropies_are_tested_against_greedy_iti_and_dola(frame):
    texts, _ = table(frame, "Base entropy, nats")
    assert (texts["DoLa low", "n"], texts["DoLa low", "mean ± std"]) == ("12", "0.167 ± 0.032")
    # DoLa's run has another length, so the two tests differ.
    method = "DeCoRe entropy, N = 4"
    samples = [
        frame["run"][frame["setup"] == name].iloc[0].entropies for name in (method, "DoLa low")
    ]
    for name, equal in (("Welch t, p", False), ("equal variances", True)):
        t, p = ttest_ind(*samples, equal_var=equal, alternative="less")
        expected = f"{t:+.2f}, {significance.p_text(p)}"
        assert texts[method, f"{name} (below DoLa low)"] == expected
        assert "p =" in texts[method, f"{name} (below greedy)"]
        assert "p =" in texts[method, f"{name} (below ITI)"]
    assert texts["ITI", "Welch t, p (below ITI)"] == "–"
    texts, _ = table(frame, "Base entropy of correct")
    assert texts["greedy", "correct / incorrect"] == "20 / 20"
    assert texts["greedy", "nats, mean"] == "0.129 / 0.179"
    assert texts["greedy", "Welch t, p"].startswith("+7.9")
    assert texts["greedy", "pseudo-R²"] == "0.689"


def test_an_answer_of_musique_is_right_if_its_generation_holds_a_reference(add, tmp_path):
    path = add(task="musique-cot-open", model=LLAMA)
    path.write_text(path.read_text().replace(" Alaria.", "Alaria, but the answer is: Bodun."))
    texts, _ = table(frame_of(tmp_path), "Base entropy of correct")
    assert texts["greedy", "correct / incorrect"] == "20 / 20"


# Tables of scores


def test_draws_share_a_line_and_the_best_values_are_marked(frame):
    texts, notes = table(frame, "Other tasks")
    for setup, text in (
        ("masked, N = 4, random heads", "42.5 ± 2.5 (40.0 to 45.0, 3 draws)"),
        ("DeCoRe entropy, N = 4", "**80.0** [67.5, 90.0]"),
        ("DeCoRe static, N = 4, α = 2", "_70.0_ [55.0, 82.5]"),
    ):
        assert texts[setup, "miniature"] == text
    # More answers from memory are not better: no best value.
    assert sum("**" in text for text in texts.values()) == 1
    texts, _ = table(frame, "Score against")
    assert texts["masked", "N"] == "1, 2, 4"
    # Greedy is the point N = 0 of masked models only.
    r = np.corrcoef([0, 1, 2, 4], [50, *[42.5] * 3])[0, 1]
    assert texts["masked, random heads", "Pearson r"] == f"{r:+.2f}"
    assert texts["DeCoRe entropy", "Pearson r"] == "+1.00"  # with greedy it would be 0.96


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
    metric = {"ifeval": "prompt_strict_published"}.get(task, "substring_match_published")
    assert printed.text(printed.cell(described(task=task, **header), metric)) == text


def test_every_cell_of_the_paper_has_a_column():
    for row in printed.table("paper"):
        _, columns = printed.TASKS[row["task"]]
        assert row["metric"].removesuffix("_published") in [*columns, "entropy"]


def test_the_papers_own_tests_are_noted_with_doubts():
    [note] = printed.tests("meta-llama-3-8b-instruct", ["musique-cot-open"])
    assert "MuSiQue CoT open book, greedy, t-test statistic 11.75;" in note
    assert "R² of correctness on length-normalised entropy 0.98 (implausible" in note


def test_variants_are_labelled_by_dtype_and_inputs_and_each_has_the_papers_value(add, tmp_path):
    own = {"source": "file", "file": "demos.jsonl", "sha256": "ab12cd34", "paper": False}
    for dtype, demos in itertools.product(("bfloat16", "float32"), (own, {"paper": True})):
        add(task="nq-swap", model=LLAMA, dtype=dtype, demos=demos)
    add(task="nq-open", model=LLAMA, data=OTHER)
    texts, notes = table(frame_of(tmp_path), "Faithfulness")
    for dtype in ("bfloat16", "float32"):
        for demos in ("demonstrations: file demos.jsonl ab12cd", "the paper's demonstrations"):
            assert "; paper 60.62 (-10.6)" in texts[f"greedy, {dtype}, {demos}", "NQ-Swap EM"]
    assert "; paper" in texts["greedy", "NQ-Open EM"]  # one variant of its task: no label
    assert "in bfloat16, these in bfloat16, float32" in notes
    assert "4 of 5 runs: nq-swap, 40 items of 4,746." in notes
    assert "2 of 5 runs: nq-swap, demonstrations other than the paper's." in notes


def test_entropies_of_runs_of_another_dtype_or_engine_are_tested_and_it_is_said(add, tmp_path):
    add(dtype="bfloat16")
    add(dtype="float16", model=ITI)
    add("decore-entropy", 2, dtype="bfloat16", engine="transformers", right=30)
    add(dtype="bfloat16", engine="transformers", right=19)
    add("dola-low", dtype="bfloat16", data=OTHER, right=19)
    frame = frame_of(tmp_path)
    texts, _ = table(frame, "Base entropy, nats")
    setup = "DeCoRe entropy, N = 2, bfloat16, transformers engine"
    assert texts[setup, "Welch t, p (below ITI)"] == "-1.79, p = .039 (float16, own engine)"
    assert texts[setup, "Welch t, p (below greedy)"] == "-1.94, p = .028"
    assert texts[setup, "Welch t, p (below DoLa low)"] == "–"  # of other data
    scores, notes = table(frame, "Other tasks")
    assert scores["greedy, bfloat16, transformers engine", "miniature"][:4] == "47.5"
    assert "EM:" not in notes


def test_the_papers_value_is_compared_with_the_metric_as_published(add, tmp_path):
    path = add(task="popqa", model=LLAMA, items=4, right=2)
    # A demonstration counts in the published metric only: 1 of 3 is right, as published 2 of 4.
    path.write_text(path.read_text().replace('"index": 0,', '"index": 0, "demonstration": true,'))
    texts, notes = table(frame_of(tmp_path), "Factuality")
    assert texts["greedy", "PopQA EM"] == "33.3 [0.0, 100.0]; paper 26.64† (+23.4)"
    assert "EM: the answer contains a reference." in notes


def test_judged_answers_have_columns_without_rejections(add, tmp_path):
    path = add(task="truthfulqa-gen", model=LLAMA, items=2, right=2)
    path.write_text(path.read_text().replace(" Alaria.", " I have no comment.", 1))
    verdicts = []
    for kind, key in itertools.product(("truth", "info"), ("0: I have no comment.", "1: Alaria.")):
        verdicts.append({"judge": kind, "model": "t", "yes": 1, "key": key})
    write_lines(path.with_suffix(".judged.jsonl"), verdicts)
    texts, notes = table(frame_of(tmp_path), "Factuality")
    text = texts["greedy", "TruthfulQA (Gen) %T∩¬Reject"]
    assert text.startswith("100.0 [") and "paper 65.5 (+34.5)" in text
    assert "1 of 1 runs: judged by t;" in notes


# Settings


def test_the_typical_setup_has_the_papers_options_its_alpha_and_its_n(add, tmp_path):
    for task in (TASK, "nq-open", "nq-closed"):
        add("decore-static", 1, 0.5, task, scale_alpha=True)
        add("decore-static", 2, 2.0, task)
    add("decore-static", 4, 0.5)
    assert {*typical(frame_of(tmp_path))["num_heads"]} == {4}
    for n in (1, 5, 10, 90):
        add("decore-entropy", n, task="xsum", model=LLAMA)
        add("masked", n, task="nq-swap", model=LLAMA)
    frame = frame_of(tmp_path)
    lines = typical(frame[frame["model"] != "miniature"])
    # Every N has one run: 90 is the paper's N, 10 the default.
    setups = {*zip(lines["method"], lines["num_heads"])}
    assert setups == {("decore-entropy", 90), ("masked", 10)}


MISTRAL = {"model": "Mistral-7B-Instruct-v0.3"}
DOLA = {"method": "dola-low", "dola_layers": "halves"}
QWEN_DOLA = {"method": "dola-low", "model": "Qwen2-7B-Instruct"}


@pytest.mark.parametrize(
    "header, text",
    [
        ({"max_new_tokens": 50, "layout": "plain"}, "layout plain, max new tokens 50; "),
        ({"max_new_tokens": 12, "template_args": {"enable_thinking": False}}, "; "),
        (MISTRAL | {"layout": "chat"}, "layout chat; "),
        (MISTRAL | {"layout": "mistral", "template_args": {}}, "; "),
        ({"method": "ad", "info_layer": 12}, "; info layer 12"),
        ({"alpha_cap": 0.5, "renormalise": False}, "; alpha cap 0.5, renormalise False"),
        (DOLA, "; dola layers halves"),
        (DOLA | {"task": "memotrap"}, "; "),
        (QWEN_DOLA, "; repetition penalty 1.0"),
        (QWEN_DOLA | {"repetition_penalty": 1.05}, "; "),
        ({"heads": ["24-27", "15-30"]}, "; "),
        ({"heads": ["15-30", "0-0"]}, "; heads of another file"),
        ({"heads": ["0-0"], "random_heads": "uniform"}, "; "),
        ({"heads": ["0-0"], "model": "unknown"}, "; "),
    ],
)
def test_settings_that_are_not_the_papers_are_named(header, text):
    run = described(**{"task": "popqa"} | header)
    assert f"{run.conditions}; {run.setup.options}" == text


def test_other_conditions_have_tables_of_their_own_and_other_options_lines(add, tmp_path, call):
    add(right=10, max_new_tokens=50)
    add("masked", 2, right=30, max_new_tokens=50)
    for mask, n in itertools.product(("output", "query"), (1, 2, 4)):
        add("masked", n, mask=mask, right=10 + n)
    for name in ("small", "tiny"):
        add("decore-entropy-lite", 2, amateur=f"models/{name}")
    add(model=f"mine/{ITI}")
    status, out, _ = call(evaluate.main, "report", tmp_path)
    parts = dict(part.split("\n", 1) for part in out.split("### ")[1:])
    setups = ["ITI", "masked, N = 2", "masked, N = 2, query mask"]
    setups += [f"DeCoRe entropy-lite, N = 2, amateur {name}" for name in ("small", "tiny")]
    for title in ("Other tasks", "Base entropy, nats per token"):
        for setup in setups:
            assert f"| {setup} " in parts[f"{title}: miniature"], (title, setup)
    assert parts["Score against the number of masked heads: miniature"].count("| masked") == 2
    longer = parts["Other tasks: miniature, max new tokens 50"]
    assert status == 0 and "| masked, N = 2 | **75.0** [60.0, 87.5]" in longer


def test_csv_has_a_line_per_run_and_metric(add, call, tmp_path):
    add("masked", 2, right=30)
    _, out, _ = call(evaluate.main, "report", tmp_path, "--csv")
    lines = pd.read_csv(io.StringIO(out)).set_index("metric")
    line = lines.loc["exact_match", ["run", "method", "num_heads", "seed", "n", "value", "low"]]
    assert [*line] == ["0.jsonl", "masked", 2, 1234, 40, 75.0, 60.0]
    assert lines["value"]["entropy"] < 0.2


# Files and programs


def test_an_unfinished_run_is_reported_and_a_shorter_one_of_its_setup_is_not(add, call, tmp_path):
    path = add()
    path.write_text(path.read_text()[:-40])  # as a kill leaves it
    shorter = add(items=35)
    shorter.with_suffix(".jsonl.gz").write_bytes(gzip.compress(shorter.read_bytes()))
    shorter.unlink()
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
        ("matplotlib", ["RUNS"], 0, "### Other tasks"),
        ("matplotlib", ["heads"], 0, "### Retrieval scores by rank"),
        ("matplotlib", ["RUNS", "--plots", "x"], 2, "pip install pandas scipy statsmodels"),
        ("pandas", ["--help"], 0, "usage: evaluate.py report [-h]"),
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
        colours = imread(tmp_path / f"{kind}-miniature-other-tasks.png")[..., :3]
        assert (colours.min(-1) < 0.98).mean() > 0.02  # not blank
        assert f"/{kind}-miniature-other-tasks.png)" in out
        foot = " ".join(draw(kind, frame).get_supxlabel().split())
        assert "n: miniature 40" in foot and "commit: 01234567" in foot
        assert ("seeds of random heads: 0, 1, 2" in foot) == (kind == "heads")


def test_lines_of_a_figure_against_n_can_be_told_apart(add, tmp_path):
    run = {"task": "nq-swap", "model": LLAMA}
    add(**run)
    for n in (10, 20):
        add("masked", n, right=18, **run)
        for sampler in ("uniform", "published"):
            add("masked", n, random_heads=sampler, **run)
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
    lines = {line.get_label(): dict(line.get_xydata().tolist()) for line in ax.lines[:3]}
    assert lines["DeCoRe static, N = 4"] == {0.0: 50, 0.5: 50, 2.0: 70}


def test_all_bars_of_the_correctness_figure_are_inside(frame):
    *_, right = draw("correctness", frame).axes
    ends = [bar.get_x() + bar.get_width() for bar in right.patches]
    assert max(ends) < 0.99 * right.get_xlim()[1]


def test_runs_without_data_for_a_figure_have_none(add, tmp_path):
    add(right=40)
    assert [kind for kind in figures.FIGURES if draw(kind, frame_of(tmp_path))] == ["entropy"]


def test_retrieval_scores_by_rank_are_the_papers(call):
    status, out, err = call(evaluate.main, "report", "heads")
    lines = [re.findall(r"0\.\d{4}", line) for line in out.splitlines()[4:14]]
    assert (status, err) == (0, "") and [*map(len, lines)] == [11] * 10
    assert lines[::2] == lines[1::2]


def test_a_map_of_heads_has_layer_0_at_the_bottom(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"scores": {"0-0": 0.5, "0-1": 0.25, "1-0": 0, "1-1": 1}}))
    [image] = figures.head_maps({path: load_scores(path)}).axes[0].images
    assert image.origin == "lower"
    assert image.get_array().tolist() == [[0.5, 0.25], [0, 1]]
