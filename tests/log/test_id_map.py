import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from recpo.log.id_map import IdMap
from recpo.log.schema import ALWAYS, NEVER
from tests.refusals import refused

IDS = st.one_of(
    st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
    st.sets(st.text(max_size=6), min_size=1, max_size=30),
)


@pytest.mark.slow
@given(ids=IDS)
def test_there_and_back(ids):
    ids = sorted(ids)
    mapping = IdMap(pa.array(ids))
    internal = mapping.to_internal(ids)
    assert internal.tolist() == list(range(1, len(ids) + 1))
    assert mapping.to_external(internal).to_pylist() == ids


def test_unknown_and_null_are_zero_and_zero_is_null():
    mapping = IdMap(pa.array([30, 10, 20], pa.int32()))
    assert mapping.to_internal(pa.array([10, 99, None, 30])).tolist() == [2, 0, 0, 1]
    assert mapping.to_internal([]).tolist() == []
    found = mapping.to_external(np.array([[3, 0], [1, 2]]))
    assert found.type == pa.int32()
    assert found.to_pylist() == [20, None, 30, 10]


def test_items_are_unlisted_outside_their_times(tmp_path):
    times = np.array([[ALWAYS, 100, 50, ALWAYS], [NEVER, NEVER, 70, 100]])
    IdMap(pa.array(["a", "b", "c", "d"]), np.array([1]), times).save(tmp_path / "items.parquet")
    items = IdMap.load(tmp_path / "items.parquet")
    assert pq.read_table(tmp_path / "items.parquet")["available_from"].to_pylist() == [None, 100, 50, None]
    expected = {None: [1], 49: [1, 2, 3], 50: [1, 2], 69: [1, 2], 70: [1, 2, 3], 99: [1, 2, 3], 100: [1, 3, 4]}
    for at, unlisted in [*expected.items(), *reversed(expected.items())]:
        assert items.unlisted(at).tolist() == unlisted, at
    assert items.unlisted(101) is items.unlisted(10_000)  # nothing is computed again before the next change
    IdMap(pa.array(["a"]), None, np.array([[ALWAYS], [NEVER]])).save(tmp_path / "items.parquet")
    assert pq.read_schema(tmp_path / "items.parquet").names == ["item_index", "item_id"]


def test_times_of_another_type_are_refused(tmp_path):
    table = pa.table({"item_index": [1], "item_id": ["a"], "available_from": ["tomorrow"]})
    pq.write_table(table, tmp_path / "items.parquet")
    with refused("wrong_file", "items.parquet"):
        IdMap.load(tmp_path / "items.parquet")


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint64(), pa.string(), pa.large_string()])
def test_the_type_survives_saving(tmp_path, kind):
    values = pa.array([7, 5, 9]).cast(kind)
    IdMap(values).save(tmp_path / "items.parquet")
    loaded = IdMap.load(tmp_path / "items.parquet")
    assert loaded.type == kind
    assert loaded.to_external(np.arange(1, 4)).equals(values)
    assert loaded.to_internal(values).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IdMap(pa.array([1, 1, 2])), ("duplicate", "item_id")),
        (lambda: IdMap(pa.array(["a", None])), ("missing_value", "item_id")),
        (lambda: IdMap(pa.array([1.5])), ("wrong_type", "item_id")),
        (lambda: IdMap(pa.array([1, 2])).to_internal(["1"]), ("wrong_type", "item_id")),
        (lambda: IdMap(pa.array(["1"])).to_internal([1]), ("wrong_type", "item_id")),
        (lambda: IdMap(pa.array([1, 2])).to_internal([1, "b"]), ("wrong_type", "item_id")),
        (lambda: IdMap(pa.array([1, 2])).to_external([3]), ("out_of_range", "item_id")),
    ],
)
def test_mistakes_are_reported(make, message):
    with refused(*message):
        make()


def test_a_file_that_is_not_an_item_table(tmp_path):
    with refused("wrong_file", "items.parquet"):
        IdMap.load(tmp_path / "items.parquet")
    pq.write_table(pa.table({"item_index": [1, 3], "item_id": [5, 6]}), tmp_path / "items.parquet")
    with refused("bad_value", "item_index"):
        IdMap.load(tmp_path / "items.parquet")
