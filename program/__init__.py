"""The program behind decore.py: decodes prompts by any method, and prints texts or JSON, or writes
a page.

settings.py makes the arguments of a method, prompts.py reads prompts, printing.py shows answers,
page.py writes the page."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import cli
from heads.sources import find_sources
from paper import decoders
from program.page import write_page
from program.printing import label, sources_below
from program.prompts import EXAMPLE, prompts_to_ids, read_prompt, read_prompts, token_ids
from program.settings import method_settings
from runtime.files import one_line
from runtime.torchrun import rank_and_size

COMPARED = ("greedy", "masked")
TITLE = 60  # characters of a prompt that are printed above its answers
EXAMPLES = """examples:
  python decore.py                                            the built-in example
  python decore.py --model Qwen/Qwen2.5-3B-Instruct --prompt-file passage.txt --compare
  python decore.py --model my-gemma2 --transformers --prompt "…" --method dola-low,decore-entropy
"""


def main():
    """Decode the prompts of the command line by one method, or by several.

    What can be known without weights is checked before they are read. Methods that --compare adds
    and that raise ValueError are left out; a requested method's error is raised after the other
    answers are printed."""
    args = make_parser().parse_args()
    requested, chosen = choose_methods(args)
    facts, tokenizer, amateur_facts = cli.read_models(args)
    job = None
    if rank_and_size()[0] == 0:  # it has standard input
        job = prepare(args, requested, chosen, facts, tokenizer, amateur_facts)
    model, amateur = cli.load_weights(args)
    if not model.can_record:
        cli.refuse_unused(args, {"no_graph": f"on {model.device.type}"})
    prompts, settings = model.shard.broadcast(job)
    width = max(14, *map(len, settings)) if len(settings) > 1 else 0
    answers, failures = {}, []
    for method, arguments in settings.items():
        if "amateur" in arguments:
            arguments["amateur"] = amateur
        try:
            answers[method] = answer(method, prompts, arguments, model, tokenizer, args, width)
        except ValueError as error:
            if method in requested:
                failures.append(error)
            else:
                print(f"{method} is left out: {error}", file=sys.stderr)
    if args.html and answers:
        write_page(args.html, model, tokenizer, answers, settings)
        print(f"wrote {args.html}", file=sys.stderr)
    if failures:
        raise failures[0]


def prepare(args, requested, chosen, model, tokenizer, amateur):
    """(prompts as {title: ids}, {method: its settings}), from the options and the facts of the
    models. Prints the built-in example if there is no prompt."""
    given = read_prompts(args)
    prompts = given or [read_prompt(EXAMPLE)]
    if not given:
        chosen = list(dict.fromkeys(["greedy", *chosen]))
        args.without_context = args.without_context or [prompts[0].rpartition("\n")[2]]
    ids = prompts_to_ids(prompts, model, tokenizer, args)
    settings = {}
    for method in chosen:
        try:
            settings[method] = method_settings(method, args, model, amateur)
            if method == "cad" and args.without_context:
                without = prompts_to_ids(args.without_context, model, tokenizer, args)
                settings[method]["ids_without_context"] = without
        except ValueError as error:
            if method in requested:
                raise
            print(f"{method} is left out: {error}", file=sys.stderr)
        if "amateur" in settings.get(method, ()):
            settings[method]["amateur"] = None  # its weights come later
    if not given and not args.json:
        print(prompts[0], end="\n\n", flush=True)
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    return list(zip(texts, ids, strict=True)), settings


def answer(method, prompts, settings, model, tokenizer, args, width):
    """Decode prompts, pairs of text and ids, by one method → an object of --json per prompt.

    Prints the objects; or the only answer while it is decoded; or each of several answers when it
    ends."""
    ids = [prompt for _, prompt in prompts]
    streams = [tokenizer.stream(args.stop) for _ in ids]
    texts = [label(method, width) for _ in ids]  # to be printed
    models = model, settings.get("amateur") or model
    context = min(m.config.max_positions for m in models)
    left = [max(1, min(args.max_new_tokens, context - len(prompt))) for prompt in ids]
    is_live = len(ids) == 1 and not args.json
    at_end = len(ids) > 1 and not args.json and not args.sources

    def on_token(b, token, entropy):
        is_end = token in tokenizer.eos_ids
        texts[b] += "" if is_end else streams[b].push(token)
        left[b] -= 1
        ended = streams[b].ended
        if is_live:
            print(texts[b], end="", flush=True)
            texts[b] = ""
        elif at_end and (is_end or ended or left[b] == 0):
            print_answer(b, texts[b] + streams[b].end())
        return ended

    def print_answer(b, text):
        print(f"[{b + 1}] {one_line(prompts[b][0], TITLE)}\n{text}\n", flush=True)

    start = time.perf_counter()
    out = decoders.generate(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
        on_token=on_token,
        graph=not args.no_graph,
        **settings,
    )
    seconds = time.perf_counter() - start
    heads = settings.get("amateur_heads", settings.get("heads", ()))
    lines = []
    for b, (prompt, g, stream) in enumerate(zip(ids, out, streams, strict=True)):
        texts[b] += stream.end()
        line = dict(
            prompt_ids=prompt,
            ids=g.ids,
            text=stream.text,
            alphas=g.alphas,
            entropies=g.entropies,
            stop=g.stop,
            method=method,
            heads=[f"{layer}-{head}" for layer, head in heads],
            model=model.name,
        )
        if args.sources and heads:
            line["sources"] = find_sources(settings.get("amateur") or model, prompt, g.ids, heads)
        if "amateur" in settings:
            line["amateur"] = settings["amateur"].name
        if args.json:
            print(json.dumps(line, ensure_ascii=False), flush=True)
        elif is_live:
            print(texts[b] + sources_below(line, tokenizer, width), flush=True)
        elif not at_end:
            print_answer(b, texts[b] + sources_below(line, tokenizer, width))
        lines.append(line)
    n = sum(len(g.ids) for g in out)
    print(f"{method}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)
    if any(g.stop == "length" and len(g.ids) < args.max_new_tokens for g in out):
        print(f"{method}: an answer ended because the context is full", file=sys.stderr)
    return lines


# ------------------------------------------------------------------------------------------ options


def make_parser():
    p = cli.parser("Decode with DeCoRe: contrast a model with itself, its retrieval heads masked.")
    p.epilog = EXAMPLES
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    cli.add_model_arguments(p.add_argument_group("model"))
    several = dict(action="append", default=[])
    group = p.add_argument_group("prompt")
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        **several,
        help="several prompts are decoded as one batch; without a prompt, standard input is one",
    )
    group.add_argument(
        "--prompt-file",
        metavar="F",
        **several,
        help="a file that is one prompt; - is standard input",
    )
    group.add_argument(
        "--prompt-ids",
        metavar="1,2,3",
        type=token_ids,
        **several,
        help="token ids, used as they are",
    )
    group.add_argument(
        "--system", metavar="TEXT", help="system message, for models with a chat template"
    )
    group.add_argument(
        "--raw", action="store_true", default=None, help="plain text, no chat template"
    )
    group = p.add_argument_group("method")
    group.add_argument(
        "--method",
        type=cli.comma_list(cli.method_name(decoders.METHODS)),
        default=["decore-entropy"],
        metavar="M[,M…]",
        help=f"{', '.join(decoders.METHODS)} (default: decore-entropy)",
    )
    cli.add_method_arguments(group, decoders.METHODS)
    group.add_argument(
        "--compare",
        action="store_true",
        help=f"decode with {' and '.join(COMPARED)} too, if they apply",
    )
    group = p.add_argument_group("output")
    group.add_argument(
        "--max-new-tokens",
        type=cli.positive,
        default=64,
        metavar="N",
        help="maximum number of new tokens (default: 64)",
    )
    group.add_argument("--stop", metavar="TEXT", **several, help="an answer ends before this text")
    group.add_argument("--json", action="store_true", help="one JSON object per prompt")
    group.add_argument(
        "--html", metavar="FILE", help="also write a page: entropy as shade, numbers on pointing"
    )
    group.add_argument(
        "--sources",
        action="store_true",
        help="show what in the prompt the masked heads attend to: below each answer the words, "
        "with --json and --html the tokens",
    )
    group.add_argument(
        "--no-graph",
        action="store_true",
        help="on a GPU: do not record a decoding step as a CUDA graph",
    )
    return p


def choose_methods(args):
    """(the requested methods, all methods to decode by).

    ValueError for an option that none of them uses."""
    if "" in args.stop:
        raise ValueError("--stop: an empty text would end every answer before it begins")
    if args.html is not None and (
        Path(args.html).is_dir() or not os.access(Path(args.html).parent, os.W_OK)
    ):
        raise ValueError(
            f"--html {args.html} cannot be written: give a file in a folder that you may write to"
        )
    requested = cli.full_names(args.method, args.amateur)
    chosen = requested
    if args.compare:  # without the amateur, and with it
        names = [*COMPARED, *args.method]
        chosen = [*names, *cli.full_names(names, args.amateur)]
        chosen = list(
            dict.fromkeys(sorted(chosen, key=lambda m: names.index(m.removesuffix("-lite"))))
        )
    cli.check_options(args, chosen)
    if not set(chosen) & set(cli.OPTIONS["num_heads"].methods):
        cli.refuse_unused(args, {"sources": f"on {', '.join(chosen)}, which masks no heads"})
    return requested, chosen
