"""Sequential rules against loops over one pair and one event at a time, and what they learn."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from recpo.base.feedback import HIGHEST, LEAST_POSITIVE_LEVEL
from recpo.base.types import Histories
from recpo.rewards.counted import SequentialRulesOptions, fit_sequential_rules, rules_of
from tests.refusals import refused

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
            yield owner, np.concatenate([log[u] for u in users]), len(owner)

    return events


def counts_of(log):
    return np.bincount(np.concatenate(log), minlength=ITEMS + 1)[1:]


def rules_by_loop(log, options):
    pairs, counts = defaultdict(float), counts_of(log)
    for items in log:
        for a, one in enumerate(items):
            for distance in range(1, options.window + 1):
                if a + distance < len(items) and one != items[a + distance]:
                    pairs[one, items[a + distance]] += options.decay ** (distance - 1)
    kept = {}
    for j in range(1, ITEMS + 1):
        weights = {i: pairs[a, i] / (counts[j - 1] + options.shrinkage) for a, i in pairs if a == j}
        kept[j] = dict(sorted(weights.items(), key=lambda rule: (-rule[1], rule[0]))[: options.neighbors])
    return kept


@pytest.mark.parametrize("pairs_in_memory", [1 << 24, 100])
def test_rules_are_those_of_a_loop_over_pairs_in_one_pass_or_many(pairs_in_memory):
    log = log_of()
    options = SequentialRulesOptions(3, decay=0.5, shrinkage=2.0, neighbors=6, pairs_in_memory=pairs_in_memory)
    lengths, followers, weights = rules_of(chunks_of(log), counts_of(log), options)
    ends = np.cumsum(lengths)
    assert len(ends) == ITEMS + 1
    assert lengths[0] == 0
    expected = rules_by_loop(log, options)
    for item in range(1, ITEMS + 1):
        own = slice(ends[item - 1], ends[item])
        assert followers[own].tolist() == list(expected[item])
        assert weights[own] == pytest.approx(list(expected[item].values()))


def test_a_log_without_pairs_has_no_rules():
    log = [np.array([4]), np.array([4]), np.array([2, 2])]
    lengths, followers, weights = rules_of(chunks_of(log), counts_of(log), SequentialRulesOptions())
    assert not len(followers) + len(weights) + lengths.sum()


def positives_of(data):
    """The positive training items of every user, in order."""
    shards = [data.load("train", shard) for shard in range(data.num_shards("train"))]
    user, item, positive = (
        np.concatenate([getattr(shard, name) for shard in shards]) for name in ("user_index", "item_index", "positive")
    )
    return [item[positive & (user == one)] for one in np.unique(user)]


def test_scores_are_those_of_a_loop_over_the_positives_of_a_history(data):
    options = SequentialRulesOptions(window=4, decay=0.7, shrinkage=3.0, neighbors=5, max_history=6)
    policy, log = fit_sequential_rules(data, options), positives_of(data)
    pairs, counts = defaultdict(float), np.bincount(np.concatenate(log), minlength=data.num_items + 1)
    for items in log:
        for a, one in enumerate(items):
            for distance, other in enumerate(items[a + 1 : a + 5]):
                pairs[one, other] += 0.7**distance * (one != other)
    rng = np.random.default_rng(0)
    items, levels = rng.integers(1, data.num_items + 1, (4, 9)), rng.integers(0, HIGHEST + 1, (4, 9))
    lengths = np.array([0, 3, 7, 9])
    expected = np.tile(1e-6 * counts[1:] / counts.max(), (4, 1))
    for row, length in enumerate(lengths):
        age, seen = 0, set()
        for place in range(length - 1, max(-1, length - 7), -1):
            item = items[row, place]
            if levels[row, place] < LEAST_POSITIVE_LEVEL or item in seen:
                continue
            seen.add(item)
            own = {i: weight / (counts[item] + 3.0) for (j, i), weight in pairs.items() if j == item and weight}
            for other, weight in sorted(own.items(), key=lambda rule: (-rule[1], rule[0]))[:5]:
                expected[row, other - 1] += 0.7**age * weight
            age += 1
    histories = Histories(torch.from_numpy(items), torch.from_numpy(lengths), torch.from_numpy(levels))
    np.testing.assert_allclose(policy.scores(histories), expected, atol=1e-6)
    # without a rule, popularity
    popular = sorted(range(1, data.num_items + 1), key=lambda item: (-counts[item], item))[:5]
    for width in (0, 9):
        nothing = Histories(torch.zeros(1, width).long(), torch.tensor([0]), torch.zeros(1, width).long())
        assert policy.recommend(nothing, 5).item_ids.tolist() == [popular]


def test_shards_do_not_matter(data, many):
    one, other = (fit_sequential_rules(prepared).state_dict() for prepared in (data, many))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor)


def test_options_out_of_range_are_refused():
    with refused("out_of_range", "baseline_options.sequential_rules.decay"):
        SequentialRulesOptions(decay=1.0)
