"""How sure a factor model is of its grades: the variance of the posterior of two ridge regressions."""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.errors import RecpoError
from recpo.factorization.factors import GATHER_COST, Factors


def posterior_variance(model: Factors, users: Tensor, covariance: Tensor, item_ids: Tensor) -> Tensor:
    """Variance of the predicted grades of some items.

    ``noise (x_uᵀ C_i x_u + y_iᵀ C_u y_i)`` with ``x_u = [p_u, 1]``, ``y_i = [q_i, 1]`` and the inverses ``C`` of the
    normal matrices: what is not known of the item plus what is not known of the user, each given the other. It shrinks
    with every event of either.

    Args:
        model: with the covariances of its items.
        users: ``[B, r + 1]``.
        covariance: ``[B, r + 1, r + 1]``, ``C_u``.
        item_ids: ``[B, S]``; of id 0 anything.

    Returns:
        ``[B, S]``. Of many items, such as a whole catalog, by one matrix product.

    Raises:
        RecpoError: the model was fitted without ``uncertainty``.
    """
    if model.item_covariance is None:
        raise RecpoError("these factors were fitted with uncertainty: false, so they have no bounds; fit them again")
    row = (item_ids - 1).clamp_min(0)
    known_users, known_items = _with_one(users[:, :-1]), _with_one(model.item_factors)
    if row.shape[1] * GATHER_COST >= model.num_items:
        of_users = torch.cat([_products(known_users), _triangles(covariance)], 1)
        of_items = torch.cat([_triangles(model.item_covariance), _products(known_items)], 1)
        return model.noise * (of_users @ of_items.T).gather(1, row).clamp_min(0.0)
    of_item = torch.einsum("bj,bsjk,bk->bs", known_users, model.item_covariance[row], known_users)
    of_user = torch.einsum("bsj,bjk,bsk->bs", known_items[row], covariance, known_items[row])
    return model.noise * (of_item + of_user).clamp_min(0.0)


def _with_one(factors: Tensor) -> Tensor:
    return torch.cat([factors, torch.ones_like(factors[:, :1])], 1)


def _products(rows: Tensor) -> Tensor:
    """``x xᵀ`` of every row, its upper triangle."""
    first, second = torch.triu_indices(rows.shape[1], rows.shape[1], device=rows.device)
    return rows[:, first] * rows[:, second]


def _triangles(matrices: Tensor) -> Tensor:
    """Upper triangles of symmetric matrices, what is off the diagonal twice: times ``x xᵀ`` they give ``xᵀ C x``."""
    first, second = torch.triu_indices(matrices.shape[1], matrices.shape[1], device=matrices.device)
    return matrices[:, first, second] * torch.where(first == second, 1.0, 2.0)
