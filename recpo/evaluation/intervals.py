"""Means over users with intervals: normal, or bootstrap over users."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
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


def bootstrap_interval(
    values: Tensor, weights: Tensor | None = None, *, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Percentile bootstrap over users (Efron, 1979) of ``sum_u values / sum_u weights`` for M metrics at once.

    Every resample draws U users with replacement, the same ones for all metrics. Without weights the ratio is the mean
    of the values that are not nan; the number of those users varies from resample to resample, as it would from
    sample to sample. Memory is bounded whatever the number of users and resamples.

    Args:
        values: ``[U, M]``, nan = the user is left out.
        weights: ``[U, M]`` non-negative denominators; None = 1.
        resamples: how many.
        seed: of the random numbers; the same seed and U draw the same users.
        level: share of the resamples inside the interval.

    Returns:
        Lower and upper ends, ``[M]`` float64 each; nan where no user has a value.
    """
    defined = ~values.isnan()
    numerator = values.double().nan_to_num(0.0)
    denominator = (torch.ones_like(numerator) if weights is None else weights.double()) * defined
    users, generator = len(values), torch.Generator().manual_seed(seed)
    sums = torch.cat([numerator, denominator], 1).cpu()
    at_once = max(1, _DRAWS_AT_ONCE // max(1, users))
    ratios = []
    for begin in range(0, resamples, at_once):
        rows = min(at_once, resamples - begin)
        drawn = torch.randint(max(1, users), (rows, users), generator=generator)
        times = torch.bincount((drawn + users * torch.arange(rows)[:, None]).flatten(), minlength=rows * users)
        total = times.view(rows, users).double() @ sums
        ratios.append(total[:, : values.shape[1]] / total[:, values.shape[1] :])
    low, high = torch.cat(ratios).nanquantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]).double(), dim=0)
    return low, high
