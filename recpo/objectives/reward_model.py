"""Reward models: a score head that learns which item is better (pairwise) or how good each item is (pointwise)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from recpo.base.contracts import Objective, Requirement
from recpo.base.errors import PositiveFloat, RecpoError
from recpo.base.features import Reads
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import masked_mean, required
from recpo.objectives.preference import preference_lists
from recpo.ops.reduce import aggregate, check_same_shape, zero_masked

TARGETS = ("grade", "dislike")
"""What the first scores of a pointwise reward model are about, in their order; behaviors follow."""


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
        RecpoError: shapes that differ.
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
        margin: lead that the chosen item's score should have over the others.
    """

    margin: float = 0.0

    requires = frozenset({Requirement.CHOSEN, Requirement.SCORE})
    reads_log_prob = False  # only scores are compared

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Lists with exactly one chosen item."""
        return preference_lists(inputs, self).kept.sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        lists = preference_lists(inputs, self)
        scores = required(inputs, "scores", self)[..., 0]
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
        positive_weight: ``[K]``, weight ``w_k`` of the positives of a target; None = 1. With another weight, the odds
            are off by the factor ``w_k``, which a calibration corrects.

    Returns:
        ``[..., K]``, 0 where masked.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_same_shape(scores=scores, targets=targets, mask=mask)
    if positive_weight is not None and positive_weight.shape != scores.shape[-1:]:
        raise RecpoError(
            f"positive_weight has shape {tuple(positive_weight.shape)}: one per target is ({scores.shape[-1]},)",
            code="wrong_shape",
            field="positive_weight",
        )
    scores, targets = zero_masked(scores, mask), zero_masked(targets.to(scores.dtype), mask)
    positive = targets if positive_weight is None else targets * positive_weight
    return zero_masked(positive * softplus(-scores) + (1.0 - targets) * softplus(scores), mask)


@dataclass(frozen=True)
class PointwiseReward(Objective):
    """Pointwise reward model: cross-entropy of one score per item and target: grade, dislike, and named behaviors.

    With ``target: positive``, the first score is the probability of a positive event instead of the grade.

    ``sigmoid`` of the first score is the expected grade of the event (``base.feedback.GRADES``), a number in [0, 1]
    that enters the cross-entropy as a soft label; ``sigmoid`` of the second score is the probability of a dislike, and
    that of every other score is the probability of one behavior. The log has dislikes and behaviors for every event. A
    disliked event has the grade 0. The loss is the mean over the known targets of the kept positions. It trains the
    score head and, through it, the encoder; log-probabilities are not read.

    Attributes:
        positive_weight: weight of a dislike relative to an event without one, above 0. If it is not 1, the
            probabilities are correct only after ``recpo calibrate``.
        behaviors: more targets, by their names in the prepared data (``like``, ``follow``, ...).
        target: target of the first score: the grade, or 1 for a positive event by the log's own definition
            (``recpo.base.feedback.FeedbackRule``) and 0 otherwise. A grade has more information about an event; if only
            positive events matter, its other steps are noise.
    """

    positive_weight: PositiveFloat = 1.0
    behaviors: tuple[str, ...] = ()
    target: Literal["grade", "positive"] = "grade"
    #: bits of the behaviors in the training data (``for_behaviors``); not an option
    _bits: ClassVar[tuple[int, ...] | None] = None

    reads_log_prob = False  # only scores are trained

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.target_names)) < len(self.target_names):
            raise RecpoError(
                f"PointwiseReward: behaviors are {', '.join(self.behaviors)}; name each once, and none of "
                f"{', '.join(self.target_names[:2])}, which are predicted anyway",
                code="duplicate",
                field="PointwiseReward.behaviors",
            )

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        requires = {Requirement.SCORE, Requirement.DISLIKES, Requirement.GRADES}
        if self.behaviors:
            requires.add(Requirement.BEHAVIORS)
        if self.target == "positive":
            requires.add(Requirement.POSITIVES)
        return frozenset(requires)

    @property
    def reads(self) -> Reads:
        """See ``Objective.reads``."""
        return Reads(behaviors=bool(self.behaviors))

    def for_behaviors(self, names: tuple[str, ...]) -> Self:
        """See ``Objective.for_behaviors``."""
        if unknown := [name for name in self.behaviors if name not in names]:
            raise RecpoError(
                f"PointwiseReward predicts the behavior {unknown[0]!r}, which the data lacks (it has "
                f"{', '.join(names) or 'none'}); name its column in `behaviors` of recpo prepare",
                code="unknown_name",
                field="PointwiseReward.behaviors",
            )
        known = replace(self)
        object.__setattr__(known, "_bits", tuple(names.index(name) for name in self.behaviors))
        return known

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets of the scores, in their order."""
        return (self.target, TARGETS[1], *self.behaviors)

    @property
    def num_scores(self) -> int:
        """One per target."""
        return len(self.target_names)

    def targets(
        self, grade: Tensor, dislike: Tensor, behaviors: Tensor | None = None, positive: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The targets ``[..., K]`` of events ``[...]``, and which of them are known, bool.

        The first target of an event of unknown grade (nan) is 0, and not known.

        Args:
            grade: ``[...]``, nan = unknown.
            dislike: ``[...]`` bool.
            behaviors: ``[...]`` bit sets (``Slates.behaviors``), where behaviors are predicted.
            positive: ``[...]`` bool, where it is the first target.
        """
        graded, columns = ~grade.isnan(), [dislike.bool()]
        first = grade
        if self.target == "positive":
            if positive is None:
                raise Requirement.POSITIVES.missing(self)
            first = positive.bool().to(grade.dtype)
        if self.behaviors:
            if behaviors is None:
                raise Requirement.BEHAVIORS.missing(self)
            if self._bits is None:
                raise RecpoError(
                    "PointwiseReward: call for_behaviors with the names of the data's behaviors",
                    code="missing_option",
                    field="PointwiseReward.behaviors",
                )
            columns += [(behaviors >> bit & 1).bool() for bit in self._bits]
        targets = torch.stack([torch.where(graded, first, 0.0), *(column.to(grade.dtype) for column in columns)], -1)
        return targets, torch.stack([graded, *(torch.ones_like(graded) for _ in columns)], -1)

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Known targets of the kept positions."""
        return self._targets(inputs)[1].sum()

    def losses(self, scores: Tensor, targets: Tensor, known: Tensor) -> Tensor:
        """``pointwise_reward_loss`` with the weight of dislikes, ``[..., K]``."""
        weight = scores.new_ones(2 + len(self.behaviors))
        weight[1] = self.positive_weight
        return pointwise_reward_loss(scores, targets, known, weight)

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        targets, mask = self._targets(inputs)
        scores = required(inputs, "scores", self)
        losses = self.losses(scores, targets, mask)
        with torch.no_grad():
            predicted = zero_masked(scores, mask).sigmoid()
            metrics = {}
            for k, name in enumerate(self.target_names):
                known = mask[..., k]
                metrics[f"{name}_loss"] = masked_mean(losses[..., k], known)
                metrics[f"{name}_mean"] = masked_mean(targets[..., k], known)
                metrics[f"{name}_predicted"] = masked_mean(predicted[..., k], known)
        return LossOutput(aggregate(losses, mask, count=inputs.denominator), metrics)

    def _targets(self, inputs: ObjectiveInputs) -> tuple[Tensor, Tensor]:
        grade = required(inputs, "grades", self).detach()
        dislike = required(inputs, "dislike", self)
        targets, known = self.targets(grade, dislike, inputs.behaviors, inputs.positive)
        return targets, known & inputs.logp.mask.bool().any(-1, keepdim=True)
