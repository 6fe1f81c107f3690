"""Which rows the shards of a period and the serving histories hold."""

from __future__ import annotations

import ibis
import ibis.expr.types as ir

from recpo.data.schema import EVENT_SCHEMA, TRAIN, Derived, LogColumns


def period_rows(events: ir.Table, period: int, max_context: int) -> ir.Table:
    """The rows of one period for ``recpo.data.writing.write_shards``, sorted by user and time.

    They have the columns of ``EVENT_SCHEMA`` but the feedback level; times in seconds are float64 here.

    Train: every event, all of them targets. Valid and test: for each user with an event in the period, the last
    ``max_context`` earlier events as context, then the period's events as targets.

    Args:
        events: labeled events with ``position`` and ``period``.
        period: 0, 1 or 2.
        max_context: number of context events.
    """
    if period == TRAIN:
        chosen = events.filter(events[Derived.PERIOD] == TRAIN)
    else:
        targets = events.filter(events[Derived.PERIOD] == period)
        begins = targets.group_by(Derived.USER_INDEX).aggregate(begin=targets[Derived.POSITION].min())
        near = events.inner_join(begins, Derived.USER_INDEX)
        chosen = near.filter(near[Derived.PERIOD] <= period, near[Derived.POSITION] >= near.begin - max_context)
    order = [chosen[Derived.USER_INDEX], chosen[Derived.POSITION]]
    return chosen.order_by(order).select(**_layout(chosen, period))


def last_events(events: ir.Table, items: ir.Table, users: ir.Table, max_context: int) -> ir.Table:
    """Each user's last ``max_context`` events as raw events (``history_schema``), sorted by user and time."""
    lengths = events.group_by(Derived.USER_INDEX).aggregate(length=events[Derived.POSITION].max() + 1)
    near = events.inner_join(lengths, Derived.USER_INDEX)
    near = near.filter(near[Derived.POSITION] >= near.length - max_context)
    named = near.inner_join(items, Derived.ITEM_INDEX).inner_join(users, Derived.USER_INDEX)
    order = [named[Derived.USER_INDEX], named[Derived.POSITION]]
    seconds = {
        LogColumns.WATCH_TIME: named[Derived.WATCH_MS].cast("float64") / 1000.0,
        LogColumns.DURATION: named[Derived.DURATION_MS].cast("float64") / 1000.0,
    }
    names = [LogColumns.USER_ID, LogColumns.ITEM_ID, LogColumns.TIMESTAMP, *seconds, LogColumns.DISLIKE, Derived.LABEL]
    return named.order_by(order).select(**{name: seconds[name] if name in seconds else named[name] for name in names})


def _layout(events: ir.Table, period: int) -> dict[str, ir.Value]:
    nan = float("nan")
    made = {
        Derived.LABEL: events[Derived.LABEL].fill_null(nan).cast("float32"),
        LogColumns.WATCH_TIME: (events[Derived.WATCH_MS].cast("float64") / 1000.0).fill_null(nan),
        LogColumns.DURATION: (events[Derived.DURATION_MS].cast("float64") / 1000.0).fill_null(nan),
        LogColumns.PROPENSITY: events[LogColumns.PROPENSITY].fill_null(nan).cast("float32"),
        Derived.IS_TARGET: ibis.literal(True) if period == TRAIN else events[Derived.PERIOD] == period,
    }
    return {
        name: made[name] if name in made else events[name] for name in EVENT_SCHEMA.names if name != Derived.FEEDBACK
    }
