"""Every fast kernel equals its formula, forward and backward, alone and inside a policy."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.ops import kernels
from recpo.ops.kernels import linear, matmul_transposed, sum_rows, take_rows
from recpo.ops.linear_logprob import linear_divergence, linear_entropy, linear_logprob
from recpo.policies import item_table
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
    taken = take_rows(values, index)
    assert torch.equal(taken, values.reshape(35, 3)[index])
    (gradient,) = torch.autograd.grad(taken.sum(), values)
    assert gradient.view(35, 3).sum(1).nonzero().squeeze(1).tolist() == [0, 3, 34]
    assert gradient.view(35, 3)[3].tolist() == [2, 2, 2]
    rows, places = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([2, 0, 2])
    summed = sum_rows(rows, places, 4)
    assert summed.tolist() == [[2.0], [0.0], [5.0], [0.0]]
    assert torch.equal(summed, torch.zeros(4, 1).index_add_(0, places, rows))


@pytest.mark.parametrize("threshold", [1, 128, 255])
def test_dropout_drops_its_share(threshold: int) -> None:
    torch.manual_seed(0)
    dropped = kernels.dropout(torch.ones(200_000), threshold)
    kept = dropped[dropped != 0]
    assert kept.unique().item() == pytest.approx(256 / (256 - threshold))
    assert len(kept) / 200_000 == pytest.approx(1 - threshold / 256, abs=0.005)


def dense(states: torch.Tensor, table: torch.Tensor, targets: torch.Tensor, index: torch.Tensor | None = None):
    """``linear_logprob`` as its formula reads."""
    logp = (states @ table[1:].T).log_softmax(1)
    logp = logp if index is None else logp[index]
    return logp.gather(1, targets.view(len(logp), -1) - 1).view_as(targets)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_passes_over_a_catalog(keep_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_ROWS_OF_TABLE", 13)
    monkeypatch.setattr(kernels, "KEEP_BYTES", keep_bytes)
    monkeypatch.setitem(kernels.BLOCK_BYTES, "cpu", 1)
    torch.manual_seed(0)
    states, table = torch.randn(150, 6, dtype=torch.float64), torch.randn(61, 6, dtype=torch.float64)
    targets, seed = torch.randint(1, 61, (150, 2)), torch.randn(150, 2, dtype=torch.float64)
    reference = states.flip(0), table.flip(0)

    def plain(states: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        logp, other = ((h @ rows[1:].T).log_softmax(1) for h, rows in ((states, table), reference))
        return [dense(states, table, targets), -(logp.exp() * logp).sum(1), (logp.exp() * (logp - other)).sum(1)]

    def fast(states: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        divergence = linear_divergence(states, table, *reference)
        return [linear_logprob(states, table, targets), linear_entropy(states, table), divergence]

    def outcome(function) -> list[torch.Tensor]:
        leaves = [states.clone().requires_grad_(), table.clone().requires_grad_()]
        values = function(*leaves)
        weights = seed, seed[:, 0], seed[:, 1]
        gradients = [
            gradient
            for value, weight in zip(values, weights, strict=True)
            for gradient in torch.autograd.grad((value * weight).sum(), leaves, retain_graph=True)
        ]
        return [*values, *gradients]

    for one, other in zip(outcome(fast), outcome(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows_of_padding", [0, 1])
def test_a_pass_leaves_the_rows_of_padding_out(rows_of_padding: int) -> None:
    """A rank's rows of a table that is divided over ranks begin with a row of padding on one rank alone."""
    states, table = torch.randn(9, 4, dtype=torch.float64), torch.randn(21, 4, dtype=torch.float64)
    logits = states @ table[rows_of_padding:].T
    sums = kernels.sum_over_catalog(states, table, rows_of_padding, want_expected_row=True)
    torch.testing.assert_close(sums.lse, logits.logsumexp(1))
    torch.testing.assert_close(sums.expected_row, logits.softmax(1) @ table[rows_of_padding:])
    gradient = torch.zeros_like(table)
    kernels.add_softmax_gradient(gradient, torch.ones(9).double(), states, table, rows_of_padding, sums)
    torch.testing.assert_close(gradient[rows_of_padding:], logits.softmax(1).T @ states)
    assert not gradient[:rows_of_padding].any()


@pytest.mark.parametrize("block", [SASRecBlock, HSTUBlock])
def test_a_policy_and_its_gradients(block: type[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(3000, dim=32, block=block, dropout=0.0, max_history=20)
    ids, lengths = torch.randint(1, 3001, (40, 20)), torch.randint(1, 12, (40,))
    histories = Histories(ids * (torch.arange(20) < lengths[:, None]), lengths)
    slates = Slates(torch.randint(1, 3001, (40, 3)), lengths[:, None].expand(40, 3), torch.ones(40, 3).bool())

    def outcome() -> tuple[list[torch.Tensor | None], torch.Tensor]:
        logp = policy.train().log_prob(FeedbackBatch(histories, slates, torch.arange(40)))
        weights = [weight for weight in policy.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(logp.mean(), weights, allow_unused=True)
        return [logp, *gradients], policy.eval().recommend(histories, 5).item_ids

    (fast, best), lookup = outcome(), F.embedding
    monkeypatch.setattr(kernels, "_suits", lambda values: False)
    monkeypatch.setattr(kernels, "_onednn", None)  # whoever calls it fails
    monkeypatch.setattr(item_table, "linear_logprob", dense)
    monkeypatch.setattr(F, "embedding", lambda at, rows, **given: lookup(at, rows, **given) if given else rows[at])
    plain, plain_best = outcome()
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert torch.equal(best, plain_best)
