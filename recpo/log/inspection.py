"""What an unknown log holds, and what suits it: columns, size, label, split and objectives.

``inspect_log`` reads a sample of the files and recognizes the columns (``recpo.log.recognition``). The suggestions
follow from the recognized columns and the counts. ``recpo.verbs.init`` writes them as configurations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.errors import RecpoError
from recpo.base.frames import some_of
from recpo.log.column_facts import FEW, ColumnFacts, words
from recpo.log.csv_files import CsvFormat
from recpo.log.feature_columns import FeatureColumns
from recpo.log.files import TableSample, sample_tables
from recpo.log.reading import LogReading
from recpo.log.recognition import Recognition
from recpo.log.schema import MILLISECONDS_PER_UNIT, Columns, FlagColumn, LogColumns
from recpo.log.shaping import estimated_duration_exponent

#: The offset at the end of a time of day: +05:30, +0530 or +02.
_OFFSET: Final = r":[0-9]{2}(?:\.[0-9]+)? ?(?P<offset>[+-][0-9]{2}(?::?[0-9]{2})?)$"
_SCALES: Final = ((0, 1), (0.5, 5), (1, 5), (0, 5), (1, 10), (0, 10), (0, 100))
#: ``smoothing`` of the ranks of watch times, by which policies of all kinds are worth more (docs/your_own_log.md).
_SMOOTHING: Final = 10
#: Watched events that tell the exponent of durations. Of the fewest, its standard error is about .15.
_LEAST_WATCHED: Final = 1_000
_MOST_WATCHED: Final = 100_000
#: From this share of plays that end with the item, ranks cannot tell the best quarter: they are equal.
_MANY_ENDS: Final = 0.25
_AT_THE_END: Final = 0.01  # of the duration, before its end or after
_YEAR: Final = 365.0  # days
_CENTURY: Final = 100 * _YEAR  # a log that spans it has numbers that are no times, which `prepare` refuses
_HELD_OUT_DAYS: Final = 0.2  # of the events, at most, where periods of more than a day are held out
_MOSTLY_NEW: Final = 0.5  # of held-out events: from this share of new users on, days say little of users who are known
_HELD_OUT: Final = 0.1  # of the graded events of each user, where the periods are not days
#: Held-out events of a user that can be compared, where nine tenths of the users have fewer events than so many.
_COMPARED, _SHORT, _LARGEST_VALID = 2, 8, 0.4
#: A 0 that is so frequent, and so much more than the next number, of a scale of at least so many, is no rating.
_UNRATED_SHARE, _UNRATED_RATIO, _LEAST_SCALE = 0.25, 3.0, 4
#: Times of snapshots, and the share of what people have that they have at the next time, too.
_LEAST_TIMES, _MOST_TIMES, _KEPT = 3, 120, 0.8
#: Why lists of what ``Inspection.has_snapshots`` do not repeat items.
SNAPSHOTS: Final = (
    "nearly all that people have at one time they have at the next: these are snapshots, so lists do not repeat items"
)
#: Words for ratings.
_RATINGS: Final = ("rating", "ratings", "stars", "score", "scores", "overall", "points", "grade")
#: What stands for "not rated" where it is far from all other numbers.
_CODES: Final = (9, 99, 999, 9999)
#: A scale whose largest number is more than so many times the median above the least ends where so many are below.
_SKEW, _LARGE = 4.0, 0.9


@dataclass(frozen=True)
class LogCounts:
    """The size of a log.

    Attributes:
        events: number of rows.
        users: number of users in the inspected rows.
        items: number of items in the inspected rows.
        requests: number of requests in all rows.
        events_per_user: 90th percentile of the number of events per user.
        days: days from the first event to the last; None if the log has no clock.
        is_whole: whether all rows were inspected.
        by_day: number of events of each UTC day, the last day first; empty if the log has no clock, or more rows than
            were inspected.
        by_first_day: the same by the day of the user's first event.
    """

    events: int
    users: int
    items: int
    requests: int
    events_per_user: int
    days: float | None
    is_whole: bool = True
    by_day: tuple[int, ...] = ()
    by_first_day: tuple[int, ...] = ()

    def new_share(self, days: int) -> float:
        """Share of the events of the last days that are of users without earlier ones; 0 = unknown."""
        events = sum(self.by_day[:days])
        return sum(self.by_first_day[:days]) / events if events else 0.0


@dataclass(frozen=True)
class Choice:
    """A label or split of ``recpo prepare``.

    Attributes:
        class_name: name of its class.
        init_args: its options.
        why: the reason for the choice.
    """

    class_name: str
    init_args: Mapping[str, Any]
    why: str


@dataclass(frozen=True, kw_only=True)
class Inspection(Recognition):
    """The recognized columns of a log, its size, and the suggested configurations.

    Attributes:
        log: the files that were named.
        sample: the files of the log, and the inspected rows.
        facts: facts about the values of every column, by its name.
        counts: its size.
        tables: "item" and "user" -> a file with one row for each.
        table_columns: columns of the tables that say how long an item is, and when it is available, and ids with other
            names than in the log. The sample has these durations beside the columns of the log.
        left_out: options of ``prepare`` that leave out rows without a user, item or time, or of wrong clocks.
        written: the files that were written, by what they configure; empty before.
        commands: the commands to run with them, in order, from the log to recommendations.
    """

    log: tuple[str, ...]
    sample: TableSample = field(repr=False)
    facts: Mapping[str, ColumnFacts] = field(repr=False)
    counts: LogCounts
    tables: Mapping[str, str] = field(default_factory=dict)
    table_columns: FeatureColumns = field(default_factory=FeatureColumns)
    left_out: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Path] = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    @cached_property
    def label(self) -> Choice:
        """The label for the feedback of the log: watch times if there are any, else ratings, else none."""
        facts = self.facts
        watch, duration = map(self.column, (LogColumns.WATCH_TIME, LogColumns.DURATION))
        rated = self.source(LogColumns.LABEL)
        if watch is not None and duration is not None:
            return self._label_of_watch_times(watch, duration)
        if isinstance(rated, FlagColumn):
            return _label_of_values(rated)
        if rated is not None and facts[rated].distinct > 1:
            if facts[rated].kind == "flag":
                return Choice("BinaryColumn", {}, f"`{rated}` is 0 or 1")
            numbers = pc.cast(self.sample.table[rated], pa.float64()).to_numpy()
            numbers = numbers[np.isfinite(numbers)]
            missing = _missing(numbers, is_rating=not {*words(rated)}.isdisjoint(_RATINGS))
            numbers = numbers[numbers != missing]
            low, high = _scale(numbers, facts[rated].kind)
            why = f"`{rated}` runs from {low:g} to {high:g}"
            if high < numbers.max():
                why += f", as few of its values are larger, up to {numbers.max():g}"
            if missing is None:
                return Choice("NumericColumn", {"low": low, "high": high}, why)
            end = "low" if missing < low else "high"
            why += f", and {missing:g} is read as not rated; if it is a rating, remove missing, and set {end} to it"
            return Choice("NumericColumn", {"low": low, "high": high, "missing": missing}, why)
        if watch is not None:
            why = f"the rank of `{watch}` among the user's watch times, as there is no duration, smoothed with "
            why += f"{_SMOOTHING} of everybody's"
            return Choice("WatchQuantiles", {"smoothing": _SMOOTHING, "by_duration": False}, why)
        return Choice("EveryEvent", {}, "no column says how good an event was: every event is a positive")

    def _label_of_watch_times(self, watch: str, duration: str) -> Choice:
        """The watched share, where many plays end with the item; else the rank, as at one duration."""
        table = self.sample.table.select([watch, duration])
        rows = table.take(np.arange(0, table.num_rows, 1 + table.num_rows // _MOST_WATCHED))
        watched, lasted = (
            pc.cast(rows[name], pa.float64()).to_numpy() * MILLISECONDS_PER_UNIT[unit or "s"] / 1000
            for name, unit in ((watch, self.columns.watch_time_unit), (duration, self.columns.duration_unit))
        )
        plays = (watched > 0) & (lasted > 0)
        ended = np.abs(watched[plays] / lasted[plays] - 1) <= _AT_THE_END
        if ended.size and ended.mean() >= _MANY_ENDS:
            why = f"the share of `{duration}` in `{watch}`: {ended.mean():.0%} of the plays end with the item"
            return Choice("WatchRatio", {}, why)
        why = f"the rank of `{watch}` among the user's watch times on items of similar duration, smoothed with"
        why += f" {_SMOOTHING} of everybody's"
        options: dict[str, float] = {"smoothing": _SMOOTHING}
        enough = np.count_nonzero(plays) >= _LEAST_WATCHED
        if enough and (exponent := round(estimated_duration_exponent(watched, lasted), 2)):
            options |= {"duration_exponent": exponent}
            why += f", as at one duration: it grows with `{duration}` to the power of {exponent:g}"
        return Choice("WatchQuantiles", options, why)

    @cached_property
    def split(self) -> Choice:
        """How the log is split, in the time zone that its times state."""
        days, time = self.counts.days, self.column(LogColumns.TIMESTAMP)
        if days is None:
            return self._last_out("there is no clock")
        if days < 3:
            return self._last_out(f"the log has {days:.1f} days, fewer than periods of days need")
        is_watched = self.column(LogColumns.WATCH_TIME) is not None
        if days > _YEAR and self.label.class_name == "NumericColumn" and not is_watched:
            return self._last_out(
                f"ratings over {days:,.0f} days: few users return after months; TemporalSplit where yours do"
            )
        each, by_day = max(1, min(14, round(days / 15))), np.cumsum(self.counts.by_day)
        while each > 1 and len(by_day) > 2 * each and by_day[2 * each - 1] > _HELD_OUT_DAYS * by_day[-1]:
            each -= 1  # a log that grows has most of its events at its end
        if (last := self.where_users_are_new(2 * each)) is not None:
            return last
        options, begin = {"valid_days": each, "test_days": each}, f"the log has {days:,.0f} days"
        timezone = None if time is None else _timezone(self.sample.table[time])
        if timezone is None:
            why = f'{begin}; they begin at midnight UTC, or as in timezone: "+08:00"'
            return Choice("TemporalSplit", options, why)
        return Choice(
            "TemporalSplit", {**options, "timezone": timezone}, f"{begin}; the time zone is that of most times"
        )

    @cached_property
    def has_snapshots(self) -> bool:
        """Whether rows say at a few times what people have, as holdings by month: nearly all are there again next time.

        Nobody chose these again.
        """
        pair = [name for role in (LogColumns.USER_ID, LogColumns.ITEM_ID) if (name := self.column(role)) is not None]
        time = self.column(LogColumns.TIMESTAMP)
        if time is None or len(pair) < 2 or self.label.class_name != "EveryEvent":
            return False
        rows = self.sample.table.select([*pair, time]).drop_null()
        times = rows[time]
        times = times.cast(times.type.value_type) if pa.types.is_dictionary(times.type) else times
        order = pc.rank(times, tiebreaker="dense").to_numpy()
        if not _LEAST_TIMES <= order.max(initial=0) <= _MOST_TIMES:
            return False
        who, what = (rows[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in pair)
        key = (who.astype(np.int64) * (what.max() + 1) + what) * (_MOST_TIMES + 2) + order.astype(np.int64)
        return bool(np.isin(key[order < order.max()] + 1, key).mean() >= _KEPT)

    def where_users_are_new(self, days: int) -> Choice | None:
        """The split to take instead of days, if most events of so many last days are of new users; None = days do."""
        new = self.counts.new_share(days)
        if new <= _MOSTLY_NEW:
            return None
        return self._last_out(f"{new:.0%} of the events of the last {days} days are of users without earlier ones")

    def _last_out(self, why: str) -> Choice:
        """Each user's last event; of graded events a share, to compare what a user liked with what the user did not."""
        if self.label.class_name == "EveryEvent":
            return Choice("LeaveLastOut", {}, f"{why}: each user's last event is the test")
        valid, counts = _HELD_OUT, self.counts
        if counts.events_per_user < _SHORT:
            each = counts.events / max(1, counts.users) if counts.is_whole else counts.events_per_user
            valid = min(math.ceil(1000 * _COMPARED / each) / 1000, _LARGEST_VALID)
        shares = {"valid_share": max(_HELD_OUT, valid), "test_share": _HELD_OUT}
        return Choice("LeaveLastOut", shares, f"{why}: the last {_HELD_OUT:.0%} of each user's events are the test")

    @property
    def objectives(self) -> dict[str, str]:
        """The alignments that the feedback allows, in order of preference, each with its reason."""
        chosen, is_graded = {}, self.label.class_name != "EveryEvent"
        disliked, propensity = map(self.column, (LogColumns.DISLIKE, LogColumns.PROPENSITY))
        if is_graded or disliked is not None:
            grades = self.label.why if is_graded else f"positives, and `{disliked}`"
            chosen["mpo"] = (
                f"the log has grades ({grades}): moves the policy toward the grades that a factorization predicts"
            )
        if disliked is not None or propensity is not None:
            told = " and ".join(f"`{name}`" for name in (disliked, propensity) if name is not None)
            chosen["gbpo"] = f"the log has {told}: learns from logged feedback alone, without a reward model"
        return chosen


def inspect_log(
    log: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    columns: Columns = Columns(),  # noqa: B008  frozen
    csv: CsvFormat = CsvFormat(),  # noqa: B008  frozen
) -> Inspection:
    """Inspects a log as ``init`` does, but writes nothing.

    Args:
        log: as for ``init``.
        columns: as for ``init``.
        csv: as for ``init``.

    Raises:
        RecpoError: a file cannot be read, or the log has no row.
    """
    named = (fspath(log),) if isinstance(log, str | PathLike) else tuple(fspath(name) for name in log)
    reading = LogReading.of(sample_tables(list(named), csv), columns)
    reading.leave_columns_out()
    reading.read_texts()
    reading.name_returns()
    reading.leave_rows_out()
    reading.read_tables()
    _validate_names(columns, reading.sample)
    if not reading.sample.table.num_rows:
        raise RecpoError(f"{', '.join(named)}: the log has no rows: name one with events", code="empty", field="log")
    reading.read_files()
    found = vars(reading.found) | {"questions": tuple(reading.questions), "doubts": tuple(reading.doubts)}
    return Inspection(
        **found,
        log=named,
        sample=reading.sample,
        facts=reading.facts,
        counts=_counts(reading),
        tables={side: str(table.files[0]) for side, (table, _) in reading.tables.items()},
        table_columns=FeatureColumns(**reading.table_columns),
        left_out=reading.left_out,
    )


def _validate_names(given: Columns, sample: TableSample) -> None:
    for role, name in given.named().items():
        if name not in sample.table.column_names:
            raise RecpoError(
                f"--columns.{role} {name}: no such column; the log has {some_of(sample.table.column_names)}",
                code="missing_column",
                field=f"columns.{role}",
            )


def _counts(reading: LogReading) -> LogCounts:
    """The size of a log, from the inspected rows."""
    sample, found = reading.sample, reading.found
    user, item, request = map(found.column, LogColumns.IDS)
    table, rows = sample.table, sample.table.num_rows
    if user is None or item is None:
        return LogCounts(sample.rows, 0, 0, sample.rows, 1, None, sample.is_whole)
    per_user = table.group_by(user).aggregate([([], "count_all")])["count_all"]
    requests = rows
    if request is not None:
        requests = table.group_by([user, request]).aggregate([]).num_rows
    time, days = found.column(LogColumns.TIMESTAMP), reading.days
    is_text = time is not None and reading.facts[time].kind == "text"
    moments = None if days is None else _Moments.of(days, _numbered(table[user]), added=float(is_text))
    return LogCounts(
        events=sample.rows,
        users=len(per_user),
        items=pc.count_distinct(table[item]).as_py(),
        requests=int(requests * sample.rows / max(1, rows)),
        events_per_user=int(pc.quantile(per_user, 0.9)[0].as_py() or 1) if rows else 1,
        days=None if moments is None else moments.days,
        is_whole=sample.is_whole,
        by_day=() if moments is None or not sample.is_whole else moments.by_day,
        by_first_day=() if moments is None or not sample.is_whole else moments.by_first_day,
    )


def _numbered(column: pa.ChunkedArray) -> np.ndarray:
    """Values as numbers from 0 on."""
    plain = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
    numbers: np.ndarray = pc.index_in(plain, value_set=pc.unique(plain)).to_numpy()
    return numbers


class _Moments(NamedTuple):
    """When the inspected events happened.

    Attributes:
        days: from the first to the last event.
        by_day: number of events of each UTC day, the last day first; empty if one of them is no time.
        by_first_day: the same by the day of the user's first event.
    """

    days: float
    by_day: tuple[int, ...] = ()
    by_first_day: tuple[int, ...] = ()

    @classmethod
    def of(cls, moments: np.ndarray, users: np.ndarray, added: float) -> Self | None:
        """Of times in days since 1970, and the users of the events as numbers from 0 on; None = there are none."""
        is_known = np.isfinite(moments)
        known, users = moments[is_known], users[is_known]
        if not len(known):
            return None
        span, ago = float(known.max() - known.min()), np.floor(known.max()) - np.floor(known)
        if span >= _CENTURY:
            return cls(span + added)
        first = np.zeros(users.max() + 1)
        np.maximum.at(first, users, ago)
        by_days = (tuple(np.bincount(days.astype(np.int64)).tolist()) for days in (ago, first[users]))
        return cls(span + added, *by_days)


def _label_of_values(flag: FlagColumn) -> Choice:
    rest = "0 for other known values"
    if flag.grades:
        why = f"{' and '.join(f'{grade:g} for {text}' for text, grade in flag.grades.items())}, {rest}"
        return Choice("NumericColumn", {"low": 0, "high": 1}, f"of `{flag.column}`: {why}")
    return Choice("BinaryColumn", {}, f"1 where `{flag.column}` is {' or '.join(flag.values)}, {rest}")


def _timezone(values: pa.ChunkedArray) -> str | None:
    """The time zone that a column of times states: that of its type, or the most frequent offset of its texts.

    Returns:
        An IANA name or an offset such as "+01:00"; None = it states none, or UTC.
    """
    if pa.types.is_timestamp(values.type):
        zone = values.type.tz
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        offsets = pc.extract_regex(values.drop_null(), _OFFSET).drop_null()
        counts = pc.value_counts(pc.struct_field(offsets, "offset")).to_pylist() if len(offsets) else []
        digits = max(counts, key=lambda one: one["counts"])["values"].replace(":", "") if counts else None
        zone = None if digits is None else f"{digits[:3]}:{digits[3:] or '00'}"
    else:
        zone = None
    return None if zone in ("UTC", "Etc/UTC", "GMT", "Z", "+00:00", "-00:00") else zone


def _missing(numbers: np.ndarray, is_rating: bool) -> float | None:
    """The number that means that nothing was rated, if there is one.

    A code such as 99 or -999, if it is further from all others than these are from each other. Of what is called a
    rating also -1 below a scale, and 0, if it is frequent and the next number is not; no reward is a reward of 0.
    """
    distinct, counts = np.unique(numbers, return_counts=True)
    if len(distinct) < _LEAST_SCALE:
        return None
    share, next_share = counts[:2] / len(numbers)
    is_frequent = share >= _UNRATED_SHARE and share > _UNRATED_RATIO * next_share
    is_rating = is_rating and len(distinct) <= FEW
    if is_rating and ((distinct[0] == -1 and distinct[1] >= 0) or (distinct[0] == 0 and is_frequent)):
        return float(distinct[0])
    for code, others in ((distinct[0], distinct[1:]), (distinct[-1], distinct[:-1])):
        is_far = np.abs(others - code).min() > others[-1] - others[0]
        if is_far and abs(code) in _CODES:
            return float(code)
    return None


def _are_counts(numbers: np.ndarray) -> bool:
    """Whether whole numbers say how often something happened: 0 mostly, 1 less often, 2 even less, and so on."""
    distinct, times = np.unique(numbers, return_counts=True)
    is_complete = distinct[-1] == len(distinct) - 1
    return bool(is_complete and 2 * times[0] > len(numbers) and (np.diff(times) <= 0).all())


def _scale(numbers: np.ndarray, kind: str) -> tuple[float, float]:
    """The ends of a rating's scale.

    A common scale that the values reach, else the smallest and largest value. Where few of many are far larger than
    most, as numbers of plays are, all others would be next to 0: there, the largest tenth is the end. Of how often
    something happened, which is mostly never, once is the end.
    """
    least, most = float(numbers.min()), float(numbers.max())
    for low, high in _SCALES:
        if (kind != "number" and low != int(low)) or least > (low + high) / 2:
            continue  # a scale of halves has values with fractions, and points from 80 to 100 are none from 0 on
        if low <= least and most <= high and (most == high or (kind == "number" and high == 1)):
            return low, high
    above = numbers[numbers > least]
    if kind == "whole" and least == 0 and _are_counts(numbers):
        return 0.0, 1.0
    if least >= 0 and most > _SKEW * np.median(above) and len(np.unique(numbers)) > FEW:
        return least, float(f"{np.quantile(above, _LARGE):.4g}")
    return least, most
