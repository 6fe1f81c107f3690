"""Diagnostics that show whether an estimate can be believed, and the warnings that follow from them."""

from __future__ import annotations

import math
from typing import NamedTuple

from recpo.evaluation.estimates import Interval
from recpo.evaluation.off_policy.estimators import DM, ClippedIPS, Estimator, NaiveAverage
from recpo.evaluation.off_policy.propensities import PropensitySource
from recpo.evaluation.off_policy.weights import WeightTail

LEAST_EFFECTIVE_ROWS = 100.0
LEAST_EFFECTIVE_SHARE = 0.01
LARGEST_SHARE = 0.1
LARGEST_PARETO_K = 0.7
LARGEST_UNSUPPORTED_SHARE = 0.1
MEAN_WEIGHT_TOLERANCE = 0.01
MEAN_WEIGHT_LEVEL = 0.99  # one of a hundred correct logs gets a warning


class Diagnostics(NamedTuple):
    """The data and weights behind the estimates of one target policy.

    Attributes:
        rows: number of exposures with a reward and a propensity, which the estimates use.
        users: number of users with such exposures.
        rows_without_reward: number of exposures that are skipped because their reward is unknown.
        rows_without_propensity: number of exposures with a reward that are skipped because their propensity is unknown.
        effective_rows: ``(sum w)^2 / sum w^2`` over rows: the number of equally weighted rows with the same
            information.
        effective_users: the same over the users' sums of weights; users are the units of the intervals.
        mean_weight: mean of the weights. Its expectation is the target policy's probability of items that the logging
            policy can show: ``1 - no_item_share`` if propensities are correct and no item is missing.
        mean_weight_interval: its normal 99 % interval over users.
        tail: the upper end of the weights.
        unsupported_share: share of the target policy's choices (places of its lists, or draws from it) that are items
            without any row in the log; nan if the policy cannot be sampled.
        no_item_share: share of its draws that are not items (a policy over semantic ids that is normalized over the
            codebook may draw codes without an item); they earn 0; nan if the policy cannot be sampled.
    """

    rows: int
    users: int
    rows_without_reward: int
    rows_without_propensity: int
    effective_rows: float
    effective_users: float
    mean_weight: float
    mean_weight_interval: Interval
    tail: WeightTail
    unsupported_share: float
    no_item_share: float = math.nan


def warnings_of(estimator: Estimator, diagnostics: Diagnostics, source: PropensitySource) -> tuple[str, ...]:
    """Warnings to read before believing an estimate; empty if there are none."""
    found = []
    if isinstance(estimator, NaiveAverage):
        found.append("confounded: the rewards of what was shown, to those to whom it was shown; for comparison only")
    if isinstance(estimator, DM):
        found.append("this is what the reward model believes: no interval contains the model's error")
    if isinstance(estimator, ClippedIPS) and diagnostics.tail.largest > estimator.limit:
        found.append(f"biased, for rewards >= 0 toward 0: weights above {estimator.limit:g} are cut")
    if estimator.reads_weights:
        found += _about_size(diagnostics) + _about_tail(diagnostics.tail) + _about_support(diagnostics)
        if estimator.self_normalized and diagnostics.no_item_share > MEAN_WEIGHT_TOLERANCE:
            found.append(
                f"biased: {diagnostics.no_item_share:.0%} of the policy's draws are not items; self-normalized "
                "estimators leave them out; IPS and DR count them as a reward of 0"
            )
        if source == "estimated":
            found.append("propensities are estimated: they know how often an item was shown, not to whom")
    return tuple(found)


def _about_size(diagnostics: Diagnostics) -> list[str]:
    effective = diagnostics.effective_rows
    if effective < LEAST_EFFECTIVE_ROWS:
        return [
            f"means nothing: only {effective:.0f} effective rows of {diagnostics.rows:,}, "
            f"expected at least {LEAST_EFFECTIVE_ROWS:.0f}"
        ]
    if effective < LEAST_EFFECTIVE_SHARE * diagnostics.rows:
        return [f"little of the log speaks about this policy: {effective:.0f} effective rows of {diagnostics.rows:,}"]
    return []


def _about_tail(tail: WeightTail) -> list[str]:
    found = []
    if tail.largest_share > LARGEST_SHARE:
        found.append(f"one row carries {tail.largest_share:.0%} of all weight")
    if tail.pareto_k > LARGEST_PARETO_K:
        found.append(
            f"the weights have a long tail (Pareto k {tail.pareto_k:.2f} > {LARGEST_PARETO_K}): larger ones than the "
            "log happens to hold are missing, and intervals are too narrow"
        )
    return found


def _about_support(diagnostics: Diagnostics) -> list[str]:
    found = []
    interval = diagnostics.mean_weight_interval
    # weights of a policy close to the logging policy hardly vary, so rounded propensities must not trigger the warning
    expected = 1 - (0.0 if math.isnan(diagnostics.no_item_share) else diagnostics.no_item_share)
    off = abs(diagnostics.mean_weight - expected) > MEAN_WEIGHT_TOLERANCE
    if off and (interval.low > expected or interval.high < expected):
        cause = (
            "propensities are wrong, or the policy wants items that the log cannot show"
            if interval.high < expected
            else "propensities are wrong"
        )
        found.append(f"the mean weight is {diagnostics.mean_weight:.3g}, expected {expected:.3g}: {cause}")
    if diagnostics.unsupported_share > LARGEST_UNSUPPORTED_SHARE:
        found.append(
            f"{diagnostics.unsupported_share:.0%} of what the policy would show are items that no row shows: "
            "the log has no information about them"
        )
    return found
