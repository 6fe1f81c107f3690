"""Q-learning head on the history encoder (SQN, arXiv 2006.05779): the value-based baseline."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import Objective, Requirement
from recpo.base.errors import PositiveFloat
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import explained_variance, masked_mean, required, validate_log_probs
from recpo.ops.reduce import aggregate, check_same_shape, denominator, zero_masked


def bellman_target(
    rewards: Tensor,
    next_q: Tensor,
    dones: Tensor,
    *,
    gamma: float = 0.99,
    next_q_online: Tensor | None = None,
) -> Tensor:
    """``r + gamma (1 - done) max_a Q'(s', a)`` with ``Q'`` of the target network; no gradient.

    With ``next_q_online`` the action is chosen by the online network and valued by the target network (double
    Q-learning, arXiv 1509.06461), as SQN does.

    Args:
        rewards: ``[...]``.
        next_q: ``[..., V]`` of the target network at the next state; may be nan where ``dones``.
        dones: ``[...]`` bool or 0/1, 1 = the step ends its session.
        gamma: discount.
        next_q_online: ``[..., V]`` of the online network at the next state.

    Returns:
        ``[...]``.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_same_shape(rewards=rewards, dones=dones, next_states=next_q[..., 0])
    check_same_shape(next_q=next_q, next_q_online=next_q_online)
    next_q = next_q.detach()
    if next_q_online is None:
        best = next_q.amax(-1)
    else:
        best = next_q.gather(-1, next_q_online.detach().argmax(-1, keepdim=True)).squeeze(-1)
    return rewards.detach() + gamma * zero_masked(best, ~dones.bool())


def q_loss(q_values: Tensor, q_targets: Tensor, *, huber: float | None = None) -> Tensor:
    """``0.5 (q - target)^2`` per step; with ``huber`` = d, ``d (|q - target| - 0.5 d)`` beyond an error of d.

    Args:
        q_values: any shape.
        q_targets: same shape; no gradient flows into it.
        huber: error beyond which the loss is linear; None = never.

    Returns:
        Same shape.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(q_values=q_values, q_targets=q_targets)
    error = q_values - q_targets.detach()
    squared = 0.5 * error.square()
    if huber is None:
        return squared
    return torch.where(error.abs() <= huber, squared, huber * (error.abs() - 0.5 * huber))


@dataclass(frozen=True)
class QLearning(Objective):
    """Temporal-difference loss of a Q head beside the likelihood of the policy (SQN, arXiv 2006.05779).

    ``-likelihood_coef * logp + q_coef * 0.5 (Q(s, a) - target)^2`` per item. Both share the encoder, so the rewards
    shape its states. The policy itself learns by likelihood.

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

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        mask = inputs.logp.mask.bool()
        kept = mask.any(-1)
        q_values = zero_masked(required(inputs, "q_values", self), kept)
        targets = zero_masked(required(inputs, "q_targets", self).detach(), kept)
        temporal_difference = q_loss(q_values, targets, huber=self.huber)
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
