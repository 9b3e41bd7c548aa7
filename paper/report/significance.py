"""Statistical tests, by scipy and statsmodels, for numbers that are enough and vary."""

import warnings

import numpy as np
from scipy import stats
from statsmodels.discrete.discrete_model import Logit
from statsmodels.tools import add_constant

FEWEST = 3  # numbers that a test needs on each side


def t_tests(a, b, alternative="two-sided"):
    """Name → statistic and p, as a text, of Welch's t-test and, as in the published analysis,
    Student's. "–" if numbers are too few or do not vary.

    alternative: "less" tests whether the mean of a is below that of b."""
    texts = {}
    for name, equal_variances in (("Welch t, p", False), ("equal variances", True)):
        texts[name] = "–"
        if min(len(a), len(b)) >= FEWEST and (np.ptp(a) or np.ptp(b)):
            test = stats.ttest_ind(a, b, equal_var=equal_variances, alternative=alternative)
            texts[name] = f"{test.statistic:+.2f}, {p_text(test.pvalue)}"
    return texts


def p_text(p):
    return "p < .001" if p < 0.001 else "p = " + f"{p:.3f}".lstrip("0")


def logistic(x, correct):
    """(intercept, slope, McFadden's pseudo-R²) of a logistic regression without penalty.

    x: floats, [n]. correct: bools, [n]. None if numbers are too few or do not vary, or if x
    separates correct from incorrect."""
    scale = np.std(x)  # x may be tiny, and the fit converges best for x near 1
    if min(sum(correct), sum(~correct)) < FEWEST or scale == 0:
        return None
    try:
        with warnings.catch_warnings(action="error"):  # of classes that are separated
            fit = Logit(correct.astype(float), add_constant(x / scale)).fit(disp=False, maxiter=200)
    except (UserWarning, RuntimeWarning, np.linalg.LinAlgError):
        return None
    intercept, slope = fit.params
    return intercept, slope / scale, fit.prsquared
