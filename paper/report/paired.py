"""Compares runs with greedy decoding on the same items."""

from typing import NamedTuple

import numpy as np

from paper.tasks import metrics
from runtime.files import short_hash

NOT_RATES = ("rougeL", "bertscore_f1", "factkb", "entropy", "tokens", "letters")  # not in per cent
# Fewer items cannot show a difference at 5 %, even if all are won: 2 · 0.5⁵ > 0.05.
FEWEST = 6


class Difference(NamedTuple):
    """A metric of runs, minus that of greedy decoding."""

    value: float  # of the runs, a mean over them
    difference: float
    low: float  # the 95 % interval of the difference
    high: float
    won: float  # items with a higher value than with greedy decoding, a mean over the runs
    lost: float
    n: int  # items compared

    @property
    def separable(self):
        """Whether the interval leaves out 0, and enough items differ for it to mean something."""
        return (self.low > 0 or self.high < 0) and self.won + self.lost >= FEWEST


def compare(runs, greedy, half=None):
    """Metric → Difference of the runs, such as draws of random heads, to a greedy run, over the
    items that all have. The interval is a paired bootstrap over the questions.

    half: 0 or 1, to compare one half of the questions."""
    sides = [run.items for run in (greedy, *runs)]
    common = [
        key
        for key, (question, _) in sides[0].items()
        if all(key in side for side in sides) and half in (None, half_of(question))
    ]
    if not common:
        return {}
    counts = metrics.bootstrap([sides[0][key][0] for key in common])
    values = [[side[key][1] for key in common] for side in sides]
    base, *others = [metrics.means(side, counts) for side in values]
    results = {}
    for metric in base:
        if not all(metric in other for other in others):
            continue
        means = np.mean([other[metric] for other in others], axis=0)
        differences = means - base[metric]
        if np.isnan(differences[0]):
            continue
        scale = scale_of(metric)
        # A mean over splits has no values of single items.
        signs = np.sign(item_differences(values, "micro" if metric.startswith("macro") else metric))
        results[metric] = Difference(
            scale * means[0],
            scale * differences[0],
            *(scale * end for end in metrics.interval(differences)),
            (signs > 0).sum() / len(runs),
            (signs < 0).sum() / len(runs),
            len(common),
        )
    return results


def item_differences(values, metric):
    """The differences of all runs to the first, item by item; those without a value are left out.

    values: metric values of the items, for each run."""
    columns = np.array([[of_item.get(metric) for of_item in side] for side in values], dtype=float)
    differences = columns[1:] - columns[0]
    return differences[~np.isnan(differences)]


def half_of(question):
    """0 or 1, by a hash of the question."""
    return int(short_hash(question.encode()), 16) % 2


def scale_of(metric):
    return 1 if metric in NOT_RATES else 100
