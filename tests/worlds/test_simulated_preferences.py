from __future__ import annotations

import math

import numpy as np
import pytest

from recpo.worlds.parameters import SimulationParameters
from recpo.worlds.preferences import Preferences
from tests.refusals import refused


@pytest.fixture(scope="module")
def small():
    return Preferences.draw(SimulationParameters(users=40, items=60, events=100, drift=0.1))


def test_reward_is_the_formula_of_the_docstring(small):
    parameters, users, items = small
    affinity = small.affinity(np.array([3, 7]), np.array([[5, 6], [7, 5]]), 4.5)
    reward = small.reward(affinity, items.clickbait[np.array([[5, 6], [7, 5]])])
    for n, (user, row) in enumerate([(3, [5, 6]), (7, [7, 5])]):
        angle = float(users.rate[user]) * 4.5
        taste = [
            math.cos(angle) * float(a) + math.sin(angle) * float(b)
            for a, b in zip(users.taste[user], users.direction[user], strict=True)
        ]
        for k, item in enumerate(row):
            match = sum(t * float(v) for t, v in zip(taste, items.latent[item], strict=True))
            logit = 4.0 * match + 0.8 * float(items.quality[item]) - 1.5
            a = 1 / (1 + math.exp(-logit))
            dislike = 0.05 * (1 - a) ** 2 + 0.25 * bool(items.clickbait[item]) * (1 - a)
            assert affinity[n, k] == pytest.approx(a, abs=1e-12)
            assert reward[n, k] == pytest.approx(a - parameters.dislike_cost * dislike, abs=1e-12)


def test_dense_and_pairwise_affinities_agree(small):
    users, days = np.arange(40), np.linspace(0, 30, 40)
    pairs = small.affinity(users, np.tile(np.arange(60), (40, 1)), days)
    np.testing.assert_allclose(pairs, small.affinity_to_all(users, days), rtol=1e-12)


def test_tastes_turn_at_their_rate_and_keep_their_length(small):
    users = np.arange(40)
    before, after = small.taste(users, 2.0), small.taste(users, 9.0)
    np.testing.assert_allclose(np.linalg.norm(after, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(np.sum(before * after, axis=1), np.cos(7 * small.users.rate), atol=1e-6)
    assert np.allclose(small.users.rate.mean(), 0.1, rtol=0.2)


def test_without_drift_tastes_stand_still():
    still = Preferences.draw(SimulationParameters(users=20, items=10, events=20, drift=0.0))
    np.testing.assert_array_equal(still.taste(np.arange(20), 0.0), still.taste(np.arange(20), 100.0))


def test_dislikes_rise_as_affinity_falls_and_for_clickbait(small):
    affinity = np.linspace(0, 1, 101)
    ordinary = small.dislike_probability(affinity, np.False_)
    clickbait = small.dislike_probability(affinity, np.True_)
    assert (np.diff(ordinary) < 0).all()
    assert (clickbait[:-1] > ordinary[:-1]).all()
    assert ordinary.min() >= 0
    assert clickbait.max() <= 1


def test_identifiers_have_gaps(small):
    for ids in (small.users.user_id, small.items.item_id):
        assert ids[0] > 0
        assert (np.diff(ids) >= 1).all()
        assert (np.diff(ids) > 1).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("users", 0),
        ("users", 2.5),
        ("users", True),
        ("items", -1),
        ("events", 0),
        ("events", 2000 * 14 * 200 + 1),
        ("days", 0),
        ("topics", 0),
        ("random_share", 1.01),
        ("random_share", -0.1),
        ("random_share", math.nan),
        ("drift", -1.0),
        ("drift", math.inf),
        ("dislike_cost", -1.0),
        ("seed", -1),
        ("seed", "0"),
        ("latent_dim", 1),
        ("clickbait_dislike", 0.99),
        ("activity_spread", 9.0),
    ],
)
def test_an_impossible_argument_is_named(name, value):
    with refused("out_of_range", name):
        SimulationParameters(**{name: value})
