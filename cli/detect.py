"""Finds the retrieval heads of a model, as a program: `python -m heads.detect`."""

import argparse
import sys
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

from cli import models
from cli.entry import continuing, run_program
from cli.options import (
    add_model_arguments,
    check_known,
    comma_list,
    number,
    parser,
    positive,
    refuse_unused,
)
from heads import find_heads
from heads.ablation import ablate_batch, ablation_table, heads_to_mask
from heads.detect import REMEDY, mean_scores, right_answers, run_all, run_batch, stored_facts
from heads.needles import (
    HAYSTACK,
    PUBLISHED,
    TEMPLATE,
    make_prompts,
    read_haystack,
    read_needles,
    spread,
)
from heads.reader import read_head_file
from runtime import files
from runtime.errors import InputError


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
    p = parser(
        "Find the retrieval heads of a model, needle-in-a-haystack.",
        epilog="With --questions FILE or --task T, heads are measured by their effect on answers: "
        "see python -m heads.detect --task T --help.",
    )
    add = p.add_argument
    add_model_arguments(p)
    add(
        "--out",
        required=True,
        metavar="FILE",
        type=Path,
        help="head scores, and FILE.runs.jsonl the runs; with --masked the runs",
    )
    purpose = p.add_mutually_exclusive_group()
    purpose.add_argument(
        "--masked",
        type=comma_list(positive),
        metavar="N[,N…]",
        help="measure no heads: count the needles found without the N best heads of a head file, "
        "by each of its measures, and without random ones",
    )
    purpose.add_argument(
        "--min-success",
        type=number(int, 0),
        default=10,
        help="right answers needed (default 10); 0 also goes on if the first 20 are wrong",
    )
    add(
        "--heads",
        metavar="NAME|FILE",
        help="with --masked: the head file, or another model with one (default: this model's)",
    )
    add("--batch-size", type=positive, default=4, help="runs decoded together (default 4)")
    add_prompt_arguments(p)
    return p.parse_args()


def add_prompt_arguments(p):
    """Options of the runs: their prompts, and where an answer ends."""
    add = p.add_argument
    add(
        "--lengths",
        type=lengths,
        metavar="A:B:N",
        help="N prompt lengths, A to B tokens (default: 5 up to 5000 or "
        "the model's context; with --published 1000 and 3579)",
    )
    add("--depths", type=positive, default=10, help="needle depths, 0 to 100 %% (default 10)")
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
        type=positive,
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
    add("--max-new-tokens", type=positive, default=50, help="of an answer (default 50)")
    add(
        "--published",
        action="store_true",
        help="as the published runs: needle inserted and located by token ids, "
        "their prompt, repeated tokens counted, answers end only at a new line's token or id 144",
    )


def make_facts(args, model, needles, texts):
    """What determines the scores and is known without the weights, as a dict for the head file.

    model: `cli.models.Facts`. InputError for options that do not fit."""
    published = args.published
    chat = bool(model.tokenizer.chat_template and not args.raw and not published)
    if published:
        unused = ["template", "raw", "eos"] + ["seed"] * (not args.runs)
        refuse_unused(args, dict.fromkeys(unused, "with --published"))
    template_args = None
    if chat:
        template_args = models.benchmark_template_args(model.tokenizer, args.template_args) or {}
    else:
        refuse_unused(args, {"template_args": "on plain text"})
    libraries = "torch", "tokenizers", "rouge-score", *["transformers"] * args.transformers
    longest = model.config.max_positions - args.max_new_tokens
    if longest < 1:
        raise InputError(
            f"--max-new-tokens {args.max_new_tokens} leaves no room for a prompt in the context of "
            f"{model.name}, {model.config.max_positions} tokens"
        )
    last = min(5000, longest)
    # In a short context the needle takes most of a prompt.
    first = max(last // 5, min(400, 3 * last // 4))
    prompt_lengths = args.lengths or ([1000, 3579] if published else spread(first, last, 5))
    if prompt_lengths[-1] > longest:
        raise InputError(
            f"--lengths: {prompt_lengths[-1]} tokens do not fit the context of {model.name} with "
            f"{args.max_new_tokens} new ones; use lengths up to {longest}"
        )
    return {
        "model": model.name,
        "lengths": prompt_lengths,
        "depths": args.depths,
        "runs": args.runs,
        "seed": args.seed or 0,
        "needles": files.json_hash(needles),
        "haystack": files.json_hash(texts),
        "template": PUBLISHED if published else args.template or TEMPLATE,
        "chat": chat,
        "template_args": template_args,
        "eos": args.eos,
        "published": published,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "engine": "transformers" if args.transformers else "own",
        "versions": {name: version(name) for name in libraries},
    }


def runs_file(args):
    """The file of runs. InputError if it, or the head file, cannot be that of this command."""
    if args.out.is_dir():
        raise InputError(f"--out {args.out} is a folder; give a file in it")
    runs = args.out if args.masked else Path(f"{args.out}.runs.jsonl")
    scored = args.out.exists() and (args.masked or has_scores(args.out))  # not damaged
    if runs.exists():
        stored_facts(runs)
    elif scored:
        raise InputError(f"--out {args.out} exists, and its runs ({runs}) do not; {REMEDY}")
    return runs


def has_scores(path):
    """Whether a head file has more than the effect that questions measured."""
    content = read_head_file(path)
    return "scores" in content or "effect_facts" not in content


def effect_on_questions(path):
    """The effect scores of a head file that questions measured, with their facts; {} if none did.

    They stay: needles measure the effect in a text that is not the user's task."""
    content = read_head_file(path) if path.exists() else {}
    return {n: content[n] for n in ("effect", "effect_facts") if "effect_facts" in content}


def say_missing(content):
    """Print which measures a head file does not have, and why."""
    for measure, reason in (
        ("write", "does not show its heads' values"),
        ("effect", "has no gradient, or the stored runs are of an earlier version"),
    ):
        if measure not in content:
            print(f"{measure} is left out: {content['model']} {reason}", file=sys.stderr)


@continuing("interrupted: the same command continues")
def main():
    args = parse_args()
    runs = runs_file(args)
    needles = read_needles(args.needles)
    texts = read_haystack(args.haystack)
    checkpoint = models.read_model(args.model, args)
    tokenizer = checkpoint.tokenizer
    facts = make_facts(args, checkpoint, needles, texts)
    if args.masked:
        check_known(checkpoint, args.heads, "--heads", args.model, args)
        path, _ = find_heads(checkpoint, args.heads)
        if str(path) != args.heads:
            print(f"masked heads are those of {path}", file=sys.stderr)
        sets = heads_to_mask(checkpoint, path, args.masked)
        labels = {name: [f"{layer}-{head}" for layer, head in sets[name]] for name in sets}
        facts["masked"] = labels
        measure = partial(ablate_batch, sets=sets)
    else:
        sets = ()
        measure = run_batch
        refuse_unused(args, {"heads": "without --masked"})
    prompts = make_prompts(facts, needles, texts, tokenizer)
    model = models.load_model(checkpoint.checkpoint, args)
    models.limit_threads(model)
    facts |= {
        "fingerprint": model.checkpoint.fingerprint,
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "ranks": model.shard.size,
    }

    def run(batch, bar):
        steps = (1 + len(sets)) * args.max_new_tokens
        on_step = partial(bar.update, len(batch) / steps)
        return measure(model, tokenizer, batch, needles, facts, on_step=on_step)

    min_success = 0 if args.masked else args.min_success
    with files.locked(runs) if model.shard.rank == 0 else nullcontext():
        records = run_all(model, prompts, facts, runs, run, min_success)
        if model.shard.rank:
            return
        if not args.masked:
            content = mean_scores(model, records, facts, min_success)
            content |= effect_on_questions(args.out)
            files.write(args.out, [content])
            say_missing(content)
    if args.masked:
        print(*ablation_table(records), "", sep="\n")
    print(f"{right_answers(records)}; wrote {args.out}")


if __name__ == "__main__":
    sys.exit(run_program(main))
