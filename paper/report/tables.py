"""Tables of stored runs in Markdown: scores in the paper's layout, correlations with N, entropies.

A table is (title, rows, notes); rows are dicts {column: text} or a table of pandas."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.stats import mannwhitneyu, pearsonr

from paper import printed
from paper.printed import TASKS, headline
from paper.report import significance
from paper.report.frame import typical

NO_BEST = ("rejection", "memory_match", "entropy")  # neither many nor few of these are better
# The paper compares DeCoRe's entropy with that of these methods.
RIVALS = ("greedy", "iti", "dola-low", "dola-high")
CORRELATION_NOTES = [
    "r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's figures."
]
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
        table = pd.DataFrame(rows).fillna("")
        lines = [list(table), *table.to_numpy()]
        widths = [max(map(len, texts)) for texts in zip(*lines)]
        lines.insert(1, ["-" * width for width in widths])
        print(f"### {title}\n")
        for texts in lines:
            print(f"| {' | '.join(map(str.ljust, texts, widths))} |")
        print("\n" + "".join(f"{note}  \n" for note in notes))


def all_tables(frame):
    for title, same in frame.groupby("title"):
        tables = [(name, *score_table(name, same)) for name in printed.GROUPS]
        model = same["run"].iloc[0].paper_model
        notes = CORRECTNESS_NOTES + printed.tests(model, {*same["task"]})
        tables += [
            ("Score against the number of masked heads", correlation_rows(same), CORRELATION_NOTES),
            ("Base entropy, nats per token", entropy_rows(same), ENTROPY_NOTES),
            ("Base entropy of correct and incorrect answers", correctness_rows(same), notes),
        ]
        for name, rows, notes in tables:
            rows = pd.DataFrame(rows)
            if len(rows):
                yield f"{name}: {title}", rows, notes


# Scores, as in the paper's tables


def score_table(group, frame):
    """(rows, notes) of one of printed.GROUPS. A column's best value is bold, the second italic."""
    frame = frame[frame["task"].isin(printed.GROUPS[group])]
    columns = {}
    for task, (name, labels) in printed.GROUPS[group].items():
        by_metric = dict(list(frame[frame["task"] == task].groupby("metric")))
        for metric, label in labels.items():
            if metric in by_metric:
                ours = by_metric[metric]
                n = dict.fromkeys(f"{n:,}" for n in ours["scored"].agg(["min", "max"]))
                heading = f"{name} {label}".strip() + f" (n = {' to '.join(n)})"
                compared = by_metric.get(f"{metric}_published", ours)
                columns[heading] = cell_texts(ours, compared, metric not in NO_BEST)
    rows = pd.DataFrame(columns).reindex(frame["setup"].unique()).dropna(how="all").fillna("–")
    notes = score_notes(rows.to_csv(), frame["run"].unique())
    return rows.rename_axis("method").reset_index(), notes


def cell_texts(ours, compared, has_best):
    """Setup → text: the mean, its interval or the range of the draws, and the paper's value.

    compared: the lines of the metric that the paper's value is compared with."""
    means = ours.groupby("setup")["value"].mean()
    ranks = means.rank(method="dense", ascending=False)
    marks = {1: "**", 2: "_"} if has_best and len(means) > 1 else {}
    texts = {}
    for setup, draws in ours.groupby("setup"):
        mark = marks.get(ranks[setup], "")
        text = f"{mark}{means[setup]:.1f}{mark}"
        if len(draws) > 1:
            values = draws["value"]
            text += f" ± {values.std():.1f} ({values.min():.1f} to {values.max():.1f}, "
            text += f"{len(draws)} draws)"
        else:
            text += f" [{draws['low'].item():.1f}, {draws['high'].item():.1f}]"
        same = compared[compared["setup"] == setup]
        if paper := same["cell"].iloc[0]:
            difference = same["value"].mean() - float(paper["value"])
            text += f"; paper {printed.text(paper)} ({difference:+.1f})"
        texts[setup] = text
    return texts


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
        dtypes = {run.precision["dtype"] for run in runs}
        if dtypes != {"bfloat16"}:
            names = ", ".join(sorted(dtypes))
            notes.append(f"The paper's runs are in bfloat16, these in {names}.")
    counts = Counter(remark for run in runs for remark in run.remarks)
    return notes + [f"{n} of {len(runs)} runs: {remark}." for remark, n in counts.items()]


# Numbers of masked heads


def curves(frame, field="num_heads"):
    """Yields (task, setup without the field "num_heads" or "alpha", lines with its values).

    Curves of a single point are left out."""
    lines = frame[frame["headline"]].dropna(subset=field).sort_values("task", kind="stable")
    names = [str(replace(run.setup, **{field: None})) for run in lines["run"]]
    for (task, name), curve in lines.groupby(["task", names], sort=False, observed=True):
        if curve[field].nunique() > 1:
            yield task, name, curve


def correlation_rows(frame):
    """Rows of Pearson's r of the score with N, over the means of the draws."""
    greedy = frame[frame["headline"] & (frame["method"] == "greedy")]
    greedy = greedy.groupby(["task", "variant"], observed=True)["value"].first()
    for task, name, curve in curves(frame):
        setup = curve["run"].iloc[0].setup
        draws = curve.groupby("num_heads")["value"]
        means = draws.mean()
        # As in the paper's figures, greedy is the point N = 0 of masked models only.
        if setup.method == "masked" and (task, setup.variant) in greedy:
            means[0] = greedy[task, setup.variant]
        if len(means) < significance.FEWEST or not np.ptp(means):
            continue
        yield {
            "task": TASKS[task][0],
            "metric": headline(task)[1],
            "method": name,
            "N": ", ".join(map(str, draws.groups)),
            "Pearson r": f"{pearsonr(means.index, means).statistic:+.2f}",
        }


# Entropies


def entropy_rows(frame):
    """Rows of base entropies, tested against those of RIVALS: one-sided, Welch, Student."""
    shown = typical(frame[frame["metric"] == "entropy"])
    rivals = dict.fromkeys(run.plain for run in shown["run"] if run.setup.method in RIVALS)
    for run in shown.sort_values("task", kind="stable")["run"]:
        values = run.entropies
        row = {
            "task": TASKS[run.task][0],
            "method": str(run.setup),
            "n": f"{len(values):,}",
            "mean ± std": f"{values.mean():.3f} ± {values.std():.3f}",
            "paper": printed.text(printed.cell(run, "entropy")),
        }
        for name in rivals:
            others, differs = entropies_of(name, run, shown["run"])
            for test, text in significance.t_tests(values, others, "less").items():
                row[f"{test} (below {name})"] = text + differs
        yield row


def entropies_of(name, run, runs):
    """(entropies of the setup `name` on the inputs of `run`; " (float16)" if its dtype differs).

    A run of the same dtype and engine comes first; ((), "") if there is none."""
    wanted = name, run.task, run.inputs
    rivals = [one for one in runs if (one.plain, one.task, one.inputs) == wanted]
    if not rivals or name == run.plain:
        return (), ""
    rival = min(rivals, key=lambda rival: rival.precision != run.precision)
    differs = [text for key, text in rival.precision.items() if text != run.precision[key]]
    return rival.entropies, f" ({', '.join(differs)})" if differs else ""


def judged_answers(frame):
    """Yields (run, base entropies per token [n], whether the answers are right [n]) of each method.

    Without runs of which fewer than three answers are right or wrong."""
    shown = typical(frame[frame["metric"] == "entropy"])
    for run in shown.sort_values("task", kind="stable")["run"]:
        metric, _ = headline(run.task)
        if metric not in ("substring_match", "exact_match"):
            continue
        answers = pd.DataFrame(run.values)[["entropy", metric]]
        if run.task.startswith("musique"):  # as published: a reference anywhere in the generation
            verdicts = []
            for line in run.lines:
                text = line["prediction"].lower()
                verdicts.append(any(reference.lower() in text for reference in line["references"]))
            answers[metric] = verdicts
        entropies, verdicts = answers.dropna().to_numpy(float).T
        right = verdicts == 1
        if min(sum(right), sum(~right)) >= significance.FEWEST:
            yield run, entropies, right


def correctness_rows(frame):
    """Rows of base entropies of correct and incorrect answers, with tests of their difference."""
    for run, entropies, right in judged_answers(frame):
        good, bad = entropies[right], entropies[~right]
        ranks = mannwhitneyu(good, bad)
        fit = significance.logistic(entropies, right)
        yield {
            "task": TASKS[run.task][0],
            "method": str(run.setup),
            "correct / incorrect": f"{len(good):,} / {len(bad):,}",
            "nats, mean": f"{good.mean():.3f} / {bad.mean():.3f}",
            **significance.t_tests(bad, good),
            "Mann-Whitney U, p": f"{ranks.statistic:,.0f}, {significance.p_text(ranks.pvalue)}",
            "pseudo-R²": f"{fit[2]:.3f}" if fit else "–",
        }
