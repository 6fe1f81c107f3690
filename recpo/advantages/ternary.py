"""Ternary advantages from labels and dislikes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import AdvantageEstimator
from recpo.errors import RecpoError
from recpo.ops.reduce import zero_masked
from recpo.types import FeedbackBatch

# A rank (1 - fraction) * (n - 1) that misses a whole number by rounding alone is that number: 0.3 of 11 events is 4.
_RANK_ROUNDING = 1e-9


def share_threshold(label: Tensor, positive_fraction: float = 0.25) -> Tensor:
    """The threshold from which on the best ``positive_fraction`` of the labels lie: ``label >= threshold``.

    It is their ``1 - positive_fraction`` quantile with linear interpolation, over all non-nan entries of the tensor,
    computed from order statistics, since ``torch.quantile`` takes no more than 2^24 values. If a larger share ties at
    the maximum, the threshold is the maximum, and all the tied ones are positive.

    Args:
        label: any shape; nan = missing.
        positive_fraction: share of positives, in (0, 1).

    Returns:
        A scalar, float32 or float64; nan where every entry is missing.
    """
    if not 0.0 < positive_fraction < 1.0:
        raise ValueError(f"positive_fraction must lie in (0, 1), got {positive_fraction}")
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
        dislike: ``[B, S]`` bool; None = no dislikes were recorded. Padding is the business of the slate mask.
        positive_fraction: without ``threshold``, the share of the batch that counts as well watched. Take the
            threshold over the whole optimizer step (``share_threshold``) before splitting it into micro-batches.
        threshold: a fixed threshold instead of the batch's.

    Returns:
        ``[B, S]`` of -1, 0 and 1 in the dtype of ``label``.
    """
    value = label.detach()
    if threshold is None:
        threshold = share_threshold(value, positive_fraction)
    if isinstance(threshold, Tensor):
        # A 0-dim tensor does not promote: the comparison would round the threshold to the dtype of the labels.
        value = value.to(torch.promote_types(value.dtype, threshold.dtype))
    return _signs((value >= threshold) & (value > 0), dislike, label.dtype)


def _signs(positive: Tensor, dislike: Tensor | None, dtype: torch.dtype) -> Tensor:
    advantage = positive.to(dtype)
    return advantage if dislike is None else advantage.masked_fill(dislike.bool(), -1.0)


@dataclass(frozen=True)
class TernaryAdvantage(AdvantageEstimator):
    """+1 for a positive item, -1 for a disliked one, 0 otherwise and where the slate is masked.

    Attributes:
        positive_fraction: share of the optimizer step's labels that counts as positive, as in the paper (see
            ``ternary_advantage``); none = what the prepared log defines as positive (``Slates.positive``).
    """

    positive_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.positive_fraction is not None and not 0.0 < self.positive_fraction < 1.0:
            raise RecpoError(f"TernaryAdvantage.positive_fraction must lie in (0, 1), got {self.positive_fraction}.")

    @property
    def reads_step_labels(self) -> bool:
        """See ``AdvantageEstimator.reads_step_labels``."""
        return self.positive_fraction is not None

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``AdvantageEstimator.learns_from``."""
        return frozenset({"positives" if self.positive_fraction is None else "labels", "dislikes"})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        slates = batch.slates
        if self.positive_fraction is None:
            if slates.positive is None:
                raise RecpoError("TernaryAdvantage needs Slates.positive, which this batch lacks.")
            return zero_masked(_signs(slates.positive, slates.dislike, torch.float32), slates.mask)
        if slates.label is None:
            raise RecpoError("TernaryAdvantage.positive_fraction needs labels, which this batch lacks.")
        label = slates.label.masked_fill(~slates.mask, torch.nan)
        step = label if batch.step_labels is None else batch.step_labels
        threshold = share_threshold(step, self.positive_fraction)
        return zero_masked(ternary_advantage(label, slates.dislike, threshold=threshold), slates.mask)
