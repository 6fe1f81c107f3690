"""Rows of an inspected log that ``recpo prepare`` has to leave out: without user, item or time, or of wrong clocks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.features import is_text
from recpo.log.column_facts import ColumnFacts
from recpo.log.files import TableSample
from recpo.log.recognition import Recognition
from recpo.log.schema import LogColumns

_FIRST_DAY, _LAST_DAY = 365.0, 47_482.0  # 1971-01-01 and 2100-01-01
_DATED: Final = r"^(197[1-9]|19[89][0-9]|20[0-9]{2})[-/](0?[1-9]|1[0-2])[-/](0?[1-9]|[12][0-9]|3[01])"
#: At most this share of the rows are of wrong clocks, further from the others than this multiple of their span.
_CLOCKS, _FAR = 0.005, 10.0

_Days = Callable[[pa.Table], np.ndarray | None]


def usable_rows(
    sample: TableSample, found: Recognition, facts: Mapping[str, ColumnFacts], days_of: _Days
) -> tuple[TableSample, dict[str, Any], list[str], list[str]]:
    """The rows with a user, an item and a time that is not far from all others.

    Args:
        sample: the inspected rows.
        found: the columns of the log.
        facts: facts about them.
        days_of: when the events of a table happened, in days since 1970; None = it has no clock.

    Returns:
        Those rows; options of ``prepare`` that leave the others out; a question if these are most; what to check.
    """
    options, doubts, rows = dict[str, Any](), list[str](), sample.table.num_rows
    roles = {str(found.column(role)): role for role in LogColumns.REQUIRED if found.column(role) is not None}
    absent = {name: mask for name, role in roles.items() if (mask := _absent(sample, facts[name], role, days_of)).any()}
    if absent:
        gone = np.any(list(absent.values()), axis=0)
        shown = ", ".join(f"{mask.sum():,} without `{name}`" for name, mask in absent.items())
        if 2 * gone.sum() > rows:
            role = roles[max(absent, key=lambda name: absent[name].sum())]
            remedy = f"name another column (--columns.{role} NAME), or remove these rows from the log"
            return sample, {}, [f"{role}: most of the {rows:,} rows have no user, item or time ({shown}): {remedy}"], []
        sample, options["skip_incomplete"] = _kept(sample, ~gone), True
        doubts = [
            f"{gone.sum():,} of {rows:,} rows have no user, item or time ({shown}): skip_incomplete leaves them out"
        ]
    days = days_of(sample.table)
    is_near = None if days is None else _near(days)
    if days is not None and is_near is not None:
        (first, last), far = (days[is_near].min(), days[is_near].max()), days[~is_near]
        ends = {"begin": _day(first)} if far.min() < first else {}
        ends |= {"end": _day(last + 1)} if far.max() > last else {}
        dates = f"{_day(far.min())} to {_day(far.max())}, all others of {_day(first)} to {_day(last)}"
        doubts.append(f"{len(far):,} rows, as of wrong clocks, are of {dates}: {' and '.join(ends)} leaves them out")
        options |= ends
        sample = _kept(sample, is_near)
    return sample, options, [], doubts


def _absent(sample: TableSample, facts: ColumnFacts, role: str, days_of: _Days) -> np.ndarray:
    """Which rows have no value, or no time that parses."""
    values = sample.table[facts.name]
    if is_text(values.type):
        is_date = role == LogColumns.TIMESTAMP and facts.dated >= 0.5
        stated = pc.match_substring_regex(values.cast(pa.string()), _DATED if is_date else r"\S")
        return ~pc.fill_null(stated, False).to_numpy()
    empty: np.ndarray = pc.is_null(values, nan_is_null=True).to_numpy()
    days = days_of(sample.table) if role == LogColumns.TIMESTAMP else None
    return empty if days is None else ~((days >= _FIRST_DAY) & (days < _LAST_DAY))


def _kept(sample: TableSample, mask: np.ndarray) -> TableSample:
    gone = round(sample.rows * np.mean(~mask))
    return replace(sample, table=sample.table.filter(pa.array(mask)), rows=sample.rows - gone)


def _near(days: np.ndarray) -> np.ndarray | None:
    """Which times are not those of the few that are far from all others; None if there are no such."""
    few, known = int(_CLOCKS * len(days)), np.sort(days)
    if not few:
        return None
    first, last = known[few], known[-few - 1]
    is_near: np.ndarray = np.abs(days - (first + last) / 2) <= (_FAR + 0.5) * max(1.0, last - first)
    first, last, far = days[is_near].min(), days[is_near].max(), days[~is_near]
    is_far = np.maximum(first - far, far - last) > _FAR * max(1.0, last - first)
    return is_near if 0 < len(far) <= few and is_far.all() else None


def _day(days: float) -> str:
    return str(np.datetime64(int(np.floor(days)), "D"))
