"""Errors and edge cases of the small pure functions."""

from __future__ import annotations

import math

import pytest
import torch

from recpo.objectives.grpo import aspo_loss, cispo_loss, ecpo_loss, gbpo_loss, gspo_loss
from recpo.objectives.listwise_dpo import margin_listwise_dpo_loss, softmax_dpo_loss
from recpo.objectives.policy_gradient import entropy, ppo_loss, reinforce_loss, value_loss
from recpo.objectives.preference import dpo_loss
from recpo.objectives.q_learning import bellman_target, q_loss
from recpo.ops.kl import categorical_kl, kl_estimate, kl_shaped_rewards, masked_log_softmax
from recpo.ops.reduce import aggregate, denominator, over_tokens
from recpo.ops.surrogate import (
    clipped_surrogate,
    guarded_ratio,
    is_clipped,
    log1mexp,
    sequence_log_ratio,
    weighted_score,
)
from tests.refusals import refused

X = torch.zeros(2, 3)
MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: aggregate(X, MASK[0]), ("wrong_shape", "mask")),
        (lambda: aggregate(X, MASK, "mean"), ("unknown_name", "aggregation")),
        (lambda: over_tokens(torch.zeros(3), X), ("wrong_shape", "values")),
        (lambda: kl_estimate(X, X, "k4"), ("unknown_name", "kl_kind")),
        (lambda: clipped_surrogate(X, X, dual_clip=1.0), ("out_of_range", "dual_clip")),
        (lambda: ppo_loss(X, X, torch.zeros(3)), ("wrong_shape", "values")),
        (lambda: value_loss(X, None, X, clip=0.1), ("missing_option", "values_old")),
        (lambda: gspo_loss(X, X, X, MASK, level="item"), ("unknown_name", "level")),
        (lambda: gbpo_loss(X, X, level="item"), ("unknown_name", "level")),
        (lambda: reinforce_loss(X, X, top_k=0), ("out_of_range", "top_k")),
        (lambda: dpo_loss(X, X, X, X, variant="slic"), ("unknown_name", "variant")),
        (lambda: dpo_loss(X, X, X, X, label_smoothing=0.5), ("out_of_range", "label_smoothing")),
    ],
)
def test_mistakes_are_named(call, message):
    with refused(*message):
        call()


@pytest.mark.parametrize(
    ("function", "free", "fixed"),
    [
        (ppo_loss, 1, 2),
        (lambda *x: gspo_loss(*x, MASK), 1, 2),
        (lambda logp, old, a: gbpo_loss(logp, a, logp_old=old), 1, 2),
        (lambda logp, old, a: reinforce_loss(logp, a, logp_old=old), 1, 2),
        (aspo_loss, 1, 2),
        (ecpo_loss, 1, 2),
        (cispo_loss, 1, 2),
        (dpo_loss, 2, 2),
        (lambda *x: softmax_dpo_loss(x[0][:, 0], x[1], x[2][:, 0], x[3]), 2, 2),
        (lambda *x: margin_listwise_dpo_loss(x[0][:, 0], x[1], x[2][:, 0], x[3]), 2, 2),
        (lambda *x: value_loss(*x, clip=0.1), 1, 2),
        (q_loss, 1, 1),
        (lambda logp, weight: weighted_score(weight, logp), 1, 1),
        (categorical_kl, 1, 1),
        *[(lambda *x, kind=kind: kl_estimate(*x, kind), 1, 1) for kind in ("k1", "abs", "k2", "k3", "low_var")],
    ],
)
def test_only_the_trained_policy_gets_a_gradient(function, free, fixed):
    torch.manual_seed(0)
    leaves = [(-torch.rand(2, 3) - 0.1).requires_grad_() for _ in range(free + fixed)]
    gradients = torch.autograd.grad(function(*leaves).sum(), leaves, allow_unused=True)
    assert all(g is not None for g in gradients[:free])
    assert gradients[free:] == (None,) * fixed


def test_what_is_a_target_or_a_reward_carries_no_gradient():
    x = (-torch.rand(2, 3) - 0.1).requires_grad_()
    assert not kl_shaped_rewards(x[:, 0], x, x, MASK, 0.1).requires_grad
    assert not bellman_target(x[:, 0], x, MASK[:, 0]).requires_grad
    assert not bellman_target(x[:, 0], x, MASK[:, 0], next_q_online=x).requires_grad


def test_log1mexp_keeps_its_digits():
    x = torch.tensor([-1e-15, -1e-5, -0.5, -0.7, -5.0, -40.0, -1e3], dtype=torch.float64)
    want = [math.log(-math.expm1(v)) if v > -1 else math.log1p(-math.exp(v)) for v in x.tolist()]
    assert log1mexp(x).tolist() == pytest.approx(want, rel=1e-13)
    assert log1mexp(torch.zeros(1)) == -math.inf


def test_k3_far_from_the_reference_is_finite_and_pulls_back():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logp = torch.tensor([-1e3, -100.0, -1.0], dtype=dtype, requires_grad=True)
        divergence = kl_estimate(logp, torch.tensor([-1.0, -1.0, -1e3], dtype=dtype))
        (gradient,) = torch.autograd.grad(divergence.sum(), logp)
        assert divergence.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient.sign().tolist() == [-1, -1, 1]


def test_k3_continues_as_its_tangent_and_ratios_stop_at_e_to_the_20():
    logp = torch.tensor([-31.0], dtype=torch.float64, requires_grad=True)
    divergence = kl_estimate(logp, torch.tensor([-1.0], dtype=torch.float64))
    slope = math.exp(20.0)
    assert divergence.item() == pytest.approx(slope - 1 + 10 * slope - 30, rel=1e-12)
    assert torch.autograd.grad(divergence, logp)[0].item() == pytest.approx(1 - slope, rel=1e-12)
    assert guarded_ratio(torch.tensor([-30.0, 30.0], dtype=torch.float64)).tolist() == pytest.approx(
        [1 / slope, slope], rel=1e-12
    )


def test_an_advantage_of_zero_is_never_clipped():
    assert not is_clipped(torch.tensor([9.0, -9.0]), torch.zeros(2), 0.2, 0.2).any()


def test_k3_keeps_its_digits_near_the_reference():
    difference = 1e-6
    got = kl_estimate(torch.tensor([-1.0 + difference], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64))
    assert got.item() == pytest.approx(difference**2 / 2, rel=1e-3)


def test_rows_without_classes_have_neither_entropy_nor_divergence():
    logits = torch.full((2, 3), math.nan, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    total = entropy(logits, nothing) + categorical_kl(logits, logits, nothing)
    assert total.tolist() == [0.0, 0.0]
    assert (torch.autograd.grad(total.sum(), logits)[0] == 0).all()


def test_divergence_where_the_policy_excludes_a_class():
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    reference = torch.tensor([0.0, 0.0, 5.0])
    divergence = categorical_kl(logits, reference)
    assert divergence.item() == pytest.approx(math.log(1 / 2) - math.log(1 / (2 + math.exp(5))), rel=1e-6)
    assert torch.autograd.grad(divergence, logits)[0].isfinite().all()
    assert categorical_kl(reference, logits.detach()) == math.inf


def test_a_class_that_is_masked_or_impossible_is_a_class_removed():
    logits, reference = torch.tensor([[0.3, -1.0, 9.0, -math.inf], [1.0, 0.5, -3.0, -math.inf]])
    mask = torch.tensor([True, True, False, True])
    torch.testing.assert_close(entropy(logits, mask), entropy(logits[:2]))
    torch.testing.assert_close(categorical_kl(logits, reference, mask), categorical_kl(logits[:2], reference[:2]))
    nothing = torch.full((4,), -math.inf)
    for row in (masked_log_softmax(nothing), masked_log_softmax(logits, torch.zeros(4))):
        assert row.tolist() == pytest.approx([-math.log(4.0)] * 4)


def test_integer_and_float_masks_and_any_leading_shape():
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    keep = torch.rand(2, 3, 4, 5) < 0.5
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        flat = aggregate(values.view(-1, 5), keep.view(-1, 5), mode)
        for mask in (keep, keep.long(), keep.double()):
            torch.testing.assert_close(aggregate(values, mask, mode), flat)
            assert denominator(mask, mode) == denominator(keep, mode)
            assert denominator(mask, mode).dtype == torch.int64
            torch.testing.assert_close(aggregate(values, mask, mode, count=denominator(mask, mode).item()), flat)


def test_half_precision_is_summed_in_float32():
    values = torch.ones(1, 5000, dtype=torch.bfloat16)
    mean = aggregate(values, torch.ones_like(values))
    assert mean.dtype == torch.float32
    assert mean == 1.0
    long = values[:, :257]  # as a sum in bfloat16, 256
    assert aggregate(long, torch.ones_like(long), "seq-mean-token-mean") == 1.0


def test_empty_sequence_has_ratio_one():
    log_ratio = torch.tensor([[1.0, 3.0], [math.nan, math.inf]])
    mask = torch.tensor([[1, 1], [0, 0]])
    assert sequence_log_ratio(log_ratio, mask).tolist() == [2.0, 0.0]
