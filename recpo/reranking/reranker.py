"""The contract of re-ranking, and the scores of a re-ranked list."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recpo.errors import RecpoError
from recpo.reranking.attributes import FloatArray, IntArray, ItemAttributes


class Reranker(ABC):
    """Chooses a slate from a shortlist, one item after the other; implementations are frozen dataclasses."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name with its options, for tables."""

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the item attributes that it reads."""
        return ()

    @property
    def reads_vectors(self) -> bool:
        """It reads item vectors."""
        return False

    @abstractmethod
    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """The slate as places of the shortlist.

        Args:
            items: ``[M]`` internal ids, distinct.
            scores: ``[M]`` relevance, higher = better, finite.
            k: length of the slate.
            known: tags and vectors of the items.
            history: ``[H]`` internal ids of the user's past, 0 pads; None = not known.

        Returns:
            ``[min(k, M)]`` distinct places, first item first.

        Raises:
            RecpoError: an attribute or the vectors that it reads are not known.
        """


def rerank(
    reranker: Reranker,
    items: ArrayLike,
    scores: ArrayLike,
    k: int,
    known: ItemAttributes,
    history: ArrayLike | None = None,
) -> tuple[IntArray, FloatArray]:
    """The full shortlist in its new order: the slate, then the rest by relevance; empty places stay at the end.

    The i-th item gets the i-th largest score. So scores fall along the list, as in any ranking, and their distribution
    is the policy's own. Exploration of the re-ranked list has exact propensities, because the re-ranked list is a
    deterministic function of the request.

    Args:
        reranker: chooses the slate.
        items: ``[M]`` internal ids; 0 = an empty place.
        scores: ``[M]`` log-probabilities; -inf where the place is empty.
        k: length of the slate.
        known: tags and vectors of the items.
        history: ``[H]`` internal ids of the user's past.

    Returns:
        items ``[M]`` and scores ``[M]``.
    """
    items, scores = np.asarray(items, np.int64), np.asarray(scores)
    places = reranked_places(reranker, items, scores, k, known, history)
    listed, falling = np.zeros_like(items), np.full_like(scores, -np.inf)
    listed[: len(places)], falling[: len(places)] = items[places], -np.sort(-scores[places])
    return listed, falling


def reranked_places(
    reranker: Reranker,
    items: ArrayLike,
    scores: ArrayLike,
    k: int,
    known: ItemAttributes,
    history: ArrayLike | None = None,
) -> IntArray:
    """The places of the full shortlist in its new order, without empty places; see ``rerank``."""
    items, scores = np.asarray(items, np.int64), np.asarray(scores)
    best = np.argsort(-scores, kind="stable")
    best = best[(items[best] > 0) & (scores[best] > -np.inf)]
    past = None if history is None else np.asarray(history, np.int64)
    slate = reranker.order(items[best], scores[best], k, known, past)
    rest = np.ones(len(best), bool)
    rest[slate] = False
    return best[np.concatenate([slate, np.flatnonzero(rest)])]


def relevance(scores: FloatArray) -> FloatArray:
    """Scores of a shortlist, scaled to similarities: 0 = the worst, 1 = the best; all 0 if all scores are equal."""
    low, high = scores.min(initial=np.inf), scores.max(initial=-np.inf)
    return np.asarray((scores - low) / (high - low) if high > low else np.zeros(len(scores)), np.float64)


def by_score(scores: FloatArray) -> IntArray:
    """Places by falling score, ties in their order."""
    return np.argsort(-scores, kind="stable")


def vectors_of(known: ItemAttributes, items: IntArray) -> NDArray[np.float64]:
    """Unit vectors ``[M, d]`` of items.

    Raises:
        RecpoError: there are none.
    """
    if known.vectors is None:
        raise RecpoError(
            "re-ranking by similarity needs item vectors: name a column of vectors in a file of item attributes, or "
            "take a policy that has item vectors of its own"
        )
    return np.asarray(known.vectors[items], np.float64)


def validate_weight(value: float) -> None:
    """Raises ``RecpoError`` unless ``value`` is a relevance weight."""
    if not 0 <= value <= 1:
        raise RecpoError(f"re-ranking: relevance_weight is {value!r}, expected 0 to 1 (1 = relevance alone)")
