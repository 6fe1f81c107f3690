"""Tables that are only looked up, as torchrec embedding collections sharded over the ranks, and their optimizer.

The vectors come from the ranks that hold them. After the backward pass, their gradients return to those ranks and
become an ordinary sparse gradient of the rank's own block. Clipping, rescaling, accumulation and skipped steps
therefore work as for any other parameter, and a step may look up several times. (Inside torchrec, every lookup's
backward pass updates the table at once, before any of these.) A single update per step follows.

``TableOptimizer`` updates all tables: by FBGEMM's fused kernels, or by ``TableOptions.update`` with the same results
where there is no kernel: for replicated tables, and Adam on a CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpo.base.errors import NonNegativeFloat, RecpoError, validate_ranges
from recpo.ops.sharded_logprob import RowShard
from recpo.policies.item_table import ItemTable
from recpo.sharding.memory import TableBlock, TableOptimizerName, row_blocks
from recpo.sharding.row_tables import ShardedTable, copy_rows


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

    def row_shard(self, *, learns: bool) -> RowShard:
        """The table cut into rows: the block itself if it already has that form, else a copy until the weights change.

        Raises:
            RecpoError: the table would need a gradient.
        """
        if learns and torch.is_grad_enabled() and self.training and self.weight.requires_grad:
            raise RecpoError(
                "a table sharded for lookups learns nothing from the exact softmax, which this objective asks for: set "
                "policy.normalizer to full, or shard with trainer.strategy sharding: data_parallel",
                code="conflicting_options",
                field="policy.normalizer",
            )
        rank, cuts = dist.get_rank(self._group), row_blocks(self.num_items + 1, dist.get_world_size(self._group))
        first, count = cuts[rank]
        if self._rows is None:
            in_rows = [block.num_columns for block in self._blocks] == [self.dim] * len(cuts)
            with torch.no_grad():
                own = torch.arange(first, first + count, device=self.weight.device)
                self._rows = self.weight.detach() if in_rows else self._vectors(own)
        rows = self._rows
        if self.features is not None:
            with torch.no_grad():
                rows = self.features.matrix(rows, first)
        rows = F.normalize(rows, dim=-1) if self.cosine else rows
        return RowShard(rows, first, self.num_items + 1, self._group)

    def train(self, mode: bool = True) -> Self:
        """Also drops lookups whose gradient was never requested."""
        self._pending = []
        return super().train(mode)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.whole(self.weight.detach())


def _length(ids: Tensor) -> Tensor:
    return torch.tensor([len(ids)], dtype=torch.int32, device=ids.device)


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


def row_gradient(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a sparse or dense gradient that are not 0, and their values.

    A looked-up row with a zero gradient does not move: a dense gradient cannot distinguish it from the other rows.
    """
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        kept = values.any(1)
        return rows[kept], values[kept]
    rows = gradient.any(1).nonzero().squeeze(1)
    return rows, gradient[rows]


STATE_NAMES: Final[dict[TableOptimizerName, list[str]]] = {
    "sgd": [],
    "adagrad": ["momentum1"],
    "rowwise_adagrad": ["momentum1"],
    "adam": ["momentum1", "momentum2"],
}
_FUSED: Final = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}


@dataclass(frozen=True)
class TableOptions:
    """The optimizer of sharded tables. Only rows that were looked up change.

    Attributes:
        optimizer: ``rowwise_adagrad`` keeps one number per row, ``adagrad`` one per weight, ``adam`` two per weight,
            ``sgd`` none.
        lr: learning rate of the tables.
        eps: added to the denominator (not for ``sgd``).
        betas: for ``adam``.
    """

    optimizer: TableOptimizerName = "rowwise_adagrad"
    lr: NonNegativeFloat = 0.02
    eps: NonNegativeFloat = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        validate_ranges(self, "table_optimizer.")
        if not all(0 <= beta < 1 for beta in self.betas):
            message = f"table_optimizer.betas are {self.betas}, expected numbers in [0, 1)"
            raise RecpoError(message, code="out_of_range", field="table_optimizer.betas")

    @property
    def is_per_row(self) -> bool:
        """Whether the state has one number per row."""
        return self.optimizer == "rowwise_adagrad"

    def empty_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The state before the first step, by name: ``[V + 1]`` if it is per row, else ``[V + 1, d]``."""
        shape = weight.shape[:1] if self.is_per_row else weight.shape
        return {name: weight.new_zeros(shape) for name in STATE_NAMES[self.optimizer]}

    def update(
        self, weight: Tensor, state: Mapping[str, Tensor], rows: Tensor, gradient: Tensor, lr: float, step: int
    ) -> None:
        """Updates the rows of a table that a batch has, and their state, in place; other rows do not change.

        ``sgd``: ``w <- w - lr g``. ``adagrad`` (Duchi et al. 2011): ``s <- s + g^2; w <- w - lr g / (sqrt(s) + eps)``.
        ``rowwise_adagrad`` (Gupta et al. 2014; Mudigere et al., arXiv 2104.05158): the same with one number per row,
        ``s_v <- s_v + mean_j g_vj^2``. ``adam`` (arXiv 1412.6980): ``m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
        w <- w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)``.

        Args:
            weight: ``[V + 1, d]``.
            state: see ``empty_state``.
            rows: ``[n]``, distinct.
            gradient: ``[n, d]``.
            lr: learning rate.
            step: ``t``, from 1.
        """
        moments, change = list(state.values()), gradient
        if self.optimizer == "adam":
            first = moments[0][rows].lerp_(gradient, 1 - self.betas[0])
            second = moments[1][rows].lerp_(gradient.square(), 1 - self.betas[1])
            moments[0][rows], moments[1][rows] = first, second
            denominator = (second / (1 - self.betas[1] ** step)).sqrt_().add_(self.eps)
            change = first.div_(1 - self.betas[0] ** step).div_(denominator)
        elif self.optimizer != "sgd":
            squared = gradient.square()
            moments[0].index_add_(0, rows, squared.mean(1) if self.is_per_row else squared)
            root = moments[0][rows].sqrt()
            change = gradient / ((root[:, None] if self.is_per_row else root) + self.eps)
        weight.index_add_(0, rows, change, alpha=-lr)

    def is_fused(self, device: torch.device) -> bool:
        """Whether FBGEMM has a fused kernel for it. FBGEMM has no fused Adam on CPUs."""
        return self.optimizer != "adam" or device.type == "cuda"

    def fused_params(self, device: torch.device, *, frozen: bool) -> dict[str, Any]:
        """The setting for torchrec's sharder. Tables without a fused optimizer get one without state."""
        name = "sgd" if frozen or not self.is_fused(device) else self.optimizer
        options = {"optimizer": _FUSED[name], "learning_rate": self.lr, "eps": self.eps}
        return options | {"beta1": self.betas[0], "beta2": self.betas[1]} if name == "adam" else options


class TableOptimizer(Optimizer):
    """Updates tables from their gradients, with fused kernels if available.

    Args:
        tables: by name; sharded for lookups, or complete on every rank.
        options: see ``TableOptions``.
        scheduler: creates a learning-rate schedule for the tables, which steps with this optimizer; None = the tables
            follow the schedule of the run.
    """

    def __init__(
        self,
        tables: Mapping[str, ItemTable],
        options: TableOptions,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__([table.weight for table in tables.values()], {"lr": options.lr})
        self._tables, self._options = dict(tables), options
        self._states = {}
        for name, table in tables.items():
            fused, names = self._fused(table), STATE_NAMES[options.optimizer]
            weight = table.weight.detach()
            self._states[name] = options.empty_state(weight) if fused is None else fused.fused_state(names)
        self._steps = 0
        # a schedule needs an optimizer; this one has no parameters to update
        self._rate = SGD([nn.Parameter(torch.zeros(()))], lr=options.lr)
        self._schedule = None if scheduler is None else scheduler(self._rate)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the rows that have a gradient."""
        assert closure is None
        lr = (self if self._schedule is None else self._rate).param_groups[0]["lr"]
        for name, table in self._tables.items():
            if table.weight.grad is not None:
                rows, gradient = row_gradient(table.weight.grad)
                if (fused := self._fused(table)) is not None:
                    fused.fused_step(rows, gradient, float(lr), self._steps)
                else:
                    weight, state = table.weight.detach(), self._states[name]
                    self._options.update(weight, state, rows, gradient, float(lr), self._steps + 1)
            if isinstance(table, LookupTable):
                table.changed()
        self._steps += 1
        if self._schedule is not None:
            self._rate.step()
            self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """The states by table and name (not copied), and the learning rate. The result does not depend on the plan."""
        return {
            "tables": {name: self._state_of(name, table) for name, table in self._tables.items()},
            "steps": self._steps,
            "lr": self.param_groups[0]["lr"],
            "initial_lr": self.param_groups[0].get("initial_lr"),
            "rate": self._rate.param_groups[0]["lr"],
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    def _fused(self, table: ItemTable) -> LookupTable | None:
        """The table if a kernel updates it."""
        if isinstance(table, LookupTable) and self._options.is_fused(table.weight.device):
            return table
        return None

    def _state_of(self, name: str, table: ItemTable) -> dict[str, Any]:
        """The states by name: sharded like the table, and without copying."""
        state, per_row = self._states[name], self._options.is_per_row
        if not isinstance(table, LookupTable):
            return dict(state)
        return {part: table.whole(state.get(part), per_row=per_row) for part in STATE_NAMES[self._options.optimizer]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores all but the tables' states, which a checkpoint reads into the tensors of ``state_dict``."""
        self._steps = state_dict["steps"]
        self.param_groups[0]["lr"] = state_dict["lr"]
        if state_dict["initial_lr"] is not None:
            self.param_groups[0]["initial_lr"] = state_dict["initial_lr"]
        self._rate.param_groups[0]["lr"] = state_dict["rate"]
        if self._schedule is not None:
            self._schedule.load_state_dict(state_dict["schedule"])
        for table in self._tables.values():
            if isinstance(table, LookupTable):
                table.changed()
