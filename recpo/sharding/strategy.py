"""The Lightning strategy for sharded tables: one line of YAML; the model needs no change.

All ranks write a checkpoint together. Any number of ranks, or a process without torchrec, can read it. It is a
directory: safetensors files with the blocks of every rank (torch.distributed.checkpoint), and ``meta.pt`` with
everything that is not a tensor. The only pickled values are plain numbers, strings and containers.
"""

import json
import logging
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from recpo.artifacts.documents import write_tensors
from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.policies.item_table import ItemTable, PlacedTable, SavedRows
from recpo.sharding.lookup_tables import LookupTable, TableOptimizer, TableOptions
from recpo.sharding.memory import Sharding, TableSpec, sharding_by_table, validate_exact_softmax
from recpo.sharding.planning import collection_plan, make_collection, plan_tables, table_key
from recpo.sharding.row_tables import ReplicatedTable, RowTable, whole_weight
from recpo.training.checkpoints import META, SHAPES, load_plain, saved_tensors
from recpo.training.optimizers import JointOptimizer

_LARGE = 64 << 20  # bytes
_TENSOR, _STATES = "__tensor__", "optimizer_states"

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
        write_checkpoint(checkpoint["state_dict"], rest, Path(self.broadcast(str(filepath))))

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint directory that any number of ranks wrote. A collective call."""
        assert self.lightning_module is not None
        loaded = read_checkpoint(self.lightning_module.state_dict(), self.optimizers, Path(checkpoint_path))
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
        validate_exact_softmax(of_softmax, self._sharding)
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


def _original(name: str, tables: dict[str, ItemTable]) -> str | None:
    """The table that a frozen copy copies: ``policy.item_table`` for ``old.policy.item_table``."""
    head, found, tail = name.rpartition("policy.")
    original = found + tail
    return original if head and original in tables and not tables[name].weight.requires_grad else None


def write_checkpoint(tensors: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint. A collective call: the checkpoint appears after all ranks have written their parts.

    Args:
        tensors: by name; a sharded tensor describes the complete table, every other tensor is equal on all ranks.
        rest: plain containers, numbers and small tensors; "optimizer_states" may also contain sharded tensors.
        path: the same on all ranks, on a file system that all ranks share.
    """
    tensors = dict(tensors)
    states = _strip(rest.get(_STATES, []), _STATES, tensors)
    skeleton = rest | {_STATES: states, SHAPES: {name: list(tensor.size()) for name, tensor in tensors.items()}}
    if dist.get_rank() == 0:
        with output_directory(path, kind="checkpoint", overwrite=True) as partial:
            dist.broadcast_object_list([str(partial)], src=0)
            _write(tensors, partial)
            with (partial / META).open("wb") as file:  # torch's own error does not mention a full disk
                torch.save(skeleton, file)
            dist.barrier()
    else:
        shared: list[Any] = [None]
        dist.broadcast_object_list(shared, src=0)
        _write(tensors, Path(shared[0]))
        dist.barrier()
    dist.barrier()


def read_checkpoint(tensors: dict[str, Any], optimizers: list[Optimizer], path: Path) -> dict[str, Any]:
    """Reads a checkpoint into ``tensors`` and the optimizers, and returns the rest. A collective call.

    Raises:
        RecpoError: ``path`` is not such a checkpoint, or belongs to another model.
    """
    if not (path / META).is_file():
        raise RecpoError(
            f"{path} was not written by a run with ShardedStrategy: resume it with the strategy it was made with, or "
            "start from its policy with --init_from",
            code="wrong_file",
            field=str(path),
        )
    saved_tensors(path)  # rejects a checkpoint with missing files
    skeleton = load_plain(path / META)
    reader = dcp.HuggingFaceStorageReader(str(path))
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    wanted = dict(tensors)
    for number, optimizer in enumerate(optimizers):
        _strip(optimizer.state_dict(), f"{_STATES}.{number}", wanted)
        parameters = _by_state(optimizer, f"{_STATES}.{number}")
        for name, sizes in saved.items():
            if name.startswith(f"{_STATES}.{number}.") and name not in wanted:
                wanted[name] = _room(sizes.size, sizes.properties.dtype, parameters.get(name.rpartition(".")[0]))
    faults = sorted(wanted.keys() ^ saved.keys()) or [
        name for name in sorted(wanted) if wanted[name].size() != saved[name].size
    ]
    if faults:
        raise RecpoError(
            f"{path} does not fit the run ({len(faults)} faults): resume with the options it was made with:\n  "
            + "\n  ".join(faults[:10]),
            code="mismatch",
            field=str(path),
        )
    dcp.load(wanted, storage_reader=reader)
    del skeleton[SHAPES]
    rest: dict[str, Any] = _fill(skeleton, wanted)
    return rest


def _write(tensors: dict[str, Any], path: Path) -> None:
    try:
        dcp.save(tensors, storage_writer=_BlockWriter(str(path), save_distributed=True))
    except CheckpointException as error:  # on all ranks, whichever rank failed
        reasons = {rank: failure for rank, (failure, _) in error.failures.items()}
        if not all(isinstance(reason, (OSError, SafetensorError)) for reason in reasons.values()):
            raise
        said = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
        raise RecpoError(
            f"the checkpoint {path.with_suffix('')} could not be written ({said})",
            code="failed",
            field=str(path.with_suffix("")),
        ) from error


class _BlockWriter(dcp.HuggingFaceStorageWriter):
    """Writes blocks directly from their memory. PyTorch's own writer copies each block twice in memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part: each large block into its own file, all small ones into one file."""
        large = [[item] for item in plan.items if _size(item) >= _LARGE]
        small = [[item for item in plan.items if _size(item) < _LARGE]]
        files = [items for items in large + small if items]
        results = []
        for number, items in enumerate(files, 1):
            tensors = {item.index.fqn: _resolved(planner, item) for item in items}
            places = {item.index.fqn: {SAVED_OFFSETS_KEY: list(_chunk(item).offsets)} for item in items}
            name = _gen_file_name(number, len(files), plan.storage_data["shard_index"])
            write_tensors(Path(self.path) / name, tensors, {CUSTOM_METADATA_KEY: json.dumps(places)})
            results += [WriteResult(item.index, _size(item), _StorageInfo(name, 0, _size(item))) for item in items]
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return _chunk(item).sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor.detach().cpu().contiguous()


def _strip(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    """Returns ``value`` with names in place of its tensors, and adds the tensors to ``tensors``."""
    if isinstance(value, (Tensor, ShardedTensor)):
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {key: _strip(part, f"{name}.{key}", tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_strip(part, f"{name}.{index}", tensors) for index, part in enumerate(value))
    return value


def _fill(value: Any, tensors: dict[str, Any]) -> Any:
    """The reverse of ``_strip``."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _fill(part, tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(part, tensors) for part in value)
    return value


def _by_state(optimizer: Optimizer, name: str) -> dict[str, Tensor]:
    """The parameters by the name of their state, with ``name`` for the optimizer's own states."""
    if isinstance(optimizer, JointOptimizer):
        members = [_by_state(member, f"{name}.members.{number}") for number, member in enumerate(optimizer.members)]
        return {key: parameter for member in members for key, parameter in member.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {f"{name}.state.{number}": parameter for number, parameter in enumerate(parameters)}


def _room(size: torch.Size, dtype: torch.dtype, parameter: Tensor | None) -> Tensor:
    """An empty tensor for a state that the optimizer creates in its first step; cut into rows if its parameter is."""
    if parameter is not None and isinstance(parameter.data, DTensor) and parameter.size() == size:
        return torch.zeros_like(parameter.data)
    return torch.empty(size, dtype=dtype)
