"""What `generate` and `score` take from a caller: checked once, here. Every ValueError says what to give instead."""

import numbers
from collections.abc import Iterable
from functools import cache

HUGE = 1e9                          # what no α comes near, and what floats can still be multiplied with


COMPILE = ("no", "graph", "kernels")


def check_generation(model, ids, max_new_tokens, eos_ids, lookup, settings, compile=None):
    """→ prompts as lists of ints, end ids as a set, new tokens to make room for, and the longest text in tokens.

    A cache is never made for more than the models read."""
    whole(max_new_tokens, "max_new_tokens", 1)
    whole(lookup, "lookup", 0)
    if compile not in (None, *COMPILE):
        raise ValueError(f"compile {compile!r} is unknown; known: {', '.join(COMPILE)}")
    if compile in COMPILE[1:] and model.device.type != "cuda":
        raise ValueError(f"compile {compile!r} records a CUDA graph and the model is on {model.device}; leave it out")
    check_settings(settings)
    prompts = check_prompts(model, ids)
    amateur = settings.get("amateur")
    if amateur is not None:
        check_amateur(model, amateur, prompts)
    longest = min(m.config.max_positions for m in (model, amateur or model))
    if lookup > longest:
        raise ValueError(f"lookup {lookup} is more than the {longest} tokens that {model.name} reads")
    room = min(max_new_tokens, max(1, longest - min(map(len, prompts))))
    return prompts, check_ends(model, eos_ids), room + lookup, longest


def check_answers(model, prompt_ids, answer_ids, settings):
    """→ the prompt and a list of answers. An answer's last token is not read, so it may be one beyond the context."""
    check_settings(settings)
    prompt, answers = sequence(prompt_ids, "the prompt"), check_prompts(model, answer_ids, "answer")
    check_prompts(model, [prompt])
    amateur = settings.get("amateur")
    if amateur is not None:
        check_amateur(model, amateur, [prompt])
    bos = special_ids(model.folder)[0]
    for answer in answers:
        if answer[0] == bos and prompt != [bos]:       # of a whole text, BOS itself may be scored
            raise ValueError(f"an answer begins with {bos}, the id that begins a text: encode answers without it "
                             "(tokenizer.encode(text, bos=False))")
    for m in (model, amateur or model):
        longest = len(prompt) + max(map(len, answers)) - 1
        if longest > m.config.max_positions:
            raise ValueError(f"the prompt with its longest answer has {longest} tokens to read; {m.name} reads "
                             f"{m.config.max_positions}: shorten it")
    return prompt, answers


def check_prompts(model, ids, what="prompt"):
    """One sequence or several → a list of lists of ints that the model knows and can read."""
    rows, prompts = ids if is_batch(ids) else [ids], []
    for i, row in enumerate(rows):
        here = f"{what} {i + 1} of {len(rows)}" if len(rows) > 1 else f"the {what}"
        p = sequence(row, here)
        bad = next((t for t in p if not 0 <= t < model.config.vocab_size), None)
        if not p:
            raise ValueError(f"{here} is empty; give at least one token")
        if bad is not None:
            raise ValueError(f"{here} holds the id {bad}; {model.name} knows 0 to {model.config.vocab_size - 1}")
        if len(p) > model.config.max_positions:
            raise ValueError(f"{here} has {len(p)} tokens; {model.name} reads {model.config.max_positions}: shorten it")
        prompts.append(p)
    return prompts


def is_batch(ids):
    """Whether ids are several sequences, and not one."""
    if hasattr(ids, "ndim"):
        return ids.ndim > 1
    first = ids[0] if isinstance(ids, list | tuple) and ids else 0
    return first.ndim > 0 if hasattr(first, "ndim") else hasattr(first, "__len__")


def sequence(ids, what):
    """A list, tuple, numpy array or tensor of whole numbers → a list of ints."""
    if isinstance(ids, str | bytes):
        raise ValueError(f"{what} is a text; give token ids (tokenizer.encode)")
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{what} is a {type(ids).__name__}; give a list, a tuple, a numpy array or a tensor of ids")
    ids = [t.tolist() if hasattr(t, "tolist") else t for t in ids]
    for t in ids:
        if isinstance(t, bool) or not isinstance(t, int):
            raise ValueError(f"{what} holds {t!r}; token ids are whole numbers"
                             + (", and prompts are not nested deeper than a list of lists" * isinstance(t, list)))
    return ids


def check_ends(model, eos_ids):
    """End ids: one, or several in any form; None: the checkpoint's own → a set of ints."""
    if eos_ids is None:
        return set(special_ids(model.folder)[1])
    if isinstance(eos_ids, int) and not isinstance(eos_ids, bool):
        return {eos_ids}
    eos_ids = sorted(eos_ids) if isinstance(eos_ids, set | frozenset) else eos_ids
    eos_ids = [eos_ids.item()] if getattr(eos_ids, "ndim", 1) == 0 else eos_ids
    return set(sequence(eos_ids, "eos_ids"))


@cache
def special_ids(folder):
    """(the id that begins a text, those that end one) of a checkpoint; (None, ()) without one."""
    from tokenizer import Tokenizer, read_eos_ids

    if folder is None:
        return None, ()
    if not (folder / "tokenizer.json").exists():
        return None, read_eos_ids(folder, None, None)
    tokenizer = Tokenizer.load(folder)
    return tokenizer.bos_id, tokenizer.eos_ids


def check_heads(heads, model):
    """(layer, head) pairs or "layer-head" → pairs of ints inside the model, each once."""
    L, H, pairs = model.config.n_layers, model.config.n_heads, []
    if isinstance(heads, str | bytes):
        raise ValueError(f"heads is the text {heads!r}; give a list of (layer, head) pairs or of texts like '3-1'")
    if not isinstance(heads, Iterable) or getattr(heads, "ndim", 1) == 0:
        raise ValueError(f"heads is {heads!r}; give a list of (layer, head) pairs or of texts like '3-1'")
    for head in heads:
        pair = head.split("-") if isinstance(head, str) else head
        try:
            layer, number = (int(x) for x in pair if isinstance(x, str) or x == int(x) and not isinstance(x, bool))
        except (TypeError, ValueError):
            raise ValueError(f"{head!r} is no head; give (layer, head) pairs or texts like '3-1'") from None
        if not (0 <= layer < L and 0 <= number < H):
            raise ValueError(f"head {layer}-{number} is outside {model.name} ({L} layers, {H} heads); "
                             "use a head file made for this model")
        if (layer, number) in pairs:
            raise ValueError(f"head {layer}-{number} is given twice")
        pairs.append((layer, number))
    return pairs


def check_settings(settings):
    """α and what bounds it must be finite numbers, a cap or a share not negative."""
    for name, low in (("alpha", -HUGE), ("alpha_cap", 0), ("relative_top", 0)):
        value = settings.get(name)
        if value is None or name == "relative_top" and value == "published":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= value <= HUGE:
            raise ValueError(f"{name} {value!r} is not a finite number" + (" of at least 0" if low == 0 else ""))


def check_amateur(model, amateur, prompts):
    """The amateur must score as many tokens as the model, and read the prompts."""
    if amateur.config.vocab_size != model.config.vocab_size:
        raise ValueError(f"{model.name} has {model.config.vocab_size} tokens and {amateur.name} "
                         f"{amateur.config.vocab_size}; contrasting needs one vocabulary")
    check_prompts(amateur, prompts)


def whole(n, name, low):
    if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < low:
        raise ValueError(f"{name} {n!r} is not a whole number of at least {low}")
