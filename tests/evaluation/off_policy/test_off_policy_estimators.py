"""Estimators: the vector, OBP's dense formulas, exact expectations, and how their errors fall."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from recpo.evaluation.off_policy.diagnostics import effective_sample_size
from recpo.evaluation.off_policy.estimators import (
    DM,
    DR,
    IPS,
    LOGGED_MEAN,
    NAIVE_AVERAGE,
    SNDR,
    SNIPS,
    Rows,
    clipped_ips,
    sum_of_ratios,
    switch_dr,
)
from tests.reference import off_policy_dense
from tests.reference.bandit import Bandit
from tests.refusals import refused

ALL = [IPS, clipped_ips(2.0), SNIPS, DM, DR, SNDR, switch_dr(2.0)]


def rows_of(bandit, context, action, reward, q=None, propensity=None):
    """Rows of a bandit's exposures with the model ``q [contexts, actions]``, by default the true rewards."""
    q = bandit.mean_reward if q is None else q
    p = bandit.logging if propensity is None else propensity
    v = (bandit.target * q).sum(1)
    return Rows(reward, bandit.target[context, action], p[context, action], np.asarray(q)[context, action], v[context])


def expectation(estimator, bandit, q=None, propensity=None):
    """What the estimator converges to, by enumeration: no sampling."""
    context, action = (index.ravel() for index in np.indices(bandit.logging.shape))
    rows = rows_of(bandit, context, action, bandit.mean_reward[context, action], q, propensity)
    chance = (bandit.logging[context, action] / len(bandit.logging))[:, None]
    return float(sum_of_ratios((chance * estimator.terms(rows)).sum(0)))


def test_the_vector():
    vectors = json.loads((Path(__file__).parents[2] / "objectives" / "objectives.json").read_text())["vectors"]
    (vector,) = [vector for vector in vectors if vector["id"] == "ope.basic"]
    inputs = {name: np.array(values) for name, values in vector["inputs"].items()}
    rows = Rows(inputs["reward"], inputs["pi_e"], inputs["pi_b"], inputs["q_hat_logged"], inputs["v_hat_under_pi_e"])
    estimators = {"IPS": IPS, "SNIPS": SNIPS, "DM": DM, "DR": DR, "SNDR": SNDR}
    found = {name: estimator(rows) for name, estimator in estimators.items()}
    found |= {
        "clipped_IPS_at_2": clipped_ips(2.0)(rows),
        "ESS": effective_sample_size(rows.weight),
        "mean_weight": rows.weight.mean(),
    }
    assert found == pytest.approx(vector["expected"], rel=1e-12)


def test_small_fractions():
    rows = Rows(np.array([1.0, 0.0, 1.0]), np.array([0.5, 0.5, 0.25]), np.array([0.25, 0.5, 0.5]))
    assert IPS(rows) == pytest.approx((2 + 0 + 0.5) / 3)
    assert SNIPS(rows) == pytest.approx(2.5 / 3.5)
    assert clipped_ips(1.0)(rows) == pytest.approx(1.5 / 3)
    assert LOGGED_MEAN(rows) == pytest.approx(2 / 3)
    assert NAIVE_AVERAGE(rows) == pytest.approx(0.75 / 1.25)


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_the_dense_formulas_of_obp(seed, size):
    rng = np.random.default_rng(seed)
    bandit = Bandit(contexts=4, actions=6, seed=seed)
    context, action, reward = bandit.draw(size, seed)
    q = rng.random(bandit.logging.shape)
    dense = off_policy_dense.estimates(
        reward, action, bandit.logging[context, action], bandit.target[context], q[context], 2.0, 2.0
    )
    rows = rows_of(bandit, context, action, reward, q)
    assert {estimator.name: estimator(rows) for estimator in ALL} == pytest.approx(dense, rel=1e-9, abs=1e-12)


@given(st.integers(0, 2**32 - 1))
def test_expectations_are_what_theory_says(seed):
    bandit, rng = Bandit(seed=seed), np.random.default_rng(seed)
    wrong_q, wrong_p = rng.random(bandit.logging.shape), rng.dirichlet(np.ones(8), 5)
    exact = pytest.approx(bandit.value, rel=1e-10)
    for estimator in (IPS, SNIPS, DR, SNDR, clipped_ips(np.inf), switch_dr(np.inf)):
        assert expectation(estimator, bandit, wrong_q) == exact, "right propensities"
    for estimator in (DM, DR, SNDR, switch_dr(2.0)):
        assert expectation(estimator, bandit, propensity=wrong_p) == exact, "right model"
    assert expectation(DR, bandit, wrong_q, wrong_p) != exact, "both wrong"
    assert expectation(clipped_ips(1.0), bandit) < bandit.value, "rewards >= 0"
    assert expectation(switch_dr(0.0), bandit, wrong_q) == pytest.approx(expectation(DM, bandit, wrong_q))
    scaled = 0.3 * bandit.logging
    assert expectation(SNIPS, bandit, propensity=scaled) == exact, "a common factor cancels"


def test_a_monte_carlo_value_leaves_doubly_robust_unbiased_and_costs_variance():
    bandit, draws, rows = Bandit(), 4, 400_000
    rng = np.random.default_rng(1)
    wrong_q = rng.random(bandit.logging.shape)
    context, action, reward = bandit.draw(rows)
    sampled = (rng.random((rows, draws, 1)) > bandit.target.cumsum(1)[context][:, None]).sum(2)
    exact = rows_of(bandit, context, action, reward, wrong_q)
    noisy = exact._replace(v_hat=wrong_q[context[:, None], sampled].mean(1))
    value, of_exact = DR.terms(noisy)[:, 0], DR.terms(exact)[:, 0]
    assert value.mean() == pytest.approx(bandit.value, abs=4 * value.std() / np.sqrt(rows))
    assert value.var() > of_exact.var()


def test_a_shift_of_rewards_moves_snips_exactly_and_ips_not():
    bandit = Bandit()
    context, action, reward = bandit.draw(50)
    rows = rows_of(bandit, context, action, reward)
    shifted = rows._replace(reward=reward + 10)
    assert SNIPS(shifted) == pytest.approx(SNIPS(rows) + 10)
    assert IPS(shifted) == pytest.approx(IPS(rows) + 10 * rows.weight.mean())


def test_a_good_model_lowers_the_variance():
    bandit = Bandit()
    context, action, reward = bandit.draw(500 * 200)
    rows = rows_of(bandit, context, action, reward)
    spread = {e.name: data_sets(e, rows, 500).std() for e in ALL}
    assert spread["DM"] < spread["DR"] < 0.75 * spread["IPS"]
    assert spread["SNIPS"] < spread["IPS"]


@pytest.mark.parametrize("estimator", [IPS, SNIPS, DR, SNDR], ids=lambda e: e.name)
def test_errors_fall_with_the_square_root_of_the_rows(estimator):
    bandit = Bandit()
    wrong_q = np.full(bandit.logging.shape, 0.5)
    errors = []
    for rows in (50, 200, 800):
        sample = rows_of(bandit, *bandit.draw(500 * rows, seed=rows), wrong_q)
        errors.append(np.sqrt(((data_sets(estimator, sample, 500) - bandit.value) ** 2).mean()))
    # each error is known to about 3 %, so is a ratio of two to 5 %
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 2.0, rtol=0.17)


@pytest.mark.parametrize("estimator", [clipped_ips(1.0), DM, switch_dr(1.0)], ids=lambda e: e.name)
def test_a_bias_stays_and_is_the_one_of_theory(estimator):
    bandit = Bandit()
    wrong_q = np.full(bandit.logging.shape, 0.7)
    found = data_sets(estimator, rows_of(bandit, *bandit.draw(500 * 800), wrong_q), 500)
    bias = expectation(estimator, bandit, wrong_q) - bandit.value
    assert abs(bias) > 0.01
    assert found.mean() - bandit.value == pytest.approx(bias, abs=1e-12 + 4 * found.std() / np.sqrt(500))


def data_sets(estimator, rows, number):
    """The estimates of ``number`` equal parts of ``rows``."""
    terms = estimator.terms(rows)
    return sum_of_ratios(terms.reshape(number, -1, terms.shape[1]).sum(1))


def test_without_rows_or_weight_there_is_no_estimate():
    nothing = Rows(*np.zeros((3, 0)))
    assert np.isnan(IPS(nothing))
    assert np.isnan(SNIPS(nothing))
    never = Rows(np.ones(4), np.zeros(4), np.ones(4))
    assert IPS(never) == 0
    assert np.isnan(SNIPS(never))


@pytest.mark.parametrize("estimator", [DM, DR, SNDR, switch_dr()], ids=lambda e: e.name)
def test_a_missing_model_is_named(estimator):
    with refused("missing_value", "v_hat"):
        estimator(Rows(np.ones(2), np.ones(2), np.ones(2)))
