"""Advantages: how much better each slate position is than expected.

Pure functions on tensors, and the estimators that read a ``FeedbackBatch``. Shapes: ``[B, S]``, ``B`` contexts and
``S`` slate positions; the slate axis is the group of GRPO and the time axis of a session. Nothing here carries a
gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import AdvantageEstimator, Requirement, TokenAdvantageEstimator
from recpo.base.errors import ClosedUnitInterval, OpenUnitInterval, RecpoError, validate_range
from recpo.base.types import FeedbackBatch
from recpo.ops.reduce import check_same_shape, zero_masked

EPS = 1e-8
"""Added to the standard deviation, so that equal advantages give 0."""

ROUNDING = 1e-6
"""A mean below this share of the root mean square counts as 0, because it is a rounding error: advantages of groups
with equal rewards, which are exactly 0, then stay 0 when they are whitened."""


def whitening_sums(advantages: Tensor, mask: Tensor) -> Tensor:
    """Number, sum and sum of squares of the kept advantages, ``[3]`` float64. Add them up over the parts of a step.

    Args:
        advantages: any shape.
        mask: same shape, True keeps.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(advantages=advantages, mask=mask)
    kept = zero_masked(advantages.detach(), mask).double()
    return torch.stack([mask.bool().sum().double(), kept.sum(), kept.square().sum()])


def whitened_advantage(advantages: Tensor, mask: Tensor, sums: Tensor | None = None) -> Tensor:
    """``(A - mean) / (std + 1e-8)`` over the kept positions of an optimizer step, with the biased standard deviation.

    Args:
        advantages: any shape.
        mask: same shape, True keeps.
        sums: ``whitening_sums`` of the whole step; None = these advantages are the whole step.

    Returns:
        Same shape and dtype, without gradient; 0 at masked positions. Not changed if fewer than two positions are
        kept.

    Raises:
        RecpoError: shapes that differ.
    """
    count, total, squares = (whitening_sums(advantages, mask) if sums is None else sums).unbind()
    mean, mean_square = total / count.clamp(min=1), squares / count.clamp(min=1)
    mean = torch.where(mean.abs() < ROUNDING * mean_square.sqrt(), 0.0, mean)
    std = (mean_square - mean.square()).clamp(min=0).sqrt()
    kept = zero_masked(advantages.detach(), mask)
    whitened = ((kept.double() - mean) / (std + EPS)).to(kept.dtype)
    return torch.where(count < 2, kept, zero_masked(whitened, mask))


def kept_mask(values: Tensor, mask: Tensor | None) -> Tensor:
    """``mask`` as bool; all True if there is none."""
    return torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()


def rewards_of(batch: FeedbackBatch, estimator: object) -> Tensor:
    """The rewards ``[B, S]`` of the batch.

    Args:
        batch: the slates.
        estimator: named in the error.

    Raises:
        RecpoError: no reward is configured.
    """
    if batch.slates.reward is None:
        raise Requirement.REWARDS.missing(estimator, ", which this batch lacks")
    return batch.slates.reward


def _column_of(batch: FeedbackBatch, name: str, estimator: object) -> Tensor:
    """A column of the slates that is read from prepared data; ``estimator`` is named in the error."""
    column: Tensor | None = getattr(batch.slates, name)
    if column is None:
        raise RecpoError(
            f"{type(estimator).__name__} needs Slates.{name}, which this batch lacks: read it from a prepared log.",
            code="missing_value",
            field=name,
        )
    return column


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
        ``[..., S]``; exactly 0 for a group of one or of equal rewards, because 1 / eps would amplify rounding errors.
    """
    kept = kept_mask(rewards, mask)
    rewards = zero_masked(rewards.detach(), kept)
    size = kept.sum(-1, keepdim=True)
    centered = zero_masked(rewards - rewards.sum(-1, keepdim=True) / size.clamp(min=1), kept)
    highest = rewards.masked_fill(~kept, -torch.inf).amax(-1, keepdim=True)
    lowest = rewards.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    centered = centered.masked_fill(highest <= lowest, 0.0)  # equal rewards; the highest is -inf if none is kept
    if not scale:
        return centered
    variance = centered.square().sum(-1, keepdim=True) / (size - int(unbiased)).clamp(min=1)
    return centered / (variance.sqrt() + eps)


def leave_one_out_advantage(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """Reward minus the mean reward of the *others* of the group, the last axis (RLOO, arXiv 2402.14740).

    Args:
        rewards: ``[..., S]``.
        mask: ``[..., S]``; masked entries are left out of the group and get 0.

    Returns:
        ``[..., S]``; exactly 0 for a group of one or of equal rewards.
    """
    centered = group_normalized_advantage(rewards, mask, scale=False)
    size = kept_mask(rewards, mask).sum(-1, keepdim=True)
    # r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    return centered * size / (size - 1).clamp(min=1)


@dataclass(frozen=True)
class GroupNormalizedAdvantage(AdvantageEstimator):
    """Rewards normalized over the slate axis, the group of GRPO (see ``group_normalized_advantage``).

    Attributes:
        scale: divide by the group's standard deviation; False for ``DrGRPO``.
        unbiased: divide the squared deviations by n - 1 instead of n.
        eps: added to the standard deviation.
    """

    scale: bool = True
    unbiased: bool = True
    eps: float = 1e-6

    requires = frozenset({Requirement.REWARDS})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        rewards = rewards_of(batch, self)
        return group_normalized_advantage(
            rewards, batch.slates.mask, scale=self.scale, unbiased=self.unbiased, eps=self.eps
        )


@dataclass(frozen=True)
class LeaveOneOutAdvantage(AdvantageEstimator):
    """Reward minus the mean reward of the others on the slate (see ``leave_one_out_advantage``)."""

    requires = frozenset({Requirement.REWARDS})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        return leave_one_out_advantage(rewards_of(batch, self), batch.slates.mask)


def graded_advantage(grade: Tensor, mask: Tensor | None = None, *, baseline: float | None = None) -> Tensor:
    """Grade minus a baseline.

    Args:
        grade: ``[..., S]`` in [0, 1]; nan = unknown.
        mask: ``[..., S]``, True keeps.
        baseline: a constant; None = the mean over the known grades of the slate, the last axis; over a user's sequence
            this is the user's mean grade.

    Returns:
        ``[..., S]`` in [-1, 1]; 0 at masked positions and where the grade is unknown.
    """
    kept = kept_mask(grade, mask)
    known = kept & ~grade.isnan()
    grade = zero_masked(grade.detach(), known)
    mean = grade.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
    return zero_masked(grade - (mean if baseline is None else baseline), known)


@dataclass(frozen=True)
class GradedAdvantage(AdvantageEstimator):
    """Grade of the feedback minus a baseline, in [-1, 1] (see ``graded_advantage``).

    A dislike has the grade 0, and other events have the grade of their feedback level, such as a watch time. Unknown
    feedback has the advantage 0.

    Attributes:
        baseline: a constant grade in [0, 1]; null = the mean of the slate. Over ``SequenceLayout`` that is about the
            mean of the user, so that generous users do not outweigh others.
    """

    baseline: ClosedUnitInterval | None = None

    requires = frozenset({Requirement.LABELS, Requirement.DISLIKES})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        return graded_advantage(_column_of(batch, "grade", self), batch.slates.mask, baseline=self.baseline)


_RANK_ROUNDING = 1e-9
"""A rank this close to a whole number is that number, so that the best 0.3 of 11 labels are the 4 from rank 7 on."""


def share_threshold(label: Tensor, positive_fraction: float = 0.25) -> Tensor:
    """The threshold that the best ``positive_fraction`` of the labels reach: ``label >= threshold``.

    It is their ``1 - positive_fraction`` quantile with linear interpolation, over all entries that are not nan. It is
    computed from order statistics, because ``torch.quantile`` accepts at most 2^24 values. If a larger share of the
    labels equals the maximum, the threshold is the maximum, and all of these are positive.

    Args:
        label: any shape; nan = missing.
        positive_fraction: share of positives, in (0, 1).

    Returns:
        A scalar, float32 or float64; nan where every entry is missing.
    """
    validate_range(0.0 < positive_fraction < 1.0, "positive_fraction", "must lie in (0, 1)", positive_fraction)
    known = label.detach().flatten()
    known = known.to(torch.promote_types(known.dtype, torch.float32))
    known = known[~known.isnan()]
    if known.numel() == 0:
        return known.new_tensor(torch.nan)
    ascending = known.sort().values
    rank = (1.0 - positive_fraction) * (len(ascending) - 1)
    rank = round(rank) if abs(rank - round(rank)) < _RANK_ROUNDING else rank
    return torch.lerp(ascending[math.floor(rank)], ascending[math.ceil(rank)], rank - math.floor(rank))


def ternary_advantage(
    label: Tensor,
    dislike: Tensor | None,
    *,
    positive_fraction: float = 0.25,
    threshold: float | Tensor | None = None,
) -> Tensor:
    """+1 for a well-watched item, -1 for a disliked one, 0 otherwise (OneRec-V2, arXiv 2508.20900, section 3.1).

    ``A = -1`` if disliked, labeled or not; else ``+1`` if ``label >= threshold`` and ``label > 0``, else 0. These
    advantages are never normalized.

    Departures from the paper: it prints ``>``, which selects nothing where a quarter of the batch ties at the maximum
    (``share_threshold``); a label of 0 is never positive, even if enough labels are 0 that the threshold is 0; and it
    is silent on missing labels: they give 0, unless the item is disliked.

    Args:
        label: ``[B, S]`` in [0, 1]; nan = missing: left out of the threshold.
        dislike: ``[B, S]`` bool; None = no dislikes were recorded. The caller masks padding.
        positive_fraction: without ``threshold``, the share of the labels that counts as well watched. For a step of
            several micro-batches, pass the ``share_threshold`` of all their labels as ``threshold``.
        threshold: None = ``share_threshold`` of these labels.

    Returns:
        ``[B, S]`` of -1, 0 and 1 in the dtype of ``label``.
    """
    value = label.detach()
    if threshold is None:
        threshold = share_threshold(value, positive_fraction)
    if isinstance(threshold, Tensor):
        # A 0-dim tensor does not promote: the comparison would round the threshold to the dtype of the labels.
        value = value.to(torch.promote_types(value.dtype, threshold.dtype))
    return _plus_minus_one((value >= threshold) & (value > 0), dislike, label.dtype)


def _plus_minus_one(positive: Tensor, dislike: Tensor | None, dtype: torch.dtype) -> Tensor:
    """-1 if disliked, else +1 if positive, else 0."""
    advantage = positive.to(dtype)
    return advantage if dislike is None else advantage.masked_fill(dislike.bool(), -1.0)


@dataclass(frozen=True)
class TernaryAdvantage(AdvantageEstimator):
    """+1 for a positive item, -1 for a disliked one, 0 otherwise and where the slate is masked.

    Attributes:
        positive_fraction: share of the optimizer step's labels that counts as positive, as in the paper (see
            ``ternary_advantage``); null = the prepared data define which events are positive (``Slates.positive``).
    """

    positive_fraction: OpenUnitInterval | None = None

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        positive = Requirement.POSITIVES if self.positive_fraction is None else Requirement.STEP_LABELS
        return frozenset({positive, Requirement.DISLIKES})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        slates = batch.slates
        if self.positive_fraction is None:
            positive = _column_of(batch, "positive", self)
            return zero_masked(_plus_minus_one(positive, slates.dislike, torch.float32), slates.mask)
        label = _column_of(batch, "label", self).masked_fill(~slates.mask, torch.nan)
        step = label if batch.step_labels is None else batch.step_labels
        threshold = share_threshold(step, self.positive_fraction)
        return zero_masked(ternary_advantage(label, slates.dislike, threshold=threshold), slates.mask)


def reward_gate(
    rewards: Tensor,
    item_ids: Tensor,
    liked: Tensor,
    drawn: Tensor,
    *,
    max_hit_share: float = 0.5,
    min_separation: float = 0.75,
) -> Tensor:
    """Groups to learn from: the policy rarely draws the liked items, and the reward ranks them higher.

    - At most ``max_hit_share`` of the policy's draws are items that the user liked in the log.
    - Of all pairs of a liked item and another draw, the share in which the liked item has the higher reward (a tie
      counts half) is at least ``min_separation``.

    Args:
        rewards: ``[..., S]``.
        item_ids: ``[..., S]``.
        liked: ``[..., S]`` bool, logged items of the group that the user likes.
        drawn: ``[..., S]`` bool, draws of the policy that are not masked.
        max_hit_share: in [0, 1].
        min_separation: in [0, 1].

    Returns:
        ``[...]`` bool; False for a group without a liked item, or without a draw of anything else.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(rewards=rewards, item_ids=item_ids, liked=liked, drawn=drawn)
    same = item_ids.unsqueeze(-1) == item_ids.unsqueeze(-2)
    hit = drawn & (same & liked.unsqueeze(-2)).any(-1)
    others = drawn & ~hit
    hit_share = hit.sum(-1) / drawn.sum(-1).clamp(min=1)
    own, other = rewards.unsqueeze(-1), rewards.unsqueeze(-2)
    pairs = liked.unsqueeze(-1) & others.unsqueeze(-2)
    won = zero_masked((own > other) + 0.5 * (own == other), pairs).sum((-1, -2))
    separation = won / pairs.sum((-1, -2)).clamp(min=1)
    return pairs.flatten(-2).any(-1) & (hit_share <= max_hit_share) & (separation >= min_separation)


@dataclass(frozen=True)
class GatedAdvantage(AdvantageEstimator):
    """The advantages of another estimator, and 0 in groups whose reward is unreliable or uninformative.

    After AdaGRPO (arXiv 2606.08480): a group passes if the policy rarely draws the items that the user liked in the
    log, and the reward ranks these above the other draws (see ``reward_gate``). Both conditions need logged items in a
    group: set ``rollout.logged_share``. A group without a liked item never passes. To let the other groups learn from
    the likelihood of the log, set ``anchor_coef``.

    Attributes:
        estimator: the estimator of the advantages.
        max_hit_share: largest share of draws that are liked items.
        min_separation: smallest share of pairs (a liked item, another draw) that the reward orders correctly; .5 =
            chance.
    """

    estimator: AdvantageEstimator = GroupNormalizedAdvantage()
    max_hit_share: ClosedUnitInterval = 0.5
    min_separation: ClosedUnitInterval = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator.whiten:
            raise RecpoError(
                "GatedAdvantage.estimator must not whiten, because its advantages are used in some groups only: set "
                "whiten of GatedAdvantage instead",
                code="conflicting_options",
                field="GatedAdvantage.estimator",
            )

    @property
    def requires(self) -> frozenset[str]:
        """See ``AdvantageEstimator.requires``."""
        return self.estimator.requires | {Requirement.REWARDS, Requirement.POSITIVES}

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``."""
        slates = batch.slates
        if slates.is_logged is None or slates.positive is None:
            raise RecpoError(
                "GatedAdvantage compares draws with logged items, and this batch does not tell them apart: set rollout "
                "with logged_share above 0",
                code="missing_option",
                field="rollout.logged_share",
            )
        passes = reward_gate(
            rewards_of(batch, self),
            slates.item_ids,
            slates.mask & slates.is_logged & slates.positive,
            slates.mask & ~slates.is_logged,
            max_hit_share=self.max_hit_share,
            min_separation=self.min_separation,
        )
        return torch.where(passes.unsqueeze(-1), self.estimator(batch, values), 0.0)


def prefix_group_advantage(
    rewards: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    min_group: int = 2,
    scale: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Reward minus the mean reward of the candidates with the same prefix, for every token of an item.

    The advantage of token t compares the choice at t with the other choices there: its baseline is the mean over the
    candidates with the same first t - 1 tokens. At the first token these are all candidates of the group, so one token
    per item gives ``group_normalized_advantage``. If fewer than ``min_group`` candidates share that prefix, the longest
    prefix that enough candidates share gives the baseline. Baselines depend only on the prefix, so they change the
    variance of the policy gradient but not its direction.

    Args:
        rewards: ``[..., S]``.
        tokens: ``[..., S, T]``.
        mask: ``[..., S]``, True keeps; masked candidates leave every group.
        min_group: number of candidates that a prefix needs; at least 2.
        scale: divide by the standard deviation of the whole group.
        eps: added to the standard deviation.

    Returns:
        ``[..., S, T]``; 0 at masked candidates and throughout a group of equal rewards. Memory: ``S * S * T`` flags.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(rewards=rewards, items=tokens[..., 0], mask=mask)
    kept = kept_mask(rewards, mask)
    rewards = zero_masked(rewards.detach(), kept)
    # [..., S, S, T]: candidates with the same first t + 1 tokens, then with the same first t
    same_prefix = (tokens.unsqueeze(-2) == tokens.unsqueeze(-3)).cumprod(-1).bool()
    same_prefix = torch.cat([torch.ones_like(same_prefix[..., :1]), same_prefix[..., :-1]], -1)
    same_prefix &= kept[..., None, :, None]
    size = same_prefix.sum(-2)
    mean = (same_prefix * rewards[..., None, :, None]).sum(-2) / size.clamp(min=1)
    baseline = [mean[..., 0]]
    for t in range(1, tokens.shape[-1]):
        baseline.append(torch.where(size[..., t] >= min_group, mean[..., t], baseline[-1]))
    advantage = rewards.unsqueeze(-1) - torch.stack(baseline, -1)
    varies = (group_normalized_advantage(rewards, kept, scale=False) != 0).any(-1)[..., None, None]
    if scale:
        count = kept.sum(-1)
        square = zero_masked(advantage[..., 0], kept).square().sum(-1) / (count - 1).clamp(min=1)
        advantage = advantage / (square.sqrt() + eps)[..., None, None]
    return zero_masked(advantage, kept.unsqueeze(-1) & varies)


@dataclass(frozen=True)
class PrefixGroupAdvantage(TokenAdvantageEstimator):
    """Group-relative advantages of every token of a semantic id, by the rewards of candidates with the same prefix.

    After SAPO (arXiv 2605.17648: one group-relative advantage per step) and HRPO (arXiv 2608.00750), with the reward of
    the whole item at every token instead of exact matches of single tokens; see ``prefix_group_advantage``.

    Attributes:
        min_group: number of candidates that must share a prefix; otherwise a shorter prefix gives the baseline.
        scale: divide by the group's standard deviation.
        eps: added to the standard deviation.
    """

    min_group: int = 2
    scale: bool = True
    eps: float = 1e-6

    requires = frozenset({Requirement.REWARDS})

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_range(self.min_group >= 2, "PrefixGroupAdvantage.min_group", "must be at least 2", self.min_group)

    def token_advantages(self, batch: FeedbackBatch, tokens: Tensor) -> Tensor:
        """See ``TokenAdvantageEstimator``."""
        return prefix_group_advantage(
            rewards_of(batch, self),
            tokens,
            batch.slates.mask,
            min_group=self.min_group,
            scale=self.scale,
            eps=self.eps,
        )
