"""The variational factorization against dense NumPy, its evidence bound, and planted factors."""

import itertools
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.base.features import Categories, Category, Number
from recpo.base.types import Features, Histories
from recpo.rewards import graded, variational
from recpo.rewards.graded import FactorOptions, chunks, chunks_of, mean_grade
from recpo.rewards.prior_features import of_consumption, of_user_table
from recpo.rewards.selection import fit_factors
from recpo.rewards.variational import Fit, Gaussians, Prior, fit_items, moments, plain_factors
from tests.refusals import refused

RANK = 3
D = RANK + 1
# noise, ridge of the biases, validation error, sum of the items' biases, of the squares of the users' weights
BEFORE = [0.05069076766785855, 19.73819276348745, 0.059494783164626856, -2.6098294893745333, 164.74627700481898]


class Encoded(NamedTuple):
    """Features as prepared data give them."""

    features: Features

    def tensors(self):
        return self.features


class State(NamedTuple):
    """Everything that coordinate ascent changes."""

    users: Gaussians
    items: Gaussians
    of_users: Prior
    of_items: Prior
    noise: float


def update(mine, other, of, count, residual, prior, features, noise):
    """Posterior of one side, one user or item after the other: a regression on uncertain rows.

    A row is ``x = [factors, 1]``, an offset ``b``: ``E[x xᵀ]`` and ``E[x b]`` have the covariances of the other side.
    """
    result = Gaussians(np.zeros((count, D)), np.zeros((count, D, D)))
    for number in range(count):
        precision = np.linalg.inv(prior.covariance)
        matrix, right = precision.copy(), precision @ (prior.mean + prior.slopes.T @ features[number])
        for event in np.flatnonzero(mine == number):
            mean, covariance = other.mean[of[event]], other.covariance[of[event]]
            row = np.array([*mean[:-1], 1.0])
            of_rows, with_offset = np.zeros((D, D)), np.zeros(D)
            of_rows[:-1, :-1], with_offset[:-1] = covariance[:-1, :-1], covariance[:-1, -1]
            matrix += (np.outer(row, row) + of_rows) / noise
            right += (row * (residual[event] - mean[-1]) - with_offset) / noise
        result.covariance[number] = np.linalg.inv(matrix)
        result.mean[number] = result.covariance[number] @ right
    return result


def expected_error(state, user, item, residual):
    """``E[(residual - a · ã)^2]`` summed over the events, by the variance of a product of independent Gaussians."""
    total = 0.0
    for u, i, target in zip(user, item, residual, strict=True):
        p, q = state.users.mean[u], state.items.mean[i]
        cp, cq = state.users.covariance[u], state.items.covariance[i]
        mean = p[:-1] @ q[:-1] + p[-1] + q[-1]
        x, y = np.array([*q[:-1], 1.0]), np.array([*p[:-1], 1.0])
        variance = x @ cp @ x + y @ cq @ y + (cp[:-1, :-1] * cq[:-1, :-1]).sum()
        total += (target - mean) ** 2 + variance
    return total


def prior_of(side, present, features):
    """Ridge regression of the means with a free intercept; the slopes have the prior ``N(0, covariance / ridge)``."""
    means, columns = side.mean[present], features.shape[1]
    rows = np.c_[np.ones(len(means)), features[present]]
    ridge = variational.SLOPE_RIDGE * np.diag([0.0] + [1.0] * columns)
    weights = np.linalg.solve(rows.T @ rows + ridge, rows.T @ means)
    apart = means - rows @ weights
    covariance = (apart.T @ apart + weights.T @ ridge @ weights) / present.sum() + side.covariance[present].mean(0)
    return Prior(weights[0], covariance + 1e-9 * np.eye(D), weights[1:])


def evidence_bound(state, user, item, residual, present, features):
    """Lower bound of the log-evidence, up to a constant: expected log-likelihood less the two KL divergences.

    Plus the logarithm of the density of the slopes, up to what does not depend on them.
    """

    def divergence(side, prior, rows, features):
        precision = np.linalg.inv(prior.covariance)
        apart = side.mean[rows] - prior.mean - features[rows] @ prior.slopes
        quadratic = np.einsum("ni,ij,nj->n", apart, precision, apart)
        trace = np.einsum("ij,nji->n", precision, side.covariance[rows])
        logs = np.linalg.slogdet(prior.covariance)[1] - np.linalg.slogdet(side.covariance[rows])[1]
        slopes = variational.SLOPE_RIDGE * np.trace(prior.slopes @ precision @ prior.slopes.T)
        return 0.5 * ((trace + quadratic + logs - D).sum() + slopes)

    likelihood = (
        -0.5 * len(user) * np.log(state.noise) - 0.5 * expected_error(state, user, item, residual) / state.noise
    )
    everybody = np.ones(len(state.items.mean), bool)
    return (
        likelihood
        - divergence(state.users, state.of_users, present, features[0])
        - divergence(state.items, state.of_items, everybody, features[1])
    )


USER_SCHEMA = (Category("country", num_codes=5), Categories("tags", length=3, num_codes=6), Number("age"))


def user_table(count):
    """Features of ``count`` users, some missing, some unknown."""
    generator = np.random.default_rng(5)
    codes, lists = generator.integers(0, 5, (count, 1)), generator.permuted(np.tile(np.arange(6), (count, 1)), axis=1)
    lists = np.where(lists[:, :3] == 5, 0, lists[:, :3])
    numbers = np.where(generator.random((count, 1)) < 0.2, np.nan, generator.normal(size=(count, 1)))
    return Features(codes, (lists,), numbers.astype(np.float32), ()).map(torch.from_numpy)


def user_columns(table):
    """The same features as columns, one user after the other."""
    rows = []
    for code, tags, age in zip(table.codes[:, 0].tolist(), table.lists[0].tolist(), table.numbers[:, 0], strict=True):
        named = [tag for tag in tags if tag]
        row = np.zeros(5 + 6 + 1)
        row[code] = code > 0
        row[[5 + tag for tag in named]] = 1 / np.sqrt(max(1, len(named)))
        row[-1] = 0 if age.isnan() else age
        rows.append(row)
    return np.stack(rows)


def features_of(data, columns):
    """Consumption features and those of a user table; two more of the items, so that the sides differ in number."""
    found = of_consumption(partial(chunks, data), data.num_items, columns, 0)
    more = np.random.default_rng(4).normal(size=(data.num_items, 2 if columns else 0))
    users = of_user_table(USER_SCHEMA, user_table(data.manifest["num_users"]), 0) if columns else None
    return found._replace(items=np.concatenate([found.items, more], 1), users=users)


def of_users(user, item, given, count):
    """Features of the users, event by event, and those of the table."""
    summed = np.zeros((count, given.history.shape[1]))
    np.add.at(summed, user, given.history[item])
    found = summed / (np.bincount(user, minlength=count)[:, None] + 20)
    if given.users is None:
        return found
    components = user_columns(user_table(count)) @ given.users.table.axes
    np.testing.assert_allclose(given.users.rows, components, atol=1e-5)
    return np.concatenate([found, given.users.rows], 1)


@pytest.fixture(scope="module", params=[0, 3])
def dense(data, events, request):
    """Six sweeps, written down event by event, with the evidence bound after every half of one."""
    user, item, grade = events
    given = features_of(data, request.param)
    mean, _ = mean_grade(data)
    residual, count = grade - mean, data.manifest["num_users"]
    present = np.bincount(user, minlength=count) > 0
    start = np.random.default_rng(0).normal(0.0, 0.1, (data.num_items, RANK))
    noise = float(np.square(residual).mean())
    features = of_users(user, item, given, count), given.items
    other, prior = (Prior(np.zeros(D), noise / 2.0 * np.eye(D), np.zeros((x.shape[1], D))) for x in features)
    items = Gaussians(np.c_[start, np.zeros(len(start))], np.zeros((len(start), D, D)))
    state, bounds = State(None, items, other, prior, noise), []
    for sweep in range(6):
        users = update(user, state.items, item, count, residual, state.of_users, features[0], state.noise)
        state = state._replace(users=users)
        items = update(item, state.users, user, data.num_items, residual, state.of_items, features[1], state.noise)
        state = state._replace(items=items)
        bounds.append(evidence_bound(state, user, item, residual, present, features))
        if sweep >= variational.WARM_UP:
            everybody = np.ones(data.num_items, bool)
            learned = prior_of(users, present, features[0]), prior_of(items, everybody, features[1])
            state = state._replace(of_users=learned[0], of_items=learned[1])
        state = state._replace(noise=expected_error(state, user, item, residual) / len(user))
        bounds.append(evidence_bound(state, user, item, residual, present, features))
    return state, bounds, given


def fitted(data, features=None):
    mean, _ = mean_grade(data)
    return mean, fit_items(partial(chunks, data), data.num_items, mean, RANK, FactorOptions(sweeps=6), features)


def test_sweeps_are_the_dense_ones(data, dense):
    state, _, features = dense
    _, fit = fitted(data, features)
    np.testing.assert_allclose(fit.items.mean, state.items.mean, atol=1e-8)
    np.testing.assert_allclose(fit.items.covariance, state.items.covariance, atol=1e-8)
    np.testing.assert_allclose(fit.users.mean, state.of_users.mean, atol=1e-8)
    np.testing.assert_allclose(fit.users.covariance, state.of_users.covariance, atol=1e-8)
    np.testing.assert_allclose(fit.users.slopes, state.of_users.slopes, atol=1e-8)
    assert fit.noise == pytest.approx(state.noise, rel=1e-9)


def test_the_evidence_bound_never_falls(dense):
    _, bounds, _ = dense
    assert all(later >= before - 1e-6 for before, later in itertools.pairwise(bounds))
    assert bounds[-1] > bounds[0] + 1


def test_no_features_change_no_digit(data, monkeypatch):
    """Of the model as it was before priors had features, when there were four grades."""
    grades = (np.nan, 0.0, *np.repeat([0.125, 0.375, 0.625, 0.875], 4))
    for room in ("rewards.graded", "batches.slates"):
        monkeypatch.setattr(f"recpo.{room}.GRADES", grades)
    monkeypatch.setattr("recpo.rewards.factors._grades_on", lambda _: torch.tensor(grades, dtype=torch.float64))
    model = fit_factors(data, FactorOptions(ranks=(RANK,), sweeps=6, consumption=(0,)))
    assert not model.history_prior.any()
    known = [model.noise, model.bias_ridge, model.facts["tried"][0]["squared_error"]]
    known += [float(model.item_bias.double().sum()), float(model.user_factors.double().square().sum())]
    assert known == pytest.approx(BEFORE, rel=1e-6)


def test_a_training_user_is_the_posterior_of_the_fit_given_its_items(data, events, monkeypatch):
    """In the model's own units and in those of the stored factors: the same expected grades."""
    (user, item, grade), count = events, data.manifest["num_users"]
    monkeypatch.setattr(
        type(data), "user_features", lambda _, users: Encoded(user_table(count).rows(torch.tensor(users)))
    )
    monkeypatch.setattr(type(data), "features_checksum", lambda *_: "")
    features = features_of(data, 3)
    mean, fit = fitted(data, features)
    model = variational.finish(data, plain_factors(data, fit, mean, FactorOptions()))
    x = of_users(user, item, features, count)
    # the covariance of an item's factors counts in the fit, and in the stored model its diagonal
    exact = fit.items._replace(covariance=np.zeros_like(fit.items.covariance))
    stored = replace(model, factor_variance=torch.zeros_like(model.factor_variance))
    stored = variational.finish(data, stored)
    users = update(user, exact, item, count, grade - mean, fit.users, x, fit.noise)
    expected = mean + users.mean[:, :-1] @ fit.items.mean[:, :-1].T + users.mean[:, -1:] + fit.items.mean[:, -1]
    here = np.unique(user)
    np.testing.assert_allclose(stored.scores(stored.user_factors).numpy()[here], expected[here], atol=1e-4)
    assert np.abs(model.history_prior.numpy()).max() > 0.01
    # a user of whom only the table is known has its prior mean, in both models
    nobody = Histories(torch.zeros(count, 0).long(), torch.zeros(count).long(), torch.zeros(count, 0).long())
    found = model.scores(model.fold_in(nobody._replace(user=user_table(count)))).numpy()
    x = np.concatenate([np.zeros((count, features.history.shape[1])), x[:, features.history.shape[1] :]], 1)
    means = fit.users.mean + x @ fit.users.slopes
    expected = mean + means[:, :-1] @ fit.items.mean[:, :-1].T + means[:, -1:] + fit.items.mean[:, -1]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.ptp(found.mean(1)) > 0.001
    absent = np.setdiff1d(np.arange(count), here)
    assert len(absent)
    np.testing.assert_allclose(model.scores(model.user_factors).numpy()[absent], expected[absent], atol=1e-4)
    with refused("missing_value", "user_features"):
        model.fold_in(nobody)


def test_moments_are_those_of_draws():
    generator = np.random.default_rng(0)
    root = generator.normal(size=(2, D, D)) * 0.3
    side = Gaussians(generator.normal(size=(2, D)), root @ root.transpose(0, 2, 1))
    table = moments(side)
    first, second = np.triu_indices(D + 1)
    for number in range(2):
        draws = generator.multivariate_normal(side.mean[number], side.covariance[number], 200_000)
        draws = np.insert(draws, RANK, 1.0, axis=1)  # (factors, 1, bias)
        np.testing.assert_allclose(table.left[number], (draws.T @ draws / len(draws))[first, second], atol=0.02)
        np.testing.assert_array_equal(table.right[number], np.insert(side.mean[number], RANK, 1.0))


def test_a_model_in_units_of_the_prior_gives_the_same_grades(data):
    """Every user ``z`` of the prior has a ``z'`` with the same grades, and ``z'`` is standard normal."""
    mean, fit = fitted(data)
    model = plain_factors(data, fit, mean, FactorOptions())
    users = np.random.default_rng(1).multivariate_normal(fit.users.mean, fit.users.covariance, 500)
    grades = mean + users[:, :-1] @ fit.items.mean[:, :-1].T + users[:, -1:] + fit.items.mean[:, -1]
    rows = np.concatenate([model.item_factors.double().numpy(), np.ones((model.num_items, 1))], 1)
    target = (grades - model.mean - model.item_bias.double().numpy()).T
    own, *_ = np.linalg.lstsq(rows, target, rcond=None)
    np.testing.assert_allclose(rows @ own, target, atol=1e-5)
    scale = np.sqrt(fit.noise / model.bias_ridge)
    units = own / np.array([[1.0]] * RANK + [[scale]])
    np.testing.assert_allclose(np.cov(units), np.eye(D), atol=0.25)
    assert model.ridge == model.noise == fit.noise
    # the variance of a grade is that of the model as it was fitted
    row = np.concatenate([users[:, :-1], np.ones((500, 1))], 1)
    expected = np.einsum("ni,vij,nj->nv", row, fit.items.covariance, row)
    again = np.concatenate([own.T[:, :-1], np.ones((500, 1))], 1)
    covariance = model.item_covariance.double().numpy() * model.noise
    np.testing.assert_allclose(np.einsum("ni,vij,nj->nv", again, covariance, again), expected, rtol=1e-3, atol=1e-6)
    within = covariance[:, :-1, :-1].mean(0)
    np.testing.assert_allclose(within, np.diag(np.diag(within)), atol=1e-6)
    np.testing.assert_allclose(model.factor_variance, np.diagonal(covariance, 0, 1, 2)[:, :-1], rtol=1e-4)


class Planted(NamedTuple):
    """Prepared data as far as the fit reads it: factors of rank 2 and noise that are known."""

    num_items: int
    catalog_checksum: str
    manifest: dict
    users_checksum: str = ""
    feedback: None = None


@pytest.fixture
def planted(monkeypatch):
    generator = np.random.default_rng(3)
    users, items, count = 400, 60, 12_000
    user = np.sort(generator.integers(0, users, count))
    item = generator.integers(0, items, count)
    p, q = generator.normal(size=(users, 2)), generator.normal(size=(items, 2)) * 0.3
    grade = 0.5 + (p[user] * q[item]).sum(1) + 0.1 * generator.normal(size=count)
    monkeypatch.setattr(graded, "chunks", lambda *_, **__: chunks_of(user, item, grade, items))
    truth = p @ q.T
    return Planted(items, "", {"max_context": 200, "num_users": users}), grade.mean(), truth, (user, item)


def test_planted_factors_and_noise_are_found_for_any_largest_rank(planted):
    data, mean, truth, _ = planted
    for rank in (2, 6):
        fit = fit_items(partial(graded.chunks, data), data.num_items, mean, rank, FactorOptions(sweeps=40))
        assert fit.noise == pytest.approx(0.01, rel=0.08)
        model = variational.finish(data, plain_factors(data, fit, mean, FactorOptions()))
        found = model.scores(model.user_factors).numpy()
        assert np.square(found - 0.5 - truth).mean() < 0.002
        # factors that nothing supports have no size
        sizes = np.sort(model.item_factors.square().mean(0).numpy())[::-1]
        assert (sizes[2:] < 0.01 * sizes[0]).all()


def test_little_is_known_of_items_with_few_events(planted):
    data, mean, _, (_, item) = planted
    model = plain_factors(
        data, fit_items(partial(graded.chunks, data), data.num_items, mean, 2, FactorOptions()), mean, FactorOptions()
    )
    events = np.bincount(item, minlength=data.num_items)
    order = np.corrcoef(1 / events, model.factor_variance.mean(1).numpy())[0, 1]
    assert order > 0.7


def test_the_rank_is_chosen_on_the_validation_period_and_a_seed_is_a_model(data):
    options = {"ranks": (1, 3), "sweeps": 4}
    model = fit_factors(data, FactorOptions(**options))
    tried = model.facts["tried"]
    prior = min(tried[:2], key=lambda one: one["squared_error"])["consumption"]
    assert [(one["rank"], one["consumption"]) for one in tried] == [(1, 0), (1, 16), (3, prior)]
    best = min(tried, key=lambda one: one["squared_error"])
    assert model.facts["chosen"] == best
    assert model.rank == best["rank"]
    assert bool(model.history_prior.any()) == bool(best["consumption"])
    assert torch.equal(model.item_factors, fit_factors(data, FactorOptions(**options)).item_factors)
    assert model.lower_bound == 1.0
    without = FactorOptions(ranks=(1,), sweeps=2, uncertainty=False)
    assert fit_factors(data, without).item_covariance is None


def test_grades_that_are_all_equal_fit(data, monkeypatch):
    parts = chunks_of(np.repeat(np.arange(9), 4), np.tile(np.arange(4), 9), np.full(36, 0.375), 4)
    kept = list(parts)
    monkeypatch.setattr(graded, "chunks", lambda *_, **__: iter(kept))
    small = Planted(4, "", {"max_context": 9, "num_users": 9})
    fit: Fit = fit_items(partial(graded.chunks, small), small.num_items, 0.375, 2, FactorOptions())
    model = plain_factors(small, fit, 0.375, FactorOptions())
    nobody = Histories(torch.zeros(1, 2, dtype=torch.long), torch.tensor([0]), torch.zeros(1, 2, dtype=torch.long))
    np.testing.assert_allclose(model.scores(model.fold_in(nobody)), 0.375, atol=1e-3)


def test_averages_are_factors_of_rank_0(data, events):
    """Every bias is the mean of what is left, shrunk by a variance that is learned."""
    user, item, grade = events
    mean, _ = mean_grade(data)
    fit = fit_items(partial(graded.chunks, data), data.num_items, mean, 0, FactorOptions(sweeps=6))
    model = variational.finish(data, plain_factors(data, fit, mean, FactorOptions()))
    known = grade - model.mean - model.item_bias.double().numpy()[item]
    count = data.manifest["num_users"]
    sums, counts = np.bincount(user, known, count), np.bincount(user, minlength=count)
    np.testing.assert_allclose(model.user_factors[:, 0], sums / (counts + model.bias_ridge), atol=1e-5)
    bias = model.user_factors[:, -1:] + model.mean + model.item_bias
    torch.testing.assert_close(model.scores(model.user_factors), bias)
    assert model.item_covariance.shape[1:] == (1, 1)
    nobody = Histories(torch.zeros(1, 2).long(), torch.tensor([0]), torch.zeros(1, 2).long())
    torch.testing.assert_close(model.scores(model.fold_in(nobody))[0], model.mean + model.item_bias)
    assert model.recommend(nobody, 5).item_ids.shape == (1, 5)
    chosen = fit_factors(data, FactorOptions(method="als", ranks=(0,), ridges=(4.0,)))
    assert chosen.rank == 0
    assert chosen.item_bias.std() > 0.01


def test_factors_that_a_learned_prior_would_prune_are_kept_by_learning_it_later(tmp_path):
    """Thumbs of users whose tastes are strong, but of whom little is known: 600 users, 14 training events each."""
    draw, users, items, events = np.random.default_rng(0), 600, 60, 20
    of_items, of_users = draw.normal(size=(items, 5)), 0.5 * draw.normal(size=(users, 5))
    liked = 1 / (1 + np.exp(-(of_users @ of_items.T + 0.7 * draw.normal(size=items))))
    user, item = np.repeat(np.arange(users), events), np.concatenate([draw.permutation(items)[:events] for _ in liked])
    thumbs = (draw.random(users * events) < liked[user, item]).astype(int)
    columns = {"user_id": user, "item_id": item, "timestamp": np.tile(np.arange(events), users), "label": thumbs}
    pd.DataFrame(columns).to_parquet(tmp_path / "log.parquet")
    split, order = recpo.LeaveLastOut(valid_share=0.2, test_share=0.1), recpo.Columns(time_unit="order")
    options = {"label": recpo.BinaryColumn(), "columns": order, "split": split, "progress": False}
    data = recpo.prepare(tmp_path / "log.parquet", tmp_path / "prepared", **options)
    model = fit_factors(data, FactorOptions())
    *pruned, late = model.facts["tried"]
    assert [(one["rank"], one["warm_up"]) for one in pruned] == [(8, 3), (8, 3), (16, 3), (0, 3)]
    errors = [one["squared_error"] for one in pruned]
    assert errors[0] == pytest.approx(errors[2], rel=1e-2) == pytest.approx(errors[3], rel=1e-2)  # as without factors
    assert (late["rank"], late["warm_up"]) == (8, variational.LATE_WARM_UP)
    assert late["squared_error"] < 0.99 * min(errors)
    assert model.facts["chosen"] == late
    assert not variational.is_pruned(model)
    again = fit_factors(data, FactorOptions().of(model))
    assert len(again.facts["tried"]) == 1
    assert torch.equal(again.item_factors, model.item_factors)
