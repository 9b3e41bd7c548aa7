"""Intervals and tests of stored runs, against plain computations."""

import itertools
import math

import numpy as np
import pytest

from runtime import statistics
from runtime.statistics import averages, exact, holm, interval, items_needed, sampled, wilson


def columns(values):
    values = np.array(values, dtype=float)
    return [(values, np.ones(len(values)))]


def test_averages_are_those_of_resampled_questions():
    """Also if the metric is a ratio of sums, as the rate of IFEval's instructions."""
    generator = np.random.default_rng(3)
    questions = generator.integers(12, size=40)
    weights = generator.integers(1, 4, size=40).astype(float)
    sums = weights * generator.random(40)
    by_averages = averages([[(sums, weights)]], questions)[:, 0]
    plain = []
    for _ in range(2000):
        drawn = np.concatenate(
            [np.flatnonzero(questions == q) for q in generator.choice(np.unique(questions), 12)]
        )
        plain.append(sums[drawn].sum() / weights[drawn].sum())
    assert by_averages[0] == pytest.approx(sums.sum() / weights.sum())
    assert by_averages[1:].mean() == pytest.approx(np.mean(plain), abs=0.005)
    assert by_averages[1:].std() == pytest.approx(np.std(plain), rel=0.08)
    assert interval(by_averages) == pytest.approx(np.percentile(plain, (2.5, 97.5)), abs=0.015)


@pytest.mark.parametrize(
    "values, questions", [([1, 1, 1], "abc"), ([0.1] * 7, "abcdefg"), ([1, 0], "aa"), ([1], "a")]
)
def test_an_interval_without_width_is_none(values, questions):
    assert interval(averages([columns(values)], [*questions])[:, 0]) is None


@pytest.mark.parametrize("n", [2, 3, 50])
@pytest.mark.parametrize("share", [0.0, 1.0, 0.5])
def test_the_ends_of_wilsons_interval_are_1_96_standard_errors_away(n, share):
    for end in wilson(share, n):
        error = math.sqrt(end * (1 - end) / n)
        assert abs(end - share) == pytest.approx(1.959964 * error, abs=1e-6)


def test_one_item_has_no_interval():
    assert wilson(1.0, 1) is None


def by_enumeration(values):
    """Twice the smaller tail over all ways to choose the value of row 0 on each item."""
    counts = []
    for choice in itertools.product(range(len(values)), repeat=values.shape[1]):
        counts.append(values[choice, range(values.shape[1])].sum())
    counts, right = np.array(counts), values[0].sum()
    return min(1, 2 * min((counts <= right).mean(), (counts >= right).mean()))


@pytest.mark.parametrize("others", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_exact_p_is_that_of_all_exchanges(others, seed):
    values = np.random.default_rng(seed).integers(2, size=(1 + others, 6))
    assert exact(values) == pytest.approx(by_enumeration(values))


def pair(won, lost):
    """A run and another one, which agree on seven more items."""
    counts = won, lost, 3, 4
    return np.repeat((1, 0, 1, 0), counts), [np.repeat((0, 1, 1, 0), counts)]


def mcnemar(won, lost):
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1, 2 * tail / 2 ** (won + lost))


@pytest.mark.parametrize(
    "won, lost, p",
    [
        (2, 8, 0.109375),
        (7, 1, 0.0703125),
        (0, 5, 0.0625),
        (0, 6, 0.03125),
        (5, 5, 1),
        (0, 0, 1),
        (19, 8, 7011398 / 2**27),
    ],
)
def test_against_one_run_p_is_mcnemars(won, lost, p):
    one, [other] = pair(won, lost)
    assert statistics.p_value(one, [other]) == pytest.approx(p)
    assert statistics.p_value(other, [one]) == pytest.approx(mcnemar(won, lost))


def test_p_of_a_large_difference_is_0_at_worst():
    assert statistics.p_value(np.ones(3000), [np.zeros(3000)]) < 1e-300


@pytest.mark.parametrize("others, shift", [(1, 0.1), (2, 0.3)])
def test_the_sampled_p_is_that_of_all_exchanges(others, shift):
    values = np.random.default_rng(5).random((1 + others, 8))
    values[0] += shift
    observed = values[0].mean() - values[1:].mean()
    extreme = []
    for choice in itertools.product(range(1 + others), repeat=8):
        chosen = values[choice, range(8)]
        difference = chosen.mean() - (values.sum(0) - chosen).mean() / others
        extreme.append(abs(difference) >= abs(observed) - 1e-12)
    assert 0.1 < np.mean(extreme) < 0.5
    assert sampled(values) == pytest.approx(np.mean(extreme), abs=0.015)
    assert statistics.p_value(values[0], values[1:]) == sampled(values)


def test_holms_correction_as_worked_out_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1] and holm([]) == []


@pytest.mark.parametrize("differing", [0.1, 0.2])
def test_the_items_needed_find_the_difference_in_four_of_five_samples(differing):
    n = items_needed(differing)
    generator = np.random.default_rng(1)
    shares = (differing + 0.05) / 2, (differing - 0.05) / 2, 1 - differing
    found = []
    for won, lost, _ in generator.multinomial(n, shares, size=1000).tolist():
        found.append(mcnemar(won, lost) < 0.05)
    assert np.mean(found) == pytest.approx(0.8, abs=0.04)


def test_a_difference_of_five_points_needs_five_per_cent_that_differ():
    assert items_needed(0.01) == items_needed(0.05)
