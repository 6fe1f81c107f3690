"""Checkpoints: when they are written, and how their tensors are read in every format.

A checkpoint is one file, or a directory that the ranks of a sharded run wrote. A directory has safetensors files, each
with one rank's blocks of the tensors and their positions. This module combines the blocks on demand, without torchrec
and without other ranks.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import safe_open
from torch import Tensor

from recpo.artifacts import PARTIAL, describe_os_error, flush
from recpo.errors import RecpoError

META = "meta.pt"
"""The file for everything that is not a tensor. A directory without it is not a checkpoint."""
RUN = "run"
"""Entry of a checkpoint: the run that wrote it (``run_directory.identity``)."""


class _Block(NamedTuple):
    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensor:
    """A tensor in the blocks of a checkpoint directory.

    Args:
        name: its name in the files.
        blocks: the blocks that form the tensor.

    Attributes:
        shape: shape of the complete tensor.
    """

    def __init__(self, name: str, blocks: list[_Block]) -> None:
        self._name, self._blocks = name, blocks
        ends = ([o + s for o, s in zip(block.offset, block.shape, strict=True)] for block in blocks)
        self.shape = torch.Size(max(sizes) for sizes in zip(*ends, strict=True))

    def __getitem__(self, rows: slice) -> Tensor:
        """The rows of a range with step 1, like indexing a tensor."""
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
        """The complete tensor."""
        if not self.shape:
            with safe_open(self._blocks[0].file, framework="pt") as file:
                scalar: Tensor = file.get_tensor(self._name)
            return scalar
        return self[:]


def saved_tensors(checkpoint: Path) -> dict[str, Tensor | SavedTensor]:
    """The weights in a checkpoint, by name. Nothing is unpickled, and large tensors stay on disk.

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


def validate_checkpoint(checkpoint: Path, run: str | None = None) -> None:
    """Raises if a checkpoint to resume from was changed, or is not one of the run.

    The checkpoint of an unfinished run is not in any ``run.json``, and torch does not verify the checksums of its own
    format. Without this check, training would continue from a weight with a flipped bit.

    Args:
        checkpoint: the file; for the directory of a sharded run, only missing files are detected.
        run: the run that must have written it (``run_directory.identity``); None = any.

    Raises:
        RecpoError: it is damaged, or another run wrote it.
    """
    remedy = "copy it again, or train again with --overwrite true"
    content = _undamaged(checkpoint, remedy)
    if run is not None and content.get(RUN) != run:
        raise RecpoError(
            f"{checkpoint} was written by another run than {checkpoint.parents[1]}, with other options or data, or by "
            f"another version of recpo; {remedy}"
        )


def _undamaged(checkpoint: Path, remedy: str) -> dict[str, Any]:
    """The content of a checkpoint, without its tensors."""
    try:
        if checkpoint.is_dir():
            saved_tensors(checkpoint)
            meta: dict[str, Any] = torch.load(checkpoint / META, map_location="meta", weights_only=True)
            return meta
        if (wrong := _damaged_record(checkpoint)) is not None:
            raise RecpoError(f"{checkpoint} is damaged ({wrong}); {remedy}")
        content: dict[str, Any] = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)
        content["state_dict"]
        return content
    except RecpoError:
        raise
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, checkpoint)}; {remedy}") from error
    except Exception as error:  # zipfile, pickle and torch raise their own exceptions, and several kinds
        reason = " ".join(str(error).split())[:200]
        raise RecpoError(f"{checkpoint} is damaged ({type(error).__name__}: {reason}); {remedy}") from error


def _damaged_record(archive: Path) -> str | None:
    """The first record of an archive whose CRC-32 is wrong, or that torch would not read as it is here.

    ``ZipFile.testzip`` looks records up by their names, so it misses one whose name has become the name of another. A
    record that its attributes mark as a directory gives torch nothing to read: the tensor would keep whatever its
    memory contained. torch writes no attributes.
    """
    with ZipFile(archive) as file:
        for record in file.infolist():
            if record.external_attr:
                return f"{record.filename}: its attributes have changed"
            try:
                with file.open(record) as content:
                    while content.read(1 << 20):
                        pass
            except BadZipFile as error:
                return f"{record.filename}: {error}"
    return None


def _numbers(blocks: list[_Block]) -> int:
    return sum(prod(block.shape) for block in blocks)


class _WholeCheckpoint(ModelCheckpoint):
    """Writes a checkpoint next to its target and renames it, so that a complete one always exists."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if getattr(trainer.strategy, "shards_tables", False):  # writes a directory, and handles this itself
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
    """Keeps the policy with the best validation metric or, without validation, the last one.

    Args:
        directory: directory of the checkpoints.
        monitor: the validation metric.
        mode: whether its smallest or its largest value is the best.
    """

    def __init__(self, directory: Path, monitor: str, mode: Literal["min", "max"] = "max") -> None:
        super().__init__(directory, filename="best", monitor=monitor, mode=mode, enable_version_counter=False)


class LastCheckpoint(_WholeCheckpoint):
    """Keeps the last state: after every epoch, every few optimizer steps, and when training ends within an epoch.

    Within an epoch, a state has the position after its optimizer step, and is saved at the start of the next batch or
    at the end of training. By then, a validation after the step is over and its outcome is in the states of the other
    callbacks; a resumed run does not repeat it. If training ends within an epoch, Lightning's own position would be the
    end of the epoch, and a resumed run would skip the rest of it.

    Args:
        directory: directory of the checkpoints.
        every: optimizer steps; None = only after epochs.
    """

    def __init__(self, directory: Path, every: int | None) -> None:
        super().__init__(
            directory, filename="last", save_on_train_epoch_end=True, every_n_epochs=1, enable_version_counter=False
        )
        self._every = every
        self._position: dict[str, Any] | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Saves the state after the previous batch if it is due."""
        due = self._every and self._position is not None and trainer.global_step % self._every == 0
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save_checkpoint(trainer, str(Path(self.dirpath or "") / "last.ckpt"))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the position within the epoch. Between the micro-batches of a step, it stays at the previous step."""
        if _epoch_is_over(trainer):
            self._position = None
        elif not trainer.fit_loop._should_accumulate():
            self._position = trainer.fit_loop.state_dict()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the state after a complete epoch, or where training ends within one."""
        if _epoch_is_over(trainer) or self._position is not None:
            super().on_train_epoch_end(trainer, pl_module)
        self._position = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stores the position within the epoch."""
        if self._position is not None:
            checkpoint["loops"]["fit_loop"] = self._position


def _epoch_is_over(trainer: Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
