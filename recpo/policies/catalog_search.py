"""Search in a softmax over the catalog, scored in blocks of items, as a function and inside exported programs.

A loop over the blocks keeps the largest score of every group of 16 rows and the log-sum-exp so far. The k best items
are in the k groups with the largest of these scores (k + M groups if M items are excluded), which are scored again.
Nothing of size ``[B, V]`` is allocated, and the table is stored once, for search and for lookups. Rows may be rounded
to float16 or int8; they are converted back one block at a time, in the cache.
"""

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from recpo.base.errors import RecpoError, validate_range
from recpo.base.types import Recommendations
from recpo.ops.kernels import column_blocks, matmul_transposed

# The device whose values are known at once. Of any other, the CPU would have to wait for the answer.
KNOWN_AT_ONCE = "cpu"
# Bytes of the scores of one block of items for the full batch. Larger catalogs are searched block by block.
SCORE_BYTES = 64 << 20
# The same on another device: every block costs it two dozen launches.
SCORE_BYTES_ACCELERATOR = 1 << 30
_PART: Final = 128  # scores that a program sums at once


def scores_of(
    states: Tensor, table: Tensor, variance_columns: int = 0, multiply: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """Scores ``[B, V]`` of all rows of a table: ``states · row``, optionally minus the root of a second product.

    The second form is a lower confidence bound: the first columns give an estimate, the last ones its variance.

    Args:
        states: ``[B, d]``.
        table: ``[V, d]``.
        variance_columns: number of trailing columns that give the variance, which has no gradient; 0 = none.
        multiply: ``(left [B, d], right [V, d]) -> left rightᵀ``; None = without a gradient, and not for export.
    """
    multiply, table = multiply or matmul_transposed, table.float()
    if not variance_columns:
        return multiply(states, table)
    own = table.shape[1] - variance_columns
    variance = multiply(states[:, own:].detach(), table[:, own:].detach())
    return multiply(states[:, :own], table[:, :own]) - variance.clamp_min(0.0).sqrt()


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left rightᵀ`` with a gradient. Exported programs use it too."""
    return left @ right.T


def top_k(states: Tensor, table: Tensor, k: int, exclude: Tensor | None, variance_columns: int = 0) -> Recommendations:
    """The ``k`` best items by log-probability. Ties are ordered by item id.

    Args:
        states: ``[B, d]``, divided by the temperature.
        table: ``[V + 1, d]``; row 0 is padding and is never recommended.
        k: list length, at most V.
        exclude: ``[B, M]`` ids that are not recommended, padded with 0. They remain in the normalizer.
        variance_columns: see ``scores_of``.
    """
    if torch.compiler.is_exporting():
        return _top_k_of_one_block(states, table, k, exclude, variance_columns)
    ids, best, lse = best_by_blocks(states.detach(), table.detach(), k, exclude, variance_columns=variance_columns)
    return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - lse[:, None])


def _top_k_of_one_block(
    states: Tensor, table: Tensor, k: int, exclude: Tensor | None, variance_columns: int
) -> Recommendations:
    """``top_k`` without data-dependent branches, for exported programs.

    The score matrix ``[B, V + 1]`` is the only tensor of its size. A runtime overwrites it twice: first the column of
    the padding item, then, after the normalizer is known, the excluded items. (Slicing off the padding before the
    normalizer kept a second matrix.) Ties for the last place go to the smaller id in ONNX, whose TopK guarantees this.
    """
    scores = scores_of(states, table, variance_columns, product)
    scores = scores.scatter(1, torch.zeros_like(scores[:, :1], dtype=torch.long), -torch.inf)
    return best_of_scores(scores, log_sum_exp(scores), k, exclude)


def log_sum_exp(scores: Tensor) -> Tensor:
    """Log-sum-exp ``[B, 1]`` of scores ``[B, V]``, which exported programs too compute within 1e-5.

    ONNX Runtime adds one float32 number after the other, so its log-sum-exp of a million nearly equal scores is wrong
    by .002. Programs sum parts of the scores, and then the sums.
    """
    while torch.compiler.is_exporting() and scores.shape[1] > _PART:
        parts = F.pad(scores, (0, -scores.shape[1] % _PART), value=-torch.inf).unflatten(1, (-1, _PART))
        scores = parts.logsumexp(2)
    return scores.logsumexp(1, keepdim=True)


def best_of_scores(scores: Tensor, lse: Tensor, k: int, exclude: Tensor | None) -> Recommendations:
    """The ``k`` best items of all scores ``[B, V + 1]``, -inf in column 0, whose log-sum-exp is ``lse [B, 1]``."""
    if exclude is not None:
        scores = scores.scatter(1, exclude, -torch.inf)
    if torch.compiler.is_exporting():
        best, ids = scores.topk(k, 1)
        ids = ties_to_smaller_id(best, ids, scores.shape[1])
    else:
        best, ids = block_top_k(scores, k)
    return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - lse)


def best_by_blocks(
    states: Tensor, table: Tensor, k: int, exclude: Tensor | None, padding_rows: int = 1, variance_columns: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows with the best scores, ties ordered by row number. The arguments are those of ``top_k``.

    Returns:
        row numbers and scores ``[B, at most k]``, best first (-inf for an excluded row), and the log-sum-exp ``[B]`` of
        all scores.
    """
    best = states.new_full((len(states), 0), -torch.inf)
    ids = torch.empty_like(best, dtype=torch.long)
    lse = states.new_full((len(states),), -torch.inf)
    for rows in score_blocks(states, table, padding_rows):
        scores = scores_of(states, table[rows], variance_columns)
        lse = torch.logaddexp(lse, scores.logsumexp(1))
        if exclude is not None:
            _bar(scores, exclude - rows.start)
        best_here, ids_here = block_top_k(scores, k)
        # smaller ids come first and the sort is stable, so they win ties
        best, order = torch.cat([best, best_here], 1).sort(dim=1, descending=True, stable=True)
        ids = torch.cat([ids, ids_here + rows.start], 1).gather(1, order)[:, :k]
        best = best[:, :k]
    return ids, best, lse


def _bar(scores: Tensor, exclude: Tensor) -> None:
    """Sets the columns ``exclude [B, M]`` of ``scores [B, R]`` to -inf; those that are not columns mean nothing."""
    inside = (exclude >= 0) & (exclude < scores.shape[1])
    lowered = torch.where(inside, -torch.inf, torch.inf).to(scores.dtype)  # a minimum ignores +inf
    scores.scatter_reduce_(1, exclude.masked_fill(~inside, 0), lowered, "amin")


def block_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``topk`` with ties ordered by index.

    If the last place of a row is tied, a full sort of the row decides on a CPU. On other devices every row is searched
    for the smallest indices of its last score, so that nothing waits for the answer which rows are tied.
    """
    if scores.shape[1] <= k:
        return scores.sort(dim=1, descending=True, stable=True)
    best, ids = scores.topk(k + 1, 1)
    tied = (best[:, k - 1] == best[:, k]) & (best[:, k] > -torch.inf)
    best, ids = best[:, :k], ids[:, :k]
    ids = ties_to_smaller_id(best, ids, scores.shape[1])
    if scores.device.type != KNOWN_AT_ONCE:
        return best, torch.where(tied[:, None], _smallest_of_last(scores, best, ids), ids)
    rows = tied.nonzero().squeeze(1)
    if len(rows):
        ids[rows] = scores[rows].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return best, ids


def _smallest_of_last(scores: Tensor, best: Tensor, ids: Tensor) -> Tensor:
    """``ids [B, k]`` of the ``best`` scores, with the smallest indices of those that have the last one's score."""
    count, k = scores.shape[1], best.shape[1]
    descending = torch.arange(count, 0, -1, device=scores.device, dtype=torch.int32)
    ascending = count - torch.where(scores == best[:, -1:], descending, 0).topk(k, 1).values.long()
    greater = (best > best[:, -1:]).sum(1, keepdim=True)
    place = torch.arange(k, device=scores.device) - greater
    return torch.where(place < 0, ids, ascending.gather(1, place.clamp_min(0)))


def ties_to_smaller_id(best: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """The ids of a list that is sorted by score, with the ids of equal scores in ascending order."""
    new_run = F.pad(best[:, 1:] != best[:, :-1], (1, 0))
    # one integer sort, because ONNX has no stable sort
    return (new_run.long().cumsum(1) * num_rows + ids).sort(1).values % num_rows


def score_blocks(states: Tensor, table: Tensor, padding_rows: int = 1) -> list[slice]:
    """The item rows of a table, in blocks that bound the size of the scores for all ``states [B, d]``."""
    bound = SCORE_BYTES if states.device.type == KNOWN_AT_ONCE else SCORE_BYTES_ACCELERATOR
    return list(column_blocks(len(table), padding_rows, max(1024, bound // (4 * max(1, len(states))))))


#: Number format of an item matrix.
Precision = Literal["float32", "float16", "int8"]

BLOCK_ROWS: Final = 16_384
"""Maximum rows in a block. At d = 64, the rows and the scores of 32 users stay in the caches of one core."""

GROUP_ROWS: Final = 16
"""Rows in a group, of which the search first keeps only the largest score."""

_LARGEST_INT8: Final = 127


class BlockedTable(nn.Module):
    """Vectors of the items 1..V in blocks of equal size. Row 0 and the rows after V are not items.

    With int8, row i is ``columns * scales_i * values_i``. Every column is first divided by its root mean square, so
    that columns of different magnitude (vectors next to the factors of a tilted policy) lose equal relative precision.

    Args:
        vectors: ``[V + 1, d]``; row 0 is not an item.
        precision: number format; float16 and int8 round.
        variance_columns: see ``recpo.policies.catalog_search.scores_of``.
        block_rows: maximum rows in a block, at least 2; rounded up to whole groups.

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

    def __init__(
        self, vectors: Tensor, precision: Precision = "float32", variance_columns: int = 0, block_rows: int = BLOCK_ROWS
    ) -> None:
        super().__init__()
        validate_precision(precision)
        size, dim = vectors.shape
        blocks = -(-size // block_rows)
        self.group = min(GROUP_ROWS, -(-size // blocks))
        self.rows = -(-size // (blocks * self.group)) * self.group
        self.num_items, self.variance_columns, self.precision = size - 1, variance_columns, precision
        self.written_out = False
        padded = F.pad(vectors.detach().float(), (0, 0, 0, blocks * self.rows - size))
        columns, scales = torch.ones(dim), torch.ones(len(padded))
        if precision == "int8":
            columns, scales, padded = _rounded(padded)
        elif precision == "float16":
            padded = padded.half()
            if not padded.isfinite().all():
                raise RecpoError(
                    "item_precision float16 holds numbers up to 65,504, the item vectors are larger",
                    code="out_of_range",
                    field="item_precision",
                )
        place = torch.arange(len(padded))
        bias = torch.where((place > 0) & (place < size), 0.0, -torch.inf)
        self.register_buffer("values", padded.view(blocks, self.rows, dim))
        self.register_buffer("scales", scales.view(blocks, self.rows))
        self.register_buffer("columns", columns)
        self.register_buffer("bias", bias.view(blocks, self.rows))

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
        maxima, lse = self._pass(states, allowed)
        groups, inside = _largest(maxima, k + exclude.shape[1])
        ids = (groups[:, :, None] * self.group + torch.arange(self.group)).flatten(1)
        listed = inside[:, :, None].expand(-1, -1, self.group).flatten(1)
        if allowed is not None:
            padded = F.pad(allowed, (0, self.bias.numel() - allowed.shape[1]))
            listed = listed & padded.gather(1, ids)
        scores = torch.where(listed, self._candidate_scores(states, groups), -torch.inf)
        best, place = self._without(scores, groups, exclude).topk(k, 1)
        ids = ties_to_smaller_id(best, ids.gather(1, place), self.bias.numel())
        return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - lse[:, None])

    def _pass(self, states: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The largest score ``[B, N]`` of every group, of rows that may be listed; and the log-sum-exp ``[B]``."""
        blocks: tuple[Tensor, ...] = (self.values, self.scales, self.bias)
        if allowed is not None:
            users, (parts, rows) = allowed.shape[0], self.bias.shape
            padded = F.pad(allowed, (0, parts * rows - allowed.shape[1]))
            blocks = (*blocks, padded.view(users, parts, rows).transpose(0, 1))
        lse = states.new_full((states.shape[0],), -torch.inf)

        def step(lse: Tensor, block: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            scores = self._scores(states, *block[:3])
            maxima = self._of_groups(scores)
            lse = torch.logaddexp(lse, _block_log_sum_exp(scores, maxima))
            if len(block) > 3:
                maxima = self._of_groups(torch.where(block[3], scores, -torch.inf))
            return lse, maxima

        if torch.compiler.is_exporting() and not self.written_out:
            lse, found = scan(step, lse, blocks)
        else:
            parts_ = []
            for block in zip(*blocks, strict=True):
                lse, maxima = step(lse, block)
                parts_.append(maxima)
            found = torch.stack(parts_)
        return found.transpose(0, 1).flatten(1), lse

    def _of_groups(self, scores: Tensor) -> Tensor:
        """The largest score ``[B, R / G]`` of every group."""
        return scores.view(scores.shape[0], -1, self.group).amax(2)

    def _candidate_scores(self, states: Tensor, groups: Tensor) -> Tensor:
        """Scores ``[B, n G]`` of the rows of the groups ``[B, n]``, each in the order of its rows."""
        dim = self.values.shape[2]
        users = groups.shape[0]
        values, scales, bias = (  # whole groups end to end: runtimes copy them at once
            part.view(-1, self.group * width).index_select(0, groups.flatten()).view(users, -1, width)
            for part, width in ((self.values, dim), (self.scales, 1), (self.bias, 1))
        )
        rows, states = values.float(), states[..., None]
        return self._combined(
            lambda part: (rows[:, :, part] @ states[:, part]).squeeze(2), scales.squeeze(2), bias.squeeze(2)
        )

    def _without(self, scores: Tensor, groups: Tensor, exclude: Tensor) -> Tensor:
        """Scores ``[B, n G]`` of the rows of the groups ``[B, n]``, -inf where an item is excluded."""
        same = groups[:, None, :] == (exclude // self.group)[:, :, None]
        place = same.long().argmax(2) * self.group + exclude % self.group
        # an id of no group writes +inf, which a minimum ignores
        barred = torch.where(same.any(2), -torch.inf, torch.inf).to(scores.dtype)
        return scores.scatter_reduce(1, place, barred, "amin")

    def _scores(self, states: Tensor, values: Tensor, scales: Tensor, bias: Tensor) -> Tensor:
        """Scores ``[B, R]`` of one block; -inf for rows that are not items."""
        rows = values.float()
        if not self.variance_columns and self.precision != "int8":
            return F.linear(states, rows, bias)
        return self._combined(lambda part: F.linear(states[:, part], rows[:, part]), scales, bias)

    def _combined(self, products: Callable[[slice], Tensor], scales: Tensor, bias: Tensor) -> Tensor:
        """``scores_of`` from the products of states and rows over some columns, plus the bias."""
        own = self.values.shape[2] - self.variance_columns
        scores = products(slice(own))
        scores = scores * scales if self.precision == "int8" else scores
        if self.variance_columns:
            variance = products(slice(own, None))
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


def _largest(maxima: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The ``number`` groups of largest maxima ``[B, N]``, in the order of their rows, and which of them there are.

    An item that is not in them is behind the first item of each of them, by score and then by id: so the best items
    without ``M`` excluded ones are in ``k + M`` groups.
    """
    groups = F.pad(maxima, (0, number), value=-torch.inf).topk(number, 1).indices.sort(1).values
    return groups.clamp_max(maxima.shape[1] - 1), groups < maxima.shape[1]


def _block_log_sum_exp(scores: Tensor, maxima: Tensor) -> Tensor:
    """Log-sum-exp ``[B]`` of scores ``[B, R]`` whose groups have these maxima, in operators that runtimes vectorize."""
    largest = maxima.amax(1).clamp_min(torch.finfo(scores.dtype).min)  # a block of no items has -inf alone
    return (scores - largest[:, None]).exp().sum(1).log() + largest


def validate_list_length(k: int, num_items: int) -> None:
    """Raises ``RecpoError`` unless lists of ``k`` items can be made of the catalog."""
    validate_range(1 <= k <= num_items, "k", f"must be between 1 and the {num_items} items of the catalog", k)


def validate_precision(precision: object) -> None:
    """Raises ``RecpoError`` if the precision is unknown."""
    if precision not in get_args(Precision):
        raise RecpoError(
            f"item_precision is {precision!r}, expected one of: {', '.join(get_args(Precision))}",
            code="unknown_name",
            field="item_precision",
        )


def _rounded(vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns ``[d]``, scales ``[N]`` and int8 values ``[N, d]`` whose product is closest to the vectors."""
    columns = vectors.square().mean(0).sqrt()
    columns = torch.where(columns > 0, columns, 1.0)
    equalized = vectors / columns
    scales = equalized.abs().amax(1) / _LARGEST_INT8
    scales = torch.where(scales > 0, scales, 1.0)
    return columns, scales, (equalized / scales[:, None]).round().to(torch.int8)
