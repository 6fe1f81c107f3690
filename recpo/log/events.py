"""Standard events from the columns of a log: one unit, one type, one meaning each; the items and users to keep."""

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add, gt, lt
from typing import Any, Literal

import ibis
import ibis.expr.datatypes as dt
import ibis.expr.types as ir

from recpo.base.features import Feature, Number
from recpo.base.feedback import FeedbackRule
from recpo.base.frames import EARLIEST_MS, LATEST_MS
from recpo.log import column_facts, schema
from recpo.log.engine import Engine
from recpo.log.feature_columns import BEHAVIOR, CONTEXT, ENCODED, EventColumns
from recpo.log.schema import Columns, Derived, FlagColumn, LogColumns


def select_columns(rows: ir.Table, columns: dict[str, str], flags: Mapping[str, FlagColumn]) -> ir.Table:
    """The rows of the log under standard names, with unchanged values and the engine's file and row number.

    Args:
        rows: rows of the files.
        columns: standard name -> name in the log.
        flags: the columns among them that become a boolean: whether the value is one of those that mean true; or the
            grade of the value.
    """
    read: dict[str, ir.Value] = {column: rows[name] for column, name in columns.items()}
    chosen = {column: one.cast("float64") if one.type().is_decimal() else one for column, one in read.items()}
    chosen |= {column: _whole(chosen[column]) for column in LogColumns.IDS if column in chosen}
    chosen |= {column: _read(chosen[column], flag) for column, flag in flags.items()}
    return rows.select(**{Engine.FILE: rows[Engine.FILE], Engine.ROW: rows[Engine.ROW]}, **chosen)


def _whole(column: ir.Value) -> ir.Value:
    """Ids that missing values made floating-point numbers, as integers; null if they are none, or not exact."""
    if not column.type().is_floating():
        return column
    # not floor(), which is an integer: nan and large numbers have none
    is_exact = (column % 1.0 == 0) & (column.abs() < 2.0**53) & ~column.isnan()
    return ibis.ifelse(is_exact, column, ibis.null("float64")).cast("int64")


def _read(column: ir.Value, flag: FlagColumn) -> ir.Value:
    """The boolean or the grade that a value means; null if it is missing."""
    if not flag.grades:
        return _has_value(column, flag)
    graded = [
        _has_value(column, FlagColumn(flag.column, value)).cast("float64") * grade
        for value, grade in flag.grades.items()
    ]
    return reduce(add, graded)


def _has_value(column: ir.Value, flag: FlagColumn) -> ir.BooleanColumn:
    """Whether a value is one of those that mean true; null if it is missing. ``ANY``: whether it is not missing."""
    if flag.values == (schema.ANY,):
        return ~absent(column) & (column.strip() != "" if column.type().is_string() else True)
    if column.type().is_string():
        return column.strip().isin(flag.values)
    if column.type().is_boolean():
        return column.cast("string").isin(flag.values)
    value = number(column)
    return ibis.ifelse(value.isnan(), ibis.null("boolean"), value.isin(flag.numbers))


def number(column: ir.Value) -> ir.FloatingColumn:
    """Any numeric or boolean column as float64."""
    return (column.cast("int8") if column.type().is_boolean() else column).cast("float64")


def absent(column: ir.Value) -> ir.BooleanColumn:
    """Whether a value is missing: null, or nan."""
    return column.isnull() | column.isnan() if column.type().is_floating() else column.isnull()


def timestamp_ms(column: ir.Value, unit: str) -> ir.IntegerColumn:
    """Milliseconds since the epoch; null if the value is null, does not parse, or is not a plausible time.

    Args:
        column: times, dates, texts or numbers.
        unit: of numbers, a unit since 1970 or "order"; or a form of dates (``DATE_FORMS``).
    """
    if column.type().is_unknown():
        # Ibis does not know DuckDB's type of nanoseconds with a time zone.
        column = column.cast("timestamp('UTC')")
    kind = column.type()
    if kind.is_timestamp() or kind.is_date():
        return _plausible(_clock_ms(column.cast("timestamp")))
    if unit in column_facts.DATE_FORMS:
        return _dated_ms(_as_iso(column if kind.is_string() else column.try_cast("int64").cast("string"), unit))
    if kind.is_string():
        counted = _numeric_ms(column.try_cast("int64"), unit)
        # An offset in the string is used; without one, the string is UTC. The accepted formats are checked here because
        # engines disagree: Spark reads "2024" as a year and "12:00" as a time of the current day.
        dated = ibis.ifelse(column.re_search(schema.DATED), column, ibis.null("string"))
        dated = dated.replace(" +", "+").replace(" -", "-")  # an offset after a space, as Snowflake writes it
        return counted.coalesce(_dated_ms(dated))
    return _numeric_ms(column, unit)


def _as_iso(text: ir.StringColumn, form: str) -> ir.StringColumn:
    """Dates as ISO 8601 writes them, such as 2026-01-31T18:30:00; null where a text is no date of this form.

    Args:
        text: dates, with or without a time of day, AM or PM, and an offset from UTC.
        form: ``day_first``, ``month_first`` or ``year_first``.
    """
    pattern, places = column_facts.PATTERNS[form]
    year, month, day = (text.re_extract(pattern, place) for place in places)
    named = ibis.literal("".join(column_facts.MONTHS)).find(month.lower().substr(0, 3))
    month = ibis.ifelse(month.re_search("^[0-9]+$"), month, (named // 3 + 1).cast("int64").cast("string"))
    clock = column_facts.DIGITS if form == "year_first" else column_facts.CLOCK
    hour, minute, second = (_or_zero(text.re_extract(clock, place)) for place in (1, 2, 3))
    half = text.re_extract(column_facts.HALF, 1).lower()
    twelve = hour.cast("int64") % 12 + ibis.ifelse(half == "p", 12, 0)
    hour = ibis.ifelse(half == "", hour.cast("int64"), twelve).cast("string")
    year, month, day, hour, minute, second = (one.lpad(2, "0") for one in (year, month, day, hour, minute, second))
    moment = year + "-" + month + "-" + day + "T" + hour + ":" + minute + ":" + second
    return ibis.ifelse(text.re_search(pattern), moment + text.re_extract(column_facts.OFFSET, 1), ibis.null("string"))


def _or_zero(text: ir.StringColumn) -> ir.StringColumn:
    return ibis.ifelse(text.isnull() | (text == ""), "0", text)


def _dated_ms(text: ir.StringColumn) -> ir.IntegerColumn:
    return _plausible(_clock_ms(text.try_cast("timestamp('UTC')").cast("timestamp")))


def _clock_ms(time: ir.TimestampColumn) -> ir.IntegerColumn:
    return time.truncate("s").epoch_seconds().cast("int64") * 1000 + time.millisecond().cast("int64")


def _plausible(milliseconds: ir.IntegerColumn) -> ir.IntegerColumn:
    return ibis.ifelse(milliseconds.between(EARLIEST_MS, LATEST_MS - 1), milliseconds, ibis.null("int64"))


def _numeric_ms(column: ir.NumericColumn, unit: str) -> ir.IntegerColumn:
    if unit == "order":
        return column.try_cast("int64")
    factor = schema.MILLISECONDS_PER_UNIT[unit]
    rough = column.cast("float64") * factor
    # Only plausible values are converted to integers, so that the conversion cannot overflow.
    kept = ibis.ifelse(rough.between(float(EARLIEST_MS), float(LATEST_MS)), column, ibis.null(column.type()))
    if not column.type().is_integer():
        return _plausible((kept * factor).floor().cast("int64"))
    whole = kept.cast("int64")
    return _plausible(whole * int(factor) if factor >= 1 else (whole // round(1 / factor)).cast("int64"))


def standardize(raw: ir.Table, mapping: Columns, max_watch_time: float, more: EventColumns) -> ir.Table:
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
    is_timed, unit = LogColumns.TIMESTAMP in raw.columns, mapping.time_unit or "ms"
    label, propensity = _optional_number(raw, LogColumns.LABEL), _optional_number(raw, LogColumns.PROPENSITY)
    events = raw.select(
        user_id=raw[LogColumns.USER_ID],
        item_id=raw[LogColumns.ITEM_ID],
        timestamp=timestamp_ms(raw[LogColumns.TIMESTAMP], unit) if is_timed else ibis.null("int64"),
        watch_ms=_kept(watch, watch.between(0, max_watch_time * 1000)).round().cast("int64"),
        duration_ms=whole_duration(duration),
        dislike=_flag(raw, LogColumns.DISLIKE),
        value=_kept(label, ~label.isinf()),
        propensity=_kept(propensity, (propensity > 0) & (propensity <= 1)),
        is_random=_flag(raw, LogColumns.IS_RANDOM),
        request_id=raw[LogColumns.REQUEST_ID] if LogColumns.REQUEST_ID in raw.columns else ibis.null("int64"),
        **behavior_bits(raw, more.behaviors),
        **{CONTEXT + one.name: _context(raw[CONTEXT + one.name], one) for one in more.context},
    )
    return events if is_timed else _in_random_order(events)


def _in_random_order(events: ir.Table) -> ir.Table:
    """Numbers each user's events by a hash of the ids: the order of the rows could be that of the items or grades."""
    user, item = (events[name].cast("string") for name in (LogColumns.USER_ID, LogColumns.ITEM_ID))
    drawn = events.mutate(drawn=(user + "/" + item).hexdigest("md5"))
    order = [drawn.drawn.asc(), *time_order(drawn)]
    place = ibis.row_number().over(group_by=LogColumns.USER_ID, order_by=order).cast("int64")
    return drawn.mutate(**{LogColumns.TIMESTAMP: place}).drop("drawn")


def behavior_bits(raw: ir.Table, behaviors: Iterable[str]) -> dict[str, ir.IntegerColumn]:
    """The column of bit sets, if there are behaviors: bit b is set if the b-th behavior is 1."""
    bits = [_flag(raw, BEHAVIOR + name).cast("int32") * (1 << bit) for bit, name in enumerate(behaviors)]
    return {Derived.BEHAVIORS: reduce(add, bits).cast("int32")} if bits else {}


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
    return _optional_number(raw, column) * schema.MILLISECONDS_PER_UNIT[unit or "s"]


def whole_duration(milliseconds: ir.FloatingColumn) -> ir.IntegerColumn:
    """A duration in whole milliseconds; null if it is missing or impossible."""
    return _kept(milliseconds, (milliseconds > 0) & ~milliseconds.isinf()).round().cast("int64")


def _optional_number(raw: ir.Table, column: str) -> ir.FloatingColumn:
    return number(raw[column]) if column in raw.columns else ibis.null("float64")


def _kept(value: ir.FloatingColumn, valid: ir.BooleanColumn) -> ir.FloatingColumn:
    # DuckDB orders nan above all numbers, so it is excluded explicitly.
    return ibis.ifelse(valid & ~value.isnan(), value, ibis.null("float64"))


def _flag(raw: ir.Table, column: str) -> ir.BooleanColumn:
    return (number(raw[column]) == 1).fill_null(False) if column in raw.columns else ibis.literal(False)


def outcomes(events: ir.Table) -> ir.Table:
    """Of a user's events with an item on one UTC day, the one with the highest label; the first one of several.

    For logs in which an exposure and what followed have rows of their own, such as a view and a purchase. A dislike
    that followed stays.
    """
    same = [events[name] for name in (LogColumns.USER_ID, LogColumns.ITEM_ID)]
    day = events[LogColumns.TIMESTAMP] // schema.MILLISECONDS_PER_DAY
    # not desc(): Ibis takes one direction per column, and the label is also a key of the order of time
    order = [(-events[Derived.VALUE]).asc(nulls_first=False), *time_order(events)]
    disliked = events[LogColumns.DISLIKE].any().over(group_by=[*same, day])
    place = ibis.row_number().over(group_by=[*same, day], order_by=order)
    ranked = events.mutate(place=place, **{LogColumns.DISLIKE: disliked})
    return ranked.filter(ranked.place == 0).drop("place")


def time_order(events: ir.Table, *, newest_first: bool = False) -> list[ir.Column]:
    """Sort keys for the unique order of a user's events (``TIE_RULE``)."""
    keys = [events[column] for column in (*schema.TIE_RULE, *more_columns(events))]
    return [key.desc() if newest_first else key.asc(nulls_first=True) for key in keys]


def more_columns(events: ir.Table) -> list[str]:
    """The columns of events that hold behaviors and request features, plain and (in an extension) encoded."""
    return [name for name in events.columns if name == Derived.BEHAVIORS or name.startswith((CONTEXT, ENCODED))]


def appended(first: ir.Table, second: ir.Table) -> ir.Table:
    """The rows of both, with the columns and types of ``first``."""
    return first.union(second.select(first.columns).cast(dict(first.schema().items())))


def bucket(events: ir.Table, base: float) -> ir.IntegerColumn:
    """Duration bucket ``floor(log_base(d + 1e-6))`` with ``d`` in seconds; null if the duration is unknown.

    OneRec-V2, arXiv 2508.20900, section 3.1.
    """
    return duration_power(events, base).floor().cast("int32")


def duration_power(events: ir.Table, base: float) -> ir.FloatingColumn:
    """``log_base(d + 1e-6)`` with the duration ``d`` in seconds; null if it is unknown."""
    # Explicit float64, here and elsewhere: Spark would divide an integer by 1000.0 as a decimal.
    seconds = events[Derived.DURATION_MS].cast("float64") / 1000.0 + 1e-6
    return seconds.ln() / ibis.literal(base, type=dt.float64).ln()


CatalogScope = Literal["train", "log", "items"]
"""Which items to keep: those of the train period, of the whole log, or of the train period and the item table."""


def item_indices(events: ir.Table, scope: CatalogScope, min_events: int, listed: ir.Column | None = None) -> ir.Table:
    """``item_id`` and ``item_index`` 1..V: first the items of the train period by external id, then all others.

    Args:
        events: standard events with their period.
        scope: "train" counts the events of the train period, so that nothing is known about the future; "log" counts
            all events; "items" counts the events of the train period, and keeps every item of the item table regardless
            of its events.
        min_events: minimum number of counted events per item.
        listed: distinct ids of the item table; None = there is no item table.
    """
    trained = (events[Derived.PERIOD] == schema.TRAIN).cast("int64").sum()
    items = events.group_by(LogColumns.ITEM_ID).aggregate(trained=trained, total=events.count())
    counted = (items.total if scope == "log" else items.trained) >= max(1, min_events)
    if scope == "items" and listed is not None:
        # the log and its tables may hold the same ids as integers of different widths
        table = listed.cast(items[LogColumns.ITEM_ID].type()).name("listed").as_table()
        items = items.outer_join(table, items[LogColumns.ITEM_ID] == table["listed"])
        counted = counted.fill_null(False) | items["listed"].notnull()
        items = items.filter(counted).select(
            items[LogColumns.ITEM_ID].coalesce(items["listed"]).name(LogColumns.ITEM_ID),
            trained=items.trained.fill_null(0),
        )
    else:
        items = items.filter(counted)
    order = [(items.trained == 0).cast("int8"), items[LogColumns.ITEM_ID]]
    index = (ibis.row_number().over(order_by=order) + 1).cast("int32")
    return items.select(LogColumns.ITEM_ID, index.name(Derived.ITEM_INDEX))


def user_indices(events: ir.Table, min_events: int) -> ir.Table:
    """``user_id`` and ``user_index`` 0..U-1, ordered by the period of the user's first event, then by external id.

    Users of the train period come first, so their indices do not depend on later users.

    Args:
        events: events of kept items.
        min_events: minimum number of train events per user; 0 also keeps users who first appear later.
    """
    period = events[Derived.PERIOD]
    users = events.group_by(LogColumns.USER_ID).aggregate(
        trained=(period == schema.TRAIN).cast("int64").sum(), first=period.min()
    )
    users = users.filter(users.trained >= min_events)
    index = ibis.row_number().over(order_by=[users["first"], users[LogColumns.USER_ID]]).cast("int32")
    return users.select(LogColumns.USER_ID, index.name(Derived.USER_INDEX), train_count=users.trained)


def count_dropped(engine: Engine, before: ir.Table, after: ir.Table, reason: str) -> dict[str, int]:
    """Number of events per period that are in ``before`` but not in ``after``, keyed by reason. Zeros are omitted."""
    first, second = (_by_period(engine, events) for events in (before, after))
    lost = {period: first[number] - second[number] for number, period in enumerate(schema.PERIODS)}
    return {f"{reason} ({period})": count for period, count in lost.items() if count}


def _by_period(engine: Engine, events: ir.Table) -> dict[int, int]:
    counts: dict[int, int] = dict.fromkeys(range(len(schema.PERIODS)), 0)
    rows: list[dict[str, Any]] = engine.table(
        events.group_by(Derived.PERIOD).aggregate(rows=events.count())
    ).to_pylist()
    return counts | {row[Derived.PERIOD]: row["rows"] for row in rows}


def item_table(items: ir.Table, events: ir.Table, rule: FeedbackRule, available: ir.Table | None) -> ir.Table:
    """The rows of ``items.parquet``: index, external id, train events, train positives, median duration in seconds.

    The median of an even number of durations is the lower of the two middle ones.

    Args:
        items: ids and indices.
        events: labeled events.
        rule: what makes an event positive.
        available: the result of ``availability``, which adds its columns of times; None = there are none.
    """
    train = events.filter(events[Derived.PERIOD] == schema.TRAIN)
    liked = rule.positive(train[Derived.LABEL].cast("float32"), train[LogColumns.DISLIKE])
    counts = train.group_by(Derived.ITEM_INDEX).aggregate(
        train_count=train.count(), train_positives=liked.fill_null(False).cast("int64").sum().cast("int64")
    )
    joined = items.left_join(counts, Derived.ITEM_INDEX).drop(f"{Derived.ITEM_INDEX}_right")
    joined = joined.left_join(_median_duration(train), Derived.ITEM_INDEX)
    if available is not None:
        joined = joined.drop(f"{Derived.ITEM_INDEX}_right").left_join(available, Derived.ITEM_INDEX)
    return joined.select(
        Derived.ITEM_INDEX,
        LogColumns.ITEM_ID,
        train_count=joined.train_count.fill_null(0),
        train_positives=joined.train_positives.fill_null(0),
        duration=(joined.median_ms.cast("float64") / 1000.0).cast("float32"),
        **{name: joined[name] for name in schema.AVAILABILITY if name in joined.columns},
    ).order_by(Derived.ITEM_INDEX)


def exposures(events: ir.Table) -> ir.Table:
    """Of each item of the train period: ``first`` and ``last`` time, number of events ``trained`` and ``later``."""
    time, is_train = events[LogColumns.TIMESTAMP], events[Derived.PERIOD] == schema.TRAIN
    found = events.group_by(Derived.ITEM_INDEX).aggregate(
        first=time.min(where=is_train),
        last=time.max(where=is_train),
        trained=is_train.cast("int64").sum(),
        later=(~is_train).cast("int64").sum(),
    )
    return found.filter(found.trained > 0)


def availability(items: ir.Table, events: ir.Table, given: ir.Table | None, idle_days: float) -> ir.Table:
    """When each item may be recommended: ``item_index``, and ``available_from`` or ``available_until`` in ms.

    An item that was shown before ``available_from`` of the item table was already available then, so its first event
    determines it. One that a held-out period shows at ``available_until`` or later was available until after that.

    Args:
        items: ids and indices.
        events: all events of kept items.
        given: has ``item_id`` and the times of the item table, null = no limit; None = it has none.
        idle_days: where the table has no ends, an item ends so long after its last event; 0 = it does not.
    """
    time, named = events[LogColumns.TIMESTAMP], () if given is None else given.columns
    # held-out events alone: an extension does not see all events of the train period
    end = time.max(where=events[Derived.PERIOD] > schema.TRAIN) + 1
    shown = events.group_by(Derived.ITEM_INDEX).aggregate(first=time.min(), last=time.max(), end=end)
    joined = items if given is None else given.inner_join(items, LogColumns.ITEM_ID)
    joined = joined.left_join(shown, Derived.ITEM_INDEX)
    settled = {
        name: ibis.ifelse(is_wrong(joined[name], joined[bound]).fill_null(False), joined[bound], joined[name])
        for name, is_wrong, bound in ((Derived.AVAILABLE_FROM, gt, "first"), (Derived.AVAILABLE_UNTIL, lt, "end"))
        if name in named
    }
    if idle_days and Derived.AVAILABLE_UNTIL not in named:
        settled[Derived.AVAILABLE_UNTIL] = joined["last"] + round(idle_days * schema.MILLISECONDS_PER_DAY)
    return joined.select(Derived.ITEM_INDEX, **settled)


def with_durations(events: ir.Table, given: ir.Table) -> ir.Table:
    """The events, where a duration is missing with that of the item.

    Args:
        events: standard events.
        given: has ``item_id`` and ``duration_ms`` of the item table.
    """
    own = Derived.DURATION_MS
    joined = events.left_join(given.select(LogColumns.ITEM_ID, of_item=given[own]), LogColumns.ITEM_ID)
    return joined.mutate(**{own: joined[own].coalesce(joined.of_item)}).select(events.columns)


def _median_duration(train: ir.Table) -> ir.Table:
    # Counts make the median exact, with memory for distinct durations instead of events.
    known = train.filter(train[Derived.DURATION_MS].notnull())
    keys = [Derived.ITEM_INDEX, Derived.DURATION_MS]
    counts = known.group_by(keys).aggregate(n=known.count())
    up_to = ibis.cumulative_window(group_by=Derived.ITEM_INDEX, order_by=Derived.DURATION_MS)
    counts = counts.mutate(at_most=counts.n.sum().over(up_to), total=counts.n.sum().over(group_by=Derived.ITEM_INDEX))
    upper = counts.filter(counts.at_most * 2 >= counts.total)
    return upper.group_by(Derived.ITEM_INDEX).aggregate(median_ms=upper[Derived.DURATION_MS].min())


def place_events(events: ir.Table, items: ir.Table, users: ir.Table) -> ir.Table:
    """Events of kept items and users, with both indices."""
    known = events.inner_join(items, LogColumns.ITEM_ID).inner_join(users, LogColumns.USER_ID)
    return known.select(*events.columns, Derived.ITEM_INDEX, Derived.USER_INDEX)


def add_positions(events: ir.Table, order: list[ir.Column]) -> ir.Table:
    """Adds ``position`` (0.. within the user) and ``request``, which is the same when later events are added.

    Only held-out events keep ``request_id``, because an extension continues from them.
    """
    user = events[Derived.USER_INDEX]
    placed = events.mutate(**{Derived.POSITION: ibis.row_number().over(group_by=user, order_by=order)})
    position, request = placed[Derived.POSITION], placed[LogColumns.REQUEST_ID]
    first = position.min().over(group_by=[placed[Derived.USER_INDEX], request])
    return name_requests(placed, first)


def name_requests(placed: ir.Table, first: ir.IntegerValue) -> ir.Table:
    """Adds ``request`` to events with their positions.

    Args:
        placed: events with ``position``.
        first: position of the first event of each event's request; used only for events with a ``request_id``.
    """
    position, request = placed[Derived.POSITION], placed[LogColumns.REQUEST_ID]
    # A request is named after its first event: user index in the upper 32 bits, position in the lower 32 bits.
    name = placed[Derived.USER_INDEX].cast("int64") * (1 << 32) + ibis.ifelse(request.isnull(), position, first)
    held_out = ibis.ifelse(placed[Derived.PERIOD] > schema.TRAIN, request, ibis.null(request.type()))
    named = placed.mutate(**{Derived.REQUEST: name.cast("int64"), LogColumns.REQUEST_ID: held_out})
    # From here on, indices replace the external ids: less data to sort and to spill.
    return named.drop(LogColumns.USER_ID, LogColumns.ITEM_ID)
