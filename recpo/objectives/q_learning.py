"""Q-learning head on the history encoder (SQN, arXiv 2006.05779): the value-based baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import Objective, Requirement
from recpo.base.ranges import PositiveFloat
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import explained_variance, masked_mean, required, validate_log_probs
from recpo.ops.reduce import aggregate, denominator, zero_masked


@dataclass(frozen=True)
class QLearning(Objective):
    """Temporal-difference loss of a Q head beside the likelihood of the policy (SQN, arXiv 2006.05779).

    ``-likelihood_coef * logp + q_coef * 0.5 (Q(s, a) - target)^2`` per item. Both share the encoder, so the rewards
    shape its states. The policy itself learns by likelihood. With ``huber`` = d, the temporal-difference loss beyond an
    error of d is ``d (|Q - target| - 0.5 d)``.

    Attributes:
        likelihood_coef: weight of the likelihood of the logged item; 0 = only Q-learning.
        q_coef: weight of the temporal-difference loss.
        huber: error beyond which that loss is linear; none = never.
    """

    likelihood_coef: float = 1.0
    q_coef: float = 1.0
    huber: PositiveFloat | None = None

    requires = frozenset({Requirement.Q_VALUE})

    @property
    def reads_log_prob(self) -> bool:
        """False for Q-learning alone."""
        return self.likelihood_coef != 0

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Kept items."""
        return denominator(inputs.logp.mask, "seq-mean-token-sum")

    def q_loss(self, q_values: Tensor, q_targets: Tensor) -> Tensor:
        """The temporal-difference loss per item; no gradient flows into the targets."""
        error = q_values - q_targets.detach()
        squared = 0.5 * error.square()
        if self.huber is None:
            return squared
        return torch.where(error.abs() <= self.huber, squared, self.huber * (error.abs() - 0.5 * self.huber))

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        mask = inputs.logp.mask.bool()
        kept = mask.any(-1)
        q_values = zero_masked(required(inputs, "q_values", self), kept)
        targets = zero_masked(required(inputs, "q_targets", self).detach(), kept)
        temporal_difference = self.q_loss(q_values, targets)
        nll = -zero_masked(inputs.logp.policy, mask).sum(-1)
        total = self.q_coef * temporal_difference + self.likelihood_coef * nll
        loss = aggregate(total, kept, count=inputs.denominator)
        with torch.no_grad():
            metrics = {
                "q_loss": masked_mean(temporal_difference, kept),
                "q_mean": masked_mean(q_values, kept),
                "q_target_mean": masked_mean(targets, kept),
                "nll": masked_mean(nll, kept),
                "explained_variance": explained_variance(q_values, targets, kept),
            }
        return LossOutput(loss, metrics)
