"""Drawn slates: the logged propensity is the probability of the draw."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from recpo.lists.exploration import Exploration
from recpo.server.bundles import LoadedBundle, Versions
from recpo.server.impressions import settle, validate_propensities
from recpo.server.ranking import Query, Ranker
from tests.refusals import refused
from tests.server.conftest import answers, event, request

MIXED = Exploration(temperature=2.0, epsilon=0.3, shortlist=8)
PAST = Query([event(3), event(7)], ["item-50"], k=3, explore=True)


@pytest.fixture(scope="module")
def loaded(bundle):
    return LoadedBundle.load(bundle.root, "bundle")


@pytest.mark.slow
def test_frequencies_are_the_propensities_that_are_logged(loaded):
    """5,000 slates of one user: how often an item was shown, against what its rows say."""
    ranker, draws = Ranker(MIXED, seed=1), 5_000
    shown = [slate for _ in range(draws // 500) for slate in ranker.rank(loaded, [PAST] * 500)]
    places = Counter(item for slate in shown for item in slate.items)
    said = {item: p for slate in shown for item, p in zip(slate.items, slate.propensity, strict=True)}
    assert not {"item-3", "item-7", "item-50"} & places.keys()
    assert len(places) > 110  # of 117 that may be listed
    total = 3 * draws
    for item, propensity in said.items():
        spread = np.sqrt(propensity * (1 - propensity) / total)
        assert abs(places[item] / total - propensity) < 6 * spread, item
    assert sum(said.values()) == pytest.approx(1, abs=0.05)
    assert np.mean([slate.is_random for slate in shown]) == pytest.approx(0.3, abs=0.04)


def test_scores_are_the_policys_own_and_unknown_outside_its_list(loaded, bundle):
    ranker = Ranker(MIXED, seed=2)
    whole = dict(bundle.recommend_one(PAST.history, None, PAST.exclude))
    best = list(whole)[:3]
    for slate in ranker.rank(loaded, [PAST] * 200):
        for item, score, explored in zip(slate.items, slate.scores, slate.explored, strict=True):
            assert explored == (item not in best)
            assert score is None or score == whole[item]
            assert score is not None or slate.is_random


def test_queries_of_one_batch_have_separate_exploration_and_lengths(loaded, bundle):
    ranker = Ranker(Exploration(temperature=3.0, shortlist=20), seed=3)
    queries = [Query([event(3)], k=k, explore=explore) for k in (1, 4, 4, 20) for explore in (False, True)]
    found = ranker.rank(loaded, queries)
    assert [len(slate.items) for slate in found] == [1, 1, 4, 4, 4, 4, 20, 20]
    for slate, query in zip(found, queries, strict=True):
        best = [item for item, _ in bundle.recommend_one(query.history, query.k)]
        assert query.explore or (slate.items == best and set(slate.propensity) == {1 / query.k})
    assert set(found[-1].items) == set(found[-2].items)  # all that the shortlist has, in another order


def test_temperature_zero_is_the_deterministic_slate(loaded):
    cold = Ranker(Exploration(temperature=0.0, shortlist=20)).rank(loaded, [PAST])[0]
    best = Ranker().rank(loaded, [Query(PAST.history, PAST.exclude, k=PAST.k)])[0]
    assert cold == best


def test_the_log_says_what_was_drawn_and_a_request_may_decline(bundle, tmp_path):
    async def calls(server):
        found = []
        for user in range(60):
            body = request(user) | ({"explore": user % 3 > 0} if user % 3 < 2 else {})
            found.append((await server.client.post("/v1/recommend", json=body)).json())
        return found, (await server.client.get("/metrics")).text

    found, metrics = answers(bundle.root, calls, log=tmp_path, sync=False, exploration=MIXED)
    settle(tmp_path)
    rows = pq.read_table(tmp_path).to_pylist()
    sent = {
        (user, item["item_id"]): item["propensity"] for user, answer in enumerate(found) for item in answer["items"]
    }
    assert {(row["user_id"], row["item_id"]): row["propensity"] for row in rows} == sent
    assert {row["propensity"] for row in rows if row["user_id"] % 3 == 0} == {0.2}
    assert any(row["is_random"] for row in rows)
    for request_id in {row["request_id"] for row in rows}:
        assert len({row["is_random"] for row in rows if row["request_id"] == request_id}) == 1
    explored = sum(item["explored"] for answer in found for item in answer["items"])
    assert explored
    assert f'recpo_items_shown_total{{explored="true"}} {explored}.0' in metrics


def test_a_shortlist_beyond_the_bundle_is_refused_at_the_start(bundle):
    with refused("out_of_range", "k"):
        answers(bundle.root, None, exploration=Exploration())
    assert Versions(bundle.root, shortlist=20).current.bundle.k == 20


@pytest.mark.parametrize(
    ("items", "propensity", "refusal"),
    [
        (["a", "b"], [0.5, 0.0], ("bad_value", "propensity")),
        (["a", "b"], [float("nan"), 0.5], ("bad_value", "propensity")),
        (["a"], [1.5], ("bad_value", "propensity")),
        (["a", "b"], [0.75, 0.5], ("out_of_range", "propensity")),
        (["a", "a"], [0.25, 0.25], ("duplicate", "items")),
        (["a", "b"], [0.25], ("duplicate", "items")),
    ],
)
def test_propensities_that_cannot_weigh_a_row_are_found(items, propensity, refusal):
    with refused(*refusal):
        validate_propensities(items, propensity)


def test_a_slate_with_an_invalid_propensity_is_neither_sent_nor_logged(bundle, tmp_path, monkeypatch, caplog):
    rank = Ranker.rank

    def wrong(self, *args):
        return [replace(shown, propensity=[0.0, *shown.propensity[1:]]) for shown in rank(self, *args)]

    async def calls(server):
        good = await server.client.post("/v1/recommend", json=request(1))
        monkeypatch.setattr(Ranker, "rank", wrong)
        bad = await server.client.post("/v1/recommend", json=request(2))
        return good.status_code, bad, (await server.client.get("/metrics")).text

    good, bad, metrics = answers(bundle.root, calls, log=tmp_path)
    assert (good, bad.status_code) == (200, 500)
    assert "propensities" in bad.json()["detail"]
    assert "propensity 0.0" in caplog.text
    assert "recpo_invalid_propensities_total 1.0" in metrics
    settle(tmp_path)
    assert {row["user_id"] for row in pq.read_table(tmp_path).to_pylist()} == {1}
