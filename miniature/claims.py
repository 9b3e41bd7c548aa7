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
        return right_answers(self.find(split, method, n, **settings)[0])

    def random(self, split, method, n):
        """The same for each draw of random heads, [draws, items]."""
        return np.stack([right_answers(run) for run in self.find(split, method, n, "uniform")])


def right_answers(run):
    return np.array([row["exact_match"] for row in run.values], float)


class Interval(NamedTuple):
    mean: float
    low: float
    high: float

    def __str__(self):
        return f"{self.mean:z.1f} ({self.low:z.1f} to {self.high:z.1f})"


def interval(numbers):
    """Mean of the numbers in percent, with its 95 % bootstrap interval."""
    ends = metrics.interval([{"number": number} for number in numbers])["number"]
    return Interval(*(100 * float(x) for x in (numbers.mean(), *ends)))


def draws(right):
    """Mean over the items and draws, with the range of the draws, as text. right: [draws, items]."""
    means = 100 * right.mean(1)
    return f"{means.mean():.1f} ({len(means)} draws, {means.min():.1f} to {means.max():.1f})"


# Each function tests the claim in its docstring. It returns whether the claim holds, and the measured numbers. What
# counts as holding was fixed before the numbers were known, except for claim 7.

def sparse(runs):
    """Retrieval heads are few: at most a fifth of the heads score above 0.1, the best above 0.5"""
    scores = np.array(sorted(load_scores("miniature").values(), reverse=True))
    share = np.mean(scores > RETRIEVAL)
    best = ", ".join(f"{score:.3f}" for score in scores[:5])
    return 0 < share <= 0.2 and scores[0] > 0.5, f"{share:.1%} of {len(scores)} heads; the best five: {best}"


def reading(runs):
    """Masking the top N heads more than halves right answers from the passage, N random heads do not"""
    greedy = runs.right("open")
    holds, measured = [], f"greedy {interval(greedy)}"
    for n in runs.numbers:
        top, others = runs.right("open", "masked", n), runs.random("open", "masked", n)
        holds.append(top.mean() < greedy.mean() / 2 < others.mean() and interval(others.mean(0) - top).low > 0)
        measured += f"; N = {n}: {interval(top)}, random heads {draws(others)}"
    return all(holds), measured


def recall(runs):
    """Masking the top N heads costs less closed-book recall than answers from the passage"""
    lost = {n: [interval(runs.right(split) - runs.right(split, "masked", n)) for split in ("closed", "open")]
            for n in runs.numbers}
    return (all(closed.high < opened.low for closed, opened in lost.values()), "points lost at "
            + "; ".join(f"N = {n}: {closed} against {opened}" for n, (closed, opened) in lost.items()))


def faithful(runs):
    """On conflicts DeCoRe entropy follows the passage more often than greedy does, or random heads do"""
    greedy = runs.right("conflict")
    holds, measured = [], f"greedy {interval(greedy)}"
    for n in runs.numbers:
        right, others = runs.right("conflict", "decore-entropy", n), runs.random("conflict", "decore-entropy", n)
        holds.append(interval(right - greedy).low > 0 and interval(right - others.mean(0)).low > 0)
        measured += (f"; N = {n}: {interval(right)}, won {(right > greedy).sum()}, lost {(right < greedy).sum()}, "
                     f"random heads {draws(others)}")
    return all(holds), measured


def cost(runs):
    """Without a conflict DeCoRe entropy (N = 4) costs less than a point"""
    changes = {split: interval(runs.right(split, "decore-entropy", 4) - runs.right(split))
               for split in ("open", "closed", "irrelevant")}
    return (all(change.low > -1 for change in changes.values()),
            "change " + ", ".join(f"{split} {change}" for split, change in changes.items()))


def entropies(runs):
    """On conflicts base entropy per token is lower for right answers, and lower with DeCoRe (N = 4)"""
    greedy, [contrasted] = runs.find("conflict")[0], runs.find("conflict", "decore-entropy", 4)
    base, contrasted_base = (stored.base_entropies(run) for run in (greedy, contrasted))
    right, wrong = base[right_answers(greedy) == 1], base[right_answers(greedy) == 0]
    t, u = (test(right, wrong, alternative="less").pvalue for test in (significance.t_test, mannwhitneyu))
    return (max(t, u) < 0.05 and interval(contrasted_base - base).high < 0,
            f"greedy: right {right.mean():.3f}, wrong {wrong.mean():.3f} nats (p = {t:.2g}, t-test; {u:.2g}, U-test); "
            f"greedy {base.mean():.3f}, DeCoRe {contrasted_base.mean():.3f} nats")


def masks(runs):
    """Query masking and a masked prompt change DeCoRe's faithfulness (N = 4) by less than 2 points"""
    base = runs.right("conflict", "decore-entropy", 4)
    query, prompt = (interval(runs.right("conflict", "decore-entropy", 4, **settings) - base)
                     for settings in ({"mask": "query"}, {"mask_prompt": True}))
    return (all(-2 < change.low and change.high < 2 for change in (query, prompt)),
            f"query {query}, masked prompt {prompt}")


def sources(runs):
    """Retrieval heads point at what is copied, random heads do not: the place that most of them attend to is in the
    passage's answer for more than half of DeCoRe's right answers (N = 4)"""
    [run] = runs.find("conflict", "decore-entropy", 4)
    sets = [[tuple(map(int, name.split("-"))) for name in one.settings["heads"]]
            for one in (run, *runs.find("conflict", "decore-entropy", 4, "uniform"))]
    model, tokenizer, hits = Transformer.load(FOLDER, dtype=torch.float32), Tokenizer.load(FOLDER), []
    for row, right in zip(run.lines, right_answers(run), strict=True):
        if right:
            prompt = tokenizer.core.encode(row["question"])
            places = attended(model, prompt.ids, row["ids"][:1])[0].tolist()                        # [L][H]
            answer = answer_tokens(prompt.offsets, row["question"], row["references"][0])
            # Of several positions that most heads attend to, the first in the order of the heads.
            tops = [Counter(places[layer][head] for layer, head in heads).most_common(1)[0][0] for heads in sets]
            hits.append([top in answer for top in tops])
    top, *others = np.array(hits, float).T                                                  # [1 + draws, items]
    return (interval(top).low > 50 > interval(np.mean(others, 0)).high,
            f"{interval(top)} of {len(hits)}, random heads {draws(np.array(others))}")


def answer_tokens(offsets, text, answer):
    """The tokens of the answer in the sentence of the prompt `text` that states it. offsets: of the text's tokens."""
    question = text.rpartition("Answer: The ")[2]                                           # "capital of Muveth is"
    start = text.index(f"he {question} {answer}.") + len(f"he {question} ")
    return {i for i, (first, end) in enumerate(offsets) if first < start + len(answer) and end > start}


CLAIMS = {"1": sparse, "2": reading, "3": recall, "4": faithful, "4, cost": cost, "5": entropies, "6": masks,
          "7": sources}


def table(folder):
    """The claims tested on a folder's runs, as a Markdown table with a line about its origin."""
    runs, lines = Runs(folder), ["| | claim | holds | measured |", "|---|---|---|---|"]
    for name, test in CLAIMS.items():
        holds, measured = test(runs)
        claim = " ".join(test.__doc__.split())
        lines.append(f"| {name} | {claim} | {'yes' if holds else '**no**'} | {measured} |")
    greedy = [run for run in runs.runs if run.settings["method"] == "greedy" and run.settings["model"] == "miniature"]
    items = ", ".join(f"{run.task.removeprefix('miniature-')} {len(run.lines):,}" for run in greedy)
    about = greedy[0].settings
    return "\n".join([*lines, "", f"Items: {items}. {about['dtype']}, {about['device']}, torch "
                      f"{about['versions']['torch']}, commit {about['commit'][:8]}, {about['date']}."])


def main():
    parser = cli.parser(__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="DIR", help="folder with the runs")
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    sys.exit(cli.run(main))
