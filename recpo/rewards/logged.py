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

    A disliked item without a label has the reward ``-dislike_cost``: its label counts as 0. An item of which nothing is
    known (neither label nor dislike: a missing watch time, a sampled negative) has no reward: it leaves its slate, and
    with it the group whose mean is taken, the session and every denominator, unless ``unknown`` names its reward.

    Attributes:
        dislike_cost: what a dislike takes away.
        unknown: reward of an item without label and dislike; none = it is left out.
    """

    dislike_cost: float = 1.0
    unknown: float | None = None

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``RewardFunction.learns_from``."""
        return frozenset({"labels"})

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        if candidates.label is None:
            raise RecpoError("LoggedReward needs labels, which these candidates lack.")
        label = candidates.label
        reward = label if self.unknown is None else label.nan_to_num(self.unknown)
        if candidates.dislike is None:
            return reward
        return torch.where(candidates.dislike.bool(), label.nan_to_num(0.0) - self.dislike_cost, reward)
