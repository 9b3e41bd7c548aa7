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

from cli.entry import run_program
from cli.options import parser
from paper.facts import among, choose, fill, order, others_of, row_of

CONDITIONS = ("conflict", "agreement", "listed", "documents", "irrelevant")
KINDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def load():
    """All facts, shuffled: kind, subject, truth and false, lists of spellings each."""
    facts = []
    for kind, table in KINDS.items():
        answers = [row["answers"] for row in table["facts"]]
        for row in table["facts"]:
            wrong = [a for a in answers if a != row["answers"]]
            for subject in row["subjects"]:
                false = min(wrong, key=lambda a: order(subject + a[0]))
                fact = dict(kind=kind, subject=subject, truth=row["answers"], false=false)
                facts.append(fact)
    return sorted(facts, key=lambda f: order(name(f)))


def name(fact):
    return f"fresh {fact['kind']}:{fact['subject']}"


def sentence(fact, value="truth"):
    """The passage of a fact that implies its truth, or what is false."""
    wording = choose(KINDS[fact["kind"]]["implied"], name(fact))
    return fill(wording, fact, fact[value][0])


def passage(fact, condition, facts):
    """The passage of a fact in a condition."""

    def others(same_kind):
        of_kind = [f for f in facts if (f["kind"] == fact["kind"]) == same_kind]
        others = others_of(fact, of_kind, lambda f: name(fact) + name(f))
        return [f for f in others if f["subject"] != fact["subject"]]

    if condition == "irrelevant":
        return sentence(others(False)[0])
    if condition == "agreement":
        return sentence(fact)
    if condition == "documents":
        first, last = map(sentence, others(False)[:2])
        texts = first, sentence(fact, "false"), last
        return " ".join(f"[{i}] {text}" for i, text in enumerate(texts, 1))
    if condition == "listed":
        form = KINDS[fact["kind"]]["listed"]
        return among(others(True), form, fact, fact["false"][0], name(fact))
    return sentence(fact, "false")


def questions(condition):
    """Yields rows, as of `row_of`."""
    facts = load()
    value = "truth" if condition in ("agreement", "irrelevant") else "false"
    for fact in facts:
        context = passage(fact, condition, facts)
        yield row_of(name(fact), fact, KINDS[fact["kind"]], context, value)


def main():
    p = parser(__doc__)
    p.add_argument("condition", choices=CONDITIONS)
    for row in questions(p.parse_args().condition):
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(run_program(main))
