"""Intervals and tests of stored runs, against plain computations."""

import itertools
import math

import numpy as np
import pytest

from runtime import statistics
from runtime.statistics import averages, holm, interval, items_needed, sampled, wilson
from tests.tables import cells, each


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


WITHOUT_WIDTH = """
[1, 1, 1] | "abc"
[0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1] | "abcdefg"
[1, 0] | "aa"
[1] | "a"
"""


@each("values, questions", WITHOUT_WIDTH, cells)
def test_an_interval_without_width_is_none(values, questions):
    column = np.array(values, dtype=float), np.ones(len(values))
    assert interval(averages([[column]], [*questions])[:, 0]) is None


@pytest.mark.parametrize("n", [2, 3, 50])
@pytest.mark.parametrize("share", [0.0, 1.0, 0.5])
def test_the_ends_of_wilsons_interval_are_1_96_standard_errors_away(n, share):
    for end in wilson(share, n):
        error = math.sqrt(end * (1 - end) / n)
        assert abs(end - share) == pytest.approx(1.959964 * error, abs=1e-6)
    assert wilson(1.0, 1) is None


def by_enumeration(differences):
    """How often the sum is as large, over all signs of the differences."""
    signs = np.array([*itertools.product((-1, 1), repeat=len(differences))])
    return (abs(signs @ differences) > abs(differences.sum()) - 1e-9).mean()


@pytest.mark.parametrize("n_runs, n_others", [(1, 1), (1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize("kind", ["right or wrong", "graded"])
def test_p_is_that_of_all_signs_of_the_differences_of_means(n_runs, n_others, kind):
    generator = np.random.default_rng(10 * n_runs + n_others)
    values = generator.random((n_runs + n_others, 8))
    values[:n_runs] += 0.3
    if kind == "right or wrong":
        values = (values > 0.5).astype(float)
    runs, others = values[:n_runs], values[n_runs:]
    expected = by_enumeration(runs.mean(0) - others.mean(0))
    assert statistics.p_value(runs, others, range(8)) == pytest.approx(expected)
    assert 0.005 < expected < 0.7


def test_items_of_one_question_change_their_signs_together():
    one, other = np.array([1, 1, 1, 1, 1, 1.0]), np.zeros(6)
    assert statistics.p_value([one], [other], [*"abcdef"]) == 2 / 2**6
    assert statistics.p_value([one], [other], [*"aaabbb"]) == 2 / 2**2


def pair(won, lost):
    """A run and another one, which agree on seven more items."""
    counts = won, lost, 3, 4
    return np.repeat((1, 0, 1, 0), counts), np.repeat((0, 1, 1, 0), counts)


def mcnemar(won, lost):
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1, 2 * tail / 2 ** (won + lost))


@pytest.mark.parametrize("counts", "2 8, 7 1, 0 5, 0 6, 5 5, 0 0, 19 8, 700 640".split(", "))
def test_of_two_runs_with_right_and_wrong_items_p_is_mcnemars(counts):
    won, lost = map(int, counts.split())
    one, other = pair(won, lost)
    for runs in (one, other), (other, one):
        p = statistics.p_value(*([run] for run in runs), range(len(one)))
        assert p == pytest.approx(mcnemar(won, lost))


def test_p_of_a_large_difference_is_0_at_worst():
    assert statistics.p_value(np.ones((1, 3000)), np.zeros((1, 3000)), range(3000)) < 1e-300


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1, 3e8])
def test_p_does_not_depend_on_the_unit(size):
    differences = size * np.arange(1, 11)
    expected = by_enumeration(np.arange(1, 11))
    assert statistics.sign_flips(differences) == pytest.approx(expected)
    with pytest.raises(ValueError, match="a value is not finite; leave out items"):
        statistics.paired(differences, [size * math.nan] * 10)


def test_of_many_graded_differences_signs_are_drawn():
    differences = np.random.default_rng(5).normal(0.3, 1, 12)
    expected = by_enumeration(differences)
    assert 0.1 < expected < 0.5 and sampled(differences) == pytest.approx(expected, abs=0.005)
    many = np.random.default_rng(6).normal(0.3, 1, 40)
    assert statistics.sign_flips(many) == sampled(many)


# Qwen2.5-Coder-0.5B-Instruct on NQ-Swap with ten heads masked: whether the answer of the retrieval
# heads' run is right, and those of three draws of random heads, which hardly differ → items.
DRAWS = "0000 65, 0010 3, 0011 2, 0100 2, 0101 1, 0110 1, 0111 15, 1000 4, 1001 1, 1010 1, 1011 1, "
DRAWS = [draw.split() for draw in (DRAWS + "1101 1, 1111 53").split(", ")]


def test_without_a_difference_one_test_in_twenty_is_below_5_per_cent():
    """Right and wrong are exchanged on half of the items, at random: then no run is better. A test
    that takes the draws for independent controls rejects 15 % of these."""
    patterns = [[int(right) for right in pattern] for pattern, _ in DRAWS]
    values = np.repeat(patterns, [int(n) for _, n in DRAWS], axis=0).T
    generator = np.random.default_rng(0)
    items = range(values.shape[1])
    rejected = []
    for _ in range(1000):
        one, *draws = abs(values - generator.integers(2, size=values.shape[1]))
        rejected.append(statistics.p_value([one], draws, items) < 0.05)
    assert 0.03 < np.mean(rejected) < 0.06
    assert statistics.p_value(values[:1], values[1:], items) == pytest.approx(0.0052, abs=5e-5)


def test_a_script_gets_difference_interval_and_p_of_runs_or_draws():
    won, lost = pair(19, 8)
    difference, ends, p = statistics.paired(won, lost)
    assert difference == pytest.approx(11 / 34) and p == pytest.approx(mcnemar(19, 8))
    deviation = math.sqrt((27 / 34 - difference**2) / 34)
    assert ends == pytest.approx(
        (difference - 1.96 * deviation, difference + 1.96 * deviation), abs=0.03
    )
    assert statistics.paired([won, lost], [lost, won]) == (0, None, 1)
    assert statistics.paired(won, lost, ["one"] * 34) == (pytest.approx(difference), None, 1)


def test_holms_correction_as_worked_out_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1] and holm([]) == []


@pytest.mark.parametrize("differing", [0.1, 0.2])
def test_the_items_needed_find_the_difference_in_four_of_five_samples(differing):
    assert items_needed(0.01) == items_needed(0.05)  # five points need five per cent that differ
    n = items_needed(differing)
    generator = np.random.default_rng(1)
    shares = (differing + 0.05) / 2, (differing - 0.05) / 2, 1 - differing
    found = []
    for won, lost, _ in generator.multinomial(n, shares, size=1000).tolist():
        found.append(mcnemar(won, lost) < 0.05)
    assert np.mean(found) == pytest.approx(0.8, abs=0.04)
