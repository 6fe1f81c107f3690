"""Sums per user for the estimates and diagnostics of one target policy. Memory grows with users, not with rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpo.evaluation.off_policy.diagnostics import MEAN_WEIGHT_LEVEL, Diagnostics
from recpo.evaluation.off_policy.estimators import Estimator, FloatArray, Rows, sum_of_ratios
from recpo.evaluation.off_policy.ratio_intervals import influence, normal_interval
from recpo.evaluation.off_policy.weights import WeightDistribution, effective_sample_size

IntArray = NDArray[np.integer]

_ROW, _WEIGHT, _SQUARED_WEIGHT, _OWN_COLUMNS = 0, 1, 2, 3


class Clusters(NamedTuple):
    """Sums per user.

    Attributes:
        users: ``[U]`` int64, ascending.
        sums: ``[U, K]`` float64, sums over the user's rows.
        rows: ``[U]`` int64, number of the user's rows.
    """

    users: IntArray
    sums: FloatArray
    rows: IntArray


class ClusterSums:
    """Adds up columns of rows per user. A user's rows may come in several chunks."""

    def __init__(self, num_columns: int) -> None:
        self._merged = Clusters(np.zeros(0, np.int64), np.zeros((0, num_columns)), np.zeros(0, np.int64))
        self._pending: list[Clusters] = []

    def update(self, users: IntArray, columns: FloatArray) -> None:
        """Adds rows: ``users [N]`` and ``columns [N, K]``."""
        if not len(users):
            return
        self._pending.append(_summed(np.asarray(users, np.int64), columns, np.ones(len(users), np.int64)))
        if sum(len(part.users) for part in self._pending) > len(self._merged.users):
            self._merge()  # merged at every doubling, so each user is merged a logarithmic number of times

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


class TargetTotals(NamedTuple):
    """The sums of one target policy over the whole log.

    Attributes:
        users: ``[U]`` int64, ascending.
        rows: ``[U]`` int64, number of the user's rows.
        by_estimator: estimator -> its numerators and denominators ``[U, 2 J]``: sums over the user's rows, divided by
            their number if every user has the same weight.
        diagnostics: diagnostics of the weights.
    """

    users: IntArray
    rows: IntArray
    by_estimator: dict[Estimator, FloatArray]
    diagnostics: Diagnostics


class TargetSums:
    """Accumulates the sums per user for the estimators and diagnostics of one target policy.

    Memory: some numbers per user and two per item, for any number of rows.
    """

    def __init__(self, estimators: Sequence[Estimator], num_items: int) -> None:
        ends = list(accumulate((2 * e.num_ratios for e in estimators), initial=_OWN_COLUMNS))
        self._columns = {e: slice(*ends[i : i + 2]) for i, e in enumerate(estimators)}
        self._sums = ClusterSums(ends[-1])
        self._weights = WeightDistribution()
        self._shown = np.zeros(num_items + 1, bool)
        self._chosen = np.zeros(num_items + 1, np.int64)

    def update(self, users: IntArray, items: IntArray, rows: Rows) -> None:
        """Adds rows: ``users [N]`` who were shown ``items [N]``."""
        weight = rows.weight
        self._weights.update(weight)
        self._shown[items] = True
        own = np.stack([np.ones_like(weight), weight, weight**2], 1)
        terms = [part for estimator in self._columns for part in estimator.terms(rows)]
        self._sums.update(users, np.concatenate([own, *terms], axis=1))

    def add_choices(self, items: IntArray) -> None:
        """Counts the items that the target policy would show: item ids, 0 = a draw that is not an item."""
        self._chosen += np.bincount(items, minlength=len(self._chosen))

    def compute(self, *, by_user: bool, rows_without_reward: int, rows_without_propensity: int) -> TargetTotals:
        """The totals so far.

        Args:
            by_user: a mean over users of their means over exposures; False: a mean over exposures.
            rows_without_reward: see ``Diagnostics``.
            rows_without_propensity: see ``Diagnostics``.
        """
        clusters = self._sums.compute()
        sums = clusters.sums / clusters.rows[:, None] if by_user else clusters.sums
        weight, squares = sums[:, _WEIGHT], sums[:, _SQUARED_WEIGHT] / (clusters.rows if by_user else 1)
        against_rows = sums[:, [_WEIGHT, _ROW]]
        mean_weight = float(sum_of_ratios(against_rows.sum(0)))
        total = float(weight.sum())
        diagnostics = Diagnostics(
            rows=int(clusters.rows.sum()),
            users=len(clusters.users),
            rows_without_reward=rows_without_reward,
            rows_without_propensity=rows_without_propensity,
            effective_rows=total**2 / float(squares.sum()) if total else 0.0,
            effective_users=effective_sample_size(weight),
            mean_weight=mean_weight,
            mean_weight_interval=normal_interval(influence(against_rows), mean_weight, MEAN_WEIGHT_LEVEL),
            tail=self._weights.compute(),
            unsupported_share=_share(self._chosen[1:][~self._shown[1:]], self._chosen[1:]),
            no_item_share=_share(self._chosen[:1], self._chosen),
        )
        by_estimator = {estimator: sums[:, columns] for estimator, columns in self._columns.items()}
        return TargetTotals(clusters.users, clusters.rows, by_estimator, diagnostics)


def _share(part: IntArray, whole: IntArray) -> float:
    total = int(whole.sum())
    return float(part.sum() / total) if total else np.nan
