"""Advantages only for groups whose reward is reliable and informative."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.advantages.group import GroupNormalizedAdvantage, rewards_of
from recpo.contracts import AdvantageEstimator
from recpo.errors import RecpoError
from recpo.ops.reduce import check_same_shape, zero_masked
from recpo.types import FeedbackBatch


def reward_gate(
    rewards: Tensor,
    item_ids: Tensor,
    liked: Tensor,
    drawn: Tensor,
    *,
    max_hit_share: float = 0.5,
    min_separation: float = 0.75,
) -> Tensor:
    """Groups whose reward is used: the policy is unsure, and the reward discriminates.

    - The policy is unsure: at most ``max_hit_share`` of its draws are items that the user liked in the log.
    - The reward discriminates: of all pairs of a liked item and another draw, the share in which the liked item has the
      higher reward (a tie counts half) is at least ``min_separation``.

    Args:
        rewards: ``[..., S]``.
        item_ids: ``[..., S]``.
        liked: ``[..., S]`` bool, logged items of the group that the user likes.
        drawn: ``[..., S]`` bool, kept draws of the policy.
        max_hit_share: in [0, 1].
        min_separation: in [0, 1].

    Returns:
        ``[...]`` bool; False for a group without a liked item, or without a draw of anything else.

    Raises:
        ValueError: shapes that differ.
    """
    check_same_shape(rewards=rewards, item_ids=item_ids, liked=liked, drawn=drawn)
    same = item_ids.unsqueeze(-1) == item_ids.unsqueeze(-2)
    hit = drawn & (same & liked.unsqueeze(-2)).any(-1)
    others = drawn & ~hit
    hit_share = hit.sum(-1) / drawn.sum(-1).clamp(min=1)
    own, other = rewards.unsqueeze(-1), rewards.unsqueeze(-2)
    pairs = liked.unsqueeze(-1) & others.unsqueeze(-2)
    won = zero_masked((own > other) + 0.5 * (own == other), pairs).sum((-1, -2))
    separation = won / pairs.sum((-1, -2)).clamp(min=1)
    return pairs.flatten(-2).any(-1) & (hit_share <= max_hit_share) & (separation >= min_separation)


@dataclass(frozen=True)
class GatedAdvantage(AdvantageEstimator):
    """The advantages of another estimator, and 0 in groups whose reward is unreliable or uninformative.

    After AdaGRPO (arXiv 2606.08480): a group passes if the policy rarely draws the items that the user liked in the
    log, and the reward ranks these above the other draws (see ``reward_gate``). Both conditions need logged items in a
    group: set ``rollout.logged_share``. A group without a liked item never passes. To let the other groups learn from
    the likelihood of the log, set ``anchor_coef``.

    Attributes:
        estimator: the estimator whose advantages pass.
        max_hit_share: largest share of draws that are liked items.
        min_separation: smallest share of pairs (a liked item, another draw) that the reward orders correctly; .5 =
            chance.
    """

    estimator: AdvantageEstimator = GroupNormalizedAdvantage()  # noqa: RUF009  frozen
    max_hit_share: float = 0.5
    min_separation: float = 0.75

    def __post_init__(self) -> None:
        if self.estimator.whiten:
            raise RecpoError(
                "GatedAdvantage.estimator must not whiten, because only the advantages that pass are learned from: set "
                "whiten of GatedAdvantage itself"
            )
        for name in ("max_hit_share", "min_separation"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise RecpoError(f"GatedAdvantage.{name} must lie in [0, 1], got {getattr(self, name)}.")

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return self.estimator.requires | {"rewards"}

    @property
    def reads_step_labels(self) -> bool:
        """See ``AdvantageEstimator.reads_step_labels``."""
        return self.estimator.reads_step_labels

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``AdvantageEstimator.learns_from``."""
        return self.estimator.learns_from | {"positives"}

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``."""
        slates = batch.slates
        if slates.is_logged is None or slates.positive is None:
            raise RecpoError(
                "GatedAdvantage compares draws with what the log shows, and this batch does not say which is which: "
                "set rollout with logged_share above 0"
            )
        passes = reward_gate(
            rewards_of(batch, self),
            slates.item_ids,
            slates.mask & slates.is_logged & slates.positive,
            slates.mask & ~slates.is_logged,
            max_hit_share=self.max_hit_share,
            min_separation=self.min_separation,
        )
        return torch.where(passes.unsqueeze(-1), self.estimator(batch, values), 0.0)
