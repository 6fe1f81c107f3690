"""Rewards for hits: a candidate that is a logged positive of its context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError
from recpo.ops.reduce import zero_masked
from recpo.types import FeedbackBatch, Slates


@dataclass(frozen=True)
class HitReward(RewardFunction):
    """1 for a candidate that is a logged positive of its context; 0 for any other, including one that is not an item.

    A logged positive is an item of the context's logged slate (``batch.slates``) that is positive there
    (``Slates.positive``) and is not in the candidate's history yet: the candidate sees no more events than the log's
    position did. If a slate is one request, these are the items of the request; in a sequence, they are all later
    positives.
    """

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``RewardFunction.learns_from``."""
        return frozenset({"positives"})

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        return is_hit(batch, candidates).float()


def is_hit(batch: FeedbackBatch, candidates: Slates) -> Tensor:
    """``[B, G]`` bool: the candidate is a logged positive of its context; see ``HitReward``.

    Sorted by item, so memory does not grow with the product of candidates and logged positions.

    Raises:
        RecpoError: the logged slates do not say what is positive.
    """
    logged = batch.slates
    if logged.positive is None:
        raise RecpoError("a hit is a logged positive, and the logged slates lack Slates.positive")
    positive = logged.mask & logged.positive
    if logged.is_logged is not None:
        positive &= logged.is_logged.bool()
    # a logged position counts from when it lies ahead: keys order the positions by item, then by what they see
    width = batch.histories.item_ids.shape[1] + 1
    beyond = torch.iinfo(torch.int64).max
    keys = (logged.item_ids * width + logged.visible).masked_fill(~positive, beyond).sort(1).values
    wanted = (candidates.item_ids * width + candidates.visible).contiguous()
    place = torch.searchsorted(keys, wanted).clamp(max=keys.shape[1] - 1)
    found = keys.gather(1, place)
    is_same = (found >= wanted) & (found // width == candidates.item_ids) & (found != beyond)
    return is_same & candidates.mask & (candidates.item_ids > 0)


def rank_aware_reward(hits: Tensor, mask: Tensor | None = None) -> Tensor:
    """``1`` for a hit and ``-(1 / log2(rank + 1)) / sum over the misses of (1 / log2(rank' + 1))`` for a miss.

    Ranks count all kept candidates, best first, from 1 on; a group's misses sum to -1. In ReRe's code the sum runs over
    the hits as well, and a group without a hit gets 0 throughout; this is the form of the paper (equations 7 to 9).

    Args:
        hits: ``[..., G]`` bool, candidates of a group in descending probability under the policy.
        mask: ``[..., G]`` bool, True keeps; None = all.

    Returns:
        ``[..., G]`` float64, 0 where masked.
    """
    kept = torch.ones_like(hits, dtype=torch.bool) if mask is None else mask.bool()
    rank = kept.long().cumsum(-1).clamp(min=1)
    discount = 1.0 / torch.log2(rank.double() + 1.0)
    missed = zero_masked(discount, kept & ~hits)
    share = missed / missed.sum(-1, keepdim=True).clamp(min=torch.finfo(missed.dtype).tiny)
    return zero_masked(torch.where(hits, 1.0, -share), kept)


@dataclass(frozen=True)
class RankAwareReward(RewardFunction):
    """1 for a hit (see ``HitReward``), and a share of -1 for a miss; a higher rank gives a larger share.

    The candidates of a group must be in the order of the policy's own probability, best first. See
    ``rank_aware_reward``.
    """

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``RewardFunction.learns_from``."""
        return frozenset({"positives"})

    @property
    def reads_ranks(self) -> bool:
        """See ``RewardFunction.reads_ranks``."""
        return True

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        hits = is_hit(batch, candidates)
        return rank_aware_reward(hits, candidates.mask).float()
