"""The additive reward model: recovers effects, shrinks rare ones, and does not depend on chunks."""

import numpy as np
import pytest
import torch

from recpo.evaluation.off_policy.estimators import AdditiveRewardModel, RewardedExposures
from tests.refusals import refused


def exposures(users=300, items=50, rows=40_000, item_spread=0.3, user_spread=0.2, noise=0.5, seed=0):
    rng = np.random.default_rng(seed)
    of_user, of_item = user_spread * rng.standard_normal(users), item_spread * rng.standard_normal(items + 1)
    user, item = rng.integers(0, users, rows), rng.integers(1, items + 1, rows)
    reward = 0.4 + of_user[user] + of_item[item] + noise * rng.standard_normal(rows)
    return RewardedExposures(user, item, reward), of_user, of_item


def fit(chunk, chunks=1, users=300, items=50):
    def parts():
        for rows in np.array_split(np.arange(len(chunk.users)), chunks):
            yield RewardedExposures(*(column[rows] for column in chunk))

    return AdditiveRewardModel.fit(parts, num_users=users, num_items=items)


def test_effects_are_recovered():
    chunk, of_user, of_item = exposures()
    model = fit(chunk)
    truth = 0.4 + of_user[:, None] + of_item[None, 1:]
    found = model(torch.arange(300), torch.arange(1, 51).expand(300, -1)).numpy()
    assert np.abs(found - truth).mean() < 0.05
    assert np.corrcoef(found.ravel(), truth.ravel())[0, 1] > 0.98


def test_chunks_do_not_matter_and_unknown_rewards_are_left_out():
    chunk, _, _ = exposures(rows=2000)
    holes = np.arange(2000) % 5 == 0
    with_holes = chunk._replace(reward=np.where(holes, np.nan, chunk.reward))
    known = RewardedExposures(*(column[~holes] for column in chunk))
    a, b = fit(with_holes, chunks=9), fit(known)
    torch.testing.assert_close(a.item_effect, b.item_effect)
    torch.testing.assert_close(a.user_effect, b.user_effect)
    assert a.mean == pytest.approx(b.mean)


def test_pure_noise_is_shrunk_to_nothing_and_rare_items_more_than_others():
    noise, _, _ = exposures(item_spread=0, user_spread=0, rows=5000)
    assert fit(noise).item_effect.abs().max() < 0.1
    chunk, _, _ = exposures(rows=20_000)
    rare = RewardedExposures(
        np.append(chunk.users, 0), np.append(chunk.items, 51), np.append(chunk.reward, chunk.reward.mean() + 5)
    )
    assert 0 < fit(rare, items=51).item_effect[51] < 2.5


def test_who_and_what_was_never_seen_has_no_effect():
    chunk, _, _ = exposures()
    model = fit(chunk, users=301, items=60)
    found = model(torch.tensor([300, 999]), torch.tensor([[60], [60]]))
    torch.testing.assert_close(found, torch.full((2, 1), model.mean, dtype=torch.float64))


def test_nothing_to_learn_from_is_refused():
    with refused("empty", "reward"):
        fit(RewardedExposures(np.zeros(2, int), np.ones(2, int), np.full(2, np.nan)))
