"""Prompt lookup against plain decoding: tokens per pass and per second, of texts that copy and texts that do not.

    python -m benchmarks.lookup [--shape 0.5b] [--prompt 512] [--new 96] [--lookup 7] [--rounds 3] [--json]
    python -m benchmarks.lookup --miniature [--items 64]

The weights are random; every pass is computed in full, and then the scores are overruled so that the text is one of

    copying    runs of 24 tokens of the prompt, one token of its own between them: an answer that quotes its passage
    nothing    tokens that the prompt does not hold
    decoys     pairs of the prompt's tokens, each followed by another token than in the prompt: every proposal is wrong

With --miniature nothing is overruled: the miniature answers questions on its passages, to the end of each answer.

Decoding only, one prompt at a time, on a GPU with a CUDA graph. One round runs every contestant once; a ratio is the
median of the rounds' ratios, given with their quartiles.
"""

import json
import statistics
import sys
import time

import torch

import cli
from benchmarks.measure import origin
from benchmarks.shapes import find_shape, random_model, spread_heads
from decore import generate, open_decore
from heads import load_heads
from miniature.data import make_split
from model import Transformer
from runtime.config import DTYPES
from runtime.fast import record
from runtime.pack import pack
from tokenizer import Tokenizer

METHODS = ("greedy", "decore-entropy")
SPLITS = ("conflict", "open", "needle")         # of the miniature's questions: those whose passage holds the answer


def forced(vocab_size, P, new):
    """Kind of text → [(prompt of P tokens, the tokens to decode after it)]."""
    half = vocab_size // 2
    if not 32 < P <= half or new > half:
        raise ValueError(f"--prompt {P} --new {new}: give 33 to {half} tokens of prompt and at most {half} new ones")
    prompt, own = torch.randperm(half)[:P].tolist(), (half + torch.randperm(half)[:new]).tolist()
    copying, decoys = [], []
    for i in range(new):
        start = 31 * i % (P - 32)
        copying += prompt[start:start + 24] + [own[i]]
        decoys += prompt[start:start + 2] + [own[i]]
    return {kind: [(prompt, text[:new])] for kind, text in dict(copying=copying, nothing=own, decoys=decoys).items()}


def force(step, cache, text):
    """`step`, made to choose the text whatever the model says (None: what it says) → it and its passes' lengths."""
    passes, text = [], None if text is None else torch.tensor(text + text, device=cache.slots.device)

    def forced(tokens):
        at = cache.slots[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        out = step(tokens)
        passes.append(tokens.shape[1])
        if text is not None:
            out.scores.scatter_(-1, text[at][..., None], 1e9)
        return out

    forced.widths = getattr(step, "widths", ())
    return forced, passes


def measure(model, cases, new, k, rounds, heads, eos_ids=()):
    """What `summary` tells of each method, plain and with lookup, over all cases (prompt, text or None)."""
    contestants = {method + (f", lookup {ahead}" if ahead else ""): (method, ahead)
                   for method in METHODS for ahead in (0, k)}
    names = list(contestants)
    found = {name: dict(seconds=[0.0] * rounds, tokens=0, passes=0) for name in names}
    for prompt, text in cases:
        opened = {}
        for method in METHODS:
            masked = heads if method != "greedy" else None
            step, caches = open_decore(model, [prompt], new + k, method, masked)
            if model.device.type == "cuda":
                step = record(step, caches, torch.tensor([prompt[-1:]], device=model.device), (1, k + 1))
            opened[method] = step, caches
        for i in range(1 + rounds):
            for name in names[i % 4:] + names[:i % 4]:                                  # nobody always goes last
                method, ahead = contestants[name]
                step, caches = opened[method]
                caches[0].slots.zero_()
                made, passes = force(step, caches[0], text)
                start = time.perf_counter()
                out = generate(model, prompt, max_new_tokens=new, eos_ids=eos_ids, lookup=ahead, compile="no",
                               opener=lambda *_, made=made, caches=caches: (made, caches))
                seconds = time.perf_counter() - start
                assert text is None or out.ids == text
                if i:                           # the first one warms up
                    found[name]["seconds"][i - 1] += seconds
                    found[name]["tokens"] += len(out.ids)
                    found[name]["passes"] += len(passes)
    return {name: summary(one, found["greedy"]) for name, one in found.items()}


def summary(one, greedy):
    """Tokens per pass and per second, and the latter over plain greedy's."""
    rounds = len(one["seconds"])
    a_token, greedys = ([s * rounds / x["tokens"] for s in x["seconds"]] for x in (one, greedy))
    ratios = [g / s for g, s in zip(greedys, a_token, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else 3 * ratios
    return dict(tokens_per_pass=round(one["tokens"] / one["passes"], 2),
                tokens_per_second=round(1 / statistics.median(a_token), 2),
                over_greedy=round(median, 3), over_greedy_quartiles=[round(low, 3), round(high, 3)])


def random_weights(args):
    """A model of random weights, {kind of text: its cases}, the heads to mask, and the tokens that end a text."""
    model = random_model(find_shape(args.shape), args.device, DTYPES[args.dtype])
    if args.device == "cpu":
        pack(model)
    return model, forced(model.config.vocab_size, args.prompt, args.new), spread_heads(model.config), ()


def miniature(args):
    """The same four of the miniature and its questions."""
    model = Transformer.load(cli.MINIATURE, args.device, DTYPES[args.dtype])
    tokenizer, c = Tokenizer.load(cli.MINIATURE), model.config
    cases = {split: [(tokenizer.encode(item.prompt), None) for item in make_split(split, args.items, 0)]
             for split in SPLITS}
    return model, cases, load_heads("miniature", c.n_layers, c.n_heads)[:c.n_layers * c.n_heads // 8], tokenizer.eos_ids


@torch.inference_mode()
def main():
    p = cli.parser(__doc__.split("\n")[0])
    what = p.add_mutually_exclusive_group()
    what.add_argument("--shape", default="0.5b")
    what.add_argument("--miniature", action="store_true", help="the miniature and its questions in place of a shape")
    p.add_argument("--texts", nargs="+", metavar="KIND", help="only these of the above")
    p.add_argument("--items", type=cli.positive, default=64, help="questions of each kind")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32", choices=DTYPES)
    p.add_argument("--prompt", type=cli.positive, default=512)
    p.add_argument("--new", type=cli.positive, default=96)
    p.add_argument("--lookup", type=cli.positive, default=7, help="on a CPU two rows of eight tokens are one product")
    p.add_argument("--rounds", type=cli.positive, default=3)
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    model, cases, heads, eos_ids = miniature(args) if args.miniature else random_weights(args)
    if wrong := set(args.texts or []) - set(cases):
        raise ValueError(f"--texts {min(wrong)} is not one of {', '.join(cases)}")
    results = {kind: measure(model, cases[kind], args.new, args.lookup, args.rounds, heads, eos_ids)
               for kind in args.texts or cases}
    if args.json:
        what = dict(model="miniature", items=args.items) if args.miniature else dict(shape=args.shape,
                                                                                    prompt=args.prompt)
        print(json.dumps(what | dict(dtype=args.dtype, new=args.new, **origin(args.device), results=results)))
        return
    for kind, row in results.items():
        for name, r in row.items():
            print(f"{kind:8} {name:26} {r['tokens_per_pass']:5.2f} tokens a pass, "
                  f"{r['tokens_per_second']:7.2f} a second, {r['over_greedy']:.2f} x greedy "
                  f"({r['over_greedy_quartiles'][0]:.2f} to {r['over_greedy_quartiles'][1]:.2f})")


if __name__ == "__main__":
    sys.exit(cli.run(main))
