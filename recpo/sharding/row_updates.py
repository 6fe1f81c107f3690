"""Optimizer updates of the rows that have a gradient, with the same results as FBGEMM's fused kernels.

For tables without a fused kernel: replicated tables, and Adam on a CPU. All functions change ``weight`` and the state
in place. ``rows [n]`` are distinct row numbers, and ``gradient [n, d]`` their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sgd(weight: Tensor, rows: Tensor, gradient: Tensor, lr: float) -> None:
    """``w <- w - lr g``."""
    weight.index_add_(0, rows, gradient, alpha=-lr)


def adagrad(weight: Tensor, total: Tensor, rows: Tensor, gradient: Tensor, lr: float, eps: float) -> None:
    """``s <- s + g^2; w <- w - lr g / (sqrt(s) + eps)`` (Duchi et al. 2011); ``total`` is ``s [V + 1, d]``."""
    total.index_add_(0, rows, gradient.square())
    weight.index_add_(0, rows, gradient / (total[rows].sqrt() + eps), alpha=-lr)


def rowwise_adagrad(weight: Tensor, total: Tensor, rows: Tensor, gradient: Tensor, lr: float, eps: float) -> None:
    """``s_v <- s_v + mean_j g_vj^2; w_v <- w_v - lr g_v / (sqrt(s_v) + eps)``: one number per row, ``total [V + 1]``.

    Gupta et al. 2014; Mudigere et al., arXiv 2104.05158.
    """
    total.index_add_(0, rows, gradient.square().mean(1))
    weight.index_add_(0, rows, gradient / (total[rows, None].sqrt() + eps), alpha=-lr)


def adam(
    weight: Tensor,
    moments: tuple[Tensor, Tensor],
    rows: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """Adam (arXiv 1412.6980) for the rows in the batch. The moments of other rows do not change.

    ``m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2; w <- w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)``.

    Args:
        weight: ``[V + 1, d]``.
        moments: ``m`` and ``v``, each ``[V + 1, d]``.
        rows: ``[n]``.
        gradient: ``[n, d]``.
        lr: learning rate.
        betas: ``b1``, ``b2``.
        eps: added to the denominator.
        step: ``t``, from 1.
    """
    first = moments[0][rows].lerp_(gradient, 1 - betas[0])
    second = moments[1][rows].lerp_(gradient.square(), 1 - betas[1])
    moments[0][rows], moments[1][rows] = first, second
    denominator = (second / (1 - betas[1] ** step)).sqrt_().add_(eps)
    weight.index_add_(0, rows, first.div_(1 - betas[0] ** step).div_(denominator), alpha=-lr)


def row_gradient(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a sparse or dense gradient that are not 0, and their values.

    A looked-up row with a zero gradient does not move: a dense gradient cannot distinguish it from the other rows.
    """
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        kept = values.any(1)
        return rows[kept], values[kept]
    rows = gradient.any(1).nonzero().squeeze(1)
    return rows, gradient[rows]


def empty_state(weight: Tensor, names: list[str], *, per_row: bool) -> dict[str, Tensor]:
    """The state before the first step."""
    shape = weight.shape[:1] if per_row else weight.shape
    return {name: torch.zeros(shape, dtype=weight.dtype, device=weight.device) for name in names}
