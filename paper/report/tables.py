"""Tables of stored runs in Markdown: scores in the paper's layout beside greedy decoding, settings
chosen on one half of the items, commands.

A table is (title, rows, notes); rows are dicts {column: text} or a table of pandas."""

from collections import Counter, defaultdict
from dataclasses import replace

import pandas as pd

from paper import printed
from paper.printed import TASKS, headline
from paper.report.paired import FEWEST, compare

# Of generated texts: metric → heading.
TEXTS = {"entropy": "entropy", "tokens": "tokens", "ended": "% ended", "letters": "letters a word"}
TEXT_NOTES = [
    "entropy: the base model's, in nats, a mean over the tokens of the text that the method wrote "
    "(of masked, the masked model's); not that of the distribution decoded from. tokens: the mean "
    "length. % ended: texts that end by themselves before the limit of new tokens. letters a word: "
    "about 5 in English, more if pieces of words are glued together, as a model does that is "
    "pushed too far."
]
CHOICE_NOTES = [
    "The setup of each method is the best of its setups (N, α and options) on one half of the "
    "questions, and reported on the other half, which did not choose it; then with the halves "
    "exchanged. Halves are drawn by a hash of the question."
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


def print_commands(runs):
    """Print each command with the files of its runs."""
    files = defaultdict(list)
    for run in runs:
        files[run.header.get("command") or "unknown"].append(run.path.name)
    print("### Commands\n")
    for command, names in files.items():
        print(f"* `python {command}`: {', '.join(names)}")


def all_tables(frame):
    """Yields the tables that have rows."""
    for title, same in frame.groupby("title"):
        texts = {task: (name, TEXTS) for task, (name, _) in TASKS.items()}
        tables = [(name, *score_table(columns, same)) for name, columns in printed.GROUPS.items()]
        tables += [
            ("Texts", score_table(texts, same)[0], TEXT_NOTES),
            ("Chosen on one half, reported on the other", choice_rows(same), CHOICE_NOTES),
        ]
        for name, rows, notes in tables:
            if len(rows):
                yield f"{name}: {title}", rows, notes


# Scores, as in the paper's tables


def score_table(columns, frame):
    """(rows, notes) for the columns of one of printed.GROUPS: task → (name, metric → heading)."""
    cells = {}
    n_compared = 0
    frame = frame[frame["task"].isin(list(columns))]
    for task, (name, labels) in columns.items():
        by_metric = dict(list(frame[frame["task"] == task].groupby("metric")))
        for metric, label in labels.items():
            if metric in by_metric:
                ours = by_metric[metric]
                n = dict.fromkeys(f"{n:,}" for n in ours["scored"].agg(["min", "max"]))
                heading = f"{name} {label}".strip() + f" (n = {' to '.join(n)})"
                compared = by_metric.get(f"{metric}_published", ours)
                cells[heading] = cell_texts(ours, compared)
                n_compared += ours[ours["versus"].notna()]["setup"].nunique()
    rows = pd.DataFrame(cells).reindex(frame["setup"].unique()).dropna(how="all").fillna("–")
    notes = score_notes(rows.to_csv(), frame["run"].unique(), n_compared)
    return rows.rename_axis("method").reset_index(), notes


def cell_texts(ours, published):
    """Setup → text: the mean, the difference to greedy decoding, and the paper's value.

    published: the lines of the metric that the paper's value is compared with."""
    texts = {}
    for setup, draws in ours.groupby("setup"):
        metric = draws["metric"].iloc[0]
        spec = ".2f" if metric == "entropy" else ".1f"
        values = draws["value"]
        cell = f"{values.mean():{spec}}"
        spread = ""
        if len(draws) > 1:
            spread = f" ({values.min():{spec}} to {values.max():{spec}}, {len(draws)} draws)"
        versus = versus_of(draws)
        if versus is None:
            spread = spread or f" [{draws['low'].item():{spec}}, {draws['high'].item():{spec}}]"
        elif versus.separable:
            cell = f"**{cell}**"
        cell += spread
        if versus:
            cell += f"; {versus_text(versus, spec, metric not in TEXTS)}"
            if versus.n < draws["n"].max():
                cell += f" on {versus.n:,} items"
        same = published[published["setup"] == setup]
        if paper := same["cell"].iloc[0]:
            difference = same["value"].mean() - float(paper["value"])
            cell += f"; paper {printed.text(paper)} ({difference:+.1f})"
        texts[setup] = cell
    return texts


def versus_of(draws):
    """The Difference of the runs of a metric to greedy decoding; None without it."""
    if len(draws) == 1:
        return draws["versus"].item()
    greedy = draws["greedy"].iloc[0]
    return greedy and compare(draws["run"], greedy).get(draws["metric"].iloc[0])


def versus_text(versus, spec=".1f", has_better=True):
    """spec: the format of the numbers. has_better: whether items are won and lost."""
    difference, low, high = (f"{number:+z{spec}}" for number in versus[1:4])  # z: no -0.0
    won, lost = (f"{number:.1f}".removesuffix(".0") for number in (versus.won, versus.lost))
    return f"{difference} [{low}, {high}]" + f", {won} : {lost}" * has_better


def score_notes(text, runs, n_compared):
    """Notes for a table of scores. text: its headings and cells. n_compared: differences in it."""
    notes = [
        "Rates in per cent, ROUGE and the like × 100. Square brackets: 95 % bootstrap intervals "
        "over the questions."
    ]
    if n_compared:
        notes.append(
            "After the semicolon: the difference to greedy decoding on the same items with its "
            "paired interval, items won : lost (of draws: means). Bold: the interval leaves out 0, "
            f"and at least {FEWEST} items differ; of {n_compared} comparisons without any real "
            f"difference, about {0.05 * n_compared:.1f} would be bold."
        )
    if " answer contained (n" in text:
        notes.append(
            "answer contained: the answer contains a reference. The paper calls this EM. The share "
            "of answers that equal a reference is `exact_match` in --csv."
        )
    if any(run.setup.mask == "query" for run in runs):
        notes.append(
            "query mask: the query of masked heads is zero, as in the published runs. In the other "
            "rows with N their output is zero, as in the paper's equation."
        )
    if " draws)" in text:
        notes.append(
            "Random heads: mean and range over the draws; the interval is that of these draws. The "
            "paper's ± is a standard deviation over three draws (inferred: 58 of 60 values are "
            "multiples of 1/(3n))."
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


# Settings chosen on one half of the items


def choice_rows(frame):
    """Rows of the setups that are the best on one half of the questions, with their scores on the
    other: one for each task and method with several setups."""
    groups = defaultdict(dict)
    lines = frame[frame["headline"] & frame["greedy"].notna()].sort_values("task", kind="stable")
    for (task, setup), draws in lines.groupby(["task", "setup"], sort=False, observed=True):
        run, greedy = draws[["run", "greedy"]].iloc[0]
        method = str(replace(run.setup, num_heads=None, alpha=None, options=""))
        halves = [compare(draws["run"], greedy, half) for half in (0, 1)]
        groups[task, method][setup] = [half.get(headline(task)[0]) for half in halves]
    rows = []
    for (task, method), setups in groups.items():
        if len(setups) < 2 or not all(map(all, setups.values())):
            continue
        n = [half.n for half in next(iter(setups.values()))]
        row = {
            "task": f"{TASKS[task][0]} {headline(task)[1]} (n = {n[0]:,} + {n[1]:,})",
            "method": method,
            "setups": str(len(setups)),
        }
        for half, names in enumerate((("first", "second"), ("second", "first"))):
            best = max(setups, key=lambda setup: setups[setup][half].difference)
            versus = setups[best][1 - half]
            value = f"**{versus.value:.1f}**" if versus.separable else f"{versus.value:.1f}"
            chosen = [part for part in best.split(", ") if part not in method.split(", ")]
            row[f"chosen on the {names[0]} half"] = ", ".join(chosen)
            row[f"on the {names[1]}"] = f"{value}; {versus_text(versus)}"
        rows.append(row)
    return rows
