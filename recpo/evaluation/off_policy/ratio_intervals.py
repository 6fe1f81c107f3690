"""Intervals of sums of ratios over users, whose rows depend on each other.

The unit is the user: ``sums [U, 2 J]`` hold each user's numerators and denominators, and users are taken as independent
draws from a population. A user's rows may depend on each other in any way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from recpo.evaluation.estimates import Interval
from recpo.evaluation.off_policy.estimators import FloatArray, sum_of_ratios

_CELLS_AT_ONCE = 1 << 21  # of a resamples x users matrix

NOWHERE = Interval(math.nan, math.nan)


def influence(sums: FloatArray) -> FloatArray:
    """How much each user moves the estimate: ``[U]``, of sum 0.

    The delta method: ``sum_j (numerator_uj - ratio_j denominator_uj) / sum_u denominator_uj``.
    """
    numerator, denominator = np.split(sums, 2, axis=1)
    total = denominator.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(((numerator - numerator.sum(0) / total * denominator) / total).sum(1))


def normal_interval(influences: FloatArray, value: float, level: float = 0.95) -> Interval:
    """``value +- z sqrt(U / (U - 1) sum_u influence_u^2)``: right for many users and weights without a long tail.

    nan at both ends where the value is nan, and below two users.

    Args:
        influences: ``[U]`` of the estimate, or differences of those of two estimates on the same users.
        value: the estimate.
        level: probability with which the interval is to contain what is estimated.
    """
    half_width = ndtri((1 + level) / 2).item() * standard_error(influences)
    return Interval(value - half_width, value + half_width)


def standard_error(influences: FloatArray) -> float:
    """``sqrt(U / (U - 1) sum_u influence_u^2)`` of ``influences [U]``; nan below two users."""
    users = len(influences)
    return math.sqrt(users / (users - 1) * (influences**2).sum()) if users > 1 else math.nan


def bootstrap_values(samples: Sequence[FloatArray], resamples: int, seed: int) -> list[FloatArray]:
    """Estimates ``[resamples]`` of each of ``samples`` over users drawn with replacement.

    The same users for all: values of two contenders may be subtracted. Memory: a few resamples at a time.

    Args:
        samples: ``[U, 2 J]`` sums of as many estimators over the same users.
        resamples: how many.
        seed: of the random numbers.
    """
    users = len(samples[0])
    rng = np.random.default_rng(seed)
    joined = np.concatenate(samples, axis=1)
    totals = np.empty((resamples, joined.shape[1]))
    at_once = max(1, _CELLS_AT_ONCE // users)
    for begin in range(0, resamples, at_once):
        part = totals[begin : begin + at_once]
        drawn = [np.bincount(rng.integers(0, users, users), minlength=users) for _ in part]
        part[:] = np.array(drawn, np.float64) @ joined
    edges = np.cumsum([sample.shape[1] for sample in samples])[:-1]
    return [sum_of_ratios(part) for part in np.split(totals, edges, axis=1)]


def percentile_interval(values: FloatArray, level: float = 0.95) -> Interval:
    """The middle ``level`` of bootstrap values (Efron, 1979); resamples without an estimate are left out.

    Closer than the normal interval where the estimate is skewed. Neither knows of a large weight that the log does not
    happen to contain.
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return NOWHERE
    return Interval(*np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist())


def empirical_bernstein_interval(values: FloatArray, low: float, high: float, level: float = 0.95) -> Interval:
    """An interval that holds for every number of independent ``values [U]`` in ``[low, high]``, not only for many.

        mean +- (sqrt(2 s^2 ln(4 / delta) / U) + 7 (high - low) ln(4 / delta) / (3 (U - 1))),   delta = 1 - level

    Maurer and Pontil (COLT 2009, arXiv 0907.3740), theorem 4, applied to both sides with delta / 2 each. Wide: it pays
    for what it promises.

    Raises:
        ValueError: a value outside the range.
    """
    users = len(values)
    if users < 2:
        return NOWHERE
    slack = 1e-9 * max(-low, high, 1.0)
    if values.min() < low - slack or values.max() > high + slack:
        raise ValueError(f"values from {values.min():g} to {values.max():g} lie outside {low:g} to {high:g}")
    log_term = math.log(4 / (1 - level))
    mean, variance = float(values.mean()), float(values.var(ddof=1))
    half_width = math.sqrt(2 * variance * log_term / users) + 7 * (high - low) * log_term / (3 * (users - 1))
    return Interval(max(low, mean - half_width), min(high, mean + half_width))
