"""Float32 matrix products on a CPU through oneDNN.

PyTorch sends float32 products to MKL, which on AMD processors leaves half of the machine unused: measured on an EPYC
with AVX-512, oneDNN is 2.3 times as fast at the shapes of this library, at the same precision. Elsewhere (other devices
and types, autocast, export, a build without oneDNN, products too small to matter) these functions are ``torch.mm`` and
``torch.nn.functional.linear``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

# Below this many multiplications a product is over before oneDNN has looked up its kernel.
_SMALL = 1 << 20


def _onednn_available() -> bool:
    """Whether the operator that ``torch.compile`` itself uses for oneDNN products is there and multiplies."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        product = _onednn(torch.ones(2, 3), torch.ones(4, 3))
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, torch.full((2, 4), 3.0))


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


_HAS_ONEDNN = _onednn_available()


def matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """``left rightᵀ``: ``[n, k]`` and ``[m, k]`` give ``[n, m]``; no gradient. Either may be a transposed view."""
    if _suits(left) and left.shape[0] * left.shape[1] * right.shape[0] >= _SMALL:
        return _onednn(left, right)
    return torch.mm(left, right.T)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``inputs weightᵀ + bias``, as ``torch.nn.functional.linear``; differentiable once.

    Args:
        inputs: ``[..., k]``.
        weight: ``[m, k]``.
        bias: ``[m]``; None = 0.
    """
    if (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled(inputs.device.type)
        or not _suits(inputs)
        or inputs.numel() * weight.shape[0] < _SMALL
    ):
        return F.linear(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias)


def _suits(values: Tensor) -> bool:
    return _HAS_ONEDNN and values.dtype == torch.float32 and values.device.type == "cpu"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.shape = inputs.shape
        product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product.view(*inputs.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.reshape(-1, len(weight))
        grad_inputs = _onednn(grad, weight.T).view(ctx.shape) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # oneDNN copies a transposed left operand: let that be the narrower one
            narrow_inputs = rows.shape[1] < grad.shape[1]
            grad_weight = _onednn(rows.T, grad.T).T.contiguous() if narrow_inputs else _onednn(grad.T, rows.T)
        return grad_inputs, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None
