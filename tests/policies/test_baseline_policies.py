"""Baselines as policies: the lists of the evaluation's baselines, exact probabilities, and bundles of them."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

import recpo
from recpo.base.feedback import HIGHEST
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.contenders import BaselineOptions, baseline
from recpo.log.prepared import Prepared
from recpo.policies.baseline import PopularityPolicy, distinct_positives
from recpo.verbs.contenders import SERVED, served_baseline
from tests.refusals import refused


@pytest.fixture(scope="module")
def data(prepared):
    return Prepared.open(prepared)


@pytest.fixture(scope="module")
def held_out(data):
    (batch,) = evaluation_batches(data.root, "valid", 200, 512)
    return batch


@pytest.mark.parametrize("name", [name for name in SERVED if not name.startswith("segment")])  # no table of users here
def test_a_policy_lists_what_the_baseline_lists(name, data, held_out):
    served = served_baseline(name, data)
    histories, past = held_out.feedback.histories, held_out.exclude
    theirs = baseline(name, data, BaselineOptions()).load().recommend(histories, 10, past)
    ours = served.policy.recommend(histories, 10, past)
    same = (ours.item_ids == theirs.item_ids).float().mean()
    assert same > 0.999, name  # ties aside, which rounding may break
    assert (ours.scores <= 1e-6).all()


@pytest.mark.parametrize("name", ["item_rate", "allrank"])
def test_probabilities_add_up_and_are_those_of_lists_and_slates(name, data, held_out):
    policy = served_baseline(name, data).policy
    histories = held_out.feedback.histories
    every = policy.recommend(histories, data.num_items)
    assert every.scores.exp().sum(1).allclose(torch.ones(len(every.scores)))
    slates = Slates(every.item_ids, histories.lengths[:, None].expand_as(every.item_ids), every.item_ids > 0)
    logp = policy.log_prob(FeedbackBatch(histories, slates, held_out.user_ids))
    assert logp[..., 0].allclose(every.scores, atol=1e-5)


def test_a_prefix_is_scored_as_a_history_of_its_own(data, held_out):
    policy = served_baseline("implicit_als", data).policy
    histories = held_out.feedback.histories.rows(torch.arange(3)).up_to(torch.tensor([6, 6, 6]))
    items = torch.arange(1, 5).expand(3, -1)
    visible = torch.tensor([[0, 2, 2, 6]] * 3)
    mask = torch.ones_like(items, dtype=torch.bool)
    logp = policy.log_prob(FeedbackBatch(histories, Slates(items, visible, mask), torch.arange(3)))
    for column, seen in enumerate([0, 2, 2, 6]):
        prefix = histories.up_to(torch.full((3,), seen))
        ranked = policy.recommend(prefix, data.num_items)
        place = (ranked.item_ids == column + 1).float().argmax(1)
        assert logp[:, column, 0].allclose(ranked.scores.gather(1, place[:, None])[:, 0], atol=1e-5)


def test_distinct_positives_are_the_same_in_exported_programs(monkeypatch):
    torch.manual_seed(0)
    ids, feedback = torch.randint(0, 6, (50, 12)), torch.randint(0, HIGHEST + 1, (50, 12))
    lengths = torch.randint(0, 13, (50,))
    histories = Histories(ids, lengths, feedback)
    for most in (3, 12):
        found = distinct_positives(histories, most)
        with monkeypatch.context() as exporting:
            exporting.setattr(torch.compiler, "is_exporting", lambda: True)
            assert torch.equal(distinct_positives(histories, most), found)
        # each at its last place, which sequential rules count from
        assert not found[:, :-1][(ids[:, :-1] == ids[:, -1:]) & found[:, -1:]].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["popularity", "implicit_als", "allrank"])
def test_a_bundle_of_a_baseline_lists_and_scores_like_it(name, data, held_out, tmp_path):
    bundle = recpo.export(name, prepared=data, out=tmp_path / "bundle", k=5)
    assert bundle.manifest.origin["baseline"] == name
    histories = pd.read_parquet(data.root / "histories.parquet")
    lists = bundle.recommend(histories, k=5)
    again = recpo.recommend(name, histories, k=5, prepared=data)
    assert lists[["user_id", "item_id"]].equals(again[["user_id", "item_id"]])


def test_a_baseline_needs_its_data_and_a_yardstick_is_not_served(data, tmp_path):
    with refused("missing_option", "prepared"):
        recpo.export("popularity", out=tmp_path / "bundle")
    with refused("unsupported", "run"):
        recpo.export("random", prepared=data, out=tmp_path / "bundle")
    with refused("out_of_range", "k"):
        PopularityPolicy(4).recommend(Histories(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1)), 5)
    assert not (tmp_path / "bundle").exists()
