"""Intervals contain the truth as often as their level states, over 500 data sets with dependent rows per user."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from recpo.evaluation.estimates import percentile_interval
from recpo.evaluation.off_policy.estimators import (
    BASELINE_IPS,
    COMBINED_IPS,
    DR,
    IPS,
    SNDR,
    SNIPS,
    Rows,
    clipped_ips,
    sum_of_ratios,
)
from recpo.evaluation.off_policy.results import (
    ClusterSums,
    bootstrap_values,
    empirical_bernstein_interval,
    influence,
    normal_interval,
)
from tests.reference.bandit import Bandit
from tests.refusals import refused

DATA_SETS, USERS = 500, 200
ESTIMATORS = [IPS, clipped_ips(1.5), SNIPS, DR, SNDR, BASELINE_IPS, COMBINED_IPS]
WITH_INTERVALS = ["IPS", "SNIPS", "DR", "SNDR", "beta-IPS", "combined"]
SAMPLING_ERROR = 3.3 * np.sqrt(0.95 * 0.05 / DATA_SETS)  # of a share over 500 data sets, at one in a thousand


@pytest.fixture(scope="module")
def user_sums():
    """``[500, 200, 2 J]`` sums of the users of 500 data sets, for each estimator, and the value.

    A user is a context and has one to seven rows, so the rows of a user depend on each other.
    """
    bandit = Bandit(contexts=40, actions=6, seed=3)
    rng = np.random.default_rng(2)
    users = DATA_SETS * USERS
    owner = np.repeat(np.arange(users), rng.integers(1, 8, users))
    context = rng.integers(0, 40, users)[owner]
    action = (rng.random((len(owner), 1)) > bandit.logging.cumsum(1)[context]).sum(1).clip(max=5)
    reward = (rng.random(len(owner)) < bandit.mean_reward[context, action]).astype(float)
    q = np.full(bandit.logging.shape, 0.5)
    rows = Rows(
        reward,
        bandit.target[context, action],
        bandit.logging[context, action],
        q[context, action],
        (bandit.target * q).sum(1)[context],
    )
    found = {}
    for estimator in ESTIMATORS:
        sums = ClusterSums(2 * estimator.num_ratios)
        sums.update(owner, estimator.terms(rows))
        of_users = sums.compute().sums.reshape(DATA_SETS, USERS, -1)
        found[estimator.name] = np.stack([estimator.with_coefficients(one) for one in of_users])
    return found, bandit.value


def coverage(intervals, value):
    return np.mean([interval.low <= value <= interval.high for interval in intervals])


@pytest.mark.parametrize("name", WITH_INTERVALS)
def test_normal_intervals_cover_at_the_nominal_rate(user_sums, name):
    sums, value = user_sums
    intervals = [normal_interval(influence(s), float(sum_of_ratios(s.sum(0)))) for s in sums[name]]
    assert coverage(intervals, value) == pytest.approx(0.95, abs=SAMPLING_ERROR)


def test_control_variates_lower_the_variance(user_sums):
    """beta-IPS has at most the variance of IPS and SNIPS, and the combination at most that of beta-IPS and DR."""
    sums, value = user_sums
    error = {name: np.mean((sum_of_ratios(of_users.sum(1)) - value) ** 2) for name, of_users in sums.items()}
    assert error["beta-IPS"] < 0.8 * error["IPS"]
    assert error["beta-IPS"] < 1.03 * error["SNIPS"]
    assert error["combined"] < 1.03 * min(error["beta-IPS"], error["DR"])


def test_intervals_that_take_rows_for_independent_cover_too_seldom(user_sums):
    sums, value = user_sums
    # as if every row were a user: the variance of the sums of one-row users, with the same totals
    covered = []
    for s in sums["IPS"]:
        mean, rows = s[:, 0].sum() / s[:, 1].sum(), s[:, 1]
        within = (s[:, 0] ** 2 / rows).sum() / rows.sum() - mean**2
        half_width = 1.96 * np.sqrt(within / rows.sum())
        covered.append(abs(mean - value) <= half_width)
    assert np.mean(covered) < 0.9


@pytest.mark.slow
def test_bootstrap_intervals_cover_at_the_nominal_rate(user_sums):
    sums, value = user_sums
    names = WITH_INTERVALS
    resampled = [bootstrap_values([sums[n][d] for n in names], 300, seed=d) for d in range(DATA_SETS)]
    for i, name in enumerate(names):
        share = coverage([percentile_interval(values[i]) for values in resampled], value)
        assert share == pytest.approx(0.95, abs=SAMPLING_ERROR), name


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_the_level_is_the_coverage(user_sums, level):
    sums, value = user_sums
    intervals = [normal_interval(influence(s), float(sum_of_ratios(s.sum(0))), level) for s in sums["SNIPS"]]
    error = 3.3 * np.sqrt(level * (1 - level) / DATA_SETS)
    assert coverage(intervals, value) == pytest.approx(level, abs=error)


def test_empirical_bernstein_never_promises_too_much(user_sums):
    sums, _ = user_sums
    truth = sums["clipped IPS"][:, :, 0] / sums["clipped IPS"][:, :, 1]
    intervals = [empirical_bernstein_interval(values, 0.0, 1.5) for values in truth]
    assert coverage(intervals, truth.mean()) > 0.99
    widths = [high - low for low, high in intervals]
    normal = [1.96 * values.std(ddof=1) / np.sqrt(USERS) for values in truth]
    assert min(widths) > max(normal), "it pays for holding at every sample size"


def test_empirical_bernstein_is_the_printed_formula():
    values = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    log_term = np.log(4 / 0.05)
    half = np.sqrt(2 * 0.3 * log_term / 5) + 7 * 2 * log_term / (3 * 4)
    assert empirical_bernstein_interval(values, -1.0, 1.0) == pytest.approx((max(-1, 0.6 - half), min(1, 0.6 + half)))
    many = np.tile(values, 20_000)
    low, high = empirical_bernstein_interval(many, -1.0, 1.0)
    assert low < 0.6 < high
    assert high - low < 0.04
    with refused("out_of_range", "values"):
        empirical_bernstein_interval(values, 0.0, 0.5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_chunks_do_not_matter(seed, chunks):
    rng = np.random.default_rng(seed)
    users, columns = rng.integers(0, 12, 40), rng.random((40, 3))
    whole, parts = ClusterSums(3), ClusterSums(3)
    whole.update(users, columns)
    for part in np.array_split(rng.permutation(40), chunks):
        parts.update(users[part], columns[part])
        parts.update(users[:0], columns[:0])
    a, b = whole.compute(), parts.compute()
    np.testing.assert_array_equal(a.users, np.unique(users))
    np.testing.assert_array_equal(a.users, b.users)
    np.testing.assert_array_equal(a.rows, b.rows)
    np.testing.assert_allclose(a.sums, b.sums)
    np.testing.assert_allclose(a.sums.sum(0), columns.sum(0))


def test_the_bootstrap_is_seeded_paired_and_in_agreement_with_the_delta_method():
    rng = np.random.default_rng(0)
    sums = np.concatenate([rng.random((3000, 1)), rng.uniform(1, 2, (3000, 1))], axis=1)
    first, same = bootstrap_values([sums, sums], 400, seed=5)
    np.testing.assert_array_equal(first, same)
    np.testing.assert_array_equal(first, bootstrap_values([sums], 400, seed=5)[0])
    assert not np.array_equal(first, bootstrap_values([sums], 400, seed=6)[0])
    assert first.std() == pytest.approx(np.sqrt((influence(sums) ** 2).sum()), rel=0.15)


def test_too_few_users_have_no_interval():
    assert np.isnan(normal_interval(np.zeros(1), 0.5)).all()
    assert np.isnan(empirical_bernstein_interval(np.ones(1), 0, 1)).all()
    assert np.isnan(percentile_interval(np.full(3, np.nan))).all()
