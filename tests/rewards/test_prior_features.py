"""Features of consumption against a dense decomposition, and what a prior from them is worth."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.base.features import Categories, Category, Number, Vector
from recpo.base.types import Features, Histories
from recpo.log.feature_columns import FeatureColumns
from recpo.log.schema import Columns
from recpo.log.shaping import BinaryColumn
from recpo.ops.small_systems import damped_mean
from recpo.rewards import graded, prior_features, selection
from recpo.rewards.factors import Factors
from recpo.rewards.graded import FactorOptions, chunks, chunks_of
from recpo.rewards.prior_features import of_consumption, of_table, user_features
from recpo.rewards.selection import fit_factors
from tests.refusals import refused


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
    found = of_consumption(lambda: parts, 60, 3, seed=0)
    np.testing.assert_allclose(found.items, vectors / np.sqrt(np.square(vectors).mean(0)), atol=1e-4)
    np.testing.assert_allclose(found.history, vectors / np.sqrt(np.square(own).mean(0)), rtol=1e-3, atol=1e-3)
    of_users = np.concatenate([user_features(chunk, found.history) for chunk in parts])
    np.testing.assert_allclose(of_users, own / np.sqrt(np.square(own).mean(0)), atol=1e-3)
    np.testing.assert_allclose(np.square(of_users).mean(0), 1.0)
    # a genre is found, whatever the grades are
    genre = np.arange(60) // 15
    within = np.stack([found.items[genre == one].mean(0) for one in range(4)])
    assert np.square(within).sum() > 0.8 * 3 * 4
    again = of_consumption(lambda: parts, 60, 3, seed=0)
    assert np.array_equal(found.items, again.items)


def test_tables_in_which_nothing_differs_say_nothing(tastes):
    parts = list(chunks_of(*tastes, 60))
    kind, genres = Category("kind", num_codes=4), Categories("genres", num_codes=6)
    lists = torch.tensor([1, 3, 4]).expand(60, 3)  # shares of 1 / sqrt(3), whose products are rounded
    features = Features(torch.ones(60, 1, dtype=torch.int64), [lists], torch.zeros(60, 0), [])
    assert not of_table(lambda: parts, (kind, genres), features, seed=0).items.any()
    assert prior_features.of_user_table((kind, genres), features, seed=0) is None


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
        return of_consumption(lambda: parts, count, 16, seed=0)

    assert of(item, 3).items.shape == of(item, 3).history.shape == (3, 2)
    assert of(np.zeros(12, int), 1).items.shape == (1, 0)
    # all users were shown the same: popularity explains everything
    assert of(np.tile([0, 1], 6), 4).items.shape == (4, 0)
    assert not of(item, 5).items[3:].any()  # nothing is known of items without events


def test_features_of_a_table_are_its_principal_components(tastes, monkeypatch):
    user, item, grade = tastes
    generator = np.random.default_rng(2)
    schema = [
        Category("kind", num_codes=5),
        Categories("tags", length=3, num_codes=6),
        Number("age"),
        Vector("text", width=4),
    ]
    codes, lists = generator.integers(0, 5, (60, 1)), generator.integers(0, 6, (60, 3))
    lists[:, 1], lists[:, 2] = np.where(lists[:, 1] == lists[:, 0], 0, lists[:, 1]), 0
    numbers, text = generator.normal(size=(60, 1)), 9 * generator.normal(size=(60, 4))
    numbers[3], text[5] = np.nan, np.nan
    columns = [np.eye(5)[codes[:, 0]] * (codes > 0)]
    tags = np.zeros((60, 6))
    for row, listed in enumerate(lists):
        tags[row, listed[listed > 0]] = 1 / np.sqrt(max(1, (listed > 0).sum()))
    known = np.nan_to_num(text)
    columns += [tags, np.nan_to_num(numbers), known / np.sqrt(np.square(known).sum(1).mean())]
    dense = np.concatenate(columns, 1)
    left, sizes, _ = np.linalg.svd(dense - dense.mean(0), full_matrices=False)
    kept = sizes > 1e-6
    expected = (left * sizes)[:, kept] / (sizes[0] / np.sqrt(60))

    given = Features(codes, (lists,), numbers, (text,)).map(torch.from_numpy)
    parts = list(chunks_of(user, item, grade, 60))
    found = of_table(lambda: parts, schema, given, 0)
    assert found.items.shape == expected.shape
    # components whose sign is a convention
    signs = np.sign((found.items * expected).sum(0))
    np.testing.assert_allclose(found.items * signs, expected, atol=1e-6)
    ratio = found.history / found.items
    np.testing.assert_allclose(ratio, ratio[0, 0])
    of_users = np.concatenate([user_features(chunk, found.history) for chunk in parts])
    assert np.square(of_users).mean(0).max() == pytest.approx(1.0)
    nothing = given.map(torch.zeros_like)
    assert of_table(lambda: parts, schema, nothing, 0).items.shape == (60, 0)
    monkeypatch.setattr(prior_features, "_ROWS", 7)
    pieces = of_table(lambda: parts, schema, given, 0)
    np.testing.assert_allclose(pieces.items, found.items, atol=1e-9)
    monkeypatch.setattr(prior_features, "TABLE_COLUMNS", 3)
    largest = of_table(lambda: parts, schema, given, 0).items
    np.testing.assert_allclose(np.abs(largest), np.abs(expected[:, :3]), atol=1e-3)


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
    with refused("wrong_shape", "history_prior"):
        replace(accepted, history_prior=torch.zeros(3, 3))


@pytest.mark.parametrize(("errors", "chosen"), [((0.2, 0.1), 4), ((0.1, 0.2), 0), ((0.1, 0.1), 0)])
def test_the_validation_period_accepts_or_refuses_the_prior(data, monkeypatch, errors, chosen):
    left = iter(errors)
    monkeypatch.setattr(selection, "validation_errors", lambda _, models: ([next(left) for _ in models], 10))
    model = fit_factors(data, FactorOptions(ranks=(2,), sweeps=5, consumption=(0, 4)))
    assert [one["consumption"] for one in model.facts["tried"]] == [0, 4]
    assert [one["squared_error"] for one in model.facts["tried"]] == list(errors)
    assert model.facts["chosen"]["consumption"] == chosen
    assert bool(model.history_prior.any()) == bool(chosen)


@pytest.mark.slow
def test_features_are_tried_where_there_are_some(data, tmp_path):
    """In a growing catalog the features are all that is known of a new item."""
    for side in ("item_features", "item_factors", "user_features", "user_factors"):
        with refused("missing_value", side):
            fit_factors(data, FactorOptions(ranks=(2,), sweeps=2, **{side: 4 if side.endswith("factors") else True}))
    world = recpo.simulate(tmp_path / "world", world="living", users=300, items=600, events=9000, seed=0)
    features = FeatureColumns(available_from="available_from")
    tables = {"items": world.items, "users": world.users, "catalog": "items", "features": features}
    living = recpo.prepare(world.log, tmp_path / "prepared", **tables)
    model = fit_factors(living, FactorOptions(ranks=(4,), consumption=(0, 8)))
    *found, with_users, _, by_table, _, by_items = model.facts["tried"]
    by_sides = model.facts["tried"][-4:]
    tried = {(one["consumption"], one["item_features"]): one["squared_error"] for one in found}
    assert list(tried) == [(0, False), (0, True), (8, False), (8, True)]
    assert not any(one["user_features"] for one in found)
    best = min(found, key=lambda one: one["squared_error"])
    assert with_users | {"squared_error": 0} == best | {"user_features": True, "squared_error": 0}
    assert (by_table["rank"], by_table["item_features"], by_table["user_factors"]) == (0, True, 32)
    assert (by_items["rank"], by_items["item_features"], by_items["item_factors"]) == (0, True, 32)
    assert [(one["user_factors"], one["item_factors"]) for one in by_sides] == [(8, 0), (32, 0), (0, 8), (0, 32)]
    assert model.facts["chosen"] == min(best, with_users, *by_sides, key=lambda one: one["squared_error"])
    assert tried[0, True] < 0.97 * tried[0, False]
    assert model.facts["chosen"]["item_features"]
    # an item without events has the prior mean of its features, not that of all items
    new = living.item_counts() == 0
    assert new.sum() > 5
    assert model.item_bias[torch.from_numpy(new)].std() > 0.1 * model.item_bias.std()
    without = fit_factors(living, FactorOptions(ranks=(4,), consumption=(0,), item_features=False))
    assert float(without.item_bias[torch.from_numpy(new)].std()) == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_held_out_errors_fall_where_exposures_carry_taste(tmp_path):
    """The small world: four events per item, too few for factors without a prior."""
    world = recpo.simulate(tmp_path / "world", world="small", seed=0)
    data = recpo.prepare(world.log, tmp_path / "prepared")
    model = fit_factors(data, FactorOptions(ranks=(8,)))
    without, with_it = (one["squared_error"] for one in model.facts["tried"])
    assert model.facts["chosen"]["consumption"] == 16
    assert with_it < without - 0.001  # measured: .0752 and .0737
    parts = partial(chunks, data)
    assert of_consumption(parts, data.num_items, 16, 0).items.shape == (data.num_items, 16)


def test_what_groups_want_is_found_where_no_user_tells_it(tmp_path):
    """Six events of a user and few positives: only many users of a group together say what it wants."""
    random, users, items, groups = np.random.default_rng(0), 1_500, 30, 3
    group, wanted = random.integers(0, groups, users), np.where(random.random((groups, items)) < 0.25, 0.25, 0.02)
    user, item = np.repeat(np.arange(users), 6), random.integers(0, items, users * 6)
    log = pd.DataFrame(
        {"user_id": user, "item_id": item, "label": random.random(len(user)) < wanted[group[user], item]}
    )
    log["timestamp"] = 1_700_000_000_000 + random.integers(0, 20 * 86_400_000, len(user))
    log = log.astype({"label": float}).sort_values("timestamp", ignore_index=True)
    table = pd.DataFrame({"user_id": np.arange(users), "group": [f"group {one}" for one in group]})
    options = {"label": BinaryColumn(), "columns": Columns(label="label", time_unit="ms")}
    data = recpo.prepare(log, tmp_path / "prepared", users=table, **options)
    model = fit_factors(data, FactorOptions())
    assert model.facts["chosen"]["user_factors"]
    without = [one["squared_error"] for one in model.facts["tried"] if not one["user_factors"]]
    assert model.facts["chosen"]["squared_error"] < min(without) - 0.001
    nobody = Histories(torch.zeros(users, 0).long(), torch.zeros(users).long(), torch.zeros(users, 0).long())
    own = nobody._replace(user=data.user_features(np.arange(users)).tensors())
    found = model.scores(model.fold_in(own)).numpy()
    names = data.item_ids().to_external(np.arange(1, data.num_items + 1)).to_numpy()
    ids = data.table("users.parquet", ["user_id"]).column(0).to_numpy()
    assert np.corrcoef(found.ravel(), wanted[group[ids]][:, names].ravel())[0, 1] > 0.8
    again = fit_factors(data, FactorOptions().of(model))  # the same model, without a choice
    assert len(again.facts["tried"]) == 1
    torch.testing.assert_close(again.item_factors, model.item_factors)


@pytest.mark.slow
def test_what_is_wanted_of_kinds_of_items_is_found_where_no_item_tells_it(tmp_path):
    """Three events of an item: only all items of a kind together say who wants that kind."""
    random, users, items, kinds = np.random.default_rng(0), 200, 2_000, 8
    kind, wanted = random.integers(0, kinds, items), np.where(random.random((users, kinds)) < 0.3, 0.8, 0.2)
    item = np.repeat(np.arange(items - 50), 4)
    user = random.integers(0, users, len(item))
    log = pd.DataFrame({"user_id": user, "item_id": item, "label": random.random(len(user)) < wanted[user, kind[item]]})
    log["timestamp"] = 1_700_000_000_000 + random.integers(0, 20 * 86_400_000, len(user))
    log = log.astype({"label": float}).sort_values("timestamp", ignore_index=True)
    table = pd.DataFrame({"item_id": np.arange(items), "kind": [f"kind {one}" for one in kind]})
    options = {"label": BinaryColumn(), "columns": Columns(label="label", time_unit="ms"), "catalog": "items"}
    data = recpo.prepare(log, tmp_path / "prepared", items=table, **options)
    model = fit_factors(data, FactorOptions())
    assert model.facts["chosen"]["item_factors"]
    without = [one["squared_error"] for one in model.facts["tried"] if not one["item_factors"]]
    assert model.facts["chosen"]["squared_error"] < min(without) - 0.01
    names = data.item_ids().to_external(np.arange(1, data.num_items + 1)).to_numpy()
    people = data.table("users.parquet", ["user_id"]).column(0).to_numpy()
    found, expected = model.scores(model.user_factors).numpy(), wanted[people][:, kind[names]]
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.6
    new = data.item_counts() == 0  # its kind says who wants an item without events
    assert new.sum() > 5
    assert np.corrcoef(found[:, new].ravel(), expected[:, new].ravel())[0, 1] > 0.6
    again = fit_factors(data, FactorOptions().of(model))  # the same model, without a choice
    assert len(again.facts["tried"]) == 1
    torch.testing.assert_close(again.item_factors, model.item_factors)
    with refused("conflicting_options", "item_factors"):
        FactorOptions(item_factors=8, user_factors=8)
