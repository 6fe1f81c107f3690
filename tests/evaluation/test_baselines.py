"""Baselines against loops over one event, one pair, one user at a time."""

from __future__ import annotations

import math
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest
import torch

from recpo.base.types import Histories
from recpo.evaluation.baselines import (
    CooccurrenceBaseline,
    CooccurrenceOptions,
    decayed_counts,
    neighbors_of,
    recent_counts,
)

ITEMS = 30


def log_of(users=40, seed=0):
    """Histories by user: some are empty or short, items repeat."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, ITEMS + 1, rng.integers(0, 25)) for _ in range(users)]


def chunks_of(log, parts=3):
    def events():
        for part in range(parts):
            users = range(part, len(log), parts)
            owner = np.concatenate([np.full(len(log[u]), u, np.int32) for u in users])
            yield {"user_index": owner, "item_index": np.concatenate([log[u] for u in users])}

    return events


def histories_of(log, length=25):
    ids = torch.zeros(len(log), length, dtype=torch.long)
    for row, items in enumerate(log):
        ids[row, : len(items)] = torch.from_numpy(items)
    return Histories(ids, torch.tensor([len(items) for items in log]))


def weights_by_loop(log, options):
    counts = defaultdict(float)
    for items in log:
        for a in range(len(items)):
            for b in range(a + 1, min(a + options.window, len(items) - 1) + 1):
                if items[a] != items[b]:
                    counts[items[a], items[b]] += 1
                    counts[items[b], items[a]] += 1
    total = defaultdict(float)
    for (i, _), count in counts.items():
        total[i] += count
    weights = {}
    for (i, j), count in counts.items():
        expected = total[i] if options.weight == "conditional" else math.sqrt(total[i] * total[j])
        weights[i, j] = count / (expected + options.shrinkage)
    kept = {}
    for i in range(1, ITEMS + 1):
        ranked = sorted((-w, j) for (a, j), w in weights.items() if a == i)[: options.neighbors]
        kept[i] = {j: -w for w, j in ranked}
    return kept


def lists_by_loop(log, kept, counts, k, exclude, recent):
    lists = []
    for items, banned in zip(log, exclude, strict=True):
        score = defaultdict(float)
        for rank, item in enumerate(items[::-1][:recent], 1):
            for j, weight in kept[item].items():
                score[j] += weight / rank
        near = sorted((j for j in score if j not in banned), key=lambda j: (-round(score[j], 6), j))[:k]
        popular = sorted(range(1, ITEMS + 1), key=lambda j: (-counts[j - 1], j))
        near += [j for j in popular if j not in banned and j not in near][: k - len(near)]
        lists.append((near + [0] * k)[:k])
    return lists


@pytest.mark.parametrize("weight", ["cosine", "conditional"])
@pytest.mark.parametrize("pairs_in_memory", [1 << 24, 100])
def test_neighbors_are_those_of_a_loop_over_pairs_in_one_pass_or_many(weight, pairs_in_memory):
    log = log_of()
    options = CooccurrenceOptions(window=3, neighbors=6, weight=weight, shrinkage=2.0, pairs_in_memory=pairs_in_memory)
    offsets, item_ids, weights = neighbors_of(chunks_of(log), ITEMS, options)
    assert len(offsets) == ITEMS + 2
    assert offsets[1] == 0
    expected = weights_by_loop(log, options)
    for item in range(1, ITEMS + 1):
        own = slice(offsets[item], offsets[item + 1])
        found = dict(zip(item_ids[own].tolist(), weights[own].tolist(), strict=True))
        assert list(found) == list(expected[item])
        assert list(found.values()) == pytest.approx(list(expected[item].values()), rel=1e-6)


@pytest.mark.parametrize("k", [5, ITEMS])
def test_lists_are_those_of_a_loop_over_users(k):
    log, rng = log_of(seed=1), np.random.default_rng(2)
    options = CooccurrenceOptions(window=2, neighbors=4, shrinkage=0.0, recent_events=3)
    counts = np.bincount(np.concatenate(log), minlength=ITEMS + 1)[1:]
    exclude = rng.integers(0, ITEMS + 1, (len(log), 8))
    recommender = CooccurrenceBaseline(neighbors_of(chunks_of(log), ITEMS, options), torch.from_numpy(counts), 3)
    shown = recommender.recommend(histories_of(log), k, torch.from_numpy(exclude))
    banned = [set(row.tolist()) - {0} for row in exclude]
    assert shown.item_ids.tolist() == lists_by_loop(log, weights_by_loop(log, options), counts, k, banned, 3)
    assert (shown.scores.diff(dim=1)[shown.item_ids[:, 1:] > 0] <= 0).all()
    assert (shown.scores[shown.item_ids == 0] == -torch.inf).all()


def test_an_empty_history_gets_the_most_popular_items():
    recommender = CooccurrenceBaseline(neighbors_of(chunks_of(log_of()), ITEMS), torch.arange(ITEMS))
    shown = recommender.recommend(Histories(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long)), 3)
    assert shown.item_ids.tolist() == [[ITEMS, ITEMS - 1, ITEMS - 2]]
    assert shown.scores.tolist() == [[0, 0, 0]]


def test_a_log_without_pairs_is_popularity():
    log = [np.array([4]), np.array([4]), np.array([2, 2])]
    recommender = CooccurrenceBaseline(neighbors_of(chunks_of(log), ITEMS), torch.arange(ITEMS))
    assert recommender.recommend(histories_of(log), 2).item_ids.tolist() == [[ITEMS, ITEMS - 1]] * 3


def test_a_half_life_halves_the_count_and_chunks_add_up():
    item, time = np.array([1, 1, 3, 3, 3]), np.array([0, 100, 50, 100, 0])
    counts = decayed_counts(item, time, num_items=4, end=100, half_life=50)
    assert counts.tolist() == [1.25, 0, 1.75, 0]
    parts = [decayed_counts(item[s], time[s], num_items=4, end=100, half_life=50) for s in (slice(2), slice(2, 5))]
    assert sum(parts).tolist() == counts.tolist()


class Shards:
    """Prepared data of many shards that are made when they are read."""

    num_items = 5

    def __init__(self, shards, events):
        self.shards, self.events = shards, events

    def train_columns(self, names):
        for shard in range(self.shards):
            found = {
                "item_index": np.arange(self.events) % self.num_items + 1,
                "timestamp": 1_000_000 + (7 * shard % self.shards) * 1000 + np.arange(self.events, dtype=np.int64),
            }
            yield {name: found[name] for name in names}


def test_recency_counts_are_those_of_all_events_at_once():
    data = Shards(shards=11, events=50)
    item, time = (
        np.concatenate([columns[name] for columns in data.train_columns([name])])
        for name in ("item_index", "timestamp")
    )
    tenth = (time.max() - time.min()) / 10
    for days, half_life in ((None, tenth), (0.001, 86_400)):
        expected = decayed_counts(item, time, num_items=5, end=int(time.max()), half_life=half_life)
        np.testing.assert_allclose(recent_counts(data, days), expected)


def test_recency_holds_one_shard_at_a_time():
    data = Shards(shards=40, events=100_000)
    tracemalloc.start()
    recent_counts(data, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one_shard = 8 * data.events
    assert peak < 8 * one_shard, "the timestamps of all shards are 40 times that of one"
