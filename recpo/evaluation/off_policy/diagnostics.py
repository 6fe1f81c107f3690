"""Can an estimate be believed? The distribution of importance weights, in bounded memory, and warnings."""

import math
from typing import NamedTuple

import numpy as np

from recpo.evaluation.estimates import Interval
from recpo.evaluation.off_policy.estimators import DM, NAIVE_AVERAGE, Estimator, FloatArray, PropensitySource

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


LEAST_EFFECTIVE_ROWS = 100.0
LEAST_EFFECTIVE_SHARE = 0.01
LARGEST_SHARE = 0.1
LARGEST_PARETO_K = 0.7
LARGEST_UNSUPPORTED_SHARE = 0.1
MEAN_WEIGHT_TOLERANCE = 0.01
MEAN_WEIGHT_LEVEL = 0.99  # one of a hundred correct logs gets a warning


class Diagnostics(NamedTuple):
    """The data and weights behind the estimates of one target policy.

    Attributes:
        rows: number of exposures with a reward and a propensity, which the estimates use.
        users: number of users with such exposures.
        rows_without_reward: number of exposures that are skipped because their reward is unknown.
        rows_without_propensity: number of exposures with a reward that are skipped because their propensity is unknown.
        effective_rows: ``(sum w)^2 / sum w^2`` over rows: the number of equally weighted rows with the same
            information.
        effective_users: the same over the users' sums of weights; users are the units of the intervals.
        mean_weight: mean of the weights. Its expectation is the target policy's probability of items that the logging
            policy can show: ``1 - no_item_share`` if propensities are correct and no item is missing.
        mean_weight_interval: its normal 99 % interval over users.
        tail: the upper end of the weights.
        unsupported_share: share of the target policy's choices (places of its lists, or draws from it) that are items
            without any row in the log; nan if the policy cannot be sampled.
        no_item_share: share of its draws that are not items (a policy over semantic ids that is normalized over the
            codebook may draw codes without an item); they earn 0; nan if the policy cannot be sampled.
    """

    rows: int
    users: int
    rows_without_reward: int
    rows_without_propensity: int
    effective_rows: float
    effective_users: float
    mean_weight: float
    mean_weight_interval: Interval
    tail: WeightTail
    unsupported_share: float
    no_item_share: float = math.nan


def warnings_of(estimator: Estimator, diagnostics: Diagnostics, source: PropensitySource) -> tuple[str, ...]:
    """Warnings to read before believing an estimate; empty if there are none."""
    found = []
    if estimator == NAIVE_AVERAGE:
        found.append("confounded: the rewards of what was shown, to those to whom it was shown; for comparison only")
    if estimator == DM:
        found.append("this is what the reward model believes: no interval contains the model's error")
    if diagnostics.tail.largest > estimator.clip:
        found.append(f"biased, for rewards >= 0 toward 0: weights above {estimator.clip:g} are cut")
    if not estimator.reads_weights:
        return tuple(found)
    found += _about_weights(diagnostics)
    if estimator.self_normalized and diagnostics.no_item_share > MEAN_WEIGHT_TOLERANCE:
        found.append(
            f"biased: {diagnostics.no_item_share:.0%} of the policy's draws are not items; self-normalized "
            "estimators leave them out; IPS and DR count them as a reward of 0"
        )
    if source == "estimated":
        found.append("propensities are estimated from who was shown what; no interval contains the error of that model")
    return tuple(found)


def _about_weights(diagnostics: Diagnostics) -> list[str]:
    """Whether they are enough, their tail, and whether the log shows what the policy would."""
    found, effective, tail = [], diagnostics.effective_rows, diagnostics.tail
    if effective < LEAST_EFFECTIVE_ROWS:
        found.append(
            f"means nothing: only {effective:.0f} effective rows of {diagnostics.rows:,}, "
            f"expected at least {LEAST_EFFECTIVE_ROWS:.0f}"
        )
    elif effective < LEAST_EFFECTIVE_SHARE * diagnostics.rows:
        speaks = f"{effective:.0f} effective rows of {diagnostics.rows:,}"
        found.append(f"little of the log speaks about this policy: {speaks}")
    if tail.largest_share > LARGEST_SHARE:
        found.append(f"one row carries {tail.largest_share:.0%} of all weight")
    if tail.pareto_k > LARGEST_PARETO_K:
        found.append(
            f"the weights have a long tail (Pareto k {tail.pareto_k:.2f} > {LARGEST_PARETO_K}): larger ones than the "
            "log happens to hold are missing, and intervals are too narrow"
        )
    interval = diagnostics.mean_weight_interval
    # weights of a policy close to the logging policy hardly vary, so rounded propensities must not trigger the warning
    expected = 1 - (0.0 if math.isnan(diagnostics.no_item_share) else diagnostics.no_item_share)
    off = abs(diagnostics.mean_weight - expected) > MEAN_WEIGHT_TOLERANCE
    if off and (interval.low > expected or interval.high < expected):
        cause = "propensities are wrong"
        cause += ", or the policy wants items that the log cannot show" if interval.high < expected else ""
        found.append(f"the mean weight is {diagnostics.mean_weight:.3g}, expected {expected:.3g}: {cause}")
    if diagnostics.unsupported_share > LARGEST_UNSUPPORTED_SHARE:
        found.append(
            f"{diagnostics.unsupported_share:.0%} of what the policy would show are items that no row shows: "
            "the log has no information about them"
        )
    return found
