"""Averaged weights: validation and checkpoints use a moving average of the trained weights.

This is our own code because Lightning's ``WeightAveraging`` (2.6) copies the complete module, including the frozen
reference policy, the item features and every other buffer, and averages with a constant decay from the first step on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from recpo.training.options import WeightAverage

TRAINED = "trained_weights"
"""Entry of a checkpoint: the weights from which training continues. Its ``state_dict`` has the averages."""


class WeightAveraging(Callback):
    """Keeps ``average <- d_t average + (1 - d_t) weights`` after optimizer step t, ``d_t = min(decay, t / (t + 9))``.

    The first averages forget the initial weights quickly: after t steps, the average covers about the last tenth of
    them. Validation uses the averages, and checkpoints store them as their weights. A resumed run continues with both.

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
