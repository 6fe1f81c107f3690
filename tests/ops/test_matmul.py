"""Products through oneDNN equal torch's, forward and backward, in every layout that is used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from recpo.ops.matmul import linear, matmul_transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_product_of_transposed_views(dtype: torch.dtype) -> None:
    left, right = torch.randn(700, 40, dtype=dtype), torch.randn(300, 40, dtype=dtype)
    wide = torch.randn(300, 700, dtype=dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(matmul_transposed(left, right), left @ right.T, **tolerance)
    torch.testing.assert_close(matmul_transposed(wide, left.T), wide @ left, **tolerance)
    torch.testing.assert_close(matmul_transposed(left.T, wide), left.T @ wide.T, **tolerance)
    torch.testing.assert_close(matmul_transposed(left.T, wide.T.T[:, :700]), left.T @ wide.T, **tolerance)


@pytest.mark.parametrize("shape", [(2, 3), (40, 50)])
def test_linear_and_its_gradients(shape: tuple[int, int]) -> None:
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
