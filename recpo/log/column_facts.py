"""Facts about the values of a column: kind, share of nulls, range, and the units that fit them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.log.schema import MILLISECONDS_PER_UNIT

Kind = Literal["whole", "number", "flag", "text", "time", "other"]

#: clock times of a log lie in these years
_FIRST_MS: Final = datetime(1995, 1, 1, tzinfo=UTC).timestamp() * 1000
_LAST_MS: Final = datetime(2040, 1, 1, tzinfo=UTC).timestamp() * 1000
_DATED: Final = r"^[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}"
_EXAMPLES: Final = 3
_FEW: Final = 20
_MOST_SECONDS: Final = {"watch_time": (0.5, 7_200.0, 28_800.0), "duration": (1.0, 14_400.0, 86_400.0)}


@dataclass(frozen=True)
class ColumnFacts:
    """Facts about the values of one column.

    Attributes:
        name: name of the column.
        kind: whole numbers, numbers with fractions, flags (booleans, or 0 and 1 alone), text, times, or anything else.
        rows: number of inspected values, including nulls.
        nulls: number of missing values; nan counts as missing.
        distinct: number of distinct values.
        least: the smallest number; None if there are no numbers.
        median: median of the numbers above 0.
        high: the 99th percentile.
        most: the largest number.
        few: the distinct numbers, ascending, if there are at most 20.
        dated: share of text values that begin with a date.
        examples: the first values, as text.
        texts: the distinct texts, sorted, if there are at most 20.
    """

    name: str
    kind: Kind
    rows: int
    nulls: int
    distinct: int
    least: float | None = None
    median: float | None = None
    high: float | None = None
    most: float | None = None
    few: tuple[float, ...] | None = None
    dated: float = 0.0
    examples: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether the values are integers, numbers with fractions, or flags."""
        return self.kind in ("whole", "number", "flag")

    @property
    def evidence(self) -> str:
        """A short description of the values: range, distinct values, nulls."""
        if self.is_number and self.least is not None and self.most is not None:
            shown = f"{_short(self.least)} to {_short(self.most)}"
        elif self.kind == "time":
            shown = f"{self.examples[0] if self.examples else '-'}, ..."
        else:
            shown = ", ".join(self.examples)
        nulls = f", {self.nulls / self.rows:.1%} null" if self.nulls else ""
        return f"{shown}; {self.distinct:,} distinct{nulls}"


def column_facts(name: str, values: pa.ChunkedArray) -> ColumnFacts:
    """Collects the facts about the values of one column."""
    kind, rows = values.type, len(values)
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = values.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _number_facts(name, _as_number(values))
    examples = tuple(_text(value) for value in values.drop_null().unique()[:_EXAMPLES].to_pylist())
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return ColumnFacts(name, "time", rows, values.null_count, pc.count_distinct(values).as_py(), examples=examples)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        return ColumnFacts(name, "other", rows, values.null_count, 0, examples=examples)
    known = values.drop_null()
    dated = pc.match_substring_regex(known, _DATED).cast(pa.int64())
    share = (pc.sum(dated).as_py() or 0) / max(1, len(known))
    distinct = pc.count_distinct(known).as_py()
    texts = tuple(sorted(map(str, known.unique().to_pylist()))) if distinct <= _FEW else ()
    return ColumnFacts(name, "text", rows, values.null_count, distinct, dated=share, examples=examples, texts=texts)


def _as_number(values: pa.ChunkedArray) -> pa.ChunkedArray:
    whole = values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values
    return whole.cast(pa.float64(), safe=False)


def _number_facts(name: str, values: pa.ChunkedArray) -> ColumnFacts:
    numbers = values.to_numpy().astype(np.float64)
    known = numbers[np.isfinite(numbers)]
    rows, nulls = len(numbers), len(numbers) - len(known)
    if not len(known):
        return ColumnFacts(name, "other", rows, nulls, 0)
    distinct = np.unique(known)
    few = tuple(distinct.tolist()) if len(distinct) <= _FEW else None
    whole = bool((known == np.floor(known)).all())
    kind: Kind = "flag" if few is not None and set(few) <= {0.0, 1.0} else "whole" if whole else "number"
    positive = known[known > 0]
    return ColumnFacts(
        name,
        kind,
        rows,
        nulls,
        len(distinct),
        least=float(known.min()),
        median=float(np.median(positive)) if len(positive) else 0.0,
        high=float(np.quantile(known, 0.99)),
        most=float(known.max()),
        few=few,
        examples=tuple(_short(value) for value in known[:_EXAMPLES]),
    )


def clock_units(facts: ColumnFacts) -> list[str]:
    """The units since 1970 for which all numbers of a column are times of the years 1995 to 2039."""
    if not facts.is_number or facts.least is None or facts.most is None:
        return []
    factors = {unit: MILLISECONDS_PER_UNIT[unit] for unit in ("s", "ms", "us", "ns")}
    return [
        unit for unit, factor in factors.items() if facts.least * factor >= _FIRST_MS and facts.most * factor < _LAST_MS
    ]


def length_units(facts: ColumnFacts, role: str) -> list[str]:
    """The units (seconds, milliseconds, microseconds) for which the numbers are plausible watch times or durations.

    Watch times are plausible if their median is half a second to two hours and the 99th percentile is under eight
    hours; durations, if their median is a second to four hours and they are under a day. Numbers with fractions are
    read as seconds if possible, because players count whole milliseconds.

    Args:
        facts: facts about the column.
        role: ``watch_time`` or ``duration``.
    """
    if facts.median is None or facts.high is None or not facts.is_number:
        return []
    units = [unit for unit in ("s", "ms", "us") if is_plausible(facts, role, unit)]
    return ["s"] if facts.kind == "number" and "s" in units else units


def is_plausible(facts: ColumnFacts, role: str, unit: str) -> bool:
    """Whether the numbers are plausible watch times or durations in a unit, by the rule of ``length_units``."""
    low, middle, high = _MOST_SECONDS[role]
    seconds = MILLISECONDS_PER_UNIT[unit] / 1000.0
    median, most = (facts.median or 0.0) * seconds, (facts.high or 0.0) * seconds
    return low <= median <= middle and most <= high


def read_as(facts: ColumnFacts, unit: str) -> str:
    """The median in a unit, for people: ``33 min in s``."""
    seconds = (facts.median or 0.0) * MILLISECONDS_PER_UNIT[unit] / 1000.0
    if seconds < 90:
        return f"{seconds:.3g} s in {unit}"
    return f"{seconds / 60:.3g} min in {unit}" if seconds < 5400 else f"{seconds / 3600:.3g} h in {unit}"


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e18:
        return str(int(value)) if abs(value) >= 1e8 else f"{int(value):,}"
    return f"{value:.4g}"


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:21] + "..."
