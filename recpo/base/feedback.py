"""The kind of each event (positive, skipped, disliked, unknown) and the feedback level that the encoder reads.

recpo has one definition of feedback. ``recpo prepare`` fits it and writes it into the manifest. Layouts, advantages,
rewards, validation, evaluation and bundles read it from there.
"""

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, Self, TypeVar

import numpy as np

from recpo.base.errors import RecpoError, reading, validate_range

NUM_GRADES: Final = 16
"""Feedback levels of known feedback without a dislike: sixteenths of the watch times, or of the labels."""

UNKNOWN, DISLIKED, LOWEST, HIGHEST = 0, 1, 2, 1 + NUM_GRADES
"""Feedback levels."""

LEAST_POSITIVE_LEVEL: Final = LOWEST + NUM_GRADES // 2
"""Baselines of positives read the upper half of the levels of a history as positive."""

GRADES: Final = (math.nan, 0.0, *((step + 0.5) / NUM_GRADES for step in range(NUM_GRADES)))
"""Grade of each feedback level, in [0, 1]: the middle of its sixteenth. A dislike has 0, unknown feedback has nan."""

FEEDBACK_KINDS: Final = ("positive", "neutral", "skipped", "disliked", "unknown")
"""Every event has exactly one kind."""

DEFAULT_DURATION_BASE: Final = 2.0
DEFAULT_MAX_WATCH_TIME: Final = 86_400.0
"""Seconds. A longer watch time is treated as an error in the log."""

_HINT: Final = "prepare the log again"

_Column = TypeVar("_Column", bound=Any)
"""A NumPy array or a torch tensor."""


@dataclass(frozen=True)
class FeedbackRule:
    """Which labels and dislikes make an event positive, skipped, disliked or unknown.

    A dislike overrides the label: a disliked event has no other kind, with or without a label. Without a dislike, the
    event is positive (``label >= positive_threshold``), skipped (``label < skip_threshold``), neutral (between the two)
    or unknown (no label). Evaluation compares positives with all other exposures, skipped, neutral and disliked
    (``AUC_other``). Preference lists reject only skipped ones.

    Labels are compared as float32, the type in the prepared shards.

    Args:
        positive_threshold: smallest label of a positive event, in (0, 1].
        skip_threshold: events with a smaller label are skipped; in [0, 1] and at most ``positive_threshold``.
    """

    positive_threshold: float = 0.75
    skip_threshold: float = 0.25

    def __post_init__(self) -> None:
        positive, skipped = self.positive_threshold, self.skip_threshold
        validate_range(0.0 < positive <= 1.0, "feedback.positive_threshold", "must lie in (0, 1]", positive)
        rule = f"must lie between 0 and positive_threshold ({positive}), or an event could be both positive and skipped"
        validate_range(0.0 <= skipped <= positive, "feedback.skip_threshold", rule, skipped)

    def positive(self, label: _Column, dislike: _Column) -> _Column:
        """Whether the label is at least ``positive_threshold`` without a dislike; bool, same shape as ``label``."""
        return (label >= float(np.float32(self.positive_threshold))) & ~dislike

    def skipped(self, label: _Column, dislike: _Column) -> _Column:
        """Whether the label is below ``skip_threshold`` without a dislike."""
        return (label < float(np.float32(self.skip_threshold))) & ~dislike

    def unknown(self, label: _Column, dislike: _Column) -> _Column:
        """Whether the event has neither a label nor a dislike."""
        return (label != label) & ~dislike

    @property
    def level_limits(self) -> np.ndarray:
        """``[15]`` float32: the smallest label of every level of feedback but the lowest; four levels per kind."""
        low, high = (np.float32(t) for t in (self.skip_threshold, self.positive_threshold))
        quarters = np.array([0.0, low, (low + high) / 2, high, 1.0])
        return np.interp(np.arange(1, NUM_GRADES) / NUM_GRADES, np.arange(5) / 4, quarters).astype(np.float32)

    def counts(self, label: np.ndarray, dislike: np.ndarray) -> dict[str, int]:
        """Number of events of each kind in ``FEEDBACK_KINDS``."""
        kinds = self.positive(label, dislike), self.skipped(label, dislike), dislike, self.unknown(label, dislike)
        positive, skipped, disliked, unknown = (int(np.count_nonzero(kind)) for kind in kinds)
        neutral = len(label) - positive - skipped - disliked - unknown
        return dict(zip(FEEDBACK_KINDS, (positive, neutral, skipped, disliked, unknown), strict=True))


@dataclass(frozen=True)
class FeedbackDefinition:
    """The rule and the values that ``recpo prepare`` fitted on the train period, for reading raw events as in training.

    Feedback levels are an input of the history encoder: 0 unknown, 1 disliked, and 2 to 17 for the sixteenth of the
    watch time among all train watch times on items of similar duration. The level is
    ``2 + |{c in cutoffs of the bucket: watch_time > c}|``, compared in integer milliseconds, and, with a
    ``duration_exponent``, as the watch time would be in the middle of the duration bucket. Without cutoffs (a log
    without watch times) the level comes from the label: four levels of equal width for skipped labels, eight for those
    between the thresholds, and four for positive ones.

    Attributes:
        rule: the thresholds.
        duration_base: base of the duration buckets, ``floor(log_base(duration + 1e-6))`` with the duration in seconds.
        cutoffs: for each bucket, the 1/16, 2/16, ..., 15/16 quantiles of its watch times in seconds, or those of
            ``Label.cutoffs``.
        max_watch_time: seconds; a longer watch time counts as unknown.
        label: how ``recpo prepare`` made the labels, for people; empty = not by ``recpo prepare``.
        duration_exponent: exponent with which watch times grow with the duration inside a bucket.
        every_event: an event without a label is positive, because every event of the log was.
    """

    rule: FeedbackRule = field(default_factory=FeedbackRule)
    duration_base: float = DEFAULT_DURATION_BASE
    cutoffs: dict[int, tuple[float, ...]] = field(default_factory=dict)
    max_watch_time: float = DEFAULT_MAX_WATCH_TIME
    label: str = ""
    duration_exponent: float = 0.0
    every_event: bool = False

    @property
    def levels_from(self) -> Literal["watch times", "labels"]:
        """Where the feedback levels of events come from."""
        return "watch times" if self.cutoffs else "labels"

    def validate_same(self, other: Self, own: object, others: object) -> None:
        """Raises unless an event has the same meaning by both definitions.

        Cutoffs may differ in value: ``recpo prepare`` of a longer log fits them again.

        Args:
            other: the definition to compare with.
            own: the directory of this definition, for the message.
            others: the directory of ``other``.

        Raises:
            RecpoError: the labels, the thresholds, the duration buckets or the longest watch times differ, or only one
                of them reads levels from watch times.
        """
        pairs = zip(self._meaning().items(), other._meaning().values(), strict=True)
        different = [f"{name} {here}, not {there}" for (name, here), there in pairs if here != there]
        if different:
            raise RecpoError(
                f"{own}: made with another definition of feedback than {others}: {'; '.join(different)}. Name the "
                "data that it was made from or an extension of them, or prepare the log with the same options",
                code="mismatch",
                field="feedback",
            )

    def _meaning(self) -> dict[str, object]:
        """What ``validate_same`` compares."""
        durations = {"duration_base": self.duration_base, "duration_exponent": self.duration_exponent}
        fitted = {**durations, "max_watch_time": self.max_watch_time}
        return {"label": self.label or "unknown", **asdict(self.rule), **fitted, "levels from": self.levels_from}

    def levels(
        self, watch_time: np.ndarray, duration: np.ndarray, dislike: np.ndarray, label: np.ndarray
    ) -> np.ndarray:
        """Feedback levels of events, int8.

        Args:
            watch_time: ``[N]`` seconds; nan = unknown.
            duration: ``[N]`` seconds; nan, zero or negative = unknown.
            dislike: ``[N]`` bool.
            label: ``[N]`` in [0, 1]; nan = unknown, or 1 with ``every_event``. Used only without cutoffs.
        """
        label = np.where(np.isnan(label), 1.0, label) if self.every_event else label
        levels = self._label_levels(np.asarray(label)) if not self.cutoffs else self._watch_levels(watch_time, duration)
        return np.where(dislike, np.int8(DISLIKED), levels)

    def buckets(self, duration: np.ndarray) -> np.ndarray:
        """Duration buckets, int64; ``UNKNOWN_BUCKET`` for unknown durations, and for all without fitted ones."""
        if self.cutoffs.keys() == {UNKNOWN_BUCKET}:
            return np.full(np.shape(duration), UNKNOWN_BUCKET)
        power = self._powers(duration)
        return np.where(np.isnan(power), UNKNOWN_BUCKET, np.floor(power)).astype(np.int64)

    def _powers(self, duration: np.ndarray) -> np.ndarray:
        """``log_base(duration + 1e-6)``; nan for unknown durations."""
        seconds = _milliseconds(duration) / 1000.0
        return np.asarray(np.log(np.where(seconds > 0, seconds, np.nan) + 1e-6) / np.log(self.duration_base))

    def _watch_levels(self, watch_time: np.ndarray, duration: np.ndarray) -> np.ndarray:
        watch, bucket = _milliseconds(watch_time), self.buckets(duration)
        possible = (watch >= 0) & (watch <= self.max_watch_time * 1000.0)  # False for nan
        if self.duration_exponent:
            watch = self._compared(watch, self._powers(duration))
        fitted, limits = self._limits
        place = np.minimum(np.searchsorted(fitted, bucket), len(fitted) - 1)
        known = (fitted[place] == bucket) & possible
        passed = sum(watch > cutoff[place] for cutoff in limits.T)
        return np.where(known, LOWEST + passed, UNKNOWN).astype(np.int8)

    def _compared(self, watch: np.ndarray, power: np.ndarray) -> np.ndarray:
        """``watch (c / d)^e`` with c the middle of the bucket; as ``recpo.log.shaping.compared_ms``, in its order."""
        to_middle = (np.floor(power) + 0.5 - power) * np.log(self.duration_base)
        return np.asarray(np.floor(watch * np.exp(to_middle * self.duration_exponent) + 0.5))

    @cached_property
    def _limits(self) -> tuple[np.ndarray, np.ndarray]:
        """The fitted buckets, ascending, and their cutoffs in milliseconds ``[buckets, 15]``."""
        fitted = np.array(sorted(self.cutoffs), np.int64)
        return fitted, _milliseconds(np.array([self.cutoffs[key] for key in fitted.tolist()]))

    def _label_levels(self, label: np.ndarray) -> np.ndarray:
        label = label.astype(np.float32)
        passed = sum(label >= limit for limit in self.rule.level_limits)
        return np.where(np.isnan(label), UNKNOWN, LOWEST + passed).astype(np.int8)

    def to_json(self) -> dict[str, Any]:
        """The input of ``from_json``: the thresholds and all fields, ``cutoffs`` by bucket."""
        cutoffs = {str(bucket): list(limits) for bucket, limits in sorted(self.cutoffs.items())}
        durations = {"duration_base": self.duration_base, "duration_exponent": self.duration_exponent}
        fitted = {"cutoffs": cutoffs, "max_watch_time": self.max_watch_time, "label": self.label}
        return {"levels": HIGHEST + 1, **asdict(self.rule), **durations, **fitted, "every_event": self.every_event}

    @classmethod
    def from_json(cls, content: Any, source: str = "feedback") -> Self:
        """Reads the output of ``to_json``.

        Args:
            content: the parsed JSON.
            source: the name of its file, for messages.

        Raises:
            RecpoError: a key is missing, a value has the wrong type, thresholds or cutoffs are out of range, or it was
                made when there were other feedback levels.
        """
        with reading(source, KeyError, TypeError, ValueError, AttributeError, remedy=_HINT, field="feedback"):
            if content["levels"] != HIGHEST + 1:
                raise ValueError(f"{content['levels']} feedback levels, expected {HIGHEST + 1}")
            rule = FeedbackRule(float(content["positive_threshold"]), float(content["skip_threshold"]))
            cutoffs = {int(bucket): tuple(map(float, limits)) for bucket, limits in content["cutoffs"].items()}
            base, longest = float(content["duration_base"]), float(content["max_watch_time"])
            label, exponent = str(content["label"]), float(content["duration_exponent"])
            every_event = bool(content["every_event"])
            if not (1.0 < base < math.inf and longest > 0.0 and 0.0 <= exponent <= 1.0):
                raise ValueError(f"duration_base {base}, duration_exponent {exponent}, max_watch_time {longest}")
            for limits in cutoffs.values():
                if len(limits) != NUM_GRADES - 1 or not all(0.0 <= a <= b < math.inf for a, b in pairwise(limits)):
                    raise ValueError(f"cutoffs {limits}: expected {NUM_GRADES - 1} ascending times in seconds")
        return cls(rule, base, cutoffs, longest, label, exponent, every_event)


UNKNOWN_BUCKET: Final = -1001
"""Bucket of unknown durations. No duration in milliseconds falls into it."""


def _milliseconds(seconds: np.ndarray) -> np.ndarray:
    """Integer milliseconds as float64, halves rounded up; nan if the time is unknown or infinite."""
    time = np.asarray(seconds, np.float64)
    return np.floor(np.where(np.isfinite(time), time, np.nan) * 1000.0 + 0.5)
