"""Pointwise reward model of several targets: will the item be watched for long, liked, disliked?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from recpo.contracts import Objective
from recpo.errors import RecpoError
from recpo.objectives.health import masked_mean
from recpo.objectives.inputs import required
from recpo.ops.reduce import aggregate, zero_masked
from recpo.types import LossOutput, ObjectiveInputs

TARGETS = ("long_watch", "like", "dislike")
"""What the scores of a pointwise reward model are about, in their order."""


def pointwise_reward_loss(
    scores: Tensor, targets: Tensor, mask: Tensor, positive_weight: Tensor | None = None
) -> Tensor:
    """``-w_k y log sigmoid(score) - (1 - y) log(1 - sigmoid(score))`` per target: binary cross-entropy.

    Gradient on a score: ``sigmoid(score) - y`` at weight 1, in general ``(w y + 1 - y) sigmoid(score) - w y``.

    Args:
        scores: ``[..., K]``.
        targets: ``[..., K]``, 0 or 1; anything where masked.
        mask: ``[..., K]``, True keeps.
        positive_weight: ``[K]``, weight ``w_k`` of the positives of a target; None = 1. With another weight the
            probabilities are off by the odds ``w_k``, which a calibration takes back.

    Returns:
        ``[..., K]``, 0 where masked.
    """
    scores, targets = zero_masked(scores, mask), zero_masked(targets.to(scores.dtype), mask)
    positive = targets if positive_weight is None else targets * positive_weight
    return zero_masked(positive * softplus(-scores) + (1.0 - targets) * softplus(scores), mask)


@dataclass(frozen=True)
class PointwiseReward(Objective):
    """Pointwise reward model: binary cross-entropy of three scores per item, for the targets of ``TARGETS``.

    A logged item was watched for long from ``long_watch`` on, liked from ``like`` on (both watch quantiles, or whatever
    label the data was prepared with), and disliked where the log says so. The loss is the mean over the known targets
    of the kept positions. It trains the score head and, through it, the encoder; log-probabilities are not read.

    Attributes:
        long_watch: least label of an item that was watched for long.
        like: least label of an item that was liked.
        positive_weights: weight of the positives of each target.
    """

    long_watch: float = 0.5
    like: float = 0.9
    positive_weights: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        if not all(0.0 < weight < float("inf") for weight in self.positive_weights):
            raise RecpoError(f"PointwiseReward: positive_weights must be above 0, got {list(self.positive_weights)}")
        if not 0.0 < self.long_watch <= self.like <= 1.0:
            raise RecpoError(
                "PointwiseReward: a label lies in [0, 1], so it takes 0 < long_watch <= like <= 1, got long_watch "
                f"{self.long_watch} and like {self.like}"
            )

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({"score", "labels"})

    @property
    def num_scores(self) -> int:
        """One per target."""
        return len(TARGETS)

    @property
    def reads_log_prob(self) -> bool:
        """False: only scores are trained."""
        return False

    def targets(self, label: Tensor, dislike: Tensor) -> tuple[Tensor, Tensor]:
        """The targets ``[..., K]`` of labels ``[...]`` and which of them are known, each bool.

        Whether an item was watched for long or liked is not known where its label is missing (nan).
        """
        labeled = ~label.isnan()
        disliked = dislike.bool()
        targets = torch.stack([label >= self.long_watch, label >= self.like, disliked], -1)
        return targets, torch.stack([labeled, labeled, torch.ones_like(labeled)], -1)

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Known targets of the kept positions."""
        return self._targets(inputs)[1].sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        targets, mask = self._targets(inputs)
        scores = required(inputs.scores, "scores", self)
        weight = torch.tensor(self.positive_weights, dtype=scores.dtype, device=scores.device)
        losses = pointwise_reward_loss(scores, targets, mask, weight)
        with torch.no_grad():
            probabilities = zero_masked(scores, mask).sigmoid()
            metrics = {}
            for k, name in enumerate(TARGETS):
                known = mask[..., k]
                metrics[f"{name}_loss"] = masked_mean(losses[..., k], known)
                metrics[f"{name}_rate"] = masked_mean(targets[..., k], known)
                metrics[f"{name}_predicted"] = masked_mean(probabilities[..., k], known)
        return LossOutput(aggregate(losses, mask, count=inputs.denominator), metrics)

    def _targets(self, inputs: ObjectiveInputs) -> tuple[Tensor, Tensor]:
        quantile = required(inputs.label, "label", self)
        targets, known = self.targets(quantile, required(inputs.dislike, "dislike", self))
        return targets, known & inputs.logp.mask.bool().any(-1, keepdim=True)
