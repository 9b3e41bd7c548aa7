"""Tables of stored runs in Markdown: scores in the paper's layout, correlations with N, and tests on entropies."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.stats import mannwhitneyu

from paper import numbers
from paper.numbers import TASKS, headline
from paper.report import significance
from paper.report.frame import PAPER_DTYPE, by_task, headline_values, typical
from paper.report.stored import base_entropies
from paper.runs import remarks
from paper.tasks import find
from runtime.files import json_lines

NO_BEST = ("rejection", "memory_match", "entropy")  # neither many nor few of these are better
RIVALS = (
    "greedy",
    "iti",
    "dola-low",
    "dola-high",
)  # whose entropies the paper compares DeCoRe's with
SCORE_NOTES = {  # part of a table's text → the note that explains it
    "": "Rates in per cent, ROUGE and the like × 100; 95 % bootstrap interval over the examples. The best value of a "
    "column is bold, the second italic.",
    "query mask": "query mask: the query of masked heads is zero, as in the published runs. In the other rows with N "
    "their output is zero, as in the paper's equation.",
    " draws)": "Random heads: mean, sample standard deviation and range over the draws. The paper's ± is over three "
    "draws (inferred: 58 of 60 values are multiples of 1/(3n)).",
    "; paper": "paper: its value, and our value minus it, by the metric as published. The published runs mask "
    "queries. At N: measured at another N than the run; N = ?: not stated (paper/paper_n.csv). †: "
    "misprinted or unclear (paper/paper.csv).",
}


def print_tables(tables):
    """tables: [(title, table of texts, notes)]."""
    for title, table, notes in tables:
        lines = [[*table.columns], *table.to_numpy().tolist()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
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
        yield from (
            (f"{name}: {title}", table, notes) for name, table, notes in tables if len(table)
        )


# Scores, as in the paper's tables


def score_table(group, frame):
    """(table, notes) of one of numbers.GROUPS. The best value of a column is bold, the second is italic."""
    frame, columns = frame[frame["task"].isin(numbers.GROUPS[group])], {}
    for task, metric, heading in numbers.columns(group):
        ours, twin = (
            frame[(frame["task"] == task) & (frame["metric"] == name)]
            for name in (metric, f"{metric}_published")
        )
        if len(ours):
            texts = cell_texts(ours, twin if len(twin) else ours, metric not in NO_BEST)
            columns[f"{heading} (n = {low_to_high(ours['scored'])})"] = texts
    table = (
        pd.DataFrame(columns, dtype=str)
        .reindex(frame["setup"].unique())
        .dropna(how="all")
        .fillna("–")
    )
    table = table.rename_axis("method").reset_index()
    return table, score_notes(" ".join(table.to_numpy().flat), frame) if len(table) else []


def cell_texts(ours, published_metric, has_best):
    """Texts by setup: the mean, its interval or the range of the draws, and the paper's value.

    published_metric: the lines of the metric as published, which the paper's value is compared with."""
    means, texts = ours.groupby("setup", sort=False)["value"].mean(), {}
    ranks = means.rank(method="dense", ascending=False)
    for setup, draws in ours.groupby("setup", sort=False):
        mark = {1: "**", 2: "_"}.get(ranks[setup], "") if has_best and len(means) > 1 else ""
        texts[setup] = f"{mark}{means[setup]:.1f}{mark} "
        if len(draws) > 1:
            low, high = draws["value"].min(), draws["value"].max()
            texts[setup] += (
                f"± {draws['value'].std():.1f} ({low:.1f} to {high:.1f}, {len(draws)} draws)"
            )
        else:
            texts[setup] += f"[{draws['low'].item():.1f}, {draws['high'].item():.1f}]"
        twin = published_metric[published_metric["setup"] == setup]
        if paper := twin["cell"].iloc[0]:
            difference = twin["value"].mean() - float(paper["value"])
            texts[setup] += f"; paper {numbers.text(paper)} ({difference:+.1f})"
    return pd.Series(texts)


def p_text(p):
    return "p < .001" if p < 0.001 else "p = " + f"{p:.3f}".lstrip("0")


def low_to_high(numbers):
    return " to ".join(dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers))))


def score_notes(text, frame):
    """Notes for a table of scores. text: all of its cells."""
    runs = frame["run"].unique()
    stores = [run.path.with_suffix(".judged.jsonl") for run in runs]
    facts = {
        f"The paper's runs are in {PAPER_DTYPE}, these (also) in {{}}.": {
            run.header.get("dtype", PAPER_DTYPE) for run in runs if "; paper" in text
        }
        - {PAPER_DTYPE},
        "Demonstrations other than the paper's: {}.": {
            run.task
            for run in runs
            if not (run.header.get("demos") or {"paper": True}).get("paper")
        },
        "Another number of items than usual: {}.": {
            f"{run.task} {run.header['n']:,} of {find(run.task).n:,}"
            for run in runs
            if run.header["n"] != find(run.task).n
        },
        "Judges: {}. The paper's no longer exist; compare only values of the same judges.": {
            verdict["model"]
            for store in stores
            if store.exists()
            for _, verdict in json_lines(store)
        },
        "Unfinished: {}.": {
            f"{run.path.name} ({len(run.lines):,} of {run.header['n']:,})"
            for run in runs
            if len(run.lines) < run.header["n"]
        },
    }
    counts = Counter(remark for run in runs for remark in remarks(run.header))
    return (
        [note for part, note in SCORE_NOTES.items() if part in text]
        + [note.format(", ".join(sorted(names))) for note, names in facts.items() if names]
        + [f"{count} of {len(runs)} runs: {remark}." for remark, count in counts.items()]
    )


# Numbers of masked heads


def curves(frame, task, field="num_heads"):
    """[(setup without the field "num_heads" or "alpha", lines of the frame with its values)] of a task.

    Curves of a single point are left out."""
    lines = headline_values(frame, task).dropna(subset=field)
    curve = [str(replace(run.setup, **{field: None})) for run in lines["run"]]
    return [
        (name, same) for name, same in lines.groupby(curve, sort=False) if same[field].nunique() > 1
    ]


def greedy_mean(frame, task, variant=""):
    """The score of greedy decoding; None without a run."""
    lines = headline_values(frame, task)
    return next(
        iter(lines[(lines["method"] == "greedy") & (lines["variant"] == variant)]["value"]), None
    )


def correlation(method, means, greedy):
    """Pearson's r of the score with N; None if it is not defined.

    means: score by N, the mean over the draws. greedy: its score. As in the paper's figures it is the point N = 0 of a
    masked model, and of no other method."""
    if method.startswith("masked") and greedy is not None:
        means = means.combine_first(pd.Series({0: greedy}))
    return significance.pearson(means.index.to_numpy(float), means.to_numpy(float))


def correlation_table(frame):
    lines = []
    for task, same in by_task(frame):
        for name, curve in curves(same, task):
            draws, first = curve.groupby("num_heads")["value"], curve.iloc[0]
            r = correlation(
                first["method"], draws.mean(), greedy_mean(same, task, first["variant"])
            )
            if r is not None:
                std = draws.std().mean()
                lines.append(
                    {
                        "task": TASKS[task][0],
                        "metric": headline(task)[1],
                        "method": name,
                        "N": ", ".join(map(str, draws.groups)),
                        "Pearson r": f"{r:+.2f}",
                        "std over draws": "–" if np.isnan(std) else f"{std:.1f}",
                    }
                )
    return pd.DataFrame(lines), [
        "r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's "
        "figures."
    ]


# Entropies


def entropy_table(frame):
    """Base entropies of each method, tested against those of greedy, ITI and DoLa: one-sided, Welch and Student."""
    shown, lines = typical(frame[frame["metric"] == "entropy"]), []
    rivals = dict.fromkeys(run.plain for run in shown[shown["method"].isin(RIVALS)]["run"])
    for task, same in by_task(shown):
        entropies = {(run.plain, run.setup.variant): base_entropies(run) for run in same["run"]}
        for run, cell in zip(same["run"], same["cell"], strict=True):
            values = entropies[run.plain, run.setup.variant]
            lines.append(
                {
                    "task": TASKS[task][0],
                    "method": str(run.setup),
                    "n": f"{len(values):,}",
                    "mean ± std": f"{values.mean():.3f} ± {values.std():.3f}",
                    "paper": numbers.text(cell),
                }
            )
            for rival in rivals:
                others = entropies.get((rival, run.setup.variant), ()) if rival != run.plain else ()
                lines[-1] |= t_tests(values, others, "less", f" (below {rival})")
    return pd.DataFrame(lines), [
        "The base model's entropy along the text that the method wrote, mean over its tokens (of masked, the masked "
        "model's). It is not the entropy of the distribution decoded from. One-sided tests: Welch's as in the paper, "
        "and with equal variances as in its published analysis. †: misprinted or unclear (paper/paper.csv).",
        "Each method has one setup: α = 0.5 and the N with the most runs; of several, the paper's or the default one.",
    ]


def t_tests(a, b, alternative="two-sided", name=""):
    """Statistic and p of two t-tests, as cells of a table. name: end of the columns' names."""
    cells = {}
    for column, equal_variance in (("Welch t, p", False), ("equal variances", True)):
        test = significance.t_test(a, b, alternative, equal_variance)
        cells[column + name] = f"{test.statistic:+.2f}, {p_text(test.pvalue)}" if test else "–"
    return cells


def judged_answers(run):
    """(base entropy per token, number of tokens) [n, 2], and whether the answer is right [n], of the scored examples.

    None if the task's answers are not right or wrong, or if fewer than three are right or wrong."""
    metric, _ = headline(run.task)
    if metric not in ("substring_match", "exact_match"):
        return None
    right = [values.get(metric) for values in run.values]
    if run.task.startswith("musique"):  # as published: a reference anywhere in the generation
        right = [
            any(reference.lower() in line["prediction"].lower() for reference in line["references"])
            for line in run.lines
        ]
    examples = np.array(
        [
            (values["entropy"], len(line["ids"]), verdict)
            for values, line, verdict in zip(run.values, run.lines, right, strict=True)
            if None not in (values["entropy"], verdict)
        ]
    ).reshape(-1, 3)
    right = examples[:, 2] == 1
    return (examples[:, :2], right) if min(sum(right), sum(~right)) >= significance.FEWEST else None


def correctness_table(frame):
    """Base entropies of correct and incorrect answers, with tests of their difference."""
    shown, lines = typical(frame[frame["metric"] == "entropy"]), []
    for task, same in by_task(shown):
        for run in same["run"]:
            if (answers := judged_answers(run)) is None:
                continue
            predictors, right = answers
            good, bad = predictors[right, 0], predictors[~right, 0]
            ranks = mannwhitneyu(good, bad)
            fits = (significance.logistic(x, right) for x in (predictors[:, :1], predictors))
            lines.append(
                {
                    "task": TASKS[task][0],
                    "method": str(run.setup),
                    "correct / incorrect": f"{len(good):,} / {len(bad):,}",
                    "nats, mean": f"{good.mean():.3f} / {bad.mean():.3f}",
                    **t_tests(bad, good),
                    "Mann-Whitney U, p": f"{ranks.statistic:,.0f}, {p_text(ranks.pvalue)}",
                    **{
                        name: f"{fit[1]:.3f}" if fit else "–"
                        for name, fit in zip(("pseudo-R²", "with length"), fits, strict=True)
                    },
                }
            )
    return pd.DataFrame(lines), [
        "t: incorrect against correct; U: of the correct answers, as the paper prints it; all two-sided. Pseudo-R²: "
        "McFadden's, of a logistic regression without penalty on the entropy, and on the entropy and the number of "
        "tokens.",
        "Setups with fewer than three correct or incorrect answers are left out.",
        *numbers.tests(frame["model"].iloc[0], {*frame["task"]}),
    ]
