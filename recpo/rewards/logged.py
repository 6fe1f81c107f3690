"""Rewards of logged items, computed from what the log says about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError
from recpo.types import FeedbackBatch, Slates


@dataclass(frozen=True)
class LoggedReward(RewardFunction):
    """``label - dislike_cost * disliked`` of logged items.

    An item without a label (a missing watch quantile, a sampled negative) has no reward: it leaves its slate, and with
    it the group whose mean is taken, the session and every denominator, unless ``unknown`` names its reward.

    Attributes:
        dislike_cost: what a dislike takes away.
        unknown: reward of an item without a label; none = it is left out.
    """

    dislike_cost: float = 1.0
    unknown: float | None = None

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        quantile = candidates.label
        if quantile is None:
            raise RecpoError("LoggedReward needs watch quantiles or labels, which these candidates lack.")
        reward = quantile
        if candidates.dislike is not None:
            reward = reward - self.dislike_cost * candidates.dislike.to(reward.dtype)
        return reward if self.unknown is None else torch.where(quantile.isnan(), self.unknown, reward)
