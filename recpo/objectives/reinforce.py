"""REINFORCE with off-policy and top-K correction (YouTube, arXiv 1812.02353)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import ObjectiveInputs
from recpo.objectives.health import masked_mean
from recpo.objectives.policy_gradient import PolicyGradientObjective
from recpo.ops.reduce import Aggregation, check_same_shape, over_tokens, zero_masked
from recpo.ops.surrogate import guarded_ratio, log1mexp, weighted_score


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
        ValueError: ``top_k`` below 1, or shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
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
    top_k: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k < 1:
            raise RecpoError(f"Reinforce.top_k must be at least 1, got {self.top_k}.")

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return super().requires - (frozenset() if self.off_policy else {"old"})

    def old(self, inputs: ObjectiveInputs) -> Tensor | None:
        """Log-probabilities under the behavior policy; None on-policy."""
        return super().old(inputs) if self.off_policy else None

    def log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """The log-ratio of the item, on each of its tokens."""
        return zero_masked(over_tokens(log_ratio.sum(-1), log_ratio), mask)

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``reinforce_loss``."""
        return reinforce_loss(
            logp, advantages, logp_old=logp_old, mask=mask, ratio_cap=self.ratio_cap, top_k=self.top_k
        )

    def clip_metrics(self, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Share of tokens whose ratio was capped."""
        bound = float("inf") if self.ratio_cap is None else self.ratio_cap
        return {"clip_fraction": masked_mean(guarded_ratio(log_ratio) > bound, mask)}
