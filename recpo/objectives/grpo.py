"""Group-relative policy optimization, GRPO, and its family: one surrogate with other ratios, clips and aggregations.

| | ratio | where the surrogate is flat or bounded | aggregation |
|---|---|---|---|
| GRPO (2402.03300) | token | clipped around 1 | mean over items of token means |
| Dr.GRPO (2503.20783) | token | clipped around 1 | token sums over a constant length |
| DAPO (2503.14476) | token | clipped, more room above | mean over tokens |
| GSPO (2507.18071) | item | clipped, close around 1 | as GRPO |
| ECPO (2506.13695) | token, capped early for negatives | clipped around 1 | as GRPO |
| ASPO (2510.06062) | token, reciprocal for positives | hard mask and soft cap | mean over tokens |
| CISPO (2506.13585) | token, capped weight | never | mean over tokens |
| GBPO (2508.20900) | token or item | bounded by the gradient of binary cross-entropy | as GRPO |

Advantages are normalized over the slate axis by ``recpo.objectives.advantages.GroupNormalizedAdvantage``
(``scale=False`` for Dr.GRPO), except for GBPO, which takes them as they are.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import Requirement
from recpo.base.errors import NonNegativeFloat, RecpoError
from recpo.base.types import ObjectiveInputs
from recpo.objectives.inputs import masked_mean
from recpo.objectives.policy_gradient import ClippedObjective, PolicyGradientObjective, ppo_loss
from recpo.ops import surrogate
from recpo.ops.reduce import Aggregation, check_same_shape, over_tokens, zero_masked


@dataclass(frozen=True)
class GRPO(ClippedObjective):
    """Group-relative policy optimization (arXiv 2402.03300): PPO without a critic, over groups of candidates.

    ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3(policy, reference)``, the mean over items of
    the mean over tokens. The KL penalty is part of the loss and not of the reward.
    """

    kl_coef: NonNegativeFloat = 0.04

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``ppo_loss``."""
        return ppo_loss(logp, logp_old, advantages, mask=mask, **self.clips)


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """Dr.GRPO (arXiv 2503.20783): no division by the length of an item, and none by the group's standard deviation.

    Token sums over a constant ``length``, averaged over items; pair it with
    ``GroupNormalizedAdvantage(scale=False)``. No KL penalty by default.
    """

    aggregation: Aggregation = "seq-mean-token-sum-norm"
    kl_coef: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class DAPO(GRPO):
    """Decoupled clip and token-level mean (arXiv 2503.14476): clip 0.2 / 0.28, no KL penalty.

    Dynamic sampling (dropping groups of equal rewards) and the overlong penalty belong to the rollout. Without
    dropping, such groups have zero advantages and only enter the denominator (``zero_group_share`` reports their
    share).
    """

    aggregation: Aggregation = "token-mean"
    kl_coef: NonNegativeFloat = 0.0
    clip_high: NonNegativeFloat = 0.28


def gspo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    level: surrogate.RatioLevel = "sequence",
) -> Tensor:
    """The clipped surrogate with one ratio per sequence, ``s = exp(mean_t log rho)``, returned on each of its tokens.

    Gradient of the token mean: ``-A s mean_t grad logp_t`` if not clipped. ``level="token"`` uses ``sg(s) pi /
    sg(pi)``: the same value and, under ``seq-mean-token-mean``, the same gradient when the advantage is one per
    sequence, but it admits an advantage per token.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        clip_low: lower clip range: for ``A < 0`` the gradient is zero once ``s < 1 - clip_low``. The geometric mean
            stays near 1, hence the small default.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``s > 1 + clip_high``.
        level: see above.

    Returns:
        ``[..., T]``; 0 at masked tokens; meant for ``seq-mean-token-mean``.

    Raises:
        RecpoError: unknown level, or shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    log_s = over_tokens(surrogate.sequence_log_ratio(logp - zero_masked(logp_old.detach(), mask), mask), logp)
    if level == "token":
        log_s = log_s.detach() + logp - logp.detach()
    elif level != "sequence":
        raise RecpoError(f"unknown level {level!r}; expected sequence or token", code="unknown_name", field="level")
    return surrogate.clipped_surrogate(log_s, zero_masked(over_tokens(advantages, logp), mask), clip_low, clip_high)


@dataclass(frozen=True)
class GSPO(ClippedObjective):
    """Group sequence policy optimization (arXiv 2507.18071): one ratio per item, the geometric mean over its tokens.

    ``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``. On a catalog policy (``T = 1``) it is GRPO with another clip
    range: the ratio is then not a mean over many tokens and leaves the paper's range of 3e-4 / 4e-4 at once, so raise
    both options.

    Attributes:
        level: ``token`` is GSPO-token: the same gradient for one advantage per item.
    """

    clip_low: NonNegativeFloat = 3e-4
    clip_high: NonNegativeFloat = 4e-4
    level: surrogate.RatioLevel = "sequence"

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``gspo_loss``."""
        return gspo_loss(logp, logp_old, advantages, mask, level=self.level, **self.clips)

    def log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """One log-ratio per item, on each of its tokens."""
        return zero_masked(over_tokens(surrogate.sequence_log_ratio(log_ratio, mask), log_ratio), mask)


def ecpo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float = 0.1,
) -> Tensor:
    """PPO whose ratio is capped *before* the clip, with its gradient kept, per token.

    ``ppo_loss`` against ``pi_old' = max(sg(pi) / (1 + clip_high + delta), pi_old)``, so that ``rho <= 1 + clip_high +
    delta``. Positives are as in PPO (they have no gradient there anyway). A negative has a gradient weight of at most
    ``1 + clip_high + delta``, while PPO's weight grows without bound.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        clip_low: lower clip range: for ``A < 0`` the gradient is zero once ``rho < 1 - clip_low``.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``rho > 1 + clip_high``.
        delta: distance between the clip and the cap.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    early = logp.detach() - math.log(1.0 + clip_high + delta)
    old = torch.maximum(early, zero_masked(logp_old.detach(), mask))
    return ppo_loss(logp, old, advantages, mask=mask, clip_low=clip_low, clip_high=clip_high)


@dataclass(frozen=True)
class ECPO(ClippedObjective):
    """Early-clipped policy optimization (OneRec, arXiv 2506.13695): GRPO with a bound on the ratio of negatives.

    The ratio is capped at ``1 + clip_high + delta``:
    ``pi_old' = max(sg(pi) / (1 + clip_high + delta), pi_old)`` keeps the gradient of negatives bounded.

    Departures: the paper's ratio is per item; here it is per token, as in the other objectives.

    Attributes:
        delta: room between the clip and the cap.
    """

    delta: NonNegativeFloat = 0.1

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``ecpo_loss``."""
        return ecpo_loss(logp, logp_old, advantages, mask=mask, delta=self.delta, **self.clips)

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens without gradient, and share of negatives whose ratio was capped early."""
        capped = (advantages < 0) & (surrogate.guarded_ratio(log_ratio) > 1.0 + self.clip_high + self.delta)
        return super().clip_metrics(log_ratio, advantages, mask) | {"early_clip_fraction": masked_mean(capped, mask)}


def aspo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """Policy gradient, per token, that weights a positive by its *reciprocal* ratio, so that unlikely tokens catch up.

    ``-A w grad logp`` with ``w = pi_old / pi`` for ``A > 0`` (``pi_old pi / sg(pi^2)``) and ``w = rho`` for ``A < 0``.
    Hard mask, ``w = 0``: ``A > 0`` and ``rho > 1 + clip_high``, or ``A < 0`` and ``rho < 1 - clip_low``. Soft cap:
    ``w <= dual_clip`` for both signs, with the gradient kept. The value is ``-A w``.

    Clamping the flipped ratio to ``[1 - clip_low, 1 + clip_high]``, as seen elsewhere, disables the method.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        clip_low: lower clip range: for ``A < 0`` the gradient is zero once ``rho < 1 - clip_low``.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``rho > 1 + clip_high``.
        dual_clip: the soft cap; None = none.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    advantages = zero_masked(over_tokens(advantages.detach(), logp), mask)
    log_ratio = logp.detach() - zero_masked(logp_old.detach(), mask)
    weight = surrogate.guarded_ratio(torch.where(advantages > 0, -log_ratio, log_ratio))
    weight = weight if dual_clip is None else weight.clamp(max=dual_clip)
    weight = zero_masked(weight, ~surrogate.is_clipped(log_ratio, advantages, clip_low, clip_high))
    return -advantages * surrogate.weighted_score(weight, logp)


@dataclass(frozen=True)
class ASPO(ClippedObjective):
    """Asymmetric importance sampling policy optimization (arXiv 2510.06062).

    ``-A w grad logp`` with ``w = 1 / rho`` for ``A > 0`` and ``rho`` for ``A < 0``: a positive whose probability has
    fallen gets more weight, not less. Outside the clip range there is no gradient (hard mask), and ``w`` is capped at
    ``dual_clip`` with its gradient kept (soft cap).

    Attributes:
        dual_clip: the soft cap on the weight of both signs, above 1; none = no cap.
    """

    aggregation: Aggregation = "token-mean"
    dual_clip: float | None = 3.0

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``aspo_loss``."""
        return aspo_loss(logp, logp_old, advantages, mask=mask, dual_clip=self.dual_clip, **self.clips)

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens without gradient, and share of tokens whose weight was capped."""
        metrics = super().clip_metrics(log_ratio, advantages, mask)
        if self.dual_clip is not None:
            weight = surrogate.guarded_ratio(-advantages.sign() * log_ratio)
            metrics["dual_clip_fraction"] = masked_mean((advantages != 0) & (weight > self.dual_clip), mask)
        return metrics


def cispo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    cap_low: float | None = None,
    cap_high: float | None = 1.2,
) -> Tensor:
    """REINFORCE with a capped importance weight, ``-sg(clip(rho, cap_low, cap_high)) A grad logp``, per token.

    No token ever loses its gradient. The value is ``-A w``.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        cap_low: smallest weight; None = none (the paper's choice).
        cap_high: largest weight, the bound itself and not its distance from 1; None = none.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    advantages = zero_masked(over_tokens(advantages.detach(), logp), mask)
    weight = surrogate.guarded_ratio(logp.detach() - zero_masked(logp_old.detach(), mask))
    if cap_low is not None or cap_high is not None:
        weight = weight.clamp(cap_low, cap_high)
    return -advantages * surrogate.weighted_score(weight, logp)


@dataclass(frozen=True)
class CISPO(PolicyGradientObjective):
    """Capped importance weights on the policy gradient (MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

    ``-sg(clip(rho, cap_low, cap_high)) A grad logp``. Caps are absolute, as in TRL (verl's are distances from 1).

    Attributes:
        cap_low: smallest weight; none = no bound (the paper's choice).
        cap_high: largest weight; none = no bound.
    """

    aggregation: Aggregation = "token-mean"
    cap_low: float | None = None
    cap_high: float | None = 1.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap_low is not None and self.cap_high is not None and self.cap_low > self.cap_high:
            raise RecpoError(
                f"CISPO.cap_low ({self.cap_low}) must not exceed CISPO.cap_high ({self.cap_high}).",
                code="conflicting_options",
                field="CISPO.cap_low",
            )

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``cispo_loss``."""
        return cispo_loss(logp, logp_old, advantages, mask=mask, cap_low=self.cap_low, cap_high=self.cap_high)

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens whose weight was capped."""
        ratio = surrogate.guarded_ratio(log_ratio)
        below = ratio < (0.0 if self.cap_low is None else self.cap_low)
        above = ratio > (float("inf") if self.cap_high is None else self.cap_high)
        return {"clip_fraction": masked_mean(below | above, mask)}


def gbpo_loss(
    logp: Tensor,
    advantages: Tensor,
    *,
    logp_old: Tensor | None = None,
    mask: Tensor | None = None,
    level: surrogate.RatioLevel = "token",
) -> Tensor:
    """Policy loss whose gradient never exceeds that of binary cross-entropy, per token.

    ``-pi / den * A`` with ``den = max(pi_old, sg(pi))`` for ``A >= 0`` and ``max(pi_old, 1 - sg(pi))`` for ``A < 0``.
    The weight on ``grad logp`` is ``-A min(1, pi / pi_old)`` for positives and ``-A min(pi / pi_old, pi / (1 - pi))``
    for negatives. The value of the loss carries no information: for a positive without ``logp_old`` it is the constant
    -1. Monitor the gradients instead.

    Everything stays in log space and no probability is clamped; the log of the weight is guarded from above at
    ``LOG_RATIO_GUARD`` (a negative of probability 1), where the gradient is kept.

    Args:
        logp: ``[..., T]``.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        logp_old: ``[..., T]`` at exposure, if it was logged; None = ``sg(logp)``, a ratio of 1 for positives.
        mask: ``[..., T]``.
        level: ``token`` bounds each token by its own probability; ``sequence`` uses the product over the item's tokens,
            returned on each of its tokens. On a large catalog that product is about 1e-6, so negatives vanish.

    Returns:
        ``[..., T]``; 0 at masked tokens.

    Raises:
        RecpoError: unknown level, or shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    advantages = zero_masked(over_tokens(advantages.detach(), logp), mask)
    old = logp.detach() if logp_old is None else zero_masked(logp_old.detach(), mask)
    if level == "sequence":
        logp, old = (x.sum(-1, keepdim=True).expand_as(logp) for x in (logp, old))
    elif level != "token":
        raise RecpoError(f"unknown level {level!r}; expected token or sequence", code="unknown_name", field="level")
    current = logp.detach()
    # A float32 log-softmax may end a rounding above 0, where log(1 - pi) is nan.
    complement = surrogate.log1mexp(current.clamp(max=0.0))
    bound = torch.maximum(old, torch.where(advantages < 0, complement, current))
    weight = (current - bound).clamp(max=surrogate.LOG_RATIO_GUARD).exp()
    return zero_masked(-advantages * surrogate.weighted_score(weight, logp), mask)


@dataclass(frozen=True)
class GBPO(PolicyGradientObjective):
    """Gradient-bounded policy optimization (OneRec-V2, arXiv 2508.20900): ``-pi / max(pi_old, bound) * A``.

    ``bound`` is ``sg(pi)`` for ``A >= 0`` and ``1 - sg(pi)`` for ``A < 0``. Averaged over all kept items, ``A = 0``
    included. The training module supplies ``pi_old`` (logged or snapshot); without one, it is ``sg(pi)``.

    On a catalog policy (``T = 1``) a negative has the weight ``pi / (1 - pi)``: only disliked items that the policy
    still ranks high are pushed down. Monitor ``negative_gradient_share``. If dislikes matter more, use ``SoftmaxDPO``
    or combine both.

    Departures: the paper writes ``pi(o_i | u)`` and analyzes tokens; ``level="token"`` follows the analysis.

    Attributes:
        level: ``token`` bounds each token by its own probability; ``sequence`` by that of the item.
    """

    level: surrogate.RatioLevel = "token"

    @property
    def requires(self) -> frozenset[str]:
        """The old policy is read if it is supplied, and never required."""
        return super().requires - {Requirement.OLD}

    def old(self, inputs: ObjectiveInputs) -> Tensor | None:
        """Log-probabilities under the old policy, if supplied."""
        return inputs.logp.old

    def token_loss(self, logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``gbpo_loss``."""
        return gbpo_loss(logp, advantages, logp_old=logp_old, mask=mask, level=self.level)
