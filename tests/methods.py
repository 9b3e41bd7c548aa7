"""Methods, and prompts for them, of tests on tiny models: three layers of four heads."""

from itertools import product

from decoders.baselines import AD, CAD, CD, DoLa  # noqa: F401 (of the table)
from decore import DeCoRe, Greedy, Masked
from runtime.values import MASKS
from tests.checkpoints import random_ids
from tests.tables import rows

HEADS = [(1, 0), (1, 3), (2, 2)]
PROMPTS = [random_ids(n, seed=n) for n in (3, 17, 1, 30)]
WAYS = [*product(MASKS, (False, True))]
MASKING = [
    Greedy(),
    *(Masked(HEADS, *how) for how in WAYS),
    *(DeCoRe(HEADS, *how, alpha=0.5) for how in WAYS),
    *(DeCoRe(HEADS, *how) for how in WAYS),
]
METHODS = """
greedy | Greedy()
masked | Masked(HEADS)
decore-static | DeCoRe(HEADS, alpha=0.5)
decore-entropy | DeCoRe(HEADS)
decore-entropy, query | DeCoRe(HEADS, mask="query")
decore-entropy, masked prompt | DeCoRe(HEADS, mask_prompt=True)
cad | CAD([[5, *p[-1:]] for p in PROMPTS])
dola-low | DoLa("low")
dola-high | DoLa("high", repetition_penalty=1.3)
ad | AD(info_layer=2)
"""
METHODS = {case: eval(record) for case, record in rows(METHODS)}
CASES = [*METHODS, "decore-entropy, amateur", "cd"]
DRAFTING = [case for case in CASES if not case.startswith(("dola", "ad"))]


def method_of(case, amateur=None):
    lite = {"decore-entropy, amateur": DeCoRe([(0, 1)], amateur=amateur), "cd": CD(amateur)}
    return (METHODS | lite)[case]
