"""The arguments of a method, from the command line."""

from pathlib import Path

from cli.options import DEFAULTS, LITE, MASKING, MINIATURE, OPTIONS, SEED
from heads import choose_heads


def method_settings(method, args, model, amateur):
    """The arguments of `decoders.generate` and `score` for a method, from the command line."""
    settings = dict(method=method.removesuffix("-lite"))
    for name in (*DEFAULTS, "relative_top", "info_layer", "dola_layers", "repetition_penalty"):
        value = getattr(args, name, None)
        if method in OPTIONS[name][0] and (value is not None or name in DEFAULTS):
            settings[name] = DEFAULTS[name] if value is None else value
    n = args.num_heads or default_num_heads(model)
    if method in MASKING:
        settings["heads"] = choose_heads(
            model,
            args.heads or bundled_heads(args.model),
            n,
            draw=args.random_heads,
            seed=SEED if args.seed is None else args.seed,
        )
    if method in OPTIONS["amateur"][0]:
        settings["amateur"] = amateur
    if method in LITE:
        settings["amateur_heads"] = choose_heads(
            amateur, args.amateur_heads or bundled_heads(args.amateur), n, "--amateur-heads"
        )
    return settings


def default_num_heads(model):
    return min(10, max(1, model.config.n_layers * model.config.n_heads // 8))


def bundled_heads(name):
    """The head scores of the bundled amateur, recognised by its path.

    None: those by the model's name."""
    return "miniature-amateur" if Path(name).resolve() == MINIATURE / "amateur" else None
