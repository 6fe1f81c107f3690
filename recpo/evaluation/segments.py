"""Segments: users by user properties, targets by item properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.base.types import EvaluationBatch
from recpo.evaluation.item_facts import POPULARITY_BINS, ItemFacts, popularity_bins
from recpo.ops.ranking import RankedHits

#: Label of a user or an item that is in no bin.
NO_BIN = -1


class UserSegment(NamedTuple):
    """Divides users into bins. Every per-user metric gets a mean over the users of each bin.

    Attributes:
        name: name, such as ``history length``.
        bins: names of the bins.
        label: ``batch -> [B]`` int64, index of the user's bin, ``NO_BIN`` for none.
    """

    name: str
    bins: tuple[str, ...]
    label: Callable[[EvaluationBatch], Tensor]


class ItemSegment(NamedTuple):
    """Divides items into bins. HitRate, Recall and NDCG are computed for each bin's targets alone.

    Attributes:
        name: name, such as ``item popularity``.
        bins: names of the bins.
        label: ``[V + 1]`` int64, index of the bin of item 1, 2, ..., V (place 0 is unused), ``NO_BIN`` for none.
    """

    name: str
    bins: tuple[str, ...]
    label: Tensor

    def split(self, hits: RankedHits, item_ids: Tensor) -> Iterator[RankedHits]:
        """The hits of each bin's targets in the unchanged lists ``item_ids [B, K]``; ranks do not change."""
        label = self.label.to(item_ids.device)
        shown, wanted = label[item_ids], label[hits.targets].masked_fill(hits.targets == 0, NO_BIN)
        for index in range(len(self.bins)):
            inside = wanted == index
            yield RankedHits(hits.hit * (shown == index), inside.sum(1), hits.targets * inside)


def history_length(bounds: Sequence[int] = (1, 5, 20, 50)) -> UserSegment:
    """Users by the number of distinct items in their past, ``EvaluationBatch.exclude``. The first bin has new users.

    Args:
        bounds: minimum history of the second, third, ... bin; ascending, the first is 1.
    """
    edges = torch.tensor(bounds)

    def label(batch: EvaluationBatch) -> Tensor:
        return torch.bucketize((batch.exclude > 0).sum(1), edges.to(batch.exclude.device), right=True)

    upper = [f"{low}-{high - 1}" for low, high in pairwise(bounds)]
    return UserSegment("history length", ("new users", *upper, f"{bounds[-1]} and more"), label)


def item_popularity(train_count: Tensor) -> ItemSegment:
    """Items by share of the training events, see ``popularity_bins``."""
    return ItemSegment("item popularity", POPULARITY_BINS, popularity_bins(train_count))


def item_duration(duration: Tensor, bounds: Sequence[float] | None = None) -> ItemSegment:
    """Items by duration.

    Args:
        duration: ``[V + 1]`` seconds, nan = unknown, which is a separate bin if there are such items.
        bounds: minimum duration of the second, third, ... bin; ascending. None = the quartiles of the catalog.
    """
    known = ~duration.isnan()
    known[0] = False
    if bounds is None:
        values = duration[known].double().numpy()  # torch.quantile accepts at most 16 million values
        bounds = np.unique(np.quantile(values, [0.25, 0.5, 0.75])).tolist() if len(values) else []
    label = torch.bucketize(duration.double(), torch.tensor(bounds, dtype=torch.float64), right=True)
    label = label.masked_fill(~known, len(bounds) + 1)
    label[0] = NO_BIN
    names = [f"under {bounds[0]:.4g} s"] if bounds else ["known"]
    names += [f"{low:.4g} to {high:.4g} s" for low, high in pairwise(bounds)]
    names += [f"{bounds[-1]:.4g} s and more"] if bounds else []
    names += ["unknown"] if not bool(known[1:].all()) else []
    return ItemSegment("item duration", tuple(names), label)


def item_segments(facts: ItemFacts) -> list[ItemSegment]:
    """The item segments: by popularity and, if known, by duration."""
    by_duration = [] if facts.duration is None else [item_duration(facts.duration)]
    return [item_popularity(facts.train_count), *by_duration]
