"""Passes over a large catalog on a GPU, as Triton kernels that never write a logit to memory.

Each program holds a tile of rows and streams the other matrix past it, as FlashAttention-2 does (arXiv 2307.08691):

- ``sum_over_catalog`` holds states and streams table rows, with an online log-sum-exp (arXiv 1805.02867): the largest
  score so far, the sum of exponentials relative to it, and the table rows summed with these weights.
- ``add_softmax_gradient`` holds table rows, streams states, and computes the scores again. No other program writes the
  same rows: there are no atomic additions, and equal inputs give equal bits on one device.

Products are sums of three products of TF32 parts (``tf32x3``): on matrix units, and at least as exact as float32's.
Plain TF32 keeps 11 bits, and was wrong by .001 where these were wrong by .000001. Tiles depend on ``d`` alone, because
autotuning could change the order of additions from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Programs of the sums, which fill a GPU several times. A constant, so that the order of additions is one, too.
PROGRAMS = 1056
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def _rows(values: tl.tensor, at: tl.tensor, valid: tl.tensor, dim: tl.tensor, width: tl.constexpr) -> tl.tensor:
    """Rows ``at`` of ``values [..., dim]``, ``[len(at), width]``: 0 where not valid, and beyond ``dim``."""
    columns = tl.arange(0, width)
    places = values + at.to(tl.int64)[:, None] * dim + columns[None, :]
    return tl.load(places, mask=valid[:, None] & (columns < dim)[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_states"])
def _sum_over_items(
    states: tl.tensor,
    table: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    row_out: tl.tensor,
    num_states: tl.tensor,
    num_items: tl.tensor,
    dim: tl.tensor,
    want_row: tl.constexpr,
    held_rows: tl.constexpr,
    streamed_rows: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Largest score, sum of ``exp(score - largest)`` and the table rows summed with these weights, by split."""
    rows = tl.program_id(0) * held_rows + tl.arange(0, held_rows)
    split = tl.program_id(1)
    held = _rows(states, rows, rows < num_states, dim, width)
    largest = tl.full((held_rows,), float("-inf"), tl.float32)
    total = tl.zeros((held_rows,), tl.float32)
    row = tl.zeros((held_rows, width), tl.float32)
    items_per_split = tl.cdiv(tl.cdiv(num_items, streamed_rows), tl.num_programs(1)) * streamed_rows
    first = split * items_per_split
    for start in range(first, tl.minimum(first + items_per_split, num_items), streamed_rows):
        items = start + tl.arange(0, streamed_rows)
        vectors = _rows(table, items, items < num_items, dim, width)
        scores = tl.dot(held, tl.trans(vectors), input_precision=PRECISION)
        scores = tl.where((items < num_items)[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - larger)
        weights = tl.exp(scores - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if want_row:
            row = tl.dot(weights, vectors, row * shrink[:, None], input_precision=PRECISION)
        largest = larger
    at = split.to(tl.int64) * num_states + rows
    tl.store(largest_out + at, largest, mask=rows < num_states)
    tl.store(total_out + at, total, mask=rows < num_states)
    if want_row:
        columns = tl.arange(0, width)
        mask = (rows < num_states)[:, None] & (columns < dim)[None, :]
        tl.store(row_out + at[:, None] * dim + columns[None, :], row, mask=mask)


@triton.jit(do_not_specialize=["num_states"])
def _add_gradient_of_table(
    states: tl.tensor,
    table: tl.tensor,
    lse: tl.tensor,
    weights: tl.tensor,
    gradient: tl.tensor,
    num_states: tl.tensor,
    num_items: tl.tensor,
    dim: tl.tensor,
    held_rows: tl.constexpr,
    streamed_rows: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Adds ``Σ_n weights_n p_nv h_n`` for the items v of a program."""
    items = tl.program_id(0) * held_rows + tl.arange(0, held_rows)
    held = _rows(table, items, items < num_items, dim, width)
    summed = tl.zeros((held_rows, width), tl.float32)
    for start in range(0, num_states, streamed_rows):
        rows = start + tl.arange(0, streamed_rows)
        valid = rows < num_states
        vectors = _rows(states, rows, valid, dim, width)
        lse_of_rows = tl.load(lse + rows, mask=valid, other=float("inf"))  # beyond the states exp(0 - inf) is 0
        weights_of_rows = tl.load(weights + rows, mask=valid, other=0.0)
        scores = tl.dot(held, tl.trans(vectors), input_precision=PRECISION)
        of_scores = tl.exp(scores - lse_of_rows[None, :]) * weights_of_rows[None, :]
        summed = tl.dot(of_scores, vectors, summed, input_precision=PRECISION)
    columns = tl.arange(0, width)
    mask = (items < num_items)[:, None] & (columns < dim)[None, :]
    at = gradient + items.to(tl.int64)[:, None] * dim + columns[None, :]
    tl.store(at, summed + tl.load(at, mask=mask, other=0.0), mask=mask)


def sum_over_catalog(states: Tensor, items: Tensor, want_expected_row: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp ``[N]`` of ``states itemsᵀ`` and, if wanted, ``softmax(states itemsᵀ) items [N, d]``."""
    states, items = states.contiguous(), items.contiguous()
    options = _options(states)
    held, streamed = (triton.cdiv(len(states), options["held_rows"]), triton.cdiv(len(items), options["streamed_rows"]))
    per_split = triton.cdiv(streamed, min(max(1, PROGRAMS // held), streamed))
    splits = triton.cdiv(streamed, per_split)
    largest = states.new_empty(splits, len(states))
    total = torch.empty_like(largest)
    row = states.new_empty(splits, *states.shape) if want_expected_row else largest
    with torch.cuda.device_of(states):
        _sum_over_items[(held, splits)](
            *(states, items, largest, total, row, len(states), len(items), states.shape[1]),
            want_row=want_expected_row,
            **options,
        )
    top = largest.amax(0)
    shares = (largest - top).exp_()
    total = total.mul_(shares).sum(0)
    expected = row.mul_(shares[..., None]).sum(0).div_(total[:, None]) if want_expected_row else None
    return top + total.log(), expected


def add_softmax_gradient(gradient: Tensor, weights: Tensor, states: Tensor, items: Tensor, lse: Tensor) -> None:
    """Adds ``Σ_n weights_n p_n h_nᵀ`` to the gradient ``[V, d]`` of the items, which is contiguous."""
    states, items = states.contiguous(), items.contiguous()
    options = _options(states)
    with torch.cuda.device_of(states):
        _add_gradient_of_table[(triton.cdiv(len(items), options["held_rows"]),)](
            *(states, items, lse.contiguous(), weights.contiguous(), gradient, len(states), len(items)),
            states.shape[1],
            **options,
        )


def _options(states: Tensor) -> dict[str, int]:
    """The compile-time options of a kernel: the fastest of those tried on an H200. Larger tiles spill registers."""
    width = max(16, triton.next_power_of_2(states.shape[1]))
    streamed, stages = (64, 3) if width <= 64 else (32, 2)
    return {"held_rows": 128, "streamed_rows": streamed, "width": width, "num_warps": 8, "num_stages": stages}
