import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from recpo.data.writing import user_blocks


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=20),
    rows=st.integers(1, 12),
)
def test_blocks_hold_whole_users_whatever_the_batches(counts, cuts, rows):
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
