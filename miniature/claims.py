"""Test the paper's claims on stored runs of the miniature.

    python -m miniature.claims results/miniature

prints a Markdown table that says which claims hold. `python -m miniature.make` makes the runs. Each item has one right
answer: what the passage says, or the memorised fact if the passage does not say it. Numbers are percent with 95 %
bootstrap intervals over items. An item's value for random heads is the mean over the draws."""

import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import mannwhitneyu

import cli
from heads import load_scores
from heads.sources import attended
from model import Transformer
from report import significance, stored
from tasks import metrics
from tokenizer import Tokenizer

FOLDER = Path(__file__).parent
RETRIEVAL = 0.1                         # scores above this make a head a retrieval head


class Claim(NamedTuple):
    claim: str
    holds: bool
    measured: str


class Interval(NamedTuple):
    mean: float
    low: float
    high: float

    def __str__(self):
        return f"{self.mean:z.1f} ({self.low:z.1f} to {self.high:z.1f})"


class Runs:
    """The runs of a folder, by their settings."""

    def __init__(self, folder):
        self.folder, self.runs = folder, stored.collect(folder)[0]
        self.numbers = sorted({run.settings["num_heads"] for run in self.runs if run.settings["random_heads"]})

    def find(self, split, method="greedy", n=None, random=None, mask="output", mask_prompt=False):
        """Runs with these settings; several for random heads, one per draw."""
        key = (f"miniature-{split}", "miniature", method, n, random, mask, mask_prompt)
        runs = [run for run in self.runs if key == (
            run.task, run.settings["model"], run.settings["method"], run.settings["num_heads"],
            run.settings["random_heads"], run.settings.get("mask", "output"), run.settings.get("mask_prompt", False))]
        if not runs:
            raise ValueError(f"{self.folder} holds no run with the settings {key}: run python -m miniature.make")
        return runs

    def right(self, split, method="greedy", n=None, **settings):
        """1 for each item with the right answer and 0 for the others, [items]."""
        return values(self.find(split, method, n, **settings)[0])

    def random(self, split, method, n):
        """The same for each draw of random heads, [draws, items]."""
        return np.stack([values(run) for run in self.find(split, method, n, "uniform")])


def values(run, metric="exact_match"):
    return np.array([row[metric] for row in run.values], float)


def interval(numbers):
    """Mean of the numbers in percent, with its 95 % bootstrap interval."""
    ends = metrics.interval([{"number": number} for number in numbers])["number"]
    return Interval(*(100 * float(x) for x in (numbers.mean(), *ends)))


def draws(right):
    """Mean over the items and draws, with the range of the draws, as text. right: [draws, items]."""
    means = 100 * right.mean(1)
    return f"{means.mean():.1f} ({len(means)} draws, {means.min():.1f} to {means.max():.1f})"


# What counts as holding was fixed before the numbers were known, except for claim 7.

def sparse(runs):
    scores = sorted(load_scores("miniature").values(), reverse=True)
    share = np.mean(np.array(scores) > RETRIEVAL)
    return Claim("Retrieval heads are few: at most a fifth of the heads score above 0.1, the best above 0.5",
                 0 < share <= 0.2 and scores[0] > 0.5,
                 f"{share:.1%} of {len(scores)} heads; the best five: {', '.join(f'{s:.3f}' for s in scores[:5])}")


def reading(runs):
    greedy, holds, measured = runs.right("open"), [], []
    for n in runs.numbers:
        top, others = runs.right("open", "masked", n), runs.random("open", "masked", n)
        difference = interval(others.mean(0) - top)
        holds.append(top.mean() < greedy.mean() / 2 < others.mean() and difference.low > 0)
        measured.append(f"N = {n}: {interval(top)}, random heads {draws(others)}")
    return Claim("Masking the top N heads more than halves right answers from the passage, N random heads do not",
                 all(holds), f"greedy {interval(greedy)}; " + "; ".join(measured))


def recall(runs):
    holds, measured = [], []
    for n in runs.numbers:
        closed, opened = (interval(runs.right(split) - runs.right(split, "masked", n)) for split in ("closed", "open"))
        holds.append(closed.high < opened.low)
        measured.append(f"N = {n}: {closed} against {opened}")
    return Claim("Masking the top N heads costs less closed-book recall than answers from the passage", all(holds),
                 "points lost at " + "; ".join(measured))


def faithful(runs):
    greedy, holds, measured = runs.right("conflict"), [], []
    for n in runs.numbers:
        right, others = runs.right("conflict", "decore-entropy", n), runs.random("conflict", "decore-entropy", n)
        gain, difference = interval(right - greedy), interval(right - others.mean(0))
        holds.append(gain.low > 0 and difference.low > 0)
        measured.append(f"N = {n}: {interval(right)}, won {(right > greedy).sum()}, lost {(right < greedy).sum()}, "
                        f"random heads {draws(others)}")
    return Claim("On conflicts DeCoRe entropy follows the passage more often than greedy does, or random heads do",
                 all(holds), f"greedy {interval(greedy)}; " + "; ".join(measured))


def cost(runs):
    changes = {split: interval(runs.right(split, "decore-entropy", 4) - runs.right(split))
               for split in ("open", "closed", "irrelevant")}
    return Claim("Without a conflict DeCoRe entropy (N = 4) costs less than a point",
                 all(change.low > -1 for change in changes.values()),
                 "change " + ", ".join(f"{split} {change}" for split, change in changes.items()))


def entropies(runs):
    greedy, [contrasted] = runs.find("conflict")[0], runs.find("conflict", "decore-entropy", 4)
    base, contrasted_base = (stored.base_entropies(run) for run in (greedy, contrasted))
    right = values(greedy) == 1
    means, ranks = (test(base[right], base[~right], alternative="less")
                    for test in (significance.t_test, mannwhitneyu))
    return Claim("On conflicts base entropy per token is lower for right answers, and lower with DeCoRe (N = 4)",
                 max(means.pvalue, ranks.pvalue) < 0.05 and interval(contrasted_base - base).high < 0,
                 f"greedy: right {base[right].mean():.3f}, wrong {base[~right].mean():.3f} nats "
                 f"(p = {means.pvalue:.2g}, t-test; {ranks.pvalue:.2g}, U-test); "
                 f"greedy {base.mean():.3f}, DeCoRe {contrasted_base.mean():.3f} nats")


def masks(runs):
    base = runs.right("conflict", "decore-entropy", 4)
    query, prompt = (interval(runs.right("conflict", "decore-entropy", 4, **settings) - base)
                     for settings in ({"mask": "query"}, {"mask_prompt": True}))
    return Claim("Query masking and a masked prompt change DeCoRe's faithfulness (N = 4) by less than 2 points",
                 all(-2 < change.low and change.high < 2 for change in (query, prompt)),
                 f"query {query}, masked prompt {prompt}")


def sources(runs):
    """Where do the heads look at the first new token? For right answers of DeCoRe entropy (N = 4)."""
    [run] = runs.find("conflict", "decore-entropy", 4)
    sets = [head_list(one) for one in (run, *runs.find("conflict", "decore-entropy", 4, "uniform"))]
    model, tokenizer, hits = Transformer.load(FOLDER, dtype=torch.float32), Tokenizer.load(FOLDER), []
    for row in (row for row, right in zip(run.lines, values(run), strict=True) if right):
        prompt = tokenizer.encode(row["question"])
        places = attended(model, prompt, row["ids"][:1])[0].tolist()                        # [L][H]
        answer = answer_tokens(tokenizer, prompt, row["question"], row["references"][0])
        hits.append([source(places, heads) in answer for heads in sets])
    top, *others = np.array(hits, float).T                                                  # [1 + draws, items]
    return Claim("Retrieval heads point at what is copied, random heads do not: the place that most of them attend to "
                 "is in the passage's answer for more than half of DeCoRe's right answers (N = 4)",
                 interval(top).low > 50 > interval(np.mean(others, 0)).high,
                 f"{interval(top)} of {len(hits)}, random heads {draws(np.array(others))}")


def head_list(run):
    return [tuple(map(int, name.split("-"))) for name in run.settings["heads"]]


def source(places, heads):
    """The position that most heads attend to; of several, the first in the order of the heads."""
    return Counter(places[layer][head] for layer, head in heads).most_common(1)[0][0]


def answer_tokens(tokenizer, prompt, text, answer):
    """Positions of the prompt's tokens that hold a letter of the answer in the passage's sentence about it."""
    question = text.rpartition("Answer: The ")[2]                                           # "capital of Muveth is"
    start = text.index(f"he {question} {answer}.") + len(f"he {question} ")
    ends = [len(tokenizer.decode(prompt[:i])) for i in range(len(prompt) + 1)]
    return {i for i in range(len(prompt)) if ends[i] < start + len(answer) and ends[i + 1] > start}


CLAIMS = {"1": sparse, "2": reading, "3": recall, "4": faithful, "4, cost": cost, "5": entropies, "6": masks,
          "7": sources}


def table(folder):
    """The claims tested on a folder's runs, as a Markdown table with a line about its origin."""
    runs = Runs(folder)
    results = {name: test(runs) for name, test in CLAIMS.items()}
    lines = [f"| {name} | {c.claim} | {'yes' if c.holds else '**no**'} | {c.measured} |" for name, c in results.items()]
    return "\n".join(["| | claim | holds | measured |", "|---|---|---|---|", *lines, "", origin(runs)])


def origin(runs):
    """How many items were used, and what made the runs."""
    greedy = [run for run in runs.runs if run.settings["method"] == "greedy" and run.settings["model"] == "miniature"]
    about = greedy[0].settings
    items = ", ".join(f"{run.task.removeprefix('miniature-')} {len(run.lines):,}" for run in greedy)
    return (f"Items: {items}. {about['dtype']}, {about['device']}, torch {about['versions']['torch']}, "
            f"commit {about['commit'][:8]}, {about['date']}.")


def main():
    parser = cli.parser(__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="DIR", help="folder with the runs")
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    sys.exit(cli.run(main))
