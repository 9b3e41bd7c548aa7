"""Turns an item into chat messages, plain text or token ids, with its context and without (for
CAD).

chat      system = instruction; demonstrations as user and assistant in turn; last, the question
user      no system turn: the instruction and an empty line precede the first user turn
mistral   no system turn: the instruction and a newline precede every user turn
plain     one text: instruction, demonstrations, question; it ends with the answer's prefix

The `begin` of an item's answer follows: in chats it is the assistant's turn, which stays open.
"""

import datetime
from os.path import commonprefix
from typing import NamedTuple

LAYOUTS = ("chat", "user", "mistral", "plain")
DAY = datetime.date(2024, 7, 26)  # "today" in chat templates: the default of Llama 3.1


def shown_of(task, item, demos, with_context):
    """(demonstrations, the last user turn). An item is not among its own demonstrations."""
    if task.demos_are_items:
        demos = [demo for demo in demos if demo["question"] != item["question"]][: task.shots - 1]
    return demos, last_turn(task, item, with_context)


def last_turn(task, item, with_context=True):
    """The last user turn."""
    if with_context and item.get("context") != "":
        return task.template.format_map(item)
    return item.get("without_context", (task.front + task.question).format_map(item))


def messages(task, item, demos, layout, with_context=True):
    """[{"role", "content"}]."""
    if not with_context and task.without_context == "demos":
        demos = []
    demos, last = shown_of(task, item, demos, with_context)
    front = ""
    chat = []
    if task.instruction and layout == "mistral":
        front = task.instruction + "\n"
    elif task.instruction:
        chat.append({"role": "system", "content": task.instruction})
    for demo in demos:
        chat.append({"role": "user", "content": front + demo["user"]})
        chat.append({"role": "assistant", "content": demo["answer"]})
    chat.append({"role": "user", "content": front + last})
    if begin := item.get("begin"):
        chat.append({"role": "assistant", "content": begin})
    if not task.instruction or layout != "user":
        return chat
    from tokenizer import join_system  # slow

    return join_system(chat)


def plain_text(task, item, demos, with_context=True):
    """The plain layout. MuSiQue's plain prompt without context keeps its demonstrations."""
    demos, last = shown_of(task, item, demos, with_context)
    blocks = [f"{demo['user'].rstrip(' ')} {demo['answer']}" for demo in demos]
    if begin := item.get("begin"):
        last = f"{last.rstrip(' ')} {begin}"
    gap = task.gap if with_context else task.gap_without_context
    return task.instruction + gap * bool(task.instruction) + "\n\n".join([*blocks, last])


def dry_run(task, item, demos, layout):
    """One item as `--dry-run` prints it.

    For the plain layout the messages are those of the chat layout."""
    line = {name: item.get(name) for name in ("index", "id", "references", "candidates")}
    for with_context, name in ((True, ""), (False, "_without_context")):
        shown = with_context or task.without_context
        chat = messages(task, item, demos, layout, with_context) if shown else None
        text = plain_text(task, item, demos, with_context) if shown else None
        line |= {"messages" + name: chat, "text" + name: text}
    more = ("n_true", "best_position", "split", "memory")
    return line | {name: item[name] for name in more if name in item}


class Encoded(NamedTuple):
    index: int
    prompt: list  # token ids
    without_context: list | None
    # Multiple choice: token ids of each candidate. Closed book: of each spelling of `memory`.
    answers: list | None
    merged: int  # candidates whose first token merged with the prompt's last


def item_to_ids(task, item, demos, tokenizer, layout, template_args=None):
    """The token ids of an item.

    template_args: more variables of the chat template.

    A candidate's ids are those that follow the prompt's in the ids of both. If the two merge into
    one token, the candidate is tokenised alone, and in chat the end of its turn is added. Otherwise
    a part of it would not be scored."""

    def ids(with_context=True, answer=None, **changes):
        shown = item | changes
        if layout == "plain":
            return tokenizer.encode(plain_text(task, shown, demos, with_context) + (answer or ""))
        turns = messages(task, shown, demos, layout, with_context)
        begins = turns[-1]["role"] == "assistant"
        turns += [] if answer is None else [{"role": "assistant", "content": answer}]
        return tokenizer.encode_chat(
            turns,
            generation_prompt=answer is None,
            template_args=template_args,
            today=DAY,
            continue_final_message=begins,
        )

    prompt = ids()
    answers = []
    merged = 0
    for candidate in item.get("candidates", ()):
        both = ids(answer=candidate)
        if both[: len(prompt)] == prompt:
            answers.append(both[len(prompt) :])
        else:
            # The end of a turn is the common suffix of two chats with different answers.
            chats = [ids(answer=other)[::-1] for other in ("0", "1")]
            end = commonprefix(chats)[::-1]
            answers.append(tokenizer.encode(candidate, bos=False) + end)
            merged += 1
    for text in item.get("memory", ()) if task.closed_book else ():
        both = ids(begin=" ".join(filter(None, [item.get("begin"), text])))
        if both[: len(prompt)] == prompt:
            answers.append(both[len(prompt) :])
    without_context = ids(with_context=False) if task.without_context else None
    return Encoded(item["index"], prompt, without_context, answers or None, merged)
