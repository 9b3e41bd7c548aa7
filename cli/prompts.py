"""Prompts from the command line: options, files, standard input."""

import argparse
import select
import sys
from contextlib import suppress
from pathlib import Path

import cli
from runtime.checks import check_prompts
from runtime.files import one_line, read_json, read_text

EXAMPLE = cli.MINIATURE / "example.txt"  # a passage that contradicts the miniature's memory


def read_prompts(args):
    """Texts, chats (lists of messages) and lists of ids; none of them for the built-in example."""
    prompts = [read_prompt(p) if isinstance(p, Path) else p for p in args.prompts]
    piped = not sys.stdin.isatty()
    if piped and not prompts:
        prompts = [text for text in [read_prompt("-")] if text.strip()]
    elif piped and has_text(sys.stdin):
        raise ValueError(
            "standard input has a text too: add --prompt-file - to decode it, or < /dev/null to "
            "leave it"
        )
    texts = [p for p in prompts if isinstance(p, str)]
    if prompts and not texts:
        reasons = dict.fromkeys(("system", "raw"), "on --prompt-ids and --messages")
        if not any(map(is_chat, prompts)):
            reasons["template_args"] = "on --prompt-ids"
        cli.refuse_unused(args, reasons)
    is_miniature = Path(args.model).resolve() == cli.MINIATURE
    if not prompts and not is_miniature:
        raise ValueError(
            "nothing to answer: give --prompt, --prompt-file, --messages or --prompt-ids"
        )
    if is_miniature and texts not in ([], [read_prompt(EXAMPLE)]):
        print(
            "the miniature knows invented facts, in prompts like miniature/example.txt only; for "
            "others give a real model, such as --model Qwen/Qwen2.5-3B-Instruct",
            file=sys.stderr,
        )
    return prompts


def has_text(stdin):
    """Whether standard input has a text by now. Windows does not tell: False."""
    with suppress(OSError):
        return bool(select.select([stdin], [], [], 0)[0] and stdin.buffer.peek(1))
    return False


def token_ids(text):
    """argparse type: token ids separated by commas."""
    return [cli.number(int, 0)(part) for part in text.split(",")]


def messages(path):
    """argparse type: a JSON file of messages, [{"role": …, "content": …}, …]."""
    try:
        chat = read_json(path, list)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None
    kinds = {"role": str, "content": str}
    for message in chat:
        if not isinstance(message, dict) or {k: type(v) for k, v in message.items()} != kinds:
            raise argparse.ArgumentTypeError(
                f'{path}: {one_line(repr(message), 60)} must be {{"role": …, "content": …}}, texts'
            )
    if not chat or chat[-1]["role"] == "assistant":
        raise argparse.ArgumentTypeError(f"{path} must end in a message for the model to answer")
    return chat


def is_chat(prompt):
    """Whether a prompt is a list of messages, neither a text nor ids."""
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def read_prompt(path):
    """The text of a file, or of the standard input, without one final newline."""
    return read_text(sys.stdin.fileno() if str(path) == "-" else path).removesuffix("\n")


def prompts_to_ids(prompts, model, tokenizer, args):
    """The token ids of texts, through the chat template if there is one, and of chats. Ids stay as
    they are.

    model: its config and name are known; its weights are not needed."""
    ids = []
    for prompt in prompts:
        if is_chat(prompt):
            ids.append(tokenizer.encode_chat(prompt, template_args=args.template_args))
        elif not isinstance(prompt, str):
            ids.append(prompt)
        elif not prompt.strip():
            raise ValueError("the prompt is empty")
        elif args.raw or not tokenizer.chat_template:
            if args.system is not None or args.template_args:
                raise ValueError(
                    "--system and --template-args need a chat template, and exclude --raw"
                )
            ids.append(tokenizer.encode(prompt))
        else:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            messages = [*system, {"role": "user", "content": prompt}]
            ids.append(tokenizer.encode_chat(messages, template_args=args.template_args))
    return check_prompts(model, ids)
