"""Pairwise reward model (Bradley-Terry): a score head learns to rank the chosen item above the rejected ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recpo.contracts import Objective
from recpo.objectives.health import masked_mean
from recpo.objectives.inputs import preference_lists, required
from recpo.ops.reduce import aggregate, zero_masked
from recpo.types import LossOutput, ObjectiveInputs


def pairwise_reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None) -> Tensor:
    """``-logsigmoid(chosen - rejected - margin)`` per pair (arXiv 2203.02155; margin arXiv 2307.09288).

    Gradient on ``chosen``: ``-sigmoid(-(chosen - rejected - margin))``, and its opposite on ``rejected``.

    Args:
        chosen: ``[B]`` (any shape) scores.
        rejected: same shape.
        margin: same shape or a number; None = 0.

    Returns:
        Same shape.
    """
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
        chosen = lists.chosen(scores).unsqueeze(-1)
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
