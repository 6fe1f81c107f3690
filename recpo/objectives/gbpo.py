"""Gradient-bounded policy optimization, GBPO (OneRec-V2, arXiv 2508.20900)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.types import ObjectiveInputs
from recpo.objectives.policy_gradient import PolicyGradientObjective
from recpo.ops.reduce import check_same_shape, over_tokens, zero_masked
from recpo.ops.surrogate import LOG_RATIO_GUARD, RatioLevel, log1mexp, weighted_score


def gbpo_loss(
    logp: Tensor,
    advantages: Tensor,
    *,
    logp_old: Tensor | None = None,
    mask: Tensor | None = None,
    level: RatioLevel = "token",
) -> Tensor:
    """Policy loss whose gradient never exceeds that of binary cross-entropy, per token.

    ``-pi / den * A`` with ``den = max(pi_old, sg(pi))`` for ``A >= 0`` and ``max(pi_old, 1 - sg(pi))`` for ``A < 0``.
    The weight on ``grad logp`` is ``-A min(1, pi / pi_old)`` for positives and ``-A min(pi / pi_old, pi / (1 - pi))``
    for negatives. The value of the loss carries no information: for a positive without ``logp_old`` it is the constant
    -1. Monitor the gradients instead.

    Everything stays in log space and no probability is clamped; the log of the weight is guarded from above at
    ``LOG_RATIO_GUARD`` (a negative of probability 1), where the gradient is kept.

    Args:
        logp: ``[..., T]``.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        logp_old: ``[..., T]`` at exposure, if it was logged; None = ``sg(logp)``, a ratio of 1 for positives.
        mask: ``[..., T]``.
        level: ``token`` bounds each token by its own probability; ``sequence`` uses the product over the item's tokens,
            returned on each of its tokens. On a large catalog that product is about 1e-6, so negatives vanish.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        ValueError: unknown level, or shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    advantages = zero_masked(over_tokens(advantages.detach(), logp), mask)
    old = logp.detach() if logp_old is None else zero_masked(logp_old.detach(), mask)
    if level == "sequence":
        logp, old = (x.sum(-1, keepdim=True).expand_as(logp) for x in (logp, old))
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; expected token or sequence")
    current = logp.detach()
    # A float32 log-softmax may end a rounding above 0, where log(1 - pi) is nan.
    complement = log1mexp(current.clamp(max=0.0))
    bound = torch.maximum(old, torch.where(advantages < 0, complement, current))
    weight = (current - bound).clamp(max=LOG_RATIO_GUARD).exp()
    return zero_masked(-advantages * weighted_score(weight, logp), mask)


@dataclass(frozen=True)
class GBPO(PolicyGradientObjective):
    """Gradient-bounded policy optimization (OneRec-V2, arXiv 2508.20900): ``-pi / max(pi_old, bound) * A``.

    ``bound`` is ``sg(pi)`` for ``A >= 0`` and ``1 - sg(pi)`` for ``A < 0``. Averaged over all kept items, ``A = 0``
    included. The training module supplies ``pi_old`` (logged or snapshot); without one, it is ``sg(pi)``.

    On a catalog policy (``T = 1``) a negative has the weight ``pi / (1 - pi)``: only disliked items that the policy
    still ranks high are pushed down. Monitor ``negative_gradient_share``. If dislikes matter more, use ``SoftmaxDPO``
    or combine both.

    Departures: the paper writes ``pi(o_i | u)`` and analyzes tokens; ``level="token"`` follows the analysis.

    Attributes:
        level: ``token`` bounds each token by its own probability; ``sequence`` by that of the item.
    """

    level: RatioLevel = "token"

    @property
    def requires(self) -> frozenset[str]:
        """The old policy is read if it is supplied, and never required."""
        return super().requires - {"old"}

    def old(self, inputs: ObjectiveInputs) -> Tensor | None:
        """Log-probabilities under the old policy, if supplied."""
        return inputs.logp.old

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``gbpo_loss``."""
        return gbpo_loss(logp, advantages, logp_old=logp_old, mask=mask, level=self.level)
