"""Every fast kernel equals its plain twin, forward and backward, alone and inside a policy."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.ops import kernels
from recpo.ops.kernels import linear, matmul_transposed, reference_kernels, sum_rows, take_rows
from recpo.ops.linear_logprob import linear_divergence, linear_entropy, linear_logprob
from recpo.policies.blocks import Block, HSTUBlock, SASRecBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_of_transposed_views(dtype: torch.dtype) -> None:
    left, right = torch.randn(700, 40, dtype=dtype), torch.randn(300, 40, dtype=dtype)
    wide = torch.randn(300, 700, dtype=dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(matmul_transposed(left, right), left @ right.T, **tolerance)
    torch.testing.assert_close(matmul_transposed(wide, left.T), wide @ left, **tolerance)
    torch.testing.assert_close(matmul_transposed(left.T, wide), left.T @ wide.T, **tolerance)
    torch.testing.assert_close(matmul_transposed(left.T, wide.T.T[:, :700]), left.T @ wide.T, **tolerance)


@pytest.mark.skipif(not kernels._HAS_ONEDNN, reason="no oneDNN")
def test_columns_of_a_wider_matrix_are_multiplied_as_fast_as_their_copy() -> None:
    """oneDNN itself takes 1,000 times as long for them."""
    left, wide = torch.randn(512, 240), torch.randn(1000, 240)

    def seconds(own: torch.Tensor, other: torch.Tensor) -> float:
        product = linear(own.requires_grad_(), other, None)
        began = time.process_time()
        torch.testing.assert_close(matmul_transposed(own.detach(), other), product.detach(), rtol=1e-4, atol=1e-4)
        product.square().sum().backward()
        return time.process_time() - began

    copied = min(seconds(left[:, 80:].clone(), wide[:, 80:].clone()) for _ in range(3))
    assert seconds(left[:, 80:].detach(), wide[:, 80:]) < 50 * copied


@pytest.mark.parametrize("shape", [(2, 3), (40, 50)])
def test_linear_and_its_gradients(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(*shape, 32), torch.randn(96, 32), torch.randn(96)
    seed = torch.randn(*shape, 96)
    gradients = []
    for function in (linear, F.linear):
        leaves = [value.clone().requires_grad_() for value in (inputs, weight, bias)]
        outputs = function(*leaves)
        gradients.append((outputs.detach(), *torch.autograd.grad((outputs * seed).sum(), leaves)))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_linear_without_bias() -> None:
    inputs, weight = torch.randn(4096, 32), torch.randn(96, 32, requires_grad=True)
    outputs = linear(inputs, weight, None)
    torch.testing.assert_close(outputs, F.linear(inputs, weight), rtol=1e-4, atol=1e-4)
    outputs.sum().backward()
    torch.testing.assert_close(weight.grad, inputs.sum(0).expand(96, 32), rtol=1e-3, atol=1e-3)


def test_linear_follows_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(4096, 64), torch.randn(64, 64), torch.randn(64)).dtype == torch.bfloat16


def both(function):
    """What ``function`` returns with fast kernels and with plain ones."""
    fast = function()
    with reference_kernels():
        plain = function()
    return fast, plain


def test_the_switch_is_undone_also_after_an_error() -> None:
    with reference_kernels():
        with pytest.raises(ZeroDivisionError), reference_kernels():
            _ = 1 / 0
        assert kernels._reference
    assert not kernels._reference


def test_reference_products_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_onednn", None)  # whoever calls it fails
    with reference_kernels():
        assert matmul_transposed(torch.ones(2000, 40), torch.ones(700, 40)).sum() == 2000 * 700 * 40
        assert linear(torch.ones(2000, 40), torch.ones(700, 40), None).sum() == 2000 * 700 * 40


def not_here(*_: object) -> None:
    raise AssertionError("the other way of computing it was due")


needs_onednn = pytest.mark.skipif(not kernels._HAS_ONEDNN, reason="this machine's PyTorch has no oneDNN")


@needs_onednn
def test_fast_products_run_from_their_least_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels._SMALL == 32 * 128 * 256
    right, weight = torch.ones(256, 128), torch.ones(256, 128, requires_grad=True)

    def is_fast(rows: int, dtype: torch.dtype = torch.float32) -> bool:
        node = linear(torch.ones(rows, 128, dtype=dtype), weight.to(dtype), None).grad_fn
        return node is not None and "_Linear" in node.name()

    assert is_fast(32)
    assert not is_fast(31)
    assert not is_fast(32, torch.float64)
    monkeypatch.setattr(kernels, "_onednn", not_here)
    assert (matmul_transposed(torch.ones(31, 128), right) == 128).all()
    with pytest.raises(AssertionError, match="due"):
        matmul_transposed(torch.ones(32, 128), right)


@pytest.mark.parametrize(
    ("product", "works"),
    [(lambda a, b: a @ b.T, True), (lambda a, b: a @ b.T + 1, False), (lambda a, b: (a @ b.T)[:1], False)],
)
def test_onednn_is_used_where_it_is_there_and_multiplies(product, works, monkeypatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "_onednn", product)
    assert kernels._onednn_available() is works
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert kernels._onednn_available() is False
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "_onednn", broken)
    assert kernels._onednn_available() is False


def test_plain_rows_and_dropout_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    values, index = torch.ones(16, 2), torch.tensor([3, 0])
    monkeypatch.setattr(F, "embedding", not_here)
    with reference_kernels():
        assert take_rows(values, index).shape == (2, 2)
    with pytest.raises(AssertionError, match="due"):
        take_rows(values, index)
    monkeypatch.setattr(torch.Tensor, "index_add_", not_here)
    assert sum_rows(values[:2], index, 4).shape == (4, 2)
    with reference_kernels(), pytest.raises(AssertionError, match="due"):
        sum_rows(values[:2], index, 4)
    monkeypatch.setattr(F, "dropout", not_here)
    assert kernels.dropout(values, 128).shape == (16, 2)
    with reference_kernels(), pytest.raises(AssertionError, match="due"):
        kernels.dropout(values, 128)


def test_full_precision_is_undone() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            with kernels.full_precision():
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_small_rest_joins_the_last_block() -> None:
    def cuts(num_rows: int) -> list[tuple[int, int]]:
        return [(block.start, block.stop) for block in kernels.column_blocks(num_rows, 1, 8)]

    assert cuts(9) == [(1, 9)]
    assert cuts(11) == [(1, 11)]
    assert cuts(12) == [(1, 9), (9, 12)]
    assert cuts(21) == [(1, 9), (9, 17), (17, 21)]
    assert cuts(1) == []


def test_linear_with_either_gradient_alone() -> None:
    inputs, weight, seed = torch.randn(4096, 32), torch.randn(96, 32), torch.randn(4096, 96)
    for alone in range(2):
        gradients = []
        for function in (linear, F.linear):
            leaves = [inputs.clone(), weight.clone()]
            leaves[alone].requires_grad_()
            gradients += torch.autograd.grad((function(*leaves, None) * seed).sum(), leaves[alone])
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_rows_taken_and_summed() -> None:
    values, index = torch.randn(5, 7, 3, dtype=torch.float64, requires_grad=True), torch.tensor([[3, 34], [3, 0]])
    for taken in both(lambda: take_rows(values, index)):
        assert torch.equal(taken, values.reshape(35, 3)[index])
        (gradient,) = torch.autograd.grad(taken.sum(), values)
        assert gradient.view(35, 3).sum(1).nonzero().squeeze(1).tolist() == [0, 3, 34]
        assert gradient.view(35, 3)[3].tolist() == [2, 2, 2]
    for summed in both(lambda: sum_rows(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 2]), 4)):
        assert summed.tolist() == [[2.0], [0.0], [5.0], [0.0]]


@pytest.mark.parametrize("threshold", [1, 128, 255])
def test_dropout_drops_its_share(threshold: int) -> None:
    torch.manual_seed(0)
    for dropped in both(lambda: kernels.dropout(torch.ones(200_000), threshold)):
        kept = dropped[dropped != 0]
        assert kept.unique().item() == pytest.approx(256 / (256 - threshold))
        assert len(kept) / 200_000 == pytest.approx(1 - threshold / 256, abs=0.005)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("padding_rows", [0, 1])
def test_passes_over_a_catalog(keep_bytes: int, padding_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_ROWS_OF_TABLE", 13)
    monkeypatch.setitem(kernels.BLOCK_BYTES, "cpu", 1)
    torch.manual_seed(0)
    states, table = torch.randn(150, 6, dtype=torch.float64), torch.randn(61, 6, dtype=torch.float64)
    targets, seed = torch.randint(1, 61, (150, 2)), torch.randn(150, 2, dtype=torch.float64)

    def outcome() -> list[torch.Tensor]:
        leaves = [states.clone().requires_grad_(), table.clone().requires_grad_()]
        options = {"padding_rows": padding_rows}
        logp = linear_logprob(*leaves, targets, keep_bytes=keep_bytes, **options)
        entropy = linear_entropy(*leaves, **options)
        gradients = [*torch.autograd.grad((logp * seed).sum(), leaves)]
        divergence = linear_divergence(*leaves, states.flip(0), table.flip(0), **options)
        gradients += torch.autograd.grad((divergence * seed[:, 1]).sum(), leaves)
        return [logp, entropy, divergence, *gradients, *torch.autograd.grad((entropy * seed[:, 0]).sum(), leaves)]

    for fast, plain in zip(*both(outcome), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)


def test_plain_passes_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    states, table = torch.randn(3, 2), torch.randn(5, 2)
    arguments = (torch.ones(3), states, table, 1, torch.zeros(3), torch.zeros(3), True, True)
    monkeypatch.setattr(kernels, "_plain_sums", not_here)
    monkeypatch.setattr(kernels, "_plain_entropy_gradients", not_here)
    assert kernels.sum_over_catalog(states, table, 1, want_expected_row=True).lse.shape == (3,)
    assert kernels.entropy_gradients(*arguments)[1].shape == (5, 2)
    with reference_kernels():
        with pytest.raises(AssertionError, match="due"):
            kernels.sum_over_catalog(states, table, 1, want_expected_row=True)
        with pytest.raises(AssertionError, match="due"):
            kernels.entropy_gradients(*arguments)


@pytest.mark.parametrize("block", [SASRecBlock, HSTUBlock])
def test_a_policy_and_its_gradients(block: type[Block]) -> None:
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(3000, dim=32, block=block, dropout=0.0, max_history=20)
    ids, lengths = torch.randint(1, 3001, (40, 20)), torch.randint(1, 12, (40,))
    histories = Histories(ids * (torch.arange(20) < lengths[:, None]), lengths)
    slates = Slates(torch.randint(1, 3001, (40, 3)), lengths[:, None].expand(40, 3), torch.ones(40, 3).bool())

    def outcome() -> list[torch.Tensor]:
        logp = policy.log_prob(FeedbackBatch(histories, slates, torch.arange(40)))
        return [
            logp,
            *torch.autograd.grad(logp.mean(), [p for p in policy.parameters() if p.requires_grad], allow_unused=True),
        ]

    for fast, plain in zip(*both(outcome), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-5)
    best, plain = both(lambda: policy.eval().recommend(histories, 5).item_ids)
    assert torch.equal(best, plain)
