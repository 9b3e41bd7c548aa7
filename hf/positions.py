"""Rotary positions whose scale depends on a text's length, or that a cast has rounded. Needs torch
alone: integrations/hub.py publishes a copy of this file."""

import math
import warnings

import torch


def position_problem(config, first, last, name):
    """Why texts of a batch would not be decoded as each alone; None if they would.

    All positions of a batch have the scale of its longest text, and a cache keeps keys of an
    earlier scale. config: that of the text model. first, last: the number of tokens that the first
    pass reads of each text, and that all passes do."""
    limit, by_token = length_scaling(config)
    before = [n <= limit for n in last]
    beyond = [n > limit and not by_token for n in first]
    if all(before) or all(beyond):
        return None
    subject = f"{name} scales positions beyond {limit:,} tokens"
    if all(b or a for b, a in zip(before, beyond)):
        return f"{subject}; a part of this batch is longer: decode that part by itself"
    return (
        f"{subject}; this prompt with its answer passes that: shorten one of them "
        "(max_new_tokens counts as a whole)"
    )


def forget_lengths(model):
    """Scale the next pass by its own length. In transformers, positions that are scaled by each
    token keep the scale of a longer text before, also at exactly the limit."""
    if length_scaling(model.config.get_text_config(decoder=True))[1]:
        for module in model.modules():
            for name in vars(module).keys():
                if name.endswith("max_seq_len_cached"):
                    setattr(module, name, 0)


def warn_of_casts(model, name):
    """Warn if the rotary frequencies have been rounded, as `model.bfloat16()` does."""
    for dtype in torch.bfloat16, torch.float16:
        for buffer, x in model.named_buffers():
            if buffer.endswith("inv_freq") and len(x) > 1 and torch.equal(x, x.to(dtype).to(x)):
                warnings.warn(
                    f"{name}: a cast has rounded the rotary frequencies to {dtype}, so that texts "
                    "of thousands of tokens get other positions; load the model again, with "
                    f"dtype={dtype}",
                    stacklevel=3,
                )
                return


def length_scaling(config):
    """How many tokens a text has at most before all its positions are scaled otherwise, and whether
    each token beyond changes the scale again."""
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [x for x in rope.values() if isinstance(x, dict)] or [rope]:  # of kinds of layers
        if kind.get("rope_type") == "longrope":
            return kind["original_max_position_embeddings"], False
        if "dynamic" in kind.get("rope_type", ""):
            return config.max_position_embeddings, True
    return math.inf, False
