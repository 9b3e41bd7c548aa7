"""Statistical tests, by scipy and statsmodels. None if numbers are too few or do not vary."""

import warnings

import numpy as np
from scipy import stats
from statsmodels.discrete.discrete_model import Logit
from statsmodels.tools import add_constant

FEWEST = 3  # numbers that a test needs on each side


def pearson(x, y):
    if len(x) < FEWEST or not np.ptp(x) or not np.ptp(y):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def t_test(a, b, alternative="two-sided", equal_variance=False):
    """Welch's t-test of two means, or Student's with equal variances, as in the published analysis.

    alternative: "less" tests whether the mean of a is below that of b."""
    if min(len(a), len(b)) < FEWEST or np.ptp(a) == 0 == np.ptp(b):
        return None
    return stats.ttest_ind(a, b, equal_var=equal_variance, alternative=alternative)


def logistic(x, correct):
    """(intercept, slope, McFadden's pseudo-R²) of a logistic regression without penalty.

    x: floats, [n]. correct: bools, [n]. None also if x separates correct from incorrect."""
    scale = np.std(x)  # x may be tiny, and the fit converges best for x near 1
    if min(sum(correct), sum(~correct)) < FEWEST or scale == 0:
        return None
    try:
        with warnings.catch_warnings(action="error"):  # of classes that are separated
            fit = Logit(correct.astype(float), add_constant(x / scale)).fit(disp=False, maxiter=200)
    except (UserWarning, RuntimeWarning, np.linalg.LinAlgError):
        return None
    intercept, slope = fit.params
    return intercept, slope / scale, float(fit.prsquared)
