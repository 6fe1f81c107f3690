"""Advantages per token of an item: rewards are compared among the candidates that share a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.advantages.group import group_normalized_advantage, kept_mask, rewards_of
from recpo.contracts import TokenAdvantageEstimator
from recpo.errors import RecpoError
from recpo.ops.reduce import check_same_shape, zero_masked
from recpo.types import FeedbackBatch


def prefix_group_advantage(
    rewards: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    min_group: int = 2,
    scale: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Reward minus the mean reward of the candidates with the same prefix, for every token of an item.

    The advantage of token t compares the choice at t with the other choices there: its baseline is the mean over the
    candidates with the same first t - 1 tokens. At the first token these are all candidates of the group, so one token
    per item gives ``group_normalized_advantage``. If fewer than ``min_group`` candidates share that prefix, the longest
    prefix that enough candidates share gives the baseline. Baselines depend only on the prefix, so they change the
    variance of the policy gradient but not its direction.

    Args:
        rewards: ``[..., S]``.
        tokens: ``[..., S, T]``.
        mask: ``[..., S]``, True keeps; masked candidates leave every group.
        min_group: candidates that a prefix needs, 2 at least.
        scale: divide by the standard deviation of the whole group.
        eps: added to that.

    Returns:
        ``[..., S, T]``; 0 at masked candidates and throughout a group of equal rewards. Memory: ``S * S * T`` flags.

    Raises:
        ValueError: ``min_group`` under 2, or shapes that differ.
    """
    check_same_shape(rewards=rewards, items=tokens[..., 0], mask=mask)
    if min_group < 2:
        raise ValueError(f"min_group must be at least 2, got {min_group}")
    kept = kept_mask(rewards, mask)
    rewards = zero_masked(rewards.detach(), kept)
    alike = (tokens.unsqueeze(-2) == tokens.unsqueeze(-3)).cumprod(-1).bool()  # [..., S, S, T]: the first t + 1 tokens
    alike = torch.cat([torch.ones_like(alike[..., :1]), alike[..., :-1]], -1) & kept[..., None, :, None]
    size = alike.sum(-2)
    mean = (alike * rewards[..., None, :, None]).sum(-2) / size.clamp(min=1)
    baseline = [mean[..., 0]]
    for t in range(1, tokens.shape[-1]):
        baseline.append(torch.where(size[..., t] >= min_group, mean[..., t], baseline[-1]))
    advantage = rewards.unsqueeze(-1) - torch.stack(baseline, -1)
    varies = (group_normalized_advantage(rewards, kept, scale=False) != 0).any(-1)[..., None, None]
    if scale:
        count = kept.sum(-1)
        square = zero_masked(advantage[..., 0], kept).square().sum(-1) / (count - 1).clamp(min=1)
        advantage = advantage / (square.sqrt() + eps)[..., None, None]
    return zero_masked(advantage, kept.unsqueeze(-1) & varies)


@dataclass(frozen=True)
class PrefixGroupAdvantage(TokenAdvantageEstimator):
    """Group-relative advantages of every token of a semantic id, by the rewards of candidates with the same prefix.

    After SAPO (arXiv 2605.17648: one group-relative advantage per step) and HRPO (arXiv 2608.00750), with the reward of
    the whole item at every token instead of exact matches of single tokens; see ``prefix_group_advantage``.

    Attributes:
        min_group: candidates that must share a prefix for its mean to be a baseline; fewer: a shorter prefix.
        scale: divide by the group's standard deviation.
        eps: added to the standard deviation.
    """

    min_group: int = 2
    scale: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.min_group < 2:
            raise RecpoError(f"PrefixGroupAdvantage.min_group must be at least 2, got {self.min_group}.")

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return frozenset({"rewards"})

    def token_advantages(self, batch: FeedbackBatch, tokens: Tensor) -> Tensor:
        """See ``TokenAdvantageEstimator``."""
        return prefix_group_advantage(
            rewards_of(batch, self),
            tokens,
            batch.slates.mask,
            min_group=self.min_group,
            scale=self.scale,
            eps=self.eps,
        )
