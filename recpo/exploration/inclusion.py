"""The probability that an item is in a slate drawn without replacement, to nine digits and without enumeration.

Drawing k items one by one, each in proportion to its weight among those that are left (Plackett, 1975; Luce, 1959), is
a race: item i arrives at an exponential time of rate ``w_i``, and the slate is the first k to arrive. Gumbel top-k
(Kool et al., arXiv 1903.06059) is that race in the logarithm of time. So

    P(i in slate) = integral over t of w_i exp(-w_i t) S_i(t),    S_i(t) = P(fewer than k of the others arrive before t)

one integral instead of a sum over orderings. Until a time t the others have arrived independently, each with
``p_j = 1 - exp(-w_j t)``: ``S_i(t)`` is the sum of the first k coefficients of ``prod_(j != i) (1 - p_j + p_j z)``. All
of its terms are positive: nothing cancels, and what error there is comes from the integral. A Poisson process of rate L
has the same integral in closed form, ``1 - (L / (L + w_i))^k``; what remains, the difference of the two, vanishes at
both ends and is summed by the trapezoidal rule in ``log t``, which converges exponentially (Trefethen and Weideman,
2014).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recpo.errors import RecpoError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_TAIL = 1e-10  # probability that is left out at each end of the integral
_CERTAIN = 50.0  # a weight exp(50) times that of the k-th item arrives before everything that matters
_BISECTIONS = 14
_CELLS = 1 << 17  # floats of one level of the product at a time: 1 MiB stays in the cache


def inclusion_probabilities(logits: ArrayLike, k: int, chosen: ArrayLike | None = None) -> FloatArray:
    """Probabilities of being among ``k`` items drawn without replacement from ``softmax(logits)``.

    Absolute error below 1e-9 and relative error below 1e-8 (tests compare with all orderings and with a finer grid).
    Time: proportional to ``M k`` and to the number of points in time, about 25 where weights are alike and some
    hundred where they differ by many orders of magnitude.

    Args:
        logits: ``[B, M]`` unnormalized log-weights, -inf = cannot be drawn; no nan and no +inf.
        k: size of the slate; where fewer items can be drawn, all of them are.
        chosen: ``[B, C]`` distinct columns whose probabilities are wanted; None = all, in time proportional to M
            more steps.

    Returns:
        ``[B, C]`` in [0, 1]; with all columns a row sums to ``min(k, items that can be drawn)``.

    Raises:
        RecpoError: a wrong shape, nan or +inf, or k below 1.
    """
    logits = np.asarray(logits, np.float64)
    if logits.ndim != 2 or np.isnan(logits).any() or np.isposinf(logits).any() or k < 1:
        raise RecpoError(
            f"inclusion probabilities: expected log-weights [B, M] without nan and +inf, and k of at least 1; got "
            f"shape {logits.shape} and k = {k}"
        )
    columns = np.arange(logits.shape[1])[None] if chosen is None else np.asarray(chosen, np.int64)
    columns = np.broadcast_to(columns, (len(logits), columns.shape[1]))
    possible = logits > -np.inf
    found = np.take_along_axis(possible, columns, 1).astype(np.float64)
    if k == 1:
        return _softmax(logits, found, columns)
    open_rows = np.flatnonzero(possible.sum(1) > k)
    for part in _parts(open_rows, logits.shape[1]):
        found[part] = _integrated(logits[part], k, columns[part])
    return found


def _softmax(logits: FloatArray, found: FloatArray, columns: IntArray) -> FloatArray:
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf)))
    total = weights.sum(1, keepdims=True)
    return np.where(found > 0, np.take_along_axis(weights, columns, 1) / np.where(total > 0, total, 1.0), 0.0)


def _parts(rows: IntArray, items: int) -> list[IntArray]:
    step = max(1, _CELLS // (64 * max(1, items)))
    return [rows[begin : begin + step] for begin in range(0, len(rows), step)]


def _integrated(logits: FloatArray, k: int, columns: IntArray) -> FloatArray:
    """Rows with more than k items that can be drawn, k from 2 on."""
    # In units of the k-th weight nothing that matters overflows or vanishes, however far the weights are apart.
    ordered = -np.sort(-logits, axis=1)
    with np.errstate(under="ignore"):
        weights = np.exp(np.minimum(logits - ordered[:, k - 1 : k], _CERTAIN))
        later = np.exp(ordered[:, k - 1 :] - ordered[:, k - 1 : k]).sum(1)
        times = _times(weights, later, k)
        w = np.take_along_axis(weights, columns, 1)[:, :, None]
        t = times.t[:, None, :]
        survival = _fewer_than_k_others(weights, times.t, k, columns)
        reference = _poisson_cdf(times.rate[:, None] * times.t, k)
        rest = (w * t * np.exp(-w * t) * (survival - reference[:, None, :])).sum(2) * times.step[:, None]
        found = -np.expm1(-k * np.log1p(w[:, :, 0] / times.rate[:, None])) + rest
    return np.clip(found, 0.0, 1.0)


class _Times(NamedTuple):
    """Where the integral is summed.

    Attributes:
        t: ``[B, Q]`` points in time, equally spaced in log t.
        step: ``[B]`` their distance in log t.
        rate: ``[B]`` L, of the Poisson process with a closed form.
    """

    t: FloatArray
    step: FloatArray
    rate: FloatArray


def _times(weights: FloatArray, later: FloatArray, k: int) -> _Times:
    """Points that leave out no more than ``_TAIL`` at each end.

    Before the first point fewer than k have arrived: by Chernoff's bound for the expected number of arrivals, or
    because one of the items from the k-th on would have to, whose weights sum to ``later [B]``. After the last one at
    least k have: by Chernoff's bound, or because each of the k first (of weight 1 or more) has.
    """
    few, many = _chernoff(k)
    earliest, latest = np.log(_TAIL / later), math.log(math.log(k / _TAIL))
    low = np.repeat(earliest[:, None], 3, 1)
    high = np.full_like(low, latest)
    targets = np.array([few, k - 0.5, many + 1])
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        arrived = -np.expm1(-weights[:, None, :] * np.exp(middle)[:, :, None]).sum(2)
        low, high = np.where(arrived < targets, middle, low), np.where(arrived < targets, high, middle)
    rate = k / np.exp((low + high)[:, 1] / 2)
    begin = np.minimum(low[:, 0], np.log(few / rate))
    end = np.maximum(high[:, 2], np.log(many / rate))
    points = int(np.ceil((end - begin).max() / _spacing(k))) + 1
    log_t = begin[:, None] + (end - begin)[:, None] * np.linspace(0, 1, points)
    return _Times(np.exp(log_t), (end - begin) / (points - 1), rate)


def _spacing(k: int) -> float:
    """Distance of the points in log t at which the trapezoidal rule errs by 1e-9 or less.

    For equal weights the integrand is a gamma density of shape k in log t, whose error at the spacing h is
    ``2 |Gamma(k + 2 pi i / h)| / Gamma(k)``; unequal weights and few items make it wider and smoother.
    """
    return 2 * math.pi / (12 + 5.5 * math.sqrt(k))


@lru_cache(maxsize=256)
def _chernoff(k: int) -> tuple[float, float]:
    """Expected arrivals with which k or more, and fewer than k, arrive with a probability of at most ``_TAIL``."""

    def log_bound(count: float, mean: float) -> float:
        return (count * (1 + math.log(mean / count)) if count else 0.0) - mean

    few, many = (1e-12, float(k)), (float(max(k - 1, 1e-12)), 10.0 * k + 100)
    for _ in range(60):
        middle = (few[0] + few[1]) / 2
        few = (middle, few[1]) if log_bound(k, middle) < math.log(_TAIL) else (few[0], middle)
        middle = (many[0] + many[1]) / 2
        many = (many[0], middle) if log_bound(k - 1, middle) < math.log(_TAIL) else (middle, many[1])
    return few[0], many[1]


def _poisson_cdf(mean: FloatArray, k: int) -> FloatArray:
    """``P(N <= k - 1)`` of Poisson numbers with the means ``[B, Q]``."""
    n = np.arange(k)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, k)))])
    return np.asarray(np.exp(n * np.log(mean)[..., None] - log_factorial - mean[..., None]).sum(-1))


def _fewer_than_k_others(weights: FloatArray, t: FloatArray, k: int, columns: IntArray) -> FloatArray:
    """``[B, C, Q]`` probability that fewer than k items beside the column's own arrive before ``t [B, Q]``."""
    rows, count = np.arange(len(t))[:, None], columns.shape[1]
    others = weights.copy()
    others[rows, columns] = 0.0  # a factor of 1
    rest = _product(-np.expm1(-others.T[:, :, None] * t), k)
    p = -np.expm1(-weights[rows, columns].T[:, :, None] * t)
    # Products of the chosen items before and after each one: leaving an item out needs no division.
    before = np.zeros((count, k, *t.shape))
    after = np.zeros((count, k, *t.shape))
    before[0, : len(rest)], after[-1, 0] = rest, 1.0
    for i in range(1, count):
        before[i] = _with_item(before[i - 1], p[i - 1])
        after[-1 - i] = _with_item(after[-i], p[-i])
    return np.einsum("cnbq,cnbq->bcq", before, np.cumsum(after, 1)[:, ::-1])


def _with_item(polynomial: FloatArray, p: FloatArray) -> FloatArray:
    """``polynomial (1 - p + p z)``, with as many coefficients as before."""
    product = polynomial * (1 - p)
    product[1:] += polynomial[:-1] * p
    return product


def _product(p: FloatArray, k: int) -> FloatArray:
    """The first k coefficients of ``prod_j (1 - p_j + p_j z)`` for ``p [M, B, Q]``, by multiplying in pairs."""
    found = np.stack([1 - p, p])
    while found.shape[1] > 1:
        if found.shape[1] % 2:
            one = np.zeros_like(found[:, :1])
            one[0] = 1.0
            found = np.concatenate([found, one], 1)
        left, right = found[:, 0::2], found[:, 1::2]
        size = min(2 * len(found) - 1, k)
        found = np.zeros((size, *left.shape[1:]))
        for power, coefficient in enumerate(left[:size]):
            width = min(len(right), size - power)
            found[power : power + width] += coefficient * right[:width]
    return found[:k, 0]
