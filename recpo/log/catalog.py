"""Selects the items and users to keep, and gives them internal indices."""

from __future__ import annotations

from typing import Any, Literal

import ibis
import ibis.expr.types as ir

from recpo.base.feedback import FeedbackRule
from recpo.log.engine import Engine
from recpo.log.schema import PERIODS, TRAIN, Derived, LogColumns

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
    trained = (events[Derived.PERIOD] == TRAIN).cast("int64").sum()
    items = events.group_by(LogColumns.ITEM_ID).aggregate(trained=trained, total=events.count())
    counted = (items.total if scope == "log" else items.trained) >= max(1, min_events)
    if scope == "items" and listed is not None:
        table = listed.name("listed").as_table()
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
        trained=(period == TRAIN).cast("int64").sum(), first=period.min()
    )
    users = users.filter(users.trained >= min_events)
    index = ibis.row_number().over(order_by=[users["first"], users[LogColumns.USER_ID]]).cast("int32")
    return users.select(LogColumns.USER_ID, index.name(Derived.USER_INDEX), train_count=users.trained)


def count_dropped(engine: Engine, before: ir.Table, after: ir.Table, reason: str) -> dict[str, int]:
    """Number of events per period that are in ``before`` but not in ``after``, keyed by reason. Zeros are omitted."""
    first, second = (_by_period(engine, events) for events in (before, after))
    lost = {period: first[number] - second[number] for number, period in enumerate(PERIODS)}
    return {f"{reason} ({period})": count for period, count in lost.items() if count}


def _by_period(engine: Engine, events: ir.Table) -> dict[int, int]:
    counts: dict[int, int] = dict.fromkeys(range(len(PERIODS)), 0)
    rows: list[dict[str, Any]] = engine.table(
        events.group_by(Derived.PERIOD).aggregate(rows=events.count())
    ).to_pylist()
    return counts | {row[Derived.PERIOD]: row["rows"] for row in rows}


def item_table(items: ir.Table, events: ir.Table, rule: FeedbackRule, available: ir.Table | None = None) -> ir.Table:
    """The rows of ``items.parquet``: index, external id, train events, train positives, median duration in seconds.

    The median of an even number of durations is the lower of the two middle ones.

    Args:
        items: ids and indices.
        events: labeled events.
        rule: what makes an event positive.
        available: the result of ``available_from``, which adds a column ``available_from``; None = no such column.
    """
    train = events.filter(events[Derived.PERIOD] == TRAIN)
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
        **({} if available is None else {Derived.AVAILABLE_FROM: joined[Derived.AVAILABLE_FROM]}),
    ).order_by(Derived.ITEM_INDEX)


def available_from(items: ir.Table, events: ir.Table, given: ir.Table) -> ir.Table:
    """The time from which each item may be recommended: ``item_index``, ``available_from`` in ms, and ``earlier``.

    An item that was shown before the time in the item table was already available then: its first event determines
    ``available_from``, and ``earlier`` is true.

    Args:
        items: ids and indices.
        events: all events of kept items.
        given: ``item_id`` and ``available_from`` of the item table, null = always.
    """
    known = given.filter(given[Derived.AVAILABLE_FROM].notnull()).inner_join(items, LogColumns.ITEM_ID)
    shown = events.group_by(Derived.ITEM_INDEX).aggregate(shown=events[LogColumns.TIMESTAMP].min())
    joined = known.left_join(shown, Derived.ITEM_INDEX)
    time = joined[Derived.AVAILABLE_FROM]
    earlier = (joined["shown"] < time).fill_null(False)
    return joined.select(
        Derived.ITEM_INDEX,
        ibis.ifelse(earlier, joined["shown"], time).name(Derived.AVAILABLE_FROM),
        earlier=earlier,
    )


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
    held_out = ibis.ifelse(placed[Derived.PERIOD] > TRAIN, request, ibis.null(request.type()))
    named = placed.mutate(**{Derived.REQUEST: name.cast("int64"), LogColumns.REQUEST_ID: held_out})
    # From here on, indices replace the external ids: less data to sort and to spill.
    return named.drop(LogColumns.USER_ID, LogColumns.ITEM_ID)
