"""The predicted grade of a factor model as a reward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError
from recpo.factorization.bounds import posterior_variance
from recpo.factorization.factors import Factors
from recpo.feedback import FeedbackDefinition
from recpo.types import FeedbackBatch, Slates


@dataclass(frozen=True)
class FactorReward(RewardFunction):
    """The grade, in about [0, 1], that a graded matrix factorization predicts for a candidate.

    ``mean + p_u · q_i + b_u + b_i - lower_bound * sqrt(variance)``, with the variance of
    ``recpo.factorization.bounds.posterior_variance``. A policy finds the items that a model overrates. A lower bound
    reduces the reward of items and users with few events the most (Jeunen and Goethals, "Pessimistic Reward Models for
    Off-Policy Learning in Recommendation", RecSys 2021). A candidate that is not an item (id 0) has no reward (nan).

    One matrix product scores the full catalog. The reward depends only on user and item, not on the events of the
    history that a position sees (``Slates.visible``).

    Attributes:
        factors: directory that ``recpo factorize`` wrote, of the same items.
        users: "trained" takes the user factors that were fitted on all events of the training period, by
            ``FeedbackBatch.user_ids``; the prepared data must be the same (``users_checksum`` identifies them), and a
            user without an event there has the factors of an empty history. "folded" folds users in from
            ``FeedbackBatch.histories``.
        lower_bound: number of standard deviations of the posterior to subtract, at least 0. The uncertainty about a
            user comes from the batch's history, also with trained users.
    """

    factors: Path
    users: Literal["trained", "folded"] = "trained"
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        # what is wrong is said before training starts
        if not self.lower_bound >= 0:
            raise RecpoError(f"FactorReward: lower_bound is {self.lower_bound}; it is at least 0")
        if self.users not in ("trained", "folded"):
            raise RecpoError(f"FactorReward: users is {self.users!r}; it is trained or folded")
        if self.users == "trained" and self._opened.user_factors is None:
            raise RecpoError(f"{self.factors} has no factors of users: set users to folded")
        if self.lower_bound and self._opened.item_covariance is None:
            raise RecpoError(f"{self.factors} was fitted with uncertainty: false, so it has no bounds; fit it again")

    @property
    def catalog_checksum(self) -> str | None:
        """See ``RewardFunction.catalog_checksum``."""
        return self._opened.catalog_checksum

    @property
    def users_checksum(self) -> str | None:
        """See ``RewardFunction.users_checksum``."""
        return self._opened.users_checksum if self.users == "trained" else None

    @property
    def feedback(self) -> tuple[FeedbackDefinition, ...]:
        """See ``RewardFunction.feedback``: that of the factors, unless trained users replace histories."""
        reads = self.users == "folded" or self.lower_bound > 0
        return (self._opened.feedback,) if reads and self._opened.feedback is not None else ()

    @cached_property
    def _opened(self) -> Factors:
        return Factors.open(self.factors)

    @cached_property
    def _on_device(self) -> dict[torch.device, Factors]:
        return {}

    def model(self, device: torch.device | str = "cpu") -> Factors:
        """The factor model, its tensors on ``device``."""
        place = torch.device(device)
        if place not in self._on_device:
            self._on_device[place] = self._opened.to(place)
        return self._on_device[place]

    @torch.no_grad()
    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        items = candidates.item_ids
        model = self.model(items.device)
        with torch.autocast(items.device.type, enabled=False):
            if self.lower_bound:
                folded, covariance = model.fold_in_with_covariance(batch.histories)
                users = folded if self.users == "folded" else self._trained(model, batch)
                deviation = posterior_variance(model, users, covariance, items).sqrt()
                rewards = model.grades(users, items) - self.lower_bound * deviation
            else:
                users = model.fold_in(batch.histories) if self.users == "folded" else self._trained(model, batch)
                rewards = model.grades(users, items)
        return rewards.masked_fill(~candidates.mask | (items == 0), torch.nan)

    def _trained(self, model: Factors, batch: FeedbackBatch) -> Tensor:
        assert model.user_factors is not None
        if batch.user_ids is None:
            raise RecpoError(
                "FactorReward with trained users asks whose contexts they are, and this batch does not say"
            )
        if len(batch.user_ids) and int(batch.user_ids.max()) >= len(model.user_factors):
            raise RecpoError(
                f"{self.factors} knows {len(model.user_factors):,} users, and the data have more: they are not those "
                "that it was fitted on; set users to folded, or run `recpo factorize` on these data"
            )
        return model.user_factors[batch.user_ids]
