"""Keeps the rows whose memorised answer a model knows, or the others, by a stored closed-book run:
greedy decoding of the same questions without their passages."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from paper.runfile import read_run
from paper.tasks import metrics
from runtime.errors import InputError
from runtime.progress import say


def choose_rows(task, items, path, known, model=None):
    """(the items that the run answers with `memory`, or the others if not `known`; a record of the
    choice for a run's header). Items without `memory`, such as those whose passage is right, get
    the run's.

    Rows are matched by their ids, or without them by their questions. model: `cli.models.Facts`,
    which must be the run's; None: not checked. InputError for a run that does not tell."""
    header, lines = read_run(path)
    if problem := problem_of(task, header or {}, lines, model):
        raise InputError(f"{path} is not a closed-book run that tells what is known: {problem}")
    by_id = [item["id"] for item in items] != list(range(len(items)))  # else they are row numbers

    def key_of(row):
        return str(row["id"]) if by_id else row["question"]

    knows, of_run = {}, {}
    for line, values in zip(lines, metrics.compute(task, lines)):
        key = key_of(line)
        knows[key] = knows.get(key, True) and values["memory"] == 1
        of_run[key] = {name: line[name] for name in ("question", "memory")}
    if any(header.get(name) for name in ("limit", "sample", "skip")):  # a part of the rows
        there = [item for item in items if key_of(item) in of_run]
        say(f"{path} lacks {len(items) - len(there):,} rows: left out")
        items = there
    of_items = [(item, of_run.get(key_of(item), {})) for item in items]
    lacking = [item for item, line in of_items if line.get("question") != item["question"]]
    if lacking:
        raise InputError(
            f"{path} lacks {len(lacking):,} of {len(items):,} questions of the data, such as "
            f"{lacking[0]['id']!r}, {lacking[0]['question']!r}: run them with --closed-book first"
        )
    chosen = [line | item for item, line in of_items if knows[key_of(item)] == known]
    words = "known" if known else "unknown"
    say(f"{task.name}: {len(chosen):,} of {len(items):,} rows are {words}")
    if not chosen:
        raise InputError(f"by {path} no row of the data is {words}")
    facts = sorted((str(key), value) for key, value in knows.items())
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return chosen, {"rows": words, "file": Path(path).name.removesuffix(".gz"), "sha256": digest}


def problem_of(task, header, lines, model):
    """Why a run does not tell what a model knows; None if it does."""
    if not lines:
        return "it holds no answers"
    if header.get("task") != task.name or not header.get("closed_book"):
        return "it was not made with --closed-book"
    if not all(line.get("memory") for line in lines):
        return "rows of it have no field 'memory'"
    if header["method"] != "greedy":
        return f"it is of {header['method']}; what a model knows, greedy decoding says"
    if model and Path(header["model"]).name != Path(model.name).name:
        return f"it is of {header['model']}, not of {model.name}"
    with suppress(OSError):  # of weights that are not here yet
        if model and header.get("fingerprint") != model.checkpoint.fingerprint:
            return f"it is of another checkpoint called {model.name}"
    return None
