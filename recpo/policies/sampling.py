"""What sampling from a catalog softmax and sampling code by code have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.errors import RecpoError
from recpo.types import SamplingOptions


def check_options(group_size: int, options: SamplingOptions) -> None:
    """Refuses what describes no distribution.

    Raises:
        RecpoError: a group size below 1, a temperature that is not above 0, or a ``top_p`` outside (0, 1].
    """
    if group_size < 1:
        raise RecpoError(f"group_size must be at least 1, got {group_size}")
    if not 0 < options.temperature < float("inf"):
        raise RecpoError(f"the sampling temperature must be above 0, got {options.temperature} (small = greedy)")
    if not 0 < options.top_p <= 1:
        raise RecpoError(f"top_p must be above 0 and at most 1 (= draw from all), got {options.top_p}")


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """The distribution restricted to its nucleus: the fewest choices that reach a probability of ``top_p``.

    Holtzman et al., arXiv 1904.09751. Ties go to the smaller index; the most probable choice always stays.

    Args:
        logp: ``[..., K]`` normalized log-probabilities, -inf where impossible.
        top_p: in (0, 1]; 1 returns ``logp`` itself.

    Returns:
        ``[..., K]`` normalized log-probabilities, -inf outside the nucleus.
    """
    if top_p >= 1:
        return logp
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().exp_()
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    outside[..., 0] = False
    kept = ordered.masked_fill(outside, -torch.inf).log_softmax(-1)
    return torch.empty_like(logp).scatter_(-1, order, kept)


def gumbel_like(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Independent standard Gumbel noise in the shape of ``values``, float64.

    In double precision, because the largest of many float32 draws is cut off at about 16.6.
    """
    return torch.empty_like(values, dtype=torch.float64).exponential_(generator=generator).log_().neg_()
