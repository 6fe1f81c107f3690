"""A table that an exact softmax runs over: a parameter of its own, cut into rows over the ranks.

torchrec's tables can be looked up in but not multiplied with. Here every rank multiplies the states of all ranks with
its own rows, forward and backward, and the ranks add up their partial sums (``recpo.ops.sharded_logprob``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim

from recpo.ops.sharded_logprob import RowShard, sharded_lookup
from recpo.policies.item_table import ItemTable
from recpo.sharding.costs import row_blocks
from recpo.sharding.sharded_table import ShardedTable, copy_rows


class RowTable(ShardedTable):
    """A table for an exact softmax, and for look-ups as well.

    Args:
        table: the table it replaces.
        mesh: the ranks, in one dimension.

    Attributes:
        weight: the whole table as a ``DTensor`` of which each rank holds ``ceil((V + 1) / ranks)`` rows.
    """

    def __init__(self, table: ItemTable, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.num_items, self.dim, self.sparse, self.use = table.num_items, table.dim, False, table.use
        self._group: dist.ProcessGroup = mesh.get_group()
        cuts = row_blocks(self.num_items + 1, mesh.size())
        self._first, rows = cuts[dist.get_rank(self._group)]
        local = torch.empty(rows, self.dim, device=mesh.device_type)
        if table.initial is not None:
            copy_rows(local, table.initial, self._first)
        size = torch.Size([self.num_items + 1, self.dim])
        whole = DTensor.from_local(local, mesh, [ShardDim(0)], run_check=False, shape=size, stride=(self.dim, 1))
        self.weight: nn.Parameter = nn.Parameter(whole, requires_grad=table.weight.requires_grad)
        self.train(table.training)

    def forward(self, ids: Tensor) -> Tensor:
        """See ``ItemTable.forward``."""
        return sharded_lookup(ids, self.row_shard(learns=True))

    def row_shard(self, *, learns: bool, cosine: bool = False) -> RowShard:
        """See ``ShardedTable.row_shard``."""
        weight: Any = self.weight
        rows = weight.to_local()
        rows = F.normalize(rows, dim=-1) if cosine else rows
        return RowShard(rows, self._first, self.num_items + 1, self._group)
