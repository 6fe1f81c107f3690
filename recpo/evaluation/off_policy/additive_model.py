"""The reward model of the direct method and the doubly robust estimators: fast, and without a users x items matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recpo.base.errors import RecpoError


class RewardedExposures(NamedTuple):
    """Exposures of the training period.

    Attributes:
        users: ``[N]`` int64, 0..U-1, ``EvaluationBatch.user_ids``.
        items: ``[N]`` int64, 1..V.
        reward: ``[N]``; rows with nan (unknown) are skipped.
    """

    users: NDArray[np.integer]
    items: NDArray[np.integer]
    reward: NDArray[np.floating]


@dataclass(frozen=True)
class AdditiveRewardModel:
    """``q_hat(u, i) = mean + user_effect_u + item_effect_i``, with effects shrunk toward 0.

    It models generous users and good items, but no tastes. It is fitted on the training period alone, so its
    predictions are for rewards that it was not fitted to.

    Attributes:
        mean: mean of all training rewards.
        user_effect: ``[U]`` float64; a user without training events has 0.
        item_effect: ``[V + 1]`` float64, item 0 has 0.
    """

    mean: float
    user_effect: Tensor
    item_effect: Tensor

    @classmethod
    def fit(
        cls,
        exposures: Callable[[], Iterable[RewardedExposures]],
        *,
        num_users: int,
        num_items: int,
        rounds: int = 3,
    ) -> AdditiveRewardModel:
        """Fits by backfitting in streaming passes: item effects given user effects, then the other way round.

        An effect is ``sum of residuals / (n + s^2 / t^2)``, the empirical-Bayes estimate under a normal prior: s^2 is
        the variance of the residuals, t^2 that of the true effects, estimated by moments (DerSimonian and Laird, 1986).

        Args:
            exposures: each call yields the training period chunk by chunk.
            num_users: U.
            num_items: V.
            rounds: number of rounds, of two passes each.

        Raises:
            RecpoError: no exposure has a reward.
        """
        totals = np.zeros(3)
        for chunk in exposures():
            reward = _known(chunk).reward
            totals += [len(reward), reward.sum(), (reward.astype(np.float64) ** 2).sum()]
        if not totals[0]:
            raise RecpoError("the reward model has nothing to learn from: no training event has a reward")
        mean = totals[1] / totals[0]
        noise = totals[2] / totals[0] - mean**2
        users, items = np.zeros(num_users), np.zeros(num_items + 1)
        for _ in range(rounds):
            items, noise = _effects(exposures, mean, users, items, noise, of_items=True)
            users, noise = _effects(exposures, mean, users, items, noise, of_items=False)
        items[0] = 0.0
        return cls(float(mean), torch.from_numpy(users), torch.from_numpy(items))

    def __call__(self, users: Tensor, items: Tensor) -> Tensor:
        """Predictions ``[B, S]`` float64 for ``users [B]`` and ``items [B, S]``."""
        known = users < len(self.user_effect)
        user = self.user_effect.to(users.device)[users.where(known, 0)].where(known, 0.0)
        return self.mean + user[:, None] + self.item_effect.to(items.device)[items]


def _effects(
    exposures: Callable[[], Iterable[RewardedExposures]],
    mean: float,
    users: NDArray[np.float64],
    items: NDArray[np.float64],
    noise: float,
    *,
    of_items: bool,
) -> tuple[NDArray[np.float64], float]:
    """New effects of one side given the other, and the variance of the residuals."""
    size = len(items) if of_items else len(users)
    count, total, squares = np.zeros(size), np.zeros(size), 0.0
    for chunk in map(_known, exposures()):
        residual = chunk.reward - mean - (users[chunk.users] if of_items else items[chunk.items])
        rows = chunk.items if of_items else chunk.users
        count += np.bincount(rows, minlength=size)
        total += np.bincount(rows, residual, size)
        squares += float((residual**2).sum())
    seen, rows_in_all = count > 0, count.sum()
    between = (total[seen] ** 2 / count[seen]).sum() - (seen.sum() - 1) * noise
    between /= max(rows_in_all - (count**2).sum() / rows_in_all, 1.0)
    effect = total / (count + noise / between) if between > 0 else np.zeros(size)
    explained = (2 * effect * total - count * effect**2).sum()
    return effect, float(max(squares - explained, 0.0) / rows_in_all)


def _known(chunk: RewardedExposures) -> RewardedExposures:
    known = ~np.isnan(chunk.reward)
    return RewardedExposures(*(column[known] for column in chunk))
