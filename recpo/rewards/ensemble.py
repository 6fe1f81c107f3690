"""The mean of several rewards, minus a multiple of their disagreement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError
from recpo.features.schema import Reads
from recpo.feedback import FeedbackDefinition
from recpo.rewards.identity import common_checksum
from recpo.types import FeedbackBatch, Slates


@dataclass(frozen=True)
class EnsembleReward(RewardFunction):
    """``mean - lower_bound * standard deviation`` over the members, such as models of different seeds.

    If members that were fitted the same way disagree, the log has little information. A lower bound keeps a policy away
    from items that only some members rate high (Jeunen and Goethals, RecSys 2021). All members must have the same unit.
    The standard deviation divides by the number of members. A candidate that any member does not know is unknown (nan).

    Attributes:
        members: at least two rewards.
        lower_bound: number of standard deviations to subtract, at least 0.
    """

    members: list[RewardFunction]
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            raise RecpoError(f"EnsembleReward: {len(self.members)} members; give at least two")
        if not self.lower_bound >= 0:
            raise RecpoError(f"EnsembleReward: lower_bound is {self.lower_bound}; it is at least 0")

    @property
    def catalog_checksum(self) -> str | None:
        """See ``RewardFunction.catalog_checksum``: that of the members which have one."""
        return common_checksum("EnsembleReward", "items", (member.catalog_checksum for member in self.members))

    @property
    def users_checksum(self) -> str | None:
        """See ``RewardFunction.users_checksum``: that of the members which have one."""
        return common_checksum("EnsembleReward", "users", (member.users_checksum for member in self.members))

    @property
    def feedback(self) -> tuple[FeedbackDefinition, ...]:
        """See ``RewardFunction.feedback``: those of all members."""
        return tuple(definition for member in self.members for definition in member.feedback)

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``RewardFunction.learns_from``: what any of the members cannot do without."""
        return frozenset().union(*(member.learns_from for member in self.members))

    @property
    def reads(self) -> Reads:
        """See ``RewardFunction.reads``: what any of the members reads."""
        return reduce(or_, (member.reads for member in self.members))

    def for_behaviors(self, names: tuple[str, ...]) -> RewardFunction:
        """See ``RewardFunction.for_behaviors``."""
        return replace(self, members=[member.for_behaviors(names) for member in self.members])

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        rewards = torch.stack([member(batch, candidates).float() for member in self.members])
        deviation, mean = torch.std_mean(rewards, 0, correction=0)
        return mean - self.lower_bound * deviation
