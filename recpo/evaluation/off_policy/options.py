"""Options of off-policy evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recpo.base.errors import RecpoError, validate_range
from recpo.base.ranges import NonNegativeFloat, OpenUnitInterval, PositiveFloat, PositiveInt, Seed, validate_ranges
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
        low, high = self.reward_range or (0, 1)
        validate_range(low < high, "off_policy.reward_range", "must be low < high", self.reward_range)

    def estimators(self, with_model: bool) -> list[Estimator]:
        """All estimators, or those that need no reward model."""
        found: list[Estimator] = [NaiveAverage(), IPS(), ClippedIPS(self.clip), SNIPS(), BaselineIPS()]
        return found + ([DM(), DR(), SNDR(), SwitchDR(self.switch_threshold), CombinedIPS()] if with_model else [])
