"""Which items and users are kept, and their internal indices."""

from __future__ import annotations

from typing import Any, Literal

import ibis
import ibis.expr.types as ir

from recpo.data.engine import Engine
from recpo.data.schema import PERIODS, TRAIN, Derived, LogColumns
from recpo.feedback import FeedbackRule

CatalogScope = Literal["train", "log"]


def item_indices(events: ir.Table, scope: CatalogScope, min_events: int) -> ir.Table:
    """``item_id`` and ``item_index`` 1..V: items of the train period by external id, then (scope "log") later ones.

    Args:
        events: standard events with their period.
        scope: "train" counts events of the train period, so that nothing is known of the future; "log" counts all.
        min_events: least number of counted events of an item.
    """
    trained = (events[Derived.PERIOD] == TRAIN).cast("int64").sum()
    items = events.group_by(LogColumns.ITEM_ID).aggregate(trained=trained, total=events.count())
    items = items.filter((items.trained if scope == "train" else items.total) >= max(1, min_events))
    order = [(items.trained == 0).cast("int8"), items[LogColumns.ITEM_ID]]
    index = (ibis.row_number().over(order_by=order) + 1).cast("int32")
    return items.select(LogColumns.ITEM_ID, index.name(Derived.ITEM_INDEX))


def user_indices(events: ir.Table, min_events: int) -> ir.Table:
    """``user_id`` and ``user_index`` 0..U-1: by the period of the first event, then by external id.

    Users of the train period come first, so their indices do not depend on who comes later.

    Args:
        events: events of kept items.
        min_events: least number of train events of a user; 0 keeps users who first appear later.
    """
    period = events[Derived.PERIOD]
    users = events.group_by(LogColumns.USER_ID).aggregate(
        trained=(period == TRAIN).cast("int64").sum(), first=period.min()
    )
    users = users.filter(users.trained >= min_events)
    index = ibis.row_number().over(order_by=[users["first"], users[LogColumns.USER_ID]]).cast("int32")
    return users.select(LogColumns.USER_ID, index.name(Derived.USER_INDEX))


def count_dropped(engine: Engine, before: ir.Table, after: ir.Table, reason: str) -> dict[str, int]:
    """Events by period that are in ``before`` and not in ``after``, keyed by reason; zeros are left out."""
    first, second = (_by_period(engine, events) for events in (before, after))
    lost = {period: first[number] - second[number] for number, period in enumerate(PERIODS)}
    return {f"{reason} ({period})": count for period, count in lost.items() if count}


def _by_period(engine: Engine, events: ir.Table) -> dict[int, int]:
    counts: dict[int, int] = dict.fromkeys(range(len(PERIODS)), 0)
    rows: list[dict[str, Any]] = engine.table(
        events.group_by(Derived.PERIOD).aggregate(rows=events.count())
    ).to_pylist()
    return counts | {row[Derived.PERIOD]: row["rows"] for row in rows}


def item_table(items: ir.Table, events: ir.Table, rule: FeedbackRule) -> ir.Table:
    """``items.parquet``: index, external id, train events, train positives, median duration in seconds.

    The median of an even number of durations is the lower of the two middle ones.
    """
    train = events.filter(events[Derived.PERIOD] == TRAIN)
    liked = rule.positive(train[Derived.LABEL].cast("float32"), train[LogColumns.DISLIKE])
    counts = train.group_by(Derived.ITEM_INDEX).aggregate(
        train_count=train.count(), train_positives=liked.fill_null(False).cast("int64").sum().cast("int64")
    )
    joined = items.left_join(counts, Derived.ITEM_INDEX).drop(f"{Derived.ITEM_INDEX}_right")
    joined = joined.left_join(_median_duration(train), Derived.ITEM_INDEX)
    return joined.select(
        Derived.ITEM_INDEX,
        LogColumns.ITEM_ID,
        train_count=joined.train_count.fill_null(0),
        train_positives=joined.train_positives.fill_null(0),
        duration=(joined.median_ms.cast("float64") / 1000.0).cast("float32"),
    ).order_by(Derived.ITEM_INDEX)


def _median_duration(train: ir.Table) -> ir.Table:
    # Through counts: exact, and bounded by the number of distinct durations instead of events.
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
    """Adds ``position`` (0.. within the user) and ``request``, which is the same when later events are added."""
    user = events[Derived.USER_INDEX]
    placed = events.mutate(**{Derived.POSITION: ibis.row_number().over(group_by=user, order_by=order)})
    position, request = placed[Derived.POSITION], placed[LogColumns.REQUEST_ID]
    first = position.min().over(group_by=[placed[Derived.USER_INDEX], request])
    # A request is named after its first event: user index in the upper, position in the lower 32 bits.
    name = placed[Derived.USER_INDEX].cast("int64") * (1 << 32) + ibis.ifelse(request.isnull(), position, first)
    named = placed.mutate(**{Derived.REQUEST: name.cast("int64")})
    # The indices stand for the external ids from here on; less to sort and to spill.
    return named.drop(LogColumns.USER_ID, LogColumns.ITEM_ID, LogColumns.REQUEST_ID)
