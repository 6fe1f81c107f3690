"""The distribution of the labels of a period by duration of the item. Labels are the rewards of a policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from recpo.base.feedback import UNKNOWN_BUCKET
from recpo.log.prepared import Period, Prepared
from recpo.log.schema import Derived, LogColumns

_BINS = 10
_COLUMNS = (Derived.LABEL, LogColumns.DISLIKE, LogColumns.DURATION, Derived.IS_TARGET)
_KINDS = ("positive", "neutral", "negative", "unlabeled")
_LAST_BUCKET = 1000  # longer than any item
_GROUPS = _LAST_BUCKET - UNKNOWN_BUCKET + 1


def label_summary(data: Prepared, split: Period) -> list[dict[str, Any]]:
    """Counts the events of ``split``, shard by shard: all events, then by duration bucket.

    Args:
        data: the prepared directory.
        split: the period; context events in its shards are not counted.

    Returns:
        For each group its ``name``, such as ``8 to 16 s``, and ``events``; ``positive``, ``neutral`` (skipped ones
        included), ``negative`` (disliked) and ``unlabeled``, which sum to ``events``; ``histogram``: labels in 10 equal
        bins over [0, 1]. A bin includes its upper end, because the longest watch of a group has a label on it.
    """
    signs, bins = np.zeros((_GROUPS, 4), np.int64), np.zeros((_GROUPS, _BINS), np.int64)
    rule, base = data.feedback.rule, data.feedback.duration_base
    for shard in range(data.num_shards(split)):
        label, disliked, duration, is_target = data.columns(split, shard, _COLUMNS).values()
        label, disliked, duration = (column[is_target] for column in (label, disliked, duration))
        group = np.minimum(data.feedback.buckets(duration), _LAST_BUCKET) - UNKNOWN_BUCKET
        kind = np.select([disliked, rule.unknown(label, disliked), rule.positive(label, disliked)], [2, 3, 0], 1)
        signs += np.bincount(group * 4 + kind, minlength=_GROUPS * 4).reshape(_GROUPS, 4)
        known = ~np.isnan(label)
        place = np.clip(np.ceil(label[known] * _BINS - 1e-4).astype(np.int64) - 1, 0, _BINS - 1)
        bins += np.bincount(group[known] * _BINS + place, minlength=_GROUPS * _BINS).reshape(_GROUPS, _BINS)
    found = np.flatnonzero(signs.sum(1))
    rows = [_row("all", signs.sum(0), bins.sum(0))]
    if len(found) > 1:
        rows += [_row(_name(int(group) + UNKNOWN_BUCKET, base), signs[group], bins[group]) for group in found]
    return rows


def _name(bucket: int, base: float) -> str:
    return "unknown" if bucket == UNKNOWN_BUCKET else f"{base**bucket:.4g} to {base ** (bucket + 1):.4g} s"


def _row(name: str, signs: np.ndarray, bins: np.ndarray) -> dict[str, Any]:
    kinds = dict(zip(_KINDS, signs.tolist(), strict=True))
    return {"name": name, "events": int(signs.sum()), **kinds, "histogram": bins.tolist()}
