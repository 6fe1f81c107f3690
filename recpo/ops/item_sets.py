"""Rows of item ids as sets: membership, and first occurrences."""

from __future__ import annotations

import torch
from torch import Tensor

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
