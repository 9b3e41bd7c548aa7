"""Intervals and exact tests of results on the same items."""

import math

import numpy as np

SAMPLES = 10_000
Z = 1.959964  # of 95 %, two-sided
Z_POWER = 0.841621  # of 80 %


@np.errstate(invalid="ignore")  # 0 / 0 if a sample has no value of a metric
def averages(runs, questions):
    """Means of a metric, [1 + SAMPLES, R]: over the n items, then over samples of questions that
    are drawn with replacement, since items of one question are not independent.

    runs: of R runs on the same items, pairs (sums, weights) of arrays [n]: each pair's mean is
    Σ sums / Σ weights, and the run's that of its pairs. questions: the question of each item."""
    columns = np.stack([column for parts in runs for pair in parts for column in pair], axis=1)
    names, numbers = np.unique(questions, return_inverse=True)
    sums = np.zeros((len(names), columns.shape[1]))
    np.add.at(sums, numbers, columns)
    # Questions with equal sums are interchangeable: it is enough to draw how many of each kind.
    kinds, counts = np.unique(sums, axis=0, return_counts=True)
    generator = np.random.default_rng(0)
    drawn = [sums.sum(0, keepdims=True)]
    for _ in range(10):
        times = generator.multinomial(len(names), counts / len(names), size=SAMPLES // 10)
        drawn.append(times @ kinds)
    drawn = np.concatenate(drawn).reshape(1 + SAMPLES, len(runs), -1, 2)
    return (drawn[..., 0] / drawn[..., 1]).mean(-1)


def interval(means):
    """(low, high): the 95 % percentile interval of `averages`, [1 + SAMPLES]; None if it would
    have no width, because all questions agree or there is only one."""
    low, high = map(float, np.nanpercentile(means[1:], [2.5, 97.5]))
    return (low, high) if high - low > 1e-9 else None


def wilson(share, n):
    """Wilson's 95 % interval of a share of n items; None for fewer than two."""
    if n < 2:
        return None
    centre = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    width = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, centre - width), min(1.0, centre + width)


def p_value(one, others):
    """Two-sided p of a run against K others: on each item, its value could as well be that of any
    of them.

    one: values of n items, [n]; others [K, n]. Exact if all values are 0 or 1: for K = 1 it is
    McNemar's test. Otherwise values are exchanged at random, SAMPLES times."""
    values = np.vstack([one, others])
    if np.isin(values, (0, 1)).all():
        return exact(values)
    return sampled(values)


def exact(values):
    """p of the number of items that row 0 of `values` has right, given how many of the 1 + K rows
    are right on each item: twice the smaller tail."""
    shares = values.mean(0)
    distribution = np.ones(1)
    for share in shares[(shares > 0) & (shares < 1)]:
        distribution = np.convolve(distribution, (1 - share, share))
    right = round(values[0].sum() - (shares == 1).sum())
    tails = distribution[: right + 1].sum(), distribution[right:].sum()
    return min(1.0, 2 * float(min(tails)))


def sampled(values):
    """p of the mean difference of row 0 of `values` to the others."""
    n_rows, n = values.shape
    centred = values - values.mean(0)
    generator = np.random.default_rng(0)
    extreme = 0
    for _ in range(10):
        row = generator.integers(n_rows, size=(SAMPLES // 10, n))
        sums = centred[row, np.arange(n)].sum(1)
        # A tolerance, for sums of the same numbers in another order.
        extreme += (np.abs(sums) > np.abs(centred[0].sum()) - 1e-9).sum()
    return float(1 + extreme) / (1 + SAMPLES)


def holm(p_values):
    """p adjusted for the number of tests by Holm's method, in the same order."""
    adjusted = np.empty(len(p_values))
    largest = 0.0
    for rank, number in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = largest
    return adjusted.tolist()


def items_needed(differing, points=0.05):
    """Items with which the exact McNemar test at 5 % finds a difference of `points` in 80 % of
    samples, about: Connor's formula (1987), and 1 / points more because the test is exact.

    differing: the share of items on which the two differ, at least `points`."""
    differing = max(differing, points)
    spread = Z * math.sqrt(differing) + Z_POWER * math.sqrt(differing - points**2)
    return math.ceil((spread / points) ** 2 + 1 / points)
