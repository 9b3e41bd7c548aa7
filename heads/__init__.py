"""Retrieval-head scores: which heads copy tokens out of the context, and the choice of heads to mask.

A head file holds one score per head of one model: {"model", "n_layers", "n_heads", "samples", "measure", "source",
"scores": {"layer-head": mean}}, counted from 0. The form in which the paper's authors publish theirs,
{"layer-head": [one score per sample]}, is read too. README.md lists the files of this folder."""

import random
import re
import warnings
from pathlib import Path

import numpy as np

from runtime.files import read_json

FOLDER = Path(__file__).parent
KEY = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)")
VARIANT = re.compile(r"base|chat|instruct|it|hf|gradient|v0\.\d|\d+[km]")       # in names of models that share a base


def choose_heads(model, name, n, option="--heads", draw=None, seed=1234):
    """n heads to mask, as (layer, head): the best by the file `name`, or by the file of the model's own name.

    draw: "uniform" draws heads at random that are not retrieval heads, "published" as the paper's runs did. option:
    the command-line option that sets `name`."""
    layers, heads = model.config.n_layers, model.config.n_heads
    if n == 0:
        return []
    if draw == "published":
        return published_random_heads(n, layers, heads, seed)
    name = name or find_heads(model.name)
    if name is None:
        relatives = [f"{option} {path.stem}" for path in related(model.name, layers, heads)]
        hint = f"try those of a related model ({', '.join(relatives)}), or " if relatives else ""
        raise ValueError(f"no head scores are known for {model.name}: {hint}give {option} FILE "
                         f"(python -m heads.detect --model {model.name} --out FILE makes one)")
    ranked = load_heads(name, layers, heads, model.name)
    if not 0 < n <= len(ranked):
        raise ValueError(f"--num-heads {n}: {model.name} has {len(ranked)} heads")
    return random_heads(ranked, n, seed) if draw else ranked[:n]


def random_heads(ranked, n, seed=1234, most=100):
    """n random heads, drawn uniformly from all but the best of `ranked`, which lists every head.

    The best `most` (half of the heads, if there are fewer than twice as many) are left out for every n. So the sets of
    one seed are nested, and for n up to `most` none of them holds one of the n best."""
    best = max(n, min(most, len(ranked) // 2))
    if n > len(ranked) - best:
        raise ValueError(f"{n} random heads are too many: without the {best} best, {len(ranked) - best} are left")
    heads = sorted(ranked[best:])
    random.Random(seed).shuffle(heads)
    return heads[:n]


def published_random_heads(n, n_layers, n_heads, seed=1234):
    """The published runs' sampler: layer and head are one draw of two from a shuffled list of the layers' numbers.

    Retrieval heads are not left out. ValueError if it draws a head number that the model does not have."""
    if n > n_layers ** 2:
        raise ValueError(f"--num-heads {n}: the published sampler draws at most {n_layers ** 2} heads")
    rng, heads = random.Random(seed), []
    numbers = list(range(n_layers))
    rng.shuffle(numbers)
    while len(heads) < n:
        head = tuple(rng.choices(numbers, k=2))
        if head not in heads:
            heads.append(head)
    outside = [head for head in heads if head[1] >= n_heads]
    if outside:
        raise ValueError(f"the published sampler drew head {label(outside[0])}, but a layer has {n_heads} heads: it "
                         "takes head numbers from the number of layers; use uniform random heads")
    return heads


def load_heads(name, n_layers, n_heads, model_name=None):
    """Every head of a model as (layer, head), best first; equal scores keep the order of the file.

    name: a file, or the name of a model with a file here. ValueError if the file does not fit the model's shape; a
    warning if it was made for a model of another name, since fine-tuned models often use the heads of their base."""
    path = find_file(name)
    scores = load_scores(path)
    made_for = read_json(path).get("model")
    if model_name and isinstance(made_for, str) and plain_name(made_for) != plain_name(model_name):
        warnings.warn(f"{path} holds the heads of {made_for}, but the model is {model_name}", stacklevel=2)
    heads = {(layer, head) for layer in range(n_layers) for head in range(n_heads)}
    wrong = sorted(heads ^ scores.keys())
    if wrong:
        problem = "has no score" if wrong[0] in heads else "is outside the model"
        raise ValueError(f"{path}: head {label(wrong[0])} {problem}; the model has {n_layers} layers of {n_heads} "
                         "heads: use a head file made for this model (python -m heads.detect makes one)")
    return sorted(scores, key=scores.get, reverse=True)     # stable, also in reverse


def load_scores(name):
    """{(layer, head): score} in the order of the file; the mean if the file has a list per head."""
    path = find_file(name)
    content = read_json(path)
    scores = content.get("scores", content)
    if not isinstance(scores, dict) or not scores:
        raise ValueError(f'{path}: "scores" must be an object with one entry "layer-head": score per head')
    return dict(read_score(key, value, path) for key, value in scores.items())


def read_score(key, value, path):
    """One entry of a file → (layer, head), score. Means are numpy's: its last digit decides ties in published files."""
    match, values = KEY.fullmatch(key), value if isinstance(value, list) else [value]
    if not match:
        raise ValueError(f'{path}: {key!r} is not a head; keys are "layer-head", counted from 0, such as "15-30"')
    if not values or not all(type(v) in (int, float) and abs(v) < 1e9 for v in values):         # NaN is not < 1e9
        raise ValueError(f"{path}: the score of head {key} must be a finite number, or a list of one per sample")
    return (int(match[1]), int(match[2])), float(np.mean(values))


def find_file(name):
    """The head file `name`, or the file of the model of that name. FileNotFoundError without one."""
    if Path(name).is_file():
        return Path(name)
    path = None if str(name).endswith(".json") else find_heads(name)
    if path is None:
        raise FileNotFoundError(f"{name} is neither a head file nor a model with head scores: heads/README.md lists "
                                "those models, and python -m heads.detect finds the heads of any other")
    return path


def find_heads(model_name):
    """The file of a model, by the last part of its name or folder; None without one."""
    return next((path for path in known() if plain_name(path.stem) == plain_name(model_name)), None)


def related(model_name, n_layers, n_heads):
    """Files of models of the same family and shape, such as the base of an instruct model."""
    return [path for path in known() if family(path.stem) == family(model_name)
            and (n_layers, n_heads) == tuple(read_json(path).get(field) for field in ("n_layers", "n_heads"))]


def known():
    return sorted(FOLDER.glob("*.json"))


def plain_name(model_name):
    """A model's name without owner, case, "Meta-" and "-hf": names of one model on the hub differ in these."""
    return Path(str(model_name)).name.lower().removeprefix("meta-").removesuffix("-hf")


def family(model_name):
    """The words of a model's name that its base, chat and long-context variants share."""
    name = re.sub(r"^llama-3\.[13]-", "llama-3-", plain_name(model_name))      # heads of 3 and 3.1 agree: README.md
    return [word for word in name.split("-") if not VARIANT.fullmatch(word)]


def label(head):
    return f"{head[0]}-{head[1]}"
