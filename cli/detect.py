"""Finds the retrieval heads of a model, as a program: `python -m heads.detect`."""

import argparse
import json
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import cli
from heads.detect import count_masked, mean_scores, run_all, summary
from heads.needles import (
    HAYSTACK,
    PUBLISHED,
    TEMPLATE,
    make_prompts,
    read_haystack,
    read_needles,
    spread,
)
from runtime import files
from runtime.weights import fingerprint


def lengths(text):
    """argparse type: A:B:N → N lengths from A to B tokens."""
    first, last, n = map(int, text.split(":") if ":" in text else (text, text, 1))
    if not (0 <= first <= last > 0 < n):
        raise ValueError
    return spread(first, last, n)


def template(text):
    """argparse type: a text with {context}, once, and {question}."""
    if text.count("{context}") != 1 or "{question}" not in text:
        raise argparse.ArgumentTypeError("must contain {context}, once, and {question}")
    return text.replace("\\n", "\n")


def parse_args():
    p = cli.parser("Find the retrieval heads of a model, needle-in-a-haystack.")
    add = p.add_argument
    cli.add_model_arguments(p)
    add(
        "--out",
        required=True,
        metavar="FILE",
        type=Path,
        help="head scores; FILE.runs.jsonl holds the runs",
    )
    add(
        "--lengths",
        type=lengths,
        metavar="A:B:N",
        help="N prompt lengths, A to B tokens (default: 5 up to 5000 or "
        "the model's context; with --published 1000 and 3579)",
    )
    add("--depths", type=cli.positive, default=10, help="needle depths, 0 to 100 %% (default 10)")
    add(
        "--needles",
        type=Path,
        default=HAYSTACK / "needles.jsonl",
        metavar="FILE",
        help="JSON Lines: needle, question, real_needle, the part that answers "
        "(default: heads/haystack/needles.jsonl)",
    )
    add(
        "--haystack",
        type=Path,
        default=HAYSTACK,
        metavar="DIR|FILE",
        help=".txt files, or JSON Lines of text; needle i is hidden in the i-th, in turn "
        "(default: heads/haystack)",
    )
    add(
        "--runs",
        type=cli.positive,
        metavar="N",
        help="draw N runs, needles in turn (default: every combination)",
    )
    add("--seed", type=int, help="of the needles' positions and of --runs (default 0)")
    add("--raw", action="store_true", help="plain text, no chat template")
    add(
        "--template",
        type=template,
        metavar="TEXT",
        help="contains {context} and {question}; \\n is a new line "
        "(default: the text, then the question)",
    )
    add("--max-new-tokens", type=cli.positive, default=50, help="of an answer (default 50)")
    purpose = p.add_mutually_exclusive_group()
    purpose.add_argument(
        "--masked",
        type=cli.comma_list(cli.positive),
        metavar="N[,N…]",
        help="measure no heads: count right answers without the N best of this model's head file, "
        "by each measure, and without random ones",
    )
    purpose.add_argument(
        "--min-success",
        type=cli.number(int, 0),
        default=10,
        help="right answers needed (default 10); 0 also goes on if the first 20 are wrong",
    )
    add("--batch-size", type=cli.positive, default=4, help="runs decoded together (default 4)")
    add(
        "--published",
        action="store_true",
        help="as the published runs: needle inserted and located by token ids, "
        "their prompt, repeated tokens counted, answers end only at a new line's token or id 144",
    )
    return p.parse_args()


def make_facts(args, model, needles, texts):
    """Everything that determines the scores, as a dict for the head file. None for what is known
    with the weights only.

    model: a cli.Checkpoint. ValueError for options that do not fit."""
    published = args.published
    chat = bool(model.tokenizer.chat_template and not args.raw and not published)
    if published:
        unused = ["template", "raw", "eos"] + ["seed"] * (not args.runs)
        cli.refuse_unused(args, dict.fromkeys(unused, "with --published"))
    template_args = None
    if chat:
        template_args = cli.benchmark_template_args(model.tokenizer, args.template_args) or {}
    else:
        cli.refuse_unused(args, {"template_args": "on plain text"})
    libraries = "torch", "tokenizers", "rouge-score", *["transformers"] * args.transformers
    longest = model.config.max_positions - args.max_new_tokens
    last = min(5000, longest)
    # In a short context the needle takes most of a prompt.
    first = max(last // 5, min(400, 3 * last // 4))
    prompt_lengths = args.lengths or ([1000, 3579] if published else spread(first, last, 5))
    if prompt_lengths[-1] > longest:
        raise ValueError(
            f"--lengths: {prompt_lengths[-1]} tokens do not fit the context of {model.name} with "
            f"{args.max_new_tokens} new ones; use lengths up to {longest}"
        )
    return {
        "model": model.name,
        "fingerprint": None,
        "lengths": prompt_lengths,
        "depths": args.depths,
        "runs": args.runs,
        "seed": args.seed or 0,
        "needles": files.short_hash(json.dumps(needles).encode()),
        "haystack": files.short_hash(json.dumps(texts).encode()),
        "template": PUBLISHED if published else args.template or TEMPLATE,
        "chat": chat,
        "template_args": template_args,
        "eos": args.eos,
        "published": published,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "device": None,
        "dtype": None,
        "ranks": None,
        "engine": "transformers" if args.transformers else "own",
        "versions": {name: version(name) for name in libraries},
    }


def main():
    args = parse_args()
    runs = Path(f"{args.out}.runs.jsonl")
    if args.out.exists() and not runs.exists():
        raise ValueError(
            f"--out {args.out} exists, and its runs ({runs}) do not; "
            "delete it, or choose another --out"
        )
    needles = read_needles(args.needles)
    texts = read_haystack(args.haystack)
    checkpoint = cli.read_model(args.model, args)
    tokenizer = checkpoint.tokenizer
    facts = make_facts(args, checkpoint, needles, texts)
    prompts = make_prompts(facts, needles, texts, tokenizer)
    model = cli.load_model(args.model, args)
    cli.limit_threads(model)
    facts |= {
        "fingerprint": fingerprint(args.model),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "ranks": model.shard.size,
    }
    if args.masked:
        right = count_masked(model, tokenizer, prompts, needles, facts, args.masked)
        if model.shard.rank == 0:
            files.write(
                args.out, [dict(model=model.name, runs=len(prompts), facts=facts, right=right)]
            )
        return
    with files.locked(runs) if model.shard.rank == 0 else nullcontext():
        try:
            records = run_all(model, tokenizer, prompts, needles, facts, runs, args.min_success)
        except KeyboardInterrupt:
            print("\ninterrupted: the same command continues", file=sys.stderr)
            raise
        if model.shard.rank:
            return
        files.write(args.out, [mean_scores(model, records, facts, args.min_success)])
    if not any(record["write"] for record in records):
        print(f"write is left out: {model.name} does not show its heads' values", file=sys.stderr)
    print(f"{summary(records)}; wrote {args.out}")


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
