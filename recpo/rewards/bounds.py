"""Uncertainty of a factor model's grades: the posterior variance of two ridge regressions.

``noise (x_uᵀ C_i x_u + y_iᵀ C_u y_i)`` with ``x_u = [p_u, 1]``, ``y_i = [q_i, 1]`` and the inverses ``C`` of the normal
matrices: the uncertainty of the item plus the uncertainty of the user, each given the other. It shrinks with every
event of either. It is a dot product of one vector per user and one per item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.ops import quadratic_forms
from recpo.ops.quadratic_forms import with_one

if TYPE_CHECKING:
    from recpo.rewards.factors import Factors

# a product with looked-up items costs this many times as much as one in a matrix product
GATHER_COST: Final = 8


def posterior_variance(model: Factors, users: Tensor, covariance: Tensor, item_ids: Tensor) -> Tensor:
    """Variance of the predicted grades of some items.

    Args:
        model: a model with item covariances.
        users: ``[B, r + 1]``.
        covariance: ``[B, r + 1, r + 1]``, ``C_u``.
        item_ids: ``[B, S]``; the result for id 0 is arbitrary.

    Returns:
        ``[B, S]``. For many items, such as the complete catalog, computed by one matrix product.

    Raises:
        RecpoError: the model was fitted without ``uncertainty``.
    """
    of_items = _item_covariance(model)
    row = (item_ids - 1).clamp_min(0)
    if row.shape[1] * GATHER_COST >= model.num_items:
        variance = quadratic_forms.of_users(users, covariance) @ item_vectors(model).T
        return model.noise * variance.gather(1, row).clamp_min(0.0)
    known_users, known_items = with_one(users[:, :-1]), with_one(model.item_factors)[row]
    of_item = torch.einsum("bj,bsjk,bk->bs", known_users, of_items[row], known_users)
    of_user = torch.einsum("bsj,bjk,bsk->bs", known_items, covariance, known_items)
    return model.noise * (of_item + of_user).clamp_min(0.0)


def item_vectors(model: Factors) -> Tensor:
    """``[V, (r + 1) (r + 2)]``, see ``recpo.ops.quadratic_forms.of_items``.

    Raises:
        RecpoError: the model was fitted without ``uncertainty``.
    """
    return quadratic_forms.of_items(model.item_factors, _item_covariance(model))


def _item_covariance(model: Factors) -> Tensor:
    if model.item_covariance is None:
        raise RecpoError("these factors were fitted with uncertainty: false, so they have no bounds; fit them again")
    return model.item_covariance
