"""Turns the events of a shard into ``FeedbackBatch``: the history of each context and the positions to score.

A *window* is one context: history events ``[history_start, history_stop)`` and slate events ``[slate_start,
slate_stop)``. Histories index the shard's events in the order of time. Slates index them in the order of requests
(``Events.by_request``), in which the events of a request are adjacent even if requests overlap in time. In the layouts
of this module, every event of the training period is a slate position of exactly one window.

No position ever sees an event of its own request or a later one: its history ends where its request starts
(``visible``). A position sees an empty history only if nothing came before its request. Layouts that sample other items
into their slates are in ``recpo.batches.preference_lists``. A session ends if the user's next event is more than
``SESSION_GAP_MS`` later. What follows a user's last event of the training period is unknown, so that event ends no
session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.base.errors import PositiveInt, validate_range, validate_ranges
from recpo.base.feedback import GRADES
from recpo.base.types import FeedbackBatch, Histories, Slates, SlateTraits
from recpo.log.prepared import Events, Keys, Prepared, run_change

SESSION_GAP_MS = 30 * 60 * 1000


class Windows(NamedTuple):
    """Index ranges of contexts, each ``[N]`` int64: histories in the order of time, slates in that of requests."""

    history_start: np.ndarray
    history_stop: np.ndarray
    slate_start: np.ndarray
    slate_stop: np.ndarray

    def take(self, rows: np.ndarray) -> Windows:
        """Selects the windows ``rows``."""
        return Windows(*(column[rows] for column in self))

    def empty(self, count: int) -> Windows:
        """``count`` windows without history and without positions."""
        nothing = np.zeros(count, np.int64)
        return Windows(nothing, nothing, nothing, nothing)


BatchMaker = Callable[[Events, Windows, np.ndarray, int], FeedbackBatch]
"""Gathers windows of a shard: ``(events, windows, context_ids, epoch) -> batch``. It may cache facts about a shard."""


class Layout(ABC):
    """How a user's events are cut into contexts and slates.

    Attributes:
        history_length: H, maximum number of history events of a context.
        cuts_by_label: ``windows`` also needs to know which events are positive.
    """

    history_length: int
    cuts_by_label: ClassVar[bool] = False

    def __post_init__(self) -> None:
        validate_ranges(self)

    @abstractmethod
    def windows(self, keys: Keys) -> Windows:
        """Cuts the events of a shard, in the order of requests; reads ``keys.positive`` only with ``cuts_by_label``."""

    def scoring_windows(self, keys: Keys) -> Windows:
        """The windows of a shard that have something to score; context rows of an extension are only read."""
        windows = self.windows(keys)
        if keys.is_target is None:
            return windows
        before = np.concatenate([[0], np.cumsum(keys.is_target)])
        return windows.take(np.flatnonzero(before[windows.slate_stop] > before[windows.slate_start]))

    @property
    def traits(self) -> SlateTraits:
        """The properties of the slates that training needs to know."""
        return SlateTraits()

    def batch_maker(self, prepared: Prepared, seed: int) -> BatchMaker:
        """The function that gathers windows into batches; ``seed`` determines which items it samples of the catalog."""
        return feedback_batch


@dataclass(frozen=True)
class SequenceLayout(Layout):
    """The slate is a part of the user's own sequence: every event is scored after the events before its request.

    A window reads at most H events and scores at most H, in one pass of a causal encoder. Windows are cut at the
    boundaries of requests, starting from the user's last event, so that the most recent window is full. If a user has
    several windows, they overlap: the first events that a window reads are scored in the previous window, so that its
    early positions have a history as well. Every event is scored in exactly one window. A position sees at least
    ``min(overlap, events before its request)`` events, and the last position of a full window sees H. Only a request
    with more than H events is cut, into windows with the same history.

    Use it for next-item pre-training and, with the feedback of the same events, for alignment from logs.

    Args:
        history_length: H.
        overlap: O, minimum history of a position if the user has that many events. 1 scores the most positions per
            pass; H gives every request its own pass. None = H / 4, rounded up: with H = 50 on a simulated log it gained
            0.008 of validation NDCG@10 for a tenth of the speed; H / 2 costs a quarter (docs/training.md).
        last_window_only: keep only each user's most recent window (the convention of SASRec's evaluation protocol).

    Raises:
        RecpoError: history_length below 1, or overlap outside 1..H.
    """

    history_length: PositiveInt = 50
    overlap: PositiveInt | None = None
    last_window_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.overlap is None or self.overlap <= self.history_length
        validate_range(fits, "overlap", f"must be at most history_length {self.history_length}", self.overlap)

    @property
    def least_history(self) -> int:
        """The overlap in events."""
        return -(-self.history_length // 4) if self.overlap is None else self.overlap

    def windows(self, keys: Keys) -> Windows:
        """See ``Layout.windows``."""
        user, request_start = keys.user, keys.request_start
        user_offsets = np.append(np.flatnonzero(run_change(user)), len(user))
        first = self._first_of_window(user, request_start, user_offsets)
        # Windows are found from the end; each pass finds the n-th window of all users that have one.
        begins, stops = user_offsets[:-1], user_offsets[1:]
        starts_found, stops_found = [], []
        while len(stops):
            slate_start = first[stops - 1]
            starts_found.append(slate_start)
            stops_found.append(stops)
            more = slate_start > begins if not self.last_window_only else np.zeros(len(stops), bool)
            begins, stops = begins[more], slate_start[more]
        if not starts_found:
            return Windows(user_offsets[:0], user_offsets[:0], user_offsets[:0], user_offsets[:0])
        slate_start, slate_stop = np.sort(np.concatenate(starts_found)), np.sort(np.concatenate(stops_found))
        history_stop = request_start[slate_stop - 1]
        own_start = user_offsets[np.searchsorted(user_offsets, slate_start, side="right") - 1]
        return Windows(np.maximum(history_stop - self.history_length, own_start), history_stop, slate_start, slate_stop)

    def _first_of_window(self, user: np.ndarray, request_start: np.ndarray, user_offsets: np.ndarray) -> np.ndarray:
        """For every event, the first event of the window that ends with it, all in the order of requests."""
        index = np.arange(len(user))
        own_start = np.repeat(user_offsets[:-1], np.diff(user_offsets))
        read_from = request_start - self.history_length
        # if the user's first events are within reach, no history is cut; otherwise the overlap must fit
        earliest = np.where(read_from <= own_start, own_start, read_from + self.least_history)
        first = np.maximum(np.searchsorted(request_start, earliest), index + 1 - self.history_length)
        request_first = last_true(run_change(request_start))
        next_request = np.searchsorted(request_start, request_start[first], side="right")
        cuts_request = request_first[first] < first
        # one request less, unless it is the only one: then it is longer than H and is cut
        return np.where(cuts_request & (next_request <= index), next_request, first)


@dataclass(frozen=True)
class ImpressionLayout(Layout):
    """The slate is one request: all its items are scored after the same history.

    Attributes:
        history_length: H, number of events before the request that the policy sees.
        slate_length: S; a longer request is cut into several contexts with the same history.
    """

    history_length: int = 50
    slate_length: PositiveInt = 20

    def windows(self, keys: Keys) -> Windows:
        """See ``Layout.windows``."""
        starts = np.flatnonzero(run_change(keys.request_start))
        stops = np.append(starts[1:], len(keys.user))
        counts = -(-(stops - starts) // self.slate_length)
        owner = np.repeat(np.arange(len(starts)), counts)
        part = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        slate_start = starts[owner] + part * self.slate_length
        slate_stop = np.minimum(slate_start + self.slate_length, stops[owner])
        return Windows(*preceding(keys, slate_start, self.history_length), slate_start, slate_stop)

    @property
    def traits(self) -> SlateTraits:
        """See ``Layout.traits``."""
        return SlateTraits(one_request=True)


def feedback_batch(events: Events, windows: Windows, context_ids: np.ndarray, epoch: int = 0) -> FeedbackBatch:
    """Gathers windows into right-padded tensors, equal in every epoch. H and S are the longest among these windows."""
    place, valid = ranges(windows.slate_start, windows.slate_stop)
    index, lengths = events.by_request[place], windows.history_stop - windows.history_start
    valid &= events.is_target[index]  # context rows of an extension's shards are not positions
    # the history ends where the event's request starts, because items shown together were chosen together
    visible = np.clip(events.request_start[index] - windows.history_start[:, None], 0, lengths[:, None])
    slates = logged_slates(events, index, valid, visible)
    return FeedbackBatch(
        histories_of(events, windows.history_start, windows.history_stop),
        slates._replace(ends_session=padded(_ends_session(events, place), valid)),
        torch.from_numpy(context_ids),
        user_ids=torch.from_numpy(events.user_index[windows.slate_start].astype(np.int64)),
    )


def preceding(keys: Keys, place: np.ndarray, history_length: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 of the ``history_length`` events before the requests of the events at ``place``."""
    stop = keys.request_start[place]
    return np.maximum(stop - history_length, last_true(run_change(keys.user))[place]), stop


def last_true(change: np.ndarray) -> np.ndarray:
    """For every row, the index of the last True up to it; the first row is True."""
    return np.maximum.accumulate(np.where(change, np.arange(len(change)), 0))


def _ends_session(events: Events, place: np.ndarray) -> np.ndarray:
    """Which of the events at ``place``, in the order of requests, end their session."""
    here, following = events.by_request[place], events.by_request[np.minimum(place + 1, len(events.timestamp) - 1)]
    same_user = events.user_index[following] == events.user_index[here]
    ends: np.ndarray = same_user & (events.timestamp[following] - events.timestamp[here] > SESSION_GAP_MS)
    return ends


def logged_slates(events: Events, index: np.ndarray, valid: np.ndarray, visible: np.ndarray) -> Slates:
    """The events ``index [B, S]`` as slates, empty where they are not ``valid``."""
    with np.errstate(divide="ignore"):
        logp_behavior = np.log(events.propensity[index]).astype(np.float32)
    return Slates(
        item_ids=padded(events.item_index[index], valid),
        visible=padded(visible, valid),
        mask=torch.from_numpy(valid),
        label=padded(events.label[index], valid, np.nan),
        dislike=padded(events.dislike[index], valid),
        positive=padded(events.positive[index], valid),
        grade=padded(np.array(GRADES, np.float32)[events.feedback[index]], valid, np.nan),
        logp_behavior=padded(logp_behavior, valid, np.nan),
        is_logged=torch.from_numpy(valid),
        is_random=None if events.is_random is None else padded(events.is_random[index], valid),
        behaviors=None if events.behaviors is None else padded(events.behaviors[index], valid),
    )


def histories_of(events: Events, start: np.ndarray, stop: np.ndarray) -> Histories:
    """Gathers the events ``[start, stop)`` of every context; event ``stop`` is the first of the request after them."""
    index, valid = ranges(start, stop)
    user = context = None
    if events.users is not None:
        user = events.users.rows(np.searchsorted(events.offsets, stop, side="right") - 1).tensors()
    if events.context is not None:
        request, known = ranges(start, stop + 1, least=2)  # one more than the events, which have a place at least
        context = events.context.rows(request).where(known).tensors()
    return Histories(
        item_ids=padded(events.item_index[index], valid),
        lengths=torch.from_numpy(stop - start),
        feedback=padded(events.feedback[index], valid),
        timestamps=padded(events.timestamp[index], valid),
        behaviors=None if events.behaviors is None else padded(events.behaviors[index], valid),
        user=user,
        context=context,
    )


def ranges(start: np.ndarray, stop: np.ndarray, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Indices ``[N, L]`` of the ranges, and which of them are inside; L is the longest range, at least ``least``."""
    width = max(least, int((stop - start).max(initial=0)))
    index = start[:, None] + np.arange(width)
    valid = index < stop[:, None]
    # an index outside its range is masked below; it only has to be valid, and 0 is valid in any non-empty shard
    return np.where(valid, index, 0), valid


def padded(values: np.ndarray, valid: np.ndarray, fill: float = 0) -> Tensor:
    """``values`` if ``valid``, else ``fill``."""
    return torch.from_numpy(np.where(valid, values, np.asarray(fill, dtype=values.dtype)))
