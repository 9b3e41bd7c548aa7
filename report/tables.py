"""Tables of stored runs in Markdown: scores in the paper's layout, correlations with N, tests on entropies; and the
retrieval scores of head files."""

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.stats import entropy, mannwhitneyu, ttest_ind

from report import published
from report.frame import typical
from report.published import HEADLINES, NAMES
from report.stored import base_entropies
from runtime.files import json_lines, read_json

NO_BEST = ("rejection", "memory_match", "entropy")      # neither many nor few of these are better
RIVALS = ("greedy", "iti", "dola-low", "dola-high")     # whose entropies the paper compares DeCoRe's with
FEWEST = 3                      # numbers that a test needs on each side
RETRIEVAL = 0.1                 # the paper counts heads above this score as retrieval heads
RANKS = (1, *range(10, 101, 10))
SCORE_NOTES = {                 # part of a table's text → the note that explains it
    "": "Rates in per cent, ROUGE and the like × 100; 95 % bootstrap interval over the examples. The best value of a "
        "column is bold, the second italic.",
    "query mask": "query mask: the query of masked heads is zero, as in the published runs. In the other rows with N "
                  "their output is zero, as in the paper's equation.",
    " draws)": "Random heads: mean, sample standard deviation and range over the draws. The paper's ± is over three "
               "draws (inferred: 58 of 60 values are multiples of 1/(3n)).",
    "; paper": "paper: its value, and our value minus it, by the metric as published. The published runs mask "
               "queries. At N: measured at another N than the run; N = ?: not stated (report/paper_n.csv). †: "
               "misprinted or unclear (report/paper.csv)."}


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
        tables = [(name, *score_table(name, same)) for name in published.GROUPS]
        tables += [("Score against the number of masked heads", *correlation_table(same)),
                   ("Base entropy, nats per token", *entropy_table(same)),
                   ("Base entropy of correct and incorrect answers", *correctness_table(same))]
        yield from ((f"{name}: {title}", table, notes) for name, table, notes in tables if len(table))


# Scores, as in the paper's tables

def score_table(group, frame):
    """(table, notes) of one of published.GROUPS. The best value of a column is bold, the second is italic."""
    frame, columns = frame[frame["task"].isin(published.GROUPS[group])], {}
    for row in published.COLUMNS:
        same = frame[frame["task"] == row["task"]]
        ours = same[same["metric"] == row["metric"]]
        twin = same[same["metric"] == f"{row['metric']}_published"]
        if len(ours):
            heading = f"{row['name']} {row['heading']}".strip() + f" (n = {low_to_high(ours['scored'])})"
            columns[heading] = cell_texts(ours, twin if len(twin) else ours, row["metric"] not in NO_BEST)
    table = pd.DataFrame(columns, dtype=str).reindex(frame["setup"].unique()).dropna(how="all").fillna("–")
    table = table.rename_axis("method").reset_index()
    return table, score_notes(" ".join(table.to_numpy().flat), frame) if len(table) else []


def cell_texts(ours, twin, has_best):
    """Texts by setup: the mean, its interval or the range of the draws, and the paper's value.

    twin: the lines of the metric as published, which the paper's value is compared with."""
    means, texts = ours.groupby("setup", sort=False)["value"].mean(), {}
    ranks = means.rank(method="dense", ascending=False)
    for setup, draws in ours.groupby("setup", sort=False):
        mark = {1: "**", 2: "_"}.get(ranks[setup], "") if has_best and len(means) > 1 else ""
        texts[setup] = f"{mark}{means[setup]:.1f}{mark} "
        if len(draws) > 1:
            low, high = draws["value"].min(), draws["value"].max()
            texts[setup] += f"± {draws['value'].std():.1f} ({low:.1f} to {high:.1f}, {len(draws)} draws)"
        else:
            texts[setup] += f"[{draws['low'].item():.1f}, {draws['high'].item():.1f}]"
        same = twin[twin["setup"] == setup]
        if paper := same["cell"].iloc[0]:
            difference = same["value"].mean() - float(paper["value"])
            texts[setup] += f"; paper {published.text(paper)} ({difference:+.1f})"
    return pd.Series(texts)


def low_to_high(numbers):
    return " to ".join(dict.fromkeys(f"{number:,}" for number in (min(numbers), max(numbers))))


def score_notes(text, frame):
    """Notes for a table of scores. text: all of its cells."""
    runs = frame["run"].unique()
    stores = [run.path.with_suffix(".judged.jsonl") for run in runs]
    facts = {
        "The paper's runs are in bfloat16, these (also) in {}.":
            {run.header.get("dtype", "bfloat16") for run in runs if "; paper" in text} - {"bfloat16"},
        "Demonstrations other than the paper's: {}.":
            {run.task for run in runs if not (run.header.get("demos") or {"paper": True}).get("paper")},
        "Judges: {}. The paper's no longer exist; compare only values of the same judges.":
            {verdict["model"] for store in stores if store.exists() for _, verdict in json_lines(store)},
        "Unfinished: {}.":
            {f"{run.path.name} ({len(run.lines):,} of {run.header['n']:,})"
             for run in runs if len(run.lines) < run.header["n"]}}
    return ([note for part, note in SCORE_NOTES.items() if part in text]
            + [note.format(", ".join(sorted(names))) for note, names in facts.items() if names])


# Numbers of masked heads

def curves(frame, task, field="num_heads"):
    """[(setup without "num_heads" or "alpha", lines with its scores, Pearson's r or NaN)] of a task.

    r is that of N and the mean over the draws. As in the paper's figures, greedy decoding is the point N = 0 of a
    masked model, and of no other method. Curves of a single point are left out."""
    same, result = frame[(frame["task"] == task) & frame["headline"]], []
    greedy = same[same["method"] == "greedy"]["value"].tolist()
    points = same.dropna(subset=field)
    for name, curve in points.groupby([run.setup.text(field) for run in points["run"]], sort=False):
        means = curve.groupby(field)["value"].mean()
        if len(means) > 1:
            if greedy and curve["method"].iloc[0].startswith("masked"):
                means.loc[0] = greedy[0]
            n = means.index.to_series().astype(float)
            result.append((name, curve, n.corr(means, min_periods=FEWEST)))
    return result


def correlation_table(frame):
    table = []
    for task in NAMES:
        for name, curve, r in curves(frame, task):
            if not np.isnan(r):
                table.append({"task": NAMES[task], "metric": HEADLINES[task][1], "method": name,
                              "N": ", ".join(map(str, sorted(curve["num_heads"].unique()))), "Pearson r": f"{r:+.2f}"})
    return pd.DataFrame(table), ["r over the N listed; for masked models N = 0 (greedy) counts too, as in the paper's "
                                 "figures."]


# Entropies

def t_test(a, b, alternative="two-sided", equal_variance=False):
    """Welch's t-test of two means, or Student's with equal variances, as in the published analysis.

    alternative: "less" tests whether the mean of a is below that of b. None if there are too few numbers, or if they do
    not vary."""
    if min(len(a), len(b)) < FEWEST or np.ptp(a) == 0 == np.ptp(b):
        return None
    return ttest_ind(a, b, equal_var=equal_variance, alternative=alternative)


def t_tests(a, b, alternative="two-sided", name=""):
    """Statistic and p of both t-tests, as cells of a table. name: end of the columns' names."""
    tests = {"Welch t, p": t_test(a, b, alternative), "equal variances": t_test(a, b, alternative, True)}
    return {column + name: f"{test.statistic:+.2f}, {p_text(test.pvalue)}" if test else "–"
            for column, test in tests.items()}


def p_text(p):
    return "p < .001" if p < 0.001 else "p = " + f"{p:.3f}".lstrip("0")


def entropy_table(frame):
    """Base entropies of each method, tested against those of greedy, ITI and DoLa: one-sided, Welch and Student."""
    shown, table = typical(frame[frame["metric"] == "entropy"]), []
    rivals = shown[shown["method"].isin(RIVALS)]["setup"].unique()
    for task, same in shown.groupby("task"):
        entropies = {line.setup: base_entropies(line.run) for line in same.itertuples()}
        for line in same.itertuples():
            values = entropies[line.setup]
            texts = {"task": NAMES[task], "method": line.setup, "n": f"{len(values):,}",
                     "mean ± std": f"{values.mean():.3f} ± {values.std():.3f}", "paper": published.text(line.cell)}
            for rival in rivals:
                others = entropies.get(rival, ()) if rival != line.setup else ()
                texts |= t_tests(values, others, "less", f" (below {rival})")
            table.append(texts)
    return pd.DataFrame(table), [
        "The base model's entropy along the text that the method wrote, mean over its tokens (of masked, the masked "
        "model's). It is not the entropy of the distribution decoded from. One-sided tests: Welch's as in the paper, "
        "and with equal variances as in its published analysis. †: misprinted or unclear (report/paper.csv).",
        "Each method has one setup: α = 0.5 and the N with the most runs; of several, the paper's or the default one."]


def correctness_table(frame):
    """Base entropies of correct and incorrect answers, with tests of their difference."""
    shown, table = typical(frame[frame["metric"] == "entropy"]), []
    for line in shown.sort_values("task", kind="stable").itertuples():
        run, metric = line.run, HEADLINES[line.task][0]
        right = [values.get(metric) for values in run.values]
        if line.task.startswith("musique"):                     # as published: a reference anywhere in the generation
            right = [any(reference.lower() in answer["prediction"].lower() for reference in answer["references"])
                     for answer in run.lines]
        examples = pd.DataFrame({"entropy": [values["entropy"] for values in run.values],
                                 "length": [len(answer["ids"]) for answer in run.lines], "right": right}).dropna()
        right, x = examples["right"].to_numpy() == 1, examples[["entropy", "length"]].to_numpy(float)
        good, bad = x[right, 0], x[~right, 0]
        if metric not in ("substring_match", "exact_match") or min(len(good), len(bad)) < FEWEST:
            continue
        ranks = mannwhitneyu(good, bad)
        table.append({
            "task": NAMES[line.task], "method": line.setup,
            "correct / incorrect": f"{len(good):,} / {len(bad):,}",
            "nats, mean": f"{good.mean():.3f} / {bad.mean():.3f}", **t_tests(bad, good),
            "Mann-Whitney U, p": f"{ranks.statistic:,.0f}, {p_text(ranks.pvalue)}",
            "pseudo-R²": f"{pseudo_r2(x[:, :1], right):.3f}", "with length": f"{pseudo_r2(x, right):.3f}"})
    return pd.DataFrame(table), [
        "t: incorrect against correct; U: of the correct answers, as the paper prints it; all two-sided. Pseudo-R²: "
        "McFadden's, of a logistic regression without penalty on the entropy, and on the entropy and the number of "
        "tokens.",
        "Setups with fewer than three correct or incorrect answers are left out."]


def pseudo_r2(x, right):
    """McFadden's pseudo-R² of a logistic regression of right answers [n] on x [n, predictors], without penalty."""
    scale = x.std(0)
    x = np.column_stack([np.ones(len(x)), (x - x.mean(0)) / np.where(scale > 0, scale, 1)])

    def loss(weights):                                          # negative log-likelihood
        z = x @ weights
        return np.logaddexp(0, z).sum() - z[right].sum()

    share = right.mean()
    return 1 - minimize(loss, np.zeros(x.shape[1])).fun / (len(x) * entropy([share, 1 - share]))


# Head files

def heads_table(files):
    """Retrieval scores by rank, with the paper's. files: {path: scores}"""
    paper, table = {row["model"]: row for row in published.table("paper_heads")}, []
    for path, scores in files.items():
        ranked = sorted(scores.values(), reverse=True)
        table.append({"model": path.stem, "heads": f"{len(ranked):,}",
                      "samples": str(read_json(path).get("samples", "unknown")),
                      f"above {RETRIEVAL}": str(sum(score > RETRIEVAL for score in ranked)),
                      **{f"rank {rank}": f"{ranked[rank - 1]:.4f}" if rank <= len(ranked) else "–" for rank in RANKS}})
        if path.stem in paper:
            table.append({"model": "the paper"} | {f"rank {rank}": paper[path.stem][str(rank)] for rank in RANKS})
    return pd.DataFrame(table).fillna(""), ["Means over the samples of each head file."]
