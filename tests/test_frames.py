"""Every kind of frame is read as the same table; other objects raise an error with their type."""

import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.base.frames import flag_column, id_column, number_column, read_frame, require_columns, time_column, to_arrow
from tests.refusals import refused

COLUMNS = {"user_id": ["a", "b"], "item_id": [3, 1], "watch_time": [1.5, None]}


class Foreign:
    """A frame of a library that recpo does not know: all it has is the Arrow C stream."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def _frames():
    table = pa.table(COLUMNS)
    return {
        "dict": COLUMNS,
        "pandas": pd.DataFrame(COLUMNS),
        "pyarrow": table,
        "batch": table.to_batches()[0],
        "reader": pa.RecordBatchReader.from_batches(table.schema, table.to_batches()),
        "foreign": Foreign(table),
    }


@pytest.mark.parametrize("kind", _frames())
def test_every_kind_of_frame_gives_the_same_columns(kind):
    table = to_arrow(_frames()[kind])
    assert table.column_names == list(COLUMNS)
    assert table.to_pylist() == pa.table(COLUMNS).to_pylist()


def test_a_selection_of_pandas_rows_brings_no_index_column_and_a_named_index_is_a_column():
    frame = pd.DataFrame(COLUMNS)
    assert to_arrow(frame.iloc[[1]]).column_names == list(COLUMNS)
    assert set(to_arrow(frame.set_index("user_id")).column_names) == set(COLUMNS)


def test_categories_and_views_become_plain_text():
    table = pa.table(
        {"c": pa.array(["x", "y", "x"]).dictionary_encode(), "v": pa.array(["x", "y", "z"], pa.string_view())}
    )
    plain = to_arrow(Foreign(table))
    assert [str(field.type) for field in plain.schema] == ["string", "large_string"]
    assert plain.column("c").to_pylist() == ["x", "y", "x"]


@pytest.mark.parametrize("value", [3, "a.parquet", [1, 2], None])
def test_other_objects_than_frames_are_refused_with_their_type(value):
    with refused("wrong_type", "histories"):
        to_arrow(value, "histories")


def test_mixed_types_unequal_lengths_and_repeated_names_are_refused():
    with refused("wrong_type", "log"):
        to_arrow(pd.DataFrame({"user_id": [1, "a"]}), "log")
    with refused("wrong_type", "log"):
        to_arrow({"user_id": [1, 2], "item_id": [1]}, "log")
    with refused("duplicate", "a"):
        to_arrow(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]))


def test_a_path_is_read_and_a_wrong_one_is_named(tmp_path):
    pq.write_table(pa.table(COLUMNS), tmp_path / "[x].parquet")
    assert read_frame(tmp_path / "[x].parquet").num_rows == 2
    (tmp_path / "text.parquet").write_text("no parquet", encoding="utf-8")
    for name in ("text.parquet", "absent.parquet"):
        with refused("wrong_file"):
            read_frame(tmp_path / name)


def test_missing_columns_are_named_with_those_that_are_there():
    with refused("missing_column", "timestamp"):
        require_columns(pa.table(COLUMNS), ["user_id", "timestamp"], "log")


def test_of_many_columns_some_are_named():
    wide = pa.table({f"item_{number}": [1.0] for number in range(500)})
    with pytest.raises(recpo.RecpoError, match=r"item_19 and 480 more$"):
        require_columns(wide, ["user_id"], "log")


def test_ids_are_integers_or_strings_without_nulls():
    assert id_column(to_arrow(COLUMNS), "user_id").to_pylist() == ["a", "b"]
    with refused("wrong_type", "user_id"):
        id_column(to_arrow({"user_id": [1.5]}), "user_id")
    with refused("missing_value", "user_id"):
        id_column(to_arrow({"user_id": ["a", None]}), "user_id")


def test_numbers_flags_and_times():
    table = to_arrow(
        {
            "n": pa.array([1, None]),
            "f": pa.array([1, 0]),
            "b": pa.array([None, True]),
            "ms": pa.array([1500, 0]),
            "t": [datetime.datetime(1970, 1, 1, 0, 0, 1, 500_000), datetime.datetime(1970, 1, 1)],
            "z": pa.array([1500, 0], pa.timestamp("ms", "+08:00")),
            "text": ["a", "b"],
        }
    )
    np.testing.assert_array_equal(number_column(table, "n"), [1, np.nan])
    assert number_column(table, "absent") is None
    assert flag_column(table, "absent") is None
    np.testing.assert_array_equal(flag_column(table, "f"), [True, False])
    np.testing.assert_array_equal(flag_column(table, "b"), [False, True])
    for name in ("ms", "t", "z"):
        np.testing.assert_array_equal(time_column(table, name), [1500, 0])
    for read in (number_column, flag_column, time_column):
        with refused("wrong_type", "text"):
            read(table, "text", "log")
    with refused("wrong_type", "f"):
        flag_column(to_arrow({"f": [2]}), "f")


def test_an_empty_frame_has_its_columns():
    table = to_arrow(pd.DataFrame({"user_id": [], "item_id": [], "timestamp": []}).astype("int64"))
    assert table.num_rows == 0
    assert len(id_column(table, "user_id")) == 0 == len(time_column(table, "timestamp"))
