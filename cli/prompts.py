"""Prompts from the command line: options, files, standard input.

Before it is encoded, a prompt is an object, as in a line of --prompts: "prompt" (a text),
"messages" (a chat) or "prompt_ids"; "begin", the beginning of the answer, which may also be a turn
of the assistant that ends the chat; "without_context", for cad, a text or a chat; and fields of the
user, which --json gives back."""

import argparse
import os
import re
import select
import sys
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

from cli.options import MINIATURE, number, refuse_unused
from runtime.checks import parse_prompts
from runtime.errors import InputError, one_line
from runtime.files import json_bytes, json_lines, read_json, read_text
from tokenizer import join_parts

EXAMPLE = MINIATURE / "example.txt"  # a passage that contradicts the miniature's memory
CHAT = '[{"role": "user", "content": "…"}, …]'
AHEAD = 30  # at most so many characters of a title precede what differs from other prompts


class Prompt(NamedTuple):
    index: int  # among the prompts, from 0
    fields: dict  # those of its object, for --json
    title: str
    ids: list
    ids_without_context: list | None = None  # for cad


# ------------------------------------------ argparse types: the value of an option → its prompts


def text_prompt(text):
    return [{"prompt": text}]


def file_prompt(path):
    return [Path(path)]  # to be read later: of the ranks only one has standard input


def ids_prompt(text):
    """Token ids separated by commas."""
    return [{"prompt_ids": [number(int, 0)(part) for part in text.split(",")]}]


def chat_prompt(path):
    """A JSON file of messages, in a list or in an object."""
    with errors_at(path):
        value = read_json(path, object)
        prompt = {"messages": value} if isinstance(value, list) else value
        if not isinstance(prompt, dict) or "messages" not in prompt:
            raise InputError(f'it must be a chat: {CHAT}, or {{"messages": [{{…}}, …]}}')
        check_prompt(prompt)
        json_bytes(prompt)  # --json gives back all of its fields
    return [prompt]


def line_prompts(path):
    """A file of JSON lines, a prompt each."""
    with errors_at(path):
        lines = list(json_lines(path, complete=True))
        if not lines:
            raise InputError("it is empty; give a line for each prompt")
    for line, prompt in lines:
        with errors_at(f"{path}, line {line}"):
            check_prompt(prompt)
    return [prompt for _, prompt in lines]


@contextmanager
def errors_at(place):
    """A ValueError becomes one that argparse shows, and that names the place."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        named = message if message.startswith(str(place)) else f"{place}: {message}"
        raise argparse.ArgumentTypeError(named) from None


def check_prompt(prompt):
    """InputError for an object that is not a prompt."""
    if ("prompt" in prompt) == ("messages" in prompt):
        raise InputError('it must have either "prompt", a text, or "messages", a chat')
    if "messages" in prompt:
        check_chat(prompt["messages"])
    elif not isinstance(prompt["prompt"], str):
        raise InputError('"prompt" must be a text')
    if not isinstance(prompt.get("begin", ""), str):
        raise InputError('"begin" must be a text')
    if prompt.get("begin") and chat_begin(prompt):
        raise InputError('"messages" end with an assistant\'s turn, so "begin" has no place')
    without = prompt.get("without_context")
    if isinstance(without, list):
        check_chat(without)
    elif not isinstance(without, str | None):
        raise InputError('"without_context" must be a text, or a chat as in "messages"')


def check_chat(chat):
    """InputError for what is not a chat that a model can answer."""
    if not isinstance(chat, list):
        raise InputError(f"a chat is a list of messages: {CHAT}")
    for message in chat:
        fields = join_parts(message) if isinstance(message, dict) else {}
        if {name: type(fields[name]) for name in fields} != {"role": str, "content": str}:
            raise InputError(
                f'{one_line(repr(message), 60)} must be {{"role": …, "content": …}}, texts'
            )
        role = message["role"]
        if role != role.lower() and role.lower() in ("system", "user", "assistant"):
            raise InputError(f'"role": {role!r} must be {role.lower()!r}')
    if not chat:
        raise InputError("the chat must end in a message for the model to answer or to continue")


def chat_begin(prompt):
    """The assistant's turn with which a chat ends; "" without one."""
    last = join_parts(prompt["messages"][-1]) if "messages" in prompt else {}
    return last["content"] if last.get("role") == "assistant" else ""


# ---------------------------------------------------------------------------- reading and encoding


def read_prompts(args):
    """The objects of the options; none for the built-in example."""
    prompts = []
    for prompt in args.prompts:
        prompts += text_prompt(read_prompt(prompt)) if isinstance(prompt, Path) else [prompt]
    piped = not sys.stdin.isatty()
    if piped and not prompts:
        text = read_prompt("-")
        prompts = text_prompt(text) if text.strip() else []
    elif piped and has_text(sys.stdin):
        raise InputError(
            "standard input has a text too: add --prompt-file - to decode it, or < /dev/null to "
            "leave it"
        )
    texts = [p["prompt"] for p in prompts if "prompt" in p]
    if prompts and not texts:
        reasons = dict.fromkeys(("system", "raw"), "on --prompt-ids and --messages")
        if not any("messages" in p for p in prompts):
            reasons["template_args"] = "on --prompt-ids"
        refuse_unused(args, reasons)
    is_miniature = Path(args.model).resolve() == MINIATURE
    if not prompts and not is_miniature:
        raise InputError(
            "nothing to answer: give --prompt, --prompt-file, --messages, --prompts or --prompt-ids"
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


def read_prompt(path):
    """The text of a file, or of the standard input, without one final newline."""
    return read_text(sys.stdin.fileno() if str(path) == "-" else path).removesuffix("\n")


def with_begin(objects, begin):
    """The objects, with the text of --begin where they have no beginning of the answer."""
    if not begin:
        return objects
    out = []
    for prompt in objects:
        takes = "prompt_ids" not in prompt and not prompt.get("begin") and not chat_begin(prompt)
        out.append(prompt | {"begin": begin} if takes else prompt)
    if out == objects:
        raise InputError("--begin has no effect on --prompt-ids and on answers that have begun")
    return out


def to_prompts(objects, model, tokenizer, args):
    """Objects → `Prompt`s.

    model: its config and name are known; its weights are not needed."""
    all_ids = encode_all(objects, model, tokenizer, args)
    all_fields, texts = [], []
    for fields, ids in zip(objects, all_ids):
        if not {"prompt", "messages"} & fields.keys():  # of --prompt-ids
            fields = {"prompt": tokenizer.decode(ids)}
        if begin := chat_begin(fields):
            fields = fields | {"begin": begin}
        all_fields.append(fields)
        turns = [turn for turn in fields.get("messages", ()) if turn["role"] != "assistant"]
        texts.append(join_parts(turns[-1])["content"] if turns else fields.get("prompt", begin))
    return list(map(Prompt, count(), all_fields, titles(texts), all_ids))


def encode_all(objects, model, tokenizer, args, what="prompt"):
    """The ids of each object. what: the objects are called in messages."""
    all_ids = []
    for i, prompt in enumerate(objects, 1):
        try:
            all_ids.append(encode_one(prompt, tokenizer, args))
        except ValueError as error:
            place = f"{what} {i} of {len(objects)}: " if len(objects) > 1 else ""
            raise InputError(f"{place}{error}") from None
    return parse_prompts(model, all_ids, what)


def encode_one(prompt, tokenizer, args):
    """The ids of an object: a text passes through the chat template, if there is one."""
    begin = prompt.get("begin", "")
    if "messages" in prompt:
        chat = prompt["messages"]
    elif "prompt" not in prompt:
        return prompt["prompt_ids"]
    elif not prompt["prompt"].strip():
        raise InputError("the prompt is empty")
    elif args.raw or not tokenizer.chat_template:
        if args.system is not None or args.template_args:
            raise InputError("--system and --template-args need a chat template, and exclude --raw")
        return tokenizer.encode(prompt["prompt"] + begin)
    else:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        chat = [*system, {"role": "user", "content": prompt["prompt"]}]
    if begin:
        chat = [*chat, {"role": "assistant", "content": begin}]
    is_open = chat[-1]["role"] == "assistant"
    return tokenizer.encode_chat(
        chat, template_args=args.template_args, continue_final_message=is_open
    )


def without_context(objects, texts):
    """The prompts without their contexts, as objects with the same beginnings of answers. texts: of
    --without-context, in the order of the prompts whose lines have none."""
    lines = [prompt.get("without_context") for prompt in objects]
    if len(texts) != lines.count(None):
        raise InputError(
            'cad needs --without-context for each prompt, or "without_context" in its line: '
            f"{lines.count(None)} prompts have none, and the option is given {len(texts)} times"
        )
    rest = iter(texts)
    lines = [next(rest) if line is None else line for line in lines]
    out = []
    for prompt, line in zip(objects, lines):
        without = {"messages" if isinstance(line, list) else "prompt": line}
        if not chat_begin(without):
            without["begin"] = prompt.get("begin") or chat_begin(prompt)
        out.append(without)
    return out


def titles(texts):
    """Each text from the line or the word on in which it differs from all other texts."""
    starts = dict.fromkeys(texts, 0)
    for one, other in pairwise(sorted(starts)):  # neighbours have the longest common prefixes
        common = len(os.path.commonprefix([one, other]))
        for text in one, other:
            starts[text] = max(starts[text], common)
    out = []
    for text in texts:
        before = text[: starts[text]]
        line = before.rfind("\n") + 1
        word = line + re.search(r"\S*$", before[line:]).start()
        start = line if word - line <= AHEAD else word
        out.append(one_line("…" * (start > line) + text[start:], 60))
    return out
