"""The oracle of a simulated log, and each contender's share of its gain."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.catalog_ranking import RankingResult
from recpo.evaluation.document import headroom, share
from recpo.evaluation.true_rewards import true_rewards
from recpo.log.prepared import Prepared


@pytest.fixture(scope="module")
def found(world, prepared):
    return recpo.evaluate(prepared, ["popularity", "random"], ks=[5, 10], truth=world, off_policy=None)


def loop_oracle(known, user, exclude, k):
    """Internal ids of the best items of one user, item by item."""
    scored = []
    for item in range(1, len(known.item_ids) + 1):
        if item not in exclude:
            one = known.truth.expected_reward(known.user_ids[[user]], known.item_ids[[[item - 1]]], known.day)
            scored.append((-float(one[0, 0]), item))
    return [item for _, item in sorted(scored)[:k]]


@pytest.mark.parametrize("repeats", [False, True])
def test_the_oracle_lists_the_best_items_that_may_be_listed(world, prepared, repeats):
    """Also where the catalog is in another order, and lacks items of the simulation that were never shown."""
    known = true_rewards(world, Prepared.open(prepared), "test", [5])
    known = replace(known, item_ids=np.random.default_rng(0).permutation(known.item_ids)[:50])
    batch = next(iter(evaluation_batches(prepared, "test", 1, 8, repeats=repeats)))
    lists = known.oracle().lists(batch, 7)
    for row, user in enumerate(batch.user_ids.tolist()):
        expected = loop_oracle(known, user, set(batch.exclude[row].tolist()), 7)
        rewards = known.of_lists(batch.user_ids[[row]], torch.tensor([expected]))["true_reward@5"]
        assert known.of_lists(batch.user_ids[[row]], lists.item_ids[[row]])["true_reward@5"] == pytest.approx(rewards)
        assert lists.item_ids[row].tolist() == expected


def test_no_contender_exceeds_the_oracle_or_is_compared_with_it(found):
    document = found.document
    entries = {one["name"]: one for one in document["contenders"]}
    assert list(entries) == ["popularity", "random", "oracle", "logging policy"]
    best = entries["oracle"]["metrics"]
    for entry in entries.values():
        assert all(entry["metrics"][f"true_reward@{k}"]["mean"] <= best[f"true_reward@{k}"]["mean"] for k in (5, 10))
    assert not any("oracle" in (pair["contender"], pair["against"]) for pair in document["differences"])
    assert entries["oracle"]["off_policy"] == []
    page = found.html()
    assert 'id="headroom"' in page
    assert "share of the headroom" in page


def test_shares_are_those_of_the_means(found):
    document = found.document
    rewards = {one["name"]: one["metrics"]["true_reward@5"]["mean"] for one in document["contenders"]}
    assert document["headroom"]["start"] == "logging policy"
    assert document["headroom"]["start_is"].startswith("no run is pre-trained")
    at_5 = document["headroom"]["metrics"]["true_reward@5"]
    assert (at_5["start"], at_5["oracle"]) == (rewards["logging policy"], rewards["oracle"])
    assert at_5["contenders"].keys() == {"popularity", "random"}
    for name, value in at_5["contenders"].items():
        expected = (rewards[name] - at_5["start"]) / (at_5["oracle"] - at_5["start"])
        assert value["mean"] == pytest.approx(expected, rel=1e-4)


def result_of(values):
    users = torch.arange(len(values))
    return RankingResult(users, {"true_reward@5": torch.tensor(values)}, {}, {}, {}, {})


def configured(objective, **options):
    lines = "".join(f"    {name}: {value}\n" for name, value in options.items())
    return {"configuration": f"objective:\n  class_path: recpo.{objective}\n  init_args:\n{lines or '    x: 1'}"}


@pytest.mark.parametrize(
    ("runs", "start"),
    [
        ({"a": configured("Likelihood", positive_only="false"), "b": configured("GBPO")}, "a"),
        ({"a": configured("Likelihood", positive_only="true"), "b": configured("GBPO")}, "logging policy"),
        ({"a": configured("Likelihood"), "b": configured("Likelihood")}, "logging policy"),
        ({"a": {"configuration": "objective: [1"}, "b": {}}, "logging policy"),
    ],
)
def test_the_start_is_the_only_pretrained_policy_or_the_logging_policy(runs, start):
    values = {"a": [0.2, 0.4], "b": [0.5, 0.6], "oracle": [0.9, 1.0], "logging policy": [0.1, 0.1]}
    found = headroom({name: result_of(value) for name, value in values.items()}, runs)
    assert found["start"] == start
    assert found["metrics"]["true_reward@5"]["contenders"].keys() == {"a", "b", "logging policy"} - {start}
    assert headroom({name: result_of(value) for name, value in values.items() if name != "oracle"}, runs) is None


def test_the_interval_of_a_share_is_that_of_the_bootstrap():
    rng = np.random.default_rng(0)
    start = rng.uniform(0, 0.5, 400)
    oracle = start + rng.uniform(0.1, 0.5, 400)
    value = start + (oracle - start) * rng.uniform(-0.2, 1, 400)
    value[:7] = np.nan
    found = share(value, start, oracle)
    kept = slice(7, None)
    assert found.mean == pytest.approx((value - start)[kept].sum() / (oracle - start)[kept].sum())
    assert found.n == 393
    drawn = rng.integers(393, size=(4000, 393)) + 7
    ratios = (value - start)[drawn].sum(1) / (oracle - start)[drawn].sum(1)
    assert found.half_width == pytest.approx(1.96 * ratios.std(), rel=0.06)
    assert share(start, start, oracle)[:2] == (0.0, 0.0)
    assert share(oracle, start, oracle).mean == 1.0
    assert math.isnan(share(oracle, oracle, start).mean)
