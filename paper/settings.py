"""The arguments of a method, from the command line."""

import shlex
from contextlib import suppress
from pathlib import Path

from cli.options import DEFAULTS, LITE, MASKED_ROW, MASKING, OPTIONS, SEED
from heads import choose_heads, find_file, head_file, model_names, similar_models


def method_settings(method, args, model, amateur):
    """The arguments of `baselines.generate` and `score` for a method, from the command line.

    model, amateur: models, or what `cli.read_models` knows of them before their weights."""
    settings = dict(method=method.removesuffix("-lite"))
    for name in (*DEFAULTS, "relative_top", "info_layer", "dola_layers", "repetition_penalty"):
        value = getattr(args, name, None)
        if method in OPTIONS[name].methods and (value is not None or name in DEFAULTS):
            settings[name] = DEFAULTS[name] if value is None else value
    measure = args.measure or "copy"
    if method in MASKING:
        if not args.random_heads:
            check_known(model, args.heads, "--heads", args.model, args)
        seed = SEED if args.seed is None else args.seed
        settings["heads"] = choose_heads(
            model, args.heads, args.num_heads, args.random_heads, seed, measure
        )
    if method in OPTIONS["amateur"].methods:
        if amateur is None:
            raise ValueError(f"{method} needs --amateur M2, a smaller model of the same vocabulary")
        settings["amateur"] = amateur
    if method in LITE:
        check_known(amateur, args.amateur_heads, "--amateur-heads", args.amateur, args)
        settings["amateur_heads"] = choose_heads(
            amateur, args.amateur_heads, args.num_heads, measure=measure
        )
    return settings


def used_head_file(method, args, model):
    """The head file of `method_settings`; None without one.

    model: the one whose heads are masked."""
    if method not in MASKED_ROW or args.random_heads == "published":
        return None
    name = args.amateur_heads if method in LITE else args.heads
    with suppress(FileNotFoundError):  # of random heads
        return find_file(*[name] if name else model_names(model))


def check_known(model, heads, flag, name, args):
    """ValueError without a head file: with related models, and the command that measures scores.

    name: that of the model on the command line."""
    if heads or any(map(head_file, model_names(model))):
        return
    similar = ", ".join(f"{flag} {name}" for name in similar_models(model))
    hints = f"try those of a related model ({similar}), " if similar else ""
    command = ["python", "-m", "heads.detect", "--model", name]
    command += ["--transformers"] * args.transformers
    command += ["--out", f"heads/{Path(model.name).name}.json"]
    raise ValueError(
        f"no head scores are known for {model.name}: {hints}give {flag} FILE, "
        f"or measure them: {shlex.join(command)}"
    )
