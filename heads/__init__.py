"""Retrieval heads: the best ones of a head file, and the choice of heads to mask.

`load_heads` is for users: a model → its heads, best first. Programs choose by `choose_heads`: the
best heads, listed or random ones, and their file. `find_heads` finds the file of a model. reader.py
knows files and names, not models: parts of integrations/ have it alone. README.md describes head
files and lists those of scores/."""

import random
import warnings
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, partial
from itertools import product
from pathlib import Path

from heads.reader import (
    FOLDER,  # noqa: F401
    MEASURES,  # noqa: F401
    best_heads,
    find_file,
    head_file,
    head_files,
    listed_heads,
    plain_name,
    read_head_file,
    usual_number,
)
from runtime.checks import parse_heads
from runtime.errors import InputError
from runtime.files import checkpoint_name


def load_heads(model, n=None, name=None, measure="copy"):
    """The heads of a model as (layer, head), best first: all of them, or the n best.

    model: a Transformer, or any object with its `name` and `config`. name: a head file, or the name
    of another model with a file here; by default that of this model. measure: see MEASURES. Equal
    scores keep the order of the file. InputError if the file does not fit the model. Warns if it
    was made for a model of another name: fine-tuned models often use the heads of their base."""
    c = model.config
    path, names = find_heads(model, name)
    path = path or find_file(model.name)  # which says what is known
    return best_heads(path, c.n_layers, c.n_heads, n, measure, names)


def choose_heads(model, name=None, n=None, draw=None, seed=1234, measure="copy"):
    """n heads to mask, as (layer, head), which the model has: the best as in `load_heads`, or
    random ones; and the file that ranks or lists them, or None.

    name: also a list, as in `listed_heads`. n: by default 10, at most an eighth of all. draw:
    "uniform" draws heads that are not retrieval heads, "others" from all heads but those that
    would be masked, and both from all heads, with a warning, if there are no scores; "published"
    draws as the paper's runs did."""
    c = model.config
    listed = listed_heads(name)
    if listed:
        if n is not None or draw or measure != "copy":
            raise InputError(
                f"{name} lists the heads to mask: a number, a measure or a draw has no effect"
            )
        return parse_heads(listed, model), Path(name) if Path(name).is_file() else None
    if n is None:
        n = usual_number(c.n_layers, c.n_heads)
    if draw == "published":
        return published_random_heads(n, c.n_layers, c.n_heads, seed), None
    path, names = find_heads(model, name)
    rank = partial(best_heads, n_layers=c.n_layers, n_heads=c.n_heads, measure=measure, names=names)
    if not draw:
        path = path or find_file(model.name)
        return rank(path, n=n), path
    if path:
        best = n if draw == "others" else 100
        return random_heads(rank(path), n, seed, best), path
    warnings.warn(
        f"no head scores are known for {model.name}: random heads are drawn from all heads, "
        "retrieval heads included",
        stacklevel=2,
    )
    heads = list(product(range(c.n_layers), range(c.n_heads)))
    if n > len(heads):
        raise InputError(f"{n} random heads are too many: {model.name} has {len(heads)}")
    return random.Random(seed).sample(heads, n), None


def random_heads(ranked, n, seed=1234, best=100):
    """Draws n heads uniformly from all but the best of `ranked`, which lists every head.

    best: so many are left out, at least n and at most half of all. So the sets of one seed are
    nested for n up to it."""
    half = len(ranked) // 2
    if n > half:
        raise InputError(f"{n} random heads are too many: at most {half} are not among the n best")
    heads = sorted(ranked[max(n, min(best, half)) :])
    random.Random(seed).shuffle(heads)
    return heads[:n]


def published_random_heads(n, n_layers, n_heads, seed=1234):
    """Draws n heads as the published runs did: layer and head are one draw of two from the shuffled
    layer numbers.

    Retrieval heads are not left out. InputError if it draws a head number that the model does not
    have."""
    if n > n_layers**2:
        raise InputError(f"{n} heads are too many: the published sampler draws {n_layers**2}")
    rng = random.Random(seed)
    numbers = list(range(n_layers))
    rng.shuffle(numbers)
    heads = []
    while len(heads) < n:
        head = tuple(rng.choices(numbers, k=2))
        if head[1] >= n_heads:
            raise InputError(
                f"the published sampler drew head {head[1]}, but a layer has {n_heads} heads: it "
                "takes head numbers from the number of layers; use uniform random heads"
            )
        if head not in heads:
            heads.append(head)
    return heads


def find_heads(model, name=None):
    """The head file of a model, or the one that a name names; and the model's names, of which the
    first with a file here counts. None in place of the file if there is none of these.

    The names: its own; of a link to a folder, that of its target; those of the GGUF file that it
    was converted from; or, if there are no heads of these, that of the same weights."""
    names = [model.name]
    checkpoint = getattr(model, "checkpoint", None)
    if checkpoint:
        names.append(checkpoint_name(checkpoint.folder.resolve()))
        names += checkpoint.read("config.json").get("gguf_names", [])
        if not any(map(head_file, names)):
            names += same_weights(checkpoint)
    if name:
        return find_file(name), names
    with suppress(FileNotFoundError):
        return find_file(*names), names
    return None, names


@cache
def same_weights(checkpoint):
    """The names of head files that were measured with the weights of this checkpoint."""
    try:
        weights = checkpoint.fingerprint["weights"]
    except (OSError, ValueError):  # not downloaded yet, or damaged: loading them says so
        return []
    names = []
    for path in head_files().values():
        facts = read_head_file(path).get("facts", {})
        if facts.get("fingerprint", {}).get("weights") == weights:
            names.append(path.stem)
    return names


def similar_models(model):
    """Names of at most three models of the same shape with a head file here, the nearest first."""
    shape = model.config.n_layers, model.config.n_heads
    alike = {}
    for name, path in head_files().items():
        content = read_head_file(path)
        if (content.get("n_layers"), content.get("n_heads")) == shape:
            alike[name] = path.stem
    return [alike[name] for name in get_close_matches(plain_name(model.name), alike)]
