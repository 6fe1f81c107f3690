"""A table whose rows are cut into blocks over the ranks of a process group, and the exchange of its rows.

Every function here is a collective: all ranks of the group call it, in the same order. Ranks may contribute different
numbers of rows, including none. The numbers are exchanged first (``common_sizes``), and rows are padded to the largest
number only for the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RowShard(NamedTuple):
    """This rank's rows of a table ``[V + 1, d]``, and their position. Row 0 of the table is padding.

    The blocks follow each other in the order of the ranks and form the table. A block may be empty.

    Attributes:
        rows: ``[R, d]``.
        first: index of its first row.
        num_rows: V + 1, rows of the complete table.
        group: the ranks; None = the default group. A separate group keeps these collectives apart from others that a
            backward pass starts, such as those of ``DistributedDataParallel``.
    """

    rows: Tensor
    first: int
    num_rows: int
    group: dist.ProcessGroup | None = None

    @property
    def padding_rows(self) -> int:
        """Number of padding rows among these: 1 if row 0 is among them, else 0."""
        return int(self.first == 0 and len(self.rows) > 0)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return dist.get_world_size(self.group)


class Sizes(NamedTuple):
    """The sizes on every rank.

    Attributes:
        bounds: ``ranks + 1`` row indices: rank r has rows ``bounds[r]`` to ``bounds[r + 1]``.
        counts: for each requested count, one list over the ranks.
    """

    bounds: list[int]
    counts: list[list[int]]


def common_sizes(shard: RowShard, *counts: int, faults: Tensor | None = None) -> Sizes:
    """Exchanges sizes. Every rank sees the errors of all ranks here, so none is left waiting.

    Args:
        shard: this rank's rows.
        counts: counts of this rank.
        faults: number of invalid ids of this rank, a scalar on the device of the rows; None = 0.

    Raises:
        ValueError: the blocks of the ranks do not form the table.
        IndexError: any rank has faults.
    """
    mine = torch.tensor([shard.first, len(shard.rows), shard.num_rows, *counts], device=shard.rows.device)
    mine = torch.cat([mine, mine.new_zeros(1) if faults is None else faults.view(1)])
    everyone = mine.new_empty(shard.ranks * len(mine))
    dist.all_gather_single(everyone, mine, group=shard.group)
    firsts, lengths, num_rows, *others, faulty = everyone.view(shard.ranks, -1).T.tolist()
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    gaps = any(length and first != bound for first, length, bound in zip(firsts, lengths, bounds, strict=False))
    if gaps or set(num_rows) != {bounds[-1]}:
        raise ValueError(f"blocks from rows {firsts} of {lengths} rows do not make up a table of {num_rows} rows")
    if any(faulty):
        raise IndexError(f"ids outside of the table of {shard.num_rows} rows or of the states, by rank: {faulty}")
    return Sizes(bounds, others)


def gather_rows(values: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """``[sum of counts, ...]``, the ``values [counts[rank], ...]`` of all ranks in their order."""
    padded = _pad(values, max(counts))
    everyone = padded.new_empty(len(counts) * len(padded), *padded.shape[1:])
    if everyone.numel():
        dist.all_gather_single(everyone, padded, group=group)
    if min(counts) == len(padded):
        return everyone
    parts = everyone.split(len(padded))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def start_sum_of_rows(values: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Starts to sum ``values [sum of counts, ...]`` over the ranks. Each rank receives its own rows of the sum.

    Returns:
        A function that waits for the sum and returns it, ``[counts[rank], ...]``.
    """
    largest = max(counts)
    if min(counts) < largest:
        values = torch.cat([_pad(part, largest) for part in values.split(counts)])
    own = values.new_empty(largest, *values.shape[1:])
    work = dist.reduce_scatter_single(own, values, group=group, async_op=True) if values.numel() else None

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return own[: counts[dist.get_rank(group)]]

    return finish


def exchange_rows(values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """All to all: the first ``send[0]`` rows of ``values`` go to rank 0, the next ones to rank 1, and so on.

    Returns:
        ``[sum of receive, ...]``: ``receive[0]`` rows from rank 0, then those from rank 1, and so on.
    """
    received = values.new_empty(sum(receive), *values.shape[1:])
    dist.all_to_all_single(received, values.contiguous(), receive, send, group=group)
    return received


def _pad(values: Tensor, length: int) -> Tensor:
    """``values`` padded with zero rows up to ``length`` rows, contiguous."""
    if len(values) == length:
        return values.contiguous()
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])
