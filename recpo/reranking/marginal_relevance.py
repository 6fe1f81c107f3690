"""Maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recpo.reranking.attributes import FloatArray, IntArray, ItemAttributes
from recpo.reranking.reranker import Reranker, relevance, validate_weight, vectors_of


@dataclass(frozen=True)
class MaximalMarginalRelevance(Reranker):
    """A slate of items that are relevant and not similar to the items above them.

    The next item has the largest

        w relevance_i - (1 - w) max over the items j above of cos(v_i, v_j)

    where relevance is scaled from 0 (the worst of the shortlist) to 1 (the best). The first item is the most relevant
    one. Time is proportional to ``k M d``.

    Attributes:
        relevance_weight: w in [0, 1]; 1 = only relevance.
    """

    relevance_weight: float = 0.7

    def __post_init__(self) -> None:
        validate_weight(self.relevance_weight)

    @property
    def label(self) -> str:
        """See ``Reranker``."""
        return f"mmr {self.relevance_weight:g}"

    @property
    def reads_vectors(self) -> bool:
        """See ``Reranker``."""
        return True

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        vectors, weight = vectors_of(known, items), self.relevance_weight
        relevant = relevance(scores)
        nearest, chosen = np.full(len(items), -np.inf), np.zeros(min(k, len(items)), np.int64)
        value = relevant.copy()
        for place in range(len(chosen)):
            chosen[place] = best = int(value.argmax())
            nearest = np.maximum(nearest, vectors @ vectors[best])
            value = weight * relevant - (1 - weight) * nearest
            value[chosen[: place + 1]] = -np.inf
        return chosen
