"""Vectors and codes from files in all common layouts, and faults in such files."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.base.errors import RecpoError
from recpo.items.columns import read_codes, read_vectors

ITEMS = {10: 1, 20: 2, 30: 3}
NUMBERS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


def to_internal(values):
    if not pa.types.is_integer(values.type):
        raise RecpoError(f"item ids of this catalog are int64, got {values.type}: cast them")
    return np.array([ITEMS.get(value, 0) for value in values.to_pylist()], dtype=np.int64)


def write(folder, **columns):
    pq.write_table(pa.table(columns), folder / "items.parquet")
    return folder / "items.parquet"


def vectors(file, columns=("vector",), item_id="item"):
    return read_vectors(file, item_id, columns, to_internal, 3)


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
    ("columns", "message"),
    [
        ({"id": [10], "vector": [[1.0]]}, "has no column item; it has id, vector"),
        ({"item": [10], "values": [[1.0]]}, "has no column vector; it has item, values"),
        ({"item": [10, 20], "vector": [[1.0], [1.0, 2.0]]}, "column vector: vectors have unequal lengths, 1 and 2"),
        ({"item": [10], "vector": [[]]}, "column vector: the vectors are empty"),
        ({"item": [10, 20], "vector": [[1.0], [float("nan")]]}, "nan or infinite values, the first is that of item 20"),
        ({"item": [10, 20], "vector": [[1.0], None]}, "column vector: 1 values are missing"),
        ({"item": [10], "vector": [[1.0, None]]}, "column vector: 1 values are missing"),
        ({"item": [10], "vector": ["1 2 3"]}, "column vector: expected numbers or lists of numbers, found string"),
        ({"item": [10, 10], "vector": [[1.0], [2.0]]}, "item 10 occurs twice in column item"),
        ({"item": [11, 12], "vector": [[1.0], [2.0]]}, "none of its 2 rows names an item of the catalog"),
        ({"item": ["10"], "vector": [[1.0]]}, "column item: item ids of this catalog are int64, got string"),
    ],
)
def test_faults_of_vectors(tmp_path, columns, message):
    with pytest.raises(RecpoError, match=message):
        vectors(write(tmp_path, **columns))


def test_files_that_are_none(tmp_path):
    with pytest.raises(RecpoError, match=r"nowhere.* cannot be read as Parquet"):
        vectors(tmp_path / "nowhere.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(RecpoError, match="cannot be read as Parquet"):
        vectors(tmp_path / "broken.parquet")


def codes(file, columns=("a", "b")):
    return read_codes(file, "item", columns, to_internal, 3)


def test_codes_are_integers_or_text_with_one_number(tmp_path):
    text = pa.array(["<a_183>", "a7", "0"], pa.large_string())
    rows = codes(write(tmp_path, item=[10, 30, 20], a=text, b=[5, 6, 7]))
    assert rows.values.tolist() == [[183, 5], [0, 7], [7, 6]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1], "column a: codes count from 0, found -1"),
        (["<a_1_2>"], "column a: expected text with one number, such as <a_183>, found <a_1_2>"),
        (["none"], "expected text with one number"),
        (
            pa.array([b"a\xb4"], pa.binary()).view(pa.string()),
            "expected text with one number, .* found a\N{REPLACEMENT CHARACTER}",
        ),
        ([0.5], "column a: expected integers, or text such as <a_183>, found double"),
        ([None], "column a: 1 values are missing"),
    ],
)
def test_faults_of_codes(tmp_path, values, message):
    with pytest.raises(RecpoError, match=message):
        codes(write(tmp_path, item=[10], a=values), ["a"])
