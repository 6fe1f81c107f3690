"""From the queries of a batch to the slates that are shown: histories, program, exploration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recpo.errors import RecpoError
from recpo.server.bundles import LoadedBundle
from recpo.serving.histories import ServingCounts
from recpo.serving.recommending import validate_k


@dataclass(frozen=True)
class Query:
    """What is asked of the policy.

    Attributes:
        history: raw events, keys as the columns of a history (``recpo.serving.histories``).
        exclude: external ids that must not be listed.
        k: length of the slate; None = the bundle's own.
    """

    history: Sequence[Mapping[str, Any]]
    exclude: Sequence[Any] = ()
    k: int | None = None


@dataclass(frozen=True)
class Shown:
    """A slate, best first.

    Attributes:
        bundle: who ranked it.
        items: external ids, at most k.
        scores: natural-log probabilities under the policy; None where it was not asked.
        propensity: probability of each item at a place of the slate that is drawn at random.
        explored: the item is none of the best ones, which would be shown without exploration.
        is_random: the item was drawn uniformly.
    """

    bundle: LoadedBundle
    items: list[Any]
    scores: list[float | None]
    propensity: list[float]
    explored: list[bool]
    is_random: list[bool]


def rank(
    bundle: LoadedBundle, queries: Sequence[Query], on_counts: Callable[[ServingCounts], None] = lambda _: None
) -> list[Shown | Exception]:
    """A slate, or what is wrong with the query, for each query.

    The histories of all queries are read at once, which costs little more than reading one. Where one of them cannot be
    read, each is read alone, so that a fault stays with the client who made it.

    Args:
        bundle: who ranks.
        queries: what is asked.
        on_counts: told what was left out of the histories.
    """
    try:
        return list(_rank(bundle, queries, on_counts))
    except RecpoError as error:
        if len(queries) == 1:
            return [error]
        return [answer for query in queries for answer in rank(bundle, [query], on_counts)]


def _rank(bundle: LoadedBundle, queries: Sequence[Query], on_counts: Callable[[ServingCounts], None]) -> list[Shown]:
    lengths = [bundle.bundle.k if query.k is None else validate_k(query.k, bundle.bundle.k) for query in queries]
    read = bundle.reader.read_requests([(query.history, query.exclude) for query in queries])
    ((_, inputs),) = read.batches(len(queries))
    top_items, scores = bundle.bundle.runtime.recommend(inputs, max(lengths))
    external = bundle.bundle.items.to_external(top_items).to_pylist()
    on_counts(read.counts)
    width = top_items.shape[1]
    return [
        _shown(bundle, top_items[row, :k], external[row * width : row * width + k], scores[row, :k])
        for row, k in enumerate(lengths)
    ]


def _shown(bundle: LoadedBundle, top_items: np.ndarray, external: list[Any], scores: np.ndarray) -> Shown:
    """The deterministic slate: the n best items.

    The log's propensity is the probability of the item at a place of the slate that is drawn at random: 1 / n here.
    """
    listed = int((top_items > 0).sum())  # what is empty stands at the end
    return Shown(
        bundle,
        external[:listed],
        scores[:listed].tolist(),
        [1.0 / listed] * listed if listed else [],
        [False] * listed,
        [False] * listed,
    )
