"""The chunked softmax head against dense log-softmax in float64, by value, gradient and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recpo.ops import kernels
from recpo.ops.kl import categorical_kl, kl_estimate
from recpo.ops.linear_logprob import (
    linear_divergence,
    linear_entropy,
    linear_log_softmax,
    linear_logprob,
    state_of_targets,
)
from tests.refusals import refused


@pytest.fixture(params=[0, 1 << 30], ids=["recomputed", "kept"])
def keep_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The softmax is computed again in the backward pass, or kept for it."""
    monkeypatch.setattr(kernels, "KEEP_BYTES", request.param)
    return int(request.param)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many blocks in both directions on problems that a test can afford."""
    monkeypatch.setattr(kernels, "BLOCK_ROWS_OF_TABLE", 13)
    monkeypatch.setitem(kernels.BLOCK_BYTES, "cpu", 1)
    return


def problem(n: int, v: int, d: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + v)
    states = torch.randn(n, d, generator=generator, dtype=torch.float64) * scale
    table = torch.randn(v + 1, d, generator=generator, dtype=torch.float64)
    return states.to(dtype).requires_grad_(), table.to(dtype).requires_grad_()


def dense(states: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    logp = (states @ table[1:].T).log_softmax(-1)
    return logp.gather(1, targets.view(len(states), -1) - 1).view(targets.shape)


@pytest.mark.usefixtures("small_blocks", "keep_bytes")
def test_equals_the_dense_softmax_in_value_and_gradient() -> None:
    states, table = problem(150, 90, 8)
    targets = torch.randint(1, 91, (150, 3))
    weights = torch.randn(150, 3, dtype=torch.float64)
    ours, theirs = linear_logprob(states, table, targets), dense(states, table, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad((ours * weights).sum(), (states, table))
    expected = torch.autograd.grad((theirs * weights).sum(), (states, table))
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    assert (got[1][0] == 0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 70), st.integers(1, 60), st.integers(0, 90), st.booleans())
def test_state_index_scores_any_target_of_any_state(n: int, v: int, m: int, keep: bool) -> None:
    states, table = problem(n, v, 4)
    m = m if n else 0
    index, targets = torch.randint(0, max(n, 1), (m,)), torch.randint(1, v + 1, (m,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "KEEP_BYTES", keep * (1 << 20))
        ours = linear_logprob(states, table, targets, index)
    theirs = (states @ table[1:].T).log_softmax(-1)[index, targets - 1]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn(m, dtype=torch.float64)
    got = torch.autograd.grad((ours * weights).sum(), (states, table))
    expected = torch.autograd.grad((theirs * weights).sum(), (states, table))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("small_blocks")
def test_either_gradient_alone_is_that_of_both() -> None:
    states, table = problem(5, 30, 3)
    targets = torch.randint(1, 31, (5, 3))  # as many as states have elements
    weights = torch.randn(5, 3, dtype=torch.float64)
    for value, weight in ((lambda h, e: linear_logprob(h, e, targets), weights), (linear_entropy, weights[:, 0])):
        both = torch.autograd.grad((value(states, table) * weight).sum(), (states, table))
        (of_states,) = torch.autograd.grad((value(states, table.detach()) * weight).sum(), (states,))
        (of_table,) = torch.autograd.grad((value(states.detach(), table) * weight).sum(), (table,))
        torch.testing.assert_close((of_states, of_table), both)


def test_agrees_with_linear_cross_entropy_in_float32() -> None:
    states, table = problem(300, 2000, 32, torch.float32)
    targets = torch.randint(1, 2001, (300,))
    ours = linear_logprob(states, table, targets)
    theirs = -F.linear_cross_entropy(states, table[1:], targets - 1, reduction="none")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("keep_bytes")
def test_float32_gradients_are_those_of_float64() -> None:
    states, table = problem(400, 20_000, 16, torch.float32)
    targets = torch.randint(1, 20_001, (400,))
    logp = linear_logprob(states, table, targets)
    got = torch.autograd.grad(logp.mean(), (states, table))
    states64, table64 = states.detach().double().requires_grad_(), table.detach().double().requires_grad_()
    reference = dense(states64, table64, targets)
    expected = torch.autograd.grad(reference.mean(), (states64, table64))
    assert (logp - reference).abs().max() < 1e-5
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() / other.norm() < 1e-5


@pytest.mark.usefixtures("small_blocks")
def test_survives_extreme_logits() -> None:
    states, table = problem(70, 40, 4, torch.float32, scale=1e4)
    targets = torch.randint(1, 41, (70,))
    logp = linear_logprob(states, table, targets)
    gradients = torch.autograd.grad(logp.sum(), (states, table))
    assert all(value.isfinite().all() for value in (logp, *gradients))
    torch.testing.assert_close(logp.double(), dense(states.double(), table.double(), targets), rtol=1e-5, atol=1e-2)


@pytest.mark.usefixtures("small_blocks")
def test_entropy_is_minus_the_mean_log_probability() -> None:
    states, table = problem(100, 50, 8)
    logp = (states @ table[1:].T).log_softmax(-1)
    reference = -(logp.exp() * logp).sum(1)
    ours = linear_entropy(states, table)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    weights = torch.randn(100, dtype=torch.float64)
    got = torch.autograd.grad((ours * weights).sum(), (states, table))
    expected = torch.autograd.grad((reference * weights).sum(), (states, table))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_autocast_and_bfloat16_inputs_are_summed_in_float32() -> None:
    states, table = problem(64, 500, 16, torch.float32)
    targets = torch.randint(1, 501, (64,))
    plain, entropy = linear_logprob(states, table, targets), linear_entropy(states, table)
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_logprob(states, table, targets)
        assert torch.equal(linear_entropy(states, table), entropy)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, plain)
    half = linear_logprob(states.bfloat16(), table.bfloat16(), targets)
    assert half.dtype == torch.float32
    reference = dense(states.bfloat16().double(), table.bfloat16().double(), targets)
    torch.testing.assert_close(half.double(), reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", [linear_entropy, linear_log_softmax])
def test_every_item_under_autocast(function: Any) -> None:
    states, table = problem(20, 30, 6, torch.float32)
    exact = function(states.double(), table.double())
    with torch.autocast("cpu", torch.bfloat16):
        ours = function(states, table)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


def problem_of_two(n: int, v: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    """States and table of a policy, and those of a reference with another width."""
    return [*problem(n, v, 4, dtype, scale), *problem(n, v, 6, dtype, scale)]


@pytest.mark.usefixtures("small_blocks")
def test_the_divergence_is_that_of_two_dense_softmaxes() -> None:
    states, table, others, reference = problem_of_two(150, 90)
    ours = linear_divergence(states, table, others, reference)
    logits, logits_ref = (h @ rows[1:].T for h, rows in ((states, table), (others, reference)))
    theirs = categorical_kl(logits, logits_ref)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    weights = torch.randn(150, dtype=torch.float64)
    got = torch.autograd.grad((ours * weights).sum(), (states, table, others, reference), allow_unused=True)
    want = torch.autograd.grad((theirs * weights).sum(), (states, table))
    torch.testing.assert_close(got[:2], want, rtol=1e-10, atol=1e-12)
    assert got[2:] == (None, None)
    assert (got[1][0] == 0).all()


def test_the_divergence_is_the_expected_log_ratio_over_all_items() -> None:
    states, table, others, reference = problem_of_two(20, 30)
    logp, logp_ref = linear_log_softmax(states, table), linear_log_softmax(others, reference)
    expected = (logp.exp() * kl_estimate(logp, logp_ref, "k1")).sum(1)
    torch.testing.assert_close(linear_divergence(states, table, others, reference), expected)
    same = linear_divergence(states, table, states, table)
    assert same.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(same.sum(), table)
    assert gradient.abs().max() < 1e-12


def test_either_gradient_of_the_divergence_alone() -> None:
    states, table, *reference = problem_of_two(9, 14)
    both = torch.autograd.grad(linear_divergence(states, table, *reference).sum(), (states, table))
    alone = linear_divergence(states, table.detach(), *reference), linear_divergence(states.detach(), table, *reference)
    for value, leaf, want in zip(alone, (states, table), both, strict=True):
        torch.testing.assert_close(torch.autograd.grad(value.sum(), leaf)[0], want)


def test_the_divergence_survives_extreme_logits_in_float32() -> None:
    states, table, others, reference = problem_of_two(40, 60, torch.float32, scale=100.0)
    exact = [values.detach().double().requires_grad_() for values in (states, table, others, reference)]
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_divergence(states, table, others, reference)
    assert ours.dtype == torch.float32
    theirs = linear_divergence(*exact)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-3)
    got, want = torch.autograd.grad(ours.sum(), table)[0], torch.autograd.grad(theirs.sum(), exact[1])[0]
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.slow
def test_the_divergence_never_makes_an_n_by_v_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.BLOCK_BYTES, "cpu", 2 << 20)
    leaves = problem_of_two(1000, 20_000, torch.float32)
    with _LargestTensor() as largest:
        linear_divergence(*leaves).sum().backward()
    assert largest.numel * 4 <= 2 * kernels.BLOCK_BYTES["cpu"] < 1000 * 20_000 * 4 / 10


def test_the_divergence_refuses_a_reference_of_other_states_or_items() -> None:
    states, table, others, reference = problem_of_two(4, 7)
    for wrong in ((others[1:], reference), (others, reference[1:]), (others[:, 1:], reference)):
        with refused("wrong_shape", "reference"):
            linear_divergence(states, table, *wrong)


class Products(TorchDispatchMode):
    """Notes which matrix products run, and with which precision of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ("mm", "addmm", "bmm", "baddbmm", "_linear_pointwise"):
            self.found.append((name, torch.get_float32_matmul_precision()))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def less_precision() -> Iterator[None]:
    """What ``recpo train`` allows elsewhere on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def softmaxes(states: Tensor, table: Tensor) -> list[Tensor]:
    targets = torch.arange(1, len(states) + 1, device=states.device)
    return [
        linear_logprob(states, table, targets),
        linear_entropy(states, table),
        linear_log_softmax(states, table),
        linear_divergence(states, table, states.flip(0), table.flip(0)),
    ]


@pytest.mark.parametrize("sizes", [(5, 9, 4), (64, 3000, 8)])  # products below and above oneDNN's least size
def test_every_product_is_of_full_precision_in_both_passes(sizes: tuple[int, int, int], less_precision: None) -> None:
    states, table = problem(*sizes, torch.float32)
    with Products() as products:
        found = softmaxes(states, table)
        in_forward = len(products.found)
        torch.autograd.grad(sum(values.sum() for values in found), (states, table))
    assert 5 <= in_forward < len(products.found) - 3
    assert {precision for _, precision in products.found} == {"highest"}


@pytest.mark.gpu
def test_on_a_gpu_tf32_does_not_reach_the_softmax(less_precision: None) -> None:
    states, table = (values.detach().cuda().requires_grad_() for values in problem(64, 3000, 64, torch.float32, 3.0))
    exact = [values.detach().double().requires_grad_() for values in (states, table)]
    found, wanted = softmaxes(states, table), softmaxes(*exact)
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-4)
    got = torch.autograd.grad(sum(values.sum() for values in found), (states, table))
    want = torch.autograd.grad(sum(values.sum() for values in wanted), exact)
    for ours, reference in zip(got, want, strict=True):
        assert (ours.double() - reference).abs().max() < 1e-5 * reference.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "v", "d"), [(5, 70, 8), (1000, 20_001, 64), (300, 5000, 100), (2000, 777, 128)])
def test_on_a_gpu_a_fused_pass_is_as_exact_as_float32(
    n: int, v: int, d: int, less_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "KEEP_BYTES", 0)
    states, table = (one.detach().cuda().requires_grad_() for one in problem(n, v, d, torch.float32, 4 / d**0.5))
    exact = [values.detach().double().requires_grad_() for values in (states, table)]
    targets = torch.randint(1, v + 1, (n, 3), device="cuda")
    weights = torch.randn(n, 3, device="cuda")
    assert kernels._is_fused(states, table[1:])
    ours, reference = (linear_logprob(*one, targets) for one in ((states, table), exact))
    torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=3e-5)
    got = torch.autograd.grad((ours * weights).sum(), (states, table))
    want = torch.autograd.grad((reference * weights.double()).sum(), exact)
    for own, gradient in zip(got, want, strict=True):
        assert (own.double() - gradient).abs().max() < 1e-5 * gradient.abs().max()
    assert torch.equal(ours, linear_logprob(states, table, targets))


def test_the_log_softmax_of_every_item() -> None:
    states, table = problem(11, 9, 4)
    found = linear_log_softmax(states, table)
    assert found.shape == (11, 9)
    targets = torch.arange(1, 10).expand(11, -1)
    torch.testing.assert_close(found, linear_logprob(states, table, targets), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, dense(states, table, targets))
    weights = torch.randn(found.shape, dtype=torch.float64)
    got = torch.autograd.grad((found * weights).sum(), (states, table))
    want = torch.autograd.grad((linear_logprob(states, table, targets) * weights).sum(), (states, table))
    torch.testing.assert_close(got, want)


def test_a_softmax_is_kept_for_the_gradient_of_the_table_alone_and_only_where_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states, table = problem(8, 20, 4)
    targets = torch.randint(1, 21, (8,))

    def keeps(states: Tensor, table: Tensor, keep_bytes: int) -> bool:
        monkeypatch.setattr(kernels, "KEEP_BYTES", keep_bytes)
        logp = linear_logprob(states, table, targets)
        assert logp.grad_fn is not None
        node: Any = logp.grad_fn.next_functions[0][0]
        return bool(node.sums.softmax)

    assert keeps(states, table, 8 * 20 * 8)
    assert not keeps(states, table, 8 * 20 * 8 - 1)
    assert not keeps(states, table.detach(), 1 << 30)  # nobody would read it


def test_state_of_targets() -> None:
    states = torch.zeros(3, 4)
    assert state_of_targets(states, torch.ones(3), None).tolist() == [0, 1, 2]
    assert state_of_targets(states, torch.ones(3, 2), None).tolist() == [0, 0, 1, 1, 2, 2]


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_never_makes_an_n_by_v_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "KEEP_BYTES", 0)
    monkeypatch.setitem(kernels.BLOCK_BYTES, "cpu", 2 << 20)
    states, table = problem(1000, 20_000, 4, torch.float32)
    with _LargestTensor() as largest:
        linear_logprob(states, table, torch.randint(1, 20_001, (1000,))).sum().backward()
    assert largest.numel * 4 <= 2 * kernels.BLOCK_BYTES["cpu"] < 1000 * 20_000 * 4 / 10


@pytest.mark.parametrize(
    ("states", "table", "targets", "index", "field"),
    [
        ((3, 4), (5, 3), (3,), None, "states"),
        ((3, 4), (1, 4), (3,), None, "states"),
        ((3, 4), (5, 4), (2,), None, "targets"),
        ((3, 4), (5, 4), (3, 2, 2), None, "targets"),
        ((3, 4), (5, 4), (4,), (3,), "state_index"),
        ((3, 4), (5, 4), (3,), (1,), "state_index"),
    ],
)
def test_refuses_shapes_that_do_not_fit(
    states: tuple[int, ...], table: tuple[int, ...], targets: tuple[int, ...], index: tuple[int, ...] | None, field: str
) -> None:
    place = None if index is None else torch.zeros(index, dtype=torch.long)
    with refused("wrong_shape", field):
        linear_logprob(torch.zeros(states), torch.zeros(table), torch.ones(targets, dtype=torch.long), place)
