"""Ridge regression of many small problems at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RidgeSolution(NamedTuple):
    """Of ``B`` problems: the weights ``[B, d]`` and the inverses ``[B, d, d]`` of their normal matrices, float64."""

    weights: Tensor
    covariance: Tensor


class NormalEquations(NamedTuple):
    """Of ``B`` problems: ``sum_h rows_h rows_hᵀ + diag(ridge) [B, d, d]`` and ``sum_h targets_h rows_h [B, d]``."""

    matrix: Tensor
    right: Tensor


def normal_equations(rows: Tensor, targets: Tensor, known: Tensor, ridge: float | Tensor) -> NormalEquations:
    """What ``ridge_regression`` solves, in float64; the arguments are the same."""
    kept = rows.double() * known[..., None]
    transposed = kept.transpose(1, 2)
    right = transposed @ targets.double().masked_fill(~known, 0.0)[..., None]
    # a product with the identity, as programs for ONNX know no diagonal
    identity = torch.eye(rows.shape[-1], dtype=torch.float64, device=rows.device)
    weights = ridge.double()[..., None] if isinstance(ridge, Tensor) else ridge
    return NormalEquations(transposed @ kept + weights * identity, right.squeeze(-1))


def ridge_regression(rows: Tensor, targets: Tensor, known: Tensor, ridge: float | Tensor) -> RidgeSolution:
    """``argmin_w sum_h known_h (targets_h - rows_h · w)^2 + sum_j ridge_j w_j^2`` of every problem, in float64.

    Args:
        rows: ``[B, H, d]``.
        targets: ``[B, H]``; read where ``known``.
        known: ``[B, H]`` bool.
        ridge: above 0: one, or one per weight ``[d]`` or ``[B, d]``; constants, so few observations leave the weights
            near 0.

    Returns:
        The weights, 0 where nothing is known, and ``(sum_h rows_h rows_hᵀ + diag(ridge))^-1``, which times the variance
        of the noise is the covariance of the posterior.
    """
    matrix, right = normal_equations(rows, targets, known, ridge)
    factor = torch.linalg.cholesky(matrix)
    covariance = torch.cholesky_inverse(factor)
    return RidgeSolution(torch.cholesky_solve(right[..., None], factor)[..., 0], covariance)
