"""Tables of stored runs: the paper's layout, each run against greedy, and the tests on entropies.

Each is a `Table` of texts, and `show` prints them all; `csv_rows` gives the same numbers and the rest of the metrics
as data. *Base entropy* is the entropy of the base model's next token along the text that a method wrote; it is what
runs store, what α is in Eq. 8, and what the paper reports. The distribution that Eq. 7 decodes from has another."""

import csv
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np

from report import published, significance, stored
from report.published import GROUPS, headline, tasks_of
from report.stored import NO_BEST, Setup, base_entropies, greedy_run, mean_of, n_scored, scale, typical, won_and_lost
from tasks.runs import remarks


class Table(NamedTuple):
    title: str
    header: list
    rows: list                  # texts
    notes: list


def show(tables, markdown=False):
    for title, header, rows, notes in tables:
        width = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [[text.ljust(w) for text, w in zip(row, width, strict=True)] for row in [header, *rows]]
        if markdown:
            lines.insert(1, ["-" * w for w in width])
            print(f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
        else:
            print(f"{title}\n" + "\n".join("  ".join(line).rstrip() for line in lines) + "\n")
        print("".join(f"{note}{'  ' * markdown}\n" for note in notes))


def all_tables(runs, markdown=False):
    """Every table the runs give. The tests need scipy and statsmodels; where these are absent, ImportError."""
    for model, setups in stored.grouped(runs)[0].items():
        yield from score_tables(model, setups, markdown)
        for make in (correlation_table, entropy_table, correctness_table):
            title, header, rows, notes = make(model, setups)
            if rows:
                yield Table(f"{title}: {model}", header, rows, notes)


# Scores, as in the paper's main tables

class Cell(NamedTuple):
    value: float                # in per cent where it is a rate; the mean over random draws
    low: float                  # 95 % bootstrap interval over the examples; the range of the draws
    high: float
    draws: int
    std: float                  # over the draws
    versus: tuple | None        # won, lost, p
    paper: dict | None          # the row of tasks/paper.csv
    above: float | None         # ours minus the paper's, by the metric as published


def cell_of(runs, metric, greedy):
    """One cell from the runs of one setup and task; None without the metric."""
    means = [mean_of(run, metric) for run in runs if run.means.get(metric) is not None]
    if not means:
        return None
    run, single = runs[0], len(runs) == 1
    low, high = (scale(metric) * end for end in run.intervals[metric]) if single else (min(means), max(means))
    versus = won_and_lost(run, greedy, metric) if single and greedy and run is not greedy else None
    name = f"{metric}_published" if f"{metric}_published" in run.means else metric
    paper = published.cell(run, name)
    above = mean_of(run, name) - float(paper["value"]) if paper and single else None
    return Cell(float(np.mean(means)), low, high, len(means), float(np.std(means)), versus, paper, above)


def score_tables(model, setups, markdown):
    """One per group of tasks; best bold, second underlined (in plain text * and _)."""
    for group, columns in GROUPS.items():
        here = {setup: by_task for setup, by_task in setups.items() if any(c[0] in by_task for c in columns)}
        cells = {(setup, column): cell for setup, by_task in here.items() for column in columns
                 if column[0] in by_task
                 and (cell := cell_of(by_task[column[0]], column[1], greedy_run(setups, column[0])))}
        columns = [column for column in columns if any((setup, column) in cells for setup in here)]
        if not columns:
            continue
        places = {column: ranking({setup: cells[setup, column].value for setup in here if (setup, column) in cells},
                                  column[1]) for column in columns}
        rows = [[str(setup), *(shown(cells.get((setup, column)), places[column].get(setup), markdown)
                               for column in columns)] for setup in here]
        tasks = dict.fromkeys(column[0] for column in columns)
        runs = [run for by_task in here.values() for task in tasks for run in by_task.get(task, [])]
        yield Table(f"{group}: {model}", ["method", *(headed(column, runs) for column in columns)], rows,
                    score_notes(list(cells.values()), here, runs))


def headed(column, runs):
    return f"{column[2]} (n = {spanned({n_scored(run, column[1]) for run in runs if run.task == column[0]})})"


def spanned(numbers):
    return " to ".join(dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers))))


def ranking(values, metric):
    """{setup: 1 or 2} of the best and the second-best value; equal values share a place."""
    best = sorted(set(values.values()), reverse=True)[:2] if len(values) > 1 and metric not in NO_BEST else []
    return {setup: best.index(value) + 1 for setup, value in values.items() if value in best}


def shown(cell, place, markdown):
    if cell is None:
        return "–"
    marks = {1: ("**{}**", "*{}*"), 2: ("<u>{}</u>", "_{}_")}.get(place, ("{}", "{}"))
    text = marks[0 if markdown else 1].format(f"{cell.value:.1f}")
    text += (f" [{cell.low:.1f}, {cell.high:.1f}]" if cell.draws == 1
             else f" ± {cell.std:.1f} ({cell.low:.1f} to {cell.high:.1f}, {cell.draws} draws)")
    if cell.versus:
        won, lost, p = cell.versus
        text += f"; {won}/{lost}, {p_value(p)}"
    if cell.paper:
        text += f"; paper {float(cell.paper['value']):g}{dagger(cell.paper)}{cell.paper['at']}"
        text += f" ({cell.above:+.1f})" if cell.above is not None else ""
    return text


def dagger(row):
    return "†" if row["printed"] or row["note"] else ""


def p_value(p):
    return "p < .001" if p < 0.001 else "p = " + f"{p:.3f}".lstrip("0")


def score_notes(cells, setups, runs):
    papers = [cell.paper for cell in cells if cell.paper]
    other = sorted({run.task for run in runs if (demos := run.settings.get("demos")) and not demos.get(
        "paper", "hub" not in demos)})          # older runs do not say; theirs from the hub were drawn
    unfinished = sorted({f"{run.path.name} ({len(run.lines):,} of {run.settings['n']:,})" for run in runs
                         if len(run.lines) < run.settings["n"]})
    notes = {
        "Rates in per cent, ROUGE and the like × 100; 95 % bootstrap interval over the examples. Best and second-best "
        "value of a column are marked.": True,
        "query mask: heads masked by a query of zeros, as in the published runs; the other rows with N mask outputs, "
        "as in the paper's equation.": any(setup.mask == "query" for setup in setups),
        "Random heads: mean, standard deviation and range over the draws.": any(cell.draws > 1 for cell in cells),
        "won/lost: examples that greedy has wrong and this setup right, and the reverse; exact McNemar p, two-sided, "
        "not corrected for the number of comparisons.": any(cell.versus for cell in cells),
        "paper: its value, and ours minus it, by the metric as published. The published runs mask queries.": papers,
        "at N = …: the paper's cell was measured at another N than the run; at N = ?: at one that it does not state "
        "(tasks/paper_n.csv).": any(row["at"] for row in papers),
        "† the paper's cell is known to be misprinted or unclear; tasks/paper.csv says how.":
            any(dagger(row) for row in papers),
        f"Demonstrations other than the paper's: {', '.join(other)}.": other,
        f"Unfinished: {', '.join(unfinished)}.": unfinished}
    remarked = Counter(remark for run in runs for remark in remarks(run.settings))
    return [note for note, needed in notes.items() if needed] + [
        f"{count} of {len(runs)} runs: {remark}." for remark, count in remarked.items()]


# Numbers of masked heads

def curves(setups, task, metric):
    """({(method, random heads?, α, mask, amateur, variant): {N: [mean of each draw]}}, greedy's mean or None)."""
    found = {}
    for setup, by_task in setups.items():
        values = [mean_of(run, metric) for run in by_task.get(task, []) if run.means.get(metric) is not None]
        if setup.n is not None and values:
            key = setup.method, bool(setup.random), setup.alpha, setup.mask, setup.amateur, setup.variant
            found.setdefault(key, {})[setup.n] = values
    greedy = greedy_run(setups, task)
    return found, greedy and mean_of(greedy, metric)


def correlation(method, points, start):
    """Pearson r of the score with N, over the means of the draws. As in the paper's figures a masked model's N = 0,
    which is greedy, counts, and DeCoRe's does not."""
    pairs = [(n, float(np.mean(values))) for n, values in points.items()]
    pairs += [(0, start)] if method == "masked" and start is not None and 0 not in points else []
    return significance.pearson(*zip(*pairs, strict=True)) if pairs else None


def correlation_table(model, setups):
    rows = []
    for task in tasks_of(setups):
        metric, heading = headline(task)
        lines, start = curves(setups, task, metric)
        for (method, random, alpha, *rest), points in lines.items():
            r = correlation(method, points, start)
            if r is not None:
                spread = [np.std(values) for values in points.values() if len(values) > 1]
                mask, amateur, variant = rest
                name = Setup(method, None, alpha, mask, amateur, "uniform" if random else None, variant)
                rows.append([heading, str(name), ", ".join(map(str, sorted(points))), f"{r:+.2f}",
                             f"{np.mean(spread):.1f}" if spread else "–"])
    return Table("Score against the number of masked heads", ["task", "method", "N", "Pearson r", "std over draws"],
                 rows, ["r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's figures."])


# Entropies

def entropy_table(model, setups):
    """Is a method's entropy below greedy's? One-sided; Welch's test, and equal variances as published."""
    rows = []
    for task in tasks_of(setups):
        greedy = greedy_run(setups, task)
        for setup in [setup for setup in typical(setups) if task in setups[setup]]:
            run = setups[setup][task][0]
            ours = base_entropies(run)
            if not len(ours):
                continue
            there = published.cell(run, "entropy")
            row = [headline(task)[1], str(setup), f"{len(ours):,}", f"{ours.mean():.3f} ± {ours.std():.3f}",
                   f"{there['value']} ± {there['std']}{dagger(there)}{there['at']}" if there else "–"]
            for equal in (False, True):
                test = greedy and run is not greedy and significance.t_test(ours, base_entropies(greedy), "less", equal)
                row.append(f"{test.statistic:+.2f}, {p_value(test.p)}" if test else "–")
            rows.append(row)
    return Table(
        "Base entropy, nats per token",
        ["task", "method", "n", "mean ± std", "paper", "Welch t, p (below greedy)", "equal variances"], rows,
        ["The base model's entropy along the text that the method wrote, mean over its tokens (of masked, the masked "
         "model's); the paper reports this one too, under every decoder's name, not the entropy of the distribution "
         "decoded from. One-sided: is it lower than greedy's? The paper speaks of Welch's test; its published analysis "
         "takes equal variances.",
         "One setup stands for each method: α = 0.5 and the N with the most runs."]
        + ["† misprinted or unclear; the right value is shown."] * any("†" in row[4] for row in rows))


def answers(run):
    """(base entropy per token, whether the answer is right) of each example that is scored, as two arrays."""
    metric = headline(run.task)[0]
    right = [row.get(metric) for row in run.values]
    if run.task.startswith("musique"):                          # as published: a reference anywhere in the generation
        right = [any(reference.lower() in line["prediction"].lower() for reference in line["references"])
                 for line in run.lines]
    pairs = [(np.mean(line["entropies"]), one == 1) for line, one in zip(run.lines, right, strict=True)
             if line.get("entropies") and one is not None]
    return np.array([h for h, _ in pairs], float), np.array([one for _, one in pairs], bool)


def scored_by_answer(task):
    return headline(task)[0] in ("substring_match", "exact_match")


def correctness_table(model, setups):
    """Is entropy higher where the answer is wrong?"""
    rows = [row for task in tasks_of(setups) if scored_by_answer(task) for setup in typical(setups)
            if task in setups[setup] and (row := correctness_row(setups[setup][task][0]))]
    return Table(
        "Base entropy of correct and incorrect answers",
        ["task", "method", "correct / incorrect", "nats, mean", "Welch t, p", "equal variances", "Mann-Whitney U, p",
         "pseudo-R²"], rows,
        ["t: incorrect against correct; U: of the correct answers, as the paper prints it; all two-sided. Pseudo-R²: "
         "McFadden's, of a logistic regression without penalty. Setups with fewer than three correct or incorrect "
         "answers are left out.", *published.tests(model, tasks_of(setups))])


def correctness_row(run):
    entropies, right = answers(run)
    good, bad = entropies[right], entropies[~right]
    if min(len(good), len(bad)) < significance.FEWEST:
        return None
    tests = [significance.t_test(bad, good), significance.t_test(bad, good, equal_variance=True)]
    ranks, fit = significance.mann_whitney(good, bad), significance.logistic(entropies, right)
    return [headline(run.task)[1], str(run.setup),
            f"{len(good):,} / {len(bad):,}", f"{good.mean():.3f} / {bad.mean():.3f}",
            *(f"{test.statistic:+.2f}, {p_value(test.p)}" if test else "–" for test in tests),
            f"{ranks.statistic:,.0f}, {p_value(ranks.p)}", f"{fit.pseudo_r2:.3f}" if fit else "–"]


# The same as data

def csv_rows(runs):
    """One dict per run and metric, with the paper's value and the comparison with greedy. Rates in per cent."""
    found, _ = stored.grouped(runs)
    for run in runs:
        s, setup, greedy = run.settings, run.setup, greedy_run(found[run.model], run.task)
        tokens = sum(len(line["ids"]) if "ids" in line else line.get("tokens", 0) for line in run.lines)
        seconds = sum(line.get("seconds", 0) for line in run.lines)
        about = {"run": run.path.name, "task": run.task, "model": run.model, "method": published.method_of(setup),
                 "num_heads": setup.n, "alpha": setup.alpha, "mask": setup.mask, "amateur": setup.amateur,
                 "n": len(run.lines), "of": s["n"]}
        metrics = {name: (mean_of(run, name), *(end if end is None else end * scale(name)
                                                for end in run.intervals[name]), None)
                   for name, mean in run.means.items() if mean is not None}
        entropies = base_entropies(run)
        if len(entropies):
            metrics["base_entropy"] = float(entropies.mean()), None, None, float(entropies.std())
        for name, (value, low, high, std) in metrics.items():
            there = published.cell(run, "entropy" if name == "base_entropy" else name) or {}
            versus = won_and_lost(run, greedy, name) if greedy and greedy is not run else None
            yield about | {"metric": name, "value": value, "low": low, "high": high, "std": std,
                           "paper": float(there["value"]) if there else None, "paper_std": there.get("std") or None,
                           "paper_at": there.get("at", "").strip() or None,
                           "paper_printed": there.get("printed") or None, "paper_note": there.get("note") or None,
                           "paper_table": there.get("table"),
                           "tokens_per_second": tokens / seconds if seconds else None,
                           **dict(zip(("won", "lost", "mcnemar_p"), versus or (None, None, None), strict=True))}


def write_csv(rows):
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
