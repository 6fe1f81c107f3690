import ibis
import pyarrow as pa
import pytest

from recpo.log.splits import LeaveLastOut, TemporalSplit
from tests.refusals import refused

HOUR = 3_600_000
DAY = 24 * HOUR
MIDNIGHT = 1_700_006_400_000  # 2023-11-15T00:00Z


def events(user, timestamp, request=None, item=None):
    rows = len(user)
    return ibis.memtable(
        pa.table(
            {
                "user_id": pa.array(user),
                "item_id": pa.array(item or list(range(rows))),
                "timestamp": pa.array(timestamp, pa.int64()),
                "request_id": pa.array(request or [None] * rows, pa.int64()),
                "watch_ms": pa.array([None] * rows, pa.int64()),
                "duration_ms": pa.array([None] * rows, pa.int64()),
                "dislike": pa.array([False] * rows),
                "value": pa.array([None] * rows, pa.float64()),
                "propensity": pa.array([None] * rows, pa.float64()),
                "is_random": pa.array([False] * rows),
            }
        )
    )


def periods(engine, split, table, timestamps=None):
    boundaries = split.boundaries(min(timestamps), max(timestamps), True) if timestamps else {}
    return engine.table(split.assign(table, boundaries).order_by("item_id"))["period"].to_pylist()


def test_calendar_days_and_an_event_at_the_boundary_belongs_to_the_later_period(engine):
    times = [MIDNIGHT - 1, MIDNIGHT, MIDNIGHT + DAY - 1, MIDNIGHT + DAY, MIDNIGHT + DAY + 5 * HOUR]
    table = events(["a"] * 5, times)
    assert periods(engine, TemporalSplit(), table, times) == [0, 1, 1, 2, 2]


def test_midnight_is_where_the_timezone_says():
    split = TemporalSplit(timezone="+08:00").boundaries(MIDNIGHT - 9 * DAY, MIDNIGHT + 15 * HOUR, True)
    # 15:00 UTC on the 15th is 23:00 in +08:00: the day began at 16:00 UTC the day before.
    assert split["test_start_ms"] == MIDNIGHT - 8 * HOUR
    assert split["test_start"] == "2023-11-15T00:00:00+08:00"
    split = TemporalSplit(timezone="Asia/Shanghai").boundaries(MIDNIGHT - 9 * DAY, MIDNIGHT + 17 * HOUR, True)
    assert split["test_start"] == "2023-11-16T00:00:00+08:00"


def test_explicit_boundaries():
    split = TemporalSplit(valid_start="2023-11-14T12:00:00", test_start="2023-11-15T06:00:00+06:00")
    found = split.boundaries(MIDNIGHT - 9 * DAY, MIDNIGHT + DAY, True)
    assert (found["valid_start_ms"], found["test_start_ms"]) == (MIDNIGHT - 12 * HOUR, MIDNIGHT)


@pytest.mark.parametrize(
    ("split", "has_clock", "code", "field"),
    [
        (lambda: TemporalSplit(valid_days=30), True, "bad_value", "split"),
        (lambda: TemporalSplit(test_start="2030-01-01"), True, "bad_value", "split"),
        (lambda: TemporalSplit(test_days=0), True, "out_of_range", "test_days"),
        (lambda: TemporalSplit(test_start="soon"), True, "bad_value", "test_start"),
        (lambda: TemporalSplit(timezone="Mars/Olympus"), True, "unknown_name", "timezone"),
        (lambda: TemporalSplit(), False, "conflicting_options", "time_unit"),
        (lambda: LeaveLastOut(min_history=-1), True, "out_of_range", "min_history"),
        (lambda: LeaveLastOut(valid_share=-0.1), True, "out_of_range", "valid_share"),
        (lambda: LeaveLastOut(valid_share=0.5, test_share=0.5), True, "out_of_range", "valid_share"),
    ],
)
def test_what_cannot_be_split_is_reported(split, has_clock, code, field):
    with refused(code, field):
        split().boundaries(MIDNIGHT - 5 * DAY, MIDNIGHT, has_clock)


def test_leave_last_out_by_the_stated_order(engine):
    # The two events of one time are ordered by request, then item; short histories are train throughout.
    table = events(
        ["a", "a", "a", "b", "b", "c"], [5, 9, 9, 1, 2, 7], request=[0, 2, 1, 0, 0, 0], item=[0, 1, 2, 3, 4, 5]
    )
    assert periods(engine, LeaveLastOut(), table) == [0, 2, 1, 0, 0, 0]
    assert periods(engine, LeaveLastOut(min_history=0), table) == [0, 2, 1, 1, 2, 0]
    assert periods(engine, LeaveLastOut(min_history=2), table) == [0, 0, 0, 0, 0, 0]


def test_shares_are_rounded_down_and_hold_out_at_least_one_event(engine):
    users = ["a"] * 10 + ["b"] * 3 + ["c"] * 2
    table = events(users, list(range(len(users))))
    split = LeaveLastOut(valid_share=0.25, test_share=0.1)  # of a, 2 and 1; of b, 1 and 1; c is too short
    assert periods(engine, split, table) == [*[0] * 7, 1, 1, 2, 0, 1, 2, 0, 0]
    longer = LeaveLastOut(min_history=2, valid_share=0.25, test_share=0.1)
    assert periods(engine, longer, table) == [*[0] * 7, 1, 1, 2, 0, 0, 0, 0, 0]
