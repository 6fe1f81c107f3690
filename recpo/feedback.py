"""What an event says about its item: positive, skipped, disliked, unknown; and the level that the encoder reads of it.

One definition for the whole of recpo. ``recpo prepare`` fits it, writes it into the manifest, and everybody else reads
it from there: layouts, advantages, rewards, validation, evaluation, bundles.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from recpo.errors import RecpoError

UNKNOWN, DISLIKED, LOWEST, HIGHEST = 0, 1, 2, 5
"""Feedback levels; ``LOWEST .. HIGHEST`` are the quartiles of the watch time."""

GRADES: Final = (math.nan, 0.0, 0.125, 0.375, 0.625, 0.875)
"""Grade of each feedback level, in [0, 1]: the middle of its quartile; a dislike has 0, unknown feedback nan."""

FEEDBACK_KINDS: Final = ("positive", "neutral", "skipped", "disliked", "unknown")
"""Every event is of one kind."""

DEFAULT_DURATION_BASE: Final = 2.0
DEFAULT_MAX_WATCH_TIME: Final = 86_400.0
"""Seconds; a longer watch time is taken for a fault of the log."""

_HINT: Final = "prepare the log again"

_Column = TypeVar("_Column", bound=Any)
"""A NumPy array or a torch tensor."""


@dataclass(frozen=True)
class FeedbackRule:
    """Which labels and dislikes make an event positive, skipped, disliked or unknown.

    A dislike outranks the label and needs none: the event is disliked, and nothing else. Without a dislike the event is
    positive (``label >= positive_threshold``), skipped (``label < skip_threshold``), neutral (between the two) or
    unknown (no label). Evaluation sets the positives against all other labeled exposures, skipped and neutral ones
    (``AUC_other``); preference lists reject skipped ones only.

    Labels are compared as float32, as the prepared shards hold them.

    Args:
        positive_threshold: least label of a positive event, in (0, 1].
        skip_threshold: label under which an event is skipped, in [0, 1] and at most ``positive_threshold``.
    """

    positive_threshold: float = 0.75
    skip_threshold: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 < self.positive_threshold <= 1.0:
            raise RecpoError(f"feedback.positive_threshold must lie in (0, 1], got {self.positive_threshold}")
        if not 0.0 <= self.skip_threshold <= self.positive_threshold:
            raise RecpoError(
                f"feedback.skip_threshold must lie between 0 and positive_threshold ({self.positive_threshold}), or an "
                f"event would be positive and skipped at once; got {self.skip_threshold}"
            )

    def positive(self, label: _Column, dislike: _Column) -> _Column:
        """Labeled at least ``positive_threshold`` and not disliked; bool, of the shape of ``label``."""
        return (label >= float(np.float32(self.positive_threshold))) & ~dislike

    def skipped(self, label: _Column, dislike: _Column) -> _Column:
        """Labeled under ``skip_threshold`` and not disliked."""
        return (label < float(np.float32(self.skip_threshold))) & ~dislike

    def unknown(self, label: _Column, dislike: _Column) -> _Column:
        """Neither labeled nor disliked."""
        return (label != label) & ~dislike

    def counts(self, label: np.ndarray, dislike: np.ndarray) -> dict[str, int]:
        """How many events are of each kind of ``FEEDBACK_KINDS``."""
        kinds = self.positive(label, dislike), self.skipped(label, dislike), dislike, self.unknown(label, dislike)
        positive, skipped, disliked, unknown = (int(np.count_nonzero(kind)) for kind in kinds)
        neutral = len(label) - positive - skipped - disliked - unknown
        return dict(zip(FEEDBACK_KINDS, (positive, neutral, skipped, disliked, unknown), strict=True))


@dataclass(frozen=True)
class FeedbackDefinition:
    """The rule and what ``recpo prepare`` fitted on the train period: enough to read raw events as training did.

    Feedback levels, the input of the history encoder: 0 unknown, 1 disliked, 2..5 the quartile of the watch time among
    all users' train watch times on items of like duration: ``2 + |{c in cutoffs of the bucket: watch_time > c}|``,
    compared in whole milliseconds. Without cutoffs (a log without watch times) the level comes from the label: 2
    skipped, 5 positive, and between the thresholds 3 below their midpoint and 4 from it on.

    Attributes:
        rule: the thresholds.
        duration_base: base of the duration buckets, ``floor(log_base(duration + 1e-6))`` of seconds.
        cutoffs: seconds; of each bucket the smallest watch times at or below which 25, 50 and 75 % lie.
        max_watch_time: seconds; a longer watch time is unknown.
    """

    rule: FeedbackRule = field(default_factory=FeedbackRule)
    duration_base: float = DEFAULT_DURATION_BASE
    cutoffs: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    max_watch_time: float = DEFAULT_MAX_WATCH_TIME

    def levels(
        self, watch_time: np.ndarray, duration: np.ndarray, dislike: np.ndarray, label: np.ndarray
    ) -> np.ndarray:
        """Feedback levels of events, int8.

        Args:
            watch_time: ``[N]`` seconds; nan = unknown.
            duration: ``[N]`` seconds; nan, zero or negative = unknown.
            dislike: ``[N]`` bool.
            label: ``[N]`` in [0, 1]; nan = unknown. Not read where there are cutoffs.
        """
        levels = self._label_levels(np.asarray(label)) if not self.cutoffs else self._watch_levels(watch_time, duration)
        return np.where(dislike, np.int8(DISLIKED), levels)

    def buckets(self, duration: np.ndarray) -> np.ndarray:
        """Duration buckets, int64; of an unknown duration ``UNKNOWN_BUCKET``."""
        seconds = _milliseconds(duration) / 1000.0
        known = seconds > 0
        power = np.log(np.where(known, seconds, 1.0) + 1e-6) / np.log(self.duration_base)
        return np.where(known, np.floor(power), UNKNOWN_BUCKET).astype(np.int64)

    def _watch_levels(self, watch_time: np.ndarray, duration: np.ndarray) -> np.ndarray:
        watch, bucket = _milliseconds(watch_time), self.buckets(duration)
        fitted = np.array(sorted(self.cutoffs), np.int64)
        limits = _milliseconds(np.array([self.cutoffs[key] for key in fitted.tolist()]))
        place = np.minimum(np.searchsorted(fitted, bucket), len(fitted) - 1)
        possible = (watch >= 0) & (watch <= self.max_watch_time * 1000.0)  # False for nan
        known = (fitted[place] == bucket) & possible
        passed = (watch[:, None] > limits[place]).sum(1)
        return np.where(known, LOWEST + passed, UNKNOWN).astype(np.int8)

    def _label_levels(self, label: np.ndarray) -> np.ndarray:
        low, high = (np.float32(t) for t in (self.rule.skip_threshold, self.rule.positive_threshold))
        label = label.astype(np.float32)
        passed = sum((label >= limit).astype(np.int8) for limit in (low, (low + high) / 2, high))
        return np.where(np.isnan(label), UNKNOWN, LOWEST + passed).astype(np.int8)

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads: the thresholds, ``duration_base``, ``max_watch_time``, ``cutoffs`` by bucket."""
        cutoffs = {str(bucket): list(limits) for bucket, limits in sorted(self.cutoffs.items())}
        fitted = {"duration_base": self.duration_base, "cutoffs": cutoffs, "max_watch_time": self.max_watch_time}
        return {**asdict(self.rule), **fitted}

    @classmethod
    def from_json(cls, content: Any, source: str = "feedback") -> FeedbackDefinition:
        """The definition that ``to_json`` described.

        Args:
            content: the parsed JSON.
            source: where it stands, for the message.

        Raises:
            RecpoError: a key is missing, a value is of another type, thresholds or cutoffs make no sense.
        """
        try:
            rule = FeedbackRule(float(content["positive_threshold"]), float(content["skip_threshold"]))
            cutoffs = {int(bucket): tuple(map(float, limits)) for bucket, limits in content["cutoffs"].items()}
            base, longest = float(content["duration_base"]), float(content["max_watch_time"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecpoError(f"{source} is damaged ({error!r}): {_HINT}") from error
        if not (math.isfinite(base) and base > 1.0):
            raise RecpoError(f"{source}: duration_base {base} must be a number above 1: {_HINT}")
        if not longest > 0.0:
            raise RecpoError(f"{source}: max_watch_time {longest} must be above 0: {_HINT}")
        for bucket, limits in cutoffs.items():
            ascending = all(math.isfinite(limit) and limit >= 0 for limit in limits) and list(limits) == sorted(limits)
            if len(limits) != 3 or not ascending:
                raise RecpoError(
                    f"{source}: cutoffs of bucket {bucket} are {list(limits)}, expected three ascending times in "
                    f"seconds: {_HINT}"
                )
        return cls(rule, base, cutoffs, longest)  # type: ignore[arg-type]  # three each, as checked


UNKNOWN_BUCKET: Final = -1001
"""Bucket of unknown durations; no duration that is counted in milliseconds lies in it."""


def _milliseconds(seconds: np.ndarray) -> np.ndarray:
    """Whole milliseconds as float64, halves up; nan where the time is unknown or infinite."""
    time = np.asarray(seconds, np.float64)
    return np.floor(np.where(np.isfinite(time), time, np.nan) * 1000.0 + 0.5)
