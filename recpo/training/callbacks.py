"""What watches over a training: guards against divergence and collapse, lost ranks, averaged weights, checkpoints."""

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from recpo.artifacts.documents import flush
from recpo.artifacts.outputs import PARTIAL
from recpo.base.errors import RecpoError
from recpo.training.module import PreferenceModule
from recpo.training.options import CollapseLimits, WeightAverage
from recpo.training.run import Run
from recpo.training.trainer import Throughput, TrainOptions


def callbacks_of(options: TrainOptions, module: PreferenceModule, out: Path) -> list[Callback]:
    """Those of every run, and those that its options ask for, in the order in which they are called."""
    checkpoints = out / Run.CHECKPOINTS
    callbacks: list[Callback] = [ReportLostRanks(out), FiniteGuard(), ValidateAtEnd(), Throughput()]
    if options.rollout is not None:
        callbacks.append(CollapseGuard(options.rollout.collapse, module.ranking_metric))
    if options.weight_averaging is not None:
        callbacks.append(WeightAveraging(options.weight_averaging))
    if options.patience is not None:
        callbacks.append(EarlyStopping(module.monitor, mode=module.monitor_mode, patience=options.patience))
    callbacks.append(BestCheckpoint(checkpoints, module.monitor, module.monitor_mode))
    return [*callbacks, LastCheckpoint(checkpoints, options.checkpoint_every)]


class FiniteGuard(Callback):
    """Stops a run whose loss or metrics are no longer finite, with an error that names the step and the metric.

    The loss is checked after every step, before the state is saved. With a single rank, the other metrics are checked
    too.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks the metrics of the step. The loss is the mean over the ranks, so all ranks stop together."""
        names = ["train/loss"]
        if trainer.world_size == 1:  # every rank has its own values of the other metrics
            names += [name for name in trainer.callback_metrics if name.startswith("train/")]
        self._check(trainer, names)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the metrics of the validation."""
        self._check(trainer, [name for name in trainer.callback_metrics if name.startswith("val/")])

    def _check(self, trainer: Trainer, names: list[str]) -> None:
        values = {name: trainer.callback_metrics[name].float() for name in names if name in trainer.callback_metrics}
        if not values or torch.stack(list(values.values())).isfinite().all():
            return
        name, value = next((name, value) for name, value in values.items() if not value.isfinite())
        raise RecpoError(
            f"training has diverged: at step {trainer.global_step} {name} is {float(value)}. Lower the learning rate "
            "(optimizer.init_args.lr), clip gradients (trainer.gradient_clip_val), or raise a policy.temperature close "
            "to 0; earlier checkpoints are kept",
            code="diverged",
        )


class CollapseGuard(Callback):
    """Stops a collapsed run, with an error that names the metric and its limit.

    Args:
        limits: see ``CollapseLimits``.
        monitor: validation metric of ``min_ndcg_share``.
    """

    def __init__(self, limits: CollapseLimits, monitor: str) -> None:
        self._limits, self._monitor = limits, monitor
        self._least = {
            "train/valid_share": limits.min_valid_share,
            "train/unique_share": limits.min_unique_share,
            "train/draw_entropy": limits.min_entropy,
        }
        self._zero_steps = 0
        self._best = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks the metrics of the step, averaged over the ranks, so all ranks stop together."""
        groups = ["train/zero_group_share", "train/dropped_group_share"]
        values = self._values(trainer, [*self._least, "train/approx_kl", *groups])
        step = trainer.global_step
        for name, least in self._least.items():
            if least is not None and name in values and values[name] < least:
                _stop(name, values[name], f"fell below {least}", step)
        most, moved = self._limits.max_kl, values.get("train/approx_kl")
        if most is not None and moved is not None and moved > most:
            _stop("train/approx_kl", moved, f"rose above {most}", step)
        without = max(groups, key=lambda name: values.get(name, 0.0))
        self._zero_steps = self._zero_steps + 1 if values.get(without, 0.0) >= 1.0 else 0
        longest = self._limits.zero_group_steps
        if longest is not None and self._zero_steps >= longest:
            _stop(without, values[without], f"was 1 for {longest} steps: no group has an advantage", step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares the validation metric with the best one so far."""
        whole = not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")
        value = getattr(pl_module, "validated", {}).get(self._monitor)
        if value is None or not whole:
            return
        share, value = self._limits.min_ndcg_share, float(value)
        if share is not None and value < share * self._best:
            _stop(self._monitor, value, f"fell below {share} of its best, {self._best:.4f}", trainer.global_step)
        self._best = max(self._best, value)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {"zero_steps": self._zero_steps, "best": self._best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``."""
        self._zero_steps, self._best = state_dict["zero_steps"], state_dict["best"]

    def _values(self, trainer: Trainer, names: list[str]) -> dict[str, float]:
        metrics = trainer.callback_metrics
        known = [name for name in names if name in metrics]
        if not known:
            return {}
        values = torch.stack([metrics[name].float() for name in known]).to(trainer.strategy.root_device)
        return dict(zip(known, trainer.strategy.reduce(values, reduce_op="mean").tolist(), strict=True))


def _stop(name: str, value: float, what: str, step: int) -> None:
    raise RecpoError(
        f"the policy has collapsed: at step {step} {name} is {value:.4g}, it {what}. Lower the learning rate or the "
        "number of rollout.epochs, set rollout.max_kl, raise objective.init_args.kl_coef or entropy_coef, or change "
        "the limit in rollout.collapse (null = none)",
        code="diverged",
        field=name,
    )


class ValidateAtEnd(Callback):
    """Validates a run that ``max_steps`` ends within an epoch, as at the end of an epoch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Makes Lightning validate within the epoch if training is about to stop."""
        if trainer.global_step >= trainer.max_steps > 0:
            trainer.should_stop = True


_OBSERVER: Final = "child-process-observer"  # the name of Lightning's thread
#: in which rank 0 reports the failure by itself; one that waits in a collective for ever does not
GRACE_S: Final = 30.0


class ReportLostRanks(Callback):
    """Lets rank 0 report that another rank has ended, before Lightning would kill it silently.

    Every five seconds, Lightning checks whether the ranks that rank 0 started are alive. If one is not, it kills all
    ranks, including rank 0, by SIGKILL, so no process can report why. Usually rank 0 has noticed before, because its
    next collective fails; on a busy machine it may not have.

    Rank 0 has ``GRACE_S`` seconds to end by itself, as it does if a collective fails. After that it reports what
    happened, and all ranks of this machine are ended.

    Args:
        out: the run directory.
    """

    def __init__(self, out: Path) -> None:
        self._out = out

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Once the ranks have been started."""
        for thread in threading.enumerate():
            if thread.name == _OBSERVER and hasattr(thread, "_terminate_all"):
                thread._terminate_all = lambda observer=thread: self._end(observer)

    def _end(self, observer: Any) -> None:
        children = observer._child_processes
        time.sleep(GRACE_S)
        ended = next((process for process in children if process.returncode), None)
        for process in children:
            with suppress(OSError):
                process.send_signal(signal.SIGKILL)
        how = "" if ended is None else f" (process {ended.pid} ended with status {ended.returncode})"
        print(f"error: {lost_rank(self._out, 0)}{how}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread hangs in a collective, where no exception reaches it


def lost_rank(out: Path, rank: int) -> str:
    """What to say where a rank has lost another one."""
    again = f"recpo train --config {out}/{Run.RESOLVED} --resume true"
    return (
        f"rank {rank} has lost another rank of this run, which ended or does not answer (see what that one wrote, or "
        "whether its machine ran out of memory); once it is fixed, continue from the last checkpoint: " + again
    )


TRAINED = "trained_weights"
"""Entry of a checkpoint: the weights from which training continues. Its ``state_dict`` has the averages."""


class WeightAveraging(Callback):
    """Keeps ``average <- d_t average + (1 - d_t) weights`` after optimizer step t, ``d_t = min(decay, t / (t + 9))``.

    The first averages forget the initial weights quickly: after t steps, the average covers about the last tenth of
    them. Validation uses the averages, and checkpoints store them as their weights. A resumed run continues with both.

    This is our own code because Lightning's ``WeightAveraging`` (2.6) copies the complete module, including the frozen
    reference policy, the item features and every other buffer, and averages with a constant decay from the first step.

    Args:
        options: see ``WeightAverage``.
    """

    def __init__(self, options: WeightAverage) -> None:
        self._decay, self._steps = options.decay, 0
        self._averages: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts from the initial weights, or moves the averages of a checkpoint to the training device."""
        self._averages = {
            name: self._averages.get(name, weight).detach().to(weight.device, copy=True)
            for name, weight in _trained(pl_module).items()
        }

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the weights of the step to the averages."""
        if trainer.global_step <= self._steps:  # an optimizer step has several micro-batches
            return
        self._steps = trainer.global_step
        decay = min(self._decay, self._steps / (self._steps + 9))
        weights = [weight.detach() for weight in _trained(pl_module).values()]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swaps the averages in."""
        self._exchange(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swaps the weights back in."""
        self._exchange(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stores the averages as the weights of the checkpoint, and the trained weights beside them."""
        weights = checkpoint["state_dict"]
        checkpoint[TRAINED] = {name: weights[name] for name in self._averages}
        checkpoint["state_dict"] = {**weights, **self._averages}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores both: Lightning has already loaded the averages into the module as its weights."""
        weights: Mapping[str, Tensor] = checkpoint[TRAINED]
        self._averages = {name: checkpoint["state_dict"][name].clone() for name in weights}
        self._steps = int(checkpoint["global_step"])
        for name, weight in _trained(pl_module).items():
            weight.data.copy_(weights[name])

    @torch.no_grad()
    def _exchange(self, module: LightningModule) -> None:
        for name, weight in _trained(module).items():
            trained = weight.detach().clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(trained)


def _trained(module: LightningModule) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest values that mallopt takes as int: blocks below 1 GiB come from the heap, the heap's end is not given back.
_MMAP_BYTES = 1 << 30
_TRIM_BYTES = (1 << 31) - 1


def tune_allocator() -> bool:
    """Tells glibc to keep freed memory instead of returning it to the kernel after every step.

    A training step frees and asks for the same tensors of megabytes again and again; by default each of them is mapped
    again and page-faulted in, which costs up to a third of a step on a CPU. The price is a resident size that stays at
    its peak. Call it before the first large tensor. Linux with glibc only; elsewhere nothing happens.

    Returns:
        True if the allocator took both settings.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))


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

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        """Without validation, too: Lightning would warn at every epoch that the monitor is missing."""
        return not trainer.limit_val_batches or super()._should_skip_saving_checkpoint(trainer)


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
