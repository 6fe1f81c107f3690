"""Finds the watch time of a log by its values: a number that is a share of the item's duration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from recpo.log.schema import MILLISECONDS_PER_UNIT

#: of the shares: range of the median of those above 0, least 95th percentile, largest 99th percentile
_MEDIAN: Final = (0.02, 1.5)
_HIGH: Final = 0.3
_MOST: Final = 5.0
_WITHIN: Final = 0.75  # at least this part of the shares is at most 1 (with 5 % tolerance)
_CORRELATION: Final = 0.1  # least correlation of watch times with durations
_ENDS: Final = 0.02  # or: least part of plays that end exactly with the item
_LEAST_ROWS: Final = 50


class WatchShare(NamedTuple):
    """A column whose values are shares of the duration in one unit.

    Attributes:
        column: its name.
        unit: the unit of its values.
        within: part of the values that are at most the duration.
        is_certain: the values also follow the durations, or often equal them, and an item has many values.
    """

    column: str
    unit: str
    within: float
    is_certain: bool


def watch_shares(
    table: pa.Table, columns: Sequence[str], duration: str, duration_unit: str, item: str | None
) -> list[WatchShare]:
    """The columns of a log that could be watch times, by their values beside the durations.

    Args:
        table: rows of the log.
        columns: columns of numbers to consider.
        duration: column of the durations.
        duration_unit: their unit.
        item: column of the items; a number that each item has once, such as its tempo, is no watch time.
    """
    seconds = _numbers(table[duration]) * MILLISECONDS_PER_UNIT[duration_unit] / 1000.0
    found = []
    for column in columns:
        numbers = _numbers(table[column])
        for unit in ("s", "ms", "us", "min"):
            one = _share(column, unit, numbers * MILLISECONDS_PER_UNIT[unit] / 1000.0, seconds)
            if one is not None and not _is_fixed(table, column, item):
                found.append(one)
    return found


def _share(column: str, unit: str, watched: np.ndarray, duration: np.ndarray) -> WatchShare | None:
    known = np.isfinite(watched) & np.isfinite(duration) & (duration > 0)
    watched, duration = watched[known], duration[known]
    if len(watched) < _LEAST_ROWS or watched.min() < 0 or not watched.any():
        return None
    shares = watched / duration
    within, median = float((shares <= 1.05).mean()), float(np.median(shares[shares > 0]))
    high, most = np.quantile(shares, [0.95, 0.99])
    if not (_MEDIAN[0] <= median <= _MEDIAN[1] and high >= _HIGH and most <= _MOST and within >= _WITHIN):
        return None
    ends = float((np.abs(shares - 1.0) < 0.005).mean())
    varied = watched.std() > 0 and duration.std() > 0
    follows = varied and float(np.corrcoef(watched, duration)[0, 1]) >= _CORRELATION
    return WatchShare(column, unit, within, bool(follows or ends >= _ENDS))


def _is_fixed(table: pa.Table, column: str, item: str | None) -> bool:
    """Whether nearly every item has one value."""
    if item is None:
        return False
    pairs, items = (table.group_by(keys).aggregate([]).num_rows for keys in ([item, column], [item]))
    return bool(items < table.num_rows / 2 and pairs <= 1.1 * items)


def _numbers(values: pa.ChunkedArray) -> np.ndarray:
    numbers: np.ndarray = values.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
    return numbers
