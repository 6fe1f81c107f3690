"""Baselines against loops over one event, one pair, one user at a time."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np

from recpo.base.feedback import FeedbackRule
from recpo.rewards.counted import item_scores, recent_counts


class Shards:
    """Prepared data of many shards that are made when they are read."""

    num_items = 5
    feedback = SimpleNamespace(rule=FeedbackRule())

    def __init__(self, shards, events):
        self.shards, self.events = shards, events

    def train_columns(self, names):
        for shard in range(self.shards):
            found = {
                "item_index": np.arange(self.events) % self.num_items + 1,
                "timestamp": 1_000_000 + (7 * shard % self.shards) * 1000 + np.arange(self.events, dtype=np.int64),
                "label": np.arange(self.events) % 2,
                "dislike": np.zeros(self.events, bool),
            }
            yield {name: found[name] for name in names}


class Two(Shards):
    """Two shards with events at the times 0, 50 and 100."""

    num_items = 4

    def train_columns(self, names):
        for item, time in (([1, 1], [0, 100]), ([3, 3, 3], [50, 100, 0])):
            found = {"item_index": np.array(item), "timestamp": np.array(time)}
            found |= {"label": np.array(item) / 3, "dislike": np.array(time) == 0}
            yield {name: found[name] for name in names}


def test_a_half_life_halves_the_count_and_shards_add_up():
    data = Two(2, 5)
    days = 50 / 86_400_000
    assert recent_counts(data, days).tolist() == [[1.25, 0, 1.75, 0], [0, 0, 1.5, 0]]
    rate = 1.5 / 3
    expected = [10 * rate / 11.25, rate, (1.5 + 10 * rate) / 11.75, rate]
    np.testing.assert_allclose(item_scores("recent_rate", data, days), expected)


def test_recency_counts_are_those_of_all_events_at_once():
    data = Shards(shards=11, events=50)
    item, time = (
        np.concatenate([columns[name] for columns in data.train_columns([name])])
        for name in ("item_index", "timestamp")
    )
    tenth = (time.max() - time.min()) / 10
    for days, half_life in ((None, tenth), (0.001, 86_400)):
        expected = np.bincount(item, 0.5 ** ((time.max() - time) / half_life), minlength=6)[1:]
        np.testing.assert_allclose(recent_counts(data, days)[0], expected)


def test_recency_holds_one_shard_at_a_time():
    data = Shards(shards=40, events=100_000)
    tracemalloc.start()
    recent_counts(data, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one_shard = 8 * data.events
    assert peak < 16 * one_shard, "the timestamps of all shards are 40 times that of one"
