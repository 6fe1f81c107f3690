"""The accuracy metrics of every pass: names and what they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from recpo.evaluation.measures import Observed
from recpo.evaluation.ranking import (
    RankedHits,
    graded_hits,
    graded_ndcg,
    hit_rate,
    mean_average_precision,
    mean_rank,
    mrr,
    ndcg,
    precision,
    recall,
)

Gain = Literal["linear", "exponential"]


def accuracy(positive: RankedHits, disliked: RankedHits, ks: Sequence[int]) -> dict[str, Tensor]:
    """Per-user metrics ``[B]`` at every k, named ``NDCG@10`` and so on.

    Of the positives NDCG, Recall, HitRate, MRR, MAP and Precision. Of the held-out items that the user disliked, for
    the users who have any: lower is better for ``disliked`` (their share of the k places), ``disliked_hit_rate`` and
    ``disliked_MRR``; higher is better for ``disliked_rank`` (their mean rank, k + 1 where they are absent).
    """
    return _named(
        ks,
        NDCG=ndcg(positive, ks),
        Recall=recall(positive, ks),
        HitRate=hit_rate(positive, ks),
        MRR=mrr(positive, ks),
        MAP=mean_average_precision(positive, ks),
        Precision=precision(positive, ks),
        disliked=precision(disliked, ks),
        disliked_hit_rate=hit_rate(disliked, ks),
        disliked_MRR=mrr(disliked, ks),
        disliked_rank=mean_rank(disliked, ks),
    )


def graded_accuracy(observed: Observed, ks: Sequence[int], gain: Gain = "linear") -> dict[str, Tensor]:
    """``gNDCG@k``: NDCG whose gains come from the watch quantiles q of all held-out items, liked or not.

    Linear: the gain is q. Exponential: ``2^level - 1`` with the quartile ``level = min(floor(4 q), 3)``, so 0, 1, 3, 7.
    A disliked item has gain 0, an item with several events the largest of their gains.
    """
    targets, quantile = observed.targets, observed.batch.feedback.slates.label
    assert quantile is not None  # the targets were made of it
    labeled = targets.positive | targets.other
    gains = quantile if gain == "linear" else torch.exp2((4 * quantile).floor().clamp(max=3)) - 1
    hits = graded_hits(observed.lists.item_ids, targets.item_ids, torch.where(labeled, gains, 0.0))
    return _named(ks, gNDCG=graded_ndcg(hits, ks))


def accuracy_of_bin(positive: RankedHits, ks: Sequence[int]) -> dict[str, Tensor]:
    """NDCG, Recall and HitRate ``[B]`` at every k of the targets of one bin of items."""
    return _named(ks, NDCG=ndcg(positive, ks), Recall=recall(positive, ks), HitRate=hit_rate(positive, ks))


def _named(ks: Sequence[int], **by_name: Tensor) -> dict[str, Tensor]:
    return {f"{name}@{k}": values[:, i] for name, values in by_name.items() for i, k in enumerate(ks)}
