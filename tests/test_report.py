"""The report on stored runs: statistics by hand, tables in the paper's layout, pictures that are not blank."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cli
import evaluate
from report import figures, published, significance, stored, tables
from tasks import TASKS

TASK = "miniature-conflict"


def write_run(folder, method="greedy", n=None, alpha=None, random=None, seed=1234, task=TASK, items=40, right=20,
              model="miniature", name=None, **more):
    """A made-up run in evaluate.py's format: the first `right` of its items are answered rightly."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"task": task, "version": TASKS[task].version, "n": items, "model": model, "method": method,
                "num_heads": n, "random_heads": random, "seed": seed, "amateur": None, "mask": "output" if n else None,
                "dtype": "float32", "commit": "0123456789abcdef", "date": "2024-12-31"}
    settings |= ({"alpha": alpha} if alpha is not None else {}) | more
    lines = [{"settings": settings}]
    for i in range(items):
        h = 0.1 + 0.01 * (i % 7) + (0 if i < right else 0.05)
        lines.append({"index": i, "id": str(i), "prompt_sha256": f"p{i}", "references": ["Alaria"], "memory": ["Bodun"],
                      "prediction": " Alaria." if i < right else " Bodun.", "ids": [1, 2], "alphas": [0.0, 0.0],
                      "entropies": [h, h], "stop": "eos", "seconds": 0.01})
    path = folder / f"{name or f'{task}.{method}.{n}.{alpha}.{random}.{seed}'}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_sweep(folder):
    """Runs of every kind: greedy, sweeps over N and α, random draws."""
    write_run(folder)
    for n in (1, 2, 4):
        write_run(folder, "masked", n, right=20 - 4 * n)
        write_run(folder, "decore-entropy", n, right=20 + 3 * n)
        for alpha in (0.0, 0.5, 2.0):
            write_run(folder, "decore-static", n, alpha, right=20 + round(alpha) * n)
        for seed in range(3):
            write_run(folder, "masked", n, random="uniform", seed=seed, right=18 - seed)
            write_run(folder, "decore-entropy", n, random="uniform", seed=seed, right=19 + seed)
    return folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("sweep"))


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "report", *map(str, args)])
        return cli.run(evaluate.main), *capsys.readouterr()
    return run


# Statistics, by hand

def test_pearson_of_four_points():
    # means 2.5 and 3; Σ dx·dy = 5, Σ dx² = 5, Σ dy² = 10 → 5 / √50
    assert significance.pearson([1, 2, 3, 4], [1, 4, 2, 5]) == pytest.approx(5 / 50 ** 0.5)
    assert significance.pearson([1, 2], [1, 2]) is None and significance.pearson([1, 2, 3], [5, 5, 5]) is None


def test_t_tests_of_unequal_groups():
    # means 2 and 5; variances 1 and 20/3 of 3 and 4 numbers
    a, b = [1, 2, 3], [2, 4, 6, 8]
    welch = significance.t_test(a, b, "less")
    assert welch.statistic == pytest.approx(-3 / (1 / 3 + 20 / 12) ** 0.5)
    pooled = (2 * 1 + 3 * 20 / 3) / 5
    student = significance.t_test(a, b, "less", equal_variance=True)
    assert student.statistic == pytest.approx(-3 / (pooled * (1 / 3 + 1 / 4)) ** 0.5)
    assert significance.t_test(a, b).p == pytest.approx(2 * welch.p)
    assert significance.t_test(b, a, "less").p == pytest.approx(1 - welch.p)
    assert welch.p != pytest.approx(student.p)
    assert significance.t_test([1, 2], b) is None


def test_a_t_test_with_four_degrees_of_freedom_has_its_p_in_closed_form():
    # equal variances, 3 + 3 numbers: t = −√1.5; with 4 degrees F(t) = 1/2 + (3/8)·u·(1 − u²/12·…), by its closed form
    t = significance.t_test([1, 2, 3], [2, 3, 4], "less", equal_variance=True)
    x = abs(t.statistic) / (1 + t.statistic ** 2 / 4) ** 0.5
    assert t.statistic == pytest.approx(-(1.5 ** 0.5))
    assert t.p == pytest.approx(0.5 - 0.375 * x * (1 - x ** 2 / 12))


def test_u_counts_pairs():
    # of the nine pairs of 1 4 6 and 2 3 6: 4 > 2, 4 > 3, 6 > 2, 6 > 3, and 6 = 6 counts half
    assert significance.mann_whitney([1, 4, 6], [2, 3, 6]).statistic == 4.5
    assert significance.mann_whitney([4, 5, 6], [1, 2, 3], "greater").p == pytest.approx(1 / 20)   # of C(6, 3) orders


def test_pseudo_r2_of_two_values_of_x():
    # x = 0: 3 of 4 right, x = 1: 1 of 4 right. The fit meets both shares, so its slope is ln(1/3) − ln 3.
    x, right = [0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 1]
    fit = significance.logistic(x, right)
    full = 6 * np.log(0.75) + 2 * np.log(0.25)
    assert fit.pseudo_r2 == pytest.approx(1 - full / (8 * np.log(0.5)), abs=1e-6)
    assert (fit.intercept, fit.slope) == pytest.approx((np.log(3), -2 * np.log(3)), abs=1e-5)
    tiny = significance.logistic(np.array(x) * 1e-5, right)
    assert tiny.pseudo_r2 == pytest.approx(fit.pseudo_r2) and tiny.slope == pytest.approx(fit.slope * 1e5)


def test_separated_answers_have_no_fit():
    assert significance.logistic([1, 2, 3, 4, 5, 6], [1, 1, 1, 0, 0, 0]) is None
    assert significance.logistic([1, 2, 3, 4], [1, 1, 1, 1]) is None


def test_mcnemar_is_a_fair_coin():
    assert significance.mcnemar(0, 0) == 1
    assert significance.mcnemar(5, 0) == significance.mcnemar(0, 5) == 2 / 32
    assert significance.mcnemar(3, 1) == 2 * (1 + 4) / 16
    assert significance.mcnemar(2, 2) == 1
    assert significance.mcnemar(1000, 0) < 1e-300


# Tables

def table(folder, title, markdown=False, iti=stored.ITI):
    runs, _ = stored.collect(folder, iti)
    return next(t for t in tables.all_tables(runs, markdown) if t[0].startswith(title))


def test_random_draws_fold_into_one_row_and_greedy_is_the_other_side(sweep):
    _, header, rows, notes = table(sweep, "Miniature")
    cells = {row[0]: row[1] for row in rows}
    assert header[1] == "conflict (n = 40)" and len(rows) == 1 + 3 + 3 + 9 + 3 + 3
    assert cells["masked, N = 4, random heads"] == "42.5 ± 2.0 (40.0 to 45.0, 3 draws)"
    assert cells["greedy"].startswith("50.0 [")
    assert cells["masked, N = 4"].endswith("0/16, p < .001")
    assert cells["DeCoRe entropy, N = 1"].endswith("3/0, p = .250")
    assert any("McNemar" in note for note in notes)


def test_best_is_bold_and_second_underlined(sweep):
    cells = {row[0]: row[1] for row in table(sweep, "Miniature", markdown=True)[2]}
    assert cells["DeCoRe entropy, N = 4"].startswith("**80.0** ")
    assert cells["DeCoRe static, N = 4, α = 2"].startswith("<u>70.0</u> ")
    assert sum("**" in cell for cell in cells.values()) == 1


def test_memory_has_no_best(sweep):
    assert not any(mark in row[2] for row in table(sweep, "Miniature")[2] for mark in "*_;")


def test_examples_pair_by_prompt_not_by_place(tmp_path):
    write_run(tmp_path, right=20)
    path = write_run(tmp_path, "masked", 2, right=30)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[11:]]) + "\n")      # without the first ten, which both have right
    runs, _ = stored.collect(tmp_path)
    masked, greedy = sorted(runs, key=lambda run: run.settings["method"] == "greedy")
    assert stored.won_and_lost(masked, greedy, "exact_match")[:2] == (10, 0)
    path.write_text("\n".join([lines[0], *(line.replace(': "p', ': "other') for line in lines[1:])]) + "\n")
    runs, _ = stored.collect(tmp_path)
    masked, greedy = sorted(runs, key=lambda run: run.settings["method"] == "greedy")
    assert stored.won_and_lost(masked, greedy, "exact_match") is None


def test_a_masked_models_correlation_counts_greedy_and_decores_does_not():
    points = {1: [40.0, 44.0], 2: [30.0], 4: [36.0]}
    with_greedy, without = np.corrcoef([1, 2, 4, 0], [42, 30, 36, 50]), np.corrcoef([1, 2, 4], [42, 30, 36])
    assert tables.correlation("masked", points, 50.0) == pytest.approx(with_greedy[0, 1])
    assert tables.correlation("decore-entropy", points, 50.0) == pytest.approx(without[0, 1])


def test_entropy_tests_compare_with_greedy_one_sided(sweep):
    _, header, rows, _ = table(sweep, "Base entropy, nats")
    runs = {str(run.setup): run for run in stored.collect(sweep)[0]}
    row = next(row for row in rows if row[1].startswith("DeCoRe entropy"))
    ours, theirs = stored.base_entropies(runs[row[1]]), stored.base_entropies(runs["greedy"])
    welch, equal = (significance.t_test(ours, theirs, "less", variances) for variances in (False, True))
    for name, test in (("Welch t, p (below greedy)", welch), ("equal variances", equal)):
        assert row[header.index(name)] == f"{test.statistic:+.2f}, {tables.p_value(test.p)}"
    assert welch.statistic < 0 and welch.p < 0.5
    assert ours.mean() == pytest.approx(np.mean([0.1 + 0.01 * (i % 7) + 0.05 * (i >= 23) for i in range(40)]))


def test_wrong_answers_have_the_higher_entropy(sweep):
    row = next(row for row in table(sweep, "Base entropy of correct")[2] if row[1] == "greedy")
    assert row[2] == "20 / 20" and row[3] == "0.129 / 0.179" and row[4].startswith("+7.9")
    assert float(row[-1]) > 0.5


def test_the_papers_value_stands_beside_the_run_of_its_cell(tmp_path):
    name = "meta-llama/Meta-Llama-3-8B-Instruct"
    write_run(tmp_path, task="popqa", model=name, right=12)
    write_run(tmp_path, "decore-entropy", 10, task="popqa", model=name, right=12)
    write_run(tmp_path, "decore-entropy", 10, random="published", task="popqa", model=name, right=12)
    cells = {row[0]: row[1] for row in table(tmp_path, "Factuality: Meta-Llama-3-8B-Instruct")[2]}
    rows = {(row["method"], row["num_heads"]): row for row in published.table("paper")
            if (row["task"], row["model"]) == ("popqa", "Meta-Llama-3-8B-Instruct")}
    greedy, random = rows["greedy", ""], rows["decore-random", "10"]
    assert f"paper {float(greedy['value']):g}† ({30 - float(greedy['value']):+.1f})" in cells["greedy"]
    assert f"paper {float(random['value']):g}" in cells["DeCoRe entropy, N = 10, random heads as published"]
    assert f"paper {float(rows['decore-entropy', '10']['value']):g}" in cells["DeCoRe entropy, N = 10"]


def test_csv_has_the_comparison_with_greedy(call, sweep):
    _, out, _ = call(sweep, "--csv")
    rows = [line.split(",") for line in out.splitlines()]
    at = {name: i for i, name in enumerate(rows[0])}
    row = next(r for r in rows if r[0] == f"{TASK}.masked.4.None.None.1234.jsonl" and r[at["metric"]] == "exact_match")
    assert (row[at["won"]], row[at["lost"]]) == ("0", "16") and float(row[at["mcnemar_p"]]) < 0.001


# What is left out

def test_missing_partial_foreign_and_empty_runs_are_named(call, tmp_path):
    write_run(tmp_path)
    cut = write_run(tmp_path, "masked", 1, name="cut")
    cut.write_text(cut.read_text()[:-40])                               # a run that a kill ended
    write_run(tmp_path, "masked", 2, name="unknown", task=TASK).write_text(
        json.dumps({"settings": {"task": "chess", "model": "m", "method": "greedy", "n": 1}}) + "\n")
    write_run(tmp_path, "masked", 2, name="old", version=-1)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "begun.jsonl").write_text(write_run(tmp_path, name="x").read_text().splitlines()[0] + "\n")
    (tmp_path / "foreign.jsonl").write_text('{"question": "Who?"}\n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "text.jsonl").write_text("hello\nthere\n")
    (tmp_path / "damaged.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 not a gzip")
    (tmp_path / "notes.txt").write_text("not read")
    (tmp_path / "sub").mkdir()
    status, out, err = call(tmp_path)
    left = [line for line in err.splitlines() if line.startswith("left out")]
    for name in ("unknown", "old", "empty", "begun", "foreign", "list", "text", "damaged", "x"):
        assert sum(f"/{name}.jsonl" in line.split(": ")[1] for line in left) == 1, name
    assert status == 0 and len(left) == 9 and "Traceback" not in err
    assert "(39 of 40)" in out and "notes" not in err


def test_folders_without_runs_are_errors(call, tmp_path):
    assert call(tmp_path)[0] == 2
    status, _, err = call(tmp_path / "nowhere")
    assert status == 2 and "no such folder" in err and len(err.splitlines()) == 1


def test_compressed_runs_are_read(tmp_path):
    path = write_run(tmp_path)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    runs, left_out = stored.collect(tmp_path / "packed")
    assert not left_out and runs[0].means == stored.collect(tmp_path)[0][-1].means


# Pictures

def ink(path):
    """Share of pixels that are not white, and the number of different colours."""
    from matplotlib.image import imread
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    return (pixels.min(-1) < 250).mean(), len(np.unique(pixels.reshape(-1, 3), axis=0)), pixels.shape


def test_pictures_are_drawn_without_a_screen_and_are_not_blank(call, sweep, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(figures, "DPI", 60)
    status, out, err = call(sweep, "--plots", tmp_path / "pics", "--markdown")
    names = {path.name for path in (tmp_path / "pics").iterdir()}
    assert status == 0, err
    assert names == {f"{kind}-miniature.png" for kind in figures.FIGURES} | {"head-curves.png", "head-maps.png"}
    for name in names:
        share, colours, (height, width, _) = ink(tmp_path / "pics" / name)
        assert share > 0.02 and colours > 50 and width == round(figures.WIDTH * figures.DPI) and height > 120, name
        assert f"](pics/{name})" in out


def test_small_print_says_what_a_picture_was_made_from(sweep):
    setups = stored.grouped(stored.collect(sweep)[0])[0]["miniature"]
    for draw in figures.FIGURES.values():
        figure, caption = draw("miniature", setups, [TASK])
        text = " ".join(figure.get_supxlabel().split())
        assert "miniature-conflict 40" in text and "commit 01234567" in text, caption
        assert "run on 2024-12-31" in text and "drawn 20" in text, caption
        assert ("seeds of random heads: 0, 1, 2" in text) == (draw is figures.heads_figure)


def test_nothing_to_draw_is_no_picture(tmp_path):
    write_run(tmp_path, right=40)
    setups = stored.grouped(stored.collect(tmp_path)[0])[0]["miniature"]
    assert figures.heads_figure("miniature", setups, [TASK]) is None
    assert figures.alpha_figure("miniature", setups, [TASK]) is None
    assert figures.correctness_figure("miniature", setups, [TASK]) is None
    assert figures.entropy_figure("miniature", setups, [TASK]) is not None


def test_without_matplotlib_the_report_says_what_to_install(sweep, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    done = subprocess.run([sys.executable, "evaluate.py", "report", str(sweep), "--plots", str(tmp_path / "pics")],
                          capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "pip install" in done.stderr


# The table of a single run, beside the paper's values

@pytest.fixture
def single(tmp_path):
    """A folder with one run of a published cell, whose values are known, and files that are none."""
    settings = {"task": "ifeval", "version": 1, "model": "meta-llama/Meta-Llama-3-8B-Instruct", "n": 3,
                "method": "decore-static", "num_heads": 10, "alpha": 0.0, "amateur": None, "random_heads": None}
    run = tmp_path / "triviaqa.jsonl"
    lines = [{"index": i, "id": i, "prediction": text, "references": ["ant"], "ids": [1, 2],
              "entropies": [h, 1.0], "seconds": 0.5} for i, (text, h) in enumerate([("ant", 0.0), ("bee", 1.0)])]
    about = {"settings": settings | {"task": "triviaqa", "alpha": 0.5}}
    run.write_text("\n".join(json.dumps(one) for one in [about, *lines]))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "foreign.jsonl").write_text('{"hello": 1}\n')
    (tmp_path / "old.jsonl").write_text(json.dumps({"settings": settings | {"task": "xsum", "version": 0}}) + "\n")
    (tmp_path / "begun.jsonl").write_text(json.dumps({"settings": settings}) + "\n")
    return tmp_path


def test_the_report_shows_runs_beside_the_paper_and_says_what_it_left_out(call, single):
    status, out, err = call(single)
    assert status == 0 and "TriviaQA" in out and "(2 of 3)" in out
    assert "50.0 [0.0, 100.0]; paper 56.93 at N = ? (-6.9)" in out
    assert "0.750 ± 0.250" in out                           # length-normalised: (0.5 + 1.0) / 2, population deviation
    left = {Path(line.split(": ")[1]).name: line for line in err.splitlines()}
    assert set(left) == {"empty.jsonl", "foreign.jsonl", "old.jsonl", "begun.jsonl"}
    assert "version 0 of xsum" in left["old.jsonl"] and "no examples yet" in left["begun.jsonl"]


def test_the_report_writes_csv_and_markdown(call, single):
    _, out, _ = call(single, "--csv")
    header, *rows = out.splitlines()
    assert header.startswith("run,task,model,method,num_heads,alpha,mask,amateur,n,of,metric,value,low,high")
    assert any(",substring_match_published,50.0,0.0,100.0," in row for row in rows)
    _, out, _ = call(single, "--markdown")
    assert out.startswith("### Factuality: Meta-Llama-3-8B-Instruct\n\n| method ")


def paper_cell(metric, **settings):
    """The paper's row for a run with these settings."""
    model, setup = stored.setup_of({"amateur": None} | settings)
    return published.cell(stored.Run(Path("x"), settings, model, setup, [], [], {}, {}), metric)


def test_misprints_of_the_paper_are_put_right_and_marked():
    about = {"task": "ifeval", "model": "x/Meta-Llama-3-8B-Instruct", "method": "decore-static", "num_heads": 10,
             "alpha": 0.0}
    cell = paper_cell("prompt_strict_published", **about)
    assert (cell["value"], cell["printed"]) == ("70.24", "78.30") and cell["note"]
    greedy = about | {"method": "greedy", "alpha": None, "num_heads": None}
    assert paper_cell("prompt_strict_published", **greedy)["value"] == "70.24"
    assert paper_cell("prompt_strict_published", **about | {"model": "other"}) is None


def test_a_run_is_compared_with_the_papers_cell_of_its_n_else_the_other_n_is_said():
    about = {"task": "nq-swap", "model": "Meta-Llama-3-8B-Instruct", "method": "decore-entropy", "num_heads": 20}
    here = paper_cell("substring_match_published", **about)
    assert (here["num_heads"], here["at"]) == ("20", "")
    main = paper_cell("substring_match_published", **about | {"num_heads": 17})
    assert (main["num_heads"], main["value"], main["at"]) == ("", "66.08", " at N = 10")
    either = about | {"num_heads": 17, "model": "Meta-Llama-3-70B-Instruct", "task": "popqa"}
    assert paper_cell("substring_match_published", **either)["at"] == " at N = 10 or 90"
    static = about | {"method": "decore-static", "alpha": 0.5}
    assert paper_cell("substring_match_published", **static)["at"] == " at N = ?"


def test_demonstrations_that_are_not_the_papers_are_said(tmp_path):
    for name, demos in (("popqa", {"source": "first items", "paper": True}), ("nq-swap", {"paper": False}),
                        ("triviaqa", {"hub": "x", "seed": 1}), ("nq-closed", {"file": "demos.jsonl"})):
        write_run(tmp_path, task=name, demos=demos)
    notes = [note for title in ("Factuality", "Faithfulness") for note in table(tmp_path, title)[3]]
    assert [note for note in notes if note.startswith("Demonstrations")] == [
        "Demonstrations other than the paper's: triviaqa.", "Demonstrations other than the paper's: nq-swap."]


def test_each_inferred_n_gives_the_main_tables_value_in_the_tables_over_n():
    rows = {(row["task"], row["model"], row["method"], row["metric"], row["num_heads"], row["alpha"]): row["value"]
            for row in published.table("paper")}
    inferred = 0
    for row in published.table("paper_n"):
        cell = row["task"], row["model"], row["method"]
        main = {key[3]: value for key, value in rows.items() if key[:3] == cell and key[4:] in (("", ""), ("", "0.5"))
                and key[3] != "entropy"}
        fits = [n for n in map(str, range(10, 101, 10))
                if main and all(rows.get((*cell, metric, n, "")) == value for metric, value in main.items())]
        assert row["num_heads"].split() == fits and row["how"], cell
        inferred += bool(fits)
    assert inferred == 25


def test_the_papers_correlations_come_out_with_its_metrics():
    def r(task, method):
        metric, _ = published.headline(task)
        points = published.points("num_heads", "Meta-Llama-3-8B-Instruct", task, method, metric)
        start = paper_cell(metric, task=task, model="Meta-Llama-3-8B-Instruct", method="greedy")
        return tables.correlation(method, {n: [value] for n, value in points}, float(start["value"]))

    assert f"{r('xsum', 'masked'):.2f}" == "-0.93" and f"{r('xsum', 'decore-random'):.2f}" == "0.89"     # as printed
    assert published.headline("truthfulqa-mc")[0] == "mc2"


def test_the_papers_u_and_p_are_those_of_open_book():
    from scipy.stats import norm
    rows = {(row["method"], row["what"].split()[1], row["task"]): float(row["value"])
            for row in published.table("paper_tests") if row["what"].startswith("U-test")}
    printed = {"greedy": 69.84, "dola": 69.92, "decore-entropy": 74.47}
    assert {method for method, _, _ in rows} == set(printed) and {task for _, _, task in rows} == {"musique-cot-open"}
    for method, right in printed.items():
        u, p = (rows[method, what, "musique-cot-open"] for what in ("statistic", "p-value"))
        n, z = 2417, norm.isf(p / 2)
        root = (z * ((n + 1) / 12) ** 0.5 + (z ** 2 * (n + 1) / 12 + 2 * u) ** 0.5)        # of n1·n2, by U's normal law
        share = 50 + 100 * (0.25 - root ** 2 / n ** 2) ** 0.5
        assert abs(share - right) < 2                              # closed book has 14 %


def test_what_the_paper_printed_is_quoted_with_its_doubts():
    notes = published.tests("meta-llama-3-8b-instruct", ["musique-cot-open"])
    assert "McFadden's pseudo-R² 0.98" in notes[0] and "implausible" in notes[1] and len(notes) == 2
    assert len(published.tests("Meta-Llama-3-8B-Instruct", ["musique-cot-closed"])) == 1
    assert published.tests("Meta-Llama-3-8B-Instruct", ["popqa"]) == []


# ITI, ways of masking, amateurs

def test_greedy_runs_of_an_iti_checkpoint_are_a_method_of_its_base_model(tmp_path, call):
    base = "meta-llama/Meta-Llama-3-8B-Instruct"
    write_run(tmp_path, task="popqa", model=base)
    write_run(tmp_path, task="popqa", model="jujipotle/honest_llama3_8B_instruct", name="honest")
    write_run(tmp_path, "cad", alpha=0.5, task="popqa", model="jujipotle/honest_llama3_8B_instruct", name="cad")
    cells = {row[0]: row[1] for row in table(tmp_path, "Factuality: Meta-Llama-3-8B-Instruct")[2]}
    there = next(row for row in published.table("paper") if (row["task"], row["model"], row["method"])
                 == ("popqa", "Meta-Llama-3-8B-Instruct", "iti"))
    assert set(cells) == {"greedy", "ITI"} and f"0/0, p = 1.000; paper {float(there['value']):g} (" in cells["ITI"]
    write_run(tmp_path, task="popqa", model="/my/edited", name="mine")
    _, out, _ = call(tmp_path, "--iti", f"edited={base.split('/')[1]}", "--csv")
    assert sum(line.split(",")[3] == "iti" and line.split(",")[0] == "mine.jsonl" for line in out.splitlines()) > 0
    assert call(tmp_path, "--iti", "edited")[0] == 2


def test_every_iti_cell_of_the_paper_can_be_found():
    checkpoint = {base: name for name, base in stored.ITI.items()}
    rows = [row for row in published.table("paper") if row["method"] == "iti"]
    assert len(rows) == 55
    for row in rows:
        found = paper_cell(row["metric"], task=row["task"], model=checkpoint[row["model"]], method="greedy")
        assert found["value"] == row["value"]


def test_query_masks_and_amateurs_are_setups_and_not_departures(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "save", lambda found, path: (path, found[1]))
    write_run(tmp_path)
    for mask in ("output", "query"):
        for n in (1, 2, 4):
            write_run(tmp_path, "masked", n, mask=mask, name=f"masked{n}{mask}", right=10 + n)
            write_run(tmp_path, "decore-entropy", n, mask=mask, name=f"entropy{n}{mask}", right=20 + n)
            write_run(tmp_path, "decore-static", 4, alpha=float(n), mask=mask, name=f"static{n}{mask}", right=22 + n)
    write_run(tmp_path, "decore-entropy", 2, amateur="models/small", name="lite")
    write_run(tmp_path, "cd", alpha=0.5, amateur="models/small", name="cd")
    _, _, rows, notes = table(tmp_path, "Miniature")
    names = [row[0] for row in rows]
    assert {"DeCoRe entropy, N = 2, query mask", "DeCoRe entropy, N = 2", "CD, α = 0.5, amateur small",
            "DeCoRe entropy-lite, N = 2, amateur small"} <= set(names) and len(names) == 1 + 18 + 2
    assert any(note.startswith("query mask: ") for note in notes)
    for title in ("Base entropy, nats", "Base entropy of correct"):
        names = [row[1] for row in table(tmp_path, title)[2]]
        assert {"masked, N = 4, query mask", "masked, N = 4", "DeCoRe entropy-lite, N = 2, amateur small",
                "CD, α = 0.5, amateur small"} <= set(names), title
    correlated = {row[1] for row in table(tmp_path, "Score against")[2]}
    assert correlated == {f"{name}{mask}" for name in ("masked", "DeCoRe entropy") for mask in ("", ", query mask")}
    drawn = {path.name: caption for path, caption in figures.draw_all(stored.collect(tmp_path)[0], tmp_path / "pics")}
    assert set(drawn) - {"head-curves.png", "head-maps.png"} == {
        f"{kind}-miniature{mask}.png" for kind in figures.FIGURES for mask in ("", "-query")}
    assert drawn["alpha-miniature-query.png"].startswith("miniature, query mask: ")


def test_dola_is_in_the_figure_of_correct_answers_and_iti_among_the_entropies(tmp_path):
    write_run(tmp_path)
    write_run(tmp_path, "dola-low")
    write_run(tmp_path, "decore-entropy", 2)
    write_run(tmp_path, model="edited", name="iti")
    setups = stored.grouped(stored.collect(tmp_path, {"edited": "miniature"})[0])[0]["miniature"]
    figure, _ = figures.correctness_figure("miniature", setups, [TASK])
    titles = [ax.get_title(loc="left").split("\n")[-1] for ax in figure.axes]
    assert titles == ["greedy", "DoLa low", "DeCoRe entropy, N = 2", "", "", ""]
    figure, _ = figures.entropy_figure("miniature", setups, [TASK])
    assert "ITI" in [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def test_an_axis_of_per_cent_shows_all_of_it(sweep):
    setups = stored.grouped(stored.collect(sweep)[0])[0]["miniature"]
    for draw in (figures.heads_figure, figures.alpha_figure):
        low, high = draw("miniature", setups, [TASK])[0].axes[0].get_ylim()
        assert low < 0 and high > 100


def test_a_head_file_of_ones_own_is_drawn_with_layer_0_at_the_bottom(tmp_path):
    scores = {f"{layer}-{head}": 0.5 * (layer == 0) for layer in range(2) for head in range(3)}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"model": "mine", "n_layers": 2, "n_heads": 3, "samples": 7, "scores": scores}))
    figure, _ = figures.head_maps([path])
    assert figure.axes[0].get_title(loc="left") == "mine" and figure.axes[0].images[0].origin == "lower"
    assert figure.axes[0].images[0].get_array()[0].min() == 0.5


@pytest.mark.filterwarnings("error")
def test_tiny_runs_warn_of_nothing(call, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "known", list)
    monkeypatch.setattr(figures, "head_curves", lambda files: grid_of_nothing())
    monkeypatch.setattr(figures, "head_maps", lambda files: grid_of_nothing())
    monkeypatch.setattr(figures, "DPI", 40)
    for task, items, right in (("open", 1, 1), ("closed", 2, 1), ("conflict", 4, 2), ("irrelevant", 6, 3)):
        for method, n in (("greedy", None), ("masked", 1), ("decore-entropy", 1), ("decore-entropy", 2)):
            write_run(tmp_path, method, n, items=items, right=right, task=f"miniature-{task}")
    assert call(tmp_path, "--plots", tmp_path / "pics")[0::2] == (0, "")


def grid_of_nothing():
    return figures.grid(1)[0], "nothing"
