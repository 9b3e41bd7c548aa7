"""Retrieval-head scores: which heads copy tokens out of the context, and how much; and the heads to mask.

A file holds one score per head of one model: {"model", "n_layers", "n_heads", "samples", "source",
"scores": {"layer-head": mean}}, counted from 0. The form in which the paper's authors publish theirs,
{"layer-head": [one score per sample]}, is read too."""

import random
import re
import warnings
from pathlib import Path

import numpy as np

from runtime.files import read_json

FOLDER = Path(__file__).parent
KEY = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)")


def choose_heads(model, name, n, option="--heads", draw=None, seed=1234):
    """n heads to mask, as (layer, head): the best by the file `name` or, without one, by the file of the model's name.

    draw: "uniform" draws them by the seed from the heads that are no retrieval heads, "published" as the paper's runs
    did. option: what a person calls `name`."""
    layers, heads = model.config.n_layers, model.config.n_heads
    if n == 0:
        return []
    if draw == "published":
        return published_random_heads(n, layers, heads, seed)
    name = name or find_heads(model.name)
    if name is None:
        raise ValueError(f"no head scores are known for {model.name}: give {option} FILE "
                         f"(python -m heads.detect --model {model.name} --out FILE finds them)")
    ranked = load_heads(name, layers, heads, model.name)
    if not 0 < n <= len(ranked):
        raise ValueError(f"--num-heads {n}: {model.name} has {len(ranked)} heads")
    return random_heads(ranked, n, seed) if draw else ranked[:n]


def random_heads(ranked, n, seed=1234, most=100):
    """n heads that are no retrieval heads: drawn uniformly from all but the best of `ranked`, which lists every head.

    The best `most` (half of them where the model has fewer than twice as many heads) are left out whatever n is. So a
    seed's sets are nested, and none of them meets the n best for n up to `most`."""
    best = max(n, min(most, len(ranked) // 2))
    if n > len(ranked) - best:
        raise ValueError(f"{n} random heads are too many: without the {best} best, {len(ranked) - best} are left")
    heads = sorted(ranked[best:])
    random.Random(seed).shuffle(heads)
    return heads[:n]


def published_random_heads(n, n_layers, n_heads, seed=1234):
    """The published runs' sampler: layer and head are one draw of two from a shuffled list of the layers' numbers.

    Retrieval heads are not left out. The list may hold head numbers that the model does not have; to draw one is a
    ValueError here."""
    if n > n_layers ** 2:
        raise ValueError(f"the published sampler knows {n_layers ** 2} heads; {n} asked for")
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

    name: a file, or the name of a model known here. ValueError when the file does not fit the model's shape; a mere
    warning when it was made for a model of another name: a fine-tuned model may well use the heads of its base."""
    path = find_file(name)
    scores = load_scores(path)
    made_for = read_json(path).get("model")
    if model_name and isinstance(made_for, str) and last_part(made_for) != last_part(model_name):
        warnings.warn(f"{path} holds the heads of {made_for}, but the model is {model_name}", stacklevel=2)
    allowed = f"the model has {n_layers} layers of {n_heads} heads, 0-0 to {n_layers - 1}-{n_heads - 1}"
    advice = "use a head file made for this model (python -m heads.detect makes one)"
    outside = [head for head in scores if head[0] >= n_layers or head[1] >= n_heads]
    if outside:
        raise ValueError(f"{path}: head {label(outside[0])} is outside the model; {allowed}; {advice}")
    missing = [(i, j) for i in range(n_layers) for j in range(n_heads) if (i, j) not in scores]
    if missing:
        raise ValueError(f"{path}: no score for head {label(missing[0])}" + (len(missing) > 1) * " and others"
                         + f" ({len(scores)} heads in the file); {allowed}; {advice}")
    return sorted(scores, key=scores.get, reverse=True)     # stable, also in reverse


def load_scores(name):
    """{(layer, head): score} in the order of the file. The mean where the file gives a list per head."""
    path = find_file(name)
    content = read_json(path)
    scores = content.get("scores", content)
    if not isinstance(scores, dict) or not scores:
        raise ValueError(f'{path}: "scores" must be an object with one entry "layer-head": score per head')
    means = {parse(key, path): mean(value, key, path) for key, value in scores.items()}
    lengths = {len(value) for value in scores.values() if isinstance(value, list)}
    if len(lengths) > 1:
        raise ValueError(f"{path}: heads have {min(lengths)} to {max(lengths)} samples; every run scores every head")
    check_shape(content, means, path)
    return means


def find_heads(model_name):
    """The file of a known model, by the last part of its name or folder, in any case; None for an unknown one."""
    return next((path for path in known() if path.stem.lower() == last_part(model_name)), None)


def known():
    return sorted(FOLDER.glob("*.json"))


def last_part(model_name):
    return Path(str(model_name)).name.lower()


def find_file(name):
    if Path(name).is_file():
        return Path(name)
    path = None if str(name).endswith(".json") else find_heads(name)
    if path is None:
        raise FileNotFoundError(f"{name} is neither a head file nor a model whose heads are known here ("
                                + ", ".join(path.stem for path in known())
                                + "); python -m heads.detect finds the heads of any model")
    return path


def parse(key, path):
    match = KEY.fullmatch(key)
    if not match:
        raise ValueError(f'{path}: {key!r} is no head; keys read "layer-head", counted from 0, such as "15-30"')
    return int(match[1]), int(match[2])


def mean(value, key, path):
    """The mean of a list as numpy takes it: published rankings contain ties that its last digit decides."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"{path}: head {key} has no samples; no run succeeded, so there is nothing to rank")
    if not all(type(v) in (int, float) and abs(v) < 1e9 for v in values):       # NaN is not below anything either
        raise ValueError(f"{path}: the score of head {key} must be a finite number or a list of them")
    return float(np.mean(values))


def check_shape(content, scores, path):
    """n_layers and n_heads, where a file states them, must be those of its own scores."""
    found = {"n_layers": 1 + max(layer for layer, _ in scores), "n_heads": 1 + max(head for _, head in scores)}
    for name, number in found.items() if "scores" in content else ():
        if content.get(name, number) != number:
            raise ValueError(f"{path}: {name} is {content[name]!r}, its scores are those of {number}; "
                             "is the file whole?")


def label(head):
    return f"{head[0]}-{head[1]}"
