"""Tables, their blocks on the ranks, and the bytes of a block.

Blocks are combined into one tensor for checkpoints. Tables are float32, also under mixed precision. Symbols: ``W``
ranks, ``d`` the width of vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from recpo.base.errors import RecpoError

Sharding = Literal["auto", "row_wise", "table_wise", "column_wise", "data_parallel"]
TableOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]

GIB = 1 << 30
BYTES_PER_ID = 8
FLOAT = 4
#: the columns of a block must be a multiple of this (FBGEMM reads four floats at a time)
COLUMN_MULTIPLE = 4


class TableSpec(NamedTuple):
    """One table.

    Attributes:
        name: dotted module path.
        num_rows: rows, including the padding row (V + 1).
        dim: d.
        lookups: ids that a rank looks up per step; the planner weights communication with this number.
        sharding: how it is sharded.
        frozen: it has no gradient and no optimizer state.
        copies: number of frozen copies (old policy, reference), which are placed with it and looked up as often.
    """

    name: str
    num_rows: int
    dim: int
    lookups: int
    sharding: Sharding = "auto"
    frozen: bool = False
    copies: int = 0


class TableBlock(NamedTuple):
    """A rank's part of a table: ``num_rows`` rows starting with ``first_row``, and a range of columns."""

    rank: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


class Placement(NamedTuple):
    """Sharding of a table, and its blocks in the order of the ranks (``data_parallel``: a full table on each)."""

    sharding: str
    blocks: list[TableBlock]


def sharding_by_table(sharding: Sharding | dict[str, Sharding], tables: Iterable[str]) -> dict[str, Sharding]:
    """The sharding of all tables, or by name, for each of ``tables``; those that are not named are ``auto``.

    Raises:
        RecpoError: ``sharding`` names another table.
    """
    named = sharding if isinstance(sharding, dict) else dict.fromkeys(tables, sharding)
    if unknown := sorted(named.keys() - set(tables)):
        raise RecpoError(
            f"sharding names {', '.join(unknown)}; the tables are {', '.join(sorted(tables))}",
            code="unknown_name",
            field="sharding",
        )
    return {name: named.get(name, "auto") for name in tables}


def row_blocks(num_rows: int, ranks: int) -> list[tuple[int, int]]:
    """``(first row, rows)`` of every rank: blocks of ``ceil(rows / W)`` rows; the last ones may be shorter or empty."""
    height = -(-num_rows // ranks)
    starts = [min(rank * height, num_rows) for rank in range(ranks + 1)]
    return [(begin, end - begin) for begin, end in pairwise(starts)]


def row_wise_placement(num_rows: int, dim: int, ranks: int) -> Placement:
    """The row-wise blocks of a table."""
    cuts = enumerate(row_blocks(num_rows, ranks))
    return Placement("row_wise", [TableBlock(rank, first, rows, 0, dim) for rank, (first, rows) in cuts])


def block_bytes(
    rows: int, columns: int, optimizer: TableOptimizerName, *, copies: int = 0, frozen: bool = False, gradients: int = 0
) -> dict[str, int]:
    """Bytes of a block of a table in float32, by part.

    The state of the optimizer: sgd 0, rowwise_adagrad ``rows``, adagrad ``rows d``, adam ``2 rows d``.

    Args:
        rows: rows of the block.
        columns: columns of the block.
        optimizer: the optimizer of the table.
        copies: number of frozen copies.
        frozen: the block has neither gradients nor state.
        gradients: number of gradient tensors of its size in a backward pass. None if the table is only looked up. 1 if
            the exact softmax multiplies with it, 2 if it is looked up as well (the two are then added). 2 if it is
            data-parallel (the second is the all-reduced bucket).
    """
    weights = FLOAT * rows * columns
    state = {"sgd": 0, "rowwise_adagrad": FLOAT * rows, "adagrad": weights, "adam": 2 * weights}[optimizer]
    return {
        "tables": weights,
        "state of their optimizer": 0 if frozen else state,
        "their dense gradients": 0 if frozen else gradients * weights,
        "frozen copies of tables": copies * weights,
    }


def sharded_tensor(
    local: Tensor | None,
    blocks: Sequence[TableBlock],
    size: Sequence[int],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> ShardedTensor:
    """Combines the blocks of all ranks into one tensor that a distributed checkpoint can save and reshard on load.

    Args:
        local: this rank's block, not copied; None if it has none.
        blocks: the blocks of all ranks; blocks without rows are skipped.
        size: shape of the complete tensor: ``[V + 1, d]``, or ``[V + 1]`` for one number per row.
        dtype: type of the complete tensor.
        group: the ranks.
    """
    blocks = [block for block in blocks if block.num_rows]
    # torch compares the device with the block's, index included; nothing is allocated on other ranks' devices
    device = torch.device("cpu") if local is None else local.device
    metadata = [
        ShardMetadata(
            shard_offsets=[block.first_row, block.first_column][: len(size)],
            shard_sizes=[block.num_rows, block.num_columns][: len(size)],
            placement=f"rank:{block.rank}/{device}",
        )
        for block in blocks
    ]
    mine = [
        Shard(local, shard)
        for shard, block in zip(metadata, blocks, strict=True)
        if local is not None and block.rank == dist.get_rank(group)
    ]
    of_all = ShardedTensorMetadata(metadata, torch.Size(size), TensorProperties(dtype=dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, of_all, process_group=group)
