"""The program behind decore.py: decodes prompts by any method, and prints texts or JSON, or writes
a page.

prompts.py reads prompts, printing.py prints texts and their sources, page.py writes the page."""

import argparse
import json
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import decore
from cli import models
from cli.entry import explain
from cli.options import (
    DECODER,
    add_method_arguments,
    add_model_arguments,
    check_options,
    fit,
    full_names,
    labels,
    number,
    parse_with_decoders,
    parser,
    positive,
    refuse_unused,
    say_measures,
    setups,
)
from cli.page import check_writable, write_page
from cli.printing import Texts, sources_below
from cli.prompts import (
    CHAT,
    EXAMPLE,
    chat_prompt,
    encode_all,
    file_prompt,
    ids_prompt,
    line_prompts,
    read_prompt,
    read_prompts,
    text_prompt,
    to_prompts,
    with_begin,
    without_context,
)
from decoders.setup import METHODS, Setup, method_names
from decoders.sweep import PromptsReadOnce
from heads.sources import find_sources
from runtime.errors import InputError
from runtime.ranks import rank_and_size

PROMPTS = {  # option → (how it is parsed, its value, what it is)
    "--prompt": (text_prompt, None, "may be repeated; without a prompt, standard input is one"),
    "--prompt-file": (file_prompt, "FILE", "a file that is one prompt; - is standard input"),
    "--messages": (
        chat_prompt,
        "FILE",
        f'a JSON file that is a chat: {CHAT}, or {{"messages": […]}}; a last turn of the '
        "assistant is continued",
    ),
    "--prompts": (
        line_prompts,
        "FILE.jsonl",
        'a JSON object in each line, with "prompt" or "messages", "begin" if it has one, and '
        '"without_context" for cad; --json gives back all of its fields',
    ),
    "--prompt-ids": (ids_prompt, "ID,…", "token ids separated by commas, used as they are"),
}
COMPARED = ("greedy", "masked")
HIGH = 2.5  # a mean α, in nats: docs/choosing.md says which stored answers have a higher one
# What --json says of an answer, besides the fields of its prompt.
NAMES = {"index", "prompt_ids", "text", "model", "sources"}
NAMES |= {"ids", "alphas", "entropies", "stop"} | Setup("greedy").header().keys()
EXAMPLES = """examples:
  python decore.py                                            the built-in example
  python decore.py --model Qwen/Qwen2.5-3B-Instruct --prompt-file passage.txt --compare
  python decore.py --model my-gemma2 --transformers --prompt "…" --method dola-low,decore-entropy
"""


def main():
    """Decode the prompts of the command line by one method, or by several.

    What can be known without weights is checked before they are read."""
    args = parse_with_decoders(make_parser)
    chosen = choose_methods(args)
    facts, tokenizer, amateur_facts = models.read_models(args)
    job = None
    if rank_and_size()[0] == 0:  # it has standard input
        job = prepare(args, chosen, facts, tokenizer, amateur_facts)
    model, amateur = models.load_models(facts, amateur_facts, args)
    prompts, fitted = model.shard.broadcast(job)
    if len(fitted) > 1 and len(prompts) <= args.batch_size:  # more batches need more memory
        model = PromptsReadOnce(model)
        amateur = amateur and PromptsReadOnce(amateur)
    width = max(14, *map(len, fitted)) if len(fitted) > 1 else 0
    answers = {}
    for label, setup in fitted.items():
        with may_be_left_out(label, setup.method, args):
            answers[label] = answer(label, setup, prompts, model, amateur, tokenizer, args, width)
    if args.html:
        write_page(args.html, model, prompts, fitted, answers)
        print(f"wrote {args.html}", file=sys.stderr)


@contextmanager
def may_be_left_out(label, method, args):
    """In place of a ValueError of a method that --compare adds, print why it is left out."""
    try:
        yield
    except ValueError as error:
        if method in full_names(args.method, args.amateur):
            raise
        print(f"{label} is left out: {explain(error)}", file=sys.stderr)


def prepare(args, chosen, model, tokenizer, amateur):
    """([`Prompt`], {label: setup}), from the options and the facts of the models. Prints the
    built-in example if there is no prompt."""
    objects = read_prompts(args)
    texts = args.without_context or []
    is_example = not objects
    if is_example:
        objects = text_prompt(read_prompt(EXAMPLE))
        chosen = list(dict.fromkeys(["greedy", *chosen]))
        texts = texts or [objects[0]["prompt"].rpartition("\n")[2]]
    objects = with_begin(objects, args.begin)
    prompts = to_prompts(objects, model, tokenizer, args)
    if args.json:
        check_fields(prompts)
    unfitted = list(setups(args, chosen))
    fitted = {}
    for setup, label in zip(unfitted, labels(unfitted)):
        with may_be_left_out(label, setup.method, args):
            fitted[label] = fit(setup, args, model, amateur)
    say_measures(fitted.values(), args)
    if "cad" in chosen:
        without = without_context(objects, texts)
        ids = encode_all(without, model, tokenizer, args, "context-free prompt")
        prompts = [p._replace(ids_without_context=x) for p, x in zip(prompts, ids)]
    if is_example and not args.json:
        print(objects[0]["prompt"], end="\n\n", flush=True)
    return prompts, fitted


def check_fields(prompts):
    """InputError for a field of a prompt that --json could not give back."""
    for prompt in prompts:
        for name in NAMES & prompt.fields.keys():
            raise InputError(
                f"prompt {prompt.index + 1} has a field {name!r}, as the answer in --json has: "
                "rename it"
            )


def answer(label, setup, prompts, model, amateur, tokenizer, args, width):
    """Decode prompts by a setup, in batches → a `Generation` for each of them, with its texts for
    a page.

    Prints the objects, or each answer as it grows. width: of the label before an answer; 0: no
    label."""
    several = len(prompts) > 1
    before = f"{label:>{width}}  " if width else ""
    reads_once = isinstance(model, PromptsReadOnce)
    are_read = reads_once and bool(model.known) and not setup.mask_prompt
    method = setup.record(amateur)
    generations = []
    seconds = 0
    on_page = args.html and setup.method.startswith("decore")
    for first in range(0, len(prompts), args.batch_size):
        batch = prompts[first : first + args.batch_size]
        if setup.method == "cad":
            method = replace(method, without_context=[p.ids_without_context for p in batch])
        titles = [f"[{p.index + 1}] {p.title}\n" if several else "" for p in batch]
        texts = Texts(
            tokenizer,
            args.stop,
            beginnings=[t + before + p.fields.get("begin", "") for t, p in zip(titles, batch)],
            end="\n\n" if several else "\n",
            holds_ends=args.sources,
            quiet=args.json,
        )
        start = time.perf_counter()
        try:
            out = decore.generate(
                model,
                [prompt.ids for prompt in batch],
                method,
                max_new_tokens=args.max_new_tokens,
                min_new_tokens=args.min_new_tokens,
                draft=args.draft,
                eos_ids=tokenizer.eos_ids,
                on_token=texts.push,
                tokenizer=tokenizer if args.html else None,
                best=1 if on_page else 0,
            )
        except KeyboardInterrupt:
            texts.interrupt()
            raise
        seconds += time.perf_counter() - start
        for b, (prompt, g) in enumerate(zip(batch, out)):
            line = answer_object(prompt, g, texts.text(b), setup, model)
            if args.sources and setup.heads:
                masked = amateur if setup.amateur else model
                g.sources = line["sources"] = find_sources(
                    masked, prompt.ids, g.ids, setup.heads, tokenizer.hidden
                )
            texts.complete(b, sources_below(line, tokenizer, width))
            if args.json:
                print(json.dumps(line, ensure_ascii=False), flush=True)
        generations += out
    report(label, generations, seconds, args, are_read)
    if setup.alpha is None and "alpha_rule" in METHODS[setup.method].options:
        warn_of_alpha(label, generations)
    return generations


def answer_object(prompt, g, text, setup, model):
    """An object of --json: the prompt's index and fields, its answer, and the model and setup."""
    line = {"index": prompt.index} | prompt.fields
    line |= dict(prompt_ids=prompt.ids, ids=g.ids, text=text)
    line |= dict(alphas=g.alphas, entropies=g.entropies, stop=g.stop)
    return line | {"model": model.name, "heads": []} | setup.stated()


def report(name, generations, seconds, args, are_read):
    """Say on standard error how fast a method was, and how answers ended early.

    are_read: another method has read the prompts."""
    n = sum(len(g.ids) for g in generations)
    without = ", prompts already read" * are_read
    speed = f"{n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s{without}"
    print(f"{name}: {speed}", file=sys.stderr)
    ends = [(g.stop, len(g.ids)) for g in generations]
    if any(stop == "length" and n < args.max_new_tokens for stop, n in ends):
        print(f"{name}: an answer ended because the context is full", file=sys.stderr)
    empty = ends.count(("eos", 1))
    if empty:
        print(
            f"{name}: {empty} of {len(ends)} answers are empty, as their first token is an "
            "end id (--min-new-tokens 1 forbids it)",
            file=sys.stderr,
        )


def warn_of_alpha(name, generations):
    """Say on standard error if α stays high in an answer."""
    means = [fmean(g.alphas) for g in generations if len(g.ids) >= 6]  # not only at its beginning
    high = [mean for mean in means if mean > HIGH]
    if high:
        n = len(generations)
        where = f" in {len(high)} of {n} answers" * (n > 1)
        print(
            f"{name}: mean α {fmean(high):.1f}{where}; on small models this breaks words: "
            "--alpha-cap 0.5 limits it, docs/choosing.md says more",
            file=sys.stderr,
        )


# ------------------------------------------------------------------------------------------ options


def make_parser():
    p = parser(
        "Decode with DeCoRe: contrast a model with itself, its retrieval heads masked.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(p.add_argument_group("model"))
    add = p.add_argument_group("prompt").add_argument
    for option, (parse, metavar, text) in PROMPTS.items():
        add(
            option,
            action="extend",
            type=parse,
            metavar=metavar,
            default=[],
            dest="prompts",
            help=text,
        )
    add(
        "--begin",
        metavar="TEXT",
        help="the beginning of the answer; it follows plain text as it is",
    )
    add("--system", help="system message, for models with a chat template")
    add("--raw", action="store_true", help="plain text, no chat template")
    group = p.add_argument_group("method")
    add_method_arguments(group, method_names(METHODS), exclude=["renormalise"])
    group.add_argument("--decoder", **DECODER)
    group.add_argument(
        "--compare",
        action="store_true",
        help=f"decode with {' and '.join(COMPARED)} too, if they apply",
    )
    add = p.add_argument_group("output").add_argument
    add(
        "--max-new-tokens",
        type=positive,
        default=64,
        help="maximum number of new tokens (default: 64)",
    )
    add(
        "--min-new-tokens",
        type=number(int, 0),
        default=0,
        metavar="N",
        help="new tokens before which no end id is chosen (default: 0)",
    )
    add(
        "--draft",
        type=number(int, 0),
        default=0,
        metavar="K",
        help="draft up to K tokens from the text and check them in one pass: the same "
        "answer in fewer passes, for a batch of one prompt (default: 0)",
    )
    add("--stop", action="append", default=[], help="an answer ends before this text")
    add(
        "--batch-size",
        type=positive,
        default=16,
        metavar="B",
        help="prompts that are decoded at once (default: 16)",
    )
    add("--json", action="store_true", help="one JSON object per prompt")
    add(
        "--html",
        type=Path,
        help="also write this file, a page: entropy as shade, numbers on pointing",
    )
    add(
        "--sources",
        action="store_true",
        help="show what in the prompt the masked heads attend to: below each answer the words, "
        "with --json and --html the tokens",
    )
    return p


def choose_methods(args):
    """The names of the methods to decode by.

    InputError for an option that none of them uses, and for a page that cannot be written."""
    if "" in args.stop:
        raise InputError("--stop: an empty text would end every answer before it begins")
    if args.min_new_tokens > args.max_new_tokens:
        raise InputError(
            f"--min-new-tokens {args.min_new_tokens} is above --max-new-tokens "
            f"{args.max_new_tokens}"
        )
    if args.html:
        check_writable(args.html)
    chosen = full_names(args.method, args.amateur)
    if args.compare:
        chosen = []
        for method in (*COMPARED, *args.method):  # without the amateur, and with it
            chosen += [method, *full_names([method], args.amateur)]
    chosen = list(dict.fromkeys(chosen))
    check_options(args, chosen)
    if not any("num_heads" in METHODS[method].options for method in chosen):
        refuse_unused(args, {"sources": f"on {', '.join(chosen)}, which masks no heads"})
    return chosen
