"""Rotary positions whose scale depends on a text's length. Needs no other module:
integrations/hub.py publishes a copy of this file."""

import math


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
