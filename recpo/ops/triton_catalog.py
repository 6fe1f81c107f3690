"""Passes over a catalog on a GPU: Triton kernels that never write a logit to memory.

The module has the three functions of ``recpo.ops.kernels`` that ``catalog_passes`` selects, with the same arguments and
results. It needs the package ``triton`` (the compiler, not NVIDIA's inference server).

- **Sums**: each program keeps a tile of states and passes over its part of the table with an online log-sum-exp (the
  largest score so far, and the sum of exponentials relative to it). It sums the expected row in the same pass, as
  attention sums its values, so the gradient of the states needs no second pass.
- **Gradient of the table**: each program owns a tile of items, computes their scores again and sums over the states. No
  other program writes these rows, so there are no atomic additions, and equal inputs give equal bits on one device.
- **States without a gradient** are left out. A sort on the device plans this before the kernel starts, and the kernel
  reads their number, so the CPU never waits.
- If one axis has too few tiles to fill a device, the other axis is cut into parts (splits), which are added in order
  afterwards. Tiles depend on ``d`` and the device only: autotuning could change the order of additions between runs.

Products are float32 ("ieee"). If ``torch.get_float32_matmul_precision()`` is not "highest", they are sums of three
products of TF32 parts ("tf32x3"), with an error of the size of float32's. Plain TF32 is never used: it keeps 11 bits,
so a score of 10 could be wrong by 0.005. Tables in bfloat16 and float16 are read as they are and multiplied in float32.

References: "Online normalizer calculation for softmax" (arXiv 1805.02867); FlashAttention-2 (arXiv 2307.08691); "Cut
Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009), which adds gradients with atomics and drops small
ones; these kernels do neither.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpo.ops.kernels import CatalogSums

#: Programs per kernel: enough to fill any current GPU several times. A constant, so the order of additions is too.
PROGRAMS = 512


class Tiles(NamedTuple):
    """How a pass is divided into tiles.

    Attributes:
        own: rows that a program holds.
        other: rows that it processes at a time.
        width: width of the vectors, a power of two of at least 16.
        warps: warps of a program.
        precision: precision of its products, an argument of ``tl.dot``.
    """

    own: int
    other: int
    width: int
    warps: int
    precision: str


def is_interpreted() -> bool:
    """Whether Triton runs in Python on the CPU: ``TRITON_INTERPRET=1`` was set when it was first imported."""
    return bool(triton.knobs.runtime.interpret)


def tiles_for(dim: int, generation: int, matmul_precision: str) -> Tiles:
    """Tiles that fit registers and shared memory, found by compiling for each generation and counting spills.

    Args:
        dim: width of the vectors, d.
        generation: major compute capability of the device: 8 Ampere, 9 Hopper.
        matmul_precision: ``torch.get_float32_matmul_precision()``.
    """
    width = max(16, triton.next_power_of_2(dim))
    narrow = width <= 64
    if matmul_precision == "highest" or generation < 8:
        return Tiles(64 if narrow else 32, 32, width, 8, "ieee")
    if generation == 9:  # its matrix units take 64 rows at a time
        return Tiles(64, 64 if narrow else 32, width, 4 if narrow else 8, "tf32x3")
    return Tiles(32, 32, width, 4 if narrow else 8, "tf32x3")


# ---------------------------------------------------------------- kernels
@triton.jit
def _rows(
    values: tl.tensor, at: tl.tensor, valid: tl.tensor, dim: tl.tensor, stride: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    """Rows ``at`` of ``values [..., dim]`` in float32, ``[len(at), width]``: 0 where not valid, and beyond ``dim``."""
    columns = tl.arange(0, width)
    places = values + at.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(places, mask=valid[:, None] & (columns < dim)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_states", "tiles_per_split"])
def _sum_over_items(
    states: tl.tensor,
    table: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    row_out: tl.tensor,
    num_states: tl.tensor,
    num_items: tl.tensor,
    dim: tl.tensor,
    stride_of_states: tl.tensor,
    stride_of_table: tl.tensor,
    tiles_per_split: tl.tensor,
    want_row: tl.constexpr,
    precision: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Largest score, sum of ``exp(score - largest)`` and the table rows summed with these weights, by split."""
    rows = tl.program_id(0) * own + tl.arange(0, own)
    split = tl.program_id(1)
    held = _rows(states, rows, rows < num_states, dim, stride_of_states, width)
    largest = tl.full((own,), float("-inf"), tl.float32)
    total = tl.zeros((own,), tl.float32)
    row = tl.zeros((own, width), tl.float32)
    first = split * tiles_per_split * other
    for start in range(first, tl.minimum(first + tiles_per_split * other, num_items), other):
        items = start + tl.arange(0, other)
        vectors = _rows(table, items, items < num_items, dim, stride_of_table, width)
        scores = tl.dot(held, tl.trans(vectors), input_precision=precision)
        scores = tl.where((items < num_items)[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp(largest - larger)
        weights = tl.exp(scores - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if want_row:
            row = tl.dot(weights, vectors, row * shrink[:, None], input_precision=precision)
        largest = larger
    at = split.to(tl.int64) * num_states + rows
    tl.store(largest_out + at, largest, mask=rows < num_states)
    tl.store(total_out + at, total, mask=rows < num_states)
    if want_row:
        columns = tl.arange(0, width)
        mask = (rows < num_states)[:, None] & (columns < dim)[None, :]
        tl.store(row_out + at[:, None] * dim + columns[None, :], row, mask=mask)


@triton.jit(do_not_specialize=["num_states", "tiles_per_split"])
def _gradient_of_table(
    states: tl.tensor,
    table: tl.tensor,
    lse: tl.tensor,
    weights: tl.tensor,
    entropy: tl.tensor,
    order: tl.tensor,
    num_active: tl.tensor,
    out: tl.tensor,
    num_items: tl.tensor,
    dim: tl.tensor,
    stride_of_states: tl.tensor,
    stride_of_table: tl.tensor,
    tiles_per_split: tl.tensor,
    of_entropy: tl.constexpr,
    add: tl.constexpr,
    precision: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """``Σ_n weights_n p_nv h_n``, by split, for the ``own`` items v of a program; see ``_gradient_of_scores``."""
    items = tl.program_id(0) * own + tl.arange(0, own)
    split = tl.program_id(1)
    held = _rows(table, items, items < num_items, dim, stride_of_table, width)
    gradient = tl.zeros((own, width), tl.float32)
    count = tl.load(num_active)
    first = split * tiles_per_split * other
    for start in range(first, tl.minimum(first + tiles_per_split * other, count), other):
        place = start + tl.arange(0, other)
        rows = tl.load(order + place, mask=place < count, other=0)
        vectors = _rows(states, rows, place < count, dim, stride_of_states, width)
        logp = tl.dot(held, tl.trans(vectors), input_precision=precision) - tl.load(lse + rows)[None, :]
        of_scores = tl.exp(logp)
        if of_entropy:
            of_scores = of_scores * (logp + tl.load(entropy + rows)[None, :])
        of_scores = of_scores * tl.load(weights + rows)[None, :]
        # a place without a row has the index of another row, and is not part of the sum
        of_scores = tl.where((place < count)[None, :], of_scores, 0.0)
        gradient = tl.dot(of_scores, vectors, gradient, input_precision=precision)
    columns = tl.arange(0, width)
    mask = (items < num_items)[:, None] & (columns < dim)[None, :]
    at = out + (split.to(tl.int64) * num_items + items)[:, None] * dim + columns[None, :]
    if add:
        gradient += tl.load(at, mask=mask, other=0.0)
    tl.store(at, gradient, mask=mask)


@triton.jit(do_not_specialize=["num_states", "tiles_per_split"])
def _gradient_of_states(
    states: tl.tensor,
    table: tl.tensor,
    lse: tl.tensor,
    weights: tl.tensor,
    entropy: tl.tensor,
    order: tl.tensor,
    num_active: tl.tensor,
    out: tl.tensor,
    num_states: tl.tensor,
    num_items: tl.tensor,
    dim: tl.tensor,
    stride_of_states: tl.tensor,
    stride_of_table: tl.tensor,
    tiles_per_split: tl.tensor,
    precision: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """``Σ_v weights_n p_nv (log p_nv + H_n) E_v``, by split, for the ``own`` states n of a program."""
    place = tl.program_id(0) * own + tl.arange(0, own)
    split = tl.program_id(1)
    active = place < tl.load(num_active)
    rows = tl.load(order + place, mask=active, other=0)
    held = _rows(states, rows, active, dim, stride_of_states, width)
    lse_of_rows, weights_of_rows = tl.load(lse + rows), tl.load(weights + rows)
    entropy_of_rows = tl.load(entropy + rows)
    gradient = tl.zeros((own, width), tl.float32)
    first = split * tiles_per_split * other
    last = tl.minimum(first + tiles_per_split * other, num_items)
    # a tile whose rows all have no gradient ends at once
    last = tl.where(tl.program_id(0) * own < tl.load(num_active), last, first)
    for start in range(first, last, other):
        items = start + tl.arange(0, other)
        vectors = _rows(table, items, items < num_items, dim, stride_of_table, width)
        logp = tl.dot(held, tl.trans(vectors), input_precision=precision) - lse_of_rows[:, None]
        of_scores = tl.exp(logp) * (logp + entropy_of_rows[:, None]) * weights_of_rows[:, None]
        of_scores = tl.where((items < num_items)[None, :], of_scores, 0.0)
        gradient = tl.dot(of_scores, vectors, gradient, input_precision=precision)
    columns = tl.arange(0, width)
    mask = active[:, None] & (columns < dim)[None, :]
    at = (split.to(tl.int64) * num_states + rows)[:, None] * dim + columns[None, :]
    tl.store(out + at, gradient, mask=mask)


# ---------------------------------------------------------------- passes
def sum_over_catalog(
    states: Tensor, table: Tensor, padding_rows: int, *, want_expected_row: bool, keep_bytes: int = 0
) -> CatalogSums:
    """``kernels.sum_over_catalog`` without logits in memory. It keeps no softmax, for any ``keep_bytes``."""
    states, items = _rows_dense(states), _rows_dense(table[padding_rows:])
    if not len(states) or not len(items):
        empty = torch.zeros_like(states) if want_expected_row else None
        lse = states.new_full((len(states),), -torch.inf)
        return CatalogSums(lse, empty, lse[None], [])
    launch = _launch(len(states), len(items), states)
    largest = states.new_empty(launch.splits, len(states))
    total = torch.empty_like(largest)
    row = states.new_empty(launch.splits, *states.shape) if want_expected_row else largest
    with torch.cuda.device_of(states):
        _sum_over_items[launch.grid](
            *(states, items, largest, total, row, len(states), len(items), states.shape[1]),
            *(states.stride(0), items.stride(0), launch.tiles_per_split),
            want_row=want_expected_row,
            **launch.options,
        )
    top = largest.amax(0)
    shares = (largest - top).exp_()
    total = total.mul_(shares).sum(0)
    lse = top + total.log()
    expected = row.mul_(shares[..., None]).sum(0).div_(total[:, None]) if want_expected_row else None
    return CatalogSums(lse, expected, lse[None], [])


def add_softmax_gradient(
    gradient: Tensor, weights: Tensor, states: Tensor, table: Tensor, padding_rows: int, sums: CatalogSums
) -> None:
    """``kernels.add_softmax_gradient`` without logits in memory. States with weight 0 are left out."""
    _add_table_gradient(gradient, weights, states, table, padding_rows, sums.lse, None)


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
    """``kernels.entropy_gradients`` without logits in memory. States with a zero ``grad`` are left out."""
    grad_states = grad_table = None
    if needs_states:
        grad_states = _entropy_gradient_of_states(-grad, states, table[padding_rows:], lse, entropy)
    if needs_table:
        grad_table = torch.zeros(table.shape, dtype=states.dtype, device=states.device)
        _add_table_gradient(grad_table, -grad, states, table, padding_rows, lse, entropy)
    return grad_states, grad_table


def _add_table_gradient(
    gradient: Tensor,
    weights: Tensor,
    states: Tensor,
    table: Tensor,
    padding_rows: int,
    lse: Tensor,
    entropy: Tensor | None,
) -> None:
    """Adds the softmax's gradient or, with ``entropy [N]``, the entropy's to the gradient ``[V + padding_rows, d]``."""
    states, items, of_items = _rows_dense(states), _rows_dense(table[padding_rows:]), gradient[padding_rows:]
    if not len(states) or not len(items):
        return
    launch = _launch(len(items), len(states), states)
    adds = launch.splits == 1 and of_items.is_contiguous()
    out = of_items if adds else states.new_empty(launch.splits, *items.shape)
    with torch.cuda.device_of(states):
        _gradient_of_table[launch.grid](
            *(states, items, lse, weights.contiguous(), lse if entropy is None else entropy, *_active_rows(weights)),
            *(out, len(items), states.shape[1], states.stride(0), items.stride(0), launch.tiles_per_split),
            of_entropy=entropy is not None,
            add=adds,
            **launch.options,
        )
    if not adds:
        of_items += out.sum(0)


def _entropy_gradient_of_states(weights: Tensor, states: Tensor, items: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
    """``[N, d]``."""
    states, items = _rows_dense(states), _rows_dense(items)
    if not len(states) or not len(items):
        return torch.zeros_like(states)
    launch = _launch(len(states), len(items), states)
    out = states.new_zeros(launch.splits, *states.shape)
    with torch.cuda.device_of(states):
        _gradient_of_states[launch.grid](
            *(states, items, lse, weights.contiguous(), entropy, *_active_rows(weights), out),
            *(len(states), len(items), states.shape[1], states.stride(0), items.stride(0), launch.tiles_per_split),
            **launch.options,
        )
    return out.sum(0)


def _active_rows(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, those with a weight first, ``[N]``, and their number, ``[1]``. Both stay on the device."""
    idle = weights == 0
    return idle.byte().argsort(stable=True), (~idle).sum(dtype=torch.int32).view(1)


class _Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        grid: tiles of the axis that programs hold, and parts of the other axis.
        splits: number of these parts.
        tiles_per_split: tiles of the other axis in a part.
        options: compile-time options of the kernel.
    """

    grid: tuple[int, int]
    splits: int
    tiles_per_split: int
    options: dict[str, int | str]


def _launch(own: int, other: int, states: Tensor) -> _Launch:
    """Fills the device with ``own`` rows to hold and ``other`` rows to process. No part is empty."""
    generation = torch.cuda.get_device_capability(states.device)[0] if states.is_cuda else 9
    tiles = tiles_for(states.shape[1], generation, torch.get_float32_matmul_precision())
    tiles_of_own, tiles_of_other = triton.cdiv(own, tiles.own), triton.cdiv(other, tiles.other)
    wanted = max(1, PROGRAMS // tiles_of_own)
    per_split = triton.cdiv(tiles_of_other, min(wanted, tiles_of_other))
    splits = triton.cdiv(tiles_of_other, per_split)
    options: dict[str, int | str] = {"own": tiles.own, "other": tiles.other, "width": tiles.width}
    options |= {"precision": tiles.precision, "num_warps": tiles.warps, "num_stages": 2}
    return _Launch((tiles_of_own, splits), splits, per_split, options)


def _rows_dense(values: Tensor) -> Tensor:
    """The kernels support any stride between rows; each row must be contiguous."""
    return values if values.stride(-1) == 1 else values.contiguous()
