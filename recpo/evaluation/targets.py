"""Held-out outcomes: the item sets that lists and scores are compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recpo.base.types import EvaluationBatch
from recpo.ops.ranking import is_member


class Targets(NamedTuple):
    """The held-out events' items and their sets, all ``[B, S]``.

    A set contains items: an event's membership says that its item is in the set. An item that the user disliked in any
    held-out event is disliked and in no other set. An item that was positive in any event is not in ``other``. The
    prepared log defines the kinds of events (``recpo.base.feedback.FeedbackRule``).

    Attributes:
        item_ids: int64, padded with 0.
        positive: bool, positive in this event and never disliked.
        disliked: bool, disliked in this event.
        other: bool, labeled and in none of the other sets: skipped and neutral exposures. An event without a label is
            in no set, unless it is disliked.
    """

    item_ids: Tensor
    positive: Tensor
    disliked: Tensor
    other: Tensor

    def without(self, exclude: Tensor) -> Targets:
        """The same sets without the items of ``exclude [B, M]``."""
        kept = ~is_member(self.item_ids, exclude)
        return Targets(self.item_ids, self.positive & kept, self.disliked & kept, self.other & kept)


def held_out_targets(batch: EvaluationBatch) -> Targets:
    """The sets of the held-out events' items.

    Raises:
        ValueError: the batch does not say which events are positive.
    """
    slates = batch.feedback.slates
    if slates.label is None or slates.positive is None:
        raise ValueError("targets are made of Slates.label and Slates.positive, and this batch lacks them")
    items = slates.item_ids
    disliked = torch.zeros_like(slates.mask) if slates.dislike is None else slates.dislike & slates.mask
    liked = slates.mask & slates.positive
    labeled = slates.mask & ~slates.label.isnan()
    acceptable = ~is_member(items, items, disliked)
    other = labeled & acceptable & ~is_member(items, items, liked)
    return Targets(items, liked & acceptable, disliked, other)
