"""The report on the codes of a catalog: use of the codebooks, error of the vectors, and collisions."""

from typing import Any

import torch
from torch import Tensor

from recpo.items.residual_kmeans import Codebooks, subtract
from recpo.items.unique_codes import tuple_ids

#: Above this share of moved items, codes carry little information about their items.
MANY_MOVED = 0.1


def level_statistics(codes: Tensor, codebook_sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Distribution of the codes over the items, for every level of ``codes [V, T]``.

    ``codebook_size`` K; ``utilization``, the share of the K codes with at least one item; ``entropy``
    ``H = -sum p log p`` in nats; ``perplexity`` ``exp(H)``, at most K, the number of equally frequent codes with the
    same entropy; ``largest``, the share p of the most frequent code.
    """
    levels = []
    for code, size in zip(codes.T, codebook_sizes, strict=True):
        share = torch.bincount(code, minlength=size).double() / len(codes)
        entropy = torch.special.entr(share).sum()
        levels.append(
            {
                "codebook_size": size,
                "utilization": float((share > 0).double().mean()),
                "entropy": float(entropy),
                "perplexity": float(entropy.exp()),
                "largest": float(share.max()),
            }
        )
    return levels


def reconstruction_errors(points: Tensor, codebooks: Codebooks, codes: Tensor) -> list[float]:
    """Mean squared error after 1, 2, .. T levels, divided by the variance of the points (1 = no better than the mean).

    Args:
        points: ``[n, d]`` normalized vectors.
        codebooks: T levels.
        codes: ``[n, T]``.
    """
    variance = float(torch.var(points, 0, correction=0).double().sum())
    residual, errors = points.clone(), []
    for centroids, code in zip(codebooks.centroids, codes.T, strict=True):
        subtract(residual, centroids, code)
        error = float(residual.square().sum(1).double().mean())
        errors.append(error / variance if variance > 0 else 0.0)
    return errors


def collision_statistics(before: Tensor, after: Tensor, movable: int) -> dict[str, Any]:
    """Items that shared a code tuple, and items that moved to make tuples unique.

    Args:
        before: ``[V, T]``, codes before tuples were made unique.
        after: ``[V, T]``, or ``[V, T + 1]`` with an extra code; unique.
        movable: number of items that may move.

    Returns:
        ``movable``; ``collisions``, items beyond the first of their tuple; ``sharing``, items that shared a tuple;
        ``largest_tuple``, the most items on one tuple; ``largest_prefix``, the most items with one prefix of T - 1
        codes; ``moved`` and ``prefix_changed``, items whose T codes, or first T - 1 codes, changed; ``moved_share``,
        the share of the movable items that moved.
    """
    levels = before.shape[1]
    together = torch.bincount(tuple_ids(before))
    prefixes = torch.bincount(tuple_ids(before[:, :-1])) if levels > 1 else torch.tensor([len(before)])
    changed = before != after[:, :levels]
    moved = int(changed.any(1).sum())
    return {
        "collisions": len(before) - len(together),
        "sharing": int(together[together > 1].sum()),
        "largest_tuple": int(together.max()),
        "largest_prefix": int(prefixes.max()),
        "movable": movable,
        "moved": moved,
        "moved_share": moved / max(1, movable),
        "prefix_changed": int(changed[:, : levels - 1].any(1).sum()),
    }
