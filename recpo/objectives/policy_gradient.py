"""The common part of the objectives that weight ``grad logp`` of every token by an advantage.

They differ in four choices: the level of the ratio and its clipping (both in ``token_loss``), the aggregation of token
losses, and the penalties that are added before the aggregation. Notation: ``rho = exp(logp - logp_old)``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import Objective
from recpo.base.errors import RecpoError
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.health import advantage_shares, masked_mean, negative_gradient_share, ratio_metrics
from recpo.objectives.inputs import required, validate_log_probs
from recpo.ops.kl import KLPenalty, kl_estimate
from recpo.ops.reduce import Aggregation, aggregate, denominator, over_tokens, zero_masked
from recpo.ops.surrogate import is_clipped


@dataclass(frozen=True)
class PolicyGradientObjective(Objective):
    """``aggregate(token_loss + kl_coef * KL(policy, reference) - entropy_coef * entropy)``.

    Penalties are added to the token losses before the aggregation. So all terms share one denominator, and splitting a
    step over micro-batches or ranks does not change it.

    Attributes:
        aggregation: how token losses become one number (see ``recpo.ops.reduce.aggregate``).
        length: the constant of ``seq-mean-token-sum-norm``; none = tokens per item.
        kl_coef: weight of the penalty that keeps the policy close to the reference policy; 0 = none.
        kl_kind: its estimator (see ``recpo.ops.kl.kl_estimate``); full = the exact divergence over all items of the
            catalog, or over all codes of a token, with its own gradient.
        entropy_coef: weight of the entropy bonus; 0 = none.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    length: float | None = None
    kl_coef: float = 0.0
    kl_kind: KLPenalty = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_low", "kl_coef", "clip_high"):
            if getattr(self, name, 0.0) < 0:
                raise RecpoError(f"{type(self).__name__}.{name} must not be negative, got {getattr(self, name)}.")
        dual_clip = getattr(self, "dual_clip", None)
        if dual_clip is not None and dual_clip <= 1.0:
            raise RecpoError(f"{type(self).__name__}.dual_clip must be above 1, got {dual_clip}.")

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        compared = "divergence" if self.kl_kind == "full" else "reference"
        optional = {compared: self.kl_coef, "entropy": self.entropy_coef}
        return frozenset({"advantages", "old"} | {name for name, weight in optional.items() if weight})

    @property
    def zero_advantage_is_inert(self) -> bool:
        """True unless a penalty applies to every position."""
        return not (self.kl_coef or self.entropy_coef)

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Kept tokens or items, by ``aggregation``; those with a zero advantage included."""
        return denominator(inputs.logp.mask, self.aggregation)

    @abstractmethod
    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """The unreduced loss ``[B, S, T]``; ``advantages`` too, and ``logp_old`` is as ``old`` returns it."""

    def log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The token log-ratios ``[B, S, T]`` at the level at which this objective clips them."""
        return log_ratio

    def gradient_weight(self, loss: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """The weight on ``grad logp`` of each token, ``[B, S, T]``, for the metrics; by default the loss itself."""
        return loss

    def old(self, inputs: ObjectiveInputs) -> Tensor | None:
        """Log-probabilities under the old policy."""
        return required(inputs.logp.old, "old", self)

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        mask = inputs.logp.mask.bool()
        given = required(inputs.advantages, "advantages", self).detach()
        advantages = zero_masked(over_tokens(given, mask), mask)
        of_items = advantages.sum(-1) if given.dim() == mask.dim() else zero_masked(given, mask.any(-1))
        # The module need not score inert positions: their values are not log-probabilities. An item is scored as a
        # whole, since its ratio may be that of all its tokens.
        acts = (advantages != 0).any(-1, keepdim=True)
        scored = mask & acts if self.zero_advantage_is_inert else mask
        logp = zero_masked(inputs.logp.policy, scored)
        old = self.old(inputs)
        old = None if old is None else zero_masked(old.detach(), scored)
        surrogate = self.token_loss(logp, old, advantages, mask)
        total, metrics = self.penalized(surrogate, logp, mask, inputs)
        loss = aggregate(total, mask, self.aggregation, count=inputs.denominator, length=self.length)
        metrics |= {"policy_loss": aggregate(surrogate.detach(), mask, self.aggregation, length=self.length)}
        metrics |= advantage_shares(of_items, mask.any(-1))
        metrics |= self._health(surrogate.detach(), logp.detach(), old, advantages, scored)
        return LossOutput(loss, metrics)

    def penalized(
        self, loss: Tensor, logp: Tensor, mask: Tensor, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the penalties to the token losses ``[B, S, T]``, and measures them."""
        metrics = {}
        if self.kl_coef:
            divergence = self._divergence(logp, mask, inputs)
            loss = loss + self.kl_coef * divergence
            metrics["kl_reference"] = masked_mean(divergence.detach(), mask)
        if self.entropy_coef:
            kept = mask.any(-1)
            entropy = zero_masked(required(inputs.entropy, "entropy", self), kept)
            loss = loss - self.entropy_coef * over_tokens(entropy, loss)
            metrics["entropy"] = masked_mean(entropy.detach(), kept)
        return loss, metrics

    def _divergence(self, logp: Tensor, mask: Tensor, inputs: ObjectiveInputs) -> Tensor:
        """The divergence from the reference ``[B, S, T]``, exact or estimated from the tokens of the slate."""
        if self.kl_kind == "full":
            return zero_masked(required(inputs.divergence, "divergence", self), mask)
        return kl_estimate(logp, zero_masked(required(inputs.logp.reference, "reference", self), mask), self.kl_kind)

    @torch.no_grad()
    def _health(
        self, loss: Tensor, logp: Tensor, old: Tensor | None, advantages: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        advantages = over_tokens(advantages, logp)
        log_ratio = torch.zeros_like(logp) if old is None else self.log_ratio(logp - old, mask)
        weight = self.gradient_weight(loss, log_ratio, advantages)
        metrics = {"negative_gradient_share": negative_gradient_share(weight, advantages, mask)}
        if old is not None:
            metrics |= ratio_metrics(log_ratio, mask) | self.clip_metrics(log_ratio, advantages, mask)
        return metrics

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Shares of the tokens whose ratio was clipped; every argument is ``[B, S, T]``."""
        return {}


@dataclass(frozen=True)
class ClippedObjective(PolicyGradientObjective):
    """Base of the objectives whose surrogate is flat outside a clip range around ratio 1.

    Attributes:
        clip_low: Lower clip range: for A < 0 the gradient is zero once ratio < 1 - clip_low.
        clip_high: Upper clip range: for A > 0 the gradient is zero once ratio > 1 + clip_high.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def gradient_weight(self, loss: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """The loss where it is not flat."""
        return zero_masked(loss, ~is_clipped(log_ratio, advantages, self.clip_low, self.clip_high))

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of the tokens where the surrogate is flat."""
        clipped = is_clipped(log_ratio, advantages, self.clip_low, self.clip_high)
        return {"clip_fraction": masked_mean(clipped, mask)}
