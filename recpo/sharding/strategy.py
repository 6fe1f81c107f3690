"""The Lightning strategy for sharded tables: one line of YAML; the model needs no change."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from recpo.base.errors import RecpoError
from recpo.policies.item_table import ItemTable, PlacedTable, SavedRows
from recpo.sharding import checkpoint as checkpoints
from recpo.sharding.blocks import Sharding, TableSpec, sharding_by_table
from recpo.sharding.lookup_tables import LookupTable, TableOptimizer, TableOptions
from recpo.sharding.planning import collection_plan, make_collection, plan_tables, table_key
from recpo.sharding.row_tables import ReplicatedTable, RowTable, whole_weight

# torchrec checks in every lookup whether it is being traced, and torch.fx warns about that check
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor.*")  # torchrec itself uses it


class ShardedStrategy(DDPStrategy):
    """Data-parallel training with item and code tables sharded over the ranks.

    Lookup tables become torchrec embedding collections, sharded by ``DistributedModelParallel`` with their own fused
    optimizer. The table of an exact softmax (``normalizer: full``) is cut into rows instead, and the optimizer of the
    dense parameters updates it. Frozen copies (old policy, reference) are placed with the tables that they copy. All
    other parameters are replicated, as in ``DDPStrategy``.

    Args:
        sharding: one type for all tables, or a type for each table by name (``policy.item_table``): ``row_wise``,
            ``table_wise``, ``column_wise``, ``data_parallel`` (a full copy on every rank), or ``auto`` (torchrec's
            planner chooses). The table of an exact softmax is ``row_wise`` or ``data_parallel``.
        table_optimizer: the optimizer of the tables.
        table_scheduler: learning-rate schedule of the tables; null = the schedule of the dense parameters.
        memory_per_rank: GiB per rank for lookup tables, their optimizer state and their copies; a limit for the planner
            (`recpo plan` counts everything).
        lookups_per_step: ids that a rank looks up per step; the planner estimates communication from it.
        process_group_backend: ``nccl`` or ``gloo``; null = the one that fits the device.
        timeout: seconds after which a rank stops waiting for another rank and fails.
        find_unused_parameters: see ``torch.nn.parallel.DistributedDataParallel``.
    """

    #: Tables may be built without memory and are then filled block by block.
    shards_tables = True

    def __init__(
        self,
        sharding: Sharding | dict[str, Sharding] = "auto",
        table_optimizer: TableOptions = TableOptions(),  # noqa: B008  frozen
        table_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        memory_per_rank: float | None = None,
        lookups_per_step: int = 8192,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout),
            find_unused_parameters=find_unused_parameters,
        )
        self._sharding, self._options, self._scheduler = sharding, table_optimizer, table_scheduler
        self._memory = None if memory_per_rank is None else int(memory_per_rank * (1 << 30))
        self._lookups = lookups_per_step
        self._tables: list[LookupTable] = []
        self._blocks: list[str] = []

    def setup(self, trainer: Trainer) -> None:
        """Shards the tables of the module, then continues as ``DDPStrategy`` does."""
        assert isinstance(self.model, LightningModule)
        if trainer.state.fn != TrainerFn.FITTING:
            raise RecpoError(
                "ShardedStrategy is for training: `recpo evaluate` reads its checkpoints without it",
                code="unsupported",
                field="trainer.strategy",
            )
        if self.precision_plugin.precision not in ("32-true", "bf16-mixed"):
            raise RecpoError(
                f"trainer.precision {self.precision_plugin.precision}: sharded tables learn in float32, and each rank "
                "would skip other steps for overflows of float16; use bf16-mixed",
                code="conflicting_options",
                field="trainer.precision",
            )
        self._shard(self.model)
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", []), *self._blocks]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return super()._setup_model(model)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Sends the gradients of looked-up vectors to the ranks that hold the rows."""
        super().post_backward(closure_loss)
        for table in self._tables:
            table.collect_gradients()

    def teardown(self) -> None:
        """Also works after an error that occurred before the tables had memory; Lightning could not move them then."""
        assert self.lightning_module is not None
        for table in self.lightning_module.modules():
            if isinstance(table, ItemTable) and table.weight.is_meta:
                table.weight = nn.Parameter(torch.empty(0))
        super().teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read into the blocks of the ranks."""
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint directory. A collective call."""
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        checkpoints.save(checkpoint["state_dict"], rest, Path(self.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint directory that any number of ranks wrote. A collective call."""
        assert self.lightning_module is not None
        loaded = checkpoints.load(self.lightning_module.state_dict(), self.optimizers, Path(checkpoint_path))
        for table in self._tables:
            table.changed()
        return loaded | {"state_dict": {}}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Does nothing: ``load_checkpoint`` has already read the weights into place."""

    def _shard(self, module: LightningModule) -> None:
        tables = {
            name: table
            for name, table in module.named_modules()
            if isinstance(table, ItemTable) and table.use != "whole"
        }
        for table in tables.values():
            if table.initial is None:  # the table was built with its own memory
                table.initial = SavedRows(table.weight.detach())
        of_softmax = {name: table for name, table in tables.items() if table.use == "softmax"}
        looked_up = {name: table for name, table in tables.items() if table.use == "lookup"}
        originals = {name: _original(name, tables) or name for name in tables}
        kinds = sharding_by_table(self._sharding, set(originals.values()))
        kinds = {name: kinds[original] for name, original in originals.items()}
        self._validate_softmax(of_softmax)
        # a separate group: its exchanges in the backward pass must not interleave with those of DDP
        group = dist.new_group(timeout=self._timeout) if of_softmax else None
        mesh = None if group is None else DeviceMesh.from_group(group, self.root_device.type)
        for name, table in of_softmax.items():
            if mesh is None or kinds[name] == "data_parallel":
                table.weight, table.initial = whole_weight(table, self.root_device), None
            else:
                self._replace(module, name, RowTable(table, mesh))
        if looked_up:
            self._shard_lookups(module, looked_up, kinds)

    def _shard_lookups(self, module: LightningModule, tables: dict[str, ItemTable], kinds: dict[str, Sharding]) -> None:
        originals = {name: _original(name, tables) or name for name in tables}
        specs = {
            name: TableSpec(
                name,
                table.num_items + 1,
                table.dim,
                self._lookups,
                kinds[name],
                frozen=not table.weight.requires_grad,
                copies=list(originals.values()).count(name) - 1,
            )
            for name, table in tables.items()
        }
        plan = plan_tables(
            [spec for name, spec in specs.items() if originals[name] == name],
            optimizer=self._options.optimizer,
            world_size=dist.get_world_size(),
            local_world_size=self.num_processes,
            compute_device="cuda" if self.root_device.type == "cuda" else "cpu",
            memory_per_rank=self._memory,
            group=dist.group.WORLD,
        )
        placed = {name: plan.placements[original] for name, original in originals.items()}
        placed_tables: dict[str, PlacedTable] = {}
        for frozen in (False, True):
            some = [s for s in specs.values() if s.frozen == frozen and placed[s.name].sharding != "data_parallel"]
            planned = {spec.name: plan.sharding[originals[spec.name]] for spec in some}
            collections = self._collections(some, planned, frozen=frozen) if some else {}
            for spec in some:
                key = table_key(spec.name)
                blocks = placed[spec.name].blocks
                assert dist.group.WORLD is not None
                placed_tables[spec.name] = LookupTable(
                    tables[spec.name], key, collections[key], blocks, dist.group.WORLD
                )
        for name, table in tables.items():
            if placed[name].sharding == "data_parallel":
                placed_tables[name] = ReplicatedTable(table, self.root_device)
        for name, one in placed_tables.items():
            self._replace(module, name, one)
        learning = {name: one for name, one in placed_tables.items() if not specs[name].frozen}
        if self.is_global_zero:
            shown = ", ".join(f"{name} {placement.sharding}" for name, placement in placed.items())
            print(f"tables over {self.world_size} ranks: {shown}", flush=True)
        optimizer = TableOptimizer(learning, self._options, self._scheduler) if learning else None
        for table in learning.values():
            table.optimizer = optimizer

    def _collections(
        self, specs: list[TableSpec], planned: dict[str, ParameterSharding], *, frozen: bool
    ) -> dict[str, Any]:
        """Sharded collections by key."""
        collections = nn.ModuleDict({table_key(spec.name): make_collection(spec) for spec in specs})
        sharder = EmbeddingCollectionSharder(fused_params=self._options.fused_params(self.root_device, frozen=frozen))
        sharded = DistributedModelParallel(
            collections,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=self.root_device,
            plan=collection_plan(planned),
            sharders=[sharder],
            init_data_parallel=False,
        )
        return dict(sharded.module.items())

    def _replace(self, module: LightningModule, name: str, table: PlacedTable) -> None:
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, table)
        if table.is_block:
            self._blocks.append(f"{name}.weight")
        if isinstance(table, LookupTable):
            self._tables.append(table)

    def _validate_softmax(self, of_softmax: dict[str, ItemTable]) -> None:
        named = self._sharding if isinstance(self._sharding, dict) else {}
        for name in of_softmax.keys() & named.keys():
            if named[name] not in ("auto", "row_wise", "data_parallel"):
                raise RecpoError(
                    f"sharding: an exact softmax runs over {name}, which may be row_wise or data_parallel, not "
                    f"{named[name]}; with policy.normalizer sampled it is only looked up",
                    code="conflicting_options",
                    field=name,
                )


def _original(name: str, tables: dict[str, ItemTable]) -> str | None:
    """The table that a frozen copy copies: ``policy.item_table`` for ``old.policy.item_table``."""
    head, found, tail = name.rpartition("policy.")
    original = found + tail
    return original if head and original in tables and not tables[name].weight.requires_grad else None
