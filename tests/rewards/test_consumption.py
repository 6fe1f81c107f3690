"""Features of consumption against a dense decomposition, and what a prior from them is worth."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import recpo
from recpo.base.types import Histories
from recpo.ops.linear_algebra import damped_mean
from recpo.rewards import graded, selection
from recpo.rewards.consumption import consumed, user_features
from recpo.rewards.factors import Factors
from recpo.rewards.graded import FactorOptions, chunks, chunks_of
from recpo.rewards.selection import fit_factors


def dense_features(user, item, num_items, columns):
    """Vectors of the items and features of the users, from all singular vectors of the exposure matrix."""
    shown = np.zeros((user.max() + 1, num_items))
    shown[user, item] = 1.0
    of_users, of_items = (1 / np.sqrt(shown.sum(axis) + 20) for axis in (1, 0))
    _, _, right = np.linalg.svd(of_users[:, None] * shown * of_items)
    vectors = of_items[:, None] * right[1 : columns + 1].T
    vectors *= np.sign(vectors[np.abs(right[1 : columns + 1]).argmax(1), np.arange(columns)])
    counts = np.zeros(shown.shape)
    np.add.at(counts, (user, item), 1.0)
    present = counts.any(1)
    return vectors, (counts @ vectors / (counts.sum(1, keepdims=True) + 20))[present]


@pytest.fixture(scope="module")
def tastes():
    """Events of users who mostly choose within one of four genres, some of them repeatedly, and random grades."""
    generator = np.random.default_rng(0)
    user = np.repeat(np.arange(300), 20)
    item = np.where(generator.random(6000) < 0.7, 15 * (user % 4) + generator.integers(0, 15, 6000), 0)
    item = np.where(item > 0, item, generator.integers(0, 60, 6000))
    return user, item, generator.random(6000)


def test_features_are_those_of_a_dense_decomposition(tastes, monkeypatch):
    user, item, grade = tastes
    vectors, own = dense_features(user, item, 60, 3)
    monkeypatch.setattr(graded, "CHUNK_EVENTS", 100)
    parts = list(chunks_of(user, item, grade, 60))
    assert len(parts) > 50
    found = consumed(lambda: parts, 60, 3, seed=0)
    np.testing.assert_allclose(found.items, vectors / np.sqrt(np.square(vectors).mean(0)), atol=1e-4)
    np.testing.assert_allclose(found.history, vectors / np.sqrt(np.square(own).mean(0)), rtol=1e-3, atol=1e-3)
    of_users = np.concatenate([user_features(chunk, found.history) for chunk in parts])
    np.testing.assert_allclose(of_users, own / np.sqrt(np.square(own).mean(0)), atol=1e-3)
    np.testing.assert_allclose(np.square(of_users).mean(0), 1.0)
    # a genre is found, whatever the grades are
    genre = np.arange(60) // 15
    within = np.stack([found.items[genre == one].mean(0) for one in range(4)])
    assert np.square(within).sum() > 0.8 * 3 * 4
    again = consumed(lambda: parts, 60, 3, seed=0)
    assert np.array_equal(found.items, again.items)


def test_a_damped_mean_is_the_same_in_torch_and_numpy(tastes):
    user, item, grade = tastes
    chunk = next(iter(chunks_of(user[:200], item[:200], grade[:200], 60)))
    table = np.random.default_rng(1).normal(size=(60, 4))
    rows = torch.from_numpy(table[item[:200]].reshape(10, 20, 4))
    known = torch.ones(10, 20, dtype=torch.bool)
    np.testing.assert_allclose(damped_mean(rows, known), user_features(chunk, table))
    by_hand = rows[0, [0, 3]].sum(0) / 22
    some = torch.zeros(1, 20, dtype=torch.bool)
    some[0, [0, 3]] = True
    torch.testing.assert_close(damped_mean(rows[:1], some)[0], by_hand)
    assert not damped_mean(rows[:1], torch.zeros_like(some)).any()


def test_no_more_columns_than_there_are_singular_vectors():
    user, item = np.repeat(np.arange(6), 2), np.array([0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0])
    grade = np.ones(12)

    def of(items, count):
        parts = list(chunks_of(user, items, grade, count))
        return consumed(lambda: parts, count, 16, seed=0)

    assert of(item, 3).items.shape == of(item, 3).history.shape == (3, 2)
    assert of(np.zeros(12, int), 1).items.shape == (1, 0)
    # all users were shown the same: popularity explains everything
    assert of(np.tile([0, 1], 6), 4).items.shape == (4, 0)
    assert not of(item, 5).items[3:].any()  # nothing is known of items without events


@pytest.fixture(scope="module")
def accepted(data):
    return fit_factors(data, FactorOptions(ranks=(3,), sweeps=6, consumption=(4,)))


def test_a_history_moves_the_prior_mean_of_its_user(accepted):
    """Where nothing is known of the grades of an item, its event still says something: who sees it likes what."""
    ids, levels = torch.tensor([[7, 9, 11]]), torch.tensor([[3, 3, 3]])
    some = Histories(ids, torch.tensor([3]), levels)
    mean = accepted.history_prior[ids[0] - 1].double().sum(0) / 23
    vague = replace(accepted, ridge=1e9, bias_ridge=1e9)
    torch.testing.assert_close(vague.fold_in(some)[0].double(), mean, atol=1e-6, rtol=1e-4)
    unknown = some._replace(feedback=torch.zeros_like(levels))
    assert not accepted.fold_in(unknown).any()
    last = replace(accepted, max_history=2)
    torch.testing.assert_close(
        last.fold_in(some), accepted.fold_in(Histories(ids[:, 1:], torch.tensor([2]), levels[:, 1:]))
    )


def test_a_prior_from_consumption_is_kept_on_disk(accepted, tmp_path):
    accepted.save(tmp_path / "factors")
    opened = Factors.open(tmp_path / "factors")
    assert accepted.history_prior.any()
    assert torch.equal(opened.history_prior, accepted.history_prior)
    with pytest.raises(recpo.RecpoError):
        replace(accepted, history_prior=torch.zeros(3, 3))


@pytest.mark.parametrize(("errors", "chosen"), [((0.2, 0.1), 4), ((0.1, 0.2), 0), ((0.1, 0.1), 0)])
def test_the_validation_period_accepts_or_refuses_the_prior(data, monkeypatch, errors, chosen):
    left = iter(errors)
    monkeypatch.setattr(selection, "validation_errors", lambda _, models: ([next(left) for _ in models], 10))
    model = fit_factors(data, FactorOptions(ranks=(2,), sweeps=5, consumption=(0, 4)))
    assert [one["consumption"] for one in model.facts["tried"]] == [0, 4]
    assert [one["squared_error"] for one in model.facts["tried"]] == list(errors)
    assert model.facts["consumption"] == chosen
    assert bool(model.history_prior.any()) == bool(chosen)


def test_held_out_errors_fall_where_exposures_carry_taste(tmp_path):
    """The small world: four events per item, too few for factors without a prior."""
    world = recpo.simulate(tmp_path / "world", world="small", seed=0)
    data = recpo.prepare(world.log, tmp_path / "prepared")
    model = fit_factors(data, FactorOptions(ranks=(8,)))
    without, with_it = (one["squared_error"] for one in model.facts["tried"])
    assert model.facts["consumption"] == 16
    assert with_it < without - 0.001  # measured: .0752 and .0737
    parts = partial(chunks, data)
    assert consumed(parts, data.num_items, 16, 0).items.shape == (data.num_items, 16)
