"""Stops a run that has diverged, or a policy that has collapsed while learning from its own candidates."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from recpo.base.errors import RecpoError
from recpo.training.options import CollapseLimits

IN_TERMINAL = frozenset(
    {
        "reward_mean",
        "monitor_reward_mean",
        "approx_kl",
        "clip_fraction",
        "unique_share",
        "zero_group_share",
        "draw_entropy",
    }
)
"""Training metrics that the progress bar shows beside the loss. The loggers get all metrics."""


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
        raise diverged(f"{name} is {float(value)}", trainer.global_step)


def diverged(what: str, step: int) -> RecpoError:
    """The error of a diverged run."""
    return RecpoError(
        f"training has diverged: at step {step} {what}. Lower the learning rate (optimizer.init_args.lr), clip "
        "gradients (trainer.gradient_clip_val), or raise a policy.temperature close to 0; earlier checkpoints are kept"
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
        self._most = {"train/approx_kl": limits.max_kl}
        self._zero_steps = 0
        self._best = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Checks the metrics of the step, averaged over the ranks, so all ranks stop together."""
        groups = ["train/zero_group_share", "train/dropped_group_share"]
        values = self._values(trainer, [*self._least, *self._most, *groups])
        step = trainer.global_step
        for name, least in self._least.items():
            if least is not None and name in values and values[name] < least:
                _stop(name, values[name], f"fell below {least}", step)
        for name, most in self._most.items():
            if most is not None and name in values and values[name] > most:
                _stop(name, values[name], f"rose above {most}", step)
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
        "the limit in rollout.collapse (null = none)"
    )
