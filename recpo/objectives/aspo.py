"""Asymmetric importance sampling policy optimization, ASPO (arXiv 2510.06062)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.objectives.health import masked_mean
from recpo.objectives.inputs import required
from recpo.objectives.policy_gradient import ClippedObjective
from recpo.ops.reduce import Aggregation, check_same_shape, over_tokens, zero_masked
from recpo.ops.surrogate import guarded_ratio, is_clipped, weighted_score


def aspo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """Policy gradient, per token, that weights a positive by its *reciprocal* ratio, so that unlikely tokens catch up.

    ``-A w grad logp`` with ``w = pi_old / pi`` for ``A > 0`` (``pi_old pi / sg(pi^2)``) and ``w = rho`` for ``A < 0``.
    Hard mask, ``w = 0``: ``A > 0`` and ``rho > 1 + clip_high``, or ``A < 0`` and ``rho < 1 - clip_low``. Soft cap:
    ``w <= dual_clip`` for both signs, with the gradient kept. The value is ``-A w``.

    Clamping the flipped ratio to ``[1 - clip_low, 1 + clip_high]``, as seen elsewhere, disables the method.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        clip_low: lower clip range: for ``A < 0`` the gradient is zero once ``rho < 1 - clip_low``.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``rho > 1 + clip_high``.
        dual_clip: the soft cap; None = none.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    advantages = zero_masked(over_tokens(advantages.detach(), logp), mask)
    log_ratio = logp.detach() - zero_masked(logp_old.detach(), mask)
    weight = guarded_ratio(torch.where(advantages > 0, -log_ratio, log_ratio))
    weight = weight if dual_clip is None else weight.clamp(max=dual_clip)
    weight = zero_masked(weight, ~is_clipped(log_ratio, advantages, clip_low, clip_high))
    return -advantages * weighted_score(weight, logp)


@dataclass(frozen=True)
class ASPO(ClippedObjective):
    """Asymmetric importance sampling policy optimization (arXiv 2510.06062).

    ``-A w grad logp`` with ``w = 1 / rho`` for ``A > 0`` and ``rho`` for ``A < 0``: a positive whose probability has
    fallen gets more weight, not less. Outside the clip range there is no gradient (hard mask), and ``w`` is capped at
    ``dual_clip`` with its gradient kept (soft cap).

    Attributes:
        dual_clip: the soft cap on the weight of both signs, above 1; none = no cap.
    """

    aggregation: Aggregation = "token-mean"
    dual_clip: float | None = 3.0

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``aspo_loss``."""
        return aspo_loss(
            logp,
            required(logp_old, "old", self),
            advantages,
            mask=mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens without gradient, and share of tokens whose weight was capped."""
        metrics = super().clip_metrics(log_ratio, advantages, mask)
        if self.dual_clip is not None:
            weight = guarded_ratio(-advantages.sign() * log_ratio)
            metrics["dual_clip_fraction"] = masked_mean((advantages != 0) & (weight > self.dual_clip), mask)
        return metrics
