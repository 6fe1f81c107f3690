"""Objectives that weight ``grad logp`` of every token by an advantage: their common part, PPO and REINFORCE.

They differ in four choices: the level of the ratio and its clipping (both in ``token_loss``), the aggregation of token
losses, and the penalties that are added before the aggregation. Notation: ``rho = exp(logp - logp_old)``. Those of
groups of candidates are in ``recpo.objectives.grpo``. ``CatalogPolicyGradient`` is exact: it sums the expected reward
over the full catalog instead of sampling it.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recpo.base.contracts import Objective, Requirement
from recpo.base.errors import NonNegativeFloat, PositiveInt, RecpoError, validate_range
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import (
    advantage_shares,
    explained_variance,
    masked_mean,
    negative_gradient_share,
    ratio_metrics,
    required,
    validate_log_probs,
)
from recpo.ops.kl import KLPenalty, kl_estimate, masked_log_softmax
from recpo.ops.reduce import Aggregation, aggregate, check_same_shape, denominator, over_tokens, zero_masked
from recpo.ops.surrogate import clipped_surrogate, guarded_ratio, is_clipped, log1mexp, weighted_score

MASS_TOLERANCE: Final = 1e-3
MASS_TOLERANCE_OF_HALVES: Final = 0.1
"""How far the probabilities of a context may sum from 1: a rounding of float32, or of 8 bits per log-probability."""


@dataclass(frozen=True)
class PolicyGradientObjective(Objective):
    """``aggregate(token_loss + kl_coef * KL(policy, reference) - entropy_coef * entropy)``.

    Penalties are added to the token losses before the aggregation. So all terms share one denominator, and splitting a
    step over micro-batches or ranks does not change it.

    Attributes:
        aggregation: how token losses become one number (see ``recpo.ops.reduce.aggregate``).
        length: the constant of ``seq-mean-token-sum-norm``; none = tokens per item.
        kl_coef: weight of the penalty that keeps the policy close to the reference policy; 0 = none.
        kl_kind: its estimator (see ``recpo.ops.kl.kl_estimate``); full = the exact divergence over all items of
            the catalog, or over all codes of a token, with its own gradient.
        entropy_coef: weight of the entropy bonus; 0 = none.
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    length: float | None = None
    kl_coef: NonNegativeFloat = 0.0
    kl_kind: KLPenalty = "k3"
    entropy_coef: float = 0.0

    reads_token_advantages = True  # the loss is per token

    def __post_init__(self) -> None:
        super().__post_init__()
        dual_clip = getattr(self, "dual_clip", None)
        fits = dual_clip is None or dual_clip > 1.0
        validate_range(fits, f"{type(self).__name__}.dual_clip", "must be above 1, or null", dual_clip)

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        compared = Requirement.DIVERGENCE if self.kl_kind == "full" else Requirement.REFERENCE
        optional = {compared: self.kl_coef, Requirement.ENTROPY: self.entropy_coef}
        asked = {requirement for requirement, weight in optional.items() if weight}
        return frozenset({Requirement.ADVANTAGES, Requirement.OLD} | asked)

    @property
    def zero_advantage_is_inert(self) -> bool:
        """True unless a penalty applies to every position."""
        return not (self.kl_coef or self.entropy_coef)

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Kept tokens or items, by ``aggregation``; those with a zero advantage included."""
        return denominator(inputs.logp.mask, self.aggregation)

    @abstractmethod
    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """The unreduced loss, of ``[B, S, T]`` each; without an old policy, ``logp_old`` is ``logp``, detached."""

    def log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The token log-ratios ``[B, S, T]`` at the level at which this objective clips them."""
        return log_ratio

    def gradient_weight(self, loss: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """The weight on ``grad logp`` of each token, ``[B, S, T]``, for the metrics; by default the loss itself."""
        return loss

    def old(self, inputs: ObjectiveInputs) -> Tensor | None:
        """Log-probabilities under the old policy; None = every ratio is 1."""
        return required(inputs, "old", self)

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        mask = inputs.logp.mask.bool()
        given = required(inputs, "advantages", self).detach()
        advantages = zero_masked(over_tokens(given, mask), mask)
        of_items = advantages.sum(-1) if given.dim() == mask.dim() else zero_masked(given, mask.any(-1))
        # The module need not score inert positions: their values are not log-probabilities. An item is scored as a
        # whole, since its ratio may be that of all its tokens.
        acts = (advantages != 0).any(-1, keepdim=True)
        scored = mask & acts if self.zero_advantage_is_inert else mask
        logp = zero_masked(inputs.logp.policy, scored)
        old = self.old(inputs)
        old = None if old is None else zero_masked(old.detach(), scored)
        surrogate = self.token_loss(logp, logp.detach() if old is None else old, advantages, mask)
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
            if self.kl_kind == "full":
                divergence = zero_masked(required(inputs, "divergence", self), mask)
            else:
                reference = zero_masked(required(inputs, "reference", self), mask)
                divergence = kl_estimate(logp, reference, self.kl_kind)
            loss = loss + self.kl_coef * divergence
            metrics["kl_reference"] = masked_mean(divergence.detach(), mask)
        if self.entropy_coef:
            kept = mask.any(-1)
            entropy = zero_masked(required(inputs, "entropy", self), kept)
            loss = loss - self.entropy_coef * over_tokens(entropy, loss)
            metrics["entropy"] = masked_mean(entropy.detach(), kept)
        return loss, metrics

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

    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2

    @property
    def clips(self) -> dict[str, float]:
        """The clip range, as the arguments of a loss."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high}

    def gradient_weight(self, loss: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """The loss where it is not flat."""
        return zero_masked(loss, ~is_clipped(log_ratio, advantages, **self.clips))

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of the tokens where the surrogate is flat."""
        return {"clip_fraction": masked_mean(is_clipped(log_ratio, advantages, **self.clips), mask)}


def ppo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate of PPO, per token: see ``recpo.ops.surrogate.clipped_surrogate``.

    Gradient weight on ``grad logp``: ``-A rho``, and 0 where ``A > 0`` and ``rho > 1 + clip_high``, where ``A < 0`` and
    ``rho < 1 - clip_low``, and, with ``dual_clip``, where ``A < 0`` and ``rho > dual_clip``.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        clip_low: lower clip range: for ``A < 0`` the gradient is zero once ``rho < 1 - clip_low``.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``rho > 1 + clip_high``.
        dual_clip: upper bound, above 1, of the ratio for ``A < 0``; None = no bound.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    log_ratio = zero_masked(logp, mask) - zero_masked(logp_old.detach(), mask)
    advantages = zero_masked(over_tokens(advantages, logp), mask)
    return clipped_surrogate(log_ratio, advantages, clip_low, clip_high, dual_clip)


def value_loss(values: Tensor, values_old: Tensor | None, returns: Tensor, *, clip: float | None = None) -> Tensor:
    """``0.5 max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)`` per step; without ``clip``, ``0.5 (v - R)^2``.

    Args:
        values: any shape, with gradient.
        values_old: same shape, at the time of the rollout; only read with ``clip``.
        returns: same shape.
        clip: ``c``; None = no clipping.

    Returns:
        Same shape.

    Raises:
        RecpoError: ``clip`` without ``values_old``, or shapes that differ.
    """
    check_same_shape(values=values, returns=returns, values_old=values_old)
    returns = returns.detach()
    error = (values - returns).square()
    if clip is not None:
        if values_old is None:
            raise RecpoError("a clipped value loss needs values_old", code="missing_option", field="values_old")
        near = values_old.detach() + (values - values_old.detach()).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error


def entropy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy of ``softmax(logits)`` in nats, with ``0 log 0 = 0``, so that trie-masked logits give no nan.

    Args:
        logits: ``[..., C]``; -inf is a class of probability 0.
        mask: ``[..., C]`` over classes; a masked class equals a removed one.

    Returns:
        ``[...]``; 0 for a row without classes.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(logits=logits, mask=mask)
    kept = logits > -torch.inf if mask is None else mask.bool() & (logits > -torch.inf)
    logp = zero_masked(masked_log_softmax(logits, mask), kept)
    return -(logp.exp() * logp).sum(-1)


@dataclass(frozen=True)
class PPO(ClippedObjective):
    """Proximal policy optimization (arXiv 1707.06347), dual clip (arXiv 1912.09729), critic and entropy bonus.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + value_coef * value_loss - entropy_coef * entropy``; with
    ``dual_clip``, ``-dual_clip A`` bounds the loss of negative advantages.

    Departures: value loss and entropy are spread over the tokens of an item and averaged with them.

    Attributes:
        dual_clip: upper bound, above 1, of the ratio for ``A < 0``; none = no bound.
        value_coef: weight of the value loss; 0 = no critic (for advantages that need none, such as group-normalized
            ones).
        value_clip: largest change of a value from its old one that still has a gradient; none = no clipping.
    """

    aggregation: Aggregation = "token-mean"
    dual_clip: float | None = None
    value_coef: float = 0.5
    value_clip: float | None = None

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return super().requires | ({Requirement.VALUE} if self.value_coef else frozenset())

    @property
    def zero_advantage_is_inert(self) -> bool:
        """False with a critic, which learns from every position."""
        return super().zero_advantage_is_inert and not self.value_coef

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``ppo_loss``."""
        return ppo_loss(logp, logp_old, advantages, mask=mask, dual_clip=self.dual_clip, **self.clips)

    def penalized(
        self, loss: Tensor, logp: Tensor, mask: Tensor, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the value loss too."""
        loss, metrics = super().penalized(loss, logp, mask, inputs)
        if self.value_coef:
            kept = mask.any(-1)
            values = zero_masked(required(inputs, "values", self), kept)
            returns = zero_masked(required(inputs, "returns", self), kept)
            old = None
            if self.value_clip is not None:
                old = zero_masked(required(inputs, "values_old", self), kept)
            critic = value_loss(values, old, returns, clip=self.value_clip)
            loss = loss + self.value_coef * over_tokens(critic, loss)
            metrics["value_loss"] = masked_mean(critic.detach(), kept)
            metrics["explained_variance"] = explained_variance(values, returns, kept)
        return loss, metrics

    def gradient_weight(self, loss: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """The loss where it is not flat."""
        return zero_masked(super().gradient_weight(loss, log_ratio, advantages), ~self._capped(log_ratio, advantages))

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of clipped tokens, and share of tokens that the dual clip stopped."""
        metrics = super().clip_metrics(log_ratio, advantages, mask)
        if self.dual_clip is not None:
            metrics["dual_clip_fraction"] = masked_mean(self._capped(log_ratio, advantages), mask)
        return metrics

    def _capped(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        bound = torch.inf if self.dual_clip is None else self.dual_clip
        return (advantages < 0) & (guarded_ratio(log_ratio) > bound)


def reinforce_loss(
    logp: Tensor,
    advantages: Tensor,
    *,
    logp_old: Tensor | None = None,
    mask: Tensor | None = None,
    ratio_cap: float | None = 20.0,
    top_k: int = 1,
) -> Tensor:
    """The plain policy gradient with a weight per item, ``-sg(min(rho, ratio_cap) lambda_K) A grad logp``, per token.

    ``rho`` and ``pi`` are per item, products over its tokens. ``lambda_K = K (1 - pi)^(K - 1)`` is the derivative of
    the probability that the item is among K draws: it pushes an item up while K draws may still miss it, and goes to 0
    once they almost surely contain it. The value is ``-A`` times the weight.

    Args:
        logp: ``[..., T]``.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        logp_old: ``[..., T]`` of the behavior policy; None = on-policy, a ratio of 1.
        mask: ``[..., T]``.
        ratio_cap: largest ratio, which trades bias for variance; None = none. The paper uses e^3 = 20.
        top_k: K, at least 1; 1 = no correction.

    Returns:
        ``[..., T]``; 0 at masked tokens; meant for ``seq-mean-token-sum``.

    Raises:
        RecpoError: ``top_k`` below 1, or shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    validate_range(top_k >= 1, "top_k", "must be at least 1", top_k)
    logp = zero_masked(logp, mask)
    advantages = zero_masked(over_tokens(advantages.detach(), logp), mask)
    item = logp.detach().sum(-1, keepdim=True)
    old = item if logp_old is None else zero_masked(logp_old.detach(), mask).sum(-1, keepdim=True)
    weight = guarded_ratio(item - old).clamp(max=ratio_cap) if ratio_cap is not None else guarded_ratio(item - old)
    if top_k > 1:
        weight = weight * top_k * ((top_k - 1) * log1mexp(item.clamp(max=0.0))).exp()
    return -advantages * weighted_score(weight.expand_as(logp), logp)


@dataclass(frozen=True)
class Reinforce(PolicyGradientObjective):
    """REINFORCE (Williams, 1992), with off-policy and top-K correction (arXiv 1812.02353).

    ``-sg(min(rho, ratio_cap) K (1 - pi)^(K - 1)) A grad logp`` per item: the simple baseline of the clipped objectives.

    Attributes:
        off_policy: weight by the ratio of policy to behavior policy; needs an old policy. False: a ratio of 1.
        ratio_cap: largest ratio; none = no bound.
        top_k: number of slots that are filled at once; 1 = no correction.
    """

    aggregation: Aggregation = "seq-mean-token-sum"
    off_policy: bool = False
    ratio_cap: float | None = 20.0
    top_k: PositiveInt = 1

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return super().requires if self.off_policy else super().requires - {Requirement.OLD}

    def old(self, inputs: ObjectiveInputs) -> Tensor | None:
        """Log-probabilities under the behavior policy; None on-policy."""
        return super().old(inputs) if self.off_policy else None

    def log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The log-ratio of the item, on each of its tokens."""
        return zero_masked(over_tokens(log_ratio.sum(-1), log_ratio), mask)

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``reinforce_loss``."""
        return reinforce_loss(
            logp, advantages, logp_old=logp_old, mask=mask, ratio_cap=self.ratio_cap, top_k=self.top_k
        )

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens whose ratio was capped."""
        bound = float("inf") if self.ratio_cap is None else self.ratio_cap
        return {"clip_fraction": masked_mean(guarded_ratio(log_ratio) > bound, mask)}


def catalog_policy_gradient_loss(
    logp: Tensor,
    rewards: Tensor,
    *,
    logp_ref: Tensor | None = None,
    mask: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Tensor:
    """``-sum_i pi_i r_i + kl_coef KL(pi || pi_ref) - entropy_coef H(pi)``, per context.

    All three are sums over the catalog: nothing is sampled, so there is no variance for a baseline to lower. Gradient
    on the logit of item i: ``-pi_i (r_i - sum_j pi_j r_j)``, plus ``kl_coef pi_i (log pi_i - log pi_ref_i - KL)``, plus
    ``entropy_coef pi_i (log pi_i + H)``. The logit of an item with a small probability hardly changes, however good the
    item is; ``MPO`` has no such factor.

    Args:
        logp: ``[..., V]`` of every item, summed over tokens; normalized.
        rewards: ``[..., V]``; no gradient flows into it.
        logp_ref: ``[..., V]``; only read with ``kl_coef``; no gradient flows into it.
        mask: ``[..., V]``, True keeps.
        kl_coef: weight of the divergence from the reference, at least 0.
        entropy_coef: weight of the entropy, at least 0.

    Returns:
        ``[...]``; 0 for a context without any kept item.

    Raises:
        RecpoError: ``kl_coef`` without a reference, or shapes that differ.
    """
    check_same_shape(logp=logp, rewards=rewards, logp_ref=logp_ref, mask=mask)
    logp, pi = _distribution(logp, mask)
    loss = -(pi * zero_masked(rewards.detach(), mask)).sum(-1)
    if kl_coef:
        if logp_ref is None:
            raise RecpoError("kl_coef needs logp_ref", code="missing_option", field="logp_ref")
        loss = loss + kl_coef * (pi * (logp - zero_masked(logp_ref.detach(), mask))).sum(-1)
    return loss + entropy_coef * (pi * logp).sum(-1) if entropy_coef else loss


def _distribution(logp: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities, both 0 where masked."""
    logp = zero_masked(logp, mask)
    return logp, zero_masked(logp.exp(), mask)


@dataclass(frozen=True)
class CatalogPolicyGradient(Objective):
    """Exact policy gradient over the full catalog, averaged over contexts (``rollout.candidates: catalog``).

    ``-sum_i pi_i r_i + kl_coef KL(pi || pi_ref) - entropy_coef H(pi)``. With ``kl_coef`` its optimum is that of ``MPO``
    with ``temperature = kl_coef`` and the reference as base; only the path of training differs.

    Attributes:
        kl_coef: weight of the exact divergence from the reference policy, in units of the reward. 0 = none; then all
            probability moves to the best item of every context.
        entropy_coef: weight of the exact entropy; 0 = none.
    """

    kl_coef: NonNegativeFloat = 0.05
    entropy_coef: NonNegativeFloat = 0.0

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        compared = {Requirement.REFERENCE} if self.kl_coef else set()
        return frozenset({Requirement.REWARDS, Requirement.CATALOG} | compared)

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Contexts with any kept item."""
        return inputs.logp.mask.flatten(1).any(-1).sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``.

        Raises:
            RecpoError: the probabilities of a context do not sum to 1 (checked on a CPU, as all values are).
        """
        validate_log_probs(inputs.logp, self)
        tokens = inputs.logp.mask.bool()
        mask = tokens.any(-1)
        rewards = required(inputs, "rewards", self)
        logp, reference = zero_masked(inputs.logp.policy, tokens).sum(-1), None
        if self.kl_coef:
            reference = zero_masked(required(inputs, "reference", self).detach(), tokens).sum(-1)
        self._validate_mass(logp.detach(), mask)
        losses = catalog_policy_gradient_loss(
            logp, rewards, logp_ref=reference, mask=mask, kl_coef=self.kl_coef, entropy_coef=self.entropy_coef
        )
        loss = aggregate(losses, mask.any(-1), count=inputs.denominator)
        return LossOutput(loss, self._health(logp.detach(), rewards, reference, mask))

    def _validate_mass(self, logp: Tensor, mask: Tensor) -> None:
        """Raises if the candidates are not the full catalog, or the log-probabilities are not normalized."""
        # another device would be waited for, and a compiled step does not branch on values
        if logp.device.type != "cpu" or torch.compiler.is_compiling():
            return
        off = ((_distribution(logp.float(), mask)[1].sum(-1) - 1.0) * mask.any(-1)).abs()
        half = logp.dtype in (torch.float16, torch.bfloat16)
        if (off > (MASS_TOLERANCE_OF_HALVES if half else MASS_TOLERANCE)).any():
            raise RecpoError(
                "CatalogPolicyGradient sums over the whole catalog, and the probabilities of a context miss 1 by up to "
                f"{float(off.max()):.4g}: set rollout.candidates to catalog, with a reward that knows every item "
                "(unknown rewards leave their items out)",
                code="bad_value",
                field="rollout.candidates",
            )

    @torch.no_grad()
    def _health(self, logp: Tensor, rewards: Tensor, reference: Tensor | None, mask: Tensor) -> dict[str, Tensor]:
        contexts, (logp, pi) = mask.any(-1), _distribution(logp, mask)
        metrics = {
            "expected_reward": masked_mean((pi * zero_masked(rewards, mask)).sum(-1), contexts),
            "entropy": masked_mean(-(pi * logp).sum(-1), contexts),
        }
        if reference is not None:
            metrics["kl_reference"] = masked_mean((pi * (logp - reference)).sum(-1), contexts)
        return metrics
