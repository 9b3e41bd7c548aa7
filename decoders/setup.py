"""A method with its settings, said once.

`Setup` is the record. OPTIONS says of each setting which methods have it, its option on the command
line, its default, and how names of files and tables call it. A new setting is a field, a row, and
an argument of a decoder."""

from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import NamedTuple

import decore
from decoders import baselines
from heads import MEASURES, choose_heads
from runtime.checks import argument_names, check_number
from runtime.files import one_line

MASKING = ("masked", "decore-static", "decore-entropy")  # mask heads of the model itself
LITE = ("decore-static-lite", "decore-entropy-lite")  # mask heads of the amateur
MASKED_ROW = (*MASKING, *LITE)
CONTRASTED = MASKED_ROW[1:]
ENTROPY = ("decore-entropy", "decore-entropy-lite")
DOLA = ("dola-low", "dola-high")
METHODS = ("greedy", *MASKED_ROW, *baselines.DECODERS)  # of this project, in the order of tables


class Option(NamedTuple):
    """What follows from a setting."""

    methods: tuple  # that have it
    # int, float or str; bool: an option without a value; list: it may be repeated; a tuple: the
    # known values
    kind: object
    help: str
    default: object = None  # if it has an effect
    file: str = ""  # its part of a file's name, if it is not the default
    words: str = ""  # in tables and titles, likewise
    shown: bool = False  # the default too
    listed: bool = False  # its option takes a list
    bare: str | None = None  # the value of its option without a value
    choice: bool | None = None  # True: only of multiple choice; False: only of generated texts


OPTIONS = {
    "heads": Option(
        MASKING,
        str,
        "a file of head scores, a model's name, or the heads to mask, such as 18-6,23-2 "
        "(default: by the model's name)",
    ),
    "num_heads": Option(
        MASKED_ROW,
        int,
        "retrieval heads to mask (default: 10; of a tiny model, an eighth)",
        file="n{}",
        words="N = {}",
        listed=True,
    ),
    "measure": Option(
        MASKED_ROW,
        tuple(MEASURES),
        "how heads are ranked, see heads/README.md",
        default="copy",
        file="{}",
        words="{} heads",
        listed=True,
    ),
    "random_heads": Option(
        MASKING,
        ("uniform", "published"),
        "mask random heads instead of retrieval heads; published: with the paper's sampler",
        file="random-{}-seed{seed}",
        words="random heads {}",
        bare="uniform",
    ),
    "seed": Option(
        MASKING, int, "of random heads", default=1234, words="seed {}", shown=True, listed=True
    ),
    "alpha": Option(
        ("decore-static", "cd", "cad", "ad", "decore-static-lite"),
        float,
        "a constant α",
        default=0.5,
        file="a{}",
        words="α = {}",
        shown=True,
        listed=True,
    ),
    "alpha_cap": Option(CONTRASTED, float, "the largest α", file="cap{}", words="cap {}"),
    "scale_alpha": Option(
        ENTROPY, bool, "α = H / ln V", default=False, file="scaled", words="scaled α"
    ),
    "alpha_rule": Option(
        ENTROPY,
        decore.ALPHA_RULES,
        "entropy: α = H; gain: α = H of the masked model − H, which may be negative",
        default="entropy",
        file="{}",
        words="{} rule",
        listed=True,
    ),
    "mask": Option(
        MASKED_ROW,
        ("output", "query"),
        "output: the paper's equation; query: its runs",
        default="output",
        file="{}",
        words="{} mask",
    ),
    "mask_prompt": Option(
        MASKED_ROW,
        bool,
        "mask heads at every position, those of the prompt included",
        default=False,
        file="mask-prompt",
        words="masked prompt",
        choice=False,  # scoring masks every position
    ),
    "amateur": Option(
        (*LITE, "cd"),
        str,
        "a smaller model of the same vocabulary: decore-entropy becomes decore-entropy-lite",
        file="{}",
        words="amateur {}",
    ),
    "amateur_heads": Option(LITE, str, "those of the amateur, in the forms of --heads"),
    "relative_top": Option(
        ("cd", "cad", *DOLA, "ad"),
        float,
        "drop tokens below this fraction of the largest probability (default: 0.1 for dola and ad, "
        "else 0)",
        file="top{}",
        words="relative top {}",
        choice=False,
    ),
    "info_layer": Option(
        ("ad",),
        int,
        "the information layer",
        default=baselines.INFO_LAYER,
        file="layer{}",
        words="layer {}",
    ),
    "renormalise": Option(
        (*CONTRASTED, "cd", "cad", *DOLA),
        bool,
        "multiple choice: sum the contrasted scores without normalising them",
        default=True,
        file="unnormalised",
        words="not renormalised",
        choice=True,
    ),
    "dola_layers": Option(
        DOLA,
        ("capped", "halves"),
        "capped: of models with more than 40 layers the lowest or uppermost 20, else a half; "
        "halves: a half of any depth (default: as published, capped to generate, halves to score)",
        file="{}",
        words="{} layers",
    ),
    "repetition_penalty": Option(
        DOLA,
        float,
        "tokens already in the text count less; 1.05 in Qwen2's published runs",
        default=1.0,
        file="penalty{}",
        words="repetition penalty {}",
        choice=False,
    ),
    "without_context": Option(("cad",), list, "the prompt without its context"),
}


@dataclass(frozen=True)
class Setup:
    """A method with its settings; equal setups are equal runs. None: the setting has no effect, or
    its value is the decoder's own or the model's."""

    method: str  # with "-lite" if it contrasts with an amateur
    choice: bool = False  # it scores the answers of multiple choice; else it writes texts
    heads: tuple | None = None  # (layer, head) pairs, after `fit`
    num_heads: int | None = None
    measure: str | None = None
    random_heads: str | None = None
    seed: int | None = None
    alpha: float | None = None
    alpha_cap: float | None = None
    scale_alpha: bool | None = None
    alpha_rule: str | None = None
    mask: str | None = None
    mask_prompt: bool | None = None
    amateur: str | None = None  # its name
    relative_top: float | None = None
    info_layer: int | None = None
    renormalise: bool | None = None
    dola_layers: str | None = None
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, method, choice=False, heads=None, **values):
        """A setup with the defaults of settings that are not among the values or None.

        ValueError for a value without effect."""
        for name in SETTINGS:
            value = values.get(name)
            reason = no_effect(name, [method], choice, values.get("random_heads"))
            if value is not None and reason:
                raise ValueError(f"{name} has no effect {reason}")
            # Other defaults of a decoder of one's own are those of its class.
            if value is None and not reason and (method in METHODS or name in CHOOSING):
                values[name] = OPTIONS[name].default
        return cls(method, choice, heads and tuple(heads), **values)

    def fit(self, model, amateur=None, source=None):
        """The setup with the heads to mask in a model.

        model, amateur: or facts of them, as `cli.Checkpoint`. source: of the heads' scores, as the
        name in `choose_heads`; by default the name of the model whose heads are masked."""
        fitted = self
        if has(self.method, "amateur"):
            baselines.check_amateur(self.method, amateur)
            fitted = replace(fitted, amateur=amateur.name)
        if has(self.method, "num_heads"):
            masked = amateur if has(self.method, "amateur_heads") else model
            if self.num_heads is not None:
                check_number(self.num_heads, "num_heads", 1, kind=Integral)
            how = self.num_heads, self.random_heads, self.seed, self.measure or "copy"
            heads = choose_heads(masked, source, *how)
            fitted = replace(fitted, heads=tuple(heads), num_heads=len(heads))
        return fitted

    def arguments(self, amateur=None):
        """The arguments of `baselines.generate` or `score`. amateur: the model, if the setup has
        one."""
        values = {name: getattr(self, name) for name in SETTINGS if name not in CHOOSING}
        values["amateur_heads" if has(self.method, "amateur_heads") else "heads"] = self.heads
        values["amateur"] = amateur if self.amateur else None
        values = {name: value for name, value in values.items() if value is not None}
        return {"method": self.method.removesuffix("-lite")} | values

    # ------------------------------------------------------------------------ in files and tables

    def header(self):
        """Its fields of a run's header."""
        heads = self.heads and [f"{layer}-{head}" for layer, head in self.heads]
        values = {name: getattr(self, name) for name in SETTINGS}
        return {"method": self.method, "heads": heads} | values

    @classmethod
    def from_header(cls, header):
        """The setup of a stored run. ValueError for a damaged header."""
        method = header["method"]
        choice = header["max_new_tokens"] is None
        values = {}
        for name in SETTINGS:
            value = header.get(name)
            if value is None or no_effect(name, [method], choice, header.get("random_heads")):
                continue
            kinds = {int: int, float: (int, float), bool: bool}.get(OPTIONS[name].kind, str)
            if not isinstance(value, kinds) or isinstance(value, bool) and kinds is not bool:
                raise ValueError(f"field {name!r} of its header is {one_line(repr(value), 60)}")
            values[name] = value
        heads = header.get("heads")
        if heads:
            heads = [tuple(map(int, head.split("-"))) for head in heads]
        return cls.of(method, choice, heads, **values)

    @property
    def file_name(self):
        """Its part of the name of a run's file, such as "decore-entropy.n10.cap0.5"."""
        parts = [self.text(name, option.file) for name, option in OPTIONS.items() if option.file]
        return ".".join(filter(None, [self.method, *parts]))

    @property
    def label(self):
        """In tables: "decore-entropy, N = 10, cap 0.5"."""
        return ", ".join([self.method, *self.words().values()])

    def words(self, varied=()):
        """{setting: words} of the settings that are not the defaults, and of those in `varied`."""
        words = {}
        for name in SETTINGS:
            if text := self.text(name, OPTIONS[name].words, name in varied):
                words[name] = text
        return words

    def text(self, name, template, shown=False):
        """A setting in a template; "" for the default unless it is shown."""
        option = OPTIONS[name]
        value = getattr(self, name)
        if value is None or value == option.default and not (shown or option.shown):
            return ""
        if isinstance(value, float):
            value = exact(value)
        elif isinstance(value, str):
            value = Path(value).name  # of an amateur
        return template.format(value, seed=self.seed)


SETTINGS = tuple(field.name for field in fields(Setup)[3:])  # without method, choice and heads
CHOOSING = ("num_heads", "measure", "random_heads", "seed")  # say how heads are chosen


def has(method, name):
    """Whether a method has a setting. A decoder of one's own has those that its class takes; if the
    class is not here, as in a report, all that a header holds."""
    if method in METHODS:
        return method in OPTIONS[name].methods
    if method not in baselines.DECODERS or name == "renormalise":
        return True
    argument = "heads" if name in CHOOSING else name
    return argument in argument_names(baselines.DECODERS[method])


def no_effect(name, methods, choice=None, random_heads=None):
    """Why a setting has no effect on the methods, to be read after "has no effect"; "" if it has
    one.

    choice: None for programs that both generate and score."""
    option = OPTIONS[name]
    if not any(has(method, name) for method in methods):
        return f"on {', '.join(methods)}; it is an option of {', '.join(short(option.methods))}"
    if None not in (choice, option.choice) and choice != option.choice:
        return f"on {'multiple choice' if choice else 'generated texts'}"
    if name == "seed" and not random_heads:
        return "without random_heads"
    if name in ("heads", "measure") and random_heads == "published":
        return "with random_heads published, which draws from all heads"
    return ""


def short(methods):
    """The names that --method takes for these methods."""
    return list(dict.fromkeys(method.removesuffix("-lite") for method in methods))


def exact(number):
    """The shortest text of a float that gives it back: 0.5, 1, 0.1234567."""
    text = f"{number:g}"
    return text if float(text) == number else repr(number)
