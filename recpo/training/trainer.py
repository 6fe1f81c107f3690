"""Lightning's Trainer with the defaults of a run directory, and all options of a run."""

import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from recpo.base.errors import PositiveInt, RecpoError, validate_range
from recpo.batches.datamodule import FeedbackDataModule
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.options import LearningOptions, MatmulPrecision, PolicyFactory, WeightAverage

LINE_SECONDS = 30.0
LINE_COLUMNS = 80
DEFAULT_EPOCHS = 10
"""``max_epochs`` if none of ``max_epochs``, ``max_steps`` and ``max_time`` is given."""


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar without the version number of the logger.

    Without a terminal, it prints lines: one every ``LINE_SECONDS`` (epoch, batches, rate, remaining time of the epoch,
    loss) and one after every epoch (``epoch_line``).
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        super().__init__(refresh_rate=1 if self._terminal else 0)
        self._losses: list[Tensor] = []
        self._began = self._said = time.monotonic()
        self._first: int | None = None

    def on_train_epoch_start(self, trainer: Trainer, *rest: Any) -> None:
        """Starts the clock of the epoch."""
        super().on_train_epoch_start(trainer, *rest)
        self._began = self._said = time.monotonic()
        self._first = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stores the loss for the epoch's mean, and prints a line if the last one is long ago."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._terminal or "train/loss" not in trainer.callback_metrics:
            return
        self._losses.append(trainer.callback_metrics["train/loss"])
        now, done, total = time.monotonic(), batch_idx + 1, trainer.num_training_batches
        if self._first is None:  # a resumed epoch starts in the middle
            self._began, self._first = now, done
        if now - self._said >= LINE_SECONDS and trainer.is_global_zero:
            self._said = now
            rate = (done - self._first) / max(now - self._began, 1e-9)
            left = f", {timedelta(seconds=round((total - done) / rate))} left" if rate and total != float("inf") else ""
            loss = float(torch.stack(self._losses[-100:]).mean())
            print(
                f"epoch {trainer.current_epoch}  batch {done}/{total}  {rate:.1f}/s{left}  train/loss {loss:.4f}",
                flush=True,
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the epoch's line, with its mean loss, if there is no bar."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._losses and trainer.is_global_zero:
            shown = self.get_metrics(trainer, pl_module) | {"train/loss": torch.stack(self._losses).mean()}
            monitor = str(getattr(pl_module, "monitor", ""))
            print(epoch_line(trainer.current_epoch, trainer.global_step, shown, monitor), flush=True)
        self._losses.clear()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """See ``lightning.pytorch.callbacks.ProgressBar``."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


def epoch_line(epoch: int, step: int, metrics: Mapping[str, Any], monitor: str) -> str:
    """The line of an epoch in at most ``LINE_COLUMNS`` columns, with as many metrics as fit; all are in metrics.csv.

    Args:
        epoch: number of the epoch.
        step: number of optimizer steps so far.
        metrics: values by name.
        monitor: the metric that selects the best checkpoint; it is shown right after the loss.
    """
    first = [name for name in ("train/loss", monitor) if name in metrics]
    line = f"epoch {epoch}  step {step}"
    for name in dict.fromkeys([*first, *metrics]):
        part = f"  {name} {float(metrics[name]):.4f}"
        if name in first or len(line) + len(part) <= LINE_COLUMNS:
            line += part
    return line


class Throughput(Callback):
    """Logs the scored positions per second and the peak memory of the process, once per epoch.

    ``train/positions_per_second`` counts this rank, without validation. ``train/peak_memory_mib`` is the largest
    resident size so far or, on a GPU, the largest memory that its tensors used.
    """

    def __init__(self) -> None:
        self._positions: list[Tensor] = []
        self._seconds, self._began = 0.0, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts the clock after everything that is not training."""
        self._began = self._began or time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts without waiting for the device."""
        self._positions.append(batch.slates.mask.sum())
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._stop()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock: validation does not count."""
        self._stop()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the values of the epoch."""
        self._stop()
        if self._positions and self._seconds:
            positions = float(torch.stack(self._positions).sum())
            device = trainer.strategy.root_device
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_bytes()
            values = {"positions_per_second": positions / self._seconds, "peak_memory_mib": peak / (1 << 20)}
            pl_module.log_dict({f"train/{name}": value for name, value in values.items()})
        self._positions, self._seconds = [], 0.0

    def _stop(self) -> None:
        if self._began:
            self._seconds += time.monotonic() - self._began
            self._began = 0.0


class SentMetrics(Logger):
    """Sends the metrics of training to a function, from the first process only."""

    name = version = None

    def __init__(self, send: Callable[[Mapping[str, Any], int | None], None]) -> None:
        super().__init__()
        self._send = send

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """See ``lightning.pytorch.loggers.Logger``."""
        self._send(metrics, step)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Sends nothing: the options are recorded elsewhere."""


def _resident_bytes() -> int:
    """Largest resident size of this process so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def says_when_to_stop(options: Mapping[str, Any]) -> bool:
    """Whether the trainer's options contain a limit, or state that there is none (``max_epochs`` -1)."""
    given = options.get("max_epochs") is not None or options.get("max_time") is not None
    return given or options.get("max_steps") not in (None, -1)


class TrainerOptions:
    """Every option of ``lightning.Trainer``, by its own name.

    By default, ``logger`` writes CSV and TensorBoard files into the run directory, and checkpoints keep the best policy
    (by the monitor) and the last state. Any logger, callback or strategy can be set by its class path. The run
    directory replaces ``default_root_dir``. If none of ``max_epochs``, ``max_steps`` and ``max_time`` is given,
    ``max_epochs`` is 10 (Lightning's default is 1,000).

    Args:
        options: see https://lightning.ai/docs/pytorch/stable/common/trainer.html
    """

    def __init__(
        self,
        *,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        # 1 is a batch and 1.0 all of them. Lightning's own types are typing.Union, whose cache forgets which of int and
        # float comes first: with another import before, a 1 would be read as 1.0
        options |= {"limit_train_batches": limit_train_batches, "limit_val_batches": limit_val_batches}
        options |= {"limit_test_batches": limit_test_batches, "limit_predict_batches": limit_predict_batches}
        options |= {"overfit_batches": overfit_batches, "val_check_interval": val_check_interval}
        self._options = options  # in these words, see _trainer
        if not says_when_to_stop(options):
            self._options["max_epochs"] = DEFAULT_EPOCHS

    def validate(self) -> None:
        """Raises ``RecpoError`` if the options allow no training at all; -1 is no limit, as in Lightning.

        Lightning itself accepts such options, and would end at once with nothing learned.
        """
        for name in ("max_epochs", "max_steps", "accumulate_grad_batches"):
            value = self._options.get(name)
            fits = value in (None, -1) or value >= 1
            validate_range(fits, f"trainer.{name}", "must be at least 1, or -1 for no limit", value)
        clip = self._options.get("gradient_clip_val")
        validate_range((clip or 0) >= 0, "trainer.gradient_clip_val", "must be at least 0", clip)
        for name in ("limit_train_batches", "check_val_every_n_epoch", "val_check_interval"):
            value = self._options.get(name)
            validate_range(not isinstance(value, int | float) or value > 0, f"trainer.{name}", "must be above 0", value)

    @property
    def shards_tables(self) -> bool:
        """Whether the strategy shards item tables over the ranks."""
        return bool(getattr(self._options.get("strategy"), "shards_tables", False))

    @property
    def validates(self) -> bool:
        """Whether anything is validated; not with ``limit_val_batches: 0``."""
        return self._options["limit_val_batches"] != 0

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of an optimizer step."""
        return int(self._options.get("accumulate_grad_batches") or 1)

    def build(
        self, run: Path, *, callbacks: Sequence[Callback] = (), loggers: Sequence[Logger] = (), progress: bool = True
    ) -> Trainer:
        """Creates the trainer of a run. It may be called again, for the same or another run.

        Args:
            run: the run directory.
            callbacks: further callbacks, after those of the options.
            loggers: further loggers, after those of the options.
            progress: show a progress bar, or lines without a terminal.

        Raises:
            RecpoError: Lightning rejects the options.
        """
        _quieten()
        options, own = dict(self._options), self._options.get("callbacks") or []
        options["callbacks"] = [*(own if isinstance(own, list) else [own]), *callbacks]
        progress = progress and options.get("enable_progress_bar") is not False
        if progress:
            options["callbacks"].append(ProgressBar())
        options["enable_progress_bar"] = progress
        if options.get("enable_checkpointing") is False:
            options["callbacks"] = [c for c in options["callbacks"] if not isinstance(c, Checkpoint)]
        if options.get("logger") in (None, True):
            csv = CSVLogger(run, name="logs")
            options["logger"] = [csv, TensorBoardLogger(run, name="logs", version=csv.version)]
        if loggers:
            given = options["logger"] or []
            options["logger"] = [*(given if isinstance(given, list | tuple) else [given]), *loggers]
        if options.get("enable_model_summary") is None:
            options["enable_model_summary"] = False
        options["default_root_dir"] = run
        try:
            trainer = TrainerOptions(**options)._trainer()
        except (MisconfigurationException, ValueError, TypeError, ModuleNotFoundError) as error:
            raise trainer_error(error) from error
        if str(options.get("precision")) in ("16", "16-mixed") and trainer.strategy.root_device.type == "cpu":
            raise RecpoError(  # Lightning would take bf16-mixed instead
                f"trainer.precision: {options['precision']} needs a GPU; on a CPU set 32-true, 64-true, bf16-mixed "
                "or bf16-true",
                code="unsupported",
                field="trainer.precision",
            )
        return trainer

    def _trainer(self) -> Trainer:
        # in these words: the parser reads from them whose options these are
        return Trainer(**self._options)


def trainer_error(error: Exception) -> RecpoError:
    """What Lightning says about options that it does not accept, in one line."""
    return RecpoError(f"trainer: {' '.join(str(error).split())}", code="bad_value", field="trainer")


def _quieten() -> None:
    """Silences Lightning's messages about itself. Warnings about the user's options remain."""
    for name in ("utilities.rank_zero", "accelerators.cuda"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.WARNING)
    # frozen copies stay in evaluation mode on purpose
    for message in (
        ".*AMP with fp16 is not supported on CPU.*",  # refused, see build
        ".*LeafSpec.*",
        ".*in eval mode at the start.*",
        ".*IterableDataset. has .__len__. defined.*",
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*recommended to use `self.log.*sync_dist=True.*",  # values that are logged per epoch are reduced already
        ".*all_gather.*deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(LearningOptions):
    """Every option of a training run.

    Attributes:
        data: the batches.
        policy: the policy to train; the catalog size comes from the data.
        module: your subclass of ``recpo.PreferenceModule``, which changes a step of training; null = PreferenceModule.
        trainer: options of lightning.Trainer.
        weight_averaging: validate and save a moving average of the weights (``{decay: .99}``), which overfits later
            than the weights themselves; null = the weights.
        patience: stop when the monitor has not improved for this many validations; null = train to the end.
        checkpoint_every: write last.ckpt every this many optimizer steps, and not only after every epoch.
        matmul_precision: precision of float32 matrix products on CUDA: high uses TF32 (10 bits of mantissa, several
            times faster), highest does not. The exact softmax over the catalog, its entropy and their gradients are
            float32 in either case.
        allocator: keep freed memory in the process (glibc only): up to a third faster on CPU, for somewhat more memory.
        progress: show a progress bar or, without a terminal, a line every half minute and after every epoch.
    """

    data: FeedbackDataModule
    policy: PolicyFactory = CatalogSoftmaxPolicy
    module: type[LightningModule] | None = None
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    weight_averaging: WeightAverage | None = None
    patience: PositiveInt | None = None
    checkpoint_every: PositiveInt | None = None
    matmul_precision: MatmulPrecision = "high"
    allocator: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trainer.validate()
        if self.weight_averaging is not None and self.trainer.shards_tables:
            raise RecpoError(
                "weight_averaging needs whole item tables on every rank, and trainer.strategy cuts them over the "
                "ranks: leave one of the two out",
                code="conflicting_options",
                field="weight_averaging",
            )
        if self.rollout is not None and self.rollout.candidates == "catalog" and self.trainer.shards_tables:
            raise RecpoError(
                "rollout.candidates: catalog needs a whole item table on every rank, and trainer.strategy cuts it over "
                "them: set candidates to draws, or leave trainer.strategy out",
                code="conflicting_options",
                field="rollout.candidates",
            )
