"""The program behind decore.py: decodes prompts and prints texts or JSON, or writes a page.

settings.py makes the arguments of a method, page.py the page."""

import json
import os
import select
import sys
import time
from collections import Counter
from pathlib import Path

import cli
from decore import DeCoRe
from heads.sources import find_sources
from paper import decoders
from program.page import pieces, write_page
from program.settings import method_settings
from runtime.checks import check_prompts
from runtime.files import one_line, read_text

EXAMPLE = cli.MINIATURE / "example.txt"  # a passage that contradicts the miniature's memory
TITLE = 60  # characters of a prompt that are printed above its answers
SHOWN = 3  # words of the prompt that --sources prints for a new word


DEFAULT = "decore-entropy"
COMPARED = ("greedy", "masked")


def main():
    """Decode the prompts of the command line by one method, or by several for comparison.

    Methods that --compare adds and that raise ValueError are left out. The requested method's error
    is raised after all others are printed."""
    args = make_parser().parse_args()
    requested, chosen = choose_methods(args, DEFAULT, COMPARED)
    prompts = (
        read_prompts(args) if os.environ.get("RANK", "0") == "0" else None
    )  # rank 0 has standard input
    model, tokenizer, amateur = cli.load_models(args)
    if not model.can_record:
        cli.refuse_unused(args, {"no_graph": f"on {model.device.type}"})
    prompts = model.shard.broadcast(prompts)
    if not prompts:
        prompts, chosen = [read_prompt(EXAMPLE)], list(dict.fromkeys(["greedy", *chosen]))
        if True:
            args.without_context = args.without_context or [prompts[0].rpartition("\n")[2]]
        if not args.json:
            print(prompts[0], end="\n\n", flush=True)
    ids = [encode(prompt, tokenizer, args) for prompt in prompts]
    check_prompts(model, ids)
    width = max(14, *map(len, chosen)) if len(chosen) > 1 else 0
    answers, failure = [], None  # answers: per method, (a line of --json per prompt, settings)
    try:
        for method in chosen:
            try:
                settings = method_settings(method, args, model, amateur)
                if method == "cad" and args.without_context:
                    settings["ids_without_context"] = [
                        encode(text, tokenizer, args) for text in args.without_context
                    ]
                answers.append(
                    (decode(method, model, tokenizer, ids, settings, args, width), settings)
                )
            except ValueError as error:
                if method == requested:
                    failure = error
                else:
                    print(f"{method} is left out: {error}", file=sys.stderr)
    finally:  # also after Ctrl-C
        if len(ids) > 1 and not args.json:
            print_batch(prompts, [lines for lines, _ in answers], tokenizer, width)
    if args.html and answers:
        write_page(args.html, model, tokenizer, answers, DeCoRe)
        print(f"wrote {args.html}", file=sys.stderr)
    if failure:
        raise failure


def decode(method, model, tokenizer, ids, settings, args, width):
    """Decode by one method → a line of --json per prompt.

    Prints the lines, or a single answer while it is decoded."""
    streams, live = [tokenizer.stream(args.stop) for _ in ids], len(ids) == 1 and not args.json
    text = label(method, width)  # to be printed

    def on_token(b, token, entropy):
        nonlocal text
        text += "" if token in tokenizer.eos_ids else streams[b].push(token)
        if live:
            print(text, end="", flush=True)
            text = ""
        return streams[b].ended

    start = time.perf_counter()
    out = decoders.generate(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        eos_ids=tokenizer.eos_ids,
        on_token=on_token,
        graph=False if args.no_graph else None,
        **settings,
    )
    seconds, n = time.perf_counter() - start, sum(len(g.ids) for g in out)
    heads, lines = settings.get("amateur_heads", settings.get("heads", ())), []
    for prompt, g, stream in zip(ids, out, streams, strict=True):
        text += stream.end()
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
        elif live:
            print(text + sources_below(line, tokenizer, width), flush=True)
        lines.append(line)
    print(f"{method}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)
    if any(g.stop == "length" and len(g.ids) < args.max_new_tokens for g in out):
        print(f"{method}: an answer ended because the context is full", file=sys.stderr)
    return lines


def label(method, width):
    return f"{method:>{width}}  " if width else ""


def print_batch(prompts, answers, tokenizer, width):
    """Print the answers by prompt and then by method.

    answers: per method, a line for each prompt."""
    for i, lines in enumerate(zip(*answers, strict=True)):
        prompt = prompts[i] if isinstance(prompts[i], str) else tokenizer.decode(prompts[i])
        print(f"[{i + 1}] {one_line(prompt, TITLE)}")
        for line in lines:
            print(
                label(line["method"], width) + line["text"] + sources_below(line, tokenizer, width)
            )
        print(flush=True)


def sources_below(line, tokenizer, width):
    """Text below an answer: for each of its words the words of the prompt that the heads attended
    to most."""
    if "sources" not in line:
        return ""
    text, ids = "", line["ids"][:-1] if line["stop"] == "eos" else line["ids"]
    word_of = {
        p: word for word, positions in words(tokenizer, line["prompt_ids"]) for p in positions
    }
    for word, positions in words(tokenizer, ids):
        shares = Counter()
        for p in positions:
            for place, share in line["sources"][p]:
                if place in word_of:
                    shares[word_of[place]] += share / len(positions)
        text += f"\n{'':{width}}  {word} ← " + ", ".join(
            f"{w} {share:.0%}" for w, share in shares.most_common(SHOWN)
        )
    return text


def words(tokenizer, ids):
    """[(word, positions of its ids)] of a text."""
    out = []
    for text, positions in pieces(tokenizer, ids):
        if not out or text[0].isspace() or out[-1][0][-1].isspace():
            out.append(("", []))
        out[-1] = out[-1][0] + text, [*out[-1][1], *positions]
    return [(word.strip(), positions) for word, positions in out if word.strip()]


# ------------------------------------------------------------------------------------------ options


def make_parser():
    methods, default, compared = decoders.METHODS, DEFAULT, COMPARED
    p = cli.parser("Decode with DeCoRe: contrast a model with itself, its retrieval heads masked.")
    cli.add_model_arguments(p)
    several = dict(action="append", default=[])
    p.add_argument(
        "--prompt",
        metavar="TEXT",
        **several,
        help="several prompts are decoded as one batch; without a prompt, standard input is one",
    )
    p.add_argument(
        "--prompt-file",
        metavar="F",
        **several,
        help="a file that is one prompt; - is standard input",
    )
    p.add_argument(
        "--prompt-ids",
        metavar="1,2,3",
        type=token_ids,
        **several,
        help="token ids, used as they are",
    )
    p.add_argument(
        "--system", metavar="TEXT", help="system message, for models with a chat template"
    )
    p.add_argument("--raw", action="store_true", default=None, help="plain text, no chat template")
    p.add_argument(
        "--max-new-tokens",
        type=cli.positive,
        default=64,
        metavar="N",
        help="maximum number of new tokens (default: 64)",
    )
    p.add_argument("--stop", metavar="TEXT", **several, help="an answer ends before this text")
    p.add_argument(
        "--method",
        type=cli.method_name(methods),
        metavar="M",
        help=f"{', '.join(methods)} (default: {default})",
    )
    cli.add_method_arguments(p, methods)
    p.add_argument(
        "--compare",
        action="store_true",
        help=f"decode with {', '.join(compared)} too, if they apply",
    )
    p.add_argument("--json", action="store_true", help="one JSON object per prompt")
    p.add_argument(
        "--html", metavar="FILE", help="also write a page: entropy as shade, numbers on pointing"
    )
    p.add_argument(
        "--sources",
        action="store_true",
        help="show what in the prompt the masked heads attend to: below "
        "each answer the words, with --json and --html the tokens",
    )
    p.add_argument(
        "--no-graph",
        action="store_true",
        help="on a GPU: do not record a decoding step as a CUDA graph",
    )
    return p


def choose_methods(args, default, compared):
    """(the requested method, all methods to decode by).

    ValueError for an option that none of them uses."""
    if "" in args.stop:
        raise ValueError("--stop: an empty text would end every answer before it begins")
    if args.html is not None and (
        Path(args.html).is_dir() or not os.access(Path(args.html).parent, os.W_OK)
    ):
        raise ValueError(
            f"--html {args.html} cannot be written: give a file in a folder that you may write to"
        )
    names = [*(compared if args.compare else ()), args.method or default]
    full = cli.full_names(names, args.amateur)
    both = [
        name for pair in zip(names, full, strict=True) for name in pair
    ]  # without and with the amateur
    chosen = list(dict.fromkeys(both if args.compare else full))
    cli.check_options(args, chosen)
    if not set(chosen) & {*cli.OPTIONS["num_heads"][0]}:
        cli.refuse_unused(args, {"sources": f"on {', '.join(chosen)}, which masks no heads"})
    return full[-1], chosen


# ------------------------------------------------------------------------------------------ prompts


def read_prompts(args):
    """Texts and lists of ids; none of them for the built-in example."""
    texts, piped = (
        args.prompt + [read_prompt(path) for path in args.prompt_file],
        not sys.stdin.isatty(),
    )
    if piped and not texts and not args.prompt_ids:
        texts = [text for text in [read_prompt("-")] if text.strip()]
    elif (
        piped and select.select([sys.stdin], [], [], 0)[0] and sys.stdin.buffer.peek(1)
    ):  # without waiting
        raise ValueError(
            "standard input has a text too: add --prompt-file - to decode it, or < /dev/null to "
            "leave it"
        )
    if any("\\n" in text for text in args.prompt):
        print(
            r"--prompt has a backslash and an n, which is not a line break: write $'…\n…', or use "
            r"--prompt-file",
            file=sys.stderr,
        )
    if args.prompt_ids and not texts:
        cli.refuse_unused(
            args, dict.fromkeys(("system", "raw", "template_args"), "on --prompt-ids")
        )
    if not texts + args.prompt_ids and Path(args.model).resolve() != cli.MINIATURE:
        raise ValueError("nothing to answer: give --prompt, --prompt-file or --prompt-ids")
    return texts + args.prompt_ids


def token_ids(text):
    return [cli.number(int, 0)(part) for part in text.split(",")]


def read_prompt(path):
    """The text of a file, or of the standard input, without one final newline."""
    return (sys.stdin.read() if path == "-" else read_text(path)).removesuffix("\n")


def encode(prompt, tokenizer, args):
    """Token ids of a text, through the chat template if there is one. Ids stay as they are."""
    if not isinstance(prompt, str):
        return prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if args.raw or not tokenizer.has_chat_template:
        if args.system is not None or args.template_args:
            raise ValueError("--system and --template-args need a chat template, and exclude --raw")
        return tokenizer.encode(prompt)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return tokenizer.encode_chat(
        [*system, {"role": "user", "content": prompt}], template_args=args.template_args
    )
