"""The pointwise reward model: value and gradient in closed form, missing labels, options that make no sense."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recpo.errors import RecpoError
from recpo.objectives import PointwiseReward
from recpo.objectives.reward_model import pointwise_reward_loss
from recpo.types import LogProbs, ObjectiveInputs

NAN = float("nan")


def test_value_and_gradient_in_closed_form():
    torch.manual_seed(0)
    scores = (3 * torch.randn(50, 3, dtype=torch.float64)).requires_grad_()
    targets, weight = torch.rand(50, 3) < 0.4, torch.tensor([1.0, 2.5, 10.0], dtype=torch.float64)
    mask = torch.rand(50, 3) < 0.8
    loss = pointwise_reward_loss(scores, targets, mask, weight)
    theirs = binary_cross_entropy_with_logits(scores, targets.double(), pos_weight=weight, reduction="none")
    torch.testing.assert_close(loss, torch.where(mask, theirs, 0.0))
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    y = targets.double()
    expected = (weight * y + 1 - y) * scores.sigmoid() - weight * y
    torch.testing.assert_close(gradient, torch.where(mask, expected, 0.0).detach())


def test_extreme_scores_stay_finite():
    scores = torch.tensor([[-1e4], [1e4]], requires_grad=True)
    for target in (0.0, 1.0):
        loss = pointwise_reward_loss(scores, torch.full((2, 1), target), torch.ones(2, 1, dtype=torch.bool))
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), scores)[0].abs().max() <= 1


def test_a_missing_label_leaves_only_the_dislike():
    scores = torch.zeros(1, 2, 3, dtype=torch.float64, requires_grad=True)
    logp = LogProbs(torch.zeros(1, 2, 1), torch.ones(1, 2, 1, dtype=torch.bool))
    quantile, dislike = torch.tensor([[NAN, 0.6]]), torch.tensor([[True, False]])
    inputs = ObjectiveInputs(logp, scores=scores, label=quantile, dislike=dislike)
    objective = PointwiseReward()
    assert objective.count(inputs) == 4
    output = objective(inputs)
    (gradient,) = torch.autograd.grad(output.loss, scores)
    expected = torch.tensor([[[0.0, 0.0, -0.5], [-0.5, 0.5, 0.5]]], dtype=torch.float64) / 4
    torch.testing.assert_close(gradient, expected)
    assert output.metrics["long_watch_rate"] == 1.0
    assert output.metrics["dislike_rate"] == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"long_watch": 0.95}, "long_watch <= like"),
        ({"long_watch": 0.0}, "0 < long_watch"),
        ({"like": 1.5}, "like <= 1"),
        ({"long_watch": NAN}, "long_watch"),
        ({"positive_weights": (1.0, 0.0, 1.0)}, "above 0"),
        ({"positive_weights": (1.0, NAN, 1.0)}, "above 0"),
    ],
)
def test_options_without_sense_are_refused(options, said):
    with pytest.raises(RecpoError, match=said):
        PointwiseReward(**options)
