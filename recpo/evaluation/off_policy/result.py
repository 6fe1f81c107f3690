"""Estimates of one contender's value, and what one contender gains over another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from recpo.evaluation.off_policy.cluster_sums import IntArray
from recpo.evaluation.off_policy.diagnostics import Diagnostics
from recpo.evaluation.off_policy.estimators import Estimator, FloatArray, sum_of_ratios
from recpo.evaluation.off_policy.intervals import (
    Interval,
    bootstrap_values,
    influence,
    normal_interval,
    percentile_interval,
)
from recpo.evaluation.off_policy.propensities import PropensitySource
from recpo.evaluation.off_policy.target_sums import TargetTotals

#: The target that is the log itself.
LOGGING_POLICY = "logging policy"

IntervalKind = Literal["normal", "bootstrap", "empirical_bernstein"]


@dataclass(frozen=True)
class OffPolicyEstimate:
    """One estimator's answer for one target policy.

    Attributes:
        target: ``policy`` (items drawn from the policy), ``top_k`` such as ``top_10`` (items drawn uniformly from its
            list of k), or ``logging policy``.
        estimator: its name.
        value: mean reward per exposure; nan = refused, see the warnings.
        intervals: by kind; nan where not defined.
        effective_sample_size: so many rows of equal weight say as much.
        rows: exposures that were used.
        users: who had them.
        propensity: where propensities come from.
        diagnostics: of the target's weights, the same for all its estimators.
        warnings: what speaks against believing it; empty if nothing does.
    """

    target: str
    estimator: str
    value: float
    intervals: dict[IntervalKind, Interval]
    effective_sample_size: float
    rows: int
    users: int
    propensity: PropensitySource
    diagnostics: Diagnostics
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``metrics.json``; what is not defined is null."""
        return {name: _as_json(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class OffPolicyDifference:
    """What one contender is worth more than another on the same log, by the same estimator.

    Attributes:
        target: of both contenders.
        estimator: its name.
        value: the difference of the estimates.
        intervals: normal and bootstrap, paired over users.
    """

    target: str
    estimator: str
    value: float
    intervals: dict[IntervalKind, Interval]

    def as_json(self) -> dict[str, Any]:
        """For ``metrics.json``; what is not defined is null."""
        return {name: _as_json(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class OffPolicyResult:
    """All estimates of one contender.

    Attributes:
        estimates: target after target.
        totals: target to its sums over users.
        level: of the intervals.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """

    estimates: tuple[OffPolicyEstimate, ...]
    totals: dict[str, TargetTotals]
    level: float
    resamples: int
    seed: int

    def as_json(self) -> list[dict[str, Any]]:
        """The list for ``metrics.json``."""
        return [estimate.as_json() for estimate in self.estimates]

    def estimate(self, target: str, estimator: str) -> OffPolicyEstimate:
        """One estimate.

        Raises:
            KeyError: there is no such target or estimator.
        """
        for found in self.estimates:
            if (found.target, found.estimator) == (target, estimator):
                return found
        raise KeyError(f"no estimate {estimator} of {target}")

    def differences(self, other: OffPolicyResult) -> tuple[OffPolicyDifference, ...]:
        """What this contender is worth more than ``other``, for every target and estimator that both have.

        Both weigh the same rewards of the same users, so the intervals are of the users' own differences: narrower than
        two separate intervals suggest where the contenders agree. A target that was refused is left out.

        Raises:
            ValueError: the two were not evaluated on the same rows.
        """
        found: list[OffPolicyDifference] = []
        for target, mine in self.totals.items():
            if target == LOGGING_POLICY or target not in other.totals:
                continue
            theirs = other.totals[target]
            if not (np.array_equal(mine.users, theirs.users) and np.array_equal(mine.rows, theirs.rows)):
                raise ValueError("a paired difference needs both results on the same rows of the same users")
            shared = [estimator for estimator in mine.by_estimator if estimator in theirs.by_estimator]
            found += self._differences(target, {e: (mine.by_estimator[e], theirs.by_estimator[e]) for e in shared})
        return tuple(found)

    def over_logging_policy(self) -> tuple[OffPolicyDifference, ...]:
        """What this contender is worth more than what the logging policy earned from the same users, paired."""
        logged = self.totals[LOGGING_POLICY]
        (earned,) = logged.by_estimator.values()
        found: list[OffPolicyDifference] = []
        for target, totals in self.totals.items():
            if target == LOGGING_POLICY:
                continue
            # a row without a propensity counts for the logging policy alone
            every = np.union1d(totals.users, logged.users)
            theirs = _spread(earned, logged.users, every)
            pairs = {e: (_spread(sums, totals.users, every), theirs) for e, sums in totals.by_estimator.items()}
            found += self._differences(target, pairs)
        return tuple(found)

    def _differences(
        self, target: str, pairs: dict[Estimator, tuple[FloatArray, FloatArray]]
    ) -> list[OffPolicyDifference]:
        drawn = bootstrap_values([sums for pair in pairs.values() for sums in pair], self.resamples, self.seed)
        found = []
        for (estimator, (mine, theirs)), of_mine, of_theirs in zip(pairs.items(), drawn[::2], drawn[1::2], strict=True):
            value = float(sum_of_ratios(mine.sum(0)) - sum_of_ratios(theirs.sum(0)))
            intervals: dict[IntervalKind, Interval] = {
                "normal": normal_interval(influence(mine) - influence(theirs), value, self.level),
                "bootstrap": percentile_interval(of_mine - of_theirs, self.level),
            }
            found.append(OffPolicyDifference(target, estimator.name, value, intervals))
        return found


def _spread(sums: FloatArray, users: IntArray, every: IntArray) -> FloatArray:
    """The sums as rows of a larger set of users; those who are not among ``users`` have 0."""
    spread = np.zeros((len(every), sums.shape[1]))
    spread[np.searchsorted(every, users)] = sums
    return spread


def _as_json(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items()}
    if hasattr(value, "_asdict"):
        return _as_json(value._asdict())
    return list(value) if isinstance(value, tuple) else value
