"""Divides a log into the events that train a policy (train), select it (valid) and evaluate it (test).

This module has the split rules, and selects the rows of each period's shards and of the serving histories.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, ClassVar, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import ibis
import ibis.expr.types as ir
import numpy as np

from recpo.base.errors import NonNegativeFloat, NonNegativeInt, PositiveInt, RecpoError, validate_ranges
from recpo.log.events import more_columns, time_order
from recpo.log.feature_columns import BEHAVIOR, CONTEXT
from recpo.log.schema import (
    EVENT_SCHEMA,
    MILLISECONDS_PER_DAY,
    PERIODS,
    TEST,
    TIE_RULE,
    TRAIN,
    VALID,
    Derived,
    LogColumns,
)

_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


#: Rule of ``idle_days``: days that are tried, events expected of idle items, and at most this share of them happened.
_IDLE_DAYS: Final = (1, 2, 3, 5, 7, 10, 14, 21, 30)
_LEAST_EXPECTED, _COME_BACK = 300, 0.003
#: Then fewer days are tried, with at most so many times as much as of other items. Not less: nobody comes at night.
_FEWER_DAYS: Final = sorted({0.5, 0.75, 1.5, *_IDLE_DAYS}, reverse=True)
_LEAST_EXPECTED_BETWEEN, _MOSTLY_ENDED = 100, 0.25
_OFTENER: Final = 1.6


def idle_days(
    first: np.ndarray, last: np.ndarray, counts: np.ndarray, later: np.ndarray, begin: int, end: int
) -> float:
    """After how many days without an event items have ended, as news and offers do; 0 = they do not end.

    An item with ``n`` events since its first one, ``t`` days before the held-out periods of ``h`` days, has ``n h / t``
    events in them if it lasts, however long ago its last one was. Of the items that were idle for some days, nearly
    none of these happen where items end; where items only fade, some do. If items end, most have ended before so many
    days: the result is the fewest days after which at most a quarter as much happens as of items that were less idle.

    Args:
        first: ``[V]`` time of the first event of each item of the train period, in ms.
        last: time of its last event of the train period.
        counts: number of its events in the train period.
        later: number of its events afterwards.
        begin: end of the train period.
        end: the last time of the log.
    """
    expected = counts * (end - begin) / np.maximum(begin - first, MILLISECONDS_PER_DAY)
    idle = (begin - last) / MILLISECONDS_PER_DAY

    def share(chosen: np.ndarray, least: float) -> float | None:
        """Of the events that are expected of some items, how many happened; None = too few are expected."""
        wanted = float(expected[chosen].sum())
        return float(later[chosen].sum()) / wanted if wanted >= least else None

    shares = {days: share(idle > days, _LEAST_EXPECTED) for days in _IDLE_DAYS}
    ended: float = next((days for days, back in shares.items() if back is not None and back <= _COME_BACK), 0)
    for days in [days for days in _FEWER_DAYS if days < ended]:
        back, usual = share((idle > days) & (idle <= ended), _LEAST_EXPECTED_BETWEEN), share(idle <= days, 1)
        if usual is None or (back is not None and back > _MOSTLY_ENDED * usual):
            break
        ended = ended if back is None else days
    return ended


def chosen_again(counts: Mapping[str, Any]) -> bool:
    """Whether people choose items of their past: most positives of the validation period are of such items.

    Where offers are logged, an item may be there again because it was offered again. Then people must come back to what
    they had: they like such offers more than 1.6 times as often as those of new items, by two standard errors of the
    logarithm, ``sqrt(1 / positives of past items + 1 / positives of new ones)``. Or nine tenths must be of past items,
    which leaves little to learn from new ones, and liked at least as often as others: people do not tire.

    Args:
        counts: of the manifest.
    """
    of_past, again, splits = counts["repeated_positives"], counts["repeated_targets"], counts["splits"]
    positives, targets = splits["valid"]["positive"], splits["valid"]["targets"]
    if 2 * of_past <= positives:
        return False
    if all(splits[period]["positive"] == splits[period]["targets"] for period in PERIODS):
        return True
    new = positives - of_past
    least = _OFTENER * math.exp(2 * math.sqrt(1 / max(1, of_past) + 1 / max(1, new)))
    come_back = of_past * (targets - again) > least * new * again
    return come_back or (10 * of_past > 9 * positives and of_past * targets >= positives * again)


class Split(ABC):
    """Assigns each event to a period. Implementations are frozen dataclasses.

    Attributes:
        is_per_event: the period depends only on the event itself, so that computing it again is cheap.
        holds_out: there are events of the valid and of the test period.
    """

    is_per_event: ClassVar[bool] = False
    holds_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate_ranges(self)

    @abstractmethod
    def boundaries(self, first_ms: int, last_ms: int, has_clock: bool) -> dict[str, Any]:
        """The values that follow from the log's first and last time; they are written into the manifest.

        Args:
            first_ms: earliest timestamp of the log.
            last_ms: latest timestamp of the log.
            has_clock: False if timestamps are positions (``time_unit: order`` or ``none``).

        Raises:
            RecpoError: the log cannot be split this way.
        """

    @abstractmethod
    def assign(self, events: ir.Table, boundaries: dict[str, Any]) -> ir.Table:
        """Adds the column ``period``: 0 train, 1 valid, 2 test."""


@dataclass(frozen=True)
class TemporalSplit(Split):
    """Two points in time for all users: the test period is the last days, the valid period the days before them.

    Days are calendar days in ``timezone``; the day of the log's last event is the last test day. An event exactly at a
    boundary belongs to the later period, so equal times are never separated. If explicit times are given, the numbers
    of days are not used.

    Args:
        valid_days: length of the valid period in days.
        test_days: length of the test period in days.
        valid_start: ISO time at which the valid period starts; without an offset, it is in ``timezone``.
        test_start: ISO time at which the test period starts; without an offset, it is in ``timezone``.
        timezone: determines midnight: a UTC offset such as "+08:00", or an IANA name.
    """

    valid_days: PositiveInt = 1
    test_days: PositiveInt = 1
    valid_start: str | None = None
    test_start: str | None = None
    timezone: str = "+00:00"

    is_per_event: ClassVar[bool] = True

    def boundaries(self, first_ms: int, last_ms: int, has_clock: bool) -> dict[str, Any]:
        """The two times in milliseconds since the epoch, and as ISO times in ``timezone``."""
        if not has_clock:
            raise RecpoError(
                "split TemporalSplit needs real times, but by time_unit the log has none: use LeaveLastOut",
                code="conflicting_options",
                field="time_unit",
            )
        zone = _zone(self.timezone)
        midnight = _moment(last_ms, zone).replace(hour=0, minute=0, second=0, microsecond=0)
        test = self._start("test_start", zone) or midnight - timedelta(days=self.test_days - 1)
        valid = self._start("valid_start", zone) or test - timedelta(days=self.valid_days)
        first, last = _moment(first_ms, zone), _moment(last_ms, zone)
        if not first < valid < test <= last:
            raise RecpoError(
                f"split TemporalSplit: valid would begin at {valid.isoformat()} and test at {test.isoformat()}, but "
                f"the log runs from {first.isoformat()} to {last.isoformat()}: each period needs events; choose other "
                "valid_days and test_days, or valid_start and test_start",
                code="bad_value",
                field="split",
            )
        return {
            "valid_start": valid.isoformat(),
            "valid_start_ms": _milliseconds(valid),
            "test_start": test.isoformat(),
            "test_start_ms": _milliseconds(test),
        }

    def assign(self, events: ir.Table, boundaries: dict[str, Any]) -> ir.Table:
        """Compares every timestamp with the two boundaries."""
        time = events[LogColumns.TIMESTAMP]
        period = ibis.cases(
            (time >= boundaries["test_start_ms"], TEST), (time >= boundaries["valid_start_ms"], VALID), else_=TRAIN
        )
        return events.mutate(**{Derived.PERIOD: period.cast("int8")})

    def _start(self, key: str, zone: tzinfo) -> datetime | None:
        text = getattr(self, key)
        if text is None:
            return None
        return _iso_time(key, text, zone)


@dataclass(frozen=True)
class LeaveLastOut(Split):
    """Each user's last event is test, the previous one valid, and all earlier ones train; or shares of their events.

    The last event is determined by the fixed order of a user's events (``recpo.log.schema.TIE_RULE``), so ties in time
    do not depend on the order of the log. Events of other users may be later than a user's test event; use
    ``TemporalSplit`` if that matters. The last event is selected before events of items outside the catalog are
    dropped.

    Args:
        min_history: minimum number of train events of a held-out user; users with shorter histories are only in train.
        valid_share: share of a user's events that is valid, rounded down, and at least one event. Metrics that compare
            what a user liked with what the same user did not like need several.
        test_share: the same for the last events, which are test.
    """

    min_history: NonNegativeInt = 1
    valid_share: NonNegativeFloat = 0.0
    test_share: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.valid_share + self.test_share < 1:
            shares = f"valid_share {self.valid_share:g} and test_share {self.test_share:g}"
            raise RecpoError(
                f"split LeaveLastOut: {shares} leave nothing to train on: choose shares whose sum is below 1",
                code="out_of_range",
                field="valid_share",
            )

    def boundaries(self, first_ms: int, last_ms: int, has_clock: bool) -> dict[str, Any]:
        """Does nothing: the split does not depend on the log."""
        return {}

    def assign(self, events: ir.Table, boundaries: dict[str, Any]) -> ir.Table:
        """Counts every user's events from the last one backward."""
        user = events[LogColumns.USER_ID]
        from_end = ibis.row_number().over(group_by=user, order_by=time_order(events, newest_first=True))
        total = events.count().over(group_by=user)
        valid, test = (
            ibis.greatest((total.cast("float64") * share).floor().cast("int64"), ibis.literal(1, "int64"))
            for share in (self.valid_share, self.test_share)
        )
        held_out = total >= self.min_history + valid + test
        is_test, is_valid = held_out & (from_end < test), held_out & (from_end < test + valid)
        period = ibis.cases((is_test, TEST), (is_valid, VALID), else_=TRAIN)
        return events.mutate(**{Derived.PERIOD: period.cast("int8")})


@dataclass(frozen=True)
class TrainOnly(Split):
    """Every event is train: for a policy that is trained again on the whole log, after its options were chosen.

    Nothing is held out, so such data cannot select or evaluate: training validates nothing
    (``trainer.limit_val_batches: 0``), and temperatures and the options of factors are given.
    """

    holds_out: ClassVar[bool] = False

    def boundaries(self, first_ms: int, last_ms: int, has_clock: bool) -> dict[str, Any]:
        """Does nothing: there is one period."""
        return {}

    def assign(self, events: ir.Table, boundaries: dict[str, Any]) -> ir.Table:
        """Every event is in the train period."""
        return events.mutate(**{Derived.PERIOD: ibis.literal(TRAIN, "int8")})


def period_rows(events: ir.Table, period: int, max_context: int, has_context: bool) -> ir.Table:
    """The rows of one period for ``recpo.log.writing.write_shards``, sorted by user and time.

    They have the columns of ``EVENT_SCHEMA`` except the feedback level; times in seconds are float64 here.

    Train: every event, all of them targets. Valid and test, and train in an extension: for each user with an event in
    the period, the last ``max_context`` earlier events as context, followed by the period's events as targets.

    Args:
        events: labeled events with ``position`` and ``period``.
        period: 0, 1 or 2.
        max_context: number of context events.
        has_context: whether there are context events.
    """
    if not has_context:
        chosen = events.filter(events[Derived.PERIOD] == TRAIN)
    else:
        targets = events.filter(events[Derived.PERIOD] == period)
        begins = targets.group_by(Derived.USER_INDEX).aggregate(begin=targets[Derived.POSITION].min())
        near = events.inner_join(begins, Derived.USER_INDEX)
        chosen = near.filter(near[Derived.PERIOD] <= period, near[Derived.POSITION] >= near.begin - max_context)
    order = [chosen[Derived.USER_INDEX], chosen[Derived.POSITION]]
    return chosen.order_by(order).select(**_layout(chosen, period))


def past_items(events: ir.Table, period: int, earlier: ir.Table | None = None) -> ir.Table:
    """The items that the users of a held-out period had before it: ``PAST_SCHEMA``, sorted pairs with repeats.

    ``recpo.log.writing.without_repeats`` drops the repeats: cheaper than a hash table of pairs.

    Args:
        events: events with their period.
        period: 1 or 2.
        earlier: pairs of ``PAST_SCHEMA`` to include.
    """
    user, item = Derived.USER_INDEX, Derived.ITEM_INDEX
    held_out = events.filter(events[Derived.PERIOD] == period).select(user).distinct()
    before = events.filter(events[Derived.PERIOD] < period).select(user, item)
    before = (before if earlier is None else before.union(earlier.select(user, item))).semi_join(held_out, user)
    return before.order_by([user, item])


def train_items(events: ir.Table) -> ir.Table:
    """The items that users had in the train period: ``PAST_SCHEMA``, sorted pairs with repeats, as ``past_items``."""
    user, item = Derived.USER_INDEX, Derived.ITEM_INDEX
    return events.filter(events[Derived.PERIOD] == TRAIN).select(user, item).order_by([user, item])


def outside_events(events: ir.Table, items: ir.Table, users: ir.Table) -> ir.Table:
    """The standard events of the held-out periods whose item or user is not kept.

    Args:
        events: all standard events with their period.
        items: kept items.
        users: kept users.
    """
    later, item, user = events.filter(events[Derived.PERIOD] > TRAIN), LogColumns.ITEM_ID, LogColumns.USER_ID
    keys = items.select(kept_item=items[item]), users.select(kept_user=users[user])
    joined = later.left_join(keys[0], later[item] == keys[0]["kept_item"])
    joined = joined.left_join(keys[1], joined[user] == keys[1]["kept_user"])
    outside = joined.filter(joined["kept_item"].isnull() | joined["kept_user"].isnull())
    return outside.select(user, *TIE_RULE, *more_columns(events))


def held_out_events(outside: ir.Table, placed: ir.Table, items: ir.Table, users: ir.Table) -> ir.Table:
    """The standard events of the held-out periods (``held_out_schema``), in one order.

    Args:
        outside: those of items and users that are not kept (``outside_events``).
        placed: the others, with their labels and requests.
        items: kept items.
        users: kept users.
    """
    later = placed.filter(placed[Derived.PERIOD] > TRAIN)
    kept = later.inner_join(items, Derived.ITEM_INDEX).inner_join(users, Derived.USER_INDEX)
    names = outside.columns
    unknown = {Derived.LABEL: ibis.null("float64"), Derived.REQUEST: ibis.null("int64")}
    rows = kept.select(*names, Derived.LABEL, Derived.REQUEST, **{Derived.IS_PLACED: ibis.literal(True)}).union(
        outside.select(*names, **unknown, **{Derived.IS_PLACED: ibis.literal(False)})
    )
    return rows.order_by([rows[name].asc(nulls_first=True) for name in names])


def recent_events(
    events: ir.Table, items: ir.Table, users: ir.Table, max_context: int, behaviors: Iterable[str] = ()
) -> ir.Table:
    """Each user's last ``max_context`` events with ``user_index`` and ``position``, for ``as_histories``."""
    lengths = events.group_by(Derived.USER_INDEX).aggregate(length=events[Derived.POSITION].max() + 1)
    near = events.inner_join(lengths, Derived.USER_INDEX)
    near = near.filter(near[Derived.POSITION] >= near.length - max_context)
    named = near.inner_join(items, Derived.ITEM_INDEX).inner_join(users, Derived.USER_INDEX)
    seconds = {
        LogColumns.WATCH_TIME: named[Derived.WATCH_MS].cast("float64") / 1000.0,
        LogColumns.DURATION: named[Derived.DURATION_MS].cast("float64") / 1000.0,
    }
    names = [LogColumns.USER_ID, LogColumns.ITEM_ID, LogColumns.TIMESTAMP, *seconds, LogColumns.DISLIKE, Derived.LABEL]
    names += [name for name in more_columns(named) if name.startswith(CONTEXT)]
    names += [Derived.USER_INDEX, Derived.POSITION]
    flags = {BEHAVIOR + name: (named[Derived.BEHAVIORS] & (1 << bit)) != 0 for bit, name in enumerate(behaviors)}
    return named.select(**{name: seconds[name] if name in seconds else named[name] for name in names}, **flags)


def as_histories(rows: ir.Table) -> ir.Table:
    """The raw events (``history_schema``) of ``recent_events``, sorted by user and time."""
    rows = rows.order_by([rows[Derived.USER_INDEX], rows[Derived.POSITION]])
    rows = rows.drop(Derived.USER_INDEX, Derived.POSITION)
    prefixed = [name for name in rows.columns if name.startswith((BEHAVIOR, CONTEXT))]
    return rows.rename({name.removeprefix(BEHAVIOR).removeprefix(CONTEXT): name for name in prefixed})


def _layout(events: ir.Table, period: int) -> dict[str, ir.Value]:
    nan = float("nan")
    made = {
        Derived.LABEL: events[Derived.LABEL].fill_null(nan).cast("float32"),
        LogColumns.WATCH_TIME: (events[Derived.WATCH_MS].cast("float64") / 1000.0).fill_null(nan),
        LogColumns.DURATION: (events[Derived.DURATION_MS].cast("float64") / 1000.0).fill_null(nan),
        LogColumns.PROPENSITY: events[LogColumns.PROPENSITY].fill_null(nan).cast("float32"),
        Derived.IS_TARGET: events[Derived.PERIOD] == period,
    }
    names = [name for name in (*EVENT_SCHEMA.names, *more_columns(events)) if name != Derived.FEEDBACK]
    return {name: made[name] if name in made else events[name] for name in names}


def _zone(name: str) -> tzinfo:
    try:
        offset = datetime.strptime(name.replace(":", ""), "%z").utcoffset()
        return timezone(offset or timedelta(0))
    except ValueError:
        pass
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise RecpoError(
            f"split timezone: {name!r} is neither a UTC offset such as +08:00 nor an IANA name",
            code="unknown_name",
            field="timezone",
        ) from error


def _iso_time(key: str, text: str, zone: tzinfo) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise RecpoError(
            f"{key}: {text!r} is not an ISO time such as 2024-05-01T00:00:00", code="bad_value", field=key
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=zone)


def iso_ms(key: str, text: str | None) -> int | None:
    """The ISO time of the option ``key`` in milliseconds since 1970, without an offset in UTC; None = no time."""
    return None if text is None else _milliseconds(_iso_time(key, text, UTC))


def _moment(milliseconds: int, zone: tzinfo) -> datetime:
    return (_EPOCH + milliseconds * _MILLISECOND).astimezone(zone)


def _milliseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MILLISECOND
