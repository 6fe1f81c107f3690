"""Suggestions for a log: its label, its split, the objectives that fit its feedback, and sizes of training.

Pure functions of the recognized columns and counts; ``recpo.verbs.init`` writes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from recpo.log.column_facts import ColumnFacts
from recpo.log.recognition import Recognition
from recpo.log.schema import LogColumns

_SCALES: Final = ((0, 1), (0.5, 5), (1, 5), (0, 5), (1, 10), (0, 10), (0, 100))
_LENGTHS: Final = (20, 50, 100, 200)
_SMALL_LOG: Final = 5_000  # events
_LARGE_CATALOG: Final = 200_000  # items
_YEAR: Final = 365.0  # days
_STEPS: Final = {"pretrain": 2_000, "mpo": 850, "gbpo": 500}  # optimizer steps to reach with epochs of small logs
_MOST_EPOCHS: Final = {"pretrain": 12, "mpo": 8, "gbpo": 3}
_LEAST_EPOCHS: Final = {"pretrain": 3, "mpo": 1, "gbpo": 1}
_MOST_STEPS: Final = 3_000  # steps of MPO, each of which scores the full catalog


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
    """

    events: int
    users: int
    items: int
    requests: int
    events_per_user: int
    days: float | None
    is_whole: bool = True


@dataclass(frozen=True)
class Label:
    """How the preference label is made.

    Attributes:
        class_name: a label of ``recpo prepare``.
        init_args: its options.
        why: the reason for the choice.
        column: column that it reads instead of the recognized label.
    """

    class_name: str
    init_args: Mapping[str, Any]
    why: str
    column: str | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of one training configuration.

    Attributes:
        history_length: events of a window.
        max_history: events that the policy can read.
        dim: width of item vectors.
        batch_size: contexts of a batch.
        epochs: passes over the training period.
        steps: approximate number of optimizer steps.
        max_steps: training ends after this many steps; None = after the epochs.
    """

    history_length: int
    max_history: int
    dim: int
    batch_size: int
    epochs: int
    steps: int
    max_steps: int | None = None


def label_of(found: Recognition, facts: Mapping[str, ColumnFacts]) -> Label:
    """The label for the feedback of a log: watch times if there are any, else ratings, else none."""
    watch, duration, rated = (
        found.column(role) for role in (LogColumns.WATCH_TIME, LogColumns.DURATION, LogColumns.LABEL)
    )
    if watch is not None and duration is not None:
        return Label(
            "WatchQuantiles", {}, f"the rank of `{watch}` among the user's watch times on items of similar duration"
        )
    if rated is not None and (texts := found.texts(LogColumns.LABEL)):
        return Label("BinaryColumn", {}, f"1 where `{rated}` is {' or '.join(texts)}, 0 for other values")
    if rated is not None and facts[rated].kind == "flag" and facts[rated].distinct > 1:
        return Label("BinaryColumn", {}, f"`{rated}` is 0 or 1")
    if rated is not None and facts[rated].distinct > 1:
        low, high = scale(facts[rated])
        return Label("NumericColumn", {"low": low, "high": high}, f"`{rated}` runs from {low:g} to {high:g}")
    if watch is not None:
        high = round(facts[watch].high or 1.0, 3)
        why = f"`{watch}` divided by its 99 % quantile, because there is no duration"
        return Label("NumericColumn", {"low": 0, "high": high}, why, watch)
    return Label("EveryEvent", {}, "no column says how good an event was: every event is a positive")


def scale(facts: ColumnFacts) -> tuple[float, float]:
    """The ends of a rating's scale: a common scale that the values reach, else the smallest and largest value."""
    least, most = facts.least or 0.0, facts.most or 1.0
    for low, high in _SCALES:
        if facts.kind != "number" and low != int(low):
            continue  # a scale of halves has values with fractions
        if low <= least and most <= high and (most == high or (facts.kind == "number" and high == 1)):
            return low, high
    return least, most


def split_of(
    found: Recognition, counts: LogCounts, label: Label, timezone: str | None = None
) -> tuple[str, dict[str, Any], str]:
    """The split's class, its options, and the reason.

    Args:
        found: the recognized columns.
        counts: size of the log.
        label: how the preference label is made.
        timezone: time zone of the log's times, if they state one; None = UTC.
    """
    if counts.days is None:
        return "LeaveLastOut", {}, "there is no clock: each user's last event is the test"
    if counts.days < 3:
        return "LeaveLastOut", {}, f"the log has {counts.days:.1f} days, fewer than periods of days need"
    if counts.days > _YEAR and label.class_name == "NumericColumn" and found.column(LogColumns.WATCH_TIME) is None:
        why = f"ratings over {counts.days:,.0f} days: few users return after months; TemporalSplit where yours do"
        return "LeaveLastOut", {}, why
    days = max(1, min(14, round(counts.days / 15)))
    options, begin = {"valid_days": days, "test_days": days}, f"the log has {counts.days:,.0f} days"
    if timezone is None:
        return "TemporalSplit", options, f'{begin}; they begin at midnight UTC, or as in timezone: "+08:00"'
    return "TemporalSplit", {**options, "timezone": timezone}, f"{begin}; the time zone is that of most times"


def objectives_of(found: Recognition, label: Label) -> dict[str, str]:
    """The alignments that a log's feedback allows, in order of preference, each with its reason."""
    chosen = {}
    disliked, propensity = found.column(LogColumns.DISLIKE), found.column(LogColumns.PROPENSITY)
    if label.class_name != "EveryEvent" or disliked is not None:
        grades = label.why if label.class_name != "EveryEvent" else f"positives, and `{disliked}`"
        chosen["mpo"] = (
            f"the log has grades ({grades}): moves the policy toward the grades that a factorization predicts"
        )
    if disliked is not None or propensity is not None:
        told = " and ".join(f"`{name}`" for name in (disliked, propensity) if name is not None)
        chosen["gbpo"] = f"the log has {told}: learns from logged feedback alone, without a reward model"
    return chosen


def sizes_of(step: str, counts: LogCounts) -> Sizes:
    """Sizes of one training, from the size of the log.

    Args:
        step: "pretrain", "gbpo" (windows of users) or "mpo" (requests).
        counts: size of the log.
    """
    history = _at_least(min(counts.events_per_user, _LENGTHS[-1]))
    window = min(history, 50)
    users = max(1, counts.users) * (1.0 if counts.is_whole else counts.events / max(1, counts.events_per_user))
    windows = max(counts.events / window, min(users, counts.events / 2))
    contexts = max(1, int(0.85 * (counts.requests if step == "mpo" else windows)))
    batch = _power_of_two(contexts / 16, 8, 128)
    if step == "mpo" and counts.items > _LARGE_CATALOG:
        batch = min(batch, 32)
    steps = -(-contexts // batch)
    epochs = max(_LEAST_EPOCHS[step], min(_MOST_EPOCHS[step], round(_STEPS[step] / steps)))
    most = _MOST_STEPS if step == "mpo" and epochs * steps > _MOST_STEPS else None
    dim = 64 if counts.events >= _SMALL_LOG else 32
    return Sizes(window, history, dim, batch, epochs, most or epochs * steps, most)


def _at_least(events: float) -> int:
    return next((length for length in _LENGTHS if length >= events), _LENGTHS[-1])


def _power_of_two(value: float, least: int, most: int) -> int:
    power = least
    while power * 2 <= min(value, most):
        power *= 2
    return power
