"""Tables of stored runs in Markdown: scores in the paper's layout, correlations with N, entropies.

A table is (title, rows, notes); a row is {column: text}."""

from collections import Counter
from dataclasses import replace

import numpy as np
from scipy.stats import mannwhitneyu

from paper import numbers
from paper.numbers import TASKS, headline
from paper.report import significance
from paper.report.frame import PAPER_DTYPE, by_task, headline_values, typical
from paper.report.stored import base_entropies

NO_BEST = ("rejection", "memory_match", "entropy")  # neither many nor few of these are better
# The paper compares DeCoRe's entropy with that of these methods.
RIVALS = ("greedy", "iti", "dola-low", "dola-high")
ENTROPY_NOTES = [
    "The base model's entropy along the text that the method wrote, mean over its tokens (of "
    "masked, the masked model's). It is not the entropy of the distribution decoded from. "
    "One-sided tests: Welch's as in the paper, and with equal variances as in its published "
    "analysis; in brackets: dtype or engine of the other run, if it differs. †: misprinted or "
    "unclear (paper/paper.csv).",
    "Each method has one setup: α = 0.5 and the N with the most runs; of several, the paper's or "
    "the default one.",
]
CORRECTNESS_NOTES = [
    "t: incorrect against correct; U: of the correct answers, as the paper prints it; all "
    "two-sided. Pseudo-R²: McFadden's, of a logistic regression without penalty on the entropy.",
    "Setups with fewer than three correct or incorrect answers are left out.",
]


def print_tables(tables):
    for title, rows, notes in tables:
        columns = {}
        for row in rows:
            columns |= dict.fromkeys(row)
        lines = [list(columns)]
        for row in rows:
            lines.append([row.get(column, "") for column in columns])
        widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        print(f"### {title}\n")
        for texts in lines:
            print(f"| {' | '.join(map(str.ljust, texts, widths))} |")
        print("\n" + "".join(f"{note}  \n" for note in notes))


def all_tables(frame):
    for title, same in frame.groupby("title"):
        tables = [(name, *score_table(name, same)) for name in numbers.GROUPS]
        tables += [
            ("Score against the number of masked heads", *correlation_table(same)),
            ("Base entropy, nats per token", *entropy_table(same)),
            ("Base entropy of correct and incorrect answers", *correctness_table(same)),
        ]
        for name, rows, notes in tables:
            if rows:
                yield f"{name}: {title}", rows, notes


# Scores, as in the paper's tables


def score_table(group, frame):
    """(rows, notes) of one of numbers.GROUPS. A column's best value is bold, the second italic."""
    frame = frame[frame["task"].isin(numbers.GROUPS[group])]
    columns = {}
    for task, metric, heading in numbers.columns(group):
        of_task = frame[frame["task"] == task]
        ours = of_task[of_task["metric"] == metric]
        if len(ours):
            published = of_task[of_task["metric"] == f"{metric}_published"]
            compared = published if len(published) else ours
            heading += f" (n = {low_to_high(ours['scored'])})"
            columns[heading] = cell_texts(ours, compared, metric not in NO_BEST)
    rows = []
    for setup in frame["setup"].unique():
        if any(setup in texts for texts in columns.values()):
            texts = {heading: texts.get(setup, "–") for heading, texts in columns.items()}
            rows.append({"method": setup} | texts)
    return rows, score_notes(str(rows), frame["run"].unique())


def cell_texts(ours, compared, has_best):
    """Setup → text: the mean, its interval or the range of the draws, and the paper's value.

    compared: the lines of the metric that the paper's value is compared with."""
    means = ours.groupby("setup", sort=False)["value"].mean()
    ranks = means.rank(method="dense", ascending=False)
    texts = {}
    for setup, draws in ours.groupby("setup", sort=False):
        text = f"{means[setup]:.1f}"
        if has_best and len(means) > 1:
            mark = {1: "**", 2: "_"}.get(ranks[setup], "")
            text = f"{mark}{text}{mark}"
        if len(draws) > 1:
            values = draws["value"]
            text += f" ± {values.std():.1f} ({values.min():.1f} to {values.max():.1f}, "
            text += f"{len(draws)} draws)"
        else:
            text += f" [{draws['low'].item():.1f}, {draws['high'].item():.1f}]"
        same = compared[compared["setup"] == setup]
        if paper := same["cell"].iloc[0]:
            difference = same["value"].mean() - float(paper["value"])
            text += f"; paper {numbers.text(paper)} ({difference:+.1f})"
        texts[setup] = text
    return texts


def p_text(p):
    return "p < .001" if p < 0.001 else "p = " + f"{p:.3f}".lstrip("0")


def low_to_high(numbers):
    return " to ".join(dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers))))


def score_notes(text, runs):
    """Notes for a table of scores. text: its headings and cells."""
    notes = [
        "Rates in per cent, ROUGE and the like × 100; 95 % bootstrap interval over the examples. "
        "The best value of a column is bold, the second italic."
    ]
    if " EM (n" in text:
        notes.append(
            "EM: the answer contains a reference. The paper calls this exact match, and its code "
            "counts it. The share of answers that equal a reference is `exact_match` in --csv."
        )
    if any(run.setup.mask == "query" for run in runs):
        notes.append(
            "query mask: the query of masked heads is zero, as in the published runs. In the other "
            "rows with N their output is zero, as in the paper's equation."
        )
    if " draws)" in text:
        notes.append(
            "Random heads: mean, sample standard deviation and range over the draws. The paper's ± "
            "is over three draws (inferred: 58 of 60 values are multiples of 1/(3n))."
        )
    if "; paper" in text:
        notes.append(
            "paper: its value, and our value minus it, by the metric as published. The published "
            "runs mask queries. At N: measured at another N than the run; N = ?: not stated "
            "(paper/paper_n.csv). †: misprinted or unclear (paper/paper.csv)."
        )
        dtypes = {str(run.header.get("dtype")) for run in runs}
        if dtypes != {PAPER_DTYPE}:
            names = ", ".join(sorted(dtypes))
            notes.append(f"The paper's runs are in {PAPER_DTYPE}, these in {names}.")
    counts = Counter(remark for run in runs for remark in run.remarks)
    return notes + [f"{n} of {len(runs)} runs: {remark}." for remark, n in counts.items()]


# Numbers of masked heads


def curves(frame, task, field="num_heads"):
    """[(setup without the field "num_heads" or "alpha", lines with its values)] of a task.

    Curves of a single point are left out."""
    lines = headline_values(frame, task).dropna(subset=field)
    names = [str(replace(run.setup, **{field: None})) for run in lines["run"]]
    grouped = lines.groupby(names, sort=False)
    return [(name, curve) for name, curve in grouped if curve[field].nunique() > 1]


def greedy_mean(frame, task, variant):
    """The score of greedy decoding; None without a run."""
    lines = headline_values(frame, task)
    lines = lines[(lines["method"] == "greedy") & (lines["variant"] == variant)]
    return lines["value"].iloc[0] if len(lines) else None


def correlation_table(frame):
    """Pearson's r of the score with N, over the means of the draws."""
    rows = []
    for task, same in by_task(frame):
        for name, curve in curves(same, task):
            draws = curve.groupby("num_heads")["value"]
            means = draws.mean()
            first = curve.iloc[0]
            greedy = greedy_mean(same, task, first["variant"])
            # As in the paper's figures, greedy is the point N = 0 of masked models only.
            if first["method"].startswith("masked") and greedy is not None:
                means[0] = greedy
            r = significance.pearson(means.index.to_numpy(float), means.to_numpy(float))
            if r is None:
                continue
            row = {
                "task": TASKS[task][0],
                "metric": headline(task)[1],
                "method": name,
                "N": ", ".join(map(str, draws.groups)),
                "Pearson r": f"{r:+.2f}",
            }
            rows.append(row)
    return rows, [
        "r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's "
        "figures."
    ]


# Entropies


def entropy_table(frame):
    """Base entropies of each method, tested against those of RIVALS: one-sided, Welch, Student."""
    shown = typical(frame[frame["metric"] == "entropy"])
    rivals = dict.fromkeys(run.plain for run in shown["run"] if run.setup.method in RIVALS)
    rows = []
    for task, same in by_task(shown):
        runs = list(same["run"])
        for run, cell in zip(runs, same["cell"], strict=True):
            values = base_entropies(run)
            row = {
                "task": TASKS[task][0],
                "method": str(run.setup),
                "n": f"{len(values):,}",
                "mean ± std": f"{values.mean():.3f} ± {values.std():.3f}",
                "paper": numbers.text(cell),
            }
            for name in rivals:
                rival, differs = rival_of(run, name, runs)
                others = base_entropies(rival) if rival else ()
                tests = t_tests(values, others, "less")
                row |= {f"{test} (below {name})": text + differs for test, text in tests.items()}
            rows.append(row)
    return rows, ENTROPY_NOTES


def rival_of(run, name, runs):
    """(the run of the setup `name` on the inputs of `run`; " (float16)" if its dtype differs).

    Precision includes the engine. A run of the same precision comes first; (None, "") if none."""
    if name == run.plain:
        return None, ""
    rivals = [rival for rival in runs if rival.plain == name and rival.inputs == run.inputs]
    if not rivals:
        return None, ""
    rival = min(rivals, key=lambda rival: rival.precision != run.precision)
    differs = [text for key, text in rival.precision.items() if text != run.precision[key]]
    return rival, f" ({', '.join(differs)})" if differs else ""


def t_tests(a, b, alternative="two-sided"):
    """Name → statistic and p of two t-tests, as texts."""
    texts = {}
    for name, equal_variance in (("Welch t, p", False), ("equal variances", True)):
        test = significance.t_test(a, b, alternative, equal_variance)
        texts[name] = f"{test.statistic:+.2f}, {p_text(test.pvalue)}" if test else "–"
    return texts


def judged_answers(run):
    """(base entropies per token [n], whether the answers are right [n]) of the scored examples.

    None if answers are not right or wrong, or if fewer than three are right or wrong."""
    metric, _ = headline(run.task)
    if metric not in ("substring_match", "exact_match"):
        return None
    entropies, right = [], []
    for line, values in zip(run.lines, run.values, strict=True):
        verdict = values.get(metric)
        if run.task.startswith("musique"):  # as published: a reference anywhere in the generation
            text = line["prediction"].lower()
            verdict = any(reference.lower() in text for reference in line["references"])
        if values["entropy"] is not None and verdict is not None:
            entropies.append(values["entropy"])
            right.append(verdict == 1)
    if min(sum(right), len(right) - sum(right)) < significance.FEWEST:
        return None
    return np.array(entropies), np.array(right)


def correctness_table(frame):
    """Base entropies of correct and incorrect answers, with tests of their difference."""
    rows = []
    for task, same in by_task(typical(frame[frame["metric"] == "entropy"])):
        for run in same["run"]:
            answers = judged_answers(run)
            if answers is None:
                continue
            entropies, right = answers
            good, bad = entropies[right], entropies[~right]
            ranks = mannwhitneyu(good, bad)
            fit = significance.logistic(entropies, right)
            row = {
                "task": TASKS[task][0],
                "method": str(run.setup),
                "correct / incorrect": f"{len(good):,} / {len(bad):,}",
                "nats, mean": f"{good.mean():.3f} / {bad.mean():.3f}",
                **t_tests(bad, good),
                "Mann-Whitney U, p": f"{ranks.statistic:,.0f}, {p_text(ranks.pvalue)}",
                "pseudo-R²": f"{fit[2]:.3f}" if fit else "–",
            }
            rows.append(row)
    model = frame["run"].iloc[0].paper_model
    return rows, CORRECTNESS_NOTES + numbers.tests(model, {*frame["task"]})
