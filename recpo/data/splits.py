"""Divides a log into what a policy learns from (train), is chosen by (valid) and is judged by (test)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, ClassVar, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import ibis
import ibis.expr.types as ir

from recpo.data.events import time_order
from recpo.data.schema import TEST, TRAIN, VALID, Derived, LogColumns
from recpo.errors import RecpoError

_MILLISECOND: Final = timedelta(milliseconds=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Split(ABC):
    """Says for each event to which period it belongs; implementations are frozen dataclasses.

    Attributes:
        is_per_event: the period follows from the event alone, so that it costs nothing to find it again.
    """

    is_per_event: ClassVar[bool] = False

    @abstractmethod
    def boundaries(self, first_ms: int, last_ms: int, has_clock: bool) -> dict[str, Any]:
        """What is settled from the log's first and last time; goes into the manifest.

        Args:
            first_ms: earliest timestamp of the log.
            last_ms: latest timestamp of the log.
            has_clock: False where timestamps are bare positions (``time_unit: order``).

        Raises:
            RecpoError: the log cannot be split this way.
        """

    @abstractmethod
    def assign(self, events: ir.Table, boundaries: dict[str, Any]) -> ir.Table:
        """Adds the column ``period``: 0 train, 1 valid, 2 test."""


@dataclass(frozen=True)
class TemporalSplit(Split):
    """One moment for all users: valid is what happened in the days before the test days, test the last days.

    Days are calendar days in ``timezone``; the day of the log's last event is the last test day. An event at the very
    boundary belongs to the later period, so equal times are never separated. With explicit times the days are not used.

    Args:
        valid_days: length of the valid period in days.
        test_days: length of the test period in days.
        valid_start: ISO time at which valid begins; without an offset it is in ``timezone``.
        test_start: ISO time at which test begins; without an offset it is in ``timezone``.
        timezone: where midnight is: a UTC offset such as "+08:00", or an IANA name.
    """

    valid_days: int = 1
    test_days: int = 1
    valid_start: str | None = None
    test_start: str | None = None
    timezone: str = "+00:00"

    is_per_event: ClassVar[bool] = True

    def boundaries(self, first_ms: int, last_ms: int, has_clock: bool) -> dict[str, Any]:
        """The two moments in milliseconds since the epoch, and as ISO times in ``timezone``."""
        if not has_clock:
            raise RecpoError("split TemporalSplit needs real times, but time_unit is order: use LeaveLastOut")
        if min(self.valid_days, self.test_days) < 1:
            raise RecpoError(f"split: valid_days {self.valid_days} and test_days {self.test_days} must be at least 1")
        zone = _zone(self.timezone)
        test = self._start("test_start", zone) or _midnight(_moment(last_ms, zone), self.test_days - 1)
        valid = self._start("valid_start", zone) or test - timedelta(days=self.valid_days)
        first, last = _moment(first_ms, zone), _moment(last_ms, zone)
        if not first < valid < test <= last:
            raise RecpoError(
                f"split TemporalSplit: valid would begin at {valid.isoformat()} and test at {test.isoformat()}, but "
                f"the log runs from {first.isoformat()} to {last.isoformat()}: each period needs events; choose other "
                "valid_days and test_days, or valid_start and test_start"
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
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise RecpoError(f"split {key}: {text!r} is no ISO time such as 2024-05-01T00:00:00") from error
        return moment if moment.tzinfo else moment.replace(tzinfo=zone)


@dataclass(frozen=True)
class LeaveLastOut(Split):
    """Each user's last event is test, the one before it valid, all earlier ones train.

    Which event is last is settled by the one order of a user's events (``recpo.data.schema.TIE_RULE``), so ties in time
    do not depend on the order of the log. Other users' events may lie after a user's test event: use ``TemporalSplit``
    where that matters. The last event is taken before events of items outside the catalog are dropped.

    Args:
        min_history: least number of train events for a user to be held out; shorter histories are train throughout.
    """

    min_history: int = 1

    def boundaries(self, first_ms: int, last_ms: int, has_clock: bool) -> dict[str, Any]:
        """Nothing depends on the log."""
        if self.min_history < 0:
            raise RecpoError(f"split LeaveLastOut: min_history {self.min_history} must be at least 0")
        return {}

    def assign(self, events: ir.Table, boundaries: dict[str, Any]) -> ir.Table:
        """Counts every user's events from the last one."""
        user = events[LogColumns.USER_ID]
        from_end = ibis.row_number().over(group_by=user, order_by=time_order(events, newest_first=True))
        total = events.count().over(group_by=user)
        held_out = total >= self.min_history + 2
        period = ibis.cases((held_out & (from_end == 0), TEST), (held_out & (from_end == 1), VALID), else_=TRAIN)
        return events.mutate(**{Derived.PERIOD: period.cast("int8")})


def _zone(name: str) -> tzinfo:
    try:
        offset = datetime.strptime(name.replace(":", ""), "%z").utcoffset()
        return timezone(offset or timedelta(0))
    except ValueError:
        pass
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise RecpoError(f"split timezone: {name!r} is neither a UTC offset such as +08:00 nor an IANA name") from error


def _moment(milliseconds: int, zone: tzinfo) -> datetime:
    return (_EPOCH + milliseconds * _MILLISECOND).astimezone(zone)


def _milliseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MILLISECOND


def _midnight(moment: datetime, days_earlier: int) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=days_earlier)
