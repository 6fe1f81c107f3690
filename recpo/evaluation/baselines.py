"""Recommenders that do not learn from histories. Every policy must beat them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recpo.base.types import FeedbackBatch, Histories, Recommendations
from recpo.ops.ranking import is_member


class Popularity:
    """The items with the highest counts, equal for all users except for excluded items. Ties are ordered by item id.

    Scores are ``log((count + 1) / (sum of counts + V))``.
    """

    def __init__(self, counts: Tensor) -> None:
        """``counts [V]`` of the items 1, 2, ..., V."""
        self._ranking = counts.argsort(descending=True, stable=True) + 1
        self._logp = torch.log((counts.double() + 1) / (counts.double().sum() + len(counts))).float()

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``."""
        depth = min(len(self._ranking), k + (0 if exclude is None else exclude.shape[1]))
        device = histories.item_ids.device
        candidates = self._ranking[:depth].to(device).expand(len(histories.item_ids), -1)
        item_ids = first_allowed(candidates, k, exclude)
        scores = self._logp.to(device)[(item_ids - 1).clamp_min(0)]
        return Recommendations(item_ids, scores.masked_fill(item_ids == 0, -torch.inf))

    def score(self, batch: FeedbackBatch) -> Tensor:
        """Scores ``[B, S]`` of the slates, equal for all users."""
        item_ids = batch.slates.item_ids
        return self._logp.to(item_ids.device)[(item_ids - 1).clamp_min(0)]


class UniformlyRandom:
    """A random list per user: every allowed item is equally likely at every place.

    One random order of the catalog is drawn, and every list starts at a different place in it, so the cost of a list of
    distinct items does not grow with the catalog. Scores are ``-log V``.
    """

    def __init__(self, num_items: int, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(num_items, generator=self._generator) + 1

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. Every call draws new lists."""
        num_items, batch = len(self._order), len(histories.item_ids)
        depth = min(num_items, k + (0 if exclude is None else exclude.shape[1]))
        begin = torch.randint(num_items, (batch, 1), generator=self._generator)
        candidates = self._order[(begin + torch.arange(depth)) % num_items].to(histories.item_ids.device)
        item_ids = first_allowed(candidates, k, exclude)
        score = -torch.log(torch.tensor(float(num_items), device=item_ids.device))
        return Recommendations(item_ids, torch.where(item_ids > 0, score, -torch.inf))


def first_allowed(candidates: Tensor, k: int, exclude: Tensor | None) -> Tensor:
    """The first ``k`` of ``candidates [B, C]`` that are not in ``exclude [B, M]``: ``[B, k]``, filled up with 0."""
    allowed = candidates.new_ones(candidates.shape, dtype=torch.bool)
    if exclude is not None:
        allowed = ~is_member(candidates, exclude)
    order = (~allowed).int().argsort(dim=1, stable=True)[:, :k]
    chosen = candidates.gather(1, order).masked_fill(~allowed.gather(1, order), 0)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]))


def decayed_counts(
    item_index: np.ndarray, timestamp: np.ndarray, *, num_items: int, end: int, half_life: float
) -> np.ndarray:
    """Training events of the items 1..V, weighted by recency: ``c_i = sum_e 2 ** ((t_e - end) / half_life)``.

    With these counts, ``Popularity`` is a recency baseline. Sums over several chunks of events may be added.

    Args:
        item_index: ``[N]``, the item of each event.
        timestamp: ``[N]``, its time.
        num_items: V.
        end: the time at which an event has weight 1: the last time of the training period.
        half_life: in the unit of the timestamps; an event of this age has weight one half.

    Returns:
        ``[V]`` float64.
    """
    weight = np.exp2((timestamp - end) / half_life)
    return np.bincount(item_index, weight, minlength=num_items + 1)[1:]
