"""Results in Markdown or LaTeX: the short tables with a verdict; on demand the paper's tables, and
texts.

Cells are values until they are printed. A table is (title, rows, notes); rows are dicts
{column: text}."""

import re
from collections import Counter, defaultdict

import numpy as np

from paper import printed
from paper.printed import METRICS, NAMES
from paper.report import results
from paper.report.results import BESIDE
from paper.report.stored import TEXTS
from runtime import statistics
from runtime.files import markdown_table

PER_CENT = ("ended", "empty")  # of TEXTS
TEXT_NOTES = [
    "entropy: the base model's, in nats, a mean over the tokens of the text that the method wrote "
    "(of masked, the masked model's); not that of the distribution decoded from. tokens: the mean "
    "length. % ended: texts that end by themselves before the limit of new tokens. % empty: texts "
    "that their first token ends. letters a word: about 5 in English, more if pieces of words are "
    "glued together, as a model does that is pushed too far; not of texts in scripts that do not "
    "separate words."
]
METRIC_NOTES = {
    "answer_contained": "answer contained: the answer contains a reference. The paper calls this "
    "EM, exact match. exact match: the answer equals a reference.",
    "memory_match": "memory match: the answer is the memorised one, which the passage contradicts.",
    "memory": "passage, memory, neither, blank: what the answer's first sentence gives, in "
    "complete words; of both the first one counts. A clause with not, no longer, never or "
    "formerly gives none.",
}
QUERY = (
    "query mask: the query of masked heads is zero, as in the published runs. In the other rows "
    "with N their output is zero, as in the paper's equation."
)

LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "{}$&#%_"}
    | {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}", "<": "$<$", ">": "$>$"}
    | {"−": "$-$", "±": r"$\pm$", "×": r"$\times$", "α": r"$\alpha$", "†": r"\dag{}"}
)


def print_tables(tables):
    for title, cells, notes in filled(tables):
        print(f"### {title}\n", *markdown_table(cells), sep="\n")
        print("\n" + "".join(f"{note}  \n" for note in notes))


def print_latex(tables):
    """Print tables as `tabular` for LaTeX, with titles and notes in comments."""
    for title, cells, notes in filled(tables):
        head, *body = (" & ".join(map(latex, row)) + r" \\" for row in cells)
        print(f"% {title}", rf"\begin{{tabular}}{{l{'r' * (len(cells[0]) - 1)}}}", sep="\n")
        print(r"\hline", head, r"\hline", *body, r"\hline", r"\end{tabular}", sep="\n")
        print(*(f"% {note}" for note in notes), "", sep="\n")


def filled(tables):
    """Yields (title, rows of cells, notes) of the tables that have rows; first, the headings."""
    for title, rows, notes in tables:
        if rows:
            columns = dict.fromkeys(name for row in rows for name in row)
            yield title, [[*columns], *([row.get(n, "") for n in columns] for row in rows)], notes


def latex(text):
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text.translate(LATEX))


def print_commands(runs):
    """Print each command with the files of its runs."""
    files = defaultdict(dict)
    for run in runs:
        files[run.header.get("command") or "unknown"][run.path.name] = None
    print("### Commands\n")
    for command, names in files.items():
        print(f"* `python {command}`: {', '.join(names)}")
    print()


# Numbers


def unsigned(value, metric=""):
    spec = ".2f" if metric == "entropy" else ".1f"
    return f"{round(value, 6):{spec}}"  # 6.25, computed as 6.2500001, is printed as 6.25 is


def signed(value, metric=""):
    spec = "+z.2f" if metric == "entropy" else "+z.1f"  # z: no -0.0
    return f"{round(value, 6):{spec}}".replace("-", "−")


def span(ends, metric=""):
    return f"{signed(ends[0], metric)} to {signed(ends[1], metric)}" if ends else "–"


def count(value):
    return f"{value:.1f}".removesuffix(".0")


def p_text(p):
    if p is None:
        return "–"
    return "<0.001" if p < 0.001 else f"{p:.2g}"


def numbers_of(rows):
    """Their numbers of items: "40", or "12 to 40"."""
    numbers = [row.n for row in rows]
    return " to ".join(f"{n:,}" for n in sorted({min(numbers), max(numbers)}))


def heading(metric):
    return metric.replace("_", " ")


# Short tables


def short_table(rows):
    """(title, rows, notes) of one task and model of `results.short_tables`."""
    same_items = len({row.n for row in rows if not row.beside_random}) == 1
    papers = [paper_cell(row) for row in rows]
    texts = []
    for row, paper in zip(rows, papers):
        versus = row.versus
        cells = {"setup": row.label, "n": f"{row.n:,}"}
        cells[heading(row.metric)] = "" if row.beside_random else values_text(row)
        for name, share in row.beside.items():
            if name in rows[0].beside:
                cells[heading(name)] = unsigned(share)
        if not same_items:
            of_greedy = versus and not row.beside_random
            cells["greedy on them"] = unsigned(versus.value) if of_greedy else ""
        cells |= dict.fromkeys(("difference", "95 %", "won : lost", "p"), "")
        if versus:
            bold = "**" if row.shown else ""
            cells["difference"] = f"{bold}{signed(versus.difference)}{bold}"
            cells["95 %"] = span(versus.interval)
            cells["won : lost"] = f"{count(versus.won)} : {count(versus.lost)}"
            cells["p"] = p_text(versus.p)
        if any(papers):
            cells["paper"] = printed.text(paper) if paper else ""
        texts.append(cells)
    run = rows[0].run
    return f"{NAMES[run.task]}: {run.title}", texts, counted_remarks(rows)


def values_text(row):
    """The value; of several draws the mean and each draw's."""
    text = unsigned(row.value, row.metric)
    if len(row.values) > 1:
        text += f" ({', '.join(unsigned(value, row.metric) for value in row.values)})"
    return text


def paper_cell(row):
    """The paper's cell of the result, by the metric as published; None without one."""
    if row.beside_random:
        return None
    return printed.cell(row.run, published(row))


def published(row):
    """The metric that the paper's value is compared with."""
    name = f"{row.metric}_published"
    return name if name in row.run.values[0] else row.metric


def counted_remarks(rows):
    """Sentences on the runs of a table, with how many they concern."""
    runs = runs_of(rows)
    counts = Counter(remark for run in runs for remark in run.remarks)
    return [f"{n} of {len(runs)} runs: {remark}." for remark, n in counts.items()]


def runs_of(rows):
    return list(dict.fromkeys(run for row in rows for run in row.runs))


def short_notes(tables):
    """Notes on all short tables, from their results."""
    rows = [row for table in tables.values() for row in table]
    runs = runs_of(rows)
    notes = ["Rates are in per cent, ROUGE and the like × 100."]
    if any(row.versus for row in rows):
        notes.append(
            "difference: to greedy decoding on the row's n items, with the paired 95 % bootstrap "
            f"interval over the questions ({statistics.SAMPLES:,} samples) and the items won : "
            "lost. p: how often the difference is as large if the sign of each question's "
            "difference is drawn; exact, or for graded values, such as MC2 and ROUGE, in "
            f"{statistics.FLIPS:,} draws. For right and wrong items of a question each it is the "
            "exact McNemar test. Bold, and called shown: p < 0.05 after Holm's correction within "
            "the table, a family of all its p: those of one model and one task. The verdict's "
            "number of items finds a true difference of 5 points in 80 % of samples, by one such "
            "test at 5 %."
        )
    if any(run.setup.random_heads for run in runs):
        notes.append(
            "random heads: the mean of the draws, and each draw in brackets; won : lost are means. "
            "retrieval − random: the retrieval heads' value minus the mean of the draws of the "
            "same N, α and options. Interval and p concern the mean of these draws; how others "
            "may differ is in the spread of the draws."
        )
    return notes + notes_on(rows, {name for row in rows for name in (row.metric, *row.beside)})


def notes_on(rows, metrics):
    """Notes on metrics, on ways of masking and on the paper's values."""
    runs = runs_of(rows)
    notes = [note for name, note in METRIC_NOTES.items() if name in metrics]
    notes += [QUERY] * any(run.setup.mask == "query" for run in runs)
    if any(paper_cell(row) for row in rows):
        notes.append(
            "paper: its value, by the metric as published. The published runs mask queries. Its ± "
            "is a standard deviation over three draws (inferred: 58 of 60 values are multiples of "
            "1/(3n)). At N: measured at another N than the run; N = ?: not stated "
            "(paper/paper_n.csv). †: misprinted or unclear (paper/paper.csv)."
        )
        dtypes = {run.labels["dtype"] for run in runs}
        if dtypes != {"bfloat16"}:
            notes.append(f"The paper's runs are in bfloat16, these in {', '.join(sorted(dtypes))}.")
    return notes


def print_notes(tables):
    """Print how to read the short tables, and what they show."""
    print("### Reading the tables\n")
    print("".join(f"{note}  \n" for note in short_notes(tables)))
    if paragraphs := verdict(tables):
        print("### Verdict\n")
        print("\n".join(paragraphs))


# The verdict


def verdict(tables):
    """A paragraph for each short table: what it shows, what it does not, what it could show."""
    return [
        f"* **{NAMES[task]}, {title}.** {' '.join(sentences(rows))}"
        for (title, task), rows in tables.items()
        if any(row.versus for row in rows)
    ]


def sentences(rows):
    compared = [row for row in rows if row.versus]
    shown = [f"{row.label} ({signed(row.versus.difference)})" for row in compared if row.shown]
    if shown:
        yield f"Shown: {'; '.join(shown)}."
    if others := len(compared) - len(shown):
        yield f"Not shown: {'the other ' * bool(shown)}{others} of {len(compared)} differences."
    if all(counts_items(row.versus) for row in compared):
        share = float(np.median([(row.versus.won + row.versus.lost) / row.n for row in compared]))
        yield (
            f"{100 * share:.0f} % of the items differ (median of the rows): a difference of 5 "
            f"points needs about {statistics.items_needed(share):,} items."
        )


def counts_items(versus):
    """Whether items are right or wrong, so that the difference counts them."""
    return abs(versus.difference * versus.n / 100 - (versus.won - versus.lost)) < 1e-6


# Tables in the paper's layout


def all_tables(runs):
    """Yields the paper's tables and texts of all runs, by model."""
    by_title = defaultdict(list)
    for run in runs:
        by_title[run.title].append(run)
    for title, same in by_title.items():
        for name, tasks in printed.GROUPS.items():
            rows = score_rows(same, {task: [*METRICS[task], *BESIDE] for task in tasks})
            yield f"{name}: {title}", table_rows(rows), score_notes(rows)
        texts = score_rows(same, dict.fromkeys(NAMES, TEXTS))
        yield f"Texts: {title}", table_rows(texts), TEXT_NOTES


def score_rows(runs, columns):
    """Results of a table, for {task: metrics}; corrected for all their tests."""
    rows = []
    for task, names in columns.items():
        same = [run for run in runs if run.task == task]
        known = results.known_metrics(same)
        for metric in dict.fromkeys(names):
            if metric in known:
                for draws in results.by_label(same).values():
                    rows.append(results.result_of(draws, metric))
    return results.correct([*filter(None, rows)])


def table_rows(rows):
    """Rows {column: text} of results: a row for each setup, a column for each task and metric."""
    of_columns = defaultdict(list)
    for row in rows:
        of_columns[row.run.task, row.metric].append(row)
    columns = {}
    for (task, metric), of_column in of_columns.items():
        name = "letters a word" if metric == "letters" else heading(metric)
        if metric in PER_CENT:
            name = f"% {name}"
        columns[task, metric] = f"{NAMES[task]} {name} (n = {numbers_of(of_column)})"
    texts = {}
    for row in sorted(rows, key=lambda row: results.order_of_row(row.run)):
        empty = {"setup": row.label} | dict.fromkeys(columns.values(), "–")
        texts.setdefault(row.label, empty)[columns[row.run.task, row.metric]] = cell_text(row)
    return [*texts.values()]


def cell_text(row):
    """The value, the difference to greedy decoding, and the paper's value."""
    metric, versus = row.metric, row.versus
    text = values_text(row)
    if versus:
        bold = "**" if row.shown else ""
        text = f"{bold}{text}{bold}; {versus_text(versus, metric)}"
    elif len(row.runs) == 1 and (ends := results.own_interval(row.run, metric)):
        text += f" [{unsigned(ends[0], metric)}, {unsigned(ends[1], metric)}]"
    if paper := paper_cell(row):
        value = np.mean([results.own_value(run, published(row)) for run in row.runs])
        difference = signed(value - float(paper["value"]))
        text += f"; paper {printed.text(paper)} ({difference})"
    return text


def versus_text(versus, metric=""):
    text = f"{signed(versus.difference, metric)}"
    if versus.interval:
        text += f" [{span(versus.interval, metric)}]"
    if metric not in TEXTS:
        text += f", {count(versus.won)} : {count(versus.lost)}"
    if versus.p is not None:
        text += f", p {p_text(versus.p)}"
    return text


def score_notes(rows):
    """Notes on a table of scores, from its results."""
    notes = [
        "Rates in per cent, ROUGE and the like × 100. Square brackets: 95 % bootstrap intervals "
        "over the questions; Wilson's if all items agree."
    ]
    if any(row.versus for row in rows):
        notes.append(
            "After the semicolon: the difference to greedy decoding on the same items with its "
            "paired interval, items won : lost (of draws: means), and p. Bold: p < 0.05 after "
            "Holm's correction within the table."
        )
    return notes + notes_on(rows, {row.metric for row in rows}) + counted_remarks(rows)
