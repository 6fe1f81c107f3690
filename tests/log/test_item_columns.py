"""Vectors and codes from files in all common layouts, and faults in such files."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.log.id_map import IdMap, read_rows
from tests.refusals import refused

ITEMS = IdMap(pa.array([10, 20, 30]))
NUMBERS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


def write(folder, **columns):
    pq.write_table(pa.table(columns), folder / "items.parquet")
    return folder / "items.parquet"


def vectors(file, columns=("vector",), item_id="item"):
    return read_rows(file, item_id, columns, ITEMS)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2), pa.list_(pa.float16())],
    ids=str,
)
def test_lists_of_every_kind_in_the_order_of_the_catalog(tmp_path, kind):
    numbers = [np.array(row, np.float16) for row in NUMBERS] if kind.value_type == pa.float16() else NUMBERS
    file = write(tmp_path, item=[30, 99, 10, 20], vector=pa.array(numbers, type=kind))
    rows = vectors(file)
    assert rows.values.dtype == np.float32
    assert rows.values.tolist() == [[5, 6], [7, 8], [1, 2]]
    assert rows.found.all()
    assert rows.ignored == 1


def test_one_column_for_each_dimension_and_items_that_are_not_there(tmp_path):
    file = write(tmp_path, item=[20, 10], a=[1, 2], b=[0.5, 1.5])
    rows = vectors(file, ["b", "a"])
    assert rows.values.tolist() == [[1.5, 2], [0.5, 1], [0, 0]]
    assert rows.found.tolist() == [True, True, False]


def test_a_directory_of_files(tmp_path):
    for number, item in enumerate((10, 20)):
        pq.write_table(pa.table({"item": [item], "vector": [[float(item)]]}), tmp_path / f"{number}.parquet")
    assert vectors(tmp_path).values.tolist() == [[10], [20], [0]]


@pytest.mark.parametrize(
    ("columns", "refusal"),
    [
        ({"id": [10], "vector": [[1.0]]}, ("missing_column", "item")),
        ({"item": [10], "values": [[1.0]]}, ("missing_column", "vector")),
        ({"item": [10, 20], "vector": [[1.0], [1.0, 2.0]]}, ("wrong_shape", "vector")),
        ({"item": [10], "vector": [[]]}, ("empty", "vector")),
        ({"item": [10, 20], "vector": [[1.0], [float("nan")]]}, ("bad_value", "vector")),
        ({"item": [10, 20], "vector": [[1.0], None]}, ("missing_value", "vector")),
        ({"item": [10], "vector": [[1.0, None]]}, ("missing_value", "vector")),
        ({"item": [10], "vector": ["1 2 3"]}, ("wrong_type", "vector")),
        ({"item": [10, 10], "vector": [[1.0], [2.0]]}, ("duplicate", "item")),
        ({"item": [11, 12], "vector": [[1.0], [2.0]]}, ("mismatch", "item")),
        ({"item": ["10"], "vector": [[1.0]]}, ("bad_value", "item")),
    ],
)
def test_faults_of_vectors(tmp_path, columns, refusal):
    with refused(*refusal):
        vectors(write(tmp_path, **columns))


def test_files_that_are_none(tmp_path):
    with refused("wrong_file", str(tmp_path / "nowhere.parquet")):
        vectors(tmp_path / "nowhere.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not at all")
    with refused("wrong_file", str(tmp_path / "broken.parquet")):
        vectors(tmp_path / "broken.parquet")


def codes(file, columns=("a", "b")):
    return read_rows(file, "item", columns, ITEMS, "codes")


def test_codes_are_integers_or_text_with_one_number(tmp_path):
    text = pa.array(["<a_183>", "a7", "0"], pa.large_string())
    rows = codes(write(tmp_path, item=[10, 30, 20], a=text, b=[5, 6, 7]))
    assert rows.values.tolist() == [[183, 5], [0, 7], [7, 6]]


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ([-1], ("out_of_range", "a")),
        (["<a_1_2>"], ("bad_value", "a")),
        (["none"], ("bad_value", "a")),
        (pa.array([b"a\xb4"], pa.binary()).view(pa.string()), ("bad_value", "a")),
        ([0.5], ("wrong_type", "a")),
        ([None], ("missing_value", "a")),
    ],
)
def test_faults_of_codes(tmp_path, values, refusal):
    with refused(*refusal):
        codes(write(tmp_path, item=[10], a=values), ["a"])
