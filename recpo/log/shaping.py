"""Labels in [0, 1] and the cutoffs of feedback levels, as Ibis expressions.

Every label implements ``Label``. Fitted values only use events of the train period, so no label depends on later
events. An event whose label cannot be determined is unlabeled: null here, nan in the shards. Watch times are compared
in integer milliseconds, which makes every quantile exact.

The share of watch times that an event reaches is a mid-rank: (number below + half of the number equal) / n. Counting
ties in full, as printed in the paper (``ties="full"``), moves ties up: in a log in which most items are skipped after
zero seconds, a skip would be no shorter than most watch times and would count as positive.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa

from recpo.base.errors import (
    ClosedUnitInterval,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    RecpoError,
    validate_range,
    validate_ranges,
)
from recpo.base.feedback import DEFAULT_DURATION_BASE, NUM_GRADES, UNKNOWN_BUCKET, FeedbackDefinition, FeedbackRule
from recpo.log.events import bucket, duration_power
from recpo.log.schema import TRAIN, Derived, LogColumns

Ties = Literal["mid", "full"]
"""How equal watch times count: by half, or in full."""

Cutoffs = dict[int, tuple[float, ...]]
"""Fifteen watch times in seconds by duration bucket."""

#: fatal: the log is rejected. impossible: the value is neutralized and counted, or fatal if strict. missing:
#: neutralized and counted.
Severity = Literal["fatal", "impossible", "missing"]

_WTG_RESOLUTION: Final = 1e6
_CUTOFFS: Final = tuple(f"q{step}" for step in range(1, NUM_GRADES))
_COMPARED: Final = "compared_ms"


class Label(ABC):
    """Turns events into a preference label; implementations are frozen dataclasses.

    Attributes:
        needs: standard columns that the log must have.
        reads_events_once: ``add`` refers to its events once, so that they need not be materialized for it.
        keeps_fitted: what it fits is kept, so that a directory with it can be extended.
        every_event: every event is positive, with or without a label.
        base: base of the duration buckets.
        duration_exponent: exponent with which watch times grow with the duration inside a bucket, see ``compared_ms``.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    reads_events_once: ClassVar[bool] = False
    keeps_fitted: ClassVar[bool] = True
    every_event: ClassVar[bool] = False
    base: float = DEFAULT_DURATION_BASE
    duration_exponent: float = 0.0

    def __post_init__(self) -> None:
        validate_ranges(self)
        validate_range(self.base > 1, "base", "of the duration buckets must be greater than 1", self.base)

    def bucket(self, events: ir.Table) -> ir.IntegerColumn:
        """The duration bucket of events; null if the duration is unknown."""
        return bucket(events, self.base)

    @abstractmethod
    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """Adds ``label``: float64 in [0, 1], null = unknown.

        Args:
            events: standard events with ``user_index`` and ``period``.
            counts: their ``bucket_counts`` by this label; in an extension, those of the users before.
        """

    def cutoffs(self, quantiles: Cutoffs, rule: FeedbackRule) -> Cutoffs:
        """Cutoffs of the feedback levels of every duration bucket; by default the quantiles of its watch times.

        Args:
            quantiles: the 1/16, 2/16, ..., 15/16 quantiles of the compared watch times in seconds, by bucket.
            rule: which labels are positive and skipped.
        """
        return quantiles

    def check(self, value: ir.FloatingColumn) -> tuple[str, Severity, str, ir.BooleanColumn] | None:
        """Problem, severity, remedy and offending rows of values in the log's ``label``; None = it reads any number."""
        return None


@dataclass(frozen=True)
class WatchQuantiles(Label):
    """Rank of the watch time among the user's own train watch times on items of similar duration.

    ``q_i = (|{p in P: p < p_i}| + |{p in P: p = p_i}| / 2) / |P|``, where ``P`` is the same user's watch times of the
    train period in the duration bucket ``floor(log_base(d + 1e-6))``, ``d`` in seconds (OneRec-V2, arXiv 2508.20900,
    section 3.1; a train event is itself in ``P``). A watch time of zero seconds has 0. With ``ties="full"`` the label
    is as printed in the paper, ``q_i = |{p in P: p <= p_i}| / |P|``.

    The paper does not cover short histories. If ``|P| < min_history``, the rank among all users' train watch times of
    that bucket is used. If these are fewer than ``min_history`` as well, the event has no label. It also has no label
    if the duration is missing, zero or negative, or if the watch time is missing.

    A rank among few watch times is mostly noise. With ``smoothing`` m above 0, m watch times of everybody stand beside
    the user's own: ``(|P| q + m q_all) / (|P| + m)``, where ``q_all`` is the rank among all users' train watch times of
    the bucket. That is the posterior mean of the user's distribution under a Dirichlet process with concentration m
    around everybody's (Ferguson, Annals of Statistics 1973). They count toward ``min_history`` as well.

    Inside a bucket the longer items are still watched longer, so an item would be liked for its length. With
    ``duration_exponent`` e above 0, the ranks compare ``p (c / d)^e`` instead of ``p``, with ``c`` the middle of the
    bucket: the watch times as they would be at one duration. 1 compares watched shares. ``recpo init`` estimates the
    exponent from the log (``estimated_duration_exponent``).

    Sessions, live streams and pages have no duration. With ``by_duration=False`` the ranks are those among all watch
    times of the user.

    Args:
        base: base of the duration buckets.
        min_history: minimum number of watch times for a quantile.
        ties: how equal watch times count: by half (mid), or in full (full).
        smoothing: how many watch times of everybody stand beside the user's own; 0 = none, as in the paper.
        duration_exponent: exponent with which watch times grow with the duration inside a bucket; 0 = the watch times
            themselves are compared, as in the paper.
        by_duration: compare the watch times on items of similar duration; false = all watch times.
    """

    base: float = DEFAULT_DURATION_BASE
    min_history: PositiveInt = 5
    ties: Ties = "mid"
    smoothing: NonNegativeFloat = 0.0
    duration_exponent: ClosedUnitInterval = 0.0
    by_duration: bool = True

    reads_events_once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "must be 0 where durations are not read (by_duration false)"
        validate_range(
            self.by_duration or not self.duration_exponent, "duration_exponent", rule, self.duration_exponent
        )

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Watch times, and durations unless all watch times are compared."""
        return (LogColumns.WATCH_TIME, *[LogColumns.DURATION] * self.by_duration)

    def bucket(self, events: ir.Table) -> ir.IntegerColumn:
        """The duration bucket, or one bucket of all events."""
        return super().bucket(events) if self.by_duration else ibis.literal(UNKNOWN_BUCKET, "int32")

    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """The user's rank, smoothed; or the rank of ``counts`` if the user has too few watch times; or null."""
        keyed = events.mutate(**{"bucket": self.bucket(events), _COMPARED: compared_ms(events, self)})
        share_of_all = _share(counts.at_most, counts["count"], counts.total, self.ties)
        table = counts.select(
            "bucket", **{_COMPARED: counts[Derived.WATCH_MS]}, share_of_all=share_of_all, total_of_all=counts.total
        )
        keyed = keyed.left_join(table, ["bucket", _COMPARED])
        own = {"group_by": [Derived.USER_INDEX, "bucket"], "order_by": _COMPARED}
        fitted = _is_fitted(keyed)
        keyed = keyed.mutate(  # with the same order one sort serves the three sums
            own_at_most=fitted.sum().over(ibis.range_window(**own, preceding=None, following=0)),
            own_equal=fitted.sum().over(ibis.range_window(**own, preceding=0, following=0)),
            own_total=fitted.sum().over(**own, rows=(None, None)),
        )
        own_enough, all_enough = keyed.own_total >= self.min_history, keyed.total_of_all >= self.min_history
        own = _share(keyed.own_at_most, keyed.own_equal, keyed.own_total, self.ties)
        if self.smoothing > 0:
            own_enough = own_enough | (all_enough & (keyed.own_total + self.smoothing >= self.min_history))
            rank = ibis.ifelse(keyed.own_total > 0, own * keyed.own_total, 0.0)
            own = (rank + keyed.share_of_all * self.smoothing) / (keyed.own_total + self.smoothing)
        quantile = ibis.cases(
            (keyed[Derived.WATCH_MS].isnull() | keyed.bucket.isnull(), ibis.null("float64")),
            (own_enough, own),
            (all_enough, keyed.share_of_all),
            else_=ibis.null("float64"),
        )
        return _with_label(events, keyed, _unwatched_is_zero(keyed, quantile, self.ties))


@dataclass(frozen=True)
class WatchRatio(Label):
    """Watched share of the item, ``min(watch_time / (cap * duration), 1)``, which also gives the feedback level.

    For logs in which most items are played to the end, such as songs: the ranks of complete plays are equal, or say
    which of the items are longer. ``recpo init`` takes it where a quarter of the plays end with the item.

    Args:
        cap: watch ratio that counts as 1; watching an item twice is a ratio of 2.
    """

    cap: PositiveFloat = 1.0

    duration_exponent = 1.0  # not an option: shares are compared

    needs: ClassVar[tuple[str, ...]] = (LogColumns.WATCH_TIME, LogColumns.DURATION)
    reads_events_once: ClassVar[bool] = True

    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """Nothing is fitted."""
        ratio = events[Derived.WATCH_MS].cast("float64") / (events[Derived.DURATION_MS].cast("float64") * self.cap)
        return _with_label(events, events, ibis.ifelse(ratio > 1.0, 1.0, ratio))

    def cutoffs(self, quantiles: Cutoffs, rule: FeedbackRule) -> Cutoffs:
        """The limits of the levels of labels, as shares of the middle of the bucket."""
        shares = rule.level_limits * self.cap
        return {bucket: tuple((shares * self.base ** (bucket + 0.5)).tolist()) for bucket in quantiles}


@dataclass(frozen=True)
class D2Q(Label):
    """Rank of the watch time among all users' train watch times in the item's duration group.

    Duration-deconfounded quantile (Zhan et al., KDD 2022, arXiv 2206.06003): items are divided by duration into
    ``groups`` groups with equally many train events, and the label is the mid-rank of the watch time in the group; 0
    for a watch time of zero seconds. Events of equal duration are never separated, so groups may differ in size if
    durations repeat.

    Args:
        groups: number of duration groups.
        min_history: minimum number of train watch times in a group; events of smaller groups have no label.
        ties: how equal watch times count: by half (mid), or in full (full).
    """

    groups: PositiveInt = 30
    min_history: int = 5
    ties: Ties = "mid"

    needs: ClassVar[tuple[str, ...]] = (LogColumns.WATCH_TIME, LogColumns.DURATION)
    keeps_fitted: ClassVar[bool] = False

    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """Groups are quantiles of the train durations. A later, unknown duration is placed by its value."""
        durations = watch_counts(events, [], Derived.DURATION_MS)
        durations = durations.filter(durations.total > 0)
        place = ((durations.at_most - durations["count"]) * self.groups // durations.total).cast("int32")
        groups = durations.select(Derived.DURATION_MS, group=ibis.ifelse(place >= self.groups, self.groups - 1, place))
        keyed = events.left_join(groups, Derived.DURATION_MS).drop(f"{Derived.DURATION_MS}_right")
        return _share_within(events, keyed, ["group"], Derived.WATCH_MS, self.min_history, self.ties)


@dataclass(frozen=True)
class WatchTimeGain(Label):
    """Rank of the watch-time gain ``(w - mean) / std`` among all train events.

    Watch-time gain (WTG) of DVR, Zheng et al., ACM MM 2022, arXiv 2208.05190: the watch time standardized within items
    of similar duration. Mean and (population) standard deviation are computed over all users' train watch times in the
    duration bucket. Differences from the paper: buckets are those of ``WatchQuantiles``, and the unbounded gain is
    replaced by its mid-rank among the train gains, with a resolution of one millionth of a deviation. 0 for a watch
    time of zero seconds.

    Args:
        base: base of the duration buckets.
        min_history: minimum number of train watch times in a bucket; events of smaller buckets have no label.
        ties: how equal gains count: by half (mid), or in full (full).
    """

    base: float = DEFAULT_DURATION_BASE
    min_history: int = 5
    ties: Ties = "mid"

    needs: ClassVar[tuple[str, ...]] = (LogColumns.WATCH_TIME, LogColumns.DURATION)
    keeps_fitted: ClassVar[bool] = False

    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """Moments are sums of integers, so they do not depend on the order of summation."""
        keyed = events.mutate(bucket=self.bucket(events))
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
        keyed = keyed.mutate(gain=(gain * _WTG_RESOLUTION).round().cast("int64"))
        return _share_within(events, keyed, [], "gain", 1, self.ties)


@dataclass(frozen=True)
class EveryEvent(Label):
    """Every event is positive: 1. For logs of purchases, clicks or visits without other feedback."""

    reads_events_once: ClassVar[bool] = True
    every_event: ClassVar[bool] = True

    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """A constant column; Spark takes the literal 1.0 for a decimal number."""
        return events.mutate(**{Derived.LABEL: ibis.literal(1).cast("float64")})


@dataclass(frozen=True)
class BinaryColumn(Label):
    """The column mapped to ``label`` itself, 0 or 1: a click, a like, KuaiRand's ``long_view``.

    ``recpo prepare`` rejects other values. An event with a missing value has no label.
    """

    needs: ClassVar[tuple[str, ...]] = (LogColumns.LABEL,)
    reads_events_once: ClassVar[bool] = True

    def check(self, value: ir.FloatingColumn) -> tuple[str, Severity, str, ir.BooleanColumn]:
        """Anything but 0 and 1 is fatal."""
        fix = "map another column to label, or choose another label such as NumericColumn"
        return "a value that BinaryColumn cannot read", "fatal", fix, (value != 0) & (value != 1) & ~value.isnan()

    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """The column itself."""
        return events.mutate(**{Derived.LABEL: events[Derived.VALUE]})


@dataclass(frozen=True)
class NumericColumn(Label):
    """The number mapped to ``label``, scaled linearly from ``low`` (0) to ``high`` (1) and clipped; or a threshold.

    The ends are given, not fitted, so the label of an event does not depend on other events. They have no default: the
    scale of a column is not known, and on a wrong one most events would be clipped to the same label. For ratings from
    0.5 to 5, use ``low=0.5, high=5``, or ``threshold=4`` for 1 if the rating is at least 4 and 0 otherwise. ``recpo
    prepare`` asks for missing ends with the smallest and largest value of the column, and counts values outside them.

    Args:
        low: value that becomes 0.
        high: value that becomes 1.
        threshold: 1 if the value is at least this and 0 otherwise; instead of ``low`` and ``high``.
        missing: value that means that nothing was rated, such as 0 or -1: the event has no label.
    """

    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    missing: float | None = None

    needs: ClassVar[tuple[str, ...]] = (LogColumns.LABEL,)
    reads_events_once: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ends = self.low is not None or self.high is not None
        if ends and self.threshold is not None:
            raise RecpoError(
                f"label NumericColumn: low {self.low} and high {self.high} must be left out if threshold is given",
                code="conflicting_options",
                field="threshold",
            )
        if ends and (self.low is None or self.high is None):
            raise RecpoError(
                f"label NumericColumn: low {self.low} and high {self.high} must be given together",
                code="missing_option",
                field="high" if self.high is None else "low",
            )
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise RecpoError(
                f"label NumericColumn: low {self.low} must be below high {self.high}", code="bad_value", field="low"
            )

    def check(self, value: ir.FloatingColumn) -> tuple[str, Severity, str, ir.BooleanColumn] | None:
        """Finite values outside the ends, if there are ends."""
        if self.low is None or self.high is None:
            return None
        problem = f"outside low {self.low:g} and high {self.high:g}, taken as the nearer one"
        fix = "set --label.low and --label.high to the ends of the column's scale"
        outside = ((value < self.low) | (value > self.high)) & ~value.isnan() & ~value.isinf()
        outside = outside if self.missing is None else outside & (value != self.missing)
        return problem, "impossible", fix, outside

    def add(self, events: ir.Table, counts: ir.Table) -> ir.Table:
        """Linear scaling, or a threshold. Without either, the checks of the log have refused it before."""
        value = events[Derived.VALUE]
        value = value if self.missing is None else value.nullif(self.missing)
        if self.threshold is not None:
            label = (value >= self.threshold).cast("int8").cast("float64")
        else:
            assert self.low is not None
            assert self.high is not None
            label = ((value - self.low) / (self.high - self.low)).clip(lower=0.0, upper=1.0)
        return events.mutate(**{Derived.LABEL: label})


def watch_counts(
    keyed: ir.Table, by: Sequence[str], value: str = Derived.WATCH_MS, kept: ir.Table | None = None
) -> ir.Table:
    """Train events per group and value, and how many of the group have at most that value.

    Args:
        keyed: events with the columns ``by`` and ``value``.
        by: columns of the group; empty = all events are one.
        value: integer column.
        kept: counts of train events that replace the counts of ``keyed``.

    Returns:
        ``by``, ``value``, ``count``, ``at_most``, ``total`` (int64). Values that only later events have get count 0.
    """
    known = keyed.filter(*[keyed[key].notnull() for key in (*by, value)])
    counts = known.group_by([*by, value]).aggregate(count=_is_fitted(known).sum().cast("int64"))
    if kept is not None:
        values = counts.mutate(count=ibis.literal(0, "int64"))
        values = values.union(kept.select(*(kept[name].cast(kind) for name, kind in counts.schema().items())))
        counts = values.group_by([*by, value]).aggregate(count=values["count"].sum().cast("int64"))
    count = counts["count"]
    return counts.mutate(
        at_most=count.sum().over(ibis.cumulative_window(group_by=by, order_by=value)).cast("int64"),
        total=count.sum().over(group_by=by).cast("int64"),
    )


def _is_fitted(events: ir.Table) -> ir.IntegerColumn:
    return ((events[Derived.PERIOD] == TRAIN) & events[Derived.WATCH_MS].notnull()).cast("int64")


def _share_within(
    events: ir.Table, keyed: ir.Table, by: Sequence[str], value: str, min_history: int, ties: Ties
) -> ir.Table:
    table = watch_counts(keyed, by, value)
    table = table.filter(table.total >= max(1, min_history))
    table = table.select(*by, value, share=_share(table.at_most, table["count"], table.total, ties))
    joined = keyed.left_join(table, [*by, value])
    quantile = ibis.ifelse(joined[Derived.WATCH_MS].notnull(), joined.share, ibis.null("float64"))
    return _with_label(events, joined, _unwatched_is_zero(joined, quantile, ties))


def _share(
    at_most: ir.IntegerColumn, equal: ir.IntegerColumn, total: ir.IntegerColumn, ties: Ties
) -> ir.FloatingColumn:
    """Rank / total from integers, so that every engine divides the same two numbers."""
    if ties == "full":
        return at_most.cast("float64") / total.cast("float64")
    return (at_most * 2 - equal).cast("float64") / (total * 2).cast("float64")


def _unwatched_is_zero(keyed: ir.Table, label: ir.FloatingColumn, ties: Ties) -> ir.FloatingColumn:
    if ties == "full":
        return label
    return ibis.ifelse(label.notnull() & (keyed[Derived.WATCH_MS] == 0), 0.0, label)


def _with_label(events: ir.Table, computed: ir.Table, label: ir.FloatingColumn) -> ir.Table:
    return computed.select(*[computed[name] for name in events.columns], label.name(Derived.LABEL))


def bucket_counts(events: ir.Table, label: Label, kept: ir.Table | None = None) -> ir.Table:
    """The ``watch_counts`` of duration buckets, of ``compared_ms``: of the quantiles of all users, and of labels."""
    keyed = events.mutate(**{"bucket": label.bucket(events), Derived.WATCH_MS: compared_ms(events, label)})
    return watch_counts(keyed, ["bucket"], kept=kept)


def compared_ms(events: ir.Table, label: Label) -> ir.IntegerColumn:
    """The watch times that are compared within a bucket, whole milliseconds: ``p (c / d)^e``.

    ``c = base^(bucket + 1/2)`` is the middle of the bucket and ``e`` the label's ``duration_exponent``.
    ``FeedbackDefinition.levels`` computes the same at serving time.

    Args:
        events: standard events.
        label: with the base of the buckets and the exponent.
    """
    watch = events[Derived.WATCH_MS]
    if label.duration_exponent == 0:
        return watch
    power = duration_power(events, label.base)
    to_middle = (power.floor().cast("float64") + 0.5 - power) * ibis.literal(label.base, "float64").ln()
    factor = (to_middle * label.duration_exponent).exp()
    return (watch.cast("float64") * factor + 0.5).floor().cast("int64")


def estimated_duration_exponent(
    watch_time: np.ndarray, duration: np.ndarray, base: float = DEFAULT_DURATION_BASE
) -> float:
    """The exponent with which watch times grow with the duration inside duration buckets, in [0, 1].

    The ``e`` at which the ranks of ``log p - e log d`` within the buckets are uncorrelated with ``log d``:

        sum over events of (log d - mean of the bucket) rank = 0

    Its left side falls in ``e``, so bisection finds it (Jaeckel, Annals of Mathematical Statistics 43, 1972, with
    Wilcoxon scores). Skipped items and items watched again and again hardly move ranks.

    Args:
        watch_time: ``[N]``, in any unit; events that were not watched or lack one of the two are left out.
        duration: ``[N]`` seconds, of which the buckets are.
        base: base of the duration buckets.

    Returns:
        0 if all items of a bucket have one duration.
    """
    watched, lasted = np.asarray(watch_time, np.float64), np.asarray(duration, np.float64)
    known = np.isfinite(watched) & np.isfinite(lasted) & (watched > 0) & (lasted > 0)
    log_watch, log_duration = np.log(watched[known]), np.log(lasted[known])
    groups = FeedbackDefinition(duration_base=base).buckets(lasted[known])
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    score = log_duration - (np.bincount(group, log_duration) / sizes)[group]

    def dependence(exponent: float) -> float:
        order = np.lexsort((log_watch - exponent * log_duration, group))
        rank = np.empty(len(group))
        rank[order] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return float((score * (rank + 1) / (sizes[group] + 1)).sum())

    low, high = 0.0, 1.0
    if not len(group) or not np.abs(score).max() > 1e-9 or dependence(low) <= 0:
        return low
    if dependence(high) >= 0:
        return high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if dependence(middle) > 0 else (low, middle)
    return (low + high) / 2


def quantile_table(counts: ir.Table) -> ir.Table:
    """All users' train watch times: ``bucket``, ``watch_ms``, ``count``, ``quantile`` (share that is no longer).

    They are those that are compared (``compared_ms``).

    Args:
        counts: of ``bucket_counts``.
    """
    table = counts.filter(counts["count"] > 0)
    table = table.mutate(quantile=table.at_most / table.total)
    return table.select("bucket", Derived.WATCH_MS, "count", "quantile").order_by(["bucket", Derived.WATCH_MS])


def cutoff_table(quantiles: ir.Table) -> ir.Table:
    """Cutoffs of each bucket: ``bucket`` and ``q1`` to ``q15`` in milliseconds.

    ``qN`` is the smallest watch time at or below which N sixteenths of them lie.
    """
    watch = quantiles[Derived.WATCH_MS]
    cutoffs = {name: watch.min(where=quantiles.quantile >= step / NUM_GRADES) for step, name in enumerate(_CUTOFFS, 1)}
    return quantiles.group_by("bucket").aggregate(**cutoffs).order_by("bucket")


def quantiles_in_seconds(cutoffs: pa.Table) -> Cutoffs:
    """The table of ``cutoff_table`` by bucket, in seconds."""
    limits = np.stack([cutoffs[name].to_numpy() for name in _CUTOFFS], 1) / 1000
    return dict(zip(cutoffs["bucket"].to_pylist(), map(tuple, limits.tolist()), strict=True))


def definition(
    quantiles: Cutoffs, rule: FeedbackRule, label: Label, max_watch_time: float, described: str = ""
) -> FeedbackDefinition:
    """The rule with the cutoffs of the label, and its description."""
    cutoffs, exponent, every = label.cutoffs(quantiles, rule), label.duration_exponent, label.every_event
    return FeedbackDefinition(rule, label.base, cutoffs, max_watch_time, described, exponent, every)


def watch_ties(quantiles: ir.Table) -> ir.Table:
    """One row about the train watch times of ``quantile_table``: ``watched``, ``zero`` and ``tied`` (int64).

    ``zero`` counts watch times of zero seconds. ``tied`` counts those that equal the most frequent watch time of their
    duration bucket.
    """
    count, no_watch = quantiles["count"], quantiles[Derived.WATCH_MS] == 0
    buckets = quantiles.group_by("bucket").aggregate(
        watched=count.sum(), zero=count.sum(where=no_watch).fill_null(0), tied=count.max()
    )
    return buckets.aggregate(
        **{name: buckets[name].sum().fill_null(0).cast("int64") for name in ("watched", "zero", "tied")}
    )
