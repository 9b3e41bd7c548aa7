"""Turns one entry of a data file into an item, a dict with

    id                  that of the data; None if they have none
    question, context…  the fields that the task's templates name
    references          accepted answers, a list of str
    candidates          multiple choice: the answers in scoring order, true ones first

Other fields are stored with the prediction, for the metrics. ValueError names a field that is
missing or of the wrong kind; `located` adds file and line."""

import ast
import csv
import json
from contextlib import contextmanager


def list_of(*types):
    return lambda value: (
        isinstance(value, list) and value and all(type(element) in types for element in value)
    )


KINDS = {
    "a text": lambda value: isinstance(value, str),
    "a whole number from 0": lambda value: type(value) is int and value >= 0,
    "a list of texts": list_of(str),
    "a list of numbers": list_of(int, float, type(None)),
    "a list of objects": list_of(dict, type(None)),
}


@contextmanager
def located(place):
    """Turns any error of a wrong entry in the block into a ValueError that begins with the entry's
    place."""
    try:
        yield
    except (
        ValueError,
        SyntaxError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        csv.Error,
    ) as error:
        raise ValueError(f"{place}: {error}") from error


def require(entry, names):
    """ValueError that names all fields that the entry lacks."""
    if missing := [repr(name) for name in names if entry.get(name) is None]:
        raise ValueError(
            f"missing field: {', '.join(missing)} (found: "
            f"{', '.join(map(str, entry)) or 'nothing'})"
        )


def field(entry, name, kind="a text"):
    require(entry, [name])
    if not KINDS[kind](entry[name]):
        raise ValueError(f"field {name!r} should be {kind}, not {str(entry[name])[:60]!r}")
    return entry[name]


def texts(entry, name):
    return field(entry, name, "a list of texts")


def qa(entry, references, **more):
    return {
        "id": entry.get("id"),
        "question": field(entry, "question"),
        "references": references,
    } | more


def xsum(entry):
    return {
        "id": entry.get("id"),
        "document": field(entry, "document"),
        "references": [field(entry, "summary")],
    }


def memotrap(entry):
    """`classes` is a Python list of two strings, each with a leading space; `split` is the file's
    name."""
    prompt = field(entry, "prompt")
    pair = texts({"classes": ast.literal_eval(field(entry, "classes"))}, "classes")
    if len(pair) != 2 or str(entry.get("answer_index")) not in ("0", "1"):
        raise ValueError(
            "field 'classes' should be a Python list of two strings, and 'answer_index' 0 or 1"
        )
    right = int(entry["answer_index"])
    return {
        "id": entry.get("id"),
        "question": prompt,
        "without_context": prompt.split(":")[-1].strip(),
        "references": [pair[right]],
        "candidates": [pair[right], pair[1 - right]],
        "n_true": 1,
        "split": entry.get("split", ""),
    }


def ifeval(entry):
    names, kwargs = zip(*instructions(entry), strict=True)
    return {
        "id": entry.get("key"),
        "question": field(entry, "prompt"),
        "prompt": entry["prompt"],
        "references": [],
        "instruction_id_list": list(names),
        "kwargs": list(kwargs),
    }


def instructions(entry):
    """[(name, arguments)] of an item of IFEval, without the arguments that are null, zero or
    empty."""
    names = texts(entry, "instruction_id_list")
    kwargs = field(entry, "kwargs", "a list of objects")
    if len(names) != len(kwargs):
        raise ValueError(
            f"field 'kwargs' should hold one object for each of the {len(names)} instructions"
        )
    pairs = []
    for name, arguments in zip(names, kwargs, strict=True):
        used = {key: value for key, value in (arguments or {}).items() if value}
        pairs.append((name, used))
    return pairs


def nq_closed(entry):
    return qa(entry, texts(entry, "answers"))


def nq_open(entry):
    passages = field(entry, "ctxs", "a list of objects")
    if len(passages) != 1:
        raise ValueError(f"field 'ctxs' should hold the one gold passage, not {len(passages)}")
    return nq_closed(entry) | {name: field(passages[0], name).strip() for name in ("title", "text")}


def nq_swap(entry):
    """The model sees the substituted context. `memory` is the original answer."""
    return qa(
        entry,
        texts(entry, "sub_answer"),
        context=field(entry, "sub_context"),
        memory=texts(entry, "org_answer"),
    )


def with_full_stop(answer):
    return answer if answer.endswith(".") else answer + "."


def split_answers(entry, name):
    """Answers separated by semicolons, each with a full stop. Repeated ones stay."""
    parts = [with_full_stop(part.strip()) for part in field(entry, name).split(";") if part.strip()]
    return texts({name: parts}, name)


def truthfulqa_gen(entry):
    return qa(entry | {"question": entry.get("Question")}, split_answers(entry, "Correct Answers"))


def truthfulqa_mc(entry):
    item = truthfulqa_gen(entry)
    true = item["references"]
    false = split_answers(entry, "Incorrect Answers")
    best = with_full_stop(field(entry, "Best Answer").strip())
    if best not in true:
        raise ValueError(f"field 'Best Answer' is not among the correct answers: {best!r}")
    return item | {
        "candidates": [" " + answer for answer in true + false],
        "n_true": len(true),
        "best_position": true.index(best),
    }


def triviaqa(entry):
    """References are the aliases only. A repackaged data set calls them `golden_answers`."""
    answer = entry.get("answer")
    if isinstance(answer, dict):
        references = texts(answer, "aliases")
    else:
        references = texts(entry, "golden_answers")
    return qa(entry, references, id=entry.get("question_id", entry.get("id")))


def triviaqa_training(entry):
    return {"question": field(entry, "question"), "answer": field(entry["answer"], "value").lower()}


def popqa(entry):
    """`possible_answers` is a JSON list in a string.

    A repackaged data set has a list, `golden_answers`."""
    answers = entry.get("possible_answers", entry.get("golden_answers"))
    answers = json.loads(answers) if isinstance(answers, str) else answers
    return qa(entry, texts({"possible_answers": answers}, "possible_answers"))


def musique_closed(entry):
    if entry.get("answerable") is False:
        raise ValueError("this is the full MuSiQue; use the answerable one (musique_ans)")
    aliases = texts(entry, "answer_aliases") if entry.get("answer_aliases") else []
    return qa(entry, [field(entry, "answer"), *aliases])


def musique_open(entry):
    """The supporting paragraphs only, in file order, each followed by a space."""
    passages = [
        f"Wikipedia Title: {field(paragraph, 'title')}\n{field(paragraph, 'paragraph_text')} "
        for paragraph in field(entry, "paragraphs", "a list of objects")
        if paragraph.get("is_supporting")
    ]
    if not passages:
        raise ValueError("field 'paragraphs' holds no supporting paragraph")
    return musique_closed(entry) | {"passages": "\n\n".join(passages)}


def miniature(entry):
    """The last line is the prompt without its passage.

    `memory` is the answer of the training texts."""
    prompt = field(entry, "prompt")
    answer = field(entry, "answer")
    item = {
        "id": entry.get("id"),
        "question": prompt,
        "without_context": prompt.split("\n")[-1],
        "references": [answer],
    }
    if entry.get("memory") not in (None, answer):
        item["memory"] = [field(entry, "memory")]
    return item
