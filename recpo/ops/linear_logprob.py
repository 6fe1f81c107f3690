"""Exact log-probabilities of a softmax over a large catalogue, in bounded memory.

``s = h Eᵀ`` are the logits of a state ``h [d]`` over a table ``E [V, d]``. Nothing of size ``[N, V]`` outlives a block unless
it fits ``KEEP_BYTES``: logits are made block by block (a block fits the cache), reduced, and made again in the backward
pass. Everything is computed in float32 (float64 for float64 inputs), under autocast too: a log-probability of -14 in
bfloat16 would be wrong by 0.03.

Gradients, with ``p`` the softmax, ``u = Σ_v p_v E_v`` the expected row and ``g`` the incoming gradients of a state's
log-probabilities:  ``dh = Σ_k g_k E[t_k] - (Σ_k g_k) u`` and ``dE = Σ_k g_k h at row t_k, minus (Σ_k g_k) p hᵀ``. ``u`` is
gathered in the forward pass, while the block is in the cache, so the backward pass needs the blocks only for ``dE``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# One block of logits: small enough for a CPU's last-level cache, large enough to fill a GPU.
BLOCK_BYTES = {"cpu": 4 << 20}
BLOCK_BYTES_ACCELERATOR = 256 << 20
# Up to this many bytes of exponentials are kept for the backward pass instead of being computed again.
KEEP_BYTES = 256 << 20
# Table rows per block: at d = 64 the rows and the logits of a few hundred states stay in the cache together.
BLOCK_ROWS_OF_TABLE = 8192


class _Block(NamedTuple):
    """Exponentials ``exp(s - shift)`` of the logits of some states over some table rows."""

    states: slice
    rows: slice
    exponentials: Tensor
    shift: Tensor


class _CatalogSums(NamedTuple):
    """``lse [N]``, the expected table row ``[N, d]`` (None if not asked for) and the blocks that were kept."""

    lse: Tensor
    expected_row: Tensor | None
    kept: list[_Block]


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
        state_index: ``[M]``, the state of each target; None = target ``n`` (row ``n`` of targets) belongs to state ``n``.
        temperature: divides the logits.
        padding_rows: rows of the table before the first item.
        keep_bytes: exponentials up to this size are kept for the backward pass (faster); above, they are recomputed.

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


def linear_logsumexp(
    states: Tensor, table: Tensor, *, temperature: float = 1.0, padding_rows: int = 1, keep_bytes: int = KEEP_BYTES
) -> Tensor:
    """``logsumexp_v(states tableᵀ / temperature)``, ``[N]``; arguments as in ``linear_logprob``."""
    _check(states, table, padding_rows)
    with torch.autocast(states.device.type, enabled=False):
        return _LinearLogSumExp.apply(_as_float(states, temperature), _as_float(table), padding_rows, keep_bytes)


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
    """Walks the logits in blocks of states within blocks of table rows, in one reused buffer.

    Args:
        states: ``[N, d]``.
        table: ``[V + padding_rows, d]``.
        padding_rows: rows of the table to leave out.
        reuse: False where the caller keeps the blocks.
    """

    def __init__(self, states: Tensor, table: Tensor, padding_rows: int, *, reuse: bool = True) -> None:
        self.states, self.table, self.padding_rows = states, table, padding_rows
        self.block_bytes = BLOCK_BYTES.get(states.device.type, BLOCK_BYTES_ACCELERATOR)
        self.reuse, self.buffer = reuse, states.new_empty(0)

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yields the states' slice, the rows' slice and their logits, which the caller may overwrite."""
        for rows in column_blocks(len(self.table), self.padding_rows, BLOCK_ROWS_OF_TABLE):
            items = self.table[rows].T
            height = max(64, self.block_bytes // (self.states.element_size() * items.shape[1]))
            for start in range(0, len(self.states), height):
                part = slice(start, min(start + height, len(self.states)))
                yield part, rows, self._logits(self.states[part], items)

    def _logits(self, states: Tensor, items: Tensor) -> Tensor:
        if not self.reuse:
            return torch.mm(states, items)
        size = len(states) * items.shape[1]
        if self.buffer.numel() < size:
            self.buffer = states.new_empty(size)
        return torch.mm(states, items, out=self.buffer[:size].view(len(states), items.shape[1]))


def _sum_over_catalog(
    states: Tensor, table: Tensor, padding_rows: int, *, want_expected_row: bool, keep_bytes: int = 0
) -> _CatalogSums:
    """One pass over the catalogue: log-sum-exp with a running maximum, and the expected table row."""
    shift = states.new_full((len(states),), -torch.inf)
    total = states.new_zeros(len(states))
    expected = torch.zeros_like(states) if want_expected_row else None
    keep = 0 < len(states) * (len(table) - padding_rows) * states.element_size() <= keep_bytes
    kept: list[_Block] = []
    for part, rows, logits in _Grid(states, table, padding_rows, reuse=not keep):
        new_shift = torch.maximum(shift[part], logits.amax(1))
        exponentials = logits.sub_(new_shift[:, None]).exp_()
        rescale = (shift[part] - new_shift).exp_()
        total[part].mul_(rescale).add_(exponentials.sum(1))
        if expected is not None:
            expected[part].mul_(rescale[:, None]).addmm_(exponentials, table[rows])
        shift[part] = new_shift
        if keep:
            kept.append(_Block(part, rows, exponentials, new_shift))
    if expected is not None:
        expected.div_(total[:, None])
    return _CatalogSums(total.log_().add_(shift), expected, kept)


def _add_softmax_gradient(
    gradient: Tensor, weights: Tensor, states: Tensor, table: Tensor, padding_rows: int, sums: _CatalogSums
) -> None:
    """Adds ``Σ_n weights_n p_n h_nᵀ`` to the table's gradient, from the kept blocks or from new ones."""
    weighted = states * weights[:, None]
    if sums.kept:
        for part, rows, exponentials, shift in sums.kept:
            # the blocks stay as they are: the scale goes onto the states, which are smaller
            scale = (shift - sums.lse[part]).exp_()
            gradient[rows].addmm_(exponentials.T, weighted[part] * scale[:, None])
        return
    for part, rows, logits in _Grid(states, table, padding_rows):
        probabilities = logits.sub_(sums.lse[part, None]).exp_()
        gradient[rows].addmm_(probabilities.T, weighted[part])


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
            grad_states = (
                grad_states.add_(chosen) if state_index is None else _add_rows(grad_states, state_index, chosen)
            )
        if ctx.needs_input_grad[1]:
            of_target = states if state_index is None else states[state_index]
            # the backward kernel of an embedding: a sum of rows by index, several times faster than index_add_ on a CPU
            grad_table = torch.ops.aten.embedding_dense_backward(
                of_target * grad[:, None], targets, len(table), -1, False
            )
            grad_table[: ctx.padding_rows] = 0
            _add_softmax_gradient(grad_table, -per_state, states, table, ctx.padding_rows, ctx.sums)
        return grad_states, grad_table, None, None, None, None


def _add_rows(base: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``base`` plus ``rows`` summed by ``index``."""
    return base.add_(torch.ops.aten.embedding_dense_backward(rows, index, len(base), -1, False))


class _LinearLogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, padding_rows: int, keep_bytes: int) -> Tensor:
        needs_states, needs_table = ctx.needs_input_grad[:2]
        ctx.sums = _sum_over_catalog(
            states, table, padding_rows, want_expected_row=needs_states, keep_bytes=keep_bytes if needs_table else 0
        )
        ctx.save_for_backward(states, table)
        ctx.padding_rows = padding_rows
        return ctx.sums.lse.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, table = ctx.saved_tensors
        grad_states = ctx.sums.expected_row * grad[:, None] if ctx.needs_input_grad[0] else None
        grad_table = None
        if ctx.needs_input_grad[1]:
            grad_table = torch.zeros_like(table)
            _add_softmax_gradient(grad_table, grad, states, table, ctx.padding_rows, ctx.sums)
        return grad_states, grad_table, None, None


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
        for part, rows, logits in _Grid(states, table, ctx.padding_rows):
            logp = logits.sub_(lse[part, None])
            grad_logits = logp.exp().mul_(logp.add_(entropy[part, None])).mul_(-grad[part, None])
            if grad_states is not None:
                grad_states[part].addmm_(grad_logits, table[rows])
            if grad_table is not None:
                grad_table[rows].addmm_(grad_logits.T, states[part])
        return grad_states, grad_table, None
