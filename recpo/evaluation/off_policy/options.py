"""Options of off-policy evaluation, and propensities: the logging policy's probabilities of items.

Propensities are logged, known by design, or estimated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.ranges import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt, Seed, validate_ranges
from recpo.base.types import Slates
from recpo.evaluation.off_policy.estimators import (
    DM,
    DR,
    IPS,
    SNDR,
    SNIPS,
    BaselineIPS,
    ClippedIPS,
    CombinedIPS,
    Estimator,
    NaiveAverage,
    SwitchDR,
)

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
                "`recpo prepare`, or take propensity uniform (random exposures) or estimated",
                code="missing_column",
                field="propensity",
            )
        logged = slates.logp_behavior.double()
        if bool((logged > 1e-6).any()):
            raise RecpoError(
                f"off-policy value: a logged propensity is {logged.max().exp():.6g}, expected at most 1",
                code="out_of_range",
                field="propensity",
            )
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
            raise RecpoError(
                "off-policy value: propensity uniform needs the log's is_random column",
                code="missing_column",
                field="is_random",
            )
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


@dataclass(frozen=True)
class OffPolicyOptions:
    """How the value of a policy is estimated from the log of another one.

    Attributes:
        propensity: where the probability of a logged item comes from: logged (the log's propensity column), uniform
            (rows that the log marks as random, each item of the pool equally likely; other rows are skipped) or
            estimated (the item's share of the training exposures; labeled in every result).
        pool_size: number of items that random exposures were drawn from; null = the full catalog.
        top_k: list lengths whose value is estimated, for a random item of the list; null = those of the ranking.
        average: exposure = every exposure has the same weight, as in an online test; user = every user has the same
            weight, as in the ranking metrics.
        clip: maximum weight of clipped IPS.
        switch_threshold: Switch-DR uses the reward model for rows with a larger weight.
        samples: number of items drawn per user for the reward model's value of the policy.
        level: probability that an interval contains the value.
        resamples: number of bootstrap resamples of users.
        reward_range: least and largest possible reward, for the empirical Bernstein interval; null = no such interval.
        seed: seed of the bootstrap and of the draws.
    """

    propensity: PropensitySource = "logged"
    pool_size: PositiveInt | None = None
    top_k: tuple[PositiveInt, ...] | None = None
    average: Literal["exposure", "user"] = "exposure"
    clip: PositiveFloat = 100.0
    switch_threshold: NonNegativeFloat = 100.0
    samples: PositiveInt = 32
    level: OpenUnitInterval = 0.95
    resamples: PositiveInt = 1000
    reward_range: tuple[float, float] | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        validate_ranges(self, "off_policy.")
        if self.top_k == ():
            raise RecpoError("off_policy.top_k names no list length", code="empty", field="off_policy.top_k")
        if self.reward_range is not None and not self.reward_range[0] < self.reward_range[1]:
            raise RecpoError(
                f"off_policy.reward_range is {self.reward_range}, expected low < high",
                code="out_of_range",
                field="off_policy.reward_range",
            )

    def estimators(self, with_model: bool) -> list[Estimator]:
        """All estimators, or those that need no reward model."""
        found: list[Estimator] = [NaiveAverage(), IPS(), ClippedIPS(self.clip), SNIPS(), BaselineIPS()]
        return found + ([DM(), DR(), SNDR(), SwitchDR(self.switch_threshold), CombinedIPS()] if with_model else [])
