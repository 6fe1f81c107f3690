"""Divergences between the trained and the reference policy.

Facts that the tests check (``logp`` sampled on-policy): k1 and k3 have the right expected *value* of KL(pi || ref);
used as a loss, k1 has zero expected gradient, k3 has the gradient of the other direction, KL(ref || pi), and only k2
has the gradient of KL(pi || ref).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.ops.reduce import check_same_shape, zero_masked

KLKind = Literal["k1", "abs", "k2", "k3", "low_var"]
"""Per-token estimators; see ``kl_estimate``."""

KLPenalty = Literal[KLKind, "full"]
"""An estimator, or the exact divergence over all choices of a token (``categorical_kl``)."""

EXPONENT_GUARD = 20.0
"""Beyond e^20 = 4.9e8, the exponential of k3 continues as its tangent, so neither it nor its gradient overflows."""

LOW_VAR_BOUND = 10.0
"""Bound on |low_var|, as widely used; its gradient is 0 there."""


def kl_estimate(logp: Tensor, logp_ref: Tensor, kind: KLKind = "k3") -> Tensor:
    """Per-token estimate of KL(pi || ref) from tokens sampled from pi (Schulman, 2020).

    ``k1 = logp - logp_ref``; ``abs = |k1|``; ``k2 = k1^2 / 2``; ``k3 = exp(-k1) + k1 - 1``; ``low_var`` is k3 with
    ``-k1`` clamped to +-20 and the result to +-10, where its gradient is 0.

    Args:
        logp: any shape.
        logp_ref: same shape; no gradient flows into it.
        kind: the estimator.

    Returns:
        Same shape.

    Raises:
        RecpoError: unknown estimator, or shapes that differ.
    """
    check_same_shape(logp=logp, logp_ref=logp_ref)
    k1 = logp - logp_ref.detach()
    if kind == "k1":
        return k1
    if kind == "abs":
        return k1.abs()
    if kind == "k2":
        return 0.5 * k1.square()
    if kind == "k3":
        head = (-k1).clamp(max=EXPONENT_GUARD)
        tail = (-k1 - EXPONENT_GUARD).clamp(min=0.0)
        # expm1(x) - x loses fewer digits than exp(x) - x - 1 near 0, where most penalties are.
        return torch.expm1(head) + head.exp() * tail + k1
    if kind == "low_var":
        x = (-k1).clamp(-EXPONENT_GUARD, EXPONENT_GUARD)
        return (torch.expm1(x) - x).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    raise RecpoError(
        f"unknown KL estimator {kind!r}; expected one of {', '.join(get_args(KLKind))}",
        code="unknown_name",
        field="kl_kind",
    )


def masked_log_softmax(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log-softmax over the kept classes of the last axis; -inf elsewhere, and -log C throughout a row without any."""
    check_same_shape(logits=logits, mask=mask)
    if mask is not None:
        logits = logits.masked_fill(~mask.bool(), -torch.inf)
    possible = (logits > -torch.inf).any(-1, keepdim=True)
    return torch.where(possible, logits, torch.zeros_like(logits)).log_softmax(-1)


def categorical_kl(logits: Tensor, logits_ref: Tensor, mask: Tensor | None = None) -> Tensor:
    """Exact KL(softmax(logits) || softmax(logits_ref)), with ``0 log 0 = 0``.

    Args:
        logits: ``[..., C]``; -inf is a class of probability 0.
        logits_ref: ``[..., C]``; no gradient flows into it.
        mask: ``[..., C]`` over classes; a masked class equals a removed one.

    Returns:
        ``[...]``; 0 for a row without classes; inf where the reference excludes a class that the policy does not.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(logits=logits, logits_ref=logits_ref, mask=mask)
    kept = (logits > -torch.inf) if mask is None else mask.bool() & (logits > -torch.inf)
    logp = zero_masked(masked_log_softmax(logits, mask), kept)
    logp_ref = zero_masked(masked_log_softmax(logits_ref.detach(), mask), kept)
    return (logp.exp() * (logp - logp_ref)).sum(-1)


def kl_shaped_rewards(scores: Tensor, logp_old: Tensor, logp_ref: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Per-token rewards ``[t is the last kept token] * score - kl_coef * (logp_old - logp_ref)`` (arXiv 2203.02155).

    Args:
        scores: ``[...]``, one per sequence.
        logp_old: ``[..., T]`` of the policy that generated the tokens.
        logp_ref: ``[..., T]``.
        mask: ``[..., T]``.
        kl_coef: weight of the penalty.

    Returns:
        ``[..., T]`` without gradient; 0 at masked tokens; the score of an empty sequence is dropped.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_same_shape(logp_old=logp_old, logp_ref=logp_ref, mask=mask)
    check_same_shape(scores=scores, sequences=mask[..., 0])
    kept = mask.bool()
    kept_from_here = kept.flip(-1).cumsum(-1).flip(-1)
    last = kept & (kept_from_here == 1)
    penalty = kl_coef * zero_masked(logp_old.detach() - logp_ref.detach(), kept)
    return zero_masked(scores.detach().unsqueeze(-1).expand_as(penalty), last) - penalty
