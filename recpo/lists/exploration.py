"""Slates drawn at random with exact propensities: what a served policy needs so that its log can be learned from.

The probability that an item is in a slate drawn without replacement, to nine digits and without enumeration.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recpo.base.errors import ClosedUnitInterval, PositiveInt, RecpoError, validate_range, validate_ranges

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pool:
    """The items 1..V of a catalog, or some of them, without excluded items.

    A request excludes only a few items, so the rest of the catalog is not copied for it.

    Attributes:
        ids: ``[N]`` internal ids, ascending; None = 1..``num_items``.
        num_items: V.
        left_out: ``[E]`` places of ``ids`` (or of 1..V) that are excluded, ascending.
    """

    ids: IntArray | None
    num_items: int
    left_out: IntArray

    @classmethod
    def of(cls, num_items: int, *, exclude: ArrayLike = (), ids: ArrayLike | None = None) -> Self:
        """The pool of one request.

        Args:
            num_items: V.
            exclude: internal ids that must not be listed, in any order; 0 pads.
            ids: the only internal ids that may be listed; None = the full catalog.

        Raises:
            RecpoError: an id outside 1..V (0..V for those to exclude).
        """
        excluded, kept = _ids(exclude, "exclude", 0, num_items), None
        if ids is not None:
            kept = _ids(ids, "ids", 1, num_items)
            excluded = np.searchsorted(kept, excluded[np.isin(excluded, kept)])
        else:
            excluded = excluded[excluded > 0] - 1
        return cls(kept, num_items, excluded)

    def __len__(self) -> int:
        """How many items may be listed."""
        return (self.num_items if self.ids is None else len(self.ids)) - len(self.left_out)

    def at(self, ranks: IntArray) -> IntArray:
        """The items at ``ranks [n]``, 0 .. ``len(self)`` - 1, in ascending order of all items of the pool."""
        place = ranks + np.searchsorted(self.left_out - np.arange(len(self.left_out)), ranks, side="right")
        return place + 1 if self.ids is None else self.ids[place]

    def contains(self, items: IntArray) -> NDArray[np.bool_]:
        """Whether each of ``items [n]`` may be listed."""
        place = items - 1
        known = (items >= 1) & (items <= self.num_items)
        if self.ids is not None:
            place = np.minimum(np.searchsorted(self.ids, items), max(0, len(self.ids) - 1))
            known &= self.ids[place] == items if len(self.ids) else False
        return known & ~np.isin(place, self.left_out)


def _ids(values: ArrayLike, name: str, smallest: int, largest: int) -> IntArray:
    found = np.unique(np.asarray(values, np.int64))
    if len(found) and (found[0] < smallest or found[-1] > largest):
        message = f"pool: {name} has ids {found[0]}..{found[-1]}, expected {smallest}..{largest}"
        raise RecpoError(message, code="out_of_range", field=name)
    return found


FloatArray = NDArray[np.float64]

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
        message = (
            f"inclusion probabilities: expected log-weights [B, M] without nan and +inf, and k of at least 1; got "
            f"shape {logits.shape} and k = {k}"
        )
        raise RecpoError(message, code="out_of_range" if k < 1 else "wrong_shape", field="k" if k < 1 else "logits")
    columns = np.arange(logits.shape[1])[None] if chosen is None else np.asarray(chosen, np.int64)
    columns = np.broadcast_to(columns, (len(logits), columns.shape[1]))
    possible = logits > -np.inf
    found = np.take_along_axis(possible, columns, 1).astype(np.float64)
    if k == 1:
        return _softmax(logits, found, columns)
    open_rows = np.flatnonzero(possible.sum(1) > k)
    step = max(1, _CELLS // (64 * max(1, logits.shape[1])))
    for begin in range(0, len(open_rows), step):
        part = open_rows[begin : begin + step]
        found[part] = _integrated(logits[part], k, columns[part])
    return found


def _softmax(logits: FloatArray, found: FloatArray, columns: IntArray) -> FloatArray:
    with np.errstate(invalid="ignore"):
        weights = np.nan_to_num(np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf)))
    total = weights.sum(1, keepdims=True)
    return np.where(found > 0, np.take_along_axis(weights, columns, 1) / np.where(total > 0, total, 1.0), 0.0)


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
    """``P(N <= k - 1)`` of Poisson numbers with the means ``[B, Q]``; a server has no SciPy."""
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


BoolArray = NDArray[np.bool_]

_COLDEST = 1e-6  # below this the differences of log-probabilities leave the precision of the noise


class Slate(NamedTuple):
    """The slate of one request.

    Attributes:
        items: ``[n]`` internal ids in the order in which they are shown; n is k, or less if fewer items may be listed.
        propensity: ``[n]`` probability in (0, 1] of the item at a random position of this slate; over all items that
            may be listed it sums to 1. The log's column ``propensity``.
        explored: ``[n]`` bool, the item is not one of the n best, which would be shown without exploration.
        is_random: the slate was drawn uniformly. The log's column ``is_random`` for all rows of the slate.
        positions: ``[n]`` places in the shortlist, -1 = the item was drawn from the rest of the catalog.
    """

    items: IntArray
    propensity: FloatArray
    explored: BoolArray
    is_random: bool
    positions: IntArray


class SlateBatch(NamedTuple):
    """The slates of several requests, padded: ``items`` 0, ``propensity`` nan, ``explored`` False, ``positions`` -1.

    Attributes:
        items: ``[B, k]``.
        propensity: ``[B, k]``.
        explored: ``[B, k]``.
        is_random: ``[B]``.
        positions: ``[B, k]``.
        lengths: ``[B]`` items in each slate.
    """

    items: IntArray
    propensity: FloatArray
    explored: BoolArray
    is_random: BoolArray
    positions: IntArray
    lengths: IntArray

    def of(self, row: int) -> Slate:
        """The slate of one request."""
        n = int(self.lengths[row])
        return Slate(
            self.items[row, :n],
            self.propensity[row, :n],
            self.explored[row, :n],
            bool(self.is_random[row]),
            self.positions[row, :n],
        )


@dataclass(frozen=True)
class Exploration:
    """Options that draw a slate of k items from the M best items.

    With probability ``epsilon`` the slate is uniform without replacement; otherwise its items are drawn without
    replacement from ``softmax(logp / temperature)`` over the shortlist, by Gumbel top-k (Kool et al., arXiv
    1903.06059). The propensity of an item on a slate of n items is exact:

        (1 - epsilon) P(item among n drawn from the shortlist) / n + epsilon / N

    with N items in the pool of the uniform part. It is the probability of the item at a random position of the slate.
    An exposure is such a position, so with this propensity IPS, SNIPS and doubly robust values of the log are unbiased.
    The probability of the item given the items above it would be biased: an item above cannot be drawn again, so the
    target policy's probability of it at this position would be missing. docs/exploration.md has the derivation.

    Attributes:
        temperature: divides the log-probabilities; 1 = the policy itself, more = closer to uniform, 0 = the best items
            in their order.
        epsilon: share of requests whose slate is uniform, in [0, 1].
        shortlist: M, how many of the policy's best items can be drawn at a temperature.
        uniform_over: source of uniform slates: the full allowed catalog, so that every item that may be listed has a
            propensity above 0, or the shortlist, so that no user is shown items far from their taste.
    """

    temperature: float = 1.0
    epsilon: ClosedUnitInterval = 0.0
    shortlist: PositiveInt = 100
    uniform_over: Literal["catalog", "shortlist"] = "catalog"

    def __post_init__(self) -> None:
        validate_ranges(self)
        fits = self.temperature == 0 or _COLDEST <= self.temperature < math.inf
        validate_range(fits, "temperature", f"must be 0 (the best items), or from {_COLDEST:g} on", self.temperature)
        if self.uniform_over not in ("catalog", "shortlist"):
            message = f"exploration: uniform_over is {self.uniform_over!r}, expected catalog or shortlist"
            raise RecpoError(message, code="unknown_name", field="uniform_over")

    def sample(
        self, items: ArrayLike, logp: ArrayLike, k: int, generator: np.random.Generator, allowed: Pool | None = None
    ) -> Slate:
        """Draws the slate of one request.

        Args:
            items: ``[M]`` internal ids of the shortlist, distinct; 0 = an empty place.
            logp: ``[M]`` their log-probabilities, or any scores on that scale; -inf = cannot be shown.
            k: length of the slate.
            generator: source of all random numbers.
            allowed: the items that may be listed; no other item of the shortlist is drawn. None = all of the shortlist;
                uniform slates over the catalog need it.

        Raises:
            RecpoError: see ``sample_batch``.
        """
        pools = None if allowed is None else [allowed]
        return self.sample_batch(np.asarray(items)[None], np.asarray(logp)[None], k, generator, pools).of(0)

    def sample_batch(
        self,
        items: ArrayLike,
        logp: ArrayLike,
        k: int,
        generator: np.random.Generator,
        allowed: Sequence[Pool] | None = None,
    ) -> SlateBatch:
        """Draws the slates of several requests; see ``sample``, with a leading axis ``[B]``.

        Raises:
            RecpoError: wrong shapes, repeated items, nan or +inf, k below 1, or no pool for uniform slates.
        """
        ids, scores, pools, lengths = self._prepared(items, logp, k, allowed)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        drawn = best if self.temperature == 0 else _gumbel_top(self._logits(scores), k, generator)
        is_random = (generator.random(len(ids)) < self.epsilon) & (lengths > 0)
        shown = np.arange(drawn.shape[1]) < lengths[:, None]
        positions = np.where(shown, drawn, -1)
        listed = np.where(shown, np.take_along_axis(ids, drawn, 1), 0)
        for row in np.flatnonzero(is_random).tolist():
            pool = pools[row] if pools else Pool.of(int(ids[row].max()), ids=ids[row][scores[row] > -np.inf])
            n = lengths[row]
            listed[row, :n] = pool.at(generator.choice(len(pool), n, replace=False))
            positions[row, :n] = _places(ids[row], listed[row, :n])
        propensity = self._propensities(scores, best, positions, lengths, pools)
        explored = shown & ~(positions[:, :, None] == np.where(shown, best, -2)[:, None, :]).any(2)
        return SlateBatch(listed, propensity, explored, is_random, positions, lengths)

    def probabilities(
        self, items: ArrayLike, logp: ArrayLike, k: int, asked: ArrayLike, allowed: Sequence[Pool] | None = None
    ) -> FloatArray:
        """Propensities of given items, shown or not; equal to ``Slate.propensity`` for an item that is drawn.

        Args:
            items: ``[B, M]`` shortlists, as in ``sample_batch``.
            logp: ``[B, M]``.
            k: length of the slates.
            asked: ``[B, S]`` internal ids; 0 = none.
            allowed: the items that may be listed, as in ``sample_batch``.

        Returns:
            ``[B, S]``, 0 for items that are never shown.

        Raises:
            RecpoError: see ``sample_batch``.
        """
        ids, scores, pools, lengths = self._prepared(items, logp, k, allowed)
        if self.temperature == 0:
            place = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
            included = (place < lengths[:, None]).astype(np.float64)
        else:
            included = inclusion_probabilities(self._logits(scores), k)
        wanted = np.asarray(asked, np.int64)
        found = np.zeros(wanted.shape)
        for row in np.flatnonzero(lengths).tolist():
            places, known = _places(ids[row], wanted[row]), wanted[row] > 0
            listed = known & (places >= 0) & (scores[row, places] > -np.inf)
            found[row] = (1 - self.epsilon) * np.where(listed, included[row, places], 0.0) / lengths[row]
            if self.epsilon > 0:
                can = listed if pools is None else known & pools[row].contains(wanted[row])
                size = (scores[row] > -np.inf).sum() if pools is None else len(pools[row])
                found[row] += self.epsilon * can / size
        return found

    def _prepared(
        self, items: ArrayLike, logp: ArrayLike, k: int, allowed: Sequence[Pool] | None
    ) -> tuple[IntArray, FloatArray, Sequence[Pool] | None, IntArray]:
        """Shortlists without forbidden items, the source of uniform slates (None = the shortlists), their lengths."""
        ids, scores = _validated(items, logp, k)
        if self.epsilon > 0 and self.uniform_over == "catalog" and allowed is None:
            message = (
                "exploration: uniform slates over the catalog need the items that may be listed (allowed); pass a "
                "Pool, or set uniform_over: shortlist"
            )
            raise RecpoError(message, code="missing_option", field="allowed")
        if allowed is not None:
            kept = np.stack([pool.contains(row) for pool, row in zip(allowed, ids, strict=True)])
            scores = np.where(kept, scores, -np.inf)
        lengths = np.minimum((scores > -np.inf).sum(1), k)
        return ids, scores, allowed if self.uniform_over == "catalog" else None, lengths

    def _logits(self, scores: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore"):
            shifted = scores - scores.max(1, keepdims=True, initial=-np.inf)
        return np.where(scores > -np.inf, shifted, -np.inf) / self.temperature

    def _propensities(
        self, scores: FloatArray, best: IntArray, positions: IntArray, lengths: IntArray, pools: Sequence[Pool] | None
    ) -> FloatArray:
        """``[B, n]``, nan where no item is shown; the exact mixture of both parts."""
        width = positions.shape[1]
        shown, in_shortlist = np.arange(width) < lengths[:, None], positions >= 0
        included = np.zeros(positions.shape)
        if self.temperature == 0:
            included[:] = (positions[:, :, None] == best[:, None, :]).any(2)
        elif self.epsilon < 1 and positions.size:
            logits, tiniest = self._logits(scores), np.finfo(np.float64).tiny
            # An item of the shortlist that a uniform slate shows may stand anywhere in it: columns stay distinct.
            columns = _distinct(positions, scores.shape[1])
            included = np.maximum(inclusion_probabilities(logits, width, columns), tiniest)
        sizes = (scores > -np.inf).sum(1) if pools is None else np.array([len(pool) for pool in pools], np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):
            mixed = (1 - self.epsilon) * included * in_shortlist / lengths[:, None] + self.epsilon / sizes[:, None]
        return np.where(shown, mixed, np.nan)


def _validated(items: ArrayLike, logp: ArrayLike, k: int) -> tuple[IntArray, FloatArray]:
    """The shortlists ``[B, M]`` and their scores, with empty places if there are fewer than ``k``."""
    ids, scores = np.asarray(items), np.asarray(logp, np.float64)
    if ids.ndim != 2 or ids.shape != scores.shape or not np.issubdtype(ids.dtype, np.integer):
        message = (
            f"exploration: items {ids.shape} of {ids.dtype} and log-probabilities {scores.shape}; expected whole "
            "numbers and numbers of one shape"
        )
        raise RecpoError(message, code="wrong_shape", field="items")
    validate_range(k >= 1, "k", "must be at least 1", k)
    if np.isnan(scores).any() or np.isposinf(scores).any():
        message = "exploration: a log-probability is nan or +inf, expected finite numbers, or -inf"
        raise RecpoError(message, code="bad_value", field="logp")
    scores = np.where(ids > 0, scores, -np.inf)
    ordered = np.sort(np.where(scores > -np.inf, ids, -np.arange(ids.shape[1])), axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        message = "exploration: an item occurs twice in a shortlist, expected distinct items"
        raise RecpoError(message, code="duplicate", field="items")
    missing = ((0, 0), (0, max(0, k - ids.shape[1])))
    return np.pad(ids.astype(np.int64), missing), np.pad(scores, missing, constant_values=-np.inf)


def _gumbel_top(logits: FloatArray, k: int, generator: np.random.Generator) -> IntArray:
    """Columns ``[B, k]`` of the largest logits after Gumbel noise, largest first."""
    noisy = logits + generator.gumbel(size=logits.shape)
    top = np.argpartition(-noisy, k - 1, axis=1)[:, :k]
    return np.take_along_axis(top, np.argsort(-np.take_along_axis(noisy, top, 1), axis=1, kind="stable"), 1)


def _places(ids: IntArray, items: IntArray) -> IntArray:
    """The places of ``items [n]`` among ``ids [M]``, -1 where they are not there."""
    same = items[:, None] == ids[None]
    return np.where(same.any(1), same.argmax(1), -1)


def _distinct(positions: IntArray, width: int) -> IntArray:
    """``positions`` with every -1 replaced by a column that its row does not name."""
    found = positions.copy()
    for row in np.flatnonzero((positions < 0).any(1)):
        missing = positions[row] < 0
        free = np.setdiff1d(np.arange(width), positions[row])
        found[row, missing] = free[: missing.sum()]
    return found
