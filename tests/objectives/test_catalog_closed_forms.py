"""MPO, the catalog policy gradient, KTO and weighted likelihood number by number: masks, metrics, defaults, bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.objectives import KTO, MPO, CatalogPolicyGradient, WeightedLikelihood
from recpo.objectives.likelihood import likelihood_weights, weighted_likelihood_loss
from recpo.objectives.mpo import dual_temperature, mpo_loss, mpo_target
from recpo.objectives.policy_gradient import catalog_policy_gradient_loss
from recpo.objectives.preference import kto_loss
from tests.refusals import refused

NAN = math.nan
F64 = torch.float64


def hostile(values, mask):
    """A leaf with nan wherever nothing may be read."""
    return torch.tensor(np.where(mask, values, NAN), requires_grad=True)


class Draws:
    """Three contexts with four candidates of two tokens; of the last context nothing is kept."""

    def __init__(self, seed=0, shape=(3, 4, 2)):
        rng = np.random.default_rng(seed)
        self.tokens = rng.random(shape) < 0.7
        self.tokens[:2, 0] = True
        self.tokens[:2, 3] = False
        self.tokens[2] = False
        self.mask = self.tokens.any(-1)
        self.logp, self.old, self.reference = (-rng.gamma(1.0, 1.0, shape) for _ in range(3))
        self.rewards = rng.normal(size=shape[:2])

    def inputs(self, **more):
        names = {name: hostile(getattr(self, name), self.tokens) for name in ("logp", "old", "reference")}
        logp = LogProbs(names["logp"], torch.tensor(self.tokens), names["old"], names["reference"])
        return ObjectiveInputs(logp, **more)

    def item(self, name, b, s):
        return getattr(self, name)[b, s][self.tokens[b, s]].sum()

    def kept(self, b):
        return [s for s in range(4) if self.mask[b, s]]


def assert_only_policy_learns(loss, logp, *others):
    """Gradients reach the policy's kept tokens alone."""
    gradients = torch.autograd.grad(loss, [logp.policy, logp.old, logp.reference, *others], allow_unused=True)
    assert gradients[1:] == (None,) * (len(gradients) - 1)
    assert (gradients[0][~logp.mask] == 0).all()
    return gradients[0]


# ---------------------------------------------------------------- MPO
def softmax(values):
    weights = np.exp(np.array(values) - max(values))
    return weights / weights.sum()


@pytest.mark.parametrize("kl_target", [None, 0.2])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("base", ["reference", "old"])
def test_mpo_candidate_by_candidate(base, draws, kl_target):
    x = Draws()

    def base_of(b):
        log_base = [x.item(base, b, s) - (x.item("old", b, s) if draws else 0.0) for s in x.kept(b)]
        return softmax(log_base)

    def target_of(b, temperature):
        return softmax(np.log(base_of(b)) + x.rewards[b, x.kept(b)] / temperature)

    def divergence(temperature):
        pairs = [(target_of(b, temperature), base_of(b)) for b in range(2)]
        return np.mean([(w * np.log(w / q)).sum() for w, q in pairs])

    temperature = 0.7 if kl_target is None else brentq(lambda t: divergence(t) - kl_target, 1e-2, 1e3, xtol=1e-12)
    rewards = hostile(x.rewards, x.mask)
    inputs = x.inputs(rewards=rewards)
    objective = MPO(temperature=0.7, kl_target=kl_target, base=base, candidates_are_draws=draws)
    output = objective(inputs)
    targets = [target_of(b, temperature) for b in range(2)]
    losses = [-(w * [x.item("logp", b, s) for s in x.kept(b)]).sum() for b, w in enumerate(targets)]
    assert output.loss.item() == pytest.approx(np.mean(losses), rel=1e-6)
    entropy = [-(w * np.log(w)).sum() for w in targets]
    want = {
        "temperature": temperature,
        "target_reward": np.mean([(w * x.rewards[b, x.kept(b)]).sum() for b, w in enumerate(targets)]),
        "target_kl": divergence(temperature),
        "target_entropy": np.mean(entropy),
        "target_distance": np.mean(losses) - np.mean(entropy),
    }
    found = {name: value.item() for name, value in output.metrics.items()}
    assert found == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert not any(value.requires_grad for value in output.metrics.values())
    gradient = assert_only_policy_learns(output.loss, inputs.logp, rewards)
    for b, w in enumerate(targets):
        for s, weight in zip(x.kept(b), w, strict=True):
            token = x.tokens[b, s].argmax()
            assert gradient[b, s, token].item() == pytest.approx(-weight / 2, rel=1e-6)
    assert objective.count(inputs).item() == 2
    part = objective(inputs._replace(denominator=torch.tensor(8))).loss
    assert part.item() == pytest.approx(np.sum(losses) / 8, rel=1e-6)


def test_the_temperature_ends_where_the_dual_looks():
    rewards = torch.tensor([[0.0, 1.0]], dtype=F64)
    assert dual_temperature(rewards, 5.0).item() == pytest.approx(1e-4, rel=1e-6)  # at most log 2 is to be had
    assert dual_temperature(rewards, 1e-12).item() == pytest.approx(1e4, rel=1e-6)  # hotter than it looks
    assert dual_temperature(torch.ones(2, 3), 0.1).item() == pytest.approx(1e-4, rel=1e-5)
    found = dual_temperature(rewards, 0.1).item()
    w = 1 / (1 + math.exp(-1 / found))
    assert w * math.log(2 * w) + (1 - w) * math.log(2 - 2 * w) == pytest.approx(0.1, rel=1e-6)
    assert dual_temperature(torch.ones(2, 1), 0.1).item() == pytest.approx(1e-4, rel=1e-5)  # nothing to choose
    # contexts without a candidate do not count
    padded = torch.tensor([[0.0, 1.0, NAN], [NAN] * 3], dtype=F64)
    mask = torch.tensor([[True, True, False], [False] * 3])
    assert dual_temperature(padded, 0.1, mask=mask).item() == pytest.approx(found, rel=1e-9)


def test_targets_of_halves_are_single_and_carry_no_gradient():
    rewards = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    log_base = torch.tensor([[0.0, 0.0]], requires_grad=True)
    for options in ({}, {"log_base": log_base}):
        target = mpo_target(rewards, temperature=1.0, **options)
        assert target.dtype == torch.float32
        assert not target.requires_grad
        assert target[0].tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    w = 1 / (1 + math.exp(-20.0))  # the default temperature is .05
    assert mpo_loss(logp, rewards.float()).item() == pytest.approx(w * 2 + (1 - w) * 1)
    assert mpo_loss(logp, rewards.float(), mask=torch.zeros(1, 2)).item() == 0.0
    unknown = torch.tensor([[-1.0, NAN]])
    assert mpo_loss(unknown, unknown, log_base=unknown, mask=torch.tensor([[True, False]])).item() == 1.0


@pytest.mark.parametrize("objective", [MPO(), CatalogPolicyGradient()])
def test_a_context_counts_with_any_token_of_any_item(objective):
    mask = torch.zeros(4, 3, 2, dtype=torch.bool)
    mask[0] = True
    mask[1, 2, 0] = True
    mask[2, :2, 1] = True
    logp = torch.zeros(4, 3, 2)
    assert objective.count(ObjectiveInputs(LogProbs(logp, mask))).item() == 3


def test_defaults_of_the_newer_objectives():
    assert MPO() == MPO(temperature=0.05, kl_target=None, base="reference", candidates_are_draws=False)
    assert CatalogPolicyGradient() == CatalogPolicyGradient(kl_coef=0.05, entropy_coef=0.0)
    assert KTO() == KTO(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, reference_point="slate")
    defaults = {"temperature": 0.25, "max_weight": 20.0, "ips_power": 0.0, "max_ips": 10.0}
    assert WeightedLikelihood() == WeightedLikelihood(**defaults, self_normalized=True)
    advantages, behavior = torch.tensor([-0.1, 0.5, 5.0]), torch.tensor([-0.1, -2.0, -9.0])
    got = likelihood_weights(advantages, logp_behavior=behavior)
    assert torch.equal(got, likelihood_weights(advantages, **defaults))
    assert got.tolist() == pytest.approx([math.exp(-0.4), math.exp(2.0), 20.0])
    capped = likelihood_weights(advantages, logp_behavior=behavior, ips_power=1.0)
    assert capped.tolist() == pytest.approx([math.exp(-0.3), math.exp(4.0), 200.0])
    logp, reference, signs, zero = (
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-2.0, -1.0]),
        torch.tensor([1.0, -1.0]),
        0.0,
    )
    got = kto_loss(logp, reference, signs, torch.tensor(zero))
    assert got.tolist() == pytest.approx([1 / (1 + math.exp(0.1))] * 2)


# ---------------------------------------------------------------- the catalog policy gradient
def test_the_catalog_policy_gradient_item_by_item():
    """Two contexts of which some items cannot be shown, and one of which none can; two tokens per item."""
    rng = np.random.default_rng(1)
    mask = np.array([[True, True, True, False], [True, False, True, True], [False] * 4])
    tokens = np.stack([mask, mask & (np.arange(4) != 0)], -1)  # the first item has one token
    log_pi = np.log(softmax_rows(rng.normal(size=(3, 4)), mask))
    logp = np.stack([np.where(tokens[..., 1], 0.3, 1.0) * log_pi, np.where(tokens[..., 1], 0.7, 0.0) * log_pi], -1)
    log_ref = np.log(softmax_rows(rng.normal(size=(3, 4)), mask))
    reference = np.stack([log_ref, np.zeros((3, 4))], -1)
    rewards = rng.normal(size=(3, 4))
    policy, other, given = hostile(logp, tokens), hostile(reference, tokens), hostile(rewards, mask)
    inputs = ObjectiveInputs(LogProbs(policy, torch.tensor(tokens), other.detach(), other), rewards=given)
    objective = CatalogPolicyGradient(kl_coef=0.3, entropy_coef=0.2)
    output = objective(inputs)
    pi = [np.exp(log_pi[b, mask[b]]) for b in range(2)]
    gained = [(p * rewards[b, mask[b]]).sum() for b, p in enumerate(pi)]
    kl = [(p * (np.log(p) - log_ref[b, mask[b]])).sum() for b, p in enumerate(pi)]
    entropy = [-(p * np.log(p)).sum() for p in pi]
    losses = -np.array(gained) + 0.3 * np.array(kl) - 0.2 * np.array(entropy)
    assert output.loss.item() == pytest.approx(losses.mean())
    found = {name: value.item() for name, value in output.metrics.items()}
    want = {"expected_reward": np.mean(gained), "kl_reference": np.mean(kl), "entropy": np.mean(entropy)}
    assert found == pytest.approx(want, rel=1e-5)
    assert not any(value.requires_grad for value in output.metrics.values())
    gradient, *others = torch.autograd.grad(output.loss, [policy, other, given], allow_unused=True)
    assert others == [None, None]
    assert (gradient[~torch.tensor(tokens)] == 0).all()
    # of -sum pi (r - kl_coef log(pi / ref) - entropy_coef log pi) by log pi, over two contexts
    for b, p in enumerate(pi):
        slope = -p * (rewards[b, mask[b]] - 0.3 * (np.log(p) - log_ref[b, mask[b]] + 1) - 0.2 * (np.log(p) + 1)) / 2
        assert gradient[b, mask[b], 0].tolist() == pytest.approx(slope.tolist())
    assert objective.count(inputs).item() == 2
    assert objective(inputs._replace(denominator=torch.tensor(5))).loss.item() == pytest.approx(losses.sum() / 5)
    assert set(CatalogPolicyGradient(kl_coef=0.0)(inputs).metrics) == {"expected_reward", "entropy"}
    bare = CatalogPolicyGradient(kl_coef=0.0)
    assert bare.requires == {"rewards", "catalog"}
    assert bare(inputs._replace(logp=inputs.logp._replace(reference=None))).loss.item() == pytest.approx(
        -np.mean(gained)
    )
    assert objective.requires == {"rewards", "reference", "catalog"}
    assert CatalogPolicyGradient(0.0, 0.0).entropy_coef == 0.0


def softmax_rows(values, mask):
    """Probabilities over the kept entries of every row; 1 elsewhere, so that there is a logarithm."""
    weights = np.exp(values) * mask
    return np.where(mask, weights / np.maximum(weights.sum(1, keepdims=True), 1e-30), 1.0)


def test_the_pure_catalog_loss_has_no_regularizers_unless_asked():
    logp = torch.tensor([[0.25, 0.75]], dtype=F64).log()
    rewards, reference = torch.tensor([[1.0, 3.0]], dtype=F64), torch.tensor([[0.5, 0.5]], dtype=F64).log()
    plain = catalog_policy_gradient_loss(logp, rewards, logp_ref=reference)
    assert plain.item() == pytest.approx(-2.5)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert catalog_policy_gradient_loss(logp, rewards, entropy_coef=0.1).item() == pytest.approx(-2.5 - 0.1 * entropy)
    unread = torch.tensor([[0.0, 0.0, NAN]], dtype=F64)
    mask, wide = torch.tensor([[True, True, False]]), torch.nn.functional.pad
    leaves = [(wide(x, (0, 1)) + unread).requires_grad_() for x in (logp, rewards, reference)]
    options = {"logp_ref": leaves[2], "mask": mask, "kl_coef": 0.1, "entropy_coef": 0.1}
    regularized = catalog_policy_gradient_loss(*leaves[:2], **options)
    assert regularized.item() == pytest.approx(-2.5 + 0.1 * (math.log(2) - entropy) - 0.1 * entropy)
    gradient, *others = torch.autograd.grad(regularized, leaves, allow_unused=True)
    assert others == [None, None]
    assert gradient[0, 2] == 0
    kl = math.log(2) - entropy
    assert catalog_policy_gradient_loss(logp, rewards, logp_ref=reference, kl_coef=0.1).item() == pytest.approx(
        -2.5 + 0.1 * kl
    )


@pytest.mark.parametrize(
    ("dtype", "passes", "missing"),
    [
        (torch.float32, 0.0009, 0.0011),
        (torch.float32, -0.0009, -0.0011),
        (torch.bfloat16, 215 / 2048, 0.109375),  # summed in halves, the first would miss by more than a tenth
        (torch.float16, 0.0859375, 0.109375),
    ],
)
def test_how_far_from_one_a_catalog_may_sum(dtype, passes, missing):
    def loss(short):
        logp = torch.full((1, 1, 1), -short, dtype=dtype)
        inputs = ObjectiveInputs(LogProbs(logp, torch.ones(1, 1, 1, dtype=torch.bool)), rewards=torch.ones(1, 1))
        return CatalogPolicyGradient(kl_coef=0.0)(inputs).loss

    assert loss(passes).item() == pytest.approx(-math.exp(-passes), rel=5e-3)
    with refused("bad_value", "rollout.candidates"):
        loss(missing)


def test_one_context_without_the_full_catalog_is_enough():
    logp = torch.tensor([0.0, -1.0]).view(2, 1, 1)
    inputs = ObjectiveInputs(LogProbs(logp, torch.ones(2, 1, 1, dtype=torch.bool)), rewards=torch.ones(2, 1))
    with refused("bad_value", "rollout.candidates") as caught:
        CatalogPolicyGradient(kl_coef=0.0)(inputs)
    assert "0.6321" in str(caught.value)  # 1 - exp(-1)


# ---------------------------------------------------------------- unary labels
@pytest.mark.parametrize("over", ["slate", "batch"])
def test_kto_item_by_item(over):
    x = Draws(2)
    advantages = np.array([[0.5, -1.0, 0.0, 3.0], [-0.5, 0.2, -2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    given = hostile(advantages, x.mask)
    inputs = x.inputs(advantages=given)
    objective = KTO(beta=0.6, desirable_weight=1.3, undesirable_weight=0.7, reference_point=over)
    output = objective(inputs)
    labeled = [(b, s) for b in range(3) for s in x.kept(b) if advantages[b, s] != 0]
    lead = {(b, s): x.item("logp", b, s) - x.item("reference", b, s) for b, s in labeled}
    point = {}
    for b, s in labeled:
        alike = [value for (other, _), value in lead.items() if over == "batch" or other == b]
        point[b, s] = max(np.mean(alike), 0.0)
    losses, slopes = [], {}
    for b, s in labeled:
        sign, weight = np.sign(advantages[b, s]), 1.3 if advantages[b, s] > 0 else 0.7
        value = 1 / (1 + math.exp(-0.6 * sign * (lead[b, s] - point[b, s])))
        losses.append(weight * (1 - value))
        slopes[b, s] = -sign * weight * 0.6 * value * (1 - value) / len(labeled)
    assert output.loss.item() == pytest.approx(np.mean(losses))
    gradient = assert_only_policy_learns(output.loss, inputs.logp, given)
    for (b, s), slope in slopes.items():
        assert gradient[b, s][x.tokens[b, s]].tolist() == pytest.approx([slope] * int(x.tokens[b, s].sum()))
    kept = [advantages[b, s] for b in range(2) for s in x.kept(b)]
    want = {
        "reward_desirable": 0.6 * np.mean([lead[at] for at in labeled if advantages[at] > 0]),
        "reward_undesirable": 0.6 * np.mean([lead[at] for at in labeled if advantages[at] < 0]),
        "reference_point": np.mean(list(point.values())),
        "positive_share": np.mean(np.array(kept) > 0),
        "negative_share": np.mean(np.array(kept) < 0),
        "zero_share": np.mean(np.array(kept) == 0),
        "zero_group_share": 0.0,
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(want, abs=1e-6)
    assert not any(value.requires_grad for value in output.metrics.values())
    assert objective.count(inputs).item() == len(labeled)
    assert objective(inputs._replace(denominator=torch.tensor(9))).loss.item() == pytest.approx(np.sum(losses) / 9)
    assert objective.zero_advantage_is_inert
    assert objective.requires == {"advantages", "reference"}

    finite = objective(inputs._replace(advantages=torch.tensor(advantages)))  # what is masked has a sign as well
    assert finite.loss.item() == pytest.approx(output.loss.item())
    assert finite.metrics["zero_share"] == output.metrics["zero_share"]


def test_the_pure_loss_of_kto_reads_what_is_kept_and_moves_the_policy_alone():
    logp, reference, signs, point = (
        torch.tensor(x, requires_grad=True) for x in ([-1.0, -1.0, NAN], [-2.0, -2.0, NAN], [1.0, 1.0, -1.0], [0.5])
    )
    loss = kto_loss(logp, reference, signs, point, mask=torch.tensor([True, False, False]))
    assert loss.tolist() == pytest.approx([1 / (1 + math.exp(0.05)), 0.0, 0.0])
    gradient, *others = torch.autograd.grad(loss.sum(), [logp, reference, signs, point], allow_unused=True)
    assert others == [None] * 3
    assert gradient[1:].tolist() == [0.0, 0.0]


def test_bounds_of_kto():
    with refused("out_of_range", "KTO.beta"):
        KTO(beta=0.0)
    assert KTO(desirable_weight=0.0, undesirable_weight=0.0).desirable_weight == 0.0
    # nothing labeled: the reference point is 0 over no items
    x = Draws(3)
    output = KTO()(x.inputs(advantages=torch.zeros(3, 4)))
    assert output.loss.item() == output.metrics["reference_point"].item() == 0.0


# ---------------------------------------------------------------- weights
@pytest.mark.parametrize("self_normalized", [True, False])
@pytest.mark.parametrize("power", [0.0, 0.5])
def test_weighted_likelihood_item_by_item(power, self_normalized):
    x = Draws(4)
    given = hostile(x.rewards, x.mask)
    inputs = x.inputs(advantages=given)
    options = {"temperature": 0.8, "max_weight": 2.0, "ips_power": power, "max_ips": 1.5}
    objective = WeightedLikelihood(**options, self_normalized=self_normalized)
    output = objective(inputs)
    items = [(b, s) for b in range(2) for s in x.kept(b)]
    weight = [
        min(math.exp(x.rewards[at] / 0.8), 2.0) * min(math.exp(-power * x.item("old", *at)), 1.5 if power else 1.0)
        for at in items
    ]
    nll = [-x.item("logp", *at) for at in items]
    total = sum(weight) if self_normalized else len(items)
    assert output.loss.item() == pytest.approx(np.dot(weight, nll) / total)
    assert objective.count(inputs).item() == pytest.approx(total)
    gradient = assert_only_policy_learns(output.loss, inputs.logp, given)
    for at, w in zip(items, weight, strict=True):
        assert gradient[at][x.tokens[at]].tolist() == pytest.approx([-w / total] * int(x.tokens[at].sum()))
    want = {
        "nll": np.mean(nll),
        "weight_mean": np.mean(weight),
        "weight_max": max(weight),
        "effective_sample_size": sum(weight) ** 2 / (len(items) * np.square(weight).sum()),
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(want, rel=1e-5)
    assert not any(value.requires_grad for value in output.metrics.values())
    assert objective(inputs._replace(denominator=torch.tensor(0.25))).loss.item() == pytest.approx(
        np.dot(weight, nll) / 0.25
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weighted_likelihood_sums_halves_in_single_precision(dtype):
    """In halves a sum of 3000 ones, each times 1, stops at 2048 or 256."""
    logp = torch.full((1, 3000, 1), -1.0, dtype=dtype)
    inputs = ObjectiveInputs(LogProbs(logp, torch.ones_like(logp, dtype=torch.bool)), torch.zeros(1, 3000, dtype=dtype))
    output = WeightedLikelihood()(inputs)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(1.0)
    assert output.metrics["effective_sample_size"].item() == pytest.approx(1.0)


def test_weighted_likelihood_of_nothing():
    x = Draws(5)
    x.tokens[:] = False
    for shape in ((3, 4, 2), (0, 4, 2)):
        logp = LogProbs(torch.full(shape, NAN, requires_grad=True), torch.zeros(shape, dtype=torch.bool))
        output = WeightedLikelihood()(ObjectiveInputs(logp, torch.full(shape[:2], NAN)))
        assert {name: value.item() for name, value in output.metrics.items()} == dict.fromkeys(output.metrics, 0.0)
        assert output.loss.item() == 0.0
        assert (torch.autograd.grad(output.loss, logp.policy)[0] == 0).all()


def test_bounds_of_weighted_likelihood():
    for power in (0.0, 1.0):
        assert WeightedLikelihood(ips_power=power).ips_power == power
    with refused("out_of_range", "WeightedLikelihood.ips_power"):
        WeightedLikelihood(ips_power=-0.1)
    tight = {"temperature": 0.5, "max_weight": 0.5, "max_ips": 0.5}
    assert WeightedLikelihood(**tight).max_ips == 0.5
    logp, weights = torch.tensor([[-1.0, -2.0]]), torch.tensor([0.5], requires_grad=True)
    loss = weighted_likelihood_loss(logp, weights)
    assert loss.item() == pytest.approx(1.5)
    assert not loss.requires_grad
    alone = ObjectiveInputs(LogProbs(logp[None, :, :1], torch.ones(1, 1, 1, dtype=torch.bool)), torch.tensor([[0.3]]))
    assert WeightedLikelihood()(alone).metrics["effective_sample_size"].item() == pytest.approx(1.0)
    assert weighted_likelihood_loss(logp, weights, mask=torch.tensor([[False, True]])).item() == pytest.approx(1.0)
    assert weighted_likelihood_loss(logp, torch.tensor([NAN]), mask=torch.zeros(1, 2)).item() == 0.0
