"""Maximum likelihood: next-item pre-training, behavior cloning of positive items, and weighted by the advantage.

The weights are exponentials of advantages (AWR, reward-weighted fine-tuning) and inverse propensities.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recpo.base.contracts import Objective, Requirement
from recpo.base.errors import ClosedUnitInterval, PositiveFloat, RecpoError
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import masked_mean, required, validate_log_probs
from recpo.ops.reduce import aggregate, check_same_shape, denominator, zero_masked


@dataclass(frozen=True)
class Likelihood(Objective):
    """Negative log-likelihood of the kept tokens: ``-logp``, averaged.

    Gradient: ``-1`` on ``grad logp`` of every kept token. With ``positive_only`` it is filtered behavior cloning: all
    other positions leave both the loss and its denominator.

    Attributes:
        positive_only: count only positions with a positive advantage; needs an advantage estimator.
        aggregation: how token losses become one number; ``seq-mean-token-sum`` is the likelihood per item.
    """

    positive_only: bool = False
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({Requirement.ADVANTAGES} if self.positive_only else ())

    @property
    def zero_advantage_is_inert(self) -> bool:
        """See ``Objective.zero_advantage_is_inert``."""
        return self.positive_only

    def _mask(self, inputs: ObjectiveInputs) -> Tensor:
        mask = inputs.logp.mask.bool()
        if self.positive_only:
            mask = mask & (required(inputs, "advantages", self) > 0).unsqueeze(-1)
        return mask

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Counted tokens, or items, by ``aggregation``."""
        return denominator(self._mask(inputs), self.aggregation)

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        mask = self._mask(inputs)
        logp = zero_masked(inputs.logp.policy, mask)
        loss = aggregate(-logp, mask, self.aggregation, count=inputs.denominator)
        with torch.no_grad():
            metrics = {"nll": aggregate(-logp, mask, "seq-mean-token-sum")}
        return LossOutput(loss, metrics)


def likelihood_weights(
    advantages: Tensor,
    *,
    logp_behavior: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 0.25,
    max_weight: float = 20.0,
    ips_power: float = 0.0,
    max_ips: float = 10.0,
) -> Tensor:
    """``min(exp(A / temperature), max_weight) * min(propensity^-ips_power, max_ips)``, per item.

    Args:
        advantages: ``[..., S]``.
        logp_behavior: ``[..., S]`` log-propensities; only read with ``ips_power``.
        mask: ``[..., S]``, True keeps.
        temperature: above 0, in units of the advantage: smaller = only the best items count.
        max_weight: cap on the first factor.
        ips_power: 0 = no propensities; 1 = full inverse propensities, unbiased up to the cap and noisy.
        max_ips: cap on the second factor.

    Returns:
        ``[..., S]``; 0 at masked items; no gradient.

    Raises:
        RecpoError: ``ips_power`` without propensities, or shapes that differ.
    """
    check_same_shape(advantages=advantages, logp_behavior=logp_behavior, mask=mask)
    log_weight = (advantages.detach() / temperature).clamp(max=math.log(max_weight))
    if ips_power:
        if logp_behavior is None:
            raise RecpoError("ips_power needs logp_behavior", code="missing_option", field="logp_behavior")
        log_weight = log_weight + (-ips_power * logp_behavior.detach()).clamp(max=math.log(max_ips))
    weight = log_weight.exp()
    return weight if mask is None else zero_masked(weight, mask)


def weighted_likelihood_loss(logp: Tensor, weights: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """``-w sum_t logp_t`` per item (AWR, arXiv 1910.00177).

    Gradient: ``-w`` on each token. It is the projection of ``pi_behavior exp(A / temperature)``, the optimum of ``E[A]
    - temperature KL(pi || pi_behavior)``, onto the policy. With full inverse propensities the behavior policy cancels,
    and the optimum is ``exp(A / temperature)``.

    Args:
        logp: ``[..., T]``.
        weights: ``[...]``, see ``likelihood_weights``; no gradient flows into it.
        mask: ``[..., T]``.

    Returns:
        ``[...]``; 0 for an item without any kept token.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(logp=logp, mask=mask)
    check_same_shape(weights=weights, items=logp[..., 0])
    kept = None if mask is None else mask.bool().any(-1)
    return -zero_masked(weights.detach(), kept) * zero_masked(logp, mask).sum(-1)


@dataclass(frozen=True)
class WeightedLikelihood(Objective):
    """Likelihood of every logged item, weighted by ``exp(A / temperature)`` and a power of its inverse propensity.

    Advantage-weighted regression (AWR, arXiv 1910.00177); on graded feedback exponentially reward-weighted fine-tuning
    (Exp-RSFT, arXiv 2603.10279); with capped inverse propensities PWLL (arXiv 2509.03456). Weights are never negative:
    a disliked item is imitated less, but not pushed down.

    Attributes:
        temperature: temperature in units of the advantage; two grades differ by at most 1.
        max_weight: cap on ``exp(A / temperature)``.
        ips_power: power of the inverse propensities; 0 = none, 1 = in full. Reads the propensities of the log: set
            ``old_policy: logged``.
        max_ips: cap on that power.
        self_normalized: divide by the sum of the weights of the full optimizer step instead of by its number of items,
            so that the size of the step does not depend on the temperature.
    """

    temperature: PositiveFloat = 0.25
    max_weight: PositiveFloat = 20.0
    ips_power: ClosedUnitInterval = 0.0
    max_ips: PositiveFloat = 10.0
    self_normalized: bool = True

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        of_log = {Requirement.OLD, Requirement.PROPENSITIES} if self.ips_power else set()
        return frozenset({Requirement.ADVANTAGES} | of_log)

    def _weights(self, inputs: ObjectiveInputs) -> Tensor:
        tokens = inputs.logp.mask.bool()
        behavior = None
        if self.ips_power:
            behavior = zero_masked(required(inputs, "old", self), tokens).sum(-1)
        return likelihood_weights(
            required(inputs, "advantages", self),
            logp_behavior=behavior,
            mask=tokens.any(-1),
            temperature=self.temperature,
            max_weight=self.max_weight,
            ips_power=self.ips_power,
            max_ips=self.max_ips,
        )

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """The sum of the weights, or kept items without ``self_normalized``."""
        if not self.self_normalized:
            return inputs.logp.mask.bool().any(-1).sum()
        return self._weights(inputs).double().sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        tokens, weights = inputs.logp.mask.bool(), self._weights(inputs)
        losses = weighted_likelihood_loss(inputs.logp.policy, weights, mask=tokens)
        # not ``aggregate``, which divides by 1 at least: a sum of weights may lie below
        total = self.count(inputs) if inputs.denominator is None else inputs.denominator
        loss = losses.float().sum() if losses.dtype in (torch.float16, torch.bfloat16) else losses.sum()
        loss = loss / torch.where(total > 0, total, 1.0).to(loss.dtype)
        return LossOutput(loss, self._health(inputs, weights, tokens.any(-1)))

    @torch.no_grad()
    def _health(self, inputs: ObjectiveInputs, weights: Tensor, kept: Tensor) -> dict[str, Tensor]:
        weights = weights.float()
        total, square = weights.sum(), weights.square().sum()
        logp = zero_masked(inputs.logp.policy.detach(), inputs.logp.mask).sum(-1)
        tiny = torch.finfo(weights.dtype).tiny
        return {
            "nll": masked_mean(-logp, kept),
            "weight_mean": masked_mean(weights, kept),
            "weight_max": weights.amax() if weights.numel() else total,
            "effective_sample_size": total.square() / (square * kept.sum().clamp(min=1)).clamp(min=tiny),
        }
