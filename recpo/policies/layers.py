"""Layers that a CPU runs faster than their namesakes in ``torch.nn``; the state-dict keys are the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.errors import RecpoError
from recpo.ops.matmul import linear

_LEAST_INT64 = -(2**63)


class Linear(nn.Linear):
    """``torch.nn.Linear`` through ``recpo.ops.matmul.linear``."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return linear(inputs, self.weight, self.bias)


class ByteDropout(nn.Module):
    """Inverted dropout that decides with one random byte per element.

    On a CPU the Bernoulli numbers of ``torch.nn.Dropout`` cost more than a transformer's matrix products of that size;
    a random 64-bit word decides eight elements here. The rate is rounded to a multiple of 1/256, a rate above 0 to one
    of 1/256 to 255/256, and the survivors are scaled by the reciprocal of the rounded keep rate, so the expectation is
    untouched. On other devices it is ``torch.nn.functional.dropout`` at the rounded rate.

    Args:
        rate: probability that an element is set to zero, in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise RecpoError(f"a dropout rate lies in [0, 1), got {rate}")
        self.threshold = min(max(round(rate * 256), 1), 255) if rate else 0

    def forward(self, values: Tensor) -> Tensor:
        """``values`` in evaluation mode; in training mode with elements dropped."""
        if not self.training or self.threshold == 0:
            return values
        if values.device.type != "cpu":
            return F.dropout(values, self.threshold / 256)
        words = torch.empty((values.numel() + 7) // 8, dtype=torch.int64).random_(_LEAST_INT64, None)
        keep = words.view(torch.uint8)[: values.numel()].view(values.shape) >= self.threshold
        # this kernel multiplies by a mask and a scale in one pass, and is its own derivative
        return torch.ops.aten.native_dropout_backward(values, keep, 256.0 / (256 - self.threshold))

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"rate={self.threshold / 256:g}"
