"""Sampling from a softmax over the catalogue, scored in blocks of items."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.ops.matmul import matmul_transposed
from recpo.policies import catalog_search
from recpo.policies.sampling import check_options, gumbel_like, nucleus
from recpo.types import SamplingOptions


@torch.no_grad()
def draw(
    states: Tensor,
    table: Tensor,
    group_size: int,
    options: SamplingOptions = SamplingOptions(),  # noqa: B008  immutable
) -> tuple[Tensor, Tensor]:
    """Draws ``group_size`` items per state.

    A nucleus (``top_p`` below 1) needs all scores of a context at once: contexts are taken in parts then, of at least
    one context.

    Args:
        states: ``[B, d]``, divided by the temperature of the policy.
        table: ``[V + 1, d]``; row 0 is padding and never drawn.
        group_size: G.
        options: temperature, nucleus, with or without replacement.

    Returns:
        ids ``[B, G]`` and their log-probabilities ``[B, G]`` under the distribution that the options describe (without
        replacement: of the first draw); both 0 where fewer than G items can be drawn.

    Raises:
        RecpoError: see ``check_options``.
    """
    check_options(group_size, options)
    states = states.float() / options.temperature
    if options.top_p < 1:
        at_once = max(1, catalog_search.SCORE_BYTES // (32 * len(table)))
        parts = [_from_nucleus(part, table, group_size, options) for part in states.split(at_once)]
        return torch.cat([ids for ids, _ in parts]), torch.cat([logp for _, logp in parts])
    return (_by_inversion if options.replacement else _gumbel_top_k)(states, table, group_size)


def _by_inversion(states: Tensor, table: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """With replacement: where the cumulative distribution passes a uniform number, block by block."""
    lse = states.new_full((len(states),), -torch.inf)
    for rows in catalog_search.score_blocks(states, table):
        lse = torch.logaddexp(lse, matmul_transposed(states, table[rows].float()).logsumexp(1))
    remaining = torch.rand(len(states), group_size, dtype=torch.float64, device=states.device)
    ids = torch.zeros(len(states), group_size, dtype=torch.long, device=states.device)
    logp = states.new_zeros(len(states), group_size)
    for rows in catalog_search.score_blocks(states, table):
        log_probabilities = matmul_transposed(states, table[rows].float()) - lse[:, None]
        cdf = log_probabilities.double().exp_().cumsum_(1)
        index = torch.searchsorted(cdf, remaining, right=True)
        # rounding may leave the last total a little below 1: such a draw takes the last item
        last = rows.stop == len(table)
        here = (ids == 0) & ((index < cdf.shape[1]) | last)
        index = index.clamp_max(cdf.shape[1] - 1)
        ids = torch.where(here, index + rows.start, ids)
        logp = torch.where(here, log_probabilities.gather(1, index), logp)
        remaining = remaining - cdf[:, -1:]
    return ids, logp


def _gumbel_top_k(states: Tensor, table: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Without replacement: the G largest of the scores with Gumbel noise (Kool et al., arXiv 1903.06059)."""
    perturbed = states.new_empty((len(states), 0), dtype=torch.float64)
    ids, scores = perturbed.long(), perturbed.float()
    lse = states.new_full((len(states),), -torch.inf)
    for rows in catalog_search.score_blocks(states, table):
        scores_here = matmul_transposed(states, table[rows].float())
        lse = torch.logaddexp(lse, scores_here.logsumexp(1))
        noisy = gumbel_like(scores_here).add_(scores_here)
        best, index = noisy.topk(min(group_size, noisy.shape[1]), 1)
        perturbed, order = torch.cat([perturbed, best], 1).sort(dim=1, descending=True)
        perturbed, order = perturbed[:, :group_size], order[:, :group_size]
        ids = torch.cat([ids, index + rows.start], 1).gather(1, order)
        scores = torch.cat([scores, scores_here.gather(1, index)], 1).gather(1, order)
    missing = group_size - ids.shape[1]
    return F.pad(ids, (0, missing)), F.pad(scores - lse[:, None], (0, missing))


def _from_nucleus(states: Tensor, table: Tensor, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    logp = nucleus(matmul_transposed(states, table[1:].float()).log_softmax(1), options.top_p)
    if options.replacement:
        cdf = logp.double().exp_().cumsum_(1)
        uniform = torch.rand(len(states), group_size, dtype=torch.float64, device=states.device)
        index = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).clamp_max(cdf.shape[1] - 1)
    else:
        index = gumbel_like(logp).add_(logp).topk(min(group_size, logp.shape[1]), 1).indices
    drawn = logp.gather(1, index)
    possible = drawn > -torch.inf
    missing = group_size - index.shape[1]
    return F.pad((index + 1) * possible, (0, missing)), F.pad(drawn.masked_fill(~possible, 0), (0, missing))
