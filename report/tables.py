"""Tables of stored runs in Markdown: scores in the paper's layout, each run against greedy, and tests on entropies.

`write_csv` prints every metric as data."""

import csv
import sys
from collections import Counter

import numpy as np
from scipy.stats import mannwhitneyu

from evaluation.runs import remarks
from report import published, significance
from report.published import by_task, headline
from report.stored import base_entropies, greedy_run, group, typical
from runtime.files import json_lines
from tasks import TASKS

NO_BEST = ("rejection", "memory_match", "entropy")      # neither many nor few of these are better
RIVALS = ("greedy", "iti", "dola-low", "dola-high")     # whose entropies the paper compares DeCoRe's with
SCORE_NOTES = {                                         # part of a table's text → the note that explains it
    "": "Rates in per cent, ROUGE and the like × 100; 95 % bootstrap interval over the examples. The best value of a "
        "column is bold, the second italic.",
    "query mask": "query mask: the query of masked heads is zero, as in the published runs. In the other rows with N "
                  "their output is zero, as in the paper's equation.",
    " draws)": "Random heads: mean, sample standard deviation and range over the draws. The paper's ± is over three "
               "draws (inferred: its values are multiples of 1/(3n)).",
    ", p ": "won/lost: examples that greedy has wrong and this setup right, and the reverse; exact McNemar p, "
            "two-sided, not corrected for the number of comparisons.",
    "; paper": "paper: its value, and our value minus it, by the metric as published. The published runs mask "
               "queries. At N: measured at another N than the run; N = ?: not stated (tasks/paper_n.csv). †: "
               "misprinted or unclear (tasks/paper.csv)."}


def print_tables(tables):
    """tables: [(title, rows, notes)]. A row is {column: text}; all rows have the columns of the first."""
    for title, rows, notes in tables:
        widths = [max(len(text) for text in (name, *(row[name] for row in rows))) for name in rows[0]]
        print(f"### {title}\n")
        for texts in [rows[0], ["-" * width for width in widths], *(row.values() for row in rows)]:
            print(f"| {' | '.join(map(str.ljust, texts, widths))} |")
        print("\n" + "".join(f"{note}  \n" for note in notes))


def all_tables(runs):
    for title, same in group(runs)[0].items():
        tables = [score_table(name, same) for name in published.GROUPS]
        tables += [correlation_table(same), entropy_table(same), correctness_table(same)]
        yield from ((f"{name}: {title}", rows, notes) for name, rows, notes in tables if rows)


# Scores, as in the paper's tables

def score_table(name, runs):
    """One of published.GROUPS. The best value of a column is bold, the second is italic."""
    runs = [run for run in runs if run.task in published.GROUPS[name]]
    rows = {run.setup: {"method": str(run.setup)} for run in runs}
    for task, metric, heading in published.columns(name):
        cells = {}
        for run in runs:
            if run.task == task and metric in run.means:
                cells.setdefault(run.setup, []).append(run)
        if not cells:
            continue
        means = {setup: np.mean([run.means[metric] for run in draws]) for setup, draws in cells.items()}
        best = sorted({*means.values()}, reverse=True)[:2] if len(means) > 1 and metric not in NO_BEST else []
        marks = dict(zip(best, ("**", "_"), strict=False))
        # A metric of whole runs, such as `macro`, has no values of single examples.
        sizes = {sum(values.get(metric) is not None for values in run.values) or len(run.lines)
                 for draws in cells.values() for run in draws}
        for setup, row in rows.items():
            mark, draws = marks.get(means.get(setup), ""), cells.get(setup)
            row[f"{heading} (n = {low_to_high(sizes)})"] = (
                f"{mark}{means[setup]:.1f}{mark}{details(draws, metric, greedy_run(runs, task))}" if draws else "–")
    rows = [row for row in rows.values() if {*row.values()} - {row["method"], "–"}]
    return name, rows, score_notes(" ".join(text for row in rows for text in row.values()), runs)


def details(draws, metric, greedy):
    """Interval or range of one cell, its comparison with greedy, and the paper's value."""
    run, values = draws[0], [run.means[metric] for run in draws]
    if len(draws) > 1:
        text = f" ± {np.std(values, ddof=1):.1f} ({min(values):.1f} to {max(values):.1f}, {len(values)} draws)"
    else:
        text = " [{:.1f}, {:.1f}]".format(*run.intervals[metric])
        if comparison := won_and_lost(run, greedy, metric):
            text += "; {}/{}, ".format(*comparison) + p_text(comparison[2])
    name = f"{metric}_published" if f"{metric}_published" in run.means else metric
    if paper := published.cell(run, name):
        difference = np.mean([run.means[name] for run in draws]) - float(paper["value"])
        text += f"; paper {paper_text(paper)} ({difference:+.1f})"
    return text


def won_and_lost(run, greedy, metric):
    """How often the run is better and worse than greedy on the same prompt, and McNemar's exact p.

    None for a metric that single examples do not have, without common examples, and for greedy itself."""
    if metric in NO_BEST or greedy is None or greedy is run:
        return None
    a, b = ({(line["index"], line.get("prompt_sha256")): values[metric]
             for line, values in zip(each.lines, each.values, strict=True) if values.get(metric) is not None}
            for each in (run, greedy))
    pairs = [(a[key], b[key]) for key in a.keys() & b.keys()]
    won, lost = sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
    return (won, lost, significance.mcnemar(won, lost)) if pairs else None


def paper_text(row):
    """The paper's value with its ±, a mark if it is misprinted, and its N if that is not the run's."""
    if row is None:
        return "–"
    std = f" ± {float(row['std']):g}" if row["std"] else ""
    return f"{float(row['value']):g}{std}{'†' if row['printed'] or row['note'] else ''}{row['at']}"


def p_text(p):
    return "p < .001" if p < 0.001 else "p = " + f"{p:.3f}".lstrip("0")


def low_to_high(numbers):
    return " to ".join(dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers))))


def score_notes(text, runs):
    """Notes for a table of scores. text: all of its cells."""
    stores = [run.path.with_suffix(".judged.jsonl") for run in runs]
    facts = {
        "The paper's runs are in bfloat16, these (also) in {}.":
            {run.settings.get("dtype", "bfloat16") for run in runs if "; paper" in text} - {"bfloat16"},
        "Demonstrations other than the paper's: {}.":                   # older runs name only the hub they drew from
            {run.task for run in runs if (record := run.settings.get("demos"))
             and not record.get("paper", "hub" not in record)},
        "Another number of items than usual: {}.":
            {f"{run.task} {run.settings['n']:,} of {TASKS[run.task].n:,}"
             for run in runs if run.settings["n"] != TASKS[run.task].n},
        "Judges: {}. The paper's no longer exist; compare only values of the same judges.":
            {verdict["model"] for store in stores if store.exists() for _, verdict in json_lines(store)},
        "Unfinished: {}.":
            {f"{run.path.name} ({len(run.lines):,} of {run.settings['n']:,})"
             for run in runs if len(run.lines) < run.settings["n"]}}
    counts = Counter(remark for run in runs for remark in remarks(run.settings))
    return ([note for part, note in SCORE_NOTES.items() if part in text]
            + [note.format(", ".join(sorted(names))) for note, names in facts.items() if names]
            + [f"{count} of {len(runs)} runs: {remark}." for remark, count in counts.items()])


# Numbers of masked heads

def curves(runs, task, field="num_heads"):
    """{setup without the field, "num_heads" or "alpha": {its value: [mean of each draw]}} of a task.

    Lines of a single point are left out."""
    lines = {}
    for run in runs:
        x, mean = getattr(run.setup, field), run.means.get(headline(task)[0])
        if run.task == task and x is not None and mean is not None:
            lines.setdefault(run.setup._replace(**{field: None}), {}).setdefault(x, []).append(mean)
    return {line: points for line, points in lines.items() if len(points) > 1}


def greedy_mean(runs, task):
    run = greedy_run(runs, task)
    return run and run.means.get(headline(task)[0])


def correlation(method, points, greedy):
    """Pearson's r of the score with N, over the means of the draws; None if it is not defined.

    greedy: its score. As in the paper's figures it is the point N = 0 of a masked model, and of no other method."""
    pairs = [(n, np.mean(values)) for n, values in points.items()]
    pairs += [(0, greedy)] if method == "masked" and greedy is not None and 0 not in points else []
    return significance.pearson(*zip(*pairs, strict=True))


def correlation_table(runs):
    rows = []
    for task in by_task(runs):
        for line, points in curves(runs, task).items():
            r = correlation(line.method, points, greedy_mean(runs, task))
            deviations = [np.std(values, ddof=1) for values in points.values() if len(values) > 1]
            if r is not None:
                rows.append({"task": headline(task)[1], "method": str(line), "N": ", ".join(map(str, sorted(points))),
                             "Pearson r": f"{r:+.2f}",
                             "std over draws": f"{np.mean(deviations):.1f}" if deviations else "–"})
    return ("Score against the number of masked heads", rows,
            ["r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's figures."])


# Entropies

def entropy_table(runs):
    """Base entropies of each method, tested against those of greedy, ITI and DoLa: one-sided, Welch and Student."""
    rows, runs = [], [run for run in typical(runs) if len(base_entropies(run))]
    rivals = dict.fromkeys(run.setup for run in runs if run.setup.method in RIVALS)
    for task, same in by_task(runs).items():
        entropies = {run.setup: base_entropies(run) for run in same}
        for run in same:
            values = entropies[run.setup]
            rows.append({"task": headline(task)[1], "method": str(run.setup), "n": f"{len(values):,}",
                         "mean ± std": f"{values.mean():.3f} ± {values.std():.3f}",
                         "paper": paper_text(published.cell(run, "entropy"))})
            for rival in rivals:
                others = entropies.get(rival, ()) if rival != run.setup else ()
                rows[-1] |= t_tests(values, others, "less", f" (below {rival})")
    return (
        "Base entropy, nats per token", rows,
        ["The base model's entropy along the text that the method wrote, mean over its tokens (of masked, the masked "
         "model's). It is not the entropy of the distribution decoded from. One-sided tests: Welch's as in the paper, "
         "and with equal variances as in its published analysis. †: misprinted or unclear (tasks/paper.csv).",
         "Each method has one setup: α = 0.5 and the N with the most runs."])


def t_tests(a, b, alternative="two-sided", name=""):
    """Statistic and p of two t-tests, as cells of a table. name: end of the columns' names."""
    cells = {}
    for column, equal_variance in (("Welch t, p", False), ("equal variances", True)):
        test = significance.t_test(a, b, alternative, equal_variance)
        cells[column + name] = f"{test.statistic:+.2f}, {p_text(test.pvalue)}" if test else "–"
    return cells


def entropies_and_verdicts(run):
    """(base entropy per token [n], whether the answer is right [n]) of the scored examples.

    None if the task's answers are not right or wrong, or if fewer than three are right or wrong."""
    metric, _ = headline(run.task)
    if metric not in ("substring_match", "exact_match"):
        return None
    right = [values.get(metric) for values in run.values]
    if run.task.startswith("musique"):                          # as published: a reference anywhere in the generation
        right = [any(reference.lower() in line["prediction"].lower() for reference in line["references"])
                 for line in run.lines]
    pairs = np.array([(values["entropy"], verdict) for values, verdict in zip(run.values, right, strict=True)
                      if None not in (values["entropy"], verdict)]).reshape(-1, 2)
    entropies, right = pairs[:, 0], pairs[:, 1] == 1
    return (entropies, right) if min(sum(right), sum(~right)) >= significance.FEWEST else None


def correctness_table(runs):
    """Base entropies of correct and incorrect answers, with tests of their difference."""
    rows, tasks = [], by_task(runs)
    for task, same in by_task(typical(runs)).items():
        for run in same:
            if (pairs := entropies_and_verdicts(run)) is None:
                continue
            entropies, right = pairs
            good, bad = entropies[right], entropies[~right]
            ranks, fit = mannwhitneyu(good, bad), significance.logistic(entropies, right)
            rows.append({
                "task": headline(task)[1], "method": str(run.setup),
                "correct / incorrect": f"{len(good):,} / {len(bad):,}",
                "nats, mean": f"{good.mean():.3f} / {bad.mean():.3f}",
                **t_tests(bad, good),
                "Mann-Whitney U, p": f"{ranks.statistic:,.0f}, {p_text(ranks.pvalue)}",
                "pseudo-R²": f"{fit[2]:.3f}" if fit else "–"})
    return (
        "Base entropy of correct and incorrect answers", rows,
        ["t: incorrect against correct; U: of the correct answers, as the paper prints it; all two-sided. Pseudo-R²: "
         "McFadden's, of a logistic regression without penalty.",
         "Setups with fewer than three correct or incorrect answers are left out.",
         *published.tests(runs[0].model, tasks)])


# The same as data

def write_csv(runs):
    """Prints one line per run and metric. Rates are in per cent."""
    groups, lines = group(runs)[0], []
    for run in runs:
        for metric, value in run.means.items():
            low, high = run.intervals[metric]
            won, lost, p = won_and_lost(run, greedy_run(groups[run.title], run.task), metric) or (None,) * 3
            paper = published.cell(run, metric) or {}
            lines.append({"run": run.path.name, "task": run.task, "model": run.model, "conditions": run.conditions,
                          **run.setup._asdict(), "method": published.method_of(run.setup), "n": len(run.lines),
                          "metric": metric, "value": value, "low": low, "high": high, "won": won, "lost": lost,
                          "mcnemar_p": p, "paper": paper.get("value"), "paper_at": paper.get("at", "").strip()})
    writer = csv.DictWriter(sys.stdout, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
