"""Item vectors in blocks of rows, for exported programs that search a large catalog block by block.

A loop over the blocks keeps the best items so far and the log-sum-exp of every block. Nothing of size ``[B, V]`` is
allocated, and the table is stored once, for search and for lookups. Rows may be rounded to float16 or int8; they are
converted back one block at a time, in the cache.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from recpo.errors import RecpoError
from recpo.policies.catalog_search import ties_to_smaller_id
from recpo.types import Recommendations

#: Number format of an item matrix.
Precision = Literal["float32", "float16", "int8"]

BLOCK_ROWS: Final = 8192
"""Maximum rows in a block. At d = 64, the rows and the scores of 32 users stay in the cache of one core."""

_LARGEST_INT8: Final = 127


class BlockedTable(nn.Module):
    """Vectors of the items 1..V in blocks of equal size. Row 0 and the rows after V are not items.

    With int8, row i is ``columns * scales_i * values_i``. Every column is first divided by its root mean square, so
    that columns of different magnitude (vectors next to the factors of a tilted policy) lose equal relative precision.

    Args:
        vectors: ``[V + 1, d]``; row 0 is not an item.
        precision: number format; float16 and int8 round.
        rooted: see ``recpo.policies.catalog_search.scores_of``.
        block_rows: maximum rows in a block, at least 2.

    Attributes:
        values: ``[n, R, d]`` in the number format.
        scales: ``[n, R]`` float32; 1 except with int8.
        columns: ``[d]`` float32; 1 except with int8.
        bias: ``[n, R]`` float32; -inf for rows that are not items.
        written_out: exported programs contain the blocks one after the other instead of a loop.

    Raises:
        RecpoError: an unknown precision, or values that it cannot represent.
    """

    values: Tensor
    scales: Tensor
    columns: Tensor
    bias: Tensor
    starts: Tensor

    def __init__(
        self, vectors: Tensor, precision: Precision = "float32", rooted: int = 0, block_rows: int = BLOCK_ROWS
    ) -> None:
        super().__init__()
        validate_precision(precision)
        size, dim = vectors.shape
        blocks = -(-size // block_rows)
        self.rows = -(-size // blocks)
        self.num_items, self.rooted, self.precision = size - 1, rooted, precision
        self.written_out = False
        padded = F.pad(vectors.detach().float(), (0, 0, 0, blocks * self.rows - size))
        columns, scales = torch.ones(dim), torch.ones(len(padded))
        if precision == "int8":
            columns, scales, padded = _rounded(padded)
        elif precision == "float16":
            padded = padded.half()
            if not padded.isfinite().all():
                raise RecpoError("item_precision float16 holds numbers up to 65,504, the item vectors are larger")
        place = torch.arange(len(padded))
        bias = torch.where((place > 0) & (place < size), 0.0, -torch.inf)
        self.register_buffer("values", padded.view(blocks, self.rows, dim))
        self.register_buffer("scales", scales.view(blocks, self.rows))
        self.register_buffer("columns", columns)
        self.register_buffer("bias", bias.view(blocks, self.rows))
        self.register_buffer("starts", torch.arange(blocks) * self.rows)

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors ``[..., d]`` float32 of the items ``[...]``, with rounding; zero for id 0."""
        block, row = ids // self.rows, ids % self.rows
        vectors = self.values[block, row].float()
        if self.precision == "int8":
            vectors = vectors * self.scales[block, row][..., None] * self.columns
        return vectors

    def top_k(self, states: Tensor, k: int, exclude: Tensor, allowed: Tensor | None = None) -> Recommendations:
        """The ``k`` best items by log-probability. Ties are ordered by item id. See ``catalog_search.top_k``.

        ``allowed [B, V + 1]`` bool selects the items that may be listed; None = all. The other items remain in the
        normalizer.

        Items of equal score are ordered by id within a list. If the last place is tied, ONNX chooses the smaller id
        (its TopK guarantees this); a torch program may list another item of equal score.
        """
        states = states * self.columns if self.precision == "int8" else states
        blocks: tuple[Tensor, ...] = (self.values, self.scales, self.bias, self.starts)
        if allowed is not None:
            users, (parts_, rows) = allowed.shape[0], self.bias.shape
            padded = F.pad(allowed, (0, parts_ * rows - allowed.shape[1]))
            blocks = (*blocks, padded.view(users, parts_, rows).transpose(0, 1))
        nothing = states.new_full((states.shape[0], k), -torch.inf)
        carry: tuple[Tensor, Tensor] = (nothing, torch.zeros_like(nothing, dtype=torch.long))

        def search(carry: tuple[Tensor, Tensor], block: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
            return self._search(states, k, exclude, carry, block)

        if torch.compiler.is_exporting() and not self.written_out:
            carry, sums = scan(search, carry, blocks)
        else:
            parts = []
            for block in zip(*blocks, strict=True):
                carry, part = search(carry, block)
                parts.append(part)
            sums = torch.stack(parts)
        best, ids = carry
        ids = ties_to_smaller_id(best, ids, self.num_items + 1)
        return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - sums.logsumexp(0)[:, None])

    def _search(
        self, states: Tensor, k: int, exclude: Tensor, carry: tuple[Tensor, Tensor], block: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Adds one block to the search: the best items so far, and the log-sum-exp ``[B]`` of its items."""
        values, scales, bias, start = block[:4]
        scores = self._scores(states, values, scales, bias)
        lse = scores.logsumexp(1)
        place = exclude - start
        inside = (place >= 0) & (place < self.rows)
        # an id outside the block writes +inf, which a minimum ignores
        barred = torch.where(inside, -torch.inf, torch.inf).to(scores.dtype)
        scores = scores.scatter_reduce(1, place.clamp(0, self.rows - 1), barred, "amin")
        if len(block) > 4:
            scores = torch.where(block[4], scores, -torch.inf)
        best, ids = scores.topk(min(k, self.rows), 1)
        # earlier results have smaller ids and come first
        best, order = torch.cat([carry[0], best], 1).topk(k, 1)
        return (best, torch.cat([carry[1], ids + start], 1).gather(1, order)), lse

    def _scores(self, states: Tensor, values: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
        """Scores ``[B, R]`` of one block; -inf for rows that are not items."""
        rows, own = values.float(), values.shape[1] - self.rooted
        if not self.rooted and self.precision != "int8":
            return F.linear(states, rows, bias)
        scores = F.linear(states[:, :own], rows[:, :own])
        if self.precision == "int8":
            scores = scores * scales
        if self.rooted:
            variance = F.linear(states[:, own:], rows[:, own:])
            variance = variance * scales if self.precision == "int8" else variance
            scores = scores - variance.clamp_min(0.0).sqrt()
        return scores + bias


class RoundedRows(nn.Module):
    """The first columns of a ``BlockedTable`` as an item table: the vectors that an encoder looks up.

    Args:
        table: the rows.
        width: number of columns.
    """

    def __init__(self, table: BlockedTable, width: int) -> None:
        super().__init__()
        self.table, self.width = table, width

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors ``[..., width]`` of the items ``[...]``; zero for id 0."""
        vectors: Tensor = self.table(ids)
        return vectors if vectors.shape[-1] == self.width else vectors[..., : self.width]


def validate_precision(precision: object) -> None:
    """Raises ``RecpoError`` if the precision is unknown."""
    if precision not in get_args(Precision):
        raise RecpoError(f"item_precision is {precision!r}, expected one of: {', '.join(get_args(Precision))}")


def _rounded(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns ``[d]``, scales ``[N]`` and int8 values ``[N, d]`` whose product is closest to the vectors."""
    columns = vectors.square().mean(0).sqrt()
    columns = torch.where(columns > 0, columns, 1.0)
    equalized = vectors / columns
    scales = equalized.abs().amax(1) / _LARGEST_INT8
    scales = torch.where(scales > 0, scales, 1.0)
    return columns, scales, (equalized / scales[:, None]).round().to(torch.int8)
