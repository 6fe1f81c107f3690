"""Alternating least squares with biases against dense NumPy, and how the rank and the ridge are chosen."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from recpo.base.feedback import GRADES
from recpo.base.types import Histories
from recpo.rewards import graded
from recpo.rewards.factors import Factors
from recpo.rewards.graded import (
    FactorOptions,
    Items,
    chunks,
    first_factors,
    mean_grade,
    of_some_users,
    sweep,
    user_weights,
)
from recpo.rewards.selection import fit_factors, validation_batches, validation_errors
from tests.refusals import refused

RIDGE = 1.5


def solve_each(rows, targets, of, count, ridge):
    """One dense ridge regression after the other."""
    weights = np.zeros((count, rows.shape[1]))
    for number in range(count):
        mine = of == number
        matrix = rows[mine].T @ rows[mine] + ridge * np.eye(rows.shape[1])
        weights[number] = np.linalg.solve(matrix, rows[mine].T @ targets[mine])
    return weights


def dense_sweep(events, items, mean, ridge, num_users):
    user, item, grade = events
    users = solve_each(items.rows[item], grade - mean - items.bias[item], user, num_users, ridge)
    one = np.c_[users[:, :-1], np.ones(num_users)]
    weights = solve_each(one[user], grade - mean - users[user, -1], item, len(items.bias), ridge)
    return users, Items(np.c_[weights[:, :-1], np.ones(len(weights))], weights[:, -1])


def objective(events, users, items, mean, ridge):
    user, item, grade = events
    error = grade - mean - items.bias[item] - (users[user] * items.rows[item]).sum(1)
    penalty = (users**2).sum() + (items.rows[:, :-1] ** 2).sum() + (items.bias**2).sum()
    return (error**2).sum() + ridge * penalty


def first_items(count, rank, seed):
    return Items(np.pad(first_factors(count, rank, seed), ((0, 0), (0, 1)), constant_values=1.0), np.zeros(count))


def test_a_sweep_is_the_dense_one(data, events):
    mean, count = mean_grade(data)
    assert count == len(events[0])
    assert mean == pytest.approx(events[2].mean())
    items = first_items(data.num_items, 3, seed=1)
    users, expected = dense_sweep(events, items, mean, RIDGE, data.manifest["num_users"])
    got = sweep(chunks(data), items, mean, RIDGE)
    np.testing.assert_allclose(got.rows, expected.rows, atol=1e-10)
    np.testing.assert_allclose(got.bias, expected.bias, atol=1e-10)
    for chunk in chunks(data):
        np.testing.assert_allclose(user_weights(chunk, items, mean, RIDGE), users[chunk.users], atol=1e-10)


def test_the_objective_never_rises(data, events):
    mean, _ = mean_grade(data)
    items, values = first_items(data.num_items, 4, seed=0), []
    for _ in range(5):
        users, after = dense_sweep(events, items, mean, RIDGE, data.manifest["num_users"])
        values += [objective(events, users, items, mean, RIDGE), objective(events, users, after, mean, RIDGE)]
        items = sweep(chunks(data), items, mean, RIDGE)
    assert all(later <= before + 1e-9 for before, later in itertools.pairwise(values))
    assert values[-1] < 0.99 * values[1]


def test_small_chunks_and_many_shards_give_the_same_model(many, factors, monkeypatch):
    assert many.num_shards("train") > 5
    monkeypatch.setattr(graded, "CHUNK_EVENTS", 100)
    assert max(len(chunk.grade) for chunk in chunks(many)) < 400
    again = fit_factors(many, FactorOptions(method="als", ranks=(3,), ridges=(2.0,), sweeps=3))
    for name, tensor in factors.tensors.items():
        torch.testing.assert_close(again.tensors[name], tensor, atol=1e-6, rtol=1e-5)
    assert again.noise == pytest.approx(factors.noise)


@pytest.mark.parametrize("method", ["als", "variational"])
def test_a_small_period_is_read_once_for_all_sweeps(data, method, monkeypatch):
    read, reads = type(data).train_columns, []
    monkeypatch.setattr(type(data), "train_columns", lambda self, names: reads.append(names) or read(self, names))
    options = FactorOptions(method=method, ranks=(3,), ridges=(2.0,), consumption=(0,), sweeps=4)
    kept, fewest = fit_factors(data, options), len(reads)
    monkeypatch.setattr(graded, "KEPT_EVENTS", 0)
    again = fit_factors(data, options)
    of_noise = method == "variational"  # its first value is the variance of the grades
    assert len(reads) - fewest == fewest + options.sweeps - 1 + of_noise
    for name, tensor in kept.tensors.items():
        assert torch.equal(again.tensors[name], tensor)


@pytest.mark.parametrize("method", ["als", "variational"])
def test_a_fold_in_of_all_training_events_is_the_fitted_user(data, factors, method):
    if method == "variational":
        factors = fit_factors(data, FactorOptions(method=method, ranks=(3,), sweeps=4))
    assert factors.user_factors is not None
    every = Factors(**{**vars(factors), "max_history": 10_000})
    shard = data.load("train", 0)
    for user in range(0, len(shard.offsets) - 1, 9):
        part = slice(shard.offsets[user], shard.offsets[user + 1])
        items, levels = torch.from_numpy(shard.item_index[part]), torch.from_numpy(shard.feedback[part])
        folded = every.fold_in(Histories(items[None], torch.tensor([len(items)]), levels[None]))[0]
        torch.testing.assert_close(folded, factors.user_factors[shard.user_index[part.start]], atol=1e-5, rtol=1e-4)


def test_noise_and_covariance_are_those_of_the_fitted_model(data, factors, events):
    user, item, grade = events
    users, rank = factors.user_factors.double().numpy(), factors.rank
    predicted = factors.grades(factors.user_factors[user], torch.from_numpy(item)[:, None] + 1)[:, 0].numpy()
    assert factors.noise == pytest.approx(np.square(grade - predicted).mean(), rel=1e-5)
    one = np.c_[users[:, :-1], np.ones(len(users))]
    for number in (0, 17, 59):
        rows = one[user[item == number]]
        expected = np.linalg.inv(rows.T @ rows + factors.ridge * np.eye(rank + 1))
        np.testing.assert_allclose(factors.item_covariance[number], expected, atol=1e-5)


def test_one_seed_gives_one_model_and_another_seed_another(data, factors):
    options = {"method": "als", "ranks": (3,), "ridges": (2.0,), "sweeps": 3}
    assert torch.equal(fit_factors(data, FactorOptions(**options)).item_factors, factors.item_factors)
    other = fit_factors(data, FactorOptions(**options, seed=1))
    assert not torch.allclose(other.item_factors, factors.item_factors, atol=1e-3)


def test_the_smallest_error_on_the_validation_period_is_chosen(data):
    options = FactorOptions(method="als", ranks=(1, 6), ridges=(0.1, 4.0, 50.0), sweeps=2)
    chosen = fit_factors(data, options)
    tried = chosen.facts["tried"]
    assert [(one["rank"], one["ridge"]) for one in tried] == [(r, x) for r in (1, 6) for x in (0.1, 4.0, 50.0)]
    best = min(tried, key=lambda one: one["squared_error"])
    assert (chosen.rank, chosen.ridge) == (best["rank"], best["ridge"])
    assert (options.of(chosen).ranks, options.of(chosen).ridges) == ((best["rank"],), (best["ridge"],))
    for one in tried[:2]:
        alone = fit_factors(data, FactorOptions(method="als", ranks=(one["rank"],), ridges=(one["ridge"],), sweeps=2))
        assert alone.facts["tried"] == [one]
        assert by_hand(data, alone) == pytest.approx(one["squared_error"], rel=1e-5)
    json.dumps(chosen.facts)


def by_hand(data, model):
    """Squared error on the validation events, one event at a time."""
    squared = []
    for batch in validation_batches(data, model.max_history):
        users = model.scores(model.fold_in(batch.feedback.histories))
        slates = batch.feedback.slates
        for row, place in slates.mask.nonzero().tolist():
            grade = float(slates.grade[row, place])
            if grade == grade:
                squared.append((float(users[row, slates.item_ids[row, place] - 1]) - grade) ** 2)
    return sum(squared) / len(squared)


def test_models_of_a_larger_log_are_tried_on_some_users_and_the_best_is_fitted_to_all(data, events):
    options = FactorOptions(ranks=(3, 1), sweeps=3)
    few, every = fit_factors(data, replace(options, selection_events=len(events[0]) // 3)), fit_factors(data, options)
    again = fit_factors(data, options.of(few))  # one model, which is fitted to all events
    for name, tensor in few.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name
    errors = [[one["squared_error"] for one in model.facts["tried"][:2]] for model in (few, every)]
    assert errors[0] != errors[1]
    assert few.facts["events"] == every.facts["events"]


def test_some_users_of_a_chunk_keep_all_of_their_events(data):
    (whole,) = chunks(data)
    kept = np.arange(1, len(whole.users), 3)
    some = whole.of(kept)
    assert some.users.tolist() == whole.users[kept].tolist()
    for row, place in enumerate(kept):
        own, all_of = (slice(*one.starts[at : at + 2]) for one, at in ((some, row), (whole, place)))
        assert some.items[some.item[own]].tolist() == whole.items[whole.item[all_of]].tolist()
        assert some.grade[own].tolist() == whole.grade[all_of].tolist()
    assert set(some.item) == set(range(len(some.items)))
    (third,) = of_some_users(lambda: iter([whole]), 1 / 3)
    assert len(third.users) == round(len(whole.users) / 3)
    assert set(third.users) <= set(whole.users)
    assert third.users[0] == whole.users[0]


def test_a_log_without_validation_events_leaves_nothing_to_choose(data, factors, monkeypatch):
    monkeypatch.setattr("recpo.rewards.selection.validation_batches", lambda *_: iter(()))
    assert validation_errors(data, [factors]) == ([0.0], 0)
    with refused("empty"):
        fit_factors(data, FactorOptions(method="als", ranks=(1, 2), ridges=(1.0,), sweeps=1))
    alone = fit_factors(data, FactorOptions(method="als", ranks=(2,), ridges=(1.0,), sweeps=1))
    assert alone.facts["tried"] == [
        {
            "rank": 2,
            "ridge": 1.0,
            "consumption": 0,
            "item_features": False,
            "user_features": False,
            "user_factors": 0,
            "item_factors": 0,
            "squared_error": None,
        }
    ]
    # unless it is asked for, a prior from consumption is no reason to refuse
    assert fit_factors(data, FactorOptions(ranks=(2,), sweeps=1)).facts["chosen"]["consumption"] == 0
    with refused("empty"):
        fit_factors(data, FactorOptions(ranks=(2,), sweeps=1, consumption=(0, 4)))


def test_a_period_has_the_grades_of_its_own_events(data):
    expected = []
    for batch in validation_batches(data, 5):
        known = batch.feedback.slates.grade[batch.feedback.slates.mask]
        expected += known[~known.isnan()].tolist()
    found = np.concatenate([chunk.grade for chunk in chunks(data, period="valid")])
    assert sorted(found) == pytest.approx(sorted(expected))
    mean, count = mean_grade(data, "valid")
    assert (mean, count) == (pytest.approx(np.mean(expected)), len(expected))
    model = fit_factors(data, FactorOptions(period="valid", sweeps=4))
    assert (model.rank, model.facts["events"]) == (8, count)
    assert model.facts["tried"] == [
        {
            "rank": 8,
            "ridge": None,
            "consumption": 0,
            "item_features": False,
            "user_features": False,
            "user_factors": 0,
            "item_factors": 0,
            "warm_up": 3,
            "squared_error": None,
        }
    ]
    here = np.unique(np.concatenate([chunk.users for chunk in chunks(data, period="valid")]))
    elsewhere = np.setdiff1d(np.arange(len(model.user_factors)), here)
    assert not model.user_factors[elsewhere].any()
    assert model.user_factors[here].any(1).all()


def test_a_log_without_grades_is_refused(data, monkeypatch):
    monkeypatch.setattr(graded, "GRADES", (float("nan"),) * len(GRADES))
    with refused("empty", str(data.root)):
        fit_factors(data, FactorOptions(method="als", ranks=(2,), ridges=(1.0,), sweeps=1))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"method": "svd"}, ("unknown_name", "method")),
        ({"ranks": ()}, ("empty", "ranks")),
        ({"ranks": (-1,)}, ("out_of_range", "ranks")),
        ({"ridges": ()}, ("empty", "ridges")),
        ({"ridges": (1.0, 0.0)}, ("out_of_range", "ridges")),
        ({"ridges": (float("nan"),)}, ("out_of_range", "ridges")),
        ({"sweeps": 0}, ("out_of_range", "sweeps")),
        ({"max_history": 0}, ("out_of_range", "max_history")),
        ({"period": "night"}, ("unknown_name", "period")),
        ({"period": "valid", "method": "als"}, ("conflicting_options", "period")),
        ({"period": "valid", "ranks": (2, 4)}, ("conflicting_options", "period")),
        ({"period": "valid", "consumption": (0, 4)}, ("conflicting_options", "period")),
        ({"method": "als", "consumption": (4,)}, ("conflicting_options", "consumption")),
        ({"method": "als", "item_features": True}, ("conflicting_options", "item_features")),
        ({"method": "als", "warm_up": 3}, ("conflicting_options", "warm_up")),
        ({"consumption": ()}, ("empty", "consumption")),
        ({"consumption": (-1,)}, ("out_of_range", "consumption")),
    ],
)
def test_options_out_of_range_are_refused(options, refusal):
    with refused(*refusal):
        FactorOptions(**options)


def test_one_thread_holds_for_every_library():
    def threads():
        libraries = [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]
        return [torch.get_num_threads(), *libraries]

    before = threads()
    assert len(before) > 1
    with graded.one_thread():
        assert set(threads()) == {1}
    assert threads() == before
