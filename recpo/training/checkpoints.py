"""Checkpoints: when they are written, and their tensors, whoever wrote them.

A checkpoint is one file, or a directory that the ranks of a sharded run wrote. A directory holds safetensors files,
each with one rank's blocks of the tensors and where they stand; here the blocks are put together again, without
torchrec and without other ranks, and only as far as they are asked for.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import ZipFile

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import safe_open
from torch import Tensor

from recpo.artifacts import PARTIAL, describe_os_error, flush
from recpo.errors import RecpoError

META = "meta.pt"
"""What a checkpoint directory holds beside tensors; a directory without it is none."""


class _Block(NamedTuple):
    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensor:
    """A tensor in the blocks of a checkpoint directory.

    Args:
        name: in the files.
        blocks: which together are the tensor.

    Attributes:
        shape: of the whole.
    """

    def __init__(self, name: str, blocks: list[_Block]) -> None:
        self._name, self._blocks = name, blocks
        ends = ([o + s for o, s in zip(block.offset, block.shape, strict=True)] for block in blocks)
        self.shape = torch.Size(max(sizes) for sizes in zip(*ends, strict=True))

    def __getitem__(self, rows: slice) -> Tensor:
        """The rows of a range, as of a tensor; its step is 1."""
        begin, end, _ = rows.indices(self.shape[0])
        end = max(begin, end)
        whole: Tensor | None = None
        for block in self._blocks:
            low, high = max(begin, block.offset[0]), min(end, block.offset[0] + block.shape[0])
            if low >= high:
                continue
            with safe_open(block.file, framework="pt") as file:
                part = file.get_slice(self._name)[low - block.offset[0] : high - block.offset[0]]
            whole = part.new_empty(end - begin, *self.shape[1:]) if whole is None else whole
            places = [slice(low - begin, high - begin)]
            places += [slice(o, o + s) for o, s in zip(block.offset[1:], block.shape[1:], strict=True)]
            whole[tuple(places)] = part
        return torch.empty(0, *self.shape[1:]) if whole is None else whole

    def whole(self) -> Tensor:
        """All of it."""
        if not self.shape:
            with safe_open(self._blocks[0].file, framework="pt") as file:
                scalar: Tensor = file.get_tensor(self._name)
            return scalar
        return self[:]


def saved_tensors(checkpoint: Path) -> dict[str, Tensor | SavedTensor]:
    """The weights in a checkpoint, by name; nothing is unpickled, and the large ones stay on the disk.

    Raises:
        RecpoError: there is no checkpoint.
    """
    if checkpoint.is_file():
        weights: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
        return weights
    if not (checkpoint / META).is_file():
        raise RecpoError(f"{checkpoint} is missing: the run kept no such checkpoint")
    blocks: dict[str, list[_Block]] = defaultdict(list)
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                shape = tuple(file.get_slice(name).get_shape())
                blocks[name].append(_Block(path, tuple(places[name]["saved_offsets"]), shape))
    tensors = {name: SavedTensor(name, parts) for name, parts in blocks.items()}
    holes = sorted(name for name, parts in blocks.items() if _numbers(parts) != tensors[name].shape.numel())
    if holes:
        raise RecpoError(f"{checkpoint} has lost files: parts of {', '.join(holes[:5])} are missing; copy all of it")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer_states.")}


def validate_checkpoint(checkpoint: Path) -> None:
    """Raises where a checkpoint that training goes on from is not as it was written.

    That of an unfinished run is in no ``run.json``, and torch does not look at the checksums that its own format has:
    without this, a weight with a changed bit would be trained on.

    Args:
        checkpoint: the file; of the directory of a sharded run only what is missing is noticed.

    Raises:
        RecpoError: it is damaged.
    """
    remedy = "copy it again, or train again with --overwrite true"
    if checkpoint.is_dir():
        saved_tensors(checkpoint)
        return
    try:
        with ZipFile(checkpoint) as file:
            wrong = file.testzip()
        if wrong is not None:
            raise RecpoError(f"{checkpoint} is damaged ({wrong}: its checksum differs); {remedy}")
        torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)["state_dict"]
    except RecpoError:
        raise
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, checkpoint)}; {remedy}") from error
    except Exception as error:  # zipfile, pickle and torch have classes of their own, and more than a few
        reason = " ".join(str(error).split())[:200]
        raise RecpoError(f"{checkpoint} is damaged ({type(error).__name__}: {reason}); {remedy}") from error


def _numbers(blocks: list[_Block]) -> int:
    return sum(prod(block.shape) for block in blocks)


class _WholeCheckpoint(ModelCheckpoint):
    """Writes a checkpoint beside its target and renames it, so that there is always a whole one."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if getattr(trainer.strategy, "shards_tables", False):  # writes a directory, and takes care of it itself
            super()._save_checkpoint(trainer, filepath)
            return
        super()._save_checkpoint(trainer, filepath + PARTIAL)
        if trainer.is_global_zero:
            with open(filepath + PARTIAL, "rb") as file:
                os.fsync(file.fileno())
            os.replace(filepath + PARTIAL, filepath)
            flush(Path(filepath).parent)
        self._last_checkpoint_saved = filepath
        trainer.strategy.barrier("checkpoint")


class BestCheckpoint(_WholeCheckpoint):
    """Keeps the policy with the best validation metric, and where nothing was validated the last one.

    Args:
        directory: of the checkpoints.
        monitor: the validation metric.
        mode: whether its smallest or its largest value is the best.
    """

    def __init__(self, directory: Path, monitor: str, mode: Literal["min", "max"] = "max") -> None:
        super().__init__(directory, filename="best", monitor=monitor, mode=mode, enable_version_counter=False)


class LastCheckpoint(_WholeCheckpoint):
    """Keeps the last state: after every epoch, every so many optimizer steps, and where ``max_steps`` ends an epoch.

    Of an epoch that ``max_steps`` ends early Lightning would keep a state in which the epoch is over, and a run that is
    resumed from there would leave the rest of it out.

    Args:
        directory: of the checkpoints.
        every: optimizer steps; None = only after epochs.
    """

    def __init__(self, directory: Path, every: int | None) -> None:
        super().__init__(
            directory, filename="last", save_on_train_epoch_end=True, every_n_epochs=1, enable_version_counter=False
        )
        self._every = every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the state in mid-epoch, where it is due or the run ends."""
        due = trainer.global_step == trainer.max_steps or (self._every and trainer.global_step % self._every == 0)
        if due and not _epoch_is_over(trainer) and not self._should_skip_saving_checkpoint(trainer):
            self._save_checkpoint(trainer, str(Path(self.dirpath or "") / "last.ckpt"))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the state after an epoch that was gone through."""
        if _epoch_is_over(trainer):
            super().on_train_epoch_end(trainer, pl_module)


def _epoch_is_over(trainer: Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
