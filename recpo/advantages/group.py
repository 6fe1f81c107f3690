"""Rewards compared within a group, the slate axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import AdvantageEstimator
from recpo.errors import RecpoError
from recpo.ops.reduce import zero_masked
from recpo.types import FeedbackBatch


def kept_mask(values: Tensor, mask: Tensor | None) -> Tensor:
    """``mask`` as bool; all True if there is none."""
    return torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()


def rewards_of(batch: FeedbackBatch, estimator: object) -> Tensor:
    """The rewards ``[B, S]`` that ``estimator`` reads.

    Raises:
        RecpoError: no reward is configured.
    """
    if batch.slates.reward is None:
        raise RecpoError(f"{type(estimator).__name__} needs rewards, which this batch lacks: configure a reward.")
    return batch.slates.reward


def _is_constant(rewards: Tensor, kept: Tensor) -> Tensor:
    """``[..., 1]``: all kept rewards of the group are equal (or there is at most one)."""
    top = rewards.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
    return top <= rewards.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)


def group_normalized_advantage(
    rewards: Tensor, mask: Tensor | None = None, *, scale: bool = True, unbiased: bool = True, eps: float = 1e-6
) -> Tensor:
    """``(r - mean) / (std + eps)`` over the group, the last axis (GRPO, arXiv 2402.03300).

    Args:
        rewards: ``[..., S]``.
        mask: ``[..., S]``; masked entries are left out of the group and get 0.
        scale: divide by the standard deviation; False is Dr.GRPO (arXiv 2503.20783).
        unbiased: divide the squared deviations by n - 1 instead of n.
        eps: added to the standard deviation.

    Returns:
        ``[..., S]``; exactly 0 for a group of one or of equal rewards, because 1 / eps would amplify rounding errors.
    """
    kept = kept_mask(rewards, mask)
    rewards = zero_masked(rewards.detach(), kept)
    size = kept.sum(-1, keepdim=True)
    deviation = zero_masked(rewards - rewards.sum(-1, keepdim=True) / size.clamp(min=1), kept)
    deviation = deviation.masked_fill(_is_constant(rewards, kept), 0.0)
    if not scale:
        return deviation
    variance = deviation.square().sum(-1, keepdim=True) / (size - int(unbiased)).clamp(min=1)
    return deviation / (variance.sqrt() + eps)


def leave_one_out_advantage(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """Reward minus the mean reward of the *others* of the group, the last axis (RLOO, arXiv 2402.14740).

    Args:
        rewards: ``[..., S]``.
        mask: ``[..., S]``; masked entries are left out of the group and get 0.

    Returns:
        ``[..., S]``; exactly 0 for a group of one or of equal rewards.
    """
    kept = kept_mask(rewards, mask)
    deviation = group_normalized_advantage(rewards, mask, scale=False)
    size = kept.sum(-1, keepdim=True)
    # r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    return deviation * size / (size - 1).clamp(min=1)


@dataclass(frozen=True)
class GroupNormalizedAdvantage(AdvantageEstimator):
    """Rewards normalized over the slate axis, the group of GRPO (see ``group_normalized_advantage``).

    Attributes:
        scale: divide by the group's standard deviation; False for ``DrGRPO``.
        unbiased: divide the squared deviations by n - 1 instead of n.
        eps: added to the standard deviation.
    """

    scale: bool = True
    unbiased: bool = True
    eps: float = 1e-6

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return frozenset({"rewards"})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        rewards = rewards_of(batch, self)
        return group_normalized_advantage(
            rewards, batch.slates.mask, scale=self.scale, unbiased=self.unbiased, eps=self.eps
        )


@dataclass(frozen=True)
class LeaveOneOutAdvantage(AdvantageEstimator):
    """Reward minus the mean reward of the others on the slate (see ``leave_one_out_advantage``)."""

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return frozenset({"rewards"})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        return leave_one_out_advantage(rewards_of(batch, self), batch.slates.mask)
