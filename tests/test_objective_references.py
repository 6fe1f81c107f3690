"""The torch functions against the scalar references on random inputs: float64 to 1e-9, less in smaller formats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from recpo.objectives import advantages as torch_advantages, gae
from recpo.objectives.grpo import aspo_loss, cispo_loss, ecpo_loss, gbpo_loss, gspo_loss
from recpo.objectives.listwise_dpo import margin_listwise_dpo_loss, softmax_dpo_loss
from recpo.objectives.mpo import MIN_TEMPERATURE, dual_temperature, mpo_loss, mpo_target
from recpo.objectives.policy_gradient import entropy, ppo_loss, reinforce_loss, value_loss
from recpo.objectives.preference import dpo_loss
from recpo.objectives.q_learning import bellman_target, q_loss
from recpo.ops.kl import categorical_kl, kl_estimate, kl_shaped_rewards
from recpo.ops.reduce import aggregate
from tests.reference import objective_losses as ref

SEEDS = st.integers(0, 2**32 - 1)
# relative to 1 + |value|: bfloat16 has 8 bits, and the inputs themselves are rounded before the reference sees them
FORMATS = {torch.float64: 1e-9, torch.float32: 2e-5}


class Case:
    """Log-probabilities near those of the old policy, advantages of every kind, and a mask; [B, S, T]."""

    def __init__(self, seed, dtype=torch.float64):
        rng = np.random.default_rng(seed)
        shape = tuple(rng.integers(1, 5, 3))
        old = -rng.gamma(1.0, 2.0, shape) - 1e-3
        logp = np.minimum(old + rng.normal(0, rng.choice([0.05, 0.5, 2.0]), shape), -1e-4)
        self.mask = torch.tensor(rng.random(shape) < 0.8)
        self.logp = torch.tensor(logp, dtype=dtype, requires_grad=True)
        self.old = torch.tensor(old, dtype=dtype)
        self.a = torch.tensor(rng.normal(size=shape[:2]) * (rng.random(shape[:2]) < 0.8), dtype=dtype)

    def tokens(self):
        """(index, logp, old, advantage) of every kept token, as Python floats."""
        for index in np.ndindex(*self.logp.shape):
            if self.mask[index]:
                yield index, self.logp[index].item(), self.old[index].item(), self.a[index[:2]].item()

    def items(self):
        """(index, [logp], [old], advantage) of every item with a kept token."""
        for index in np.ndindex(*self.logp.shape[:2]):
            kept = self.mask[index]
            if kept.any():
                yield index, self.logp[index][kept].tolist(), self.old[index][kept].tolist(), self.a[index].item()


def check(case, loss, values, weights, tolerance=1e-9):
    """``values`` and ``weights``: index -> expected; everything else must be 0."""
    (gradient,) = torch.autograd.grad(loss.sum(), case.logp)
    for actual, expected in ((loss, values), (gradient, weights)):
        want = torch.zeros(case.logp.shape, dtype=torch.float64)
        for index, number in expected.items():
            want[index] = number
        torch.testing.assert_close(actual.detach().double(), want, rtol=tolerance, atol=tolerance)


TOKEN_LOSSES = {
    "ppo": (ppo_loss, ref.ppo, {}, {}),
    "ppo_wide": (ppo_loss, ref.ppo, {"clip_low": 0.5, "clip_high": 0.1}, {"low": 0.5, "high": 0.1}),
    "ppo_dual": (ppo_loss, ref.ppo, {"dual_clip": 1.5}, {"dual": 1.5}),
    "ecpo": (ecpo_loss, ref.ecpo, {"delta": 0.3}, {"delta": 0.3}),
    "aspo": (aspo_loss, ref.aspo, {}, {}),
    "aspo_uncapped": (aspo_loss, ref.aspo, {"dual_clip": None}, {"dual": None}),
    "cispo": (cispo_loss, ref.cispo, {}, {}),
    "cispo_both": (cispo_loss, ref.cispo, {"cap_low": 0.7, "cap_high": 1.5}, {"low": 0.7, "high": 1.5}),
    "gbpo": (lambda logp, old, a, mask: gbpo_loss(logp, a, logp_old=old, mask=mask), ref.gbpo, {}, {}),
    "gbpo_without_old": (
        lambda logp, old, a, mask: gbpo_loss(logp, a, mask=mask),
        lambda logp, old, a: ref.gbpo(logp, None, a),
        {},
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", TOKEN_LOSSES)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_token_losses(name, dtype, seed):
    function, reference, options, reference_options = TOKEN_LOSSES[name]
    case = Case(seed, dtype)
    expected = {index: reference(n, o, a, **reference_options) for index, n, o, a in case.tokens()}
    if dtype != torch.float64:
        # near a jump of the gradient the format decides on which side a ratio falls
        jumps = (0.8, 1.2, 0.5, 1.1, 1.5, 3.0, 1 / 3, 0.7)
        if any(abs(math.exp(n - o) / jump - 1) < 1e-4 for _, n, o, _ in case.tokens() for jump in jumps):
            return
    loss = function(case.logp, case.old, case.a, mask=case.mask, **options)
    check(case, loss, {i: e[0] for i, e in expected.items()}, {i: e[1] for i, e in expected.items()}, FORMATS[dtype])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_token_losses_in_bfloat16(name):
    function, reference, options, reference_options = TOKEN_LOSSES[name]
    case = Case(3, torch.bfloat16)
    loss = function(case.logp, case.old, case.a, mask=case.mask, **options)
    assert loss.dtype == torch.bfloat16
    for index, n, o, a in case.tokens():
        assert loss[index].item() == pytest.approx(reference(n, o, a, **reference_options)[0], rel=0.05, abs=0.02)


@pytest.mark.parametrize("level", ["sequence", "token"])
@given(seed=SEEDS)
def test_gspo(level, seed):
    case = Case(seed)
    loss = gspo_loss(case.logp, case.old, case.a, case.mask, clip_low=0.1, clip_high=0.3, level=level)
    total = (loss.sum(-1) / case.mask.sum(-1).clamp(min=1)).sum()
    (gradient,) = torch.autograd.grad(total, case.logp)
    for index, new, old, a in case.items():
        value, weight = ref.gspo(new, old, a, 0.1, 0.3)
        assert loss[index][case.mask[index]].tolist() == pytest.approx([value] * len(new), rel=1e-9, abs=1e-12)
        assert gradient[index][case.mask[index]].tolist() == pytest.approx([weight] * len(new), rel=1e-9, abs=1e-12)
    assert (gradient[~case.mask] == 0).all()


@pytest.mark.parametrize("cap", [None, 1.3])
@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("off_policy", [True, False])
@given(seed=SEEDS)
def test_reinforce(cap, top_k, off_policy, seed):
    case = Case(seed)
    old = case.old if off_policy else None
    loss = reinforce_loss(case.logp, case.a, logp_old=old, mask=case.mask, ratio_cap=cap, top_k=top_k)
    expected = {}
    for (b, s), new, behavior, a in case.items():
        weight = ref.reinforce(new, behavior if off_policy else None, a, cap, top_k)
        expected |= {(b, s, t): weight for t in range(case.logp.shape[2]) if case.mask[b, s, t]}
    check(case, loss, expected, expected)


@given(seed=SEEDS)
def test_gbpo_at_the_level_of_the_item(seed):
    case = Case(seed)
    loss = gbpo_loss(case.logp, case.a, logp_old=case.old, mask=case.mask, level="sequence")
    for index, new, old, a in case.items():
        want = ref.gbpo(sum(new), sum(old), a)[0]
        assert loss[index][case.mask[index]].tolist() == pytest.approx([want] * len(new), rel=1e-9)


@pytest.mark.parametrize("variant", ["sigmoid", "robust", "ipo", "hinge"])
@given(seed=SEEDS)
def test_dpo(variant, seed):
    rng = np.random.default_rng(seed)
    logps = rng.normal(-3, 3, (4, 6))
    beta, smoothing = rng.uniform(0.01, 2), rng.uniform(0, 0.45)
    tensors = [torch.tensor(x, requires_grad=True) for x in logps]
    loss = dpo_loss(*tensors, beta=beta, label_smoothing=smoothing, variant=variant)
    want = [ref.dpo(*column, beta, smoothing, variant) for column in logps.T]
    assert loss.tolist() == pytest.approx(want, rel=1e-9)
    gradients = torch.autograd.grad(loss.sum(), tensors[:2])
    step = 1e-6
    for i in range(2):
        moved = [
            [ref.dpo(*(logps + s * np.eye(4)[:, [i]]).T[j], beta, smoothing, variant) for j in range(6)]
            for s in (step, -step)
        ]
        slope = (np.array(moved[0]) - np.array(moved[1])) / (2 * step)
        assert gradients[i].tolist() == pytest.approx(slope.tolist(), rel=1e-4, abs=1e-6)


def lists(seed):
    rng = np.random.default_rng(seed)
    size, length = rng.integers(1, 5), rng.integers(1, 6)
    chosen, ref_chosen = rng.normal(-3, 2, (2, size))
    rejected, ref_rejected = rng.normal(-3, 2, (2, size, length))
    mask = rng.random((size, length)) < 0.7
    hostile = [np.where(mask, x, bad) for x, bad in ((rejected, np.nan), (ref_rejected, np.inf))]
    tensors = [torch.tensor(x, requires_grad=True) for x in (chosen, hostile[0], ref_chosen, hostile[1])]
    return tensors, torch.tensor(mask), (chosen, rejected, ref_chosen, ref_rejected), mask


def by_list(function, arrays, mask, *options):
    chosen, rejected, ref_chosen, ref_rejected = arrays
    return [
        function(chosen[i], rejected[i][mask[i]], ref_chosen[i], ref_rejected[i][mask[i]], *options)
        for i in range(len(chosen))
    ]


@given(seed=SEEDS)
def test_softmax_dpo(seed):
    tensors, mask, arrays, keep = lists(seed)
    loss = softmax_dpo_loss(*tensors, beta=0.7, mask=mask)
    assert loss.tolist() == pytest.approx(by_list(ref.softmax_dpo, arrays, keep, 0.7), rel=1e-9, abs=1e-12)
    gradients = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
    assert gradients[0].isfinite().all()
    assert gradients[1].isfinite().all()
    assert (gradients[1][~mask] == 0).all()
    assert gradients[2] is None
    assert gradients[3] is None


@given(seed=SEEDS)
def test_margin_listwise_dpo(seed):
    tensors, mask, arrays, keep = lists(seed)
    options = {"beta": 0.7, "margin": 0.2, "gap_weight": 1.5, "nll_coef": 0.3}
    loss = margin_listwise_dpo_loss(*tensors, mask=mask, **options)
    want = by_list(ref.margin_listwise, arrays, keep, *options.values())
    assert loss.tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
    gradients = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
    assert gradients[0].isfinite().all()
    assert (gradients[1][~mask] == 0).all()
    assert gradients[1].isfinite().all()


@pytest.mark.parametrize("function", [softmax_dpo_loss, margin_listwise_dpo_loss])
def test_pair_weights_of_one_change_nothing_and_of_zero_remove(function):
    tensors, _, _, _ = lists(11)
    tensors = [x.detach().nan_to_num(0.0, 0.0, 0.0) for x in tensors]
    ones = torch.ones_like(tensors[1])
    torch.testing.assert_close(function(*tensors, pair_weights=ones), function(*tensors))
    if function is softmax_dpo_loss:
        keep = torch.rand_like(ones) < 0.5
        torch.testing.assert_close(function(*tensors, pair_weights=keep.double()), function(*tensors, mask=keep))


@pytest.mark.parametrize("based", [True, False])
@given(seed=SEEDS)
def test_mpo(based, seed):
    rng = np.random.default_rng(seed)
    shape, temperature = (rng.integers(1, 4), rng.integers(1, 6)), rng.choice([0.02, 0.3, 2.0])
    logp, rewards, base = -rng.gamma(1.0, 2.0, shape), rng.random(shape), rng.normal(-4, 3, shape)
    mask = rng.random(shape) < 0.7
    hostile = [
        torch.tensor(np.where(mask, x, bad)).requires_grad_()
        for x, bad in zip((logp, rewards, base), (np.nan, np.inf, np.nan), strict=True)
    ]
    options = {"temperature": temperature, "log_base": hostile[2] if based else None, "mask": torch.tensor(mask)}
    loss = mpo_loss(*hostile[:2], **options)
    gradients = torch.autograd.grad(loss.sum(), hostile, allow_unused=True)
    weights = mpo_target(hostile[1], **options)
    assert gradients[1:] == (None, None)
    torch.testing.assert_close(-gradients[0], weights)
    for row, kept in enumerate(mask):
        if not kept.any():
            assert loss[row] == 0
            assert (weights[row] == 0).all()
            continue
        value, want = ref.mpo(logp[row][kept], rewards[row][kept], temperature, base[row][kept] if based else None)
        assert loss[row].item() == pytest.approx(value, rel=1e-9)
        assert weights[row][kept].tolist() == pytest.approx(want, rel=1e-9, abs=1e-15)
        assert (weights[row][~kept] == 0).all()


@given(seed=SEEDS)
@example(seed=1562)
def test_the_temperature_of_mpo_minimizes_its_dual(seed):
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 4), rng.integers(3, 7))
    rewards, base, mask = rng.random(shape), rng.normal(-4, 1, shape), rng.random(shape) < 0.8
    mask[:, :3] = True
    rewards[:, 0] += 0.2
    hostile = [torch.tensor(np.where(mask, x, np.nan)) for x in (rewards, base)]
    kl_target = rng.uniform(0.01, 0.1)
    found = dual_temperature(hostile[0], kl_target, log_base=hostile[1], mask=torch.tensor(mask)).item()
    at = [ref.mpo_dual(rewards, base, mask, found * factor, kl_target) for factor in (0.9, 0.999, 1.0, 1.001, 1.1)]
    if found < 1.001 * MIN_TEMPERATURE:  # no temperature is that far from the base: the dual falls as it goes to 0
        assert at == sorted(at)
    else:
        assert at[0] > at[1] >= at[2] <= at[3] < at[4]


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "low_var"])
@given(seed=SEEDS)
def test_kl_estimates(kind, seed):
    case = Case(seed)
    estimate = kl_estimate(case.logp, case.old, kind)
    for index in np.ndindex(*case.logp.shape):
        want = ref.kl(case.logp[index].item(), case.old[index].item(), kind)
        assert estimate[index].item() == pytest.approx(want, rel=1e-9, abs=1e-12)


@given(seed=SEEDS)
def test_distributions(seed):
    rng = np.random.default_rng(seed)
    p, q = rng.normal(0, 3, (2, 3, 7))
    mask = rng.random((3, 7)) < 0.7
    mask[:, 0] = True
    tp, tq = (torch.tensor(np.where(mask, x, np.nan), requires_grad=True) for x in (p, q))
    keep = torch.tensor(mask)
    divergence, disorder = categorical_kl(tp, tq, keep), entropy(tp, keep)
    rows = range(len(p))
    assert divergence.tolist() == pytest.approx([ref.categorical_kl(p[i][mask[i]], q[i][mask[i]]) for i in rows])
    assert disorder.tolist() == pytest.approx([ref.entropy(p[i][mask[i]]) for i in rows])
    (gradient,) = torch.autograd.grad((divergence + disorder).sum(), tp)
    assert gradient.isfinite().all()
    assert (gradient[~keep] == 0).all()


@given(seed=SEEDS)
def test_shaped_rewards(seed):
    case = Case(seed)
    old, reference, mask = case.old, case.logp.detach(), case.mask
    shaped = kl_shaped_rewards(case.a, old.masked_fill(~mask, math.nan), reference, mask, 0.3)
    for index in np.ndindex(*mask.shape[:2]):
        want = ref.shaped_rewards(
            case.a[index].item(), old[index].tolist(), reference[index].tolist(), mask[index].tolist(), 0.3
        )
        assert shaped[index].tolist() == pytest.approx(want, abs=1e-12)


@given(seed=SEEDS)
def test_value_losses(seed):
    rng = np.random.default_rng(seed)
    v, old, target = rng.normal(size=(3, 9))
    tensors = [torch.tensor(x, requires_grad=True) for x in (v, old, target)]
    loss = value_loss(*tensors, clip=0.3)
    assert loss.tolist() == pytest.approx([ref.value(*x, 0.3) for x in zip(v, old, target, strict=True)])
    assert torch.autograd.grad(loss.sum(), tensors, allow_unused=True)[1:] == (None, None)
    plain = value_loss(tensors[0], None, tensors[2])
    assert plain.tolist() == pytest.approx((0.5 * (v - target) ** 2).tolist())
    huber = torch.nn.functional.huber_loss(tensors[0], tensors[2], reduction="none", delta=0.4)
    torch.testing.assert_close(q_loss(tensors[0], tensors[2], huber=0.4), huber)
    torch.testing.assert_close(q_loss(tensors[0], tensors[2]), plain)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@given(seed=SEEDS)
def test_aggregate(mode, seed):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(5, 4)), rng.random((5, 4)) < 0.5
    got = aggregate(torch.tensor(np.where(mask, values, np.nan)), torch.tensor(mask), mode, length=3.0)
    assert got.item() == pytest.approx(ref.aggregate(values, mask, mode, 3.0), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("unbiased", [True, False])
@given(seed=SEEDS)
def test_group_advantages(scale, unbiased, seed):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.1, 0.3, 0.7, 1.0], (3, 4))
    mask = rng.random((3, 4)) < 0.7
    hostile = torch.tensor(np.where(mask, rewards, np.nan))
    options = {"scale": scale, "unbiased": unbiased, "eps": 1e-4}
    got = torch_advantages.group_normalized_advantage(hostile, torch.tensor(mask), **options)
    others = torch_advantages.leave_one_out_advantage(hostile, torch.tensor(mask))
    for i in range(3):
        want = ref.group_normalized(rewards[i], mask[i], *options.values())
        assert got[i].tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
        assert others[i].tolist() == pytest.approx(ref.leave_one_out(rewards[i], mask[i]), rel=1e-9, abs=1e-12)


@given(seed=SEEDS)
def test_generalized_advantage_estimate(seed):
    rng = np.random.default_rng(seed)
    rewards, values, bootstrap = rng.normal(size=(3, 2, 6))
    dones, cuts, mask = rng.random((3, 2, 6)) < np.array([0.2, 0.2, 0.7])[:, None, None]
    after, gamma, lam = rng.normal(size=2), rng.uniform(0.5, 1), rng.uniform(0, 1)
    hostile = [torch.tensor(np.where(mask, x, np.nan)) for x in (rewards, values)]
    advantages, returns = gae.generalized_advantage_estimate(
        *hostile,
        torch.tensor(dones),
        torch.tensor(after),
        gamma=gamma,
        lam=lam,
        mask=torch.tensor(mask),
        truncations=torch.tensor(cuts),
        bootstrap_values=torch.tensor(np.where(cuts, bootstrap, np.nan)),
    )
    for b in range(2):
        want = ref.gae(rewards[b], values[b], dones[b], after[b], gamma, lam, mask[b], cuts[b], bootstrap[b])
        assert advantages[b].tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
        assert returns[b].tolist() == pytest.approx(np.where(mask[b], want + values[b], 0.0).tolist(), abs=1e-12)


@pytest.mark.parametrize("threshold", [None, 0.6])
@given(seed=SEEDS, fraction=st.floats(0.05, 0.95))
def test_ternary_advantage(threshold, seed, fraction):
    rng = np.random.default_rng(seed)
    quantile = rng.choice([0.1, 0.5, 0.6, 0.9, 1.0, np.nan], 9)
    dislike = rng.random(9) < 0.3
    got = torch_advantages.ternary_advantage(
        torch.tensor(quantile), torch.tensor(dislike), positive_fraction=fraction, threshold=threshold
    )
    assert got.tolist() == ref.ternary(quantile, dislike, fraction, threshold)


def test_bellman_target():
    next_q = torch.tensor([[1.0, 3.0], [2.0, -1.0], [math.nan, math.nan]])
    online = torch.tensor([[5.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    rewards, dones = torch.tensor([0.5, 0.0, 1.0]), torch.tensor([0, 0, 1])
    assert bellman_target(rewards, next_q, dones, gamma=0.5).tolist() == [2.0, 1.0, 1.0]
    assert bellman_target(rewards, next_q, dones, gamma=0.5, next_q_online=online).tolist() == [1.0, -0.5, 1.0]


@pytest.mark.parametrize("parts", [1, 2, 4])
@given(seed=SEEDS)
@example(seed=363_560)  # two kept advantages that are nearly equal
def test_whitening(parts, seed):
    """Over the kept positions of all parts of a step, micro-batches or ranks alike."""
    rng = np.random.default_rng(seed)
    shape = (4, *rng.integers(1, 5, rng.integers(1, 3)))
    mask = torch.tensor(rng.random(shape) < 0.7)
    advantages = torch.tensor(rng.normal(rng.normal(), rng.choice([1e-3, 1.0, 100.0]), shape))
    kept = advantages[mask].tolist()
    want = torch.zeros(shape, dtype=torch.float64)
    want[mask] = torch.tensor(kept if len(kept) < 2 else ref.whitened(kept), dtype=torch.float64)
    hostile = advantages.masked_fill(~mask, math.nan).requires_grad_()
    pieces = list(zip(hostile.chunk(parts), mask.chunk(parts), strict=True))
    sums = None if parts == 1 else sum(torch_advantages.whitening_sums(*piece) for piece in pieces)
    got = torch.cat([torch_advantages.whitened_advantage(*piece, sums) for piece in pieces])
    assert not got.requires_grad
    # The variance is a difference of two means, so that parts add up: it loses the digits that mean^2 / variance has.
    condition = np.square(kept).mean() / max(np.var(kept), 1e-16) if kept else 1.0
    torch.testing.assert_close(got, want, rtol=1e-9 + 1e-14 * condition, atol=1e-7)
