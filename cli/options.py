"""Command-line options: argument types, the options of models and methods, and from the options of
methods their setups."""

import argparse
import importlib.util
import itertools
import json
import math
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path

from decoders.setup import (
    CHOOSING,
    FLAGS,
    METHODS,
    OPTIONS,
    SETTINGS,
    USERS,
    MethodSpec,
    Setup,
    flag,
    is_ours,
    settings_of,
)
from heads import find_heads, similar_models
from runtime.errors import InputError
from runtime.files import json_bytes

DECODER = dict(
    action="append",
    default=[],
    metavar="FILE.py:CLASS",
    help="a method of your own, see docs/own-data.md; --method takes its name in small letters",
)
MINIATURE = Path(__file__).resolve().parents[1] / "miniature"


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else [*args]
        for text in args:
            if re.search("[\ud800-\udfff]", text):
                self.error(f"{text!r} has bytes that are not UTF-8")
            if re.fullmatch("--[a-z-]+=--", text):  # Python 3.11 makes it an empty list
                self.error(f"{text}: '--' is not a value")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        raise InputError(f"{message}; see --help")


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
        range = f" in [{low}, {high}]" * ((low, high) != (-math.inf, math.inf))
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a {name} number{range}")

    return parse


positive = number(int, 1, 2**31 - 1)


def comma_list(parse):
    """argparse type: values separated by commas, without repetitions."""
    return lambda text: list(dict.fromkeys(parse(part) for part in text.split(",")))


def one_of(known, what):
    """argparse type: a known name. what: of what, for the error."""

    def parse(text):
        if text not in known:
            hint = did_you_mean(text, known)
            raise argparse.ArgumentTypeError(
                f"{what} {text!r} is unknown{hint}; known: {', '.join(known)}"
            )
        return text

    return parse


def did_you_mean(text, known):
    """The names that begin so, else the nearest one, as the end of a clause; nothing if none is
    near."""
    nearest = [name for name in known if name.startswith(text)] or get_close_matches(text, known, 1)
    return f", did you mean {' or '.join(nearest)}?" if nearest and text else ""


def json_object(text):
    """argparse type: a JSON object."""
    try:
        value = json.loads(text) | {}  # TypeError, which argparse reports, if it is not an object
        json_bytes(value)
        return value
    except RecursionError:
        raise argparse.ArgumentTypeError("the object is nested too deeply") from None


# -------------------------------------------------------------------------- options of the programs


def add_model_arguments(p):
    add = p.add_argument
    add(
        "--model",
        default=str(MINIATURE),
        help="folder or hub id, also owner/name@revision (default: the miniature)",
    )
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
    """Add --method and the options that the methods use, except those of `exclude`. The value of an
    option that is not on the command line is None.

    single: --method and the options that take a list take one value."""
    method = one_of(methods, "method")
    p.add_argument(
        "--method",
        type=method if single else comma_list(method),
        default="decore-entropy",
        metavar="M" if single else "M[,M…]",
        help=f"{', '.join(methods)} (default: decore-entropy)",
    )
    for name, option in OPTIONS.items():
        if not set(USERS[name]) & set(methods) or name in exclude:
            continue
        text = f"{', '.join(USERS[name])}: {option.help}"
        if option.default and option.kind is not bool:
            text += f" (default: {option.default})"
        p.add_argument(FLAGS[name], dest=name, help=text, **parsing(name, option, single))


def parsing(name, option, single):
    """How an option of methods is parsed, as arguments of add_argument."""
    if option.kind is bool:
        return dict(action="store_const", const=not option.default)
    if option.kind is list:
        return dict(action="append")
    if option.kind is str:
        return {}
    if isinstance(option.kind, tuple):
        parse, metavar = one_of(option.kind, name.replace("_", " ")), "|".join(option.kind)
    else:
        parse, metavar = number(option.kind), "N"
    if option.listed and not single:
        parse, metavar = comma_list(parse), f"{metavar}[,…]"
    bare = dict(nargs="?", const=option.bare) if option.bare else {}
    return dict(type=parse, metavar=metavar) | bare


def parse_with_decoders(make_parser, argv=None):
    """The options of a program with methods of one's own, which --method and help then know.

    make_parser(): the program's parser."""
    first = parser(None, add_help=False)
    first.add_argument("--decoder", **DECODER)
    decoders = {}
    for text in first.parse_known_args(argv)[0].decoder:
        name = add_decoder(text)
        if name in decoders:
            raise InputError(f"--decoder {decoders[name]} and {text} are both called {name}")
        decoders[name] = text
    args = make_parser().parse_args(argv)
    for name, text in decoders.items():
        if name not in args.method:
            raise InputError(f"--decoder {text} has no effect: add {name} to --method")
    return args


def add_decoder(text):
    """Add the decoder that "FILE.py:CLASS" names to METHODS, under the name of its class in small
    letters → this name."""
    import decore  # imports torch

    file, _, name = text.rpartition(":")
    if not Path(file).is_file() or not file.endswith(".py"):
        raise InputError(f"--decoder {text}: give FILE.py:CLASS, a file and a class in it")
    spec = importlib.util.spec_from_file_location(f"decoder_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for `inspect` and dataclasses
    spec.loader.exec_module(module)
    decoder = getattr(module, name, None)
    if not isinstance(decoder, type):
        raise InputError(f"--decoder {text}: {file} has no class {name!r}")
    if not issubclass(decoder, decore.Method):
        raise InputError(
            f"--decoder {text}: {name} is not a record; derive it from DeCoRe or Baseline, see "
            "CONTRIBUTING.md"
        )
    names = [field.name for field in fields(decoder)]
    for field in fields(decoder):
        absent = field.default is MISSING and field.default_factory is MISSING
        if absent and field.name not in ("heads", "amateur"):
            raise InputError(f"--decoder {text}: field {field.name!r} needs a default")
    if is_ours(name.lower()):
        raise InputError(f"--decoder {text}: {name.lower()} is a method already; rename the class")
    options = {*names, "renormalise", *(CHOOSING if "heads" in names else ())}
    if issubclass(decoder, decore.DeCoRe):
        options.remove("amateur")
    METHODS[name.lower()] = MethodSpec(decoder, tuple(options), file=Path(file))
    return name.lower()


# ------------------------------------------------------------------------- from options to setups


def full_names(methods, amateur):
    """The names of methods in outputs: with an amateur, decore-entropy is called
    decore-entropy-lite."""
    return [f"{name}-lite" if amateur and f"{name}-lite" in METHODS else name for name in methods]


def setups(args, methods, choice=False):
    """Yields the setups of the command line: for each method, every combination of the values of
    lists. choice: whether they score answers."""
    for method in methods:
        lists = {}
        for name in settings_of(method, choice, args.random_heads):
            value = getattr(args, name, None)
            if value is not None:
                lists[name] = value if isinstance(value, list) else [value]
        for values in itertools.product(*lists.values()):
            yield Setup.of(method, choice, **dict(zip(lists, values)))


def labels(setups):
    """A label for each setup of a sweep: its method and the settings that vary among the setups of
    the method."""
    labels = []
    for setup in setups:
        others = [other for other in setups if other.method == setup.method]
        varied = [n for n in SETTINGS if len({getattr(other, n) for other in others}) > 1]
        words = setup.words(varied)
        labels.append(", ".join([setup.method, *(words[n] for n in varied if n in words)]))
    return labels


def fit(setup, args, model, amateur=None):
    """`Setup.with_heads`, by the head scores that the command line names. InputError if the method
    does not fit the model. model, amateur: or their `Facts`."""
    options = METHODS[setup.method].options
    if "amateur" in options and amateur is None:
        raise InputError(
            f"{setup.method} needs --amateur M2, a smaller model of the same vocabulary"
        )
    option, masked, name = "heads", model, args.model
    if "amateur_heads" in options:
        option, masked, name = "amateur_heads", amateur, args.amateur
    source = getattr(args, option, None)
    if option in options and not setup.random_heads:
        check_known(masked, source, flag(option), name, args)
    setup = setup.with_heads(model, amateur, source)
    setup.record(amateur).check(model)
    return setup


def say_measures(fitted, args):
    """Print by which measure of which head file heads are ranked, if the command line does not say
    both: a file that was found by a name or by weights, a measure other than copy. fitted:
    setups."""
    given = [getattr(args, name, None) for name in ("heads", "amateur_heads")]
    ranked = dict.fromkeys((setup.measure or "copy", setup.head_file) for setup in fitted)
    for measure, path in ranked:
        if path is None:
            continue
        if measure != "copy" or str(path) not in given:
            print(f"heads are ranked by {measure}, of {path}", file=sys.stderr)


def check_known(model, heads, option, name, args):
    """InputError without a head file: with related models, and the command that measures scores.

    name: that of the model on the command line."""
    if heads or find_heads(model)[0]:
        return
    similar = ", ".join(f"{option} {name}" for name in similar_models(model))
    hints = f"try those of a related model ({similar}), " if similar else ""
    command = ["python", "-m", "heads.detect", "--model", name]
    command += ["--transformers"] * args.transformers
    command += ["--out", f"heads/scores/{Path(model.name).name}.json"]
    raise InputError(
        f"no head scores are known for {model.name}: {hints}give {option} FILE, "
        f"or measure them: {shlex.join(command)}"
    )


def refuse_unused(args, reasons):
    """InputError for an option that is given and has no effect. reasons: {option without effect:
    why, to be read after "--option has no effect"}."""
    for name, reason in reasons.items():
        absent = [None] if name in OPTIONS else [None, False]
        if getattr(args, name, None) not in absent:
            raise InputError(f"{flag(name)} has no effect {reason}")


def check_options(args, methods, seeded=False):
    """InputError for an option that none of the methods uses.

    seeded: --seed has another effect too."""
    random = flag("random_heads")
    for name in OPTIONS:
        if not any(name in METHODS[method].options for method in methods):
            reason = f"on {', '.join(methods)}; it is an option of {', '.join(USERS[name])}"
        elif name == "seed" and not args.random_heads:
            reason = f"without {random}"
        elif name in ("heads", "measure") and args.random_heads == "published":
            reason = f"with {random} published, which draws from all heads"
        else:
            continue
        if not (seeded and name == "seed"):
            refuse_unused(args, {name: reason})
