"""The miniature's world: 64 invented countries, what a model can memorise about them, and texts
that agree or disagree.

    python -m miniature.data --split conflict --n 3

prints JSON lines with `prompt`, `answer` and `memory`. The answer is what the passage says, or the
fact if no passage says it. The memory is what the training texts say, or null. The same seed gives
the same lines on every machine.

A training document is a prompt and its answer, of one of five kinds:

    closed      no passage                                        the memorised fact
    open        a passage about names never seen as facts         what the passage says
    agree       a passage that states the memorised fact          the fact
    irrelevant  a passage that does not contain the answer        the memorised fact
    conflict    a passage that contradicts the memorised fact     what the passage says
"""

import json
import math
import random
import sys
import zlib
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import NamedTuple

from cli.entry import run_program
from cli.options import number, parser, positive
from runtime.errors import InputError

N_COUNTRIES = 64
RELATIONS = ("capital", "ruler", "longest river", "language", "founder")
N_TRAINED_CONFLICTS = 64  # of the 320 facts; only test splits contradict the others
# The most frequent fact is ten times as frequent as the rarest; log-uniform between.
POPULARITY = 10

# Shares of the kinds: first the model learns to copy, then it learns facts, and a little about
# conflicts.
COPYING = {"open": 0.95, "closed": 0.05}
EVERYTHING = {"closed": 0.30, "open": 0.33, "agree": 0.12, "irrelevant": 0.15, "conflict": 0.10}

SPLITS = ("conflict", "conflict-known", "open", "closed", "irrelevant", "needle")
MOST = (5, 4)  # facts and filler sentences in a passage

# Syllables of names, and sentences: in fillers, {a} is an adjective, {n} goods, {p} a place, {d} a
# time of day, {s} a season.
WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


class Fact(NamedTuple):
    country: str
    relation: str
    value: str


class Item(NamedTuple):
    prompt: str
    answer: str
    memory: str | None


def held_out(name):
    """Whether training documents never contain a name: a fifth of all, chosen by checksum."""
    return zlib.crc32(name.encode()) % 5 == 0


def new_name(rng, kind, unseen, avoid):
    """Draw a name of two to four syllables. unseen: whether it is one of the held-out names."""
    while True:
        length = rng.choice((1, 1, 2))
        stem = "".join(
            rng.choice(WORDS[part]) for _ in range(length) for part in ("onsets", "vowels", "codas")
        )
        name = (stem + rng.choice(WORDS["endings"][kind])).capitalize()
        if held_out(name) == unseen and name not in avoid:
            return name


def make_world():
    """Draw all names, the 320 facts, the running sum of their popularity, and the facts that
    training contradicts."""
    rng, names, facts = random.Random("world/0"), [], []
    for _ in range(N_COUNTRIES):
        names.append(new_name(rng, "country", False, names))
    for country in names[:]:
        for relation in RELATIONS:
            names.append(new_name(rng, relation, False, names))
            facts.append(Fact(country, relation, names[-1]))
    popularity = accumulate([math.exp(rng.uniform(0, math.log(POPULARITY))) for _ in facts])
    return set(names), facts, list(popularity), sorted(rng.sample(facts, N_TRAINED_CONFLICTS))


NAMES, FACTS, POPULARITY_SUMS, CONFLICTS = make_world()


def made_up(rng, unseen, country=None, relation=None):
    """Draw a fact whose names no fact of the world uses."""
    relation = relation or rng.choice(RELATIONS)
    country = country or new_name(rng, "country", unseen, NAMES)
    return Fact(country, relation, new_name(rng, relation, unseen, NAMES))


def other_facts(rng, fact, n, unseen):
    """Draw n facts that do not answer the question about `fact`; some share its relation, some its
    country."""
    others = {}
    while len(others) < n:
        kind = rng.random()
        if kind < 0.15:  # another fact of the same country
            relation = rng.choice([r for r in RELATIONS if r != fact.relation])
            other = (
                next(f for f in FACTS if f[:2] == (fact.country, relation))
                if fact.country in NAMES
                else made_up(rng, unseen, fact.country, relation)
            )
        elif kind < 0.30:
            other = rng.choice(FACTS)
        else:
            other = made_up(rng, unseen, relation=fact.relation if kind < 0.65 else None)
        if other[:2] != fact[:2]:
            others.setdefault(other[:2], other)
    return list(others.values())


def passage(rng, facts, n_fillers):
    """A sentence for each fact and filler sentences, in random order."""
    sentences = []
    for fact in facts:
        start = rng.choice(WORDS["openers"]) + "t" if rng.random() < 0.4 else "T"
        sentences.append(f"{start}he {fact.relation} of {fact.country} is {fact.value}.")
    for _ in range(n_fillers):
        words = {key: rng.choice(choices) for key, choices in WORDS["in fillers"].items()}
        sentences.append(rng.choice(WORDS["fillers"]).format(**words))
    rng.shuffle(sentences)
    return "Context: " + " ".join(sentences) + "\n"


def make_item(rng, kind, fact, unseen, most=MOST):
    """Make one item about `fact`. kind: that of a document, or a test split.

    unseen: draw all further names from the held-out ones. most: the largest numbers of facts and of
    filler sentences in the passage."""
    context, answer = "", fact.value
    if kind == "conflict":
        answer = new_name(rng, fact.relation, unseen, NAMES)
    elif kind == "conflict-known":
        answer = rng.choice([f.value for f in FACTS if f.relation == fact.relation and f != fact])
    if kind == "needle":
        context = passage(rng, [fact], n_fillers=12)
    elif kind != "closed":
        stated = [] if kind == "irrelevant" else [fact._replace(value=answer)]
        others = other_facts(rng, fact, rng.randint(1, most[0]) - len(stated), unseen)
        context = passage(rng, others + stated, n_fillers=rng.randint(0, most[1]))
    question = f"Answer: The {fact.relation} of {fact.country} is"
    return Item(context + question, answer, None if kind in ("open", "needle") else fact.value)


def documents(mixture, seed, most=MOST):
    """Yield training documents without end, as items."""
    rng = random.Random(f"training/{seed}")
    while True:
        [kind] = rng.choices(list(mixture), list(mixture.values()))
        if kind == "open":
            fact = made_up(rng, unseen=False)
        elif kind == "conflict":
            fact = rng.choice(CONFLICTS)
        else:
            [fact] = rng.choices(FACTS, cum_weights=POPULARITY_SUMS)
        yield make_item(rng, kind, fact, unseen=False, most=most)


def make_split(name, n, seed=0):
    """Make n test items of a split (see README.md).

    Passages use held-out names, except in facts of the world."""
    if name == "closed" and n > len(FACTS):
        raise InputError(
            f"--n {n}: the closed split has {len(FACTS)} facts; ask for at most as many"
        )
    rng = random.Random(f"{name}/{seed}")
    facts = [fact for fact in FACTS if not (name.startswith("conflict") and fact in CONFLICTS)]
    rng.shuffle(facts)
    return [
        make_item(
            rng,
            name,
            made_up(rng, unseen=True) if name in ("open", "needle") else fact,
            unseen=True,
        )
        for fact in islice(cycle(facts), n)
    ]


def main():
    p = parser(__doc__)
    p.add_argument("--split", choices=SPLITS, required=True)
    p.add_argument("--n", type=positive, default=256, help="items (default: 256)")
    p.add_argument("--seed", type=number(int), default=0, help="which items (default: 0)")
    args = p.parse_args()
    for item in make_split(args.split, args.n, args.seed):
        print(json.dumps(item._asdict()))


if __name__ == "__main__":
    sys.exit(run_program(main))
