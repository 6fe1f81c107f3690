"""The health metrics on inputs with known results."""

from __future__ import annotations

import math

import pytest
import torch

from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives.grpo import ASPO, CISPO, ECPO, GBPO, GRPO
from recpo.objectives.inputs import explained_variance
from recpo.objectives.listwise_dpo import SoftmaxDPO
from recpo.objectives.policy_gradient import PPO, Reinforce
from recpo.objectives.preference import DPO
from tests.refusals import refused


def line(ratios, advantages):
    """One context, one token per item."""
    old = torch.full((1, len(ratios), 1), -3.0, dtype=torch.float64)
    policy = old + torch.tensor(ratios, dtype=torch.float64).log().view(1, -1, 1)
    mask = torch.ones_like(policy, dtype=torch.bool)
    return ObjectiveInputs(LogProbs(policy, mask, old), torch.tensor([advantages], dtype=torch.float64))


def metrics(objective, inputs):
    return {name: value.item() for name, value in objective(inputs).metrics.items()}


def test_ratios_and_clip_fractions():
    got = metrics(PPO(value_coef=0.0, dual_clip=3.0), line([0.5, 1.0, 2.0, 4.0], [1.0, 1.0, 1.0, -1.0]))
    assert got["ratio_mean"] == pytest.approx(7.5 / 4)
    assert got["ratio_max"] == pytest.approx(4.0)
    assert got["approx_kl"] == pytest.approx(-math.log(4.0) / 4)
    assert got["clip_fraction"] == 0.25
    assert got["dual_clip_fraction"] == 0.25
    assert got["effective_sample_size"] == pytest.approx(7.5**2 / (4 * (0.25 + 1 + 4 + 16)))
    assert got["positive_share"] == 0.75
    assert got["negative_share"] == 0.25
    assert got["negative_gradient_share"] == 0.0


@pytest.mark.parametrize(
    ("objective", "name", "share"),
    [
        (ASPO(), "dual_clip_fraction", 0.5),  # weights 10, 0.5, 4 and 1 against a cap of 3
        (ECPO(), "early_clip_fraction", 0.25),
        (CISPO(), "clip_fraction", 0.5),
        (Reinforce(off_policy=True, ratio_cap=3.0), "clip_fraction", 0.25),
    ],
)
def test_shares_of_capped_weights(objective, name, share):
    assert metrics(objective, line([0.1, 2.0, 4.0, 1.0], [1.0, 1.0, -1.0, 1.0]))[name] == share


def test_negatives_share_of_the_gradient_of_gbpo():
    inputs = ObjectiveInputs(
        LogProbs(torch.tensor([0.5, 0.2, 0.9]).log().view(1, 3, 1), torch.ones(1, 3, 1, dtype=torch.bool)),
        torch.tensor([[1.0, -1.0, 0.0]]),
    )
    got = metrics(GBPO(), inputs)
    assert got["negative_gradient_share"] == pytest.approx(0.25 / 1.25)
    assert got["zero_share"] == pytest.approx(1 / 3)


def test_groups_without_any_advantage():
    inputs = line([1.0, 1.0], [0.0, 0.0])
    assert metrics(GRPO(kl_coef=0.0), inputs)["zero_group_share"] == 1.0


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, math.nan])
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((4,), 9.0), returns, mask).abs() < 1e-6
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4), mask) == 0.0


def test_a_critic_is_measured():
    inputs = line([1.0, 1.0], [1.0, -1.0])
    values = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    got = metrics(PPO(), inputs._replace(values=values, values_old=values, returns=values + 1))
    assert got["value_loss"] == 0.5
    assert got["explained_variance"] == 1.0


def preference(policy, reference, chosen):
    shape = (*torch.tensor(policy).shape, 1)
    policy, reference = (torch.tensor(x, dtype=torch.float64).view(shape) for x in (policy, reference))
    mask = torch.ones(shape, dtype=torch.bool)
    return ObjectiveInputs(LogProbs(policy, mask, reference=reference), chosen=torch.tensor(chosen))


def test_implicit_rewards_and_accuracy():
    inputs = preference([[-1.0, -3.0, -2.0], [-4.0, -1.0, -5.0]], [[-2.0] * 3] * 2, [[True, False, False]] * 2)
    got = metrics(SoftmaxDPO(beta=0.5), inputs)
    assert got["reward_chosen"] == pytest.approx(0.5 * (1.0 - 2.0) / 2)
    assert got["reward_rejected"] == pytest.approx(0.5 * (-1.0 + 0.0 + 1.0 - 3.0) / 4)
    assert got["reward_accuracy"] == 0.75
    assert got["best_of_list"] == 0.5
    assert got["lone_list_share"] == 0.0


def test_lists_without_exactly_one_chosen_item_are_dropped():
    rows = [[-1.0, -3.0]] * 3
    inputs = preference(rows, [[-2.0] * 2] * 3, [[True, False], [False, False], [True, True]])
    alone = preference(rows[:1], [[-2.0] * 2], [[True, False]])
    for objective in (DPO(), SoftmaxDPO()):
        assert objective.count(inputs) == 1
        torch.testing.assert_close(objective(inputs).loss, objective(alone).loss)
        assert metrics(objective, inputs)["dropped_list_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (PPO, {"dual_clip": 1.0}),
        (PPO, {"clip_low": -0.1}),
        (GRPO, {"kl_coef": -1.0}),
        (ECPO, {"delta": -0.1}),
        (CISPO, {"cap_low": 2.0}),
        (Reinforce, {"top_k": 0}),
        (DPO, {"beta": 0.0}),
        (DPO, {"label_smoothing": 0.5}),
    ],
)
def test_impossible_settings_are_refused(cls, options):
    with refused("conflicting_options" if cls is CISPO else "out_of_range", f"{cls.__name__}.{next(iter(options))}"):
        cls(**options)
