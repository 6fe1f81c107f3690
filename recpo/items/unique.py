"""Unique code tuples: an item that collides moves to a free tuple, or every item gets one more code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.items.capacity import rank_within, settle
from recpo.items.codebooks import Codebooks, squared_distances, subtract


def nearest_free(points: Tensor, codebooks: Codebooks, codes: Tensor, kept: Tensor | None = None) -> Tensor:
    """Moves items that collide to the nearest free tuple, level by level.

    A prefix may have more items than there are tuples below it. It then keeps its nearest items. The others move to
    the nearest prefix with free places on the same level, and their later codes follow from their new residuals. At the
    last level a code has one place: the item nearest to the centroid keeps its tuple, and the others take the nearest
    free last code. No other item moves.

    Args:
        points: ``[V, d]`` normalized vectors (``Codebooks.normalize``).
        codebooks: the codebooks of the codes.
        codes: ``[V, T]``.
        kept: ``[V]`` bool, items that must not move; their tuples are unique.

    Returns:
        Codes ``[V, T]``, all different.

    Raises:
        RecpoError: there are more items than tuples.
    """
    codes, residual = codes.clone(), points.clone()

    def distances(level: int, items: Tensor) -> Tensor:
        return squared_distances(residual[items], codebooks.centroids[level])

    def settled(level: int, moved: Tensor) -> None:
        subtract(residual, codebooks.centroids[level], codes[:, level])
        codes[moved, level + 1 :] = codebooks.encode(residual[moved], level + 1)

    def wanted(level: int) -> Tensor:
        after = residual.clone()
        subtract(after, codebooks.centroids[level], codes[:, level])
        return after.square_().sum(1)

    _separate(codes, codebooks.codebook_sizes, kept, wanted, distances, settled)
    return codes


def first_free(codes: Tensor, codebook_sizes: Sequence[int]) -> Tensor:
    """Moves items that collide, without vectors: the first one keeps its tuple, the others take the smallest free code.

    Raises:
        RecpoError: there are more items than tuples.
    """
    codes = codes.clone()

    def distances(level: int, items: Tensor) -> Tensor:
        return torch.arange(codebook_sizes[level], dtype=torch.float32).expand(len(items), -1)

    def wanted(_: int) -> Tensor:
        return torch.zeros(len(codes))

    _separate(codes, codebook_sizes, None, wanted, distances, lambda level, moved: None)
    return codes


def _separate(
    codes: Tensor,
    codebook_sizes: Sequence[int],
    kept: Tensor | None,
    wanted: Callable[[int], Tensor],
    distances: Callable[[int, Tensor], Tensor],
    settled: Callable[[int, Tensor], None],
) -> None:
    """Makes the rows of ``codes`` unique in place.

    Args:
        codes: ``[V, T]``.
        codebook_sizes: ``K_t`` of every level.
        kept: ``[V]`` bool, items that must not move.
        wanted: distance ``[V]`` of all items to their present code of a level.
        distances: distances ``[m, K_t]`` of items to all codes of a level.
        settled: called when the codes of a level are final, with the items ``[m]`` that changed on it.
    """
    if len(codes) > math.prod(codebook_sizes):
        raise RecpoError(
            f"{len(codes)} items do not fit into {' x '.join(map(str, codebook_sizes))} code tuples: "
            "take more levels or larger codebooks"
        )
    group = torch.zeros_like(codes[:, 0])
    for level, size in enumerate(codebook_sizes):
        distance = wanted(level)
        if kept is not None:
            distance = distance.masked_fill(kept, -1.0)
        code = settle(
            codes[:, level],
            distance,
            group,
            num_codes=size,
            capacity=min(math.prod(codebook_sizes[level + 1 :]), len(codes)),
            distances=partial(distances, level),
        )
        moved = (code != codes[:, level]).nonzero().squeeze(1)
        codes[:, level] = code
        settled(level, moved)
        group = (group * size + code).unique(return_inverse=True)[1]


def tuple_ids(codes: Tensor) -> Tensor:
    """Ids ``[V]`` int64 of the tuples ``codes [V, T]``, from 0: equal for equal rows."""
    ids = torch.zeros_like(codes[:, 0])
    for code in codes.T:
        ids = (ids * (code.max() + 1) + code).unique(return_inverse=True)[1]
    return ids


def extra_code(codes: Tensor, given: Tensor | None = None) -> Tensor:
    """One more code for every item: 0 if no other item has its tuple, else 0 .. n - 1 in the order of the items.

    Args:
        codes: ``[V, T]``.
        given: ``[V]``, earlier extra codes, -1 = none. The codes of new items continue after the largest one.

    Returns:
        ``[V]``.
    """
    tuples = tuple_ids(codes)
    if given is None:
        return rank_within(tuples, torch.zeros_like(tuples))
    largest = torch.full_like(tuples, -1).scatter_reduce_(0, tuples, given, "amax")
    is_old = (given >= 0).long()
    order = rank_within(2 * tuples + is_old, torch.zeros_like(tuples))
    return torch.where(given >= 0, given, largest[tuples] + 1 + order)
