"""The adaptive coefficient: direction, bounds, state."""

from __future__ import annotations

import pytest
import torch

from recpo.base.types import LogProbs
from recpo.objectives import GRPO
from recpo.training.kl_control import KLControl, adapted_kl_coef
from recpo.training.options import KLTarget, LearningOptions, RolloutOptions
from tests.refusals import refused


def controlled(objective, target=None, rollout=None):
    return KLControl(LearningOptions(objective=objective, adaptive_kl=target, rollout=rollout))


def test_rises_when_the_divergence_is_too_large_and_falls_when_too_small():
    target = KLTarget(1.0, horizon=100)
    assert adapted_kl_coef(0.1, target, 5.0, 10) == pytest.approx(0.1 * 1.02)
    assert adapted_kl_coef(0.1 * 1.02, target, 0.0, 10) == pytest.approx(0.1 * 1.02 * 0.98)
    assert adapted_kl_coef(0.1, target, 1.0, 10) == 0.1


def test_resumes_where_it_stopped():
    first, second = (controlled(GRPO(kl_coef=0.3), KLTarget(0.5, 100)) for _ in range(2))
    logp = LogProbs(torch.full((2, 3, 2), -1.0), torch.ones(2, 3, 2, dtype=torch.bool))
    for control in (first, second):
        control.measure(logp, {"kl_reference": torch.tensor(3.0)})
        control.end_step(lambda sums: sums)
        second.load_state_dict(first.state_dict())
    assert first.objective.kl_coef == pytest.approx(0.3 * (1 + 0.2 * 6 / 100))
    assert second.state_dict() == first.state_dict()


def test_refuses_what_cannot_be_held():
    with refused("out_of_range", "adaptive_kl.target"):
        KLTarget(0.0)
    with refused("out_of_range", "adaptive_kl.horizon"):
        KLTarget(1.0, horizon=0)


def test_the_coefficient_of_the_rewards_follows_the_draws():
    control = controlled(GRPO(kl_coef=0.0), KLTarget(0.5, 100), RolloutOptions(kl_coef=0.2))
    policy = torch.full((2, 3, 2), -1.0)
    mask = torch.ones_like(policy, dtype=torch.bool)
    mask[0, 0] = False
    logp = LogProbs(policy, mask, policy.clone(), torch.where(mask, -4.0, torch.nan))
    assert control.reward_coef == 0.2
    control.measure(logp, {})
    control.measure(logp, {})
    control.end_step(lambda sums: sums)
    assert control.reward_coef == pytest.approx(0.2 * (1 + 0.2 * 10 / 100))  # 3 nats, and 5 items twice
    assert control.objective.kl_coef == 0.0
    assert control.metrics == {"kl_coef": control.reward_coef}
    control.measure(logp._replace(reference=logp.old), {})
    control.end_step(lambda sums: sums)
    assert control.reward_coef == pytest.approx(0.2 * 1.02 * (1 - 0.2 * 5 / 100))


def test_a_constant_coefficient_of_the_rewards_stays():
    assert controlled(GRPO(kl_coef=0.3), rollout=RolloutOptions(kl_coef=0.2)).reward_coef == 0.2
    adapted = controlled(GRPO(kl_coef=0.3), KLTarget(0.5))
    assert (adapted.reward_coef, adapted.objective.kl_coef) == (0.0, 0.3)


@pytest.mark.parametrize(("in_loss", "in_reward"), [(0.0, 0.0), (0.1, 0.2)])
def test_one_coefficient_is_adjusted(in_loss, in_reward):
    with refused("conflicting_options" if in_loss else "missing_option", "adaptive_kl"):
        controlled(GRPO(kl_coef=in_loss), KLTarget(0.5), RolloutOptions(kl_coef=in_reward))
