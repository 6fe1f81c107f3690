"""What the codes are worth: how they use the codebooks, what they keep of the vectors, who had to move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recpo.tokenizer.codebooks import Codebooks, subtract
from recpo.tokenizer.unique import tuple_ids

#: From this share of moved items on, codes say little about their items.
MANY_MOVED = 0.1


def level_statistics(codes: Tensor, codebook_sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Of every level of ``codes [V, T]``, how its codes are distributed over the items.

    ``codebook_size`` K; ``utilization``, the share of the K codes with at least one item; ``entropy``
    ``H = -sum p log p`` in nats; ``perplexity`` ``exp(H)``, at most K, the number of codes in equal use that has the
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
    """Mean squared error after 1, 2, .. T levels, divided by the variance of the points (1 = the mean says as much).

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
    """What uniqueness cost.

    Args:
        before: ``[V, T]``, codes that items may share.
        after: ``[V, T]`` or ``[V, T + 1]`` with an extra code, unique.
        movable: how many of the items could move at all.

    Returns:
        ``movable``; ``collisions`` items beyond the first of their tuple; ``sharing`` items that shared a tuple, and
        ``largest_tuple`` how many at most; ``largest_prefix`` the most items with one prefix of T - 1 codes;
        ``moved`` and ``prefix_changed`` items whose T codes, or first T - 1 codes, are others now; ``moved_share`` of
        the movable ones.
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
