"""Fresh kinds of facts in fresh wordings: rows for `evaluate.py --task qa`.

    python -m paper.facts.fresh conflict > conflict.jsonl

fresh.json has kinds of facts that facts.jsonl has not, with wordings of their own. The order is a
fixed shuffle. A subject's hash chooses its wording and its false value, the same in all conditions:

    conflict      a sentence implies the false value
    agreement     the same sentence with the true value
    listed        seven sentences of one form, six of them true, of other subjects
    documents     three numbered documents; the second is that of conflict
    irrelevant    a sentence about another kind of subject; the truth is right"""

import json
import sys
from pathlib import Path

from paper.facts import N_OTHERS, among, fill, order, row_of

KINDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CONDITIONS = ("conflict", "agreement", "listed", "documents", "irrelevant")


def load():
    """All facts, shuffled: kind, subject, truth and false, lists of spellings each."""
    facts = []
    for kind, table in KINDS.items():
        answers = [row["answers"] for row in table["facts"]]
        for row in table["facts"]:
            for subject in row["subjects"]:
                wrong = sorted(
                    (a for a in answers if a != row["answers"]), key=lambda a: order(subject + a[0])
                )
                fact = dict(kind=kind, subject=subject, truth=row["answers"], false=wrong[0])
                facts.append(fact)
    return sorted(facts, key=lambda f: order(name(f)))


def name(fact):
    return f"fresh {fact['kind']}:{fact['subject']}"


def sentence(fact, answer):
    """The passage of a fact that implies an answer."""
    wordings = KINDS[fact["kind"]]["implied"]
    return fill(wordings[int(order(name(fact)), 16) % len(wordings)], fact, answer)


def others_of(fact, facts, same_kind):
    """Other subjects' facts in a fixed order, whose answers are neither of the fact's."""
    answers = {*fact["truth"], *fact["false"]}
    others = [
        f
        for f in facts
        if (f["kind"] == fact["kind"]) == same_kind
        and f["subject"] != fact["subject"]
        and answers.isdisjoint(f["truth"])
    ]
    return sorted(others, key=lambda f: order(name(fact) + name(f)))


def passage(fact, condition, facts):
    """The passage of a fact in a condition."""
    strangers = others_of(fact, facts, same_kind=False)
    if condition == "irrelevant":
        return sentence(strangers[0], strangers[0]["truth"][0])
    if condition == "agreement":
        return sentence(fact, fact["truth"][0])
    if condition == "documents":
        first, last = (sentence(f, f["truth"][0]) for f in strangers[:2])
        texts = first, sentence(fact, fact["false"][0]), last
        return " ".join(f"[{i}] {text}" for i, text in enumerate(texts, 1))
    if condition == "listed":
        form = KINDS[fact["kind"]]["listed"]
        others = others_of(fact, facts, same_kind=True)[:N_OTHERS]
        sentences = [fill(form, f, f["truth"][0]) for f in others]
        return among(sentences, fill(form, fact, fact["false"][0]), name(fact))
    return sentence(fact, fact["false"][0])


def questions(condition):
    """Yields rows, as of `row_of`."""
    facts = load()
    value = "truth" if condition in ("agreement", "irrelevant") else "false"
    for fact in facts:
        context = passage(fact, condition, facts)
        yield row_of(name(fact), fact, KINDS[fact["kind"]], context, value)


if __name__ == "__main__":
    for row in questions(sys.argv[1]):
        print(json.dumps(row, ensure_ascii=False))
