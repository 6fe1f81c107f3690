"""Calibrated recommendations (Steck, RecSys 2018)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recpo.reranking.attributes import FloatArray, IntArray, ItemAttributes, Tags
from recpo.reranking.reranker import Reranker, by_score, relevance, validate_weight

SMOOTHING = 0.01  # of the shares in the slate, so that the divergence is finite; that of the metric `miscalibration`


@dataclass(frozen=True)
class Calibration(Reranker):
    """A slate whose categories have the shares that they have in the user's history.

    Greedily the largest

        w sum_(i in Y) relevance_i - (1 - w) sum_g p_g ln(p_g / ((1 - .01) q_g(Y) + .01 p_g))

    where p are the shares in the history and q those in the slate; every item with categories has weight 1, divided
    equally among them. A user without such a history gets the most relevant items. Time is proportional to ``k M``
    times the categories of the history.

    Attributes:
        attribute: column of the item attributes, such as category.
        relevance_weight: w in [0, 1]; 1 = only relevance.
    """

    attribute: str
    relevance_weight: float = 0.5

    def __post_init__(self) -> None:
        validate_weight(self.relevance_weight)

    @property
    def label(self) -> str:
        """See ``Reranker``."""
        return f"calibrated {self.attribute} {self.relevance_weight:g}"

    @property
    def attributes(self) -> tuple[str, ...]:
        """See ``Reranker``."""
        return (self.attribute,)

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        tags, size = known.attribute(self.attribute), min(k, len(items))
        wanted, shares = _shares(tags, items, np.zeros(0, np.int64) if history is None else history)
        if not len(wanted):
            return by_score(scores)[:size]
        relevant, tagged = relevance(scores), np.diff(tags.offsets)[items] > 0
        chosen, free = np.zeros(size, np.int64), np.ones(len(items), bool)
        total, count = np.zeros(len(wanted)), 0
        for place in range(size):
            filled = np.maximum(count + tagged, 1)[:, None]
            smoothed = (1 - SMOOTHING) * (total + shares) / filled + SMOOTHING * wanted
            divergence = np.log(wanted / smoothed) @ wanted
            value = self.relevance_weight * relevant - (1 - self.relevance_weight) * divergence
            chosen[place] = best = int(np.where(free, value, -np.inf).argmax())
            free[best] = False
            total, count = total + shares[best], count + int(tagged[best])
        return chosen


def _shares(tags: Tags, items: IntArray, history: IntArray) -> tuple[FloatArray, FloatArray]:
    """Shares ``[G]`` of the history's tags, and ``[M, G]`` the weights of the items on the same tags."""
    owner, of_history = tags.of(history[history > 0])
    names, column = np.unique(of_history, return_inverse=True)
    wanted = np.bincount(column, _equal(owner), len(names))
    owner, of_items = tags.of(items)
    place = np.minimum(np.searchsorted(names, of_items), max(0, len(names) - 1))
    known = names[place] == of_items if len(names) else np.zeros(len(of_items), bool)
    shares = np.zeros((len(items), len(names)))
    shares[owner[known], place[known]] = _equal(owner)[known]
    return wanted / max(wanted.sum(), 1e-300), shares


def _equal(owner: IntArray) -> FloatArray:
    """The weight of every tag of an item: 1 / their number."""
    return np.asarray(1.0 / np.bincount(owner)[owner]) if len(owner) else np.zeros(0)
