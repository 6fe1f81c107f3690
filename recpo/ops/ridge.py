"""Ridge regression of many small problems at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RidgeSolution(NamedTuple):
    """Of ``B`` problems: the weights ``[B, d]`` and the inverses ``[B, d, d]`` of their normal matrices, float64."""

    weights: Tensor
    covariance: Tensor


def ridge_regression(rows: Tensor, targets: Tensor, known: Tensor, ridge: float) -> RidgeSolution:
    """``argmin_w sum_h known_h (targets_h - rows_h · w)^2 + ridge |w|^2`` of every problem, in float64.

    Args:
        rows: ``[B, H, d]``.
        targets: ``[B, H]``; read where ``known``.
        known: ``[B, H]`` bool.
        ridge: above 0; a constant, so few observations leave the weights near 0.

    Returns:
        The weights, 0 where nothing is known, and ``(sum_h rows_h rows_hᵀ + ridge I)^-1``, which times the variance of
        the noise is the covariance of the posterior.
    """
    kept = rows.double() * known[..., None]
    right = kept.transpose(1, 2) @ targets.double().masked_fill(~known, 0.0)[..., None]
    identity = torch.eye(rows.shape[-1], dtype=torch.float64, device=rows.device)
    factor = torch.linalg.cholesky(kept.transpose(1, 2) @ kept + ridge * identity)
    covariance = torch.cholesky_inverse(factor)
    return RidgeSolution(torch.cholesky_solve(right, factor)[..., 0], covariance)
