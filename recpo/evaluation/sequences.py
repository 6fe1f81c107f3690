"""Confidence sequences: intervals that hold at all times at once, so that one may look at any time and stop.

An ordinary 95 % interval misses its mean at 5 % of the times; somebody who looks every hour sees a miss almost surely.
A confidence sequence misses it at any time at all with probability ``alpha``. NumPy only: the server imports it.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recpo.base.errors import RecpoError, validate_range

FloatArray = NDArray[np.float64]
#: 97.5 % quantile of the standard normal distribution.
Z95: Final = 1.959963984540054
#: Clusters before which the normal approximation is not used.
FIRST_LOOK: Final = 100
_LARGEST_BET = 0.5


class EmpiricalBernstein:
    """Confidence sequence of the mean of values in [0, 1]: predictable plug-in empirical Bernstein.

    At each time t, with probability 1 - alpha for all t together,

        |sum_i l_i m_i / L - sum_i l_i x_i / L| <= (log(2 / alpha) + sum_i v_i psi(l_i)) / L,    L = sum_i l_i

    with ``psi(l) = (-log(1 - l) - l) / 4``, ``v_i = 4 (x_i - mean_(i-1))^2`` and bets ``l_i``, which depend on the
    values before i only (Waudby-Smith and Ramdas, arXiv 2010.09686, theorem 2). It needs no distribution, no
    independence and no minimum count: ``m_i`` is the expectation of ``x_i`` given all values before. If it is constant,
    the interval is of that mean; otherwise of its weighted mean so far, for example over the users who came. Intervals
    of earlier times are not intersected, because that mean may move.

    Args:
        shape: shape of the sequences that are followed side by side; () = one.
        alpha: probability of a miss at any time.

    Attributes:
        count: number of values so far.
        low: lower end now; 0 before the first value.
        high: upper end now; 1 before the first value.

    Raises:
        RecpoError: ``alpha`` is outside (0, 1).
    """

    def __init__(self, shape: tuple[int, ...] = (), *, alpha: float = 0.05) -> None:
        validate_range(0 < alpha < 1, "alpha", "must be between 0 and 1", alpha)
        self._log = math.log(2 / alpha)
        self.count = 0
        self._sum, self._squares = np.full(shape, 0.5), np.full(shape, 0.25)
        self._bets, self._weighted, self._variation = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.low, self.high = np.zeros(shape), np.ones(shape)

    def update(self, values: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Appends values ``[*shape, n]`` and returns both ends ``[*shape, n]`` after each of them.

        Raises:
            RecpoError: a value outside [0, 1].
        """
        x = np.asarray(values, np.float64)
        if not ((x >= 0) & (x <= 1)).all():  # nan as well
            raise RecpoError("a value outside [0, 1]: scale it by its bounds", code="out_of_range", field="values")
        times = self.count + np.arange(1, x.shape[-1] + 1)
        sums = self._sum[..., None] + x.cumsum(-1)
        mean = sums / (times + 1)
        squares = self._squares[..., None] + np.square(x - mean).cumsum(-1)
        before = np.concatenate([self._squares[..., None], squares], -1)[..., :-1] / times  # the variance before
        mean_before = np.concatenate([self._sum[..., None], sums], -1)[..., :-1] / times
        bets = np.minimum(np.sqrt(2 * self._log / (before * times * np.log1p(times))), _LARGEST_BET)
        variation = np.square(x - mean_before) * (-np.log1p(-bets) - bets)
        total = self._bets[..., None] + bets.cumsum(-1)
        weighted = self._weighted[..., None] + (bets * x).cumsum(-1)
        varied = self._variation[..., None] + variation.cumsum(-1)
        center, half = weighted / total, (self._log + varied) / total
        low, high = np.maximum(center - half, 0.0), np.minimum(center + half, 1.0)
        if len(times):
            self.count = int(times[-1])
            self._sum, self._squares = sums[..., -1], squares[..., -1]
            self._bets, self._weighted, self._variation = total[..., -1], weighted[..., -1], varied[..., -1]
            self.low, self.high = low[..., -1], high[..., -1]
        return low, high


class ClusteredMean(NamedTuple):
    """A mean per impression with its standard error over users.

    Attributes:
        mean: sum of all values over the number of impressions; nan without impressions.
        error: its standard error, whose clusters are the users; nan with fewer than two users.
        impressions: number of impressions.
        users: number of clusters U.
    """

    mean: float
    error: float
    impressions: int
    users: int

    def __sub__(self, other: ClusteredMean) -> ClusteredMean:
        """The difference of two means of different users, with the error of independent samples.

        Its number of clusters is that of the smaller sample: that one has most of the error, and a look has to wait
        for it.
        """
        error, users = math.hypot(self.error, other.error), min(self.users, other.users)
        return ClusteredMean(self.mean - other.mean, error, self.impressions + other.impressions, users)

    @property
    def half_width(self) -> float:
        """Half-width of the ordinary 95 % interval, which holds if one looks once."""
        return Z95 * self.error

    def sequence_half_width(self, *, alpha: float = 0.05, tightest: int = 2000) -> float:
        """Half-width of the confidence sequence; infinite before the first look, see ``anytime_half_width``."""
        return float(anytime_half_width(self.error, self.users, alpha=alpha, tightest=tightest))


def clustered_mean(sums: ArrayLike, counts: ArrayLike) -> ClusteredMean:
    """The mean per impression, its standard error from the users' residuals (the linearized ratio).

        mean = S / N,    error^2 = U / (U - 1) sum_u (s_u - mean n_u)^2 / N^2

    Args:
        sums: ``[U]`` sum of a user's values.
        counts: ``[U]`` number of a user's impressions.
    """
    s, n = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    total, users = float(n.sum()), int((n > 0).sum())
    if not total:
        return ClusteredMean(math.nan, math.nan, 0, 0)
    mean = float(s.sum()) / total
    squares = float(np.square(s - mean * n).sum())
    error = math.sqrt(users / (users - 1) * squares) / total if users > 1 else math.nan
    return ClusteredMean(mean, error, int(total), users)


def anytime_half_width(
    error: ArrayLike, count: ArrayLike, *, alpha: float = 0.05, tightest: int = 2000, first: int = FIRST_LOOK
) -> FloatArray:
    """Half-width of the asymptotic confidence sequence of a mean (Waudby-Smith et al., arXiv 2103.06476, theorem 2.2).

        error sqrt((1 + 1 / (t r)) log((t r + 1) / alpha^2)),    r = (-2 log alpha + log(-2 log alpha) + 1) / tightest

    It is the boundary of a normal mixture (Robbins, 1970) and needs no bounds of the values. With users as clusters it
    is conservative if the values of a user are positively correlated: the deviations at two times are then more alike
    than those of independent increments, and cross the boundary less often (Slepian's inequality).

    Args:
        error: standard error of the mean at time t.
        count: t, the number of clusters.
        alpha: probability of a miss at any time.
        tightest: the t at which the interval is about as short as possible: 1.55 times the ordinary 95 %
            interval there, for alpha = 0.05.
        first: before this t the half-width is infinite, because the normal approximation is not used there.
    """
    validate_range(0 < alpha < 1, "alpha", "must be between 0 and 1", alpha)
    validate_range(tightest >= 1, "tightest", "must be at least 1", tightest)
    t, twice = np.maximum(np.asarray(count, np.float64), 1.0), -2 * math.log(alpha)
    scaled = t * (twice + math.log(twice) + 1) / tightest
    factor = np.sqrt((1 + 1 / scaled) * (np.log1p(scaled) + twice))
    known = (t >= first) & ~np.isnan(np.asarray(error, np.float64))
    return np.where(known, factor * np.nan_to_num(np.asarray(error, np.float64)), np.inf)
