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


def choose(wordings, key):
    """One of some wordings, by a text."""
    return wordings[int(order(key), 16) % len(wordings)]


def others_of(fact, facts, key):
    """The facts whose truth is neither of a fact's answers, in the order of key(other)."""
    answers = {*fact["truth"], *fact["false"]}
    others = (f for f in facts if answers.isdisjoint(f["truth"]))
    return sorted(others, key=lambda f: order(key(f)))


def passage(kind, fact, value, facts):
    """A passage that gives a fact's subject a value.

    kind: one of PASSAGES. facts: those of the half, for the other sentences of a list. The wording,
    the others and their order follow from the subject alone."""
    wording = choose(WORDINGS[fact["kind"]][kind], f"{kind} {name(fact)}")
    if kind != "listed":
        return fill(wording, fact, value)
    same_kind = [f for f in facts if f["kind"] == fact["kind"]]
    others = others_of(fact, same_kind, lambda f: f"{name(fact)} {name(f)}")
    return among(others, wording, fact, value, name(fact))


def among(others, wording, fact, value, key):
    """The first N_OTHERS of other facts, which are true, and a fact with a value, at a place that
    follows from a text."""
    sentences = [fill(wording, f, f["truth"][0]) for f in others[:N_OTHERS]]
    place = int(order(f"place {key}"), 16) % (N_OTHERS + 1)
    sentences.insert(place, fill(wording, fact, value))
    return " ".join(sentences)


def row_of(name, fact, wordings, context, value):
    """A row for `--task qa` (see docs/own-data.md), and `kind`. value: of the context, "truth" or
    "false"."""
    row = {
        "id": name,
        "kind": fact["kind"],
        "question": fill(wordings["question"], fact, None),
        "context": context,
        "begin": fill(wordings["begin"], fact, None),
        "answers": fact[value],
    }
    return row | ({"memory": fact["truth"]} if value == "false" else {})


def questions(half, kind, value):
    """Yields rows, as of `row_of`. kind: of the passages. value: one of VALUES."""
    facts = load(half)
    value = "truth" if value == "true" else "false"
    for fact in facts:
        context = passage(kind, fact, fact[value][0], facts)
        yield row_of(name(fact), fact, WORDINGS[fact["kind"]], context, value)
