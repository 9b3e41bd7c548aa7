"""Intervals and tests of results on the same items, for reports and for scripts. A script calls

    difference, ends, p = paired(ours, greedy)

for each comparison, with the values of the same items, and `holm` once for a family of them."""

import math

import numpy as np

from runtime.errors import InputError

SAMPLES = 10_000
FLIPS = 100_000
MOST_SUMS = 2**20  # of an exact test
Z = 1.959964  # of 95 %, two-sided
Z_POWER = 0.841621  # of 80 %


@np.errstate(invalid="ignore")  # 0 / 0 if a sample has no value of a metric
def averages(runs, questions):
    """Means of a metric, [1 + SAMPLES, R]: over the n items, then over samples of questions that
    are drawn with replacement, since items of one question are not independent.

    runs: of R runs on the same items, pairs (sums, weights) of arrays [n]: each pair's mean is
    Σ sums / Σ weights, and the run's that of its pairs. questions: the question of each item."""
    columns = np.stack([column for parts in runs for pair in parts for column in pair], axis=1)
    numbers = numbered(questions)
    sums = np.zeros((max(numbers) + 1, columns.shape[1]))
    np.add.at(sums, numbers, columns)
    # Questions with equal sums are interchangeable: it is enough to draw how many of each kind.
    kinds, counts = np.unique(sums, axis=0, return_counts=True)
    generator = np.random.default_rng(0)
    drawn = [sums.sum(0, keepdims=True)]
    for _ in range(10):
        times = generator.multinomial(len(sums), counts / len(sums), size=SAMPLES // 10)
        drawn.append(times @ kinds)
    drawn = np.concatenate(drawn).reshape(1 + SAMPLES, len(runs), -1, 2)
    return (drawn[..., 0] / drawn[..., 1]).mean(-1)


def numbered(questions):
    """The number of each item's question, in the order of the questions' texts."""
    places = {question: n for n, question in enumerate(sorted(set(questions)))}
    return [places[question] for question in questions]


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


def paired(runs, others, questions=None):
    """(difference, interval, p) of the mean of runs minus that of others, on the same n items.

    runs, others: values of one run, [n], or of several, [K, n], which are averaged. questions: the
    question of each item; None: each item has its own. interval: as in `interval`."""
    runs, others = np.atleast_2d(runs), np.atleast_2d(others)
    if not np.isfinite(runs).all() or not np.isfinite(others).all():
        raise InputError("a value is not finite; leave out items that a run has no value of")
    questions = range(runs.shape[1]) if questions is None else questions
    columns = [[(values, np.ones(len(values)))] for values in (*runs, *others)]
    means = averages(columns, questions)
    differences = means[:, : len(runs)].mean(1) - means[:, len(runs) :].mean(1)
    return float(differences[0]), interval(differences), p_value(runs, others, questions)


def p_value(runs, others, questions):
    """Two-sided p of runs [J, n] against others [K, n], by `sign_flips` of each question's
    difference of the means. Draws that are alike thus count as one.

    For two runs whose values are 0 or 1 and whose items have a question each, it is McNemar's
    exact test."""
    # Multiples of the differences: whole numbers, if the values are 0 and 1.
    of_items = len(others) * np.sum(runs, 0) - len(runs) * np.sum(others, 0)
    return sign_flips(np.bincount(numbered(questions), of_items))


def sign_flips(differences):
    """Two-sided p of a sum: how often it is as large if the sign of each difference is drawn.

    Exact if the possible sums are few, as they are for rates; else of FLIPS draws."""
    differences = differences[differences != 0]
    largest = np.abs(differences).max(initial=0)
    if largest < 1:  # the tolerances below are absolute
        differences = np.ldexp(differences, -np.frexp(largest)[1])
    sums, chances = np.zeros(1), np.ones(1)
    sizes, counts = np.unique(np.abs(differences).round(9), return_counts=True)
    for size, count in zip(sizes, counts.tolist()):
        if len(sums) * (count + 1) > MOST_SUMS:
            return sampled(differences)
        positive = np.arange(count + 1)
        binomial = [math.comb(count, k) / 2**count for k in range(count + 1)]
        sums = np.add.outer(size * (2 * positive - count), sums).round(9).ravel()
        order = sums.argsort(kind="stable")  # fast, since it merges count + 1 sorted rows
        sums, starts = np.unique(sums[order], return_index=True)
        chances = np.add.reduceat(np.outer(binomial, chances).ravel()[order], starts)
    extreme = np.abs(sums) > abs(differences.sum()) - 1e-6  # a tolerance, for rounded sums
    return min(1.0, float(chances[extreme].sum()))


def sampled(differences):
    """`sign_flips` of FLIPS draws of the signs."""
    total = differences.sum()
    generator = np.random.default_rng(0)
    extreme = 0
    for _ in range(100):
        positive = generator.integers(2, size=(FLIPS // 100, len(differences)), dtype=np.int8)
        extreme += (np.abs(2 * positive @ differences - total) > abs(total) - 1e-9).sum()
    return float(1 + extreme) / (1 + FLIPS)


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
