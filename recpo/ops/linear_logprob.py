"""Exact log-probabilities of a softmax over a large catalogue, in bounded memory.

``s = h Eᵀ`` are the logits of a state ``h [d]`` over a table ``E [V, d]``. Nothing of size ``[N, V]`` outlives a block
unless it fits ``KEEP_BYTES``: logits are made block by block (a block fits the cache), reduced, and made again in the
backward pass. Everything is computed in float32 (float64 for float64 inputs), under autocast too: a log-probability of
-14 in bfloat16 would be wrong by 0.03.

Gradients, with ``p`` the softmax, ``u = Σ_v p_v E_v`` the expected row and ``g`` the incoming gradients of a state's
log-probabilities: ``dh = Σ_k g_k E[t_k] - (Σ_k g_k) u`` and ``dE = Σ_k g_k h at row t_k, minus (Σ_k g_k) p hᵀ``. ``u``
is gathered in the forward pass, while the block is in the cache, so the backward pass needs blocks only for ``dE``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recpo.ops.matmul import matmul_transposed

# One block of logits: small enough for a CPU's last-level cache, large enough to fill a GPU.
BLOCK_BYTES = {"cpu": 8 << 20}
BLOCK_BYTES_ACCELERATOR = 256 << 20
# Up to this many bytes of softmax are kept for the backward pass instead of being computed again.
KEEP_BYTES = 192 << 20
# Table rows per block: at d = 64 the rows and the logits of a few hundred states stay in the cache together.
BLOCK_ROWS_OF_TABLE = 8192


class _CatalogSums(NamedTuple):
    """What one pass over the catalogue leaves.

    Attributes:
        lse: ``[N]`` log-sum-exp of all logits.
        expected_row: ``[N, d]``, None if not asked for.
        block_lse: ``[blocks of table rows, N]`` log-sum-exp within each block of table rows.
        softmax: the softmax within each block, in the order of ``_Grid``; empty if they were too large to keep.
    """

    lse: Tensor
    expected_row: Tensor | None
    block_lse: Tensor
    softmax: list[Tensor]


def linear_logprob(
    states: Tensor,
    table: Tensor,
    targets: Tensor,
    state_index: Tensor | None = None,
    *,
    temperature: float = 1.0,
    padding_rows: int = 1,
    keep_bytes: int = KEEP_BYTES,
) -> Tensor:
    """``log softmax(states tableᵀ / temperature)`` at ``targets``, without ``[N, V]`` held for the backward pass.

    Several targets of one state share its normaliser, so a preference list of 1 + 20 items costs one row.

    Args:
        states: ``[N, d]``.
        table: ``[V + padding_rows, d]``; its first ``padding_rows`` rows are not in the softmax and get no gradient.
        targets: rows of the table: ``[N]`` or ``[N, K]``; ``[M]`` with ``state_index``. A padding row is no target.
        state_index: ``[M]``, the state of each target; None = target (or row of targets) ``n`` belongs to state ``n``.
        temperature: divides the logits.
        padding_rows: rows of the table before the first item.
        keep_bytes: a softmax up to this size is kept for the backward pass (faster); above, they are recomputed.

    Returns:
        float32 (float64 for float64 states), of the shape of ``targets``. Differentiable once, in states and table.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(states, table, padding_rows)
    if state_index is None:
        if targets.shape[:1] != states.shape[:1] or targets.dim() not in (1, 2):
            raise ValueError(f"targets must be [N] or [N, K] with N = {len(states)}, got {tuple(targets.shape)}")
        if targets.dim() == 2:
            rows = torch.arange(len(states), device=states.device)
            state_index = rows[:, None].expand_as(targets).reshape(-1)
    elif state_index.shape != targets.shape or targets.dim() != 1:
        raise ValueError(f"state_index {tuple(state_index.shape)} and targets {tuple(targets.shape)} must both be [M]")
    scaled, rows_of_table = _as_float(states, temperature), _as_float(table)
    with torch.autocast(states.device.type, enabled=False):
        logp = _LinearLogProb.apply(scaled, rows_of_table, targets.reshape(-1), state_index, padding_rows, keep_bytes)
    return logp.view(targets.shape)


def linear_entropy(states: Tensor, table: Tensor, *, temperature: float = 1.0, padding_rows: int = 1) -> Tensor:
    """Entropy of ``softmax(states tableᵀ / temperature)`` in nats, ``[N]``: ``lse - h·u`` with ``u`` the expected row.

    Arguments as in ``linear_logprob``; the backward pass computes the blocks again.
    """
    _check(states, table, padding_rows)
    with torch.autocast(states.device.type, enabled=False):
        return _LinearEntropy.apply(_as_float(states, temperature), _as_float(table), padding_rows)


def _check(states: Tensor, table: Tensor, padding_rows: int) -> None:
    if states.dim() != 2 or table.dim() != 2 or states.shape[1] != table.shape[1] or len(table) <= padding_rows:
        raise ValueError(
            f"states must be [N, d] and table [V + {padding_rows}, d] with V > 0, "
            f"got {tuple(states.shape)} and {tuple(table.shape)}"
        )


def _as_float(values: Tensor, divisor: float = 1.0) -> Tensor:
    values = values if values.dtype == torch.float64 else values.float()
    return values if divisor == 1.0 else values / divisor


def column_blocks(num_rows: int, padding_rows: int, block_rows: int) -> Iterator[slice]:
    """Slices over the item rows of a table, ``block_rows`` at a time (a small rest joins the last block)."""
    start = padding_rows
    while start < num_rows:
        stop = num_rows if num_rows - start <= block_rows * 5 // 4 else start + block_rows
        yield slice(start, stop)
        start = stop


class _Grid:
    """Cuts the logits into blocks of states within blocks of table rows.

    Args:
        states: ``[N, d]``.
        table: ``[V + padding_rows, d]``.
        padding_rows: rows of the table to leave out.
    """

    def __init__(self, states: Tensor, table: Tensor, padding_rows: int) -> None:
        self.states, self.table = states, table
        self.columns = list(column_blocks(len(table), padding_rows, BLOCK_ROWS_OF_TABLE))
        self.block_bytes = BLOCK_BYTES.get(states.device.type, BLOCK_BYTES_ACCELERATOR)

    def __iter__(self) -> Iterator[tuple[int, slice, slice]]:
        """Yields the number of the block of table rows, the states' slice and the rows' slice."""
        for column, rows in enumerate(self.columns):
            height = max(64, self.block_bytes // (self.states.element_size() * (rows.stop - rows.start)))
            for start in range(0, len(self.states), height):
                yield column, slice(start, min(start + height, len(self.states))), rows

    def logits(self, part: slice, rows: slice) -> Tensor:
        """The logits of some states over some table rows."""
        return matmul_transposed(self.states[part], self.table[rows])


def _softmax_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the rows of a block, which it overwrites, and its log-sum-exp.

    The fused kernel is twice as fast as maximum, difference, exponential and sum one by one; its largest probability is
    ``exp(maximum - lse)``, at least 1/V, so the log-sum-exp loses nothing by being read off it.
    """
    maximum = logits.amax(1)
    # only the CPU kernel is known to allow its output to be its input
    softmax = torch.softmax(logits, 1, out=logits) if logits.device.type == "cpu" else logits.softmax(1)
    return softmax, maximum - softmax.amax(1).log()


def _sum_over_catalog(
    states: Tensor, table: Tensor, padding_rows: int, *, want_expected_row: bool, keep_bytes: int = 0
) -> _CatalogSums:
    """One pass over the catalogue: log-sum-exp and the expected table row."""
    grid = _Grid(states, table, padding_rows)
    lse = states.new_full((len(states),), -torch.inf)
    # one tensor for all blocks: small ones that live on between the large ones that do not would fragment the heap
    block_lse = states.new_empty(len(grid.columns), len(states))
    expected = torch.zeros_like(states) if want_expected_row else None
    keep = len(states) * (len(table) - padding_rows) * states.element_size() <= keep_bytes
    kept: list[Tensor] = []
    for column, part, rows in grid:
        softmax, block_lse[column, part] = _softmax_in_place(grid.logits(part, rows))
        before = lse[part].clone()
        torch.logaddexp(before, block_lse[column, part], out=lse[part])
        if expected is not None:
            share = (block_lse[column, part] - lse[part]).exp_()
            of_block = matmul_transposed(softmax, table[rows].T).mul_(share[:, None])
            expected[part].mul_((before - lse[part]).exp_()[:, None]).add_(of_block)
        if keep:
            kept.append(softmax)
    return _CatalogSums(lse, expected, block_lse, kept)


def _add_softmax_gradient(
    gradient: Tensor, weights: Tensor, states: Tensor, table: Tensor, padding_rows: int, sums: _CatalogSums
) -> None:
    """Adds ``Σ_n weights_n p_n h_nᵀ`` to the table's gradient, from the kept softmax or from a new one."""
    grid = _Grid(states, table, padding_rows)
    kept = iter(sums.softmax)
    for column, part, rows in grid:
        softmax = next(kept) if sums.softmax else _softmax_in_place(grid.logits(part, rows))[0]
        # the block sums to one over its own rows: its share of the catalogue goes onto the states, which are smaller
        share = (sums.block_lse[column, part] - sums.lse[part]).exp_().mul_(weights[part])
        gradient[rows] += matmul_transposed((states[part] * share[:, None]).T, softmax.T).T


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        table: Tensor,
        targets: Tensor,
        state_index: Tensor | None,
        padding_rows: int,
        keep_bytes: int,
    ) -> Tensor:
        needs_states, needs_table = ctx.needs_input_grad[:2]
        sums = _sum_over_catalog(
            states,
            table,
            padding_rows,
            want_expected_row=needs_states,
            keep_bytes=keep_bytes if needs_table else 0,
        )
        target_rows = table[targets]
        of_target = states if state_index is None else states[state_index]
        lse = sums.lse if state_index is None else sums.lse[state_index]
        ctx.save_for_backward(states, table, targets, state_index)
        ctx.sums, ctx.padding_rows = sums, padding_rows
        ctx.target_rows = target_rows if needs_states else None
        return torch.einsum("md,md->m", of_target, target_rows) - lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, table, targets, state_index = ctx.saved_tensors
        per_state = grad if state_index is None else grad.new_zeros(len(states)).index_add_(0, state_index, grad)
        grad_states = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_states = ctx.sums.expected_row * -per_state[:, None]
            chosen = ctx.target_rows * grad[:, None]
            grad_states += chosen if state_index is None else _sum_rows(chosen, state_index, len(states))
        if ctx.needs_input_grad[1]:
            of_target = states if state_index is None else states[state_index]
            grad_table = _sum_rows(of_target * grad[:, None], targets, len(table))
            grad_table[: ctx.padding_rows] = 0
            _add_softmax_gradient(grad_table, -per_state, states, table, ctx.padding_rows, ctx.sums)
        return grad_states, grad_table, None, None, None, None


def _sum_rows(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """``[size, d]``, the rows summed by index: an embedding's backward kernel, which beats ``index_add_`` on a CPU."""
    return torch.ops.aten.embedding_dense_backward(rows, index, size, -1, False)


class _LinearEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, padding_rows: int) -> Tensor:
        sums = _sum_over_catalog(states, table, padding_rows, want_expected_row=True)
        assert sums.expected_row is not None
        entropy = sums.lse - torch.einsum("nd,nd->n", states, sums.expected_row)
        ctx.save_for_backward(states, table, sums.lse, entropy)
        ctx.padding_rows = padding_rows
        return entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """``dH/ds_v = -p_v (log p_v + H)``, block by block."""
        states, table, lse, entropy = ctx.saved_tensors
        grad_states = torch.zeros_like(states) if ctx.needs_input_grad[0] else None
        grad_table = torch.zeros_like(table) if ctx.needs_input_grad[1] else None
        grid = _Grid(states, table, ctx.padding_rows)
        for _, part, rows in grid:
            logp = grid.logits(part, rows).sub_(lse[part, None])
            grad_logits = logp.exp().mul_(logp.add_(entropy[part, None])).mul_(-grad[part, None])
            if grad_states is not None:
                grad_states[part] += matmul_transposed(grad_logits, table[rows].T)
            if grad_table is not None:
                grad_table[rows] += matmul_transposed(states[part].T, grad_logits.T).T
        return grad_states, grad_table, None
