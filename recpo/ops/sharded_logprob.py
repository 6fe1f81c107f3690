"""The exact softmax over a catalog whose table is divided into row blocks over ranks (``linear_logprob`` over ranks).

Each rank has its own states and targets, and gets their log-probabilities. The states of all ranks go to every rank,
and each makes one pass over its own rows (``kernels``). The remaining exchange does not depend on the size of the
catalog: ``lse = log Σ_r exp(lse_r)``, with ``lse_r [N]`` the log-sum-exp over the rows of rank r, and the scores of the
targets, which the ranks with their rows know, are all-reduced. In the backward pass, the incoming gradients go to every
rank, each computes the gradient of its own rows, and ``dh = Σ_k g_k E[t_k] - (Σ_k g_k) Σ_r exp(lse_r - lse) u_r`` is
reduced to the rank of its state, where ``u_r`` is the expected row within the rows of rank r.

With ΣN states and ΣM targets on all ranks, a step exchanges ``[ΣN, d]`` twice (all-gather, reduce-scatter), and
``[ΣN]`` and ``[ΣM]`` numbers a few times, for any size of the catalog.

Gradients are those of ``DistributedDataParallel``, the mean over the ranks of the gradients of each rank's own loss:
those of ``rows`` are divided by the number of ranks here; those of ``states`` are not, because DDP averages the
parameters behind them.

Every function is a collective, in its forward and its backward pass: all ranks call it, with the same arguments
requiring gradients and in the same order, and all run the backward pass, even without states.

Ranks may contribute different numbers of rows, including none. The numbers are exchanged first (``common_sizes``), and
rows are padded to the largest number only for the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from recpo.base.errors import RecpoError
from recpo.ops import kernels
from recpo.ops.kernels import Scored, as_float, sum_rows
from recpo.ops.linear_logprob import check_reference, check_states, state_of_targets


def sharded_logprob(states: Tensor, shard: RowShard, targets: Tensor, state_index: Tensor | None = None) -> Tensor:
    """``log softmax(states tableᵀ)`` at ``targets``, for a table that is divided over the ranks.

    Args:
        states: ``[N, d]`` of this rank; N may differ between ranks and may be 0.
        shard: this rank's rows of the table.
        targets: row numbers in the whole table: ``[N]`` or ``[N, K]``; ``[M]`` with ``state_index``.
        state_index: ``[M]``, the state of each target; None = target (or row of targets) ``n`` belongs to state ``n``.

    Returns:
        float32 (float64 for float64 states), of the shape of ``targets``. Differentiable once, in states and rows.

    Raises:
        RecpoError: shapes that do not fit, or blocks that do not form a table.
        IndexError: on all ranks, if one has a target outside the table or of a state that does not exist.
    """
    check_states(states, shard.rows, shard.num_rows - 1)
    index = state_of_targets(states, targets, state_index)
    inputs = as_float(states), as_float(shard.rows), targets.reshape(-1)
    with kernels.without_autocast(states.device):
        logp = _ShardedLogProb.apply(*inputs, index, shard)
    return logp.view(targets.shape)


def sharded_entropy(states: Tensor, shard: RowShard) -> Tensor:
    """Entropy of ``softmax(states tableᵀ)`` in nats, ``[N]``; arguments as in ``sharded_logprob``."""
    check_states(states, shard.rows, shard.num_rows - 1)
    with kernels.without_autocast(states.device):
        return _ShardedEntropy.apply(as_float(states), as_float(shard.rows), shard)


def sharded_divergence(states: Tensor, shard: RowShard, reference_states: Tensor, reference: RowShard) -> Tensor:
    """``linear_divergence`` in nats, ``[N]``, of two tables that are cut alike; other arguments as there.

    Args:
        states: ``[N, d]`` of this rank.
        shard: this rank's rows of the table.
        reference_states: ``[N, e]`` of this rank; no gradient flows into it.
        reference: this rank's rows of the reference's table; no gradient flows into it.

    Raises:
        RecpoError: shapes that do not fit, or blocks that do not form a table.
    """
    check_states(states, shard.rows, shard.num_rows - 1)
    check_reference(states, shard.rows, reference_states, reference.rows)
    own = as_float(states), as_float(shard.rows)
    other = as_float(reference_states.detach()), as_float(reference.rows.detach())
    with kernels.without_autocast(states.device):
        return _ShardedDivergence.apply(*own, *other, shard)


def sharded_lookup(ids: Tensor, shard: RowShard) -> Tensor:
    """Rows of a table that is divided over the ranks: each id goes to its owner once, and its row comes back.

    Args:
        ids: row numbers ``[...]`` in the whole table; the shape may differ between ranks and may be empty.
        shard: this rank's rows of the table.

    Returns:
        ``[..., d]``; zero, without gradient, for id 0. The gradient of the rows is dense.

    Raises:
        IndexError: on all ranks, if one has an id outside the table.
    """
    return _ShardedLookup.apply(shard.rows, ids, shard)


def _faults(ids: Tensor, stop: int) -> Tensor:
    """Number of ids that are not in ``[0, stop)``."""
    return ((ids < 0) | (ids >= stop)).sum()


class _ShardedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, targets: Tensor, state_index: Tensor, shard: RowShard
    ) -> Tensor:
        faults = _faults(targets, shard.num_rows) + _faults(state_index, len(states))
        _, (num_states, num_targets) = common_sizes(shard, len(states), len(targets), faults=faults)
        everyone = gather_rows(states, num_states, shard.group)
        own = torch.stack([targets, state_index + sum(num_states[: shard.rank])], 1)
        targets, state_index = gather_rows(own, num_targets, shard.group).unbind(1)
        held = ((targets >= shard.first) & (targets < shard.first + len(rows))).nonzero().squeeze(1)
        row_of_held, state_of_held = targets[held] - shard.first, state_index[held]

        needs_states, needs_rows = ctx.needs_input_grad[:2]
        keep_bytes = kernels.KEEP_BYTES if needs_rows else 0
        sums = kernels.sum_over_catalog(
            everyone, rows, shard.padding_rows, want_expected_row=needs_states, keep_bytes=keep_bytes, fuses=True
        )
        scores = everyone.new_zeros(len(targets))
        scores[held] = kernels.row_products(everyone[state_of_held], rows[row_of_held])
        lse, scores = _log_sum_over_ranks(sums.lse, scores, shard)
        if sums.expected_row is not None:
            sums.expected_row.mul_((sums.lse - lse).exp_()[:, None])

        ctx.save_for_backward(everyone, rows, state_index, held, row_of_held, state_of_held)
        ctx.sums, ctx.shard, ctx.num_states, ctx.num_targets = sums._replace(lse=lse), shard, num_states, num_targets
        start = sum(num_targets[: shard.rank])
        return (scores - lse[state_index])[start : start + len(own)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        everyone, rows, state_index, held, row_of_held, state_of_held = ctx.saved_tensors
        shard, sums = ctx.shard, ctx.sums
        grad = gather_rows(grad, ctx.num_targets, shard.group)
        per_state = grad.new_zeros(len(everyone)).index_add_(0, state_index, grad)
        of_held = grad[held, None]
        grad_states = grad_rows = None
        if ctx.needs_input_grad[0]:
            partial = sums.expected_row * -per_state[:, None]
            partial += sum_rows(rows[row_of_held] * of_held, state_of_held, len(everyone))
            # reduced while the gradient of the rows is computed
            grad_states = start_sum_of_rows(partial, ctx.num_states, shard.group)
        if ctx.needs_input_grad[1]:
            grad_rows = sum_rows(everyone[state_of_held] * (of_held / shard.ranks), row_of_held, len(rows))
            grad_rows[: shard.padding_rows] = 0
            kernels.add_softmax_gradient(grad_rows, per_state / -shard.ranks, everyone, rows, shard.padding_rows, sums)
        return None if grad_states is None else grad_states(), grad_rows, None, None, None


def _log_sum_over_ranks(lse: Tensor, values: Tensor, shard: RowShard) -> tuple[Tensor, Tensor]:
    """``log Σ exp(lse [N])`` and ``Σ values [M]`` over the ranks."""
    maximum = lse.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=shard.group)
    summed = torch.cat([(lse - maximum).exp_(), values])
    dist.all_reduce(summed, group=shard.group)
    shares, values = summed.split([len(lse), len(values)])
    return maximum + shares.log(), values


class _ShardedEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, shard: RowShard) -> Tensor:
        _, (num_states,) = common_sizes(shard, len(states))
        everyone = gather_rows(states, num_states, shard.group)
        sums = kernels.sum_over_catalog(everyone, rows, shard.padding_rows, want_expected_row=True)
        assert sums.expected_row is not None
        lse, _ = _log_sum_over_ranks(sums.lse, sums.lse[:0], shard)
        mean_score = kernels.row_products(everyone, sums.expected_row).mul_((sums.lse - lse).exp_())
        dist.all_reduce(mean_score, group=shard.group)
        entropy = lse - mean_score
        ctx.save_for_backward(everyone, rows, lse, entropy)
        ctx.shard, ctx.num_states = shard, num_states
        return entropy.split(num_states)[shard.rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *own, entropy = ctx.saved_tensors
        return *_divergence_gradients(ctx, -grad, Scored(*own), None, -entropy), None


class _ShardedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, reference_states: Tensor, reference_rows: Tensor, shard: RowShard
    ) -> Tensor:
        _, (num_states,) = common_sizes(shard, len(states))
        every = [gather_rows(part, num_states, shard.group) for part in (states, reference_states)]
        tables = (rows, reference_rows)
        own, reference = (
            kernels.sum_over_catalog(h, table, shard.padding_rows, want_expected_row=False).lse
            for h, table in zip(every, tables, strict=True)
        )
        lse, _ = _log_sum_over_ranks(torch.cat([own, reference]), own[:0], shard)
        policy, other = (Scored(*each) for each in zip(every, tables, lse.view(2, len(own)), strict=True))
        divergence = kernels.divergence_sum(policy, other, shard.padding_rows)
        dist.all_reduce(divergence, group=shard.group)
        ctx.save_for_backward(*policy, *other, divergence)
        ctx.shard, ctx.num_states = shard, num_states
        return divergence.split(num_states)[shard.rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *scored, divergence = ctx.saved_tensors
        own, reference = Scored(*scored[:3]), Scored(*scored[3:])
        return *_divergence_gradients(ctx, grad, own, reference, divergence), None, None, None


def _divergence_gradients(
    ctx: Any, grad: Tensor, own: Scored, reference: Scored | None, divergence: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """``kernels.divergence_gradients`` of this rank's states and rows, given the gradients of its own results."""
    shard, needs = ctx.shard, ctx.needs_input_grad
    grad = gather_rows(grad, ctx.num_states, shard.group)
    grad_states, grad_rows = kernels.divergence_gradients(grad, own, reference, divergence, shard.padding_rows, needs)
    if grad_states is not None:
        grad_states = start_sum_of_rows(grad_states, ctx.num_states, shard.group)()
    return grad_states, None if grad_rows is None else grad_rows.div_(shard.ranks)


class _ShardedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, shard: RowShard) -> Tensor:
        bounds, _ = common_sizes(shard, faults=_faults(ids, shard.num_rows))
        distinct, place = ids.unique(return_inverse=True)
        # sorted, so ids of one owner are adjacent
        to_owner = torch.searchsorted(distinct, torch.tensor(bounds, device=ids.device, dtype=ids.dtype)).diff()
        from_asker = torch.empty_like(to_owner)
        dist.all_to_all_single(from_asker, to_owner, group=shard.group)
        send, receive = torch.stack([to_owner, from_asker]).tolist()
        asked = exchange_rows(distinct, send, receive, shard.group) - shard.first
        vectors = exchange_rows(rows[asked], receive, send, shard.group)
        ctx.save_for_backward(distinct, place, asked)
        ctx.shard, ctx.send, ctx.receive = shard, send, receive
        return vectors.masked_fill_(distinct[:, None] == 0, 0)[place]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        distinct, place, asked = ctx.saved_tensors
        shard = ctx.shard
        of_distinct = sum_rows(grad.reshape(-1, grad.shape[-1]), place.reshape(-1), len(distinct))
        of_distinct.masked_fill_(distinct[:, None] == 0, 0)
        received = exchange_rows(of_distinct, ctx.send, ctx.receive, shard.group)
        return sum_rows(received.div_(shard.ranks), asked, len(shard.rows)), None, None


class RowShard(NamedTuple):
    """This rank's rows of a table ``[V + 1, d]``, and their position. Row 0 of the table is padding.

    The blocks follow each other in the order of the ranks and form the table. A block may be empty.

    Attributes:
        rows: ``[R, d]``.
        first: index of its first row.
        num_rows: V + 1, rows of the complete table.
        group: the ranks; None = the default group. A separate group keeps these collectives apart from others that a
            backward pass starts, such as those of ``DistributedDataParallel``.
    """

    rows: Tensor
    first: int
    num_rows: int
    group: dist.ProcessGroup | None = None

    @property
    def padding_rows(self) -> int:
        """Number of padding rows among these: 1 if row 0 is among them, else 0."""
        return int(self.first == 0 and len(self.rows) > 0)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return dist.get_world_size(self.group)


def common_sizes(shard: RowShard, *counts: int, faults: Tensor | None = None) -> tuple[list[int], list[list[int]]]:
    """Exchanges sizes. Every rank sees the errors of all ranks here, so none is left waiting.

    Args:
        shard: this rank's rows.
        counts: counts of this rank.
        faults: number of invalid ids of this rank, a scalar on the device of the rows; None = 0.

    Returns:
        ``ranks + 1`` row indices, of which rank r has the rows ``[r]`` to ``[r + 1]``; and one list over the ranks for
        each count.

    Raises:
        RecpoError: the blocks of the ranks do not form the table.
        IndexError: any rank has faults.
    """
    mine = torch.tensor([shard.first, len(shard.rows), shard.num_rows, *counts], device=shard.rows.device)
    mine = torch.cat([mine, mine.new_zeros(1) if faults is None else faults.view(1)])
    everyone = mine.new_empty(shard.ranks * len(mine))
    dist.all_gather_single(everyone, mine, group=shard.group)
    firsts, lengths, num_rows, *others, faulty = everyone.view(shard.ranks, -1).T.tolist()
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    gaps = any(length and first != bound for first, length, bound in zip(firsts, lengths, bounds, strict=False))
    if gaps or set(num_rows) != {bounds[-1]}:
        raise RecpoError(
            f"blocks from rows {firsts} of {lengths} rows do not make up a table of {num_rows} rows",
            code="mismatch",
            field="blocks",
        )
    if any(faulty):
        raise IndexError(f"ids outside of the table of {shard.num_rows} rows or of the states, by rank: {faulty}")
    return bounds, others


def gather_rows(values: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """``[sum of counts, ...]``, the ``values [counts[rank], ...]`` of all ranks in their order."""
    padded = _pad(values, max(counts))
    everyone = padded.new_empty(len(counts) * len(padded), *padded.shape[1:])
    if everyone.numel():
        dist.all_gather_single(everyone, padded, group=group)
    if min(counts) == len(padded):
        return everyone
    parts = everyone.split(len(padded))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def start_sum_of_rows(values: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Starts to sum ``values [sum of counts, ...]`` over the ranks. Each rank receives its own rows of the sum.

    Returns:
        A function that waits for the sum and returns it, ``[counts[rank], ...]``.
    """
    largest = max(counts)
    if min(counts) < largest:
        values = torch.cat([_pad(part, largest) for part in values.split(counts)])
    own = values.new_empty(largest, *values.shape[1:])
    work = dist.reduce_scatter_single(own, values, group=group, async_op=True) if values.numel() else None

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return own[: counts[dist.get_rank(group)]]

    return finish


def exchange_rows(values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """All to all: the first ``send[0]`` rows of ``values`` go to rank 0, the next ones to rank 1, and so on.

    Returns:
        ``[sum of receive, ...]``: ``receive[0]`` rows from rank 0, then those from rank 1, and so on.
    """
    received = values.new_empty(sum(receive), *values.shape[1:])
    dist.all_to_all_single(received, values.contiguous(), receive, send, group=group)
    return received


def _pad(values: Tensor, length: int) -> Tensor:
    """``values`` padded with zero rows up to ``length`` rows, contiguous."""
    if len(values) == length:
        return values.contiguous()
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])
