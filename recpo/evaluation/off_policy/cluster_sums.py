"""Sums per user, from which every estimate and every interval follows: memory grows with users, not with rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpo.evaluation.off_policy.estimators import FloatArray

IntArray = NDArray[np.integer]


class Clusters(NamedTuple):
    """What was added up.

    Attributes:
        users: ``[U]`` int64, ascending.
        sums: ``[U, K]`` float64, sums over the user's rows.
        rows: ``[U]`` int64, how many they are.
    """

    users: IntArray
    sums: FloatArray
    rows: IntArray


class ClusterSums:
    """Adds up columns of rows per user; a user's rows may come in several chunks."""

    def __init__(self, num_columns: int) -> None:
        self._merged = Clusters(np.zeros(0, np.int64), np.zeros((0, num_columns)), np.zeros(0, np.int64))
        self._pending: list[Clusters] = []

    def update(self, users: IntArray, columns: FloatArray) -> None:
        """Adds rows: ``users [N]`` and ``columns [N, K]``."""
        if not len(users):
            return
        self._pending.append(_summed(np.asarray(users, np.int64), columns, np.ones(len(users), np.int64)))
        if sum(len(part.users) for part in self._pending) > len(self._merged.users):
            self._merge()  # at every doubling: each user is merged a logarithmic number of times

    def compute(self) -> Clusters:
        """The sums so far."""
        if self._pending:
            self._merge()
        return self._merged

    def _merge(self) -> None:
        parts = [self._merged, *self._pending]
        users, sums, rows = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        self._merged, self._pending = _summed(users, sums, rows), []


def _summed(users: IntArray, columns: FloatArray, rows: IntArray) -> Clusters:
    distinct, position = np.unique(users, return_inverse=True)
    sums = np.empty((len(distinct), columns.shape[1]))
    for column, values in enumerate(columns.T):
        sums[:, column] = np.bincount(position, values, len(distinct))
    return Clusters(distinct, sums, np.bincount(position, rows, len(distinct)).astype(np.int64))
