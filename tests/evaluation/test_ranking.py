from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from recpo.evaluation.ranking import (
    hit_rate,
    is_member,
    mean_average_precision,
    mrr,
    ndcg,
    precision,
    ranked_hits,
    recall,
)
from tests.reference import ranking_loops

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
    # published values: targets at ranks 1, 4 and 11 and nowhere, k = 10
    lists = torch.arange(1, 21).expand(4, -1)
    hits = ranked_hits(lists, torch.tensor([[1], [4], [11], [99]]), torch.ones(4, 1, dtype=torch.bool))
    assert hit_rate(hits, [10]).mean().item() == pytest.approx(0.5)
    assert ndcg(hits, [10]).mean().item() == pytest.approx(0.3576691395183483)
    assert mrr(hits, [10]).mean().item() == pytest.approx(0.3125)


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
    with pytest.raises(ValueError, match=r"expected item_ids \[B, K\]"):
        ranked_hits(torch.ones(2, 3), torch.ones(3, 1), torch.ones(3, 1).bool())
