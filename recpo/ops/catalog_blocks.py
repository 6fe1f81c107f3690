"""One pass over the rows of a table for many states, in blocks: log-sum-exp, expected row and their gradients.

A block of logits fits the cache, is reduced at once, and is made again in the backward pass unless all of them fit
``KEEP_BYTES``. ``linear_logprob`` runs over a whole table, ``sharded_logprob`` over a rank's rows of one. No function
here is differentiable by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from recpo.ops.matmul import matmul_transposed

# One block of logits: small enough for a CPU's last-level cache, large enough to fill a GPU.
BLOCK_BYTES = {"cpu": 8 << 20}
BLOCK_BYTES_ACCELERATOR = 256 << 20
# Up to this many bytes of softmax are kept for the backward pass instead of being computed again.
KEEP_BYTES = 192 << 20
# Table rows per block: at d = 64 the rows and the logits of a few hundred states stay in the cache together.
BLOCK_ROWS_OF_TABLE = 8192


class CatalogSums(NamedTuple):
    """What one pass over the catalog leaves.

    Attributes:
        lse: ``[N]`` log-sum-exp of all logits.
        expected_row: ``[N, d]``, None if not asked for.
        block_lse: ``[blocks of table rows, N]`` log-sum-exp within each block of table rows.
        softmax: the softmax within each block, in the order of ``Grid``; empty if they were too large to keep.
    """

    lse: Tensor
    expected_row: Tensor | None
    block_lse: Tensor
    softmax: list[Tensor]


def as_float(values: Tensor, divisor: float = 1.0) -> Tensor:
    """``values / divisor`` in float32; float64 stays."""
    values = values if values.dtype == torch.float64 else values.float()
    return values if divisor == 1.0 else values / divisor


def column_blocks(num_rows: int, padding_rows: int, block_rows: int) -> Iterator[slice]:
    """Slices over the item rows of a table, ``block_rows`` at a time (a small rest joins the last block)."""
    start = padding_rows
    while start < num_rows:
        stop = num_rows if num_rows - start <= block_rows * 5 // 4 else start + block_rows
        yield slice(start, stop)
        start = stop


class Grid:
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


def sum_over_catalog(
    states: Tensor, table: Tensor, padding_rows: int, *, want_expected_row: bool, keep_bytes: int = 0
) -> CatalogSums:
    """One pass over the catalog: log-sum-exp and the expected table row."""
    grid = Grid(states, table, padding_rows)
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
    return CatalogSums(lse, expected, block_lse, kept)


def add_softmax_gradient(
    gradient: Tensor, weights: Tensor, states: Tensor, table: Tensor, padding_rows: int, sums: CatalogSums
) -> None:
    """Adds ``Σ_n weights_n p_n h_nᵀ`` to the table's gradient, from the kept softmax or from a new one."""
    grid = Grid(states, table, padding_rows)
    kept = iter(sums.softmax)
    for column, part, rows in grid:
        softmax = next(kept) if sums.softmax else _softmax_in_place(grid.logits(part, rows))[0]
        # the block sums to one over its own rows: its share of the catalog goes onto the states, which are smaller
        share = (sums.block_lse[column, part] - sums.lse[part]).exp_().mul_(weights[part])
        gradient[rows] += matmul_transposed((states[part] * share[:, None]).T, softmax.T).T


def entropy_gradients(
    grad: Tensor,
    states: Tensor,
    table: Tensor,
    padding_rows: int,
    lse: Tensor,
    entropy: Tensor,
    needs_states: bool,
    needs_table: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """What these rows add to the gradients of states and table, by ``dH/ds_v = -p_v (log p_v + H)``, block by block."""
    grad_states = torch.zeros_like(states) if needs_states else None
    grad_table = torch.zeros_like(table) if needs_table else None
    grid = Grid(states, table, padding_rows)
    for _, part, rows in grid:
        logp = grid.logits(part, rows).sub_(lse[part, None])
        grad_logits = logp.exp().mul_(logp.add_(entropy[part, None])).mul_(-grad[part, None])
        if grad_states is not None:
            grad_states[part] += matmul_transposed(grad_logits, table[rows].T)
        if grad_table is not None:
            grad_table[rows] += matmul_transposed(states[part].T, grad_logits.T).T
    return grad_states, grad_table


def sum_rows(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """``[size, d]``, the rows summed by index: an embedding's backward kernel, which beats ``index_add_`` on a CPU."""
    return torch.ops.aten.embedding_dense_backward(rows, index, size, -1, False)
