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

from recpo.ops.sharded_logprob import RowShard, sharded_entropy, sharded_logprob, sharded_lookup
from recpo.policies.item_table import ItemTable
from recpo.sharding import search
from recpo.sharding.blocks import row_blocks
from recpo.types import Recommendations, SamplingOptions

_ROWS_AT_ONCE = 1 << 18


class RowTable(ItemTable):
    """Takes the place of an ``ItemTable``; every method is called by all ranks together.

    Args:
        table: the table it replaces.
        mesh: the ranks, in one dimension.

    Attributes:
        weight: the whole table as a ``DTensor`` of which each rank holds ``ceil((V + 1) / ranks)`` rows.
    """

    is_block = True

    def __init__(self, table: ItemTable, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.num_items, self.dim, self.sparse, self.use = table.num_items, table.dim, False, table.use
        self._group: dist.ProcessGroup = mesh.get_group()
        cuts = row_blocks(self.num_items + 1, mesh.size())
        self._first, rows = cuts[dist.get_rank(self._group)]
        local = torch.empty(rows, self.dim, device=mesh.device_type)
        if table.initial is not None:
            for begin in range(0, rows, _ROWS_AT_ONCE):
                end = min(begin + _ROWS_AT_ONCE, rows)
                local[begin:end] = table.initial[self._first + begin : self._first + end]
        size = torch.Size([self.num_items + 1, self.dim])
        whole = DTensor.from_local(local, mesh, [ShardDim(0)], run_check=False, shape=size, stride=(self.dim, 1))
        self.weight: nn.Parameter = nn.Parameter(whole, requires_grad=table.weight.requires_grad)
        self.train(table.training)

    def forward(self, ids: Tensor) -> Tensor:
        """See ``ItemTable.forward``."""
        return sharded_lookup(ids, self._shard(False))

    def log_prob(
        self,
        states: Tensor,
        targets: Tensor,
        state_index: Tensor | None = None,
        *,
        temperature: float = 1.0,
        cosine: bool = False,
    ) -> Tensor:
        """See ``ItemTable.log_prob``."""
        return sharded_logprob(states, self._shard(cosine), targets, state_index, temperature=temperature)

    def entropy(self, states: Tensor, *, temperature: float = 1.0, cosine: bool = False) -> Tensor:
        """See ``ItemTable.entropy``."""
        return sharded_entropy(states, self._shard(cosine), temperature=temperature)

    def top_k(self, states: Tensor, k: int, exclude: Tensor | None, *, cosine: bool = False) -> Recommendations:
        """See ``ItemTable.top_k``."""
        return search.top_k(states.detach(), self._shard(cosine), k, exclude)

    def draw(
        self, states: Tensor, group_size: int, options: SamplingOptions, *, cosine: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See ``ItemTable.draw``."""
        return search.draw(states, self._shard(cosine), group_size, options)

    def _shard(self, cosine: bool) -> RowShard:
        weight: Any = self.weight
        rows = weight.to_local()
        rows = F.normalize(rows, dim=-1) if cosine else rows
        return RowShard(rows, self._first, self.num_items + 1, self._group)
