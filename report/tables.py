"""Tables of stored runs in Markdown: scores in the paper's layout, each run against greedy, and tests on entropies.

`write_csv` prints the same numbers, and all other metrics, as data. *Base entropy* is the entropy of the base model's
next token along the text that a method wrote. Runs store it, Eq. 8 uses it as α, and the paper reports it. The
distribution that Eq. 7 decodes from has another entropy."""

import csv
import sys
from collections import Counter

import numpy as np
from scipy.stats import mannwhitneyu

from report import published, significance
from report.published import columns, headline, tasks_of
from report.stored import base_entropies, greedy_mean, greedy_run, group, of_typical, typical
from runtime.files import json_lines
from tasks import TASKS
from tasks.runs import prompt_key, remarks

NO_BEST = ("rejection", "memory_match")         # neither many nor few of these are better
RIVALS = ("greedy", "iti", "dola-low", "dola-high")     # whose entropies the paper compares DeCoRe's with


def print_tables(tables):
    """tables: [(title, header, rows of texts, notes)]"""
    for title, header, rows, notes in tables:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        print(f"### {title}\n")
        for row in [header, ["-" * width for width in widths], *rows]:
            print(f"| {' | '.join(map(str.ljust, row, widths))} |")
        print("\n" + "".join(f"{note}  \n" for note in notes))


def all_tables(runs):
    for title, setups in group(runs)[0].items():
        tables = [score_table(name, setups) for name in published.TABLES]
        tables += [correlation_table(setups), entropy_table(setups), correctness_table(setups)]
        yield from ((f"{name}: {title}", header, rows, notes) for name, header, rows, notes in tables if rows)


# Scores, as in the paper's tables

def score_table(name, setups):
    """One of published.TABLES. The best value of a column is bold, the second is italic."""
    header, rows = ["method"], {setup: [str(setup)] for setup in setups}
    for task, metric, heading in columns(name):
        cells = {setup: [run for run in by_task.get(task, []) if run.means.get(metric) is not None]
                 for setup, by_task in setups.items()}
        means = {setup: np.mean([run.means[metric] for run in runs]) for setup, runs in cells.items() if runs}
        if not means:
            continue
        best = sorted({*means.values()}, reverse=True)[:2] if len(means) > 1 and metric not in NO_BEST else []
        marks = dict(zip(best, ("**", "_"), strict=False))
        # A metric of whole runs, such as `macro`, has no values of single examples.
        sizes = {sum(values.get(metric) is not None for values in run.values) or len(run.lines)
                 for runs in cells.values() for run in runs}
        header.append(f"{heading} (n = {low_to_high(sizes)})")
        for setup, row in rows.items():
            mark = marks.get(means.get(setup), "")
            row.append(f"{mark}{means[setup]:.1f}{mark}{details(cells[setup], metric, greedy_run(setups, task))}"
                       if setup in means else "–")
    rows = [row for row in rows.values() if {*row[1:]} - {"–"}]
    runs = [run for by_task in setups.values() for task in published.TABLES[name] for run in by_task.get(task, [])]
    return name, header, rows, score_notes(" ".join(sum(rows, [])), runs)


def details(draws, metric, greedy):
    """Interval or range of one cell, its comparison with greedy, and the paper's value."""
    run, values = draws[0], [run.means[metric] for run in draws]
    if len(draws) > 1:
        text = f" ± {np.std(values, ddof=1):.1f} ({min(values):.1f} to {max(values):.1f}, {len(values)} draws)"
    else:
        low, high = run.intervals[metric]
        text = f" [{low:.1f}, {high:.1f}]"
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
    a, b = ({(line["index"], prompt_key(line)): values[metric]
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
    def listed(texts):
        return ", ".join(sorted(set(texts)))

    has_paper = "; paper" in text
    demos = listed(run.task for run in runs if (record := run.settings.get("demos"))
                   and not record.get("paper", "hub" not in record))      # older runs name only the hub they drew from
    dtypes = listed({run.settings.get("dtype", "bfloat16") for run in runs} - {"bfloat16"})
    items = listed(f"{run.task} {run.settings['n']:,} of {TASKS[run.task].n:,}"
                   for run in runs if run.settings["n"] != TASKS[run.task].n)
    unfinished = listed(f"{run.path.name} ({len(run.lines):,} of {run.settings['n']:,})"
                        for run in runs if len(run.lines) < run.settings["n"])
    stores = [run.path.with_suffix(".judged.jsonl") for run in runs]
    judges = listed(verdict["model"] for store in stores if store.exists() for _, verdict in json_lines(store))
    notes = {
        "Rates in per cent, ROUGE and the like × 100; 95 % bootstrap interval over the examples. The best value of a "
        "column is bold, the second italic.": True,
        "query mask: the query of masked heads is zero, as in the published runs. In the other rows with N their "
        "output is zero, as in the paper's equation.": "query mask" in text,
        "Random heads: mean, sample standard deviation and range over the draws. The paper's ± is over three draws "
        "(inferred: its values are multiples of 1/(3n)).": " draws)" in text,
        "won/lost: examples that greedy has wrong and this setup right, and the reverse; exact McNemar p, two-sided, "
        "not corrected for the number of comparisons.": ", p " in text,
        "paper: its value, and our value minus it, by the metric as published. The published runs mask queries. At N: "
        "measured at another N than the run; N = ?: not stated (tasks/paper_n.csv). †: misprinted or unclear "
        "(tasks/paper.csv).": has_paper,
        f"The paper's runs are in bfloat16, these (also) in {dtypes}.": has_paper and dtypes,
        f"Demonstrations other than the paper's: {demos}.": demos,
        f"Another number of items than usual: {items}.": items,
        f"Judges: {judges}. The paper's no longer exist; compare only values of the same judges.": judges,
        f"Unfinished: {unfinished}.": unfinished}
    counts = Counter(remark for run in runs for remark in remarks(run.settings))
    return [note for note, applies in notes.items() if applies] + [
        f"{count} of {len(runs)} runs: {remark}." for remark, count in counts.items()]


# Numbers of masked heads

def curves(setups, tasks, field="num_heads"):
    """{task: {setup without the field, "num_heads" or "alpha": {its value: [mean of each draw]}}}

    Lines of a single point are left out."""
    panels = {}
    for task in tasks:
        metric, lines = headline(task)[0], {}
        for setup, by_task in setups.items():
            x, means = getattr(setup, field), [run.means.get(metric) for run in by_task.get(task, [])]
            values = [mean for mean in means if mean is not None]
            if x is not None and values:
                lines.setdefault(setup._replace(**{field: None}), {})[x] = values
        panels[task] = {line: points for line, points in lines.items() if len(points) > 1}
    return {task: lines for task, lines in panels.items() if lines}


def correlation(method, points, greedy):
    """Pearson's r of the score with N, over the means of the draws; None if it is not defined.

    greedy: its score. As in the paper's figures it is the point N = 0 of a masked model, and of no other method."""
    pairs = [(n, np.mean(values)) for n, values in points.items()]
    pairs += [(0, greedy)] if method == "masked" and greedy is not None and 0 not in points else []
    return significance.pearson(*zip(*pairs, strict=True))


def correlation_table(setups):
    rows = []
    for task, lines in curves(setups, tasks_of(setups)).items():
        metric, heading = headline(task)
        for line, points in lines.items():
            r = correlation(line.method, points, greedy_mean(setups, task, metric))
            deviations = [np.std(values, ddof=1) for values in points.values() if len(values) > 1]
            if r is not None:
                rows.append([heading, str(line), ", ".join(map(str, sorted(points))), f"{r:+.2f}",
                             f"{np.mean(deviations):.1f}" if deviations else "–"])
    return ("Score against the number of masked heads", ["task", "method", "N", "Pearson r", "std over draws"], rows,
            ["r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's figures."])


# Entropies

def entropy_table(setups):
    """Base entropies of each method, tested against those of greedy, ITI and DoLa: one-sided, Welch and Student."""
    rows, panels = [], of_typical(setups, tasks_of(setups), base_entropies)
    rivals = [setup for setup in typical(setups)
              if setup.method in RIVALS and any(setup in entropies for entropies in panels.values())]
    for task, entropies in panels.items():
        for setup, values in entropies.items():
            others = [() if rival == setup else entropies.get(rival, ()) for rival in rivals]
            rows.append([headline(task)[1], str(setup), f"{len(values):,}", f"{values.mean():.3f} ± {values.std():.3f}",
                         paper_text(published.cell(setups[setup][task][0], "entropy")),
                         *(test_text(significance.t_test(values, other, "less", equal))
                           for other in others for equal in (False, True))])
    tests = [f"{name} (below {rival})" for rival in rivals for name in ("Welch t, p", "equal variances")]
    return (
        "Base entropy, nats per token", ["task", "method", "n", "mean ± std", "paper", *tests], rows,
        ["The base model's entropy along the text that the method wrote, mean over its tokens (of masked, the masked "
         "model's). The paper reports it under every decoder's name; it is not the entropy of the distribution decoded "
         "from. One-sided tests. The paper speaks of Welch's test; its published analysis takes equal variances.",
         "Each method has one setup: α = 0.5 and the N with the most runs."]
        + ["† misprinted or unclear; the right value is in the table."] * any("†" in row[4] for row in rows))


def test_text(test):
    return f"{test.statistic:+.2f}, {p_text(test.pvalue)}" if test else "–"


def entropies_and_verdicts(run):
    """(base entropy per token [n], whether the answer is right [n]) of the scored examples.

    Empty if the task's answers are not right or wrong, or if fewer than three are right or wrong."""
    metric, _ = headline(run.task)
    if metric not in ("substring_match", "exact_match"):
        return ()
    right = [values.get(metric) for values in run.values]
    if run.task.startswith("musique"):                          # as published: a reference anywhere in the generation
        right = [any(reference.lower() in line["prediction"].lower() for reference in line["references"])
                 for line in run.lines]
    pairs = np.array([(np.mean(line["entropies"]), value) for line, value in zip(run.lines, right, strict=True)
                      if line.get("entropies") and value is not None]).reshape(-1, 2)
    entropies, right = pairs[:, 0], pairs[:, 1] == 1
    return (entropies, right) if min(sum(right), sum(~right)) >= significance.FEWEST else ()


def correctness_table(setups):
    """Base entropies of correct and incorrect answers, with tests of their difference."""
    tasks, rows = tasks_of(setups), []
    for task, pairs in of_typical(setups, tasks, entropies_and_verdicts).items():
        for setup, (entropies, right) in pairs.items():
            good, bad = entropies[right], entropies[~right]
            ranks, fit = mannwhitneyu(good, bad), significance.logistic(entropies, right)
            rows.append([headline(task)[1], str(setup), f"{len(good):,} / {len(bad):,}",
                         f"{good.mean():.3f} / {bad.mean():.3f}", test_text(significance.t_test(bad, good)),
                         test_text(significance.t_test(bad, good, equal_variance=True)),
                         f"{ranks.statistic:,.0f}, {p_text(ranks.pvalue)}", f"{fit.pseudo_r2:.3f}" if fit else "–"])
    return (
        "Base entropy of correct and incorrect answers",
        ["task", "method", "correct / incorrect", "nats, mean", "Welch t, p", "equal variances", "Mann-Whitney U, p",
         "pseudo-R²"], rows,
        ["t: incorrect against correct; U: of the correct answers, as the paper prints it; all two-sided. Pseudo-R²: "
         "McFadden's, of a logistic regression without penalty. Setups with fewer than three correct or incorrect "
         "answers are left out.", *published.tests(model_of(setups), tasks)])


def model_of(setups):
    return next(run.model for by_task in setups.values() for runs in by_task.values() for run in runs)


# The same as data

def write_csv(runs):
    """Prints one line per run and metric, with the paper's value and the comparison with greedy. Rates in per cent."""
    (groups, _), lines = group(runs), []
    for run in runs:
        greedy, entropies = greedy_run(groups[run.title], run.task), base_entropies(run)
        tokens = sum(len(line["ids"]) if "ids" in line else line.get("tokens", 0) for line in run.lines)
        seconds = sum(line.get("seconds", 0) for line in run.lines)
        about = {"run": run.path.name, "task": run.task, "model": run.model, **run.setup._asdict(),
                 "method": published.method_of(run.setup), "conditions": run.conditions, "n": len(run.lines),
                 "of": run.settings["n"], "tokens_per_second": tokens / seconds if seconds else None}
        values = {name: (mean, *run.intervals[name], None) for name, mean in run.means.items() if mean is not None}
        if len(entropies):
            values["base_entropy"] = entropies.mean(), None, None, entropies.std()
        for name, (value, low, high, std) in values.items():
            paper = published.cell(run, name.removeprefix("base_")) or {}
            won, lost, p = won_and_lost(run, greedy, name) or (None, None, None)
            lines.append(about | {
                "metric": name, "value": value, "low": low, "high": high, "std": std,
                "paper": float(paper["value"]) if paper else None,
                **{f"paper_{key}": paper.get(key, "").strip() or None
                   for key in ("std", "at", "printed", "note", "table")},
                "won": won, "lost": lost, "mcnemar_p": p})
    writer = csv.DictWriter(sys.stdout, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
