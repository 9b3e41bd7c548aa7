"""Turns one row of a data file into an item, a dict with

    id                  that of the data; None if they have none
    question, context…  the fields that the task's templates name
    references          accepted answers, a list of str
    candidates          multiple choice: the answers in scoring order, true ones first

Other fields are stored with the prediction, for the metrics. ValueError names a field that is missing or of the wrong
kind; `located` adds file and line."""

import ast
import json
import re
from contextlib import contextmanager


def list_of(*types):
    return lambda value: isinstance(value, list) and value and all(type(element) in types for element in value)


KINDS = {"a text": lambda value: isinstance(value, str),
         "a whole number from 0": lambda value: type(value) is int and value >= 0,
         "a list of texts": list_of(str), "a list of numbers": list_of(int, float, type(None)),
         "a list of objects": list_of(dict, type(None))}


@contextmanager
def located(place, note=""):
    """Turns any error of a wrong row in the block into a ValueError that begins with the row's place."""
    try:
        yield
    except (ValueError, SyntaxError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{place}: {error}{note}") from error


def field(row, name, kind="a text"):
    if row.get(name) is None:
        raise ValueError(f"field {name!r} is missing (the row has {', '.join(map(str, row)) or 'nothing'})")
    if not KINDS[kind](row[name]):
        raise ValueError(f"field {name!r} should be {kind}, not {str(row[name])[:60]!r}")
    return row[name]


def texts(row, name):
    return field(row, name, "a list of texts")


def qa(row, references, **more):
    return {"id": row.get("id"), "question": field(row, "question"), "references": references} | more


def xsum(row):
    return {"id": row.get("id"), "document": field(row, "document"), "references": [field(row, "summary")]}


def memotrap(row):
    """`classes` is a Python list of two strings, each with a leading space; `split` is the file's name."""
    prompt, pair = field(row, "prompt"), texts({"classes": ast.literal_eval(field(row, "classes"))}, "classes")
    if len(pair) != 2 or str(row.get("answer_index")) not in ("0", "1"):
        raise ValueError("field 'classes' should be a Python list of two strings, and 'answer_index' 0 or 1")
    right = int(row["answer_index"])
    return {"id": row.get("id"), "question": prompt, "without_context": prompt.split(":")[-1].strip(),
            "references": [pair[right]], "candidates": [pair[right], pair[1 - right]],
            "n_true": 1, "split": row.get("split", "")}


def ifeval(row):
    """Instructions and their arguments, without the arguments that are null, zero or empty."""
    names, kwargs = zip(*instructions(row), strict=True)
    kwargs = [{name: value for name, value in arguments.items() if value} for arguments in kwargs]
    return {"id": row.get("key"), "question": field(row, "prompt"), "prompt": row["prompt"], "references": [],
            "instruction_id_list": list(names), "kwargs": kwargs}


def instructions(row):
    """[(name, arguments)] of an item of IFEval."""
    names, kwargs = texts(row, "instruction_id_list"), field(row, "kwargs", "a list of objects")
    if len(names) != len(kwargs):
        raise ValueError(f"field 'kwargs' should hold one object for each of the {len(names)} instructions")
    return [(name, arguments or {}) for name, arguments in zip(names, kwargs, strict=True)]


def nq_closed(row):
    return qa(row, texts(row, "answers"))


def nq_open(row):
    passages = field(row, "ctxs", "a list of objects")
    if len(passages) != 1:
        raise ValueError(f"field 'ctxs' should hold the one gold passage, not {len(passages)}")
    return nq_closed(row) | {name: field(passages[0], name).strip() for name in ("title", "text")}


def nq_training(row):
    return {"question": field(row, "question"), "answer": texts(row, "answer")[0]}


def nq_swap(row):
    """The model sees the substituted context. `memory` is the original answer."""
    return qa(row, texts(row, "sub_answer"), context=field(row, "sub_context"), memory=texts(row, "org_answer"))


def with_full_stop(answer):
    return answer if answer.endswith(".") else answer + "."


def split_answers(row, name):
    """Answers separated by semicolons, each with a full stop. Repeated ones stay."""
    parts = [with_full_stop(part.strip()) for part in field(row, name).split(";") if part.strip()]
    return texts({name: parts}, name)


def truthfulqa_gen(row):
    return qa(row | {"question": row.get("Question")}, split_answers(row, "Correct Answers"))


def truthfulqa_mc(row):
    item, false = truthfulqa_gen(row), split_answers(row, "Incorrect Answers")
    true, best = item["references"], with_full_stop(field(row, "Best Answer").strip())
    if best not in true:
        raise ValueError(f"field 'Best Answer' is not among the correct answers: {best!r}")
    return item | {"candidates": [" " + answer for answer in true + false], "n_true": len(true),
                   "best_position": true.index(best)}


def triviaqa(row):
    """References are the aliases only. A repackaged data set calls them `golden_answers`."""
    answer = row.get("answer")
    references = texts(answer, "aliases") if isinstance(answer, dict) else texts(row, "golden_answers")
    return qa(row, references, id=row.get("question_id", row.get("id")))


def triviaqa_training(row):
    return {"question": field(row, "question"), "answer": field(row["answer"], "value").lower()}


def popqa(row):
    """`possible_answers` is a JSON list in a string. A repackaged data set has a list, `golden_answers`."""
    answers = row.get("possible_answers", row.get("golden_answers"))
    answers = json.loads(answers) if isinstance(answers, str) else answers
    return qa(row, texts({"possible_answers": answers}, "possible_answers"))


def musique_closed(row):
    if row.get("answerable") is False:
        raise ValueError("this is the full MuSiQue; use the answerable one (musique_ans)")
    aliases = texts(row, "answer_aliases") if row.get("answer_aliases") else []
    return qa(row, [field(row, "answer"), *aliases])


def musique_open(row):
    """The supporting paragraphs only, in file order, each followed by a space."""
    passages = [f"Wikipedia Title: {field(paragraph, 'title')}\n{field(paragraph, 'paragraph_text')} "
                for paragraph in field(row, "paragraphs", "a list of objects") if paragraph.get("is_supporting")]
    if not passages:
        raise ValueError("field 'paragraphs' holds no supporting paragraph")
    return musique_closed(row) | {"passages": "\n\n".join(passages)}


def musique_training(row):
    """Builds the reasoning from the single questions of the data, in which "#1" stands for the first answer."""
    answer, steps, answers = field(row, "answer"), [], []
    for step in row["question_decomposition"]:
        question = re.sub(r"#(\d+)", lambda match: answers[int(match[1]) - 1], field(step, "question"))
        question = question.replace(" >>", ",")
        answers.append(field(step, "answer"))
        steps.append(f"{question}{'' if question.endswith('?') else ':'} {answers[-1]}.")
    return {"question": field(row, "question"), "direct_answer": answer,
            "cot_answer": " ".join([*steps, f"So the answer is: {answer}."])}


def miniature(row):
    """The last line is the prompt without its passage. `memory` is the answer of the training texts."""
    prompt, answer = field(row, "prompt"), field(row, "answer")
    memory = None if row.get("memory") is None else field(row, "memory")
    return {"id": row.get("id"), "question": prompt, "without_context": prompt.split("\n")[-1],
            "references": [answer]} | ({} if memory in (None, answer) else {"memory": [memory]})
