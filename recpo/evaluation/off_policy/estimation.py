"""From the sums of every target to estimates with intervals and warnings."""

from __future__ import annotations

import math

import numpy as np

from recpo.evaluation.off_policy.cluster_sums import IntArray
from recpo.evaluation.off_policy.diagnostics import warnings_of
from recpo.evaluation.off_policy.estimators import ClippedIPS, Estimator, FloatArray, Rows, sum_of_ratios
from recpo.evaluation.off_policy.intervals import (
    NOWHERE,
    Interval,
    bootstrap_values,
    empirical_bernstein_interval,
    influence,
    normal_interval,
    percentile_interval,
)
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.propensities import PropensitySource
from recpo.evaluation.off_policy.result import IntervalKind, OffPolicyEstimate, OffPolicyResult
from recpo.evaluation.off_policy.target_sums import TargetSums, TargetTotals

_NO_INTERVALS: dict[IntervalKind, Interval] = {"normal": NOWHERE, "bootstrap": NOWHERE, "empirical_bernstein": NOWHERE}
_REFUSED = "refused: the policy would have shown none of the logged items to whom they were shown: there is no support"


def result_of_rows(
    rows: Rows, users: IntArray, options: OffPolicyOptions, source: PropensitySource = "logged"
) -> OffPolicyResult:
    """All estimates of one target, called ``policy``, from rows that are at hand as arrays.

    Args:
        rows: exposures; with ``q_hat`` and ``v_hat`` for the estimators that need a reward model.
        users: ``[N]`` int64, whose rows they are: rows of different users are independent.
        options: clip, threshold, level, resamples and the like; those about a pass over batches are not read.
        source: where the propensities come from.
    """
    sums = TargetSums(options.estimators(rows.v_hat is not None), num_items=0)
    sums.update(users, np.zeros_like(users), rows)
    by_user = options.average == "user"
    totals = sums.compute(by_user=by_user, rows_without_reward=0, rows_without_propensity=0)
    return result_of({"policy": totals}, options, source)


def result_of(totals: dict[str, TargetTotals], options: OffPolicyOptions, source: PropensitySource) -> OffPolicyResult:
    """All estimates; a target of which every weight is 0 is refused: its values are nan, and the warning says why."""
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
    """Over users: a mean over exposures is one over users of sums, whose range grows with the busiest user's rows."""
    assert options.reward_range is not None
    rows_per_user = found.rows.mean() if options.average == "exposure" else 1.0
    most = found.rows.max() / rows_per_user if options.average == "exposure" else 1.0
    low, high = (estimator.limit * float(most) * bound for bound in options.reward_range)
    return empirical_bernstein_interval(sums[:, 0] / rows_per_user, min(low, 0.0), max(high, 0.0), options.level)
