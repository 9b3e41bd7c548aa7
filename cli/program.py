"""The program behind decore.py and baselines.py: decodes prompts and prints texts or JSON, or writes a page."""

import json
import os
import sys
import time
from pathlib import Path

import cli
from cli.options import token_ids
from cli.page import write_page
from cli.screen import Screen
from runtime.files import one_line, read_json, read_text

EXAMPLE = cli.MINIATURE / "example.txt"                 # a passage that contradicts the miniature's memory
TITLE = 60                                              # characters of a prompt that are printed above its answer


def main(description, generate, methods, default, compared, choose_heads, find_sources, decoder):
    """Decode the prompts of the command line by one method, or by several for comparison.

    generate, methods: those of decore.py or baselines.py. default: the default method. compared: the methods that
    --compare adds; those that raise ValueError are left out. The requested method's is raised after all others are
    printed. choose_heads, find_sources: those of `heads`. decoder: DeCoRe."""
    args = make_parser(description, methods, default, compared).parse_args()
    requested, chosen = choose_methods(args, default, compared)
    first_rank = os.environ.get("RANK", "0") == "0"
    prompts = read_prompts(args) if first_rank else None            # rank 0 has the standard input
    if args.html and first_rank:
        open(args.html, "a").close()                                # fails before decoding, not after
    model, tokenizer, amateur = cli.load_models(args)
    prompts = model.shard.broadcast(prompts)
    if not prompts:
        prompts, chosen = [read_prompt(EXAMPLE)], list(dict.fromkeys(["greedy", *chosen]))
        if "cad" in methods and not args.without_context_ids:
            args.without_context = args.without_context or [prompts[0].rpartition("\n")[2]]
        if not args.json:
            print(prompts[0], end="\n\n", flush=True)
    ids = [encode(prompt, tokenizer, args) for prompt in prompts]
    titles = [""]
    if len(prompts) > 1:
        texts = [p if isinstance(p, str) else tokenizer.decode(p_ids) for p, p_ids in zip(prompts, ids, strict=True)]
        titles = [f"[{i}] {one_line(text, TITLE)}\n" for i, text in enumerate(texts, 1)]
    width = max(14, *map(len, chosen)) if len(chosen) > 1 else 0
    answers, failure = [], None
    for method in chosen:
        label = f"{method:>{width}}  " if width else ""
        screen = Screen(tokenizer, [title + label for title in titles], args.stop, quiet=args.json)
        try:
            settings = cli.method_settings(method, args, model, amateur, choose_heads)
            if method == "cad" and (without := (args.without_context or []) + (args.without_context_ids or [])):
                settings["ids_without_context"] = [encode(prompt, tokenizer, args) for prompt in without]
            start = time.perf_counter()
            out = generate(model, ids, max_new_tokens=args.max_new_tokens, eos_ids=tokenizer.eos_ids,
                           on_token=screen.token, graph=args.graph, **settings)
        except ValueError as error:
            if method == requested:
                failure = error
            else:
                print(f"{method} is left out: {error}", file=sys.stderr)
            continue
        seconds, n = time.perf_counter() - start, sum(len(g.ids) for g in out)
        screen.end()
        heads, lines = settings.get("amateur_heads", settings.get("heads", ())), []
        for prompt, g, text in zip(ids, out, screen.texts, strict=True):
            line = dict(prompt_ids=prompt, ids=g.ids, text=text, alphas=g.alphas, entropies=g.entropies, stop=g.stop,
                        method=method, heads=[f"{layer}-{head}" for layer, head in heads], model=model.name)
            if args.sources and heads:
                line["sources"] = find_sources(settings.get("amateur") or model, prompt, g.ids, heads)
            if "amateur" in settings:
                line["amateur"] = settings["amateur"].name
            if args.json:
                print(json.dumps(line, ensure_ascii=False), flush=True)
            lines.append(line)
        answers.append((lines, settings))
        print(f"{method}: {n} tokens in {seconds:.2f} s, {n / seconds:.1f} tokens/s", file=sys.stderr)
    if args.html and answers:
        write_page(args.html, model, tokenizer, answers, decoder)
    if failure:
        raise failure


def make_parser(description, methods, default, compared):
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
    p.add_argument("--method", type=cli.method_name(methods), metavar="M",
                   help=f"{', '.join(methods)} (default: {default})")
    cli.add_method_arguments(p, methods)
    p.add_argument("--compare", action="store_true", help=f"decode with {', '.join(compared)} too, if they apply")
    p.add_argument("--json", action="store_true", help="one JSON object per prompt")
    p.add_argument("--html", metavar="FILE", help="also write a page: entropy as shade, numbers on hover")
    p.add_argument("--sources", action="store_true", help="with --json or --html: the places in the prompt that "
                   "the retrieval heads attend to at each new token")
    p.add_argument("--no-graph", action="store_false", default=None, dest="graph",
                   help="on a GPU: do not record the decoding step as a CUDA graph")
    return p


def choose_methods(args, default, compared):
    """(the requested method, all methods to decode by). ValueError for an option that none of them uses."""
    if args.sources and not (args.json or args.html):
        raise ValueError("--sources has no effect without --json or --html")
    if "" in args.stop:
        raise ValueError("--stop: an empty text would end every answer before it begins")
    method = args.method or default
    chosen = [requested] = cli.full_names([method], args.amateur)
    if args.compare:        # each method without and with the amateur
        names = [full for name in (*compared, method) for full in (name, *cli.full_names([name], args.amateur))]
        chosen = list(dict.fromkeys(names))
    cli.check_options(args, chosen)
    return requested, chosen


# -------------------------------------------------------------------------------------------------------------- prompts


def read_prompts(args):
    """Texts, chats as lists of messages, and lists of ids; none of them for the built-in example."""
    texts = args.prompt + [read_prompt(path) for path in args.prompt_file]
    chats = [read_messages(path) for path in args.messages]
    prompts = texts + chats + args.prompt_ids
    if not prompts and sys.stdin and not sys.stdin.isatty():
        prompts = texts = [text for text in [read_prompt("-")] if text.strip()]
    for name, users in (("system", texts), ("raw", texts), ("template_args", texts + chats)):
        if prompts and not users and getattr(args, name) is not None:
            raise ValueError(f"{cli.flag(name)} has no effect on {'--messages' if chats else '--prompt-ids'}")
    if not prompts and Path(args.model).resolve() != cli.MINIATURE:
        raise ValueError("nothing to answer: give --prompt, --prompt-file, --messages or --prompt-ids")
    return prompts


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
