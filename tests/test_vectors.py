"""The test vectors in tests/objectives/objectives.json for recpo's functions: values and gradients.

The vectors come from an independent NumPy implementation in float64. `OTHERS` lists the ones that belong to other
modules or to other frameworks; the last test makes sure that none is forgotten.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from recpo.base.types import FeedbackBatch, Histories, LogProbs, ObjectiveInputs, Slates
from recpo.objectives.advantages import (
    group_normalized_advantage,
    leave_one_out_advantage,
    share_threshold,
    ternary_advantage,
)
from recpo.objectives.gae import generalized_advantage_estimate
from recpo.objectives.grpo import DAPO, GBPO, GRPO, GSPO, DrGRPO, aspo_loss, cispo_loss, ecpo_loss, gbpo_loss, gspo_loss
from recpo.objectives.listwise_dpo import margin_listwise_dpo_loss, softmax_dpo_loss
from recpo.objectives.policy_gradient import PPO, entropy, ppo_loss, value_loss
from recpo.objectives.preference import DPO, dpo_loss
from recpo.objectives.reward_model import pairwise_reward_loss
from recpo.ops.kl import categorical_kl, kl_estimate, kl_shaped_rewards
from recpo.ops.reduce import aggregate
from recpo.ops.surrogate import clipped_surrogate, sequence_log_ratio
from recpo.rewards.rewards import ValidityReward, rank_aware_reward
from recpo.training.kl_control import adapted_kl_coef
from recpo.training.options import KLTarget

VECTORS = {
    vector["id"]: vector
    for vector in json.loads((Path(__file__).parent / "objectives" / "objectives.json").read_text())["vectors"]
}
OTHERS = {
    "dmpo.beta1": "not an objective of recpo",
    "onesug_pairwise_as_printed": "not an objective of recpo",
    "rank_grpo.causal_dcg": "not an objective of recpo",
    "rank_grpo.ratio": "not an objective of recpo",
    "duration_reward.quantile": "recpo.log.shaping",
    "dapo.dynamic_sampling": "recpo.training.rollout",
    "dapo.overlong": "items have no lengths that could run over",
    "ope.basic": "recpo.evaluation.off_policy",
    "metrics.ranking": "recpo.ops.ranking",
    "metrics.sid_collision": "recpo.evaluation.beyond_accuracy",
}


def vector(name):
    found = VECTORS[name]
    inputs = found["inputs"]
    if "same_as" in inputs:
        inputs = VECTORS[inputs["same_as"]]["inputs"] | inputs
    return inputs, found["expected"]


def tensor(values, requires_grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def close(actual, expected):
    torch.testing.assert_close(actual.detach(), tensor(expected), rtol=1e-9, atol=1e-12)


def gradient(loss, *leaves):
    return torch.autograd.grad(loss.sum(), leaves)


def test_kl_pointwise():
    inputs, expected = vector("kl.pointwise")
    logp, ref = tensor(inputs["logp"], True), tensor(inputs["ref_logp"])
    for kind in ("k1", "abs", "k2"):
        close(kl_estimate(logp, ref, kind), expected[kind])
    close(kl_estimate(logp, ref, "k3")[:3], expected["k3_unclamped_first3"])
    close(kl_estimate(logp, ref, "low_var"), expected["low_var_kl"])
    close(gradient(kl_estimate(logp, ref, "k1"), logp)[0], expected["dk1"])
    close(gradient(kl_estimate(logp, ref, "k2"), logp)[0], expected["dk2"])
    close(gradient(kl_estimate(logp, ref, "k3"), logp)[0][:3], expected["dk3_first3"])
    close(gradient(kl_estimate(logp, ref, "low_var"), logp)[0][3], expected["dlow_var_4th"])


def test_kl_in_expectation():
    inputs, expected = vector("kl.expected_value_and_gradient")
    logits, reference = tensor(inputs["P"]).log().requires_grad_(), tensor(inputs["Q"]).log()
    logp = logits.log_softmax(-1)
    probabilities = logp.exp().detach()
    exact = categorical_kl(logits, reference)
    close(exact, expected["KL_P_Q"])
    close(gradient(exact, logits)[0], expected["true_grad_logits"])
    for kind in ("k1", "k2", "k3"):
        estimate = (probabilities * kl_estimate(logp, reference, kind)).sum()
        close(estimate, expected[f"E_{kind}"])
        close(torch.autograd.grad(estimate, logits, retain_graph=True)[0], expected[f"E_grad_{kind}"])


def pair(inputs):
    names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
    return [tensor(inputs[name], name.startswith("policy")) for name in names]


@pytest.mark.parametrize("name", ["dpo.sigmoid.ls0.0", "dpo.sigmoid.ls0.1"])
def test_dpo_sigmoid(name):
    inputs, expected = vector(name)
    chosen, rejected, ref_chosen, ref_rejected = pair(inputs)
    loss = dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, beta=inputs["beta"], label_smoothing=inputs["label_smoothing"]
    )
    close(loss, expected["loss"])
    grad_chosen, grad_rejected = gradient(loss, chosen, rejected)
    close(grad_chosen, expected["grad_policy_chosen_per_sample"])
    close(grad_rejected, expected["grad_policy_rejected_per_sample"])
    logp = torch.stack([chosen, rejected], 1).unsqueeze(-1)
    reference = torch.stack([ref_chosen, ref_rejected], 1).unsqueeze(-1)
    mask = torch.ones_like(logp, dtype=torch.bool)
    output = DPO(beta=inputs["beta"], label_smoothing=inputs["label_smoothing"])(
        ObjectiveInputs(LogProbs(logp, mask, reference=reference), chosen=torch.tensor([[True, False]] * 2))
    )
    close(output.loss, expected["mean"])
    assert output.metrics["reward_chosen"].item() == pytest.approx(sum(expected["chosen_rewards"]) / 2, abs=1e-6)
    assert output.metrics["reward_rejected"].item() == pytest.approx(sum(expected["rejected_rewards"]) / 2, abs=1e-6)


@pytest.mark.parametrize("variant", ["robust", "ipo", "hinge"])
def test_dpo_variants(variant):
    inputs, expected = vector({"ipo": "dpo.ipo.sum"}.get(variant, f"dpo.{variant}"))
    logps = pair(inputs)
    smoothing = inputs["label_smoothing"]
    loss = dpo_loss(*logps, beta=inputs["beta"], label_smoothing=smoothing, variant=variant)
    close(loss, expected["loss"])
    if "grad_policy_chosen" in expected:
        close(gradient(loss, logps[0])[0], expected["grad_policy_chosen"])


def test_ipo_over_token_means():
    inputs, expected = vector("dpo.ipo.token_mean")
    lengths = torch.tensor([inputs["len_chosen"], inputs["len_rejected"]]).T.long()
    mask = torch.arange(3) < lengths.unsqueeze(-1)
    chosen, rejected, ref_chosen, ref_rejected = pair(inputs)

    def spread(a, b):
        return (torch.stack([a, b], 1) / lengths).unsqueeze(-1).expand(2, 2, 3)

    logp = LogProbs(spread(chosen, rejected), mask, reference=spread(ref_chosen, ref_rejected))
    objective = DPO(beta=inputs["beta"], variant="ipo", length_normalized=True)
    output = objective(ObjectiveInputs(logp, chosen=torch.tensor([[True, False]] * 2)))
    close(output.loss, sum(expected["loss"]) / 2)


def test_dpo_is_stable():
    inputs, expected = vector("dpo.stability")
    h = tensor(inputs["h"], True)
    zero = torch.zeros_like(h)
    loss = dpo_loss(h, zero, zero, zero, beta=inputs["beta"])
    close(loss, expected["loss"])
    close(gradient(loss, h)[0], expected["grad_h"])


@pytest.mark.parametrize("name", ["sdpo.beta1.0", "sdpo.beta0.1"])
def test_softmax_dpo(name):
    inputs, expected = vector(name)
    logps = pair(inputs)
    loss = softmax_dpo_loss(*logps, beta=inputs["beta"])
    close(loss, expected["loss"])
    close(loss.mean(), expected["mean"])
    grad_chosen, grad_rejected = gradient(loss, logps[0], logps[1])
    close(grad_chosen, expected["grad_chosen_per_sample"])
    close(grad_rejected, expected["grad_rejected_per_sample"])


@pytest.mark.parametrize("name", ["plain", "weighted"])
def test_margin_listwise_dpo(name):
    inputs, expected = vector(f"onesearch_listwise_as_printed.{name}")
    logps = pair(inputs)
    loss = margin_listwise_dpo_loss(
        *logps,
        beta=inputs["beta"],
        margin=inputs["delta"],
        gap_weight=inputs["rw_delta"],
        nll_coef=inputs["alpha"],
    )
    close(loss, expected["loss"])
    close(gradient(loss, logps[0])[0], expected["grad_chosen_per_sample"])
    preference = margin_listwise_dpo_loss(
        *logps, beta=inputs["beta"], margin=inputs["delta"], gap_weight=inputs["rw_delta"], nll_coef=0.0
    )
    assert preference.max().item() <= expected["preference_term_max"] + 1e-12


def test_pairwise_reward():
    inputs, expected = vector("rm.pairwise")
    loss = pairwise_reward_loss(*(tensor(inputs[name]) for name in ("chosen", "rejected", "margin")))
    close(loss, expected["loss"])
    close(loss.mean(), expected["mean"])


@pytest.mark.parametrize("name", ["done_mid", "time_batch", "lam1_gamma1", "lam0"])
def test_gae(name):
    inputs, expected = vector(f"gae.{name}")
    rewards, values = tensor(inputs["rewards"]), tensor(inputs["values"])
    dones = tensor(inputs["dones"]) if "dones" in inputs else torch.zeros_like(rewards)
    next_value = tensor(inputs.get("next_value", 0.0))
    timed = inputs.get("layout") == "[T,B]"
    advantages, returns = generalized_advantage_estimate(
        *(x.T if timed else x for x in (rewards, values, dones)),
        next_value,
        gamma=inputs["gamma"],
        lam=inputs["lam"],
    )
    close(advantages.T if timed else advantages, expected["advantages"])
    if "returns" in expected:
        close(returns, expected["returns"])


def test_kl_shaped_rewards():
    inputs, expected = vector("reward_with_kl.k1")
    names = ("score", "old_logp", "ref_logp", "mask")
    close(kl_shaped_rewards(*(tensor(inputs[n]) for n in names), inputs["kl_coef"]), expected["token_rewards"])


def test_value_loss():
    inputs, expected = vector("value_loss.clip0.2")
    values = tensor(inputs["values"], True)
    mask = tensor(inputs["mask"])
    loss = value_loss(values, tensor(inputs["old_values"]), tensor(inputs["returns"]), clip=inputs["clip"])
    close(loss * mask, expected["per_token"])
    close(aggregate(loss, mask), expected["loss_token_mean"])
    close(gradient(aggregate(loss, mask), values)[0], expected["grad_values_token_mean"])


def test_entropy_of_masked_logits():
    inputs, expected = vector("entropy.masked_logits")
    logits = tensor([[float(x) for x in row] for row in inputs["logits"]], True)
    close(entropy(logits), expected["entropy"])
    close(-entropy(logits).mean(), expected["loss_term"])
    assert gradient(entropy(logits), logits)[0].isfinite().all()


def test_adaptive_kl_coefficient():
    inputs, expected = vector("kl_controller.adaptive")
    target, values = KLTarget(inputs["target"], inputs["horizon"]), [inputs["init"]]
    for kl, n in inputs["steps"]:
        values.append(adapted_kl_coef(values[-1], target, kl, n))
    assert values[1:] == pytest.approx(expected["values"], rel=1e-12)


@pytest.mark.parametrize("name", ["ppo", "dapo_clip_higher", "dual_clip"])
@pytest.mark.parametrize("sign", ["+1", "-1"])
def test_clipped_surrogate(name, sign):
    inputs, expected = vector(f"surrogate.{name}")
    log_ratio = tensor(inputs["ratio"]).log().requires_grad_()
    advantages = torch.full_like(log_ratio, float(sign))
    loss = clipped_surrogate(log_ratio, advantages, inputs["eps_low"], inputs["eps_high"], inputs["clip_c"])
    close(loss, expected[f"A={sign}"]["loss"])
    close(gradient(loss, log_ratio)[0], expected[f"A={sign}"]["grad_logp"])


@pytest.mark.parametrize(
    ("key", "caps"),
    [
        ("paper_one_sided_cap_1p2_gradA1", {"cap_high": 1.2}),
        ("verl_two_sided_0p8_1p2_gradA1", {"cap_low": 0.8, "cap_high": 1.2}),
        ("trl_eps_high_5_is_absolute_cap_gradA1", {"cap_high": 5.0}),
    ],
)
def test_cispo(key, caps):
    inputs, expected = vector("surrogate.cispo")
    logp = tensor(inputs["ratio"]).log().requires_grad_()
    loss = cispo_loss(logp, torch.zeros_like(logp), torch.ones_like(logp), **caps)
    close(gradient(loss, logp)[0], expected[key])
    close(loss, expected[key])


@pytest.mark.parametrize(("sign", "key"), [(1.0, "grad_logp_A_pos"), (-1.0, "grad_logp_A_neg")])
def test_aspo(sign, key):
    inputs, expected = vector("surrogate.aspo")
    logp = tensor(inputs["ratio"]).log().requires_grad_()
    loss = aspo_loss(
        logp,
        torch.zeros_like(logp),
        torch.full_like(logp, sign),
        clip_low=inputs["eps_low"],
        clip_high=inputs["eps_high"],
        dual_clip=inputs["c"],
    )
    close(gradient(loss, logp)[0], expected[key])
    close(loss, expected[key])


@pytest.mark.parametrize("sign", ["+1", "-1"])
def test_ecpo(sign):
    inputs, expected = vector("surrogate.ecpo")
    logp = tensor(inputs["ratio"]).log().requires_grad_()
    loss = ecpo_loss(
        logp,
        torch.zeros_like(logp),
        torch.full_like(logp, float(sign)),
        clip_low=inputs["eps"],
        clip_high=inputs["eps"],
        delta=inputs["delta"],
    )
    close(loss, expected[f"A={sign}"]["loss"])
    close(gradient(loss, logp)[0], expected[f"A={sign}"]["grad_logp"])


@pytest.mark.parametrize("name", ["traditional_log_pi_old_is_sg_pi", "pi_old_0p2"])
@pytest.mark.parametrize("sign", ["+1", "-1"])
def test_gbpo(name, sign):
    inputs, expected = vector(f"gbpo.{name}")
    logp = tensor(inputs["pi"]).log().requires_grad_()
    old = None if inputs["pi_old"] is None else torch.full_like(logp, inputs["pi_old"]).log()
    loss = gbpo_loss(logp, torch.full_like(logp, float(sign)), logp_old=old)
    close(loss, expected[f"A={sign}"]["loss"])
    close(gradient(loss, logp)[0], expected[f"A={sign}"]["grad_logp"])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gbpo_levels(level):
    inputs, expected = vector("gbpo.token_vs_sequence_granularity")
    logp = tensor(inputs["token_probs"]).log().requires_grad_()
    loss = gbpo_loss(logp, tensor(inputs["A"]), level=level)
    if level == "sequence":
        loss = loss.mean()
    close(gradient(loss, logp)[0], expected[f"{level}_level_grad_logp_each_token"])


def test_gbpo_normalizer():
    inputs, expected = vector("gbpo.normalizer")
    logp = tensor(inputs["logp"], True)
    mask = torch.ones(1, 8, 1, dtype=torch.bool)
    output = GBPO()(ObjectiveInputs(LogProbs(logp.view(1, 8, 1), mask), advantages=tensor([inputs["A"]])))
    close(output.loss, expected["mean_over_all_G"])
    close(gradient(output.loss, logp)[0], expected["grad_over_all_G"])


def test_ternary_advantage():
    inputs, expected = vector("duration_reward.advantage")
    quantile = tensor(inputs["q"])
    close(share_threshold(quantile, inputs["top"]), expected["tau_B"])
    advantage = ternary_advantage(quantile, torch.tensor(inputs["neg"]), positive_fraction=inputs["top"])
    close(advantage, [float(a) for a in expected["A"]])


def test_ternary_advantage_with_ties():
    inputs, expected = vector("duration_reward.ties")
    close(ternary_advantage(tensor(inputs["q"]), None), [float(a) for a in expected["A_non_strict"]])


@pytest.mark.parametrize(
    ("key", "function"),
    [
        ("verl_unbiased_1e6", group_normalized_advantage),
        ("trl_unbiased_1e4", lambda r: group_normalized_advantage(r, eps=1e-4)),
        ("population_1e6", lambda r: group_normalized_advantage(r, unbiased=False)),
        ("dr_grpo", lambda r: group_normalized_advantage(r, scale=False)),
        ("rloo", leave_one_out_advantage),
    ],
)
def test_group_advantages(key, function):
    inputs, expected = vector("group_advantage")
    advantages = function(tensor(inputs["rewards"]))
    close(advantages, expected[key])
    assert (advantages[1] == 0).all()


AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "dr_grpo(TRL, mean over B)",
}


@pytest.mark.parametrize(("mode", "key"), AGGREGATIONS.items())
def test_aggregations(mode, key):
    inputs, expected = vector("agg.ragged")
    assert aggregate(
        tensor(inputs["loss"]), tensor(inputs["mask"]), mode, length=inputs["norm"]
    ).item() == pytest.approx(expected[key], rel=1e-12)


@pytest.mark.parametrize(("mode", "key"), AGGREGATIONS.items())
def test_aggregations_without_an_empty_sequence(mode, key):
    inputs, expected = vector("agg.empty_sequence")
    values = tensor([*VECTORS["agg.ragged"]["inputs"]["loss"], [math.nan] * 4])
    # TRL counts the fully masked row too (8.75); recpo removes it, like the other modes do
    want = 35.0 / 3 if mode.endswith("norm") else expected[key]
    assert aggregate(values, tensor(inputs["mask"]), mode, length=4).item() == pytest.approx(want, rel=1e-12)


def test_aggregation_over_microbatches():
    inputs, expected = vector("agg.microbatch_invariance")
    ragged = VECTORS["agg.ragged"]["inputs"]
    values, mask = tensor(ragged["loss"]), tensor(ragged["mask"])
    parts = [aggregate(values[a:b], mask[a:b], inputs["mode"], count=mask.sum()).item() for a, b in inputs["splits"]]
    assert aggregate(values, mask, inputs["mode"]).item() == pytest.approx(expected["full"])
    assert sum(parts) == pytest.approx(expected["correct_accumulated"])


def group(inputs):
    """One context whose slate is the group: [1, G, T] each, and the leaf."""
    leaf = tensor(inputs["new_logp"], True)
    old, reference = tensor(inputs["old_logp"]), tensor(inputs["ref_logp"])
    mask = tensor(inputs["mask"]).bool()
    logp = LogProbs(leaf[None], mask[None], old=old[None], reference=reference[None])
    return leaf, ObjectiveInputs(logp, advantages=tensor([inputs["advantages"]]))


def test_grpo():
    inputs, expected = vector("grpo.full")
    leaf, batch = group(inputs)
    close(group_normalized_advantage(tensor(inputs["rewards"])), inputs["advantages"])
    output = GRPO(kl_coef=inputs["beta"])(batch)
    close(output.loss, expected["loss"])
    close(output.metrics["policy_loss"], expected["pg"])
    close(gradient(output.loss, leaf)[0], expected["grad_new_logp"])
    kl = kl_estimate(leaf, batch.logp.reference[0])
    close(aggregate(kl, batch.logp.mask[0], "seq-mean-token-mean"), expected["kl"])


def test_dapo():
    inputs, expected = vector("dapo.full")
    leaf, batch = group(inputs)
    output = DAPO()(batch)
    close(output.loss, expected["loss"])
    close(gradient(output.loss, leaf)[0], expected["grad_new_logp"])


def test_dr_grpo():
    inputs, expected = vector("dr_grpo.full")
    leaf, batch = group(inputs)
    centered = group_normalized_advantage(tensor([inputs["rewards"]]), scale=False)
    output = DrGRPO(length=inputs["budget"])(batch._replace(advantages=centered))
    close(output.loss, expected["loss_mean_over_B"])
    close(gradient(output.loss, leaf)[0], expected["grad_new_logp_mean_over_B"])


@pytest.mark.parametrize("name", ["wide_0p2", "paper_3e4_4e4"])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_gspo(name, level):
    inputs, expected = vector(f"gspo.full.{name}")
    leaf, batch = group(inputs)
    mask = batch.logp.mask[0]
    close(sequence_log_ratio(leaf - batch.logp.old[0], mask).exp(), expected["seq_ratio"])
    clips = {"clip_low": inputs["eps_low"], "clip_high": inputs["eps_high"]}
    output = GSPO(level=level, **clips)(batch)
    close(output.loss, expected["loss"])
    close(gradient(output.loss, leaf)[0], expected["grad_new_logp"])
    tokens = gspo_loss(leaf, batch.logp.old[0], batch.advantages[0], mask, level=level, **clips)
    close(aggregate(tokens, mask, "seq-mean-token-mean"), expected["loss"])


def test_ppo_diagnostics():
    inputs, expected = vector("ppo_diagnostics")
    _, batch = group(inputs)
    metrics = PPO(value_coef=0.0)(batch).metrics
    assert metrics["approx_kl"].item() == pytest.approx(expected["approx_kl_old_new_k1"], abs=1e-7)
    assert metrics["clip_fraction"].item() == pytest.approx(expected["clipfrac_0p2"])
    loss = ppo_loss(batch.logp.policy, batch.logp.old, batch.advantages, mask=batch.logp.mask)
    close(aggregate(loss, batch.logp.mask), PPO(value_coef=0.0)(batch).loss.item())


@pytest.mark.parametrize("case", ["hit_at_1", "hit_at_3", "no_hit"])
def test_rere_rank_reward(case):
    inputs, expected = vector("rere.rank_reward.G4")
    hits = torch.zeros(inputs["G"], dtype=torch.bool)
    if case != "no_hit":
        hits[int(case[-1]) - 1] = True
    close(rank_aware_reward(hits), expected[case]["paper_formula" if case == "no_hit" else "paper"])


def test_rere_advantage():
    inputs, expected = vector("rere.advantage")
    close(group_normalized_advantage(tensor(inputs["reward"]), eps=1e-4), expected["adv_unbiased_1e4"])


def test_onerec_format_advantage():
    inputs, expected = vector("onerec_format_advantage")
    items = torch.tensor([inputs["legal"]]).long()
    candidates = Slates(items, torch.zeros_like(items), torch.ones_like(items, dtype=torch.bool))
    batch = FeedbackBatch(Histories(items, torch.tensor([5])), candidates, torch.tensor([0]))
    close(ValidityReward(count=5)(batch, candidates).double()[0], expected["A"])


def test_no_vector_is_forgotten():
    text = Path(__file__).read_text()

    def is_named(name):
        stems = [name[: i + 1] for i, letter in enumerate(name) if letter == "."]
        return f'"{name}"' in text or any(f'f"{stem}{{' in text for stem in stems)

    assert set(OTHERS) <= set(VECTORS)
    assert not [name for name in VECTORS if name not in OTHERS and not is_named(name)]
