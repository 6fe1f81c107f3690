"""Biases of items from their last events: trends rise and fall within days, and a bias over a whole log is late.

With ``g_e``, what the users and factors of a fitted model leave of the grade of an event at time ``t_e``, and weights
``w_e = 2^((t_e - end) / half_life)``, the bias of an item is

    b_i = sum_e w_e g_e / (sum_e w_e + noise / variance),

the posterior mean of a bias that the weighted events observe with the ``noise`` of the model, where the variance of the
biases has the largest likelihood. An item without recent events thus falls back to the mean of all. Item biases that
drift are from Koren, "Collaborative Filtering with Temporal Dynamics" (KDD 2009); exponential weights from Ding and Li,
"Time Weight Collaborative Filtering" (CIKM 2005).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from recpo.base.feedback import GRADES
from recpo.log.prepared import Prepared
from recpo.log.schema import MILLISECONDS_PER_DAY
from recpo.rewards.factors import Factors

_LEAST_WEIGHT: Final = 0.1  # sum of weights from which on an item says how much biases vary
_SHRINKAGES: Final = np.geomspace(1, 1024, 21)


def with_recent_biases(model: Factors, data: Prepared, half_lives: Sequence[float]) -> dict[float | None, Factors]:
    """The model itself (None), and with the biases of the items that their last events say, by half-life.

    One pass over the training events. Biases count wherever the model is used: in lists, rewards and tilted policies,
    and in the fold-in, whose users take the rest of a grade.

    Args:
        model: with the factors of the training users.
        data: the prepared data that it was fitted on.
        half_lives: days after which an event counts half.
    """
    if not half_lives:
        return {None: model}
    boundaries, lives = data.manifest["boundaries"], np.array(half_lives) * MILLISECONDS_PER_DAY
    end = int(boundaries.get("valid_start_ms", boundaries["last_ms"]))
    weight, squared, total = np.zeros((3, len(lives), model.num_items))
    for item, time, left in _left_to_items(model, data):
        for number, life in enumerate(lives):
            counted = np.exp2((time - end) / life)
            for sums, values in ((weight, counted), (squared, counted**2), (total, counted * left)):
                sums[number] += np.bincount(item, values, minlength=model.num_items)
    found: dict[float | None, Factors] = {None: model}
    for number, days in enumerate(half_lives):
        shrinkage = _shrinkage(weight[number], squared[number], total[number], model.noise)
        found[days] = replace(model, item_bias=torch.from_numpy(total[number] / (weight[number] + shrinkage)).float())
    return found


def _left_to_items(model: Factors, data: Prepared) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Items, times, and grades minus all that the model predicts but the item's bias, of the graded training events."""
    assert model.user_factors is not None
    users, items, grades = model.user_factors.numpy(), model.item_factors.numpy(), np.array(GRADES)
    for columns in data.train_columns(["user_index", "item_index", "timestamp", "feedback"]):
        known = ~np.isnan(grades[columns["feedback"]])
        user, index, time, level = (column[known] for column in columns.values())
        item = index - 1
        predicted = model.mean + users[user, -1] + np.einsum("nr,nr->n", users[user, :-1], items[item])
        yield item, time, grades[level] - predicted


def _shrinkage(weight: np.ndarray, squared: np.ndarray, total: np.ndarray, noise: float) -> float:
    """``noise / variance`` of the biases with the largest likelihood.

    The weighted mean of an item is normal, with the variance of the biases and ``noise sum w^2 / (sum w)^2``.

    Args:
        weight: ``[V]`` sums of weights.
        squared: sums of squared weights.
        total: sums of weighted grades that are left.
        noise: variance of a grade.
    """
    known = weight > _LEAST_WEIGHT
    mean, error = total[known] / weight[known], noise * squared[known] / weight[known] ** 2
    variance = noise / _SHRINKAGES[:, None] + error
    likelihood = -(np.log(variance) + mean**2 / variance).sum(1)
    return float(_SHRINKAGES[likelihood.argmax()])
