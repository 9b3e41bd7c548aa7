"""Turns one row of a data file into an item, a dict with

    id                  that of the data; None if they have none
    question, context…  the fields that the task's templates name
    references          accepted answers, a list of str
    candidates          multiple choice: the answers in scoring order, true ones first

Other fields are stored with the prediction, for the metrics. ValueError names a field that is missing or of the wrong
kind; the caller adds file and line."""

import ast
import json
import re
from contextlib import suppress


def field(row, name):
    if row.get(name) is None:
        names = ", ".join(str(key) for key in row if key) or "nothing"
        raise ValueError(f"field {name!r} is missing (the row has {names})")
    return row[name]


def string(row, name):
    """The field, a str. Numbers are refused: they are a sign of another file."""
    value = field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} should be text, not {type(value).__name__}")
    return value


def strings(row, name):
    """The field, a list of at least one str."""
    values = field(row, name)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"field {name!r} should be a list of texts, not {str(values)[:60]!r}")
    return values


def xsum(row):
    return {"id": row.get("id"), "document": string(row, "document"), "references": [string(row, "summary")]}


def memotrap(row):
    """`classes` is a Python list of two strings, each with a leading space; `split` is the file's name."""
    prompt, classes = string(row, "prompt"), string(row, "classes")
    try:
        pair = strings({"classes": ast.literal_eval(classes)}, "classes")
    except (ValueError, SyntaxError):
        pair = []
    if len(pair) != 2:
        raise ValueError(f"field 'classes' should be a Python list of two strings, not {classes[:60]!r}")
    if str(row.get("answer_index")) not in ("0", "1"):
        raise ValueError(f"field 'answer_index' should be 0 or 1, not {str(row.get('answer_index'))!r}")
    right = int(row["answer_index"])
    return {"id": row.get("id"), "question": prompt, "without_context": prompt.split(":")[-1].strip(),
            "references": [pair[right]], "candidates": [pair[right], pair[1 - right]],
            "n_true": 1, "split": row.get("split", "")}


def ifeval(row):
    """Instructions and their arguments, without the arguments that are null, zero or empty."""
    prompt, names = string(row, "prompt"), strings(row, "instruction_id_list")
    kwargs = row.get("kwargs")
    if not isinstance(kwargs, list) or len(kwargs) != len(names):
        raise ValueError(f"field 'kwargs' should hold one object for each of the {len(names)} instructions")
    kwargs = [{name: value for name, value in (arguments or {}).items() if value}
              for arguments in kwargs]
    return {"id": row.get("key"), "question": prompt, "prompt": prompt, "references": [], "instruction_id_list": names,
            "kwargs": kwargs}


def nq_closed(row):
    return {"id": row.get("id"), "question": string(row, "question"), "references": strings(row, "answers")}


def nq_open(row):
    item, passages = nq_closed(row), field(row, "ctxs")
    if not isinstance(passages, list) or len(passages) != 1:
        raise ValueError(f"field 'ctxs' should hold the one gold passage, not {len(passages)}")
    return item | {"title": string(passages[0], "title").strip(), "text": string(passages[0], "text").strip()}


def nq_training(row):
    return {"question": string(row, "question"), "answer": strings(row, "answer")[0]}


def nq_swap(row):
    """The model sees the substituted context, so the substituted answer is right. `memory` is the original one."""
    return {"id": row.get("id"), "question": string(row, "question"), "context": string(row, "sub_context"),
            "references": strings(row, "sub_answer"), "memory": strings(row, "org_answer")}


def with_full_stop(answer):
    return answer if answer.endswith(".") else answer + "."


def split_answers(row, name):
    """Answers separated by semicolons: stripped, empty ones dropped, each with a full stop. Repeated ones stay."""
    parts = [with_full_stop(part.strip()) for part in string(row, name).split(";") if part.strip()]
    if not parts:
        raise ValueError(f"field {name!r} holds no answer")
    return parts


def truthfulqa_gen(row):
    return {"id": row.get("id"), "question": string(row, "Question"),
            "references": split_answers(row, "Correct Answers")}


def truthfulqa_mc(row):
    item, false = truthfulqa_gen(row), split_answers(row, "Incorrect Answers")
    true, best = item["references"], with_full_stop(string(row, "Best Answer").strip())
    if best not in true:
        raise ValueError(f"field 'Best Answer' is not among the correct answers: {best!r}")
    return item | {"candidates": [" " + answer for answer in true + false], "n_true": len(true),
                   "best_position": true.index(best)}


def triviaqa(row):
    """References are the aliases only. A repackaged data set calls them `golden_answers`."""
    answer = row.get("answer")
    references = strings(answer, "aliases") if isinstance(answer, dict) else strings(row, "golden_answers")
    return {"id": row.get("question_id", row.get("id")), "question": string(row, "question"), "references": references}


def triviaqa_training(row):
    return {"question": string(row, "question"), "answer": string(row["answer"], "value").lower()}


def popqa(row):
    """`possible_answers` is a JSON list in a string. A repackaged data set has a list, `golden_answers`."""
    name = "golden_answers" if "golden_answers" in row and "possible_answers" not in row else "possible_answers"
    references = field(row, name)
    if isinstance(references, str):
        with suppress(json.JSONDecodeError):
            references = json.loads(references)
    return {"id": row.get("id"), "question": string(row, "question"), "references": strings({name: references}, name)}


def musique_closed(row):
    if row.get("answerable") is False:
        raise ValueError("field 'answerable' is false: this is the full MuSiQue; use the answerable one (musique_ans)")
    aliases = strings(row, "answer_aliases") if row.get("answer_aliases") else []
    return {"id": row.get("id"), "question": string(row, "question"), "references": [string(row, "answer"), *aliases]}


def musique_open(row):
    """The supporting paragraphs only, in file order, each followed by a space."""
    item, paragraphs = musique_closed(row), field(row, "paragraphs")
    passages = [f"Wikipedia Title: {string(paragraph, 'title')}\n{string(paragraph, 'paragraph_text')} "
                for paragraph in paragraphs if paragraph.get("is_supporting")]
    if not passages:
        raise ValueError("field 'paragraphs' holds no supporting paragraph")
    return item | {"passages": "\n\n".join(passages)}


def musique_training(row):
    """Builds the reasoning from the single questions of the data, in which "#1" stands for the first answer."""
    answer, steps, answers = string(row, "answer"), [], []
    for step in row["question_decomposition"]:
        question = re.sub(r"#(\d+)", lambda match: answers[int(match[1]) - 1], string(step, "question"))
        question = question.replace(" >>", ",")
        answers.append(string(step, "answer"))
        steps.append(f"{question}{'' if question.endswith('?') else ':'} {answers[-1]}.")
    return {"question": string(row, "question"), "direct_answer": answer,
            "cot_answer": " ".join([*steps, f"So the answer is: {answer}."])}


def miniature(row):
    """The last line, which asks, is the prompt without its passage. `memory` is the answer of the training texts."""
    prompt, answer = string(row, "prompt"), string(row, "answer")
    memory = None if row.get("memory") is None else string(row, "memory")
    return {"id": row.get("id"), "question": prompt, "without_context": prompt.split("\n")[-1],
            "references": [answer]} | ({} if memory in (None, answer) else {"memory": [memory]})
