"""Baselines that are only counted, and list the same items for every user."""

from typing import Final

import numpy as np
import torch

from recpo.log.prepared import Prepared
from recpo.log.schema import MILLISECONDS_PER_DAY
from recpo.policies.baseline import PopularityPolicy

_RATE_EVENTS: Final = 10.0


def popularity_of(scores: np.ndarray) -> PopularityPolicy:
    """The policy that lists the items with the largest of ``scores [V]``, which are 0 or above, for every user."""
    policy = PopularityPolicy(len(scores))
    policy.item_scores.copy_(torch.from_numpy(scores).double().add(1e-9).log())
    return policy.eval()


def item_scores(name: str, data: Prepared, half_life_days: float | None = None) -> np.ndarray:
    """Scores ``[V]`` of a baseline that ranks the same way for every user.

    ``item_rate`` is the share of positives among an item's events, shrunk toward that of all items as if ten more
    events had been seen: ``(positives + 10 rate) / (events + 10)``.

    Args:
        name: popularity, positives, item_rate or recency.
        data: prepared data.
        half_life_days: of recency; None = a tenth of the training period.
    """
    if name == "recency":
        return recent_counts(data, half_life_days)
    counts = data.item_counts("train_count")
    if name == "popularity":
        return counts
    positives = data.item_counts("train_positives")
    if name == "positives":
        return positives
    rate = positives.sum() / max(1, counts.sum())
    shrunk: np.ndarray = (positives + _RATE_EVENTS * rate) / (counts + _RATE_EVENTS)
    return shrunk


def recent_counts(data: Prepared, half_life_days: float | None) -> np.ndarray:
    """Training events of the items 1..V, weighted by recency: ``c_i = sum_e 2 ** ((t_e - end) / half_life)``, ``[V]``.

    An event at the end of the training period has weight 1, and one that is a half-life older one half. Two passes with
    one piece in memory at a time; the first one finds the start and the end of the training period.
    """
    first, last = np.inf, -np.inf
    for columns in data.train_columns(["timestamp"]):
        time = columns["timestamp"]
        if len(time):
            first, last = min(first, float(time.min())), max(last, float(time.max()))
    half_life = max(1.0, (last - first) / 10) if half_life_days is None else half_life_days * MILLISECONDS_PER_DAY
    counts = np.zeros(data.num_items)
    for item, time in (columns.values() for columns in data.train_columns(["item_index", "timestamp"])):
        weight = np.exp2((time - int(last)) / half_life)
        counts += np.bincount(item, weight, minlength=data.num_items + 1)[1:]
    return counts
