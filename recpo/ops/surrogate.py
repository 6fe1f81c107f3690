"""Probability ratios in log space and the clipped surrogate that most policy objectives share."""

import math
from typing import Literal

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.ops.reduce import check_same_shape, over_tokens, zero_masked

RatioLevel = Literal["token", "sequence"]
"""Whether an objective looks at the probability of each token or at that of the whole item."""

LOG_RATIO_GUARD = 20.0
"""Bound on |log ratio| before ``exp``: e^20 = 4.9e8 is far outside every clip range, while e^89 overflows float32."""


def guarded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp(log_ratio)`` with ``log_ratio`` held within +-``LOG_RATIO_GUARD``; no gradient beyond it."""
    return log_ratio.clamp(-LOG_RATIO_GUARD, LOG_RATIO_GUARD).exp()


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for ``x <= 0`` without cancellation; -inf at 0.

    Machler (2012): ``log(-expm1(x))`` near 0 and ``log1p(-exp(x))`` elsewhere, parted at ``-log 2``.
    """
    return torch.where(x > -math.log(2.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def weighted_score(weight: Tensor, logp: Tensor) -> Tensor:
    """A tensor whose value is ``weight`` and whose gradient is ``weight * grad logp``; none flows into ``weight``."""
    check_same_shape(logp=logp, weight=weight)
    return weight.detach() * (1.0 + logp - logp.detach())


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Mean log-ratio over the kept tokens of each sequence: the log of the geometric-mean ratio (arXiv 2507.18071).

    Args:
        log_ratio: ``[..., T]``.
        mask: ``[..., T]``.

    Returns:
        ``[...]``; 0 for an empty sequence.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(log_ratio=log_ratio, mask=mask)
    return zero_masked(log_ratio, mask).sum(-1) / mask.bool().sum(-1).clamp(min=1)


def is_clipped(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the clipped surrogate is flat.

    ``A > 0`` and ``rho > 1 + clip_high``, or ``A < 0`` and ``rho < 1 - clip_low``.

    Args:
        log_ratio: ``[..., T]``.
        advantages: ``[..., T]``.
        clip_low: see ``clipped_surrogate``.
        clip_high: see ``clipped_surrogate``.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(log_ratio=log_ratio, advantages=advantages)
    ratio = guarded_ratio(log_ratio)
    return ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate of PPO as a loss, per token (arXiv 1707.06347; dual clip arXiv 1912.09729).

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``; with ``dual_clip`` and ``A < 0``: ``min(that,
    -dual_clip A)``.

    Args:
        log_ratio: ``[..., T]``, ``logp - logp_old``; guarded at +-``LOG_RATIO_GUARD``.
        advantages: ``[..., T]`` or ``[...]``; no gradient flows into it.
        clip_low: lower clip range, in [0, 1]: for ``A < 0`` the gradient is zero once ``rho < 1 - clip_low``.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``rho > 1 + clip_high``.
        dual_clip: upper bound, above 1, of the ratio for ``A < 0``; None = no bound.

    Returns:
        ``[..., T]``, to be minimized.

    Raises:
        RecpoError: ``dual_clip`` is not above 1, or the shapes do not fit.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise RecpoError(f"dual_clip must be above 1, got {dual_clip}", code="out_of_range", field="dual_clip")
    advantages = over_tokens(advantages.detach(), log_ratio)
    ratio = guarded_ratio(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
