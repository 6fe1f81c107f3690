"""Ternary advantages from watch time and dislikes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.contracts import AdvantageEstimator
from recpo.errors import RecpoError
from recpo.ops.reduce import zero_masked
from recpo.types import FeedbackBatch


def positive_threshold(label: Tensor, positive_fraction: float = 0.25) -> Tensor:
    """The threshold above which the best ``positive_fraction`` of the watch quantiles lie.

    It is their ``1 - positive_fraction`` quantile with linear interpolation, over all non-nan entries of the tensor. If
    so many tie at the maximum that nothing is strictly above it, it is the largest number below the maximum, so that
    ``q > threshold`` selects the tied ones.

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
    top = known.max()
    threshold = torch.quantile(known, 1.0 - positive_fraction)
    return torch.minimum(threshold, torch.nextafter(top, top.new_tensor(-torch.inf)))


def ternary_advantage(
    label: Tensor,
    dislike: Tensor | None,
    *,
    positive_fraction: float = 0.25,
    threshold: float | Tensor | None = None,
) -> Tensor:
    """+1 for a well-watched item, -1 for a disliked one, 0 otherwise (OneRec-V2, arXiv 2508.20900, section 3.1).

    ``A = -1`` if disliked, else ``+1`` if ``q > threshold``, else 0. These advantages are never normalized.

    Departures from the paper, which is silent on both: a missing quantile gives 0, and a batch in which a quarter ties
    at the maximum selects the tied ones (see ``positive_threshold``).

    Args:
        label: ``[B, S]`` in [0, 1]; nan = missing or padding: gives 0, disliked or not, and is left out of the
            threshold.
        dislike: ``[B, S]`` bool; None = no dislikes were recorded.
        positive_fraction: without ``threshold``, the share of the batch that counts as well watched. Take the
            threshold over the whole optimizer step (``positive_threshold``) before splitting it into micro-batches.
        threshold: a fixed threshold instead of the batch's.

    Returns:
        ``[B, S]`` of -1, 0 and 1 in the dtype of ``label``.
    """
    quantile = label.detach()
    if threshold is None:
        threshold = positive_threshold(quantile, positive_fraction)
    if isinstance(threshold, Tensor):
        # A 0-dim tensor does not promote: the comparison would round the threshold to the dtype of the quantiles.
        quantile = quantile.to(torch.promote_types(quantile.dtype, threshold.dtype))
    advantage = (quantile > threshold).to(label.dtype)
    if dislike is not None:
        advantage = torch.where(dislike.bool(), -torch.ones_like(advantage), advantage)
    return zero_masked(advantage, ~quantile.isnan())


@dataclass(frozen=True)
class TernaryAdvantage(AdvantageEstimator):
    """+1 for a well-watched item, -1 for a disliked one, 0 otherwise (see ``ternary_advantage``).

    Attributes:
        positive_fraction: without ``threshold``, the share of the optimizer step's items that count as well watched.
        threshold: a fixed watch quantile above which an item counts as well watched, in [0, 1].
    """

    positive_fraction: float = 0.25
    threshold: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.positive_fraction < 1.0:
            raise RecpoError(f"TernaryAdvantage.positive_fraction must lie in (0, 1), got {self.positive_fraction}.")

    @property
    def reads_step_labels(self) -> bool:
        """Whether the threshold is a quantile of the optimizer step."""
        return self.threshold is None

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        slates = batch.slates
        if slates.label is None:
            raise RecpoError("TernaryAdvantage needs watch quantiles or labels, which this batch lacks.")
        quantile = slates.label.masked_fill(~slates.mask, torch.nan)
        threshold: float | Tensor | None = self.threshold
        if threshold is None:
            step = quantile if batch.step_labels is None else batch.step_labels
            threshold = positive_threshold(step, self.positive_fraction)
        return ternary_advantage(quantile, slates.dislike, threshold=threshold)
