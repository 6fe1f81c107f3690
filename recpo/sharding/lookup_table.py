"""A table for lookups: a torchrec embedding collection, sharded over the ranks.

The vectors come from the ranks that hold them. After the backward pass, their gradients return to those ranks and
become an ordinary sparse gradient of the rank's own block. Clipping, rescaling, accumulation and skipped steps
therefore work as for any other parameter, and a step may look up several times. (Inside torchrec, every lookup's
backward pass updates the table at once, before any of these.) A single fused update per step follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpo.base.errors import RecpoError
from recpo.ops.sharded_logprob import RowShard
from recpo.policies.item_table import ItemTable
from recpo.sharding.blocks import redistribute, sharded_tensor
from recpo.sharding.costs import TableBlock, row_blocks
from recpo.sharding.sharded_table import ShardedTable, copy_rows


class _Lookup(NamedTuple):
    """One lookup of a training step, kept until its gradient has been sent back.

    Attributes:
        ids: ``[m]`` rows of this rank's block that any rank requested.
        rows: ``[m, w]`` values of these rows; their gradient arrives here.
        vectors: ``[n, d]`` the vectors received for this rank's own ids.
        leaf: ``vectors``, detached from the exchange, as the policy sees them.
    """

    ids: Tensor
    rows: Tensor
    vectors: Tensor
    leaf: Tensor


class LookupTable(ShardedTable):
    """A table for lookups. A softmax may run over it, but the table gets no gradient from the softmax.

    Args:
        table: the table it replaces.
        key: name of the only feature of the collection.
        collection: the sharded collection.
        blocks: which rank holds which rows.
        group: the ranks.

    Attributes:
        weight: this rank's block ``[h, w]``, the memory that the collection computes with; ``[0, d]`` if it has none.
    """

    _collection: ShardedEmbeddingCollection

    def __init__(
        self,
        table: ItemTable,
        key: str,
        collection: ShardedEmbeddingCollection,
        blocks: Sequence[TableBlock],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(table, sparse=True)
        self._key, self._blocks, self._group = key, blocks, group
        # not a submodule: its parameters share the memory of ``weight`` under other names
        object.__setattr__(self, "_collection", collection)
        rank = dist.get_rank(group)
        self._own = next((block for block in blocks if block.rank == rank and block.num_rows), None)
        self._kernels = [
            module
            for lookup in collection._lookups
            for module in lookup.modules()
            if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)
        ]
        nothing = torch.empty(0, table.dim, device=collection._device)
        held = self._kernels[0].split_embedding_weights()[0] if self._own else nothing
        self.weight = nn.Parameter(held.detach(), requires_grad=table.weight.requires_grad)
        self._pending: list[_Lookup] = []
        self._rows: Tensor | None = None
        self.train(table.training)
        if table.initial is not None:
            self.fill(table.initial)

    @torch.no_grad()
    def fill(self, rows: Any) -> None:
        """Sets this rank's block from the rows of the complete table."""
        self.changed()
        if self._own is None:
            return
        columns = slice(self._own.first_column, self._own.first_column + self._own.num_columns)
        copy_rows(self.weight, rows, self._own.first_row, columns)

    def changed(self) -> None:
        """Records that the weights have changed."""
        self._rows = None

    def id_rows(self, ids: Tensor) -> Tensor:
        """See ``ItemTable.id_rows``. Each distinct id is requested once."""
        asked, place = ids.reshape(-1).unique(return_inverse=True)
        if ((asked < 0) | (asked > self.num_items)).any():  # the kernel would read row 0 for it
            raise IndexError(f"ids outside of the table of {self.num_items + 1} rows: {asked[0]} to {asked[-1]}")
        vectors = self._vectors(asked) * (asked > 0)[:, None]
        return F.embedding(place.view(ids.shape), vectors)

    def _vectors(self, asked: Tensor) -> Tensor:
        features = KeyedJaggedTensor(keys=[self._key], values=asked, lengths=_length(asked))
        context = self._collection.create_context()
        local = self._collection.input_dist(context, features).wait().wait()
        with torch.no_grad():
            rows = self._compute(context, local)
        learns = torch.is_grad_enabled() and self.training and self.weight.requires_grad
        for part in rows:
            part.requires_grad_(learns)
        vectors: Tensor = self._collection.output_dist(context, rows).wait()[self._key].values()
        if not learns:
            return vectors.detach()
        leaf = vectors.detach().requires_grad_()
        self._pending.append(_Lookup(local[0].values(), rows[0], vectors, leaf))
        return leaf

    def _compute(self, context: Any, local: KJTList) -> list[Tensor]:
        """The requested rows of this rank's block. FBGEMM has no kernel for a block without rows."""
        if self._own is not None or not self._kernels:
            found: list[Tensor] = self._collection.compute(context, local)
            return found
        asked = local[0]
        context.sharding_contexts[0].lengths_after_input_dist = asked.lengths().view(-1, asked.stride())
        return [self.weight.new_empty(0, self.dim)]

    def collect_gradients(self) -> None:
        """Sends the gradients of all lookups since the last call to the ranks that hold the rows, and sums them.

        As for every parameter of a data-parallel module, the gradient is the mean over the ranks.
        """
        for lookup in self._pending:
            arrived = torch.zeros_like(lookup.leaf) if lookup.leaf.grad is None else lookup.leaf.grad
            torch.autograd.backward(lookup.vectors, arrived)
            if self._own is not None:
                assert lookup.rows.grad is not None
                gradient = torch.sparse_coo_tensor(
                    lookup.ids[None], lookup.rows.grad, self.weight.shape, check_invariants=False
                )
                self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        self._pending.clear()

    def fused_step(self, rows: Tensor, gradient: Tensor, learning_rate: float, steps_before: int) -> None:
        """Updates rows of this rank's block with the optimizer that is fused into torchrec's kernel.

        Args:
            rows: ``[n]``, distinct.
            gradient: ``[n, w]``.
            learning_rate: of this step.
            steps_before: number of earlier steps. Adam's bias correction needs it, because a rank without a gradient
                skips steps.
        """
        if not len(rows):  # no rank requested rows of this rank, which happens with a batch of rare items
            return
        features = KeyedJaggedTensor(keys=[self._key], values=rows, lengths=_length(rows))
        kernel = self._kernels[0]
        kernel.set_learning_rate(learning_rate)
        kernel.iter.fill_(steps_before)
        kernel.iter_cpu.fill_(steps_before)
        with torch.enable_grad():
            self._collection._lookups[0](features).view(len(rows), -1).backward(gradient)

    def fused_state(self, names: list[str]) -> dict[str, Tensor]:
        """The state of the fused optimizer for this rank's block, by name; empty if the optimizer has none."""
        if self._own is None or not names:
            return {}
        return dict(zip(names, self._kernels[0].split_optimizer_states()[0], strict=True))

    def whole(self, local: Tensor | None, *, per_row: bool = False) -> ShardedTensor:
        """A tensor in the shape of the table, or with one number per row, whose block on this rank is ``local``."""
        size = (self.num_items + 1,) if per_row else (self.num_items + 1, self.dim)
        mine = local if self._own else None
        return sharded_tensor(mine, self._blocks, size, self.weight.dtype, self._group)

    def row_shard(self, *, learns: bool, cosine: bool = False) -> RowShard:
        """The table cut into rows: the block itself if it already has that form, else a copy until the weights change.

        Raises:
            RecpoError: the table would need a gradient.
        """
        if learns and torch.is_grad_enabled() and self.training and self.weight.requires_grad:
            raise RecpoError(
                "a table sharded for lookups learns nothing from the exact softmax, which this objective asks for: set "
                "policy.normalizer to full, or shard with trainer.strategy sharding: data_parallel"
            )
        rank, cuts = dist.get_rank(self._group), row_blocks(self.num_items + 1, dist.get_world_size(self._group))
        if self._rows is None:
            in_rows = [block.num_columns for block in self._blocks] == [self.dim] * len(cuts)
            weight = self.weight.detach()
            self._rows = weight if in_rows else redistribute(weight, self._blocks, cuts, self.dim, self._group)
        first, rows = cuts[rank][0], self._rows
        if self.features is not None:
            with torch.no_grad():
                rows = self.features.matrix(rows, first)
        rows = F.normalize(rows, dim=-1) if cosine else rows
        return RowShard(rows, first, self.num_items + 1, self._group)

    def train(self, mode: bool = True) -> LookupTable:
        """Also drops lookups whose gradient was never requested."""
        self._pending = []
        return super().train(mode)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.whole(self.weight.detach())


def _length(ids: Tensor) -> Tensor:
    return torch.tensor([len(ids)], dtype=torch.int32, device=ids.device)
