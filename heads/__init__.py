"""Retrieval-head scores: which heads copy tokens out of the context, and the choice of heads to mask.

A head file holds one score per head of one model: {"model", "n_layers", "n_heads", "samples", "measure", "source",
"scores": {"layer-head": mean}}, counted from 0. The files of the paper's authors are read too:
{"layer-head": [one score per sample]}. README.md lists the files of this folder."""

import random
import re
import warnings
from itertools import product
from pathlib import Path

import numpy as np

from runtime.files import read_json

FOLDER = Path(__file__).parent
KEY = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)")


def choose_heads(model, name, n, option="--heads", draw=None, seed=1234):
    """Returns n heads to mask, as (layer, head): the best by the file `name`, or by the file of the model's name.

    draw: "uniform" draws heads at random that are not retrieval heads, "published" as the paper's runs did. option:
    the command-line option that sets `name`."""
    shape = model.config.n_layers, model.config.n_heads
    if draw == "published":
        return published_random_heads(n, *shape, seed)
    name = name or find_heads(model.name)
    if name is None:
        relatives = ", ".join(f"{option} {stem}" for stem in related(model.name, shape))
        hint = f"try those of a related model ({relatives}), or " if relatives else ""
        raise ValueError(f"no head scores are known for {model.name}: {hint}give {option} FILE "
                         f"(python -m heads.detect --model {model.name} --out FILE makes one)")
    ranked = load_heads(name, *shape, model.name)
    if not 0 <= n <= len(ranked):
        raise ValueError(f"--num-heads {n}: {model.name} has {len(ranked)} heads")
    return random_heads(ranked, n, seed) if draw else ranked[:n]


def random_heads(ranked, n, seed=1234, most=100):
    """Draws n heads uniformly from all but the best of `ranked`, which lists every head.

    The best `most` (half of the heads, if there are fewer than twice as many) are left out for every n. So the sets of
    one seed are nested, and for n up to `most` none of them contains one of the n best."""
    best = max(n, min(most, len(ranked) // 2))
    if n > len(ranked) - best:
        raise ValueError(f"{n} random heads are too many: without the {best} best, {len(ranked) - best} are left")
    heads = sorted(ranked[best:])
    random.Random(seed).shuffle(heads)
    return heads[:n]


def published_random_heads(n, n_layers, n_heads, seed=1234):
    """Draws n heads as the published runs did: layer and head are one draw of two from the shuffled layer numbers.

    Retrieval heads are not left out. ValueError if it draws a head number that the model does not have."""
    if n > n_layers ** 2:
        raise ValueError(f"--num-heads {n}: the published sampler draws at most {n_layers ** 2} heads")
    rng, heads = random.Random(seed), []
    numbers = list(range(n_layers))
    rng.shuffle(numbers)
    while len(heads) < n:
        head = tuple(rng.choices(numbers, k=2))
        if head[1] >= n_heads:
            raise ValueError(f"the published sampler drew head {head[1]} of layer {head[0]}, but a layer has {n_heads} "
                             "heads: it takes head numbers from the number of layers; use uniform random heads")
        if head not in heads:
            heads.append(head)
    return heads


def load_heads(name, n_layers, n_heads, model_name=None):
    """Every head of a model as (layer, head), best first; equal scores keep the order of the file.

    name: a file, or the name of a model with a file in this folder. ValueError if the file does not fit the model's
    shape. Warns if it was made for a model of another name: fine-tuned models often use the heads of their base."""
    path, heads = find_file(name), set(product(range(n_layers), range(n_heads)))
    scores, made_for = load_scores(path), read_json(path).get("model")
    if model_name and made_for and plain_name(made_for) != plain_name(model_name):
        warnings.warn(f"{path} holds the heads of {made_for}, but the model is {model_name}", stacklevel=2)
    if scores.keys() != heads:
        layer, head = min(scores.keys() ^ heads)
        raise ValueError(f"{path} has {len(scores)} heads, the model {n_layers} layers of {n_heads} heads; only one "
                         f"has head {layer}-{head}: use a file made for this model (heads.detect makes one)")
    return sorted(scores, key=scores.get, reverse=True)     # stable, also in reverse


def load_scores(name):
    """{(layer, head): score} in the order of the file; the mean if the file has a list per head."""
    path = find_file(name)
    content = read_json(path)
    entries, scores = content.get("scores", content), {}
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f'{path}: "scores" must be an object with one entry "layer-head": score per head')
    for key, value in entries.items():
        match, values = KEY.fullmatch(key), value if isinstance(value, list) else [value]
        finite = all(type(v) in (int, float) and abs(v) < 1e9 for v in values)      # NaN is not < 1e9
        if not match or not values or not finite:
            raise ValueError(f'{path}: {key!r} must be a head, "layer-head" counted from 0, and its score a finite '
                             "number, or a list of one per sample")
        scores[int(match[1]), int(match[2])] = float(np.mean(values))   # its last digit decides published ties
    return scores


def find_file(name):
    """The head file `name`, or the file of the model of that name. FileNotFoundError without one."""
    path = Path(name) if Path(name).is_file() else find_heads(name)
    if path is None:
        raise FileNotFoundError(f"{name} is neither a head file nor a model of heads/README.md; "
                                "python -m heads.detect finds the heads of any other model")
    return path


def find_heads(model_name):
    """The file of a model, by the last part of its name or folder; None without one."""
    return known().get(plain_name(model_name))


def related(model_name, shape):
    """Names of files for models of the same shape whose name continues this one, or the reverse: base and chat."""
    name = plain_name(model_name)
    files = [path for other, path in known().items() if name.startswith(other) or other.startswith(name)]
    return [path.stem for path in files if (read_json(path).get("n_layers"), read_json(path).get("n_heads")) == shape]


def known():
    """The head files of this folder, by plain name."""
    return {plain_name(path.stem): path for path in sorted(FOLDER.glob("*.json"))}


def plain_name(model_name):
    """A model's name without owner, case, "Meta-" and "-hf": names of one model on the hub differ in these."""
    return Path(str(model_name)).name.lower().removeprefix("meta-").removesuffix("-hf")
