"""Checks of the arguments of `generate` and `score`. Each InputError says what to pass instead."""

import math
import numbers
from dataclasses import MISSING, fields
from operator import itemgetter

from runtime.errors import ArgumentError, InputError, one_line
from runtime.values import KNOWN, NUMBERS, check_name, check_number

SHORT = 4096  # contexts of fewer tokens get a hint to a model that anybody can load
LONGER = (
    ", or use a model that reads more, such as Qwen/Qwen2.5-3B-Instruct (not gated, 6.2 GB in "
    "bfloat16, head scores included)"
)


def parse_generation(model, prompts, method, max_new_tokens, eos_ids, min_new_tokens, best, draft):
    """The arguments of `generate` → prompts as lists of ints, end ids as a set, and the maximum
    number of new tokens of each text."""
    methods = getattr(method, "methods", [method])  # each makes a text of each prompt
    for one in methods:
        check_method(model, one)
    others = [amateur_of(method, model) for method in methods]
    prompts = parse_prompts(model, prompts)
    for other in others:
        parse_prompts(other, prompts)
    check_number(max_new_tokens, "max_new_tokens", 1, math.inf, numbers.Integral)
    check_number(min_new_tokens, "min_new_tokens", 0, max_new_tokens, numbers.Integral)
    known = min(reader.config.vocab_size for reader in (model, *others))
    check_number(best, "best", 0, known, numbers.Integral)
    check_draft(draft, method)
    limits = []
    for other in others:
        context = min(model.config.max_positions, other.config.max_positions)
        limits += [min(max_new_tokens, max(1, context - len(prompt))) for prompt in prompts]
    eos_ids = model.eos_ids if eos_ids is None else eos_ids
    eos_ids = set(as_ints(eos_ids, "eos_ids", single=True))
    if min_new_tokens and eos_ids >= set(range(model.config.vocab_size)):
        problem = f"{min_new_tokens} is impossible: every id of {model.name} ends a text"
        raise ArgumentError("min_new_tokens", problem)
    return prompts, eos_ids, limits


def check_draft(draft, method):
    """InputError if a method decodes without drafts."""
    check_number(draft, "draft", 0, 1000, numbers.Integral)
    if draft and not getattr(method, "shares_passes", False):
        name = type(method).__name__
        raise ArgumentError("draft", f"is for methods that are rows of passes; {name} is not")


def parse_scoring(model, prompts, answers, methods):
    """The arguments of `loglikelihoods` → prompts, and the answers of each."""
    for method in methods:
        check_method(model, method)
    readers = [model, *[amateur_of(method, model) for method in methods]]
    prompts = parse_prompts(model, prompts)
    if len(answers) != len(prompts):
        raise InputError(
            f"{len(prompts)} prompts need as many lists of answers, not {len(answers)}"
        )
    answers = [parse_prompts(model, one, "answer") for one in answers]
    for prompt, candidates in zip(prompts, answers):
        if prompt != [model.bos_id] and model.bos_id in [answer[0] for answer in candidates]:
            raise InputError(
                f"an answer begins with {model.bos_id}, the id that begins a text: encode answers "
                "without it (tokenizer.encode(text, bos=False))"
            )
        longest = prompt + max(candidates, key=len)[:-1]  # an answer's last token is not read
        for reader in readers:
            parse_prompts(reader, [longest], "prompt with its longest answer")
            parse_prompts(reader, candidates, "answer")
    return prompts, answers


def check_method(model, method):
    """InputError for what is not a method, or does not fit the model."""
    check_model(model)
    check_record(method)
    method.check(model)


def check_record(method):
    if isinstance(method, type) or not hasattr(method, "start"):
        raise InputError(
            f"the method is {one_line(repr(method), 60)}; give a record, such as DeCoRe(heads)"
        )


def amateur_of(method, model):
    """The amateur of a method; the model, if it has none."""
    return getattr(method, "amateur", None) or model


def check_model(model):
    if not hasattr(model, "new_cache"):
        raise InputError(
            f"{type(model).__name__} is not a model of ours; wrap a causal model of transformers: "
            "HFModel(model), from hf"
        )


def parse_prompts(model, sequences, what="prompt"):
    """Sequences of ids → lists of ints in the model's vocabulary and within its context."""
    prompts = []
    c = model.config
    for i, sequence in enumerate(sequences, 1):
        name = f"{what} {i} of {len(sequences)}" if len(sequences) > 1 else f"the {what}"
        p = as_ints(sequence, name)
        prompts.append(p)
        if not p:
            raise InputError(f"{name} is empty; give at least one token")
        if getattr(sequences, "ndim", 1) > 1 and {p[0], p[-1]} & set(model.pad_ids):
            raise InputError(f"{name} begins or ends in padding; give lists of ids without it")
        bad = [t for t in p if not 0 <= t < c.vocab_size]
        if bad:
            raise InputError(
                f"{name} contains the id {bad[0]}; {model.name} knows 0 to {c.vocab_size - 1}"
            )
        if len(p) > c.max_positions:
            raise InputError(
                f"{name} has {len(p)} tokens; {model.name} reads {c.max_positions}: shorten it"
                + LONGER * (c.max_positions < SHORT)
            )
    return prompts


def unpack(ids):
    """One sequence of ids, or several → a sequence of sequences, and a function that gives a list
    of results the form of ids."""
    return (ids, list) if is_batch(ids) else ([ids], itemgetter(0))


def unpack_answers(answers):
    """An answer; several; or several for each of several prompts → a list of answers for each
    prompt, and a function that gives their sums the form of answers."""
    if not is_batch(answers):
        return [[answers]], lambda sums: sums[0][0]
    return (answers, list) if is_batch(answers[0]) else ([answers], itemgetter(0))


def is_batch(ids):
    """Whether ids are several sequences, not one."""
    if isinstance(ids, list | tuple):
        return bool(ids) and getattr(ids[0], "ndim", hasattr(ids[0], "__len__")) > 0
    return getattr(ids, "ndim", 1) > 1 and len(ids) > 0


def streams(tokenizer, stop, n):
    """A stream of text for each of n texts; none without a tokenizer."""
    if tokenizer is None:
        if stop:
            raise ArgumentError("stop", "needs tokenizer=, which turns tokens into texts")
        return []
    if not hasattr(tokenizer, "stream"):
        raise ArgumentError("tokenizer", "must be one of tokenizer.Tokenizer.load(name)")
    return [tokenizer.stream([stop] if isinstance(stop, str) else stop) for _ in range(n)]


def as_ints(ids, what, single=False):
    """A list, tuple, array or tensor of whole numbers → a list.

    single: also one number, or a set."""
    values = list(ids) if single and isinstance(ids, set | frozenset) else ids
    values = [values] if single and type(values) is int else values
    if isinstance(values, list | tuple) and all(type(i) is int for i in values):
        if max(map(abs, values), default=0) < 2**63:
            return [*values]
    import torch

    try:
        if isinstance(values, list | tuple) and bool in map(type, values):
            raise TypeError  # as_tensor counts True as 1
        x = torch.as_tensor(values)
        x = x[None] if single and x.ndim == 0 else x
        if x.ndim == 1 and (len(x) == 0 or not x.is_floating_point() and x.dtype != torch.bool):
            return x.tolist()
    except (RuntimeError, TypeError, ValueError):  # of texts, ragged lists, numbers above 64 bits
        pass
    raise InputError(
        f"{what} is {one_line(repr(ids), 60)}; give token ids: whole numbers in a list, a tuple, "
        "a numpy array or a tensor"
    )


def check_head_mask(head_mask, model):
    """InputError if the head mask is not [R, L, H] or [R, B, L, H] of this model."""
    L, H = model.config.n_layers, model.config.n_heads
    if head_mask.dim() not in (3, 4) or head_mask.shape[-2:] != (L, H):
        raise InputError(
            f"the head mask is [R, L, H] = {list(head_mask.shape)}; "
            f"{model.name} has L = {L}, H = {H}"
        )


class Checked:
    """Base class of methods: records with settings."""

    def __init_subclass__(cls):
        if "start" in vars(cls) and "shares_passes" not in vars(cls):
            cls.shares_passes = False

    def __new__(cls, *_, **settings):
        known = [field.name for field in fields(cls)]
        for field in fields(cls):
            if getattr(cls, field.name, MISSING) is not field.default:
                raise InputError(
                    f"{cls.__name__}.{field.name} would have no effect: write @dataclass"
                    f"(frozen=True) above the class, and a type after {field.name}"
                )
        for name in settings.keys() - known:
            raise InputError(
                f"{cls.__name__} has no setting {name!r}; it has {', '.join(known) or 'none'}"
            )
        return super().__new__(cls)

    def __post_init__(self):
        """InputError for a setting that is out of range, or has no effect. Heads become pairs of
        ints."""
        for name, value in vars(self).copy().items():
            if name == "heads":
                object.__setattr__(self, name, tuple(pairs_of(value)))
            elif value is None:
                continue
            elif name in KNOWN:
                check_name(value, name, KNOWN[name])
            elif name in NUMBERS:
                kind = numbers.Integral if name == "info_layer" else numbers.Real
                check_number(value, name, *NUMBERS[name], kind)
        if getattr(self, "alpha", None) is not None:
            for name, default in (("scale_alpha", False), ("alpha_rule", "entropy")):
                if getattr(self, name, default) != default:
                    raise ArgumentError(name, "has no effect on a constant alpha")

    def check(self, model):
        """InputError if the method does not fit a model, or its facts: `name` and `config`."""
        amateur = getattr(self, "amateur", None)
        if amateur is not None:
            check_vocabulary(amateur, model)
        if not parse_heads(getattr(self, "heads", ["0-0"]), amateur or model):
            raise ArgumentError("heads", "are none; give one or more to mask, or decode by Greedy")


def check_alpha(method, alpha, h):
    """InputError if a rule of one's own does not give a tensor of the shape of h, [B, T]."""
    import torch

    if not torch.is_tensor(alpha) or alpha.shape != h.shape:
        form = list(alpha.shape) if torch.is_tensor(alpha) else one_line(repr(alpha), 40)
        raise InputError(
            f"{type(method).__name__}.rule gives {form}; it must give a tensor of shape "
            f"{list(h.shape)}, an α for each token of each text"
        )


def check_vocabulary(amateur, model):
    """InputError for an amateur of another vocabulary."""
    V, of_amateur = model.config.vocab_size, amateur.config.vocab_size
    if abs(V - of_amateur) > 0.01 * V:  # more than padding
        raise InputError(
            f"{model.name} has {V} tokens and {amateur.name} {of_amateur}; "
            "contrasting needs one vocabulary"
        )


def parse_without_context(model, without, prompts, capacity):
    """The context-free prompts of CAD, in the form of ids → a list for each prompt.

    capacity: tokens that each text can still take."""
    if without is None:
        raise InputError("cad needs each prompt without its context too: without_context")
    without, _ = unpack(without)
    without = parse_prompts(model, without, "context-free prompt")
    if len(without) != len(prompts):
        raise InputError(
            f"cad needs one context-free prompt for each prompt; "
            f"it got {len(without)} for {len(prompts)}"
        )
    for w, prompt in zip(without, prompts):
        if w[-1] != prompt[-1]:
            raise InputError(
                "a prompt and its context-free prompt end in different tokens; end both in "
                "the same word"
            )
        if len(w) > len(prompt):
            longest = w + w[-1:] * (capacity - 1)  # the last new token is not read
            parse_prompts(model, [longest], "context-free prompt with its longest answer")
    return without


def pairs_of(heads):
    """(layer, head) pairs or "layer-head" → a list of pairs of ints."""
    pairs = []
    try:
        for head in heads:
            pair = head.split("-") if isinstance(head, str) else as_ints(head, "a head")
            layer, number = map(int, pair)
            if isinstance(head, str) and head != f"{layer}-{number}":
                raise ValueError  # "00-3" is not the key of a head file
            pairs.append((layer, number))
    except (TypeError, ValueError):
        raise InputError(
            f"heads {one_line(repr(heads), 80)} are not a list of (layer, head) pairs "
            "or of texts like '3-1'"
        ) from None
    return pairs


def parse_heads(heads, model):
    """(layer, head) pairs or "layer-head" → a list of pairs of ints in the model, each once."""
    L, H = model.config.n_layers, model.config.n_heads
    pairs = pairs_of(heads)
    for layer, number in pairs:
        if not (0 <= layer < L and 0 <= number < H):
            raise InputError(
                f"head {layer}-{number} is outside {model.name} ({L} layers, {H} heads); "
                "use a head file made for this model"
            )
        if pairs.count((layer, number)) > 1:
            raise InputError(f"head {layer}-{number} is listed twice")
    return pairs


def check_step(model, score, alpha, h):
    """InputError for the numbers of a token that no text can have."""
    check_not_nan(alpha, h)
    check_finite(model, score, h)


def check_not_nan(alpha, h):
    """InputError for an α that is NaN, although the entropy h is a number."""
    if math.isnan(alpha) and h < math.inf:
        raise InputError(
            "α is nan: the method's rule gives it, or the logits of its masked model are not finite"
        )


def check_finite(model, *values):
    """InputError for a score or entropy that is NaN or ∞.

    An answer with a token of probability 0 scores −∞. A token scores ∞, by Eq. 7, if its
    probability is 0 in the subtracted model alone."""
    if not all(value < math.inf for value in values):
        raise InputError(
            f"{model.name} gives logits that are not finite; try float32 or bfloat16, "
            "or look for damaged weights"
        )
