from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from recpo.worlds.parameters import SimulationParameters
from recpo.worlds.preferences import LoggingPolicy, Preferences


def policy_of(**options) -> LoggingPolicy:
    return LoggingPolicy.of(Preferences.draw(SimulationParameters(**options)))


@settings(max_examples=40, deadline=None)
@given(
    items=st.integers(1, 80),
    topics=st.integers(1, 40),
    random_share=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_propensities_are_a_distribution_and_no_draw_is_impossible(items, topics, random_share, seed):
    policy = policy_of(users=5, items=items, events=10, topics=topics, random_share=random_share, seed=seed)
    users = np.arange(5)
    everything = policy.propensity_of_all(users)
    np.testing.assert_allclose(everything.sum(axis=1), 1, rtol=1e-12)
    pairs = policy.propensity(users, np.tile(np.arange(items), (5, 1)))
    np.testing.assert_allclose(pairs, everything, rtol=1e-12)
    drawn, is_random = policy.sample(np.repeat(users, 50), np.random.default_rng(seed))
    assert (everything[np.repeat(users, 50), drawn] > 0).all()
    if random_share in (0.0, 1.0):
        assert (is_random == bool(random_share)).all()


@pytest.mark.parametrize("user", [0, 3])
def test_frequencies_match_propensities(user):
    policy = policy_of(users=4, items=50, events=10, topics=6)
    # Other users are drawn in the same call, out of order: their tables must not mix.
    rows = np.tile([user, 2, 1], 100_000)
    drawn, is_random = policy.sample(rows, np.random.default_rng(1))
    mine = rows == user
    expected = policy.propensity_of_all(np.array([user]))[0] * mine.sum()
    assert chisquare(np.bincount(drawn[mine], minlength=50), expected).pvalue > 1e-4
    uniform = np.bincount(drawn[mine & is_random], minlength=50)
    assert chisquare(uniform).pvalue > 1e-4


def test_the_policy_favors_believed_topics_and_clickbait():
    preferences = Preferences.draw(SimulationParameters(users=200, items=500, events=200))
    policy = LoggingPolicy.of(preferences)
    probability = policy.propensity_of_all(np.arange(200))
    clickbait = preferences.items.clickbait
    assert probability[:, clickbait].mean() > 1.5 * probability[:, ~clickbait].mean()
    affinity = preferences.affinity_to_all(np.arange(200), 0.0)
    assert (probability * affinity).sum(axis=1).mean() > affinity.mean() + 0.1
