"""Clipped importance-sampling-weight policy optimization, CISPO (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.objectives.health import masked_mean
from recpo.objectives.inputs import required
from recpo.objectives.policy_gradient import PolicyGradientObjective
from recpo.ops.reduce import Aggregation, check_same_shape, over_tokens, zero_masked
from recpo.ops.surrogate import guarded_ratio, weighted_score


def cispo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cap_low: float | None = None,
    cap_high: float | None = 1.2,
) -> Tensor:
    """REINFORCE with a capped importance weight, ``-sg(clip(rho, cap_low, cap_high)) A grad logp``, per token.

    No token ever loses its gradient. The value is ``-A w``.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        cap_low: smallest weight; None = none (the paper's choice).
        cap_high: largest weight, the bound itself and not its distance from 1; None = none.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    advantages = zero_masked(over_tokens(advantages.detach(), logp), mask)
    weight = guarded_ratio(logp.detach() - zero_masked(logp_old.detach(), mask))
    if cap_low is not None or cap_high is not None:
        weight = weight.clamp(cap_low, cap_high)
    return -advantages * weighted_score(weight, logp)


@dataclass(frozen=True)
class CISPO(PolicyGradientObjective):
    """Capped importance weights on the policy gradient (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    ``-sg(clip(rho, cap_low, cap_high)) A grad logp``. Caps are absolute, as in TRL (verl's are distances from 1).

    Attributes:
        cap_low: smallest weight; none = no bound (the paper's choice).
        cap_high: largest weight; none = no bound.
    """

    aggregation: Aggregation = "token-mean"
    cap_low: float | None = None
    cap_high: float | None = 1.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap_low is not None and self.cap_high is not None and self.cap_low > self.cap_high:
            raise RecpoError(f"CISPO.cap_low ({self.cap_low}) must not exceed CISPO.cap_high ({self.cap_high}).")

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``cispo_loss``."""
        old = required(logp_old, "old", self)
        return cispo_loss(logp, old, advantages, mask=mask, cap_low=self.cap_low, cap_high=self.cap_high)

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens whose weight was capped."""
        ratio = guarded_ratio(log_ratio)
        below = ratio < (0.0 if self.cap_low is None else self.cap_low)
        above = ratio > (float("inf") if self.cap_high is None else self.cap_high)
        return {"clip_fraction": masked_mean(below | above, mask)}
