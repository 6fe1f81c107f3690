"""Estimates with intervals and warnings from the sums of every target, and paired differences of two contenders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from recpo.base.errors import RecpoError
from recpo.evaluation.estimates import Interval
from recpo.evaluation.off_policy.diagnostics import Diagnostics, warnings_of
from recpo.evaluation.off_policy.estimators import ClippedIPS, Estimator, FloatArray, Rows, sum_of_ratios
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.propensities import PropensitySource
from recpo.evaluation.off_policy.ratio_intervals import (
    NOWHERE,
    bootstrap_values,
    empirical_bernstein_interval,
    influence,
    normal_interval,
    percentile_interval,
    standard_error,
)
from recpo.evaluation.off_policy.target_sums import IntArray, TargetSums, TargetTotals

#: The target of the logging policy.
LOGGING_POLICY = "logging policy"
#: The target of items drawn from the policy.
POLICY = "policy"

IntervalKind = Literal["normal", "bootstrap", "empirical_bernstein"]

_ROUNDING = 1e-6  # tolerance for float32 probabilities of nearly certain items
_NO_INTERVALS: dict[IntervalKind, Interval] = {"normal": NOWHERE, "bootstrap": NOWHERE, "empirical_bernstein": NOWHERE}
_REFUSED = "refused: the policy would have shown none of the logged items to whom they were shown: there is no support"


@dataclass(frozen=True)
class OffPolicyEstimate:
    """One estimator's estimate of one target policy.

    Attributes:
        target: ``policy`` (items drawn from the policy), ``top_k`` such as ``top_10`` (items drawn uniformly from its
            list of k), or ``logging policy``.
        estimator: name of the estimator.
        value: mean reward per exposure; nan = no estimate, see the warnings.
        intervals: intervals by kind; nan = not defined.
        effective_sample_size: number of equally weighted rows with the same information.
        rows: number of exposures used.
        users: number of users with these exposures.
        propensity: source of the propensities.
        diagnostics: diagnostics of the target's weights, equal for all of its estimators.
        warnings: reasons not to believe it; empty if there are none.
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
        """The entry in ``metrics.json``; undefined values are null."""
        return {name: _as_json(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class OffPolicyDifference:
    """The difference in value of two contenders on the same log, by the same estimator.

    Attributes:
        target: target of both contenders.
        estimator: name of the estimator.
        value: the difference of the estimates.
        intervals: normal and bootstrap intervals, paired over users.
        standard_error: standard error of the difference, over users.
        users: number of users with rows.
    """

    target: str
    estimator: str
    value: float
    intervals: dict[IntervalKind, Interval]
    standard_error: float
    users: int

    def as_json(self) -> dict[str, Any]:
        """The entry in ``metrics.json``; undefined values are null."""
        return {name: _as_json(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class OffPolicyResult:
    """All estimates of one contender.

    Attributes:
        estimates: all estimates, ordered by target.
        totals: target -> its sums per user.
        level: level of the intervals.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.
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
        """The difference in value to ``other``, for every common target and estimator.

        Both contenders weight the same rewards of the same users, so the intervals are those of the users' differences:
        narrower than two separate intervals suggest, if the contenders agree. Targets without an estimate are omitted.

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
        """The paired difference in value to the logging policy, on the same users."""
        logged = self.totals[LOGGING_POLICY]
        (earned,) = logged.by_estimator.values()
        found: list[OffPolicyDifference] = []
        for target, totals in self.totals.items():
            if target == LOGGING_POLICY:
                continue
            # a row without a propensity only counts for the logging policy
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
            influences = influence(mine) - influence(theirs)
            intervals: dict[IntervalKind, Interval] = {
                "normal": normal_interval(influences, value, self.level),
                "bootstrap": percentile_interval(of_mine - of_theirs, self.level),
            }
            error = standard_error(influences)
            found.append(OffPolicyDifference(target, estimator.name, value, intervals, error, len(influences)))
        return found


def result_of_rows(
    rows: Rows, users: IntArray, options: OffPolicyOptions, source: PropensitySource = "logged"
) -> OffPolicyResult:
    """All estimates of one target, named ``policy``, from rows given as arrays.

    Args:
        rows: exposures; with ``q_hat`` and ``v_hat`` for the estimators that need a reward model.
        users: ``[N]`` int64, user of each row; rows of different users are independent.
        options: clip, threshold, level, resamples and so on; options about a pass over batches are ignored.
        source: source of the propensities.

    Raises:
        RecpoError: a propensity outside (0, 1], a probability outside [0, 1], or a reward that is not finite.
    """
    _validate_rows(rows)
    sums = TargetSums(options.estimators(rows.v_hat is not None), num_items=0)
    sums.update(users, np.zeros_like(users), rows)
    by_user = options.average == "user"
    totals = sums.compute(by_user=by_user, rows_without_reward=0, rows_without_propensity=0)
    return result_of({POLICY: totals}, options, source)


def _validate_rows(rows: Rows) -> None:
    checks = {
        "reward": (np.isfinite(rows.reward), "a finite number"),
        "target": ((rows.target >= 0) & (rows.target <= 1 + _ROUNDING), "a probability from 0 to 1"),
        "propensity": (
            (rows.propensity > 0) & (rows.propensity <= 1 + _ROUNDING),
            "a probability above 0 and at most 1; leave rows out whose propensity is unknown",
        ),
    }
    for name, (holds, expected) in checks.items():
        if not holds.all():
            row = int((~holds).argmax())
            found = getattr(rows, name)[row]
            raise RecpoError(f"off-policy value: {name} of row {row} is {found:g}, expected {expected}")


def result_of(totals: dict[str, TargetTotals], options: OffPolicyOptions, source: PropensitySource) -> OffPolicyResult:
    """All estimates. If every weight of a target is 0, its values are nan, with a warning that gives the reason."""
    estimates: list[OffPolicyEstimate] = []
    for target, found in totals.items():
        supported = found.diagnostics.effective_rows > 0
        intervals = _intervals(found, options) if supported else {}
        for estimator, sums in found.by_estimator.items():
            estimates.append(
                OffPolicyEstimate(
                    target=target,
                    estimator=estimator.name,
                    value=float(sum_of_ratios(sums.sum(0))) if supported else math.nan,
                    intervals=intervals.get(estimator, _NO_INTERVALS),
                    effective_sample_size=found.diagnostics.effective_rows,
                    rows=found.diagnostics.rows,
                    users=found.diagnostics.users,
                    propensity=source,
                    diagnostics=found.diagnostics,
                    warnings=warnings_of(estimator, found.diagnostics, source) if supported else (_REFUSED,),
                )
            )
    usable = {target: found for target, found in totals.items() if found.diagnostics.effective_rows > 0}
    return OffPolicyResult(tuple(estimates), usable, options.level, options.resamples, options.seed)


def _intervals(found: TargetTotals, options: OffPolicyOptions) -> dict[Estimator, dict[IntervalKind, Interval]]:
    resampled = bootstrap_values(list(found.by_estimator.values()), options.resamples, options.seed)
    intervals: dict[Estimator, dict[IntervalKind, Interval]] = {}
    for (estimator, sums), values in zip(found.by_estimator.items(), resampled, strict=True):
        value = float(sum_of_ratios(sums.sum(0)))
        intervals[estimator] = {
            "normal": normal_interval(influence(sums), value, options.level),
            "bootstrap": percentile_interval(values, options.level),
            "empirical_bernstein": NOWHERE,
        }
        if isinstance(estimator, ClippedIPS) and options.reward_range is not None:
            bounded = _empirical_bernstein(estimator, sums, found, options)
            intervals[estimator]["empirical_bernstein"] = bounded
    return intervals


def _empirical_bernstein(
    estimator: ClippedIPS, sums: FloatArray, found: TargetTotals, options: OffPolicyOptions
) -> Interval:
    """Units are users: a mean over exposures is a mean of users' sums, whose range grows with the most active user."""
    assert options.reward_range is not None
    rows_per_user = found.rows.mean() if options.average == "exposure" else 1.0
    most = found.rows.max() / rows_per_user if options.average == "exposure" else 1.0
    low, high = (estimator.limit * float(most) * bound for bound in options.reward_range)
    return empirical_bernstein_interval(sums[:, 0] / rows_per_user, min(low, 0.0), max(high, 0.0), options.level)


def _spread(sums: FloatArray, users: IntArray, every: IntArray) -> FloatArray:
    """The sums as rows of a larger set of users; 0 for those who are not among ``users``."""
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
