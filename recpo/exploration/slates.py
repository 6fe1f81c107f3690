"""Draws slates from a shortlist and computes the probability with which every item was shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recpo.errors import RecpoError
from recpo.exploration.inclusion import FloatArray, IntArray, inclusion_probabilities
from recpo.exploration.pool import Pool

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
    epsilon: float = 0.0
    shortlist: int = 100
    uniform_over: Literal["catalog", "shortlist"] = "catalog"

    def __post_init__(self) -> None:
        temperature, epsilon = self.temperature, self.epsilon
        checks = {
            "temperature": (
                temperature == 0 or _COLDEST <= temperature < math.inf,
                f"0 (the best items), or from {_COLDEST:g} on",
            ),
            "epsilon": (0 <= epsilon <= 1, "a probability between 0 and 1"),
            "shortlist": (isinstance(self.shortlist, int) and self.shortlist >= 1, "a whole number from 1 on"),
            "uniform_over": (self.uniform_over in ("catalog", "shortlist"), "catalog or shortlist"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise RecpoError(f"exploration: {name} is {getattr(self, name)!r}, expected {expected}")

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
        ids, scores, pools = self._prepared(items, logp, k, allowed)
        lengths = np.minimum((scores > -np.inf).sum(1), k)
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
        return _padded(SlateBatch(listed, propensity, explored, is_random, positions, lengths), k)

    def probabilities(
        self,
        items: ArrayLike,
        logp: ArrayLike,
        k: int,
        asked: ArrayLike,
        allowed: Sequence[Pool] | None = None,
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
        ids, scores, pools = self._prepared(items, logp, k, allowed)
        lengths = np.minimum((scores > -np.inf).sum(1), k)
        if self.temperature == 0:
            place = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
            included = (place < lengths[:, None]).astype(np.float64)
        else:
            included = inclusion_probabilities(self._logits(scores), min(k, scores.shape[1]))
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
    ) -> tuple[IntArray, FloatArray, Sequence[Pool] | None]:
        """Shortlists without forbidden items, and the source of uniform slates; None = the shortlists."""
        ids, scores = _validated(items, logp, k)
        if self.epsilon > 0 and self.uniform_over == "catalog" and allowed is None:
            raise RecpoError(
                "exploration: uniform slates over the catalog need the items that may be listed (allowed); pass a "
                "Pool, or set uniform_over: shortlist"
            )
        if allowed is not None:
            kept = np.stack([pool.contains(row) for pool, row in zip(allowed, ids, strict=True)])
            scores = np.where(kept, scores, -np.inf)
        return ids, scores, allowed if allowed is not None and self.uniform_over == "catalog" else None

    def _logits(self, scores: FloatArray) -> FloatArray:
        with np.errstate(invalid="ignore"):
            shifted = scores - scores.max(1, keepdims=True, initial=-np.inf)
        return np.where(scores > -np.inf, shifted, -np.inf) / self.temperature

    def _propensities(
        self,
        scores: FloatArray,
        best: IntArray,
        positions: IntArray,
        lengths: IntArray,
        pools: Sequence[Pool] | None,
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
    ids, scores = np.asarray(items), np.asarray(logp, np.float64)
    if ids.ndim != 2 or ids.shape != scores.shape or not np.issubdtype(ids.dtype, np.integer):
        raise RecpoError(
            f"exploration: items {ids.shape} of {ids.dtype} and log-probabilities {scores.shape}; expected whole "
            "numbers and numbers of one shape"
        )
    if k < 1:
        raise RecpoError(f"exploration: k is {k}, expected at least 1")
    if np.isnan(scores).any() or np.isposinf(scores).any():
        raise RecpoError("exploration: a log-probability is nan or +inf, expected finite numbers, or -inf")
    scores = np.where(ids > 0, scores, -np.inf)
    ordered = np.sort(np.where(scores > -np.inf, ids, -np.arange(ids.shape[1])), axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise RecpoError("exploration: an item occurs twice in a shortlist, expected distinct items")
    return ids.astype(np.int64), scores


def _gumbel_top(logits: FloatArray, k: int, generator: np.random.Generator) -> IntArray:
    """Columns ``[B, min(k, M)]`` of the largest logits after Gumbel noise, largest first."""
    noisy = logits + generator.gumbel(size=logits.shape)
    k = min(k, logits.shape[1])
    top = np.argpartition(-noisy, k - 1, axis=1)[:, :k] if k < logits.shape[1] else np.argsort(-noisy, axis=1)
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


def _padded(slates: SlateBatch, k: int) -> SlateBatch:
    missing = ((0, 0), (0, k - slates.items.shape[1]))
    if not missing[1][1]:
        return slates
    return slates._replace(
        items=np.pad(slates.items, missing),
        propensity=np.pad(slates.propensity, missing, constant_values=np.nan),
        explored=np.pad(slates.explored, missing),
        positions=np.pad(slates.positions, missing, constant_values=-1),
    )
