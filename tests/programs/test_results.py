"""Every number of the results, on their page and in the README, is that of the stored runs."""

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


S = "smollm2", "nq-swap"
Q = "qwen", "nq-swap"
G = "gemma", "nq-swap"
M = "smollm2", "memotrap"
COLUMNS = [S, Q, G, M]
MINUS = "retrieval − random heads uniform"
N5 = "decore-entropy, N = 5"
N10 = "decore-entropy, N = 10"
N20 = "decore-entropy, N = 20"
STATIC = "decore-static, N = 20, α = 0.5"
MASKED = "masked, N = 10"
CAD = "cad, α = 0.5"
SHORT = {  # row of README's table → label
    "greedy": "greedy",
    "10 retrieval heads masked": MASKED,
    "DeCoRe entropy, N = 10 (the default)": N10,
    "DeCoRe entropy, N = 20": N20,
    "20 retrieval heads minus 20 random ones": f"{N20}: {MINUS}",
    "context-aware decoding": CAD,
}


def test_the_table_of_the_page_is_that_of_the_stored_runs():
    expected = table_of(COLUMNS)
    assert cells_of(PAGE, "| setup |") == {
        label: [line.get(column, "") for column in COLUMNS] for label, line in expected.items()
    }


def test_the_table_of_the_readme_is_that_of_the_stored_runs():
    expected = table_of([S, Q])
    assert cells_of(README, "| NQ-Swap") == {
        short: [expected[label][column] for column in (S, Q)] for short, label in SHORT.items()
    }


def test_all_setups_of_a_column_have_the_same_items_and_the_tables_say_how_many():
    for page, heading, columns in (PAGE, "| setup |", COLUMNS), (README, "| NQ-Swap", [S, Q]):
        names = page[page.index(heading) :].splitlines()[0].strip("|").split("|")[1:]
        for name, column in zip(names, columns, strict=True):
            [n] = {row.n for row in tables()[column].values()}
            assert f"n = {n}" in name


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
    random = f"{MASKED}, random heads uniform"
    yield (
        f"Without ten retrieval heads, {value(S, MASKED)} % of SmolLM2's answers contain the "
        f"passage's, in place of {value(S, 'greedy')} %: {said(S, MASKED)}, shown."
    )
    yield f"Without ten random heads the difference is {said(S, random)}, not shown."
    yield f"Retrieval minus random heads is {said(S, f'{MASKED}: {MINUS}')}, shown."
    yield (
        f"In DeCoRe, 20 retrieval heads do more for SmolLM2 than 20 random ones: "
        f"{said(S, f'{N20}: {MINUS}')}, shown."
    )
    yield f"Ten heads do {said(S, f'{N10}: {MINUS}')} more, not shown."
    yield (
        f"Against greedy decoding no gain of DeCoRe is shown: SmolLM2 has {said(S, N10)} with the "
        f"default, N = 10, {said(S, N20)} with N = 20, and {said(S, STATIC)} with N = 20 and a "
        "constant α of 0.5."
    )
    yield (
        f"Context-aware decoding has {said(S, CAD)}, shown; with Qwen 0.5B {said(Q, CAD)} and with "
        f"Gemma {said(G, CAD)}, not shown."
    )
    yield (
        f"With Qwen 0.5B nothing is shown; the default has {said(Q, N10)}, and masking its ten "
        f"retrieval heads {said(Q, MASKED)}."
    )
    yield (
        f"With Gemma, DeCoRe with ten random heads has {said(G, f'{N10}, random heads uniform')}, "
        f"shown; with ten retrieval heads {said(G, N10)}, not shown."
    )
    yield (
        f"On MemoTrap, where the paper gains, SmolLM2 has {said(M, N5)} with N = 5, shown, and "
        f"{said(M, N10)} with the default, not shown."
    )
    yield (
        f"Greedy decoding gives the memorised answer to {memorised(S)} questions with SmolLM2, "
        f"{memorised(Q)} with Qwen 0.5B and {memorised(G)} with Gemma."
    )


SHOWN = {
    S: {MASKED, f"{MASKED}: {MINUS}", f"{N20}: {MINUS}", CAD},
    Q: set(),
    G: {f"{N10}, random heads uniform"},
    M: {N5, f"{N20}, random heads uniform"},
}


@pytest.mark.parametrize("number", range(11))
def test_a_sentence_has_the_numbers_of_the_stored_runs(number):
    assert [*sentences()][number] in " ".join(PAGE.split())
    assert f"{memorised(S)} and {memorised(Q)} questions" in README


@pytest.mark.parametrize("column", SHOWN, ids=" ".join)
def test_what_the_sentences_call_shown_is_shown(column):
    rows = tables()[column].items()
    assert {label for label, row in rows if row.shown} == SHOWN[column]
