"""Finds and reads head files: scores of all heads of a model, or a list of heads.

README.md describes them. The files of the paper's authors are read too: {"layer-head": [one score
per sample]}. This module imports nothing of the project, so it reads JSON and names of snapshots
by itself: a published folder of integrations/ holds a copy, beside the head files that it needs."""

import json
import os
import re
import warnings
from difflib import get_close_matches
from itertools import product
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
HEAD = "(0|[1-9][0-9]*)-(0|[1-9][0-9]*)"  # layer-head, counted from 0
# Measure, as measures.py defines it → field of a head file. The first files had one measure, and
# called it "scores"; with another field, installed copies of this file could not read new ones.
MEASURES = {"copy": "scores", "write": "write", "mass": "mass", "effect": "effect"}


class HeadFileError(ValueError):
    """A head file that is damaged, lacks a measure, or does not fit the model."""


def usual_number(n_layers, n_heads):
    """How many heads are masked by default: 10, at most an eighth of all."""
    return min(10, max(1, n_layers * n_heads // 8))


def best_heads(path, n_layers, n_heads, n=None, measure="copy", names=()):
    """The n best heads of a head file as (layer, head), best first. n: None for all.

    Equal scores keep the order of the file. HeadFileError if it is damaged, lacks the measure, or
    does not fit a model of n_layers layers of n_heads heads. names: of the model; a warning if the
    file was made for a model of another name."""
    content = read_head_file(path)
    scores = scores_of(content, path, measure)
    if scores.keys() != set(product(range(n_layers), range(n_heads))):
        raise HeadFileError(
            f"{path} does not fit the model: {len(scores)} heads instead of {n_layers} layers of "
            f"{n_heads}; use a file made for this model (python -m heads.detect makes one)"
        )
    if n is not None and n not in range(len(scores) + 1):
        raise HeadFileError(f"{n} heads are too many: {path} has {len(scores)}")
    made_for = content.get("model")
    if names and made_for and plain_name(made_for) not in map(plain_name, names):
        warnings.warn(
            f"{path} holds the heads of {made_for}, but the model is {names[0]}", stacklevel=3
        )
    return sorted(scores, key=scores.get, reverse=True)[:n]  # stable, also in reverse


def read_scores(path, measure="copy"):
    """{(layer, head): score} in the order of the file; the mean if the file has a list per head."""
    return scores_of(read_head_file(path), path, measure)


def scores_of(content, path, measure):
    """`read_scores` of what `read_head_file` read."""
    field = MEASURES[measure]
    entries = content.get(field, content if measure == "copy" else None)
    if not isinstance(entries, dict) or not entries:
        raise HeadFileError(
            f'{path}: "{field}" must be an object with one entry "layer-head": score per head'
            + " (python -m heads.detect measures it)" * (measure != "copy")
        )
    scores, lengths = {}, set()
    for key, value in entries.items():
        match = re.fullmatch(HEAD, key)
        values = value if isinstance(value, list) else [value]
        finite = all(type(v) in (int, float) and abs(v) < 1e9 for v in values)  # NaN is not < 1e9
        if not match or not values or not finite:
            raise HeadFileError(
                f'{path}: {key!r} must be a head, "layer-head" counted from 0, and its score a '
                "finite number, or a list of one per sample"
            )
        lengths.add(len(values))
        # The last digit of the mean decides published ties.
        scores[int(match[1]), int(match[2])] = float(np.mean(values))
    if len(lengths) > 1:
        raise HeadFileError(f"{path}: heads have {sorted(lengths)} samples, not one number of them")
    return scores


def find_measures(path):
    """The measures that a head file holds."""
    content = read_head_file(path)
    # The authors' files are the copy scores themselves.
    return [name for name, field in MEASURES.items() if field in content] or ["copy"]


def read_head_file(path):
    """The object in a head file, whose "model", if it has one, is a text."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise HeadFileError(f"{path} must contain a JSON object")
    model = content.get("model", "")
    if not isinstance(model, str):
        raise HeadFileError(f'{path}: "model" must be the name of a model, a text, not {model!r}')
    return content


def listed_heads(name):
    """The heads of a text "18-6,23-2", or of a JSON file [[18, 6], [23, 2]] or ["18-6", "23-2"], as
    listed; [] if the name is neither."""
    if re.fullmatch(f"{HEAD}(,{HEAD})*", str(name)):
        return str(name).split(",")
    if name and Path(name).is_file():
        content = read_json(name)
        return content if isinstance(content, list) else []
    return []


def read_json(path):
    """The value in a JSON file; HeadFileError or OSError with its path."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise HeadFileError(f"{path} is not valid JSON in UTF-8: {error}") from None


def find_file(*names):
    """The first head file among names: of a file, or of a model. FileNotFoundError without one."""
    for name in names:
        path = Path(name) if Path(name).is_file() else head_file(name)
        if path:
            return path
    known = head_files()
    near = get_close_matches(plain_name(names[0]), known, 1)
    hint = f"; did you mean {known[near[0]].stem}?" if near else ""
    raise FileNotFoundError(
        f"{names[0]} is neither a head file nor a model of heads/README.md{hint} "
        "(python -m heads.detect measures a model's scores)"
    )


def head_file(model_name):
    """The file of a model, by the last part of its name or folder; None without one."""
    return head_files().get(plain_name(model_name))


def head_files():
    """{plain name: path} of the head files in scores/ and, before them, of those in this folder:
    your own, or in a published copy all."""
    paths = (*FOLDER.glob("scores/*.json"), *FOLDER.glob("*.json"))
    return {plain_name(path.stem): path for path in paths}


def plain_name(model_name):
    """A model's name without owner, case, "Meta-" and "-hf": names of one model on the hub differ
    in these. Of a folder its own name, of a snapshot in the hub's cache that of the hub."""
    path = Path(os.path.abspath(Path(model_name).expanduser()))
    name = path.name
    if path.parent.name == "snapshots":
        name = path.parent.parent.name.split("--", 2)[-1]  # models--owner--name
    name = name.partition("@")[0]  # a revision
    return name.lower().removeprefix("meta-").removesuffix("-hf")
