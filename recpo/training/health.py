"""What is watched while a policy learns from its own candidates, and when such a run counts as collapsed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from recpo.errors import RecpoError

IN_TERMINAL = frozenset(
    {"reward_mean", "judge_mean", "approx_kl", "clip_fraction", "unique_share", "zero_group_share", "draw_entropy"}
)
"""Training metrics that the progress bar shows beside the loss; the loggers get all of them."""


@dataclass(frozen=True)
class CollapseLimits:
    """Where a run counts as collapsed; null switches a limit off.

    Attributes:
        min_valid_share: least share of draws that are items.
        min_unique_share: least share of draws that are no repeats in their group.
        min_entropy: least entropy of what candidates are drawn from, in nats per item.
        max_kl: largest mean of ``logp_old - logp``, in nats per token.
        zero_group_steps: so many steps in a row in which no group has an advantage.
        min_ndcg_share: least validation NDCG as a share of the highest one seen (with ``trainer.num_sanity_val_steps``
            -1 that of the policy which training starts from is among them).
    """

    min_valid_share: float | None = 0.5
    min_unique_share: float | None = 0.2
    min_entropy: float | None = 0.1
    max_kl: float | None = 2.0
    zero_group_steps: int | None = 50
    min_ndcg_share: float | None = 0.3

    def __post_init__(self) -> None:
        negative = [field.name for field in fields(self) if (getattr(self, field.name) or 0) < 0]
        if negative:
            raise RecpoError(f"collapse.{negative[0]} must not be negative, got {getattr(self, negative[0])}")


class CollapseGuard(Callback):
    """Stops a run that has collapsed, with an error that names the number and its limit.

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
        """Looks at the metrics of the step, averaged over the ranks, so that all of them stop together."""
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
        """What a resumed run must know."""
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
        "the limit in collapse (null = none)"
    )
