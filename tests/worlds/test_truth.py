from __future__ import annotations

import json

import numpy as np
import pytest

from recpo.worlds import truth as truth_module
from recpo.worlds.log import write_simulation
from recpo.worlds.parameters import SimulationParameters
from recpo.worlds.preferences import Preferences
from recpo.worlds.truth import Truth
from tests.refusals import refused

DAY = 6.5


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("truth") / "out"
    preferences = Preferences.draw(SimulationParameters(users=50, items=70, events=500))
    return out, write_simulation(preferences, out).truth


@pytest.fixture(scope="module")
def truth(saved):
    return Truth.load(saved[0])


def test_loaded_truth_equals_the_simulators_own(saved, truth):
    _, own = saved
    everything = np.tile(own.item_ids, (50, 1))
    for day in (0.0, DAY, 40.0):
        expected = own.expected_reward(own.user_ids, everything, day)
        np.testing.assert_array_equal(truth.expected_reward(truth.user_ids, everything, day), expected)
    np.testing.assert_array_equal(
        truth.propensity(truth.user_ids, everything), own.propensity(own.user_ids, everything)
    )
    assert truth.preferences.parameters == own.preferences.parameters


def test_rewards_and_probabilities_stay_in_their_range(truth):
    everything = np.tile(truth.item_ids, (50, 1))
    reward = truth.expected_reward(truth.user_ids, everything, DAY)
    dislike = truth.dislike_probability(truth.user_ids, everything, DAY)
    assert reward.shape == dislike.shape == (50, 70)
    assert ((reward > -2) & (reward < 1)).all()
    assert ((dislike >= 0) & (dislike <= 1)).all()


def test_values_of_known_policies(truth):
    users, items = truth.user_ids, truth.item_ids
    everything = np.tile(items, (50, 1))
    reward = truth.expected_reward(users, everything, DAY)
    np.testing.assert_allclose(truth.uniform_value(users, DAY), reward.mean(axis=1))
    np.testing.assert_allclose(truth.top_k_value(users, everything, DAY), reward.mean(axis=1))
    by_propensity = (truth.propensity(users, everything) * reward).sum(axis=1)
    np.testing.assert_allclose(truth.logging_value(users, DAY), by_propensity)


def test_the_oracle_is_the_sorted_truth(truth):
    reward = truth.expected_reward(truth.user_ids, np.tile(truth.item_ids, (50, 1)), DAY)
    expected = truth.item_ids[np.argsort(-reward, axis=1)[:, :5]]
    np.testing.assert_array_equal(truth.oracle_top_k(truth.user_ids, 5, DAY), expected)
    assert truth.oracle_top_k(truth.user_ids, 70, DAY).shape == (50, 70)


def test_chunks_change_nothing(truth, monkeypatch):
    days = np.linspace(0, 14, 50)
    pairs = truth.user_ids, np.tile(truth.item_ids[:9], (50, 1))
    before = truth.logging_value(truth.user_ids, DAY), truth.expected_reward(*pairs, days)
    monkeypatch.setattr(truth_module, "_CELLS_PER_CHUNK", 150)
    after = truth.logging_value(truth.user_ids, DAY), truth.expected_reward(*pairs, days)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-12)
    np.testing.assert_allclose(after[1], before[1], rtol=1e-12)


def test_monte_carlo_on_the_log_meets_the_exact_logging_value(simulated):
    """The mean reward of the logged exposures, each user weighed alike, estimates the value of the logging policy."""
    _, truth, log = simulated
    active = log[log.user_id.isin(log.user_id.value_counts().index[:300])]
    reward = truth.expected_reward(active.user_id, active.item_id.to_numpy()[:, None], truth.day_of(active.timestamp))
    rewards = active.assign(reward=reward[:, 0], exact=0.0)
    for day in range(15):  # the exact value on the middle of the event's own day; drift within a day is tiny
        rows = (truth.day_of(rewards.timestamp) // 1) == day
        ids = rewards.user_id[rows].to_numpy()
        if len(ids):
            unique, inverse = np.unique(ids, return_inverse=True)
            rewards.loc[rows, "exact"] = truth.logging_value(unique, day + 0.6)[inverse]
    difference = rewards.reward - rewards.exact
    assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(len(difference))


def test_there_is_headroom(simulated):
    """A learner must have something to gain: uniform < logging policy << oracle."""
    _, truth, log = simulated
    users = truth.user_ids[::10]
    best = truth.top_k_value(users, truth.oracle_top_k(users, 10, 13.0), 13.0).mean()
    popular = log.item_id.value_counts().index[:10].to_numpy()
    popularity = truth.top_k_value(users, np.tile(popular, (len(users), 1)), 13.0).mean()
    logging, uniform = truth.logging_value(users, 13.0).mean(), truth.uniform_value(users, 13.0).mean()
    assert uniform < popularity < logging < best - 0.3


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (lambda t: t.logging_value([1, 2, 3], 0.0), ("unknown_name", "user_ids")),
        (lambda t: t.expected_reward(t.user_ids[:1], [[10**12]], 0.0), ("unknown_name", "item_ids")),
        (lambda t: t.expected_reward(t.user_ids[:2], [t.item_ids[:3]], 0.0), ("wrong_shape", "item_ids")),
        (lambda t: t.expected_reward(t.user_ids[:2], t.item_ids[:2], 0.0), ("wrong_shape", "item_ids")),
        (lambda t: t.expected_reward(["u1"], [t.item_ids[:3]], 0.0), ("wrong_shape", "user_ids")),
        (lambda t: t.logging_value(t.user_ids, -1.0), ("wrong_shape", "day")),
        (lambda t: t.logging_value(t.user_ids, np.nan), ("wrong_shape", "day")),
        (lambda t: t.logging_value(t.user_ids, [1.0, 2.0]), ("wrong_shape", "day")),
        (lambda t: t.oracle_top_k(t.user_ids, 71, 0.0), ("out_of_range", "k")),
        (lambda t: t.top_k_value(t.user_ids[:1], np.empty((1, 0), int), 0.0), ("empty", "item_ids")),
    ],
)
def test_mistakes_are_named(truth, call, refusal):
    with refused(*refusal):
        call(truth)


def test_no_users_have_no_values(truth):
    assert truth.logging_value([], 0.0).shape == (0,)
    assert truth.oracle_top_k([], 3, 0.0).shape == (0, 3)


def test_other_versions_missing_and_damaged_files_are_refused(tmp_path):
    preferences = Preferences.draw(SimulationParameters(users=5, items=5, events=5))
    directory = tmp_path / "out" / "truth"
    write_simulation(preferences, tmp_path / "out")
    with refused("missing_file", "truth.json"):
        Truth.load(tmp_path / "nowhere")
    whole = (directory / "users.parquet").read_bytes()
    (directory / "users.parquet").write_bytes(whole[: len(whole) // 2])
    with refused("damaged", "users.parquet"):
        Truth.load(tmp_path / "out")
    content = json.loads((directory / "truth.json").read_text())
    (directory / "truth.json").write_text(json.dumps(content | {"format_version": 99}))
    with refused("old_format", "format_version"):
        Truth.load(directory)
