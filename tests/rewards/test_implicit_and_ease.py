"""Implicit ALS, AllRank and EASE against dense NumPy, their fold-in and files, and what of a history they read."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from recpo.base.feedback import GRADES
from recpo.base.types import Histories, Recommendations
from recpo.batches.slates import HeldOutBatches, Rank
from recpo.ops.exposures import exposure_auc, held_out_targets, unseen_auc, unseen_items
from recpo.policies.baseline import ImplicitPolicy, distinct_positives, options_of
from recpo.rewards import graded, implicit as positives
from recpo.rewards.implicit import (
    AllRankOptions,
    EaseOptions,
    ImplicitOptions,
    best_on_validation,
    cooccurrences,
    fit_ease,
    fit_implicit,
    item_weights,
    open_fitted,
    save_fitted,
    sweep,
    training_events,
)
from tests.refusals import refused


@pytest.fixture(scope="module")
def matrix(data):
    """``[U, V]``: 1 where a user has a positive training event of an item."""
    ones = np.zeros((data.manifest["num_users"], data.num_items))
    for shard in range(data.num_shards("train")):
        events = data.load("train", shard)
        ones[events.user_index[events.positive], events.item_index[events.positive] - 1] = 1.0
    return ones


@pytest.fixture(scope="module")
def implicit(data):
    return fit_implicit(data, ImplicitOptions(ranks=(3,), unobserved=(0.2,), ridges=(0.02,), sweeps=3))


@pytest.fixture(scope="module")
def graded_events(data):
    """``[U, V]``: the number of graded training events of a pair, and the sum of their grades."""
    counts = np.zeros((data.manifest["num_users"], data.num_items))
    sums = np.zeros_like(counts)
    for columns in data.train_columns(["user_index", "item_index", "feedback", "is_target"]):
        user, item, level, is_target = columns.values()
        known = (level > 0) & is_target
        pairs = user[known], item[known] - 1
        np.add.at(counts, pairs, 1.0)
        np.add.at(sums, pairs, np.array(GRADES)[level[known]])
    assert counts.max() > 1  # an item that was shown again counts again
    return counts, sums


@pytest.fixture(scope="module")
def allrank(data):
    return fit_implicit(data, AllRankOptions(ranks=(3,), unobserved=(0.05,), ridges=(0.02,), sweeps=3))


@pytest.fixture(scope="module")
def ease(data):
    return fit_ease(data, EaseOptions(ridges=(5.0,)))


def dense_side(counts, other, unobserved, ridge, nu, sums=None):
    """One user after the other, every pair by its own weight; ``sums`` of targets, which are ones if it is None."""
    solved, sums = np.zeros((len(counts), other.shape[1])), counts if sums is None else sums
    for row, of_row in enumerate(counts):
        weight = of_row + unobserved
        scaled = ridge * (of_row.sum() + unobserved * len(of_row)) ** nu
        left = (other * weight[:, None]).T @ other + scaled * np.eye(other.shape[1])
        solved[row] = np.linalg.solve(left, other.T @ sums[row])
    return solved


def swept(data, graded, items, unobserved, nu):
    events = training_events(data, graded)
    return sweep(events, events.T.tocsr(), items, unobserved, 0.05, nu)


@pytest.mark.parametrize("nu", [1.0, 0.5, 0.0])
def test_a_sweep_of_implicit_als_is_the_dense_one(data, matrix, nu):
    items = np.random.default_rng(0).normal(0.0, 0.1, (data.num_items, 4))
    users = dense_side(matrix, items, 0.2, 0.05, nu)
    expected = dense_side(matrix.T, users, 0.2, 0.05, nu)
    got = swept(data, False, items, 0.2, nu)
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_a_sweep_of_allrank_is_the_dense_one(data, graded_events):
    counts, sums = graded_events
    items = np.random.default_rng(0).normal(0.0, 0.1, (data.num_items, 4))
    users = dense_side(counts, items, 0.02, 0.05, 1.0, sums)
    expected = dense_side(counts.T, users, 0.02, 0.05, 1.0, sums.T)
    np.testing.assert_allclose(swept(data, True, items, 0.02, 1.0), expected, atol=1e-9)


def test_its_objective_never_rises(data, matrix):
    def objective(users, items):
        score = users @ items.T
        value = (matrix * (1 - score) ** 2).sum() + 0.2 * (score**2).sum()
        for ones, side in ((matrix, users), (matrix.T, items)):
            value += 0.05 * ((ones.sum(1) + 0.2 * ones.shape[1]) * (side**2).sum(1)).sum()
        return value

    items, values = np.random.default_rng(0).normal(0.0, 0.1, (data.num_items, 4)), []
    for _ in range(4):
        users = dense_side(matrix, items, 0.2, 0.05, 1.0)
        values.append(objective(users, items))
        items = swept(data, False, items, 0.2, 1.0)
        values.append(objective(users, items))
    assert (np.diff(values) <= 1e-9).all()


def test_shards_and_chunks_do_not_matter(many, implicit, ease, monkeypatch):
    monkeypatch.setattr(graded, "CHUNK_EVENTS", 50)
    monkeypatch.setattr(positives, "_PIECE", 2)
    monkeypatch.setattr(positives, "_NUMBERS", 1)
    again = fit_implicit(many, ImplicitOptions(ranks=(3,), unobserved=(0.2,), ridges=(0.02,), sweeps=3))
    torch.testing.assert_close(again.item_factors, implicit.item_factors, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(fit_ease(many, EaseOptions(ridges=(5.0,))).weights, ease.weights)


def test_ease_is_the_constrained_ridge_regression(data, matrix, ease):
    np.testing.assert_array_equal(cooccurrences(data), matrix.T @ matrix)
    weights = item_weights(matrix.T @ matrix, 5.0)
    np.testing.assert_array_equal(weights, ease.weights)
    assert not np.diag(weights).any()
    # column by column: the regression of an item on all others
    for item in (0, 7, 59):
        others = np.arange(60) != item
        left = matrix[:, others].T @ matrix[:, others] + 5.0 * np.eye(59)
        expected = np.linalg.solve(left, matrix[:, others].T @ matrix[:, item])
        np.testing.assert_allclose(weights[others, item], expected, atol=1e-6)


@pytest.fixture(scope="module")
def histories():
    items = torch.tensor([[5, 9, 5, 3, 0, 0], [0] * 6, [1, 2, 3, 4, 6, 7]])
    levels = torch.tensor([[17, 10, 13, 9, 0, 0], [0] * 6, [17, 1, 0, 2, 10, 16]])
    return Histories(items, torch.tensor([4, 0, 6]), levels)


def test_positives_of_a_history_are_the_upper_levels_each_item_once(histories):
    assert distinct_positives(histories, 10).int().tolist() == [[0, 1, 1, 0, 0, 0], [0] * 6, [1, 0, 0, 0, 1, 1]]
    assert distinct_positives(histories, 3).int().tolist() == [[0, 1, 1, 0, 0, 0], [0] * 6, [0, 0, 0, 0, 1, 1]]


def test_a_fold_in_of_implicit_als_is_the_user_step(implicit, histories, monkeypatch):
    ones = np.zeros((3, 60))
    ones[0, [4, 8]] = ones[2, [0, 5, 6]] = 1.0
    expected = dense_side(ones, implicit.item_factors.double().numpy(), 0.2, 0.02, 1.0)
    np.testing.assert_allclose(implicit.fold_in(histories), expected, atol=1e-6)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    np.testing.assert_allclose(implicit.fold_in(histories), expected, atol=1e-6)


def test_a_fold_in_of_allrank_is_the_user_step(allrank, histories):
    counts, sums = np.zeros((3, 60)), np.zeros((3, 60))
    for row, (items, levels) in enumerate(zip(histories.item_ids, histories.feedback, strict=True)):
        for item, level in zip(items.tolist(), levels.tolist(), strict=True):
            if level:
                counts[row, item - 1] += 1
                sums[row, item - 1] += GRADES[level]
    expected = dense_side(counts, allrank.item_factors.double().numpy(), 0.05, 0.02, 1.0, sums)
    np.testing.assert_allclose(allrank.fold_in(histories), expected, atol=1e-6)
    # a dislike, whose grade is 0, lowers what a user without it would get of the item
    liked = Histories(torch.tensor([[5, 0]]), torch.tensor([1]), torch.tensor([[17, 0]]))
    both = Histories(torch.tensor([[5, 7]]), torch.tensor([2]), torch.tensor([[17, 1]]))
    of_seven = [float((allrank.fold_in(one) @ allrank.item_factors.T)[0, 6]) for one in (liked, both)]
    assert of_seven[1] < of_seven[0]


def test_the_scores_of_ease_are_sums_over_the_history(ease, histories):
    scores = ease.scores(histories)
    torch.testing.assert_close(scores[0], ease.weights[4] + ease.weights[8])
    assert not scores[1].any()


@pytest.mark.parametrize("name", ["implicit", "allrank", "ease"])
def test_they_recommend_the_best_items_but_excluded_ones(name, histories, request):
    model = request.getfixturevalue(name)
    exclude = torch.tensor([[5, 9, 3], [1, 0, 0], [0, 0, 0]])
    lists = model.recommend(histories, 8, exclude)
    scores, logp = model.scores(histories), (model.scores(histories) / model.temperature).log_softmax(1)
    for user in range(3):
        allowed = [item for item in range(1, 61) if item not in exclude[user].tolist()]
        best = sorted(allowed, key=lambda item: (-float(scores[user, item - 1]), item))[:8]
        assert lists.item_ids[user].tolist() == best
        torch.testing.assert_close(lists.scores[user], logp[user, lists.item_ids[user] - 1])
    nearly_all = torch.arange(1, 59).expand(3, -1)
    few = model.recommend(histories, 4, nearly_all)
    assert (few.item_ids[:, 2:] == 0).all()
    assert (few.scores[:, 2:] == -torch.inf).all()


@pytest.mark.parametrize("name", ["implicit", "allrank", "ease"])
def test_saved_and_opened_they_are_the_same(name, histories, request, tmp_path):
    model = request.getfixturevalue(name)
    save_fitted(model, tmp_path / "model")
    opened = open_fitted(tmp_path / "model")
    assert torch.equal(opened.recommend(histories, 9).item_ids, model.recommend(histories, 9).item_ids)
    assert opened.facts == model.facts
    assert type(opened) is type(model)
    assert options_of(opened) == options_of(model)
    content = bytearray((tmp_path / "model").read_bytes())
    content[-2] ^= 1
    (tmp_path / "model").write_bytes(content)
    with refused("damaged", str(tmp_path / "model")):
        open_fitted(tmp_path / "model")
    for damaged in (b"", b"\xff" * 40, content[:60], b"\x02\0\0\0\0\0\0\0{}"):
        (tmp_path / "model").write_bytes(damaged)
        with refused("damaged", str(tmp_path / "model")):
            open_fitted(tmp_path / "model")
    with refused("missing_file", str(tmp_path / "absent")):
        open_fitted(tmp_path / "absent")


class Fixed:
    """Recommends to everybody what the validation period shows them, or nothing of it."""

    def __init__(self, lists):
        self.max_history, self.lists, self.calls = 20, lists, 0

    def recommend(self, histories, k, exclude=None):
        self.calls += 1
        return Recommendations(self.lists[self.calls - 1], torch.zeros(0))


def test_the_highest_ndcg_on_new_validation_positives_is_chosen(data):
    perfect, nothing, users = [], [], 0
    for batch in HeldOutBatches(data, "valid", 20, 256, Rank()):
        slates = batch.feedback.slates
        rows = torch.zeros(len(slates.item_ids), 10, dtype=torch.long)
        for row in range(len(rows)):
            past = set(batch.exclude[row].tolist())
            wanted = sorted(set(slates.item_ids[row, slates.mask[row] & slates.positive[row]].tolist()) - past)
            users += bool(wanted)
            rows[row, : len(wanted[:10])] = torch.tensor(wanted[:10], dtype=torch.long)
        perfect.append(rows)
        nothing.append(torch.zeros_like(rows))
    best, tried = best_on_validation(data, [Fixed(nothing), Fixed(perfect), Fixed(nothing)])
    assert users
    assert best == 1
    assert [one["NDCG@10"] for one in tried] == [0.0, pytest.approx(1.0), 0.0]


@pytest.mark.parametrize("weights", [(0.1, 0.5), (0.1, 0.0001, 0.3, 0.2)])
def test_a_larger_rank_takes_the_options_of_the_first_one_and_the_next_larger_weight(data, weights):
    options = ImplicitOptions(ranks=(2, 5), unobserved=weights, ridges=(0.01, 0.1), sweeps=2)
    chosen = fit_implicit(data, options)
    small, large = ([one for one in chosen.facts["tried"] if one["rank"] == rank] for rank in options.ranks)
    first = max(small, key=lambda one: one["NDCG@10"])
    assert len(small) == 2 * len(weights)
    assert [one["unobserved"] for one in large] == sorted(w for w in weights if w >= first["unobserved"])[:2]
    assert {one["ridge"] for one in large} == {first["ridge"]}
    own = {name: getattr(chosen, name) for name in ("rank", "unobserved", "ridge")}
    assert own.items() <= max((first, *large), key=lambda one: one["NDCG@10"]).items()


def test_models_of_a_larger_log_are_tried_on_some_users_and_the_best_is_fitted_to_all(data):
    options = ImplicitOptions(ranks=(2, 3), unobserved=(0.1, 0.5), ridges=(0.01, 0.1), sweeps=2)
    events = training_events(data, graded=False)
    fewer = replace(options, selection_events=events.nnz // 3)
    chosen, every = fit_implicit(data, fewer), fit_implicit(data, options)
    again = fit_implicit(data, options.of(chosen))  # one model, which is fitted to all events
    assert torch.equal(chosen.item_factors, again.item_factors)
    assert chosen.facts["tried"][:4] != every.facts["tried"][:4]


def test_users_with_a_share_of_the_events_are_evenly_spaced():
    events = csr_array((np.ones(30), np.arange(30) % 4, np.repeat(np.arange(11), 2)[:21] * 3), shape=(20, 4))
    assert (np.diff(events.indptr) > 0).tolist() == [False, True] * 10
    assert positives._some_users(events, 9).tolist() == [1, 7, 13]
    assert positives._some_users(events, 100).tolist() == list(range(1, 20, 2))
    assert positives._some_users(events[:1], 5).tolist() == []


def test_the_best_ridge_of_ease_is_kept(data):
    several = EaseOptions(ridges=(1.0, 30.0))
    ease = fit_ease(data, several)
    ridges = ease.facts["tried"]
    assert torch.equal(fit_ease(data, several.of(ease)).weights, ease.weights)
    assert [one["ridge"] for one in ridges] == [1.0, 30.0]


def test_allrank_is_selected_by_ndcg_among_those_that_order_best_what_was_shown_and_what_was_not(data, allrank):
    values = []
    for batch in HeldOutBatches(data, "valid", allrank.max_history, 256, Rank()):
        every = allrank.scores(batch.feedback.histories)
        targets, unseen = held_out_targets(batch).without(batch.exclude), unseen_items(batch, data.num_items)
        shown, others = (every.gather(1, (items - 1).clamp_min(0)) for items in (targets.item_ids, unseen))
        other, mixed = exposure_auc(shown, targets)["AUC_other"], unseen_auc(shown, others, targets, unseen)
        values.append(0.6 * other + 0.4 * mixed["AUC_unseen"])
    (tried,) = allrank.facts["tried"]
    assert {"rank": 3, "unobserved": 0.05, "ridge": 0.02}.items() < tried.items()
    assert tried["AUC_mixed"] == pytest.approx(float(torch.cat(values).nanmean()))
    assert 0 < tried["NDCG@10"] < 1


@pytest.mark.parametrize(("order", "chosen"), [([0.5, 0.52, 0.9], 2), ([0.5, 0.5, 0.5], 1)])
def test_allrank_chooses_lists_only_among_models_of_a_good_order(data, monkeypatch, order, chosen):
    """Model 1 has the best lists; where model 2 orders better beyond one standard error, they do not count."""
    ndcg = [0.1, 0.3, 0.2]

    def measured(values, number, batch):
        noise = 0.01 * (-1.0) ** torch.arange(len(batch.user_ids))
        return values[number] + noise * number

    def aucs(batch, num_items, scores):
        return torch.stack([measured(order, number, batch) for number in range(3)]).double()

    monkeypatch.setattr(positives, "_ndcg", lambda model, users, batch, k: measured(ndcg, model.max_history - 1, batch))
    monkeypatch.setattr(positives, "mixed_aucs", aucs)
    made = partial(ImplicitPolicy, 60, rank=1, unobserved=0.1, ridge=0.1, nu=1.0, graded=True)
    models = [made(max_history=number) for number in range(1, 4)]
    best, values = best_on_validation(data, models)
    assert best == chosen
    assert [one["NDCG@10"] for one in values] == pytest.approx(ndcg, abs=0.01)
    assert [one["AUC_mixed"] for one in values] == pytest.approx(order, abs=0.01)


def test_without_other_exposures_allrank_is_selected_by_ndcg(data, monkeypatch):
    whole = HeldOutBatches.__iter__

    def positives_alone(self):
        for batch in whole(self):
            slates = batch.feedback.slates
            kept = slates._replace(mask=slates.mask & slates.positive)
            yield batch._replace(feedback=batch.feedback._replace(slates=kept))

    monkeypatch.setattr(HeldOutBatches, "__iter__", positives_alone)
    options = AllRankOptions(ranks=(2,), unobserved=(0.05, 3.0), ridges=(0.02,), sweeps=2)
    model = fit_implicit(data, options)
    best = max(model.facts["tried"], key=lambda one: one["NDCG@10"])
    assert best.keys() == {"rank", "unobserved", "ridge", "NDCG@10"}
    assert model.unobserved == best["unobserved"]


def test_allrank_needs_grades(data, monkeypatch):
    monkeypatch.setattr(graded, "chunks", lambda *_, **__: iter(()))
    with refused("empty", str(data.root)):
        fit_implicit(data, AllRankOptions())


def test_a_large_catalog_gets_one_ridge():
    assert [EaseOptions().ridges_for(items) for items in (3_000, 3_001)] == [(30.0, 100.0, 300.0, 1000.0), (100.0,)]
    assert EaseOptions(ridges=(7.0,)).ridges_for(3_000) == (7.0,)


def test_without_validation_positives_there_must_be_no_choice(data, monkeypatch):
    monkeypatch.setattr(positives, "validation_batches", lambda *_: iter(()))
    assert fit_ease(data, EaseOptions(ridges=(5.0,))).facts["tried"] == [{"ridge": 5.0, "NDCG@10": None}]
    with refused("empty", "ridges"):
        fit_ease(data, EaseOptions(ridges=(5.0, 6.0)))


def test_a_catalog_that_is_too_large_is_refused_before_work(data):
    with refused("resources", "max_items"):
        fit_ease(data, EaseOptions(max_items=59))


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (partial(ImplicitOptions, ranks=()), ("out_of_range", "ranks")),
        (partial(ImplicitOptions, unobserved=(0.0,)), ("out_of_range", "unobserved")),
        (partial(ImplicitOptions, ridges=(-1.0,)), ("out_of_range", "ridges")),
        (partial(ImplicitOptions, sweeps=0), ("out_of_range", "sweeps")),
        (partial(AllRankOptions, ridges=()), ("out_of_range", "ridges")),
        (partial(EaseOptions, ridges=()), ("out_of_range", "ridges")),
        (partial(EaseOptions, ridges=(0.0,)), ("out_of_range", "ridges")),
    ],
)
def test_options_out_of_range_are_refused(make, refusal):
    with refused(*refusal):
        make()
