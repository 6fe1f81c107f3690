"""Sampling from any softmax (noise, nucleus), and from a softmax over the catalog, scored in blocks of items."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import SamplingOptions
from recpo.ops.kernels import matmul_transposed
from recpo.policies import catalog_search


def validate_sampling(group_size: int, options: SamplingOptions) -> None:
    """Raises if the options do not describe a distribution.

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
    """The distribution restricted to its nucleus: the smallest set of choices with a probability of ``top_p``.

    Holtzman et al., arXiv 1904.09751. Ties go to the smaller index. The most probable choice is always kept.

    Args:
        logp: ``[..., K]`` normalized log-probabilities; -inf for impossible choices.
        top_p: in (0, 1]; 1 returns ``logp`` itself.

    Returns:
        ``[..., K]`` normalized log-probabilities; -inf outside the nucleus.
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

    Double precision, because the maximum of many float32 draws is cut off at about 16.6.
    """
    return torch.empty_like(values, dtype=torch.float64).exponential_(generator=generator).log_().neg_()


@torch.no_grad()
def draw(
    states: Tensor,
    table: Tensor,
    group_size: int,
    options: SamplingOptions = SamplingOptions(),  # noqa: B008  immutable
) -> tuple[Tensor, Tensor]:
    """Draws ``group_size`` items per state.

    A nucleus (``top_p`` below 1) needs all scores of a context at once, so contexts are then processed in parts of at
    least one context.

    Args:
        states: ``[B, d]``, divided by the temperature of the policy.
        table: ``[V + 1, d]``; row 0 is padding and is never drawn.
        group_size: G.
        options: temperature, nucleus, with or without replacement.

    Returns:
        ids ``[B, G]`` and their log-probabilities ``[B, G]`` under the distribution that the options describe (without
        replacement: the first draw). Both are 0 if fewer than G items can be drawn.

    Raises:
        RecpoError: see ``validate_sampling``.
    """
    validate_sampling(group_size, options)
    states = states.float() / options.temperature
    if options.top_p < 1:
        parts = [
            draw_from_scores(matmul_transposed(part, table[1:].float()), group_size, options)
            for part in states.split(contexts_at_once(len(table)))
        ]
        return torch.cat([ids for ids, _ in parts]), torch.cat([logp for _, logp in parts])
    if options.replacement:
        uniform = torch.rand(len(states), group_size, dtype=torch.float64, device=states.device)
        return invert(states, table, log_normalizer(states, table), uniform)
    best = gumbel_best(states, table, group_size)
    missing = group_size - best.ids.shape[1]
    return F.pad(best.ids, (0, missing)), F.pad(best.scores - best.lse[:, None], (0, missing))


def contexts_at_once(num_rows: int) -> int:
    """Number of contexts per nucleus draw; it bounds the memory of their scores and of sorting them."""
    return max(1, catalog_search.SCORE_BYTES // (32 * num_rows))


def log_normalizer(states: Tensor, table: Tensor, padding_rows: int = 1) -> Tensor:
    """Log-sum-exp ``[B]`` of the scores of the item rows, block by block; -inf without items."""
    lse = states.new_full((len(states),), -torch.inf)
    for rows in catalog_search.score_blocks(states, table, padding_rows):
        lse = torch.logaddexp(lse, matmul_transposed(states, table[rows].float()).logsumexp(1))
    return lse


def invert(states: Tensor, table: Tensor, lse: Tensor, uniform: Tensor, padding_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative distribution at uniform numbers, block by block: draws with replacement.

    Args:
        states: ``[B, d]``, divided by all temperatures.
        table: ``[padding_rows + items, d]``.
        lse: ``[B]`` the log-normalizer.
        uniform: ``[B, G]`` in [0, 1), float64.
        padding_rows: rows of the table before the first item.

    Returns:
        row numbers ``[B, G]`` and their log-probabilities; both 0 if there is no item.
    """
    remaining = uniform
    ids = torch.full_like(uniform, -1, dtype=torch.long)
    logp = torch.zeros_like(uniform, dtype=states.dtype)
    for rows in catalog_search.score_blocks(states, table, padding_rows):
        log_probabilities = matmul_transposed(states, table[rows].float()) - lse[:, None]
        cdf = log_probabilities.double().exp_().cumsum_(1)
        index = torch.searchsorted(cdf, remaining, right=True)
        # rounding may leave the last total slightly below 1: such a draw takes the last item
        last = rows.stop == len(table)
        here = (ids < 0) & ((index < cdf.shape[1]) | last)
        index = index.clamp_max(cdf.shape[1] - 1)
        ids = torch.where(here, index + rows.start, ids)
        logp = torch.where(here, log_probabilities.gather(1, index), logp)
        remaining = remaining - cdf[:, -1:]
    return ids.clamp_min(0), logp


class GumbelBest(NamedTuple):
    """The rows with the largest scores after Gumbel noise.

    Attributes:
        perturbed: ``[B, at most G]`` scores with noise, float64, largest first.
        ids: their row numbers.
        scores: the scores without noise.
        lse: ``[B]`` log-sum-exp of the scores of all items.
    """

    perturbed: Tensor
    ids: Tensor
    scores: Tensor
    lse: Tensor


def gumbel_best(
    states: Tensor, table: Tensor, group_size: int, padding_rows: int = 1, generator: torch.Generator | None = None
) -> GumbelBest:
    """Draws without replacement: the G largest of the scores with Gumbel noise (Kool et al., arXiv 1903.06059)."""
    perturbed = states.new_empty((len(states), 0), dtype=torch.float64)
    ids, scores = perturbed.long(), perturbed.float()
    lse = states.new_full((len(states),), -torch.inf)
    for rows in catalog_search.score_blocks(states, table, padding_rows):
        scores_here = matmul_transposed(states, table[rows].float())
        lse = torch.logaddexp(lse, scores_here.logsumexp(1))
        noisy = gumbel_like(scores_here, generator).add_(scores_here)
        best, index = noisy.topk(min(group_size, noisy.shape[1]), 1)
        perturbed, order = torch.cat([perturbed, best], 1).sort(dim=1, descending=True)
        perturbed, order = perturbed[:, :group_size], order[:, :group_size]
        ids = torch.cat([ids, index + rows.start], 1).gather(1, order)
        scores = torch.cat([scores, scores_here.gather(1, index)], 1).gather(1, order)
    return GumbelBest(perturbed, ids, scores, lse)


def draw_from_scores(scores: Tensor, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """``draw`` from the nucleus of all scores ``[B, V]`` of some contexts."""
    logp = nucleus(scores.log_softmax(1), options.top_p)
    if options.replacement:
        cdf = logp.double().exp_().cumsum_(1)
        uniform = torch.rand(len(scores), group_size, dtype=torch.float64, device=scores.device)
        index = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).clamp_max(cdf.shape[1] - 1)
    else:
        index = gumbel_like(logp).add_(logp).topk(min(group_size, logp.shape[1]), 1).indices
    drawn = logp.gather(1, index)
    possible = drawn > -torch.inf
    missing = group_size - index.shape[1]
    return F.pad((index + 1) * possible, (0, missing)), F.pad(drawn.masked_fill(~possible, 0), (0, missing))
