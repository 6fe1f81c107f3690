"""Weighted sum of rewards."""

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
class WeightedSum(RewardFunction):
    """``sum_i weight_i reward_i`` over the rewards that are known.

    A candidate that some rewards do not know (nan) gets the sum of the others, as if the unknown ones were 0. A
    candidate that no reward knows stays unknown. With ``strict``, all rewards must know it.

    Attributes:
        rewards: the terms.
        weights: one per term; may be negative.
        strict: a candidate that any of the rewards does not know is unknown.
    """

    rewards: list[RewardFunction]
    weights: list[float]
    strict: bool = False

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.weights) or not self.rewards:
            raise RecpoError(
                f"WeightedSum: {len(self.rewards)} rewards and {len(self.weights)} weights; give at least one reward, "
                "and one weight for each"
            )

    @property
    def catalog_checksum(self) -> str | None:
        """See ``RewardFunction.catalog_checksum``: that of the terms which have one."""
        return common_checksum("WeightedSum", "items", (term.catalog_checksum for term in self.rewards))

    @property
    def users_checksum(self) -> str | None:
        """See ``RewardFunction.users_checksum``: that of the terms which have one."""
        return common_checksum("WeightedSum", "users", (term.users_checksum for term in self.rewards))

    @property
    def feedback(self) -> tuple[FeedbackDefinition, ...]:
        """See ``RewardFunction.feedback``: those of all terms."""
        return tuple(definition for term in self.rewards for definition in term.feedback)

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``RewardFunction.learns_from``: what any of the terms cannot do without."""
        return frozenset().union(*(term.learns_from for term in self.rewards))

    @property
    def reads_ranks(self) -> bool:
        """See ``RewardFunction.reads_ranks``."""
        return any(term.reads_ranks for term in self.rewards)

    @property
    def reads(self) -> Reads:
        """See ``RewardFunction.reads``: what any of the terms reads."""
        return reduce(or_, (term.reads for term in self.rewards))

    def for_behaviors(self, names: tuple[str, ...]) -> RewardFunction:
        """See ``RewardFunction.for_behaviors``."""
        return replace(self, rewards=[term.for_behaviors(names) for term in self.rewards])

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        terms = torch.stack([reward(batch, candidates).float() for reward in self.rewards])
        weights = torch.tensor(self.weights, device=terms.device)
        unknown = terms.isnan()
        total = (terms.nan_to_num(0.0) * weights[:, None, None]).sum(0)
        return total.masked_fill(unknown.any(0) if self.strict else unknown.all(0), torch.nan)
