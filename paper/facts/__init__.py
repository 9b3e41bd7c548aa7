"""Facts that a small model may know, and passages that contradict them or agree with them.

facts.jsonl has a fact a line, wordings.json the sentences of each kind, README.md the sources."""

import hashlib
import json
from pathlib import Path

FACTS = Path(__file__).with_name("facts.jsonl")
WORDINGS = json.loads(Path(__file__).with_name("wordings.json").read_text(encoding="utf-8"))
HALVES = ("explore", "confirm")
PASSAGES = ("stated", "implied", "listed")
VALUES = ("false", "true")
N_OTHERS = 6  # sentences about other subjects in a list


def order(text):
    """A fixed number of a text, as hexadecimal digits; rows are shuffled and chosen by it."""
    return hashlib.sha256(text.encode()).hexdigest()


def load(half):
    """The facts of a half, shuffled."""
    facts = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]
    return sorted((f for f in facts if f["half"] == half), key=lambda f: order(name(f)))


def name(fact):
    return f"{fact['kind']}:{fact['subject']}"


def fill(wording, fact, value):
    """A wording with the subject of a fact and a value. Its sentences begin with capitals."""
    text = wording.format(c=fact["subject"], x=value)
    return text[0].upper() + text[1:]


def passage(kind, fact, value, facts):
    """A passage that gives a fact's subject a value.

    kind: one of PASSAGES. facts: those of the half, for the other sentences of a list. The wording,
    the others and their order follow from the subject alone."""
    wordings = WORDINGS[fact["kind"]][kind]
    wording = wordings[int(order(f"{kind} {name(fact)}"), 16) % len(wordings)]
    sentence = fill(wording, fact, value)
    if kind != "listed":
        return sentence
    answers = {*fact["truth"], *fact["false"]}
    others = [f for f in facts if f["kind"] == fact["kind"] and answers.isdisjoint(f["truth"])]
    others.sort(key=lambda f: order(f"{name(fact)} {name(f)}"))
    sentences = [fill(wording, f, f["truth"][0]) for f in others[:N_OTHERS]]
    place = int(order(f"place {name(fact)}"), 16) % (N_OTHERS + 1)
    sentences.insert(place, sentence)
    return " ".join(sentences)


def questions(half, kind, value):
    """Rows for `--task qa` (see docs/own-data.md). kind: of the passages. value: one of VALUES."""
    facts = load(half)
    for fact in facts:
        key = "truth" if value == "true" else "false"
        answers = fact[key]
        wordings = WORDINGS[fact["kind"]]
        row = {
            "id": name(fact),
            "kind": fact["kind"],
            "question": fill(wordings["question"], fact, None),
            "context": passage(kind, fact, answers[0], facts),
            "begin": fill(wordings["begin"], fact, None),
            "answers": answers,
        }
        yield row | ({"memory": fact["truth"]} if value == "false" else {})
