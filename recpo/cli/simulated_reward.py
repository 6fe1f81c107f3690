"""The simulator's true reward of candidates, for tests and for teaching: no log knows it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recpo.cli.true_rewards import TrueRewards, true_rewards
from recpo.contracts import RewardFunction
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.types import FeedbackBatch, Slates


@dataclass(frozen=True)
class TrueReward(RewardFunction):
    """The expected reward that the simulation itself gives to a candidate: ``P(satisfied) - dislike_cost P(dislike)``.

    Tastes drift; like ``recpo evaluate --truth`` it asks for those of the day on which the validation period begins. A
    candidate that is no item (id 0) has no reward (nan).

    Attributes:
        truth: directory that ``recpo simulate`` wrote.
        prepared: directory that ``recpo prepare`` made of its log.
    """

    truth: Path
    prepared: str | Path

    @property
    def catalog_checksum(self) -> str | None:
        """See ``RewardFunction.catalog_checksum``."""
        return Prepared.open(self.prepared).catalog_checksum

    @cached_property
    def _known(self) -> TrueRewards:
        return true_rewards(self.truth, Prepared.open(self.prepared), "valid", [1])

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        if batch.user_ids is None:
            raise RecpoError("TrueReward asks whose contexts they are, and this batch does not say")
        known, items = self._known, candidates.item_ids
        users = known.user_ids[batch.user_ids.cpu().numpy()]
        # what is no item is looked up as any and left out below
        shown = known.item_ids[np.maximum(items.cpu().numpy() - 1, 0)]
        rewards = torch.from_numpy(known.truth.expected_reward(users, shown, known.day)).float().to(items.device)
        return rewards.masked_fill(~candidates.mask | (items == 0), torch.nan)
