"""Tables of stored runs: scores in the paper's layout, each run against greedy, and the tests on entropies.

`csv_rows` gives the same numbers and all other metrics as data. *Base entropy* is the entropy of the base model's next
token along the text that a method wrote: it is what runs store, what α is in Eq. 8, and what the paper reports. The
distribution that Eq. 7 decodes from has another entropy."""

import csv
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
from scipy.stats import mannwhitneyu

from report import published, significance
from report.published import columns, headline, tasks_of
from report.stored import base_entropies, greedy_run, grouped, mean_of, n_scored, scale, typical
from tasks import TASKS
from tasks.runs import prompt_key, remarks

NO_BEST = ("rejection", "memory_match")         # neither many nor few of these are better
RIVALS = ("greedy", "iti", "dola-low", "dola-high")     # whose entropies the paper compares DeCoRe's with


class Table(NamedTuple):
    title: str
    header: list
    rows: list                  # texts
    notes: list


def show(tables, markdown=False):
    for title, header, rows, notes in tables:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in [header, *rows]]
        if markdown:
            lines.insert(1, ["-" * width for width in widths])
            print(f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
        else:
            print(f"{title}\n" + "\n".join("  ".join(line).rstrip() for line in lines) + "\n")
        print("".join(f"{note}{'  ' * markdown}\n" for note in notes))


def all_tables(runs, markdown=False):
    for title, setups in grouped(runs)[0].items():
        tables = [score_table(group, setups, markdown) for group in published.TABLES]
        tables += [correlation_table(setups), entropy_table(setups), correctness_table(setups)]
        yield from (table._replace(title=f"{table.title}: {title}") for table in tables if table.rows)


# Scores, as in the paper's tables

def score_table(group, setups, markdown):
    """The best value of a column is bold, the second underlined (in plain text * and _)."""
    header, rows = ["method"], {setup: [str(setup)] for setup in setups}
    runs = [run for by_task in setups.values() for task in published.TABLES[group] for run in by_task.get(task, [])]
    marks = ("{}", "**{}**", "<u>{}</u>") if markdown else ("{}", "*{}*", "_{}_")
    for task, metric, name in columns(group):
        greedy, texts = greedy_run(setups, task), {}
        values = {setup: [mean_of(run, metric) for run in setups[setup].get(task, [])
                          if run.means.get(metric) is not None] for setup in setups}
        means = {setup: np.mean(draws) for setup, draws in values.items() if draws}
        best = sorted({*means.values()}, reverse=True)[:2] if len(means) > 1 and metric not in NO_BEST else []
        for setup, mean in means.items():
            place = best.index(mean) + 1 if mean in best else 0
            texts[setup] = marks[place].format(f"{mean:.1f}") + details(
                setups[setup][task], values[setup], metric, greedy)
        if texts:
            header.append(f"{name} (n = {span({n_scored(run, metric) for run in runs if run.task == task})})")
            for setup, row in rows.items():
                row.append(texts.get(setup, "–"))
    rows = [row for row in rows.values() if {*row[1:]} - {"–"}]
    return Table(group, header, rows, score_notes(" ".join(sum([header, *rows], [])), runs))


def details(runs, values, metric, greedy):
    """Interval or range of one cell, its comparison with greedy, and the paper's value."""
    run, text = runs[0], ""
    if len(values) > 1:
        text = (f" ± {np.std(values, ddof=1):.1f} ({min(values):.1f} to {max(values):.1f}, {len(values)} draws)")
    else:
        low, high = run.intervals[metric]
        text = f" [{low * scale(metric):.1f}, {high * scale(metric):.1f}]"
        if greedy and run is not greedy and (versus := won_and_lost(run, greedy, metric)):
            text += f"; {versus[0]}/{versus[1]}, {p_text(versus[2])}"
    name = f"{metric}_published" if f"{metric}_published" in run.means else metric
    if paper := published.cell(run, name):
        above = np.mean([mean_of(run, name) for run in runs]) - float(paper["value"])
        text += f"; paper {paper_text(paper)} ({above:+.1f})"
    return text


def won_and_lost(run, greedy, metric):
    """How often the run is better and worse than greedy on the same prompt, and McNemar's exact p.

    None for a metric that single examples do not have, or without common examples."""
    ours, theirs = ({(line["index"], prompt_key(line)): row[metric]
                     for line, row in zip(each.lines, each.values, strict=True) if row.get(metric) is not None}
                    for each in (run, greedy))
    common = ours.keys() & theirs.keys()
    if not common or metric in NO_BEST:
        return None
    won, lost = sum(ours[key] > theirs[key] for key in common), sum(ours[key] < theirs[key] for key in common)
    return won, lost, significance.mcnemar(won, lost)


def paper_text(row):
    """The paper's value with its ±, a mark if it is misprinted, and its N if that is not the run's."""
    std = f" ± {float(row['std']):g}" if row["std"] else ""
    return f"{float(row['value']):g}{std}{'†' if row['printed'] or row['note'] else ''}{row['at']}"


def p_text(p):
    return "p < .001" if p < 0.001 else "p = " + f"{p:.3f}".lstrip("0")


def span(numbers):
    return " to ".join(dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers))))


def score_notes(text, runs):
    """What a reader of the table has to know. text: all of the table's cells."""
    def those(name, condition):
        return ", ".join(sorted({str(name(run)) for run in runs if condition(run)}))

    compared = "; paper" in text
    # Older runs do not say whose their demonstrations are; those from the hub were drawn.
    demos = those(lambda run: run.task, lambda run: (shown := run.settings.get("demos"))
                  and not shown.get("paper", "hub" not in shown))
    dtypes = those(lambda run: run.settings["dtype"], lambda run: run.settings.get("dtype") not in (None, "bfloat16"))
    items = those(lambda run: f"{run.task} {run.settings['n']:,} of {TASKS[run.task].n:,}",
                  lambda run: run.settings["n"] != TASKS[run.task].n)
    unfinished = those(lambda run: f"{run.path.name} ({len(run.lines):,} of {run.settings['n']:,})",
                       lambda run: len(run.lines) < run.settings["n"])
    judges = those(lambda run: run.judges, lambda run: run.judges)
    notes = {
        "Rates in per cent, ROUGE and the like × 100; 95 % bootstrap interval over the examples. Best and second-best "
        "value of a column are marked.": True,
        "query mask: masked heads have a query of zeros, as in the published runs; in the other rows with N their "
        "output is zero, as in the paper's equation.": "query mask" in text,
        "Random heads: mean, sample standard deviation and range over the draws. The paper's ± is over three draws "
        "(inferred: its values are multiples of 1/(3n)).": " draws)" in text,
        "won/lost: examples that greedy has wrong and this setup right, and the reverse; exact McNemar p, two-sided, "
        "not corrected for the number of comparisons.": ", p " in text,
        "paper: its value, and our value minus it, by the metric as published. The published runs mask queries. At N: "
        "measured at another N than the run; N = ?: not stated (tasks/paper_n.csv). †: misprinted or unclear "
        "(tasks/paper.csv).": compared,
        f"The paper's runs are in bfloat16, these (also) in {dtypes}.": compared and dtypes,
        f"Demonstrations other than the paper's: {demos}.": demos,
        f"Another number of items than usual: {items}.": items,
        f"Judges: {judges}. The paper's no longer exist; compare only values of the same judges.": judges,
        f"Unfinished: {unfinished}.": unfinished}
    counts = Counter(remark for run in runs for remark in remarks(run.settings))
    return [note for note, needed in notes.items() if needed] + [
        f"{count} of {len(runs)} runs: {remark}." for remark, count in counts.items()]


# Numbers of masked heads

def curves(setups, task, metric):
    """({setup without its N: {N: [mean of each draw]}}, greedy's mean or None)."""
    lines = {}
    for setup, by_task in setups.items():
        values = [mean_of(run, metric) for run in by_task.get(task, []) if run.means.get(metric) is not None]
        if setup.n is not None and values:
            lines.setdefault(setup._replace(n=None), {})[setup.n] = values
    greedy = greedy_run(setups, task)
    return lines, greedy and mean_of(greedy, metric)


def correlation(method, points, start):
    """Pearson's r of the score with N, over the means of the draws; None if it is not defined.

    start: greedy's score. As in the paper's figures it is the point N = 0 of a masked model, and of no other method."""
    pairs = [(n, np.mean(values)) for n, values in points.items()]
    pairs += [(0, start)] if method == "masked" and start is not None and 0 not in points else []
    return significance.pearson(*zip(*pairs, strict=True))


def correlation_table(setups):
    rows = []
    for task in tasks_of(setups):
        metric, heading = headline(task)
        lines, start = curves(setups, task, metric)
        for line, points in lines.items():
            r = correlation(line.method, points, start)
            spread = [np.std(values, ddof=1) for values in points.values() if len(values) > 1]
            if r is not None:
                rows.append([heading, str(line), ", ".join(map(str, sorted(points))), f"{r:+.2f}",
                             f"{np.mean(spread):.1f}" if spread else "–"])
    return Table("Score against the number of masked heads", ["task", "method", "N", "Pearson r", "std over draws"],
                 rows, ["r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's figures."])


# Entropies

def entropy_table(setups):
    """Is the entropy of a method below that of greedy, ITI and DoLa? One-sided tests, Welch's and Student's."""
    rows, methods = [], typical(setups)
    rivals = [setup for setup in methods if setup.method in RIVALS
              and any(len(base_entropies(runs[0])) for runs in setups[setup].values())]
    for task in tasks_of(setups):
        entropies = {setup: base_entropies(setups[setup][task][0]) for setup in methods if task in setups[setup]}
        for setup, values in entropies.items():
            if not len(values):
                continue
            paper = published.cell(setups[setup][task][0], "entropy")
            row = [headline(task)[1], str(setup), f"{len(values):,}", f"{values.mean():.3f} ± {values.std():.3f}",
                   paper_text(paper) if paper else "–"]
            for rival in rivals:
                for equal in (False, True):
                    test = setup != rival and rival in entropies and significance.t_test(
                        values, entropies[rival], "less", equal)
                    row.append(test_text(test))
            rows.append(row)
    tests = [f"{name} (below {rival})" for rival in rivals for name in ("Welch t, p", "equal variances")]
    return Table(
        "Base entropy, nats per token", ["task", "method", "n", "mean ± std", "paper", *tests], rows,
        ["The base model's entropy along the text that the method wrote, mean over its tokens (of masked, the masked "
         "model's). The paper reports it under every decoder's name; it is not the entropy of the distribution decoded "
         "from. One-sided tests. The paper speaks of Welch's test; its published analysis takes equal variances.",
         "One setup stands for each method: α = 0.5 and the N with the most runs."]
        + ["† misprinted or unclear; the right value is shown."] * any("†" in row[4] for row in rows))


def test_text(test):
    return f"{test.statistic:+.2f}, {p_text(test.pvalue)}" if test else "–"


def answers(run):
    """(base entropy per token [n], whether the answer is right [n]) of the examples that are scored.

    None if answers are not right or wrong, or fewer than three are right or wrong."""
    metric, _ = headline(run.task)
    if metric not in ("substring_match", "exact_match"):
        return None
    right = [row.get(metric) for row in run.values]
    if run.task.startswith("musique"):                          # as published: a reference anywhere in the generation
        right = [any(reference.lower() in line["prediction"].lower() for reference in line["references"])
                 for line in run.lines]
    pairs = [(np.mean(line["entropies"]), value == 1) for line, value in zip(run.lines, right, strict=True)
             if line.get("entropies") and value is not None]
    entropies, right = (np.array([pair[i] for pair in pairs], kind) for i, kind in enumerate((float, bool)))
    return (entropies, right) if min(sum(right), sum(~right)) >= significance.FEWEST else None


def correctness_table(setups):
    """Is the entropy higher where the answer is wrong?"""
    tasks, rows = tasks_of(setups), []
    for task in tasks:
        for setup in typical(setups):
            if task not in setups[setup] or not (pair := answers(setups[setup][task][0])):
                continue
            entropies, right = pair
            good, bad = entropies[right], entropies[~right]
            ranks, fit = mannwhitneyu(good, bad), significance.logistic(entropies, right)
            rows.append([headline(task)[1], str(setup), f"{len(good):,} / {len(bad):,}",
                         f"{good.mean():.3f} / {bad.mean():.3f}", test_text(significance.t_test(bad, good)),
                         test_text(significance.t_test(bad, good, equal_variance=True)),
                         f"{ranks.statistic:,.0f}, {p_text(ranks.pvalue)}", f"{fit.pseudo_r2:.3f}" if fit else "–"])
    return Table(
        "Base entropy of correct and incorrect answers",
        ["task", "method", "correct / incorrect", "nats, mean", "Welch t, p", "equal variances", "Mann-Whitney U, p",
         "pseudo-R²"], rows,
        ["t: incorrect against correct; U: of the correct answers, as the paper prints it; all two-sided. Pseudo-R²: "
         "McFadden's, of a logistic regression without penalty. Setups with fewer than three correct or incorrect "
         "answers are left out.", *published.tests(model_of(setups), tasks)])


def model_of(setups):
    return next(run.model for by_task in setups.values() for runs in by_task.values() for run in runs)


# The same as data

def csv_rows(runs):
    """One dict per run and metric, with the paper's value and the comparison with greedy. Rates in per cent."""
    groups, _ = grouped(runs)
    for run in runs:
        setup, greedy, entropies = run.setup, greedy_run(groups[run.title], run.task), base_entropies(run)
        tokens = sum(len(line["ids"]) if "ids" in line else line.get("tokens", 0) for line in run.lines)
        seconds = sum(line.get("seconds", 0) for line in run.lines)
        about = {"run": run.path.name, "task": run.task, "model": run.model, "method": published.method_of(setup),
                 "num_heads": setup.n, "alpha": setup.alpha, "mask": setup.mask, "amateur": setup.amateur,
                 "random_heads": setup.random, "options": setup.options, "conditions": run.conditions,
                 "n": len(run.lines), "of": run.settings["n"],
                 "tokens_per_second": tokens / seconds if seconds else None}
        rows = {name: (mean_of(run, name), *run.intervals[name], None) for name, mean in run.means.items()
                if mean is not None}
        if len(entropies):
            rows["base_entropy"] = entropies.mean(), None, None, entropies.std()
        for name, (value, low, high, std) in rows.items():
            paper = published.cell(run, "entropy" if name == "base_entropy" else name) or {}
            versus = won_and_lost(run, greedy, name) if greedy and greedy is not run else None
            won, lost, p = versus or (None, None, None)
            yield about | {
                "metric": name, "value": value, "low": low and low * scale(name), "high": high and high * scale(name),
                "std": std, "paper": float(paper["value"]) if paper else None,
                **{f"paper_{key}": paper.get(key, "").strip() or None for key in ("std", "at", "printed", "note",
                                                                                  "table")},
                "won": won, "lost": lost, "mcnemar_p": p}


def write_csv(rows):
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
