"""Replacements for item tables: cut into rows over the ranks (``RowTable``), or complete on each rank; search in them.

torchrec's tables support lookups but not multiplications (see ``lookup_tables`` for them). With a ``RowTable``, every
rank multiplies the states of all ranks with its own rows, forward and backward, and the ranks sum their partial results
(``recpo.ops.sharded_logprob``).

``top_k`` and ``draw`` are the distributed form of ``recpo.policies.catalog_search`` and ``sampling``. Each rank has its
own contexts. Every rank scores the contexts of all ranks on its own rows; the best candidates of a context return to
its rank, which merges them. Both are collective: all ranks must call them, including ranks without contexts.
"""

from abc import abstractmethod
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard as ShardDim

from recpo.base.errors import RecpoError
from recpo.base.types import Recommendations, SamplingOptions
from recpo.ops.kernels import matmul_transposed
from recpo.ops.sharded_logprob import (
    RowShard,
    common_sizes,
    exchange_rows,
    gather_rows,
    sharded_divergence,
    sharded_entropy,
    sharded_logprob,
    sharded_lookup,
)
from recpo.policies import catalog_search, sampling
from recpo.policies.item_table import ItemTable, PlacedTable, Rows
from recpo.policies.sampling import validate_sampling
from recpo.sharding.memory import row_blocks

_ROWS_AT_ONCE = 1 << 18


def copy_rows(block: Tensor, rows: Rows, first: int, columns: slice = slice(None)) -> None:
    """Fills a block with rows from ``first`` on, one piece at a time.

    Args:
        block: ``[h, w]``, changed in place.
        rows: rows of the complete table.
        first: index of the block's first row.
        columns: the block's columns in the table.
    """
    for begin in range(0, len(block), _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, len(block))
        block[begin:end] = rows[first + begin : first + end][:, columns]


class ShardedTable(PlacedTable):
    """A replacement for ``ItemTable``. Every method is a collective call."""

    is_block = True

    def vectors(self) -> Tensor:
        """Not supported: no rank has the complete table.

        Raises:
            RecpoError: always.
        """
        raise RecpoError(
            "the vectors of all items need a whole item table on every rank, and this one is sharded: leave "
            "trainer.strategy out",
            code="unsupported",
        )

    def _shares_matrix(self, lookups: int) -> bool:
        return False

    @abstractmethod
    def row_shard(self, *, learns: bool) -> RowShard:
        """This rank's rows, of length 1 with ``cosine``.

        Args:
            learns: results computed from the rows may need a gradient.
        """

    def log_prob(self, states: Tensor, targets: Tensor, state_index: Tensor | None = None) -> Tensor:
        """See ``ItemTable.log_prob``."""
        return sharded_logprob(states, self.row_shard(learns=True), targets, state_index)

    def entropy(self, states: Tensor) -> Tensor:
        """See ``ItemTable.entropy``."""
        return sharded_entropy(states, self.row_shard(learns=True))

    def divergence(self, states: Tensor, reference: ItemTable, reference_states: Tensor) -> Tensor:
        """See ``ItemTable.divergence``."""
        assert isinstance(reference, ShardedTable)
        with torch.no_grad():
            other = reference.row_shard(learns=False)
        return sharded_divergence(states, self.row_shard(learns=True), reference_states, other)

    def top_k(self, states: Tensor, k: int, exclude: Tensor | None) -> Recommendations:
        """See ``ItemTable.top_k``."""
        return top_k(states.detach(), self.row_shard(learns=False), k, exclude)

    def draw(self, states: Tensor, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
        """See ``ItemTable.draw``."""
        return draw(states, self.row_shard(learns=False), group_size, options)


class RowTable(ShardedTable):
    """A table for an exact softmax and for lookups.

    Args:
        table: the table it replaces.
        mesh: the ranks, in one dimension.

    Attributes:
        weight: the complete table as a ``DTensor``; each rank holds ``ceil((V + 1) / ranks)`` rows.
    """

    def __init__(self, table: ItemTable, mesh: DeviceMesh) -> None:
        super().__init__(table)
        self._group: dist.ProcessGroup = mesh.get_group()
        cuts = row_blocks(self.num_items + 1, mesh.size())
        self._first, rows = cuts[dist.get_rank(self._group)]
        local = torch.empty(rows, self.dim, device=mesh.device_type)
        if table.initial is not None:
            copy_rows(local, table.initial, self._first)
        size = torch.Size([self.num_items + 1, self.dim])
        whole = DTensor.from_local(local, mesh, [ShardDim(0)], run_check=False, shape=size, stride=(self.dim, 1))
        self.weight: nn.Parameter = nn.Parameter(whole, requires_grad=table.weight.requires_grad)
        self.train(table.training)

    def id_rows(self, ids: Tensor) -> Tensor:
        """See ``ItemTable.id_rows``."""
        return sharded_lookup(ids, self._shard_of(self._local))

    def row_shard(self, *, learns: bool) -> RowShard:
        """See ``ShardedTable.row_shard``. Every rank encodes the features of its own rows."""
        rows = self._local
        if self.features is not None:
            # DDP averages the encoder gradients over the ranks; here each rank has the full gradient of its rows
            rows = self.features.matrix(rows, self._first, weight=dist.get_world_size(self._group))
        return self._shard_of(F.normalize(rows, dim=-1) if self.cosine else rows)

    @property
    def _local(self) -> Tensor:
        weight: Any = self.weight
        rows: Tensor = weight.to_local()
        return rows

    def _shard_of(self, rows: Tensor) -> RowShard:
        return RowShard(rows, self._first, self.num_items + 1, self._group)


class ReplicatedTable(PlacedTable):
    """A table that is complete on every rank and has its own optimizer.

    Args:
        table: the table it replaces.
        device: the device of this rank.
    """

    is_block = False

    def __init__(self, table: ItemTable, device: torch.device) -> None:
        super().__init__(table)
        self.weight = whole_weight(table, device)
        self.train(table.training)


def whole_weight(table: ItemTable, device: torch.device) -> nn.Parameter:
    """All rows of a table, in the kind of memory in which its optimizer state is created too."""
    if table.initial is None:
        return table.weight
    rows = table.initial[0 : table.num_items + 1].to(device, copy=True)
    return nn.Parameter(rows, requires_grad=table.weight.requires_grad)


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
    options: SamplingOptions,
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
