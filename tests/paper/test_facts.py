"""The facts that a model may know, their halves, and the passages about them."""

import json
import re
import sys
import unicodedata
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from paper.facts import HALVES, PASSAGES, VALUES, WORDINGS, __main__, fill, fresh, load, questions
from paper.tasks import TASKS, data
from tests.checkpoints import write_lines

FACTS = [fact for half in HALVES for fact in load(half)]
PILOT = Path("paper/facts/pilot.txt").read_text(encoding="utf-8").split("\n")[:-1]
ROWS = {key: list(questions(*key)) for key in product(HALVES, PASSAGES, VALUES)}


def fold(text):
    letters = unicodedata.normalize("NFD", text)
    return "".join(c for c in letters if not unicodedata.combining(c)).lower()


def says(text, answer):
    """Whether a text contains an answer as whole words."""
    return re.search(rf"(?<!\w){re.escape(fold(answer))}(?!\w)", fold(text))


def test_each_kind_has_facts_in_both_halves():
    counts = Counter((fact["half"], fact["kind"]) for fact in FACTS)
    assert set(counts) == set(product(HALVES, WORDINGS))
    assert len(FACTS) >= 900 and min(counts.values()) >= 15


def test_no_subject_has_two_facts():
    assert max(Counter(fact["subject"] for fact in FACTS).values()) == 1


def test_subjects_of_the_pilot_are_only_explored():
    assert len(set(PILOT)) == 160
    seen = [fact for fact in FACTS if fact["subject"] in PILOT]
    assert len(seen) > 120
    assert {(fact["kind"], fact["half"]) for fact in seen} == {("capital", "explore")}


def test_neither_answer_contains_the_other_nor_does_the_question():
    for fact in FACTS:
        for true, false in product(fact["truth"], fact["false"]):
            assert fold(true) not in fold(false) and fold(false) not in fold(true), fact
        for answer in fact["truth"] + fact["false"]:
            assert not says(fact["subject"], answer), fact


@pytest.mark.parametrize("half", HALVES)
def test_a_passage_gives_its_value_and_not_the_other(half):
    for passage in PASSAGES:
        rows = zip(ROWS[half, passage, "false"], ROWS[half, passage, "true"], strict=True)
        for false, true in rows:
            assert false["id"] == true["id"] and false["memory"] == true["answers"]
            assert "memory" not in true
            for row, other in ((false, true), (true, false)):
                assert says(row["context"], row["answers"][0]), row
                assert not any(says(row["context"], answer) for answer in other["answers"]), row
                assert not row["context"].startswith(row["begin"]) and "{" not in row["context"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("passage", ("stated", "implied"))
def test_both_values_have_the_same_wording_and_all_three_are_used(half, passage):
    used = {kind: set() for kind in WORDINGS}
    rows = zip(load(half), ROWS[half, passage, "false"], ROWS[half, passage, "true"], strict=True)
    for fact, false, true in rows:
        contexts = [
            (fill(wording, fact, fact["false"][0]), fill(wording, fact, fact["truth"][0]))
            for wording in WORDINGS[fact["kind"]][passage]
        ]
        used[fact["kind"]].add(contexts.index((false["context"], true["context"])))
    assert used == dict.fromkeys(WORDINGS, {0, 1, 2})


@pytest.mark.parametrize("half", HALVES)
def test_a_list_has_six_true_sentences_about_others_of_its_half(half):
    sentences = {kind: [] for kind in WORDINGS}
    for fact, wording in product(load(half), range(3)):
        text = WORDINGS[fact["kind"]]["listed"][wording]
        sentences[fact["kind"]].append(fill(text, fact, fact["truth"][0]))
    places = set()
    for row in ROWS[half, "listed", "false"]:
        true = sorted((s for s in sentences[row["kind"]] if s in row["context"]), key=len)
        rest = row["context"]
        for sentence in reversed(true):
            rest = rest.replace(sentence, "_", 1)
        assert rest.count("_") == 6 and says(rest, row["answers"][0]), row
        places.add(len(rest) - len(rest.lstrip("_ ")))
    assert len(places) == 7


def test_the_order_is_fixed_and_mixes_the_kinds():
    rows = ROWS["confirm", "implied", "false"]
    first = ["US city:Provo", "symbol:titanium", "city:Ibadan", "US city:Houston", "city:Kenitra"]
    assert [row["id"] for row in rows[:5]] == first
    assert {row["kind"] for row in rows[:100]} == set(WORDINGS)


def test_the_program_prints_rows_of_the_task_qa(monkeypatch, capsys, tmp_path):
    options = "--half explore --passage implied --value false"
    monkeypatch.setattr(sys, "argv", ["facts", *options.split()])
    __main__.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == ROWS["explore", "implied", "false"]
    items = data.load_data(TASKS["qa"], write_lines(tmp_path / "qa.jsonl", rows), None)[0]
    assert [item["references"] for item in items] == [row["answers"] for row in rows]


def test_an_unknown_condition_of_fresh_facts_is_refused(refused):
    assert "invalid choice: 'agrement'" in refused(fresh.main, "agrement")
