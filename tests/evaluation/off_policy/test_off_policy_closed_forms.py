"""Small off-policy numbers worked out by hand, and both sides of every bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import ndtri

from recpo.errors import RecpoError
from recpo.evaluation.off_policy.additive_model import AdditiveRewardModel, RewardedExposures
from recpo.evaluation.off_policy.estimators import DM, DR, IPS, SNDR, SNIPS, LoggedMean, NaiveAverage, Rows, SwitchDR
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.propensities import EstimatedPropensities, LoggedPropensities, UniformPropensities
from recpo.evaluation.off_policy.ratio_intervals import (
    bootstrap_values,
    empirical_bernstein_interval,
    influence,
    normal_interval,
    percentile_interval,
    standard_error,
)
from recpo.evaluation.off_policy.results import result_of_rows
from recpo.evaluation.off_policy.slate_estimators import IndependentIPS
from recpo.evaluation.off_policy.weights import WeightDistribution, effective_sample_size
from recpo.types import Slates


# ---------------------------------------------------------------- estimators
def test_a_switch_reads_the_log_up_to_its_threshold():
    rows = Rows(np.ones(2), np.array([0.5, 0.9]), np.array([0.25, 0.3]), np.full(2, 0.5), np.full(2, 0.25))
    assert SwitchDR(2.0)(rows) == pytest.approx(0.25 + 2 * 0.5 / 2)  # weights 2 and 3
    assert SwitchDR(1.9)(rows) == pytest.approx(0.25)
    assert SwitchDR(3.1)(rows) == pytest.approx(DR()(rows)) == pytest.approx(0.25 + 5 * 0.5 / 2)


def test_what_the_estimators_read():
    def traits(estimator):
        return estimator.num_ratios, estimator.reads_weights, estimator.reads_model, estimator.self_normalized

    assert traits(IPS()) == (1, True, False, False)
    assert traits(SNIPS()) == (1, True, False, True)
    assert traits(DM()) == (1, False, True, False)
    assert traits(DR()) == traits(SwitchDR()) == (1, True, True, False)
    assert traits(SNDR()) == (2, True, True, True)
    assert traits(LoggedMean()) == traits(NaiveAverage()) == (1, False, False, False)
    assert IndependentIPS() == IndependentIPS(self_normalized=False, position_weight=None)


# ---------------------------------------------------------------- propensities
def slates(items, **columns):
    ids = torch.tensor([items])
    return Slates(ids, torch.zeros_like(ids), ids > 0, **{n: torch.tensor([v]) for n, v in columns.items()})


def test_propensities_by_source():
    nan, inf = math.nan, math.inf
    logged = LoggedPropensities()(slates([1, 2, 3, 4], logp_behavior=[math.log(0.5), -inf, nan, 1e-7]))
    assert logged.dtype == torch.float64
    assert logged[0].tolist() == pytest.approx([0.5, nan, nan, 1.0], nan_ok=True)
    with pytest.raises(RecpoError, match="expected at most 1"):
        LoggedPropensities()(slates([1], logp_behavior=[1e-4]))
    uniform = UniformPropensities(4)(slates([1, 2], is_random=[True, False]))
    assert uniform.dtype == torch.float64
    assert uniform[0].tolist() == pytest.approx([0.25, nan], nan_ok=True)
    estimated = EstimatedPropensities(torch.tensor([4, 0, 1]))(slates([1, 2, 3, 0]))
    assert estimated.dtype == torch.float64
    assert estimated[0].tolist() == pytest.approx([5 / 8, 1 / 8, 2 / 8, nan], nan_ok=True)


# ---------------------------------------------------------------- intervals
def test_the_normal_interval_of_a_ratio():
    sums = np.array([[1.0, 1.0], [0.0, 2.0], [2.0, 1.0]])  # 3 / 4
    expected = np.array([1 - 0.75, 0 - 1.5, 2 - 0.75]) / 4
    np.testing.assert_allclose(influence(sums), expected)
    error = math.sqrt(3 / 2 * (expected**2).sum())
    assert standard_error(expected) == pytest.approx(error)
    for level in (0.95, 0.5):
        z = ndtri((1 + level) / 2)
        assert normal_interval(expected, 0.75, level) == pytest.approx((0.75 - z * error, 0.75 + z * error))
    assert normal_interval(expected, 0.75) == normal_interval(expected, 0.75, 0.95)
    assert np.isnan(normal_interval(expected, math.nan)).all()
    assert math.isnan(standard_error(np.ones(1)))
    assert standard_error(np.array([1.0, -1.0])) == pytest.approx(2.0)


def test_the_middle_of_bootstrap_values():
    values = np.array([*np.arange(101.0), math.nan])
    assert percentile_interval(values) == pytest.approx((2.5, 97.5))
    assert percentile_interval(values, 0.5) == pytest.approx((25.0, 75.0))
    assert np.isnan(percentile_interval(np.full(3, math.nan))).all()
    (drawn,) = bootstrap_values([np.tile([2.0, 4.0], (5, 1))], resamples=7, seed=0)
    assert drawn.tolist() == [0.5] * 7


def test_the_interval_of_maurer_and_pontil_stays_in_its_range():
    values = np.array([0.0, 1.0] * 5000)
    log_term = math.log(4 / 0.05)
    half = math.sqrt(2 * values.var(ddof=1) * log_term / 10_000) + 7 * 3 * log_term / (3 * 9999)
    assert empirical_bernstein_interval(values, -1.0, 2.0) == pytest.approx((0.5 - half, 0.5 + half))
    assert empirical_bernstein_interval(values[:2], 0.0, 1.0) == (0.0, 1.0)
    assert np.isnan(empirical_bernstein_interval(values[:1], 0.0, 1.0)).all()
    beyond = 1 + 1e-8
    for low, high, wrong in ((0.0, 1.0, beyond), (-1.0, 0.0, -beyond)):
        assert empirical_bernstein_interval(np.array([0.0, high or low]), low, high) == (low, high)
        with pytest.raises(ValueError, match="lie outside"):
            empirical_bernstein_interval(np.array([0.0, wrong]), low, high)


# ---------------------------------------------------------------- weights
def test_a_tail_takes_twenty_different_weights():
    def pareto_k(rows):
        weights = WeightDistribution()
        weights.update(np.linspace(1.0, 2.0, rows))
        return weights.compute().pareto_k

    assert not math.isnan(pareto_k(100))
    assert math.isnan(pareto_k(99))


def test_the_tail_of_few_weights():
    weights = WeightDistribution()
    weights.update(np.array([0.0, 1.0, 3.0, 4.0]))
    tail = weights.compute()
    assert tail.median == pytest.approx(1.0)
    assert (tail.largest, tail.largest_share, tail.top_percent_share, tail.zero_share) == (4.0, 0.5, 0.5, 0.25)
    assert tail.quantile_99 == pytest.approx(4.0)
    assert effective_sample_size(np.array([1.0, 3.0])) == pytest.approx(16 / 10)


def test_weights_beyond_the_histogram_are_counted_at_its_ends():
    weights = WeightDistribution()
    weights.update(np.array([1e-30, 1e-25, 1e-21, 1e30]))
    tail = weights.compute()
    assert tail.largest == 1e30
    assert tail.quantile_99 == pytest.approx(1e30)
    assert tail.median < 1e-20


# ---------------------------------------------------------------- reward model
def test_the_first_effects_of_the_reward_model():
    items, reward = np.array([1, 1, 2, 2, 2, 3]), np.array([1.0, 0.8, 0.2, 0.1, 0.3, 0.6])
    chunk = RewardedExposures(np.arange(6), items, reward)  # as many users as rows: they have no effect of their own
    model = AdditiveRewardModel.fit(lambda: [chunk], num_users=6, num_items=3, rounds=1)
    residual = reward - reward.mean()
    noise, count = residual.var(), np.array([2, 3, 1])
    total = np.array([residual[items == item].sum() for item in (1, 2, 3)])
    between = ((total**2 / count).sum() - 2 * noise) / (6 - (count**2).sum() / 6)
    expected = total / (count + noise / between)
    np.testing.assert_allclose(model.item_effect.numpy(), [0.0, *expected])
    left = residual - expected[items - 1]
    rest = ((left**2).sum() - 5 * (left**2).mean()) / max(6 - 6 / 6, 1)
    own = left / (1 + (left**2).mean() / rest) if rest > 0 else np.zeros(6)
    np.testing.assert_allclose(model.user_effect.numpy(), own)
    assert model.mean == pytest.approx(0.5)
    known = (0.5 + own[5] + expected).tolist()
    found = model(torch.tensor([5, 6]), torch.tensor([[1, 2, 3]] * 2))  # the second of them is nobody
    np.testing.assert_allclose(found.numpy(), [known, (0.5 + expected).tolist()])
    three, default, four = (
        AdditiveRewardModel.fit(lambda: [chunk], num_users=6, num_items=3, **rounds).item_effect
        for rounds in ({"rounds": 3}, {}, {"rounds": 4})
    )
    assert torch.equal(default, three)
    assert not torch.equal(default, four)


def test_the_least_divisor_of_the_reward_model():
    chunk = RewardedExposures(np.array([0, 1]), np.array([1, 2]), np.array([1.0, 0.0]))
    model = AdditiveRewardModel.fit(lambda: [chunk], num_users=2, num_items=2, rounds=1)
    assert model.item_effect.tolist() == pytest.approx([0.0, 0.25, -0.25])  # noise and spread are both 1/4


def test_a_reward_model_of_one_user_whose_rewards_are_0():
    chunk = RewardedExposures(np.zeros(2, int), np.array([1, 2]), np.zeros(2))
    for rounds in (1, 3):
        model = AdditiveRewardModel.fit(lambda: [chunk], num_users=1, num_items=2, rounds=rounds)
        assert model(torch.tensor([0, 1]), torch.tensor([[1], [2]])).tolist() == [[0.0], [0.0]]


# ---------------------------------------------------------------- results
def test_probabilities_may_miss_one_by_rounding():
    rows = Rows(np.array([1.0, 0.0]), np.array([1 + 5e-7, 0.0]), np.array([1 + 5e-7, 0.5]))
    result = result_of_rows(rows, np.array([0, 1]), OffPolicyOptions(resamples=10))
    assert result.estimate("policy", "IPS").value == pytest.approx(0.5)
    with pytest.raises(KeyError, match="no estimate DR of policy"):
        result.estimate("policy", "DR")
    with pytest.raises(RecpoError, match=r"target of row 0 is -0\.1"):
        result_of_rows(rows._replace(target=np.array([-0.1, 0.0])), np.array([0, 1]), OffPolicyOptions())
