"""From raw events to a policy's inputs: order, levels, padding, counts and errors."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from recpo.base.feature_encoding import PolicyFeatures
from recpo.base.feedback import FeedbackDefinition
from recpo.log.id_map import IdMap
from recpo.serving.histories import HistoryReader, Request, ServingCounts
from tests.cutoffs import quarters
from tests.refusals import refused

T0 = 1_650_000_000_000
FEEDBACK = FeedbackDefinition(cutoffs={3: quarters(2.0, 4.0, 6.0)})
READER = HistoryReader(IdMap(pa.array(["a", "b", "c", "d", "e"])), FEEDBACK, 3, reads_timestamps=True)
NUMBERED = HistoryReader(IdMap(pa.array([10, 20, 30])), FEEDBACK, 3)


def events(*rows, **columns):
    """Events from ``(user, item, minutes)``."""
    users, items, minutes = zip(*rows, strict=True) if rows else ((), (), ())
    times = [T0 + 60_000 * minute for minute in minutes]
    return {"user_id": list(users), "item_id": list(items), "timestamp": times, **columns}


def encoded(read):
    ((_, inputs),) = read.batches(1000)
    return inputs


def test_events_are_sorted_by_user_and_time_and_ties_keep_their_order():
    read = READER.read(events(("u", "c", 5), ("v", "e", 0), ("u", "a", 1), ("u", "b", 1)))
    assert read.users.to_pylist() == ["u", "v"]
    assert encoded(read).item_ids.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert encoded(read).timestamps.tolist() == [[T0 + 60_000, T0 + 60_000, T0 + 300_000], [T0, 0, 0]]
    assert encoded(NUMBERED.read({"user_id": [1], "item_id": [20], "timestamp": [5]})).timestamps is None


@pytest.mark.parametrize(
    ("event", "level"),
    [
        ({"watch_time": 1.0}, 2),
        ({"watch_time": 2.0}, 2),  # not longer than the cutoff
        ({"watch_time": 2.001}, 6),
        ({"watch_time": 5.0}, 10),
        ({"watch_time": 60.0}, 17),
        ({"watch_time": 60.0, "dislike": True}, 1),
        ({"watch_time": 60.0, "dislike": 1}, 1),
        ({"watch_time": 60.0, "dislike": 0}, 17),
        ({"watch_time": None}, 0),
        ({"watch_time": None, "dislike": True}, 1),
        ({"watch_time": 5.0, "duration": None}, 0),
        ({"watch_time": 5.0, "duration": 0.0}, 0),
        ({"watch_time": 5.0, "duration": 100.0}, 0),  # a bucket without cutoffs
        ({}, 0),
    ],
)
def test_levels_come_from_raw_feedback(event, level):
    inputs = READER.read_request(Request([{"item_id": "b", "timestamp": T0, "duration": 10.0, **event}]))
    assert inputs.feedback.tolist() == [[level, 0, 0]]


def test_levels_are_never_taken_from_the_user():
    read = READER.read(events(("u", "a", 0), feedback=[-1], feedback_level=[9]))
    assert encoded(read).feedback.tolist() == [[0, 0, 0]]
    assert read.counts.events_without_feedback == 1


def test_histories_without_the_column_that_says_what_was_liked_are_warned_of():
    one = events(("u", "a", 0))
    of_labels = dataclasses.replace(READER, feedback=FeedbackDefinition())
    of_choices = dataclasses.replace(READER, feedback=FeedbackDefinition(every_event=True))
    for reader, column in ((READER, "watch_time"), (of_labels, "label")):
        with pytest.warns(UserWarning, match=f"no column {column}"):
            reader.read(one)
    with warnings.catch_warnings(action="error"):
        READER.read(one | {"watch_time": [None]})
        of_labels.read(one | {"label": [0.5]})
        assert encoded(of_choices.read(one)).feedback.tolist() == [[17, 0, 0]]


def test_the_recent_events_are_read_and_older_items_are_excluded_once():
    rows = [("u", item, minute) for minute, item in enumerate("abaabcde")]
    inputs = encoded(READER.read(events(*rows), exclude={"user_id": ["u", "w"], "item_id": ["b", "c"]}))
    assert inputs.item_ids.tolist() == [[3, 4, 5]]
    assert inputs.exclude.tolist() == [[1, 2]]


def test_counts_add_up():
    log = events(
        ("u", "a", 0), ("u", "?", 1), ("u", "b", 2), ("u", "c", 3), ("u", "d", 4), ("v", "!", 5),
        watch_time=[1.0, 1.0, -1.0, np.inf, np.nan, 1.0], duration=[10.0, 10.0, 10.0, -np.inf, 10.0, 10.0],
    )  # fmt: skip
    counts = READER.read(log, users=["u", "v", "new"], exclude={"user_id": ["u", "u"], "item_id": ["?", "e"]}).counts
    assert counts == ServingCounts(
        users=3,
        events=6,
        unknown_items=2,
        impossible_values=3,
        events_without_feedback=3,
        empty_histories=2,
        truncated_histories=1,
        unknown_excluded=1,
    )
    assert vars(counts + counts) == {name: 2 * number for name, number in vars(counts).items()}


def test_users_are_served_in_the_order_asked_for_and_others_do_not_count():
    log = events(("u", "a", 0), ("v", "?", 0), ("w", "b", 0))
    for users in (
        ["w", "new", "u"],
        np.array(["w", "new", "u"]),
        pd.Series(["w", "new", "u"]),
        pa.array(["w", "new", "u"]),
    ):
        read = READER.read(log, users=users)
        assert read.users.to_pylist() == ["w", "new", "u"]
        assert encoded(read).item_ids[:, 0].tolist() == [2, 0, 1]
        assert (read.counts.events, read.counts.unknown_items, read.counts.empty_histories) == (2, 0, 1)


def test_a_batch_is_a_part_of_the_whole():
    rng = np.random.default_rng(0)
    rows = [(f"u{rng.integers(9)}", "abcde?"[rng.integers(6)], int(rng.integers(50))) for _ in range(200)]
    read = READER.read(events(*rows), exclude={"user_id": ["u3", "u4", "u4"], "item_id": ["a", "b", "c"]})
    whole = encoded(read)
    for part, inputs in read.batches(2):
        assert np.array_equal(inputs.item_ids, whole.item_ids[part])
        assert np.array_equal(inputs.timestamps, whole.timestamps[part])
        for row, expected in zip(inputs.exclude, whole.exclude[part], strict=True):
            assert row[row > 0].tolist() == expected[expected > 0].tolist()


def test_times_of_any_kind_say_the_same():
    moments = [datetime.datetime(2022, 4, 15, 5, 20, tzinfo=datetime.UTC)] * 2
    ms = int(moments[0].timestamp() * 1000)
    for values in (
        pa.array([ms, ms]),
        pa.array([ms, ms]).cast(pa.timestamp("ms")),
        pa.array([ms * 1000, ms * 1000]).cast(pa.timestamp("us", "Europe/Berlin")),
        pd.Series(moments),
    ):
        read = READER.read({"user_id": [1, 1], "item_id": ["a", "b"], "timestamp": values})
        assert encoded(read).timestamps.tolist() == [[ms, ms, 0]]


def test_types_of_users_and_items_are_those_of_the_frame():
    read = NUMBERED.read(
        {"user_id": np.array([7, 8], np.int32), "item_id": np.array([10, 99], np.uint8), "timestamp": [1, 2]}
    )
    assert read.users.type == pa.int32()
    assert encoded(read).item_ids.tolist() == [[1, 0, 0], [0, 0, 0]]
    categories = pd.DataFrame(
        {"user_id": pd.Categorical(["x", "y"]), "item_id": pd.Categorical(["a", "b"]), "timestamp": [1, 2]}
    )
    assert READER.read(categories).users.to_pylist() == ["x", "y"]


def test_without_times_the_order_of_the_rows_counts_unless_the_policy_reads_times():
    frame = {"user_id": ["u"] * 3, "item_id": ["b", "a", "b"]}
    untimed, timed = (dataclasses.replace(READER, reads_timestamps=reads) for reads in (False, True))
    expected = encoded(untimed.read(frame | {"timestamp": [T0, T0 + 1, T0 + 2]}))
    assert encoded(untimed.read(frame)).item_ids.tolist() == expected.item_ids.tolist()
    with refused("missing_column", "timestamp"):
        timed.read(frame)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"user_id": None}, "missing_column"),
        ({"item_id": None}, "missing_column"),
        ({"user_id": ["u", None]}, "missing_value"),
        ({"item_id": ["a", None]}, "missing_value"),
        ({"timestamp": [T0, None]}, "missing_value"),
        ({"user_id": [[1], [2]]}, "wrong_type"),
        ({"user_id": [1.5, 2.0]}, "wrong_type"),
        ({"item_id": [1, 2]}, "wrong_type"),
        ({"item_id": [["a"], ["b"]]}, "wrong_type"),
        ({"timestamp": ["yesterday", "today"]}, "wrong_type"),
        ({"timestamp": [1.5, 2.5]}, "wrong_type"),
        ({"timestamp": [T0 // 1000, T0 // 1000]}, "out_of_range"),
        ({"timestamp": [T0 * 1000, T0 * 1000]}, "out_of_range"),
        ({"timestamp": [-1, 5]}, "out_of_range"),
        ({"watch_time": ["long", "short"]}, "wrong_type"),
        ({"dislike": ["yes", "no"]}, "wrong_type"),
        ({"dislike": [2, 0]}, "wrong_type"),
        ({"label": [5.0, 0.1]}, "out_of_range"),
        ({"label": [0.5, -0.1]}, "out_of_range"),
    ],
)
def test_faulty_histories_are_refused(change, code):
    frame = {"user_id": ["u", "v"], "item_id": ["a", "b"], "timestamp": [T0, T0]} | change
    with refused(code, *change):
        READER.read({name: values for name, values in frame.items() if values is not None})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"users": ["u", "u"]}, ("duplicate", "users")),
        ({"users": [1, 2]}, ("wrong_type", "user_id")),
        ({"users": "u"}, ("wrong_type", "users")),
        ({"users": 7}, ("wrong_type", "users")),
        ({"users": ["u", 7]}, ("wrong_type", "users")),
        ({"exclude": {"user_id": ["u"]}}, ("missing_column", "item_id")),
        ({"exclude": {"user_id": [1], "item_id": ["a"]}}, ("wrong_type", "user_id")),
        ({"exclude": {"user_id": ["u"], "item_id": [1]}}, ("wrong_type", "item_id")),
        ({"exclude": ["a"]}, ("wrong_type", "exclude")),
    ],
)
def test_faulty_users_and_exclusions_are_refused(arguments, message):
    with refused(*message):
        READER.read(events(("u", "a", 0)), **arguments)


def test_no_events_and_no_users():
    assert len(READER.read(events()).users) == 0
    assert list(READER.read(events()).batches(4)) == []
    new = encoded(READER.read(events(), users=["x", "y"], exclude={"user_id": ["y"], "item_id": ["e"]}))
    assert new.item_ids.tolist() == [[0, 0, 0]] * 2
    assert new.exclude.tolist() == [[0], [5]]
    assert READER.read_request(Request([], ["d", "?"])).exclude.tolist() == [[4]]


def of_requests(generator, ids, times):
    """Requests with events in any order, with unknown items, and with values that are absent, null or impossible."""

    def value(kinds):
        return kinds[generator.integers(len(kinds))]

    def event():
        known = {
            "item_id": value(ids),
            "timestamp": value(times),
            "watch_time": value([None, 0, 3, 5.5, -1.0, float("nan"), 1e12]),
            "duration": value([None, 10, 9.5, -3, 0.0]),
            "dislike": value([None, True, False]),
            "likes": value([None, True, False]),
        }
        return {name: known[name] for name in known if name in ("item_id", "timestamp") or generator.random() < 0.8}

    return [
        ([event() for _ in range(generator.integers(6))], [value(ids) for _ in range(generator.integers(3))])
        for _ in range(generator.integers(1, 5))
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("ids", "times"),
    [
        ([10, 20, 30, 99], [T0, T0 + 1, T0 + 2]),
        (["a", "b", "c", "?"], [T0, T0 + 1]),
        (["a", "b"], [datetime.datetime(2024, 1, day, tzinfo=datetime.UTC) for day in (1, 2)]),
        ([np.int64(30), 20], [T0]),
    ],
)
def test_requests_are_read_as_the_same_events_in_a_frame(ids, times, seed):
    of = NUMBERED if not isinstance(ids[0], str) else READER
    reader = dataclasses.replace(
        of, features=PolicyFeatures(behaviors=("likes", "shares")), reads_timestamps=bool(seed % 2)
    )
    requests = of_requests(np.random.default_rng(seed), ids, times)
    rows = [{"user_id": user, **event} for user, (history, _) in enumerate(requests) for event in history]
    names = dict.fromkeys(
        ["user_id", "item_id", "timestamp", *reader.features.behaviors, *(name for row in rows for name in row)]
    )
    excluded = [(user, item) for user, (_, items) in enumerate(requests) for item in items]
    expected = reader.read(
        {name: [row.get(name) for row in rows] for name in names},
        exclude={"user_id": [user for user, _ in excluded], "item_id": [item for _, item in excluded]},
        users=range(len(requests)),
    )
    found = reader.read_requests(list(itertools.starmap(Request, requests)))
    assert found.counts == expected.counts
    for one, other in zip(encoded(found), encoded(expected), strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


@pytest.mark.parametrize("ids", [[3, 9, 40], [40, 3, 9], [2**62, 7, -5]])
def test_a_few_ids_are_found_as_many_are(ids):
    items = IdMap(pa.array(ids))
    asked = np.array([*ids, 8, -1, 2**63 - 1, ids[0]])
    expected = [ids.index(one) + 1 if one in ids else 0 for one in asked.tolist()]
    assert items.find(asked).tolist() == expected
    assert items.find(np.tile(asked, 1000)).tolist() == expected * 1000
    assert items.find(asked[:0]).tolist() == []
    assert items.listed(np.array([3, 1])) == [ids[2], ids[0]]
