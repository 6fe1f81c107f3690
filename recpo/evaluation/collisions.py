"""Item metrics for lists of code tuples that several items may share.

A hit of a tuple is not a hit of an item: a system that shows items must put the items of a tuple into some order.
Without another rule, this order is uniformly random, and the metrics below are the expectations over it, in closed
form: the items of the first tuple come first, in random order, then those of the second, and so on. Counting a tuple's
hit as a hit of each item instead inflates HitRate by up to the number of items in a tuple.

recpo's own policies give every item a unique tuple and rank items. These metrics are for lists of other systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TupleLists(NamedTuple):
    """Lists of code tuples, best first.

    Attributes:
        num_items: ``[B, W]`` int64, number of items that share the tuple; 0 = empty place.
        num_hits: ``[B, W]`` int64, number of targets among them.
        num_targets: ``[B]`` int64, distinct targets of the user, listed or not.
    """

    num_items: Tensor
    num_hits: Tensor
    num_targets: Tensor


def expected_recall(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """Recall@k of items: ``sum_w hits_w (share of tuple w's items among the first k) / targets``. ``[B, len(ks)]``."""
    shown = _shown(lists, ks)
    found = (lists.num_hits[..., None] * shown / lists.num_items.clamp_min(1)[..., None]).sum(1)
    return found / _targets(lists)


def expected_hit_rate(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """HitRate@k of items: probability that a target is among the first k. ``[B, len(ks)]``.

    A tuple of m items, t of them targets, of which j come among the first k, hides all its targets with probability
    ``C(m - t, j) / C(m, j)``.
    """
    items, hits, shown = lists.num_items.double()[..., None], lists.num_hits.double()[..., None], _shown(lists, ks)
    possible = shown <= items - hits
    log_hidden = _log_choose(items - hits, shown.clamp(max=items - hits)) - _log_choose(items, shown)
    hidden = torch.where(possible, log_hidden.exp(), 0.0).prod(1)
    return (1 - hidden).masked_fill(lists.num_targets[:, None] == 0, torch.nan)


def expected_ndcg(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """NDCG@k of items: a target of a tuple is at each of the tuple's places equally often. ``[B, len(ks)]``.

    The ideal list has ``min(k, targets)`` hits, as in ``recpo.ops.ranking.ndcg``.
    """
    longest = max(ks)
    gained = torch.cat([torch.zeros(1), 1 / torch.log2(torch.arange(2, longest + 2))]).double().cumsum(0)
    gained = gained.to(lists.num_items.device)
    cut = torch.tensor(ks, device=gained.device)
    end = lists.num_items.cumsum(1)
    begin = end - lists.num_items
    of_places = gained[end[..., None].minimum(cut)] - gained[begin[..., None].minimum(cut)]
    dcg = (lists.num_hits[..., None] * of_places / lists.num_items.clamp_min(1)[..., None]).sum(1)
    return (dcg / gained[lists.num_targets[:, None].minimum(cut)]).masked_fill(
        lists.num_targets[:, None] == 0, torch.nan
    )


def _shown(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """``[B, W, len(ks)]`` float64: how many items of each tuple are among the first k."""
    before = lists.num_items.cumsum(1) - lists.num_items
    left = torch.tensor(ks, device=before.device) - before[..., None]
    return left.clamp_min(0).minimum(lists.num_items[..., None]).double()


def _targets(lists: TupleLists) -> Tensor:
    return lists.num_targets.double()[:, None]


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
