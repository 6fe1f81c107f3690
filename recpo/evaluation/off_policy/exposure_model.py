"""Whom the log shows what: propensities of a log that has none.

    p(i | u) = .9 softmax_i(s_0 log(n_i + 1/2) + sum_k s_k x_uk g_ik) + .1 / V

with the training exposures ``n_i`` of an item, and the consumption features ``x_u`` and ``g_i`` of a user and an item
(``recpo.rewards.prior_features``): who was shown what, whatever the grades were. The slopes s maximize the likelihood
of the exposures of the held-out period that are not marked as random, which is concave in them. They are so few that
the same exposures may be weighted with the result, and what was true of the training period alone gets a small slope.
The last term bounds importance weights: no model of this kind knows how seldom something is shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recpo.log.prepared import Period, Prepared
from recpo.rewards.graded import Chunk, chunks_of, repeated
from recpo.rewards.prior_features import of_consumption

_FEATURES: Final = 16
_SEED: Final = 0  # of the singular vectors, and of the users that are fitted if the catalog is large
_CHANCE: Final = 0.1  # share of the exposures that are drawn uniformly
_STEPS: Final = 50  # of L-BFGS; about twenty suffice
_COLUMNS: Final = ("user_index", "item_index", "is_target", "is_random")
_CELLS_AT_ONCE: Final = 1 << 24  # of a users x items matrix; users whose exposures are fitted, times V


@dataclass(frozen=True)
class ExposureModel:
    """``p(i | u)``, estimated.

    Attributes:
        users: ``[U, m + 1]`` float32, 1 and the features of every user.
        items: ``[V, m + 1]`` float32, ``log(n_i + 1/2)`` and the features of every item, times their slopes.
    """

    users: Tensor
    items: Tensor

    @classmethod
    def fit(cls, data: Prepared, period: Period) -> Self:
        """Fits the features to the training exposures, and the slopes to those of a held-out period.

        Args:
            data: prepared data.
            period: whose exposures are to be weighted.
        """
        parts = repeated(partial(_training_exposures, data), lambda _: None)
        features = of_consumption(parts, data.num_items, _FEATURES, _SEED)
        users = np.zeros((int(data.manifest["num_users"]), 1 + features.num_user_columns), np.float32)
        users[:, 0] = 1.0
        for chunk in parts():
            users[chunk.users, 1:] = features.of_users(chunk)
        popularity = np.log(data.item_counts() + 0.5)
        items = np.concatenate([popularity[:, None], features.items], 1).astype(np.float32)
        unscaled = cls(torch.from_numpy(users), torch.from_numpy(items))
        slopes = unscaled._slopes(*_exposures(data, period, unscaled._rows_at_once))
        return cls(unscaled.users, unscaled.items * slopes)

    def __call__(self, users: Tensor, items: Tensor) -> Tensor:
        """``[B, S]`` float64, the probabilities of ``items [B, S]`` (1..V; nan for 0) for ``users [B]``."""
        known = users < len(self.users)
        of_users = self.users.to(users.device)[users.where(known, 0)] * known[:, None]
        of_items, place = self.items.to(users.device), (items - 1).clamp_min(0)
        parts = []
        for rows, places in zip(*(part.split(self._rows_at_once) for part in (of_users, place)), strict=True):
            logits = rows @ of_items.T
            parts.append((logits.gather(1, places) - logits.logsumexp(1, keepdim=True)).double().exp())
        shown = (1 - _CHANCE) * torch.cat(parts) + _CHANCE / len(of_items)
        return shown.masked_fill(items == 0, torch.nan)

    @property
    def _rows_at_once(self) -> int:
        return max(1, _CELLS_AT_ONCE // len(self.items))

    def _slopes(self, users: Tensor, items: Tensor) -> Tensor:
        """The slopes ``[m + 1]`` of greatest likelihood of the exposures ``users [N]``, ``items [N]`` (0..V - 1)."""
        shown, place = users.unique(return_inverse=True)
        rows = self.users[shown]
        slopes = torch.zeros(rows.shape[1])
        slopes[0] = 1.0
        slopes.requires_grad_()
        optimizer = torch.optim.LBFGS([slopes], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> float:
            optimizer.zero_grad()
            found = -((rows * slopes) @ self.items.T).log_softmax(1)[place, items].mean()
            found.backward()
            return found.item()

        if len(users):
            optimizer.step(loss)
        return slopes.detach()


def _training_exposures(data: Prepared) -> Iterator[Chunk]:
    """All events of the training period, in chunks with all events of their users; grades are 0."""
    for user, item, is_target in (one.values() for one in data.train_columns(_COLUMNS[:3])):
        users, items = user[is_target], item[is_target] - 1
        yield from chunks_of(users, items, np.zeros(len(users)), data.num_items)


def _exposures(data: Prepared, period: Period, most: int) -> tuple[Tensor, Tensor]:
    """Users ``[N]`` and items ``[N]`` (0..V - 1) that the log did not show at random, of at most so many users."""

    def shown() -> Iterator[tuple[NDArray[np.integer], NDArray[np.integer]]]:
        for shard in range(data.num_shards(period)):
            user, item, is_target, is_random = data.columns(period, shard, _COLUMNS).values()
            kept = is_target & ~is_random
            yield user[kept], item[kept] - 1

    present = np.unique(np.concatenate([np.unique(user) for user, _ in shown()]))
    if len(present) > most:
        present = np.random.default_rng(_SEED).choice(present, most, replace=False)
    parts = [(user[kept], item[kept]) for user, item in shown() for kept in [np.isin(user, present)]]
    users, items = (torch.from_numpy(np.concatenate(column).astype(np.int64)) for column in zip(*parts, strict=True))
    return users, items
