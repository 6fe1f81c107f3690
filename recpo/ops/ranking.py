"""Ranking metrics of top-K lists against sets of held-out items, vectorized over users.

Conventions, the same for every metric:

- Relevance is binary, except for graded NDCG.
- The targets of a user are a set: an item that occurs several times counts once.
- A recommended list is best first; id 0 is an empty place and never a hit. An item that a list repeats counts at its
  first place alone, so that no list has a recall or an NDCG above 1.
- A user without targets gets nan: such users are excluded from every mean, and counted.
- In a list shorter than k, the remaining places are empty: Precision@k still divides by k.
- NDCG@k divides by the DCG of the user's ideal list, with ``min(k, number of targets)`` items, not k items.
- A list has no ties. The recommender breaks them (recpo: the smaller id first).
- If past items are excluded from the lists, the caller must remove them from the targets, so that the ideal list only
  contains items that a list can contain.
- Targets that are not among the first k items have no known rank: its reciprocal is 0, and the rank itself counts as
  k + 1.

The sets themselves, rows of item ids, are at the end: membership and first occurrences.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpo.base.errors import RecpoError


class RankedHits(NamedTuple):
    """Which places of the lists hold a target.

    Attributes:
        hit: ``[B, K]`` float32, 1 if the item at the place is a target, else 0.
        num_targets: ``[B]`` int64, distinct targets of each user.
        targets: ``[B, P]`` int64, the distinct targets, ascending; repeated and removed ones are 0.
    """

    hit: Tensor
    num_targets: Tensor
    targets: Tensor


def ranked_hits(item_ids: Tensor, targets: Tensor, mask: Tensor) -> RankedHits:
    """Looks the lists up in the target sets, in ``O(B (P + K) log P + B K log K)`` time.

    Args:
        item_ids: ``[B, K]`` recommended items, best first, 0 = empty place; a repeated item counts at its first place.
        targets: ``[B, P]`` held-out items, in any order, repeats allowed.
        mask: ``[B, P]`` bool, True keeps a target.
    """
    if item_ids.ndim != 2 or targets.ndim != 2 or len(item_ids) != len(targets) or mask.shape != targets.shape:
        raise RecpoError(
            f"expected item_ids [B, K], targets [B, P], mask [B, P]; got {tuple(item_ids.shape)}, "
            f"{tuple(targets.shape)}, {tuple(mask.shape)}",
            code="wrong_shape",
            field="item_ids",
        )
    kept = sorted_members(targets, mask)
    distinct = kept != NO_ITEM
    distinct[:, 1:] &= kept[:, 1:] != kept[:, :-1]
    hit = first_places(item_ids, found_in(item_ids, kept))
    return RankedHits(hit.float(), distinct.sum(1), kept.masked_fill(~distinct, 0))


def hit_rate(hits: RankedHits, ks: Sequence[int]) -> Tensor:
    """HitRate@k: 1 if any target is among the first k items, else 0. ``[B, len(ks)]``."""
    return _defined((_sum_to_k(hits.hit, ks) > 0).float(), hits)


def recall(hits: RankedHits, ks: Sequence[int]) -> Tensor:
    """Recall@k: targets among the first k items / number of targets. ``[B, len(ks)]``."""
    return _defined(_sum_to_k(hits.hit, ks) / hits.num_targets[:, None], hits)


def precision(hits: RankedHits, ks: Sequence[int]) -> Tensor:
    """Precision@k: targets among the first k items / k. ``[B, len(ks)]``."""
    return _defined(_sum_to_k(hits.hit, ks) / hits.hit.new_tensor(ks), hits)


def ndcg(hits: RankedHits, ks: Sequence[int]) -> Tensor:
    """NDCG@k: ``sum_{r<=k} hit_r / log2(r + 1)`` over the same sum of the ideal list. ``[B, len(ks)]``.

    The ideal list begins with ``min(k, number of targets)`` hits (Järvelin and Kekäläinen, 2002, with binary gains).
    With one target that is ``1 / log2(rank + 1)``. Libraries that always divide by k ideal items report smaller values.
    """
    longest = max(*ks, hits.hit.shape[1])
    discount = _discount(longest, hits.hit)
    ideal = torch.cat([discount.new_zeros(1), discount.cumsum(0)])
    best = torch.stack([ideal[hits.num_targets.clamp(max=k)] for k in ks], 1)
    return _defined(_sum_to_k(hits.hit, ks, discount) / best, hits)


def mrr(hits: RankedHits, ks: Sequence[int]) -> Tensor:
    """MRR@k: 1 / rank of the first target, 0 if it is not among the first k items. ``[B, len(ks)]``."""
    places = hits.hit.shape[1]
    reciprocal = 1 / torch.arange(1, places + 1, device=hits.hit.device, dtype=torch.float32)
    first = (hits.hit * reciprocal).amax(1) if places else hits.hit.new_zeros(len(hits.hit))
    return _defined(torch.stack([first * (first >= 1 / k - 1e-7) for k in ks], 1), hits)


def mean_average_precision(hits: RankedHits, ks: Sequence[int]) -> Tensor:
    """MAP@k: ``sum_{r<=k} hit_r Precision@r / min(k, number of targets)``. ``[B, len(ks)]``."""
    rank = torch.arange(1, hits.hit.shape[1] + 1, device=hits.hit.device, dtype=torch.float32)
    gained = hits._replace(hit=hits.hit * hits.hit.cumsum(1) / rank)
    best = torch.stack([hits.num_targets.clamp(max=k) for k in ks], 1)
    return _defined(_sum_to_k(gained.hit, ks) / best, hits)


def mean_rank(hits: RankedHits, ks: Sequence[int]) -> Tensor:
    """Mean rank of the targets; a target that is not among the first k items counts as k + 1. ``[B, len(ks)]``."""
    rank = torch.arange(1, hits.hit.shape[1] + 1, device=hits.hit.device, dtype=torch.float32)
    cut = hits.hit.new_tensor(ks) + 1
    absent = hits.num_targets[:, None] - _sum_to_k(hits.hit, ks)
    return _defined((_sum_to_k(hits.hit, ks, rank) + absent * cut) / hits.num_targets[:, None], hits)


def graded_ndcg(item_ids: Tensor, targets: Tensor, gains: Tensor, ks: Sequence[int]) -> Tensor:
    """gNDCG@k: ``sum_{r<=k} gain_r / log2(r + 1)`` over the same sum of the ideal list. ``[B, len(ks)]``.

    The ideal list has the user's own targets by descending gain (Järvelin and Kekäläinen, 2002); nan if no target has a
    gain. A target that occurs several times has the largest of its gains.

    Args:
        item_ids: ``[B, K]`` recommended items, best first, 0 = empty place; a repeated item counts at its first place.
        targets: ``[B, P]`` held-out items, in any order, 0 pads.
        gains: ``[B, P]`` non-negative; gain 0 = not a target.
        ks: list lengths.
    """
    gains = gains.float().masked_fill(targets == 0, 0)
    by_gain = gains.argsort(1, descending=True)
    kept = targets.gather(1, by_gain).long().masked_fill(gains.gather(1, by_gain) == 0, NO_ITEM)
    ascending, by_item = kept.sort(dim=1, stable=True)
    worth = gains.gather(1, by_gain).gather(1, by_item)
    worth[:, 1:] *= ascending[:, 1:] != ascending[:, :-1]
    ideal, items = worth.sort(1, descending=True).values, item_ids.long().contiguous()
    if targets.shape[1]:
        place = torch.searchsorted(ascending, items).clamp_(max=targets.shape[1] - 1)
        gain = worth.gather(1, place) * first_places(items, ascending.gather(1, place) == items)
    else:
        gain = worth.new_zeros(items.shape)
    best = _sum_to_k(ideal, ks, _discount(ideal.shape[1], ideal))
    return _sum_to_k(gain, ks, _discount(gain.shape[1], gain)) / best


def accuracy(positive: RankedHits, disliked: RankedHits, ks: Sequence[int]) -> dict[str, Tensor]:
    """Per-user metrics ``[B]`` at every k, named ``NDCG@10`` and so on.

    For the positives: NDCG, Recall, HitRate, MRR, MAP and Precision. For the held-out items that the user disliked, if
    there are any: ``disliked`` (their share of the k places), ``disliked_hit_rate`` and ``disliked_MRR``, for which
    lower is better, and ``disliked_rank`` (their mean rank, k + 1 if absent), for which higher is better.
    """
    return named(
        ks,
        NDCG=ndcg(positive, ks),
        Recall=recall(positive, ks),
        HitRate=hit_rate(positive, ks),
        MRR=mrr(positive, ks),
        MAP=mean_average_precision(positive, ks),
        Precision=precision(positive, ks),
        disliked=precision(disliked, ks),
        disliked_hit_rate=hit_rate(disliked, ks),
        disliked_MRR=mrr(disliked, ks),
        disliked_rank=mean_rank(disliked, ks),
    )


def accuracy_of_bin(positive: RankedHits, ks: Sequence[int]) -> dict[str, Tensor]:
    """NDCG, Recall and HitRate ``[B]`` at every k, for the targets of one bin of items."""
    return named(ks, NDCG=ndcg(positive, ks), Recall=recall(positive, ks), HitRate=hit_rate(positive, ks))


def named(ks: Sequence[int], **by_name: Tensor) -> dict[str, Tensor]:
    """Metrics ``[B, len(ks)]`` as ``name@k`` to ``[B]``."""
    return {f"{name}@{k}": values[:, i] for name, values in by_name.items() for i, k in enumerate(ks)}


def _discount(places: int, like: Tensor) -> Tensor:
    return 1 / torch.log2(torch.arange(2, places + 2, device=like.device, dtype=torch.float32))


def _sum_to_k(values: Tensor, ks: Sequence[int], weight: Tensor | None = None) -> Tensor:
    """``sum_{r<=k} value_r weight_r`` of ``values [B, K]`` for every k, ``[B, len(ks)]``, as one matrix product."""
    places = values.shape[1]
    within = torch.arange(places, device=values.device)[:, None] < torch.tensor(ks, device=values.device)
    weights = within.float() if weight is None else within * weight[:places, None]
    return values @ weights


def _defined(values: Tensor, hits: RankedHits) -> Tensor:
    return values.masked_fill((hits.num_targets == 0)[:, None], torch.nan)


NO_ITEM = torch.iinfo(torch.int64).max
"""Sorts after every item id and equals none."""

_NARROW = 32  # up to this many targets, comparing with each of them is faster than a binary search (measured)


def is_member(items: Tensor, of: Tensor, mask: Tensor | None = None) -> Tensor:
    """``[B, N]`` bool: which of ``items [B, N]`` occur in the same row of ``of [B, M]``; 0 is a member of nothing.

    Args:
        items: the items to look up.
        of: the sets; 0 pads.
        mask: ``[B, M]`` bool, True keeps an element of ``of``; None keeps all.
    """
    return found_in(items, sorted_members(of, torch.ones_like(of, dtype=torch.bool) if mask is None else mask))


def first_places(item_ids: Tensor, mask: Tensor) -> Tensor:
    """``[B, S]`` bool: the first of every row's masked places of each item."""
    kept, order = item_ids.long().masked_fill(~mask, NO_ITEM).sort(dim=1, stable=True)
    first = kept != NO_ITEM
    first[:, 1:] &= kept[:, 1:] != kept[:, :-1]
    return torch.zeros_like(mask).scatter(1, order, first)


def first_allowed(candidates: Tensor, k: int, exclude: Tensor | None) -> Tensor:
    """The first ``k`` of ``candidates [B, C]`` that are not in ``exclude [B, M]``: ``[B, k]``, filled up with 0."""
    allowed = candidates.new_ones(candidates.shape, dtype=torch.bool)
    if exclude is not None:
        allowed = ~is_member(candidates, exclude)
    order = (~allowed).int().argsort(dim=1, stable=True)[:, :k]
    chosen = candidates.gather(1, order).masked_fill(~allowed.gather(1, order), 0)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]))


def sorted_members(items: Tensor, mask: Tensor) -> Tensor:
    """``[B, M]``, at least one column: the masked items of every row, ascending, ``NO_ITEM`` behind them."""
    kept = items.long().masked_fill(~mask | (items == 0), NO_ITEM)
    return kept.sort(1).values if kept.shape[1] else kept.new_full((len(kept), 1), NO_ITEM)


def found_in(items: Tensor, sorted_set: Tensor) -> Tensor:
    """``[B, N]`` bool: which of ``items [B, N]`` occur in the same row of ``sorted_members``."""
    items = items.long().contiguous()
    if sorted_set.shape[1] <= _NARROW:
        found = torch.zeros_like(items, dtype=torch.bool)
        for column in sorted_set.unbind(1):
            found |= items == column[:, None]
        return found
    place = torch.searchsorted(sorted_set, items).clamp_(max=sorted_set.shape[1] - 1)
    return sorted_set.gather(1, place) == items
