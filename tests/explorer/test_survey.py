"""Lists of the same users side by side: against recommend, and against counts made one by one."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.batches.slates import HeldOutBatches, Rank
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.explorer.survey import ORDERS, Survey
from recpo.verbs.contenders import contenders_of
from tests.refusals import refused


def test_the_lists_of_a_page_are_those_of_the_sample(survey, people, data):
    alone = {one.name: [] for one in survey.contenders}

    class Scores(recpo.Measure):
        def update(self, observed):
            scores.append(observed.lists.scores.numpy())
            return {}

    for one in survey.contenders:
        scores = alone[one.name]
        batches = HeldOutBatches(data, "test", one.recommender.max_history, 7, Rank(), 30, one.recommender.reads)
        evaluate_ranking(one.recommender, batches, Ranking(num_items=data.num_items, ks=(5,)), [Scores()])
        alone[one.name] = np.concatenate(scores)
    for row, user in enumerate(survey.users.tolist()):
        shown = survey.lists_of(people.person(user))
        for one, places in zip(survey.contenders, shown, strict=True):
            assert [place.item for place in places] == [item for item in one.lists[row].tolist() if item]
            np.testing.assert_allclose(
                [place.score for place in places], alone[one.name][row][one.lists[row] > 0], 1e-5
            )


def test_the_lists_are_those_of_recommend(survey, people, data):
    histories = pd.read_parquet(data.root / "histories.parquet")
    user = next(user for user in survey.users.tolist() if survey.histories[survey.users == user][0] > 3)
    user_id = people.person(user).user_id
    seen = histories[histories["user_id"] == user_id]
    # histories.parquet ends with the last event; the page's lists are made before the held-out period
    begin = data.manifest["boundaries"]["test_start_ms"]
    listed = recpo.recommend("popularity", seen[seen["timestamp"] < begin], 5, users=[user_id], prepared=data)
    (shown, *_) = survey.lists_of(people.person(user))
    assert data.item_ids().to_external([one.item for one in shown]).to_pylist() == listed["item_id"].tolist()


def test_grades_and_deviations_are_those_of_the_reward_model(survey, people, factors):
    person = people.person(int(survey.users[3]))
    places = survey.lists_of(person)[1]
    users, covariance = factors.fold_in_with_covariance(person.batch(factors.max_history).feedback.histories)
    for place in places:
        row = place.item - 1
        grade = factors.mean + users[0, -1] + factors.item_bias[row] + users[0, :-1] @ factors.item_factors[row]
        assert place.grade == pytest.approx(float(grade), abs=1e-5)
        item = torch.cat([factors.item_factors[row], torch.ones(1)])
        user = torch.cat([users[0, :-1], torch.ones(1)])
        variance = item @ covariance[0] @ item + user @ factors.item_covariance[row] @ user
        assert place.deviation == pytest.approx(math.sqrt(factors.noise * float(variance)), rel=1e-4)
        assert place.propensity is None  # factors have no probabilities


def test_shares_changes_and_overlaps_are_counts(survey):
    first, second = survey.contenders[0], survey.contenders[1]
    for metric in survey.metrics:
        before, after = survey.values(0, metric), survey.values(1, metric)
        known = [(a, b) for a, b in zip(before, after, strict=True) if not (math.isnan(a) or math.isnan(b))]
        shares = survey.shares(1, metric)
        assert shares.users == len(known)
        if known:
            assert shares.helped == pytest.approx(np.mean([b > a for a, b in known]))
            assert shares.harmed == pytest.approx(np.mean([b < a for a, b in known]))
            assert shares.unchanged == pytest.approx(np.mean([b == a for a, b in known]))
            assert shares.gain.mean == pytest.approx(np.mean([b - a for a, b in known]))
    overlap = survey.overlap(0, 1)
    for row in range(len(survey.users)):
        both = {*first.lists[row].tolist()} & {*second.lists[row].tolist()} - {0}
        assert overlap[row] == pytest.approx(len(both) / 5)
    change = survey.change(1)
    for row in range(len(survey.users)):
        gains = [survey.values(1, metric)[row] - survey.values(0, metric)[row] for metric in survey.metrics]
        known = [gain for gain in gains if not math.isnan(gain)]
        expected = next((gain for gain in known if gain), 0.0 if known else math.nan)
        assert change[row] == pytest.approx(expected, nan_ok=True)


def test_fewer_dislikes_are_better(survey):
    name = next(name for name in survey.metrics if name.startswith("disliked"))
    raw = survey.contenders[0].result.per_user[name].numpy()
    np.testing.assert_array_equal(survey.values(0, name), -raw.astype(np.float64))


def test_orders_of_users(survey):
    overlap, change = survey.overlap(0, 1), survey.change(1)
    rows = survey.ordered("differ", 1, 10)
    assert overlap[rows].tolist() == sorted(overlap.tolist())[:10]
    losing, gaining = survey.ordered("loses", 1, 50), survey.ordered("gains", 1, 50)
    assert len(losing) == (change < 0).sum()
    assert change[losing].tolist() == sorted(change[change < 0].tolist())
    assert change[gaining].tolist() == sorted(change[change > 0].tolist(), reverse=True)
    assert all(survey.histories[row] == 0 for row in survey.ordered("new", 1, 50))
    assert not {*survey.ordered("new", 1, 50)} & {*survey.ordered("short", 1, 50)}
    assert {*ORDERS} == {"differ", "loses", "gains", "new", "short"}


def test_items_that_move(survey, catalog):
    before, after = (np.zeros(len(catalog.events) + 1, int) for _ in range(2))
    for lists, count in ((survey.contenders[0].lists, before), (survey.contenders[1].lists, after)):
        for item in lists.ravel():
            count[item] += item > 0
    moved = after - before
    for order, sign in (("gain", 1), ("lose", -1)):
        found = survey.moved_items(catalog, order, 1, 7)
        assert (sign * moved[found]).tolist() == sorted((sign * moved).tolist(), reverse=True)[:7]
    listed = survey.moved_items(catalog, "listed", 1, 7)
    assert after[listed].tolist() == sorted(after.tolist(), reverse=True)[:7]
    item = listed[0]
    owners = survey.owners(1, item)
    assert len(owners) == after[item] == survey.listed[1][item]


def test_coverage_and_calibration_are_shares(survey, catalog):
    for place, (_, distinct, (_, popular, _, _)) in enumerate(survey.coverage(catalog)):
        items = survey.contenders[place].lists[survey.contenders[place].lists > 0]
        assert distinct == len({*items.tolist()})
        top = {
            index + 1
            for index in range(len(catalog.ranks))
            if catalog.ranks[index] <= max(1, len(catalog.ranks) // 100)
        }
        assert popular == pytest.approx(np.mean([item in top for item in items.tolist()]))
    ((category, kinds), (tags, _)) = survey.calibration(catalog)
    assert (category, tags) == ("category", "tags")
    assert sum(before for _, before, _ in kinds) == pytest.approx(1)
    for number, one in enumerate(survey.contenders):
        counts = np.bincount(one.lists.ravel() % 3, minlength=3) - [(one.lists == 0).sum(), 0, 0]
        values = {"music": counts[1], "news": counts[2]}  # item 1 is music, item 2 news
        for value, _, shares in kinds:
            if value in values:
                assert shares[number] == pytest.approx(values[value] / counts.sum())
    for name, row in survey.overlaps():
        assert row[survey_index(survey, name)] == pytest.approx(1)


def survey_index(survey, name):
    return [one.name for one in survey.contenders].index(name)


def test_neighbors_by_factors_and_by_lists(survey, factors):
    _, near = survey.neighbors(4)
    vectors = factors.item_factors / factors.item_factors.norm(dim=1, keepdim=True)
    cosines = (vectors @ vectors[3]).tolist()
    cosines[3] = -math.inf
    assert [one for one, _ in near] == [i + 1 for i in np.argsort(-np.array(cosines), kind="stable")[: len(near)]]
    assert near[0][1] == pytest.approx(max(cosines), abs=1e-5)
    item = int(survey.contenders[-1].lists[0][0])
    _, together = replace(survey, grades=None).neighbors(item)
    having = [row for row in survey.contenders[-1].lists.tolist() if item in row]
    for other, share in together:
        assert share == pytest.approx(np.mean([other in row for row in having]))
    assert item not in [one for one, _ in together]


def test_the_sample_is_the_same_for_everybody_and_evenly_spaced(survey, data):
    held_out = sum(shard["users"] for shard in data.manifest["shards"]["test"])
    assert survey.total == held_out
    assert len(survey.users) == min(30, held_out)
    for one in survey.contenders:
        np.testing.assert_array_equal(one.result.user_ids.numpy(), survey.users)


def test_a_period_without_users_is_refused(data):
    empty = replace(data, manifest={**data.manifest, "shards": {**data.manifest["shards"], "test": []}})
    with refused("empty", "split"):
        Survey.of(
            empty,
            contenders_of(["popularity"], data, [5]),
            split="test",
            k=5,
            users=3,
            grades=None,
            advice={},
        )
