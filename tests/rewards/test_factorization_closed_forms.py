"""Normal equations, bounds, and selection on the validation period, in small examples without a log."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.policies.baseline import distinct_positives
from recpo.rewards import factors as bounds, graded as normal_equations, implicit as positives, selection
from recpo.rewards.factors import posterior_variance
from recpo.rewards.graded import Chunk, Equations, inverses, no_equations, normal_matrices, solve
from recpo.rewards.implicit import best_on_validation, positive_pairs
from recpo.rewards.selection import validation_errors
from tests.refusals import refused


# ---------------------------------------------------------------- normal equations
def test_equations_of_users_and_items_are_sums_of_outer_products():
    """Three users with the events (0: items 1, 2, 2), (1: none), (2: item 0); four items, of which 3 is never met."""
    target = np.array([1.0, 2.0, -1.0, 4.0])
    chunk = Chunk(np.arange(3), np.array([0, 3, 3, 4]), np.arange(4), np.array([1, 2, 2, 0]), target)
    rng = np.random.default_rng(0)
    met = {0: [(1, 1.0), (2, 2.0), (2, -1.0)], 1: [], 2: [(0, 4.0)]}
    upper = np.triu_indices(3)
    of_users, of_items = rng.normal(size=(4, 3)), rng.normal(size=(3, 3))
    found = chunk.of_users(of_users, target)
    for user, events in met.items():
        left = sum((np.outer(of_users[i], of_users[i]) for i, _ in events), np.zeros((3, 3)))
        np.testing.assert_allclose(found.left[user], left[upper])
        np.testing.assert_allclose(found.right[user], sum((t * of_users[i] for i, t in events), np.zeros(3)))
    found = chunk.of_items(of_items, target)
    for item in range(4):
        events = [(u, t) for u, one in met.items() for i, t in one if i == item]
        left = sum((np.outer(of_items[u], of_items[u]) for u, _ in events), np.zeros((3, 3)))
        np.testing.assert_allclose(found.left[item], left[upper])
        np.testing.assert_allclose(found.right[item], sum((t * of_items[u] for u, t in events), np.zeros(3)))
    # a table of moments is summed as it is, and times the target
    moments = Equations(rng.normal(size=(4, 2)), rng.normal(size=(4, 3)))
    found = chunk.of_moments(moments, target)
    for user, events in met.items():
        np.testing.assert_allclose(found.left[user], sum((moments.left[i] for i, _ in events), np.zeros(2)))
        np.testing.assert_allclose(found.right[user], sum((t * moments.right[i] for i, t in events), np.zeros(3)))
    moments = Equations(rng.normal(size=(3, 2)), rng.normal(size=(3, 3)))
    found = chunk.of_moments(moments, target, of_items=True)
    for item in range(4):
        events = [(u, t) for u, one in met.items() for i, t in one if i == item]
        np.testing.assert_allclose(found.left[item], sum((moments.left[u] for u, _ in events), np.zeros(2)))
        np.testing.assert_allclose(found.right[item], sum((t * moments.right[u] for u, t in events), np.zeros(3)))
    nothing = no_equations(5, 3)
    assert (nothing.left.shape, nothing.right.shape) == ((5, 6), (5, 3))
    assert not nothing.left.any()
    assert not nothing.right.any()


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_systems_are_solved_a_part_at_a_time(at_once, monkeypatch):
    monkeypatch.setattr(normal_equations, "_MATRICES", at_once)
    rng = np.random.default_rng(1)
    half, right = rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 3))
    square = half.swapaxes(1, 2) @ half
    left = square[:, *np.triu_indices(3)]
    ridged = square + 0.5 * np.eye(3)
    np.testing.assert_allclose(normal_matrices(left, 3, 0.5), ridged)
    np.testing.assert_allclose(solve(Equations(left, right), 0.5), np.linalg.solve(ridged, right[..., None])[..., 0])
    found = inverses(left, 3, 0.5)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.linalg.inv(ridged), rtol=1e-5)
    for ridge in (np.array([0.5, 1.0, 2.0]), rng.random((5, 3)) + 0.1):  # of every weight, and of every weight of each
        own = square + np.eye(3) * (ridge if ridge.ndim == 1 else ridge[:, None])
        found = solve(Equations(left, right), ridge)
        np.testing.assert_allclose(found, np.linalg.solve(own, right[..., None])[..., 0])
    assert solve(no_equations(2, 3), 0.5).tolist() == [[0.0] * 3] * 2
    assert solve(no_equations(0, 3), 0.5).shape == (0, 3)


# ---------------------------------------------------------------- bounds
def factors(items=3, rank=2, **changes):
    """What a bound reads of a model."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(items, rank + 1, rank + 1, generator=generator)
    values = {"item_factors": torch.randn(items, rank, generator=generator), "item_covariance": half @ half.mT}
    return SimpleNamespace(**values | {"noise": 0.3, "num_items": items} | changes)


@pytest.mark.parametrize("gather_cost", [1, 100])
def test_the_variance_of_a_grade(gather_cost, monkeypatch):
    """Candidate by candidate, and by one product with the whole catalog."""
    monkeypatch.setattr(bounds, "GATHER_COST", gather_cost)
    model, generator = factors(), torch.Generator().manual_seed(1)
    users, half = torch.randn(2, 3, generator=generator), torch.randn(2, 3, 3, generator=generator)
    covariance = half @ half.mT
    items = torch.tensor([[3, 1], [2, 0]])
    found = posterior_variance(model, users, covariance, items)
    for row, column in ((0, 0), (0, 1), (1, 0)):
        item = int(items[row, column]) - 1
        x, y = [*users[row, :2].tolist(), 1.0], [*model.item_factors[item].tolist(), 1.0]
        want = np.array(x) @ model.item_covariance[item].numpy() @ x + np.array(y) @ covariance[row].numpy() @ y
        assert found[row, column].item() == pytest.approx(0.3 * want, rel=1e-5)
    certain = torch.zeros(2, 3, 3)
    known = factors(item_covariance=-torch.eye(3).expand(3, 3, 3) * 1e-9)
    assert (posterior_variance(known, users, certain, items) == 0).all()  # rounding is no negative variance


@pytest.mark.parametrize(("items", "places", "whole"), [(16, 2, True), (17, 2, False)])
def test_when_the_whole_catalog_is_computed(items, places, whole, monkeypatch):
    """From an eighth of the items on."""
    calls = []
    monkeypatch.setattr(
        bounds.small_systems, "item_variance_vectors", lambda *_: calls.append(1) or torch.zeros(items, 12)
    )
    posterior_variance(factors(items), torch.zeros(1, 3), torch.eye(3)[None], torch.ones(1, places, dtype=torch.long))
    assert bool(calls) is whole


def test_without_covariances_there_are_no_bounds():
    model = factors(item_covariance=None)
    with refused("unsupported", "uncertainty"):
        posterior_variance(model, torch.zeros(1, 3), torch.eye(3)[None], torch.ones(1, 1, dtype=torch.long))


# ---------------------------------------------------------------- positives
def test_positive_pairs_are_distinct_and_come_with_the_events_read():
    class Rule:
        @staticmethod
        def positive(label, dislike):
            return (label >= 0.5) & ~dislike

    class Data:
        num_items, feedback = 4, SimpleNamespace(rule=Rule)

        @staticmethod
        def train_columns(names):
            first = [2, 2, 0, 2, 2], [4, 4, 1, 2, 1], [0.9, 0.5, 1.0, 0.4, 0.9], [False, False, False, False, True]
            for columns in (first, ([7], [4], [0.1], [False])):
                yield dict(zip(names, map(np.array, columns), strict=True))

    first, second = positive_pairs(Data)
    assert [part.tolist() for part in first[:2]] == [[0, 2], [0, 3]]
    assert first[2] == 5
    assert [part.tolist() for part in second[:2]] == [[], []]
    assert second[2] == 1


def test_places_of_positives_in_the_last_events():
    ids, levels = (
        torch.tensor([[5, 6, 5, 7, 6, 9], [1, 2, 0, 4, 0, 0]]),
        torch.tensor([[17, 10, 12, 9, 17, 17], [10, 16, 17, 9, 17, 17]]),
    )
    histories = Histories(ids, torch.tensor([5, 4]), levels)
    every = distinct_positives(histories, 6)
    assert every.tolist() == [[False, False, True, False, True, False], [True, True, False, False, False, False]]
    last = distinct_positives(histories, 3)
    assert last.tolist() == [[False, False, True, False, True, False], [False, True, False, False, False, False]]


@dataclass
class Fixed:
    """Recommends these lists, and has predictions of these grades."""

    lists: list[list[int]]
    predicted: list[list[float]]
    max_history: int = 7
    user_features: bool = False

    asked: int = 4

    def recommend(self, histories, k, exclude=None):
        assert k == self.asked
        assert exclude.tolist() == [[3], [0]]
        return Recommendations(torch.tensor(self.lists), torch.zeros(0))

    def fold_in(self, histories):
        return histories.lengths

    def grades(self, users, item_ids):
        return torch.tensor(self.predicted)


@pytest.fixture
def validation(monkeypatch):
    """Two batches alike of two users: the first has new positives 1 and 2, the second one 4; grades of some events."""
    asked = []

    def batches(data, max_history, max_users, reads=None):
        asked.append((max_history, max_users))
        items = torch.tensor([[1, 2, 3, 4], [4, 1, 2, 3]])
        mask = torch.tensor([[True] * 4, [True, True, False, False]])
        positive = torch.tensor([[True, True, True, False], [True, False, True, True]])
        grade = torch.tensor([[0.5, math.nan, 0.25, 1.0], [0.0, 1.0, 9.0, 9.0]])
        slates = Slates(items, items, mask, positive=positive, grade=grade)
        histories = Histories(items, torch.tensor([4, 2]))
        batch = EvaluationBatch(
            FeedbackBatch(histories, slates, torch.arange(2)), torch.tensor([[3], [0]]), torch.tensor([[3], [0]])
        )
        return iter([batch, batch])

    monkeypatch.setattr(positives, "validation_batches", batches)
    monkeypatch.setattr(selection, "validation_batches", batches)
    return asked


def test_the_highest_ndcg_of_new_positives(validation):
    data = SimpleNamespace(num_items=4, root="here")
    best = Fixed([[1, 2, 4, 3], [4, 1, 2, 3]], [])
    half = Fixed([[4, 4, 4, 3], [4, 1, 2, 3]], [])
    worst = Fixed([[4, 3, 4, 3], [1, 2, 3, 1]], [])
    chosen, values = best_on_validation(data, [half, best, worst])
    assert chosen == 1
    assert [one["NDCG@10"] for one in values] == [pytest.approx(0.5), pytest.approx(1.0), 0.0]
    assert best_on_validation(data, [best, best])[0] == 0  # the first of equals
    assert [type(one["NDCG@10"]) for one in best_on_validation(data, [best])[1]] == [float]
    ten = Fixed([list(range(10, 20))] * 2, [], asked=10)
    assert best_on_validation(SimpleNamespace(num_items=20), [ten]) == (0, [{"NDCG@10": 0.0}])
    assert validation == [(7, 5000)] * 4


def test_squared_errors_on_graded_events(validation):
    right = [[0.5, 7.0, 0.25, 1.0], [0.0, 1.0, 7.0, 7.0]]
    off = [[0.5, 7.0, 0.75, 1.0], [0.0, 0.5, 7.0, 7.0]]
    found, count = validation_errors(None, [Fixed([], right), Fixed([], off)])
    assert found == [0.0, pytest.approx(2 * 0.25 / 5)]
    assert count == 10
    assert validation == [(7, 20_000)]


def test_nothing_to_choose_by(monkeypatch):
    for module in (positives, selection):
        monkeypatch.setattr(module, "validation_batches", lambda *_: iter(()))
    data, model = SimpleNamespace(num_items=4, root="here"), Fixed([], [])
    assert best_on_validation(data, [model]) == (0, [{"NDCG@10": None}])
    with refused("empty"):
        best_on_validation(data, [model, model])
    assert validation_errors(data, [model]) == ([0.0], 0)
