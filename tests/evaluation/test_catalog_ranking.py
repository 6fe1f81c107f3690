from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from recpo.artifacts.outputs import write_json
from recpo.base.errors import RecpoError
from recpo.base.feedback import FeedbackRule
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.contenders import UniformlyRandom
from recpo.evaluation.document import metrics_document
from recpo.evaluation.estimates import estimate
from recpo.evaluation.held_out_pass import Evaluated
from recpo.evaluation.measures import Recommender
from recpo.ops.exposures import held_out_targets
from recpo.rewards.counted import popularity_of
from tests.reference import ranking_loops
from tests.refusals import refused


def allowing_repeats(batch):
    return batch._replace(exclude=batch.past[:, :0])


def batch_of(items, quantiles, dislikes=None, seen=None, context_ids=None):
    items = torch.tensor(items)
    label = torch.tensor(quantiles, dtype=torch.float32)
    dislike = torch.zeros_like(items).bool() if dislikes is None else torch.tensor(dislikes)
    positive = FeedbackRule().positive(label, dislike)
    slates = Slates(items, torch.zeros_like(items), items > 0, label=label, dislike=dislike, positive=positive)
    seen = torch.zeros(len(items), 1, dtype=torch.long) if seen is None else torch.tensor(seen)
    histories = Histories(seen, (seen > 0).sum(1))
    rows = torch.arange(len(items)) if context_ids is None else torch.tensor(context_ids)
    return EvaluationBatch(FeedbackBatch(histories, slates, rows), seen, seen)


def always(*lists):
    def recommend(histories, k, exclude):
        ids = torch.tensor(lists)[:, :k]
        return Recommendations(ids, torch.zeros(ids.shape))

    return Recommender(recommend)


def columns_of(batch):
    slates = batch.feedback.slates
    return slates.item_ids, slates.label, slates.dislike, batch.exclude


def random_batches(users=200, items=50, batch=64, seed=0):
    rng = np.random.default_rng(seed)
    for start in range(0, users, batch):
        n = min(batch, users - start)
        yield batch_of(
            rng.integers(0, items + 1, (n, 9)).tolist(),
            rng.random((n, 9)).tolist(),
            (rng.random((n, 9)) < 0.15).tolist(),
            rng.integers(0, items + 1, (n, 40)).tolist(),
            list(range(start, start + n)),
        )


def test_positives_are_liked_and_never_disliked():
    batch = batch_of([[1, 2, 3, 1, 0]], [[0.9, 0.75, math.nan, 0.2, 1.0]], [[False, False, False, True, False]])
    targets = held_out_targets(batch)
    assert targets.positive.tolist() == [[False, True, False, False, False]]  # item 1 was disliked later on
    assert targets.disliked.tolist() == [[False, False, False, True, False]]


def test_hand_worked_evaluation():
    batch = batch_of([[1, 2, 3], [4, 5, 0]], [[0.9, 0.9, 0.1], [0.1, 0.1, 0.0]], [[False, False, True], [False] * 3])
    result = evaluate_ranking(always([1, 3], [2, 6]), [batch], Ranking(num_items=6, ks=(1, 2)))
    assert result.estimate("Recall@2") == (0.5, pytest.approx(math.nan, nan_ok=True), 1)
    assert result.estimate("NDCG@2").mean == pytest.approx(1 / (1 + 1 / math.log2(3)))
    assert result.estimate("disliked@2").mean == pytest.approx(1 / 2)
    assert result.estimate("disliked_hit_rate@1").mean == 0
    assert [result.totals[f"coverage@{k}"] for k in (1, 2)] == pytest.approx([2 / 6, 4 / 6])
    assert result.counts["users"] == 2
    assert result.counts["users_with_positives"] == 1


@pytest.mark.parametrize("repeats", [False, True])
def test_streamed_evaluation_agrees_with_loops(repeats):
    recommender = UniformlyRandom(50, seed=3)
    shown = []

    def recommend(histories, k, exclude):
        answer = recommender.recommend(histories, k, exclude)
        shown.extend(answer.item_ids.tolist())
        return answer

    batches = (allowing_repeats(batch) if repeats else batch for batch in random_batches())
    result = evaluate_ranking(Recommender(recommend), batches, Ranking(num_items=50, ks=(5, 20)))
    rows = [row for batch in random_batches() for row in zip(*map(Tensor.tolist, columns_of(batch)), strict=True)]
    for k in (5, 20):
        for user, (items, quantiles, dislikes, seen) in enumerate(rows):
            disliked = {i for i, d in zip(items, dislikes, strict=True) if d and i}
            liked = {i for i, q in zip(items, quantiles, strict=True) if q >= 0.75 and i} - disliked
            removed = set() if repeats else set(seen)
            for name, value in ranking_loops.metrics(shown[user], liked - removed, k).items():
                got = result.per_user[f"{name}@{k}"][user].item()
                assert got == pytest.approx(value, rel=1e-5, nan_ok=True)
            expected = ranking_loops.metrics(shown[user], disliked - removed, k)["Precision"]
            assert result.per_user[f"disliked@{k}"][user].item() == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_seen_targets_are_removed_and_counted_only_when_seen_items_are_excluded():
    batch = batch_of([[1, 2]], [[0.9, 0.9]], seen=[[2, 9]])
    without = evaluate_ranking(always([1, 3]), [batch], Ranking(num_items=9, ks=(2,)))
    assert without.estimate("Recall@2").mean == 1
    assert without.counts["positive_events_excluded"] == 1
    kept = evaluate_ranking(always([1, 3]), [allowing_repeats(batch)], Ranking(num_items=9, ks=(2,)))
    assert kept.estimate("Recall@2").mean == 0.5
    assert kept.counts["positive_events_excluded"] == 0


def test_a_recommender_that_ignores_exclusions_is_refused():
    batch = batch_of([[1]], [[0.9]], seen=[[2]])
    with refused("bad_value", "exclude"):
        evaluate_ranking(always([2, 3]), [batch], Ranking(num_items=9, ks=(2,)))


def test_nonsense_is_refused():
    batch = batch_of([[1]], [[0.9]])
    with refused("duplicate", "the recommender"):
        evaluate_ranking(always([2, 3, 2]), [batch], Ranking(num_items=9, ks=(3,)))
    unstable = Recommender(always([2]).recommend, lambda feedback: torch.full((1, 1, 2), math.nan))
    with refused("diverged", "log_prob"):
        evaluate_ranking(unstable, [batch], Ranking(num_items=9, ks=(1,)))
    assert evaluate_ranking(always([2, 0, 0]), [batch], Ranking(num_items=9, ks=(3,))).estimate("Recall@3").mean == 0


@pytest.mark.parametrize(("batches", "ks"), [([], (10,)), ([batch_of([[1]], [[1.0]])], (0,)), ([], (5, 5)), ([], ())])
def test_nothing_to_evaluate_is_an_error(batches, ks):
    with pytest.raises(RecpoError):
        evaluate_ranking(always([1]), batches, Ranking(num_items=3, ks=ks))


class SumOfIds:
    """A measure with a metric of its own and a total."""

    def __init__(self):
        self.users = 0

    def update(self, observed):
        self.users += len(observed.lists.item_ids)
        return {"sum@1": observed.lists.item_ids[:, 0] + 10 * observed.batch.user_ids}

    def totals(self):
        return {"lists": self.users}


def test_measures_add_metrics_and_totals():
    batch = batch_of([[1], [2]], [[0.9], [0.9]])
    lists = always([1, 2], [3, 4])
    result = evaluate_ranking(lists, [batch], Ranking(num_items=4, ks=(1,)), measures=[SumOfIds()])
    assert result.per_user["sum@1"].tolist() == [1, 13]
    assert result.totals["lists"] == 2
    with pytest.raises(RecpoError) as raised:
        evaluate_ranking(lists, [batch], Ranking(num_items=4, ks=(1,)), measures=[SumOfIds(), SumOfIds()])
    assert (raised.value.code, raised.value.field) == ("duplicate", "sum@1")


def test_interval_is_normal_and_paired_differences_are_narrower():
    values = torch.tensor([0.0, 1.0, 1.0, 0.0, math.nan])
    mean, half_width, n = estimate(values)
    assert (mean, n) == (0.5, 4)
    assert half_width == pytest.approx(1.96 * np.std([0, 1, 1, 0], ddof=1) / 2, rel=1e-3)
    assert math.isnan(estimate(torch.tensor([math.nan])).mean)
    batches = list(random_batches())
    a, b = (
        evaluate_ranking(Recommender(popularity_of(counts).recommend), batches, Ranking(num_items=50, ks=(10,)))
        for counts in (np.arange(50), np.arange(50)[::-1].copy())
    )
    same = a.difference(a, "NDCG@10")
    assert same.mean == same.half_width == 0
    assert a.difference(b, "NDCG@10").mean == pytest.approx(a.estimate("NDCG@10").mean - b.estimate("NDCG@10").mean)


def test_popularity_ranks_by_count_then_id_without_the_excluded():
    recommender = popularity_of(np.array([5, 9, 5, 0]))
    histories = Histories(torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    ids, scores = recommender.recommend(histories, 3, torch.tensor([[0, 0, 0], [2, 2, 0], [1, 2, 3]]))
    assert ids.tolist() == [[2, 1, 3], [1, 3, 4], [4, 0, 0]]
    assert scores[0, 0].item() == pytest.approx(math.log(9 / 19))
    assert scores[2].tolist()[1:] == [-math.inf, -math.inf]


def test_random_lists_are_distinct_allowed_and_uniform_at_every_place():
    recommender = UniformlyRandom(20, seed=1)
    histories = Histories(torch.zeros(4000, 1, dtype=torch.long), torch.zeros(4000, dtype=torch.long))
    exclude = torch.tensor([[3, 7]]).expand(4000, -1)
    ids = recommender.recommend(histories, 5, exclude).item_ids
    assert not torch.isin(ids, torch.tensor([3, 7, 0])).any()
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    free = recommender.recommend(histories, 5).item_ids
    frequencies = torch.stack([torch.bincount(column, minlength=21)[1:] for column in free.T])
    assert (frequencies - 200).abs().max() < 5 * math.sqrt(200)


def test_the_document_of_two_baselines(tmp_path):
    batches = list(random_batches())
    contenders = [
        Evaluated(name, "baseline", evaluate_ranking(Recommender(baseline.recommend), batches, Ranking(num_items=50)))
        for name, baseline in (("popularity", popularity_of(np.ones(50))), ("random", UniformlyRandom(50)))
    ]
    document = metrics_document(contenders, setting={"repeats": False, "positive_threshold": 0.75})
    write_json(tmp_path / "metrics.json", document)
    read = json.loads((tmp_path / "metrics.json").read_text())
    assert read["contenders"][0]["metrics"]["NDCG@10"]["n"] == contenders[0].result.counts["users_with_positives"]
    assert read["differences"][0]["contender"] == "random"
    assert "excluded" in read["conventions"]["past_items"]


def test_undefined_numbers_are_null_in_the_document():
    result = evaluate_ranking(always([1]), [batch_of([[1]], [[0.0]])], Ranking(num_items=3, ks=(1,)))
    setting = {"repeats": True, "positive_threshold": 0.75}
    document = metrics_document([Evaluated("x", "run", result)], setting=setting)
    assert document["contenders"][0]["metrics"]["NDCG@1"] == {"mean": None, "half_width": None, "n": 0}


def scoring(logp, name="broken"):
    return Recommender(always([2]).recommend, lambda feedback: torch.tensor([[logp]]), name)


@pytest.mark.parametrize("logp", [0.5, math.inf, math.log(2.1)])
def test_positive_log_probabilities_are_refused_and_name_the_contender(logp):
    batch = batch_of([[1]], [[0.9]])
    with refused("out_of_range", "log_prob") as raised:
        evaluate_ranking(scoring([logp]), [batch], Ranking(num_items=9, ks=(1,)))
    assert str(raised.value).startswith("broken ")


def test_rounding_above_0_and_masked_places_are_accepted():
    assert (
        evaluate_ranking(scoring([1e-6]), [batch_of([[1]], [[0.9]])], Ranking(num_items=9, ks=(1,))).counts["users"]
        == 1
    )

    def log_prob(feedback):  # the held-out items come first, then unseen ones
        return torch.cat([torch.tensor([[-1.0, 7.0]]), feedback.slates.item_ids[:, 2:] * -1.0], 1)[..., None]

    padded = Recommender(always([2]).recommend, log_prob)
    assert (
        evaluate_ranking(padded, [batch_of([[1, 0]], [[0.9, 0.0]])], Ranking(num_items=9, ks=(1,))).counts["users"] == 1
    )


def test_scores_of_lists_that_claim_to_be_log_probabilities_are_checked():
    def recommend(histories, k, exclude):
        return Recommendations(torch.tensor([[2, 0]]), torch.tensor([[0.7, -math.inf]]))

    batch = batch_of([[1]], [[0.9]])
    with refused("out_of_range", "scores"):
        evaluate_ranking(Recommender(recommend, name="b", scores_are_logp=True), [batch], Ranking(num_items=9, ks=(1,)))
    assert evaluate_ranking(Recommender(recommend), [batch], Ranking(num_items=9, ks=(1,))).counts["users"] == 1
