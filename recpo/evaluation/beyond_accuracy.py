"""What lists are like beside being accurate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpo.evaluation.measures import Observed


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
    """What is known of the items beside the held-out events; place 0 of every tensor is unused.

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


class Exposure:
    """How often every item is shown: ``coverage@k`` and ``gini@k`` over all lists.

    ``coverage@k`` is the share of the catalogue that is among the first k items of at least one list. Keeps one count
    per item and k, whatever the number of users.
    """

    def __init__(self, num_items: int, ks: Sequence[int]) -> None:
        self._ks = tuple(ks)
        self._shown = torch.zeros(len(self._ks), num_items + 1, dtype=torch.int64)

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """Adds the lists; no per-user metric."""
        self.add(observed.lists.item_ids)
        return {}

    def add(self, item_ids: Tensor) -> None:
        """Adds the lists ``[B, K]``."""
        item_ids = item_ids.to(self._shown.device)
        for shown, k in zip(self._shown, self._ks, strict=True):
            places = item_ids[:, :k].reshape(-1)
            shown.index_add_(0, places, torch.ones_like(places))

    def totals(self) -> dict[str, float]:
        """Coverage and Gini for each k."""
        shown = self._shown[:, 1:]
        coverage = {f"coverage@{k}": (row > 0).double().mean().item() for k, row in zip(self._ks, shown, strict=True)}
        return coverage | {f"gini@{k}": gini(row) for k, row in zip(self._ks, shown, strict=True)}


def gini(counts: Tensor) -> float:
    """Gini coefficient of ``counts [V]``: 0 = all items are shown equally often, towards 1 = one item alone is.

    ``sum_i (2 i - V - 1) x_(i) / (V sum_i x_i)`` over the ascending counts ``x_(1) <= ... <= x_(V)``; nan if all are 0.
    """
    ascending = counts.sort().values.double()
    total, size = ascending.sum(), len(ascending)
    place = torch.arange(1, size + 1, dtype=torch.float64, device=counts.device)
    return ((2 * place - size - 1) @ ascending / (size * total)).item()
