"""Linear algebra of many small problems at once.

Ridge regressions; positive definite systems, by Cholesky and by plain arithmetic for programs without a solver; and
quadratic forms ``xᵀ C x`` as dot products of upper triangles.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

#: events that a damped mean adds to a history, each with the value 0
DAMPING: Final = 20.0


def damped_mean(rows: Tensor, known: Tensor) -> Tensor:
    """``sum_h known_h rows_h / (sum_h known_h + DAMPING)``: ``[B, d]`` float64 of ``rows [B, H, d]``; 0 of nothing."""
    summed = (rows.double() * known[..., None]).sum(1)
    return summed / (known.sum(1, keepdim=True).double() + DAMPING)


class RidgeSolution(NamedTuple):
    """Of ``B`` problems: the weights ``[B, d]`` and the inverses ``[B, d, d]`` of their normal matrices, float64."""

    weights: Tensor
    covariance: Tensor


def normal_equations(
    rows: Tensor, targets: Tensor, known: Tensor, ridge: Tensor, pull: Tensor
) -> tuple[Tensor, Tensor]:
    """What ``ridge_regression`` solves: ``sum_h rows_h rows_hᵀ + diag(ridge)`` and ``sum_h targets_h rows_h + pull``.

    The arguments are the same; the results are ``[B, d, d]`` and ``[B, d]`` in float64.
    """
    kept = rows.double() * known[..., None]
    transposed = kept.transpose(1, 2)
    right = transposed @ targets.double().masked_fill(~known, 0.0)[..., None]
    # a product with the identity, as programs for ONNX know no diagonal
    identity = torch.eye(rows.shape[-1], dtype=torch.float64, device=rows.device)
    return transposed @ kept + ridge.double()[..., None] * identity, right.squeeze(-1) + pull.double()


def ridge_regression(rows: Tensor, targets: Tensor, known: Tensor, ridge: Tensor, pull: Tensor) -> RidgeSolution:
    """``argmin_w sum_h known_h (targets_h - rows_h · w)^2 + sum_j ridge_j w_j^2 - 2 pull · w``, in float64.

    Args:
        rows: ``[B, H, d]``.
        targets: ``[B, H]``; read where ``known``.
        known: ``[B, H]`` bool.
        ridge: above 0, one per weight: ``[d]`` or ``[B, d]``.
        pull: ``[B, d]``, the ridge times the means of a prior: few observations leave the weights near these means.

    Returns:
        The weights, those of the prior where nothing is known, and ``(sum_h rows_h rows_hᵀ + diag(ridge))^-1``, which
        times the variance of the noise is the covariance of the posterior.
    """
    matrix, right = normal_equations(rows, targets, known, ridge, pull)
    factor = torch.linalg.cholesky(matrix)
    covariance = torch.cholesky_inverse(factor)
    return RidgeSolution(torch.cholesky_solve(right[..., None], factor)[..., 0], covariance)


def solve_positive_definite(matrix: Tensor, right: Tensor) -> Tensor:
    """``matrix^-1 right`` of every system, by unrolled Gauss-Jordan elimination, column by column.

    Equal to ``torch.linalg.solve`` up to rounding: a symmetric positive definite matrix needs no pivoting. ONNX has no
    solver, but it has these ``O(n)`` products and quotients; n is a constant of the program. Rows and columns are
    looked up with ``index_select``, which keeps the dimension: the exporter turns it into one node, and a slice into
    ten. The time of an export grows with the number of nodes.

    Args:
        matrix: ``[B, n, n]`` symmetric positive definite, such as ``XᵀX + ridge I`` with a ridge above 0.
        right: ``[B, n]``, or ``[B, n, m]`` for several right sides of one matrix.

    Returns:
        The shape of ``right``.
    """
    size = matrix.shape[1]
    columns = right if right.dim() == 3 else right[..., None]
    rest = torch.cat([matrix, columns], 2)
    places = torch.arange(size, device=matrix.device)[:, None]
    here = torch.eye(size, dtype=torch.bool, device=matrix.device)[:, :, None]
    for place in range(size):
        at = places.select(0, place)
        row = rest.index_select(1, at)
        row = row / row.index_select(2, at)
        rest = torch.where(here.select(0, place), row, rest - rest.index_select(2, at) * row)
    solution = rest[:, :, size:]
    return solution if right.dim() == 3 else solution.squeeze(2)


def solve_by_cholesky(matrix: Tensor, right: Tensor) -> Tensor:
    """Equal to ``solve_positive_definite``, several times as fast forward and backward; not for exported programs.

    With ``v = matrix^-1 dx``, the gradient of the matrix is ``-v xᵀ`` and the gradient of the right side is ``v``. A
    matrix that is not positive definite gives nan.
    """
    solution: Tensor = _CholeskySolve.apply(matrix, right)
    return solution


class _CholeskySolve(torch.autograd.Function):
    """Keeps the factor of the forward pass. Autograd through ``torch.linalg.cholesky`` takes three times as long."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor) -> Tensor:
        factor, _ = torch.linalg.cholesky_ex(matrix)
        solution = torch.cholesky_solve(right[..., None], factor)
        ctx.save_for_backward(factor, solution)
        return solution[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        factor, solution = ctx.saved_tensors
        adjoint = torch.cholesky_solve(gradients[0][..., None], factor)
        return -adjoint @ solution.transpose(-2, -1), adjoint[..., 0]


def outer_products(vectors: Tensor) -> Tensor:
    """Upper triangles ``[N, d (d + 1) / 2]`` of ``x xᵀ`` for every ``x`` of ``[N, d]``."""
    first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], device=vectors.device)
    return vectors[:, first] * vectors[:, second]


def folded_triangles(matrices: Tensor) -> Tensor:
    """Upper triangles ``[N, d (d + 1) / 2]`` of symmetric ``[N, d, d]``, with off-diagonal entries doubled.

    The dot product with the outer products of ``x`` is ``xᵀ C x``.
    """
    first, second = torch.triu_indices(matrices.shape[1], matrices.shape[1], device=matrices.device)
    return matrices[:, first, second] * torch.where(first == second, 1.0, 2.0)


def with_one(vectors: Tensor) -> Tensor:
    """``[x, 1]`` of every row: ``[N, d + 1]``."""
    return F.pad(vectors, (0, 1), value=1.0)


def user_forms(users: Tensor, covariance: Tensor) -> Tensor:
    """Vectors ``[B, (r + 1) (r + 2)]`` of users' factors and bias ``[B, r + 1]`` and their covariance.

    Their dot products with ``item_forms`` are ``xᵀ C_i x + yᵀ C_u y`` with ``x = [p, 1]`` and ``y = [q, 1]``: the
    uncertainty of the item plus the uncertainty of the user.
    """
    return torch.cat([outer_products(with_one(users[:, :-1])), folded_triangles(covariance)], 1)


def item_forms(factors: Tensor, covariance: Tensor) -> Tensor:
    """``[V, (r + 1) (r + 2)]`` of factors ``[V, r]`` and the covariance ``[V, r + 1, r + 1]``; see ``user_forms``."""
    return torch.cat([folded_triangles(covariance), outer_products(with_one(factors))], 1)
