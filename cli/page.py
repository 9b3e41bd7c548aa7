"""The page of `decore.py --html`: runtime/page.py, with the prompts and setups of the program."""

import os
import shlex
import sys

from runtime.errors import InputError
from runtime.files import draft, named
from runtime.page import answer_part, pieces, prompt_part, template
from tokenizer import join_parts

LONGEST = 200  # characters of an option's value in the command


def write_page(path, model, prompts, setups, answers):
    """Write each prompt and its answers, if this is the first rank.

    setups: {label: its setup}. answers: {label: a `Generation` for each prompt}."""
    parts = []
    for b, (prompt, generations) in enumerate(zip(prompts, zip(*answers.values()))):
        title = f"[{b + 1}] {prompt.title}" if len(prompts) > 1 else ""
        texts = generations[0].prompt
        outside = template_pieces(pieces(texts), contents_of(prompt.fields))
        prompt = prompt_part(texts, f"p{b}", title, outside)
        parts.append(prompt)
        for i, (label, g) in enumerate(zip(answers, generations)):
            part = answer_part(f"g{i * len(prompts) + b}", g, prompt)
            parts.append(part | dict(title=label, details=details(setups[label])))
    if model.shard.rank == 0:
        text = template().render(title=model.name, parts=parts, command=command(sys.argv[1:]))
        write(path, text)


def command(options):
    """The command line; the page shows long values, such as prompts, elsewhere."""
    short = [o if len(o) <= LONGEST else f"{o[: LONGEST // 2]}…" for o in options]
    return shlex.join(["python", "decore.py", *short])


def write(path, text):
    """Write to a device, or replace a file."""
    with named(path) if is_device(path) else draft(path) as new:
        new.write_text(text, encoding="utf-8")


def check_writable(path):
    """InputError if a page cannot be written to the path."""
    written = path if is_device(path) else path.parent
    if not path.parent.is_dir():
        raise InputError(f"--html {path}: there is no folder {path.parent}; make it first")
    if path.is_dir() or not os.access(written, os.W_OK):
        raise InputError(
            f"--html {path} cannot be written: give a file in a folder that you may write to"
        )


def is_device(path):
    """Whether something like /dev/stdout has this path: it cannot be replaced."""
    return path.exists() and not path.is_file()


def details(setup):
    """A method's settings and heads in words."""
    words = list(setup.words().values())
    if setup.heads:
        words.append("heads masked: " + ", ".join(setup.header()["heads"]))
    return "; ".join(words)


def contents_of(fields):
    """What a person wrote of a prompt, a list of texts. fields: those of its object."""
    messages = fields.get("messages", [{"content": fields.get("prompt", "")}])
    return [join_parts(message)["content"] for message in messages] + [fields.get("begin", "")]


def template_pieces(texts, contents):
    """The numbers of those pieces of a prompt that its chat template has added, such as roles.

    texts: of `pieces`. Empty if the template has changed the contents."""
    text = "".join(piece for piece, _ in texts)
    inside = set()  # characters
    end = len(text)
    for content in reversed(contents):
        start = text.rfind(content.strip(), 0, end)
        if start < 0:
            return set()
        inside.update(range(start, start + len(content.strip())))
        end = start
    outside, start = set(), 0
    for i, (piece, _) in enumerate(texts):
        if inside.isdisjoint(range(start, start + len(piece))):
            outside.add(i)
        start += len(piece)
    return outside
