"""Maximum a posteriori policy optimization, MPO (arXiv 1806.06920): fit the policy to a reward-weighted target."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from recpo.base.contracts import Objective, Requirement
from recpo.base.errors import PositiveFloat
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import masked_mean, required, validate_log_probs
from recpo.ops.reduce import aggregate, check_same_shape, zero_masked

MIN_TEMPERATURE: Final = 1e-4
MAX_TEMPERATURE: Final = 1e4
"""Where the dual looks for the temperature, in units of the reward."""

BISECTIONS: Final = 30
"""Halvings of the logarithm of that range: the temperature is found to 2e-8 of itself."""


def mpo_target(
    rewards: Tensor, *, temperature: float | Tensor, log_base: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The target distribution over the candidates of a context: ``w_s proportional to base_s exp(r_s / temperature)``.

    It maximizes ``E_w[r] - temperature KL(w || base)`` over all distributions on the candidates.

    Args:
        rewards: ``[..., S]``.
        temperature: above 0, in units of the reward; close to 0, the best candidate gets all the weight.
        log_base: ``[..., S]`` log-weights of the candidates before the rewards, up to a constant per context; None =
            equal weights.
        mask: ``[..., S]``, True keeps.

    Returns:
        ``[..., S]``; sums to 1 over the kept candidates, 0 at masked ones; no gradient.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(rewards=rewards, log_base=log_base, mask=mask)
    return _log_softmax(_tilted(_base(rewards, log_base, mask), rewards, temperature), mask).exp()


def dual_temperature(
    rewards: Tensor, kl_target: float, *, log_base: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The temperature at which the targets are ``kl_target`` nats from their base, on average over the contexts.

    It minimizes the dual ``g(eta) = eta kl_target + eta mean_b log sum_s base_s exp(r_s / eta)`` (arXiv 1806.06920,
    section 3.2.1), which is convex, with the base normalized over the candidates of a context. Its derivative is
    ``kl_target - mean_b KL(w_b || base_b)``, and the divergence falls as the temperature rises: ``BISECTIONS`` halvings
    of ``[MIN_TEMPERATURE, MAX_TEMPERATURE]`` on a logarithmic scale find the root, the same in every run.

    Args:
        rewards: ``[..., S]``.
        kl_target: nats, above 0. If no temperature reaches it, because all rewards of a context are equal or the base
            of the best candidate is above ``exp(-kl_target)``, the result is ``MIN_TEMPERATURE``.
        log_base: see ``mpo_target``.
        mask: ``[..., S]``.

    Returns:
        A scalar; no gradient.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(rewards=rewards, log_base=log_base, mask=mask)
    base = _base(rewards, log_base, mask)
    contexts = torch.ones_like(base[..., 0], dtype=torch.bool) if mask is None else mask.bool().any(-1)
    low, high = (base.new_full((), math.log(end)) for end in (MIN_TEMPERATURE, MAX_TEMPERATURE))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        log_target = _log_softmax(_tilted(base, rewards, middle.exp()), mask)
        too_cold = masked_mean(_divergence(log_target, base), contexts) > kl_target
        low, high = torch.where(too_cold, middle, low), torch.where(too_cold, high, middle)
    return ((low + high) / 2).exp()


def mpo_loss(
    logp: Tensor,
    rewards: Tensor,
    *,
    temperature: float | Tensor = 0.05,
    log_base: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of the policy against the target of ``mpo_target``, per context: ``-sum_s w_s logp_s``.

    Gradient: ``-w_s`` on ``logp_s``. If the candidates are the full catalog, the gradient on the logit of item i is
    ``pi_i - w_i``, so the only minimum is ``pi = w``.

    Args:
        logp: ``[..., S]``, summed over tokens.
        rewards: ``[..., S]``; no gradient flows into it.
        temperature: see ``mpo_target``.
        log_base: see ``mpo_target``; no gradient flows into it.
        mask: ``[..., S]``.

    Returns:
        ``[...]``; 0 for a context without any kept candidate.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(logp=logp, rewards=rewards)
    weights = mpo_target(rewards, temperature=temperature, log_base=log_base, mask=mask)
    return -(weights * zero_masked(logp, mask)).sum(-1)


def _base(rewards: Tensor, log_base: Tensor | None, mask: Tensor | None) -> Tensor:
    """Log-weights that are normalized over the kept candidates, in float32 at least."""
    base = torch.zeros_like(rewards) if log_base is None else log_base
    return _log_softmax(base.detach().to(torch.promote_types(base.dtype, torch.float32)), mask)


def _tilted(base: Tensor, rewards: Tensor, temperature: float | Tensor) -> Tensor:
    return base + rewards.detach().to(base.dtype) / temperature


def _log_softmax(values: Tensor, mask: Tensor | None) -> Tensor:
    """Over the kept entries; -inf elsewhere."""
    if mask is None:
        return values.log_softmax(-1)
    kept = mask.bool()
    outside = torch.where(kept.any(-1, keepdim=True), -torch.inf, 0.0)  # a row of -inf alone would give nan
    return torch.where(kept, values, outside).log_softmax(-1).masked_fill(~kept, -torch.inf)


def _divergence(log_target: Tensor, base: Tensor) -> Tensor:
    """KL(target || base) ``[...]`` of log-weights, with ``0 log 0 = 0``."""
    return torch.where(log_target > -torch.inf, log_target.exp() * (log_target - base), 0.0).sum(-1)


@dataclass(frozen=True)
class MPO(Objective):
    """Maximum a posteriori policy optimization (arXiv 1806.06920): cross-entropy to ``base_s exp(r_s / temperature)``.

    ``-sum_s w_s logp_s`` over the candidates of a context, averaged over the contexts with candidates; ``w`` is the
    target, normalized over the candidates. The weights carry no gradient. There is no ratio, so nothing is clipped.

    With the reference policy as base the target is fixed: the optimum of ``E[r] - temperature KL(pi || pi_ref)``. This
    is exact if the candidates are the full catalog (``rollout.candidates: catalog``). With the old policy as base,
    every phase starts from the last one and moves further toward the best item of every context.

    Attributes:
        temperature: temperature of the target, in units of the reward; not read with ``kl_target``.
        kl_target: distance of the target from its base in nats, on average over the contexts. Every micro-batch
            computes the temperature for it (see ``dual_temperature``); none = a fixed temperature.
        base: the policy that the rewards reweight: ``reference`` or ``old``.
        candidates_are_draws: the candidates are draws of the old policy, so the number of times that an item was drawn
            already carries its weight (``rollout.candidates: draws``, or logged impressions). False: every candidate
            appears once, for any probability (``catalog``, ``beam``), and the base gives its weight.
    """

    temperature: PositiveFloat = 0.05
    kl_target: PositiveFloat | None = None
    base: Literal["reference", "old"] = "reference"
    candidates_are_draws: bool = False

    @property
    def requires(self) -> frozenset[str]:
        """Rewards, and the inputs of the base weights; draws of the base itself need no weights."""
        requires = {Requirement.REWARDS}
        if self.base != "old" or not self.candidates_are_draws:
            requires.add(Requirement.REFERENCE if self.base == "reference" else Requirement.OLD)
            requires |= {Requirement.OLD} if self.candidates_are_draws else set()
        return frozenset(requires)

    @property
    def accepted_candidates(self) -> Literal["any", "draws", "distinct"]:
        """See ``Objective.accepted_candidates``."""
        return "draws" if self.candidates_are_draws else "distinct"

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Contexts with any kept candidate."""
        return inputs.logp.mask.flatten(1).any(-1).sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        tokens = inputs.logp.mask.bool()
        mask = tokens.any(-1)
        rewards = required(inputs, "rewards", self).detach()
        logp = zero_masked(inputs.logp.policy, tokens).sum(-1)
        log_base = self._log_base(inputs, tokens)
        temperature = (
            torch.full((), self.temperature, dtype=torch.float32, device=logp.device)
            if self.kl_target is None
            else dual_temperature(rewards, self.kl_target, log_base=log_base, mask=mask)
        )
        scale = self.temperature if self.kl_target is None else temperature
        losses = mpo_loss(logp, rewards, temperature=scale, log_base=log_base, mask=mask)
        # one sequence per context: the candidates are summed already
        loss = aggregate(losses, mask.any(-1), count=inputs.denominator)
        return LossOutput(
            loss, self._health(losses.detach(), rewards, scale, log_base, mask) | {"temperature": temperature}
        )

    def _log_base(self, inputs: ObjectiveInputs, tokens: Tensor) -> Tensor | None:
        """Log-weights ``[B, S]`` of the candidates; None = all alike. Draws of another policy are reweighed by it."""
        if self.requires == {Requirement.REWARDS}:
            return None
        log_base = zero_masked(required(inputs, self.base, self).detach(), tokens).sum(-1)
        if self.candidates_are_draws:
            log_base = log_base - zero_masked(required(inputs, "old", self).detach(), tokens).sum(-1)
        return log_base

    @torch.no_grad()
    def _health(
        self, losses: Tensor, rewards: Tensor, temperature: float | Tensor, log_base: Tensor | None, mask: Tensor
    ) -> dict[str, Tensor]:
        contexts, base = mask.any(-1), _base(rewards, log_base, mask)
        log_target = _log_softmax(_tilted(base, rewards, temperature), mask)
        weights = log_target.exp()
        entropy = -torch.where(weights > 0, weights * log_target, 0.0).sum(-1)
        return {
            "target_reward": masked_mean((weights * zero_masked(rewards, mask)).sum(-1), contexts),
            "target_kl": masked_mean(_divergence(log_target, base), contexts),
            "target_entropy": masked_mean(entropy, contexts),
            "target_distance": masked_mean(losses - entropy, contexts),
        }
