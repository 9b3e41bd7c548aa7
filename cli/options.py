"""Command-line options: argument types, and which method uses which option."""

import argparse
import itertools
import json
import math
import re
import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

MINIATURE = Path(__file__).resolve().parents[1] / "miniature"


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):
        for text in sys.argv[1:] if args is None else args:
            if re.search("[\ud800-\udfff]", text):
                self.error(f"{text!r} has bytes that are not UTF-8")
            if re.fullmatch("--[a-z-]+=--", text):  # Python 3.11 makes it an empty list
                self.error(f"{text}: '--' is not a value")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        raise ValueError(f"{message}; see --help")


def parser(description, **options):
    """A parser. description: its first line is shown; None, as __doc__ under -OO, for nothing."""
    first = (description or "").partition("\n")[0]
    return Parser(description=first, allow_abbrev=False, **options)


# ----------------------------------------------------------------------------------- argparse types


def number(kind, low=-math.inf, high=math.inf):
    """argparse type: a finite int or float in [low, high]."""

    def parse(text):
        with suppress(ValueError):
            value = kind(text)
            if low <= value <= high and abs(value) < math.inf:
                return value
        name = "whole" if kind is int else "finite"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a {name} number in [{low}, {high}]")

    return parse


positive = number(int, 1, 2**31 - 1)


def comma_list(parse):
    """argparse type: values separated by commas, without repetitions."""
    return lambda text: list(dict.fromkeys(parse(part) for part in text.split(",")))


def method_name(known, what="method"):
    """argparse type: the name of a method, or of something else."""

    def parse(text):
        if text not in known:
            hint = did_you_mean(text, known)
            raise argparse.ArgumentTypeError(
                f"{what} {text!r} is unknown{hint}; known: {', '.join(known)}"
            )
        return text

    return parse


def did_you_mean(text, known):
    """The nearest name, as the end of a clause; nothing if none is near."""
    nearest = get_close_matches(text, known, 1)
    return f", did you mean {nearest[0]}?" if nearest else ""


def json_object(text):
    """argparse type: a JSON object."""
    try:
        return json.loads(text) | {}  # TypeError, which argparse reports, if it is not an object
    except RecursionError:
        raise argparse.ArgumentTypeError("the object is nested too deeply") from None


# ------------------------------------------------------------------------------- options of methods

MASKING = ("masked", "decore-static", "decore-entropy")  # mask heads of the model itself
LITE = ("decore-static-lite", "decore-entropy-lite")  # mask heads of the amateur
MASKED_ROW = (*MASKING, *LITE)
DOLA = ("dola-low", "dola-high")


class Option:
    """An option of methods. arguments: of add_argument."""

    def __init__(self, *methods, **arguments):
        self.methods = methods
        self.arguments = arguments


# The value of an option that is not on the command line is None or False.
OPTIONS = {
    "heads": Option(
        *MASKING,
        help="a file of head scores, a model's name, or the heads to mask, such as 18-6,23-2 "
        "(default: by the model's name)",
    ),
    "num_heads": Option(
        *MASKED_ROW,
        type=positive,
        help="retrieval heads to mask (default: 10; of a tiny model, an eighth)",
    ),
    "measure": Option(
        *MASKED_ROW,
        type=method_name(("copy", "write", "mass"), "measure"),
        metavar="M",
        help="copy, write or mass: how heads are ranked, see heads/README.md (default: copy, the "
        "paper's)",
    ),
    "random_heads": Option(
        *MASKING,
        nargs="?",
        const="uniform",
        choices=("uniform", "published"),
        help="mask random heads instead of retrieval heads; published: with the paper's sampler",
    ),
    "seed": Option(*MASKING, type=number(int), help="of random heads (default: 1234)"),
    "alpha": Option(
        "decore-static",
        "cd",
        "cad",
        "ad",
        "decore-static-lite",
        type=number(float),
        help="a constant α (default: 0.5)",
    ),
    "alpha_cap": Option(*MASKED_ROW[1:], type=number(float, 0), help="the largest α"),
    "scale_alpha": Option(
        "decore-entropy", "decore-entropy-lite", action="store_true", help="α = H / ln V"
    ),
    "mask": Option(
        *MASKED_ROW,
        choices=("output", "query"),
        help="output: the paper's equation; query: its runs (default: output)",
    ),
    "mask_prompt": Option(
        *MASKED_ROW,
        action="store_true",
        help="mask heads at every position, those of the prompt included",
    ),
    "amateur": Option(
        *LITE,
        "cd",
        help="a smaller model of the same vocabulary: decore-entropy becomes decore-entropy-lite",
    ),
    "amateur_heads": Option(*LITE, help="those of the amateur, in the forms of --heads"),
    "relative_top": Option(
        "cd",
        "cad",
        *DOLA,
        "ad",
        type=number(float, 0, 1),
        help="drop tokens below this fraction of the largest probability (default: 0.1 for dola "
        "and ad, else 0)",
    ),
    "info_layer": Option("ad", type=positive, help="the information layer (default: 24)"),
    "dola_layers": Option(
        *DOLA,
        choices=("capped", "halves"),
        help="capped: of models with more than 40 layers the lowest or uppermost 20, else a half; "
        "halves: a half of any depth (default: as published, capped to generate, halves to score)",
    ),
    "repetition_penalty": Option(
        *DOLA,
        type=number(float, 0),
        help="tokens already in the text count less; 1.05 in Qwen2's published runs (default: 1)",
    ),
    "without_context": Option("cad", action="append", help="the prompt without its context"),
}
# Options that take a list → label.
SWEPT = {"measure": "heads by", "num_heads": "N", "alpha": "α", "seed": "seed"}
DEFAULTS = dict(alpha=0.5, alpha_cap=None, scale_alpha=False, mask="output", mask_prompt=False)
SEED = 1234


def flag(name):
    return "--" + name.replace("_", "-")


def add_model_arguments(p):
    add = p.add_argument
    add("--model", default=str(MINIATURE), help="folder or hub id (default: the miniature)")
    add(
        "--device",
        default="auto",
        help="auto, cpu, cuda, cuda:1, …, mps (default: cuda if there is a GPU, else cpu). On a "
        "busy machine OMP_NUM_THREADS=1 is faster than several threads",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="(default: the checkpoint's; on a CPU float32 for models below a billion parameters)",
    )
    add(
        "--transformers",
        action="store_true",
        help="load models with transformers: any causal language model, quantized ones too",
    )
    add(
        "--device-map",
        choices=("auto", "balanced", "balanced_low_0", "sequential"),
        help="with --transformers: spread the layers over devices (needs accelerate)",
    )
    add(
        "--eos",
        type=comma_list(number(int, 0)),
        metavar="ID[,ID…]",
        help="ids that end an answer (default: the checkpoint's)",
    )
    add(
        "--template-args",
        type=json_object,
        help="arguments of the chat template, such as '{\"enable_thinking\": false}'",
    )


def add_method_arguments(p, methods, single=False, exclude=()):
    """Add --method and the options that the methods use, except those of `exclude`.

    single: --method and the options of SWEPT take one value, not a list."""
    method = method_name(methods)
    p.add_argument(
        "--method",
        type=method if single else comma_list(method),
        default="decore-entropy",
        metavar="M" if single else "M[,M…]",
        help=f"{', '.join(methods)} (default: decore-entropy)",
    )
    for name, option in OPTIONS.items():
        users = named(option.methods)
        if not set(users) & set(methods) or name in exclude:
            continue
        arguments = dict(option.arguments)
        if name in SWEPT and not single:
            metavar = arguments.get("metavar", "N")
            arguments["metavar"] = f"{metavar}[,{metavar}…]"
            arguments["type"] = comma_list(arguments["type"])
        arguments["help"] = f"{', '.join(users)}: {arguments['help']}"
        p.add_argument(flag(name), **arguments)


def single_values(method, args):
    """Yields (label, options) for each combination of the values of SWEPT: options with one value
    each, and the method with the values that vary."""
    lists = [method in OPTIONS[name].methods and getattr(args, name) or [None] for name in SWEPT]
    for values in itertools.product(*lists):
        label = method
        for short, value, choices in zip(SWEPT.values(), values, lists):
            label += f" {short} {value}" * (len(choices) > 1)
        yield label, argparse.Namespace(**vars(args) | dict(zip(SWEPT, values)))


def with_flags(message):
    """An error of the library, with options in place of its arguments."""
    names = "|".join(name for name in OPTIONS if "_" in name)
    return re.sub(rf"\b(?:ids_)?({names})\b", lambda match: flag(match[1]), message)


def named(methods):
    """The names that --method takes for these methods."""
    return list(dict.fromkeys(method.removesuffix("-lite") for method in methods))


def full_names(methods, amateur):
    """The names of methods in outputs: with an amateur, decore-entropy is called
    decore-entropy-lite."""
    return [f"{method}-lite" if amateur and method in MASKING[1:] else method for method in methods]


def refuse_unused(args, reasons):
    """ValueError for an option that is given and has no effect. reasons: {option without effect:
    why, to be read after "--option has no effect"}."""
    for name, reason in reasons.items():
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise ValueError(f"{flag(name)} has no effect {reason}")


def check_options(args, methods, seeded=False):
    """ValueError for an option that none of the methods uses.

    seeded: --seed has another effect too."""
    for name, option in OPTIONS.items():
        if not set(option.methods) & set(methods):
            users = ", ".join(named(option.methods))
            refuse_unused(args, {name: f"on {', '.join(methods)}; it is an option of {users}"})
    if not args.random_heads and not seeded:
        refuse_unused(args, {"seed": "without --random-heads"})
    if args.random_heads == "published":
        reason = "with --random-heads published, which draws from all heads"
        refuse_unused(args, {"heads": reason, "measure": reason})
