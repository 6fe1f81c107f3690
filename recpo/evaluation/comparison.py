"""Two bundles on the same logged requests: agreement of their lists, the document, and the limits for a swap.

The functions of agreement take two rankings of the same users, two lists of item ids ``[B, K]`` each, best first, items
distinct, 0 in empty places at the end, with the same numbering. Two empty lists agree fully; an empty list and another
one do not agree at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from recpo import __version__
from recpo.artifacts.artifact import Artifact
from recpo.evaluation.estimates import as_json, estimate
from recpo.evaluation.reading import Document, ends_of, off_policy_of
from recpo.ops.ranking import is_member

OLD, NEW = "old", "new"

_GATED_ESTIMATOR = "SNIPS"
_RANKING = ("NDCG", "Recall", "HitRate", "MRR", "disliked")


@dataclass(frozen=True)
class Comparison(Artifact):
    """The comparison of two bundles on the same logged requests.

    Attributes:
        document: every number, as in ``compare.json``; see ``compare``.
        path: the directory; None = the comparison is in memory only.
    """

    kind: ClassVar = "comparison"
    version: ClassVar = 3
    made_by: ClassVar = "recpo compare"

    document: Document
    path: Path | None = None

    @classmethod
    def _read(cls, root: Path) -> Self:
        return cls(cls.facts_of(root), root)

    @property
    def failures(self) -> list[str]:
        """Why the new bundle should not replace the old one, one sentence per violated limit; empty = it passes."""
        return list(self.document["gate"]["failures"])

    @property
    def warnings(self) -> list[str]:
        """Warnings to read before the numbers."""
        return list(self.document["warnings"])


def comparison_document(evaluated: Document, k: int, agreed: Mapping[str, Tensor]) -> Document:
    """The parts of the document that come from the evaluation of both bundles and from the ``agreement`` of lists."""
    by_name = {one["name"]: one for one in evaluated["contenders"]}
    sides = {OLD: by_name[OLD], NEW: by_name[NEW]}
    (pair,) = (one for one in evaluated["differences"] if (one["contender"], one["against"]) == (NEW, OLD))
    further = evaluated["setting"]["further_metrics"]
    ranking = {
        metric: {
            **{name: side["metrics"][metric] for name, side in sides.items()},
            "difference": {key: pair["metrics"][metric][key] for key in ("mean", "half_width", "n")},
        }
        for metric in (*(f"{name}@{k}" for name in _RANKING), *(own for own in further if own in pair["metrics"]))
    }
    totals = (f"coverage@{k}", f"gini@{k}", *(own for own in further if own in sides[OLD]["totals"]))
    setting = {name: evaluated["setting"][name] for name in ("split", "positive_threshold", "num_items")}
    setting |= {"prepared": evaluated["provenance"]["data"]["prepared"], "k": k}
    return {
        "recpo_version": __version__,
        "setting": setting | {"requests": sides[OLD]["counts"]["users"]},
        "agreement": as_json({name: estimate(values) for name, values in agreed.items()}),
        "lists": {name: {total: side["totals"][total] for total in totals} for name, side in sides.items()},
        "ranking": ranking,
        "value": _value(sides, pair, f"top_{k}"),
        "warnings": list(evaluated["warnings"]),
    }


def _value(sides: Mapping[str, Document], pair: Document, target: str) -> Document | None:
    """Estimates of the lists' value with bootstrap intervals, by estimator; None if there are none."""
    found = {**{name: off_policy_of(side) for name, side in sides.items()}, "difference": off_policy_of(pair)}
    nothing = {"value": None, "intervals": {"bootstrap": {"low": None, "high": None}}}
    estimators = [estimator for of, estimator in found[OLD] if of == target]
    return {
        estimator: {name: _ends(of.get((target, estimator), nothing)) for name, of in found.items()}
        for estimator in estimators
    } or None


def _ends(entry: Document) -> Document:
    return {"value": entry["value"], **entry["intervals"]["bootstrap"]}


def gate(document: Document, k: int, max_loss: float | None, min_overlap: float | None) -> Document:
    """The limits, the measured numbers, and one sentence per violated limit. An unknown number violates its limit."""
    if document["value"] is None:
        measure = f"NDCG@{k}"
        found = document["ranking"][measure]["difference"]
        low, high = ends_of(found["mean"], found["half_width"])
    else:
        measure, found = f"{_GATED_ESTIMATOR} of top_{k}", document["value"][_GATED_ESTIMATOR]["difference"]
        low, high = found["low"], found["high"]
    overlap = document["agreement"][f"overlap@{k}"]["mean"]
    failures = []
    if max_loss is not None and low is None:
        failures.append(f"{measure} of new - old has no interval, so a loss above {max_loss:g} cannot be ruled out")
    elif max_loss is not None and low is not None and low < -max_loss:
        failures.append(
            f"{measure}: new - old lies between {low:+.4g} and {high:+.4g}, a loss of more than {max_loss:g} cannot be "
            "ruled out"
        )
    if min_overlap is not None and not overlap >= min_overlap:
        failures.append(
            f"the lists share {overlap:.3f} of their items (overlap@{k}), expected at least {min_overlap:g}"
        )
    limits = {"max_loss": max_loss, "min_overlap": min_overlap}
    return limits | {"measure": measure, "lower_end": low, "overlap": overlap, "failures": failures}


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
