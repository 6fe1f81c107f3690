"""Any input as histories gives a result whose counts add up, or one message; never a traceback."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from recpo.base.errors import RecpoError
from recpo.base.feedback import FeedbackDefinition
from recpo.log.id_map import IdMap
from recpo.policies.blocks import HSTUBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.histories import HistoryReader, Request
from recpo.serving.recommending import milliseconds, recommend_lists, score_candidates
from recpo.serving.saved_policy import PolicyRuntime
from tests.cutoffs import quarters

NUM_ITEMS, K = 9, 3
NOW = 1_650_000_000_000
WORDS = ["", "a", "b", "ü", "日本", "\U0001f600", "a\nb", " ", "0", "[/x]", "nan", "None", "a" * 300]
CATALOG = ["a", "b", "ü", "日本", "\U0001f600", "a\nb", "0", "[/x]", ""]

torch.manual_seed(0)
RUNTIME = PolicyRuntime(
    CatalogSoftmaxPolicy(NUM_ITEMS, dim=4, heads=1, layers=1, max_history=4, block=HSTUBlock).eval()
)
READERS = {
    "watched": FeedbackDefinition(cutoffs={3: quarters(2.0, 4.0, 6.0)}),
    "labeled": FeedbackDefinition(),
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 6),
    st.floats(),
    st.sampled_from(WORDS),
    st.binary(max_size=3),
    st.datetimes(),
    st.dates(),
    st.timedeltas(),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-99, max_value=99),
    st.lists(st.integers(0, 3), max_size=2),
    st.just({"nested": 1}),
    st.just(object()),
)
fitting = {
    "user_id": st.sampled_from(WORDS),
    "item_id": st.sampled_from(WORDS),
    "timestamp": st.integers(NOW, NOW + 10**9),
    "watch_time": st.one_of(st.none(), st.floats(), st.floats(0, 20)),
    "duration": st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 10.0, 1e300, -1.0, 5e-324])),
    "dislike": st.one_of(st.none(), st.booleans()),
    "label": st.one_of(st.none(), st.floats(0, 1)),
    "feedback": st.integers(-9, 9),
}


@st.composite
def columns(draw, names, least=0):
    """Columns that mostly fit, one or two of another kind, or missing, or of another length."""
    rows = draw(st.integers(least, 12))
    chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=max(0, len(names) - 2)))
    wrong = draw(st.one_of(st.just(set()), st.just(set()), st.sets(st.sampled_from(names), max_size=2)))
    table = {}
    for name in chosen:
        values = draw(st.lists(scalars if name in wrong else fitting[name], min_size=rows, max_size=rows))
        if name in wrong and draw(st.booleans()):
            values = values[: draw(st.integers(0, rows))]
        table[name] = values
    return table


def frames():
    return columns(tuple(fitting))


def reader(kind):
    return HistoryReader(IdMap(pa.array(CATALOG)), READERS[kind], 4, reads_timestamps=True)


def lists_of(kind, histories, **options):
    """What ``Bundle.recommend`` does with a frame."""
    read = reader(kind)
    return recommend_lists(RUNTIME, read.items, read.read(histories, at=milliseconds(None), **options), k=K)


def assert_adds_up(table, served):
    counts = served.counts
    lists = served.table.to_pandas()
    assert counts.events == len(table["user_id"])
    assert counts.users == len(dict.fromkeys(table["user_id"]))
    assert 0 <= counts.unknown_items <= counts.events
    assert 0 <= counts.events_without_feedback <= counts.events - counts.unknown_items
    assert counts.empty_histories <= counts.users
    assert counts.impossible_values <= 2 * counts.events
    assert list(dict.fromkeys(lists["user_id"])) == list(dict.fromkeys(table["user_id"]))
    assert np.isfinite(lists["score"]).all()
    seen = set(zip(table["user_id"], table["item_id"], strict=True))
    assert not seen & set(zip(lists["user_id"], lists["item_id"], strict=True))
    assert not lists.duplicated(["user_id", "item_id"]).any()


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table=frames(), kind=st.sampled_from(sorted(READERS)))
def test_any_frame_is_answered_or_refused(table, kind):
    try:
        served = lists_of(kind, table)
    except RecpoError:
        return
    assert_adds_up(table, served)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    histories=columns(("user_id", "item_id", "timestamp")),
    exclude=columns(("user_id", "item_id")),
    users=st.one_of(st.none(), scalars, st.lists(st.sampled_from(WORDS), max_size=5), st.lists(scalars, max_size=3)),
)
def test_any_exclusion_and_any_users_are_answered_or_refused(histories, exclude, users):
    try:
        served = lists_of("watched", histories, exclude=exclude, users=users)
    except RecpoError:
        return
    lists = served.table.to_pandas()
    barred = set(zip(exclude["user_id"], exclude["item_id"], strict=True))
    assert not barred & set(zip(lists["user_id"], lists["item_id"], strict=True))
    expected = list(dict.fromkeys(histories["user_id"])) if users is None else list(users)
    assert served.counts.users == len(expected)
    assert [user for user in expected if user in set(lists["user_id"])] == list(dict.fromkeys(lists["user_id"]))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories=columns(("user_id", "item_id", "timestamp")), candidates=columns(("user_id", "item_id")))
def test_any_candidates_are_scored_or_refused(histories, candidates):
    try:
        scored = score_candidates(RUNTIME, reader("watched"), histories, candidates)
    except RecpoError:
        return
    frame = scored.table.to_pandas()
    assert frame["item_id"].tolist() == candidates["item_id"]
    assert frame["score"].isna().tolist() == [item not in CATALOG for item in candidates["item_id"]]
    assert scored.counts.unknown_candidates == frame["score"].isna().sum()


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(st.dictionaries(st.sampled_from([*fitting, "x"]), scalars, max_size=4), max_size=4),
    exclude=st.lists(scalars, max_size=3),
)
def test_any_request_is_read_or_refused(events, exclude):
    try:
        encoded = reader("watched").read_request(Request(events, exclude))
    except RecpoError:
        return
    RUNTIME.recommend(encoded, K)


@pytest.mark.parametrize(
    "histories",
    [None, 3, "histories.parquet", b"x", [], [{"user_id": 1}], np.zeros(3), {}, {"user_id": 1}, {1: [2]}, object()],
)
def test_other_objects_than_frames_are_refused(histories):
    with pytest.raises(RecpoError):
        lists_of("watched", histories)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.5, 2.5]),
        pa.array([True, False]),
        pa.array([b"a", b"b"]),
        pa.array([[1], [2]]),
        pa.array([{"a": 1}, {"a": 2}]),
        pa.array([None, None]),
        pa.array([decimal.Decimal("1.5")] * 2),
        pa.array([datetime.timedelta(1)] * 2),
        pa.array([2**63, 2**64 - 1], pa.uint64()),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array(["a", "b"], pa.string_view()),
        pa.array(["1", "2"], pa.large_string()),
        pa.array([1, 2], pa.duration("s")),
        pa.array([datetime.time(1)] * 2),
        pa.array([10**18, 2], pa.timestamp("s")),
        pa.array([1, 2], pa.date64()),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [*fitting, "extra"])
def test_any_type_of_any_column_is_answered_or_refused(name, column):
    table = {"user_id": ["a", "b"], "item_id": ["a", "b"], "timestamp": [NOW, NOW], name: column}
    try:
        lists_of("watched", pa.table(table))
    except RecpoError as error:
        message = str(error)
    else:
        message = name
    assert name in message
    assert "Traceback" not in message
    assert "\n" not in message
