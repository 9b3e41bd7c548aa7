"""The program behind decore.py: decodes prompts by any method, and prints texts or JSON, or writes
a page.

prompts.py reads prompts, printing.py shows sources, page.py writes the page."""

import argparse
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import cli
import decore
from cli.page import check_writable, write_page
from cli.printing import sources_below
from cli.prompts import (
    EXAMPLE,
    is_chat,
    messages,
    prompts_to_ids,
    read_prompt,
    read_prompts,
    token_ids,
)
from decoders import baselines
from decoders.setup import MASKED_ROW
from heads.sources import find_sources
from runtime.files import one_line
from runtime.torchrun import rank_and_size

COMPARED = ("greedy", "masked")
EXAMPLES = """examples:
  python decore.py                                            the built-in example
  python decore.py --model Qwen/Qwen2.5-3B-Instruct --prompt-file passage.txt --compare
  python decore.py --model my-gemma2 --transformers --prompt "…" --method dola-low,decore-entropy
"""


def main():
    """Decode the prompts of the command line by one method, or by several.

    What can be known without weights is checked before they are read."""
    args = make_parser().parse_args()
    chosen = choose_methods(args)
    facts, tokenizer, amateur_facts = cli.read_models(args)
    job = None
    if rank_and_size()[0] == 0:  # it has standard input
        job = prepare(args, chosen, facts, tokenizer, amateur_facts)
    model, amateur = cli.load_weights(args)
    prompts, methods, settings = model.shard.broadcast(job)
    width = max(14, *map(len, settings)) if len(settings) > 1 else 0
    answers = {}
    for label, arguments in settings.items():
        method = methods[label]
        if "amateur" in arguments:
            arguments["amateur"] = amateur
        with may_be_left_out(label, method, args):
            answers[label] = answer(
                label, method, prompts, arguments, model, tokenizer, args, width
            )
    if args.html:
        write_page(args.html, model, tokenizer, answers, settings)
        print(f"wrote {args.html}", file=sys.stderr)


@contextmanager
def may_be_left_out(label, method, args):
    """In place of a ValueError of a method that --compare adds, print why it is left out."""
    try:
        yield
    except ValueError as error:
        if method in cli.full_names(args.method, args.amateur):
            raise
        print(f"{label} is left out: {cli.with_flags(str(error))}", file=sys.stderr)


def prepare(args, chosen, model, tokenizer, amateur):
    """([(text, ids) of each prompt], {label: method}, {label: its settings}), from the options and
    the facts of the models. A label is a method, with the values of options that are lists. Prints
    the built-in example if there is no prompt."""
    given = read_prompts(args)
    prompts = given or [read_prompt(EXAMPLE)]
    if not given:
        chosen = list(dict.fromkeys(["greedy", *chosen]))
        args.without_context = args.without_context or [prompts[0].rpartition("\n")[2]]
    ids = prompts_to_ids(prompts, model, tokenizer, args)
    methods, settings = {}, {}
    setups = list(cli.setups(args, chosen))
    for setup, label in zip(setups, cli.titles(setups)):
        method = setup.method
        with may_be_left_out(label, method, args):
            setup = cli.fit(setup, args, model, amateur)
            baselines.check(model, setup.arguments(amateur))
            arguments = setup.arguments()
            if method == "cad":
                if not args.without_context:
                    raise ValueError("cad needs --without-context for each prompt")
                without = prompts_to_ids(args.without_context, model, tokenizer, args)
                arguments["ids_without_context"] = without
            if setup.amateur:
                arguments["amateur"] = None  # its weights come later
            methods[label] = method
            settings[label] = arguments
    if not given and not args.json:
        print(prompts[0], end="\n\n", flush=True)
    titles = []
    for prompt in prompts:
        if is_chat(prompt):
            prompt = prompt[-1]["content"]
        titles.append(prompt if isinstance(prompt, str) else tokenizer.decode(prompt))
    return list(zip(titles, ids)), methods, settings


def answer(name, method, prompts, settings, model, tokenizer, args, width):
    """Decode prompts, pairs of text and ids, by one method → an object of --json per prompt.

    Prints the objects; or the only answer while it is decoded; or each of several answers when it
    ends. width: of the name before an answer; 0: no name."""
    ids = [prompt for _, prompt in prompts]
    streams = [tokenizer.stream(args.stop) for _ in ids]
    label = f"{name:>{width}}  " if width else ""
    is_live = len(ids) == 1 and not args.json

    def on_token(b, token, entropy):
        stream = streams[b]
        is_first = not stream.ids
        is_end = token in tokenizer.eos_ids
        text = "" if is_end else stream.push(token)
        if is_live:
            print(label * is_first + text, end="", flush=True)
        elif (is_end or stream.ended) and not args.json and not args.sources:
            print_answer(b)
        return stream.ended

    def print_answer(b, sources=""):
        streams[b].end()
        title = one_line(prompts[b][0], 60)
        print(f"[{b + 1}] {title}\n{label}{streams[b].text}{sources}\n", flush=True)

    start = time.perf_counter()
    out = decore.generate(
        model,
        ids,
        decoder=baselines.find_decoder(settings["method"], settings),
        max_new_tokens=args.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
        on_token=on_token,
        **settings,
    )
    seconds = time.perf_counter() - start
    heads = settings.get("amateur_heads", settings.get("heads", ()))
    lines = []
    for b, (prompt, g, stream) in enumerate(zip(ids, out, streams)):
        rest = stream.end()
        line = dict(prompt_ids=prompt, ids=g.ids, text=stream.text) | vars(g)
        names = [f"{layer}-{head}" for layer, head in heads]
        line |= dict(method=method, heads=names, model=model.name)
        if args.sources and heads:
            masked = settings.get("amateur") or model
            line["sources"] = find_sources(masked, prompt, g.ids, heads, tokenizer.hidden)
        if "amateur" in settings:
            line["amateur"] = settings["amateur"].name
        if args.json:
            print(json.dumps(line, ensure_ascii=False), flush=True)
        elif is_live:
            print(rest + sources_below(line, tokenizer, width), flush=True)
        elif args.sources or g.stop == "length":
            print_answer(b, sources_below(line, tokenizer, width))
        lines.append(line)
    n = sum(len(g.ids) for g in out)
    print(f"{name}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)
    if any(g.stop == "length" and len(g.ids) < args.max_new_tokens for g in out):
        print(f"{name}: an answer ended because the context is full", file=sys.stderr)
    return lines


# ------------------------------------------------------------------------------------------ options


def make_parser():
    p = cli.parser(
        "Decode with DeCoRe: contrast a model with itself, its retrieval heads masked.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_model_arguments(p.add_argument_group("model"))
    several = dict(action="append", default=[])
    add = p.add_argument_group("prompt").add_argument
    prompts = dict(several, dest="prompts")
    add(
        "--prompt",
        **prompts,
        help="several prompts are decoded as one batch; without a prompt, standard input is one",
    )
    add(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        **prompts,
        help="a file that is one prompt; - is standard input",
    )
    add(
        "--messages",
        type=messages,
        metavar="FILE",
        **prompts,
        help='a JSON file that is a chat: [{"role": "user", "content": "…"}, …]',
    )
    add(
        "--prompt-ids",
        type=token_ids,
        metavar="ID,…",
        **prompts,
        help="token ids separated by commas, used as they are",
    )
    add("--system", help="system message, for models with a chat template")
    add("--raw", action="store_true", help="plain text, no chat template")
    group = p.add_argument_group("method")
    cli.add_method_arguments(group, baselines.METHODS, exclude=["renormalise"])
    group.add_argument(
        "--compare",
        action="store_true",
        help=f"decode with {' and '.join(COMPARED)} too, if they apply",
    )
    add = p.add_argument_group("output").add_argument
    add(
        "--max-new-tokens",
        type=cli.positive,
        default=64,
        help="maximum number of new tokens (default: 64)",
    )
    add("--stop", **several, help="an answer ends before this text")
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

    ValueError for an option that none of them uses, and for a page that cannot be written."""
    if "" in args.stop:
        raise ValueError("--stop: an empty text would end every answer before it begins")
    if args.html:
        check_writable(args.html)
    chosen = cli.full_names(args.method, args.amateur)
    if args.compare:
        chosen = []
        for method in (*COMPARED, *args.method):  # without the amateur, and with it
            chosen += [method, *cli.full_names([method], args.amateur)]
    chosen = list(dict.fromkeys(chosen))
    cli.check_options(args, chosen)
    if not set(chosen) & set(MASKED_ROW):
        cli.refuse_unused(args, {"sources": f"on {', '.join(chosen)}, which masks no heads"})
    return chosen


if __name__ == "__main__":
    sys.exit(cli.run_program(main))
