"""Checks of the arguments of `generate` and `score`. Each ValueError says what to pass instead."""

import numbers
from collections.abc import Iterable

HUGE = 1e9                          # far above any α, and still safe to multiply with


def check_generation(model, ids, max_new_tokens, eos_ids, lookup, settings):
    """Check the arguments of `generate` → the prompts as lists of ints, the end ids as a set, the maximum number of new
    tokens of each text, and the settings with heads as pairs."""
    check_whole(max_new_tokens, "max_new_tokens", 1)
    check_whole(lookup, "lookup", 0)
    prompts, settings = check_prompts(model, ids), check_settings(model, settings)
    amateur = settings.get("amateur") or model
    check_prompts(amateur, prompts)
    context = min(m.config.max_positions for m in (model, amateur))
    if lookup > context:
        raise ValueError(f"lookup {lookup} is more than the {context} tokens that {model.name} reads")
    single = isinstance(eos_ids, int) or getattr(eos_ids, "ndim", 1) == 0
    eos_ids = [eos_ids] if single else list(eos_ids) if isinstance(eos_ids, set | frozenset) else eos_ids
    limits = [min(max_new_tokens, max(1, context - len(p))) for p in prompts]
    return prompts, set(as_ints(eos_ids, "eos_ids")), limits, settings


def check_answers(model, prompt_ids, answer_ids, bos, settings):
    """Check the arguments of `score` → the prompt, a list of answers, and the settings with heads as pairs.

    The last token of an answer is not read, so it may lie beyond the context."""
    prompt, answers = as_ints(prompt_ids, "the prompt"), check_prompts(model, answer_ids, "answer")
    settings = check_settings(model, settings)
    for answer in answers:
        if answer[0] == bos and prompt != [bos]:
            raise ValueError(f"an answer begins with {bos}, the id that begins a text: encode answers without it "
                             "(tokenizer.encode(text, bos=False))")
    for m in (model, settings.get("amateur") or model):
        check_prompts(m, [prompt])
        longest = len(prompt) + max(map(len, answers)) - 1
        if longest > m.config.max_positions:
            raise ValueError(f"the prompt with its longest answer has {longest} tokens to read; {m.name} reads "
                             f"{m.config.max_positions}: shorten it")
    return prompt, answers, settings


def check_prompts(model, ids, what="prompt"):
    """One sequence or several → a list of lists of ints in the model's vocabulary and within its context."""
    rows, prompts = ids if is_batch(ids) else [ids], []
    for i, row in enumerate(rows):
        name = f"{what} {i + 1} of {len(rows)}" if len(rows) > 1 else f"the {what}"
        p = as_ints(row, name)
        bad = next((t for t in p if not 0 <= t < model.config.vocab_size), None)
        if not p:
            raise ValueError(f"{name} is empty; give at least one token")
        if bad is not None:
            raise ValueError(f"{name} contains the id {bad}; {model.name} knows 0 to {model.config.vocab_size - 1}")
        if len(p) > model.config.max_positions:
            raise ValueError(f"{name} has {len(p)} tokens; {model.name} reads {model.config.max_positions}: shorten it")
        prompts.append(p)
    return prompts


def is_batch(ids):
    """Whether ids are several sequences, not one."""
    if hasattr(ids, "ndim"):
        return ids.ndim > 1
    first = ids[0] if isinstance(ids, list | tuple) and ids else 0
    return first.ndim > 0 if hasattr(first, "ndim") else hasattr(first, "__len__")


def as_ints(ids, what):
    """A list, tuple, numpy array or tensor of whole numbers → a list of ints."""
    if isinstance(ids, str | bytes):
        raise ValueError(f"{what} is a text; give token ids (tokenizer.encode)")
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{what} is a {type(ids).__name__}; give a list, a tuple, a numpy array or a tensor of ids")
    ids = [t.tolist() if hasattr(t, "tolist") else t for t in ids]
    bad = [t for t in ids if isinstance(t, bool) or not isinstance(t, int)]
    if bad:
        raise ValueError(f"{what} contains {bad[0]!r}; token ids are whole numbers, in a list or a list of lists")
    return ids


def check_method(method, known, heads=None, amateur=None, amateur_heads=None):
    """ValueError for an unknown method, or one of DeCoRe's without the heads that it masks."""
    if method not in known:
        raise ValueError(f"method {method!r} is unknown; known: {', '.join(known)}")
    if amateur is not None and not (method.startswith("decore") and heads is None and amateur_heads is not None):
        raise ValueError("an amateur needs a decore method and its own amateur_heads ([] for none), and excludes heads")
    if amateur is None and heads is None and method != "greedy":
        raise ValueError(f"{method} needs heads to mask")


def check_settings(model, settings):
    """The settings, with heads as pairs of ints. ValueError for numbers out of range and a wrong amateur."""
    for name, low in (("alpha", -HUGE), ("alpha_cap", 0), ("relative_top", 0)):
        value = settings.get(name, 0)
        if value is None and name != "alpha" or name == "relative_top" and value == "published":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= value <= HUGE:
            raise ValueError(f"{name} {value!r} is not a finite number" + (" of at least 0" if low == 0 else ""))
    amateur = settings.get("amateur")
    if amateur is not None and amateur.config.vocab_size != model.config.vocab_size:
        raise ValueError(f"{model.name} has {model.config.vocab_size} tokens and {amateur.name} "
                         f"{amateur.config.vocab_size}; contrasting needs one vocabulary")
    pairs = {name: check_heads(settings[name], of) for name, of in (("heads", model), ("amateur_heads", amateur))
             if settings.get(name) is not None and of}
    return settings | pairs


def check_heads(heads, model):
    """(layer, head) pairs or "layer-head" → a list of pairs of ints inside the model, each once."""
    L, H, pairs = model.config.n_layers, model.config.n_heads, []
    heads = heads.tolist() if hasattr(heads, "tolist") else heads
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        raise ValueError(f"heads is {heads!r}; give a list of (layer, head) pairs or of texts like '3-1'")
    for head in heads:
        try:
            layer, number = map(int, head.split("-")) if isinstance(head, str) else as_ints(head, "a head")
        except ValueError:
            raise ValueError(f"{head!r} is not a head; give (layer, head) pairs or texts like '3-1'") from None
        if not (0 <= layer < L and 0 <= number < H):
            raise ValueError(f"head {layer}-{number} is outside {model.name} ({L} layers, {H} heads); "
                             "use a head file made for this model")
        if (layer, number) in pairs:
            raise ValueError(f"head {layer}-{number} is listed twice")
        pairs.append((layer, number))
    return pairs


def check_whole(n, name, low):
    if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < low:
        raise ValueError(f"{name} {n!r} is not a whole number of at least {low}")
