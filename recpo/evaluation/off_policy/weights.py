"""The distribution of importance weights, in bounded memory; it shows whether an estimate can be believed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from recpo.evaluation.off_policy.estimators import FloatArray

_BINS_PER_OCTAVE = 32
_SMALLEST, _OCTAVES = 2.0**-64, 128  # weights outside this range are counted in the outermost bins
_LARGEST_KEPT = 4096  # size of the exact tail: enough for Pareto's k of 1.8 million rows
_FEWEST_FOR_PARETO = 20


class WeightTail(NamedTuple):
    """The upper end of the weights.

    Attributes:
        median: median of all weights, including zeros; bins are 2 % wide.
        quantile_99: the 99 % quantile.
        largest: the largest weight, exactly.
        largest_share: its share of the sum of weights.
        top_percent_share: share of the sum in the largest 1 % of the weights.
        zero_share: share of rows whose weight is 0: the target policy would not have shown the item.
        pareto_k: shape of a generalized Pareto distribution fitted to the largest weights. From 0.5 on, the variance of
            the weights is infinite, and estimates are unreliable above 0.7 (Vehtari et al., arXiv 1507.02646). nan if
            there are too few distinct positive weights.
    """

    median: float
    quantile_99: float
    largest: float
    largest_share: float
    top_percent_share: float
    zero_share: float
    pareto_k: float


class WeightDistribution:
    """Adds up a histogram over the logarithm of the weights, and keeps the largest ones."""

    def __init__(self) -> None:
        self._counts = np.zeros(_OCTAVES * _BINS_PER_OCTAVE, np.int64)
        self._sums = np.zeros(_OCTAVES * _BINS_PER_OCTAVE)
        self._zeros = 0
        self._largest = np.zeros(0)

    def update(self, weight: FloatArray) -> None:
        """Adds weights ``[N]``, each >= 0."""
        positive = weight[weight > 0]
        self._zeros += len(weight) - len(positive)
        bins = np.floor(np.log2(positive / _SMALLEST) * _BINS_PER_OCTAVE).clip(0, len(self._counts) - 1).astype(int)
        self._counts += np.bincount(bins, minlength=len(self._counts))
        self._sums += np.bincount(bins, positive, len(self._counts))
        candidates = np.concatenate([self._largest, positive])
        keep = min(_LARGEST_KEPT, len(candidates))
        self._largest = np.partition(candidates, len(candidates) - keep)[len(candidates) - keep :]

    def compute(self) -> WeightTail:
        """The tail of all weights so far; shares are nan if all weights are 0."""
        total, rows = float(self._sums.sum()), int(self._counts.sum()) + self._zeros
        largest = float(self._largest.max(initial=0.0))
        return WeightTail(
            median=self._quantile(0.5, rows),
            quantile_99=self._quantile(0.99, rows),
            largest=largest,
            largest_share=largest / total if total else math.nan,
            top_percent_share=self._sum_of_largest(max(1, round(0.01 * rows))) / total if total else math.nan,
            zero_share=self._zeros / rows if rows else math.nan,
            pareto_k=self._pareto_k(rows),
        )

    def _quantile(self, level: float, rows: int) -> float:
        wanted = level * rows - self._zeros
        if wanted <= 0:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self._counts), wanted))
        return float(self._sums[place] / self._counts[place])  # the mean of the bin

    def _sum_of_largest(self, count: int) -> float:
        if count <= len(self._largest):
            return float(np.sort(self._largest)[len(self._largest) - count :].sum())
        counts, sums = self._counts[::-1], self._sums[::-1]
        taken = np.diff(np.minimum(np.cumsum(counts), count), prepend=0)
        return float((taken * sums / np.maximum(counts, 1)).sum())

    def _pareto_k(self, rows: int) -> float:
        tail = min(rows // 5, math.ceil(3 * math.sqrt(rows)), len(self._largest) - 1)
        if tail < _FEWEST_FOR_PARETO:
            return math.nan
        ordered = np.sort(self._largest)
        return pareto_shape(ordered[-tail:] - ordered[-tail - 1])


def pareto_shape(excess: FloatArray) -> float:
    """Shape k of the generalized Pareto distribution of values over a threshold.

    The quasi-Bayesian estimate of Zhang and Stephens (Technometrics, 2009) with the weak prior around 0.5 of Vehtari et
    al. (arXiv 1507.02646, appendix C).

    Args:
        excess: ``[n]`` ascending, >= 0.

    Returns:
        k; nan if the lower quartile of the values is 0, because too many of them equal the threshold.
    """
    n = len(excess)
    quartile = excess[int(n / 4 + 0.5) - 1]
    if quartile == 0:
        return math.nan
    grid = 30 + int(math.sqrt(n))
    place = np.arange(1, grid + 1) - 0.5
    theta = 1 / excess[-1] + (1 - np.sqrt(grid / place)) / (3 * quartile)
    shape = np.log1p(-theta[:, None] * excess).mean(1)
    log_likelihood = n * (np.log(-theta / shape) - shape - 1)
    posterior = np.exp(log_likelihood - log_likelihood.max())
    best = float((theta * posterior).sum() / posterior.sum())
    k = float(np.log1p(-best * excess).mean())
    return (n * k + 10 * 0.5) / (n + 10)


def effective_sample_size(weight: FloatArray) -> float:
    """``(sum w)^2 / sum w^2`` (Kish, 1965): number of equally weighted rows with the same information, or 0."""
    total = float(weight.sum())
    return total**2 / float((weight**2).sum()) if total > 0 else 0.0
