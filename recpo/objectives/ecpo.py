"""Early-clipped policy optimization, ECPO (OneRec, arXiv 2506.13695)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.objectives.health import masked_mean
from recpo.objectives.inputs import required
from recpo.objectives.policy_gradient import ClippedObjective
from recpo.objectives.ppo import ppo_loss
from recpo.ops.reduce import check_same_shape, zero_masked
from recpo.ops.surrogate import guarded_ratio


def ecpo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float = 0.1,
) -> Tensor:
    """PPO whose ratio is capped *before* the clip, with its gradient kept, per token.

    ``ppo_loss`` against ``pi_old' = max(sg(pi) / (1 + clip_high + delta), pi_old)``, so that ``rho <= 1 + clip_high +
    delta``. Positives are as in PPO (they have no gradient there anyway). A negative has a gradient weight of at most
    ``1 + clip_high + delta``, while PPO's weight grows without bound.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        clip_low: lower clip range: for ``A < 0`` the gradient is zero once ``rho < 1 - clip_low``.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``rho > 1 + clip_high``.
        delta: distance between the clip and the cap.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    early = logp.detach() - math.log(1.0 + clip_high + delta)
    old = torch.maximum(early, zero_masked(logp_old.detach(), mask))
    return ppo_loss(logp, old, advantages, mask=mask, clip_low=clip_low, clip_high=clip_high)


@dataclass(frozen=True)
class ECPO(ClippedObjective):
    """Early-clipped policy optimization (OneRec, arXiv 2506.13695): GRPO with a bound on the ratio of negatives.

    The ratio is capped at ``1 + clip_high + delta``:
    ``pi_old' = max(sg(pi) / (1 + clip_high + delta), pi_old)`` keeps the gradient of negatives bounded.

    Departures: the paper's ratio is per item; here it is per token, as in the other objectives.

    Attributes:
        delta: room between the clip and the cap.
    """

    delta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta < 0:
            raise RecpoError(f"ECPO.delta must not be negative, got {self.delta}.")

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``ecpo_loss``."""
        return ecpo_loss(
            logp,
            required(logp_old, "old", self),
            advantages,
            mask=mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            delta=self.delta,
        )

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens without gradient, and share of negatives whose ratio was capped early."""
        capped = (advantages < 0) & (guarded_ratio(log_ratio) > 1.0 + self.clip_high + self.delta)
        return super().clip_metrics(log_ratio, advantages, mask) | {"early_clip_fraction": masked_mean(capped, mask)}
