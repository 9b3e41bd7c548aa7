"""Turns an item into chat messages, plain text or token ids, with its context and without (for CAD).

    chat      system = instruction; then demonstrations as user and assistant in turn; the question is the last turn
    mistral   no system turn: the instruction and a newline precede every user turn
    plain     one text: instruction, demonstrations, question; it ends with the answer's prefix
"""

from typing import NamedTuple

LAYOUTS = ("chat", "mistral", "plain")


def last_turn(task, item, with_context=True):
    if not with_context and task.without_context == "field":
        return item["without_context"]
    return ((task.context if with_context else "") + task.question).format_map(item)


def demos_of(task, item, demos):
    """The demonstrations in an item's prompt. If they are test items, an item is not among its demonstrations."""
    if task.demos_are_items:
        demos = [demo for demo in demos if demo["question"] != item["question"]]
    return demos[:task.shots]


def messages(task, item, demos, layout="chat", with_context=True):
    """[{"role", "content"}]. None for with_context=False if the task has no prompt without context."""
    if not with_context and not task.without_context:
        return None
    if not with_context and task.without_context == "demos":
        demos = []
    turns = [turn for demo in demos_of(task, item, demos) for turn in (demo["user"], demo["answer"])]
    turns.append(last_turn(task, item, with_context))
    front = task.instruction + "\n" if layout == "mistral" and task.instruction else ""
    chat = [{"role": "assistant", "content": turn} if number % 2 else {"role": "user", "content": front + turn}
            for number, turn in enumerate(turns)]
    return [{"role": "system", "content": task.instruction}] + chat if task.instruction and not front else chat


def plain_text(task, item, demos, with_context=True):
    """The plain layout; None as above. MuSiQue's plain prompt without context keeps its demonstrations."""
    if not with_context and not task.without_context:
        return None
    blocks = [f"{demo['user'].rstrip(' ')} {demo['answer']}" for demo in demos_of(task, item, demos)]
    body = "\n\n".join([*blocks, last_turn(task, item, with_context)])
    gap = task.gap if with_context else task.gap_without_context
    return task.instruction + gap + body if task.instruction else body


def dry_run(task, item, demos, layout):
    """One item as `--dry-run` prints it. For the plain layout the messages are those of the chat layout."""
    line = {
        "index": item["index"], "id": item["id"],
        "messages": messages(task, item, demos, layout),
        "messages_without_context": messages(task, item, demos, layout, with_context=False),
        "text": plain_text(task, item, demos), "text_without_context": plain_text(task, item, demos, False),
        "references": item["references"], "candidates": item.get("candidates"),
    }
    return line | {name: item[name] for name in ("n_true", "best_position", "split", "memory") if name in item}


class Encoded(NamedTuple):
    index: int
    prompt: list                        # token ids
    without_context: list | None
    answers: list | None                # multiple choice: token ids of each candidate
    merged: int                         # candidates whose first token merged with the prompt's last


def encode(task, item, demos, tokenizer, layout, end=(), template_args=None):
    """The token ids of an item.

    end: the ids of `end_of_turn`, for multiple choice in chat. template_args: more variables of the chat template.

    A candidate's ids are those that follow the prompt's in the ids of both. If the prompt's end and the candidate's
    beginning merge into one token, the candidate is tokenised alone. Otherwise a part of it would not be scored."""
    def ids(with_context=True, answer=None):
        if layout == "plain":
            prompt = plain_text(task, item, demos, with_context)
            return None if prompt is None else tokenizer.encode(prompt + (answer or ""))
        turns = messages(task, item, demos, layout, with_context)
        if turns is None:
            return None
        if answer is not None:
            turns.append({"role": "assistant", "content": answer})
        return tokenizer.encode_chat(turns, generation_prompt=answer is None, template_args=template_args)

    prompt, answers, merged = ids(), [], 0
    for candidate in item["candidates"] if task.choice else []:
        both = ids(answer=candidate)
        if both[:len(prompt)] == prompt:
            answers.append(both[len(prompt):])
        else:
            answers.append(tokenizer.encode(candidate, bos=False) + list(end))
            merged += 1
    return Encoded(item["index"], prompt, ids(with_context=False), answers if task.choice else None, merged)


def end_of_turn(tokenizer, template_args=None):
    """The ids that the chat template puts after an answer: the common suffix of two chats with different answers."""
    first, second = (tokenizer.encode_chat([{"role": "user", "content": "0"}, {"role": "assistant", "content": answer}],
                                           generation_prompt=False, template_args=template_args)[::-1]
                     for answer in ("0", "1"))
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    return first[:same][::-1]
