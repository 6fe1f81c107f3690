"""Checks every row of a log in one pass: which values are fatal, which are neutralized, and where they are.

Also warns about labels and units that the fitted watch times make doubtful.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import ibis
import ibis.expr.types as ir

from recpo.base.errors import RecpoError
from recpo.base.features import Feature, Number
from recpo.base.feedback import UNKNOWN_BUCKET
from recpo.log.column_facts import DATE_FORMS
from recpo.log.csv_files import row_in_file
from recpo.log.engine import Engine
from recpo.log.events import absent, length_ms, number, timestamp_ms
from recpo.log.feature_columns import BEHAVIOR, CONTEXT, EventColumns
from recpo.log.files import Log
from recpo.log.schema import EXAMPLES, Columns, Example, Fault, LogColumns
from recpo.log.shaping import Label, NumericColumn, Severity, WatchRatio

_VALUES_SHOWN: Final = 8
#: From this share of equal watch times, no quantile separates a quarter of the events from the rest.
_MANY_TIES: Final = 0.25
_LEAST_RATIO, _MOST_RATIO = 0.005, 10.0  # of the median watch time to the duration


@dataclass(frozen=True)
class Check:
    """A condition that every row is checked for.

    Attributes:
        column: standard name of the column.
        problem: what is wrong with an offending row.
        severity: the consequence.
        fix: what the user can do.
        offends: expression that is true for offending rows.
    """

    column: str
    problem: str
    severity: Severity
    fix: str
    offends: ir.BooleanColumn


def check_rows(
    engine: Engine,
    raw: ir.Table,
    log: Log,
    mapping: Columns,
    label: Label,
    max_watch_time: float,
    strict: bool,
    more: EventColumns,
) -> tuple[int, dict[str, int], list[Fault]]:
    """Counts the offending rows of every check.

    Args:
        engine: runs the expressions.
        raw: rows under standard names (``select_columns``).
        log: names of files and columns, for the faults.
        mapping: units.
        label: the label method, which may reject values of the label column.
        max_watch_time: maximum possible watch time in seconds.
        strict: impossible values and exact duplicates are fatal instead of neutralized or dropped.
        more: behaviors and request features.

    Returns:
        Number of rows; number of neutralized values by reason; faults.
    """
    checks = row_checks(raw, mapping, max_watch_time, more)
    if LogColumns.LABEL in raw.columns and (found := label.check(number(raw[LogColumns.LABEL]))) is not None:
        checks.append(Check(LogColumns.LABEL, *found))
    counts = {f"c{number}": check.offends.fill_null(False).sum() for number, check in enumerate(checks)}
    row = engine.row(raw.aggregate(rows=raw.count(), **counts))
    neutralized, faults = {}, []
    for place, check in enumerate(checks):
        count = int(row[f"c{place}"] or 0)
        if not count:
            continue
        if check.severity == "fatal" or (strict and check.severity == "impossible"):
            first = examples(engine, raw.filter(check.offends), check.column, log)
            faults.append(Fault(log.name, log.columns[check.column], check.problem, check.fix, count, first))
        else:
            neutralized[f"{check.column}: {check.problem}"] = count
    faults += _scale_faults(engine, raw, log, label)
    if strict:
        faults += _duplicates(engine, raw, log, mapping)
    return int(row["rows"]), neutralized, faults


def usable_rows(
    engine: Engine, raw: ir.Table, mapping: Columns, skip_incomplete: bool, begin: int | None, end: int | None
) -> tuple[ir.Table, dict[str, int]]:
    """The rows that are not left out by an option, and the number of the others by reason.

    Args:
        engine: runs the expressions.
        raw: rows under standard names (``select_columns``).
        mapping: units.
        skip_incomplete: rows without a user, an item or a time are left out.
        begin: the first time in ms that is kept; None = no limit.
        end: the first later time that is not; None = no limit.

    Raises:
        RecpoError: no row is left.
    """
    given = {column: raw[column] for column in LogColumns.REQUIRED if column in raw.columns}
    if (time := given.get(LogColumns.TIMESTAMP)) is not None:
        given[LogColumns.TIMESTAMP] = time = timestamp_ms(time, mapping.time_unit or "ms")
    empty = {column: value.strip() == "" if value.type().is_string() else False for column, value in given.items()}
    reasons = [(given[name].isnull() | empty[name], f"row without {name}") for name in given if skip_incomplete]
    reasons += [] if time is None or begin is None else [(time < begin, "before begin")]
    reasons += [] if time is None or end is None else [(time >= end, "at end or later")]
    if not reasons:
        return raw, {}
    marked = raw.mutate(left_out=ibis.cases(*reasons))
    counts = engine.table(marked.group_by("left_out").aggregate(rows=marked.count())).to_pylist()
    dropped = {row["left_out"]: row["rows"] for row in counts}
    if dropped and dropped.pop(None, 0) == 0:
        raise RecpoError(
            f"no row is left: {dropped}", code="empty", field="skip_incomplete" if skip_incomplete else "begin"
        )
    return marked.filter(marked.left_out.isnull()).drop("left_out"), dropped


def unmatched_flags(engine: Engine, rows: ir.Table, raw: ir.Table, log: Log) -> list[Fault]:
    """A fault for every flag that is read from values of which no row has one, such as a misspelled value.

    Args:
        engine: runs the expressions.
        rows: rows of the files, under the log's names.
        raw: the same rows under standard names (``select_columns``).
        log: names of columns, and the flags.
    """
    if not log.flags:
        return []
    counts = engine.row(raw.aggregate(**{column: raw[column].sum() for column in log.flags}))
    faults = []
    for column, flag in log.flags.items():
        if counts[column]:
            continue
        values = rows.select(value=rows[flag.column]).distinct().order_by("value").limit(_VALUES_SHOWN)
        shown = [str(value) for value in engine.table(values)["value"].to_pylist() if value is not None]
        problem = f"no row has {' or '.join(map(repr, flag.values))}, wanted as {column}"
        has = f"the column has {', '.join(map(repr, shown))}" if shown else "the column is empty"
        fix = f"{has}: correct `equals`, or leave {column} out"
        faults.append(Fault(log.name, flag.column, problem, fix, code="unknown_name"))
    return faults


def row_checks(raw: ir.Table, mapping: Columns, max_watch_time: float, more: EventColumns) -> list[Check]:
    """All checks that apply to the columns of ``raw``."""
    fix = "an event needs a user, an item and a time: fill the key, or leave these rows out with --skip_incomplete true"
    keys = [column for column in (LogColumns.USER_ID, LogColumns.ITEM_ID) if column in raw.columns]
    return [
        *(Check(column, "null key", "fatal", fix, raw[column].isnull()) for column in keys),
        *_time_checks(raw, mapping),
        *_length_checks(raw, mapping, max_watch_time),
        *_flag_checks(raw),
        *_number_checks(raw),
        *_context_checks(raw, more.context),
    ]


def _time_checks(raw: ir.Table, mapping: Columns) -> Iterator[Check]:
    if LogColumns.TIMESTAMP not in raw.columns:
        return
    time, unit = raw[LogColumns.TIMESTAMP], mapping.time_unit or "ms"
    useless = timestamp_ms(time, unit).isnull() & ~absent(time)
    if unit == "order":
        fix = "time_unit order takes whole numbers"
    elif unit in DATE_FORMS:
        fix = f"these were read with --columns.time_unit {unit}: write ISO times such as 2024-05-01T12:00:00+08:00"
    elif time.type().is_string():
        fix = f"write ISO times such as 2024-05-01T12:00:00+08:00, or whole numbers in {unit} (--columns.time_unit)"
    else:
        fix = f"times lie in 1971..2099; these were read in {unit}: set --columns.time_unit to s, ms, us, ns or order"
    missing = "an event needs a user, an item and a time: fill it, or leave these rows out with --skip_incomplete true"
    yield Check(LogColumns.TIMESTAMP, "null time", "fatal", missing, absent(time))
    yield Check(LogColumns.TIMESTAMP, "unparseable or impossible time", "fatal", fix, useless)


def _length_checks(raw: ir.Table, mapping: Columns, max_watch_time: float) -> Iterator[Check]:
    if LogColumns.WATCH_TIME in raw.columns:
        watch = length_ms(raw, LogColumns.WATCH_TIME, mapping.watch_time_unit)
        unit = f"check --columns.watch_time_unit (now {mapping.watch_time_unit or 's'})"
        known = ~watch.isnan()
        yield Check(LogColumns.WATCH_TIME, "missing", "missing", unit, absent(watch))
        yield Check(LogColumns.WATCH_TIME, "negative", "impossible", "a watch time is at least 0", known & (watch < 0))
        problem = f"infinite or longer than max_watch_time = {max_watch_time:g} s"
        too_long = known & (watch > max_watch_time * 1000)
        yield Check(LogColumns.WATCH_TIME, problem, "impossible", f"{unit} or raise max_watch_time", too_long)
    if LogColumns.DURATION in raw.columns:
        duration = length_ms(raw, LogColumns.DURATION, mapping.duration_unit)
        unit = f"check --columns.duration_unit (now {mapping.duration_unit or 's'})"
        yield Check(LogColumns.DURATION, "missing or zero", "missing", unit, absent(duration) | (duration == 0))
        yield Check(LogColumns.DURATION, "negative or infinite", "impossible", unit, (duration < 0) | duration.isinf())


def _flag_checks(raw: ir.Table) -> Iterator[Check]:
    behaviors = [column for column in raw.columns if column.startswith(BEHAVIOR)]
    for column in (*LogColumns.FLAGS, *behaviors):
        if column in raw.columns:
            value, fix = number(raw[column]), "expected a boolean, or 0 and 1"
            yield Check(column, "missing, taken as false", "missing", fix, absent(value))
            yield Check(column, "neither 0 nor 1", "fatal", fix, ~absent(value) & (value != 0) & (value != 1))


def _number_checks(raw: ir.Table) -> Iterator[Check]:
    if LogColumns.LABEL in raw.columns:
        label = number(raw[LogColumns.LABEL])
        yield Check(LogColumns.LABEL, "missing", "missing", "an event without a label is neutral", absent(label))
        yield Check(LogColumns.LABEL, "infinite", "impossible", "a label is a finite number", label.isinf())
    if LogColumns.PROPENSITY in raw.columns:
        value, fix = number(raw[LogColumns.PROPENSITY]), "a propensity is a probability above 0 and at most 1"
        yield Check(LogColumns.PROPENSITY, "missing", "missing", fix, absent(value))
        outside = ~absent(value) & ((value <= 0) | (value > 1))
        yield Check(LogColumns.PROPENSITY, "outside (0, 1]", "impossible", fix, outside)


def _context_checks(raw: ir.Table, context: Sequence[Feature]) -> Iterator[Check]:
    for feature in context:
        column = CONTEXT + feature.name
        if column not in raw.columns:
            continue
        value = raw[column]
        if value.type().is_floating() and isinstance(feature, Number):
            yield Check(column, "infinite", "impossible", "a number is finite", value.isinf())
        elif value.type().is_floating():
            partial = ~absent(value) & ((value != value.floor()) | value.isinf())
            yield Check(column, "a number that is not whole", "fatal", "declare it a Number", partial)
        yield Check(column, "missing", "missing", "missing values are read as unknown", absent(value))


def _scale_faults(engine: Engine, raw: ir.Table, log: Log, label: Label) -> list[Fault]:
    """The fault of a label without ends, which names those of the column."""
    if not isinstance(label, NumericColumn) or LogColumns.LABEL not in raw.columns:
        return []
    if label.low is not None or label.threshold is not None:
        return []
    value = number(raw[LogColumns.LABEL])
    known = raw.select(value=value).filter(~value.isnan() & ~value.isinf())
    ends = engine.row(known.aggregate(low=known["value"].min(), high=known["value"].max()))
    if ends["low"] is None or ends["low"] == ends["high"]:
        found, scale = "its values do not differ", "--label.low LOW --label.high HIGH"
    else:
        low, high = (f"{ends[name]:.15g}" for name in ("low", "high"))
        found, scale = f"its values run from {low} to {high}", f"--label.low {low} --label.high {high}"
    problem = f"label NumericColumn needs the ends of the scale, and none are given; {found}"
    fix = f"pass {scale} (values beyond count as the nearer end), or --label.threshold"
    return [Fault(log.name, log.columns[LogColumns.LABEL], problem, fix, code="missing_option")]


def examples(engine: Engine, offending: ir.Table, column: str, log: Log) -> list[Example]:
    """The first offending rows of a log or table, with the user's file name and row number."""
    first = offending.order_by([Engine.FILE, Engine.ROW]).limit(EXAMPLES)
    rows = engine.table(first.select(file=first[Engine.FILE], row=first[Engine.ROW], value=first[column])).to_pylist()
    files = {str(file.path): file for file in log.files}
    places = [(files[engine.file_of(row["file"])], row) for row in rows]
    return [Example(file.shown, row_in_file(row["row"], file.left_out), row["value"]) for file, row in places]


def copies(rows: ir.Table, keys: Sequence[str]) -> ir.Table:
    """The rows whose ``keys`` an earlier row of the files has."""
    place = ibis.row_number().over(group_by=keys, order_by=[rows[Engine.FILE], rows[Engine.ROW]])
    return rows.mutate(copy=place).filter(ibis._.copy > 0)


def _duplicates(engine: Engine, raw: ir.Table, log: Log, mapping: Columns) -> Sequence[Fault]:
    columns = [column for column in raw.columns if column not in (Engine.FILE, Engine.ROW)]
    if not set(mapping.required) <= set(columns):
        return []
    again = copies(raw, columns)
    count = engine.count(again)
    if not count:
        return []
    first = examples(engine, again, LogColumns.ITEM_ID, log)
    fix = "remove the copies, or leave strict off and they are dropped and counted"
    return [Fault(log.name, None, "exact duplicates of an earlier event", fix, count, first, "duplicate")]


def tie_warnings(label: Label, ties: dict[str, int]) -> list[str]:
    """A warning if so many train watch times are equal that labels from their ranks contain little information.

    The watched share is no rank.

    Args:
        label: the label method.
        ties: the result of ``recpo.log.shaping.watch_ties``.
    """
    watched = ties["watched"]
    if LogColumns.WATCH_TIME not in label.needs or isinstance(label, WatchRatio) or not watched:
        return []
    zero, tied = ties["zero"] / watched, ties["tied"] / watched
    if zero > _MANY_TIES:
        return [
            f"{zero:.0%} of the train watch times are zero seconds: their label is 0, and nothing tells them apart. If "
            "such items were never played, leave them out of the log; or take another --label, such as BinaryColumn"
        ]
    if tied > _MANY_TIES:
        return [
            f"{tied:.0%} of the train watch times equal the most frequent one of their duration bucket, so that labels "
            "out of their ranks are coarse: log finer watch times, or take --label WatchRatio or BinaryColumn"
        ]
    return []


def unit_warnings(quantiles: Mapping[int, Sequence[float]], base: float) -> list[str]:
    """A warning if watch times and durations are so different that one of their units is probably wrong.

    The median watch time of each duration bucket is compared with the bucket's shortest duration. Plausible is a median
    ratio of 1/200 to 10 over the buckets, so a mistake of seconds for milliseconds is always outside.

    Args:
        quantiles: of the watch times, in seconds, by bucket.
        base: of the buckets.
    """
    medians = {bucket: times[len(times) // 2] for bucket, times in quantiles.items() if bucket != UNKNOWN_BUCKET}
    ratios = [watched / base**bucket for bucket, watched in medians.items() if watched > 0]
    if not ratios or _LEAST_RATIO <= (ratio := median(ratios)) <= _MOST_RATIO:
        return []
    return [
        f"the median watch time is about {ratio:.3g} times the duration: the unit of one is probably wrong; check "
        "--columns.watch_time_unit and --columns.duration_unit (seconds by default)"
    ]


def label_faults(label: Label, log: Log, of_items: Collection[str]) -> list[Fault]:
    """The fault of a label whose columns are neither in the log nor among those of the item table."""
    known = {*log.columns, *log.faulty, *of_items}
    lacking = [column for column in label.needs if column not in known]
    if not lacking or not log.files:
        return []
    name = type(label).__name__
    fix = (
        "name the column with --columns.NAME, or choose another --label: WatchQuantiles, WatchRatio, D2Q and "
        "WatchTimeGain read watch_time and duration, which may be in the table of items (--features.duration NAME); "
        "BinaryColumn and NumericColumn read label; EveryEvent none"
    )
    problem = f"label {name} needs {' and '.join(lacking)}, which the log does not have"
    return [Fault(log.name, None, problem, fix, code="missing_column")]
