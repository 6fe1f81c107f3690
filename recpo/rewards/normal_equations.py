"""Normal equations of many ridge regressions that share their rows: sums of outer products by sparse products.

The equations of a user are ``A_u = sum over the events of y_i y_iᵀ`` and ``b_u = sum of residual y_i``. Each outer
product is computed once per item, not once per event, and only its upper triangle: a matrix of users by items times a
matrix of items by ``d (d + 1) / 2`` numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from scipy.sparse import csr_array

# number of regressions whose full matrices are in memory at a time
_MATRICES: Final = 1 << 13


class Equations(NamedTuple):
    """Equations of ``n`` regressions, float64: ``left [n, d (d + 1) / 2]`` (upper triangles) and ``right [n, d]``."""

    left: np.ndarray
    right: np.ndarray


def no_equations(count: int, width: int) -> Equations:
    """Zeros for ``count`` regressions of ``width`` weights."""
    return Equations(np.zeros((count, width * (width + 1) // 2)), np.zeros((count, width)))


class Pairs(NamedTuple):
    """Pairs of users and items, user by user: the events of user ``n`` are ``starts[n] .. starts[n + 1]``.

    Attributes:
        starts: ``[n + 1]``.
        item: ``[N]``, 0 .. ``num_items`` - 1.
        num_items: number of items.
    """

    starts: np.ndarray
    item: np.ndarray
    num_items: int

    def of_users(self, items: np.ndarray, target: np.ndarray) -> Equations:
        """Equations of the users: sums over their events of ``row rowᵀ`` and ``target row``.

        Args:
            items: ``[num_items, d]`` rows.
            target: ``[N]``.
        """
        return self.of_moments(Equations(_products(items), items), target)

    def of_items(self, users: np.ndarray, target: np.ndarray) -> Equations:
        """Equations of the items, from the rows ``[n, d]`` of the users."""
        return self.of_moments(Equations(_products(users), users), target, of_items=True)

    def of_moments(self, table: Equations, target: np.ndarray, *, of_items: bool = False) -> Equations:
        """Sums, over the events of every user or item, of a table with one row per item or user.

        Args:
            table: the values to sum, and the values to sum after multiplication with the target.
            target: ``[N]``.
            of_items: the table has one row per user, and the sums are per item.
        """
        shape = (len(self.starts) - 1, self.num_items)
        values = (np.ones(len(target)), target)
        ones, targets = (csr_array((value, self.item, self.starts), shape) for value in values)
        if of_items:
            return Equations(ones.T @ table.left, targets.T @ table.right)
        return Equations(ones @ table.left, targets @ table.right)


def _products(rows: np.ndarray) -> np.ndarray:
    """Upper triangles ``[m, d (d + 1) / 2]`` of ``row rowᵀ``, in the order of ``np.triu_indices``."""
    width = rows.shape[1]
    products, begin = np.empty((len(rows), width * (width + 1) // 2)), 0
    for column in range(width):
        end = begin + width - column
        np.multiply(rows[:, column, None], rows[:, column:], out=products[:, begin:end])
        begin = end
    return products


def normal_matrices(left: np.ndarray, width: int, ridge: float | np.ndarray) -> np.ndarray:
    """``A + ridge I`` as ``[n, d, d]``; a ridge ``[n, d]`` is one for every weight of each."""
    first, second = np.triu_indices(width)
    matrices = np.empty((len(left), width, width))
    matrices[:, first, second] = left
    matrices[:, second, first] = left
    matrices[:, np.arange(width), np.arange(width)] += ridge
    return matrices


def solve(system: Equations, ridge: float | np.ndarray) -> np.ndarray:
    """The weights ``[n, d]``; 0 where a regression has no event. A ridge ``[n, d]`` is one for every weight of each."""
    weights = np.empty_like(system.right)
    for part in _parts(len(weights)):
        own = ridge[part] if isinstance(ridge, np.ndarray) and ridge.ndim == 2 else ridge
        matrices = normal_matrices(system.left[part], weights.shape[1], own)
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
