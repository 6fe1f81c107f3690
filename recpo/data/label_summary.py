"""How the labels of a period are spread, by duration of the item: what a policy is rewarded with."""

from __future__ import annotations

from typing import Any

import numpy as np

from recpo.data.prepared import Period, Prepared
from recpo.data.schema import Derived, LogColumns

_BINS = 10
_COLUMNS = (Derived.LABEL, LogColumns.DISLIKE, LogColumns.DURATION, Derived.IS_TARGET)
_UNKNOWN, _LOWEST, _HIGHEST = -1001, -1000, 1000  # duration buckets; no duration is shorter or longer


def label_summary(data: Prepared, split: Period, threshold: float) -> list[dict[str, Any]]:
    """Counts of the events of ``split``, streamed shard by shard: all of them, then by duration bucket.

    Args:
        data: the prepared directory.
        split: the period; the earlier events that its shards carry as context are not counted.
        threshold: label from which an event that was not disliked is positive.

    Returns:
        For each group its ``name``, such as ``8 to 16 s``, and ``events``; ``positive``, ``neutral``, ``negative``
        (disliked) and ``unlabeled``, which sum to ``events``; ``histogram``: labels in 10 equal bins over [0, 1], each
        with its upper end, as shares of "no longer than this one" fall on it.
    """
    base = float(data.manifest["feedback"]["duration_base"])
    groups = _HIGHEST - _UNKNOWN + 1
    signs, bins = np.zeros((groups, 4), np.int64), np.zeros((groups, _BINS), np.int64)
    for shard in range(data.num_shards(split)):
        label, disliked, duration, is_target = data.columns(split, shard, _COLUMNS).values()
        label, disliked, duration = (column[is_target] for column in (label, disliked, duration))
        group = _bucket(duration, base) - _UNKNOWN
        kind = np.select([disliked, np.isnan(label), label >= threshold], [2, 3, 0], 1)
        signs += np.bincount(group * 4 + kind, minlength=groups * 4).reshape(groups, 4)
        known = ~np.isnan(label)
        place = np.clip(np.ceil(label[known] * _BINS - 1e-4).astype(np.int64) - 1, 0, _BINS - 1)
        bins += np.bincount(group[known] * _BINS + place, minlength=groups * _BINS).reshape(groups, _BINS)
    found = np.flatnonzero(signs.sum(1))
    rows = [_row("all", signs.sum(0), bins.sum(0))]
    if len(found) > 1:
        rows += [_row(_name(int(group) + _UNKNOWN, base), signs[group], bins[group]) for group in found]
    return rows


def _bucket(duration: np.ndarray, base: float) -> np.ndarray:
    """``floor(log_base(duration + 1e-6))``, see ``recpo.data.events.bucket``."""
    known = duration > 0  # False for nan
    power = np.log(np.where(known, duration, 1.0).astype(np.float64) + 1e-6) / np.log(base)
    return np.where(known, np.clip(np.floor(power), _LOWEST, _HIGHEST), _UNKNOWN).astype(np.int64)


def _name(bucket: int, base: float) -> str:
    return "unknown" if bucket == _UNKNOWN else f"{base**bucket:.4g} to {base ** (bucket + 1):.4g} s"


def _row(name: str, signs: np.ndarray, bins: np.ndarray) -> dict[str, Any]:
    kinds = dict(zip(("positive", "neutral", "negative", "unlabeled"), signs.tolist(), strict=True))
    return {"name": name, "events": int(signs.sum()), **kinds, "histogram": bins.tolist()}
