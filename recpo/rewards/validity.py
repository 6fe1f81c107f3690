"""Validity reward (OneRec, arXiv 2506.13695, section 2.4.2): rewards candidates that are items."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError
from recpo.types import FeedbackBatch, Slates


@dataclass(frozen=True)
class ValidityReward(RewardFunction):
    """1 for a candidate that is an item and 0 for one that is not (id 0), for ``count`` random candidates per context.

    The other candidates have no validity reward (nan). The draw must be random: the most probable candidates are valid
    anyway, and rewarding only those makes the policy more certain (OneRec finds that their validity then rises while
    the validity of all candidates falls).

    Attributes:
        count: candidates per context that get a reward, or all if there are fewer; the paper takes 5 of 128.
    """

    count: int = 5

    def __post_init__(self) -> None:
        if self.count < 1:
            raise RecpoError(f"ValidityReward: count must be at least 1, got {self.count}")

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``. It draws from torch's random numbers, which training seeds at every step."""
        draws = torch.rand(candidates.mask.shape, device=candidates.mask.device).masked_fill(~candidates.mask, 2.0)
        judged = (draws.argsort(1).argsort(1) < self.count) & candidates.mask
        return torch.where(judged, (candidates.item_ids > 0).float(), torch.nan)
