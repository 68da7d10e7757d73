"""Goodness of fit without scipy. Seeds are fixed in the tests, so nothing here makes a test flaky."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LIMIT = 4.0
"""Normal quantile of the limits below: a sound sample exceeds them once in 30,000 tests."""


def chi_square_fits(counts: ArrayLike, probabilities: ArrayLike) -> bool:
    """Pearson's test of observed counts against probabilities; a count where there can be none fails.

    Cells expected less than five times are pooled. The chi-square quantile is Wilson and Hilferty's.
    """
    observed = np.asarray(counts, np.float64).ravel()
    expected = np.asarray(probabilities, np.float64).ravel() * observed.sum()
    if observed[expected == 0].any():
        return False
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return True
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return statistic <= freedom * (1 - spread + _LIMIT * math.sqrt(spread)) ** 3


def kolmogorov_smirnov_fits(
    sample: ArrayLike, cdf: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> bool:
    """One-sample Kolmogorov-Smirnov test at a level near 1e-4."""
    x = np.sort(np.asarray(sample, np.float64).ravel())
    n = len(x)
    expected = cdf(x)
    distance = max((np.arange(1, n + 1) / n - expected).max(), (expected - np.arange(n) / n).max())
    return bool(distance * math.sqrt(n) <= 2.23)
