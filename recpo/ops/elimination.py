"""Many small positive definite systems: by Cholesky, and by plain arithmetic for programs without a solver."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
