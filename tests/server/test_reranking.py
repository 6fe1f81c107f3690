"""Slates that the server chooses as a whole, alone and before exploration."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.lists.exploration import Exploration
from recpo.lists.reranking import AttributeCap, Calibration, Determinantal, RerankOptions, reranked
from recpo.server.bundles import LoadedBundle, Reranking, Versions
from recpo.server.options import ServerOptions
from recpo.server.ranking import Query, Ranker
from tests.refusals import refused
from tests.server.conftest import answers, event, post, process, request
from tests.serving.conftest import NUM_ITEMS, K

PAST = Query([event(3), event(7)], ["item-50"], k=5)


@pytest.fixture(scope="module")
def attributes(tmp_path_factory):
    """Every third item has the same author."""
    file = tmp_path_factory.mktemp("attributes") / "items.parquet"
    names = [f"item-{number}" for number in range(1, NUM_ITEMS + 1)]
    pq.write_table(pa.table({"item_id": names, "author": [number % 3 for number in range(1, NUM_ITEMS + 1)]}), file)
    return file


def authors(items):
    return [int(item.removeprefix("item-")) % 3 for item in items]


@pytest.fixture(scope="module")
def capped(bundle, attributes):
    reranking = Reranking(AttributeCap("author", 2), RerankOptions(K, attributes))
    return reranking, LoadedBundle.load(bundle.root, "bundle", reranking=reranking)


def test_a_cap_holds_for_every_length_and_scores_are_the_policys_own(capped, bundle):
    reranking, loaded = capped
    own = dict(bundle.recommend_one(PAST.history, None, PAST.exclude))
    ranker = Ranker(reranking=reranking)
    for k in (3, 5, 6):
        (found,) = ranker.rank(loaded, [Query(PAST.history, PAST.exclude, k=k)])
        assert max(np.bincount(authors(found.items))) <= 2
        assert found.scores == pytest.approx([own[item] for item in found.items])
        assert found.propensity == pytest.approx([1 / k] * k)
        assert not any(found.explored)
    queries = [PAST, Query([], k=6), Query(PAST.history, PAST.exclude, k=3)]
    alone = [ranker.rank(loaded, [query])[0].items for query in queries]
    assert [slate.items for slate in ranker.rank(loaded, queries)] == alone


def test_vectors_of_the_bundle_give_the_slate_of_the_function(bundle):
    reranking = Reranking(Determinantal(0.3), RerankOptions(K))
    loaded = LoadedBundle.load(bundle.root, "bundle", reranking=reranking)
    (found,) = Ranker(reranking=reranking).rank(loaded, [PAST])
    inputs = bundle.reader.read_request(PAST)
    items, scores = bundle.runtime.recommend(inputs, K)
    (order,) = reranked(Determinantal(0.3), items, scores, [5], loaded.known, inputs.item_ids, K)
    assert found.items == bundle.items.to_external(items[0, order[:5]]).to_pylist()
    assert found.items != bundle.items.to_external(items[0, :5]).to_pylist()


def test_exploration_draws_from_the_reranked_list(capped):
    """At a low temperature the first places of the new order are drawn, and explored is measured against them."""
    reranking, loaded = capped
    best = Ranker(reranking=reranking).rank(loaded, [PAST])[0].items
    query = Query(PAST.history, PAST.exclude, k=5, explore=True)
    cold = Ranker(Exploration(temperature=0.0, shortlist=K), reranking=reranking).rank(loaded, [query])[0]
    assert cold.items == best
    drawn = Ranker(Exploration(shortlist=K), reranking=reranking, seed=0).rank(loaded, [query] * 50)
    said = {}
    for slate in drawn:
        assert [item not in best for item in slate.items] == slate.explored
        for item, propensity in zip(slate.items, slate.propensity, strict=True):
            assert said.setdefault(item, propensity) == pytest.approx(propensity)
    assert sum(said.values()) == pytest.approx(1, abs=0.05)


def test_the_server_reranks_and_a_swap_reads_the_attributes_of_the_other_items(versions, attributes):
    async def calls(server):
        first = await server.client.post("/v1/recommend", json=request(), timeout=60)
        server.service.versions.swap("9")
        second = await server.client.post("/v1/recommend", json=request(), timeout=60)
        return [[one["item_id"] for one in answer.json()["items"]] for answer in (first, second)]

    options = {"rerank": AttributeCap("author", 2), "rerank_options": RerankOptions(K, attributes)}
    one, other = answers(versions, calls, **options)
    assert one != other
    assert max(np.bincount(authors(one)).max(), np.bincount(authors(other)).max()) <= 2


def test_missing_inputs_are_reported_before_it_listens(bundle, attributes):
    def loaded(**options):
        chosen = ServerOptions(**options)
        load = partial(LoadedBundle.load, reranking=chosen.reranking)
        return Versions(bundle.root, shortlist=chosen.shortlist, load=load)

    with refused("out_of_range", "k"):
        loaded(rerank=Determinantal())
    with refused("unknown_name", "author"):
        loaded(rerank=Calibration("author"), rerank_options=RerankOptions(K))
    with refused("missing_column", "writer"):
        loaded(rerank=AttributeCap("writer"), rerank_options=RerankOptions(K, attributes))


@pytest.mark.slow
def test_the_command_line_takes_a_method_and_its_options(bundle, attributes):
    flags = ["--rerank", "AttributeCap", "--rerank.attribute", "author", "--rerank.at_most", 2]
    flags += ["--rerank_options.attributes", attributes, "--rerank_options.shortlist", K]
    with process(bundle.root, *flags) as server:
        answer = post(f"{server.url}/v1/recommend", json=request())
    assert max(np.bincount(authors(one["item_id"] for one in answer.json()["items"]))) <= 2
