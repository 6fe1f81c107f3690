"""Advantages: how much better than expected each slate position did.

Pure functions on tensors, and the estimators that read a ``FeedbackBatch``. Shapes: ``[B, S]``, ``B`` contexts and
``S`` slate positions; the slate axis is the group of GRPO and the time axis of a session. Nothing here carries a
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import AdvantageEstimator, ReturnEstimator
from recpo.errors import RecpoError
from recpo.ops.reduce import zero_masked
from recpo.types import FeedbackBatch


def positive_threshold(watch_quantile: Tensor, positive_fraction: float = 0.25) -> Tensor:
    """The threshold above which the best ``positive_fraction`` of the watch quantiles lie.

    It is their ``1 - positive_fraction`` quantile with linear interpolation, over all non-nan entries of the tensor. If
    so many tie at the maximum that nothing is strictly above it, it is the largest number below the maximum, so that
    ``q > threshold`` selects the tied ones.

    Args:
        watch_quantile: any shape; nan = missing.
        positive_fraction: share of positives, in (0, 1).

    Returns:
        A scalar, float32 or float64; nan where every entry is missing.
    """
    if not 0.0 < positive_fraction < 1.0:
        raise ValueError(f"positive_fraction must lie in (0, 1), got {positive_fraction}")
    known = watch_quantile.detach().flatten()
    known = known.to(torch.promote_types(known.dtype, torch.float32))
    known = known[~known.isnan()]
    if known.numel() == 0:
        return known.new_tensor(torch.nan)
    top = known.max()
    threshold = torch.quantile(known, 1.0 - positive_fraction)
    return torch.minimum(threshold, torch.nextafter(top, top.new_tensor(-torch.inf)))


def ternary_advantage(
    watch_quantile: Tensor,
    dislike: Tensor | None,
    *,
    positive_fraction: float = 0.25,
    threshold: float | Tensor | None = None,
) -> Tensor:
    """+1 for a well-watched item, -1 for a disliked one, 0 otherwise (OneRec-V2, arXiv 2508.20900, section 3.1).

    ``A = -1`` if disliked, else ``+1`` if ``q > threshold``, else 0. These advantages are never normalised.

    Departures from the paper, which is silent on both: a missing quantile gives 0, and a batch in which a quarter ties
    at the maximum selects the tied ones (see ``positive_threshold``).

    Args:
        watch_quantile: ``[B, S]`` in [0, 1]; nan = missing or padding: gives 0, disliked or not, and is left out of the
            threshold.
        dislike: ``[B, S]`` bool; None = no dislikes were recorded.
        positive_fraction: without ``threshold``, the share of the batch that counts as well watched. Take the
            threshold over the whole optimiser step (``positive_threshold``) before splitting it into micro-batches.
        threshold: a fixed threshold instead of the batch's.

    Returns:
        ``[B, S]`` of -1, 0 and 1 in the dtype of ``watch_quantile``.
    """
    quantile = watch_quantile.detach()
    if threshold is None:
        threshold = positive_threshold(quantile, positive_fraction)
    if isinstance(threshold, Tensor):
        # A 0-dim tensor does not promote: the comparison would round the threshold to the dtype of the quantiles.
        quantile = quantile.to(torch.promote_types(quantile.dtype, threshold.dtype))
    advantage = (quantile > threshold).to(watch_quantile.dtype)
    if dislike is not None:
        advantage = torch.where(dislike.bool(), -torch.ones_like(advantage), advantage)
    return zero_masked(advantage, ~quantile.isnan())


@dataclass(frozen=True)
class TernaryAdvantage(AdvantageEstimator):
    """+1 for a well-watched item, -1 for a disliked one, 0 otherwise (see ``ternary_advantage``).

    Attributes:
        positive_fraction: without ``threshold``, the share of the optimiser step's items that count as well watched.
        threshold: a fixed watch quantile above which an item counts as well watched, in [0, 1].
    """

    positive_fraction: float = 0.25
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.positive_fraction < 1.0:
            raise RecpoError(f"TernaryAdvantage.positive_fraction must lie in (0, 1), got {self.positive_fraction}.")

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        slates = batch.slates
        if slates.watch_quantile is None:
            raise RecpoError("TernaryAdvantage needs watch quantiles or labels, which this batch lacks.")
        quantile = slates.watch_quantile.masked_fill(~slates.mask, torch.nan)
        threshold: float | Tensor | None = self.threshold
        if threshold is None:
            step = quantile if batch.step_quantiles is None else batch.step_quantiles
            threshold = positive_threshold(step, self.positive_fraction)
        return ternary_advantage(quantile, slates.dislike, threshold=threshold)


def _kept(values: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()


def _is_constant(rewards: Tensor, kept: Tensor) -> Tensor:
    """``[..., 1]``: all kept rewards of the group are equal (or there is at most one)."""
    top = rewards.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
    return top <= rewards.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)


def group_normalized_advantage(
    rewards: Tensor, mask: Tensor | None = None, *, scale: bool = True, unbiased: bool = True, eps: float = 1e-6
) -> Tensor:
    """``(r - mean) / (std + eps)`` over the group, the last axis (GRPO, arXiv 2402.03300).

    Args:
        rewards: ``[..., S]``.
        mask: ``[..., S]``; masked entries are left out of the group and get 0.
        scale: divide by the standard deviation; False is Dr.GRPO (arXiv 2503.20783).
        unbiased: divide the squared deviations by n - 1 instead of n.
        eps: added to the standard deviation.

    Returns:
        ``[..., S]``; exactly 0 for a group of one or of equal rewards, where rounding would be blown up by 1 / eps.
    """
    kept = _kept(rewards, mask)
    rewards = zero_masked(rewards.detach(), kept)
    size = kept.sum(-1, keepdim=True)
    deviation = zero_masked(rewards - rewards.sum(-1, keepdim=True) / size.clamp(min=1), kept)
    deviation = deviation.masked_fill(_is_constant(rewards, kept), 0.0)
    if not scale:
        return deviation
    variance = deviation.square().sum(-1, keepdim=True) / (size - int(unbiased)).clamp(min=1)
    return deviation / (variance.sqrt() + eps)


def leave_one_out_advantage(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """Reward minus the mean reward of the *others* of the group, the last axis (RLOO, arXiv 2402.14740).

    Args:
        rewards: ``[..., S]``.
        mask: ``[..., S]``; masked entries are left out of the group and get 0.

    Returns:
        ``[..., S]``; exactly 0 for a group of one or of equal rewards.
    """
    kept = _kept(rewards, mask)
    deviation = group_normalized_advantage(rewards, mask, scale=False)
    size = kept.sum(-1, keepdim=True)
    # r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    return deviation * size / (size - 1).clamp(min=1)


def generalized_advantage_estimate(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor | None,
    next_value: Tensor | float,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Tensor | None = None,
    truncations: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation along the last axis (GAE, arXiv 1506.02438).

    ``delta_t = r_t + gamma (1 - d_t) v_{t+1} - v_t``; ``A_t = delta_t + gamma lam (1 - d_t) A_{t+1}``; the return is
    ``A + v``. Termination (``dones``) says that nothing follows; truncation that something follows which was not
    recorded: there the recursion stops and ``bootstrap_values`` stands for the next value.

    Args:
        rewards: ``[..., S]``, the last axis is time.
        values: ``[..., S]`` state values before each step.
        dones: ``[..., S]`` bool or 0/1, 1 = the step ends its session; None = none does.
        next_value: ``[...]`` or a number, the value after the last step.
        gamma: discount.
        lam: 0 = one-step temporal difference, 1 = Monte Carlo.
        mask: ``[..., S]``; masked steps are skipped (their successor follows their predecessor) and return 0.
        truncations: ``[..., S]`` bool or 0/1.
        bootstrap_values: ``[..., S]``, read where truncated.

    Returns:
        advantages and returns, each ``[..., S]``, without gradient.

    Raises:
        ValueError: ``truncations`` without ``bootstrap_values``.
    """
    if truncations is not None and bootstrap_values is None:
        raise ValueError("truncations need bootstrap_values: the value that stands for the unrecorded next state")
    kept = _kept(rewards, mask)
    rewards, values = zero_masked(rewards.detach(), kept), zero_masked(values.detach(), kept)
    ends = torch.zeros_like(kept) if dones is None else dones.bool()
    cut = torch.zeros_like(kept) if truncations is None else truncations.bool()
    bootstrap = values if bootstrap_values is None else bootstrap_values.detach()
    following = torch.as_tensor(next_value, dtype=values.dtype, device=values.device).detach()
    following = following.expand(values.shape[:-1])
    running = torch.zeros_like(following)
    steps = []
    for t in reversed(range(rewards.shape[-1])):
        goes_on = ~ends[..., t]
        next_t = zero_masked(torch.where(cut[..., t], bootstrap[..., t], following), goes_on)
        delta = rewards[..., t] + gamma * next_t - values[..., t]
        advantage = delta + gamma * lam * zero_masked(running, goes_on & ~cut[..., t])
        steps.append(zero_masked(advantage, kept[..., t]))
        running = torch.where(kept[..., t], advantage, running)
        following = torch.where(kept[..., t], values[..., t], following)
    advantages = torch.stack(steps[::-1], -1) if steps else torch.zeros_like(rewards)
    return advantages, advantages + values


def _rewards(batch: FeedbackBatch, estimator: object) -> Tensor:
    if batch.slates.reward is None:
        raise RecpoError(f"{type(estimator).__name__} needs rewards, which this batch lacks: configure a reward.")
    return batch.slates.reward


@dataclass(frozen=True)
class GroupNormalizedAdvantage(AdvantageEstimator):
    """Rewards normalised over the slate axis, the group of GRPO (see ``group_normalized_advantage``).

    Attributes:
        scale: divide by the group's standard deviation; False for ``DrGRPO``.
        unbiased: divide the squared deviations by n - 1 instead of n.
        eps: added to the standard deviation.
    """

    scale: bool = True
    unbiased: bool = True
    eps: float = 1e-6

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return frozenset({"rewards"})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        rewards = _rewards(batch, self)
        return group_normalized_advantage(
            rewards, batch.slates.mask, scale=self.scale, unbiased=self.unbiased, eps=self.eps
        )


@dataclass(frozen=True)
class LeaveOneOutAdvantage(AdvantageEstimator):
    """Reward minus the mean reward of the others on the slate (see ``leave_one_out_advantage``)."""

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return frozenset({"rewards"})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        return leave_one_out_advantage(_rewards(batch, self), batch.slates.mask)


@dataclass(frozen=True)
class GAEAdvantage(ReturnEstimator):
    """Generalised advantage estimation over the slate axis, whose positions are the steps of sessions.

    Where a position ends its session nothing follows. Where the last kept position does not (its window was cut, or the
    log ends there), what follows was not recorded: its value stands for the rest in the returns of the steps before it,
    and it learns nothing itself (advantage 0, return = value). With ``gamma`` 0 nothing is read of what follows, and
    every step learns. Slates that do not say where sessions end are taken for one session that ends with them.
    Candidates of a rollout are each a session of one step: ``A = r - V``.

    Attributes:
        gamma: discount.
        lam: 0 = one-step temporal difference, 1 = Monte Carlo.
    """

    gamma: float = 0.99
    lam: float = 0.95

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return frozenset({"rewards", "value"})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; needs ``values [B, S]``."""
        return self.advantages_and_returns(batch, values)[0]

    def advantages_and_returns(self, batch: FeedbackBatch, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """See ``ReturnEstimator``."""
        if values is None:
            raise RecpoError("GAEAdvantage needs state values: configure a critic.")
        rewards, kept, ends = _rewards(batch, self), batch.slates.mask, batch.slates.ends_session
        open_end = torch.zeros_like(kept)
        if ends is not None:
            ends = _ends_of_kept(ends, kept)
            open_end = _last_kept(kept) & ~ends if self.gamma else open_end
        values = zero_masked(values.detach(), kept)
        rest = zero_masked(values, open_end).sum(-1)
        advantages, returns = generalized_advantage_estimate(
            rewards, values, ends, rest, gamma=self.gamma, lam=self.lam, mask=kept & ~open_end
        )
        return advantages, torch.where(open_end, values, returns)


def _last_kept(mask: Tensor) -> Tensor:
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)


def _ends_of_kept(ends: Tensor, kept: Tensor) -> Tensor:
    """Which kept steps are the last kept ones of their session: the step that ended it may have been left out."""
    ended = ends.long().cumsum(-1)
    before = ended - ends.long()
    after = torch.where(kept, before, ended[..., -1:]).flip(-1).cummin(-1).values.flip(-1)
    following = torch.cat([after[..., 1:], ended[..., -1:]], -1)
    return kept & (following > before)
