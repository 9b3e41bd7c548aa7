"""The values of every stored run, computed again from its lines by code of its own.

What pages print is made of them by functions of which test_report and test_statistics judge; the
tables of the pages of results are compared as texts."""

import math
import re
import string
from pathlib import Path

import pytest

from paper.report import stored
from results import tables

RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(path.relative_to(RESULTS) for path in RESULTS.rglob("*.jsonl.xz"))


def plain(text):
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def short_answer(line):
    answer = plain(line["prediction"].split("\n")[0])
    references = [plain(text) for text in line["references"] if plain(text)]
    contained = any(text in answer for text in references)
    return {"answer_contained": float(contained), "exact_match": float(answer in references)}


def micro(line):
    return {"micro": float(line["scores_true"][0] > line["scores_false"][0])}


def mc2(line):
    true, false = (sum(map(math.exp, line[f"scores_{side}"])) for side in ("true", "false"))
    return {"mc2": true / (true + false)}


VALUES = {"nq-open": short_answer, "nq-swap": short_answer, "memotrap": micro, "truthfulqa-mc": mc2}


def of_text(line):
    words = line["prediction"].split()
    letters = {"letters": sum(map(len, words)) / len(words)} if words else {}
    return letters | {"ended": float(line["stop"] != "length")}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_values_of_stored_runs_are_those_of_a_second_computation(path):
    places = stored.run_files(RESULTS / path)
    for place in places:
        run = stored.read(place, texts=True)
        assert len(run.lines) == len(run.values) > 0
        for line, values in zip(run.lines, run.values):
            expected = VALUES.get(run.task, lambda line: {})(line)
            if "entropies" in line:
                expected |= of_text(line)
            for name, value in expected.items():
                assert math.isclose(values[name], value), (place, line["index"], name)
    assert places


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_tables_of_a_page_are_those_of_the_stored_runs(path):
    page = path.read_text(encoding="utf-8")
    assert tables.filled(page) == page


def test_every_table_is_on_a_page():
    pages = "".join(path.read_text(encoding="utf-8") for path in tables.PAGES)
    assert {*re.findall(r"<!-- (\w+) -->\n\|", pages)} == tables.TABLES.keys()


def test_the_figure_has_all_runs_of_explore():
    assert "536 runs" in tables.explored().get_supxlabel()
