"""Group-relative policy optimization and two of its corrections: GRPO, Dr.GRPO, DAPO.

All three are ``ppo_loss`` with other choices of clip, aggregation and penalty; the advantages are normalized over the
slate axis by ``recpo.objectives.advantages.GroupNormalizedAdvantage`` (``scale=False`` for Dr.GRPO).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recpo.objectives.inputs import required
from recpo.objectives.policy_gradient import ClippedObjective
from recpo.objectives.ppo import ppo_loss
from recpo.ops.reduce import Aggregation


@dataclass(frozen=True)
class GRPO(ClippedObjective):
    """Group-relative policy optimization (arXiv 2402.03300): PPO without a critic, over groups of candidates.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3(policy, reference)``, the mean over items of
    the mean over tokens. The KL penalty is part of the loss and not of the reward.
    """

    kl_coef: float = 0.04

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``ppo_loss``."""
        old = required(logp_old, "old", self)
        return ppo_loss(logp, old, advantages, mask=mask, clip_low=self.clip_low, clip_high=self.clip_high)


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """Dr.GRPO (arXiv 2503.20783): no division by the length of an item, and none by the group's standard deviation.

    Token sums over a constant ``length``, averaged over items; pair it with
    ``GroupNormalizedAdvantage(scale=False)``. No KL penalty by default.
    """

    aggregation: Aggregation = "seq-mean-token-sum-norm"
    kl_coef: float = 0.0


@dataclass(frozen=True)
class DAPO(GRPO):
    """Decoupled clip and token-level mean (arXiv 2503.14476): clip 0.2 / 0.28, no KL penalty.

    Dynamic sampling (dropping groups of equal rewards) and the overlong penalty belong to the rollout. Without
    dropping, such groups have zero advantages and only enter the denominator (``zero_group_share`` reports their
    share).
    """

    aggregation: Aggregation = "token-mean"
    kl_coef: float = 0.0
    clip_high: float = 0.28
