"""Linear algebra of many small problems at once.

The normal equations of ridge regressions, their solution by plain arithmetic for programs without a solver, and
quadratic forms ``xᵀ C x`` as dot products of upper triangles.
"""

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

DAMPING: Final = 20.0
"""Number of events with the value 0 that ``damped_mean`` adds to a history."""


def damped_mean(rows: Tensor, known: Tensor) -> Tensor:
    """``sum_h known_h rows_h / (sum_h known_h + DAMPING)``: ``[B, d]`` float64 of ``rows [B, H, d]``; 0 of nothing."""
    summed = (rows.double() * known[..., None]).sum(1)
    return summed / (known.sum(1, keepdim=True).double() + DAMPING)


def normal_equations(
    rows: Tensor, targets: Tensor, known: Tensor, ridge: Tensor, pull: Tensor
) -> tuple[Tensor, Tensor]:
    """``sum_h rows_h rows_hᵀ + diag(ridge)``, ``[B, d, d]``, and ``sum_h targets_h rows_h + pull``, ``[B, d]``.

    Their solution is ``argmin_w sum_h known_h (targets_h - rows_h · w)^2 + sum_j ridge_j w_j^2 - 2 pull · w``.

    Args:
        rows: ``[B, H, d]``.
        targets: ``[B, H]``; read where ``known``.
        known: ``[B, H]`` bool.
        ridge: above 0, one per weight: ``[d]`` or ``[B, d]``.
        pull: ``[B, d]``, the ridge times the means of the prior, so that few observations leave the weights near them.
    """
    kept = rows.double() * known[..., None]
    transposed = kept.transpose(1, 2)
    right = transposed @ targets.double().masked_fill(~known, 0.0)[..., None]
    # a product with the identity, because ONNX has no operator for a diagonal
    identity = torch.eye(rows.shape[-1], dtype=torch.float64, device=rows.device)
    return transposed @ kept + ridge.double()[..., None] * identity, right.squeeze(-1) + pull.double()


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
    indices = torch.arange(size, device=matrix.device)[:, None]
    is_pivot = torch.eye(size, dtype=torch.bool, device=matrix.device)[:, :, None]
    for step in range(size):
        pivot = indices.select(0, step)
        row = rest.index_select(1, pivot)
        row = row / row.index_select(2, pivot)
        rest = torch.where(is_pivot.select(0, step), row, rest - rest.index_select(2, pivot) * row)
    solution = rest[:, :, size:]
    return solution if right.dim() == 3 else solution.squeeze(2)


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


def user_variance_vectors(users: Tensor, covariance: Tensor) -> Tensor:
    """Vectors ``[B, (r + 1) (r + 2)]``, from the factors and bias of users ``[B, r + 1]`` and their covariance.

    Their dot products with ``item_variance_vectors`` are ``xᵀ C_i x + yᵀ C_u y`` with ``x = [p, 1]`` and ``y = [q,
    1]``: the uncertainty of the item plus the uncertainty of the user.
    """
    return torch.cat([outer_products(with_one(users[:, :-1])), folded_triangles(covariance)], 1)


def item_variance_vectors(factors: Tensor, covariance: Tensor) -> Tensor:
    """``[V, (r + 1) (r + 2)]``, from factors ``[V, r]`` and their covariance; see ``user_variance_vectors``."""
    return torch.cat([folded_triangles(covariance), outer_products(with_one(factors))], 1)
