"""Rank-aware reward (ReRe, arXiv 2510.12211): misses that the policy believes in most are punished most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import RewardFunction
from recpo.ops.reduce import zero_masked
from recpo.rewards.hit import is_hit
from recpo.types import FeedbackBatch, Slates


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
    """1 for a hit (see ``HitReward``), and for a miss a share of -1 that is the larger the higher it ranks.

    The candidates of a group must stand in the order of the policy's own probability, best first. See
    ``rank_aware_reward``.
    """

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``RewardFunction.learns_from``."""
        return frozenset({"positives"})

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        hits = is_hit(batch, candidates)
        return rank_aware_reward(hits, candidates.mask).float()
