"""Assignment of items to codes, with a limit on the number of items per code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: The distances ``[m, K]`` of the items ``[m]`` to every code.
Distances = Callable[[Tensor], Tensor]

_TABLE = 1 << 24  # entries of a table of free places, [groups, codes]
_BLOCK = 1 << 22  # entries of a block of distances, [items, codes]


def settle(
    code: Tensor, distance: Tensor, group: Tensor, *, num_codes: int, capacity: int, distances: Distances
) -> Tensor:
    """Moves as few items as possible, so that no code has more than ``capacity`` items of a group.

    The nearest items of a crowded code keep it; of equally distant items, the first ones do. The other items, nearest
    first, take the nearest code of their group that has a free place. They are placed in waves of at most ``capacity``
    items per group, for all groups at once. A wave fits into one code unless that code is partly occupied, so the
    distances of an item are computed about twice.

    Args:
        code: ``[n]`` int64, the nearest codes.
        distance: ``[n]``, the distances to these codes.
        group: ``[n]`` int64, any ids; a group has at most ``num_codes * capacity`` items.
        num_codes: K.
        capacity: number of items that may have a code, per group.
        distances: gives the distances of items to all codes.

    Returns:
        Codes ``[n]``.
    """
    over = rank_within(group * num_codes + code, distance) >= capacity
    movers = over.nonzero().squeeze(1)
    code = code.clone()
    if not len(movers):
        return code
    movers = movers[_lexicographic(group[movers], distance[movers])]
    crowded = group[movers].unique()
    for groups in crowded.split(max(1, _TABLE // num_codes)):
        local = torch.searchsorted(groups, group).clamp_max(len(groups) - 1)
        inside = (groups[local] == group) & ~over
        taken = torch.bincount(local[inside] * num_codes + code[inside], minlength=len(groups) * num_codes)
        queue = movers[torch.isin(group[movers], groups)]
        _place(code, queue, local, capacity - taken.view(-1, num_codes), capacity, distances)
    return code


def _place(code: Tensor, queue: Tensor, group: Tensor, free: Tensor, capacity: int, distances: Distances) -> None:
    """Gives the items of ``queue`` (sorted by group) places in ``free [G, K]``; writes ``code`` and ``free``."""
    groups, num_codes = free.shape
    left = torch.bincount(group[queue], minlength=groups)
    start = left.cumsum(0) - left
    active = left.nonzero().squeeze(1)
    while len(active):
        wave = left[active].clamp_max(capacity)
        owner = active.repeat_interleave(wave)
        positions = start[owner] + _count_up(wave)
        items = queue[positions]
        chosen, distance = _nearest_free(items, owner, free, distances)
        key = owner * num_codes + chosen
        accepted = rank_within(key, distance) < free.view(-1)[key]
        code[items[accepted]] = chosen[accepted]
        free.view(-1).sub_(torch.bincount(key[accepted], minlength=free.numel()))
        # items that found their code full go to the front of their group's next wave
        queue[positions] = items[(2 * owner + ~accepted).argsort(stable=True)]
        done = torch.bincount(owner[accepted], minlength=groups)
        start, left = start + done, left - done
        active = active[left[active] > 0]


def _nearest_free(items: Tensor, owner: Tensor, free: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
    found = []
    rows = max(1, _BLOCK // free.shape[1])
    for block, groups in zip(items.split(rows), owner.split(rows), strict=True):
        found.append(distances(block).masked_fill(free[groups] <= 0, torch.inf).min(1))
    return torch.cat([best.indices for best in found]), torch.cat([best.values for best in found])


def rank_within(key: Tensor, value: Tensor) -> Tensor:
    """Rank ``[n]`` of every element among those with its ``key``: 0 = the smallest value, the first where equal."""
    order = _lexicographic(key, value)
    _, lengths = key[order].unique_consecutive(return_counts=True)
    return torch.empty_like(order).scatter_(0, order, _count_up(lengths))


def _lexicographic(key: Tensor, value: Tensor) -> Tensor:
    order = value.argsort(stable=True)
    return order[key[order].argsort(stable=True)]


def _count_up(lengths: Tensor) -> Tensor:
    """``0 .. n_0 - 1, 0 .. n_1 - 1, ...``."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum()), device=lengths.device) - (ends - lengths).repeat_interleave(lengths)
