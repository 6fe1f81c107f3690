"""The AUC over exposures, against scikit-learn user by user."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import roc_auc_score

from recpo.base.feedback import FeedbackRule
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.measures import Recommender
from recpo.ops.exposures import (
    UNSEEN_DRAWS,
    Targets,
    auc,
    auc_precision,
    exposure_auc,
    held_out_targets,
    unseen_auc,
    unseen_items,
)
from recpo.ops.ranking import first_places

rows = st.lists(
    st.lists(st.tuples(st.sampled_from([-3.0, -2.0, -1.5, -math.inf]), st.sampled_from("pn ")), min_size=9, max_size=9),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(rows)
def test_auc_is_scikit_learns_with_ties(users):
    scores = torch.tensor([[score for score, _ in row] for row in users])
    positive, negative = (torch.tensor([[kind == k for _, kind in row] for row in users]) for k in "pn")
    got = auc(scores, positive, negative)
    for row, value in zip(users, got.tolist(), strict=True):
        kept = [(max(score, -1e9), kind == "p") for score, kind in row if kind != " "]
        if len({kind for _, kind in kept}) < 2:
            assert math.isnan(value)
        else:
            assert value == pytest.approx(roc_auc_score([k for _, k in kept], [s for s, _ in kept]))


def test_auc_of_long_slates_without_ties():
    rng = np.random.default_rng(0)
    scores, positive = rng.normal(size=(4, 500)), rng.random((4, 500)) < 0.3
    got = auc(torch.from_numpy(scores), torch.from_numpy(positive), torch.from_numpy(~positive))
    assert got.tolist() == pytest.approx([roc_auc_score(p, s) for p, s in zip(positive, scores, strict=True)])


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 4), (2, 3), (4, 2)])
def test_the_precision_of_an_auc_is_the_inverse_of_its_variance_over_all_orders(m, n):
    orders = torch.tensor(list(permutations(range(m + n))), dtype=torch.float64)
    positive = (torch.arange(m + n) < m).expand_as(orders)
    variance = auc(orders, positive, ~positive).var(correction=0)
    items, none = torch.arange(1, m + n + 1)[None], torch.zeros(1, m + n, dtype=torch.bool)
    found = auc_precision(Targets(items, positive[:1], none, ~positive[:1]), torch.tensor([[7, 0, 8, 9]]))
    assert found["AUC_other"].item() == pytest.approx(1 / (12 * variance.item()))
    assert found["AUC_mixed"] == found["AUC_other"]
    assert found["AUC_unseen"].item() == pytest.approx(m * 3 / (m + 4))
    assert found["AUC_dislikes"].item() == 0


def test_constant_scores_are_worth_nothing():
    positive = torch.tensor([[True, False, False]])
    assert auc(torch.zeros(1, 3), positive, ~positive).item() == 0.5


def test_repeated_items_count_once():
    items = torch.tensor([[3, 5, 3, 0, 5]])
    mask = torch.tensor([[True, False, True, False, True]])
    assert first_places(items, mask).tolist() == [[True, False, False, False, True]]
    liked, below = torch.tensor([[True, False, True, False, False]]), torch.tensor([[False, True, False, True, True]])
    items, logp = torch.tensor([[1, 2, 1, 3, 2]]), torch.tensor([[-2.0, -3.0, -2.0, -1.0, -3.0]])
    found = exposure_auc(logp, Targets(items, liked, torch.zeros_like(liked), below))
    assert found["AUC_other"].item() == 0.5  # item 1 above 2, below 3; events would say 2 / 3
    assert found["AUC_dislikes"].isnan().all()


def test_tokens_are_summed_and_seen_or_unlabeled_items_left_out():
    items = torch.tensor([[1, 2, 3, 4, 5, 6]])
    quantile = torch.tensor([[0.9, 0.1, math.nan, 0.2, 0.9, 0.3]])
    dislike = torch.tensor([[False, False, False, False, False, True]])
    mask = torch.ones_like(dislike)
    slates = Slates(items, torch.zeros_like(items), mask, label=quantile, dislike=dislike)
    slates = slates._replace(positive=FeedbackRule().positive(quantile, dislike))
    seen = torch.tensor([[4]])
    batch = EvaluationBatch(FeedbackBatch(Histories(seen, torch.tensor([1])), slates, torch.tensor([0])), seen, seen)
    tokens = torch.tensor([[[-1, -1], [-2, -1], [0, 0], [0, 0], [-1, -3], [-1, -2.5]]])  # sums -2 -3 0 0 -4 -3.5

    def recommend(histories, k, exclude):
        return Recommendations(torch.tensor([[1]]), torch.zeros(1, 1))

    def log_prob(feedback):  # all other items are in the past or in the period, so none is drawn as unseen
        assert not feedback.slates.mask[:, 6:].any()
        return torch.nn.functional.pad(tokens, (0, 0, 0, feedback.slates.item_ids.shape[1] - 6))

    result = evaluate_ranking(Recommender(recommend, log_prob), [batch], Ranking(num_items=6, ks=(1,)))
    assert result.per_user["AUC_other"].item() == 0.5  # of 1 and 5 against 2 alone
    assert result.per_user["AUC_dislikes"].item() == 0.5
    assert result.per_user["AUC_unseen"].isnan().all()
    assert "AUC_other" not in evaluate_ranking(Recommender(recommend), [batch], Ranking(num_items=6, ks=(1,))).per_user


def test_dislikes_are_other_exposures():
    """Of thumbs up and down alone, a positive is compared with what the user disliked."""
    items = torch.tensor([[1, 2, 3, 1, 4]])
    mask, label = items > 0, torch.tensor([[1.0, 0.0, math.nan, 0.0, 1.0]])
    dislike = torch.tensor([[False, True, True, True, False]])
    slates = Slates(items, torch.zeros_like(items), mask, label=label, dislike=dislike)
    slates = slates._replace(positive=FeedbackRule().positive(label, dislike))
    none = torch.zeros(1, 0, dtype=torch.int64)
    targets = held_out_targets(
        EvaluationBatch(FeedbackBatch(Histories(none, torch.tensor([0])), slates, none[0]), none, none)
    )
    assert targets.positive.tolist() == [[False] * 4 + [True]]  # 1 was disliked later
    assert targets.other.tolist() == [[True] * 4 + [False]]
    found = exposure_auc(torch.tensor([[-1.0, -4.0, -5.0, -1.0, -2.0]]), targets)
    assert found["AUC_other"].item() == found["AUC_dislikes"].item() == pytest.approx(2 / 3)


def users_of(user_ids, past, shown):
    shown = torch.tensor(shown)
    slates = Slates(shown, torch.zeros_like(shown), shown > 0)
    histories = Histories(torch.tensor(past), torch.tensor([len(row) for row in past]))
    seen = torch.tensor(past)
    return EvaluationBatch(FeedbackBatch(histories, slates, torch.tensor(user_ids)), seen, seen)


def test_unseen_items_are_new_distinct_candidates_and_depend_on_the_user_alone():
    users = users_of([7, 8], [[1, 2], [3, 4]], [[5, 6], [7, 0]])
    drawn = unseen_items(users, 12, unavailable=torch.tensor([[12], [0]]))
    assert drawn.shape == (2, UNSEEN_DRAWS)
    first, second = ({item for item in row if item} for row in drawn.tolist())
    assert first <= set(range(1, 12)) - {1, 2, 5, 6}
    assert second <= set(range(1, 13)) - {3, 4, 7}
    assert len(first) == (drawn[0] > 0).sum()
    assert len(first) > 3
    alone = unseen_items(users_of([8], [[3, 4]], [[7, 0]]), 12)
    assert alone[0].tolist() == drawn[1].tolist()


def test_unseen_items_are_drawn_evenly():
    many = EvaluationBatch(
        FeedbackBatch(
            Histories(torch.zeros(4000, 1, dtype=torch.long), torch.zeros(4000, dtype=torch.long)),
            Slates(
                torch.zeros(4000, 1, dtype=torch.long), torch.zeros(4000, 1, dtype=torch.long), torch.zeros(4000, 1) > 0
            ),
            torch.arange(4000),
        ),
        *[torch.zeros(4000, 1, dtype=torch.long)] * 2,
    )
    counts = np.bincount(unseen_items(many, 1000).flatten().numpy(), minlength=1001)[1:]
    assert abs(counts.mean() - 4000 * UNSEEN_DRAWS / 1000) < 10  # hardly any is drawn twice
    assert counts.std() < 1.2 * math.sqrt(counts.mean())


def test_unseen_auc_is_scikit_learns_and_the_mixture_is_of_both():
    scores, of_unseen = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[-3.0, -1.5, 9.0]])
    items, unseen = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 0]])
    positive, other = torch.tensor([[True, False, True]]), torch.tensor([[False, True, False]])
    found = unseen_auc(scores, of_unseen, Targets(items, positive, torch.zeros_like(other), other), unseen)
    expected = roc_auc_score([1, 1, 0, 0], [-1.0, -4.0, -3.0, -1.5])
    assert found["AUC_unseen"].item() == pytest.approx(expected)
    assert found["AUC_mixed"].item() == pytest.approx(0.6 * 0.5 + 0.4 * expected)
