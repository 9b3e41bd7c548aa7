"""The program behind decore.py and baselines.py: prompts in, answers out, as text while it grows or as JSON."""

import json
import os
import stat
import sys
import time
from pathlib import Path
from select import select
from typing import NamedTuple

import cli
from cli.options import nonempty, token_ids
from cli.page import Page
from cli.screen import Screen
from model import Transformer
from runtime.files import read_text
from tokenizer import Tokenizer

EXAMPLE = cli.MINIATURE / "example.txt"                 # a passage that contradicts what the miniature remembers
HEADING = 60                                            # characters of a prompt that are shown above its answer


class Setup(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer
    amateur: Transformer | None
    prompts: list                                       # token ids
    headings: list                                      # the beginning of each prompt, one line
    example: bool                                       # whether the prompt is the built-in example


def main(description, generate, methods, default, choose_heads, find_sources=None, opener=None):
    """Decodes the prompts of the command line by one method, or by several for comparison.

    generate, methods, opener: those of decore.py or baselines.py. choose_heads, find_sources: those of `heads`. Without
    find_sources and opener the program has no pages, sources and lookup, and --compare shows every method."""
    everything = opener is None
    args = arguments(description, methods, default, everything).parse_args()
    if not everything and args.sources and not (args.json or args.html):
        raise ValueError("--sources has no effect without --json or --html")
    inputs = (([], False), [])
    if os.environ.get("RANK", "0") == "0":              # only this rank can read standard input
        prompts, example = read_prompts(args)
        inputs = (prompts, example), choose_methods(args, methods, default, everything, example)
    model, tokenizer, amateur = cli.load_models(args)
    (prompts, example), chosen = model.shard.broadcast(inputs)
    headings = [heading(prompt, tokenizer) for prompt in prompts]
    setup = Setup(model, tokenizer, amateur, encode(prompts, tokenizer, args), headings, example)
    if args.num_heads is None:
        args.num_heads = cli.default_num_heads(model)
    needed = None if everything and args.compare else chosen[-1]
    settings = attempt(chosen, needed, lambda method: method_settings(method, setup, args, choose_heads))
    page = Page(args.html, model, tokenizer, opener) if not everything and args.html else None
    find_sources = find_sources if not everything and args.sources else None
    if example and not args.json:
        print(tokenizer.decode(setup.prompts[0]), end="\n\n", flush=True)
    width = max(14, *map(len, chosen)) if len(chosen) > 1 else 0
    attempt(settings, needed,
            lambda method: answer(method, settings[method], setup, args, generate, width, find_sources, page))


def arguments(description, methods, default, everything):
    p = cli.parser(description)
    cli.add_model_arguments(p)
    several = dict(action="append", default=[])
    p.add_argument("--prompt", metavar="TEXT", **several, help="several prompts are decoded as one batch; text that is "
                   "piped into standard input is a prompt too")
    p.add_argument("--prompt-file", metavar="F", **several, help="a file that is one prompt; - is standard input")
    p.add_argument("--messages", metavar="F", **several,
                   help='a chat of several turns: a JSON list of {"role": …, "content": …}')
    p.add_argument("--prompt-ids", metavar="1,2,3", type=token_ids, **several, help="token ids, used as they are")
    p.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")
    p.add_argument("--raw", action="store_true", help="plain text, no chat template")
    p.add_argument("--max-new-tokens", type=cli.positive, default=64, metavar="N", help="maximum number of new tokens")
    p.add_argument("--stop", type=nonempty, metavar="TEXT", **several, help="an answer ends before this text")
    p.add_argument("--json", action="store_true", help="one JSON object per prompt")
    p.add_argument("--no-graph", action="store_true", help="on a GPU: do not record the decoding step as a CUDA graph")
    p.add_argument("--method", type=cli.method_name(methods), metavar="M",
                   help=f"{', '.join(methods)} (default: {default})")
    cli.add_method_arguments(p, methods)
    p.add_argument("--compare", action="store_true", help="every method that applies to the prompt" if everything else
                   "greedy, masked and the method")
    if not everything:
        p.add_argument("--lookup", type=cli.number(int, 0, 2**31 - 1), default=0, metavar="K",
                       help="check K copied tokens per pass; affects speed, not tokens (default: 0, off)")
        p.add_argument("--html", metavar="FILE", help="also write a page: entropy as shade, numbers on hover")
        p.add_argument("--sources", action="store_true", help="with --json or --html: the places in the prompt that "
                       "the retrieval heads attend to at each new token")
    return p


def choose_methods(args, methods, default, everything, example):
    """The methods to decode by, that of --method last. ValueError for an option that none of them uses."""
    if args.compare and everything and args.method:
        raise ValueError("--method has no effect with --compare, which shows every method")
    method = args.method or default
    chosen = cli.full_names([method], args.amateur)
    if args.compare:        # with an amateur, a method is shown both without and with it
        plain = methods if everything else ("greedy", "masked", method)
        chosen = [name for one in plain for name in (one, *cli.full_names([one], args.amateur))]
    elif example:
        chosen = ["greedy", *chosen]
    chosen = [name for i, name in enumerate(chosen) if name not in chosen[i + 1:]]
    cli.check_options(args, chosen)
    return chosen


def attempt(methods, needed, work):
    """{method: work(method)}, without the methods that fail. ValueError if `needed` or all of them fail."""
    results, reason = {}, None
    for method in methods:
        try:
            results[method] = work(method)
        except ValueError as error:
            if method == needed or len(methods) == 1:
                raise
            reason = error
            print(f"{method} is left out: {reason}", file=sys.stderr)
    if not results:
        raise reason
    return results


def method_settings(method, setup, args, choose_heads):
    """The arguments of `generate` for a method."""
    settings = cli.method_settings(method, args, setup.model, setup.amateur, choose_heads)
    if args.no_graph:
        settings["graph"] = False
    if getattr(args, "lookup", 0):
        settings["lookup"] = args.lookup
    if method == "cad":
        without = (args.without_context or []) + (args.without_context_ids or [])
        if setup.example and not without:               # its last line, without the passage
            without = [read_text(EXAMPLE).rstrip("\n").rpartition("\n")[2]]
        if not without:
            raise ValueError("cad needs each prompt without its context too (--without-context)")
        settings["ids_without_context"] = encode(without, setup.tokenizer, args)
    return settings


# -------------------------------------------------------------------------------------------------------------- prompts


def read_prompts(args):
    """(texts, chats as lists of messages, and lists of ids; whether they are the built-in example)."""
    texts = args.prompt + [read_stdin() if path == "-" else read_text(path) for path in args.prompt_file]
    chats, ids = [read_messages(path) for path in args.messages], args.prompt_ids
    if not texts and not chats and not ids:
        texts = [text for text in [piped()] if text.strip()]
    if not texts and (chats or ids) and (args.raw or args.system is not None):
        raise ValueError(f"{'--raw' if args.raw else '--system'} has no effect on --messages and --prompt-ids")
    example = not (texts or chats or ids)
    if example:
        if Path(args.model).resolve() != cli.MINIATURE:
            raise ValueError("nothing to answer: give --prompt, --prompt-file, --messages or --prompt-ids")
        texts = [read_text(EXAMPLE).rstrip("\n")]
    if not all(text.strip() for text in texts):
        raise ValueError("the prompt is empty")
    return texts + chats + ids, example


def read_stdin():
    return sys.stdin.buffer.read().decode().replace("\r\n", "\n")


def piped():
    """The text piped into standard input; nothing from a terminal or /dev/null."""
    try:
        if stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode):
            return ""
    except OSError:                                     # not a file, as in a notebook
        return ""
    if not select([sys.stdin], [], [], 2)[0]:
        print("reading the prompt from standard input …", file=sys.stderr)
    return read_stdin().removesuffix("\n")


def read_messages(path):
    try:
        messages = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not (isinstance(messages, list) and messages and all(
            isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
            for turn in messages)):
        raise ValueError(f'{path} must hold a list of {{"role": "user", "content": "…"}}')
    return messages


def encode(prompts, tokenizer, args):
    """Token ids. Texts and chats go through the chat template, if there is one; ids stay as they are."""
    chat = tokenizer.has_chat_template and not args.raw
    if args.system is not None and not chat:
        raise ValueError("--system needs a chat template: " + ("drop --raw" if args.raw else f"{args.model} has none"))
    templated = any(isinstance(prompt, str) and chat or is_chat(prompt) for prompt in prompts)
    if args.template_args and not templated:
        raise ValueError("--template-args has no effect: no prompt goes through a chat template")
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str) and not prompt.strip():
            raise ValueError("the prompt is empty")
        if isinstance(prompt, str) and chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            prompt = [*system, {"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            encoded.append(tokenizer.encode(prompt))
        elif is_chat(prompt):
            encoded.append(tokenizer.encode_chat(prompt, template_args=args.template_args))
        else:
            encoded.append(prompt)
    return encoded


def is_chat(prompt):
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def heading(prompt, tokenizer):
    """The beginning of a prompt, in one line."""
    if not isinstance(prompt, str):
        prompt = prompt[-1]["content"] if is_chat(prompt) else tokenizer.decode(prompt)
    text = " ".join(prompt.split())
    return text if len(text) <= HEADING else text[:HEADING].rstrip() + " …"


# -------------------------------------------------------------------------------------------------------------- answers


def answer(method, settings, setup, args, generate, width, find_sources, page):
    """Decodes the prompts by one method and prints the texts as they grow, or JSON. width: columns for its name."""
    before = [f"{method:>{width}}  " if width else ""] * len(setup.prompts)
    if len(before) > 1:
        before = [f"[{i}] {text}\n{name}" for i, (text, name) in enumerate(zip(setup.headings, before, strict=True), 1)]
    screen = Screen(setup.tokenizer, before, args.stop, silent=args.json)
    start = time.perf_counter()
    out = generate(setup.model, setup.prompts, max_new_tokens=args.max_new_tokens, eos_ids=setup.tokenizer.eos_ids,
                   on_token=screen.token, **settings)
    seconds = time.perf_counter() - start
    screen.end()
    heads, sources = settings.get("amateur_heads", settings.get("heads", [])), [None] * len(out)
    if find_sources and heads:
        sources = [find_sources(settings.get("amateur") or setup.model, prompt, g.ids, heads)
                   for prompt, g in zip(setup.prompts, out, strict=True)]
    for prompt, g, text, places in zip(setup.prompts, out, screen.texts, sources, strict=True) if args.json else ():
        line = dict(prompt_ids=prompt, ids=g.ids, text=text, alphas=g.alphas, entropies=g.entropies, stop=g.stop,
                    method=method, heads=[f"{layer}-{head}" for layer, head in heads], model=setup.model.name)
        line |= {} if places is None else dict(sources=places)
        line |= dict(amateur=settings["amateur"].name) if "amateur" in settings else {}
        print(json.dumps(line, ensure_ascii=False), flush=True)
    if page:
        page.add(method, setup.prompts, out, settings, sources)
    n = sum(len(g.ids) for g in out)
    print(f"{method}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)
