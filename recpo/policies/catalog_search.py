"""Search in a softmax over the catalog, scored in blocks of items."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.types import Recommendations
from recpo.ops.kernels import column_blocks, matmul_transposed

# Bytes of the scores of one block of items for the full batch. Larger catalogs are searched block by block.
SCORE_BYTES = 64 << 20


def scores_of(
    states: Tensor, table: Tensor, rooted: int = 0, multiply: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """Scores ``[B, V]`` of all rows of a table: ``states · row``, optionally minus the root of a second product.

    The second form is a lower confidence bound: the first columns give an estimate, the last ones its variance.

    Args:
        states: ``[B, d]``.
        table: ``[V, d]``.
        rooted: number of trailing columns that give the variance, which has no gradient; 0 = none.
        multiply: ``(left [B, d], right [V, d]) -> left rightᵀ``; None = without a gradient, and not for export.
    """
    multiply, table = multiply or matmul_transposed, table.float()
    if not rooted:
        return multiply(states, table)
    own = table.shape[1] - rooted
    variance = multiply(states[:, own:].detach(), table[:, own:].detach())
    return multiply(states[:, :own], table[:, :own]) - variance.clamp_min(0.0).sqrt()


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left rightᵀ`` with a gradient. Exported programs use it too."""
    return left @ right.T


def top_k(states: Tensor, table: Tensor, k: int, exclude: Tensor | None, rooted: int = 0) -> Recommendations:
    """The ``k`` best items by log-probability. Ties are ordered by item id.

    Args:
        states: ``[B, d]``, divided by the temperature.
        table: ``[V + 1, d]``; row 0 is padding and is never recommended.
        k: list length, at most V.
        exclude: ``[B, M]`` ids that are not recommended, padded with 0. They remain in the normalizer.
        rooted: see ``scores_of``.
    """
    if torch.compiler.is_exporting():
        return _top_k_of_one_block(states, table, k, exclude, rooted)
    ids, best, lse = best_by_blocks(states.detach(), table.detach(), k, exclude, rooted=rooted)
    return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - lse[:, None])


def _top_k_of_one_block(states: Tensor, table: Tensor, k: int, exclude: Tensor | None, rooted: int) -> Recommendations:
    """``top_k`` without data-dependent branches, for exported programs.

    The score matrix ``[B, V + 1]`` is the only tensor of its size. A runtime overwrites it twice: first the column of
    the padding item, then, after the normalizer is known, the excluded items. (Slicing off the padding before the
    normalizer kept a second matrix.) Ties for the last place go to the smaller id in ONNX, whose TopK guarantees this.
    """
    scores = scores_of(states, table, rooted, product)
    scores = scores.scatter(1, torch.zeros_like(scores[:, :1], dtype=torch.long), -torch.inf)
    lse = scores.logsumexp(1)
    if exclude is not None:
        scores = scores.scatter(1, exclude, -torch.inf)
    best, ids = scores.topk(k, 1)
    ids = ties_to_smaller_id(best, ids, scores.shape[1])
    return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - lse[:, None])


def best_by_blocks(
    states: Tensor, table: Tensor, k: int, exclude: Tensor | None, padding_rows: int = 1, rooted: int = 0
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
        scores = scores_of(states, table[rows], rooted)
        lse = torch.logaddexp(lse, scores.logsumexp(1))
        if exclude is not None:
            context, column = ((exclude >= rows.start) & (exclude < rows.stop)).nonzero(as_tuple=True)
            scores[context, exclude[context, column] - rows.start] = -torch.inf
        best_here, ids_here = _block_top_k(scores, k)
        # smaller ids come first and the sort is stable, so they win ties
        best, order = torch.cat([best, best_here], 1).sort(dim=1, descending=True, stable=True)
        ids = torch.cat([ids, ids_here + rows.start], 1).gather(1, order)[:, :k]
        best = best[:, :k]
    return ids, best, lse


def _block_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``topk`` with ties ordered by index. If the last place is tied, a full sort decides."""
    if scores.shape[1] <= k:
        return scores.sort(dim=1, descending=True, stable=True)
    best, ids = scores.topk(k + 1, 1)
    tied = ((best[:, k - 1] == best[:, k]) & (best[:, k] > -torch.inf)).nonzero().squeeze(1)
    best, ids = best[:, :k], ids[:, :k]
    ids = ties_to_smaller_id(best, ids, scores.shape[1])
    if len(tied):
        order = scores[tied].sort(dim=1, descending=True, stable=True).indices[:, :k]
        ids[tied] = order
    return best, ids


def ties_to_smaller_id(best: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """The ids of a list that is sorted by score, with the ids of equal scores in ascending order."""
    new_run = F.pad(best[:, 1:] != best[:, :-1], (1, 0))
    # one integer sort, because ONNX has no stable sort
    return (new_run.long().cumsum(1) * num_rows + ids).sort(1).values % num_rows


def score_blocks(states: Tensor, table: Tensor, padding_rows: int = 1) -> list[slice]:
    """The item rows of a table, in blocks that bound the size of the scores for all ``states [B, d]``."""
    return list(column_blocks(len(table), padding_rows, max(1024, SCORE_BYTES // (4 * max(1, len(states))))))
