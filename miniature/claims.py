"""The paper's claims, tested on the miniature, where the truth is known.

    python -m miniature.claims --out miniature/claims.json

prints a table with pass or fail per claim. Each item has one right answer: what the passage says, or the memorised fact
where no passage says it. Numbers are percent with 95 % bootstrap intervals over items. Random heads are drawn from
those that do not retrieve; what they do to an item is the mean over the draws.
"""

import itertools
import json
import random
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import cli
import decore
from heads import load_heads, load_scores
from miniature.data import make_split
from model import Transformer
from tokenizer import Tokenizer

FOLDER = Path(__file__).parent
NUMBERS = (1, 2, 4, 8)                  # heads masked
ALPHAS = (-0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
RETRIEVES = 0.1                         # the score from which a head counts as a retrieval head
DRAWS = 10                              # of random heads
BATCH = 128
NEW_TOKENS = 12                         # the longest name has fewer


class Outcome(NamedTuple):
    """One method on one split."""
    right: np.ndarray                   # [n] 1.0 where it is the item's answer
    memory: np.ndarray                  # [n] 1.0 where it is what the model remembers
    entropy: np.ndarray                 # [n] of what was decoded from, mean over the answer's tokens, nats


def main():
    parser = cli.parser("Test the paper's claims on the miniature.")
    parser.add_argument("--model", default=str(FOLDER), help="folder of the checkpoint")
    parser.add_argument("--heads", default="miniature", help="head scores: a file, or a known model's name")
    parser.add_argument("--n", type=int, default=1024, help="items per split (closed: 320 facts at most)")
    parser.add_argument("--seed", type=int, default=0, help="of test items, random heads and bootstrap")
    parser.add_argument("--draws", type=int, default=DRAWS, help="random sets of heads")
    parser.add_argument("--out", metavar="FILE", help="write all numbers here as JSON")
    args = parser.parse_args()
    start, commit = time.perf_counter(), current_commit()
    lab = Lab(args.model, args.heads, args.n, args.seed, args.draws)
    results = {}
    for name, claim in CLAIMS.items():
        results[name] = claim(lab)
        print(f"claim {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(markdown(results))
    if args.out:
        Path(args.out).write_text(json.dumps({
            "command": "python -m miniature.claims " + " ".join(sys.argv[1:]), "commit": commit,
            "seconds": round(time.perf_counter() - start), "device": "cpu", "precision": "float32",
            "torch": version("torch"), "items": {name: len(items) for name, items in lab.splits.items()},
            "seed": args.seed, "draws": args.draws, "heads": lab.top(max(NUMBERS)), "claims": results,
        }, indent=1) + "\n")


class Lab:
    """The model, its heads, the test items, and every outcome measured so far."""

    def __init__(self, folder, heads, n, seed, draws):
        self.model, self.tokenizer = Transformer.load(folder, dtype=torch.float32), Tokenizer.load(folder)
        L, H = self.model.config.n_layers, self.model.config.n_heads
        self.scores, self.ranked = load_scores(heads), load_heads(heads, L, H)
        self.splits = {name: make_split(name, min(n, 320) if name == "closed" else n, seed)
                       for name in ("conflict", "conflict-known", "open", "closed", "irrelevant")}
        rng, others = random.Random(seed), sorted(head for head in self.ranked if self.scores[head] < RETRIEVES)
        self.random = {n: [rng.sample(others, n) for _ in range(draws)] for n in NUMBERS if n <= len(others)}
        self.rng = np.random.default_rng(seed)
        self.known = {}
        remember_prompts(self.model)

    def top(self, n):
        return self.ranked[:n]

    def last_layer(self):
        """Whether the top four heads all lie there: nothing that is cached for the prompt then depends on them."""
        return all(layer == self.model.config.n_layers - 1 for layer, _ in self.top(4))

    def right(self, split, method="greedy", heads=None, **contrast):
        return self.run(split, method, heads, **contrast).right

    def at_random(self, split, method, n):
        """What N random heads do to each item, mean over the draws, and the range of the draws' accuracies."""
        draws = np.array([self.right(split, method, heads) for heads in self.random[n]])
        means = 100 * draws.mean(1)
        return draws.mean(0), [round(float(means.min()), 1), round(float(means.max()), 1)]

    def run(self, split, method="greedy", heads=None, **contrast):
        key = json.dumps([split, method, heads, contrast])
        if key not in self.known:
            self.known[key] = self.measure(self.splits[split], method, heads, contrast)
        return self.known[key]

    def measure(self, items, method, heads, contrast):
        prompts = [self.tokenizer.encode(item.prompt) for item in items]
        order = sorted(range(len(items)), key=lambda i: len(prompts[i]))            # little padding
        said, entropies = np.empty(len(items), object), np.empty(len(items))
        for i in range(0, len(order), BATCH):
            group = order[i:i + BATCH]
            said[group], entropies[group] = self.answer([prompts[j] for j in group], method, heads, contrast)
        answers, memories = (np.array(column, object) for column in zip(*[item[1:] for item in items], strict=True))
        return Outcome((said == answers).astype(float), (said == memories).astype(float), entropies)

    @torch.inference_mode()
    def answer(self, prompts, method, heads, contrast):
        """Answers up to the full stop, and the mean entropy of what they were decoded from."""
        step, _ = decore.open_decore(self.model, prompts, NEW_TOKENS, method, heads, **contrast)
        tokens, seen = [], []
        for token, found in decore.decode(step, torch.tensor([p[-1:] for p in prompts]), NEW_TOKENS):
            tokens.append(token)
            seen.append(decore.entropy(found.scores.log_softmax(-1)))
            ended = torch.isin(torch.cat(tokens, 1), torch.tensor(self.tokenizer.eos_ids))              # [B, T]
            if ended.any(1).all():
                break
        texts, entropies = [], []
        for ids, entropy, end in zip(torch.cat(tokens, 1).tolist(), torch.cat(seen, 1), ended.tolist(), strict=True):
            n = end.index(True) + 1 if True in end else len(ids)
            texts.append(self.tokenizer.decode(ids[:n]).split(".")[0].strip())
            entropies.append(entropy[:n].mean().item())
        return texts, entropies

    def interval(self, values):
        """Mean of values over items in percent, with its 95 % bootstrap interval."""
        draws = self.rng.integers(len(values), size=(2000, len(values)))
        return [round(100 * float(x), 1) for x in (values.mean(), *np.percentile(values[draws].mean(1), [2.5, 97.5]))]


def remember_prompts(model):
    """Keep the keys and values of prompts: every method reads the same ones, and reading them is most of the work."""
    read, kept = model.prefill, {}

    def prefill(ids, cache, head_mask=None, *more):
        if head_mask is not None:
            return read(ids, cache, head_mask, *more)
        key = ids.numpy().tobytes()
        if key not in kept:
            read(ids, cache, None, *more)
            kept[key] = [kv[..., :cache.P, :].clone() for kv in cache.kv]
        for kv, prompt in zip(cache.kv, kept[key], strict=True):
            kv[..., :cache.P, :] = prompt

    model.prefill = prefill


# -------------------------------------------------------------------------------------------------------------- claims
# Each returns what it claims, whether that holds, why, and its numbers. What counts as holding was fixed before they
# were known.


def sparse(lab):
    scores = [round(lab.scores[head], 3) for head in lab.ranked]
    share = sum(s > RETRIEVES for s in scores) / len(scores)
    return {"claim": "Retrieval heads are few: at most a fifth of the heads score above 0.1, the best above 0.5",
            "holds": 0 < share <= 0.2 and scores[0] > 0.5,
            "because": f"{share:.1%} of {len(scores)} heads; the best five: {', '.join(map(str, scores[:5]))}",
            "scores": {"-".join(map(str, head)): s for head, s in zip(lab.ranked, scores, strict=True)}}


def masking(lab):
    greedy, table, holds = lab.right("open"), [], []
    for n in NUMBERS:
        top = lab.right("open", "masked", lab.top(n))
        others, span = lab.at_random("open", "masked", n)
        gap = lab.interval(others - top)
        table.append({"N": n, "top": lab.interval(top), "random": lab.interval(others), "random range": span,
                      "random - top": gap})
        holds.append(top.mean() < greedy.mean() / 2 < others.mean() and gap[1] > 0)
    return {"claim": "Masking the top N heads more than halves right answers from the passage, N random others do not",
            "holds": all(holds), "because": per_number(holds), "greedy, open book": lab.interval(greedy),
            "open book, masked": table}


def recall(lab):
    table, holds = [], []
    for n in NUMBERS:
        closed = lab.right("closed", "masked", lab.top(n))
        lost = lab.interval(lab.right("closed") - closed)
        lost_open = lab.interval(lab.right("open") - lab.right("open", "masked", lab.top(n)))
        others, span = lab.at_random("closed", "masked", n)
        table.append({"N": n, "top": lab.interval(closed), "random": lab.interval(others), "random range": span,
                      "lost closed book": lost, "lost open book": lost_open})
        holds.append(lost[2] < lost_open[1])
    return {"claim": "Masking the top N heads costs less closed-book recall than answers from the passage",
            "holds": all(holds), "because": per_number(holds), "closed book, masked": table}


def contrast(lab):
    greedy, static, entropy, masked, holds = lab.right("conflict"), [], [], [], []
    for alpha in ALPHAS:
        static.append({"alpha": alpha} | {f"conflict, N = {n}": lab.interval(
            lab.right("conflict", "decore-static", lab.top(n), alpha=alpha)) for n in NUMBERS} | {
            f"{split}, N = 4": lab.interval(lab.right(split, "decore-static", lab.top(4), alpha=alpha))
            for split in ("open", "closed", "irrelevant")})
    for n in NUMBERS:
        right = {split: lab.right(split, "decore-entropy", lab.top(n)) for split in lab.splits}
        gain = lab.interval(right["conflict"] - greedy)
        others, span = lab.at_random("conflict", "decore-entropy", n)
        over = lab.interval(right["conflict"] - others)
        entropy.append({"N": n} | {split: lab.interval(values) for split, values in right.items()} | {
            "conflict, gain": gain, "won, lost": [int((right["conflict"] > greedy).sum()),
                                                  int((right["conflict"] < greedy).sum())],
            "random, conflict": lab.interval(others), "random range": span, "top - random": over})
        without = lab.run("conflict", "masked", lab.top(n))
        masked.append({"N": n, "from passage": lab.interval(without.right),
                       "from memory": lab.interval(without.memory)})
        holds.append(gain[1] > 0 and over[1] > 0)
    return {"claim": "On conflicts DeCoRe entropy follows the passage more often than greedy does, or random heads do",
            "holds": all(holds), "because": per_number(holds),
            "greedy": [{split: lab.interval(lab.right(split)) for split in lab.splits}
                       | {"conflict, from memory": lab.interval(lab.run("conflict").memory)}],
            "conflict, masked": masked, "DeCoRe static": static, "DeCoRe entropy": entropy}


def cost(lab):
    table, holds = [], []
    for split in ("open", "closed", "irrelevant"):
        contrasted = lab.right(split, "decore-entropy", lab.top(4))
        change = lab.interval(contrasted - lab.right(split))
        table.append({"split": split, "greedy": lab.interval(lab.right(split)), "DeCoRe": lab.interval(contrasted),
                      "change": change})
        holds.append(change[1] > -1)
    return {"claim": "Where there is no conflict DeCoRe entropy (N = 4) costs less than a point",
            "holds": all(holds), "because": ", ".join(f"{row['split']} {row['change'][0]:+.1f}" for row in table),
            "cost": table}


def entropies(lab):
    from scipy.stats import mannwhitneyu, ttest_ind, ttest_rel
    greedy, contrasted = lab.run("conflict"), lab.run("conflict", "decore-entropy", lab.top(4))
    right, wrong = greedy.entropy[greedy.right == 1], greedy.entropy[greedy.right == 0]
    apart, ranks = ttest_ind(right, wrong, equal_var=False), mannwhitneyu(right, wrong, alternative="less")
    paired = ttest_rel(contrasted.entropy, greedy.entropy)
    means = {"right": right.mean(), "wrong": wrong.mean(), "greedy": greedy.entropy.mean(),
             "DeCoRe": contrasted.entropy.mean()}
    p = {"t-test": apart.pvalue, "U-test": ranks.pvalue, "paired t-test": paired.pvalue}
    return {"claim": "On conflicts decoded entropy per token is lower for right answers, and lower with DeCoRe (N = 4)",
            "holds": bool(apart.statistic < 0 and paired.statistic < 0 and max(p.values()) < 0.05),
            "because": ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()) + " nats",
            "decoded entropy": [{name: round(float(mean), 4) for name, mean in means.items()}
                        | {f"p, {name}": float(f"{value:.1e}") for name, value in p.items()}]}


def readings(lab):
    table = []
    for n, mask, mask_prompt in itertools.product((4, 8), ("output", "query"), (False, True)):
        how = dict(mask=mask, mask_prompt=mask_prompt)
        table.append({"N": n, "mask": mask, "prompt masked": "yes" if mask_prompt else "no"} | {
            f"masked, {split}": lab.interval(lab.right(split, "masked", lab.top(n), **how))
            for split in ("conflict", "closed")} | {
            f"DeCoRe entropy, {split}": lab.interval(lab.right(split, "decore-entropy", lab.top(n), **how))
            for split in ("conflict", "irrelevant")})
    base = lab.right("conflict", "decore-entropy", lab.top(4), mask="output", mask_prompt=False)
    changes = [lab.interval(lab.right("conflict", "decore-entropy", lab.top(4), **how) - base)
               for how in (dict(mask="query", mask_prompt=False), dict(mask="output", mask_prompt=True))]
    return {"claim": "Query masking and a masked prompt change DeCoRe's faithfulness (N = 4) by less than 2 points",
            "holds": all(-2 < low and high < 2 for _, low, high in changes),
            "because": f"query {shown(changes[0])}, masked prompt {shown(changes[1])}" + lab.last_layer() * (
                "; all four heads are in the last layer, where masking the prompt cannot matter"), "readings": table}


CLAIMS = {"1": sparse, "2": masking, "3": recall, "4": contrast, "4, cost": cost, "5": entropies, "6": readings}


# -------------------------------------------------------------------------------------------------------------- report


def per_number(flags):
    return ", ".join(f"N = {n}: {'yes' if flag else 'no'}" for n, flag in zip(NUMBERS, flags, strict=True))


def shown(value):
    """[mean, low, high] → "86.5 (84.3 to 88.6)"; [low, high] → "84.3 to 88.6"."""
    if not isinstance(value, list):
        return str(value)
    ends = " to ".join(map(str, value[-2:]))
    return f"{value[0]} ({ends})" if len(value) == 3 else ends


def markdown(claims):
    """The summary, then every claim's tables."""
    rows = [{"": name, "claim": c["claim"], "holds": "yes" if c["holds"] else "**no**", "measured": c["because"]}
            for name, c in claims.items()]
    parts = [grid(rows)]
    for name, c in claims.items():
        tables = {title: table for title, table in c.items() if isinstance(table, list) and isinstance(table[0], dict)}
        parts += [f"**{name}: {title}**\n\n{grid(table)}" for title, table in tables.items()]
    return "\n\n".join(parts)


def grid(rows):
    lines = [list(rows[0]), ["---"] * len(rows[0])] + [[shown(value) for value in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def current_commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER, capture_output=True, text=True)
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(cli.run(main))
