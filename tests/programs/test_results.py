"""Every number of the results, on their page and in the README, is that of the stored runs."""

import re
from functools import cache
from pathlib import Path

import pytest

from paper.report import results, stored
from paper.report.tables import number, p_text, signed, span

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen": "Qwen2.5-Coder-0.5B-Instruct",
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


def table_of(columns):
    """The lines of a table of these columns of `tables`, {label: {column: cell}}."""
    lines = {}
    for column in columns:
        for label, row in tables()[column].items():
            lines.setdefault(label, {})[column] = cell(row)
    return lines


def cells_of(page, heading):
    """{first cell: the others} of the table on a page whose heading begins so."""
    lines = page[page.index(heading) :].partition("\n\n")[0].splitlines()
    cells = ([x.strip() for x in line.strip("|").split("|")] for line in lines[2:])
    return {first: others for first, *others in cells}


COLUMNS = [("smollm2", "nq-swap"), ("qwen", "nq-swap"), ("gemma", "nq-swap"), ("smollm2", "memotrap")]
SHORT = {  # row of README's table → label
    "greedy": "greedy",
    "10 retrieval heads masked": "masked, N = 10",
    "DeCoRe entropy, N = 10 (the default)": "decore-entropy, N = 10",
    "DeCoRe entropy, N = 20": "decore-entropy, N = 20",
    "the same, minus 20 random heads": "decore-entropy, N = 20: retrieval − random heads uniform",
    "context-aware decoding": "cad, α = 0.5",
}


def test_the_table_of_the_page_is_that_of_the_stored_runs():
    cells = cells_of(PAGE, "| setup |")
    expected = table_of(COLUMNS)
    assert cells == {
        label: [line.get(column, "") for column in COLUMNS] for label, line in expected.items()
    }


def test_the_table_of_the_readme_is_that_of_the_stored_runs():
    cells = cells_of(README, "| NQ-Swap")
    expected = table_of(COLUMNS[:2])
    assert cells == {
        short: [expected[label][column] for column in COLUMNS[:2]]
        for short, label in SHORT.items()
    }


def test_all_setups_of_a_column_have_the_same_items_and_the_pages_say_how_many():
    for column in COLUMNS:
        [n] = {row.n for row in tables()[column].values()}
        heading = PAGE[PAGE.index("| setup |") :].splitlines()[0].split("|")[COLUMNS.index(column) + 2]
        assert re.search(rf"n = {n}\b", heading), column
    for column in COLUMNS[:2]:
        n = tables()[column]["greedy"].n
        heading = README[README.index("| NQ-Swap") :].splitlines()[0]
        assert re.search(rf"n = {n}\b", heading.split("|")[COLUMNS.index(column) + 2])


def versus(column, label):
    return tables()[column][label].versus


def memorised(column):
    """How many of greedy decoding's answers are the memorised one, and of how many."""
    greedy = tables()[column]["greedy"]
    return f"{round(greedy.beside['memory_match'] * greedy.n / 100)} of {greedy.n}"


def said(column, label):
    """A difference in a sentence: "+6.9 (+1.3 to +12.5)"."""
    row = versus(column, label)
    return f"{signed(row.difference)} ({span(row.interval)})"


def sentences():
    """The sentences of the page, with the numbers of the stored runs."""
    s, q, g, m = COLUMNS
    retrieval, random = "masked, N = 10", "masked, N = 10, random heads uniform"
    minus = "retrieval − random heads uniform"
    n10, n20, static = "decore-entropy, N = 10", "decore-entropy, N = 20", "decore-static, N = 20, α = 0.5"
    cad = "cad, α = 0.5"
    yield (
        f"Without ten retrieval heads SmolLM2 hardly reads: {number(tables()[s][retrieval].value)} % of its answers "
        f"contain the passage's, in place of {number(tables()[s]['greedy'].value)} % ({said(s, retrieval)[:5]}); without ten random "
        f"heads the difference is {said(s, random)}, and the difference between the two, {said(s, f'{retrieval}: {minus}')}, is shown."
    )
