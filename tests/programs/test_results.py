"""Every number of the results, on their page and in the README, is that of the stored runs:
recomputed.py computes the tables again, and numbers in prose stand in a table."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.programs import recomputed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Results\n")[2]
README = README.partition("\n## ")[0]
PAGES = {"results": PAGE, "README": README}
NUMBER = r"[+−]?\d+(?:\.\d+)?"
DIFFERENCE = re.compile(
    rf"(\*\*)?([+−]\d+\.\d+)(?:\*\*)?(?: \(({NUMBER}) to ({NUMBER})\))?(?:, p (<?[\d.]+))?"
)
WON_LOST = re.compile(rf",? ({NUMBER}) : ({NUMBER})$")
# Numbers in prose that stand in no table → where they are from.
ELSEWHERE = {
    "95": "the level of intervals",
    "0.05": "the level of tests",
    "40": "texts of each setup that were read",
    "4": "bits of the weights, docs/data.md",
}


def columns():
    for name, page in PAGES.items():
        for table, (_, heads, _) in enumerate(recomputed.checked(page)):
            yield from ((name, table, column) for column in range(1, len(heads)))


def facts_of(name, table, column):
    _, heads, _ = recomputed.checked(PAGES[name])[table]
    return recomputed.column_of(heads[0], heads[column])


@cache
def chosen():
    return recomputed.choices(PAGE)


def sides_of(label, facts):
    """(runs, the runs that they are compared with) of a row; None for a row of values."""
    first, *second = label.split(" − ")
    if second and second[0].startswith("random heads") and ": " in first:
        first = first.rpartition(": ")[0]
        second = [f"{first}, random heads"]
    names = [first, *(second or ["greedy"])]
    setups = [recomputed.setup_of(name, facts["chooser"], chosen()) for name in names]
    return tuple(tuple(recomputed.runs_of(setup, facts)) for setup in setups)


def near(text, value, tolerance=0):
    """Whether a printed number is a value, but for rounding and a tolerance."""
    number = float(text.replace("−", "-"))
    digits = len(text.partition(".")[2])
    return abs(number - value) <= 0.5 * 10**-digits + tolerance + 1e-6


def is_end(text, means, share):
    """Whether a printed number has this share of the means below it, but for rounding and four
    standard errors of resampling: 4,000 times here, 10,000 times for the page."""
    number = float(text.replace("−", "-"))
    noise = 4 * np.sqrt(share * (1 - share) * (1 / 4000 + 1 / 10_000))
    below, up_to = (means < number - 0.051).mean(), (means < number + 0.051).mean()
    return below < share + noise and up_to > share - noise


def is_p(text, p, tolerance):
    if text.startswith("<"):
        return p - tolerance < float(text[1:])
    digits = 1 - int(np.floor(np.log10(float(text))))  # two that count
    return abs(float(text) - p) <= 0.5 * 10**-digits + tolerance + 1e-9


@cache
def p_of(runs, others, metric):
    ours, theirs, questions = recomputed.values(runs, others, metric)
    whole = metric in recomputed.WHOLE
    p, tolerance = recomputed.p_of_signs(ours, theirs, questions, whole)
    if whole and len(runs) == len(others) == 1 and len(set(questions)) == len(questions):
        won, lost = (ours > theirs).sum(), (ours < theirs).sum()
        assert p == pytest.approx(recomputed.mcnemar(int(won), int(lost)))
    return p, tolerance


def check_cell(text, label, facts):
    """Check a cell. Returns (runs, others, metric) if it has a p."""
    if not text:
        return None
    runs, others = sides_of(label, facts)
    metric = facts["metrics"][0]
    ours, theirs, questions = recomputed.values(runs, others, metric)
    assert len(questions) == facts["n"]
    if pair := WON_LOST.search(text):
        signs = np.sign(ours[:, None] - theirs[None])
        for count, sign in zip(pair.groups(), (1, -1)):
            assert near(count, (signs == sign).sum(-1).mean()), (label, text)
        text = text[: pair.start()]
    if part := re.fullmatch(r"(\d+) of (\d+)", text):
        assert (int(part[1]), int(part[2])) == (round(ours.mean(0).sum()), facts["n"])
        return None
    if re.fullmatch(rf"\d.*( / {NUMBER})*", text):
        for number, name in zip(text.split(" / "), facts["metrics"], strict=True):
            mean = recomputed.values(runs, others, name)[0].mean()
            assert near(number, 100 * mean), (label, text, name, mean)
        return None
    bold, difference, low, high, p = DIFFERENCE.fullmatch(text).groups()
    differences = ours.mean(0) - theirs.mean(0)
    assert near(difference, 100 * differences.mean()), (label, text, differences.mean())
    means = 100 * recomputed.resampled(differences, questions)
    if low:
        assert is_end(low, means, 0.025) and is_end(high, means, 0.975), (label, text)
    else:
        assert np.ptp(np.percentile(means, (2.5, 97.5))) < 1e-9, (label, text)
    if p is None:
        assert not bold
        return None
    assert is_p(p, *p_of(runs, others, metric)), (label, text, p_of(runs, others, metric))
    return runs, others, metric


@pytest.mark.parametrize("name, table, column", [*columns()])
def test_a_column_is_that_of_the_stored_runs(name, table, column):
    facts = facts_of(name, table, column)
    skip_ifeval(facts)
    _, _, rows = recomputed.checked(PAGES[name])[table]
    for label, *texts in rows:
        check_cell(texts[column - 1], label, facts)


def skip_ifeval(facts):
    if facts["task"] == "ifeval":
        pytest.skip("its checkers are a library")


@cache
def families():
    """[{(runs, others, metric): (p, bold)}] of the page of results."""
    found = []
    for table, (above, heads, rows) in enumerate(recomputed.checked(PAGE)):
        together = {}
        for column in range(1, len(heads)):
            family = together if "all p of this table" in above else {}
            facts = facts_of("results", table, column)
            for label, *texts in rows if facts["task"] != "ifeval" else ():
                if ", p " in texts[column - 1]:
                    key = (*sides_of(label, facts), facts["metrics"][0])
                    family[key] = p_of(*key)[0], texts[column - 1].startswith("**")
            if family and family not in found:
                found.append(family)
    return found


def test_bold_is_what_holms_correction_shows_within_the_family():
    for family in families():
        shown = recomputed.holm([p for p, _ in family.values()])
        assert shown == [bold for _, bold in family.values()], family


def test_bold_cells_of_the_readme_are_those_of_the_page():
    known = {key: bold for family in families() for key, (_, bold) in family.items()}
    for table, (_, heads, rows) in enumerate(recomputed.checked(README)):
        for column in range(1, len(heads)):
            facts = facts_of("README", table, column)
            for label, *texts in rows:
                if ", p " in texts[column - 1]:
                    key = (*sides_of(label, facts), facts["metrics"][0])
                    assert known[key] == texts[column - 1].startswith("**"), label


def test_a_family_by_model_and_task_leaves_out_no_stored_run():
    for table, (above, heads, rows) in enumerate(recomputed.checked(PAGE)):
        for column in range(1, len(heads)):
            facts = facts_of("results", table, column)
            cells = {label: texts[column - 1] for label, *texts in rows}
            if "all p of this table" in above or not any(", p " in x for x in cells.values()):
                continue
            used = set()
            for label in (label for label, text in cells.items() if text):
                used.update(*sides_of(label, facts))
            assert used == set(recomputed.of_column(facts)), heads[column]


# Prose


def prose(page):
    """Paragraphs, without sections on the plan and the commands, code, tables, names of models and
    settings."""
    sections = re.split(r"(?m)^#+ ", page)
    text = "\n".join(x for x in sections if not re.match(r".*\b([Pp]lan|[Cc]ommands)\b", x))
    text = re.sub(r"(?ms)^```.*?^```|^\|.*?$|^    .*?$|\]\(.*?\)|`.*?`", "", text)
    text = " ".join(text.split())
    models = r"Qwen(2.5-Coder)?[ -][\d.]+B|Gemma 3 270M|SmolLM2(-135M)?"
    return re.sub(rf"{models}|\b[Nnα] = [\d.]+", "", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_number_in_prose_stands_in_a_table(name):
    """Differences with their intervals, "12 of 400"; other numbers alone."""
    tables = [table for page in PAGES.values() for table in recomputed.checked(page)]
    cells = {cell.replace("*", "") for _, heads, rows in tables for row in rows for cell in row}
    heads = {head for _, heads, _ in tables for head in heads}
    text = prose(PAGES[name])
    differences = re.findall(rf"[+−]\d+\.\d+(?: \({NUMBER} to {NUMBER}\))?", text)
    for difference in differences:
        assert any(re.match(rf"{re.escape(difference)}(,|$| )", cell) for cell in cells), difference
        text = text.replace(difference, "")
    known = set(re.findall(r"[\d,]*\d(?:\.\d+)?", " ".join([*cells, *heads])))
    for number in re.findall(r"\d+ of \d+|(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)", text):
        assert number.strip(",") in known | cells | ELSEWHERE.keys(), number
