"""Propensities: the logging policy's probabilities of items, logged, known by design, or estimated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import Slates

PropensitySource = Literal["logged", "uniform", "estimated"]


class Propensities(ABC):
    """The probability of every slate item under the logging policy.

    Attributes:
        source: description of their origin, in every result.
    """

    source: ClassVar[PropensitySource]

    @abstractmethod
    def __call__(self, slates: Slates) -> Tensor:
        """``[B, S]`` float64 in (0, 1]; nan = unknown, and estimators that need it skip the row."""


@dataclass(frozen=True)
class LoggedPropensities(Propensities):
    """The propensity column of the log, ``exp(Slates.logp_behavior)``."""

    source: ClassVar[PropensitySource] = "logged"

    def __call__(self, slates: Slates) -> Tensor:
        """See ``Propensities``.

        Raises:
            RecpoError: there is no such column, or a probability above 1.
        """
        if slates.logp_behavior is None:
            raise RecpoError(
                "off-policy value: these slates have no logged propensities; map the log's propensity column in "
                "`recpo prepare`, or take propensity uniform (random exposures) or estimated"
            )
        logged = slates.logp_behavior.double()
        if bool((logged > 1e-6).any()):
            raise RecpoError(f"off-policy value: a logged propensity is {logged.max().exp():.6g}, expected at most 1")
        return torch.where(torch.isneginf(logged), torch.nan, logged.exp())


@dataclass(frozen=True)
class UniformPropensities(Propensities):
    """``1 / pool_size`` for exposures that the log marks as random; the others have none.

    Attributes:
        pool_size: number of equally likely items that a random exposure was drawn from.
    """

    source: ClassVar[PropensitySource] = "uniform"
    pool_size: int

    def __call__(self, slates: Slates) -> Tensor:
        """See ``Propensities``.

        Raises:
            RecpoError: the slates do not say which exposures were random.
        """
        if slates.is_random is None:
            raise RecpoError("off-policy value: propensity uniform needs the log's is_random column")
        return torch.where(slates.is_random, 1.0 / self.pool_size, torch.nan).double()


@dataclass(frozen=True)
class EstimatedPropensities(Propensities):
    """The item's smoothed share of exposures in the training period, ``(count + 1) / (sum of counts + V)``.

    It models how often the log shows an item, but not to whom. So it corrects for popularity, but not for a
    personalized logging policy. Its estimates are labeled, because their intervals do not contain this error.

    Attributes:
        counts: ``[V]`` exposures of item 1, 2, ..., V in the training period.
    """

    source: ClassVar[PropensitySource] = "estimated"
    counts: Tensor

    def __call__(self, slates: Slates) -> Tensor:
        """See ``Propensities``."""
        counts = self.counts.to(slates.item_ids.device).double()
        share = (counts + 1) / (counts.sum() + len(counts))
        return torch.where(slates.item_ids > 0, share[(slates.item_ids - 1).clamp_min(0)], torch.nan)
