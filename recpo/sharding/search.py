"""Search in, and draws from, a softmax over a catalog whose table is cut into row blocks over ranks.

This is the distributed form of ``recpo.policies.catalog_search`` and ``sampling``. Each rank has its own contexts.
Every rank scores the contexts of all ranks on its own rows; the best candidates of a context return to its rank, which
merges them. Every function is a collective: all ranks must call it, including ranks without contexts.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.types import Recommendations, SamplingOptions
from recpo.ops.kernels import matmul_transposed
from recpo.ops.sharded_logprob import RowShard, common_sizes, exchange_rows, gather_rows
from recpo.policies import catalog_search, sampling
from recpo.policies.sampling import validate_sampling


@torch.no_grad()
def top_k(states: Tensor, shard: RowShard, k: int, exclude: Tensor | None) -> Recommendations:
    """The ``k`` best items by log-probability. Ties are ordered by item id.

    Args:
        states: ``[B, d]`` of this rank, divided by the temperature.
        shard: this rank's rows of the table. Row 0 of the table is padding and is never recommended.
        k: list length, the same on all ranks.
        exclude: ``[B, M]`` ids that are not recommended, padded with 0. They remain in the normalizer.
    """
    exclude = states.new_zeros((len(states), 0), dtype=torch.long) if exclude is None else exclude
    _, (contexts, widths) = common_sizes(shard, *exclude.shape)
    everyone = gather_rows(states, contexts, shard.group)
    exclude = gather_rows(F.pad(exclude, (0, max(widths) - exclude.shape[1])), contexts, shard.group)
    ids, scores, lse = catalog_search.best_by_blocks(everyone, shard.rows, k, exclude - shard.first, shard.padding_rows)
    missing = k - ids.shape[1]
    ids = _to_owners(F.pad(ids + shard.first, (0, missing)), contexts, shard)
    scores = _to_owners(F.pad(scores, (0, missing), value=-torch.inf), contexts, shard)
    lse = _to_owners(lse, contexts, shard).logsumexp(0)
    # ties: the smaller id comes first, because the ranks are in the order of their rows
    best, order = _side_by_side(scores).sort(dim=1, descending=True, stable=True)
    best, ids = best[:, :k], _side_by_side(ids).gather(1, order[:, :k])
    return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - lse[:, None])


@torch.no_grad()
def draw(
    states: Tensor,
    shard: RowShard,
    group_size: int,
    options: SamplingOptions = SamplingOptions(),  # noqa: B008  immutable
) -> tuple[Tensor, Tensor]:
    """Draws ``group_size`` items per state.

    With replacement, and with a nucleus, the random numbers come from the context's own rank, as many as for an
    unsharded table. Up to rounding, the draws therefore do not depend on the sharding. For draws without replacement,
    the noise belongs to the rows and differs between ranks even if they have the same seed.

    Args:
        states: ``[B, d]`` of this rank, divided by the temperature of the policy.
        shard: this rank's rows of the table. Row 0 of the table is padding and is never drawn.
        group_size: G, the same on all ranks.
        options: temperature, nucleus, with or without replacement; the same on all ranks.

    Returns:
        ids ``[B, G]`` and their log-probabilities ``[B, G]``, as in ``sampling.draw``.

    Raises:
        RecpoError: see ``validate_sampling``.
    """
    validate_sampling(group_size, options)
    states = states.float() / options.temperature
    bounds, (contexts,) = common_sizes(shard, len(states))
    everyone = gather_rows(states, contexts, shard.group)
    if options.top_p < 1:
        return _from_nucleus(everyone, contexts, bounds, shard, group_size, options)
    if options.replacement:
        return _by_inversion(everyone, contexts, shard, group_size)
    return _gumbel_top_k(everyone, contexts, shard, group_size)


def _to_owners(values: Tensor, contexts: list[int], shard: RowShard) -> Tensor:
    """Sends this rank's results for all contexts ``[ΣB, ...]`` to their ranks; returns ``[ranks, B, ...]``."""
    own = contexts[shard.rank]
    received = exchange_rows(values, contexts, [own] * shard.ranks, shard.group)
    return received.view(shard.ranks, own, *values.shape[1:])


def _side_by_side(values: Tensor) -> Tensor:
    """``[ranks, B, n]`` as ``[B, ranks * n]``."""
    return values.movedim(0, 1).flatten(1)


def _by_inversion(everyone: Tensor, contexts: list[int], shard: RowShard, group_size: int) -> tuple[Tensor, Tensor]:
    """A uniform number selects a rank by its share of the probability; the remainder selects an item of that rank."""
    lse_here = sampling.log_normalizer(everyone, shard.rows, shard.padding_rows)
    lse_by_rank = _to_owners(lse_here, contexts, shard)
    log_share = lse_by_rank - lse_by_rank.logsumexp(0)
    share = log_share.T.double().exp()
    cdf = share.cumsum(1)
    uniform = torch.rand(len(share), group_size, dtype=torch.float64, device=share.device)
    # rounding may leave the last total slightly below 1: such a draw goes to the last rank with a share
    last = len(contexts) - 1 - (share > 0).long().flip(1).argmax(1)
    chosen = torch.searchsorted(cdf, uniform, right=True).minimum(last[:, None])
    within = (uniform - (cdf - share).gather(1, chosen)) / share.gather(1, chosen)
    # every rank gets a number for every draw; only the number of the selected rank is used
    within = within.clamp_(0, 1).expand(len(contexts), *within.shape).flatten(0, 1)
    within = exchange_rows(within, [len(share)] * len(contexts), contexts, shard.group)
    ids, logp = sampling.invert(everyone, shard.rows, lse_here, within, shard.padding_rows)
    ids, logp = _to_owners(ids + shard.first, contexts, shard), _to_owners(logp, contexts, shard)
    logp = logp + log_share[:, :, None]
    return ids.gather(0, chosen[None])[0], logp.gather(0, chosen[None])[0]


def _gumbel_top_k(everyone: Tensor, contexts: list[int], shard: RowShard, group_size: int) -> tuple[Tensor, Tensor]:
    """The largest scores with Gumbel noise, first per rank and then over all ranks."""
    # ranks usually share a seed, but the noise of their rows must differ: an odd factor keeps all seeds distinct
    seed = (int(torch.randint(2**62, ())) + shard.rank * 0x9E3779B97F4A7C15) % 2**63
    generator = torch.Generator(everyone.device).manual_seed(seed)
    here = sampling.gumbel_best(everyone, shard.rows, group_size, shard.padding_rows, generator)
    missing = group_size - here.ids.shape[1]
    perturbed = _to_owners(F.pad(here.perturbed, (0, missing), value=-torch.inf), contexts, shard)
    ids = _to_owners(F.pad(here.ids + shard.first, (0, missing)), contexts, shard)
    scores = _to_owners(F.pad(here.scores, (0, missing)), contexts, shard)
    lse = _to_owners(here.lse, contexts, shard).logsumexp(0)
    best, order = _side_by_side(perturbed).topk(group_size, 1)
    ids, scores = _side_by_side(ids).gather(1, order), _side_by_side(scores).gather(1, order)
    return ids, (scores - lse[:, None]).masked_fill(best == -torch.inf, 0)


def _from_nucleus(
    everyone: Tensor, contexts: list[int], bounds: list[int], shard: RowShard, group_size: int, options: SamplingOptions
) -> tuple[Tensor, Tensor]:
    """Sends all scores of a few contexts at a time to the context's rank, which draws from them."""
    rows = shard.rows[shard.padding_rows :].float()
    # the rows of each rank without row 0, which is on the first rank with rows
    items = [max(stop, 1) - max(start, 1) for start, stop in pairwise(bounds)]
    at_once = sampling.contexts_at_once(shard.num_rows)
    of_rank = [states.split(at_once) for states in everyone.split(contexts)]
    drawn = []
    for number in range(-(-max(contexts) // at_once)):
        part = [parts[number] if number < len(parts) else everyone[:0] for parts in of_rank]
        own = len(part[shard.rank])
        scores = matmul_transposed(torch.cat(part), rows).flatten()
        send, receive = [len(states) * len(rows) for states in part], [own * count for count in items]
        received = exchange_rows(scores, send, receive, shard.group).split(receive)
        scores = torch.cat([block.view(own, count) for block, count in zip(received, items, strict=True)], 1)
        drawn.append(sampling.draw_from_scores(scores, group_size, options))
    none = everyone.new_zeros((0, group_size))
    return torch.cat([none.long(), *(ids for ids, _ in drawn)]), torch.cat([none, *(logp for _, logp in drawn)])
