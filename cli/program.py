"""The command lines of decore.py and baselines.py: prompts in, answers out, as text while it grows or as JSON."""

import argparse
import json
import os
import stat
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from select import select
from typing import NamedTuple

import cli
from model import Transformer
from runtime.checks import COMPILE
from tokenizer import Tokenizer

EXAMPLE = cli.MINIATURE / "example.txt"                 # a passage that contradicts what the miniature remembers
AMBER = (230, 229, 222, 221, 215, 214, 208)             # backgrounds of the 256-colour palette, by rising entropy
STRONGEST = 2.0                                         # nats of the strongest shade
HEADING = 60                                            # characters of a prompt that are shown above its answer
NO_CONTEXT = "cad needs each prompt without its context too (--without-context)"


class Setup(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer
    prompts: list                                       # token ids
    headings: list                                      # how each prompt begins
    example: bool                                       # the built-in passage is the prompt
    amateur: Transformer | None                         # the smaller model to contrast with


def main(description, generate, methods, default, everything=False, opener=None):
    """Decode what the command line asks, by one of the methods or by several under each other.

    everything: --compare shows every method that applies, else greedy, masked and the one asked for.
    opener: decore.py's, with the options that it alone has: lookup, compile, a page."""
    args = arguments(description, methods, default, everything, opener).parse_args()
    first = os.environ.get("RANK", "0") == "0"          # the rank that has the standard input
    if opener and args.sources and not (args.json or args.html):
        raise ValueError("--sources has no effect without --json or --html")
    asked, example = read_prompts(args) if first else ([], False)
    chosen = choose(args, methods, default, everything, example) if first else []
    model, tokenizer, amateur = cli.load_models(args)
    prompts = encode(asked, tokenizer, args) if first else None
    asked, example, chosen, prompts = model.shard.broadcast((asked, example, chosen, prompts))
    headings = [heading(one, tokenizer) for one in asked]
    setup = Setup(model, tokenizer, prompts, headings, example, amateur)
    if args.num_heads is None:
        args.num_heads = cli.default_heads(model)
    more = dict(lookup=args.lookup or 0, compile=args.compile) if opener else {}
    wanted = None if everything and args.compare else chosen[-1]
    how = attempt(chosen, wanted, lambda method: settings(method, setup, args) | more)
    if opener and args.sources:
        generate = with_sources(generate)
    if opener and args.html:
        from report.page import Page
        generate = Page(args.html, setup, generate, opener).generate
    if example and not args.json:
        print(tokenizer.decode(prompts[0]), end="\n\n", flush=True)
    width = max(14, *map(len, chosen)) if len(chosen) > 1 else 0
    attempt(how, wanted, lambda method: answer(method, how[method], setup, args, generate, width))


def arguments(description, methods, default, everything, opener):
    p = cli.parser(description)
    cli.add_model_arguments(p)
    several = dict(action="append", default=[])
    p.add_argument("--prompt", metavar="TEXT", **several, help="several prompts are decoded as one batch; text that is "
                   "piped into standard input is a prompt too")
    p.add_argument("--prompt-file", metavar="F", **several, help="a file that is one prompt; - is standard input")
    p.add_argument("--messages", metavar="F", **several,
                   help='a chat of several turns: a JSON list of {"role": …, "content": …}')
    p.add_argument("--prompt-ids", metavar="1,2,3", type=cli.token_ids, **several, help="token ids, taken as they are")
    p.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")
    p.add_argument("--raw", action="store_true", help="plain text, no chat template")
    p.add_argument("--max-new-tokens", type=cli.positive, default=64, metavar="N", help="where an answer ends at last")
    p.add_argument("--stop", type=not_empty, metavar="TEXT", **several, help="an answer ends before this text")
    p.add_argument("--json", action="store_true", help="one JSON object per prompt")
    p.add_argument("--method", type=cli.method(methods), metavar="M",
                   help=f"{', '.join(methods)} (default: {default})")
    cli.add_method_arguments(p, methods)
    p.add_argument("--compare", action="store_true", help="every method that applies to the prompt, under each other"
                   if everything else "greedy, masked and the method under each other")
    if opener:
        p.add_argument("--lookup", type=cli.number(int, 0, 2**31 - 1), metavar="K",
                       help="check K copied tokens a pass: the same text, sooner (default: 0, off)")
        p.add_argument("--compile", choices=COMPILE, help="on a GPU: graph, a decoding step as a CUDA graph (the "
                       "default there); kernels, fused by torch.compile before, which takes minutes; no, neither")
        p.add_argument("--html", metavar="FILE", help="also as a page: entropy as shade, α on hover")
        p.add_argument("--sources", action="store_true", help="with --json or --html: where in the prompt the heads "
                       "that are masked look, when they are not, at each new token")
    return p


def not_empty(text):
    if not text:
        raise argparse.ArgumentTypeError("an empty text would end every answer before it begins")
    return text


def choose(args, methods, default, everything, example):
    """The methods to decode by, the one asked for last. ValueError where an option has no effect on any of them."""
    if args.compare and everything and args.method:
        raise ValueError("--method has no effect with --compare, which shows every method")
    method = args.method or default
    chosen = cli.variants([method], args.amateur)
    if args.compare:
        plain = methods if everything else ("greedy", "masked", method)
        # With an amateur both are shown: DeCoRe as it is, and the one that contrasts with the amateur.
        chosen = [one for name in plain for one in (name, *cli.variants([name], args.amateur))]
    elif example:
        chosen = ["greedy", *chosen]
    chosen = [one for i, one in enumerate(chosen) if one not in chosen[i + 1:]]
    cli.check_options(args, chosen)
    if chosen == ["cd"] and not args.amateur:
        raise ValueError("cd needs an amateur: a smaller model of the same vocabulary (--amateur)")
    if chosen == ["cad"] and not (args.without_context or args.without_context_ids):
        raise ValueError(NO_CONTEXT)
    return chosen


def attempt(methods, wanted, work):
    """{method: work(method)}. A method to which the prompt or the options do not apply is left out, but for `wanted`
    and where none is left."""
    done, reason = {}, None
    for method in methods:
        try:
            done[method] = work(method)
        except ValueError as error:
            if method == wanted or len(methods) == 1:
                raise
            reason = error
            print(f"{method} is left out: {reason}", file=sys.stderr)
    if not done:
        raise reason
    return done


def settings(method, setup, args):
    """The arguments of `generate` for a method."""
    how = cli.contrast(method, args, setup.model, setup.amateur)
    if method != "cad":
        return how
    asked = (args.without_context or []) + (args.without_context_ids or [])
    if setup.example and not asked:                     # its last line, without the passage
        asked = [cli.read_text(EXAMPLE).rstrip("\n").rpartition("\n")[2]]
    if not asked:
        raise ValueError(NO_CONTEXT)
    return how | dict(ids_without_context=encode(asked, setup.tokenizer, args))


# -------------------------------------------------------------------------------------------------------------- prompts


def read_prompts(args):
    """(texts, chats as lists of messages, and lists of ids; whether they are the built-in example)."""
    asked = args.prompt + [cli.read_text(path) for path in args.prompt_file]
    chats = [read_messages(path) for path in args.messages]
    ids = args.prompt_ids
    if not asked and not chats and not ids:
        asked = [text for text in [piped()] if text.strip()]
    for option, given in (("--system", args.system is not None), ("--raw", args.raw)):
        if given and not asked and (chats or ids):
            raise ValueError(f"{option} has no effect on {'--messages' if chats else '--prompt-ids'}")
    if not all(text.strip() for text in asked):
        raise ValueError("the prompt is empty")
    example = not (asked or chats or ids)
    if example:
        if Path(args.model).resolve() != cli.MINIATURE:
            raise ValueError("nothing to answer: give --prompt, --prompt-file, --messages or --prompt-ids")
        asked = [cli.read_text(EXAMPLE).rstrip("\n")]
    return asked + chats + ids, example


def piped():
    """What is piped into standard input. A terminal or /dev/null gives nothing."""
    try:
        if stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode):
            return ""
    except (OSError, ValueError):                       # no file at all
        return ""
    if not select([sys.stdin], [], [], 2)[0]:
        print("reading the prompt from standard input …", file=sys.stderr)
    return cli.read_text("-").removesuffix("\n")


def read_messages(path):
    try:
        messages = json.loads(cli.read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error.msg} in line {error.lineno}") from None
    form = 'a list of {"role": "user", "content": "…"}'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{path} should hold {form}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(f"{path}, message {number}: role or content is missing or no text; the file holds {form}")
        cli.check_text(message["role"] + message["content"], f"{path}, message {number}")
    return messages


def encode(asked, tokenizer, args):
    """Texts and chats through the chat template where there is one; ids as they are."""
    chat = tokenizer.has_chat_template and not args.raw
    if args.system is not None and not chat:
        raise ValueError("--system needs a chat template: " + ("drop --raw" if args.raw else f"{args.model} has none"))
    if args.template_args and (not chat or not any(isinstance(one, str) or isinstance(one[0], dict) for one in asked)):
        raise ValueError("--template-args has no effect: no prompt goes through a chat template")
    warn_of_special_tokens(asked, tokenizer)
    render, prompts = partial(tokenizer.encode_chat, template_args=args.template_args), []
    for one in asked:
        if isinstance(one, str) and not one.strip():
            raise ValueError("the prompt is empty")
        if isinstance(one, str) and not chat:
            prompts.append(tokenizer.encode(one))
        elif isinstance(one, str):
            system = [{"role": "system", "content": args.system}] if args.system is not None else []
            prompts.append(render([*system, {"role": "user", "content": one}]))
        else:
            prompts.append(render(one) if isinstance(one[0], dict) else one)
    return prompts


def warn_of_special_tokens(asked, tokenizer):
    texts = [text for one in asked for text in ([one] if isinstance(one, str) else [turn["content"] for turn in one
                                                                                   if isinstance(turn, dict)])]
    special = [token.content for token in tokenizer.core.get_added_tokens_decoder().values() if token.special]
    spelled = next((token for token in special if any(token in text for text in texts)), None)
    if spelled:
        warnings.warn(f"the prompt spells {spelled}, and the model reads it as that special token, not as text",
                      stacklevel=2)


def heading(one, tokenizer):
    """How a prompt begins, in one line."""
    if isinstance(one, list):
        one = one[-1]["content"] if isinstance(one[0], dict) else tokenizer.decode(one)
    text = " ".join(one.split())
    return text if len(text) <= HEADING else text[:HEADING].rstrip() + " …"


# -------------------------------------------------------------------------------------------------------------- answers


def answer(method, how, setup, args, generate, width):
    """Decode the prompts by one method; print the texts as they come, or JSON. width: columns of the method's name."""
    headings = [f"[{i}] {text}\n" for i, text in enumerate(setup.headings, 1)]
    title = f"{method:>{width}}  " if width else ""
    begin = [h + title for h in headings] if len(headings) > 1 else [title]
    screen = Screen(setup.tokenizer, begin, args.stop, silent=args.json)
    start = time.perf_counter()
    out = generate(setup.model, setup.prompts, max_new_tokens=args.max_new_tokens, eos_ids=setup.tokenizer.eos_ids,
                   on_token=screen.token, **how)
    seconds = time.perf_counter() - start
    screen.end()
    for prompt, g in zip(setup.prompts, out, strict=True) if args.json else ():
        print(json.dumps(as_json(method, how, setup, prompt, g, args.stop), ensure_ascii=False), flush=True)
    n = sum(len(g.ids) for g in out)
    print(f"{method}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)


def with_sources(generate):
    """`generate`, whose results have `sources` where heads are masked, in the amateur where those are its heads."""
    from heads.sources import find_sources

    def generate_and_look(model, prompts, method, **how):
        out, heads = generate(model, prompts, method, **how), how.get("amateur_heads") or how.get("heads")
        for prompt, g in zip(prompts, out, strict=True) if heads else ():
            g.sources = find_sources(how.get("amateur") or model, prompt, g.ids, heads)
        return out

    return generate_and_look


def as_json(method, how, setup, prompt, g, stop=()):
    heads = how.get("amateur_heads", how.get("heads", []))
    text = setup.tokenizer.decode(g.ids[:-1] if g.stop == "eos" else g.ids)
    text = text[:min((text.index(string) for string in stop if string in text), default=len(text))]
    found = dict(prompt_ids=prompt, ids=g.ids, text=text, alphas=g.alphas,
                 entropies=g.entropies, stop=g.stop, method=method, heads=[f"{layer}-{head}" for layer, head in heads],
                 model=setup.model.name)
    found |= dict(sources=g.sources) if hasattr(g, "sources") else {}
    return found | dict(amateur=how["amateur"].name) if "amateur" in how else found


class Screen:
    """Shows the texts of a batch in order: the first unfinished one as it grows, the others when it is their turn."""

    def __init__(self, tokenizer, begin, stop=(), silent=False):
        """begin: what to print before each text. stop: strings before which a text ends. silent: nothing is printed."""
        self.eos_ids, self.stop, self.silent = tokenizer.eos_ids, stop, silent
        self.streams = [tokenizer.stream() for _ in begin]
        self.waiting = [[text] for text in begin]
        self.held = [[] for _ in begin]                 # pieces at the end that may become a stop string
        self.current, self.gap = 0, "\n\n" if len(begin) > 1 else "\n"
        self.shaded = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def token(self, b, token, entropy):
        """Show a token, as soon as its turn comes → whether it completes a stop string."""
        piece = "" if token in self.eos_ids else self.streams[b].push(token)
        self.held[b].append((piece, entropy))
        n, ended = certain("".join(text for text, _ in self.held[b]), self.stop)
        self.release(b, n)
        if ended:
            self.held[b], self.streams[b] = [], None
        if b == self.current:
            self.flush()
        return ended

    def release(self, b, n):
        """The first n characters of what is held may be shown."""
        rest = []
        for piece, entropy in self.held[b]:
            self.waiting[b].append(self.shade(piece[:n], entropy))
            rest += [(piece[n:], entropy)] if piece[n:] else []
            n = max(n - len(piece), 0)
        self.held[b] = rest

    def flush(self):
        if not self.silent:
            print("".join(self.waiting[self.current]), end="", flush=True)
        self.waiting[self.current].clear()

    def shade(self, text, entropy):
        if not self.shaded or entropy < 0.02:
            return text
        level = min(int(entropy / STRONGEST * len(AMBER)), len(AMBER) - 1)
        return "\n".join(f"\x1b[30;48;5;{AMBER[level]}m{line}\x1b[0m" if line else "" for line in text.split("\n"))

    def end(self):
        for b, stream in enumerate(self.streams):
            self.current = b
            rest = stream.end() if stream else ""
            self.release(b, sum(len(piece) for piece, _ in self.held[b]))
            self.waiting[b].append(rest + self.gap)
            self.flush()


def certain(text, stop):
    """How many characters of a text are before every stop string that it holds or may be about to hold, and whether it
    holds one."""
    found = [text.index(string) for string in stop if string in text]
    if found:
        return min(found), True
    begun = [n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])]
    return len(text) - max(begun, default=0), False
