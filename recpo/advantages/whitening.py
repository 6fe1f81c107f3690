"""Whitening: advantages with mean 0 and standard deviation 1 over a complete optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.ops.reduce import check_same_shape, zero_masked

EPS = 1e-8
"""Added to the standard deviation, so that equal advantages give 0."""

ROUNDING = 1e-6
"""A mean below this share of the root mean square is rounding, and counts as 0: so advantages that are centered within
their groups keep the exact 0 of groups of equal rewards."""


def whitening_sums(advantages: Tensor, mask: Tensor) -> Tensor:
    """Number, sum and sum of squares of the kept advantages, ``[3]`` float64. Those of the parts of a step add up.

    Args:
        advantages: any shape.
        mask: same shape, True keeps.

    Raises:
        ValueError: shapes that differ.
    """
    check_same_shape(advantages=advantages, mask=mask)
    kept = zero_masked(advantages.detach(), mask).double()
    return torch.stack([mask.bool().sum().double(), kept.sum(), kept.square().sum()])


def whitened_advantage(advantages: Tensor, mask: Tensor, sums: Tensor | None = None) -> Tensor:
    """``(A - mean) / (std + 1e-8)`` over the kept positions of an optimizer step, with the biased standard deviation.

    Args:
        advantages: any shape.
        mask: same shape, True keeps.
        sums: ``whitening_sums`` of the whole step, if these advantages are only a part of it; None = they are all.

    Returns:
        Same shape and dtype, without gradient; 0 at masked positions. A step with fewer than two kept positions stays
        as it is.

    Raises:
        ValueError: shapes that differ.
    """
    count, total, squares = (whitening_sums(advantages, mask) if sums is None else sums).unbind()
    mean, mean_square = total / count.clamp(min=1), squares / count.clamp(min=1)
    mean = torch.where(mean.abs() < ROUNDING * mean_square.sqrt(), 0.0, mean)
    deviation = (mean_square - mean.square()).clamp(min=0).sqrt()
    kept = zero_masked(advantages.detach(), mask)
    white = ((kept.double() - mean) / (deviation + EPS)).to(kept.dtype)
    return torch.where(count < 2, kept, zero_masked(white, mask))
