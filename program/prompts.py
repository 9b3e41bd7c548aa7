"""Prompts from the command line: options, files, standard input."""

import select
import sys
from contextlib import suppress
from pathlib import Path

import cli
from runtime.checks import check_prompts
from runtime.files import read_text

EXAMPLE = cli.MINIATURE / "example.txt"  # a passage that contradicts the miniature's memory


def read_prompts(args):
    """Texts and lists of ids; none of them for the built-in example."""
    texts = args.prompt + [read_prompt(path) for path in args.prompt_file]
    piped = not sys.stdin.isatty()
    if piped and not texts + args.prompt_ids:
        texts = [text for text in [read_prompt("-")] if text.strip()]
    elif piped and has_text(sys.stdin):
        raise ValueError(
            "standard input has a text too: add --prompt-file - to decode it, or < /dev/null to "
            "leave it"
        )
    if args.prompt_ids and not texts:
        cli.refuse_unused(
            args, dict.fromkeys(("system", "raw", "template_args"), "on --prompt-ids")
        )
    is_miniature = Path(args.model).resolve() == cli.MINIATURE
    if not texts + args.prompt_ids and not is_miniature:
        raise ValueError("nothing to answer: give --prompt, --prompt-file or --prompt-ids")
    if is_miniature and texts not in ([], [read_prompt(EXAMPLE)]):
        print(
            "the miniature knows invented facts, in prompts like miniature/example.txt only; for "
            "others give a real model, such as --model Qwen/Qwen2.5-3B-Instruct",
            file=sys.stderr,
        )
    return texts + args.prompt_ids


def has_text(stdin):
    """Whether standard input has a text by now. Windows does not tell: False."""
    with suppress(OSError):
        return bool(select.select([stdin], [], [], 0)[0] and stdin.buffer.peek(1))
    return False


def token_ids(text):
    """argparse type: token ids separated by commas."""
    return [cli.number(int, 0)(part) for part in text.split(",")]


def read_prompt(path):
    """The text of a file, or of the standard input, without one final newline."""
    return read_text(sys.stdin.fileno() if path == "-" else path).removesuffix("\n")


def prompts_to_ids(prompts, model, tokenizer, args):
    """The token ids of texts, through the chat template if there is one. Ids stay as they are.

    model: its config and name are known; its weights are not needed."""
    ids = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            ids.append(prompt)
        elif not prompt.strip():
            raise ValueError("the prompt is empty")
        elif args.raw or not tokenizer.has_chat_template:
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
