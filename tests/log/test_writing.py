import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from recpo.log import writing
from recpo.log.writing import user_blocks, without_repeats, write_parquet, write_rows


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=20),
    rows=st.integers(1, 12),
)
def test_blocks_hold_whole_users_for_any_batches(counts, cuts, rows):
    users = np.repeat(np.arange(len(counts)) * 3, counts).astype(np.int32)
    table = pa.table({"user_index": users, "row": np.arange(len(users))})
    batches, start = [], 0
    while start < len(users):
        size = cuts[len(batches) % len(cuts)]
        batches += table.slice(start, size).combine_chunks().to_batches()
        start += size
    blocks = list(user_blocks(batches, rows))
    assert pa.concat_tables(blocks)["row"].to_pylist() == list(range(len(users)))
    owners = [set(block["user_index"].to_pylist()) for block in blocks]
    assert sum(map(len, owners)) == len(counts)
    for block in blocks[:-1]:
        last_user = block["user_index"].to_pylist()[-1]
        assert block.num_rows >= rows
        assert sum(user != last_user for user in block["user_index"].to_pylist()) < rows


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 1000])
@pytest.mark.parametrize("cut", [1, 30, 64, 100, 5000])
def test_a_streamed_table_has_the_bytes_of_a_whole_one(tmp_path, monkeypatch, rows, cut):
    monkeypatch.setattr(writing, "_ROW_GROUP", 64)
    rng = np.random.default_rng(0)
    ids = pa.array([f"user-{number}" for number in rng.integers(0, 10**6, rows)], pa.string())
    table = pa.table({"user_index": pa.array(np.arange(rows), pa.int32()), "user_id": ids})
    write_parquet(table, tmp_path / "whole.parquet")
    batches = [batch for start in range(0, rows, cut) for batch in table.slice(start, cut).to_batches()]
    # An engine may give wider types and more columns.
    wider = pa.schema([("more", pa.int8()), ("user_id", pa.large_string()), ("user_index", pa.int64())])
    batches = [
        pa.record_batch([pa.nulls(len(b), "int8"), b[1].cast("large_string"), b[0].cast("int64")], wider)
        for b in batches
    ]
    assert write_rows(batches, table.schema, tmp_path / "streamed.parquet") == rows
    assert (tmp_path / "whole.parquet").read_bytes() == (tmp_path / "streamed.parquet").read_bytes()


@pytest.mark.parametrize("cut", [1, 3, 100])
def test_of_sorted_rows_repeats_are_left_out_across_batches(cut):
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, 6, (60, 2)), axis=0)
    rows = np.repeat(pairs, rng.integers(1, 4, len(pairs)), axis=0)
    table = pa.table({"user_index": rows[:, 0], "item_index": rows[:, 1]})
    found = pa.Table.from_batches(without_repeats(table.to_batches(max_chunksize=cut)))
    np.testing.assert_array_equal(np.stack([column.to_numpy() for column in found.columns], 1), pairs)
