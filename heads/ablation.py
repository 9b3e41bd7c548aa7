"""How many needles a model finds while some of its heads are masked: the best ones of each measure,
and random ones, which show what the loss of any heads does."""

from itertools import chain

import numpy as np

from heads import load_heads, random_heads
from heads.detect import answer_runs
from heads.reader import find_measures
from runtime.files import markdown_table
from runtime.statistics import holm, p_value

DRAWS = 3  # sets of random heads, for each number of heads
LEVEL = 0.05  # of significance


def heads_to_mask(model, path, sizes):
    """{name: (layer, head) pairs}, the name as in "10 copy" or "10 random 2".

    For each of `sizes`: the best heads of each measure of the head file, and DRAWS random sets.
    model: a Transformer, or any object with its `name` and `config`."""
    ranked = {m: load_heads(model, name=path, measure=m) for m in find_measures(path)}
    sets = {}
    for n in sizes:
        for measure, heads in ranked.items():
            sets[f"{n} {measure}"] = heads[:n]
        for seed in range(DRAWS):
            sets[f"{n} random {seed}"] = random_heads(ranked["copy"], n, seed)
    return sets


def ablate_batch(model, tokenizer, prompts, needles, facts, sets, on_step=None):
    """One record per run, as of `detect.answer_runs`. on_step: as in `answer_batch`.

    record["masked"]: {name: whether the answer is right while these heads are masked}, for each of
    `sets`."""
    from decore import prefilled  # imports torch

    cache = prefilled(model, [ids for ids, _ in prompts], facts["max_new_tokens"])

    def run(heads):
        copy = cache.select(slice(None))  # answers write to it
        answered = answer_runs(
            model, tokenizer, prompts, needles, facts, cache=copy, heads=heads, on_step=on_step
        )
        return [record for record, _ in answered]

    records = [record | {"masked": {}} for record in run(())]
    for name, heads in sets.items():
        for record, masked in zip(records, run(heads)):
            record["masked"][name] = masked["right"]
    return records


def ablation_table(records):
    """The lines of a Markdown table: for each number of heads and measure the needles found, and
    those lost and won by masking. Random sets share a row.

    p: McNemar's, against no masked heads. p, random: against the random sets of the same size, the
    largest of theirs: if it is small, the heads differ from each of these sets. Bold: below LEVEL
    after Holm's correction for all p of the table."""
    right = [record["right"] for record in records]
    groups = {}  # "10 copy" → its sets: one, or DRAWS; of each, whether it finds each needle
    for name in records[0]["masked"]:
        found = [record["masked"][name] for record in records]
        groups.setdefault(" ".join(name.split()[:2]), []).append(found)
    columns = {}  # name → p against no masked heads, and p against random ones: lists
    for name, sets in groups.items():
        n, measure = name.split()
        against_random = []
        if measure != "random":
            against_random.append(max(mcnemar(sets[0], draw) for draw in groups[f"{n} random"]))
        columns[name] = [mcnemar(right, found) for found in sets], against_random
    p_values = sum(chain(*columns.values()), [])
    limit = max([0, *(p for p, adjusted in zip(p_values, holm(p_values)) if adjusted < LEVEL)])

    def cell(values):
        texts = [f"{p:.4f}" if p >= 0.0001 else "< 0.0001" for p in values]
        return ", ".join(f"**{x}**" if p <= limit else x for p, x in zip(values, texts))

    rows = [
        ["masked heads", f"found, of {len(right)}", "lost : won", "p", "p, random"],
        ["none", str(sum(right)), "", "", ""],
    ]
    for name, sets in groups.items():
        counts = ", ".join(str(sum(found)) for found in sets)
        pairs = ", ".join("{} : {}".format(*differing(right, found)) for found in sets)
        rows.append([name, counts, pairs, *map(cell, columns[name])])
    return markdown_table(rows)


def differing(a, b):
    """How many items only a, and only b, has. a, b: a truth value for each item."""
    return sum(x and not y for x, y in zip(a, b)), sum(y and not x for x, y in zip(a, b))


def mcnemar(a, b):
    """McNemar's exact p of paired results, a truth value for each item."""
    return p_value(np.array([a], dtype=float), np.array([b], dtype=float), range(len(a)))
