"""SimPO, DMPO, margins by grades, KTO and weighted likelihood against scalar references, with their gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from recpo.base.types import FeedbackBatch, Histories, LogProbs, ObjectiveInputs, Slates
from recpo.objectives import DPO, KTO, Likelihood, SoftmaxDPO, WeightedLikelihood
from recpo.objectives.advantages import GradedAdvantage, graded_advantage
from recpo.objectives.likelihood import likelihood_weights, weighted_likelihood_loss
from recpo.objectives.listwise_dpo import softmax_dpo_loss
from recpo.objectives.preference import dmpo_loss, dpo_loss, kto_loss
from tests.reference import objective_losses as ref
from tests.refusals import refused

SEEDS = st.integers(0, 2**32 - 1)


def log_probs(seed=0, shape=(3, 4, 2)):
    torch.manual_seed(seed)
    policy = (-torch.rand(shape, dtype=torch.float64) * 3 - 0.1).requires_grad_()
    mask = torch.rand(shape) < 0.8
    mask[:, 0, 0] = True
    return LogProbs(policy, mask, *(-torch.rand(2, *shape, dtype=torch.float64) * 3))


def first_chosen(shape=(3, 4)):
    chosen = torch.zeros(shape, dtype=torch.bool)
    chosen[:, 0] = True
    return chosen


# ---------------------------------------------------------------- preference lists
@given(seed=SEEDS)
def test_simpo(seed):
    rng = np.random.default_rng(seed)
    chosen, rejected, margin = (*rng.normal(-3, 2, (2, 5)), rng.uniform(0, 2, 5))
    tensors = [torch.tensor(x, requires_grad=True) for x in (chosen, rejected, margin)]
    loss = dpo_loss(*tensors[:2], *torch.zeros(2, 5), beta=0.7, margin=tensors[2])
    want = [ref.simpo(c, r, 0.7, m) for c, r, m in zip(chosen, rejected, margin, strict=True)]
    assert loss.tolist() == pytest.approx(want, rel=1e-9)
    gradients = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
    slope = -0.7 * torch.sigmoid(-(0.7 * (tensors[0] - tensors[1]) - tensors[2])).detach()
    torch.testing.assert_close(gradients[:2], (slope, -slope))
    assert gradients[2] is None


@given(seed=SEEDS)
def test_dmpo(seed):
    rng = np.random.default_rng(seed)
    size, length = rng.integers(1, 4), rng.integers(1, 5)
    (chosen, ref_chosen), margin = rng.normal(-3, 2, (2, size)), rng.uniform(0, 1, (size, length))
    rejected, ref_rejected = rng.normal(-3, 2, (2, size, length))
    mask = rng.random((size, length)) < 0.7
    hostile = [torch.tensor(np.where(mask, x, np.nan), requires_grad=True) for x in (rejected, ref_rejected, margin)]
    winner = torch.tensor(chosen, requires_grad=True)
    keep = torch.tensor(mask)
    loss = dmpo_loss(winner, hostile[0], torch.tensor(ref_chosen), hostile[1], beta=0.6, margin=hostile[2], mask=keep)
    for i, row in enumerate(mask):
        options = (rejected[i][row], ref_chosen[i], ref_rejected[i][row], 0.6, margin[i][row])
        assert loss[i].item() == pytest.approx(ref.dmpo(chosen[i], *options), rel=1e-9, abs=1e-12)
    up, down = torch.autograd.grad(loss.sum(), [winner, hostile[0]])
    assert (down[~keep] == 0).all()
    torch.testing.assert_close(down.sum(-1), -up)
    spread = down.masked_fill(~keep, math.inf).amin(-1), down.masked_fill(~keep, -math.inf).amax(-1)
    paired = keep.any(-1)
    torch.testing.assert_close(spread[0][paired], spread[1][paired])  # the hardest gets no more than the others


def test_one_rejected_item_makes_dmpo_dpo():
    logp = log_probs(1, (5, 2, 3))
    inputs = ObjectiveInputs(logp._replace(mask=torch.ones(5, 2, 3, dtype=torch.bool)), chosen=first_chosen((5, 2)))
    losses = [DPO(variant=variant, beta=0.3, margin=0.2)(inputs).loss for variant in ("sigmoid", "dmpo")]
    torch.testing.assert_close(*losses)


def test_simpo_reads_no_reference_and_the_mean_of_the_tokens():
    logp = log_probs(2)
    inputs = ObjectiveInputs(logp._replace(old=None, reference=None), chosen=first_chosen())
    simpo = DPO(variant="simpo", beta=2.0, margin=0.5)
    assert simpo.requires == {"chosen"}
    output = simpo(inputs)
    total = 0.0
    for b in range(3):
        mean = [(logp.policy[b, s][logp.mask[b, s]]).mean().item() for s in range(4) if logp.mask[b, s].any()]
        total += sum(ref.simpo(mean[0], other, 2.0, 0.5) for other in mean[1:]) / max(len(mean) - 1, 1)
    assert output.loss.item() == pytest.approx(total / 3)
    means = [logp.policy[b, 0][logp.mask[b, 0]].mean().item() for b in range(3)]
    assert output.metrics["reward_chosen"].item() == pytest.approx(2.0 * sum(means) / 3)


@pytest.mark.parametrize("variant", ["sigmoid", "robust", "ipo", "hinge"])
def test_a_margin_moves_the_lead_at_which_a_pair_counts_as_settled(variant):
    h = torch.linspace(-4, 4, 9, dtype=torch.float64)
    zero = torch.zeros_like(h)
    moved = dpo_loss(
        h, zero, zero, zero, beta=0.5, variant=variant, margin=torch.full_like(h, 0.75), label_smoothing=0.1
    )
    plain = dpo_loss(h - 1.5, zero, zero, zero, beta=0.5, variant=variant, label_smoothing=0.1)
    torch.testing.assert_close(moved, plain)


def test_margins_of_softmax_dpo_are_asked_of_each_rejected_item():
    torch.manual_seed(3)
    chosen, ref_chosen = torch.randn(2, 4, dtype=torch.float64)
    rejected, ref_rejected = torch.randn(2, 4, 3, dtype=torch.float64)
    margins = torch.rand(4, 3, dtype=torch.float64)
    margins.requires_grad_()
    got = softmax_dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.5, margins=margins)
    assert not got.requires_grad
    want = softmax_dpo_loss(chosen, rejected + 2 * margins, ref_chosen, ref_rejected, beta=0.5)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("objective", [DPO(variant=v) for v in ("sigmoid", "simpo", "dmpo")] + [SoftmaxDPO()])
def test_the_gap_of_the_grades_is_a_margin(objective):
    """Known gaps alone count, and only where the chosen item has the higher grade."""
    logp = log_probs(4, (1, 5, 1))
    inputs = ObjectiveInputs(logp._replace(mask=torch.ones(1, 5, 1, dtype=torch.bool)), chosen=first_chosen((1, 5)))
    grades = torch.tensor([[0.625, 0.125, math.nan, 0.875, 0.375]], dtype=torch.float64)
    graded = type(objective)(**{**vars(objective), "grade_gap_coef": 0.8})
    assert graded.requires == objective.requires | {"grades"}
    got = graded(inputs._replace(grades=grades)).loss
    # a lead that is asked for is a rejected item that stands higher by it
    shift = 0.8 * torch.tensor([0.0, 0.5, 0.0, 0.0, 0.25], dtype=torch.float64).view(1, 5, 1) / objective.beta
    want = objective(inputs._replace(logp=inputs.logp._replace(policy=logp.policy + shift - 3.0))).loss
    if objective.requires >= {"reference"}:
        want = objective(
            inputs._replace(
                logp=inputs.logp._replace(policy=logp.policy - 9.0, reference=inputs.logp.reference - 9.0 - shift)
            )
        ).loss
    torch.testing.assert_close(got, want)
    unknown = graded(inputs._replace(grades=torch.full_like(grades, math.nan))).loss
    torch.testing.assert_close(unknown, objective(inputs).loss)
    with refused("out_of_range", f"{type(objective).__name__}.grade_gap_coef"):
        type(objective)(grade_gap_coef=-1.0)


def test_defaults_of_the_losses_of_pairs_and_lists():
    a, b, c, d = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.5, -1.2, -1.1))

    def nll(x):
        return pytest.approx(math.log1p(math.exp(-x)))

    assert dpo_loss(a, b, c, d).item() == nll(0.1 * (0.2 + 0.4))
    assert dmpo_loss(a, b[None], c, d[None]).item() == nll(0.2 + 0.4)
    assert softmax_dpo_loss(a, b[None], c, d[None]).item() == nll(0.2 + 0.4)
    assert DPO() == DPO(beta=0.1, nll_coef=0.0, variant="sigmoid", label_smoothing=0.0, margin=0.0, grade_gap_coef=0.0)
    assert SoftmaxDPO() == SoftmaxDPO(beta=1.0, nll_coef=0.0, grade_gap_coef=0.0)
    with refused("out_of_range", "label_smoothing"):
        dpo_loss(a, b, 0 * a, 0 * b, label_smoothing=0.5)
    smoothed = dpo_loss(a, b, 0 * a, 0 * b, beta=2.0, label_smoothing=0.1).item()
    assert smoothed == pytest.approx(0.9 * math.log1p(math.exp(-1.0)) + 0.1 * math.log1p(math.exp(1.0)))
    smoothed = dmpo_loss(a, b[None], c, d[None], label_smoothing=0.1).item()
    assert smoothed == pytest.approx(0.9 * math.log1p(math.exp(-0.6)) + 0.1 * math.log1p(math.exp(0.6)))


@pytest.mark.parametrize("objective", [DPO(grade_gap_coef=0.8), SoftmaxDPO(grade_gap_coef=0.8)])
def test_every_list_has_its_own_gaps(objective):
    logp = log_probs(8)
    inputs = ObjectiveInputs(logp._replace(mask=torch.ones(3, 4, 2, dtype=torch.bool)), chosen=first_chosen())
    grades = torch.tensor([[0.875, 0.1, 0.2, 0.3], [0.375, 0.1, 0.5, 0.0], [0.625, 0.6, 0.0, math.nan]])
    alone = [
        objective(
            inputs._replace(
                logp=LogProbs(*(x[b : b + 1] for x in inputs.logp)),
                chosen=first_chosen((1, 4)),
                grades=grades[b : b + 1],
            )
        ).loss
        for b in range(3)
    ]
    torch.testing.assert_close(objective(inputs._replace(grades=grades)).loss, torch.stack(alone).mean())


# ---------------------------------------------------------------- unary labels
@given(seed=SEEDS)
def test_kto(seed):
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 4), rng.integers(1, 5))
    logp, reference = rng.normal(-3, 2, (2, *shape))
    signs, mask = rng.choice([-2.0, 0.0, 0.5], shape), rng.random(shape) < 0.8
    point = rng.uniform(0, 1, (shape[0], 1))
    hostile = [torch.tensor(np.where(mask, x, np.nan), requires_grad=True) for x in (logp, reference, signs)]
    options = {"beta": 0.7, "desirable_weight": 1.2, "undesirable_weight": 0.4}
    loss = kto_loss(*hostile, torch.tensor(point, requires_grad=True), mask=torch.tensor(mask), **options)
    gradients = torch.autograd.grad(loss.sum(), hostile, allow_unused=True)
    assert gradients[1:] == (None, None)
    for b, s in np.ndindex(*shape):
        sign = int(np.sign(signs[b, s])) if mask[b, s] else 0
        value, slope = ref.kto(logp[b, s], reference[b, s], sign, point[b, 0], *options.values())
        assert loss[b, s].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert gradients[0][b, s].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("over", ["slate", "batch"])
def test_the_reference_point_of_kto_is_the_mean_log_ratio_of_what_is_labeled_and_never_negative(over):
    logp = log_probs(5)
    advantages = torch.tensor([[1.0, -1.0, 0.0, 2.0], [0.0, -0.5, 0.0, 0.0], [0.0] * 4])
    ratio = ((logp.policy - logp.reference) * logp.mask).sum(-1).detach()
    labeled = (advantages != 0) & logp.mask.any(-1)
    rows = [ratio[b][labeled[b]] for b in range(3)]
    slate = [max(float(row.mean()), 0.0) if len(row) else 0.0 for row in rows]
    point = [max(float(torch.cat(rows).mean()), 0.0)] * 3 if over == "batch" else slate
    total = sum(
        ref.kto(ratio[b, s].item(), 0.0, int(advantages[b, s].sign()), point[b], 0.4, 1.5, 0.5)[0]
        for b, s in labeled.nonzero().tolist()
    )
    objective = KTO(beta=0.4, desirable_weight=1.5, undesirable_weight=0.5, reference_point=over)
    output = objective(ObjectiveInputs(logp, advantages))
    assert output.loss.item() == pytest.approx(total / int(labeled.sum()))
    for field in ("beta", "desirable_weight", "undesirable_weight"):
        with refused("out_of_range", f"KTO.{field}"):
            KTO(**{field: -0.1})


# ---------------------------------------------------------------- weights
@given(seed=SEEDS)
def test_weighted_likelihood(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 5, 3))
    logp, mask = -rng.gamma(1.0, 2.0, shape), rng.random(shape) < 0.8
    advantages, behavior = rng.normal(size=shape[:2]), -rng.gamma(1.0, 2.0, shape[:2])
    kept = mask.any(-1)
    options = {"temperature": 0.5, "max_weight": 3.0, "ips_power": 0.6, "max_ips": 2.5}
    hostile = [torch.tensor(np.where(kept, x, np.nan), requires_grad=True) for x in (advantages, behavior)]
    weights = likelihood_weights(hostile[0], logp_behavior=hostile[1], mask=torch.tensor(kept), **options)
    policy = torch.tensor(np.where(mask, logp, np.nan), requires_grad=True)
    loss = weighted_likelihood_loss(policy, weights, mask=torch.tensor(mask))
    gradients = torch.autograd.grad(loss.sum(), [policy, *hostile], allow_unused=True)
    assert gradients[1:] == (None, None)
    for b, s in np.ndindex(*shape[:2]):
        want = ref.likelihood_weight(advantages[b, s], math.exp(behavior[b, s]), *options.values()) if kept[b, s] else 0
        assert weights[b, s].item() == pytest.approx(want, rel=1e-9)
        assert loss[b, s].item() == pytest.approx(-want * logp[b, s][mask[b, s]].sum(), rel=1e-9)
        assert gradients[0][b, s].tolist() == pytest.approx(np.where(mask[b, s], -want, 0.0).tolist(), rel=1e-9)


def test_equal_advantages_make_it_plain_likelihood():
    logp = log_probs(6)
    inputs = ObjectiveInputs(logp, torch.full((3, 4), 0.3, dtype=torch.float64))
    for scale in (0.01, 1.0):  # self-normalized: the size of the weights does not matter, even under 1 in all
        objective = WeightedLikelihood(max_weight=scale)
        want = Likelihood(aggregation="seq-mean-token-sum")(inputs).loss
        torch.testing.assert_close(objective(inputs).loss, want)
    plain = WeightedLikelihood(self_normalized=False, temperature=0.3)(inputs).loss
    torch.testing.assert_close(plain, math.e * want)


def test_with_full_propensities_the_behavior_policy_drops_out():
    """In expectation over the log, the gradient on the logits is that of a cross-entropy to exp(A / temperature)."""
    torch.manual_seed(7)
    logits, behavior = torch.randn(6, dtype=torch.float64).requires_grad_(), torch.randn(6).double().log_softmax(-1)
    advantages = torch.randn(6, dtype=torch.float64)
    weights = likelihood_weights(
        advantages, logp_behavior=behavior, temperature=2.0, max_weight=1e6, ips_power=1.0, max_ips=1e6
    )
    expected = (behavior.exp() * weighted_likelihood_loss(logits.log_softmax(-1)[:, None], weights)).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    target = (advantages / 2.0).softmax(-1)
    torch.testing.assert_close(gradient / (advantages / 2.0).exp().sum(), logits.softmax(-1) - target)


def test_weighted_likelihood_says_what_it_lacks():
    assert WeightedLikelihood().requires == {"advantages"}
    assert WeightedLikelihood(ips_power=0.5).requires == {"advantages", "old", "propensities"}
    with refused("missing_option", "logp_behavior"):
        likelihood_weights(torch.zeros(1), ips_power=0.5)
    for field, value in (("temperature", 0.0), ("max_weight", 0.0), ("max_ips", 0.0), ("ips_power", 1.5)):
        with refused("out_of_range", f"WeightedLikelihood.{field}"):
            WeightedLikelihood(**{field: value})


@pytest.mark.parametrize("baseline", [None, 0.4])
@given(seed=SEEDS)
def test_graded_advantage(baseline, seed):
    rng = np.random.default_rng(seed)
    grades, mask = rng.choice([np.nan, 0.0, 0.125, 0.375, 0.875], (2, 5)), rng.random((2, 5)) < 0.7
    got = graded_advantage(torch.tensor(grades), torch.tensor(mask), baseline=baseline)
    for row in range(2):
        assert got[row].tolist() == pytest.approx(ref.graded(grades[row], mask[row], baseline))


def test_graded_advantage_reads_the_slate():
    ids = torch.tensor([[1, 2, 0]])
    slates = Slates(ids, ids, ids > 0, grade=torch.tensor([[0.875, 0.125, 0.5]]))
    batch = FeedbackBatch(Histories(ids, torch.tensor([2])), slates, torch.tensor([0]))
    assert GradedAdvantage()(batch).tolist() == [[0.375, -0.375, 0.0]]
    assert GradedAdvantage(baseline=0.875)(batch).tolist() == [[0.0, -0.75, 0.0]]
    assert GradedAdvantage().requires == {"labels", "dislikes"}
    with refused("missing_value", "grade"):
        GradedAdvantage()(batch._replace(slates=slates._replace(grade=None)))
    for outside in (2.0, -0.1):
        with refused("out_of_range", "GradedAdvantage.baseline"):
            GradedAdvantage(baseline=outside)
    for bound in (0.0, 1.0):
        assert GradedAdvantage(baseline=bound)(batch).tolist() == [[0.875 - bound, 0.125 - bound, 0.0]]
    grade = torch.tensor([0.5, 0.25], requires_grad=True)
    assert not graded_advantage(grade).requires_grad
    assert graded_advantage(grade[None] * math.nan).tolist() == [[0.0, 0.0]]
