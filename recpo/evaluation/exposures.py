"""Ranking of exposures: does the recommender score liked items above items that the user passed over or disliked?"""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.evaluation.targets import Targets
from recpo.ops.ranking import first_places


def exposure_auc(logp: Tensor, targets: Targets) -> dict[str, Tensor]:
    """``AUC_other`` and ``AUC_dislikes`` ``[B]``, float32: each user's positives against other and disliked items.

    Only items that the user was shown are compared, so neither metric depends on items that the log never showed. An
    item with several events counts once.

    Args:
        logp: ``[B, S]`` scores of the slate items.
        targets: the sets.
    """
    positive = first_places(targets.item_ids, targets.positive)
    return {
        "AUC_other": auc(logp, positive, first_places(targets.item_ids, targets.other)).float(),
        "AUC_dislikes": auc(logp, positive, first_places(targets.item_ids, targets.disliked)).float(),
    }


def auc(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Area under the ROC curve of every row, ``[B]`` float64; nan if a row lacks positives or negatives.

    The probability that a positive scores higher than a negative, with ties counting one half:

        (sum of the positives' mean ranks - P (P + 1) / 2) / (P N)

    with ranks 1, 2, ... of ascending scores among the row's P positives and N negatives; ties share the mean of their
    ranks (Mann and Whitney, 1947).

    Args:
        scores: ``[B, S]``, less than infinity.
        positive: ``[B, S]`` bool.
        negative: ``[B, S]`` bool, disjoint from ``positive``.
    """
    kept = scores.masked_fill(~(positive | negative), torch.inf).contiguous()
    ascending = kept.sort(1).values
    below = torch.searchsorted(ascending, kept)
    up_to = torch.searchsorted(ascending, kept, right=True)
    mean_rank = (below + up_to + 1).double() / 2
    positives, negatives = positive.sum(1).double(), negative.sum(1).double()
    return ((mean_rank * positive).sum(1) - positives * (positives + 1) / 2) / (positives * negatives)
