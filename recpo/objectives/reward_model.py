"""Reward models: a score head that learns which item is better (pairwise) or how good each is (pointwise)."""

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

TARGETS = ("grade", "dislike")
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
    """``-w_k y log sigmoid(score) - (1 - y) log(1 - sigmoid(score))`` per target: cross-entropy, soft targets allowed.

    Its minimum over scores is where ``sigmoid(score)`` is the mean of the targets (at weight 1): a regression of the
    mean whose predictions stay in (0, 1). Gradient on a score: ``sigmoid(score) - y`` at weight 1, in general
    ``(w y + 1 - y) sigmoid(score) - w y``.

    Args:
        scores: ``[..., K]``.
        targets: ``[..., K]``, in [0, 1]; anything where masked.
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
    """Pointwise reward model: cross-entropy of two scores per item, for the targets of ``TARGETS``.

    ``sigmoid`` of the first score is the expected grade of the event (``recpo.feedback.GRADES``), a number in [0, 1]
    that enters the cross-entropy as a soft label; that of the second is the probability of a dislike, which the log
    says of every event. A disliked event has the grade 0. The loss is the mean over the known targets of the kept
    positions. It trains the score head and, through it, the encoder; log-probabilities are not read.

    Attributes:
        positive_weight: weight of a dislike against an event without one, above 0; with another weight than 1 the
            probabilities are true only after ``recpo calibrate``.
    """

    positive_weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.positive_weight < float("inf"):
            raise RecpoError(f"PointwiseReward: positive_weight must be above 0, got {self.positive_weight}")

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({"score", "labels", "grades"})

    @property
    def num_scores(self) -> int:
        """One per target."""
        return len(TARGETS)

    @property
    def reads_log_prob(self) -> bool:
        """False: only scores are trained."""
        return False

    def targets(self, grade: Tensor, dislike: Tensor) -> tuple[Tensor, Tensor]:
        """The targets ``[..., K]`` of events ``[...]``, and which of them are known, bool.

        The target of an unknown grade (nan) is 0.
        """
        graded = ~grade.isnan()
        targets = torch.stack([torch.where(graded, grade, 0.0), dislike.bool().to(grade.dtype)], -1)
        return targets, torch.stack([graded, torch.ones_like(graded)], -1)

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Known targets of the kept positions."""
        return self._targets(inputs)[1].sum()

    def losses(self, scores: Tensor, targets: Tensor, known: Tensor) -> Tensor:
        """``pointwise_reward_loss`` with the weight of dislikes, ``[..., K]``."""
        weight = torch.tensor([1.0, self.positive_weight], dtype=scores.dtype, device=scores.device)
        return pointwise_reward_loss(scores, targets, known, weight)

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        targets, mask = self._targets(inputs)
        scores = required(inputs.scores, "scores", self)
        losses = self.losses(scores, targets, mask)
        with torch.no_grad():
            predicted = zero_masked(scores, mask).sigmoid()
            metrics = {}
            for k, name in enumerate(TARGETS):
                known = mask[..., k]
                metrics[f"{name}_loss"] = masked_mean(losses[..., k], known)
                metrics[f"{name}_mean"] = masked_mean(targets[..., k], known)
                metrics[f"{name}_predicted"] = masked_mean(predicted[..., k], known)
        return LossOutput(aggregate(losses, mask, count=inputs.denominator), metrics)

    def _targets(self, inputs: ObjectiveInputs) -> tuple[Tensor, Tensor]:
        grade = required(inputs.grades, "grades", self).detach()
        targets, known = self.targets(grade, required(inputs.dislike, "dislike", self))
        return targets, known & inputs.logp.mask.bool().any(-1, keepdim=True)
