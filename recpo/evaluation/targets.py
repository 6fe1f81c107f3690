"""What held-out users did with the items that they were shown: the sets that lists and scores are held against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recpo.evaluation.ranking import is_member
from recpo.types import EvaluationBatch


class Targets(NamedTuple):
    """The held-out events' items and which sets they belong to, all ``[B, S]``.

    A set is one of items: an event's membership says that its item belongs to the set. An item that the user disliked
    in any held-out event is disliked, never positive and never skipped; one that was liked in any is not skipped.

    Attributes:
        item_ids: int64, 0 pads.
        positive: bool, watched long enough and never disliked.
        disliked: bool, disliked in this event.
        skipped: bool, shown and neither positive nor disliked; an event without a label is none of the three.
    """

    item_ids: Tensor
    positive: Tensor
    disliked: Tensor
    skipped: Tensor

    def without(self, seen: Tensor) -> Targets:
        """The same sets without the items of ``seen [B, M]``."""
        unseen = ~is_member(self.item_ids, seen)
        return Targets(self.item_ids, self.positive & unseen, self.disliked & unseen, self.skipped & unseen)


def held_out_targets(batch: EvaluationBatch, positive_threshold: float) -> Targets:
    """Positives are held-out events with ``label >= positive_threshold`` of items that were not disliked.

    Raises:
        ValueError: the batch has no watch quantiles.
    """
    slates = batch.feedback.slates
    if slates.label is None:
        raise ValueError("positives are told by label, and this batch has none")
    items = slates.item_ids
    disliked = torch.zeros_like(slates.mask) if slates.dislike is None else slates.dislike & slates.mask
    liked = slates.mask & (slates.label >= positive_threshold)
    below = slates.mask & (slates.label < positive_threshold)
    acceptable = ~is_member(items, items, disliked)
    return Targets(items, liked & acceptable, disliked, below & acceptable & ~is_member(items, items, liked))
