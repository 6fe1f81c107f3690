"""Raw behaviors, user features and context give the same inputs in serving as in batches of the same events."""

import numpy as np
import pyarrow as pa
import pytest

from recpo.base.feature_encoding import PolicyFeatures, by_source, decoded
from recpo.base.features import Reads
from recpo.batches.slates import HeldOutBatches, HeldOutHistories, Rank
from recpo.serving.histories import HistoryReader, Request
from tests.log.test_features import item_rows, prepare, rich_log, user_rows
from tests.refusals import refused

LENGTH = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("served") / "out")


@pytest.fixture(scope="module")
def reader(data):
    parts = {side: data.fitted_features(side) for side in ("user", "context")}
    features = PolicyFeatures(**parts, behaviors=data.behaviors)
    return HistoryReader(data.item_ids(), data.feedback, LENGTH, features=features)


def raw_history(data, period_start):
    """The log before a time, as a server's client has it: standard names."""
    log = rich_log().filter(pa.compute.less(rich_log()["timestamp"], period_start))
    names = {"is_like": "like", "is_share": "share"}
    return log.rename_columns([names.get(name, name) for name in log.column_names])


def test_a_served_history_is_that_of_the_held_out_batch(data, reader):
    start = data.manifest["boundaries"]["test_start_ms"]
    history, ids = raw_history(data, start), data.table("users.parquet")["user_id"].to_pylist()
    (batch,) = HeldOutBatches(data, "test", LENGTH, 512, Rank(), reads=Reads(True, True, True))
    expected = batch.feedback.histories
    asked = [ids[user] for user in batch.user_ids.tolist()]
    # the context of now, out of the log: that of the first event of the period
    later = rich_log().filter(pa.compute.greater_equal(rich_log()["timestamp"], start)).to_pylist()
    first = {}
    for row in later:
        if row["item_id"] in data.item_ids()._external.to_pylist():
            first.setdefault(row["user_id"], row)
    now = pa.table({name: [first[user][name] for user in asked] for name in ("user_id", "surface", "hour")})
    read = reader.read(history, users=asked, user_features=user_rows(), context=now)
    ((_, found),) = read.batches(len(asked))
    lengths = expected.lengths.numpy()
    assert (found.item_ids != 0).sum(1).tolist() == lengths.tolist()
    for row, length in enumerate(lengths):
        assert found.item_ids[row, :length].tolist() == expected.item_ids[row, :length].tolist()
        assert found.behaviors[row, :length].tolist() == expected.behaviors[row, :length].tolist()
        assert (
            found.context.codes[row, : length + 1, 0].tolist() == expected.context.codes[row, : length + 1, 0].tolist()
        )
        np.testing.assert_array_equal(
            found.context.numbers[row, : length + 1], expected.context.numbers[row, : length + 1].numpy()
        )
        assert not found.context.codes[row, length + 1 :].any()
    assert found.user.codes.tolist() == expected.user.codes.tolist()
    np.testing.assert_array_equal(found.user.numbers, expected.user.numbers.numpy())


def test_requests_without_features_and_with_unknown_values(data, reader):
    item = data.item_ids()._external[0].as_py()
    event = {"item_id": item, "timestamp": 1_700_100_000_000, "share": True, "surface": "search"}
    ((_, found),) = reader.read_requests(
        [
            Request([event], user={"country": "de", "age": 30}, context={"surface": "moon", "hour": None}),
            Request([], user={"country": "atlantis"}),
        ]
    ).batches(2)
    assert found.behaviors[:, 0].tolist() == [0b10, 0]
    assert found.user.codes[:, 0].tolist() == [data.vocabulary("user", "country").to_pylist().index("de") + 2, 1]
    assert np.isnan(found.user.numbers[:, 0]).tolist() == [False, True]
    search = data.vocabulary("context", "surface").to_pylist().index("search") + 2
    assert found.context.codes[:, :2, 0].tolist() == [[search, 1], [0, 0]]
    ((_, bare),) = reader.read_requests([Request([event])]).batches(1)
    assert bare.user.codes.tolist() == [[0]]
    assert bare.context.codes[0, :, 0].tolist() == [search] + [0] * LENGTH
    plain = HistoryReader(data.item_ids(), data.feedback, LENGTH).read_request(Request([event]))
    assert (plain.behaviors, plain.user, plain.context) == (None, None, None)


def test_what_a_feature_cannot_be_is_refused(reader):
    now = {"user_id": [0], "surface": [None], "hour": [None]}
    event = {"item_id": [1], "timestamp": [1], "like": [False], "share": [None], **now}
    for frame, code, field in (
        ({"user_id": [0, 0], "country": ["de", "us"], "age": [1, 2]}, "duplicate", "user_id"),
        ({"user_id": [0], "country": [3], "age": [1]}, "mismatch", "country"),
        ({"user_id": [0], "country": ["de"], "age": ["old"]}, "wrong_type", "age"),
        ({"user_id": [0], "country": ["de"], "age": [float("inf")]}, "bad_value", "age"),
    ):
        with refused(code, field):
            reader.read(event, user_features=frame, context=now)


def test_raw_events_of_held_out_users_encode_to_what_batches_hold(data, reader):
    """What ``recpo compare`` hands over: codes decoded to values, and read by the reader."""
    raw = HeldOutHistories(data, "test", Reads(True, True, True))
    (batch,) = HeldOutBatches(data, "test", LENGTH, 512, Rank(), reads=Reads(True, True, True))
    expected, users = batch.feedback.histories, batch.user_ids.numpy()
    people, now = raw.user_features(users), raw.requests(users)
    ((_, found),) = reader.read(raw.events(users), users=users, user_features=people, context=now).batches(len(users))
    kept = np.arange(LENGTH + 1) <= expected.lengths.numpy()[:, None]
    assert (found.behaviors * kept[:, :-1]).tolist() == expected.behaviors.numpy().tolist()
    assert found.context.codes[kept].tolist() == expected.context.codes.numpy()[kept].tolist()
    np.testing.assert_allclose(found.context.numbers[kept], expected.context.numbers.numpy()[kept], atol=1e-6)
    assert found.user.codes.tolist() == expected.user.codes.tolist()
    np.testing.assert_allclose(found.user.numbers, expected.user.numbers.numpy(), atol=1e-6)


def test_every_kind_of_feature_is_decoded_to_values_that_encode_to_it(data):
    fitted = data.fitted_features("item")
    encoded = fitted.read(item_rows(), "items")
    again = fitted.read(pa.table(by_source(fitted, decoded(fitted, encoded))), "items")
    assert again.codes.tolist() == encoded.codes.tolist()
    assert [one.tolist() for one in again.lists] == [one.tolist() for one in encoded.lists]
    np.testing.assert_allclose(again.numbers, encoded.numbers, atol=1e-5)
    np.testing.assert_array_equal(again.vectors[0], encoded.vectors[0])
