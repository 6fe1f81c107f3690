"""Feedback levels: how an event went, as an input of the history encoder that a server can compute by itself.

Level 0 unknown, 1 disliked, 2..5 the quartile of the watch time among all users' train watch times of the same duration
bucket: ``2 + |{c in cutoffs of the bucket: watch_time > c}|``, compared in whole milliseconds. A cutoff is the smallest
watch time at or below which a quarter, half or three quarters of them lie. Without watch times or durations in the log
but with a label, level 2 is a label under 0.5 and level 5 any other.
"""

from __future__ import annotations

from typing import Final

import ibis
import ibis.expr.types as ir
import pyarrow as pa

from recpo.data.events import bucket
from recpo.data.schema import Derived, LogColumns
from recpo.data.shaping import watch_counts
from recpo.feedback import DISLIKED, HIGHEST, LOWEST, UNKNOWN, FeedbackDefinition, FeedbackRule

_CUTOFFS: Final = ("q25", "q50", "q75")


def quantile_table(events: ir.Table, base: float) -> ir.Table:
    """All users' train watch times: ``bucket``, ``watch_ms``, ``count``, ``quantile`` (share that is no longer)."""
    table = watch_counts(events.mutate(bucket=bucket(events, base)), ["bucket"])
    table = table.filter(table["count"] > 0)
    table = table.mutate(quantile=table.at_most / table.total)
    return table.select("bucket", Derived.WATCH_MS, "count", "quantile").order_by(["bucket", Derived.WATCH_MS])


def cutoff_table(quantiles: ir.Table) -> ir.Table:
    """Quartile cutoffs of each bucket: ``bucket``, ``q25``, ``q50``, ``q75`` in milliseconds."""
    watch = quantiles[Derived.WATCH_MS]
    cutoffs = {name: watch.min(where=quantiles.quantile >= quarter / 4) for quarter, name in enumerate(_CUTOFFS, 1)}
    return quantiles.group_by("bucket").aggregate(**cutoffs).order_by("bucket")


def add_feedback(events: ir.Table, cutoffs: ir.Table | None, base: float) -> ir.Table:
    """Adds ``feedback`` int8.

    Args:
        events: events with their label.
        cutoffs: from ``cutoff_table``; None where the log has no watch times or durations.
        base: base of the duration buckets.
    """
    disliked = events[LogColumns.DISLIKE]
    if cutoffs is None:
        label = events[Derived.LABEL]
        level = ibis.cases((disliked, DISLIKED), (label.isnull(), UNKNOWN), (label < 0.5, LOWEST), else_=HIGHEST)
        return events.mutate(**{Derived.FEEDBACK: level.cast("int8")})
    keyed = events.mutate(bucket=bucket(events, base)).left_join(cutoffs, "bucket")
    passed = sum(
        ((keyed[Derived.WATCH_MS] > keyed[name]).cast("int8") for name in _CUTOFFS), start=ibis.literal(LOWEST)
    )
    level = ibis.cases((keyed[LogColumns.DISLIKE], DISLIKED), else_=passed.fill_null(UNKNOWN))
    return keyed.select(*[keyed[name] for name in events.columns], level.cast("int8").name(Derived.FEEDBACK))


def definition(cutoffs: pa.Table, rule: FeedbackRule, base: float) -> FeedbackDefinition:
    """The rule with what was fitted: cutoffs in seconds."""
    low, middle, high = ((cutoffs[name].to_numpy() / 1000).tolist() for name in _CUTOFFS)
    fitted = zip(cutoffs["bucket"].to_pylist(), low, middle, high, strict=True)
    return FeedbackDefinition(rule, base, {bucket: (one, two, three) for bucket, one, two, three in fitted})
