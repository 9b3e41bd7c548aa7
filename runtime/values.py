"""The values that settings of methods may have."""

import numbers

from runtime.errors import ArgumentError

MASKS = ("output", "query")  # output: the paper's Eq. 4 and 5; query: the published runs
HUGE = 10**9  # far above any α, and still safe to multiply with
KNOWN = {
    "alpha_rule": ("entropy", "gain"),
    "mask": MASKS,
    "half": ("low", "high"),
    "dola_layers": ("capped", "halves"),
}
NUMBERS = {  # the least and the greatest value
    "alpha": (-HUGE, HUGE),
    "alpha_cap": (0, HUGE),
    "relative_top": (0, 1),
    "info_layer": (1, HUGE),
    "repetition_penalty": (0.01, HUGE),
}


def check_name(value, what, known):
    if value not in known:
        raise ArgumentError(what, f"{value!r} is unknown; known: {', '.join(known)}")


def check_number(n, name, low, high=HUGE, kind=numbers.Real):
    if isinstance(n, bool) or not isinstance(n, kind) or not low <= n <= high:
        what = "finite" if kind is numbers.Real else "whole"
        raise ArgumentError(
            name, f"{n!r} is not a {what} number of at least {low} and at most {high}"
        )
