"""Rewards of logged items, computed from their feedback in the log."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError
from recpo.features.schema import Reads
from recpo.types import FeedbackBatch, Slates


@dataclass(frozen=True)
class LoggedReward(RewardFunction):
    """``label + sum_b behaviors_b did_b - dislike_cost * disliked`` of logged items.

    An item without a label but with a dislike, or with a behavior that has a weight, is known; its label counts as 0.
    An item without label, dislike and behavior (a missing watch time, a sampled negative) has no reward. It leaves its
    slate, and so the group mean, the session and every denominator, unless ``unknown`` gives its reward.

    Attributes:
        dislike_cost: amount that a dislike subtracts.
        unknown: reward of an item without label, dislike and behavior; none = it is left out.
        behaviors: amount that a behavior adds, by its name in the prepared data, such as ``{"like": 1.0, "follow":
            2.0}``.
    """

    dislike_cost: float = 1.0
    unknown: float | None = None
    behaviors: dict[str, float] = field(default_factory=dict)
    #: bits of the behaviors in the training data (``for_behaviors``); not an option
    _bits: ClassVar[tuple[tuple[int, float], ...] | None] = None

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``RewardFunction.learns_from``."""
        return frozenset({"labels"})

    @property
    def reads(self) -> Reads:
        """See ``RewardFunction.reads``."""
        return Reads(behaviors=bool(self.behaviors))

    def for_behaviors(self, names: tuple[str, ...]) -> LoggedReward:
        """See ``RewardFunction.for_behaviors``."""
        unknown = sorted(self.behaviors.keys() - set(names))
        if unknown:
            raise RecpoError(
                f"LoggedReward weighs the behavior {unknown[0]!r}, which the data lacks (it has "
                f"{', '.join(names) or 'none'}); name its column in `behaviors` of recpo prepare"
            )
        known = replace(self)
        bits = tuple((names.index(name), weight) for name, weight in self.behaviors.items())
        object.__setattr__(known, "_bits", bits)
        return known

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        if candidates.label is None:
            raise RecpoError("LoggedReward needs labels, which these candidates lack.")
        label = candidates.label
        reward = label if self.unknown is None else label.nan_to_num(self.unknown)
        if self.behaviors:
            gain, did = self._gain(candidates)
            label = torch.where(did, label.nan_to_num(0.0) + gain, label)
            reward = torch.where(did, label, reward)
        if candidates.dislike is None:
            return reward
        return torch.where(candidates.dislike.bool(), label.nan_to_num(0.0) - self.dislike_cost, reward)

    def _gain(self, candidates: Slates) -> tuple[Tensor, Tensor]:
        """``[B, S]``: what behaviors add, and where there is one with a weight."""
        if candidates.behaviors is None or self._bits is None:
            raise RecpoError(
                "LoggedReward weighs behaviors, which these candidates lack: it is for logged slates of prepared data "
                "with behaviors (recpo.train reads them; elsewhere call for_behaviors and load them)"
            )
        done = [(candidates.behaviors >> bit & 1, weight) for bit, weight in self._bits]
        gain = torch.stack([bit * weight for bit, weight in done]).sum(0)
        return gain, torch.stack([bit.bool() for bit, _ in done]).any(0)
