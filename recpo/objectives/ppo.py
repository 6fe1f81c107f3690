"""Proximal policy optimization: clipped surrogate, value loss and entropy (arXiv 1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.types import ObjectiveInputs
from recpo.objectives.health import explained_variance, masked_mean
from recpo.objectives.inputs import required
from recpo.objectives.policy_gradient import ClippedObjective
from recpo.ops.kl import masked_log_softmax
from recpo.ops.reduce import Aggregation, check_same_shape, over_tokens, zero_masked
from recpo.ops.surrogate import clipped_surrogate, guarded_ratio


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
        ValueError: shapes that do not fit.
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
        ValueError: ``clip`` without ``values_old``, or shapes that differ.
    """
    check_same_shape(values=values, returns=returns, values_old=values_old)
    returns = returns.detach()
    error = (values - returns).square()
    if clip is not None:
        if values_old is None:
            raise ValueError("a clipped value loss needs values_old")
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
        ValueError: shapes that differ.
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
        return super().requires | ({"value"} if self.value_coef else frozenset())

    @property
    def zero_advantage_is_inert(self) -> bool:
        """False with a critic, which learns from every position."""
        return super().zero_advantage_is_inert and not self.value_coef

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``ppo_loss``."""
        return ppo_loss(
            logp,
            required(logp_old, "old", self),
            advantages,
            mask=mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def penalized(
        self, loss: Tensor, logp: Tensor, mask: Tensor, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Adds the value loss too."""
        loss, metrics = super().penalized(loss, logp, mask, inputs)
        if self.value_coef:
            kept = mask.any(-1)
            values = zero_masked(required(inputs.values, "values", self), kept)
            returns = zero_masked(required(inputs.returns, "returns", self), kept)
            old = None
            if self.value_clip is not None:
                old = zero_masked(required(inputs.values_old, "values_old", self), kept)
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
