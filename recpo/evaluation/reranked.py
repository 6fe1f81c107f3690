"""A contender with re-ranked lists: the effect of diversity, caps and calibration, in the same tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import Histories, Recommendations
from recpo.evaluation.contenders import Contender, Loaded
from recpo.evaluation.measures import Recommender
from recpo.lists.reranking import FloatArray, ItemAttributes, Reranker, rerank

#: The item vectors ``[V + 1, d]`` of a contender in memory; None = it has none.
VectorsOf = Callable[[Loaded], FloatArray | None]


def reranked_contender(
    base: Contender, reranker: Reranker, known: ItemAttributes, vectors_of: VectorsOf, *, k: int, shortlist: int
) -> Contender:
    """``base`` with a slate of ``k`` items chosen from its ``shortlist`` best ones; the rest follows by relevance.

    For calibration, the history is the complete past of the user, or the events that the policy reads if the past is
    not excluded.

    Args:
        base: the contender that ranks.
        reranker: chooses the slate.
        known: tags of the items, and vectors unless the contender's own vectors are used.
        vectors_of: the contender's own vectors.
        k: length of the slate.
        shortlist: maximum number of items to re-rank.

    Raises:
        RecpoError: an attribute that the method needs is missing.
    """
    for attribute in reranker.attributes:
        known.attribute(attribute)
    load = partial(_load, base, reranker, known, vectors_of, k, shortlist)
    return Contender(f"{base.name} + {reranker.label}", "reranked", load)


def _load(
    base: Contender, reranker: Reranker, known: ItemAttributes, vectors_of: VectorsOf, k: int, shortlist: int
) -> Loaded:
    loaded = base.load()
    ranked = loaded.recommender
    if reranker.reads_vectors and known.vectors is None:
        vectors = vectors_of(loaded)
        if vectors is None:
            raise RecpoError(
                f"{base.name} has no item vectors of its own, which {reranker.label} reads: name a column of vectors "
                "in a file (rerank_options.attributes and rerank_options.vectors)"
            )
        known = known.with_vectors(vectors)

    def recommend(histories: Histories, length: int, exclude: Tensor | None) -> Recommendations:
        return recommend_with_past(histories, length, exclude, histories.item_ids if exclude is None else exclude)

    def recommend_with_past(histories: Histories, length: int, exclude: Tensor | None, past: Tensor) -> Recommendations:
        assert ranked.recommend is not None
        lists = ranked.recommend(histories, max(length, shortlist), exclude)
        items, scores = lists.item_ids.cpu().numpy().copy(), lists.scores.cpu().numpy().copy()
        for row, history in enumerate(past.cpu().numpy()):
            first = (row, slice(shortlist))
            items[first], scores[first] = rerank(reranker, items[first], scores[first], k, known, history)
        device = lists.item_ids.device
        chosen = (torch.from_numpy(np.ascontiguousarray(part[:, :length])).to(device) for part in (items, scores))
        return Recommendations(*chosen)

    recommender = Recommender(
        recommend, name=ranked.name, scores_are_logp=ranked.scores_are_logp, recommend_with_past=recommend_with_past
    )
    return loaded._replace(recommender=recommender, policy=None)
