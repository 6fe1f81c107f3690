"""Advantages of single tokens, the gate before them, and the objectives that use them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from recpo.base.contracts import AdvantageEstimator
from recpo.base.types import FeedbackBatch, Histories, LogProbs, ObjectiveInputs, Slates
from recpo.objectives import ASPO, CISPO, DAPO, ECPO, GBPO, GRPO, GSPO, PPO, DrGRPO, Reinforce
from recpo.objectives.advantages import (
    GatedAdvantage,
    GroupNormalizedAdvantage,
    PrefixGroupAdvantage,
    TernaryAdvantage,
    group_normalized_advantage,
    prefix_group_advantage,
    reward_gate,
)
from tests.reference import objective_losses as ref
from tests.refusals import refused

SEEDS = st.integers(0, 2**32 - 1)
TAKERS = [ASPO(), CISPO(), DAPO(), ECPO(), GBPO(), GRPO(), GSPO(), GSPO(level="token"), DrGRPO(), Reinforce()]
TAKERS += [PPO(value_coef=0.0), GBPO(level="sequence"), Reinforce(off_policy=True)]


def batch_of(rewards, items, **columns):
    items = torch.as_tensor(items)
    slates = Slates(items, items, items >= 0, reward=torch.as_tensor(rewards), **columns)
    return FeedbackBatch(Histories(items, torch.zeros(len(items), dtype=torch.long)), slates, torch.arange(len(items)))


@pytest.mark.parametrize("scale", [True, False])
@given(seed=SEEDS)
def test_prefix_group_advantage(scale, seed):
    rng = np.random.default_rng(seed)
    size, width, depth = rng.integers(1, 3), rng.integers(1, 7), rng.integers(1, 4)
    rewards = rng.choice([0.0, 0.25, 0.7, 1.0], (size, width))
    codes, mask = rng.integers(0, 2, (size, width, depth)), rng.random((size, width)) < 0.8
    least = int(rng.integers(2, 4))
    hostile = torch.tensor(np.where(mask, rewards, np.nan))
    options = {"min_group": least, "scale": scale, "eps": 1e-4}
    got = prefix_group_advantage(hostile, torch.tensor(codes), torch.tensor(mask), **options)
    for b in range(size):
        want = ref.prefix_group(rewards[b], codes[b], mask[b], *options.values())
        alone = prefix_group_advantage(hostile[b], torch.tensor(codes[b]), torch.tensor(mask[b]), **options)
        np.testing.assert_array_equal(alone.numpy(), got[b].numpy())
        np.testing.assert_allclose(got[b].numpy(), want, rtol=1e-9, atol=1e-9)


def test_one_token_per_item_makes_it_the_advantage_of_grpo():
    torch.manual_seed(0)
    rewards, items, mask = torch.rand(3, 6), torch.randint(1, 4, (3, 6)), torch.rand(3, 6) < 0.8
    got = prefix_group_advantage(rewards, items.unsqueeze(-1), mask)
    torch.testing.assert_close(got.squeeze(-1), group_normalized_advantage(rewards, mask))
    torch.testing.assert_close(
        PrefixGroupAdvantage()(batch_of(rewards, items)), group_normalized_advantage(rewards), rtol=1e-5, atol=1e-6
    )


def test_a_token_answers_for_its_own_choice():
    """Two good items under the code 0, one bad item there, and a bad one under the code 1."""
    codes = torch.tensor([[[0, 0], [0, 1], [0, 2], [1, 0]]])
    got = PrefixGroupAdvantage(scale=False).token_advantages(batch_of([[1.0, 1.0, 0.0, 0.0]], [[1, 2, 3, 4]]), codes)
    third = 1 / 3
    want = [[0.5, third], [0.5, third], [-0.5, -2 * third], [-0.5, -0.5]]  # nobody shares 1: the group's mean again
    torch.testing.assert_close(got, torch.tensor([want]))


def test_defaults_and_bounds_of_prefix_groups():
    assert PrefixGroupAdvantage() == PrefixGroupAdvantage(min_group=2, scale=True, eps=1e-6)
    assert PrefixGroupAdvantage().requires == {"rewards"}
    rewards, codes = torch.tensor([[0.0, 1e-6, 0.0]], requires_grad=True), torch.tensor([[[0, 0], [0, 1], [1, 0]]])
    alike = torch.full((1, 3), 0.1, dtype=torch.float64)  # three times a tenth is not three tenths
    assert (prefix_group_advantage(alike, codes) == 0).all()
    got = prefix_group_advantage(rewards, codes)
    assert not got.requires_grad
    assert torch.equal(got, prefix_group_advantage(rewards, codes, min_group=2, scale=True, eps=1e-6))
    third, deviation = 1e-6 / 3, 1e-6 / math.sqrt(3)
    scale = deviation + 1e-6
    want = [[-third, -0.5e-6], [2 * third, 0.5e-6], [-third, -third]]
    torch.testing.assert_close(got, torch.tensor([want]) / scale, rtol=1e-4, atol=0.0)


def test_prefix_baselines_leave_the_expected_gradient_as_it_is():
    """Over all groups of two draws from a policy of two codes, scaled by n / (n - 1) for the own share of a mean."""
    torch.manual_seed(1)
    logits = torch.randn(3, 2, dtype=torch.float64).requires_grad_()  # the first code, and the second given the first
    rewards = torch.randn(4, dtype=torch.float64)
    codes = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    logp = torch.stack(
        [logits[0].log_softmax(-1)[codes[:, 0]], logits[1:].log_softmax(-1)[codes[:, 0], codes[:, 1]]], -1
    )
    pi = logp.sum(-1).exp()
    want = -torch.autograd.grad((pi * rewards).sum(), logits, retain_graph=True)[0]
    total = 0.0
    for a in range(4):
        for b in range(4):
            pair = torch.tensor([a, b])
            advantages = 2 * prefix_group_advantage(rewards[pair], codes[pair], scale=False)
            tokens = LogProbs(logp[pair][None], torch.ones(1, 2, 2, dtype=torch.bool))
            total = total + (pi[a] * pi[b]).detach() * Reinforce()(ObjectiveInputs(tokens, advantages[None])).loss
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], want)


@pytest.mark.parametrize("objective", TAKERS, ids=lambda objective: type(objective).__name__)
def test_equal_advantages_of_all_tokens_are_one_advantage_of_the_item(objective):
    torch.manual_seed(2)
    policy = (-torch.rand(3, 4, 2, dtype=torch.float64) - 0.1).requires_grad_()
    logp = LogProbs(policy, torch.rand(3, 4, 2) < 0.8, *(policy.detach() - 0.1 * torch.rand(2, 3, 4, 2)))
    advantages = torch.randn(3, 4, dtype=torch.float64) * (torch.rand(3, 4) < 0.7)
    outputs = [objective(ObjectiveInputs(logp, a)) for a in (advantages, advantages[..., None].expand_as(policy))]
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    torch.testing.assert_close(*(torch.autograd.grad(output.loss, policy)[0] for output in outputs))
    hostile = advantages[..., None].expand_as(policy).masked_fill(~logp.mask, math.nan)
    torch.testing.assert_close(objective(ObjectiveInputs(logp, hostile)).loss, outputs[0].loss)


def test_a_token_without_an_advantage_gets_no_gradient():
    policy = torch.full((1, 2, 2), -1.0, requires_grad=True)
    logp = LogProbs(policy, torch.ones(1, 2, 2, dtype=torch.bool), policy.detach())
    loss = GRPO(kl_coef=0.0)(ObjectiveInputs(logp, torch.tensor([[[0.0, 2.0], [0.0, 0.0]]]))).loss
    (gradient,) = torch.autograd.grad(loss, policy)
    assert gradient.tolist() == [[[0.0, -0.5], [0.0, 0.0]]]


def test_groups_have_two_candidates_at_least():
    with refused("out_of_range", "PrefixGroupAdvantage.min_group"):
        PrefixGroupAdvantage(min_group=1)


# ---------------------------------------------------------------- the gate
@given(seed=SEEDS)
def test_reward_gate(seed):
    rng = np.random.default_rng(seed)
    shape = (4, rng.integers(1, 7))
    rewards, items = rng.choice([0.0, 0.5, 1.0], shape), rng.integers(1, 4, shape)
    role = rng.choice(["liked", "drawn", "neither"], shape)
    hostile = torch.tensor(np.where(role == "neither", np.nan, rewards))
    arguments = [torch.tensor(items), torch.tensor(role == "liked"), torch.tensor(role == "drawn")]
    bounds = {"max_hit_share": 0.4, "min_separation": 0.6}
    got = reward_gate(hostile, *arguments, **bounds)
    want = [ref.gate(*x, 0.4, 0.6) for x in zip(rewards, items, role == "liked", role == "drawn", strict=True)]
    assert got.tolist() == want


def test_bounds_of_the_gate_are_in():
    rewards = torch.tensor([[0.5, 0.4, 0.5, 0.9, 0.1]], requires_grad=True)
    items = torch.tensor([[1, 1, 2, 3, 4]])  # a liked item, drawn once; of the other draws one ties, one beats it
    liked = torch.tensor([[True, False, False, False, False]])
    shares = {"max_hit_share": 1 / 4, "min_separation": (0.5 + 0 + 1) / 3}
    assert reward_gate(rewards, items, liked, ~liked, **shares).tolist() == [True]
    for name, value in (("max_hit_share", 0.24), ("min_separation", 0.51)):
        assert reward_gate(rewards, items, liked, ~liked, **{**shares, name: value}).tolist() == [False]
    both = [
        torch.cat([x, y]) for x, y in ((rewards, rewards), (items, items), (liked, liked & False), (~liked, ~liked))
    ]
    assert reward_gate(*both, max_hit_share=1.0, min_separation=0.0).tolist() == [True, False]  # nothing liked
    # the defaults: half of the draws, three of four pairs
    items, liked = torch.tensor([[1, 1, 1, 2, 3]]), torch.tensor([[True, False, False, False, False]])
    for beaten, passes in ((0.5, True), (0.6, False)):
        rewards = torch.tensor([[0.5, 0.0, 0.0, beaten, 0.1]])
        assert reward_gate(rewards, items, liked, ~liked).tolist() == [passes]
    items = torch.tensor([[1, 1, 1, 1, 3]])
    assert reward_gate(torch.tensor([[0.5, 0.0, 0.0, 0.0, 0.1]]), items, liked, ~liked).tolist() == [False]
    assert GatedAdvantage() == GatedAdvantage(GroupNormalizedAdvantage(), 0.5, 0.75)
    for bound in (0.0, 1.0):
        assert GatedAdvantage(max_hit_share=bound, min_separation=bound).max_hit_share == bound
    for name in ("max_hit_share", "min_separation"):
        with refused("out_of_range", f"GatedAdvantage.{name}"):
            GatedAdvantage(**{name: -0.1})


@dataclass(frozen=True)
class Ones(AdvantageEstimator):
    """The advantage 1 of everything."""

    def __call__(self, batch, values=None):
        return torch.ones_like(batch.slates.reward)


def test_the_gate_reads_kept_items_of_the_log_and_kept_draws():
    columns = {"is_logged": torch.tensor([[True, False, False]]), "positive": torch.tensor([[True, False, False]])}
    rewards = [[0.9, 0.1, 0.2]]
    for items, passes in (([1, 2, 3], 1.0), ([-1, 2, 3], 0.0), ([1, -1, -1], 0.0), ([1, -1, 3], 1.0)):
        got = GatedAdvantage(Ones())(batch_of(rewards, [items], **columns))  # -1 is masked
        assert got.tolist() == [[passes] * 3]
    for column in columns:
        with refused("missing_option", "rollout.logged_share"):
            GatedAdvantage()(batch_of(rewards, [[1, 2, 3]], **{**columns, column: None}))


def test_only_groups_that_pass_the_gate_have_advantages():
    rewards = torch.tensor([[0.9, 0.1, 0.5, 0.2], [0.0, 0.1, 0.5, 0.2], [0.9, 0.9, 0.9, 0.2], [0.9, 0.1, 0.5, 0.2]])
    items = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 1, 1, 4], [1, 2, 3, 4]]  # passes; reward wrong; known already; no like
    logged = torch.zeros(4, 4, dtype=torch.bool)
    logged[:, 0] = True
    positive = logged.clone()
    positive[3] = False
    batch = batch_of(rewards, items, is_logged=logged, positive=positive)
    got = GatedAdvantage()(batch)
    torch.testing.assert_close(got[0], group_normalized_advantage(rewards[0]))
    assert (got[1:] == 0).all()
    gated = GatedAdvantage(TernaryAdvantage(0.25))
    assert gated.requires == {"rewards", "step_labels", "positives", "dislikes"}
    assert GatedAdvantage().estimator == GroupNormalizedAdvantage()
    with refused("missing_option", "rollout.logged_share"):
        GatedAdvantage()(batch_of(rewards, items))
    for name in ("max_hit_share", "min_separation"):
        with refused("out_of_range", f"GatedAdvantage.{name}"):
            GatedAdvantage(**{name: 2.0})
