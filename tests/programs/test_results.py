"""Every number of the results, on their page and in the README, is that of the stored runs."""

import re
from functools import cache
from pathlib import Path

import pytest

from cli.decode import stays_high
from paper.report import results, stored
from paper.report.tables import number, p_text, signed, span
from paper.tasks import model_metrics
from runtime.files import json_lines

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen": "Qwen2.5-Coder-0.5B-Instruct",
    "large": "Qwen2.5-Coder-1.5B-Instruct",
    "gemma": "gemma-3-270m, layout plain",
}


@cache
def tables():
    """{(model of MODELS, task): {label: result}} of the runs in docs/results."""
    found = results.short_tables(results.select(stored.collect(ROOT / "docs" / "results")))
    names = {title: name for name, title in MODELS.items()}
    return {
        (names[title], task): {row.label: row for row in rows}
        for (title, task), rows in found.items()
    }


def cell(row):
    """A difference with its interval and p, bold if it is shown; the value of greedy decoding."""
    if row.versus is None:
        return number(row.value)
    difference = signed(row.versus.difference)
    if row.shown:
        difference = f"**{difference}**"
    interval = f" ({span(row.versus.interval)})" if row.versus.interval else ""
    return f"{difference}{interval}, p {p_text(row.versus.p)}"


def table_of(columns, labels=()):
    """The lines of a table of these columns of `tables`, {label: {column: cell}}, all or those of
    `labels`."""
    lines = {}
    for column in columns:
        for label, row in tables()[column].items():
            if label in labels or not labels:
                lines.setdefault(label, {})[column] = cell(row)
    return lines


def cells_of(page, heading):
    """{first cell: the others} of the table on a page whose heading begins so."""
    lines = page[page.index(heading) :].partition("\n\n")[0].splitlines()
    cells = ([x.strip() for x in line.strip("|").split("|")] for line in lines[2:])
    return {first: others for first, *others in cells}


def test_the_page_says_in_how_many_answers_alpha_stays_high():
    page = " ".join((ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").split())
    [sentence] = re.findall(r"On NQ-Swap with the default N that was so in .*?\.(?= )", page)
    counts = []
    for model in ("smollm2", "gemma", "qwen", "large"):
        name = MODELS[model].split(",")[0]
        path = ROOT / "docs" / "results" / f"nq-swap.{name}.decore-entropy.n10.jsonl.gz"
        high = [stays_high(line["alphas"]) for _, line in json_lines(path) if "alphas" in line]
        counts.append((str(sum(high)), str(len(high))))
    assert re.findall(r"(\d+) of (\d+)", sentence) == counts


S = "smollm2", "nq-swap"
Q = "qwen", "nq-swap"
L = "large", "nq-swap"
G = "gemma", "nq-swap"
M = "smollm2", "memotrap"
MQ = "qwen", "memotrap"
OPEN = "qwen", "nq-open"
TRUE = "qwen", "truthfulqa-mc"
XSUM = "qwen", "xsum"
IFEVAL = "qwen", "ifeval"
MINUS = "retrieval − random heads uniform"
N5 = "decore-entropy, N = 5"
N10 = "decore-entropy, N = 10"
N20 = "decore-entropy, N = 20"
STATIC = "decore-static, N = 20, α = 0.5"
MASKED = "masked, N = 10"
CAD = "cad, α = 0.5"
MINUS10, MINUS20 = (f"{n}: {MINUS}" for n in (N10, N20))
RANDOM10, RANDOM20 = (f"{n}, random heads uniform" for n in (N10, N20))
STATIC10 = "decore-static, N = 10, α = 0.5"
TABLES = {  # beginning of a table on the page → its columns and rows; (): all rows
    "| setup |": ([S, Q, L, G, M, MQ], ()),
    "| Qwen 0.5B |": ([OPEN, TRUE, XSUM], ("greedy", STATIC10, N10, RANDOM10, MINUS10, CAD)),
    "| Qwen 0.5B, IFEval |": ([IFEVAL], ()),
}
SHORT = {  # row of README's table → label
    "greedy": "greedy",
    "10 retrieval heads masked": MASKED,
    "DeCoRe entropy, N = 10 (the default)": N10,
    "DeCoRe static, N = 20, α = 0.5": STATIC,
    "20 retrieval heads minus 20 random ones": MINUS20,
    "context-aware decoding": CAD,
}


@pytest.mark.parametrize("heading", TABLES)
def test_a_table_of_the_page_is_that_of_the_stored_runs(heading):
    columns, labels = TABLES[heading]
    skip_what_cannot_be_scored(columns)
    assert cells_of(PAGE, heading) == {
        label: [line.get(column, "") for column in columns]
        for label, line in table_of(columns, labels).items()
    }


def test_the_table_of_the_readme_is_that_of_the_stored_runs():
    expected = table_of([S, Q])
    assert cells_of(README, "| NQ-Swap") == {
        short: [expected[label][column] for column in (S, Q)] for short, label in SHORT.items()
    }


@pytest.mark.parametrize("heading", [*TABLES, "| NQ-Swap"])
def test_all_setups_of_a_column_have_the_same_items_and_the_tables_say_how_many(heading):
    page, (columns, _) = (PAGE, TABLES[heading]) if heading in TABLES else (README, ([S, Q], ()))
    skip_what_cannot_be_scored(columns)
    names = page[page.index(heading) :].splitlines()[0].strip("|").split("|")[1:]
    for name, column in zip(names, columns, strict=True):
        [n] = {row.n for row in tables()[column].values()}
        assert f"n = {n}" in name


def skip_what_cannot_be_scored(columns):
    if IFEVAL in columns and (problem := model_metrics.ifeval.problem()):
        pytest.skip(problem)


def said(column, label):
    """A difference in a sentence, such as "+6.9 (+1.3 to +12.5)"; whether it is shown stands in
    the table."""
    row = tables()[column][label]
    return f"{signed(row.versus.difference)} ({span(row.versus.interval)})"


def value(column, label):
    return number(tables()[column][label].value)


def memorised(column):
    """How many of greedy decoding's answers are the memorised ones."""
    greedy = tables()[column]["greedy"]
    return f"{round(greedy.beside['memory_match'] * greedy.n / 100)} of {greedy.n}"


def sentences():
    """Those of the page that have numbers."""
    yield (
        f"Without ten retrieval heads, {value(S, MASKED)} % of SmolLM2's answers contain the "
        f"passage's, in place of {value(S, 'greedy')} %: {said(S, MASKED)}, shown; with Qwen 0.5B "
        f"the difference is {said(Q, MASKED)} and with Gemma {said(G, MASKED)}, not shown."
    )
    random = f"{MASKED}, random heads uniform"
    minus = f"{MASKED}: {MINUS}"
    yield (
        f"Without ten random heads it is {said(S, random)} and {said(Q, random)}, not shown; "
        f"retrieval minus random heads is {said(S, minus)}, shown, and {said(Q, minus)}, not shown."
    )
    yield (
        f"In DeCoRe, retrieval heads do more for SmolLM2 than random ones, {said(S, MINUS10)} with "
        f"ten and {said(S, MINUS20)} with twenty, shown; for Qwen 0.5B {said(Q, MINUS10)} and "
        f"{said(Q, MINUS20)}, not shown. With SmolLM2, random heads lose to greedy decoding: "
        f"{said(S, RANDOM10)} and {said(S, RANDOM20)}, shown."
    )
    yield (
        f"On NQ-Swap the default, ten heads and the entropy as α, has {said(S, N10)} with SmolLM2, "
        f"{said(Q, N10)} with Qwen 0.5B, {said(L, N10)} with Qwen 1.5B and {said(G, N10)} with "
        "Gemma: not shown."
    )
    yield (
        "There, one of six settings of DeCoRe has a gain that is shown, twenty heads and a "
        f"constant α of 0.5 with SmolLM2: {said(S, STATIC)}; it has {said(Q, STATIC)} with Qwen "
        f"0.5B, {said(L, STATIC)} with Qwen 1.5B and {said(G, STATIC)} with Gemma, not shown."
    )
    yield (
        f"Context-aware decoding has {said(S, CAD)} with SmolLM2, shown; {said(Q, CAD)} with Qwen "
        f"0.5B, {said(L, CAD)} with Qwen 1.5B and {said(G, CAD)} with Gemma, not shown."
    )
    yield (
        f"On MemoTrap, where the paper gains, the default has {said(M, N10)} with SmolLM2, shown, "
        f"and {said(MQ, N10)} with Qwen 0.5B, not shown; ten random heads have "
        f"{said(M, RANDOM10)} and {said(MQ, RANDOM10)}, shown."
    )
    yield (
        f"On NQ-Open, where the passage is right, Qwen 0.5B has {said(OPEN, N10)} with the "
        f"default, {said(OPEN, STATIC10)} with a constant α and {said(OPEN, CAD)} with "
        "context-aware decoding: not shown."
    )
    yield (
        f"On TruthfulQA the default has {said(TRUE, N10)} of MC2, shown, ten random heads "
        f"{said(TRUE, RANDOM10)}, not shown; retrieval minus random heads is "
        f"{said(TRUE, MINUS10)}, shown. On XSum it has {said(XSUM, N10)} of ROUGE-L, not shown."
    )
    yield (
        f"Greedy decoding gives the memorised answer to {memorised(S)} questions with SmolLM2, "
        f"{memorised(Q)} with Qwen 0.5B, {memorised(L)} with Qwen 1.5B and {memorised(G)} with "
        "Gemma."
    )


SHOWN = {
    S: {MASKED, f"{MASKED}: {MINUS}", RANDOM10, MINUS10, RANDOM20, MINUS20, STATIC, CAD},
    Q: set(),
    L: set(),
    G: {f"{MASKED}: {MINUS}"},
    M: {N5, N10, RANDOM10, N20, RANDOM20},
    MQ: {N20, RANDOM10, RANDOM20},
    OPEN: set(),
    TRUE: {N10, MINUS10},
    XSUM: set(),
}


@pytest.mark.parametrize("number", range(10))
def test_a_sentence_has_the_numbers_of_the_stored_runs(number):
    assert [*sentences()][number] in " ".join(PAGE.split())
    assert f"{memorised(S)} and {memorised(Q)} questions" in README


@pytest.mark.parametrize("column", SHOWN, ids=" ".join)
def test_what_the_sentences_call_shown_is_shown(column):
    rows = tables()[column].items()
    assert {label for label, row in rows if row.shown} == SHOWN[column]
