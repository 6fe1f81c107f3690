"""Lists of code tuples: the closed forms against every order, against draws and against the ranking metrics."""

from __future__ import annotations

import json
import math
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from recpo.evaluation.beyond_accuracy import TupleLists, expected_hit_rate, expected_ndcg, expected_recall
from recpo.ops.ranking import hit_rate, ndcg, ranked_hits, recall
from tests.reference import ranking_loops

METRICS = {"HitRate": expected_hit_rate, "Recall": expected_recall, "NDCG": expected_ndcg}


def lists_of(tuples, targets):
    """One user's list: ``tuples`` of items."""
    items = torch.tensor([[len(t) for t in tuples]])
    hits = torch.tensor([[len(set(t) & set(targets)) for t in tuples]])
    return TupleLists(items, hits, torch.tensor([len(targets)]))


def test_the_vector():
    vectors = json.loads((Path(__file__).parents[1] / "objectives" / "objectives.json").read_text())["vectors"]
    vector = next(v for v in vectors if v["id"] == "metrics.sid_collision")
    inputs = vector["inputs"]
    tuples = [inputs["items_per_sid"][sid] for sid in inputs["beam_sids"]]
    expected = vector["expected"]["item_level_expected_hit_uniform_order_inside_sid"]
    lists = lists_of(tuples, [inputs["target"]])
    for metric in (expected_hit_rate, expected_recall):
        assert metric(lists, [inputs["K"]]).item() == pytest.approx(expected)
    assert expected_ndcg(lists, [inputs["K"]]).item() == pytest.approx(expected / math.log2(3))


tuple_lists = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(
    lambda sizes: [[f"{t}{i}" for i in range(size)] for t, size in enumerate(sizes)]
)


@settings(max_examples=40, deadline=None)
@given(tuple_lists, st.data(), st.integers(1, 12))
def test_expectation_over_every_order(tuples, data, k):
    items = [item for t in tuples for item in t]
    targets = data.draw(st.lists(st.sampled_from([*items, "elsewhere"]), max_size=5, unique=True))
    lists = lists_of(tuples, targets)
    shown = [[item for t in order for item in t] for order in product(*(permutations(t) for t in tuples))]
    for name, metric in METRICS.items():
        expected = np.mean([ranking_loops.metrics(row, targets, k)[name] for row in shown])
        assert metric(lists, [k]).item() == pytest.approx(expected, rel=1e-5, abs=1e-9, nan_ok=True)


def test_draws_of_many_lists():
    generator = torch.Generator().manual_seed(0)
    users, places, draws, ks = 6, 8, 4000, [3, 10, 40]
    num_items = torch.randint(0, 9, (users, places), generator=generator)
    num_hits = (torch.rand(users, places, generator=generator) * (num_items + 1)).long() // 2
    lists = TupleLists(num_items, num_hits, num_hits.sum(1) + 1)
    for user in range(users):
        tuple_of = torch.arange(places).repeat_interleave(num_items[user])
        nth = torch.cat([torch.arange(n) for n in num_items[user]])
        order = (tuple_of + torch.rand(draws, len(tuple_of), generator=generator)).argsort(1) + 1
        target = torch.cat([torch.nonzero(nth < num_hits[user][tuple_of])[:, 0] + 1, torch.tensor([999])])
        hits = ranked_hits(order, target.expand(draws, -1), torch.ones(draws, len(target), dtype=torch.bool))
        for expected, drawn in ((expected_hit_rate, hit_rate), (expected_recall, recall), (expected_ndcg, ndcg)):
            values = drawn(hits, ks)
            bound = 4.5 * values.std(0) / math.sqrt(draws) + 1e-6
            one = TupleLists(*(field[user : user + 1] for field in lists))
            assert ((expected(one, ks)[0] - values.mean(0)).abs() < bound).all()


def test_tuples_of_one_item_are_an_ordinary_ranking():
    lists, targets = torch.tensor([[4, 2, 9, 1]]), torch.tensor([[9, 4, 7]])
    hits = ranked_hits(lists, targets, targets > 0)
    single = TupleLists(torch.ones(1, 4).long(), hits.hit.long(), hits.num_targets)
    for expected, plain in ((expected_hit_rate, hit_rate), (expected_recall, recall), (expected_ndcg, ndcg)):
        torch.testing.assert_close(expected(single, [1, 3, 6]).float(), plain(hits, [1, 3, 6]))


def test_users_without_targets_have_no_value():
    lists = TupleLists(torch.tensor([[2, 0]]), torch.tensor([[0, 0]]), torch.tensor([0]))
    assert all(metric(lists, [1]).isnan().all() for metric in METRICS.values())
