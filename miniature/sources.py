"""Do retrieval heads point at what was copied? The miniature's conflicts know: the answer is in the passage.

    python -m miniature.sources --out miniature/sources.json

For how many of the right answers of DeCoRe entropy, in percent, is the first token's source, the place where most
heads look, within the passage's answer? For the retrieval heads and for as many random ones, with 95 % bootstrap
intervals over items; for random heads of the mean over the draws."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import cli
from decore import generate
from heads import choose_heads, label
from heads.sources import attended
from miniature.data import make_split


def main():
    p = cli.parser("Measure how often retrieval heads point at the answer that was copied.")
    cli.add_model_arguments(p)
    p.add_argument("--n", type=cli.positive, default=1024, help="conflicts")
    p.add_argument("--num-heads", type=cli.positive, default=4, help="heads that point, and are masked")
    p.add_argument("--draws", type=cli.positive, default=10, help="random sets of heads")
    p.add_argument("--out", metavar="FILE", help="write the numbers here as JSON")
    args = p.parse_args()
    model, tokenizer = cli.load_model(args.model, args)
    cli.limit_threads(model)
    best = choose_heads(model, "miniature", args.num_heads)
    sets = [best] + [choose_heads(model, "miniature", args.num_heads, draw="uniform", seed=seed)
                     for seed in range(args.draws)]
    items, hits = make_split("conflict", args.n), []
    prompts = [tokenizer.encode(item.prompt) for item in items]
    for at in range(0, args.n, 64):
        written = generate(model, prompts[at:at + 64], heads=best, max_new_tokens=12)
        for item, prompt, g in zip(items[at:at + 64], prompts[at:at + 64], written, strict=True):
            if tokenizer.decode(g.ids).split(".")[0].strip() == item.answer:
                places, answer = attended(model, prompt, g.ids[:1])[0].tolist(), span(tokenizer, prompt, item)
                hits.append([source(places, heads) in answer for heads in sets])
    hits = np.array(hits, dtype=float)                                                  # [items, 1 + draws]
    random = hits[:, 1:].mean(0)
    found = {"model": model.name, "n": args.n, "right": len(hits), "heads": [label(head) for head in best],
             "retrieval": interval(hits[:, 0]), "random": interval(hits[:, 1:].mean(1)),
             "random_draws": [round(100 * float(x), 1) for x in sorted(random)]}
    print(json.dumps(found))
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def source(places, heads):
    """The position that most of the heads point at; of several, the first in the heads' order."""
    return Counter(places[layer][head] for layer, head in heads).most_common(1)[0][0]


def span(tokenizer, prompt, item):
    """Positions of the tokens that hold a letter of the answer, in the sentence of the passage that states it."""
    question = item.prompt.rpartition("Answer: The ")[2]                                # "capital of Muveth is"
    start = item.prompt.index(f"he {question} {item.answer}.") + len(f"he {question} ")
    ends = [len(tokenizer.decode(prompt[:i])) for i in range(len(prompt) + 1)]
    return {i for i in range(len(prompt)) if ends[i] < start + len(item.answer) and ends[i + 1] > start}


def interval(values):
    """Mean in percent, with its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    return [round(100 * float(x), 1) for x in (values.mean(), *np.percentile(values[draws].mean(1), [2.5, 97.5]))]


if __name__ == "__main__":
    sys.exit(cli.run(main))
