"""Which files, rows and texts of an inspected log ``recpo prepare`` can read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.features import is_text
from recpo.log.column_facts import ColumnFacts, rank_as
from recpo.log.files import TableSample
from recpo.log.recognition import Recognition
from recpo.log.schema import PRESETS, LogColumns, name_of

_FIRST_DAY, _LAST_DAY = 365.0, 47_482.0  # 1971-01-01 and 2100-01-01
_DATED: Final = r"^(197[1-9]|19[89][0-9]|20[0-9]{2})[-/](0?[1-9]|1[0-2])[-/](0?[1-9]|[12][0-9]|3[01])"
#: At most this share of the rows are of wrong clocks, further from the others than this multiple of their span.
_CLOCKS, _FAR = 0.005, 10.0

_OTHER_DATE: Final = r"^[0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2,4}\b"
_DECIMAL_COMMA: Final = r"^-?[0-9]+(\.[0-9]{3})*,[0-9]+$"

_Facts = Mapping[str, ColumnFacts]


def used_columns(found: Recognition) -> list[str]:
    """The columns of a log that are read."""
    return [*(one.column for one in found.findings), *map(name_of, found.behaviors.values())]


def is_part(one: TableSample, log: TableSample, found: Recognition) -> bool:
    """Whether other files are of the log: they have its columns, and none more that ``prepare`` looks for."""
    names, sought = set(one.table.column_names), set(map(name_of, PRESETS[found.preset].sources().values()))
    is_found = found.column(LogColumns.USER_ID) is not None and found.column(LogColumns.ITEM_ID) is not None
    is_alike = names.issuperset(used_columns(found)) and not sought & (names ^ set(log.table.column_names))
    return one is not log and is_found and is_alike and one.form == log.form


def usable_rows(
    sample: TableSample,
    found: Recognition,
    facts: _Facts,
    days_of: Callable[[pa.Table, Recognition, _Facts], np.ndarray | None],
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
    days = days_of(sample.table, found, facts)
    masks = {
        name: _absent(sample.table[name], facts[name], role == LogColumns.TIMESTAMP, days)
        for name, role in roles.items()
    }
    if absent := {name: mask for name, mask in masks.items() if mask.any()}:
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
        days = days_of(sample.table, found, facts)
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


def unread_time(table: pa.Table, found: Recognition, facts: _Facts) -> str | None:
    """The column of texts that is the time by its name, or has dates of another form; None = the time is another."""
    time = found.column(LogColumns.TIMESTAMP)
    texts = [name for name in facts if time in (None, name) and facts[name].kind == "text" and facts[name].dated < 0.5]
    texts = [name for name in texts if _share(table, name, r"^[0-9]+$") < 0.5]
    called = [name for name in texts if name == time or rank_as(LogColumns.TIMESTAMP, name) is not None]
    return next(iter(called + [name for name in texts if _share(table, name, _OTHER_DATE) >= 0.5]), None)


def unread_texts(table: pa.Table, found: Recognition, facts: _Facts, time: str | None) -> tuple[list[str], list[str]]:
    """Questions and doubts about ``time``, the result of ``unread_time``, and about numbers with decimal commas."""
    questions = list[str]()
    if time is not None:
        shown = f"timestamp: `{time}` ({', '.join(facts[time].examples)}) has no times that recpo reads"
        remedy = "write ISO times such as 2026-01-31T18:30:00 (pandas.to_datetime with a format), or seconds since 1970"
        questions = [f"{shown}: {remedy}; to do without times, pass --columns.time_unit none"]
    texts = [facts[name] for name in found.unused if not any(f"`{name}`" in one for one in found.questions)]
    numbers = [one for one in texts if one.kind == "text" and _share(table, one.name, _DECIMAL_COMMA) >= 0.9]
    doubt = "`{}` ({}) is not read: write numbers with points, not with commas"
    return questions, [doubt.format(one.name, ", ".join(one.examples)) for one in numbers]


def _share(table: pa.Table, name: str, pattern: str) -> float:
    """Which share of the texts of a column match."""
    texts = table[name].drop_null().cast(pa.string())
    return (pc.sum(pc.match_substring_regex(texts, pattern)).as_py() or 0) / max(1, len(texts))


def _absent(values: pa.ChunkedArray, facts: ColumnFacts, is_time: bool, days: np.ndarray | None) -> np.ndarray:
    """Which rows have no value, or no time that parses."""
    if is_text(values.type):
        stated = pc.match_substring_regex(values.cast(pa.string()), _DATED if is_time and facts.dated >= 0.5 else r"\S")
        return ~pc.fill_null(stated, False).to_numpy()
    empty: np.ndarray = pc.is_null(values, nan_is_null=True).to_numpy()
    return ~((days >= _FIRST_DAY) & (days < _LAST_DAY)) if is_time and days is not None else empty


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
