"""Blocks of a table on the ranks: combined into one tensor for checkpoints, or redistributed into other blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from recpo.sharding.costs import TableBlock


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
