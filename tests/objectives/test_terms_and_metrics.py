"""Every term of a loss, and every metric, against numbers worked out by hand.

Each line here fails for a mutant that other tests let live (`python tests/mutation.py recpo/objectives`).
"""

from __future__ import annotations

import math

import pytest
import torch

from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives import (
    DPO,
    GRPO,
    PPO,
    Likelihood,
    MarginListwiseDPO,
    PairwiseReward,
    PointwiseReward,
    QLearning,
    SoftmaxDPO,
)
from recpo.objectives.policy_gradient import reinforce_loss

LOG2 = math.log(2.0)


def line(ratios, advantages, **more):
    """One context, one token per item; logp_old = -3."""
    old = torch.full((1, len(ratios), 1), -3.0, dtype=torch.float64)
    policy = old + torch.tensor(ratios, dtype=torch.float64).log().view(1, -1, 1)
    rest = {name: torch.tensor([value], dtype=torch.float64) for name, value in more.items()}
    logp = LogProbs(policy, torch.ones_like(policy, dtype=torch.bool), old)
    return ObjectiveInputs(logp, torch.tensor([advantages], dtype=torch.float64), **rest)


def logsigmoid(x):
    return -math.log1p(math.exp(-x))


def numbers(output):
    return {name: value.item() for name, value in output.metrics.items()}


# ---------------------------------------------------------------- policy gradients
def test_an_entropy_bonus_is_taken_off():
    output = GRPO(kl_coef=0.0, entropy_coef=0.25)(line([1.0, 1.0], [1.0, -1.0], entropy=[1.0, 3.0]))
    assert output.loss.item() == pytest.approx(-0.25 * 2.0)
    assert numbers(output)["entropy"] == 2.0


@pytest.mark.parametrize(("clip", "error"), [(None, 1.0), (0.5, 1.5**2)])
def test_a_value_loss_is_added_and_clipped_around_the_old_value(clip, error):
    inputs = line([1.0, 1.0], [1.0, -1.0], values=[1.0, 2.0], values_old=[0.0, 1.0], returns=[2.0, 3.0])
    output = PPO(value_coef=0.25, value_clip=clip)(inputs)
    assert output.loss.item() == pytest.approx(0.25 * 0.5 * error)
    assert numbers(output)["value_loss"] == pytest.approx(0.5 * error)


def test_clipped_tokens_have_no_share_in_the_gradient():
    got = numbers(PPO(value_coef=0.0)(line([1.0, 1.1, 2.0, 0.5], [1.0, -1.0, 1.0, -1.0])))
    assert got["negative_gradient_share"] == pytest.approx(1.1 / 2.1)
    assert got["clip_fraction"] == 0.5


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_weight_of_an_item_among_k_draws(top_k):
    logp = torch.tensor([[math.log(0.25)]], dtype=torch.float64, requires_grad=True)
    (weight,) = torch.autograd.grad(reinforce_loss(logp, torch.ones(1).double(), top_k=top_k).sum(), logp)
    assert weight.item() == pytest.approx(-top_k * 0.75 ** (top_k - 1))


# ---------------------------------------------------------------- likelihood and Q-learning
def test_likelihood_is_reported_per_item():
    policy = torch.tensor([[[-1.0, -2.0], [-3.0, -9.0]]])
    logp = LogProbs(policy, torch.tensor([[[True, True], [True, False]]]))
    output = Likelihood()(ObjectiveInputs(logp))
    assert output.loss.item() == pytest.approx(2.0)
    assert numbers(output)["nll"] == pytest.approx(3.0)


def test_terms_of_q_learning():
    logp = LogProbs(torch.tensor([[[-1.0], [-3.0]]]), torch.ones(1, 2, 1, dtype=torch.bool))
    inputs = ObjectiveInputs(logp, q_values=torch.tensor([[1.0, 3.0]]), q_targets=torch.tensor([[1.5, 2.0]]))
    output = QLearning(likelihood_coef=0.5, q_coef=4.0)(inputs)
    error = 0.5 * (0.25 + 1.0) / 2
    assert output.loss.item() == pytest.approx(0.5 * 2.0 + 4.0 * error)
    assert numbers(output) == pytest.approx(
        {"q_loss": error, "q_mean": 2.0, "q_target_mean": 1.75, "nll": 2.0, "explained_variance": 1 - 9.0}
    )


# ---------------------------------------------------------------- preference lists
#: implicit rewards at beta 1, logp - logp_ref: 1, 0 and -1 in the first list; the chosen one stands first
POLICY = [[-1.0, -3.0, -2.0], [-2.0, -2.0, -4.0], [-1.0, -1.0, -1.0]]
REFERENCE = [[-2.0, -3.0, -1.0], [-2.0, -2.0, -2.0], [-9.0, -1.0, -1.0]]
KEPT = [[True, True, True], [True, True, True], [True, False, False]]
REWARDS = [[1.0, 0.5, 3.0], [2.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def lists(dtype=torch.float64):
    policy, reference = (torch.tensor(x, dtype=dtype).unsqueeze(-1) for x in (POLICY, REFERENCE))
    chosen = torch.tensor([[True, False, False]] * 3)
    return ObjectiveInputs(
        LogProbs(policy, torch.tensor(KEPT).unsqueeze(-1), reference=reference),
        chosen=chosen,
        rewards=torch.tensor(REWARDS, dtype=dtype),
        scores=torch.tensor(POLICY, dtype=dtype).unsqueeze(-1),
    )


def test_dpo_is_the_mean_over_the_pairs_of_a_list_then_over_lists():
    pairs = [(logsigmoid(0.5 * 1) + logsigmoid(0.5 * 2)) / 2, (logsigmoid(0.0) + logsigmoid(0.5 * 2)) / 2, 0.0]
    likelihood = (1.0 + 2.0 + 1.0) / 3
    assert DPO(beta=0.5)(lists()).loss.item() == pytest.approx(-sum(pairs) / 3)
    with_nll = DPO(beta=0.5, nll_coef=0.2)(lists()).loss.item()
    assert with_nll == pytest.approx(-sum(pairs) / 3 + 0.2 * likelihood)


def test_softmax_dpo_weighs_a_rejected_item_by_how_much_less_it_was_worth():
    plain = [math.log(1 + math.exp(-1) + math.exp(-2)), math.log(1 + 1 + math.exp(-2)), 0.0]
    assert SoftmaxDPO()(lists()).loss.item() == pytest.approx(sum(plain) / 3)
    # gaps of the rewards: 0.5 and, never below 0, 0; 1 and 2
    weighted = [math.log(1 + 0.5 * math.exp(-1)), math.log(1 + 1 + 2 * math.exp(-2)), 0.0]
    assert SoftmaxDPO(gap_weighted=True)(lists()).loss.item() == pytest.approx(sum(weighted) / 3)


def test_the_likelihood_counts_once_in_the_list_wise_margin_loss():
    def of_list(*gaps):
        return math.log1p(1 / sum(math.exp(gap) for gap in gaps))

    likelihood = 0.3 * (1.0 + 2.0 + 1.0) / 3
    options = {"beta": 1.0, "nll_coef": 0.3, "margin": 0.5, "gap_weight": 2.0}
    loss = MarginListwiseDPO(**options)(lists()).loss.item()
    assert loss == pytest.approx((of_list(1.0, 3.0) + of_list(0.0, 3.0)) / 3 + likelihood)
    loss = MarginListwiseDPO(**options, gap_weighted=True)(lists()).loss.item()
    assert loss == pytest.approx((of_list(0.5, 0.0) + of_list(0.0, 6.0)) / 3 + likelihood)


def test_metrics_of_preference_lists():
    assert numbers(SoftmaxDPO(beta=0.5)(lists())) == pytest.approx(
        {
            "reward_chosen": 0.5 * (1 + 0 + 8) / 3,
            "reward_rejected": 0.5 * (0 - 1 + 0 - 2) / 4,
            "reward_margin": 0.5 * (1 + 2 + 0 + 2) / 4,
            "reward_accuracy": 3 / 4,  # a tie is not won
            "best_of_list": 1 / 2,
            "logp_chosen": -4 / 3,
            "logp_rejected": -11 / 4,
            "dropped_list_share": 0.0,
            "lone_list_share": 1 / 3,
        }
    )


# ---------------------------------------------------------------- reward models
def test_metrics_of_a_pairwise_reward_model():
    inputs = lists()
    inputs = inputs._replace(chosen=inputs.chosen & torch.tensor([[True], [True], [False]]))
    output = PairwiseReward(margin=0.5)(inputs)
    want = [(logsigmoid(1.5) + logsigmoid(0.5)) / 2, (logsigmoid(-0.5) + logsigmoid(1.5)) / 2]
    assert output.loss.item() == pytest.approx(-sum(want) / 2)
    assert numbers(output) == pytest.approx(
        {
            "score_chosen": -3 / 2,
            "score_rejected": -11 / 4,
            "score_accuracy": 3 / 4,  # a tie is not won
            "dropped_list_share": 1 / 3,
        }
    )


def test_targets_of_a_pointwise_reward_model_are_the_grade_and_the_dislike():
    grade = torch.tensor([0.0, 0.125, 0.875, math.nan])
    targets, known = PointwiseReward().targets(grade, torch.tensor([1, 0, 0, 2]))
    assert targets.T.tolist() == [[0.0, 0.125, 0.875, 0.0], [1.0, 0.0, 0.0, 1.0]]
    assert known.T.tolist() == [[True, True, True, False], [True] * 4]
