from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import ndcg_score

from recpo.ops.ranking import (
    accuracy,
    accuracy_of_bin,
    graded_ndcg,
    hit_rate,
    is_member,
    mean_average_precision,
    mean_rank,
    mrr,
    ndcg,
    precision,
    ranked_hits,
    recall,
)
from tests.reference import ranking_loops
from tests.refusals import refused

VECTORS = Path(__file__).parents[1] / "objectives" / "objectives.json"
VECTOR = next(v for v in json.loads(VECTORS.read_text())["vectors"] if v["id"] == "metrics.ranking")
METRICS = {
    "HitRate": hit_rate,
    "Recall": recall,
    "Precision": precision,
    "NDCG": ndcg,
    "MRR": mrr,
    "MAP": mean_average_precision,
}


def hits_of(lists, targets):
    width = max(1, *(len(t) for t in targets))
    padded = torch.tensor([[*t, *[0] * (width - len(t))] for t in targets])
    mask = torch.tensor([[True] * len(t) + [False] * (width - len(t)) for t in targets])
    return ranked_hits(torch.tensor(lists), padded, mask)


def test_metrics_worked_by_hand():
    # targets 7 and 3 at ranks 1 and 3, target 9 not found
    hits = hits_of([[7, 1, 3, 2]], [[3, 7, 9]])
    log3, log4 = math.log2(3), 2.0
    expected = {
        "HitRate": [1, 1, 1],
        "Recall": [1 / 3, 1 / 3, 2 / 3],
        "Precision": [1, 1 / 2, 2 / 4],
        "NDCG": [1, 1 / (1 + 1 / log3), (1 + 1 / log4) / (1 + 1 / log3 + 1 / log4)],
        "MRR": [1, 1, 1],
        "MAP": [1, 1 / 2, (1 + 2 / 3) / 3],
    }
    for name, values in expected.items():
        assert METRICS[name](hits, [1, 2, 4])[0].tolist() == pytest.approx(values), name


def test_single_targets_at_known_ranks():
    inputs, expected = VECTOR["inputs"], VECTOR["expected"]
    ranks = [[99 if rank is None else rank] for rank in inputs["rank_of_target"]]
    lists = torch.arange(1, 21).expand(len(ranks), -1)  # item = rank
    hits = ranked_hits(lists, torch.tensor(ranks), torch.ones(len(ranks), 1, dtype=torch.bool))
    for name, metric in (("HR", hit_rate), ("NDCG", ndcg), ("MRR", mrr)):
        assert metric(hits, [inputs["K"]]).mean().item() == pytest.approx(expected[name])


def test_users_without_targets_are_nan_and_repeats_count_once():
    hits = hits_of([[1, 2], [1, 2]], [[], [2, 2, 2]])
    for metric in METRICS.values():
        values = metric(hits, [2])[:, 0]
        assert values[0].isnan()
        assert not values[1].isnan()
    assert recall(hits, [2])[1].item() == 1
    assert hits.num_targets.tolist() == [0, 1]


def test_empty_places_and_masked_targets_are_never_hits():
    hits = ranked_hits(torch.tensor([[0, 5, 4]]), torch.tensor([[0, 5, 4]]), torch.tensor([[True, False, True]]))
    assert hits.hit.tolist() == [[0, 0, 1]]
    assert hits.num_targets.tolist() == [1]


def test_ndcg_agrees_with_scikit_learn():
    rng = np.random.default_rng(0)
    scores, relevant = rng.normal(size=(50, 40)), rng.random((50, 40)) < 0.15
    relevant[:, 0] = True
    order = torch.from_numpy(np.argsort(-scores, axis=1) + 1)
    items = torch.arange(1, 41).expand(50, -1)
    hits = ranked_hits(order, items, torch.from_numpy(relevant))
    ours = ndcg(hits, [1, 5, 10, 40]).mean(0)
    theirs = [ndcg_score(relevant.astype(float), scores, k=k) for k in (1, 5, 10, 40)]
    assert ours.tolist() == pytest.approx(theirs, rel=1e-5)


def test_mean_rank_is_cut_after_k():
    hits = hits_of([[7, 1, 3, 2], [7, 1, 3, 2]], [[3, 7, 9], []])
    assert mean_rank(hits, [1, 4])[0].tolist() == pytest.approx([(1 + 2 + 2) / 3, (1 + 3 + 5) / 3])
    assert mean_rank(hits, [4])[1].isnan()


def test_graded_ndcg_worked_by_hand():
    # gains 3 of item 5, 1 of item 8 (the larger of its two), 0 of item 4; item 9 is unknown
    hits = (torch.tensor([[8, 9, 5, 4]]), torch.tensor([[8, 5, 8, 4, 0]]), torch.tensor([[1, 3, 0.5, 0, 7]]))
    expected = [1 / 3, 1 / (3 + 1 / math.log2(3)), (1 + 3 / 2) / (3 + 1 / math.log2(3))]
    assert graded_ndcg(*hits, [1, 2, 4])[0].tolist() == pytest.approx(expected)


def test_graded_ndcg_agrees_with_scikit_learn():
    rng = np.random.default_rng(1)
    scores, gains = rng.normal(size=(50, 40)), rng.random((50, 40)) * (rng.random((50, 40)) < 0.3)
    gains[:, 0] = 0.5
    order = torch.from_numpy(np.argsort(-scores, axis=1) + 1)
    hits = (order, torch.arange(1, 41).expand(50, -1), torch.from_numpy(gains))
    theirs = [ndcg_score(gains, scores, k=k) for k in (1, 5, 10, 40)]
    assert graded_ndcg(*hits, [1, 5, 10, 40]).mean(0).tolist() == pytest.approx(theirs, rel=1e-5)


users = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60), max_size=45),  # crosses the width at which the look-up changes its method
        st.permutations(range(1, 13)).map(lambda items: items[:8]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(users, st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True))
def test_agrees_with_loops(users, ks):
    hits = hits_of([recommended for _, recommended in users], [targets for targets, _ in users])
    for name, metric in METRICS.items():
        expected = [[ranking_loops.metrics(shown, targets, k)[name] for k in ks] for targets, shown in users]
        torch.testing.assert_close(
            metric(hits, ks), torch.tensor(expected).float(), equal_nan=True, rtol=1e-5, atol=1e-6
        )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=15),
    st.permutations(range(1, 13)),
    st.integers(1, 14),
)
def test_graded_ndcg_and_mean_rank_agree_with_loops(events, shown, k):
    best = {}
    for item, gain in events:
        if item:
            best[item] = max(best.get(item, 0), gain)
    items, gains = torch.tensor([[i for i, _ in events]]).long(), torch.tensor([[g for _, g in events]])
    got = graded_ndcg(torch.tensor([shown]), items, gains, [k])
    assert got.item() == pytest.approx(ranking_loops.graded_ndcg(shown, best, k), rel=1e-5, nan_ok=True)
    rank = mean_rank(ranked_hits(torch.tensor([shown]), items, items > 0), [k])
    assert rank.item() == pytest.approx(ranking_loops.mean_rank(shown, best, k), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("width", [3, 40])
def test_is_member_agrees_with_sets(width):
    generator = torch.Generator().manual_seed(width)
    items = torch.randint(0, 30, (20, 15), generator=generator)
    of = torch.randint(0, 30, (20, width), generator=generator)
    mask = torch.rand(20, width, generator=generator) < 0.7
    expected = [
        [item != 0 and item in {o for o, m in zip(row, keep, strict=True) if m} for item in shown]
        for shown, row, keep in zip(items.tolist(), of.tolist(), mask.tolist(), strict=True)
    ]
    assert is_member(items, of, mask).tolist() == expected


def test_empty_sets_and_empty_batches():
    assert not is_member(torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)).any()
    hits = ranked_hits(torch.zeros(0, 5, dtype=torch.long), torch.zeros(0, 2).long(), torch.zeros(0, 2).bool())
    assert all(metric(hits, [3]).shape == (0, 1) for metric in METRICS.values())


def test_shapes_that_do_not_fit_are_refused():
    with refused("wrong_shape", "item_ids"):
        ranked_hits(torch.ones(2, 3), torch.ones(3, 1), torch.ones(3, 1).bool())


repeating = st.lists(st.integers(0, 6), min_size=1, max_size=9)


@given(st.lists(st.tuples(repeating, st.lists(st.integers(1, 6), max_size=8)), min_size=1, max_size=4))
def test_no_list_has_a_metric_above_1_however_often_it_repeats_an_item(users):
    width = max(len(shown) for shown, _ in users)
    lists = [shown + [0] * (width - len(shown)) for shown, _ in users]
    hits = hits_of(lists, [targets for _, targets in users])
    for name, metric in METRICS.items():
        values = metric(hits, [1, 3, 9])
        assert not (values > 1 + 1e-6).any(), name
        assert not (values < 0).any(), name


@given(repeating, st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_a_repeated_item_counts_at_its_first_place(shown, targets):
    first = [item if item not in shown[:place] else 0 for place, item in enumerate(shown)]
    for metric in METRICS.values():
        assert torch.equal(metric(hits_of([shown], [targets]), [2, 9]), metric(hits_of([first], [targets]), [2, 9]))
    gains = torch.arange(1.0, len(targets) + 1)[None]
    graded = [graded_ndcg(torch.tensor([ids]), torch.tensor([targets]), gains, [9]) for ids in (shown, first)]
    assert torch.equal(*graded)
    assert not (graded[0] > 1 + 1e-6).any()


def test_targets_are_the_distinct_ones_ascending():
    hits = hits_of([[1, 2], [1, 2]], [[7, 3, 7], [5]])
    assert hits.targets.tolist() == [[3, 7, 0], [5, 0, 0]]


def test_items_beyond_a_wide_set_that_is_full():
    assert is_member(torch.tensor([[1, 40, 41, 99]]), torch.arange(1, 41)[None]).tolist() == [
        [True, True, False, False]
    ]


def test_names_of_the_metrics():
    positive, disliked = hits_of([[7, 1, 3, 2]], [[3, 7]]), hits_of([[7, 1, 3, 2]], [[1, 9]])
    found = accuracy(positive, disliked, [1, 2])
    assert {name.split("@")[0] for name in found} == {
        *METRICS, "disliked", "disliked_hit_rate", "disliked_MRR", "disliked_rank"
    }  # fmt: skip
    assert found["Recall@1"].tolist() == found["Recall@2"].tolist() == [0.5]
    assert found["Precision@2"].tolist() == [0.5]
    of_disliked = [found[f"disliked{name}@2"].item() for name in ("", "_hit_rate", "_MRR", "_rank")]
    assert of_disliked == pytest.approx([0.5, 1.0, 0.5, (2 + 3) / 2])
    of_bin = accuracy_of_bin(positive, [2])
    assert of_bin.keys() == {"NDCG@2", "Recall@2", "HitRate@2"}
    assert of_bin["HitRate@2"].tolist() == [1.0]
