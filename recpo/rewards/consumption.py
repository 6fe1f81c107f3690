"""Who chose what, without grades: vectors of items such that their mean over a history tells users apart.

Of the matrix of users by items that is 1 where an item was shown to a user, rows and columns are divided by
``sqrt(degree + DAMPING)``. Its first singular vectors are what popularity and activity explain; the next ``n`` become
vectors of the items, divided by ``sqrt(degree + DAMPING)`` once more. The features of a user are the damped mean of
the vectors of the history (``recpo.ops.linear_algebra.damped_mean``), as in correspondence analysis, so a history is
all that is needed to compute them: for a training user, for a new one, and in an exported program.

The singular vectors come from a subspace iteration over the shards. Memory holds one shard and some columns per item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from recpo.ops.linear_algebra import DAMPING
from recpo.rewards.graded import Chunk

# products with the matrix and its transpose, and columns beyond those that are kept: these make it converge
_PRODUCTS: Final = 8
_MORE_COLUMNS: Final = 16
#: times that ``consumed`` reads all chunks
PASSES: Final = _PRODUCTS + 3


class ItemFeatures(NamedTuple):
    """What prior means are linear in.

    Attributes:
        items: ``[V, m]``, features of the items.
        history: ``[V, n]``; the damped mean over a history is the features of its user.
    """

    items: np.ndarray
    history: np.ndarray

    @classmethod
    def none(cls, num_items: int) -> ItemFeatures:
        """No feature: prior means that are equal for all users, and for all items."""
        return cls(np.zeros((num_items, 0)), np.zeros((num_items, 0)))


def user_features(chunk: Chunk, history: np.ndarray) -> np.ndarray:
    """``[n, columns]``: damped means of the rows of ``history [V, columns]`` over the events of the chunk's users."""
    if not history.shape[1]:
        return np.zeros((len(chunk.users), 0))
    counts = np.diff(chunk.pairs.starts)[:, None]
    shape = (len(chunk.users), len(chunk.items))
    events = csr_array((np.ones(len(chunk.item)), chunk.item, chunk.pairs.starts), shape)
    means: np.ndarray = events @ history[chunk.items] / (counts + DAMPING)
    return means


def consumed(parts: Callable[[], Iterable[Chunk]], num_items: int, columns: int, seed: int) -> ItemFeatures:
    """Features from the events of chunks: vectors of the items, scaled so that features of users are of size 1.

    Args:
        parts: all chunks, as often as it is called.
        num_items: V.
        columns: number of singular vectors; at most one less than there are items is possible.
        seed: of the start of the iteration.
    """
    columns = min(columns, num_items - 1)
    if columns < 1:  # also where none are asked for
        return ItemFeatures.none(num_items)
    degree = np.zeros(num_items)
    for chunk in parts():
        degree[chunk.items] += _exposures(chunk).sum(0)
    damped = 1 / np.sqrt(degree + DAMPING)
    basis = np.random.default_rng(seed).normal(size=(num_items, min(num_items, columns + 1 + _MORE_COLUMNS)))
    basis, _ = np.linalg.qr(damped[:, None] * basis)
    for _ in range(_PRODUCTS):
        basis, _ = np.linalg.qr(_product(parts(), damped, basis))
    values, rotation = np.linalg.eigh(basis.T @ _product(parts(), damped, basis))
    vectors = basis @ rotation[:, ::-1][:, 1 : columns + 1]
    # of rank less than ``columns``: nothing but rounding
    vectors = vectors[:, values[::-1][1 : columns + 1] > 1e-9 * values[-1]]
    vectors *= np.sign(vectors[np.abs(vectors).argmax(0), np.arange(vectors.shape[1])])
    vectors *= damped[:, None]
    squares, users = np.zeros(vectors.shape[1]), 0
    for chunk in parts():
        squares += np.square(user_features(chunk, vectors)).sum(0)
        users += len(chunk.users)
    known = degree > 0
    return ItemFeatures(vectors / np.sqrt(np.square(vectors).sum(0) / known.sum()), vectors / np.sqrt(squares / users))


def _exposures(chunk: Chunk) -> csr_array:
    """1 where an item was shown to a user, however often."""
    shape = (len(chunk.users), len(chunk.items))
    # a copy, because repeats are removed in place
    matrix = csr_array((np.ones(len(chunk.item)), chunk.item, chunk.pairs.starts), shape, copy=True)
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def _product(parts: Iterable[Chunk], damped: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """``Aᵀ A basis`` of the damped matrix ``A``, whose columns are multiplied with ``damped``."""
    result = np.zeros_like(basis)
    for chunk in parts:
        matrix, of_items = _exposures(chunk), damped[chunk.items, None]
        users = matrix @ (of_items * basis[chunk.items]) / (matrix.sum(1)[:, None] + DAMPING)
        result[chunk.items] += of_items * (matrix.T @ users)
    return result
