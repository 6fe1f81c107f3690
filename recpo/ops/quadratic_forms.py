"""Quadratic forms ``xᵀ C x`` of many vectors and many matrices as dot products of their upper triangles."""

from __future__ import annotations

import torch
from torch import Tensor


def outer_products(vectors: Tensor) -> Tensor:
    """Upper triangles ``[N, d (d + 1) / 2]`` of ``x xᵀ`` for every ``x`` of ``[N, d]``."""
    first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], device=vectors.device)
    return vectors[:, first] * vectors[:, second]


def folded_triangles(matrices: Tensor) -> Tensor:
    """Upper triangles ``[N, d (d + 1) / 2]`` of symmetric ``[N, d, d]``, with off-diagonal entries doubled.

    The dot product with the outer products of ``x`` is ``xᵀ C x``.
    """
    first, second = torch.triu_indices(matrices.shape[1], matrices.shape[1], device=matrices.device)
    return matrices[:, first, second] * torch.where(first == second, 1.0, 2.0)


def with_one(vectors: Tensor) -> Tensor:
    """``[x, 1]`` of every row: ``[N, d + 1]``."""
    return torch.cat([vectors, torch.ones_like(vectors[:, :1])], 1)


def of_users(users: Tensor, covariance: Tensor) -> Tensor:
    """``[B, (r + 1) (r + 2)]`` of factors and bias ``[B, r + 1]`` and their covariance.

    Times ``of_items`` it gives ``xᵀ C_i x + yᵀ C_u y`` with ``x = [p, 1]`` and ``y = [q, 1]``: what is not known of the
    item plus what is not known of the user.
    """
    return torch.cat([outer_products(with_one(users[:, :-1])), folded_triangles(covariance)], 1)


def of_items(factors: Tensor, covariance: Tensor) -> Tensor:
    """``[V, (r + 1) (r + 2)]`` of factors ``[V, r]`` and the covariance ``[V, r + 1, r + 1]``; see ``of_users``."""
    return torch.cat([folded_triangles(covariance), outer_products(with_one(factors))], 1)
