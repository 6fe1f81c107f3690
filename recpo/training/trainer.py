"""Lightning's Trainer with the defaults of a run directory."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from recpo.training.run import CHECKPOINTS


class ProgressBar(TQDMProgressBar):
    """Lightning's bar without the version number of the logger; on anything but a terminal, one line per epoch."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        super().__init__(refresh_rate=1 if self._terminal else 0)
        self._losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss for the epoch's mean."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._terminal and "train/loss" in trainer.callback_metrics:
            self._losses.append(trainer.callback_metrics["train/loss"])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the epoch's line, with its mean loss, where there is no bar."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._losses and trainer.is_global_zero:
            shown = self.get_metrics(trainer, pl_module) | {"train/loss": torch.stack(self._losses).mean()}
            line = "  ".join(f"{name} {float(value):.4f}" for name, value in shown.items())
            print(f"epoch {trainer.current_epoch}  step {trainer.global_step}  {line}", flush=True)
        self._losses.clear()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """See ``lightning.pytorch.callbacks.ProgressBar``."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class LastCheckpoint(ModelCheckpoint):
    """Keeps the last state: after every epoch, every so many optimizer steps, and where ``max_steps`` ends an epoch.

    Of an epoch that ``max_steps`` cuts short Lightning would keep a state in which it is over, and a run that goes on
    from there would leave the rest of it out.

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


class TrainerOptions:
    """Every option of ``lightning.Trainer``, by its own name.

    Left alone, ``logger`` writes CSV and TensorBoard files into the run directory, and checkpoints keep the best policy
    (by validation NDCG) and the last state; any logger, callback or strategy is set by its class path. The run
    directory takes the place of ``default_root_dir``.

    Args:
        options: see https://lightning.ai/docs/pytorch/stable/common/trainer.html
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    @property
    def shards_tables(self) -> bool:
        """Whether the strategy cuts item tables over the ranks, so that none has to hold all of one."""
        return bool(getattr(self._options.get("strategy"), "shards_tables", False))

    def build(self, run: Path, monitor: str, checkpoint_every: int | None, guards: Sequence[Callback] = ()) -> Trainer:
        """Makes the trainer of a run.

        Args:
            run: the run directory.
            monitor: validation metric whose largest value marks the best policy.
            checkpoint_every: also keep the state every so many optimizer steps, to resume from, not only every epoch.
            guards: further callbacks, which look at the metrics.
        """
        _quieten()
        callbacks = self._options.get("callbacks") or []
        callbacks = [*(callbacks if isinstance(callbacks, list) else [callbacks]), *guards]
        if self._options.get("enable_progress_bar") is not False:
            callbacks.append(ProgressBar())
        if self._options.get("enable_checkpointing") is not False:
            best = ModelCheckpoint(
                run / CHECKPOINTS, filename="best", monitor=monitor, mode="max", enable_version_counter=False
            )
            callbacks.append(best)
            callbacks.append(LastCheckpoint(run / CHECKPOINTS, checkpoint_every))
        if self._options.get("logger") in (None, True):
            csv = CSVLogger(run, name="logs")
            self._options["logger"] = [csv, TensorBoardLogger(run, name="logs", version=csv.version)]
        if self._options.get("enable_model_summary") is None:
            self._options["enable_model_summary"] = False
        self._options.update(callbacks=callbacks, default_root_dir=run)
        return Trainer(**self._options)


def _quieten() -> None:
    """Leaves out what Lightning says about itself; warnings about the user's options stay."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    # frozen copies stay in evaluation mode on purpose
    for message in (
        ".*LeafSpec.*",
        ".*in eval mode at the start.*",
        ".*IterableDataset. has .__len__. defined.*",
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*recommended to use `self.log.*sync_dist=True.*",  # what is logged per epoch is reduced already
        ".*all_gather.*deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
