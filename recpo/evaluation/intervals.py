"""Means over users with intervals: normal, or bootstrap over users."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
_DRAWS_AT_ONCE = 1 << 22  # memory of the bootstrap: this many draws of users, 8 bytes each


class Estimate(NamedTuple):
    """A mean over users with the half-width of its normal 95 % interval ``1.96 s / sqrt(n)``.

    ``mean`` is nan for n = 0, ``half_width`` for n < 2.
    """

    mean: float
    half_width: float
    n: int


def estimate(values: Tensor) -> Estimate:
    """Mean and normal 95 % half-width of the values that are not nan."""
    defined = values[~values.isnan()].double()
    n = len(defined)
    mean = defined.mean().item() if n else math.nan
    return Estimate(mean, _Z95 * defined.std().item() / math.sqrt(n) if n > 1 else math.nan, n)
