"""Turns an item into chat messages, plain text or token ids, with its context and without (for
CAD).

chat      system = instruction; demonstrations as user and assistant in turn; last, the question
mistral   no system turn: the instruction and a newline precede every user turn
plain     one text: instruction, demonstrations, question; it ends with the answer's prefix
"""

import datetime
from os.path import commonprefix
from typing import NamedTuple

LAYOUTS = ("chat", "mistral", "plain")
DAY = datetime.date(2024, 7, 26)  # "today" in chat templates: the default of Llama 3.1


def turns_of(task, item, demos, with_context):
    """The user's turns and, in between, the assistant's.

    An item is not among its own demonstrations."""
    if task.demos_are_items:
        demos = [demo for demo in demos if demo["question"] != item["question"]]
    turns = []
    for demo in demos[: task.shots]:
        turns += [demo["user"], demo["answer"]]
    if with_context:
        last = (task.context + task.question).format_map(item)
    elif task.without_context == "field":
        last = item["without_context"]
    else:
        last = task.question.format_map(item)
    return [*turns, last]


def messages(task, item, demos, layout="chat", with_context=True):
    """[{"role", "content"}]."""
    if not with_context and task.without_context == "demos":
        demos = []
    front = ""
    chat = []
    if task.instruction and layout == "mistral":
        front = task.instruction + "\n"
    elif task.instruction:
        chat.append({"role": "system", "content": task.instruction})
    for number, turn in enumerate(turns_of(task, item, demos, with_context)):
        if number % 2:
            chat.append({"role": "assistant", "content": turn})
        else:
            chat.append({"role": "user", "content": front + turn})
    return chat


def plain_text(task, item, demos, with_context=True):
    """The plain layout. MuSiQue's plain prompt without context keeps its demonstrations."""
    *turns, last = turns_of(task, item, demos, with_context)
    blocks = [
        f"{user.rstrip(' ')} {answer}" for user, answer in zip(turns[::2], turns[1::2], strict=True)
    ]
    gap = task.gap if with_context else task.gap_without_context
    return task.instruction + gap * bool(task.instruction) + "\n\n".join([*blocks, last])


def dry_run(task, item, demos, layout):
    """One item as `--dry-run` prints it.

    For the plain layout the messages are those of the chat layout."""
    line = {name: item.get(name) for name in ("index", "id", "references", "candidates")}
    for with_context, name in ((True, ""), (False, "_without_context")):
        line |= {"messages" + name: None, "text" + name: None}
        if with_context or task.without_context:
            line["messages" + name] = messages(task, item, demos, layout, with_context)
            line["text" + name] = plain_text(task, item, demos, with_context)
    for name in ("n_true", "best_position", "split", "memory"):
        if name in item:
            line[name] = item[name]
    return line


class Encoded(NamedTuple):
    index: int
    prompt: list  # token ids
    without_context: list | None
    answers: list | None  # multiple choice: token ids of each candidate
    merged: int  # candidates whose first token merged with the prompt's last


def item_to_ids(task, item, demos, tokenizer, layout, end=(), template_args=None):
    """The token ids of an item.

    end: the ids of `end_of_turn`, for multiple choice in chat. template_args: more variables of the
    chat template.

    A candidate's ids are those that follow the prompt's in the ids of both. If the two merge into
    one token, the candidate is tokenised alone. Otherwise a part of it would not be scored."""

    def ids(with_context=True, answer=None):
        if layout == "plain":
            return tokenizer.encode(plain_text(task, item, demos, with_context) + (answer or ""))
        turns = messages(task, item, demos, layout, with_context)
        turns += [] if answer is None else [{"role": "assistant", "content": answer}]
        return tokenizer.encode_chat(
            turns, generation_prompt=answer is None, template_args=template_args, today=DAY
        )

    prompt = ids()
    answers = []
    merged = 0
    for candidate in item["candidates"] if task.choice else []:
        both = ids(answer=candidate)
        if both[: len(prompt)] == prompt:
            answers.append(both[len(prompt) :])
        else:
            answers.append(tokenizer.encode(candidate, bos=False) + list(end))
            merged += 1
    return Encoded(
        item["index"],
        prompt,
        ids(with_context=False) if task.without_context else None,
        answers if task.choice else None,
        merged,
    )


def end_of_turn(tokenizer, template_args=None):
    """The ids after an answer in chat: the common suffix of two chats with different answers."""
    chats = [
        tokenizer.encode_chat(
            [{"role": "user", "content": "0"}, {"role": "assistant", "content": answer}],
            generation_prompt=False,
            template_args=template_args,
            today=DAY,
        )[::-1]
        for answer in ("0", "1")
    ]
    return commonprefix(chats)[::-1]
