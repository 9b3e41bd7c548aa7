"""Retrieval-head scores: which heads copy tokens of the context, and the choice of heads to mask.

README.md describes head files and lists those of this folder. The files of the paper's authors are
read too: {"layer-head": [one score per sample]}."""

import random
import re
import warnings
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np

from runtime.files import checkpoint_name, read_json, read_text

FOLDER = Path(__file__).parent
KEY = re.compile(r"(0|[1-9]\d*)-(0|[1-9]\d*)")
# Measure, as detect.py defines it → field of a head file.
MEASURES = {"copy": "scores", "write": "write", "mass": "mass"}


def load_heads(model, n=None, name=None, measure="copy"):
    """The heads of a model as (layer, head), best first: all of them, or the n best.

    model: a Transformer, or any object with its `name` and `config`. name: a head file, or the name
    of another model with a file here; by default that of this model. measure: see MEASURES. Equal
    scores keep the order of the file. ValueError if the file does not fit the model. Warns if it
    was made for a model of another name: fine-tuned models often use the heads of their base."""
    c = model.config
    names = model_names(model)
    path = find_file(*[name] if name else names)
    content = read_json(path)
    scores = scores_in(content, path, measure)
    if scores.keys() != set(product(range(c.n_layers), range(c.n_heads))):
        raise ValueError(
            f"{path} does not fit {model.name}: {len(scores)} heads instead of {c.n_layers} "
            f"layers of {c.n_heads}; use a file made for this model (heads.detect makes one)"
        )
    if n is not None and not 0 <= n <= len(scores):
        raise ValueError(f"{n} heads are too many: {model.name} has {len(scores)}")
    made_for = content.get("model")
    if made_for and plain_name(made_for) not in map(plain_name, names):
        warnings.warn(
            f"{path} holds the heads of {made_for}, but the model is {model.name}", stacklevel=2
        )
    return sorted(scores, key=scores.get, reverse=True)[:n]  # stable, also in reverse


def choose_heads(model, name=None, n=None, draw=None, seed=1234, measure="copy"):
    """n heads to mask, as (layer, head): the best as in `load_heads`, or random ones.

    name: also a list, as in `listed_heads`. n: by default 10, at most an eighth of all. draw:
    "uniform" draws heads that are not retrieval heads, or from all heads, with a warning, if
    there are no scores; "published" draws as the paper's runs did."""
    c = model.config
    listed = listed_heads(name)
    if listed:
        from runtime.checks import check_heads  # imports torch

        if n is not None or draw or measure != "copy":
            raise ValueError(
                f"{name} lists the heads to mask: a number, a measure or a draw has no effect"
            )
        return check_heads(listed, model)
    if n is None:
        n = min(10, max(1, c.n_layers * c.n_heads // 8))
    if draw == "published":
        return published_random_heads(n, c.n_layers, c.n_heads, seed)
    if draw is None:
        return load_heads(model, n, name, measure)
    if name or any(map(head_file, model_names(model))):
        return random_heads(load_heads(model, None, name, measure), n, seed)
    warnings.warn(
        f"no head scores are known for {model.name}: random heads are drawn from all heads, "
        "retrieval heads included",
        stacklevel=2,
    )
    heads = list(product(range(c.n_layers), range(c.n_heads)))
    if n > len(heads):
        raise ValueError(f"{n} random heads are too many: {model.name} has {len(heads)}")
    return random.Random(seed).sample(heads, n)


def listed_heads(name):
    """The heads of a text "18-6,23-2", or of a JSON file [[18, 6], [23, 2]] or ["18-6", "23-2"]; []
    if the name is neither."""
    if re.fullmatch(rf"{KEY.pattern}(,{KEY.pattern})*", str(name)):
        return name.split(",")
    if name and Path(name).is_file() and read_text(name).lstrip().startswith("["):
        return read_json(name, list)
    return []


def random_heads(ranked, n, seed=1234):
    """Draws n heads uniformly from all but the best of `ranked`, which lists every head.

    The 100 best are left out for every n; of fewer than 200 heads, the best half. So the sets of
    one seed are nested for n up to 100."""
    half = len(ranked) // 2
    if n > half:
        raise ValueError(f"{n} random heads are too many: at most {half} are not among the n best")
    heads = sorted(ranked[max(n, min(100, half)) :])
    random.Random(seed).shuffle(heads)
    return heads[:n]


def published_random_heads(n, n_layers, n_heads, seed=1234):
    """Draws n heads as the published runs did: layer and head are one draw of two from the shuffled
    layer numbers.

    Retrieval heads are not left out. ValueError if it draws a head number that the model does not
    have."""
    if n > n_layers**2:
        raise ValueError(f"{n} heads are too many: the published sampler draws {n_layers**2}")
    rng = random.Random(seed)
    numbers = list(range(n_layers))
    rng.shuffle(numbers)
    heads = []
    while len(heads) < n:
        head = tuple(rng.choices(numbers, k=2))
        if head[1] >= n_heads:
            raise ValueError(
                f"the published sampler drew head {head[1]}, but a layer has {n_heads} heads: it "
                "takes head numbers from the number of layers; use uniform random heads"
            )
        if head not in heads:
            heads.append(head)
    return heads


def load_scores(name, measure="copy"):
    """{(layer, head): score} in the order of the file; the mean if the file has a list per head."""
    path = find_file(name)
    return scores_in(read_json(path), path, measure)


def scores_in(content, path, measure):
    """As `load_scores`, of the content of a head file."""
    field = MEASURES[measure]
    entries = content.get(field, content if measure == "copy" else None)
    if not isinstance(entries, dict) or not entries:
        raise ValueError(
            f'{path}: "{field}" must be an object with one entry "layer-head": score per head'
            + " (python -m heads.detect measures it)" * (measure != "copy")
        )
    scores, lengths = {}, set()
    for key, value in entries.items():
        match = KEY.fullmatch(key)
        values = value if isinstance(value, list) else [value]
        finite = all(type(v) in (int, float) and abs(v) < 1e9 for v in values)  # NaN is not < 1e9
        if not match or not values or not finite:
            raise ValueError(
                f'{path}: {key!r} must be a head, "layer-head" counted from 0, and its score a '
                "finite number, or a list of one per sample"
            )
        lengths.add(len(values))
        # The last digit of the mean decides published ties.
        scores[int(match[1]), int(match[2])] = float(np.mean(values))
    if len(lengths) > 1:
        raise ValueError(f"{path}: heads have {sorted(lengths)} samples, not one number of them")
    return scores


def model_names(model):
    """A model's names: its own; of a link to a folder, that of its target; those of the GGUF file
    that it was converted from; or, if there are no heads of these, that of the same weights."""
    folder = getattr(model, "folder", None)
    if not folder:
        return [model.name]
    stated = read_json(folder / "config.json").get("gguf_names", [])
    names = [model.name, checkpoint_name(folder.resolve()), *stated]
    return names if any(map(head_file, names)) else names + same_weights(folder)


@cache
def same_weights(folder):
    """The names of head files that were measured with the weights of this checkpoint."""
    from runtime.weights import fingerprint  # imports torch

    weights = fingerprint(folder)["weights"]
    names = []
    for path in head_files().values():
        facts = read_json(path).get("facts", {})
        if facts.get("fingerprint", {}).get("weights") == weights:
            names.append(path.stem)
    return names


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
    """{plain name: path} of the head files here."""
    return {plain_name(path.stem): path for path in FOLDER.glob("*.json")}


def similar_models(model):
    """Names of at most three models of the same shape with a head file here, the nearest first."""
    shape = model.config.n_layers, model.config.n_heads
    alike = {}
    for name, path in head_files().items():
        content = read_json(path)
        if (content.get("n_layers"), content.get("n_heads")) == shape:
            alike[name] = path.stem
    return [alike[name] for name in get_close_matches(plain_name(model.name), alike)]


def plain_name(model_name):
    """A model's name without owner, case, "Meta-" and "-hf": names of one model on the hub differ
    in these."""
    return Path(checkpoint_name(model_name)).name.lower().removeprefix("meta-").removesuffix("-hf")
