"""Costs of sharded tables, in bytes of memory per rank and bytes sent between ranks. This module has only formulas.

Symbols: ``W`` ranks, ``d`` the width of vectors, ``L`` ids that a rank looks up per step, ``N`` states that it scores.
The exchange of a step is the number of bytes that a rank *sends* to other ranks, averaged over the ranks; data that
stays on a rank costs nothing. Tables and everything exchanged for them are float32 and int64, also under mixed
precision.

Blocks of a table on the ranks: combined into one tensor for checkpoints, or redistributed into other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

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
        frozen: it has no gradient and no optimizer state.
        copy_of: name of the table that this table copies; both are placed on the same ranks.
    """

    name: str
    num_rows: int
    dim: int
    lookups: int
    frozen: bool = False
    copy_of: str | None = None


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


class Links(NamedTuple):
    """Bandwidths in bytes per second that one rank sees. The defaults are those of torchrec's planner.

    Attributes:
        within_node: to a rank on the same node.
        between_nodes: to a rank on another node.
    """

    within_node: float = 600 * GIB
    between_nodes: float = 12.5 * GIB


class Exchange(NamedTuple):
    """Bytes that a rank sends in a step.

    Attributes:
        ids: ids of the rows that it looks up on other ranks.
        forward: vectors, states and partial sums of the forward pass.
        backward: gradients.
    """

    ids: float = 0.0
    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.ids + self.forward + self.backward


# ---------------------------------------------------------------- tables
def columns_can_be_split(dim: int, ranks: int) -> bool:
    """Whether ``d`` columns can be split into ``W`` equal blocks whose width is a multiple of 4."""
    return dim % (COLUMN_MULTIPLE * ranks) == 0


def row_blocks(num_rows: int, ranks: int) -> list[tuple[int, int]]:
    """``(first row, rows)`` of every rank: blocks of ``ceil(rows / W)`` rows; the last ones may be shorter or empty."""
    height = -(-num_rows // ranks)
    starts = [min(rank * height, num_rows) for rank in range(ranks + 1)]
    return [(begin, end - begin) for begin, end in pairwise(starts)]


def row_wise_placement(num_rows: int, dim: int, ranks: int) -> Placement:
    """The row-wise blocks of a table."""
    cuts = enumerate(row_blocks(num_rows, ranks))
    return Placement("row_wise", [TableBlock(rank, first, rows, 0, dim) for rank, (first, rows) in cuts])


def state_bytes(rows: int, columns: int, optimizer: TableOptimizerName) -> int:
    """Optimizer state of a block in float32: sgd 0, rowwise_adagrad ``rows``, adagrad ``rows d``, adam ``2 rows d``."""
    floats = {"sgd": 0, "rowwise_adagrad": rows, "adagrad": rows * columns, "adam": 2 * rows * columns}
    return FLOAT * floats[optimizer]


def block_bytes(
    rows: int, columns: int, optimizer: TableOptimizerName, *, copies: int = 0, frozen: bool = False, gradients: int = 0
) -> int:
    """Bytes of a block of a table: ``4 rows d (1 + copies)`` for weights, plus optimizer state and dense gradients.

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
    size = FLOAT * rows * columns * (1 + copies)
    return size if frozen else size + state_bytes(rows, columns, optimizer) + gradients * FLOAT * rows * columns


# ---------------------------------------------------------------- exchange
def all_reduce_bytes(size: float, ranks: int) -> float:
    """``2 (W - 1) / W`` of the tensor: a reduce-scatter and an all-gather over a ring."""
    return 2 * (ranks - 1) / ranks * size


def lookup_exchange(
    lookups: float, num_rows: int, dim: int, ranks: int, sharding: str, *, frozen: bool = False
) -> Exchange:
    """One lookup of ``L`` ids per rank in a sharded table, and its gradient.

        ========================  ===================  =======================  ==========================
        sharding                  ids                  forward                  backward
        ========================  ===================  =======================  ==========================
        row_wise, table_wise      ``8 L (W-1) / W``    ``4 d L (W-1) / W``      ``4 d L (W-1) / W``
        column_wise               ``8 L (W-1)``        ``4 d L (W-1) / W``      ``4 d L (W-1) / W``
        data_parallel             0                    0                        all-reduce of ``4 d rows``
        ========================  ===================  =======================  ==========================

    Row-wise and table-wise: on average, a share of ``1 / W`` of the ids is on the rank itself. Popular rows make the
    rank that holds them send more than the average.

    Args:
        lookups: L, distinct ids.
        num_rows: rows of the table.
        dim: d.
        ranks: W.
        sharding: a sharding type.
        frozen: no backward pass.
    """
    if sharding == "data_parallel":
        return Exchange(backward=0.0 if frozen else all_reduce_bytes(FLOAT * dim * num_rows, ranks))
    others = (ranks - 1) / ranks
    vectors = FLOAT * dim * lookups * others
    ids = BYTES_PER_ID * lookups * (ranks - 1 if sharding == "column_wise" else others)
    return Exchange(ids, vectors, 0.0 if frozen else vectors)


def softmax_exchange(states: float, targets: float, dim: int, ranks: int, *, frozen: bool = False) -> Exchange:
    """The exact softmax over a row-sharded table: every rank scores the states of all ranks against its own rows.

    Forward: an all-gather of the states, ``4 d N (W-1)``, and of the ``M`` targets with the index of their state, ``16
    M (W-1)``; all-reduces of the maximum and the sum of all states and of the scores of all targets, ``8 (2 N + M)
    (W-1)``. Backward: an all-gather of the targets' gradients, ``4 M (W-1)``, and a reduce-scatter of the states'
    gradients, ``4 d N (W-1)``. No term grows with the catalog.

    Args:
        states: N of this rank.
        targets: M of this rank.
        dim: d.
        ranks: W.
        frozen: no backward pass.
    """
    gathered = FLOAT * dim * states * (ranks - 1)
    sums = all_reduce_bytes(FLOAT * (2 * states + targets) * ranks, ranks)
    backward = gathered + FLOAT * targets * (ranks - 1)
    return Exchange(2 * BYTES_PER_ID * targets * (ranks - 1), gathered + sums, 0.0 if frozen else backward)


def distinct_ids(draws: float, num_rows: int) -> float:
    """Expected number of distinct ids among ``L`` uniform draws from ``R``: ``R (1 - (1 - 1/R)^L)``.

    A step asks a table for each id once. Real items are not uniform, so the true number is smaller.
    """
    return float(draws if num_rows < 2 else -num_rows * math.expm1(draws * math.log1p(-1 / num_rows)))


def transfer_seconds(sent: float, ranks: int, ranks_per_node: int, links: Links) -> float:
    """Time to send ``sent`` bytes evenly to all other ranks, ``(w-1)/(W-1)`` of them within the node of ``w`` ranks.

    Both kinds of links work at the same time, so the slower one determines the result. Latency and contention are
    ignored.
    """
    if ranks == 1:
        return 0.0
    within = sent * (ranks_per_node - 1) / (ranks - 1)
    return max(within / links.within_node, (sent - within) / links.between_nodes)


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


def redistribute(
    local: Tensor, blocks: Sequence[TableBlock], cuts: Sequence[tuple[int, int]], dim: int, group: dist.ProcessGroup
) -> Tensor:
    """Returns this rank's rows ``[cuts[rank], d]`` of a table that is stored in other blocks. A collective call.

    Args:
        local: this rank's block, empty if it has none.
        blocks: the blocks of all ranks, at most one per rank.
        cuts: ``(first row, rows)`` of each rank in the result.
        dim: d.
        group: the ranks.
    """
    rank, by_rank = dist.get_rank(group), {block.rank: block for block in blocks}
    own = by_rank.get(rank)
    sent = [_overlap(own, cut) for cut in cuts]
    received = [_overlap(by_rank.get(source), cuts[rank]) for source in range(len(cuts))]
    outgoing = [local[begin - own.first_row : end - own.first_row] for begin, end in sent] if own else []
    flat = torch.cat([part.reshape(-1) for part in outgoing]) if outgoing else local.new_empty(0)
    widths = [by_rank[source].num_columns if source in by_rank else 0 for source in range(len(cuts))]
    arriving = [(end - begin) * width for (begin, end), width in zip(received, widths, strict=True)]
    incoming = local.new_empty(sum(arriving))
    dist.all_to_all_single(
        incoming, flat, arriving, [part.numel() for part in outgoing] or [0] * len(cuts), group=group
    )
    first, count = cuts[rank]
    rows = local.new_empty(count, dim)
    for source, part in enumerate(incoming.split(arriving)):
        if part.numel():
            (begin, end), block = received[source], by_rank[source]
            columns = slice(block.first_column, block.first_column + block.num_columns)
            rows[begin - first : end - first, columns] = part.view(end - begin, block.num_columns)
    return rows


def _overlap(block: TableBlock | None, cut: tuple[int, int]) -> tuple[int, int]:
    if block is None:
        return 0, 0
    begin, end = max(block.first_row, cut[0]), min(block.first_row + block.num_rows, sum(cut))
    return (begin, end) if begin < end else (block.first_row, block.first_row)
