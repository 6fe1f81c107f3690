"""Normal equations of many ridge regressions that share their rows: sums of outer products, by sparse products.

The equations of a user are ``A_u = sum over the events of y_i y_iᵀ`` and ``b_u = sum of residual y_i``. The outer
products are made once per item, not once per event, and only their upper triangle: a matrix of users by items times a
matrix of items by ``d (d + 1) / 2`` numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from scipy.sparse import csr_array

# whole matrices are made for so many regressions at a time
_MATRICES: Final = 1 << 13


class Equations(NamedTuple):
    """Of ``n`` regressions: ``left [n, d (d + 1) / 2]``, upper triangles of sums, and ``right [n, d]``; float64."""

    left: np.ndarray
    right: np.ndarray


def no_equations(count: int, width: int) -> Equations:
    """Zeros for ``count`` regressions of ``width`` weights."""
    return Equations(np.zeros((count, width * (width + 1) // 2)), np.zeros((count, width)))


def equations(place: np.ndarray, count: int, rows: np.ndarray, row_of: np.ndarray, target: np.ndarray) -> Equations:
    """Sums over events of ``row rowᵀ`` and ``target row``, of bounded width: no ``d x d`` matrix per event.

    Args:
        place: ``[N]`` which regression an event belongs to, 0 .. ``count`` - 1.
        count: number of regressions.
        rows: ``[m, d]``.
        row_of: ``[N]`` which row an event has.
        target: ``[N]``.
    """
    shape = (count, len(rows))
    first, second = np.triu_indices(rows.shape[1])
    events = csr_array((np.ones(len(place)), (place, row_of)), shape=shape)
    targets = csr_array((target, (place, row_of)), shape=shape)
    return Equations(events @ (rows[:, first] * rows[:, second]), targets @ rows)


def normal_matrices(left: np.ndarray, width: int, ridge: float) -> np.ndarray:
    """``A + ridge I`` as ``[n, d, d]``."""
    first, second = np.triu_indices(width)
    matrices = np.empty((len(left), width, width))
    matrices[:, first, second] = left
    matrices[:, second, first] = left
    matrices[:, np.arange(width), np.arange(width)] += ridge
    return matrices


def solve(system: Equations, ridge: float) -> np.ndarray:
    """The weights ``[n, d]``; 0 where a regression has no event."""
    weights = np.empty_like(system.right)
    for part in _parts(len(weights)):
        matrices = normal_matrices(system.left[part], weights.shape[1], ridge)
        weights[part] = np.linalg.solve(matrices, system.right[part, :, None])[..., 0]
    return weights


def inverses(left: np.ndarray, width: int, ridge: float) -> np.ndarray:
    """``(A + ridge I)^-1`` as ``[n, d, d]`` float32."""
    result = np.empty((len(left), width, width), np.float32)
    for part in _parts(len(left)):
        result[part] = np.linalg.inv(normal_matrices(left[part], width, ridge))
    return result


def _parts(count: int) -> Iterator[slice]:
    return (slice(begin, begin + _MATRICES) for begin in range(0, count, _MATRICES))
