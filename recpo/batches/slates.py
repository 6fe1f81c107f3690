"""Turns the events of a shard into batches: the history of each context and the positions to score.

A *window* is one context: history events ``[history_start, history_stop)`` and slate events ``[slate_start,
slate_stop)``. Histories index the shard's events in the order of time. Slates index them in the order of requests
(``Events.by_request``), in which the events of a request are adjacent even if requests overlap in time. In the layouts
of this module, every event of the training period is a slate position of exactly one window.

No position ever sees an event of its own request or a later one: its history ends where its request starts
(``visible``). A position sees an empty history only if nothing came before its request. Layouts that sample other items
into their slates are in ``recpo.batches.preference_lists``. A session ends if the user's next event is more than
``SESSION_GAP_MS`` later. What follows a user's last event of the training period is unknown, so that event ends no
session.

The held-out users of a period are streamed shard by shard, with the same number of batches on every rank and every user
once (``HeldOutBatches``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from recpo.base.errors import PositiveInt, RecpoError, validate_range, validate_ranges
from recpo.base.feature_encoding import by_source, decoded
from recpo.base.features import Reads
from recpo.base.feedback import GRADES
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Slates, SlateTraits
from recpo.log.locations import Place
from recpo.log.prepared import Events, Keys, Period, Prepared, run_change, run_offsets
from recpo.log.schema import LogColumns

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
        user_offsets = run_offsets(user)
        first = self._first_of_window(user, request_start, user_offsets)
        # Windows are found from the end; each pass finds the n-th window of all users that have one.
        begins, stops = user_offsets[:-1], user_offsets[1:]
        starts_found, stops_found = [user_offsets[:0]], [user_offsets[:0]]
        while len(stops):
            slate_start = first[stops - 1]
            starts_found.append(slate_start)
            stops_found.append(stops)
            more = slate_start > begins if not self.last_window_only else np.zeros(len(stops), bool)
            begins, stops = begins[more], slate_start[more]
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
        offsets = run_offsets(keys.request_start)
        starts, stops = offsets[:-1], offsets[1:]
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


MOST_PLACES = 1 << 20
"""Maximum of a batch's padded width (held-out events plus past items) times its number of users."""


class Rank(NamedTuple):
    """Rank of this process, number of ranks, and number of micro-batches per optimizer step."""

    rank: int = 0
    world_size: int = 1
    accumulate: int = 1


class HeldOutBatches(IterableDataset[EvaluationBatch]):
    """The users of a held-out split, batch by batch; every rank takes every ``world_size``-th batch.

    A batch is as wide as its most active user, so it has fewer users if one of them is very active (``MOST_PLACES``).
    Users are never split. Every rank yields the same number of batches, because all ranks take part in a lookup in a
    sharded table. A rank with too few batches adds batches of a user who was already counted, without that user's
    held-out events. With ``max_users``, only that many users are used, evenly spaced, because the first users of a log
    may differ from the others. With ``repeats``, lists may have items of the user's past; None = as the data say
    (``Prepared.repeats``).
    """

    def __init__(
        self,
        prepared: Prepared,
        split: Period,
        history_length: int,
        batch_size: int,
        rank: Rank,
        max_users: int | None = None,
        reads: Reads = Reads(),  # noqa: B008  immutable
        repeats: bool | None = None,
    ) -> None:
        self._reads, self._repeats = reads, repeats
        self._prepared, self._split, self._history_length = prepared, split, history_length
        self._batch_size, self._rank, self._max_users = batch_size, rank, max_users

    def __iter__(self) -> Iterator[EvaluationBatch]:
        plan, world_size, loaded = self._plan, self._rank.world_size, -1
        for turn in range(self._rank.rank, -(-len(plan) // world_size) * world_size, world_size):
            shard, users = plan[min(turn, len(plan) - 1)]
            if shard != loaded:
                events, loaded = self._prepared.load(self._split, shard, self._reads), shard
            some = users if turn < len(plan) else users[:1]
            batch = held_out_batch(
                self._prepared, self._split, shard, events, some, self._history_length, self._repeats
            )
            yield batch if turn < len(plan) else _without_targets(batch)

    @cached_property
    def _plan(self) -> list[tuple[int, np.ndarray]]:
        """The shard of each batch, and its users as rows of that shard."""
        shards = self._prepared.manifest["shards"][self._split]
        before = np.concatenate([[0], np.cumsum([shard["users"] for shard in shards], dtype=np.int64)])
        total = int(before[-1])
        count = total if self._max_users is None else min(self._max_users, total)
        chosen = np.arange(count) * total // max(1, count)
        plan = []
        for shard, first in enumerate(before[:-1]):
            users = chosen[np.searchsorted(chosen, first) : np.searchsorted(chosen, before[shard + 1])] - first
            if len(users):
                targets, past = self._prepared.held_out_sizes(self._split, shard)
                plan += [(shard, batch) for batch in _cut(users, targets[users], past[users], self._batch_size)]
        return plan


def _cut(users: np.ndarray, targets: np.ndarray, past: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Cuts ``users`` into batches, in order. Each has at most ``batch_size`` users and fits ``MOST_PLACES``."""
    begin = 0
    while begin < len(users):
        some = slice(begin, begin + batch_size)
        width = np.maximum.accumulate(targets[some]) + np.maximum.accumulate(past[some])
        fit = int(np.searchsorted(width * np.arange(1, len(width) + 1), MOST_PLACES, side="right"))
        yield users[begin : begin + max(1, fit)]
        begin += max(1, fit)


def held_out_batch(
    prepared: Prepared,
    split: Period,
    shard: int,
    events: Events,
    users: np.ndarray,
    history_length: int,
    repeats: bool | None = None,
) -> EvaluationBatch:
    """Some users of a shard of a held-out period. Retired items are excluded, too.

    Args:
        prepared: the data.
        split: the period.
        shard: index of the shard.
        events: its events.
        users: ``[B]`` rows of ``events.offsets``.
        history_length: H.
        repeats: whether lists may have items of the past; None = as the data say.
    """
    past = prepared.past_items(split, shard, events.user_index[events.offsets[users]])
    batch = evaluation_batch(events, users, history_length, *past)
    allowed = prepared.repeats if repeats is None else repeats
    exclude, retired = batch.past[:, :0] if allowed else batch.past, torch.from_numpy(prepared.retired_items)
    return batch._replace(exclude=torch.cat([exclude, retired.expand(len(users), -1)], 1) if len(retired) else exclude)


def evaluation_batch(
    events: Events, users: np.ndarray, history_length: int, past_counts: np.ndarray, past_items: np.ndarray
) -> EvaluationBatch:
    """Held-out users: their events before the period, and the events of the period.

    The history ends before the first request of the period, so that it does not contain a part of this request.

    Args:
        events: the events of a held-out shard.
        users: ``[B]`` rows of ``events.offsets``.
        history_length: H.
        past_counts: ``[B]`` number of items that each user had before the period.
        past_items: those items, user by user.
    """
    starts, stops = events.offsets[users], events.offsets[users + 1]
    boundary, known = _history_ends(events, starts, stops)
    histories = histories_of(events, np.maximum(starts, known - history_length), known)
    index, valid = ranges(boundary, stops)
    slates = logged_slates(events, index, valid, histories.lengths[:, None].numpy())
    place, is_past = ranges(np.cumsum(past_counts) - past_counts, np.cumsum(past_counts))
    past = padded(np.append(past_items, 0)[place], is_past)
    user_ids = torch.from_numpy(events.user_index[starts].astype(np.int64))
    return EvaluationBatch(FeedbackBatch(histories, slates, user_ids, user_ids=user_ids), past, past)


def _history_ends(events: Events, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For users with rows ``starts .. stops``: the first row of the period, and the row where the history ends."""
    targets_before = np.concatenate([[0], np.cumsum(events.is_target)])
    boundary = stops - (targets_before[stops] - targets_before[starts])
    ends = np.stack([boundary, stops], axis=1).ravel()
    first_request = np.minimum.reduceat(np.append(events.request_start, len(events.request_start)), ends)[::2]
    return boundary, np.minimum(boundary, first_request)


class HeldOutHistories:
    """The raw events of held-out users before the period, as a server receives them, without feedback levels.

    The shard of the last requested users is in memory, so request users in the order of ``HeldOutBatches``.

    Args:
        prepared: the data.
        split: the held-out period.
        reads: what to read besides items, feedback and times.
    """

    def __init__(self, prepared: Prepared, split: Period, reads: Reads = Reads()) -> None:  # noqa: B008  immutable
        self._prepared, self._split, self._reads = prepared, split, reads
        self._items, self._shard = prepared.item_ids(), -1
        self._context = prepared.fitted_features("context") if reads.context else None
        self._user = prepared.fitted_features("user") if reads.user else None

    def events(self, users: np.ndarray) -> pa.Table:
        """The events of ``users [B]``, in the order of time. ``user_id`` is the row of the user in ``users.parquet``.

        ``item_id`` is the external id. The other columns are those that ``HistoryReader`` reads. A user without an
        event before the period has no row.

        Raises:
            RecpoError: the users are not all in one shard.
        """
        found = self._rows_of(users)
        starts, stops = self._events.offsets[found], self._events.offsets[found + 1]
        index, kept = ranges(starts, _history_ends(self._events, starts, stops)[1])
        rows = index[kept]
        return pa.table(
            {
                LogColumns.USER_ID: self._events.user_index[rows].astype(np.int64),
                LogColumns.ITEM_ID: self._items.to_external(self._events.item_index[rows]),
                LogColumns.TIMESTAMP: self._events.timestamp[rows],
                LogColumns.DISLIKE: self._events.dislike[rows],
                **{name: values[rows] for name, values in self._raw.items()},
                **self._behaviors(rows),
                **self._contexts(rows),
            }
        )

    def requests(self, users: np.ndarray) -> pa.Table | None:
        """``user_id`` and the features of each user's first request of the period; None = not read."""
        if self._context is None:
            return None
        found = self._rows_of(users)
        ends = _history_ends(self._events, self._events.offsets[found], self._events.offsets[found + 1])[1]
        return pa.table({LogColumns.USER_ID: users, **self._contexts(ends)})

    def user_features(self, users: np.ndarray) -> pa.Table | None:
        """``user_id`` and the features of ``users``, named by the columns of the user table; None = not read."""
        if self._user is None:
            return None
        order = np.argsort(users)
        columns = decoded(self._user, self._prepared.user_features(users[order]))
        return pa.table({LogColumns.USER_ID: users[order], **by_source(self._user, columns)})

    def _behaviors(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        bits = self._events.behaviors
        if bits is None:
            return {}
        return {name: (bits[rows] >> bit & 1).astype(bool) for bit, name in enumerate(self._prepared.behaviors)}

    def _contexts(self, rows: np.ndarray) -> dict[str, pa.Array]:
        context = self._events.context
        return {} if context is None or self._context is None else decoded(self._context, context.rows(rows))

    def _rows_of(self, users: np.ndarray) -> np.ndarray:
        """The users as rows of the offsets of their shard. Loads the shard if another one is in memory."""
        shards = self._prepared.num_shards(self._split)
        for shard in (max(self._shard, 0) + turn for turn in range(shards)):
            if shard % shards != self._shard:
                self._read(shard % shards)
            place = np.searchsorted(self._users, users).clip(max=len(self._users) - 1)
            if (self._users[place] == users).all():
                return place
        raise RecpoError(
            f"{self._prepared.root}: no shard of the period {self._split} holds all of the users asked for",
            code="mismatch",
            field="users",
        )

    def _read(self, shard: int) -> None:
        self._shard, self._events = shard, self._prepared.load(self._split, shard, self._reads)
        self._users = self._events.user_index[self._events.offsets[:-1]]
        raw = (LogColumns.WATCH_TIME, LogColumns.DURATION, LogColumns.LABEL)
        self._raw = self._prepared.columns(self._split, shard, raw)


def _without_targets(batch: EvaluationBatch) -> EvaluationBatch:
    slates = batch.feedback.slates
    masked = slates._replace(mask=torch.zeros_like(slates.mask))
    return batch._replace(feedback=batch.feedback._replace(slates=masked))


def evaluation_batches(
    prepared: Prepared | Place | str,
    split: Period,
    history_length: int,
    batch_size: int,
    reads: Reads = Reads(),  # noqa: B008  immutable
    repeats: bool | None = None,
    max_users: int | None = None,
) -> Iterator[EvaluationBatch]:
    """Streams the held-out users of ``split`` with their last ``history_length`` earlier events."""
    data, rank = Prepared.open(prepared), Rank()
    return iter(HeldOutBatches(data, split, history_length, batch_size, rank, max_users, reads, repeats))
