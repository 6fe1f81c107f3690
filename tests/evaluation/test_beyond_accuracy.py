from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.evaluation import beyond_accuracy
from recpo.evaluation.beyond_accuracy import (
    POPULARITY_BINS,
    BeyondAccuracy,
    Exposure,
    ItemFacts,
    diversity,
    gini,
    list_overlap,
    miscalibration,
    popularity_bins,
    tag_diversity,
    tag_entropy,
)
from recpo.evaluation.measures import Observed
from recpo.lists.reranking import Tags
from recpo.ops.exposures import Targets
from tests.reference import list_loops

KS = (1, 3, 7)


def tags_of(sets, num_tags=5):
    """``sets``: one of tags per item 1, 2, ..."""
    offsets = np.cumsum([0, 0, *(len(tags) for tags in sets)])
    return Tags(offsets, np.array([tag for tags in sets for tag in sorted(tags)], np.int64), num_tags)


def observed(lists, seen):
    lists, seen = torch.tensor(lists), torch.tensor(seen)
    slates = Slates(lists, lists, lists > 0)
    batch = EvaluationBatch(
        FeedbackBatch(Histories(seen, (seen > 0).sum(1)), slates, torch.arange(len(seen))), seen, seen
    )
    none = torch.zeros_like(lists, dtype=torch.bool)
    return Observed(batch, Recommendations(lists, torch.zeros(lists.shape)), Targets(lists, none, none, none), None)


def test_coverage_and_gini_are_over_all_lists():
    exposure = Exposure(num_items=8, ks=[1, 2])
    exposure.add(torch.tensor([[1, 2], [1, 3]]))
    exposure.add(torch.tensor([[4, 1], [0, 0]]))
    totals = exposure.totals()
    assert totals["coverage@1"] == 2 / 8
    assert totals["coverage@2"] == 4 / 8
    assert totals["gini@2"] == pytest.approx(list_loops.gini([3, 1, 1, 1, 0, 0, 0, 0]))
    assert totals["overlap@1"] == pytest.approx(1 / 3)


def test_overlap_is_the_mean_over_pairs_of_users():
    generator = np.random.default_rng(0)
    lists = [sorted(generator.choice(np.arange(1, 13), 4, replace=False)) for _ in range(9)]
    exposure = Exposure(num_items=12, ks=[4])
    exposure.add(torch.tensor(lists[:5]))
    exposure.add(torch.tensor([*lists[5:], [0, 0, 0, 0]]))
    shared = [len(set(one) & set(other)) / 4 for one, other in itertools.combinations(lists, 2)]
    assert exposure.totals()["overlap@4"] == pytest.approx(np.mean(shared))
    assert list_overlap(torch.tensor([7, 7, 7, 0]), 7) == 1
    assert math.isnan(list_overlap(torch.tensor([1, 1, 0]), 1))


def test_gini_at_its_ends():
    assert gini(torch.full((7,), 3)) == pytest.approx(0)
    assert gini(torch.tensor([0, 0, 0, 12])) == pytest.approx(3 / 4)
    assert math.isnan(gini(torch.zeros(5)))
    counts = np.random.default_rng(0).integers(0, 9, 40)
    assert gini(torch.from_numpy(counts)) == pytest.approx(list_loops.gini(counts.tolist()))


def test_popularity_bins_worked_by_hand():
    # of 100 events items 1 and 3 hold the first half, item 2 crosses 80 %, item 5 has none
    bins = popularity_bins(torch.tensor([0, 40, 20, 30, 5, 0, 5]))
    assert [POPULARITY_BINS[b] for b in bins[1:]] == ["head", "torso", "head", "tail", "unseen in training", "tail"]
    assert bins[0] == -1
    assert (popularity_bins(torch.zeros(4, dtype=torch.long))[1:] == 3).all()


users = st.lists(
    st.tuples(
        st.lists(st.integers(1, 9), max_size=7, unique=True).map(lambda items: (items + [0] * 7)[:7]),
        st.lists(st.integers(0, 9), min_size=6, max_size=6),
    ),
    min_size=1,
    max_size=4,
)
items = st.lists(
    st.tuples(st.integers(0, 20), st.sets(st.integers(0, 4), max_size=3), st.sampled_from([-1.0, 0.0, 2.0])),
    min_size=9,
    max_size=9,
)


@settings(max_examples=40, deadline=None)
@given(users, items)
def test_every_metric_of_lists_agrees_with_loops(users, items):
    counts = {item: row[0] for item, row in enumerate(items, 1)}
    tags = {item: row[1] for item, row in enumerate(items, 1)}
    vectors = {item: (row[2], 0.5 * item * abs(row[2])) for item, row in enumerate(items, 1)}
    rows = torch.tensor([(0, 0), *vectors.values()])
    facts = ItemFacts(torch.tensor([0, *counts.values()]), tags=tags_of(tags.values()), vectors=rows)
    label = [POPULARITY_BINS[b] for b in popularity_bins(facts.train_count)[1:]]
    assert label == [list_loops.bins(counts)[item] for item in counts]
    found = BeyondAccuracy(facts, KS).update(observed([shown for shown, _ in users], [seen for _, seen in users]))
    for user, (shown, seen) in enumerate(users):
        for k in KS:
            first = shown[:k]
            expected = {
                "novelty": list_loops.novelty(first, counts),
                "popularity_lift": list_loops.popularity_lift(first, seen, counts),
                "tail_share": list_loops.tail_share(first, counts),
                "repeat_rate": list_loops.repeat_rate(first, seen),
                "diversity": list_loops.diversity(first, vectors),
                "tag_diversity": list_loops.tag_diversity(first, tags),
                "tag_entropy": list_loops.tag_entropy(first, tags),
                "miscalibration": list_loops.miscalibration(first, seen, tags),
            }
            for name, value in expected.items():
                got = found[f"{name}@{k}"][user].item()
                assert got == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (name, k)


def test_diversity_worked_by_hand():
    same, right_angle = [[1.0, 0.0]] * 2, [[1.0, 0.0], [0.0, 1.0]]
    assert diversity(torch.tensor([same, right_angle]), [2])[:, 0].tolist() == pytest.approx([0, 1])
    # one tag each: the share of pairs whose tags differ
    tags = tags_of([{0}, {0}, {1}, {2}])
    assert tag_diversity(torch.tensor([[1, 2, 3]]), tags, [2, 3])[0].tolist() == pytest.approx([0, 2 / 3])


def test_lists_with_the_tags_of_the_history_are_calibrated():
    tags = tags_of([{0}, {0}, {1}, {1, 2}, set()])
    assert miscalibration(torch.tensor([[1, 3]]), torch.tensor([[2, 2, 3, 3]]), tags, [2]).item() == pytest.approx(0)
    lost = miscalibration(torch.tensor([[1, 2]]), torch.tensor([[3, 0]]), tags, [2])  # alpha alone keeps it finite
    assert lost.item() == pytest.approx(math.log(1 / 0.01))
    assert miscalibration(torch.tensor([[5, 0], [1, 2]]), torch.tensor([[1], [5]]), tags, [2]).isnan().all()


def test_a_catalog_without_tags_has_no_value():
    tags, lists = Tags.from_pairs(np.zeros(0, np.int64), np.zeros(0, np.int64), 4), torch.tensor([[1, 2]])
    assert tag_entropy(lists, tags, [2]).isnan().all()
    assert miscalibration(lists, torch.tensor([[3]]), tags, [2]).isnan().all()


def test_many_tags_are_taken_in_chunks_of_users(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    tags = tags_of([{item % 3, 3 + item % 2} for item in range(9)])
    lists, seen = torch.randint(0, 10, (2, 11, 6), generator=generator)
    whole = tag_diversity(lists, tags, KS), miscalibration(lists, seen, tags, KS)
    monkeypatch.setattr(beyond_accuracy, "_CELLS_AT_ONCE", 12)
    torch.testing.assert_close(tag_diversity(lists, tags, KS), whole[0], equal_nan=True)
    torch.testing.assert_close(miscalibration(lists, seen, tags, KS), whole[1], equal_nan=True)


def test_only_the_facts_at_hand_are_measured():
    found = BeyondAccuracy(ItemFacts(torch.tensor([0, 3, 1])), [1]).update(observed([[2]], [[1]]))
    assert set(found) == {"novelty@1", "popularity_lift@1", "tail_share@1", "repeat_rate@1"}
    assert found["popularity_lift@1"].item() == pytest.approx(1 / 3 - 1)
    assert found["novelty@1"].item() == pytest.approx(math.log2(6 / 2))
