"""Segments, and the complete pass: the same numbers for any division of the users into batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recpo.base.feedback import FeedbackRule
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.evaluation.beyond_accuracy import BeyondAccuracy, ItemFacts
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.document import metrics_document
from recpo.evaluation.estimates import estimate
from recpo.evaluation.held_out_pass import Evaluated
from recpo.evaluation.measures import Recommender
from recpo.evaluation.reading import lower_is_better
from recpo.evaluation.segments import item_duration, item_segments
from recpo.lists.reranking import Tags
from tests.reference import ranking_loops

ITEMS, USERS, KS = 40, 90, (5, 12)
SETTING = {"repeats": False, "positive_threshold": 0.75}


def held_out(seed=0):
    """All users in one batch."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randint(0, ITEMS + 1, shape, generator=generator)

    items, seen = draw(USERS, 10), draw(USERS, 60)
    seen *= torch.arange(60) < torch.randint(0, 61, (USERS, 1), generator=generator)
    seen[:4] = 0
    label = torch.rand(USERS, 10, generator=generator)
    dislike = torch.rand(USERS, 10, generator=generator) < 0.2
    positive = FeedbackRule().positive(label, dislike)
    slates = Slates(items, torch.zeros_like(items), items > 0, label=label, dislike=dislike, positive=positive)
    histories = Histories(seen, (seen > 0).sum(1))
    return EvaluationBatch(FeedbackBatch(histories, slates, torch.arange(USERS)), seen, seen)


def rows_of(batch, rows):
    def take(value):
        if isinstance(value, torch.Tensor):
            return value[rows]
        return None if value is None else type(value)(*(take(field) for field in value))

    return take(batch)


def scored():
    """Recommends by a fixed score of (user, item), without what is excluded; scores slates by the same."""
    scores = torch.rand(USERS, ITEMS + 1, generator=torch.Generator().manual_seed(9)).double()

    def recommend(histories, k, exclude):
        allowed = scores[histories.timestamps[:, 0]].scatter(1, exclude, -1)[:, 1:]
        top = allowed.topk(k)
        return Recommendations((top.indices + 1) * (top.values >= 0), top.values)

    def log_prob(feedback):
        return scores[feedback.context_ids[:, None], feedback.slates.item_ids][..., None] - 1

    return Recommender(recommend, log_prob)


def facts():
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(0, 30, (ITEMS + 1,), generator=generator) * (torch.arange(ITEMS + 1) % 7 > 0)
    duration = torch.rand(ITEMS + 1, generator=generator) * 90
    duration[5:9] = math.nan
    tags = Tags.from_pairs(np.arange(1, ITEMS + 1), np.arange(ITEMS) % 4, ITEMS)
    return ItemFacts(counts, duration, tags, torch.randn(ITEMS + 1, 3, generator=generator))


def evaluated(order, sizes):
    whole = held_out()
    whole = whole._replace(
        feedback=whole.feedback._replace(
            histories=whole.feedback.histories._replace(timestamps=torch.arange(USERS)[:, None])
        )
    )
    return evaluate_ranking(
        scored(),
        [rows_of(whole, rows) for rows in order.split(sizes)],
        Ranking(num_items=ITEMS, ks=KS, by_history=True, item_segments=item_segments(facts())),
        measures=[BeyondAccuracy(facts(), KS)],
    )


def test_batches_and_their_order_change_nothing():
    one = evaluated(torch.arange(USERS), [USERS])
    order = torch.randperm(USERS, generator=torch.Generator().manual_seed(2))
    many = evaluated(order, [1, 7, 30, USERS - 38])
    assert torch.equal(many.user_ids, order)
    assert one.counts == many.counts
    assert one.totals == many.totals
    assert one.per_user.keys() == many.per_user.keys()
    for name, values in one.per_user.items():
        torch.testing.assert_close(many.per_user[name], values[order], equal_nan=True)
    for segment, bins in one.user_segments.items():
        for name, inside in bins.items():
            assert torch.equal(many.user_segments[segment][name], inside[order])
    for segment, bins in one.item_segments.items():
        for name, metrics in bins.items():
            for metric, values in metrics.items():
                of_many = many.item_segments[segment][name][metric]
                torch.testing.assert_close(of_many, values[order], equal_nan=True)


def test_bins_of_users_hold_all_users_and_their_means():
    result = evaluated(torch.arange(USERS), [USERS])
    lengths, users = (held_out().exclude > 0).sum(1), result.user_segments["history length"]
    assert tuple(users) == ("new users", "1-4", "5-19", "20-49", "50 and more")
    for name, low, high in zip(users, (0, 1, 5, 20, 50), (0, 4, 19, 49, 999), strict=True):
        inside = (lengths >= low) & (lengths <= high)
        got = result.segments()["history length"][name]["NDCG@5"]
        assert got == pytest.approx(estimate(result.per_user["NDCG@5"][inside]), nan_ok=True)
    assert result.segments()["history length"]["new users"]["repeat_rate@5"].n == 4


def test_bins_of_items_restrict_the_targets_and_keep_the_ranks():
    result, batch = evaluated(torch.arange(USERS), [USERS]), held_out()
    segment = item_segments(facts())[0]
    scores = scored().log_prob(
        FeedbackBatch(None, Slates(torch.arange(ITEMS + 1).expand(USERS, -1), None, None), torch.arange(USERS))
    )[..., 0]
    for user in range(0, USERS, 7):
        rows = zip(*(column[user].tolist() for column in columns_of(batch)), strict=True)
        events = [event for event in rows if event[0]]
        disliked = {item for item, _, dislike in events if dislike}
        seen = set(batch.exclude[user].tolist())
        liked = {item for item, q, _ in events if q >= 0.75} - disliked - seen
        shown = sorted(set(range(1, ITEMS + 1)) - seen, key=lambda item: -scores[user, item])[: max(KS)]
        for index, name in enumerate(segment.bins):
            targets = {item for item in liked if segment.label[item] == index}
            for k in KS:
                for metric in ("NDCG", "Recall", "HitRate"):
                    got = result.item_segments["item popularity"][name][f"{metric}@{k}"][user].item()
                    assert got == pytest.approx(ranking_loops.metrics(shown, targets, k)[metric], rel=1e-5, nan_ok=True)


def columns_of(batch):
    slates = batch.feedback.slates
    return slates.item_ids, slates.label, slates.dislike


def test_durations_fall_into_quartiles_and_unknown_ones_apart():
    segment = item_duration(torch.tensor([0.0, 4.0, 8.0, 12.0, 16.0, math.nan]))
    assert segment.bins == ("under 7 s", "7 to 10 s", "10 to 13 s", "13 s and more", "unknown")
    assert segment.label.tolist() == [-1, 0, 1, 2, 3, 4]
    assert item_duration(torch.full((3,), math.nan)).bins == ("known", "unknown")
    assert set(item_duration(torch.full((3,), 5.0)).bins) == {"under 5 s", "5 s and more"}


def test_graded_gains_of_quartiles():
    items, shown = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 1, 2]])
    slates = Slates(
        items, torch.zeros_like(items), items > 0, label=torch.tensor([[0.3, 1.0, 0.2]]), positive=items == 2
    )
    seen = torch.zeros(1, 1, dtype=torch.long)
    batch = EvaluationBatch(FeedbackBatch(Histories(seen, torch.tensor([0])), slates, torch.tensor([0])), seen, seen)
    recommender = Recommender(lambda histories, k, exclude: Recommendations(shown, shown.float()))
    for gain, gains in (("linear", (0.3, 1.0, 0.2)), ("exponential", (1, 7, 0))):
        result = evaluate_ranking(recommender, [batch], Ranking(num_items=3, ks=(3,), gain=gain))
        expected = ranking_loops.graded_ndcg([3, 1, 2], dict(enumerate(gains, 1)), 3)
        assert result.per_user["gNDCG@3"].item() == pytest.approx(expected)


def test_the_document_holds_segments_and_totals():
    result = evaluated(torch.arange(USERS), [USERS])
    contenders = [Evaluated("a", "bundle", result), Evaluated("b", "baseline", result)]
    document = metrics_document(contenders, setting=SETTING)
    entry = document["contenders"][0]
    assert set(entry["totals"]) == {f"{name}@{k}" for name in ("coverage", "gini", "overlap") for k in KS}
    assert set(entry["segments"]) == {"history length", "item popularity", "item duration"}
    assert document["setting"]["segments"]["item popularity"] == ["head", "torso", "tail", "unseen in training"]
    of_bins = {f"{name}@{k}" for name in ("NDCG", "Recall", "HitRate") for k in KS}
    assert set(entry["segments"]["item popularity"]["head"]) == of_bins
    assert entry["off_policy"] == []
    assert document["differences"][0]["metrics"]["AUC_other"]["mean"] == 0


def test_the_document_holds_bootstrap_intervals_where_asked():
    result = evaluated(torch.arange(USERS), [USERS])
    result.per_user["nothing"] = torch.full((USERS,), math.nan)
    contenders = [Evaluated("a", "run", result)]
    metrics = metrics_document(contenders, setting=SETTING, bootstrap_resamples=500)["contenders"][0]["metrics"]
    assert metrics["nothing"] == {"mean": None, "half_width": None, "n": 0, "low": None, "high": None}
    value = metrics["NDCG@5"]
    assert value["low"] < value["mean"] < value["high"]
    assert value["high"] - value["low"] == pytest.approx(2 * value["half_width"], rel=0.25)
    assert "low" not in metrics_document(contenders, setting=SETTING)["contenders"][0]["metrics"]["NDCG@5"]


def test_which_way_is_better():
    document = {"setting": {"further_metrics": {"age@5": "lower", "NDCG@7": "higher"}}}
    assert lower_is_better("age@5", document)
    assert lower_is_better("disliked@10", document)
    assert lower_is_better("miscalibration@5", document)
    assert not lower_is_better("disliked_rank@10", document)
    assert not lower_is_better("NDCG@10", document)


def test_differences_are_of_the_metrics_that_both_have():
    result = evaluated(torch.arange(USERS), [USERS])
    silent = {name: values for name, values in result.per_user.items() if not name.startswith("AUC")}
    other = type(result)(**{**vars(result), "per_user": silent})
    contenders = [Evaluated("a", "baseline", other), Evaluated("b", "run", result)]
    document = metrics_document(contenders, setting=SETTING)
    assert "AUC_other" not in document["differences"][0]["metrics"]
    assert np.isclose(document["differences"][0]["metrics"]["NDCG@5"]["mean"], 0)
