"""The program behind decore.py and baselines.py: prompts in, answers out, as text while it grows or as JSON."""

import json
import os
import sys
import time
from pathlib import Path
from select import select
from typing import NamedTuple

import cli
from cli.options import token_ids
from cli.page import Page
from cli.screen import Screen
from model import Transformer
from runtime.files import read_text
from tokenizer import Tokenizer

EXAMPLE = cli.MINIATURE / "example.txt"                 # a passage that contradicts the miniature's memory
HEADING = 60                                            # characters of a prompt that are shown above its answer


class Setup(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer
    amateur: Transformer | None
    prompts: list                                       # token ids
    before: list                                        # what is printed before each answer
    example: bool                                       # whether the prompt is the built-in example
    page: Page | None


def main(description, generate, methods, default, choose_heads, find_sources=None, opener=None):
    """Decode the prompts of the command line by one method, or by several for comparison.

    generate, methods, opener: those of decore.py or baselines.py. choose_heads, find_sources: those of `heads`. Without
    find_sources and opener the program has no pages, sources and lookup, and --compare shows every method."""
    everything = opener is None
    args = arguments(description, methods, default, everything).parse_args()
    chosen = choose_methods(args, methods, default, everything)
    prompts = read_prompts(args) if os.environ.get("RANK", "0") == "0" else None    # rank 0 has the standard input
    model, tokenizer, amateur = cli.load_models(args)
    prompts = model.shard.broadcast(prompts)
    needed = None if everything and args.compare else chosen[-1]
    example = not prompts
    if example:
        prompts = [read_text(EXAMPLE).rstrip("\n")]
        chosen = ["greedy"] * ("greedy" not in chosen) + chosen
    width = max(14, *map(len, chosen)) + 2 if len(chosen) > 1 else 0
    before = [f"[{i}] {heading(prompt, tokenizer)}\n" * (len(prompts) > 1) for i, prompt in enumerate(prompts, 1)]
    encoded = [encode(prompt, tokenizer, args) for prompt in prompts]
    if args.num_heads is None:
        args.num_heads = cli.default_num_heads(model)
    page = Page(args.html, model, tokenizer, opener) if not everything and args.html else None
    setup = Setup(model, tokenizer, amateur, encoded, before, example, page)
    if needed:
        method_settings(needed, setup, args, choose_heads)          # raises before the first answer is printed
    if example and not args.json:
        print(tokenizer.decode(encoded[0]), end="\n\n", flush=True)
    answered = 0
    for method in chosen:
        try:
            settings = method_settings(method, setup, args, choose_heads)
            answer(f"{method}  ".rjust(width) * bool(width), method, settings, setup, args, generate, find_sources)
            answered += 1
        except ValueError as error:
            if method == needed or (method == chosen[-1] and not answered):
                raise
            print(f"{method} is left out: {error}", file=sys.stderr)


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
    p.add_argument("--raw", action="store_true", default=None, help="plain text, no chat template")
    p.add_argument("--max-new-tokens", type=cli.positive, default=64, metavar="N", help="maximum number of new tokens")
    p.add_argument("--stop", metavar="TEXT", **several, help="an answer ends before this text")
    p.add_argument("--json", action="store_true", help="one JSON object per prompt")
    p.add_argument("--no-graph", action="store_true", help="on a GPU: do not record the decoding step as a CUDA graph")
    p.add_argument("--method", type=cli.method_name(methods), metavar="M",
                   help=f"{', '.join(methods)} (default: {default})")
    cli.add_method_arguments(p, methods)
    p.add_argument("--compare", action="store_true", help="every method that applies to the prompt" if everything else
                   "greedy, masked and the method")
    if not everything:
        p.add_argument("--lookup", type=cli.number(int, 0, 2**31 - 1), metavar="K",
                       help="check K copied tokens per pass; affects speed, not tokens (default: 0, off)")
        p.add_argument("--html", metavar="FILE", help="also write a page: entropy as shade, numbers on hover")
        p.add_argument("--sources", action="store_true", help="with --json or --html: the places in the prompt that "
                       "the retrieval heads attend to at each new token")
    return p


def choose_methods(args, methods, default, everything):
    """The methods to decode by, that of --method last. ValueError for an option that none of them uses."""
    if args.compare and everything and args.method:
        raise ValueError("--method has no effect with --compare, which shows every method")
    if not everything and args.sources and not (args.json or args.html):
        raise ValueError("--sources has no effect without --json or --html")
    if "" in args.stop:
        raise ValueError("--stop: an empty text would end every answer before it begins")
    method = args.method or default
    chosen = cli.full_names([method], args.amateur)
    if args.compare:        # with an amateur, a method is shown both without and with it
        plain = methods if everything else ("greedy", "masked", method)
        chosen = [name for one in plain for name in (one, *cli.full_names([one], args.amateur))]
        chosen = [name for i, name in enumerate(chosen) if name not in chosen[i + 1:]]
    cli.check_options(args, chosen)
    return chosen


def method_settings(method, setup, args, choose_heads):
    """The arguments of `generate` for a method."""
    settings = cli.method_settings(method, args, setup.model, setup.amateur, choose_heads)
    settings |= dict(graph=False) if args.no_graph else {}
    settings |= dict(lookup=args.lookup) if getattr(args, "lookup", 0) else {}
    if method == "cad":
        without = (args.without_context or []) + (args.without_context_ids or [])
        if setup.example and not without:               # its last line, without the passage
            without = [read_text(EXAMPLE).rstrip("\n").rpartition("\n")[2]]
        if without:
            settings["ids_without_context"] = [encode(prompt, setup.tokenizer, args) for prompt in without]
    return settings


# -------------------------------------------------------------------------------------------------------------- prompts


def read_prompts(args):
    """Texts, chats as lists of messages, and lists of ids; none of them for the built-in example."""
    texts = args.prompt + [read_stdin() if path == "-" else read_text(path) for path in args.prompt_file]
    chats, ids = [read_messages(path) for path in args.messages], args.prompt_ids
    if not texts and not chats and not ids and sys.stdin and not sys.stdin.isatty():
        texts = [text for text in [read_stdin().removesuffix("\n")] if text.strip()]
    prompts = texts + chats + ids
    for name, users in (("system", texts), ("raw", texts), ("template_args", texts + chats)):
        if prompts and not users and getattr(args, name) is not None:
            raise ValueError(f"{cli.flag(name)} has no effect on {'--messages' if chats else '--prompt-ids'}")
    if not prompts and Path(args.model).resolve() != cli.MINIATURE:
        raise ValueError("nothing to answer: give --prompt, --prompt-file, --messages or --prompt-ids")
    return prompts


def read_stdin():
    if not select([sys.stdin], [], [], 2)[0]:
        print("reading the prompt from standard input …", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


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


def encode(prompt, tokenizer, args):
    """Token ids of a text or a chat, through the chat template if there is one. Ids stay as they are."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        if args.raw or not tokenizer.has_chat_template:
            if args.system is not None or args.template_args:
                raise ValueError("--system and --template-args need a chat template: "
                                 + ("drop --raw" if args.raw else f"{args.model} has none"))
            return tokenizer.encode(prompt)
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompt = [*system, {"role": "user", "content": prompt}]
    is_chat = isinstance(prompt[0], dict)
    return tokenizer.encode_chat(prompt, template_args=args.template_args) if is_chat else prompt


def heading(prompt, tokenizer):
    """The beginning of a prompt, in one line."""
    if not isinstance(prompt, str):
        prompt = prompt[-1]["content"] if isinstance(prompt[0], dict) else tokenizer.decode(prompt)
    text = " ".join(prompt.split())
    return text if len(text) <= HEADING else text[:HEADING].rstrip() + " …"


# -------------------------------------------------------------------------------------------------------------- answers


def answer(title, method, settings, setup, args, generate, find_sources):
    """Decode the prompts by one method. Print the texts as they grow, or JSON, and add them to the page."""
    screen = Screen(setup.tokenizer, [text + title for text in setup.before], args.stop, quiet=args.json)
    start = time.perf_counter()
    out = generate(setup.model, setup.prompts, max_new_tokens=args.max_new_tokens, eos_ids=setup.tokenizer.eos_ids,
                   on_token=screen.token, **settings)
    seconds = time.perf_counter() - start
    screen.end()
    heads, sources = settings.get("amateur_heads", settings.get("heads", [])), [None] * len(out)
    if find_sources and args.sources and heads:
        sources = [find_sources(settings.get("amateur") or setup.model, prompt, g.ids, heads)
                   for prompt, g in zip(setup.prompts, out, strict=True)]
    for prompt, g, text, places in zip(setup.prompts, out, screen.texts, sources, strict=True) if args.json else ():
        line = dict(prompt_ids=prompt, ids=g.ids, text=text, alphas=g.alphas, entropies=g.entropies, stop=g.stop,
                    method=method, heads=[f"{layer}-{head}" for layer, head in heads], model=setup.model.name)
        line |= {} if places is None else dict(sources=places)
        line |= dict(amateur=settings["amateur"].name) if "amateur" in settings else {}
        print(json.dumps(line, ensure_ascii=False), flush=True)
    if setup.page:
        setup.page.add(method, setup.prompts, out, settings, sources)
    n = sum(len(g.ids) for g in out)
    print(f"{method}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)
