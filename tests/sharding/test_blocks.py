"""Tables in blocks, described as one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

from recpo.sharding.lookup_tables import sharded_tensor
from recpo.sharding.memory import TableBlock, row_blocks
from tests.sharding.ranks import Ranks

DIM = 8


@given(st.integers(0, 40), st.integers(1, 9))
def test_row_blocks_follow_each_other_and_are_the_table(rows: int, ranks: int) -> None:
    blocks = row_blocks(rows, ranks)
    assert len(blocks) == ranks
    assert [first for first, _ in blocks] == [sum(count for _, count in blocks[:rank]) for rank in range(ranks)]
    assert sum(count for _, count in blocks) == rows
    assert max(count for _, count in blocks) == -(-rows // ranks)


@st.composite
def layouts(draw: Any, ranks: int) -> tuple[int, list[TableBlock]]:
    """Rows, and the blocks they lie in."""
    rows = draw(st.integers(1, 12))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
    cuts = [(start, stop - start) for start, stop in zip([0, *ends], [*ends, rows], strict=True)]
    kind = draw(st.sampled_from(["rows", "columns", "one rank", "rows in another order"]))
    if kind == "columns":
        width = DIM // ranks
        blocks = [TableBlock(rank, 0, rows, rank * width, width) for rank in range(ranks)]
    elif kind == "one rank":
        blocks = [TableBlock(draw(st.integers(0, ranks - 1)), 0, rows, 0, DIM)]
    else:
        order = range(ranks) if kind == "rows" else draw(st.permutations(range(ranks)))
        blocks = [TableBlock(rank, *cut, 0, DIM) for rank, cut in zip(order, cuts, strict=True)]
    return rows, draw(st.permutations(blocks))


def block_of(whole: torch.Tensor, block: TableBlock) -> torch.Tensor:
    rows = slice(block.first_row, block.first_row + block.num_rows)
    return whole[rows, block.first_column : block.first_column + block.num_columns].contiguous()


def check(rows: int, blocks: list[TableBlock]) -> None:
    rank = dist.get_rank()
    whole = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rows))
    own = next((block for block in blocks if block.rank == rank), None)
    local = whole[:0] if own is None else block_of(whole, own)
    assert dist.group.WORLD is not None
    made = sharded_tensor(local if own else None, blocks, whole.shape, whole.dtype, dist.group.WORLD)
    assert made.size() == whole.shape
    places = {tuple(shard.shard_offsets + shard.shard_sizes) for shard in made.metadata().shards_metadata}
    assert places == {(b.first_row, b.first_column, b.num_rows, b.num_columns) for b in blocks if b.num_rows}
    held = [shard.tensor for shard in made.local_shards()]
    assert len(held) == (own is not None and own.num_rows > 0)
    assert all(tensor.data_ptr() == local.data_ptr() for tensor in held)  # not a copy: it is read into


@pytest.mark.slow
@given(layouts(2))
def test_any_blocks_are_one_tensor(two: Ranks, layout: Any) -> None:
    two.run(check, *layout)
