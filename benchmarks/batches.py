"""Examples per second of evaluate.py by batch size: the miniature's conflicts, read by a model of random weights.

    python -m benchmarks.batches [--shape 0.5b] [--dtype bfloat16] [--items 16] [--new 64] [--sizes 1 16] [--json]

Prompts of different length, read and decoded by the runner itself, files included. The text that comes is nonsense.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

import cli
from benchmarks.measure import origin
from benchmarks.shapes import SHAPES, find_shape, random_model, spread_heads
from evaluate import run
from runtime.config import DTYPES
from runtime.parallel import Ranks
from tasks import find, sources
from tokenizer import Tokenizer

TASK = "miniature-conflict"


def measure(model, method, size, n_items, new):
    """Seconds, and the tokens that were read and decoded."""
    task, tokenizer = find(TASK), Tokenizer.load(cli.MINIATURE)
    tokenizer.eos_ids = set()                                   # every text to its full length
    items, _ = sources.load_items(task, None, n_items)
    contrast = {"method": method} | ({} if method == "greedy" else {"heads": spread_heads(model.config)})
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        lines = run(task, items, [], model, tokenizer, contrast, {"date": "1970-01-01"}, Path(folder) / "run.jsonl",
                    Ranks(device="cpu"), "plain", size, new)
        seconds = time.perf_counter() - start
    return seconds, [line["prompt_tokens"] for line in lines], sum(len(line["ids"]) for line in lines)


@torch.inference_mode()
def main():
    parser = cli.parser("Examples per second of evaluate.py at several batch sizes.")
    parser.add_argument("--shape", default="0.5b", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, …")
    parser.add_argument("--items", type=cli.positive, default=16)
    parser.add_argument("--new", type=cli.positive, default=64, help="tokens to decode for each")
    parser.add_argument("--sizes", type=cli.positive, nargs="+", default=[1, 16], help="the first is the base")
    parser.add_argument("--methods", nargs="+", default=["greedy", "decore-entropy"])
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    args = parser.parse_args()
    model, results = random_model(find_shape(args.shape), args.device, DTYPES[args.dtype]), {}
    for method in args.methods:
        measure(model, method, args.sizes[-1], args.sizes[-1], 2)                   # warms up
        for size in args.sizes:
            seconds, prompts, tokens = measure(model, method, size, args.items, args.new)
            base = results.get(f"{method}, batch {args.sizes[0]}", {}).get("seconds", seconds)
            results[f"{method}, batch {size}"] = dict(
                seconds=round(seconds, 2), examples_per_second=round(args.items / seconds, 3),
                new_tokens_per_second=round(tokens / seconds, 2), over_first=round(base / seconds, 2))
    result = dict(shape=args.shape, dtype=args.dtype, items=args.items, new=args.new,
                  prompt_tokens=[min(prompts), max(prompts)], results=results, **origin(args.device))
    print(json.dumps(result) if args.json else "\n".join(
        f"{name:28} {r['examples_per_second']:8.3f} examples/s {r['new_tokens_per_second']:8.2f} tokens/s "
        f"{r['over_first']:6.2f} x" for name, r in results.items()))


if __name__ == "__main__":
    sys.exit(cli.run(main))
