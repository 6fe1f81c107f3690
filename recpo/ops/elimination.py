"""Small linear systems in plain arithmetic, for programs that know no solver."""

from __future__ import annotations

import torch
from torch import Tensor


def solve_positive_definite(matrix: Tensor, right: Tensor) -> Tensor:
    """``matrix^-1 right`` of every system, by Gaussian elimination that is written out, column after column.

    The same as ``torch.linalg.solve`` up to rounding: a symmetric positive definite matrix needs no pivoting. ONNX has
    no solver, but it has these ``O(n)`` products and quotients; n is a constant of the program.

    Args:
        matrix: ``[B, n, n]`` symmetric positive definite, such as ``XᵀX + ridge I`` with a ridge above 0.
        right: ``[B, n]``.

    Returns:
        ``[B, n]``.
    """
    rest, rows = torch.cat([matrix, right[..., None]], 2), []
    for _ in range(matrix.shape[1]):
        row = rest[:, 0, 1:] / rest[:, 0, :1]
        rest = rest[:, 1:, 1:] - rest[:, 1:, :1] * row[:, None]
        rows.append(row)
    solution = rows.pop()
    while rows:
        row = rows.pop()
        solution = torch.cat([row[:, -1:] - (row[:, :-1] * solution).sum(1, keepdim=True), solution], 1)
    return solution
