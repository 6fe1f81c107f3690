"""``allow`` and ``deny`` in the server's JSON: filtered items are not listed, drawn or re-ranked."""

from __future__ import annotations

import pytest

from recpo.lists.exploration import Exploration
from recpo.lists.reranking import AttributeCap, RerankOptions
from recpo.server.bundles import LoadedBundle, Reranking
from recpo.server.ranking import Query, Ranker
from tests.refusals import refused
from tests.server.conftest import answers
from tests.serving.test_filters import FILTERS, PAST, bundle, fits, table  # noqa: F401  a fixture

pytestmark = pytest.mark.slow

FILMS = {"category": ["film"]}


def films():
    return {row["item_id"] for row in table().to_pylist() if row["category"] == "film"}


def test_lists_and_draws_are_of_what_is_allowed(bundle):  # noqa: F811
    loaded = LoadedBundle.load(bundle.root, "b")
    past = [{**event, "label": 0.5} for event in PAST]
    left = films() - {"i3", "i7"}
    seen = set()
    for uniform in (0.0, 1.0):
        ranker = Ranker(Exploration(temperature=2.0, epsilon=uniform, shortlist=20), seed=0)
        for _ in range(30):
            queries = [Query(past, k=3, explore=True, allow=FILMS), Query(past, k=3, explore=True)]
            filtered, free = ranker.rank(loaded, queries)
            assert set(filtered.items) <= left
            assert len(free.items) == 3
            seen |= set(filtered.items) if uniform else set()
    assert seen == left  # a uniform slate may be any of them
    short = Ranker().rank(loaded, [Query(past, k=45, allow=FILMS)])[0]
    assert set(short.items) == left


def test_requests_filter_and_faults_name_the_field(bundle):  # noqa: F811
    async def calls(server):
        async def post(**more):
            body = {"user_id": 1, "history": PAST, "k": 8, **more}
            return await server.client.post("/v1/recommend", json=body)

        lists = [(await post(allow=allow, deny=deny)).json()["items"] for allow, deny in FILTERS]
        wrong = [await post(deny={"genre": ["x"]}), await post(allow={"tags": ["x"]}), await post(allow={"tags": 3})]
        metrics = (await server.client.get("/metrics")).text
        return lists, [(one.status_code, one.json()["detail"]) for one in wrong], metrics

    lists, wrong, metrics = answers(bundle.root, calls)
    for found, (allow, deny) in zip(lists, FILTERS, strict=True):
        expected = bundle.recommend_one(PAST, 8, allow=allow, deny=deny)
        assert [item["item_id"] for item in found] == [item for item, _ in expected]
        rows = {row["item_id"]: row for row in table().to_pylist()}
        assert all(fits(rows.get(item["item_id"], {}), allow, deny) for item in found)
    assert [status for status, _ in wrong] == [422] * 3
    assert "deny.genre: attributes of this bundle are" in wrong[0][1]
    assert "allow.tags: values of this attribute are integers" in wrong[1][1]
    assert "allow.tags" in wrong[2][1]
    assert f"recpo_short_lists_total {float(sum(len(one) < 8 for one in lists))}" in metrics


def test_re_ranking_reads_the_attributes_of_the_bundle(bundle):  # noqa: F811
    known = Reranking(AttributeCap("category", at_most=1), RerankOptions()).known(bundle)
    assert known.attribute("category").offsets[-1] == sum(
        row["category"] is not None for row in table().to_pylist() if row["item_id"] != "i99"
    )
    with refused("missing_column", "genre"):
        Reranking(AttributeCap("genre"), RerankOptions()).known(bundle)
