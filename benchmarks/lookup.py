"""Prompt lookup against plain decoding: tokens per pass and per second, of texts that copy and texts that do not.

    python -m benchmarks.lookup [--shape 0.5b] [--prompt 512] [--new 96] [--lookup 7] [--rounds 3] [--json]

The weights are random; every pass is computed in full, and then the scores are overruled so that the text is one of

    copying    runs of 24 tokens of the prompt, one token of its own between them: an answer that quotes its passage
    nothing    tokens that the prompt does not hold
    decoys     pairs of the prompt's tokens, each followed by another token than in the prompt: every proposal is wrong

Decoding only, one prompt. One round runs every contestant once; a ratio is the median of the rounds' ratios.
"""

import argparse
import json
import statistics
import time

import torch

import cli
from benchmarks.decode import origin
from benchmarks.shapes import find_shape, random_model, spread_heads
from decore import decode, open_prompts
from lookup import decode_with_lookup
from model import DTYPES

METHODS = ("greedy", "decore-entropy")


def texts(prompt, new, own):
    """Name → the tokens to decode after the prompt. own: tokens that the prompt does not hold."""
    P = len(prompt)
    copying, decoys = [], []
    for i in range(new):
        start = 31 * i % (P - 32)
        copying += prompt[start:start + 24] + [own[i]]
        decoys += prompt[start:start + 2] + [own[i]]
    return dict(copying=copying[:new], nothing=own[:new], decoys=decoys[:new])


def overrule(step, cache, text):
    """`step`, made to choose the text whatever the model says → it and the list of its passes' lengths."""
    passes, text = [], torch.tensor(text + text, device=cache.slots.device)

    def overruled(tokens):
        at = cache.slots[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        out = step(tokens)
        passes.append(tokens.shape[1])
        out.scores.scatter_(-1, text[at][..., None], 1e9)
        return out

    return overruled, passes


def measure(model, prompt, text, k, rounds, heads):
    """Seconds per round and tokens per pass of each method, plain and with lookup."""
    new, seconds, per_pass = len(text), {}, {}
    opened = {m: open_prompts(model, [prompt], m, heads if m != "greedy" else None, capacity=new + k) for m in METHODS}
    contestants = [(method, ahead) for method in METHODS for ahead in (0, k)]
    for i in range(1 + rounds):
        for method, ahead in contestants[i % 4:] + contestants[:i % 4]:             # nobody always goes last
            step, caches = opened[method]
            caches[0].restart(1)
            forced, passes = overrule(step, caches[0], text)
            start = time.perf_counter()
            if ahead:
                out = decode_with_lookup(forced, caches, [prompt], new, ahead, device=model.device)
            else:
                out = decode(forced, [prompt], new, device=model.device)
            name = method + (f", lookup {ahead}" if ahead else "")
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            per_pass[name] = round(new / len(passes), 2)
            assert out[0].ids == text
    return {name: s[1:] for name, s in seconds.items()}, per_pass


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--shape", default="0.5b")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32", choices=DTYPES)
    p.add_argument("--prompt", type=int, default=512)
    p.add_argument("--new", type=int, default=96)
    p.add_argument("--lookup", type=int, default=7, help="on a CPU two rows of eight tokens are one small product")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    with torch.inference_mode():
        model = random_model(find_shape(args.shape), args.device, DTYPES[args.dtype])
        half = model.config.vocab_size // 2
        prompt = (torch.randperm(half)[:args.prompt]).tolist()
        own = (half + torch.randperm(half)[:args.new]).tolist()
        results = {}
        for kind, text in texts(prompt, args.new, own).items():
            seconds, per_pass = measure(model, prompt, text, args.lookup, args.rounds, spread_heads(model.config))
            results[kind] = {name: dict(
                tokens_per_pass=per_pass[name], tokens_per_second=round(args.new / statistics.median(s), 2),
                over_greedy=round(statistics.median(g / x for g, x in zip(seconds["greedy"], s, strict=True)), 3),
            ) for name, s in seconds.items()}
    if args.json:
        print(json.dumps(dict(shape=args.shape, dtype=args.dtype, prompt=args.prompt, new=args.new,
                              **origin(args.device), results=results)))
        return
    for kind, row in results.items():
        for name, r in row.items():
            print(f"{kind:8} {name:26} {r['tokens_per_pass']:5.2f} tokens a pass, "
                  f"{r['tokens_per_second']:7.2f} a second, {r['over_greedy']:.2f} x greedy")


if __name__ == "__main__":
    cli.run(main)
