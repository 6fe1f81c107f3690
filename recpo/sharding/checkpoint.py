"""Checkpoints that all ranks write together. Any number of ranks, or a process without torchrec, can read them.

A checkpoint is a directory: safetensors files with the blocks of every rank (torch.distributed.checkpoint), and
``meta.pt`` with everything that is not a tensor. The only pickled values are plain numbers, strings and containers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer

from recpo.artifacts.documents import write_tensors
from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.training.checkpoints import META, SHAPES, load_plain, saved_tensors
from recpo.training.optimizers import JointOptimizer

_LARGE = 64 << 20  # bytes
_TENSOR, _STATES = "__tensor__", "optimizer_states"


def save(tensors: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
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


def load(tensors: dict[str, Any], optimizers: list[Optimizer], path: Path) -> dict[str, Any]:
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
