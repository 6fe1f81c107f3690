"""Warnings of training about feedback that the log rarely has."""

import pytest

from recpo.base.feedback import FEEDBACK_KINDS
from recpo.objectives import GBPO, GRPO, Likelihood, PointwiseReward
from recpo.objectives.advantages import TernaryAdvantage
from recpo.rewards.rewards import HitReward, LoggedReward, RankAwareReward, ValidityReward, WeightedSum
from recpo.training.contradictions import feedback_warnings
from recpo.training.options import LearningOptions
from tests.refusals import refused

PLENTY = dict(zip(FEEDBACK_KINDS, (250, 400, 200, 50, 100), strict=True))
HITS = WeightedSum([ValidityReward(), HitReward()], [1.0, 1.0])


def warned(objective, advantage, reward, counts):
    return feedback_warnings(LearningOptions(objective=objective, advantage=advantage, reward=reward), counts)


def test_a_log_with_all_kinds_of_feedback_is_not_spoken_of():
    for advantage in (TernaryAdvantage(), TernaryAdvantage(0.25)):
        assert warned(GBPO(), advantage, None, PLENTY) == []
    assert warned(PointwiseReward(), None, None, PLENTY) == []
    assert warned(Likelihood(), None, None, dict.fromkeys(FEEDBACK_KINDS, 0)) == []


def test_a_log_without_dislikes_gets_a_warning():
    counts = PLENTY | {"disliked": 0}
    (warning,) = warned(GBPO(), TernaryAdvantage(), None, counts)
    assert warning.startswith("TernaryAdvantage learns from dislikes too, and the train period has none")
    assert "250 positive, 400 neutral, 200 skipped, 0 disliked, 100 unknown" in warning
    assert len(warned(PointwiseReward(), None, None, counts)) == 1
    assert warned(GRPO(), None, LoggedReward(), counts) == []


@pytest.mark.parametrize(
    ("advantage", "reward"),
    [(TernaryAdvantage(), None), (None, HitReward()), (None, RankAwareReward()), (None, HITS)],
)
def test_a_log_without_positives_is_refused_where_they_are_needed(advantage, reward):
    with refused("missing_option", "label"):
        warned(GBPO(), advantage, reward, PLENTY | {"positive": 0})


def test_a_share_of_the_labels_is_positive_for_any_definition_of_the_log():
    (warning,) = warned(GBPO(), TernaryAdvantage(0.25), None, PLENTY | {"positive": 0})
    assert warning.startswith("no train event is positive by the log's own definition")


@pytest.mark.parametrize(
    ("objective", "advantage", "reward"),
    [(GBPO(), TernaryAdvantage(0.25), None), (GRPO(), None, LoggedReward()), (PointwiseReward(), None, None)],
)
def test_a_log_without_labels_is_refused_where_they_are_needed(objective, advantage, reward):
    with refused("missing_option", "label"):
        warned(objective, advantage, reward, PLENTY | {"positive": 0, "neutral": 0, "skipped": 0})
