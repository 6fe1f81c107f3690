"""The only module with computations that differ from their formula for speed. The tests compare each with its formula.

- **Products**: PyTorch sends float32 products to MKL, which uses only half of an AMD processor. On an EPYC with
  AVX-512, oneDNN is 2.3 times as fast for the shapes of this library, at the same precision.
- **Numbers of rows**: where they differ from step to step, they are filled up to a multiple of 64, because oneDNN
  compiles and keeps a kernel for every new number.
- **Rows**: an embedding lookup instead of indexing, because its gradient is several times faster on a CPU.
- **Dropout**: one random byte per element, because Bernoulli numbers cost more than the products around them.
- **Passes over a catalog**: blocks of logits that fit the cache are reduced at once, and computed again in the backward
  pass unless all of them fit ``KEEP_BYTES``. ``linear_logprob`` runs over a complete table, ``sharded_logprob`` over a
  rank's rows of one. The passes run on any device. On a Hopper GPU those of log-probabilities are one kernel each that
  writes no logit to memory (``fused_catalog``).

Other devices and types, autocast, export, a build without oneDNN, and small products always use the plain version.

Only ``linear``, ``take_rows`` and ``dropout`` are differentiable by themselves.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

# One block of logits: small enough for a CPU's last-level cache, large enough to fill a GPU.
BLOCK_BYTES = {"cpu": 8 << 20}
BLOCK_BYTES_ACCELERATOR = 256 << 20
# Up to this many bytes of softmax are kept for the backward pass instead of being computed again.
KEEP_BYTES = 192 << 20
# Table rows per block: at d = 64 the rows and the logits of a few hundred states stay in the cache together.
BLOCK_ROWS_OF_TABLE = 8192
# Few large blocks there: each costs a dozen launches.
BLOCK_ROWS_ACCELERATOR = 65_536
# Wider vectors do not fit the registers of a fused pass.
LARGEST_FUSED_DIM = 128
# Below this many multiplications a product is over before oneDNN has looked up its kernel.
_SMALL = 1 << 20
# oneDNN compiles a kernel for every number of rows that it meets, and keeps 1,024 of them (some 100 KB each). Where the
# number differs from step to step it is filled up to a multiple of this, so that few are ever compiled; below 1,024
# rows to a multiple of 16, as the rows that fill up cost as much as the others.
ROW_MULTIPLE, SMALL_ROW_MULTIPLE = 64, 16
_LEAST_INT64 = -(2**63)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Computes in the types of the inputs, also under autocast.

    No program is exported under autocast, and one would keep what is within as a graph of its own, unknown to ONNX.
    """
    return nullcontext() if torch.compiler.is_exporting() else torch.autocast(device.type, enabled=False)


# ---------------------------------------------------------------- products
def _onednn_available() -> bool:
    """Whether the operator that ``torch.compile`` itself uses for oneDNN products exists and works."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        product = _onednn(torch.ones(2, 3), torch.ones(4, 3))
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, torch.full((2, 4), 3.0))


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    right = right if _is_dense(right) else right.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


def _is_dense(right: Tensor) -> bool:
    """Whether oneDNN multiplies fast with it. With some columns of a wider matrix, it takes 1,000 times as long."""
    return right.is_contiguous() or right.T.is_contiguous()


_HAS_ONEDNN = _onednn_available()


def matmul_transposed(left: Tensor, right: Tensor) -> Tensor:
    """``left rightᵀ``: ``[n, k]`` and ``[m, k]`` give ``[n, m]``; no gradient. Either may be a view."""
    with full_precision():
        if _suits(left) and _is_dense(right) and left.shape[0] * left.shape[1] * right.shape[0] >= _SMALL:
            return _onednn(left, right)
        return torch.mm(left, right.T)


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """``Σ_k left_nk right_nk``: ``[n, k]`` twice gives ``[n]``; no gradient."""
    with full_precision():
        return torch.einsum("nk,nk->n", left, right)


@contextmanager
def full_precision() -> Iterator[None]:
    """Full float32 products, even if TF32 (or bfloat16 on a CPU) is allowed elsewhere.

    An exact softmax needs exact logits: with TF32 their error is about 0.001 of their size.
    """
    before = _precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def _precision() -> str:
    """How exact float32 products are, fixed when a step is compiled."""
    return torch.get_float32_matmul_precision()


# what torch.compiler.assume_constant_result sets; the decorator would import the compiler, two seconds
_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``inputs weightᵀ + bias``, as ``torch.nn.functional.linear``; differentiable once.

    Args:
        inputs: ``[..., k]``.
        weight: ``[m, k]``.
        bias: ``[m]``; None = 0.
    """
    if (
        not _suits(inputs)
        or torch.is_autocast_enabled(inputs.device.type)
        or not _is_dense(weight)
        or inputs.numel() * weight.shape[0] < _SMALL
    ):
        return F.linear(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias)


def _suits(values: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    return _HAS_ONEDNN and values.dtype == torch.float32 and values.device.type == "cpu"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.shape = inputs.shape
        product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product.view(*inputs.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.reshape(-1, len(weight))
        grad_inputs = _onednn(grad, weight.T).view(ctx.shape) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # oneDNN copies a transposed left operand, so the narrower one is on the left
            narrow_inputs = rows.shape[1] < grad.shape[1]
            grad_weight = _onednn(rows.T, grad.T).T.contiguous() if narrow_inputs else _onednn(grad.T, rows.T)
        return grad_inputs, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


# ---------------------------------------------------------------- rows
def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Rows ``index [...]`` of ``values [..., d]``, all but whose last axis is flattened: ``[..., d]``."""
    return F.embedding(index, values.reshape(-1, values.shape[-1]))


def sum_rows(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """``[size, d]``, the rows ``[n, d]`` summed by index: the gradient of ``take_rows``."""
    return torch.ops.aten.embedding_dense_backward(rows, index, size, -1, False)


# ---------------------------------------------------------------- dropout
def dropout(values: Tensor, threshold: int) -> Tensor:
    """Sets elements to zero with a probability of ``threshold / 256`` and scales the others up.

    Args:
        values: any shape.
        threshold: 1 to 255.
    """
    if values.device.type != "cpu":
        return F.dropout(values, threshold / 256)
    words = torch.empty((values.numel() + 7) // 8, dtype=torch.int64).random_(_LEAST_INT64, None)
    return _Dropout.apply(values, words.view(torch.uint8)[: values.numel()].view(values.shape), threshold)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, random: Tensor, threshold: int) -> Tensor:
        ctx.save_for_backward(random)  # a byte per element; the mask in floating point would be four
        ctx.threshold = threshold
        return _dropped(values, random, threshold)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (random,) = ctx.saved_tensors
        return _dropped(grad, random, ctx.threshold), None, None


def _dropped(values: Tensor, random: Tensor, threshold: int) -> Tensor:
    # comparing bytes, and multiplying by booleans, take several times as long
    keep = random.to(values.dtype).ge_(threshold)
    # this kernel multiplies by a mask and a scale in one pass
    return torch.ops.aten.native_dropout_backward(values, keep, 256.0 / (256 - threshold))


# ---------------------------------------------------------------- passes over a catalog
class CatalogSums(NamedTuple):
    """The result of one pass over the catalog.

    Attributes:
        lse: ``[N]`` log-sum-exp of all logits.
        expected_row: ``[N, d]``; None if not requested.
        block_lse: ``[blocks of table rows, M]`` log-sum-exp within each block of table rows, of the states of ``Grid``.
        softmax: the softmax within each block, in the order of ``Grid``; empty if it was too large to keep.
    """

    lse: Tensor
    expected_row: Tensor | None
    block_lse: Tensor
    softmax: list[Tensor]


def as_float(values: Tensor) -> Tensor:
    """``values`` in float32; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def column_blocks(num_rows: int, padding_rows: int, block_rows: int) -> Iterator[slice]:
    """Slices over the item rows of a table, ``block_rows`` at a time (a small rest joins the last block)."""
    start = padding_rows
    while start < num_rows:
        stop = num_rows if num_rows - start <= block_rows * 5 // 4 else start + block_rows
        yield slice(start, stop)
        start = stop


def block_size(device_type: str) -> tuple[int, int]:
    """Most bytes of a block of logits, and its table rows."""
    if device_type in BLOCK_BYTES:
        return BLOCK_BYTES[device_type], BLOCK_ROWS_OF_TABLE
    return BLOCK_BYTES_ACCELERATOR, BLOCK_ROWS_ACCELERATOR


class Grid:
    """Cuts the logits into blocks of states within blocks of table rows.

    Args:
        states: ``[N, d]``.
        table: ``[V + padding_rows, d]``.
        padding_rows: rows of the table to leave out.

    Attributes:
        states: ``[M, d]``, the states and, for oneDNN, rows of zeros up to a multiple (``row_multiple``).
    """

    def __init__(self, states: Tensor, table: Tensor, padding_rows: int) -> None:
        self.states, self.table = padded_rows(states), table
        self.block_bytes, rows = block_size(states.device.type)
        self.columns = list(column_blocks(len(table), padding_rows, rows))

    def __iter__(self) -> Iterator[tuple[int, slice, slice]]:
        """Yields the number of the block of table rows, the states' slice and the rows' slice."""
        for column, rows in enumerate(self.columns):
            if torch.compiler.is_compiling():  # a loop over states would compile a program for every number of them
                yield column, slice(0, len(self.states)), rows
                continue
            height = self.block_bytes // (self.states.element_size() * (rows.stop - rows.start))
            height = max(ROW_MULTIPLE, height // ROW_MULTIPLE * ROW_MULTIPLE)
            for start in range(0, len(self.states), height):
                yield column, slice(start, min(start + height, len(self.states))), rows

    def logits(self, part: slice, rows: slice) -> Tensor:
        """The logits of some states over some table rows."""
        return matmul_transposed(self.states[part], self.table[rows])


def row_multiple(rows: int) -> int:
    """The multiple to which the rows of an oneDNN product are padded; 1 for few rows."""
    if rows < ROW_MULTIPLE:
        return 1
    return ROW_MULTIPLE if rows >= 16 * ROW_MULTIPLE else SMALL_ROW_MULTIPLE


def padded_rows(values: Tensor) -> Tensor:
    """``[N, ...]`` with rows of zeros up to a multiple (``row_multiple``), where oneDNN multiplies by them."""
    missing = -len(values) % row_multiple(len(values))
    if not missing or not _suits(values):
        return values
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])])


def _is_fused(states: Tensor, items: Tensor) -> bool:
    """Whether ``fused_catalog`` makes the pass: float32 on a Hopper GPU, the generation that it was measured on."""
    if not states.is_cuda or torch.version.hip or torch.compiler.is_compiling():
        return False
    fits = states.dtype == items.dtype == torch.float32 and states.shape[1] <= LARGEST_FUSED_DIM
    return fits and bool(states.numel() and items.numel()) and torch.cuda.get_device_capability(states.device)[0] == 9


def _softmax_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the rows of a block, in place, and its log-sum-exp.

    The fused kernel is twice as fast as separate maximum, difference, exponential and sum. Its largest probability is
    ``exp(maximum - lse)``, at least 1/V, so the log-sum-exp computed from it is accurate.
    """
    maximum = logits.amax(1)
    # only the CPU kernel is known to allow its output to be its input
    softmax = torch.softmax(logits, 1, out=logits) if logits.device.type == "cpu" else logits.softmax(1)
    return softmax, maximum - softmax.amax(1).log()


def sum_over_catalog(
    states: Tensor,
    table: Tensor,
    padding_rows: int,
    *,
    want_expected_row: bool,
    keep_bytes: int = 0,
    fuses: bool = False,
) -> CatalogSums:
    """One pass over the catalog: log-sum-exp and the expected table row.

    Args:
        states: ``[N, d]``.
        table: ``[V + padding_rows, d]``.
        padding_rows: rows of the table to leave out.
        want_expected_row: sum the table rows, weighted by the softmax, as well.
        keep_bytes: a softmax up to this size is kept.
        fuses: ``fused_catalog`` may make the pass. Not if the caller subtracts the log-sum-exp from logits of ``Grid``:
            these are rounded otherwise, and a sum over ``p log(p / q)`` multiplies what differs by log-ratios that may
            be in the hundreds.
    """
    keep = len(states) * (len(table) - padding_rows) * states.element_size() <= keep_bytes
    if fuses and not keep and _is_fused(states, items := table[padding_rows:]):
        from recpo.ops import fused_catalog

        of_all, expected = fused_catalog.sum_over_catalog(states, items, want_expected_row)
        return CatalogSums(of_all, expected, of_all[None], [])
    grid = Grid(states, table, padding_rows)
    lse = states.new_full((len(grid.states),), -torch.inf)
    # one tensor for all blocks: small long-lived tensors between large short-lived ones would fragment the heap
    block_lse = states.new_empty(len(grid.columns), len(grid.states))
    expected = torch.zeros_like(grid.states) if want_expected_row else None
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
    return CatalogSums(lse[: len(states)], None if expected is None else expected[: len(states)], block_lse, kept)


def add_softmax_gradient(
    gradient: Tensor, weights: Tensor, states: Tensor, table: Tensor, padding_rows: int, sums: CatalogSums
) -> None:
    """Adds ``Σ_n weights_n p_n h_nᵀ`` to the table's gradient, from the kept softmax or a recomputed one."""
    if not sums.softmax and _is_fused(states, items := table[padding_rows:]):
        from recpo.ops import fused_catalog

        fused_catalog.add_softmax_gradient(gradient[padding_rows:], weights, states, items, sums.lse)
        return
    grid = Grid(states, table, padding_rows)
    weights, lse = padded_rows(weights), padded_rows(sums.lse)
    kept = iter(sums.softmax)
    for column, part, rows in grid:
        softmax = next(kept) if sums.softmax else _softmax_in_place(grid.logits(part, rows))[0]
        # the softmax sums to one over the block's rows; the block's share scales the states, which are smaller
        share = (sums.block_lse[column, part] - lse[part]).exp_().mul_(weights[part])
        product = matmul_transposed((grid.states[part] * share[:, None]).T, softmax.T)
        # summed over the states as it is, and transposed once per block of rows
        if part.start == 0:
            transposed = product
        else:
            transposed += product
        if part.stop == len(grid.states):
            gradient[rows] += transposed.T


class Scored(NamedTuple):
    """States and the table rows that score them: the softmax of a policy, or of the policy that it is compared with.

    Attributes:
        states: ``[N, d]``.
        table: ``[V + padding_rows, d]``.
        lse: ``[N]`` log-sum-exp over the items of the whole catalog, of which ``table`` may be a part.
    """

    states: Tensor
    table: Tensor
    lse: Tensor


def divergence_sum(own: Scored, other: Scored, padding_rows: int) -> Tensor:
    """What these rows add to ``Σ_v p_v (log p_v - log q_v)``, ``[N]``, block by block; ``own`` is p, ``other`` is q."""
    grid = Grid(own.states, own.table, padding_rows)
    total = torch.zeros_like(padded_rows(own.lse))
    for part, _, logp, log_ratio in _log_ratios(grid, own, other, padding_rows):
        total[part] += logp.exp_().mul_(log_ratio).sum(1)
    return total[: len(own.lse)]


def divergence_gradients(
    grad: Tensor, own: Scored, other: Scored | None, divergence: Tensor, padding_rows: int, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """What these rows add to the gradients of ``own``, by ``dKL/ds_v = p_v (log p_v - log q_v - KL)``.

    ``needs``: whether those of the states and of the table are wanted. ``other = None`` is ``log q = 0``: then KL is
    the negative entropy.
    """
    grid = Grid(own.states, own.table, padding_rows)
    grad_states = torch.zeros_like(grid.states) if needs[0] else None
    grad_table = torch.zeros_like(own.table) if needs[1] else None
    grad, divergence = padded_rows(grad), padded_rows(divergence)
    for part, rows, logp, log_ratio in _log_ratios(grid, own, other, padding_rows):
        grad_logits = logp.exp_().mul_(log_ratio.sub_(divergence[part, None])).mul_(grad[part, None])
        if grad_states is not None:
            grad_states[part] += matmul_transposed(grad_logits, own.table[rows].T)
        if grad_table is not None:
            grad_table[rows] += matmul_transposed(grid.states[part].T, grad_logits.T).T
    return None if grad_states is None else grad_states[: len(own.states)], grad_table


def _log_ratios(
    grid: Grid, own: Scored, other: Scored | None, padding_rows: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """For every block: slices of states and rows, ``log p`` and ``log p - log q``, both of which may be overwritten."""
    lse = padded_rows(own.lse)
    if other is not None:
        others, other_lse = Grid(other.states, other.table, padding_rows), padded_rows(other.lse)
    for _, part, rows in grid:
        logp = grid.logits(part, rows).sub_(lse[part, None])
        if other is None:
            yield part, rows, logp, logp.clone()
        else:
            yield part, rows, logp, others.logits(part, rows).sub_(other_lse[part, None]).neg_().add_(logp)
