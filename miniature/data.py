"""The miniature's world: 64 invented countries, what a model can memorise about them, and texts that agree or disagree.

    python -m miniature.data --split conflict --n 3

prints JSON lines with `prompt`, `answer` and `memory`. The answer is what the passage says, or the fact if no passage
says it. The memory is what the training texts say, or null. The same seed gives the same lines on every machine.

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
from itertools import cycle, islice
from typing import NamedTuple

import cli

N_COUNTRIES = 64
RELATIONS = ("capital", "ruler", "longest river", "language", "founder")
N_TRAINED_CONFLICTS = 64        # of the 320 facts; the others are contradicted in the test splits only
POPULARITY = 10                 # the most frequent fact is ten times as frequent as the rarest; log-uniform between

# Shares of the kinds: first the model learns to copy, then it learns facts, and a little about conflicts.
COPYING = {"open": 0.95, "closed": 0.05}
EVERYTHING = {"closed": 0.30, "open": 0.33, "agree": 0.12, "irrelevant": 0.15, "conflict": 0.10}

SPLITS = ("conflict", "conflict-known", "open", "closed", "irrelevant", "needle")
MOST = (5, 4)                   # facts and filler sentences in a passage

ONSETS = "b br c d dr f g gr h k kr l m n p r s st t th tr v w z".split()
VOWELS = "a e i o u".split()
CODAS = ("", "", "", "l", "m", "n", "r", "s", "rn", "nd", "lt", "v")
ENDINGS = {
    "country": "ia land mark or esse ovia un eth ara und mar ica".split(),
    "capital": "holm burg ton haven mouth stad mere ford gard port wick dal".split(),
    "ruler": "a ric wyn mund as ina or elle ard eus is old".split(),
    "longest river": "a el ine esk une ava ow is en ira ond ey".split(),
    "language": "ish ic an ese ari esh in ul ak onian ene ot".split(),
    "founder": "a ric wyn mund as ina or elle ard eus is old".split(),
}

OPENERS = ("Today ", "Travellers know that ", "Every child learns that ", "The old maps agree that ", "As a rule, ",
           "The chronicle says that ", "In our time ", "Merchants will tell you that ")

# {a} adjective, {n} goods, {p} place, {d} time of day, {s} season
FILLERS = (
    "Snow lies on the {a} hills until late {s}.", "The market by the {p} opens at {d}.",
    "A cold wind blows from the {p}.", "Nobody crosses the {p} before {d}.",
    "The {n} is kept in a {a} house near the {p}.", "Bread and {n} are sold at the {p}.",
    "Old people still sing about the {a} {p}.", "The road to the {p} is {a} and slow.",
    "At {d} the bells ring over the {p}.", "A {a} path leads to the {p}.", "Children carry {n} to the {p} at {d}.",
    "The {p} is {a} at {d}.", "Few visitors have seen the {a} {p}.", "The guide pays in {n} and sleeps until {d}.",
    "Rain fills the {p} every {s}.", "There is {n} in every kitchen.", "The harvest ends in {s} with songs and {n}.",
    "Boats bring {n} to the {a} {p}.",
)
WORDS = {
    "a": "quiet narrow bright green famous lonely steep white broad little misty golden".split(),
    "n": "honey salt wool silver tea paper amber barley oil glass copper wine".split(),
    "p": "harbour mill tower valley lake forest gate square garden shore bridge library".split(),
    "d": "dawn noon dusk midnight".split(),
    "s": "spring summer autumn winter".split(),
}


class Fact(NamedTuple):
    country: str
    relation: str
    value: str


class Item(NamedTuple):
    prompt: str
    answer: str
    memory: str | None


class World(NamedTuple):
    facts: tuple                # all 320
    cumulative: tuple           # running sum of their popularity
    conflicts: frozenset        # the facts that training may contradict
    names: frozenset            # every name that a fact uses


def held_out(name):
    """Whether a name never occurs in a training document: a fifth of all names, chosen by checksum."""
    return zlib.crc32(name.encode()) % 5 == 0


def new_name(rng, kind, unseen, avoid):
    """Draw a name of two to four syllables. unseen: whether it is one of the held-out names."""
    while True:
        length = rng.choice((1, 1, 2))
        stem = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(length))
        name = (stem + rng.choice(ENDINGS[kind])).capitalize()
        if held_out(name) == unseen and name not in avoid:
            return name


def make_world(seed=0):
    """Draw the countries, their facts and how popular each fact is."""
    rng = random.Random(f"world/{seed}")
    names, facts = set(), []

    def name(kind):
        names.add(new := new_name(rng, kind, unseen=False, avoid=names))
        return new

    for country in [name("country") for _ in range(N_COUNTRIES)]:
        facts += [Fact(country, relation, name(relation)) for relation in RELATIONS]
    popularity = [math.exp(rng.uniform(0, math.log(POPULARITY))) for _ in facts]
    cumulative = tuple(sum(popularity[: i + 1]) for i in range(len(facts)))
    return World(tuple(facts), cumulative, frozenset(rng.sample(facts, N_TRAINED_CONFLICTS)), frozenset(names))


def made_up(rng, world, unseen, country=None, relation=None):
    """Draw a fact whose names no fact of the world uses."""
    relation = relation or rng.choice(RELATIONS)
    country = country or new_name(rng, "country", unseen, world.names)
    return Fact(country, relation, new_name(rng, relation, unseen, world.names))


def other_facts(rng, world, fact, n, unseen):
    """Draw n facts that do not answer the question about `fact`; some share its relation, some its country."""
    known, others = fact.country in world.names, {}
    while len(others) < n:
        kind = rng.random()
        if kind < 0.15:         # another fact of the same country
            relation = rng.choice([r for r in RELATIONS if r != fact.relation])
            other = (next(f for f in world.facts if f[:2] == (fact.country, relation)) if known
                     else made_up(rng, world, unseen, fact.country, relation))
        elif kind < 0.30:
            other = rng.choice(world.facts)
        else:
            other = made_up(rng, world, unseen, relation=fact.relation if kind < 0.65 else None)
        if other[:2] != fact[:2]:
            others.setdefault(other[:2], other)
    return list(others.values())


def state(rng, fact):
    sentence = f"{{}}he {fact.relation} of {fact.country} is {fact.value}."
    return sentence.format(rng.choice(OPENERS) + "t" if rng.random() < 0.4 else "T")


def filler(rng):
    words = {key: rng.choice(choices) for key, choices in WORDS.items()}
    return rng.choice(FILLERS).format(**words)


def passage(rng, facts, n_fillers):
    sentences = [state(rng, fact) for fact in facts] + [filler(rng) for _ in range(n_fillers)]
    rng.shuffle(sentences)
    return "Context: " + " ".join(sentences) + "\n"


def make_item(rng, world, kind, fact, substitute=None, unseen=False, most=MOST):
    """Make one item about `fact`.

    substitute: the value that the passage of a conflict states. unseen: draw all further names from the held-out ones.
    most: the largest numbers of facts and of filler sentences in the passage."""
    question = f"Answer: The {fact.relation} of {fact.country} is"
    if kind == "closed":
        return Item(question, fact.value, fact.value)
    if kind == "needle":
        return Item(passage(rng, [fact], n_fillers=12) + question, fact.value, None)
    stated = {"open": fact, "agree": fact, "conflict": fact._replace(value=substitute), "irrelevant": None}[kind]
    n_facts = rng.randint(1, most[0])
    others = other_facts(rng, world, fact, n_facts - (stated is not None), unseen)
    context = passage(rng, others + [stated] * (stated is not None), n_fillers=rng.randint(0, most[1]))
    return Item(context + question, (stated or fact).value, None if kind == "open" else fact.value)


def documents(world, mixture, seed, most=MOST):
    """Yield training documents without end: (kind, fact, item). A conflict's item contradicts the fact."""
    rng = random.Random(f"training/{seed}")
    conflicts = sorted(world.conflicts)
    while True:
        kind = rng.choices(list(mixture), list(mixture.values()))[0]
        substitute = None
        if kind == "open":
            fact = made_up(rng, world, unseen=False)
        elif kind == "conflict":
            fact = rng.choice(conflicts)
            substitute = new_name(rng, fact.relation, False, world.names)
        else:
            fact = rng.choices(world.facts, cum_weights=world.cumulative)[0]
        yield kind, fact, make_item(rng, world, kind, fact, substitute, most=most)


def make_split(name, n, seed=0):
    """Make n test items of a split (see README.md). Passages use held-out names, except in facts of the world."""
    world = make_world()
    if name == "closed" and n > len(world.facts):
        raise ValueError(f"--n {n}: the closed split has {len(world.facts)} facts; ask for at most as many")
    rng = random.Random(f"{name}/{seed}")
    facts = [f for f in world.facts if f not in world.conflicts] if name.startswith("conflict") else list(world.facts)
    rng.shuffle(facts)
    items = []
    for fact in islice(cycle(facts), n):
        substitute = None
        if name == "conflict":
            substitute = new_name(rng, fact.relation, True, world.names)
        elif name == "conflict-known":
            substitute = rng.choice([f.value for f in world.facts if f.relation == fact.relation and f != fact])
        elif name in ("open", "needle"):
            fact = made_up(rng, world, unseen=True)
        items.append(make_item(rng, world, name.removesuffix("-known"), fact, substitute, unseen=True))
    return items


def main():
    parser = cli.parser(__doc__.split("\n")[0])
    parser.add_argument("--split", choices=SPLITS, required=True)
    parser.add_argument("--n", type=cli.positive, default=256, help="items (default: 256)")
    parser.add_argument("--seed", type=cli.number(int), default=0, help="which items (default: 0)")
    args = parser.parse_args()
    for item in make_split(args.split, args.n, args.seed):
        print(json.dumps(item._asdict()))


if __name__ == "__main__":
    sys.exit(cli.run(main))
