"""Reward models: a score head that learns which item is better (pairwise) or what a user does with it (pointwise)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from recpo.contracts import Objective
from recpo.errors import RecpoError
from recpo.objectives.health import masked_mean
from recpo.objectives.inputs import required
from recpo.objectives.preference import preference_lists
from recpo.ops.reduce import aggregate, check_same_shape, zero_masked
from recpo.types import LossOutput, ObjectiveInputs

TARGETS = ("long_watch", "like", "dislike")
"""What the scores of a pointwise reward model are about, in their order."""


def pairwise_reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None) -> Tensor:
    """``-logsigmoid(chosen - rejected - margin)`` per pair (arXiv 2203.02155; margin arXiv 2307.09288).

    Gradient on ``chosen``: ``-sigmoid(-(chosen - rejected - margin))``, and its opposite on ``rejected``.

    Args:
        chosen: ``[B]`` (any shape) scores.
        rejected: same shape.
        margin: same shape or a number; None = 0.

    Returns:
        Same shape.

    Raises:
        ValueError: shapes that differ.
    """
    check_same_shape(chosen=chosen, rejected=rejected, margin=margin if isinstance(margin, Tensor) else None)
    gap = chosen - rejected
    return -logsigmoid(gap if margin is None else gap - margin)


@dataclass(frozen=True)
class PairwiseReward(Objective):
    """Pairwise reward model: ``-logsigmoid(score_chosen - score_rejected - margin)``.

    The chosen item is paired with every rejected item of its list; the list's loss is the mean over its pairs, and 0
    without any. It trains the score head and, through it, the encoder; log-probabilities are not read.

    Attributes:
        margin: by how much the chosen item's score should exceed the others.
    """

    margin: float = 0.0

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({"chosen", "score"})

    @property
    def reads_log_prob(self) -> bool:
        """False: only scores are compared."""
        return False

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Lists with exactly one chosen item."""
        return preference_lists(inputs, self).kept.sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        lists = preference_lists(inputs, self)
        scores = required(inputs.scores, "scores", self)[..., 0]
        scores = zero_masked(scores, lists.is_chosen | lists.is_rejected)
        chosen = lists.chosen(scores).unsqueeze(-1).expand_as(scores)
        pairs = pairwise_reward_loss(chosen, scores, self.margin)
        loss = aggregate(lists.pair_mean(pairs), lists.kept, count=inputs.denominator)
        with torch.no_grad():
            metrics = {
                "score_chosen": masked_mean(scores, lists.is_chosen),
                "score_rejected": masked_mean(scores, lists.is_rejected),
                "score_accuracy": masked_mean(chosen > scores, lists.is_rejected),
                "dropped_list_share": masked_mean(~lists.kept, torch.ones_like(lists.kept)),
            }
        return LossOutput(loss, metrics)


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

    Raises:
        ValueError: shapes that do not fit.
    """
    check_same_shape(scores=scores, targets=targets, mask=mask)
    if positive_weight is not None and positive_weight.shape != scores.shape[-1:]:
        raise ValueError(
            f"positive_weight has shape {tuple(positive_weight.shape)}: one per target is ({scores.shape[-1]},)"
        )
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
