"""The program behind decore.py and baselines.py: decodes prompts and prints texts or JSON, or writes a page."""

import json
import os
import select
import sys
import time
from collections import Counter
from pathlib import Path

import baselines
import cli
from cli.options import token_ids
from cli.page import pieces, write_page
from heads.sources import find_sources
from runtime.checks import check_prompts
from runtime.files import one_line, read_json, read_text

EXAMPLE = cli.MINIATURE / "example.txt"                 # a passage that contradicts the miniature's memory
TITLE = 60                                              # characters of a prompt that are printed above its answers
SHOWN = 3                                               # words of the prompt that --sources prints for a new word


def main(description, methods, default, compared):
    """Decode the prompts of the command line by one method, or by several for comparison.

    methods: the names that --method takes. default: the default method. compared: the methods that --compare adds;
    those that raise ValueError are left out. The requested method's error is raised after all others are printed."""
    args = make_parser(description, methods, default, compared).parse_args()
    requested, chosen = choose_methods(args, default, compared)
    check_page(args.html)
    prompts = read_prompts(args) if os.environ.get("RANK", "0") == "0" else None        # rank 0 has standard input
    model, tokenizer, amateur = cli.load_models(args)
    if not model.can_record:
        cli.refuse_unused(args, {"no_graph": f"on {model.device.type}"})
    prompts = model.shard.broadcast(prompts)
    if not prompts:
        prompts, chosen = [read_prompt(EXAMPLE)], list(dict.fromkeys(["greedy", *chosen]))
        if "cad" in methods and not args.without_context_ids:
            args.without_context = args.without_context or [prompts[0].rpartition("\n")[2]]
        if not args.json:
            print(prompts[0], end="\n\n", flush=True)
    ids = [encode(prompt, tokenizer, args) for prompt in prompts]
    check_prompts(model, ids)
    titles = [p if isinstance(p, str) else tokenizer.decode(p_ids) for p, p_ids in zip(prompts, ids, strict=True)]
    screen, answers, failure = Screen(args, tokenizer, titles, chosen), {}, None
    try:
        for method in chosen:
            try:
                settings = cli.method_settings(method, args, model, amateur)
                if method == "cad" and (args.without_context or args.without_context_ids):
                    settings["ids_without_context"] = [encode(prompt, tokenizer, args) for prompt in (
                        args.without_context or []) + (args.without_context_ids or [])]
                lines = decode(method, model, ids, settings, args, screen)
                answers[method] = lines, settings
            except ValueError as error:
                if method == requested:
                    failure = error
                else:
                    print(f"{method} is left out: {error}", file=sys.stderr)
    finally:
        if len(ids) > 1:
            screen.print_batch([lines for lines, _ in answers.values()])
    if args.html and answers:
        write_page(args.html, model, tokenizer, list(answers.values()))
        print(f"wrote {args.html}", file=sys.stderr)
    if failure:
        raise failure


def decode(method, model, ids, settings, args, screen):
    """Decode by one method → a line of --json per prompt. Prints a single answer while it is decoded."""
    screen.start(method)
    start = time.perf_counter()
    out = baselines.generate(model, ids, max_new_tokens=args.max_new_tokens, eos_ids=screen.tokenizer.eos_ids,
                             on_token=screen.token, graph=False if args.no_graph else None, **settings)
    seconds, n = time.perf_counter() - start, sum(len(g.ids) for g in out)
    heads, lines = settings.get("amateur_heads", settings.get("heads", ())), []
    for prompt, g, stream in zip(ids, out, screen.streams, strict=True):
        stream.end()
        line = dict(prompt_ids=prompt, ids=g.ids, text=stream.text, alphas=g.alphas, entropies=g.entropies, stop=g.stop,
                    method=method, heads=[f"{layer}-{head}" for layer, head in heads], model=model.name)
        if args.sources and heads:
            line["sources"] = find_sources(settings.get("amateur") or model, prompt, g.ids, heads)
        if "amateur" in settings:
            line["amateur"] = settings["amateur"].name
        lines.append(line)
    if len(lines) == 1:
        screen.print_answer(lines[0])
    print(f"{method}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)
    if any(g.stop == "length" and len(g.ids) < args.max_new_tokens for g in out):
        print(f"{method}: an answer ended because the context is full", file=sys.stderr)
    return lines


class Screen:
    """Prints one answer while it is decoded, but the answers of several prompts at the end, prompt by prompt."""

    def __init__(self, args, tokenizer, titles, methods):
        self.args, self.tokenizer, self.titles, self.printed = args, tokenizer, titles, 0
        self.width = max(14, *map(len, methods)) if len(methods) > 1 else 0
        self.held_back = max(map(len, args.stop), default=1) - 1        # characters that may become a stop string

    def start(self, method):
        self.method, self.printed = method, 0
        self.streams = [self.tokenizer.stream(self.args.stop) for _ in self.titles]

    def token(self, b, token, entropy):
        """Add a token to the b-th text. Returns whether a stop string ends the text (`on_token` of generate)."""
        stream = self.streams[b]
        if token not in self.tokenizer.eos_ids:
            stream.push(token)
        if len(self.titles) == 1 and not self.args.json:
            text = self.labelled(self.method, stream.text)
            until = max(self.printed, len(text) - self.held_back)
            print(text[self.printed:until], end="", flush=True)
            self.printed = until
        return stream.ended

    def labelled(self, method, text):
        return f"{method:>{self.width}}  {text}" if self.width else text

    def print_answer(self, line):
        """Print an answer, or the part of it that `token` has not printed, and its sources."""
        if self.args.json:
            print(json.dumps(line, ensure_ascii=False), flush=True)
        else:
            print(self.labelled(line["method"], line["text"])[self.printed:])
            for text in sources_of_words(self.tokenizer, line) if "sources" in line else ():
                print(" " * self.width + f"  {text}", flush=True)

    def print_batch(self, answers):
        """answers: per method, a line for each prompt."""
        self.printed = 0
        for i, lines in enumerate(zip(*answers, strict=True)):
            title = f"[{i + 1}] {one_line(self.titles[i], TITLE)}\n"
            print("" if self.args.json else title, end="")
            for line in lines:
                self.print_answer(line)
            print("" if self.args.json else "\n", end="", flush=True)


def words(tokenizer, ids):
    """[(word, positions of its ids)] of a text, without white space."""
    out = []
    for text, positions in pieces(tokenizer, ids):
        if not out or text[0].isspace() or out[-1][0][-1].isspace():
            out.append(("", []))
        out[-1] = out[-1][0] + text, [*out[-1][1], *positions]
    return [(word.strip(), positions) for word, positions in out if word.strip()]


def sources_of_words(tokenizer, line):
    """Yields for each word of an answer the words of the prompt that the heads attended to most."""
    word_of = {p: word for word, positions in words(tokenizer, line["prompt_ids"]) for p in positions}
    for word, positions in words(tokenizer, line["ids"][:-1] if line["stop"] == "eos" else line["ids"]):
        shares = Counter()
        for place, share in (source for p in positions for source in line["sources"][p] if source[0] in word_of):
            shares[word_of[place]] += share / len(positions)
        yield f"{word} ← " + ", ".join(f"{source} {share:.0%}" for source, share in shares.most_common(SHOWN))


def make_parser(description, methods, default, compared):
    p = cli.parser(description)
    cli.add_model_arguments(p)
    several = dict(action="append", default=[])
    p.add_argument("--prompt", metavar="TEXT", **several, help="several prompts are decoded as one batch; without a "
                   "prompt, standard input is one")
    p.add_argument("--prompt-file", metavar="F", **several, help="a file that is one prompt; - is standard input")
    p.add_argument("--messages", metavar="F", **several,
                   help='a chat of several turns: a JSON list of {"role": …, "content": …}')
    p.add_argument("--prompt-ids", metavar="1,2,3", type=token_ids, **several, help="token ids, used as they are")
    p.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")
    p.add_argument("--raw", action="store_true", default=None, help="plain text, no chat template")
    p.add_argument("--max-new-tokens", type=cli.positive, default=64, metavar="N",
                   help="maximum number of new tokens (default: 64)")
    p.add_argument("--stop", metavar="TEXT", **several, help="an answer ends before this text")
    p.add_argument("--method", type=cli.method_name(methods), metavar="M",
                   help=f"{', '.join(methods)} (default: {default})")
    cli.add_method_arguments(p, methods)
    p.add_argument("--compare", action="store_true", help=f"decode with {', '.join(compared)} too, if they apply")
    p.add_argument("--json", action="store_true", help="one JSON object per prompt")
    p.add_argument("--html", metavar="FILE", help="also write a page: entropy as shade, numbers on pointing")
    p.add_argument("--sources", action="store_true", help="show what in the prompt the masked heads attend to: below "
                   "each answer the words, with --json and --html the tokens")
    p.add_argument("--no-graph", action="store_true", help="on a GPU: do not record a decoding step as a CUDA graph")
    return p


def choose_methods(args, default, compared):
    """(the requested method, all methods to decode by). ValueError for an option that none of them uses."""
    if "" in args.stop:
        raise ValueError("--stop: an empty text would end every answer before it begins")
    names = [*(compared if args.compare else ()), args.method or default]
    full = cli.full_names(names, args.amateur)
    both = [name for pair in zip(names, full, strict=True) for name in pair]        # without and with the amateur
    chosen = list(dict.fromkeys(both if args.compare else full))
    cli.check_options(args, chosen)
    if not set(chosen) & {*cli.OPTIONS["num_heads"][0]}:
        cli.refuse_unused(args, {"sources": f"on {', '.join(chosen)}, which masks no heads"})
    return full[-1], chosen


def check_page(path):
    """Raise ValueError if the page cannot be written: before decoding, not after."""
    if path is not None and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
        raise ValueError(f"--html {path} cannot be written: give a file in a folder that you may write to")


# -------------------------------------------------------------------------------------------------------------- prompts


def read_prompts(args):
    """Texts, chats as lists of messages, and lists of ids; none of them for the built-in example."""
    texts = args.prompt + [read_prompt(path) for path in args.prompt_file]
    chats = [read_messages(path) for path in args.messages]
    prompts = texts + chats + args.prompt_ids
    if not prompts and not sys.stdin.isatty():
        prompts = texts = [text for text in [read_prompt("-")] if text.strip()]
    elif "-" not in args.prompt_file and is_piped():
        raise ValueError("standard input has a text too: add --prompt-file - to decode it, or < /dev/null to leave it")
    if any("\\n" in text for text in args.prompt):
        print(r"--prompt has a backslash and an n, which is not a line break: write $'…\n…', or use --prompt-file",
              file=sys.stderr)
    if prompts and not texts:
        kind = "--messages" if chats else "--prompt-ids"
        cli.refuse_unused(args, dict.fromkeys(["system", "raw"] + ["template_args"] * (not chats), f"on {kind}"))
    if not prompts and Path(args.model).resolve() != cli.MINIATURE:
        raise ValueError("nothing to answer: give --prompt, --prompt-file, --messages or --prompt-ids")
    return prompts


def is_piped():
    """Whether standard input holds text. Does not wait for any."""
    return not sys.stdin.isatty() and select.select([sys.stdin], [], [], 0)[0] and sys.stdin.buffer.peek(1)


def read_prompt(path):
    """The text of a file, or of the standard input, without one final newline."""
    return (sys.stdin.read() if path == "-" else read_text(path)).removesuffix("\n")


def read_messages(path):
    messages = read_json(path, list)
    if not messages or not all(isinstance(turn, dict) and isinstance(turn.get("role"), str)
                               and isinstance(turn.get("content"), str) for turn in messages):
        raise ValueError(f'{path} must contain a list of {{"role": "user", "content": "…"}}')
    return messages


def encode(prompt, tokenizer, args):
    """Token ids of a text or a chat, through the chat template if there is one. Ids stay as they are."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        if args.raw or not tokenizer.has_chat_template:
            if args.system is not None or args.template_args:
                raise ValueError("--system and --template-args need a chat template, and exclude --raw")
            return tokenizer.encode(prompt)
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        prompt = [*system, {"role": "user", "content": prompt}]
    is_chat = isinstance(prompt[0], dict)
    return tokenizer.encode_chat(prompt, template_args=args.template_args) if is_chat else prompt
