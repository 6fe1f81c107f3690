"""The pointwise reward model: value and gradient in closed form, soft labels, missing grades, bad options."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits

from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives import PointwiseReward
from tests.refusals import refused

NAN = float("nan")


def test_value_and_gradient_in_closed_form():
    torch.manual_seed(0)
    scores = (3 * torch.randn(50, 3, dtype=torch.float64)).requires_grad_()
    targets, weight = torch.rand(50, 3) < 0.4, torch.tensor([1.0, 2.5, 1.0], dtype=torch.float64)
    mask = torch.rand(50, 3) < 0.8
    loss = PointwiseReward(positive_weight=2.5, behaviors=("like",)).losses(scores, targets, mask)
    y = targets.double()
    value = -weight * y * scores.sigmoid().log() - (1 - y) * (1 - scores.sigmoid()).log()
    torch.testing.assert_close(loss, torch.where(mask, value, 0.0))
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    expected = (weight * y + 1 - y) * scores.sigmoid() - weight * y
    torch.testing.assert_close(gradient, torch.where(mask, expected, 0.0).detach())


def test_extreme_scores_stay_finite():
    scores = torch.tensor([[-1e4, -1e4], [1e4, 1e4]], requires_grad=True)
    for target in (0.0, 1.0):
        loss = PointwiseReward().losses(scores, torch.full((2, 2), target), torch.ones(2, 2, dtype=torch.bool))
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), scores)[0].abs().max() <= 1


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.125, 0.375, 0.625, 0.875]), min_size=1, max_size=30))
def test_the_best_score_of_soft_labels_is_the_log_odds_of_their_mean(grades):
    grade = torch.tensor(grades, dtype=torch.float64)[:, None].expand(-1, 2)
    mean = grade.mean().clamp(1e-3, 1 - 1e-3)
    score = torch.full_like(grade, float(torch.logit(mean))).requires_grad_()
    loss = PointwiseReward().losses(score, grade, torch.ones_like(grade, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss.mean(), score)
    assert float(gradient.sum()) == pytest.approx(float(mean - grade.mean()), abs=1e-12)
    entropy = -grade * torch.log(mean) - (1 - grade) * torch.log(1 - mean)
    torch.testing.assert_close(loss, entropy)


def inputs_of(grade, dislike, scores):
    logp = LogProbs(torch.zeros(*grade.shape, 1), torch.ones(*grade.shape, 1, dtype=torch.bool))
    return ObjectiveInputs(logp, scores=scores, grades=grade, dislike=dislike)


def test_a_missing_grade_leaves_only_the_dislike():
    scores = torch.zeros(1, 2, 2, dtype=torch.float64, requires_grad=True)
    inputs = inputs_of(torch.tensor([[NAN, 0.875]]), torch.tensor([[True, False]]), scores)
    objective = PointwiseReward()
    assert objective.count(inputs) == 3
    output = objective(inputs)
    (gradient,) = torch.autograd.grad(output.loss, scores)
    expected = torch.tensor([[[0.0, -0.5], [-0.375, 0.5]]], dtype=torch.float64) / 3
    torch.testing.assert_close(gradient, expected)
    assert output.metrics["grade_mean"] == 0.875
    assert output.metrics["dislike_mean"] == 0.5
    assert output.metrics["grade_predicted"] == 0.5


def test_the_weight_is_that_of_dislikes_alone():
    grade, dislike = torch.tensor([[0.0, 0.625, 0.375]]), torch.tensor([[True, False, True]])
    scores = torch.randn(1, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, heavy = (PointwiseReward(weight)(inputs_of(grade, dislike, scores)) for weight in (1.0, 3.0))
    torch.testing.assert_close(plain.metrics["grade_loss"], heavy.metrics["grade_loss"])
    missed = -torch.log(scores[0, [0, 2], 1].sigmoid())
    torch.testing.assert_close(heavy.loss - plain.loss, 2.0 * missed.sum() / 6)


def test_the_first_score_may_be_about_positives_instead():
    """A dislike has a grade and is not positive; of an event of unknown grade nothing is known."""
    grade, dislike = torch.tensor([[0.875, 0.875, NAN, 0.0]]), torch.tensor([[False, False, False, True]])
    positive, scores = torch.tensor([[True, False, True, False]]), torch.randn(1, 4, 2)
    objective = PointwiseReward(target="positive")
    assert objective.target_names == ("positive", "dislike")
    assert objective.requires == PointwiseReward().requires | {"positives"}
    targets, known = objective.targets(grade, dislike, positive=positive)
    assert targets[..., 0].tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert known[..., 0].tolist() == [[True, True, False, True]]
    found = objective(inputs_of(grade, dislike, scores)._replace(positive=positive))
    losses = binary_cross_entropy_with_logits(scores, targets, reduction="none")
    torch.testing.assert_close(found.loss, losses[known].sum() / known.sum())
    assert found.metrics["positive_mean"] == pytest.approx(1 / 3)
    with refused("missing_option", "label"):
        objective(inputs_of(grade, dislike, scores))
    with refused("duplicate", "PointwiseReward.behaviors"):
        PointwiseReward(target="positive", behaviors=("positive",))


@pytest.mark.parametrize("weight", [0.0, -1.0, NAN, float("inf")])
def test_weights_without_sense_are_refused(weight):
    with refused("out_of_range", "PointwiseReward.positive_weight"):
        PointwiseReward(weight)


def test_behaviors_are_separate_targets_by_name():
    bits = torch.tensor([[0b101, 0b010, 0b000]])
    grade, dislike = torch.tensor([[0.875, NAN, 0.0]]), torch.tensor([[False, False, True]])
    objective = PointwiseReward(positive_weight=2.0, behaviors=("share", "like")).for_behaviors(("like", "-", "share"))
    assert objective.target_names == ("grade", "dislike", "share", "like")
    assert objective.num_scores == 4
    assert objective.reads.behaviors
    assert not PointwiseReward().reads.behaviors
    targets, known = objective.targets(grade, dislike, bits)
    assert targets[..., 2:].tolist() == [[[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]]
    assert known[..., 1:].all()
    assert known[..., 0].tolist() == [[True, False, True]]
    inputs = inputs_of(grade, dislike, torch.randn(1, 3, 4))._replace(behaviors=bits)
    found = objective(inputs)
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0])
    losses = binary_cross_entropy_with_logits(inputs.scores, targets, pos_weight=weight, reduction="none")
    torch.testing.assert_close(found.loss, losses[known].sum() / known.sum())
    assert {"share_loss", "like_predicted"} <= found.metrics.keys()
    with refused("unknown_name", "PointwiseReward.behaviors"):
        objective.for_behaviors(("like",))
    with refused("duplicate", "PointwiseReward.behaviors"):
        PointwiseReward(behaviors=("like", "like"))
    with refused("duplicate", "PointwiseReward.behaviors"):
        PointwiseReward(behaviors=("dislike",))
    with refused("missing_option", "PointwiseReward.behaviors"):
        PointwiseReward(behaviors=("like",)).targets(grade, dislike, bits)
    with refused("missing_option", "behaviors"):
        objective(inputs._replace(behaviors=None))
