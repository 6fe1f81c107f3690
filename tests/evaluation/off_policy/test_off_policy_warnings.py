"""Warnings appear beyond their bound and not at it; options and their bounds."""

from __future__ import annotations

import math

import pytest

from recpo.evaluation.estimates import Interval
from recpo.evaluation.off_policy.diagnostics import Diagnostics, WeightTail, warnings_of
from recpo.evaluation.off_policy.estimators import (
    BASELINE_IPS,
    COMBINED_IPS,
    DM,
    DR,
    IPS,
    NAIVE_AVERAGE,
    SNDR,
    SNIPS,
    OffPolicyOptions,
    clipped_ips,
    switch_dr,
)
from tests.refusals import refused

CALM_TAIL = WeightTail(1.0, 2.0, 3.0, 0.01, 0.05, 0.0, 0.3)
CALM = Diagnostics(1000, 100, 0, 0, 500.0, 80.0, 1.0, Interval(0.99, 1.01), CALM_TAIL, 0.0, 0.0)


def said(changes, estimator=None, source="logged"):
    return warnings_of(estimator or IPS, CALM._replace(**changes), source)


def tail(**changes):
    return {"tail": CALM_TAIL._replace(**changes)}


@pytest.mark.parametrize(
    ("on_the_bound", "beyond", "message"),
    [
        ({"effective_rows": 100.0}, {"effective_rows": 99.4}, "means nothing: only 99 effective rows of 1,000"),
        (
            {"effective_rows": 100.0, "rows": 10_000},
            {"effective_rows": 100.0, "rows": 10_001},
            "little of the log speaks about this policy: 100 effective rows of 10,001",
        ),
        (tail(largest_share=0.1), tail(largest_share=0.11), "one row carries 11% of all weight"),
        (tail(pareto_k=0.7), tail(pareto_k=0.71), "the weights have a long tail (Pareto k 0.71 > 0.7)"),
        ({"unsupported_share": 0.1}, {"unsupported_share": 0.11}, "11% of what the policy would show are items that"),
        (
            {"mean_weight": 1.2, "mean_weight_interval": Interval(1.0, 1.4)},
            {"mean_weight": 1.2, "mean_weight_interval": Interval(1.01, 1.39)},
            "the mean weight is 1.2, expected 1: propensities are wrong",
        ),
        (
            {"mean_weight": 0.8, "mean_weight_interval": Interval(0.6, 1.0)},
            {"mean_weight": 0.8, "mean_weight_interval": Interval(0.61, 0.99)},
            "the mean weight is 0.8, expected 1: propensities are wrong, or the policy wants items that the log cannot",
        ),
        (
            {"mean_weight": 1.009, "mean_weight_interval": Interval(1.008, 1.01)},
            {"mean_weight": 1.011, "mean_weight_interval": Interval(1.01, 1.012)},
            "the mean weight is 1.01, expected 1: propensities are wrong",
        ),
        (
            {"mean_weight": 0.01, "mean_weight_interval": Interval(0.009, 0.011), "no_item_share": 1.0},
            {"mean_weight": 0.011, "mean_weight_interval": Interval(0.01, 0.012), "no_item_share": 1.0},
            "the mean weight is 0.011, expected 0: propensities are wrong",
        ),
        (
            {"mean_weight": 0.8, "mean_weight_interval": Interval(0.79, 0.81), "no_item_share": 0.2},
            {"mean_weight": 1.0, "mean_weight_interval": Interval(0.99, 1.01), "no_item_share": 0.2},
            "the mean weight is 1, expected 0.8: propensities are wrong",
        ),
    ],
)
def test_a_warning_begins_beyond_its_bound(on_the_bound, beyond, message):
    assert said(on_the_bound) == ()
    (warning,) = said(beyond)
    assert warning.startswith(message)
    assert ("the policy wants" in warning) == ("the policy wants" in message)


def test_nothing_is_warned_of_in_a_calm_log():
    assert said({}) == said({"no_item_share": math.nan}) == ()
    assert said({"rows": 0, "effective_rows": 0.0})[0].startswith("means nothing")


def test_warnings_of_an_estimator():
    assert said(tail(largest=3.0), clipped_ips(3.0)) == ()
    assert said(tail(largest=3.1), clipped_ips(3.0)) == ("biased, for rewards >= 0 toward 0: weights above 3 are cut",)
    no_item = {"no_item_share": 0.5, "mean_weight": 0.5, "mean_weight_interval": Interval(0.49, 0.51)}
    assert said(no_item) == ()
    (warning,) = said({**no_item, "no_item_share": 0.01}, SNIPS)
    assert warning.startswith("the mean weight")
    assert [text.split(":")[0] for text in said(no_item, SNIPS)] == ["biased"]
    assert said({}, source="estimated")[0].startswith("propensities are estimated")
    poor = {"effective_rows": 1.0}
    assert [text.split(":")[0] for text in said(poor, DM, "estimated")] == ["this is what the reward model believes"]
    assert [text.split(":")[0] for text in said(poor, NAIVE_AVERAGE)] == ["confounded"]


def test_defaults_and_bounds_of_the_options():
    defaults = OffPolicyOptions()
    assert defaults == OffPolicyOptions("logged", None, None, "exposure", 100.0, 100.0, 32, 0.95, 1000, None, 0)
    least = {"pool_size": 1, "top_k": (1,), "clip": 0.5, "switch_threshold": 0.0, "samples": 1, "resamples": 1}
    assert OffPolicyOptions(**least).samples == 1
    assert OffPolicyOptions(reward_range=(-1.0, 0.0)).reward_range == (-1.0, 0.0)
    wrong = {"pool_size": 0, "switch_threshold": -0.1, "samples": 0, "resamples": 0, "reward_range": (1.0, 1.0)}
    for name, value in [
        *wrong.items(),
        ("level", 0.0),
        ("level", 1.0),
        ("top_k", ()),
        ("top_k", (3, 0)),
        ("clip", 0),
        ("seed", -1),
    ]:
        with refused("empty" if value == () else "out_of_range", f"off_policy.{name}"):
            OffPolicyOptions(**{name: value})
    without = OffPolicyOptions(clip=7.0).estimators(with_model=False)
    assert without == [NAIVE_AVERAGE, IPS, clipped_ips(7.0), SNIPS, BASELINE_IPS]
    with_model = OffPolicyOptions(switch_threshold=9.0).estimators(with_model=True)
    assert with_model[5:] == [DM, DR, SNDR, switch_dr(9.0), COMBINED_IPS]
    assert (clipped_ips(), switch_dr()) == (clipped_ips(100.0), switch_dr(100.0))
