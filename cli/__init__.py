"""What the command lines share: the way into every program, their arguments, and which method uses which option."""

import argparse
import errno
import json
import math
import os
import re
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIATURE = ROOT / "miniature"
DTYPES = ("float32", "float16", "bfloat16")
SMALL = 1_000_000_000                                   # parameters up to which a CPU computes in float32 by default
TINY = 20_000_000                                       # parameters up to which a CPU computes with one thread
ADVICE = {errno.ENOSPC: "free some space and run the command again", errno.ENOENT: "check the spelling",
          errno.EACCES: "change its permissions or name another", errno.EISDIR: "give a file, this is a folder",
          errno.ENOTDIR: "a part of the path is a file where a folder is needed", errno.EROFS: "name another place",
          errno.EEXIST: "it exists already: name another"}


# --------------------------------------------------------------------------------------------------- into every program


def run(main):
    """Call main → exit status. User errors print one line to stderr and give 2, Ctrl-C gives 130.

    With torchrun rank 0 alone speaks; another rank's error is heard only where rank 0 has none."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:                # closed by whoever started this process
            setattr(sys, stream, open(os.devnull, mode))
    name, stdout, stderr = Path(sys.argv[0]).name, sys.stdout, sys.stderr
    muted = os.environ.get("RANK", "0") != "0" and os.environ["RANK"].isdecimal()
    if muted:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    warnings.showwarning = lambda message, *_: print(f"{name}: warning: {message}", file=sys.stderr)
    try:
        try:
            check_environment()
            main()
            leave_group()
        finally:
            sys.stdout.flush()                          # here, where a reader that is gone is no surprise
        return 0
    except BrokenPipeError:
        drop(stdout)
        return 0
    except KeyboardInterrupt:
        print(file=stderr)
        return 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
    finally:
        sys.stdout, sys.stderr = stdout, stderr
    if muted:
        time.sleep(10)                                  # torchrun ends this one first where rank 0 failed too
    print(f"{name}: " + (f"rank {os.environ['RANK']}: " if muted else "") + f"error: {message}", file=stderr)
    try:
        stdout.flush()
    except OSError:
        drop(stdout)
    parallel = sys.modules.get("torch.distributed")
    if parallel and parallel.is_available() and parallel.is_initialized():
        stderr.flush()
        os._exit(2)                                     # threads of a broken group may abort a process that tears down
    return 2


def check_environment():
    """torchrun's variables, where they are set, are numbers that fit together."""
    found = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not re.fullmatch("[0-9]{1,9}", value):
            raise ValueError(f"{name}={value!r} in the environment is no whole number: start with torchrun, "
                             f"or unset {name}")
        found[name] = int(value)
    if "WORLD_SIZE" in os.environ and found["RANK"] >= found["WORLD_SIZE"]:
        raise ValueError(f"RANK={found['RANK']} in the environment is not below WORLD_SIZE={found['WORLD_SIZE']}: "
                         "start with torchrun, or unset both")


def explain(error):
    """One line for a mistake of a person or a limit of the machine. None for a mistake of ours: its traceback helps."""
    torch = sys.modules.get("torch")
    text = " ".join(str(error).split()) or type(error).__name__
    if out_of_memory(error):
        return "out of memory: use fewer or shorter prompts, bfloat16, or more devices (torchrun)"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply to be read"
    if isinstance(error, UnicodeError) and hasattr(error, "object"):
        piece = error.object[error.start:error.start + 1]
        return (f"{piece!r} at place {error.start} of a text cannot be read or written as {error.encoding}: "
                "give UTF-8, or set PYTHONIOENCODING=utf-8")
    if isinstance(error, OSError) and error.strerror and error.errno in ADVICE:
        return f"{error.filename or 'writing'}: {error.strerror[0].lower()}{error.strerror[1:]}; {ADVICE[error.errno]}"
    distributed = torch.distributed.DistError if torch and torch.distributed.is_available() else ()
    return text if isinstance(error, (ValueError, OSError, ImportError)) or isinstance(error, distributed) else None


def out_of_memory(error):
    """Whether a device, or the host, had no room."""
    torch, signs = sys.modules.get("torch"), ("out of memory", "DefaultCPUAllocator")
    return (isinstance(error, MemoryError) or torch and isinstance(error, torch.OutOfMemoryError)
            or isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs))


def leave_group():
    if "runtime.parallel" in sys.modules:               # else nobody has loaded torch
        sys.modules["runtime.parallel"].leave()


def drop(stream):
    """What is left in a stream that nobody reads goes nowhere, instead of into an error at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):                       # no file at all
        pass


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; see --help")

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        for number, text in enumerate(args, 1):
            check_text(text, f"argument {number}")
        return super().parse_known_args(args, namespace)


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Every default is shown, but for flags and where the help tells it in words."""

    def _get_help_string(self, action):
        told = "(default" in action.help or action.default in (None, False, True, [])
        return action.help if told else super()._get_help_string(action)


def parser(description, **more):
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name}" if spec and Path(sys.argv[0]).suffix == ".py" else sys.argv[0]
    return Parser(description=description, allow_abbrev=False, formatter_class=Formatter, prog=f"python {program}",
                  **more)


# ---------------------------------------------------------------------------------------------------- values and texts


def number(kind, low=-math.inf, high=math.inf):
    """What reads a finite number of a kind, int or float, from low to high."""
    what = "whole number" if kind is int else "finite number"
    span = f" from {low}" * (low > -math.inf) + f" to {high}" * (high < math.inf)

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or abs(value) == math.inf:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no {what}{span}")
        return value
    return parse


positive = number(int, 1, 2**31 - 1)


def listed(parse):
    """What reads several values with commas between them, each once."""
    return lambda text: list(dict.fromkeys(parse(part) for part in text.split(",")))


def method(known):
    """What reads the name of a method, and says where those are that a program does not know."""
    def parse(text):
        if text in known:
            return text
        hint = " here: baselines.py and evaluate.py know it" if text in BASELINES else ""
        hint = f": it is {text.removesuffix('-lite')} with --amateur M2" if text in LITE else hint
        raise argparse.ArgumentTypeError(f"method {text!r} is unknown{hint}; known: {', '.join(known)}")
    return parse


def device(text):
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; known: auto, cpu, cuda, cuda:1, …, mps")
    return text


def json_object(text):
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no JSON object, such as '{{\"enable_thinking\": false}}'")
    return value


def token_ids(text):
    try:
        ids = [int(i) for i in text.split(",")]
    except ValueError:
        ids = [-1]
    if not all(0 <= i < 2**31 for i in ids):            # what tokenizers can decode; the model knows fewer
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no list of token ids: give numbers with commas between "
                                         "them, such as 1,2,3")
    return ids


def check_text(text, place):
    """Half of a surrogate pair is what Python makes of a byte that is not UTF-8; nothing can encode it."""
    at = next((i for i, sign in enumerate(text) if "\ud800" <= sign <= "\udfff"), None)
    if at is not None:
        raise ValueError(f"{place} is not UTF-8 text: {text[at]!r} at character {at + 1}")
    return text


def read_text(path):
    """A file's text; "-" is standard input."""
    content, name = (sys.stdin.buffer.read(), "standard input") if path == "-" else (Path(path).read_bytes(), path)
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name} is not UTF-8 text: byte 0x{content[error.start]:02x} in line {line}") from None


# -------------------------------------------------------------------------------------------------------------- options

HEADS = ("masked", "decore-static", "decore-entropy")           # mask heads of the model itself
LITE = ("decore-static-lite", "decore-entropy-lite")            # contrast with an amateur, whose heads are masked
BASELINES = ("cd", "cad", "dola-low", "dola-high", "ad")
DECORE = (*HEADS[1:], *LITE)

# Option → the methods that use it, and how it is read. Unset is None, so that we know what was given.
OPTIONS = {
    "heads": (HEADS, dict(
        metavar="FILE", help="head scores, or a model's name (default: by the model's name)")),
    "num_heads": (HEADS + LITE, dict(
        type=number(int, 0, 2**31 - 1), metavar="N",
        help="retrieval heads to mask (default: 10; of a tiny model, an eighth of its heads)")),
    "random_heads": (HEADS, dict(
        nargs="?", const="uniform", choices=("uniform", "published"),
        help="mask random heads instead of retrieval heads; published: with the paper's sampler")),
    "seed": (HEADS, dict(type=number(int), metavar="S", help="of random heads (default: 1234)")),
    "alpha": (("decore-static", "cd", "cad", "ad", "decore-static-lite"), dict(
        type=number(float), metavar="A", help="α where it is a constant (default: 0.5)")),
    "alpha_cap": (DECORE, dict(type=number(float, 0), metavar="X", help="α = min(α, X)")),
    "scale_alpha": (("decore-entropy", "decore-entropy-lite"), dict(
        action="store_true", default=None, help="α = H / ln V")),
    "mask": (HEADS + LITE, dict(
        choices=("output", "query"), help="output: the paper's equation; query: its runs (default: output)")),
    "mask_prompt": (HEADS + LITE, dict(
        action="store_true", default=None, help="mask heads at every position, the prompt's too")),
    "amateur": ((*LITE, "cd"), dict(
        metavar="M2", help="a smaller model of the same vocabulary: decore-entropy becomes decore-entropy-lite")),
    "amateur_heads": (LITE, dict(metavar="FILE", help="its head scores (default: by its name)")),
    "relative_top": (BASELINES, dict(
        type=number(float, 0, 1), metavar="X", help="tokens below X times the likeliest one's probability are out; "
        "0: none (default: 0.1 for dola and ad, 0 for cd and cad)")),
    "info_layer": (("ad",), dict(type=positive, metavar="L", help="the information layer (default: 24)")),
    "dola_layers": (("dola-low", "dola-high"), dict(
        choices=("transformers", "halves"),
        help="transformers: of models with more than 40 layers the lowest or uppermost 20, else a half; halves: a half "
        "of any depth (default: as published, transformers to generate, halves to score)")),
    "repetition_penalty": (("dola-low", "dola-high"), dict(
        type=number(float, 0), metavar="X", help="tokens that the text holds already count less; 1.05 in Qwen2's "
        "published runs (default: 1)")),
    "without_context": (("cad",), dict(action="append", metavar="TEXT", help="the prompt without its context")),
    "without_context_ids": (("cad",), dict(
        action="append", type=token_ids, metavar="1,2,3", help="the same as token ids")),
}
SWEPT = ("num_heads", "alpha", "seed")                          # lists with commas in evaluate.py
DEFAULTS = dict(alpha=0.5, alpha_cap=None, scale_alpha=False, mask="output", mask_prompt=False)
SEED = 1234


def flag(name):
    return "--" + name.replace("_", "-")


def add_model_arguments(p):
    p.add_argument("--model", metavar="M", default=str(MINIATURE), help="folder or hub id (default: the miniature)")
    p.add_argument("--device", type=device, default="auto", metavar="D",
                   help="auto, cpu, cuda, cuda:1, …, mps (default: cuda where there is one, else cpu)")
    p.add_argument("--dtype", default="auto", choices=("auto", *DTYPES),
                   help="auto: the checkpoint's; on a CPU float32 for models below a billion parameters")
    p.add_argument("--template-args", type=json_object, metavar="JSON",
                   help="arguments of the chat template, such as '{\"enable_thinking\": false}'")


def add_method_arguments(p, methods, several=False, leave_out=()):
    """The options that those methods use. several: lists with commas, for sweeps."""
    for name, (users, how) in OPTIONS.items():
        if name in leave_out or not {method.removesuffix("-lite") for method in users} & set(methods):
            continue
        if several and name in SWEPT:
            how = how | dict(type=listed(how["type"]), metavar=f"{how['metavar']}[,{how['metavar']}…]")
        only = "" if set(users) >= set(HEADS) or set(users) >= set(LITE) else ", ".join(users) + ": "
        p.add_argument(flag(name), **how | dict(help=only + how["help"]))


def variants(methods, amateur):
    """With an amateur DeCoRe's methods are others, and have names of their own."""
    return [f"{method}-lite" if amateur and method in HEADS[1:] else method for method in methods]


def check_options(args, methods, seeded=False):
    """ValueError for an option that was given and has no effect on any of the methods. seeded: --seed has another."""
    for name, (users, _) in OPTIONS.items():
        if getattr(args, name, None) is not None and not set(users) & set(methods):
            hint = "the amateur's are --amateur-heads" if name == "heads" and args.amateur else \
                f"it is an option of {', '.join(users)}"
            raise ValueError(f"{flag(name)} has no effect on {', '.join(methods)}; {hint}")
    if args.amateur_heads and not args.amateur:
        raise ValueError("--amateur-heads has no effect without --amateur")
    if args.seed is not None and not args.random_heads and not seeded:
        raise ValueError("--seed has no effect without --random-heads")
    if args.heads and args.random_heads == "published":
        raise ValueError("--heads has no effect with --random-heads published, which draws from all heads")
    numbers = args.num_heads if isinstance(args.num_heads, list) else [args.num_heads]
    masked = [method for method in methods if method in HEADS]
    if 0 in numbers and masked:
        raise ValueError(f"--num-heads 0 masks nothing, so {masked[0]} would be greedy: use --method greedy")


def contrast(method, args, model, amateur=None):
    """The arguments of `baselines.generate` and `score` for a method, as the command line gave them."""
    from heads import choose_heads
    how = dict(method=method.removesuffix("-lite"))
    for name in (*DEFAULTS, "relative_top", "info_layer", "dola_layers", "repetition_penalty"):
        value = getattr(args, name, None)
        value = DEFAULTS.get(name) if value is None else value
        if method in OPTIONS[name][0] and (value is not None or name in DEFAULTS):
            how[name] = value
    if method in HEADS:
        how["heads"] = choose_heads(model, args.heads or ours(args.model), args.num_heads, draw=args.random_heads,
                                    seed=SEED if args.seed is None else args.seed)
    if method in OPTIONS["amateur"][0]:
        how["amateur"] = amateur
    if method in LITE:
        how["amateur_heads"] = choose_heads(amateur, args.amateur_heads or ours(args.amateur), args.num_heads,
                                            "--amateur-heads")
    return how


def ours(name):
    """The name under which `heads` knows a model of this project, which goes by its place; else None."""
    return {MINIATURE: "miniature", MINIATURE / "amateur": "miniature-amateur"}.get(Path(name).resolve())


# -------------------------------------------------------------------------------------------------------------- loading


def load_models(args, shard=None):
    """(model, tokenizer, amateur or None) that the arguments name."""
    model, tokenizer = load_model(args.model, args, shard)
    choose_threads(model)
    if not args.amateur:
        return model, tokenizer, None
    amateur, other = load_model(args.amateur, args, shard)
    if other.vocabulary() != tokenizer.vocabulary():
        raise ValueError(f"{args.model} and {args.amateur} have different vocabularies; contrasting needs one")
    return model, tokenizer, amateur


def benchmark_template_args(tokenizer, given):
    """Arguments of the chat template in benchmarks: as given, and thinking is off unless asked for. None: none."""
    quiet = tokenizer.has_chat_template and tokenizer.template_reads("enable_thinking")
    return ({"enable_thinking": False} if quiet else {}) | (given or {}) or None


def load_model(name, args, shard=None):
    """A model and its tokenizer on the device and in the dtype asked for. shard: None joins torchrun's ranks."""
    import torch

    from model import Transformer
    from tokenizer import Tokenizer
    tokenizer = Tokenizer.load(name)
    device, cards = args.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if cards else "cpu"
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= cards:
        raise ValueError(f"--device {device}: there is no CUDA device here; use --device cpu" if not cards else
                         f"--device {device}: the CUDA devices here are 0 to {cards - 1}")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: there is no Apple GPU here; use --device cpu")
    dtype = getattr(torch, args.dtype, None) or (torch.float32 if device == "cpu" and is_small(name) else None)
    model = Transformer.load(name, device=device, dtype=dtype, shard=shard)
    if model.device.type == "cuda" and torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.Stream(model.device))          # the default stream cannot be recorded
    return model, tokenizer


def is_small(name):
    from runtime.config import Config
    from runtime.weights import checkpoint_folder
    c = Config.from_checkpoint(checkpoint_folder(name, weights=False))
    return c.vocab_size * c.d_model + c.n_layers * c.d_model * (3 * c.d_ff + 3 * c.n_heads * c.head_dim) < SMALL


def choose_threads(model):
    """One thread for a tiny model, where the user has not chosen: several wait for each other longer than they compute,
    on a busy machine ten times as long."""
    import torch
    tiny = sum(p.numel() for p in model.parameters()) < TINY
    if tiny and model.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def default_heads(model):
    return min(10, max(1, model.config.n_layers * model.config.n_heads // 8))
