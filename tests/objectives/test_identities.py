"""Identities between the algorithms, and the exact gradient of the expected reward."""

from __future__ import annotations

import itertools

import pytest
import torch

from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives.grpo import ASPO, CISPO, DAPO, ECPO, GBPO, GRPO, GSPO, DrGRPO
from recpo.objectives.likelihood import Likelihood
from recpo.objectives.listwise_dpo import SoftmaxDPO, margin_listwise_dpo_loss, softmax_dpo_loss
from recpo.objectives.mpo import MPO, dual_temperature, mpo_loss, mpo_target
from recpo.objectives.policy_gradient import PPO, CatalogPolicyGradient, Reinforce, catalog_policy_gradient_loss
from recpo.objectives.preference import DPO, dpo_loss
from tests.refusals import refused

ON_POLICY = {
    "PPO": PPO(value_coef=0.0),
    "PPO-dual": PPO(value_coef=0.0, dual_clip=3.0),
    "GRPO": GRPO(kl_coef=0.0),
    "DrGRPO": DrGRPO(),
    "DAPO": DAPO(),
    "GSPO": GSPO(),
    "GSPO-token": GSPO(level="token"),
    "ASPO": ASPO(),
    "ECPO": ECPO(),
    "CISPO": CISPO(),
    "Reinforce": Reinforce(),
    "Reinforce-off-policy": Reinforce(off_policy=True),
}


def batch(seed=0, shape=(3, 4, 1), spread=0.3):
    torch.manual_seed(seed)
    policy = (-torch.rand(shape, dtype=torch.float64) * 3 - 0.1).requires_grad_()
    old = (policy + spread * torch.randn(shape)).detach().clamp(max=0)
    reference = (policy + 0.5 * torch.randn(shape)).detach().clamp(max=0)
    mask = torch.rand(shape) < 0.9
    return ObjectiveInputs(LogProbs(policy, mask, old, reference), torch.randn(shape[:2], dtype=torch.float64))


def outcome(objective, inputs):
    loss = objective(inputs).loss
    return loss.detach(), torch.autograd.grad(loss, inputs.logp.policy)[0]


def assert_identical(first, second, inputs):
    for a, b in zip(outcome(first, inputs), outcome(second, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_one_token_per_item_makes_gspo_grpo_and_ppo_one():
    inputs = batch()
    clips = {"clip_low": 0.1, "clip_high": 0.25}
    ppo = PPO(value_coef=0.0, **clips)
    for other in (GRPO(kl_coef=0.0, **clips), GSPO(**clips), GSPO(level="token", **clips), DrGRPO(**clips)):
        assert_identical(ppo, other, inputs)


def test_dapo_with_equal_clips_is_grpo_with_a_token_mean():
    inputs = batch(shape=(3, 4, 5))
    grpo = GRPO(aggregation="token-mean", kl_coef=0.0, clip_low=0.2, clip_high=0.2)
    assert_identical(DAPO(clip_low=0.2, clip_high=0.2), grpo, inputs)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_one_rejected_item_makes_softmax_dpo_dpo(beta):
    inputs = batch(shape=(5, 2, 3))
    inputs = inputs._replace(chosen=torch.tensor([[True, False]] * 5))
    inputs = inputs._replace(logp=inputs.logp._replace(mask=torch.ones(5, 2, 3, dtype=torch.bool)))
    assert_identical(DPO(beta=beta), SoftmaxDPO(beta=beta), inputs)


def test_softmax_dpo_is_cross_entropy_over_implicit_rewards():
    torch.manual_seed(1)
    logp, reference = torch.randn(2, 6, 5, dtype=torch.float64)
    loss = softmax_dpo_loss(logp[:, 0], logp[:, 1:], reference[:, 0], reference[:, 1:], beta=0.3)
    target = torch.zeros(6, dtype=torch.long)
    want = torch.nn.functional.cross_entropy(0.3 * (logp - reference), target, reduction="none")
    torch.testing.assert_close(loss, want)


def test_margin_form_gives_misordered_pairs_no_preference_gradient():
    chosen = torch.tensor([-3.0], requires_grad=True)
    rejected = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = margin_listwise_dpo_loss(chosen, rejected, chosen.detach() * 0, rejected.detach() * 0, nll_coef=0.0)
    gradients = torch.autograd.grad(loss.sum(), (chosen, rejected))
    assert all((g == 0).all() for g in gradients)
    softmax = softmax_dpo_loss(chosen, rejected, chosen.detach() * 0, rejected.detach() * 0)
    assert torch.autograd.grad(softmax.sum(), chosen)[0] < 0


@pytest.mark.parametrize("name", ON_POLICY)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(name):
    inputs = batch()
    inputs = inputs._replace(logp=inputs.logp._replace(old=inputs.logp.policy.detach()))
    _, gradient = outcome(ON_POLICY[name], inputs)
    _, want = outcome(Reinforce(), inputs)
    torch.testing.assert_close(gradient, want)


def test_gbpo_of_positives_without_old_is_likelihood_weighted_by_the_advantage():
    inputs = batch(shape=(3, 4, 2))
    inputs = inputs._replace(advantages=torch.ones(3, 4), logp=inputs.logp._replace(old=None))
    _, gradient = outcome(GBPO(aggregation="token-mean"), inputs)
    _, want = outcome(Likelihood(), inputs)
    torch.testing.assert_close(gradient, want)


def test_gbpo_never_exceeds_binary_cross_entropy():
    logp = torch.linspace(-12, -1e-3, 200, dtype=torch.float64).view(1, -1, 1).requires_grad_()
    mask = torch.ones_like(logp, dtype=torch.bool)
    for sign, old in itertools.product((1.0, -1.0), (None, torch.full_like(logp, -4.0), torch.full_like(logp, -0.5))):
        inputs = ObjectiveInputs(LogProbs(logp, mask, old=old), torch.full((1, 200), sign, dtype=torch.float64))
        _, gradient = outcome(GBPO(), inputs)
        pi = logp.detach().exp()
        bound = torch.ones_like(pi) if sign > 0 else pi / (1 - pi)
        assert (gradient.abs() * 200 <= bound + 1e-12).all()


def exact_gradient(logits, rewards):
    """Minus the gradient of sum_i p(i) r(i), the expected reward of one item drawn from the policy."""
    return -torch.autograd.grad((joint(logits).exp() * rewards).sum(), logits)[0]


def joint(logits):
    """log p of every item: ``[V]`` for one token, ``[V, V]`` -> flattened for two (the second given the first)."""
    if logits.dim() == 1:
        return logits.log_softmax(-1)
    return (logits[0].log_softmax(-1).unsqueeze(1) + logits[1:].log_softmax(-1)).flatten()


def token_logp(logits):
    """``[items, T]``."""
    if logits.dim() == 1:
        return logits.log_softmax(-1).unsqueeze(-1)
    first = logits[0].log_softmax(-1).unsqueeze(1).expand(-1, logits.shape[1])
    return torch.stack([first, logits[1:].log_softmax(-1)], -1).flatten(0, 1)


def enumerated_gradient(objective, logits, rewards):
    """The expectation over the policy of the gradient of each item's loss."""
    logp = token_logp(logits)
    total = 0.0
    for item, probability in enumerate(joint(logits).exp().detach()):
        one = logp[item].view(1, 1, -1)
        inputs = ObjectiveInputs(
            LogProbs(one, torch.ones_like(one, dtype=torch.bool), old=one.detach()), rewards[item].view(1, 1)
        )
        total = total + probability * objective(inputs).loss
    return torch.autograd.grad(total, logits)[0]


@pytest.mark.parametrize("name", ON_POLICY)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_enumerated_policy_gradient_is_the_gradient_of_the_expected_reward(name, tokens, baseline):
    torch.manual_seed(2)
    size = (6,) if tokens == 1 else (4, 3)
    if tokens == 2:
        logits = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
        rewards = torch.randn(9, dtype=torch.float64)
    else:
        logits = torch.randn(size, dtype=torch.float64).requires_grad_()
        rewards = torch.randn(size, dtype=torch.float64)
    gradient = enumerated_gradient(ON_POLICY[name], logits, rewards - baseline)
    # a mean over the tokens of an item is 1/T of the sum that the policy-gradient theorem asks for
    scale = 1.0 if name.startswith("Reinforce") else float(tokens)
    torch.testing.assert_close(scale * gradient, exact_gradient(logits, rewards))


def test_gbpo_of_positive_rewards_climbs_the_expected_reward_exactly():
    torch.manual_seed(3)
    logits = torch.randn(6, dtype=torch.float64).requires_grad_()
    rewards = torch.rand(6, dtype=torch.float64)
    torch.testing.assert_close(enumerated_gradient(GBPO(), logits, rewards), exact_gradient(logits, rewards))


def test_off_policy_reinforce_is_exact_under_the_behavior_policy():
    torch.manual_seed(4)
    logits = torch.randn(6, dtype=torch.float64).requires_grad_()
    behavior = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    rewards = torch.randn(6, dtype=torch.float64)
    logp = logits.log_softmax(-1).view(6, 1, 1)
    inputs = ObjectiveInputs(
        LogProbs(logp, torch.ones_like(logp, dtype=torch.bool), old=behavior.view(6, 1, 1)),
        (rewards * behavior.exp() * 6).view(6, 1),
    )
    loss = Reinforce(off_policy=True, ratio_cap=None)(inputs).loss
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], exact_gradient(logits, rewards))


def test_top_k_correction_climbs_the_reward_of_k_draws():
    """The gradient is that of sum_i r_i (1 - (1 - p_i)^K), the reward of the items seen among K draws."""
    torch.manual_seed(5)
    k, logits = 4, torch.randn(6, dtype=torch.float64).requires_grad_()
    rewards = torch.randn(6, dtype=torch.float64)
    seen = 1 - (1 - logits.softmax(-1)) ** k
    want = -torch.autograd.grad((seen * rewards).sum(), logits)[0]
    torch.testing.assert_close(enumerated_gradient(Reinforce(top_k=k), logits, rewards), want)


def test_dpo_weighs_misordered_pairs_most():
    gap = torch.linspace(-5, 5, 11, dtype=torch.float64).requires_grad_()
    zero = torch.zeros_like(gap)
    weight = -torch.autograd.grad(dpo_loss(gap, zero, zero, zero, beta=1.0).sum(), gap)[0]
    assert (weight.diff() < 0).all()
    torch.testing.assert_close(weight, torch.sigmoid(-gap.detach()))


def test_kl_penalty_is_zero_at_the_reference_and_pulls_back_to_it():
    inputs = batch()
    at = inputs._replace(advantages=torch.zeros(3, 4), logp=inputs.logp._replace(reference=inputs.logp.policy.detach()))
    assert (outcome(GRPO(), at)[1] == 0).all()
    away = at._replace(logp=inputs.logp)
    above = (inputs.logp.policy > inputs.logp.reference) & inputs.logp.mask
    below = (inputs.logp.policy < inputs.logp.reference) & inputs.logp.mask
    gradient = outcome(GRPO(), away)[1]
    assert (gradient[above] > 0).all()
    assert (gradient[below] < 0).all()


def catalog(logits, rewards, reference=None, old=None):
    """Inputs of an objective that sees the whole catalog: logits, rewards and other policies ``[B, V]``."""
    logp = logits.log_softmax(-1).unsqueeze(-1)
    others = [None if x is None else x.log_softmax(-1).unsqueeze(-1) for x in (old, reference)]
    return ObjectiveInputs(LogProbs(logp, torch.ones_like(logp, dtype=torch.bool), *others), rewards=rewards)


@pytest.mark.parametrize("base", ["reference", "old"])
def test_mpo_over_the_catalog_pulls_the_logits_to_the_kl_regularized_optimum(base):
    torch.manual_seed(6)
    logits, other = torch.randn(2, 3, 7, dtype=torch.float64)
    rewards, logits = torch.rand(3, 7, dtype=torch.float64), logits.requires_grad_()
    inputs = catalog(logits, rewards, **{base: other})
    (gradient,) = torch.autograd.grad(MPO(temperature=0.2, base=base)(inputs).loss, logits)
    optimum = (other + rewards / 0.2).softmax(-1)  # of E[r] - 0.2 KL(pi || base)
    torch.testing.assert_close(gradient * 3, logits.softmax(-1) - optimum)
    at_optimum = catalog(optimum.log().requires_grad_(), rewards, **{base: other})
    output = MPO(temperature=0.2, base=base)(at_optimum)
    assert output.metrics["target_distance"].item() == pytest.approx(0, abs=1e-6)
    assert output.metrics["target_reward"].item() == pytest.approx((optimum * rewards).sum(-1).mean().item())


def test_draws_of_the_base_need_no_separate_weight():
    """Ten draws that stand exactly as often as the old policy says are the catalog weighed by it."""
    counts = torch.tensor([5, 3, 1, 1])
    rewards = torch.tensor([0.1, 0.4, 0.9, 0.0], dtype=torch.float64)
    logits = torch.tensor([0.3, -1.0, 0.5, 0.0], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([0.0, 1.0, -1.0, 0.2], dtype=torch.float64)
    old = (counts / 10).double().log()
    for base in ("old", "reference"):
        whole = catalog(logits[None], rewards[None], reference[None], old[None])
        drawn = torch.arange(4).repeat_interleave(counts)
        draws = whole._replace(logp=LogProbs(*(x[:, drawn] for x in whole.logp)), rewards=rewards[None, drawn])
        want = torch.autograd.grad(MPO(base=base)(whole).loss, logits, retain_graph=True)[0]
        got = torch.autograd.grad(MPO(base=base, candidates_are_draws=True)(draws).loss, logits)[0]
        torch.testing.assert_close(got, want)


def test_mpo_asks_for_the_policies_that_weigh_its_candidates():
    for base, draws, asked in (
        ("reference", False, {"reference"}),
        ("old", False, {"old"}),
        ("reference", True, {"reference", "old"}),
        ("old", True, set()),
    ):
        objective = MPO(base=base, candidates_are_draws=draws)
        assert objective.requires == {"rewards"} | asked
        assert objective.accepted_candidates == ("draws" if draws else "distinct")
    for field in ("temperature", "kl_target"):
        with refused("out_of_range", f"MPO.{field}"):
            MPO(**{field: 0.0})


def test_the_temperature_of_mpo_keeps_the_divergence_and_follows_the_scale_of_the_rewards():
    torch.manual_seed(7)
    rewards, base = torch.rand(5, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    inputs = catalog(base, rewards, reference=base)
    output = MPO(kl_target=0.4)(inputs)
    assert output.metrics["target_kl"].item() == pytest.approx(0.4, rel=1e-5)
    found = dual_temperature(rewards, 0.4, log_base=base)
    assert output.metrics["temperature"] == found
    assert dual_temperature(3 * rewards, 0.4, log_base=base).item() == pytest.approx(3 * found.item(), rel=1e-6)
    want = mpo_loss(base.log_softmax(-1), rewards, temperature=found, log_base=base).mean()
    torch.testing.assert_close(output.loss, want)
    # nothing to gain: the target is the base, whatever the temperature
    even = torch.full_like(rewards, 0.3)
    torch.testing.assert_close(
        mpo_target(even, temperature=dual_temperature(even, 0.4, log_base=base), log_base=base), base.softmax(-1)
    )


def test_the_catalog_policy_gradient_in_closed_form():
    torch.manual_seed(8)
    logits, reference = torch.randn(2, 3, 6, dtype=torch.float64)
    logits, rewards = logits.requires_grad_(), torch.rand(3, 6, dtype=torch.float64)
    objective = CatalogPolicyGradient(kl_coef=0.3, entropy_coef=0.2)
    assert "catalog" in objective.requires
    output = objective(catalog(logits, rewards, reference))
    (gradient,) = torch.autograd.grad(output.loss, logits)
    logp, log_ref = logits.detach().log_softmax(-1), reference.log_softmax(-1)
    pi = logp.exp()

    def centered(values):
        return pi * (values - (pi * values).sum(-1, keepdim=True))

    want = -centered(rewards) + 0.3 * centered(logp - log_ref) + 0.2 * centered(logp)
    torch.testing.assert_close(3 * gradient, want)
    measured = {name: output.metrics[name].item() for name in ("expected_reward", "kl_reference", "entropy")}
    exact = {
        "expected_reward": (pi * rewards).sum(-1).mean().item(),
        "kl_reference": (pi * (logp - log_ref)).sum(-1).mean().item(),
        "entropy": -(pi * logp).sum(-1).mean().item(),
    }
    assert measured == pytest.approx(exact, rel=1e-6)
    total = -exact["expected_reward"] + 0.3 * exact["kl_reference"] - 0.2 * exact["entropy"]
    assert output.loss.item() == pytest.approx(total)


def test_the_catalog_policy_gradient_is_the_expectation_of_reinforce():
    torch.manual_seed(9)
    logits, rewards = torch.randn(6, dtype=torch.float64).requires_grad_(), torch.randn(6, dtype=torch.float64)
    loss = CatalogPolicyGradient(kl_coef=0.0)(catalog(logits[None], rewards[None])).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, exact_gradient(logits, rewards))
    torch.testing.assert_close(gradient, enumerated_gradient(Reinforce(), logits, rewards))


def test_mpo_and_the_catalog_policy_gradient_have_one_optimum():
    torch.manual_seed(10)
    reference, rewards = torch.randn(2, 5, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64)
    optimum = (reference + rewards / 0.2).log_softmax(-1).requires_grad_()
    for objective in (MPO(temperature=0.2), CatalogPolicyGradient(kl_coef=0.2)):
        loss = objective(catalog(optimum, rewards, reference)).loss
        (gradient,) = torch.autograd.grad(loss, optimum)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_a_part_of_the_catalog_is_not_a_catalog():
    logits, rewards = torch.zeros(2, 5), torch.rand(2, 5)
    inputs = catalog(logits, rewards, logits)
    objective = CatalogPolicyGradient()
    for missing in (4, 1):
        part = inputs.logp._replace(mask=torch.arange(5).view(1, 5, 1).expand(2, 5, 1) < missing)
        with refused("bad_value", "rollout.candidates"):
            objective(inputs._replace(logp=part))
    empty = inputs.logp._replace(mask=torch.tensor([True, False]).view(2, 1, 1).expand(2, 5, 1))
    assert objective(inputs._replace(logp=empty)).loss.isfinite()
    for field in ("kl_coef", "entropy_coef"):
        with refused("out_of_range", f"CatalogPolicyGradient.{field}"):
            CatalogPolicyGradient(**{field: -1.0})
    with refused("missing_option", "logp_ref"):
        catalog_policy_gradient_loss(logits, rewards, kl_coef=0.1)
