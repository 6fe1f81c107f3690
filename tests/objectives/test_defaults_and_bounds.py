"""Defaults are the specified ones, bounds belong to the side that the docstring states, metrics are exact.

Every test here fails for a mutant that other tests let live (`python tests/mutation.py recpo/objectives`).
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives import (
    ASPO,
    CISPO,
    DAPO,
    DPO,
    ECPO,
    GBPO,
    GRPO,
    GSPO,
    MPO,
    PPO,
    DrGRPO,
    Likelihood,
    MarginListwiseDPO,
    PairwiseReward,
    PointwiseReward,
    QLearning,
    Reinforce,
    SoftmaxDPO,
)
from recpo.objectives.grpo import aspo_loss, cispo_loss, ecpo_loss, gbpo_loss, gspo_loss
from recpo.objectives.inputs import (
    advantage_shares,
    explained_variance,
    masked_mean,
    negative_gradient_share,
    ratio_metrics,
)
from recpo.objectives.listwise_dpo import margin_listwise_dpo_loss, softmax_dpo_loss
from recpo.objectives.mpo import mpo_loss
from recpo.objectives.policy_gradient import ppo_loss, reinforce_loss
from recpo.objectives.preference import dpo_loss
from recpo.objectives.q_learning import bellman_target
from recpo.ops.surrogate import clipped_surrogate, is_clipped
from tests.refusals import refused

NAN = math.nan
DEFAULTS = {
    aspo_loss: {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    cispo_loss: {"cap_low": None, "cap_high": 1.2},
    dpo_loss: {"beta": 0.1, "label_smoothing": 0.0, "variant": "sigmoid"},
    ecpo_loss: {"clip_low": 0.2, "clip_high": 0.2, "delta": 0.1},
    gbpo_loss: {"logp_old": None, "level": "token"},
    gspo_loss: {"clip_low": 3e-4, "clip_high": 4e-4, "level": "sequence"},
    ppo_loss: {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    clipped_surrogate: {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    mpo_loss: {"temperature": 0.05, "log_base": None},
    softmax_dpo_loss: {"beta": 1.0},
    margin_listwise_dpo_loss: {"beta": 0.1, "margin": 0.0, "gap_weight": 1.0, "nll_coef": 0.1},
    ASPO: {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "kl_coef": 0.0, "entropy_coef": 0.0},
    CISPO: {"cap_low": None, "cap_high": 1.2},
    ECPO: {"clip_low": 0.2, "clip_high": 0.2, "delta": 0.1},
    GRPO: {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.04},
    DrGRPO: {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "aggregation": "seq-mean-token-sum-norm"},
    DAPO: {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.0, "aggregation": "token-mean"},
    GSPO: {"clip_low": 3e-4, "clip_high": 4e-4, "level": "sequence"},
    PPO: {"dual_clip": None, "value_coef": 0.5, "value_clip": None},
    Reinforce: {"ratio_cap": 20.0, "top_k": 1, "off_policy": False},
    reinforce_loss: {"ratio_cap": 20.0, "top_k": 1},
    bellman_target: {"gamma": 0.99},
    Likelihood: {"positive_only": False, "aggregation": "token-mean"},
    MPO: {"temperature": 0.05, "kl_target": None, "base": "reference", "candidates_are_draws": False},
    DPO: {"beta": 0.1, "label_smoothing": 0.0, "nll_coef": 0.0},
    SoftmaxDPO: {"beta": 1.0, "nll_coef": 0.0, "gap_weighted": False},
    MarginListwiseDPO: {"beta": 0.1, "nll_coef": 0.1, "margin": 0.0, "gap_weight": 1.0, "gap_weighted": False},
    QLearning: {"likelihood_coef": 1.0, "q_coef": 1.0, "huber": None},
    PairwiseReward: {"margin": 0.0},
    PointwiseReward: {"positive_weight": 1.0, "target": "grade"},
}


@pytest.mark.parametrize("function", DEFAULTS)
def test_defaults(function):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in DEFAULTS[function]} == DEFAULTS[function]


def test_bounds_of_settings():
    assert PPO(dual_clip=1.5).dual_clip == 1.5
    assert QLearning(huber=0.5).huber == 0.5
    with refused("out_of_range", "QLearning.huber"):
        QLearning(huber=0.0)
    assert PointwiseReward(positive_weight=0.5).num_scores == 2
    for value in (-0.1, NAN, math.inf):
        with refused("out_of_range", "GRPO.clip_high"):
            GRPO(clip_high=value)


@pytest.mark.parametrize(
    ("objective", "inert"),
    [
        (PPO(), False),
        (PPO(value_coef=0.0), True),
        (PPO(value_coef=0.0, entropy_coef=0.1), False),
        (GRPO(), False),
        (GRPO(kl_coef=0.0), True),
        (Likelihood(), False),
        (Likelihood(positive_only=True), True),
        (QLearning(), False),
    ],
)
def test_which_objectives_need_not_score_an_advantage_of_zero(objective, inert):
    assert objective.zero_advantage_is_inert is inert


def line(ratios, advantages, mask=None):
    """One context, one token per item; logp_old = -3."""
    old = torch.full((1, len(ratios), 1), -3.0, dtype=torch.float64)
    policy = old + torch.tensor(ratios, dtype=torch.float64).log().view(1, -1, 1)
    kept = torch.ones_like(policy, dtype=torch.bool) if mask is None else torch.tensor([mask])[..., None]
    return ObjectiveInputs(LogProbs(policy, kept, old), torch.tensor([advantages], dtype=torch.float64))


def share(objective, name, ratios, advantages):
    return objective(line(ratios, advantages)).metrics[name].item()


def test_what_is_capped_lies_beyond_the_cap_and_not_on_it():
    at_one = CISPO(cap_low=1.0, cap_high=1.0)
    assert share(at_one, "clip_fraction", [1.0, 1.0], [1.0, -1.0]) == 0
    assert share(at_one, "clip_fraction", [1.5, 0.5, 1.0, 1.0], [1.0] * 4) == 0.5
    assert share(CISPO(cap_low=None, cap_high=None), "clip_fraction", [0.001, 9.0], [1.0, 1.0]) == 0
    assert share(CISPO(cap_low=0.5, cap_high=None), "clip_fraction", [0.001, 9.0], [1.0, 1.0]) == 0.5


def test_a_ratio_is_capped_early_from_1_plus_both_options_on_and_for_negatives_only():
    early = ECPO(clip_high=0.2, delta=0.1)  # 1.3
    assert share(early, "early_clip_fraction", [1.25, 1.35, 1.29, 2.5], [-1.0, -0.5, -1.0, -1.0]) == 0.5
    assert share(early, "early_clip_fraction", [9.0, 9.0, 1.0, 1.0], [1.0, 0.5, -1.0, -1.0]) == 0
    of_both = early.clip_metrics(torch.tensor([9.0, 2.0]).log(), torch.tensor([0.0, -1.0]), torch.ones(2).bool())
    assert of_both["early_clip_fraction"] == 0.5
    assert ECPO(delta=0.0).delta == 0.0
    with refused("out_of_range", "ECPO.delta"):
        ECPO(delta=-0.01)


def test_what_lies_on_a_bound_is_not_beyond_it():
    zero, kept = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    signs = torch.tensor([1.0, -1.0, 0.0])
    assert not is_clipped(zero, signs, 0.0, 0.0).any()
    assert ECPO(clip_high=0.0, delta=0.0).clip_metrics(zero, signs, kept)["early_clip_fraction"] == 0
    bound, one = torch.ones(1).exp().item(), torch.ones(3)
    for objective in (ASPO(dual_clip=bound), PPO(dual_clip=bound)):
        assert objective.clip_metrics(one * signs.sign() * -1, signs, kept)["dual_clip_fraction"] == 0
        beyond = objective.clip_metrics(torch.tensor([-1.1, 1.1, 1.1]), signs, kept)["dual_clip_fraction"]
        assert beyond.item() == pytest.approx(2 / 3 if isinstance(objective, ASPO) else 1 / 3)
    assert Reinforce(ratio_cap=bound).clip_metrics(one, signs, kept)["clip_fraction"] == 0
    assert Reinforce(ratio_cap=bound).clip_metrics(2 * one, signs, kept)["clip_fraction"] == 1
    assert Reinforce(ratio_cap=None).clip_metrics(9 * one, signs, kept)["clip_fraction"] == 0


def test_gbpo_reads_the_old_policy_if_there_is_one():
    inputs = line([0.5], [1.0])
    logp = inputs.logp.policy.requires_grad_()
    for old, weight in ((inputs.logp.old, 0.5), (None, 1.0)):
        loss = GBPO()(inputs._replace(logp=inputs.logp._replace(policy=logp, old=old))).loss
        assert torch.autograd.grad(loss, logp)[0].item() == pytest.approx(-weight)


def test_gbpo_of_a_log_probability_a_rounding_above_zero():
    logp = torch.tensor([[1e-7]], requires_grad=True)
    (gradient,) = torch.autograd.grad(gbpo_loss(logp, torch.tensor([-1.0])).sum(), logp)
    assert gradient.isfinite().all()
    assert gradient.item() > 0
    assert reinforce_loss(logp, torch.tensor([-1.0]), top_k=3).item() == 0  # K draws surely show it


def test_an_item_of_one_token_is_its_own_mean():
    policy = torch.tensor([[[-1.0, -9.0], [-2.0, -4.0]]])
    mask = torch.tensor([[[1, 0], [1, 1]]])  # of numbers
    assert DPO(length_normalized=True).item_logp(policy, mask).tolist() == [[-1.0, -3.0]]
    assert DPO().item_logp(policy, mask).tolist() == [[-1.0, -6.0]]


TOKEN_LOSSES = {
    "ppo": lambda logp, old, a, mask: ppo_loss(logp, old, a, mask=mask),
    "ecpo": lambda logp, old, a, mask: ecpo_loss(logp, old, a, mask=mask),
    "cispo": lambda logp, old, a, mask: cispo_loss(logp, old, a, mask=mask),
    "cispo, uncapped": lambda logp, old, a, mask: cispo_loss(logp, old, a, mask=mask, cap_high=None),
    "aspo": lambda logp, old, a, mask: aspo_loss(logp, old, a, mask=mask),
    "gspo": lambda logp, old, a, mask: gspo_loss(logp, old, a, mask, clip_low=0.2, clip_high=0.2),
    "gspo, token": lambda logp, old, a, mask: gspo_loss(logp, old, a, mask, clip_high=9.0, level="token"),
    "gbpo": lambda logp, old, a, mask: gbpo_loss(logp, a, logp_old=old, mask=mask),
    "gbpo, sequence": lambda logp, old, a, mask: gbpo_loss(logp, a, logp_old=old, mask=mask, level="sequence"),
    "gbpo, no old": lambda logp, _, a, mask: gbpo_loss(logp, a, mask=mask),
    "reinforce": lambda logp, old, a, mask: reinforce_loss(logp, a, logp_old=old, mask=mask, top_k=3),
}


@pytest.mark.parametrize("loss", TOKEN_LOSSES.values(), ids=TOKEN_LOSSES.keys())
@pytest.mark.parametrize("which", range(3))
def test_masked_tokens_of_a_pure_loss_may_hold_anything(loss, which):
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    clean = [
        torch.tensor([[-1.0, -2.0, 0.0], [0.0, -0.5, -3.0]], dtype=torch.float64),
        torch.tensor([[-1.1, -2.0, 0.0], [0.0, -0.4, -3.1]], dtype=torch.float64),
        torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.5, -2.0]], dtype=torch.float64),
    ]
    for bad in (NAN, math.inf, -math.inf, -7.0, 7.0):
        hostile = [x.masked_fill(mask == 0, bad) if i == which else x for i, x in enumerate(clean)]
        found = []
        for logp, old, advantages in (clean, hostile):
            logp = logp.clone().requires_grad_()
            value = loss(logp, old, advantages, mask)
            assert (value[mask == 0] == 0).all()
            found.append((value, torch.autograd.grad(value.sum(), logp)[0]))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        assert (found[1][1][mask == 0] == 0).all()


# ---------------------------------------------------------------- metrics
def test_shares_of_advantages_are_exact():
    advantages = torch.tensor([[0.5, 0.0, -2.0, 1.0], [0.0, 0.0, NAN, NAN], [0.0, 2.0, NAN, NAN], [NAN] * 4])
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True, True, False, False], [False] * 4])
    got = {name: value.item() for name, value in advantage_shares(advantages, mask).items()}
    assert got == pytest.approx(
        {"positive_share": 3 / 8, "negative_share": 1 / 8, "zero_share": 4 / 8, "zero_group_share": 1 / 3}
    )
    deep = advantage_shares(advantages.view(2, 2, 4), mask.view(2, 2, 4))  # the slate is the last axis
    assert {name: value.item() for name, value in deep.items()} == pytest.approx(got)


def test_moments_of_ratios_are_exact():
    log_ratio = torch.tensor([0.0, math.log(5.0), NAN])
    got = ratio_metrics(log_ratio, torch.tensor([True, True, False]))
    assert got["ratio_mean"].item() == pytest.approx(3.0)
    assert got["ratio_std"].item() == pytest.approx(2.0)
    one = ratio_metrics(torch.tensor([math.log(5.0)]), torch.tensor([True]))
    assert one["effective_sample_size"].item() == pytest.approx(1.0)
    assert one["ratio_std"].item() == 0
    many = ratio_metrics(torch.full((4096,), math.log(1.25)).bfloat16(), torch.ones(4096, dtype=torch.bool))
    assert many["ratio_mean"].dtype == torch.float32  # a sum in bfloat16 stops growing at 256 summands
    assert many["ratio_mean"].item() == pytest.approx(1.25, rel=0.02)
    assert many["effective_sample_size"].dtype == torch.float32
    assert many["effective_sample_size"].item() == pytest.approx(1.0, rel=0.02)
    assert masked_mean(torch.ones(2).bfloat16(), torch.ones(2).bool()).dtype == torch.float32


def test_gradient_share_of_negatives_is_exact():
    weight, advantages = torch.tensor([-3.0, 1.0, 4.0, NAN]), torch.tensor([-1.0, 0.5, 0.0, -1.0])
    mask = torch.tensor([True, True, True, False])
    assert negative_gradient_share(weight, advantages, mask).item() == pytest.approx(3 / 8)
    assert negative_gradient_share(torch.zeros(2), torch.ones(2), torch.ones(2).bool()) == 0
    assert negative_gradient_share(torch.ones(2).bfloat16(), torch.ones(2), torch.ones(2)).dtype == torch.float32


def test_explained_variance_counts_kept_positions_only():
    values, returns = torch.tensor([1.0, 2.0, 4.0, NAN]), torch.tensor([1.0, 3.0, 5.0, NAN])
    mask = torch.tensor([True, True, True, False])
    residual, total = 2 / 9, 8 / 3  # of 0, 1, 1 and of 1, 3, 5
    assert explained_variance(values, returns, mask).item() == pytest.approx(1 - residual / total)
    assert explained_variance(values, torch.ones(4), mask) == 0
    assert explained_variance(values, returns, torch.zeros(4).bool()) == 0
    half = [torch.tensor(x).bfloat16() for x in ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])]  # whose mean, 7 / 3, bfloat16 lacks
    assert explained_variance(*half, torch.ones(3).bool()).item() == pytest.approx(1 - (2 / 9) / (14 / 9), rel=1e-5)
