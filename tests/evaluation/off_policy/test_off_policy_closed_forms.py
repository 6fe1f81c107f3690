"""Small off-policy numbers worked out by hand, and both sides of every bound."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import ndtri

import recpo
from recpo.base.types import Slates
from recpo.evaluation import estimates
from recpo.evaluation.estimates import as_json, percentile_interval
from recpo.evaluation.off_policy import results as ratio_intervals
from recpo.evaluation.off_policy.diagnostics import WeightDistribution, effective_sample_size
from recpo.evaluation.off_policy.estimators import (
    BASELINE_IPS,
    COMBINED_IPS,
    DM,
    DR,
    IPS,
    LOGGED_MEAN,
    NAIVE_AVERAGE,
    SNDR,
    SNIPS,
    AdditiveRewardModel,
    IndependentIPS,
    OffPolicyOptions,
    RewardedExposures,
    Rows,
    clipped_ips,
    switch_dr,
)
from recpo.evaluation.off_policy.measure import ExposureModel, OffPolicySetting, discounted
from recpo.evaluation.off_policy.results import (
    TargetSums,
    bootstrap_values,
    empirical_bernstein_interval,
    influence,
    normal_interval,
    result_of_rows,
    standard_error,
)
from tests.refusals import refused


# ---------------------------------------------------------------- estimators
def test_a_switch_reads_the_log_up_to_its_threshold():
    rows = Rows(np.ones(2), np.array([0.5, 0.9]), np.array([0.25, 0.3]), np.full(2, 0.5), np.full(2, 0.25))
    assert switch_dr(2.0)(rows) == pytest.approx(0.25 + 2 * 0.5 / 2)  # weights 2 and 3
    assert switch_dr(1.9)(rows) == pytest.approx(0.25)
    assert switch_dr(3.1)(rows) == pytest.approx(DR(rows)) == pytest.approx(0.25 + 5 * 0.5 / 2)


def test_what_the_estimators_read():
    def traits(estimator):
        return estimator.num_ratios, estimator.reads_weights, estimator.self_normalized

    assert traits(IPS) == traits(DR) == traits(switch_dr()) == (1, True, False)
    assert traits(SNIPS) == (1, True, True)
    assert traits(DM) == traits(LOGGED_MEAN) == traits(NAIVE_AVERAGE) == (1, False, False)
    assert traits(SNDR) == (2, True, True)
    assert traits(BASELINE_IPS) == (2, True, False)
    assert traits(COMBINED_IPS) == (3, True, False)
    assert IndependentIPS() == IndependentIPS(self_normalized=False)
    assert (clipped_ips(), switch_dr()) == (clipped_ips(100.0), switch_dr(100.0))


def random_rows(rng, reward, number=400):
    q, v = rng.random((2, number))
    return Rows(reward, rng.random(number), rng.uniform(0.1, 1.0, number), q, v)


def test_the_coefficients_of_control_variates_are_those_of_a_regression():
    rng = np.random.default_rng(0)
    rows = random_rows(rng, rng.random(400))
    weighted, weight = rows.weight * rows.reward, rows.weight
    beta = np.cov(weighted, weight)[0, 1] / weight.var(ddof=1)
    assert BASELINE_IPS(rows) == pytest.approx((weighted - beta * (weight - 1)).mean())
    controls = np.stack([weight - 1, weight * rows.q_hat - rows.v_hat], 1)
    slopes = np.linalg.lstsq(controls - controls.mean(0), weighted - weighted.mean(), rcond=None)[0]
    assert COMBINED_IPS(rows) == pytest.approx((weighted - controls @ slopes).mean())


def test_control_variates_explain_what_they_can():
    rng = np.random.default_rng(1)
    constant = random_rows(rng, np.full(400, 0.7))
    assert BASELINE_IPS(constant) == pytest.approx(0.7)
    exact = random_rows(rng, rng.random(400))
    exact = exact._replace(reward=exact.q_hat, v_hat=np.full(400, 0.6))
    assert COMBINED_IPS(exact) == pytest.approx(0.6)
    few = Rows(*(column[:9] for column in constant))
    assert BASELINE_IPS(few) == pytest.approx(IPS(few))  # too few users to estimate a coefficient


def test_a_difference_with_control_variates_is_estimated_directly():
    rng = np.random.default_rng(2)
    mine = random_rows(rng, rng.random(400))
    theirs, users = mine._replace(target=rng.random(400)), np.arange(400)
    one, other = (result_of_rows(rows, users, OffPolicyOptions(resamples=20)) for rows in (mine, theirs))
    found = {d.estimator: d for d in one.differences(other)}
    back = {d.estimator: d for d in other.differences(one)}
    between, gap = (mine.weight - theirs.weight) * mine.reward, mine.weight - theirs.weight
    beta = np.cov(between, gap)[0, 1] / gap.var(ddof=1)
    assert found["beta-IPS"].value == pytest.approx((between - beta * gap).mean())
    assert found["beta-IPS"].standard_error == pytest.approx((between - beta * gap).std(ddof=1) / 20)
    for name in ("beta-IPS", "combined"):
        assert found[name].value == pytest.approx(-back[name].value)
        assert found[name].standard_error < found["IPS"].standard_error
        assert {d.estimator: d.value for d in one.differences(one)}[name] == 0


def test_the_value_of_plain_arrays_is_that_of_rows():
    rng = np.random.default_rng(3)
    rows, users = random_rows(rng, rng.random(400)), np.arange(400) // 4
    arrays = (rows.reward.tolist(), torch.tensor(rows.propensity), rows.target)
    found = recpo.off_policy.value(*arrays, users=[f"u{u:02}" for u in users], q_hat=rows.q_hat, v_hat=rows.v_hat)
    expected = result_of_rows(rows, users, OffPolicyOptions())
    assert as_json(found.estimates) == as_json(expected.estimates)
    table = found.to_pandas().set_index("estimator")
    assert table.loc["combined", "value"] == expected.estimate("policy", "combined").value
    assert list(table.loc["IPS", ["normal_low", "normal_high"]]) == list(
        expected.estimate("policy", "IPS").intervals["normal"]
    )
    assert {"DM", "DR"}.isdisjoint(recpo.off_policy.value(*arrays).to_pandas()["estimator"])


@pytest.mark.parametrize(
    ("changed", "code", "field"),
    [
        ({"propensities": [0.5]}, "wrong_shape", "propensities"),
        ({"users": [[1], [2]]}, "wrong_shape", "users"),
        ({"q_hat": [0.5, 0.5]}, "missing_value", "v_hat"),
        ({"rewards": [1.0, math.nan]}, "bad_value", "reward"),
        ({"propensities": [0.5, 0.0]}, "bad_value", "propensity"),
    ],
)
def test_plain_arrays_that_cannot_be_are_refused(changed, code, field):
    arrays = {"rewards": [1.0, 0.0], "propensities": [0.5, 0.5], "target_probabilities": [0.5, 0.5], **changed}
    with refused(code, field):
        recpo.off_policy.value(**arrays)


@pytest.mark.parametrize("impossible", [0.0, -0.5, math.nan])
def test_the_first_row_without_a_weight_is_named(impossible):
    rows = Rows(np.ones(4), np.ones(4), np.array([0.5, impossible, 0.0, 1.0]))
    with refused("out_of_range", "propensity"):
        _ = rows.weight
    assert rows._replace(propensity=np.array([0.5, 0.25, 2.0, 1.0])).weight.tolist() == [2.0, 4.0, 0.5, 1.0]


# ---------------------------------------------------------------- propensities
def slates(items, **columns):
    ids = torch.tensor([items])
    return Slates(ids, torch.zeros_like(ids), ids > 0, **{n: torch.tensor([v]) for n, v in columns.items()})


def propensities(slates, source="logged", **options):
    # user 1 sees item 1 twice as often as the others, user 0 all three alike
    exposures = ExposureModel(torch.tensor([[0.0], [1.0]]), torch.tensor([[math.log(2)], [0.0], [0.0]]))
    setting = OffPolicySetting(OffPolicyOptions(propensity=source, **options), None, 3, [1], exposures=exposures)
    return setting.propensities(torch.tensor([1]), slates)


def test_propensities_by_source():
    nan, inf = math.nan, math.inf
    logged = propensities(slates([1, 2, 3, 4], logp_behavior=[math.log(0.5), -inf, nan, 1e-7]))
    assert logged.dtype == torch.float64
    assert logged[0].tolist() == pytest.approx([0.5, nan, nan, 1.0], nan_ok=True)
    with refused("out_of_range", "propensity"):
        propensities(slates([1, 2], logp_behavior=[1e-4, -1.0]))
    rounded = slates([1])._replace(logp_behavior=torch.tensor([[1e-6]], dtype=torch.float64))
    assert propensities(rounded).item() == pytest.approx(math.exp(1e-6))
    uniform = propensities(slates([1, 2], is_random=[True, False]), "uniform")
    assert uniform.dtype == torch.float64
    assert uniform[0].tolist() == pytest.approx([1 / 3, nan], nan_ok=True)
    pool = propensities(slates([1], is_random=[True]), "uniform", pool_size=2)
    assert pool.item() == 0.5
    estimated = propensities(slates([1, 2, 3, 0]), "estimated")
    assert estimated.dtype == torch.float64
    rare = 0.9 / 4 + 0.1 / 3
    assert estimated[0].tolist() == pytest.approx([0.9 / 2 + 0.1 / 3, rare, rare, nan], nan_ok=True)
    random = propensities(slates([1, 2], is_random=[False, True]), "estimated")
    assert random[0].tolist() == pytest.approx([0.9 / 2 + 0.1 / 3, 1 / 3])


def test_an_item_of_a_deep_list_is_drawn_by_its_place():
    lists = torch.tensor([[3, 1, 4, 2], [5, 2, 0, 0], [0, 0, 0, 0]])
    items = torch.tensor([[3, 2, 7, 0], [2, 5, 3, 0], [1, 2, 3, 0]])
    whole, short = 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5, 1 / 2 + 1 / 3
    expected = [[1 / 2 / whole, 1 / 5 / whole, 0, 0], [1 / 3 / short, 1 / 2 / short, 0, 0], [0, 0, 0, 0]]
    found = discounted(lists, items, 2)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    every = discounted(lists[:1], torch.arange(1, 8)[None], 3)
    assert every.sum() == pytest.approx(1.0)


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


def test_the_bootstrap_draws_every_user_alike_and_a_few_resamples_at_a_time(monkeypatch):
    one_of_four = np.array([[4.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])  # the first user is drawn once on average
    for sums in (one_of_four, one_of_four[::-1]):
        (drawn,) = bootstrap_values([sums], resamples=2000, seed=0)
        assert drawn.mean() == pytest.approx(1.0, abs=0.1)
        assert (drawn == 0).mean() == pytest.approx((3 / 4) ** 4, abs=0.05)
    for cells in (1, 12):  # one resample at a time, three
        monkeypatch.setattr(estimates, "_CELLS_AT_ONCE", cells)
        for kept in (8000, 7999):  # all draws, which the next call takes again, or none
            monkeypatch.setattr(ratio_intervals, "_CELLS_KEPT", kept)
            assert bootstrap_values([sums], resamples=2000, seed=0)[0].tolist() == drawn.tolist()


def test_values_may_miss_their_range_by_rounding():
    for low, high in ((-1.0, 0.0), (0.0, 1.0), (-1e6, 0.0), (0.0, 1e6), (-0.25, 0.0)):
        bound = high or low
        slack = 1e-9 * max(abs(bound), 1.0)
        found = empirical_bernstein_interval(np.array([0.0, bound + math.copysign(slack, bound)]), low, high)
        assert found == (low, high)
        with refused("out_of_range", "values"):
            empirical_bernstein_interval(np.array([0.0, bound + math.copysign(1.5 * slack, bound)]), low, high)


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
        with refused("out_of_range", "values"):
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


def test_the_histogram_reaches_from_2_to_the_minus_64_to_2_to_the_64():
    def median(*octaves):
        weights = WeightDistribution()
        weights.update(2.0 ** np.array(octaves))
        return math.log2(weights.compute().median)

    assert median(63.1, 63.9) == pytest.approx(63.1)  # each in its own bin
    assert median(-63.9, -63.1) == pytest.approx(-63.9)
    assert median(64.2, 64.8) == pytest.approx(math.log2((2**64.2 + 2**64.8) / 2))  # in the last bin both, its mean
    assert median(-64.8, -64.2) == pytest.approx(math.log2((2**-64.2 + 2**-64.8) / 2))


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


# ---------------------------------------------------------------- sums over users
def test_the_sums_of_a_target():
    """The user 5 has the weights 2 and 1, the user 9 has 1/2; of the four items that are chosen two are never shown."""
    sums = TargetSums([IPS, SNIPS], num_items=3)
    reward, target = np.array([1.0, 0.5, 1.0]), np.array([1.0, 0.5, 0.25])
    sums.update(np.array([5, 5, 9]), np.array([1, 1, 3]), Rows(reward, target, np.full(3, 0.5)))
    sums.add_choices(np.array([0, 1, 2]))
    sums.add_choices(np.array([2, 3]))
    found = sums.compute(by_user=False, rows_without_reward=4, rows_without_propensity=7)
    assert (found.users.tolist(), found.rows.tolist()) == ([5, 9], [2, 1])
    assert found.by_estimator[IPS].tolist() == [[2.5, 2.0], [0.5, 1.0]]
    assert found.by_estimator[SNIPS].tolist() == [[2.5, 3.0], [0.5, 0.5]]
    said = found.diagnostics
    assert (said.rows, said.users, said.rows_without_reward, said.rows_without_propensity) == (3, 2, 4, 7)
    assert said.effective_rows == pytest.approx(3.5**2 / (4 + 1 + 0.25))
    assert said.effective_users == pytest.approx(3.5**2 / (9 + 0.25))
    assert said.mean_weight == pytest.approx(3.5 / 3)
    moved = np.array([3 - 2 * 3.5 / 3, 0.5 - 3.5 / 3]) / 3
    half = ndtri(0.995) * math.sqrt(2 * (moved**2).sum())
    assert said.mean_weight_interval == pytest.approx((3.5 / 3 - half, 3.5 / 3 + half))
    assert (said.tail.largest, said.unsupported_share, said.no_item_share) == (2.0, 2 / 4, 1 / 5)
    alike = sums.compute(by_user=True, rows_without_reward=0, rows_without_propensity=0)
    assert alike.by_estimator[IPS].tolist() == [[1.25, 1.0], [0.5, 1.0]]
    assert alike.diagnostics.effective_rows == pytest.approx(2**2 / (5 / 2 / 2 + 0.25))
    assert alike.diagnostics.effective_users == pytest.approx(2**2 / (1.5**2 + 0.25))
    assert alike.diagnostics.mean_weight == pytest.approx(1.0)


# ---------------------------------------------------------------- results
def rows_of_users(reward, count):
    """As many rows of every user as ``count`` says, each of weight 1 and of one reward: rows, and whose they are."""
    one = np.ones(len(reward))
    return Rows(np.array(reward), one, one), np.repeat(np.arange(len(count)), count)


def test_the_bounded_interval_of_a_mean_over_exposures_is_one_over_users():
    """Of sums, which grow with the busiest user's rows: 3 of 2 on average."""
    count = np.tile([1, 3], 2000)
    rows, users = rows_of_users(np.tile([1.0, 0.0, 0.5, 0.5], 2000), count)
    options = OffPolicyOptions(resamples=2, reward_range=(-1.0, 2.0), clip=4.0, level=0.9)
    found = result_of_rows(rows, users, options).estimate("policy", "clipped IPS")
    low, high = 4 * 3 / 2 * -1, 4 * 3 / 2 * 2
    want = empirical_bernstein_interval(np.full(4000, 0.5), low, high, 0.9)
    assert found.intervals["empirical_bernstein"] == pytest.approx(want)
    assert want.low > low
    alike = result_of_rows(rows, users, replace(options, average="user")).estimate("policy", "clipped IPS")
    want = empirical_bernstein_interval(np.tile([1.0, 1 / 3], 2000), -4.0, 8.0, 0.9)
    assert alike.intervals["empirical_bernstein"] == pytest.approx(want)


def test_the_bounded_interval_ends_where_values_can():
    """A weight may be 0: the range of the weighted rewards has 0 in it."""
    for bounds, want in (((0.5, 1.0), (0.0, 4.0)), ((-1.0, -0.5), (-4.0, 0.0)), ((-1.0, 1.0), (-4.0, 4.0))):
        rows, users = rows_of_users(np.array(bounds), np.array([1, 1]))
        options = OffPolicyOptions(resamples=2, reward_range=bounds, clip=4.0)
        found = result_of_rows(rows, users, options).estimate("policy", "clipped IPS")
        assert found.intervals["empirical_bernstein"] == want
        busy = result_of_rows(rows, np.zeros(2, int), options)  # one user
        assert np.isnan(busy.estimate("policy", "clipped IPS").intervals["empirical_bernstein"]).all()


def test_a_result_of_one_row():
    rows, users = rows_of_users([0.25], [1])
    result = result_of_rows(rows, users, OffPolicyOptions(resamples=2))
    assert list(result.totals) == ["policy"]
    said = result.estimate("policy", "IPS").diagnostics
    assert (said.rows, said.users, said.rows_without_reward, said.rows_without_propensity) == (1, 1, 0, 0)
    assert math.isnan(said.unsupported_share)
    (difference, *_) = result.differences(result)
    entry = as_json(difference)
    assert (entry["estimator"], entry["value"], entry["standard_error"]) == ("naive average", 0.0, None)
    assert entry["intervals"]["bootstrap"] == {"low": 0.0, "high": 0.0}
    assert entry["intervals"]["normal"] == {"low": None, "high": None}


def test_probabilities_may_miss_one_by_a_millionth():
    for found in (1 + 1e-6, 1 + 2e-6):
        target, propensity = (Rows(np.ones(1), *pair) for pair in (([found], [1.0]), ([1.0], [found])))
        for name, rows in (("target", target), ("propensity", propensity)):
            rows = Rows(*map(np.array, rows[:3]))
            if found == 1 + 1e-6:
                result_of_rows(rows, np.zeros(1, int), OffPolicyOptions(resamples=2))
            else:
                with refused("bad_value", name):
                    result_of_rows(rows, np.zeros(1, int), OffPolicyOptions(resamples=2))


def test_probabilities_may_miss_one_by_rounding():
    rows = Rows(np.array([1.0, 0.0]), np.array([1 + 5e-7, 0.0]), np.array([1 + 5e-7, 0.5]))
    result = result_of_rows(rows, np.array([0, 1]), OffPolicyOptions(resamples=10))
    assert result.estimate("policy", "IPS").value == pytest.approx(0.5)
    with refused("unknown_name", "DR"):
        result.estimate("policy", "DR")
    with refused("bad_value", "target"):
        result_of_rows(rows._replace(target=np.array([-0.1, 0.0])), np.array([0, 1]), OffPolicyOptions())
