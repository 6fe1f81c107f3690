"""Unique code tuples: an item that collides moves to a free tuple, or every item gets one more code."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.items.residual_kmeans import Codebooks, rank_within, settle, squared_distances, subtract


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
    codes, residual, prefix = codes.clone(), points.clone(), torch.zeros_like(codes[:, 0])
    capacities = _capacities(codebooks.codebook_sizes, len(codes))
    for level, (centroids, capacity) in enumerate(zip(codebooks.centroids, capacities, strict=True)):
        before = codes[:, level]
        distance = _distances_to_own(residual, centroids, before)
        if kept is not None:
            distance.masked_fill_(kept, -1.0)
        code = settle(
            before,
            distance,
            prefix,
            num_codes=len(centroids),
            capacity=capacity,
            distances=partial(_distances_to_all, residual, centroids),
        )
        subtract(residual, centroids, code)
        moved = (code != before).nonzero().squeeze(1)
        codes[:, level] = code
        codes[moved, level + 1 :] = codebooks.encode(residual[moved], level + 1)
        prefix = tuple_ids(torch.stack([prefix, code], 1))
    return codes


def first_free(codes: Tensor, codebook_sizes: Sequence[int]) -> Tensor:
    """Moves items that collide, without vectors: the first one keeps its tuple, the others take the smallest free code.

    Raises:
        RecpoError: there are more items than tuples.
    """
    codes, prefix = codes.clone(), torch.zeros_like(codes[:, 0])
    equally_near = torch.zeros(len(codes))
    for level, (size, capacity) in enumerate(zip(codebook_sizes, _capacities(codebook_sizes, len(codes)), strict=True)):
        code = settle(
            codes[:, level],
            equally_near,
            prefix,
            num_codes=size,
            capacity=capacity,
            distances=partial(_codes_as_distances, size),
        )
        codes[:, level] = code
        prefix = tuple_ids(torch.stack([prefix, code], 1))
    return codes


def _capacities(codebook_sizes: Sequence[int], num_items: int) -> list[int]:
    """For every level, the number of tuples that begin with the same codes up to that level; at most ``num_items``.

    Raises:
        RecpoError: there are more items than tuples.
    """
    if num_items > math.prod(codebook_sizes):
        raise RecpoError(
            f"{num_items} items do not fit into {' x '.join(map(str, codebook_sizes))} code tuples: "
            "take more levels or larger codebooks",
            code="out_of_range",
            field="codebook_size",
        )
    return [min(math.prod(codebook_sizes[level + 1 :]), num_items) for level in range(len(codebook_sizes))]


def _distances_to_own(residual: Tensor, centroids: Tensor, code: Tensor) -> Tensor:
    """Squared distances ``[V]`` of all items to the centroids of their codes."""
    rest = residual.clone()
    subtract(rest, centroids, code)
    return rest.square_().sum(1)


def _distances_to_all(residual: Tensor, centroids: Tensor, items: Tensor) -> Tensor:
    """Squared distances ``[m, K]`` of ``items [m]`` to all centroids."""
    return squared_distances(residual[items], centroids)


def _codes_as_distances(num_codes: int, items: Tensor) -> Tensor:
    """``[m, K]``: code k has the distance k from every item, so that the smallest free code is the nearest."""
    return torch.arange(num_codes, dtype=torch.float32).expand(len(items), -1)


def tuple_ids(codes: Tensor) -> Tensor:
    """Ids ``[V]`` int64 of the tuples ``codes [V, T]``, from 0: equal for equal rows."""
    ids = torch.zeros_like(codes[:, 0])
    for code in codes.T:
        ids = (ids * (code.max() + 1) + code).unique(return_inverse=True)[1]
    return ids


def extra_code(codes: Tensor, earlier: Tensor | None = None) -> Tensor:
    """One more code for every item: 0 if no other item has its tuple, else 0 .. n - 1 in the order of the items.

    Args:
        codes: ``[V, T]``.
        earlier: ``[V]``, earlier extra codes, -1 = none. The codes of new items continue after the largest one.

    Returns:
        ``[V]``.
    """
    tuples = tuple_ids(codes)
    if earlier is None:
        return rank_within(tuples, torch.zeros_like(tuples))
    largest = torch.full_like(tuples, -1).scatter_reduce_(0, tuples, earlier, "amax")
    is_old = (earlier >= 0).long()
    order = rank_within(2 * tuples + is_old, torch.zeros_like(tuples))
    return torch.where(earlier >= 0, earlier, largest[tuples] + 1 + order)
