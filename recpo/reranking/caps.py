"""Caps on the number of items of a slate with the same author or category."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from recpo.errors import RecpoError
from recpo.reranking.attributes import FloatArray, IntArray, ItemAttributes
from recpo.reranking.reranker import Reranker, by_score


@dataclass(frozen=True)
class AttributeCap(Reranker):
    """The most relevant items such that at most ``at_most`` of them share a value of an attribute.

    An item with several values counts for each of them. An item without a value is never capped. If the shortlist has
    too few such items, the most relevant other items complete the slate.

    Attributes:
        attribute: column of the item attributes, such as author or category.
        at_most: largest number of items of a slate that may share a value.
    """

    attribute: str
    at_most: int = 2

    def __post_init__(self) -> None:
        if self.at_most < 1:
            raise RecpoError(f"re-ranking: at_most is {self.at_most}, expected at least 1")

    @property
    def label(self) -> str:
        """See ``Reranker``."""
        return f"{self.attribute} at most {self.at_most}"

    @property
    def attributes(self) -> tuple[str, ...]:
        """See ``Reranker``."""
        return (self.attribute,)

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        owner, tags = known.attribute(self.attribute).of(items)
        first = np.searchsorted(owner, np.arange(len(items) + 1))
        shown: Counter[int] = Counter()
        chosen: list[int] = []
        left: list[int] = []
        for place in by_score(scores).tolist():
            if len(chosen) == k:
                break
            own = tags[first[place] : first[place + 1]].tolist()
            fits = all(shown[tag] < self.at_most for tag in own)
            (chosen if fits else left).append(place)
            if fits:
                shown.update(own)
        return np.array([*chosen, *left[: k - len(chosen)]], np.int64)
