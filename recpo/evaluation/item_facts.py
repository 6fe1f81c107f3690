"""What is known of the items beside the held-out events; place 0 of every tensor is unused."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Bins of ``popularity_bins``, the most popular first.
POPULARITY_BINS = ("head", "torso", "tail", "unseen in training")


class ItemTags(NamedTuple):
    """The tags of every item, as one flat list cut by offsets.

    Attributes:
        offsets: ``[V + 2]`` int64; item i owns ``tags[offsets[i] : offsets[i + 1]]``, item 0 owns nothing.
        tags: ``[N]`` int64, 0 .. ``num_tags`` - 1, no tag twice in an item.
        num_tags: G.
    """

    offsets: Tensor
    tags: Tensor
    num_tags: int


class ItemFacts(NamedTuple):
    """What segments of items and metrics beyond accuracy are made of; all on the CPU.

    Attributes:
        train_count: ``[V + 1]`` int64, training events of every item.
        duration: ``[V + 1]`` float, seconds, nan = unknown.
        tags: genres, topics and the like.
        vectors: ``[V + 1, d]`` float, item embeddings; a row of zeros = none.
    """

    train_count: Tensor
    duration: Tensor | None = None
    tags: ItemTags | None = None
    vectors: Tensor | None = None


def popularity_bins(train_count: Tensor) -> Tensor:
    """Bins of items by share of the training events: ``[V + 1]`` int64 indices of ``POPULARITY_BINS``, place 0 is -1.

    Items are sorted by their events, ties by id. The head is the fewest items that hold at least half of all events,
    the torso the next ones up to at least 80 %, the tail the rest that has events.
    """
    counts = train_count[1:].long()
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    label = torch.bucketize(10 * before, counts.sum() * torch.tensor([5, 8]), right=True)
    bins = torch.full_like(train_count, -1, dtype=torch.int64)
    bins[order + 1] = label
    bins[1:][counts == 0] = len(POPULARITY_BINS) - 1
    return bins
