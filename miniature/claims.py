"""Test the paper's claims on stored runs of the miniature.

    python -m miniature.claims results/miniature

prints a Markdown table that says which claims hold. `python -m miniature.make` makes the runs. Each
item has one right
answer: what the passage says, or the memorised fact if the passage does not say it. Numbers are
percent with 95 % bootstrap intervals over items. An item's value for random heads is the mean over
the draws."""

import sys

import numpy as np
from scipy.stats import mannwhitneyu, ttest_ind

import cli
from heads import load_scores
from heads.sources import find_sources
from model import Transformer
from paper.report import stored
from paper.tasks import metrics
from tokenizer import Tokenizer

NUMBERS = (1, 4)  # of heads that are masked; for each there are runs with random heads
DECORE = "DeCoRe entropy, N = 4"


def read_runs(folder):
    """{(split, setup as text): its runs, one per draw of random heads} of the miniature."""
    runs = {}
    for run in stored.collect(folder):
        if run.title == "miniature":
            runs.setdefault((run.task.removeprefix("miniature-"), str(run.setup)), []).append(run)
    return runs


def right(runs, split, setup="greedy"):
    """1 for each item with the right answer and 0 for the others, [draws, items].

    One draw unless heads are random."""
    if (split, setup) not in runs:
        raise ValueError(
            f"there is no run of {setup} on miniature-{split}: run python -m miniature.make"
        )
    return np.array(
        [[row["exact_match"] for row in run.values] for run in runs[split, setup]], float
    )


class Percent:
    """Mean in percent with its 95 % bootstrap interval over items. As text, several draws have
    their range instead.

    numbers: [draws, items]."""

    def __init__(self, numbers):
        means = numbers.mean(0)
        interval = metrics.interval([{"number": mean} for mean in means])["number"]
        self.mean, self.low, self.high = (100 * float(x) for x in (means.mean(), *interval))
        self.draws = 100 * numbers.mean(1)

    def __str__(self):
        if len(self.draws) == 1:
            return f"{self.mean:z.1f} ({self.low:z.1f} to {self.high:z.1f})"
        low, high = self.draws.min(), self.draws.max()
        return f"{self.mean:.1f} ({len(self.draws)} draws, {low:.1f} to {high:.1f})"


def change(runs, split, setup, other="greedy"):
    """Points that a setup wins over another one."""
    return Percent(right(runs, split, setup) - right(runs, split, other))


# Each function tests one of CLAIMS. It returns whether the claim holds, and the measured numbers.
# What counts as holding was fixed before the numbers were known, except for claim 7.


def sparse(runs):
    scores = np.array(sorted(load_scores("miniature").values(), reverse=True))
    share = np.mean(scores > 0.1)
    best = ", ".join(f"{score:.3f}" for score in scores[:5])
    measured = f"{share:.1%} of {len(scores)} heads; the best five: {best}"
    return 0 < share <= 0.2 and scores[0] > 0.5, measured


def reading(runs):
    greedy = right(runs, "open")
    holds, measured = [], f"greedy {Percent(greedy)}"
    for n in NUMBERS:
        top = right(runs, "open", f"masked, N = {n}")
        others = right(runs, "open", f"masked, N = {n}, random heads")
        halved = top.mean() < greedy.mean() / 2 < others.mean()
        holds.append(halved and Percent(others.mean(0) - top).low > 0)
        measured += f"; N = {n}: {Percent(top)}, random heads {Percent(others)}"
    return all(holds), measured


def recall(runs):
    holds, measured = [], []
    for n in NUMBERS:
        closed = change(runs, "closed", "greedy", f"masked, N = {n}")
        opened = change(runs, "open", "greedy", f"masked, N = {n}")
        holds.append(closed.high < opened.low)
        measured.append(f"N = {n}: {closed} against {opened}")
    return all(holds), "points lost at " + "; ".join(measured)


def faithful(runs):
    greedy = right(runs, "conflict")
    holds, measured = [], f"greedy {Percent(greedy)}"
    for n in NUMBERS:
        top = right(runs, "conflict", f"DeCoRe entropy, N = {n}")
        others = right(runs, "conflict", f"DeCoRe entropy, N = {n}, random heads")
        holds.append(Percent(top - greedy).low > 0 and Percent(top - others.mean(0)).low > 0)
        measured += (
            f"; N = {n}: {Percent(top)}, won {(top > greedy).sum()}, lost {(top < greedy).sum()}, "
            f"random heads {Percent(others)}"
        )
    return all(holds), measured


def cost(runs):
    changes = {split: change(runs, split, DECORE) for split in ("open", "closed", "irrelevant")}
    measured = ", ".join(f"{split} {won}" for split, won in changes.items())
    return all(won.low > -1 for won in changes.values()), f"change {measured}"


def entropies(runs):
    correct = right(runs, "conflict")[0] == 1
    base = runs["conflict", "greedy"][0].entropies
    contrasted = runs["conflict", DECORE][0].entropies
    t = ttest_ind(base[correct], base[~correct], equal_var=False, alternative="less").pvalue
    u = mannwhitneyu(base[correct], base[~correct], alternative="less").pvalue
    measured = (
        f"greedy: right {base[correct].mean():.3f}, wrong {base[~correct].mean():.3f} nats "
        f"(p = {t:.2g}, t-test; {u:.2g}, U-test); "
        f"greedy {base.mean():.3f}, DeCoRe {contrasted.mean():.3f} nats"
    )
    return max(t, u) < 0.05 and Percent((contrasted - base)[None]).high < 0, measured


def masks(runs):
    query = change(runs, "conflict", f"{DECORE}, query mask", DECORE)
    prompt = change(runs, "conflict", f"{DECORE}, mask prompt True", DECORE)
    holds = all(-2 < won.low and won.high < 2 for won in (query, prompt))
    return holds, f"query {query}, masked prompt {prompt}"


def pointing(runs):
    [run] = runs["conflict", DECORE]
    sets = []  # of retrieval heads, then random ones
    for one in run, *runs["conflict", f"{DECORE}, random heads"]:
        sets.append([tuple(map(int, name.split("-"))) for name in one.header["heads"]])
    model = Transformer.load(cli.MINIATURE, dtype="float32")
    tokenizer = Tokenizer.load(cli.MINIATURE)
    hits = []  # [items][sets]
    for line, correct in zip(run.lines, right(runs, "conflict", DECORE)[0]):
        if not correct:
            continue
        text, answer = line["question"], line["references"][0]
        before = f"he {text.rpartition('Answer: The ')[2]} "  # "he capital of X is "
        start = text.index(f"{before}{answer}.") + len(before)
        prompt = tokenizer.core.encode(text)
        first, last = map(prompt.char_to_token, (start, start + len(answer) - 1))
        hits.append([])
        for heads in sets:
            [places] = find_sources(model, prompt.ids, line["ids"][:1], heads)
            hits[-1].append(first <= places[0][0] <= last)
    hits = np.array(hits, float).T
    top, others = Percent(hits[:1]), Percent(hits[1:])
    return top.low > 50 > others.high, f"{top} of {hits.shape[1]}, random heads {others}"


CLAIMS = {
    "1": (
        "Retrieval heads are few: at most a fifth of the heads score above 0.1, the best above 0.5",
        sparse,
    ),
    "2": (
        "Masking the top N heads more than halves right answers from the passage, N random "
        "heads do not",
        reading,
    ),
    "3": (
        "Masking the top N heads costs less closed-book recall than answers from the passage",
        recall,
    ),
    "4": (
        "On conflicts DeCoRe entropy follows the passage more often than greedy does, or "
        "random heads do",
        faithful,
    ),
    "4, cost": ("Without a conflict DeCoRe entropy (N = 4) costs less than a point", cost),
    "5": (
        "On conflicts base entropy per token is lower for right answers, and lower with "
        "DeCoRe (N = 4)",
        entropies,
    ),
    "6": (
        "Query masking and a masked prompt change DeCoRe's faithfulness (N = 4) by less than "
        "2 points",
        masks,
    ),
    "7": (
        "Retrieval heads point at what is copied, random heads do not: the place that most of "
        "them attend to is in the passage's answer for more than half of DeCoRe's right "
        "answers (N = 4)",
        pointing,
    ),
}


def table(folder):
    """The claims tested on a folder's runs, as a Markdown table with a line about its origin."""
    runs = read_runs(folder)
    lines = ["| | claim | holds | measured |", "|---|---|---|---|"]
    for name, (text, claim) in CLAIMS.items():
        holds, measured = claim(runs)
        lines.append(f"| {name} | {text} | {'yes' if holds else '**no**'} | {measured} |")
    greedy = {split: run for (split, setup), [run, *_] in runs.items() if setup == "greedy"}
    items = ", ".join(f"{split} {len(run.lines):,}" for split, run in greedy.items())
    about = greedy["open"].header
    return "\n".join(
        [
            *lines,
            "",
            f"Items: {items}. {about['dtype']}, {about['device']}, torch "
            f"{about['versions']['torch']}, commit {str(about['commit'])[:8]}, {about['date']}.",
        ]
    )


def main():
    parser = cli.parser(__doc__)
    parser.add_argument("folder", metavar="DIR", help="folder with the runs")
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
