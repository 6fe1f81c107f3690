"""Agreement of two rankings of the same users: shared items, the order at the top, and the order of the shared items.

All functions take two lists of item ids ``[B, K]`` each, best first, items distinct, 0 in empty places at the end, with
the same numbering. Two empty lists agree fully; an empty list and another one do not agree at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.ops.ranking import is_member

_CELLS_AT_ONCE = 1 << 22  # users x places x places


def agreement(ours: Tensor, theirs: Tensor, k: int, persistence: float) -> dict[str, Tensor]:
    """All measures by name, ``[B]`` float64 each. Memory is bounded for any number of users.

    Args:
        ours: ``[B, K]``.
        theirs: ``[B, K]``.
        k: number of places to compare.
        persistence: parameter of ``rank_biased_overlap``.
    """
    at_once = max(1, _CELLS_AT_ONCE // (k * k))
    parts = [
        {
            f"overlap@{k}": overlap(one, other),
            f"rank_biased_overlap@{k}": rank_biased_overlap(one, other, persistence),
            f"kendall_tau@{k}": kendall_tau(one, other),
            f"equal_lists@{k}": (one == other).all(1).double(),
        }
        for one, other in zip(ours[:, :k].split(at_once), theirs[:, :k].split(at_once), strict=True)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def overlap(ours: Tensor, theirs: Tensor) -> Tensor:
    """Shared items over the length of the longer list, ``[B]``: ``|A & B| / max(|A|, |B|)``."""
    longest = torch.maximum(_lengths(ours), _lengths(theirs))
    shared = is_member(ours, theirs).sum(1)
    return torch.where(longest == 0, 1.0, shared.double() / longest.clamp_min(1))


def rank_biased_overlap(ours: Tensor, theirs: Tensor, persistence: float = 0.9) -> Tensor:
    """Rank-biased overlap, extrapolated beyond the end of the lists, ``[B]`` in [0, 1].

    For lists of lengths ``s <= l`` with ``X_d`` items in common among the first d of each::

        (1 - p) / p (sum_{d=1..l} X_d p^d / d + sum_{d=s+1..l} X_s (d - s) p^d / (s d))
            + ((X_l - X_s) / l + X_s / s) p^l

    This is the expected agreement for a reader who continues from one place to the next with probability p, if the
    agreement at the end of the lists continues beyond it (Webber, Moffat and Zobel, ACM TOIS 28(4), 2010, equation 32).

    Args:
        ours: ``[B, K]``.
        theirs: ``[B, K]``.
        persistence: p, in (0, 1); at 0.9 the first 10 places have 86 % of the weight.
    """
    same = _matches(ours, theirs)
    depth = torch.arange(1, ours.shape[1] + 1, device=ours.device)
    # an item is in both lists from the later of its two places on
    shared = (same.tril().sum(2) + same.triu(1).sum(1)).cumsum(1).double()
    one, other = _lengths(ours), _lengths(theirs)
    short, long = torch.minimum(one, other)[:, None], torch.maximum(one, other)[:, None]
    weight = torch.where(depth <= long, persistence ** depth.double(), 0.0)
    at_short, at_long = (shared.gather(1, (length - 1).clamp_min(0)) for length in (short, long))
    extended = at_short * (depth - short).clamp_min(0) / short.clamp_min(1)
    body = ((shared + extended) / depth * weight).sum(1, keepdim=True) * (1 - persistence) / persistence
    tail = (at_long - at_short) / long.clamp_min(1) + at_short / short.clamp_min(1)
    found = body + tail * persistence ** long.double()
    return torch.where(long == 0, 1.0, found)[:, 0]


def kendall_tau(ours: Tensor, theirs: Tensor) -> Tensor:
    """Kendall's tau of the order of the shared items, ``[B]`` in [-1, 1]; nan for fewer than two of them."""
    same = _matches(ours, theirs)
    shared, place = same.any(2), same.int().argmax(2)
    pairs = (shared[:, :, None] & shared[:, None, :]).triu(1)
    order = (place[:, None, :] - place[:, :, None]).sign()
    return (order * pairs).sum((1, 2)).double() / pairs.sum((1, 2))


def _lengths(lists: Tensor) -> Tensor:
    return (lists > 0).sum(1)


def _matches(ours: Tensor, theirs: Tensor) -> Tensor:
    """``[B, K, K]`` bool: place i of ours holds the item of place j of theirs."""
    return (ours[:, :, None] == theirs[:, None, :]) & (ours > 0)[:, :, None]
