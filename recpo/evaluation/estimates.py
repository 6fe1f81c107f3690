"""Means over users with intervals, means over seeds, and significance of many paired differences."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.evaluation import Z95

#: Level of every test.
LEVEL = 0.05
_CELLS_AT_ONCE = 1 << 21  # of a resamples x users matrix


class Estimate(NamedTuple):
    """A mean over users with the half-width of its normal 95 % interval ``1.96 s / sqrt(n)``.

    ``mean`` is nan for n = 0, ``half_width`` for n < 2.
    """

    mean: float
    half_width: float
    n: int


class Interval(NamedTuple):
    """Both ends of a confidence interval; nan if not defined."""

    low: float
    high: float


#: The interval of what is not defined.
NOWHERE = Interval(math.nan, math.nan)


def as_json(value: Any) -> Any:
    """Numbers, mappings, sequences and named tuples (as mappings) of them as JSON values: nan becomes null."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {name: as_json(part) for name, part in value.items()}
    if hasattr(value, "_asdict"):
        return as_json(value._asdict())
    return [as_json(part) for part in value] if isinstance(value, list | tuple) else value


def or_least(value: float) -> float:
    """A value to sort by: what is not known is the worst."""
    return value if math.isfinite(value) else -math.inf


def estimate(values: Tensor, weights: Tensor | None = None) -> Estimate:
    """Mean and normal 95 % half-width of the values that are not nan.

    With weights w, the mean is ``sum(w x) / sum(w)``, with the squared standard error
    ``n / (n - 1) sum(w^2 (x - mean)^2) / sum(w)^2``; equal weights give the plain mean and ``s^2 / n``.

    Args:
        values: ``[U]``.
        weights: ``[U]``, positive where a value is defined; None = equal.
    """
    known = ~values.isnan()
    defined = values[known].double()
    n = len(defined)
    if weights is None or n < 2:
        mean = defined.mean().item() if n else math.nan
        return Estimate(mean, Z95 * defined.std().item() / math.sqrt(n) if n > 1 else math.nan, n)
    share = weights[known].double() / weights[known].double().sum()
    mean = (share * defined).sum().item()
    error = math.sqrt(n / (n - 1)) * (share * (defined - mean)).square().sum().sqrt().item()
    return Estimate(mean, Z95 * error, n)


def resampled(users: int, resamples: int, seed: int) -> Iterator[NDArray[np.integer]]:
    """How often each user is drawn with replacement, ``[rows, users]``, some of the resamples at a time."""
    rng, at_once = np.random.default_rng(seed), max(1, _CELLS_AT_ONCE // users)
    for begin in range(0, resamples, at_once):
        rows = range(begin, min(begin + at_once, resamples))
        yield np.array([np.bincount(rng.integers(0, users, users), minlength=users) for _ in rows])


def percentile_interval(values: NDArray[np.floating[Any]], level: float = 0.95) -> Interval:
    """The middle ``level`` of bootstrap values (Efron, 1979); resamples without an estimate are left out.

    Closer than the normal interval where the estimate is skewed. Neither knows of a large weight that the log does not
    happen to contain.
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return NOWHERE
    return Interval(*np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist())


def estimate_over_seeds(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean and half-width of Student's interval ``t_{n-1} s / sqrt(n)``; one value per seed, at least two.

    Raises:
        RecpoError: fewer than two values.
    """
    if len(values) < 2:
        raise RecpoError(
            f"an interval over seeds needs at least two, got {len(values)}", code="wrong_shape", field="values"
        )
    n = len(values)
    half_width = float(stdtrit(n - 1, (1 + level) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(float(np.mean(values)), half_width, n)


def p_value(mean: float, half_width: float, differing: int) -> float:
    """Two-sided p-value of "the mean paired difference is 0": normal, with a floor for few users.

        max(erfc(|mean| / (s / sqrt(n)) / sqrt(2)), 2^(1 - m))

    The normal approximation alone gives 0 for two users with equal differences. The floor is the smallest p-value of
    the exact test that flips the signs of the m nonzero differences (Fisher, 1935): with fewer than six such users,
    nothing is significant at 5 %, even if their differences are equal. A p-value is never 0.

    Args:
        mean: mean of the users' differences.
        half_width: half-width of the normal 95 % interval, ``1.96 s / sqrt(n)``.
        differing: m, users whose difference is not 0.

    Returns:
        nan if the mean or its interval is not defined; 1 if no user differs.
    """
    if math.isnan(mean) or math.isnan(half_width):
        return math.nan
    if mean == 0:
        return 1.0
    normal = math.erfc(abs(mean) / half_width * Z95 / math.sqrt(2)) if half_width else 0.0
    return min(1.0, max(normal, math.ldexp(1.0, 1 - differing), sys.float_info.min))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm's step-down procedure (Scandinavian Journal of Statistics 6, 1979).

    ``p'_(i) = max_{j <= i} min(1, (m - j + 1) p_(j))`` with ``p_(1) <= p_(2) <= ...``. Values of at most 5 % hold
    together: the probability that any of them is an accident is at most 5 %, for any dependence between the
    comparisons. It is never weaker than Bonferroni's ``m p``. nan stays nan and is not counted in m.
    """
    defined = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(defined):
        largest = max(largest, min(1.0, (len(defined) - rank) * p))
        adjusted[place] = largest
    return adjusted


def adjusted_p_values(
    differences: Tensor, weights: Tensor | None = None, *, resamples: int = 2000, seed: int = 0
) -> list[float]:
    """One-sided p-values of "the mean difference is at most 0" for M contenders, corrected for their number.

    The best of many contenders looks better than it is. The statistic of each is ``mean / standard error``. In every
    bootstrap sample of users, the largest deviation of any contender's statistic from its mean is noted; the p-value of
    a contender is the share of samples in which it reaches the contender's statistic. Contenders that behave alike
    therefore count little, which Bonferroni's correction ignores (the reality check of White, Econometrica 68, 2000;
    studentized, as Romano and Wolf, Econometrica 73, 2005). The probability that any value of at most 5 % is an
    accident is at most 5 %.

    Args:
        differences: ``[U, M]`` of the users' values to those of the baseline; nan = the user has none.
        weights: ``[U]`` of the users in every mean, as in ``estimate``; None = equal.
        resamples: number of samples.
        seed: seed of the samples.

    Returns:
        M values of at least ``1 / (resamples + 1)``; 1 for a contender with fewer than two users or no difference.
    """
    known = ~differences.isnan()
    values, count = differences.double().nan_to_num(0.0), known.sum(0)
    weight = known.double() if weights is None else known * weights.double()[:, None]
    total = weight.sum(0).clamp_min(sys.float_info.min)
    mean = (weight * values).sum(0) / total
    centered = weight * (values - mean)
    error = (count / (count - 1).clamp_min(1)).sqrt() * centered.square().sum(0).sqrt() / total
    usable = (error > 0) & (count > 1)
    statistic = torch.where(usable, mean / error, torch.where((count > 1) & (mean > 0), torch.inf, -torch.inf))
    reached = torch.zeros(len(mean))
    if usable.any():
        for drawn in resampled(len(values), resamples, seed):
            times = torch.from_numpy(drawn).double()
            totals = (times @ weight[:, usable]).clamp_min(sys.float_info.min)
            largest = (times @ centered[:, usable] / totals / error[usable]).max(1).values
            reached += (largest[:, None] >= statistic).sum(0)
    found = torch.where(statistic == -torch.inf, 1.0, (reached.double() + 1) / (resamples + 1))
    return [float(one) for one in found]
