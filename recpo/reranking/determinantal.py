"""Determinantal re-ranking: fast greedy maximization (Chen, Zhang and Zhou, NeurIPS 2018, arXiv 1709.05135)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recpo.reranking.attributes import FloatArray, IntArray, ItemAttributes
from recpo.reranking.reranker import Reranker, by_score, relevance, validate_weight, vectors_of

_DEPENDENT = 1e-10  # squared distance below which an item lies in the span of those above


@dataclass(frozen=True)
class Determinantal(Reranker):
    """A slate Y of relevant items that span a large volume.

    Greedily the largest

        w sum_(i in Y) relevance_i + (1 - w) log det S_Y,    S_ij = (1 + cos(v_i, v_j)) / 2

    which is the most probable slate of a determinantal point process with the kernel ``q_i S_ij q_j``, ``q_i = exp(w
    relevance_i / (2 (1 - w)))``. The gain of an item in the log-determinant is the logarithm of its squared distance
    from the span of the items above, which one more column of a Cholesky factor updates. Time is proportional to ``k M
    (k + d)``. Items in that span come last, by relevance.

    Attributes:
        relevance_weight: w in [0, 1]; 1 = only relevance.
    """

    relevance_weight: float = 0.7

    def __post_init__(self) -> None:
        validate_weight(self.relevance_weight)

    @property
    def label(self) -> str:
        """See ``Reranker``."""
        return f"dpp {self.relevance_weight:g}"

    @property
    def reads_vectors(self) -> bool:
        """See ``Reranker``."""
        return True

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        vectors, relevant, size = vectors_of(known, items), relevance(scores), min(k, len(items))
        if self.relevance_weight == 1:
            return by_score(scores)[:size]
        columns = np.zeros((size, len(items)))
        distance, free = np.ones(len(items)), np.ones(len(items), bool)
        chosen: list[int] = []
        while len(chosen) < size and (open_ := free & (distance > _DEPENDENT)).any():
            gain = np.full(len(items), -np.inf)
            gain[open_] = self.relevance_weight * relevant[open_]
            gain[open_] += (1 - self.relevance_weight) * np.log(distance[open_])
            best = int(gain.argmax())
            similarity = (1 + vectors @ vectors[best]) / 2
            above = columns[: len(chosen)]
            column = (similarity - above[:, best] @ above) / np.sqrt(distance[best])
            columns[len(chosen)] = column
            distance = distance - column**2
            chosen.append(best)
            free[best] = False
        rest = by_score(scores)
        return np.array([*chosen, *rest[free[rest]][: size - len(chosen)]], np.int64)
