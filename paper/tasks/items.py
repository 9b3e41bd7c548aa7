"""Turns one entry of a data file into an item, a dict with

    question, context…  the fields that the task's templates name
    references          accepted answers, a list of str
    candidates          multiple choice: the answers in scoring order, true ones first

Other fields are stored with the prediction, for the metrics. InputError names a field that is
missing or of the wrong kind; `runtime.fields.located` adds file and line."""

import ast
import json
import re

from runtime.errors import InputError
from runtime.fields import field

# A list in a table's cell, also with the quotation marks of spreadsheets, for the error.
LIST = re.compile(r"""\s*\[(\s*["'“”„«‘’‚‹]|.*\]\s*$)""", re.DOTALL)


def texts(entry, name):
    """A list of texts. One text is a list of one, unless it is a JSON list in a table's cell."""
    value = entry.get(name)
    if not isinstance(value, str):
        return field(entry, name, "a list of texts")
    if not LIST.match(value):
        return [value]
    try:
        return field({name: json.loads(value)}, name, "a list of texts")
    except json.JSONDecodeError:
        raise InputError(
            f'{name} is not a JSON list, as ["one answer", "another"]: {value[:60]}'
        ) from None


def qa(entry, name):
    """The item of an entry with a list of accepted answers in the field `name`."""
    return {"question": field(entry, "question"), "references": texts(entry, name)}


def xsum(entry):
    return {"document": field(entry, "document"), "references": [field(entry, "summary")]}


def memotrap(entry):
    """`classes` is a Python list of two strings, each with a leading space."""
    prompt = field(entry, "prompt")
    classes = ast.literal_eval(field(entry, "classes"))
    orders = {"0": classes, "1": classes[::-1]}
    true_first = orders.get(str(entry.get("answer_index")), [])
    if len(true_first) != 2:
        raise InputError("classes must be a Python list of two strings, and 'answer_index' 0 or 1")
    return {
        "question": prompt,
        "without_context": prompt.split(":")[-1].strip(),
        "references": true_first[:1],
        "candidates": true_first,
        "n_true": 1,
    }


def ifeval(entry):
    return {
        "question": field(entry, "prompt"),
        "prompt": entry["prompt"],
        "references": [],
        "instruction_id_list": texts(entry, "instruction_id_list"),
        "kwargs": [arguments for _, arguments in instructions(entry)],
    }


def instructions(entry):
    """Yields (name, arguments) of an item of IFEval, without the arguments that are null, zero or
    empty."""
    names = texts(entry, "instruction_id_list")
    kwargs = field(entry, "kwargs", "a list of objects")
    if len(names) != len(kwargs):
        raise InputError(f"kwargs must hold {len(names)} objects, one per instruction")
    for name, arguments in zip(names, kwargs):
        yield name, {key: value for key, value in (arguments or {}).items() if value}


def nq_closed(entry):
    return qa(entry, "answers")


def nq_open(entry):
    passages = field(entry, "ctxs", "a list of objects")
    if len(passages) != 1:
        raise InputError(f"ctxs must hold the one gold passage, not {len(passages)}")
    return nq_closed(entry) | {name: field(passages[0], name).strip() for name in ("title", "text")}


def nq_swap(entry):
    """The model sees the substituted context. `memory` is the original answer."""
    return qa(entry, "sub_answer") | {
        "context": field(entry, "sub_context"),
        "memory": texts(entry, "org_answer"),
    }


def split_answers(entry, name):
    """Answers separated by semicolons, each with a full stop. Repeated ones stay."""
    parts = filter(None, map(str.strip, field(entry, name).split(";")))
    return texts({name: [part.removesuffix(".") + "." for part in parts]}, name)


def truthfulqa_gen(entry):
    return {
        "question": field(entry, "Question"),
        "references": split_answers(entry, "Correct Answers"),
    }


def truthfulqa_mc(entry):
    item = truthfulqa_gen(entry)
    true = item["references"]
    false = split_answers(entry, "Incorrect Answers")
    best = split_answers(entry, "Best Answer")[0]
    if best not in true:
        raise InputError(f"field 'Best Answer' is not among the correct answers: {best!r}")
    return item | {
        "candidates": [" " + answer for answer in true + false],
        "n_true": len(true),
        "best_position": true.index(best),
    }


def triviaqa(entry):
    """References are the aliases only. A repackaged data set calls them `golden_answers`."""
    answer = entry.get("answer")
    return qa(entry | answer, "aliases") if answer else qa(entry, "golden_answers")


def triviaqa_training(entry):
    return {"question": field(entry, "question"), "answer": field(entry["answer"], "value").lower()}


def popqa(entry):
    """`possible_answers` is a JSON list in a string.

    A repackaged data set has a list, `golden_answers`."""
    return qa(entry, "golden_answers" if entry.get("golden_answers") else "possible_answers")


def musique_closed(entry):
    if entry.get("answerable") is False:
        raise InputError("this is the full MuSiQue; use the answerable one (musique_ans)")
    aliases = texts(entry, "answer_aliases") if entry.get("answer_aliases") else []
    return qa(entry | {"answers": [field(entry, "answer"), *aliases]}, "answers")


def musique_open(entry):
    """The supporting paragraphs only, in file order, each followed by a space."""
    passages = [
        f"Wikipedia Title: {field(paragraph, 'title')}\n{field(paragraph, 'paragraph_text')} "
        for paragraph in field(entry, "paragraphs", "a list of objects")
        if paragraph.get("is_supporting")
    ]
    if not passages:
        raise InputError("field 'paragraphs' holds no supporting paragraph")
    return musique_closed(entry) | {"passages": "\n\n".join(passages)}


def miniature(entry):
    """The last line is the prompt without its passage.

    `memory` is the answer of the training texts."""
    prompt = field(entry, "prompt")
    answer = field(entry, "answer")
    item = {"question": prompt, "without_context": prompt.split("\n")[-1], "references": [answer]}
    if entry.get("memory") not in (None, answer):
        item["memory"] = [field(entry, "memory")]
    return item


def own_question(entry):
    """A question of the user's. Its field `context` may be empty.

    Optional: `memory`, answers that the model may give from memory; `begin`, how the answer
    begins."""
    item = qa(entry, "answers")
    more = {}
    if entry.get("memory"):
        more["memory"] = texts(entry, "memory")
    if begin := field(entry, "begin", null=""):
        more["begin"] = begin
    filled = ("question", [item["question"]]), ("answers", item["references"])
    for name, values in (*filled, ("memory", more.get("memory", ())), ("begin", [begin or "x"])):
        if not all(map(str.strip, values)):
            raise InputError(f"field {name!r} is empty")
    if both := {*item["references"]} & {*more.get("memory", ())}:
        raise InputError(
            f"{both.pop()!r} is in both answers and memory: leave out `memory` if the passage "
            "agrees with it"
        )
    is_null = "context" in entry and entry["context"] is None
    context = "" if is_null else field(entry, "context")
    return item | {"context": context if context.strip() else ""} | more
