"""Replacements for item tables: cut into rows over the ranks (``RowTable``), or complete on each rank.

torchrec's tables support lookups but not multiplications (see ``lookup_table`` for them). With a ``RowTable``, every
rank multiplies the states of all ranks with its own rows, forward and backward, and the ranks sum their partial results
(``recpo.ops.sharded_logprob``).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim

from recpo.base.errors import RecpoError
from recpo.base.types import Recommendations, SamplingOptions
from recpo.ops.sharded_logprob import (
    RowShard,
    sharded_divergence,
    sharded_entropy,
    sharded_logprob,
    sharded_lookup,
)
from recpo.policies.item_table import ItemTable, PlacedTable, Rows
from recpo.sharding import search
from recpo.sharding.costs import row_blocks

_ROWS_AT_ONCE = 1 << 18


def copy_rows(block: Tensor, rows: Rows, first: int, columns: slice = slice(None)) -> None:
    """Fills a block with rows from ``first`` on, one piece at a time.

    Args:
        block: ``[h, w]``, changed in place.
        rows: rows of the complete table.
        first: index of the block's first row.
        columns: the block's columns in the table.
    """
    for begin in range(0, len(block), _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, len(block))
        block[begin:end] = rows[first + begin : first + end][:, columns]


class ShardedTable(PlacedTable):
    """A replacement for ``ItemTable``. Every method is a collective call."""

    is_block = True

    def vectors(self) -> Tensor:
        """Not supported: no rank has the complete table.

        Raises:
            RecpoError: always.
        """
        raise RecpoError("the vectors of all items need a whole item table on every rank, and this one is sharded")

    def _shares_matrix(self, lookups: int) -> bool:
        return False

    @abstractmethod
    def row_shard(self, *, learns: bool, cosine: bool = False) -> RowShard:
        """This rank's rows.

        Args:
            learns: results computed from the rows may need a gradient.
            cosine: normalize the rows to length 1.
        """

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
        shard = self.row_shard(learns=True, cosine=cosine)
        return sharded_logprob(states, shard, targets, state_index, temperature=temperature)

    def catalog_log_prob(self, states: Tensor, *, temperature: float = 1.0, cosine: bool = False) -> Tensor:
        """Not supported: no rank has the complete table.

        Raises:
            RecpoError: always.
        """
        raise RecpoError(
            "log-probabilities of the whole catalog need a whole item table on every rank, and this one is sharded: "
            "set rollout.candidates to draws or beam, or leave trainer.strategy out"
        )

    def entropy(self, states: Tensor, *, temperature: float = 1.0, cosine: bool = False) -> Tensor:
        """See ``ItemTable.entropy``."""
        return sharded_entropy(states, self.row_shard(learns=True, cosine=cosine), temperature=temperature)

    def divergence(
        self,
        states: Tensor,
        reference: ItemTable,
        reference_states: Tensor,
        *,
        temperature: float = 1.0,
        cosine: bool = False,
    ) -> Tensor:
        """See ``ItemTable.divergence``."""
        assert isinstance(reference, ShardedTable)
        with torch.no_grad():
            other = reference.row_shard(learns=False, cosine=cosine)
        shard = self.row_shard(learns=True, cosine=cosine)
        return sharded_divergence(states, shard, reference_states, other, temperature=temperature)

    def top_k(self, states: Tensor, k: int, exclude: Tensor | None, *, cosine: bool = False) -> Recommendations:
        """See ``ItemTable.top_k``."""
        return search.top_k(states.detach(), self.row_shard(learns=False, cosine=cosine), k, exclude)

    def draw(
        self, states: Tensor, group_size: int, options: SamplingOptions, *, cosine: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See ``ItemTable.draw``."""
        return search.draw(states, self.row_shard(learns=False, cosine=cosine), group_size, options)


class RowTable(ShardedTable):
    """A table for an exact softmax and for lookups.

    Args:
        table: the table it replaces.
        mesh: the ranks, in one dimension.

    Attributes:
        weight: the complete table as a ``DTensor``; each rank holds ``ceil((V + 1) / ranks)`` rows.
    """

    def __init__(self, table: ItemTable, mesh: DeviceMesh) -> None:
        super().__init__(table)
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

    def id_rows(self, ids: Tensor) -> Tensor:
        """See ``ItemTable.id_rows``."""
        return sharded_lookup(ids, self._shard_of(self._local))

    def row_shard(self, *, learns: bool, cosine: bool = False) -> RowShard:
        """See ``ShardedTable.row_shard``. Every rank encodes the features of its own rows."""
        rows = self._local
        if self.features is not None:
            # DDP averages the encoder gradients over the ranks; here each rank has the full gradient of its rows
            rows = self.features.matrix(rows, self._first, weight=dist.get_world_size(self._group))
        return self._shard_of(F.normalize(rows, dim=-1) if cosine else rows)

    @property
    def _local(self) -> Tensor:
        weight: Any = self.weight
        rows: Tensor = weight.to_local()
        return rows

    def _shard_of(self, rows: Tensor) -> RowShard:
        return RowShard(rows, self._first, self.num_items + 1, self._group)


class ReplicatedTable(PlacedTable):
    """A table that is complete on every rank and has its own optimizer.

    Args:
        table: the table it replaces.
        device: the device of this rank.
    """

    is_block = False

    def __init__(self, table: ItemTable, device: torch.device) -> None:
        super().__init__(table)
        self.weight = whole_weight(table, device)
        self.train(table.training)


def whole_weight(table: ItemTable, device: torch.device) -> nn.Parameter:
    """All rows of a table, in the kind of memory in which its optimizer state is created too."""
    if table.initial is None:
        return table.weight
    rows = table.initial[0 : table.num_items + 1].to(device, copy=True)
    return nn.Parameter(rows, requires_grad=table.weight.requires_grad)
