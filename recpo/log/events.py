"""Turns the columns of a log into standard events: one unit, one type and one meaning for each column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Final

import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir

from recpo.base.features import Feature, Number
from recpo.log.engine import Engine
from recpo.log.feature_columns import BEHAVIOR, CONTEXT, EventColumns
from recpo.log.schema import MILLISECONDS_PER_UNIT, TIE_RULE, Columns, Derived, FlagColumn, LogColumns

#: Times outside 1971-01-01 .. 2100-01-01 UTC indicate a wrong unit: seconds read as milliseconds lie in 1970.
EARLIEST_MS: Final = 31_536_000_000
LATEST_MS: Final = 4_102_444_800_000
_DATED: Final = "^[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}"


def select_columns(
    rows: ir.Table,
    columns: dict[str, str],
    flags: Mapping[str, FlagColumn] = MappingProxyType({}),
) -> ir.Table:
    """The rows of the log under standard names, with unchanged values and the engine's file and row number.

    Args:
        rows: rows of the files.
        columns: standard name -> name in the log.
        flags: the columns among them that become a boolean: whether the value is one of those that mean true.
    """
    chosen = {column: rows[name] for column, name in columns.items()}
    chosen |= {column: _has_value(chosen[column], flag) for column, flag in flags.items()}
    return rows.select(**{Engine.FILE: rows[Engine.FILE], Engine.ROW: rows[Engine.ROW]}, **chosen)


def _has_value(column: ir.Value, flag: FlagColumn) -> ir.BooleanColumn:
    """Whether a value is one of those that mean true; null if it is missing."""
    if column.type().is_string():
        return column.strip().isin(flag.values)
    if column.type().is_boolean():
        return column.cast("string").isin(flag.values)
    value = number(column)
    return ibis.ifelse(value.isnan(), ibis.null("boolean"), value.isin(flag.numbers))


def number(column: ir.Value) -> ir.FloatingColumn:
    """Any numeric or boolean column as float64."""
    return (column.cast("int8") if column.type().is_boolean() else column).cast("float64")


def timestamp_ms(column: ir.Value, unit: str) -> ir.IntegerColumn:
    """Milliseconds since the epoch; null if the value is null, does not parse, or is not a plausible time."""
    if column.type().is_unknown():
        # Ibis does not know DuckDB's type of nanoseconds with a time zone.
        column = column.cast("timestamp('UTC')")
    kind = column.type()
    if kind.is_timestamp() or kind.is_date():
        return _plausible(_clock_ms(column.cast("timestamp")))
    if kind.is_string():
        counted = _numeric_ms(column.try_cast("int64"), unit)
        # An offset in the string is used; without one, the string is UTC. The accepted formats are checked here because
        # engines disagree: Spark reads "2024" as a year and "12:00" as a time of the current day.
        dated = ibis.ifelse(column.re_search(_DATED), column, ibis.null("string"))
        return counted.coalesce(_plausible(_clock_ms(dated.try_cast("timestamp('UTC')").cast("timestamp"))))
    return _numeric_ms(column, unit)


def _clock_ms(time: ir.TimestampColumn) -> ir.IntegerColumn:
    return time.truncate("s").epoch_seconds().cast("int64") * 1000 + time.millisecond().cast("int64")


def _plausible(milliseconds: ir.IntegerColumn) -> ir.IntegerColumn:
    return ibis.ifelse(milliseconds.between(EARLIEST_MS, LATEST_MS - 1), milliseconds, ibis.null("int64"))


def _numeric_ms(column: ir.NumericColumn, unit: str) -> ir.IntegerColumn:
    if unit == "order":
        return column.try_cast("int64")
    factor = MILLISECONDS_PER_UNIT[unit]
    rough = column.cast("float64") * factor
    # Only plausible values are converted to integers, so that the conversion cannot overflow.
    kept = ibis.ifelse(rough.between(float(EARLIEST_MS), float(LATEST_MS)), column, ibis.null(column.type()))
    if not column.type().is_integer():
        return _plausible((kept * factor).floor().cast("int64"))
    whole = kept.cast("int64")
    return _plausible(whole * int(factor) if factor >= 1 else (whole // round(1 / factor)).cast("int64"))


def standardize(
    raw: ir.Table,
    mapping: Columns,
    max_watch_time: float,
    more: EventColumns = EventColumns(),  # noqa: B008  frozen
) -> ir.Table:
    """Standard events from raw rows that passed the checks of ``recpo.log.validate``.

    Missing and impossible values become null; in dislike and is_random they become False. The event itself is kept,
    without the label or input that depends on the value.

    Args:
        raw: rows under standard names.
        mapping: units.
        max_watch_time: maximum possible watch time in seconds.
        more: behaviors and request features of ``raw``.

    Returns:
        ``user_id``, ``item_id``, ``timestamp`` (int64 ms), ``watch_ms``, ``duration_ms`` (int64), ``dislike``,
        ``is_random`` (bool), ``label``, ``propensity`` (float64), ``request_id``; ``behaviors`` (int32) if the log has
        any, and every request feature in its plain form (``recpo.base.features``).
    """
    watch = length_ms(raw, LogColumns.WATCH_TIME, mapping.watch_time_unit)
    duration = length_ms(raw, LogColumns.DURATION, mapping.duration_unit)
    label, propensity = _optional_number(raw, LogColumns.LABEL), _optional_number(raw, LogColumns.PROPENSITY)
    return raw.select(
        user_id=raw[LogColumns.USER_ID],
        item_id=raw[LogColumns.ITEM_ID],
        timestamp=timestamp_ms(raw[LogColumns.TIMESTAMP], mapping.time_unit or "ms"),
        watch_ms=_kept(watch, watch.between(0, max_watch_time * 1000)).round().cast("int64"),
        duration_ms=_kept(duration, (duration > 0) & ~duration.isinf()).round().cast("int64"),
        dislike=_flag(raw, LogColumns.DISLIKE),
        value=_kept(label, ~label.isnan() & ~label.isinf()),
        propensity=_kept(propensity, (propensity > 0) & (propensity <= 1)),
        is_random=_flag(raw, LogColumns.IS_RANDOM),
        request_id=raw[LogColumns.REQUEST_ID] if LogColumns.REQUEST_ID in raw.columns else ibis.null("int64"),
        **({Derived.BEHAVIORS: _bits(raw, more.behaviors)} if more.behaviors else {}),
        **{CONTEXT + one.name: _context(raw[CONTEXT + one.name], one) for one in more.context},
    )


def _bits(raw: ir.Table, behaviors: Iterable[str]) -> ir.IntegerColumn:
    """A bit set: bit b is set if the b-th behavior is 1."""
    bits = [_flag(raw, BEHAVIOR + name).cast("int32") * (1 << bit) for bit, name in enumerate(behaviors)]
    return reduce(add, bits).cast("int32")


def _context(column: ir.Value, feature: Feature) -> ir.Value:
    """The plain form of a request feature."""
    if isinstance(feature, Number):
        value = number(column)
        return _kept(value, ~value.isinf())
    if column.type().is_string():
        return column
    if column.type().is_floating():
        column = ibis.ifelse(column.isnan(), ibis.null(column.type()), column)
    return column.cast("int64")


def length_ms(raw: ir.Table, column: str, unit: str | None) -> ir.FloatingColumn:
    """A watch time or duration in milliseconds as float64; null if the log has no such column or value."""
    return _optional_number(raw, column) * MILLISECONDS_PER_UNIT[unit or "s"]


def _optional_number(raw: ir.Table, column: str) -> ir.FloatingColumn:
    return number(raw[column]) if column in raw.columns else ibis.null("float64")


def _kept(value: ir.FloatingColumn, valid: ir.BooleanColumn) -> ir.FloatingColumn:
    # DuckDB orders nan above all numbers, so it is excluded explicitly.
    return ibis.ifelse(valid & ~value.isnan(), value, ibis.null("float64"))


def _flag(raw: ir.Table, column: str) -> ir.BooleanColumn:
    return (number(raw[column]) == 1).fill_null(False) if column in raw.columns else ibis.literal(False)


def time_order(events: ir.Table, *, newest_first: bool = False) -> list[ir.Column]:
    """Sort keys for the unique order of a user's events (``TIE_RULE``)."""
    keys = [events[column] for column in (*TIE_RULE, *more_columns(events))]
    return [key.desc() if newest_first else key.asc(nulls_first=True) for key in keys]


def more_columns(events: ir.Table) -> list[str]:
    """The columns of standard events that hold behaviors and request features."""
    return [name for name in events.columns if name == Derived.BEHAVIORS or name.startswith(CONTEXT)]


def bucket(events: ir.Table, base: float) -> ir.IntegerColumn:
    """Duration bucket ``floor(log_base(d + 1e-6))`` with ``d`` in seconds; null if the duration is unknown.

    OneRec-V2, arXiv 2508.20900, section 3.1.
    """
    # Explicit float64, here and elsewhere: Spark would divide an integer by 1000.0 as a decimal.
    seconds = events[Derived.DURATION_MS].cast("float64") / 1000.0 + 1e-6
    return (seconds.ln() / ibis.literal(base, type=dt.float64).ln()).floor().cast("int32")
