"""Statistical tests, by scipy and statsmodels. None if there are too few numbers or they do not vary."""

import warnings

import numpy as np
from scipy import stats
from statsmodels.discrete.discrete_model import Logit
from statsmodels.tools import add_constant

FEWEST = 3  # numbers that a test needs on each side


def pearson(x, y):
    return float(np.corrcoef(x, y)[0, 1]) if len(x) >= FEWEST and np.ptp(x) and np.ptp(y) else None


def t_test(a, b, alternative="two-sided", equal_variance=False):
    """Welch's t-test of two means, or Student's with equal variances, as in the published analysis.

    alternative: "less" tests whether the mean of a is below that of b."""
    if min(len(a), len(b)) < FEWEST or np.ptp(a) == 0 == np.ptp(b):
        return None
    return stats.ttest_ind(a, b, equal_var=equal_variance, alternative=alternative)


def logistic(x, correct):
    """(intercept and slopes, McFadden's pseudo-R²) of a logistic regression without penalty of correct answers on x.

    x: floats, [n, predictors]. correct: bools, [n]. None also if the predictors separate the two classes."""
    scale = np.std(x, axis=0)  # x may be tiny, and the fit converges best for x near 1
    if min(sum(correct), sum(~correct)) < FEWEST or not scale.all():
        return None
    try:
        with warnings.catch_warnings(action="error"):  # of classes that are separated
            fit = Logit(correct.astype(float), add_constant(x / scale)).fit(disp=False, maxiter=200)
    except (UserWarning, RuntimeWarning, np.linalg.LinAlgError):
        return None
    return fit.params / [1, *scale], float(fit.prsquared)
