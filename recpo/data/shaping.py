"""Preference labels in [0, 1] out of watch times, as Ibis expressions: ``label`` of the prepared shards.

Every label has the interface of ``Label``. Whatever is fitted counts events of the train period alone, so no label
depends on what happens later. An event whose label cannot be known is neutral: null here, nan in the shards,
advantage 0 in training. Watch times are compared in whole milliseconds, which makes every quantile exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import ibis
import ibis.expr.types as ir

from recpo.data.events import bucket
from recpo.data.schema import TRAIN, Derived, LogColumns
from recpo.errors import RecpoError

DEFAULT_DURATION_BASE: Final = 2.0

_WTG_RESOLUTION: Final = 1e6


class Label(ABC):
    """Turns events into a preference label; implementations are frozen dataclasses.

    Attributes:
        needs: standard columns that the log must have.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def add(self, events: ir.Table) -> ir.Table:
        """Adds ``label``: float64 in [0, 1], null = neutral.

        Args:
            events: standard events with ``user_index`` and ``period``.
        """

    def refuses(self, label: ir.FloatingColumn) -> ir.BooleanColumn | None:
        """Where the log's ``label`` has a value that this method cannot read; None = it reads any number."""
        return None

    @property
    def duration_base(self) -> float:
        """Base of the duration buckets that go with this label."""
        return DEFAULT_DURATION_BASE


@dataclass(frozen=True)
class WatchQuantiles(Label):
    """Share of the user's own train watch times on items of like duration that are no longer than this one.

    ``q_i = |{p in P: p <= p_i}| / |P|``, ``P`` = the same user's watch times of the train period in the duration
    bucket ``floor(log_base(d + 1e-6))``, ``d`` in seconds (OneRec-V2, arXiv 2508.20900, section 3.1; a train event is
    itself in ``P``). The paper is silent on thin histories: with ``|P| < min_history`` the same share among all users'
    train watch times of that bucket is taken, and where those are fewer than ``min_history`` as well the event is
    neutral. A missing, zero or negative duration or a missing watch time makes the event neutral.

    Args:
        base: base of the duration buckets.
        min_history: least number of watch times for a quantile.
    """

    base: float = DEFAULT_DURATION_BASE
    min_history: int = 5

    needs: ClassVar[tuple[str, ...]] = (LogColumns.WATCH_TIME, LogColumns.DURATION)

    def __post_init__(self) -> None:
        _check_base(self.base)
        if self.min_history < 1:
            raise RecpoError(f"label WatchQuantiles: min_history {self.min_history} must be at least 1")

    @property
    def duration_base(self) -> float:
        """Base of the duration buckets."""
        return self.base

    def add(self, events: ir.Table) -> ir.Table:
        """The user's share, or the bucket's where the user has too few watch times, or null."""
        keyed = events.mutate(bucket=bucket(events, self.base))
        table = watch_counts(keyed, ["bucket"])
        table = table.select(
            "bucket", Derived.WATCH_MS, share_of_all=table.at_most / table.total, total_of_all=table.total
        )
        keyed = keyed.left_join(table, ["bucket", Derived.WATCH_MS])
        own = [Derived.USER_INDEX, "bucket"]
        up_to = ibis.range_window(group_by=own, order_by=Derived.WATCH_MS, preceding=None, following=0)
        fitted = _is_fitted(keyed)
        keyed = keyed.mutate(
            own_at_most=fitted.sum().over(up_to).cast("float64"),
            # With the same order as above one sort serves both sums.
            own_total=fitted.sum().over(group_by=own, order_by=Derived.WATCH_MS, rows=(None, None)).cast("float64"),
        )
        quantile = ibis.cases(
            (keyed[Derived.WATCH_MS].isnull() | keyed.bucket.isnull(), ibis.null("float64")),
            (keyed.own_total >= self.min_history, keyed.own_at_most / keyed.own_total),
            (keyed.total_of_all >= self.min_history, keyed.share_of_all),
            else_=ibis.null("float64"),
        )
        return _with_label(events, keyed, quantile)


@dataclass(frozen=True)
class WatchRatio(Label):
    """Watched share of the item, ``min(watch_time / (cap * duration), 1)``.

    Args:
        cap: watch ratio that counts as 1; watching an item twice is a ratio of 2.
    """

    cap: float = 1.0

    needs: ClassVar[tuple[str, ...]] = (LogColumns.WATCH_TIME, LogColumns.DURATION)

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise RecpoError(f"label WatchRatio: cap {self.cap} must be positive")

    def add(self, events: ir.Table) -> ir.Table:
        """Nothing is fitted."""
        ratio = events[Derived.WATCH_MS].cast("float64") / (events[Derived.DURATION_MS].cast("float64") * self.cap)
        return _with_label(events, events, ibis.ifelse(ratio > 1.0, 1.0, ratio))


@dataclass(frozen=True)
class D2Q(Label):
    """Share of all users' train watch times in the item's duration group that are no longer than this one.

    Duration-deconfounded quantile (Zhan et al., KDD 2022, arXiv 2206.06003): items are divided by duration into
    ``groups`` groups of equally many train events, and the label is the empirical distribution function of the watch
    time in the group. Events of one duration are never separated, so groups may differ in size where durations repeat.

    Args:
        groups: number of duration groups.
        min_history: least number of train watch times in a group; events of thinner groups are neutral.
    """

    groups: int = 30
    min_history: int = 5

    needs: ClassVar[tuple[str, ...]] = (LogColumns.WATCH_TIME, LogColumns.DURATION)

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise RecpoError(f"label D2Q: groups {self.groups} must be at least 1")

    def add(self, events: ir.Table) -> ir.Table:
        """Groups are the quantiles of the train durations; a later, unknown duration falls where it would stand."""
        durations = _train_counts(events, [Derived.DURATION_MS])
        in_order = ibis.cumulative_window(order_by=Derived.DURATION_MS)
        below = durations["count"].sum().over(in_order).cast("int64") - durations["count"]
        total = durations["count"].sum().over(ibis.window()).cast("int64")
        place = (below * self.groups // total).cast("int32")
        groups = durations.filter(durations["count"].sum().over(ibis.window()) > 0).select(
            Derived.DURATION_MS, group=ibis.ifelse(place >= self.groups, self.groups - 1, place)
        )
        keyed = events.left_join(groups, Derived.DURATION_MS).drop(f"{Derived.DURATION_MS}_right")
        return _share_within(events, keyed, "group", Derived.WATCH_MS, self.min_history)


@dataclass(frozen=True)
class WatchTimeGain(Label):
    """Rank of the watch-time gain ``(w - mean) / std`` among all train events.

    Watch-time gain (WTG) of DVR, Zheng et al., ACM MM 2022, arXiv 2208.05190: the watch time standardized within items
    of like duration. The mean and the standard deviation (of the population) are those of all users' train watch times
    in the duration bucket. Departure from the paper: buckets are those of ``WatchQuantiles``, and the gain, which has
    no bounds, becomes the share of train gains that are no larger, to a resolution of one millionth of a deviation.

    Args:
        base: base of the duration buckets.
        min_history: least number of train watch times in a bucket; events of thinner buckets are neutral.
    """

    base: float = DEFAULT_DURATION_BASE
    min_history: int = 5

    needs: ClassVar[tuple[str, ...]] = (LogColumns.WATCH_TIME, LogColumns.DURATION)

    def __post_init__(self) -> None:
        _check_base(self.base)

    @property
    def duration_base(self) -> float:
        """Base of the duration buckets."""
        return self.base

    def add(self, events: ir.Table) -> ir.Table:
        """Moments are summed as whole numbers, so that they do not depend on the order of summation."""
        keyed = events.mutate(bucket=bucket(events, self.base))
        fitted = keyed.filter(_is_fitted(keyed) == 1, keyed.bucket.notnull())
        exact = fitted[Derived.WATCH_MS].cast("decimal(38, 0)")
        sums = fitted.group_by("bucket").aggregate(n=fitted.count(), one=exact.sum(), two=(exact * exact).sum())
        n, one, two = (sums[name].cast("float64") for name in ("n", "one", "two"))
        variance = two / n - (one / n) * (one / n)
        moments = sums.filter(sums.n >= self.min_history).select("bucket", mean=one / n, variance=variance)
        keyed = keyed.left_join(moments, "bucket").drop("bucket_right")
        gain = (keyed[Derived.WATCH_MS] - keyed["mean"]) / ibis.ifelse(
            keyed["variance"] > 0, keyed["variance"], 1.0
        ).sqrt()
        gain = ibis.ifelse(keyed["mean"].isnull(), ibis.null("float64"), gain)
        keyed = keyed.mutate(gain=(gain * _WTG_RESOLUTION).round().cast("int64"), everyone=ibis.literal(0, "int8"))
        return _share_within(events, keyed, "everyone", "gain", 1)


def watch_counts(keyed: ir.Table, by: Sequence[str], value: str = Derived.WATCH_MS) -> ir.Table:
    """Train events per group and value, and how many of the group have at most that value.

    Args:
        keyed: events with the columns ``by`` and ``value``.
        by: columns of the group.
        value: column of whole numbers.

    Returns:
        ``by``, ``value``, ``count``, ``at_most``, ``total`` (int64); values of later events alone have count 0.
    """
    counts = _train_counts(keyed, [*by, value])
    count = counts["count"]
    return counts.mutate(
        at_most=count.sum().over(ibis.cumulative_window(group_by=by, order_by=value)).cast("int64"),
        total=count.sum().over(group_by=by).cast("int64"),
    )


def _train_counts(events: ir.Table, keys: Sequence[str]) -> ir.Table:
    known = events.filter(*[events[key].notnull() for key in keys])
    return known.group_by(list(keys)).aggregate(count=_is_fitted(known).sum().cast("int64"))


def _is_fitted(events: ir.Table) -> ir.IntegerColumn:
    return ((events[Derived.PERIOD] == TRAIN) & events[Derived.WATCH_MS].notnull()).cast("int64")


def _share_within(events: ir.Table, keyed: ir.Table, group: str, value: str, min_history: int) -> ir.Table:
    table = watch_counts(keyed, [group], value)
    table = table.filter(table.total >= max(1, min_history))
    table = table.select(group, value, share=table.at_most / table.total)
    joined = keyed.left_join(table, [group, value])
    quantile = ibis.ifelse(joined[Derived.WATCH_MS].notnull(), joined.share, ibis.null("float64"))
    return _with_label(events, joined, quantile)


def _with_label(events: ir.Table, computed: ir.Table, label: ir.FloatingColumn) -> ir.Table:
    return computed.select(*[computed[name] for name in events.columns], label.name(Derived.LABEL))


def _check_base(base: float) -> None:
    if not base > 1:
        raise RecpoError(f"label: base {base} of the duration buckets must be greater than 1")
