"""Features that prior means of factors are linear in: consumption, and the features of the items and of the users.

**Consumption** is who was shown what, whatever the grades were. Of the matrix of users by items that is 1 where an item
was shown to a user, rows and columns are divided by ``sqrt(degree + DAMPING)``. Its first singular vectors are what
activity and popularity explain; the next ``n`` become vectors of the items, divided by ``sqrt(degree + DAMPING)`` once
more, as in correspondence analysis.

**The features of the items** (category, tags, numbers, vectors of the item table) are one matrix of items by columns,
of which the principal components remain.

The features of a user are in both cases the damped mean of the vectors of the history
(``recpo.ops.small_systems.damped_mean``), so a history is all that is needed to compute them: for a training user,
for a new one, and in an exported program.

**The features of the users** (the user table) are components of a matrix in the same way. They say something of users
without a history.

The vectors come from subspace iterations, over the shards and over pieces of the table. Memory holds one shard, one
piece and some columns per item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
from scipy.sparse import csr_array, hstack

from recpo.base.features import Categories, Category, Feature, Vector, of_type
from recpo.base.types import Features
from recpo.ops.small_systems import DAMPING
from recpo.rewards.graded import Chunk

#: principal components of the features of the items
TABLE_COLUMNS: Final = 64
# products with a matrix, and columns beyond those that are kept: with these, a subspace iteration converges
_PRODUCTS: Final = 8
_MORE_COLUMNS: Final = 16
# a component below this size is rounding: nothing differs
_EQUAL: Final = 1e-6
# items whose table is a matrix at a time
_ROWS: Final = 1 << 14
#: times that ``of_consumption`` and ``of_table`` read all chunks
CONSUMPTION_PASSES, TABLE_PASSES = _PRODUCTS + 3, 1


class Table(NamedTuple):
    """Principal components of the features of items or users: ``columns @ axes - center``.

    Attributes:
        schema: the fitted features.
        sizes: root mean squares of the vectors, which their columns are divided by.
        axes: ``[C, k]``.
        center: ``[k]``.
    """

    schema: tuple[Feature, ...]
    sizes: tuple[float, ...]
    axes: np.ndarray
    center: np.ndarray

    def weights(self, slopes: np.ndarray) -> np.ndarray:
        """``[C, d]``: ``axes @ slopes [k, d]`` as weights of ``recpo.policies.grade_factors.linear_in_features``."""
        found: np.ndarray = self.axes @ slopes
        begin = len(found)
        for vector, size in zip(of_type(self.schema, Vector)[::-1], self.sizes[::-1], strict=True):
            begin -= int(vector.width or 0)
            found[begin : begin + int(vector.width or 0)] /= size or 1.0
        return found


class UserTable(NamedTuple):
    """The components of the users' own table: ``rows [U, k]`` float32, in memory for all users."""

    table: Table
    rows: np.ndarray

    def largest(self, count: int) -> UserTable:
        """The ``count`` largest components; fewer where there are no more."""
        table = self.table._replace(axes=self.table.axes[:, :count], center=self.table.center[:count])
        return UserTable(table, self.rows[:, :count])


class PriorFeatures(NamedTuple):
    """What prior means are linear in.

    Attributes:
        items: ``[V, m]``, features of the items.
        history: ``[V, n]``; the damped mean over a history is the features of its user.
        table: the components of the item table, which are the last columns of both; None = there are none.
        users: further features of the users; None = none.
        history_scale: the table's columns of ``history``, divided by those of ``items``.
    """

    items: np.ndarray
    history: np.ndarray
    table: Table | None = None
    users: UserTable | None = None
    history_scale: float = 1.0

    @classmethod
    def none(cls, num_items: int) -> PriorFeatures:
        """No feature: prior means that are equal for all users, and for all items."""
        return cls(np.zeros((num_items, 0)), np.zeros((num_items, 0)))

    def beside(self, table: PriorFeatures) -> PriorFeatures:
        """The features of both, of which ``table`` has those of the item table."""
        items, history = (np.concatenate(columns, 1) for columns in zip(self[:2], table[:2], strict=True))
        return PriorFeatures(items, history, table.table, self.users, table.history_scale)

    def largest(self, count: int) -> PriorFeatures:
        """Of features of the item table alone, the ``count`` largest components; fewer where there are no more."""
        if self.table is None:
            return self
        table = self.table._replace(axes=self.table.axes[:, :count], center=self.table.center[:count])
        return self._replace(items=self.items[:, :count], history=self.history[:, :count], table=table)

    @property
    def num_user_columns(self) -> int:
        """Number of features of a user."""
        return self.history.shape[1] + (0 if self.users is None else self.users.table.axes.shape[1])

    def of_users(self, chunk: Chunk) -> np.ndarray:
        """``[n, num_user_columns]``, features of the chunk's users."""
        found = user_features(chunk, self.history)
        return found if self.users is None else np.concatenate([found, self.users.rows[chunk.users]], 1)


def user_features(chunk: Chunk, history: np.ndarray) -> np.ndarray:
    """``[n, columns]``: damped means of the rows of ``history [V, columns]`` over the events of the chunk's users."""
    if not history.shape[1]:
        return np.zeros((len(chunk.users), 0))
    counts = np.diff(chunk.starts)[:, None]
    means: np.ndarray = chunk.matrix(np.ones(len(chunk.item))) @ history[chunk.items] / (counts + DAMPING)
    return means


def of_consumption(parts: Callable[[], Iterable[Chunk]], num_items: int, columns: int, seed: int) -> PriorFeatures:
    """Features from the events of chunks, each of mean square 1 among items with events, and among users.

    Args:
        parts: all chunks, as often as it is called.
        num_items: V.
        columns: number of singular vectors; fewer where there are no more.
        seed: of the start of the iteration.
    """
    if not columns:
        return PriorFeatures.none(num_items)
    degree = np.zeros(num_items)
    for chunk in parts():
        degree[chunk.items] += _exposures(chunk).sum(0)
    damped = 1 / np.sqrt(degree + DAMPING)

    def squared(basis: np.ndarray) -> np.ndarray:
        result = np.zeros_like(basis)
        for chunk in parts():
            matrix, of_items = _exposures(chunk), damped[chunk.items, None]
            users = matrix @ (of_items * basis[chunk.items]) / (matrix.sum(1)[:, None] + DAMPING)
            result[chunk.items] += of_items * (matrix.T @ users)
        return result

    vectors = _leading(squared, num_items, columns + 1, seed)[:, 1:] * damped[:, None]
    of_users = np.sqrt(_user_squares(parts(), vectors))
    return PriorFeatures(vectors / np.sqrt(np.square(vectors).sum(0) / (degree > 0).sum()), vectors / of_users)


def of_table(
    parts: Callable[[], Iterable[Chunk]], schema: Sequence[Feature], features: Features, seed: int
) -> PriorFeatures:
    """Features from those of the items: at most ``TABLE_COLUMNS`` principal components, in their relative sizes.

    A category is one column per code, of size 1 where the item has it; of a set of categories, an item's columns have a
    squared length of 1 together; a number is a column, and a vector has a squared length of 1 on average. A missing
    value is 0. The largest component has the mean square 1 among items, and among users.

    Args:
        parts: all chunks, as often as it is called.
        schema: fitted features of items.
        features: their values for the items 1..V.
        seed: of the start of the iteration.
    """
    table, found = _components(schema, features, seed, centered=True)
    of_users = np.sqrt(_user_squares(parts(), found).max(initial=0.0))
    if of_users < _EQUAL:  # nothing differs between the items
        return PriorFeatures.none(len(found))
    size = np.sqrt(np.square(found).mean(0).max())
    scaled = table._replace(axes=table.axes / size, center=table.center / size)
    return PriorFeatures(found / size, found / of_users, scaled, history_scale=float(size / of_users))


def of_user_table(schema: Sequence[Feature], features: Features, seed: int) -> UserTable | None:
    """Features from those of the users, as in ``of_table``; None if they are equal for all users.

    A user of whom the table says nothing has the features 0: components are not centered, which changes nothing where
    there is an intercept.
    """
    table, found = _components(schema, features, seed, centered=False)
    size = np.sqrt(found.var(0).max(initial=0.0))
    if size < _EQUAL:
        return None
    return UserTable(table._replace(axes=table.axes / size), (found / size).astype(np.float32))


def _components(
    schema: Sequence[Feature], features: Features, seed: int, *, centered: bool
) -> tuple[Table, np.ndarray]:
    """The largest principal components of features ``[N]``, and their values ``[N, k]``."""
    count = len(features.codes)
    sizes = tuple(float(vector.nan_to_num().square().sum(1).double().mean().sqrt()) for vector in features.vectors)

    def pieces() -> Iterator[csr_array]:
        for begin in range(0, count, _ROWS):
            yield _columns(schema, features.map(itemgetter(slice(begin, begin + _ROWS))), sizes)

    center = np.sum([piece.sum(0) for piece in pieces()], 0) / count

    def squared(basis: np.ndarray) -> np.ndarray:
        products = sum(piece.T @ (piece @ basis) for piece in pieces())
        result: np.ndarray = products - count * np.outer(center, center @ basis)
        return result

    axes = _leading(squared, len(center), TABLE_COLUMNS, seed)
    table = Table(tuple(schema), sizes, axes, center @ axes * centered)
    return table, np.concatenate([piece @ axes for piece in pieces()]) - table.center


def _columns(schema: Sequence[Feature], features: Features, sizes: Sequence[float]) -> csr_array:
    """Some items by columns; ``sizes`` are those of the vectors."""
    count, blocks = len(features.codes), list[csr_array]()
    coded: list[Category | Categories] = [*of_type(schema, Category), *of_type(schema, Categories)]
    for one, codes in zip(coded, [*features.codes.T[:, :, None], *features.lists], strict=True):
        row, place = codes.numpy().nonzero()
        share = 1 / np.sqrt(np.bincount(row, minlength=count)[row])
        blocks.append(csr_array((share, (row, codes.numpy()[row, place])), (count, int(one.num_codes or 0))))
    dense = [features.numbers, *(v / size if size else v for v, size in zip(features.vectors, sizes, strict=True))]
    blocks += [csr_array(column.double().nan_to_num().numpy()) for column in dense]
    return hstack(blocks, format="csr")


def _exposures(chunk: Chunk) -> csr_array:
    """1 where an item was shown to a user, however often."""
    matrix = chunk.matrix(np.ones(len(chunk.item))).copy()  # because repeats are removed in place
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def _user_squares(parts: Iterable[Chunk], history: np.ndarray) -> np.ndarray:
    """Mean square of every feature of the users."""
    squares, count = np.zeros(history.shape[1]), 0
    for chunk in parts:
        squares += np.square(user_features(chunk, history)).sum(0)
        count += len(chunk.users)
    return squares / count


def _leading(squared: Callable[[np.ndarray], np.ndarray], size: int, columns: int, seed: int) -> np.ndarray:
    """The eigenvectors ``[size, columns]`` with the largest eigenvalues, without those that are only rounding.

    Args:
        squared: the product with a positive semidefinite matrix ``[size, size]``.
        size: its size.
        columns: number of vectors; fewer where there are no more.
        seed: of the start of the iteration.
    """
    start = np.random.default_rng(seed).normal(size=(size, min(size, columns + _MORE_COLUMNS)))
    basis, _ = np.linalg.qr(start)
    for _ in range(_PRODUCTS):
        basis, _ = np.linalg.qr(squared(basis))
    values, rotation = np.linalg.eigh(basis.T @ squared(basis))
    vectors = basis @ rotation[:, ::-1][:, :columns]
    vectors = vectors[:, values[::-1][:columns] > 1e-9 * values[-1]]
    return vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(vectors.shape[1])])
