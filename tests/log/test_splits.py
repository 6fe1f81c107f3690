from functools import partial

import ibis
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import recpo
from recpo.evaluation.candidates import candidates_of
from recpo.log.splits import LeaveLastOut, TemporalSplit, idle_days
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


def turnover(kind, days=40, items=1500):
    """Each item may have two events a day: forever, for five days, or more and more rarely, down to a few."""
    random = np.random.default_rng(1)
    born, begin = random.uniform(0, days, items), days - 4
    times = [np.arange(start, days, 0.5) for start in born]
    age = [time - start for time, start in zip(times, born, strict=True)]
    rare = partial(np.full_like, fill_value=0.03)
    chance = {"lasts": lambda old: 20 * rare(old), "ends": lambda old: old < 5}
    chance["fades"] = lambda old: np.maximum(np.exp(-old / 3), rare(old))
    kept = [time[random.random(len(time)) < chance[kind](old)] for time, old in zip(times, age, strict=True)]
    before = [time[time < begin] for time in kept]
    known = [number for number, time in enumerate(before) if len(time)]
    first, last = (np.array([edge(before[number]) for number in known]) * DAY for edge in (min, max))
    counts = np.array([len(before[number]) for number in known])
    later = np.array([len(kept[number]) for number in known]) - counts
    return idle_days(first, last, counts, later, begin * DAY, days * DAY)


def test_items_end_where_none_comes_back_and_neither_where_they_last_nor_where_they_fade():
    assert turnover("ends") in (0.5, 0.75, 1)
    assert turnover("lasts") == 0
    assert turnover("fades") == 0


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 0, 2.5])
def test_what_has_ended_is_no_candidate(given, tmp_path):
    """Every item is shown for five days."""
    random, days = np.random.default_rng(2), 30
    born = random.integers(-5, days, 400)
    day = np.repeat(np.arange(days), 200)
    item = np.array([random.choice(np.flatnonzero((born <= now) & (now < born + 5))) for now in day])
    log = pd.DataFrame({"user_id": random.integers(0, 60, len(day)), "item_id": item})
    log["timestamp"] = 1_700_000_000_000 - 1_700_000_000_000 % DAY + day * DAY
    log["timestamp"] += random.integers(0, DAY, len(day))
    split = TemporalSplit(valid_days=2, test_days=2)
    options = {"label": recpo.EveryEvent(), "split": split, "idle_days": given, "progress": False}
    data = recpo.prepare(log.sort_values("timestamp"), tmp_path / "prepared", **options)
    expected = given if given is not None else data.idle_days
    assert data.idle_days == expected
    assert given is not None or 0.5 <= expected <= 3
    found, begin = candidates_of(data, "test", None), data.manifest["boundaries"]["test_start_ms"]
    if not expected:
        assert found is None
        return
    last = log.groupby("item_id")["timestamp"].max() + round(expected * DAY)
    ids = data.item_ids().to_external(np.arange(1, data.num_items + 1)).to_pylist()
    assert found.is_candidate[1:].tolist() == [bool(last[one] > begin) for one in ids]
    # what has not ended yet is listed at any later time
    end = data.manifest["boundaries"]["last_ms"]
    gone = [place for place, one in enumerate(ids, 1) if last[one] <= end]
    assert data.item_ids().unlisted(end + 100 * DAY).tolist() == gone
    extended = recpo.prepare(later(log), tmp_path / "extended", extends=data, progress=False)
    assert extended.idle_days == expected
    whole = recpo.prepare(pd.concat([log, later(log)]), tmp_path / "whole", **{**options, "idle_days": expected})
    both = (one.table("items.parquet").to_pandas().set_index("item_id")["available_until"] for one in (extended, whole))
    pd.testing.assert_series_equal(*(one.sort_index() for one in both))


def later(log):
    """The last day again, a day later."""
    last = log[log["timestamp"] // DAY == log["timestamp"].max() // DAY]
    return last.assign(timestamp=last["timestamp"] + DAY)
