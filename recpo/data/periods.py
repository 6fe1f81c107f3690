"""Which rows the shards of a period and the serving histories hold."""

from __future__ import annotations

import ibis
import ibis.expr.types as ir

from recpo.data.schema import EVENT_SCHEMA, TRAIN, Columns, Events


def period_rows(events: ir.Table, period: int, max_context: int) -> ir.Table:
    """The rows of ``EVENT_SCHEMA`` of one period, sorted by user and time.

    Train: every event, all of them targets. Valid and test: for each user with an event in the period, the last
    ``max_context`` earlier events as context, then the period's events as targets.

    Args:
        events: labelled events with ``position`` and ``period``.
        period: 0, 1 or 2.
        max_context: number of context events.
    """
    if period == TRAIN:
        chosen = events.filter(events[Events.PERIOD] == TRAIN)
    else:
        targets = events.filter(events[Events.PERIOD] == period)
        begins = targets.group_by(Events.USER_INDEX).aggregate(begin=targets[Events.POSITION].min())
        near = events.inner_join(begins, Events.USER_INDEX)
        chosen = near.filter(near[Events.PERIOD] <= period, near[Events.POSITION] >= near.begin - max_context)
    order = [chosen[Events.USER_INDEX], chosen[Events.POSITION]]
    return chosen.order_by(order).select(**_layout(chosen, period))


def last_events(events: ir.Table, items: ir.Table, users: ir.Table, max_context: int) -> ir.Table:
    """Each user's last ``max_context`` events with external ids, sorted by user and time."""
    lengths = events.group_by(Events.USER_INDEX).aggregate(length=events[Events.POSITION].max() + 1)
    near = events.inner_join(lengths, Events.USER_INDEX)
    near = near.filter(near[Events.POSITION] >= near.length - max_context)
    kept = [Events.USER_INDEX, Events.ITEM_INDEX, Events.POSITION, Events.FEEDBACK, Columns.TIMESTAMP]
    near = near.select(*kept)
    named = near.inner_join(items, Events.ITEM_INDEX).inner_join(users, Events.USER_INDEX)
    columns = [Events.USER_INDEX, Columns.USER_ID, Columns.ITEM_ID, Events.FEEDBACK, Columns.TIMESTAMP]
    return named.order_by([Events.USER_INDEX, Events.POSITION]).select(*columns)


def _layout(events: ir.Table, period: int) -> dict[str, ir.Value]:
    nan = float("nan")
    made = {
        Events.WATCH_QUANTILE: events[Events.WATCH_QUANTILE].fill_null(nan).cast("float32"),
        Columns.WATCH_TIME: (events[Events.WATCH_MS].cast("float64") / 1000.0).fill_null(nan).cast("float32"),
        Columns.DURATION: (events[Events.DURATION_MS].cast("float64") / 1000.0).fill_null(nan).cast("float32"),
        Columns.PROPENSITY: events[Columns.PROPENSITY].fill_null(nan).cast("float32"),
        Events.IS_TARGET: ibis.literal(True) if period == TRAIN else events[Events.PERIOD] == period,
    }
    return {name: made[name] if name in made else events[name] for name in EVENT_SCHEMA.names}
