"""Held-out users, streamed shard by shard, with the same number of batches on every rank and every user once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset

from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import by_source, decoded
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch, FeedbackBatch
from recpo.batches.slates import histories_of, logged_slates, padded, ranges
from recpo.log.locations import Place
from recpo.log.prepared import Events, Period, Prepared
from recpo.log.schema import LogColumns

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
    may differ from the others. For every user, the retired items and the items of the user's past are excluded.
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
    ) -> None:
        self._reads = reads
        self._prepared, self._split, self._history_length = prepared, split, history_length
        self._batch_size, self._rank, self._max_users = batch_size, rank, max_users

    def __iter__(self) -> Iterator[EvaluationBatch]:
        plan, world_size, loaded = self._plan, self._rank.world_size, -1
        for turn in range(self._rank.rank, -(-len(plan) // world_size) * world_size, world_size):
            shard, users = plan[min(turn, len(plan) - 1)]
            if shard != loaded:
                events, loaded = self._prepared.load(self._split, shard, self._reads), shard
            some = users if turn < len(plan) else users[:1]
            batch = held_out_batch(self._prepared, self._split, shard, events, some, self._history_length)
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
    prepared: Prepared, split: Period, shard: int, events: Events, users: np.ndarray, history_length: int
) -> EvaluationBatch:
    """Some users of a shard of a held-out period; the items of their past and the retired items are excluded.

    Args:
        prepared: the data.
        split: the period.
        shard: index of the shard.
        events: its events.
        users: ``[B]`` rows of ``events.offsets``.
        history_length: H.
    """
    past = prepared.past_items(split, shard, events.user_index[events.offsets[users]])
    batch = evaluation_batch(events, users, history_length, *past)
    retired = torch.from_numpy(prepared.retired_items)
    if not len(retired):
        return batch
    return batch._replace(exclude=torch.cat([batch.exclude, retired.expand(len(users), -1)], 1))


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
    exclude = padded(np.append(past_items, 0)[place], is_past)
    user_ids = torch.from_numpy(events.user_index[starts].astype(np.int64))
    return EvaluationBatch(FeedbackBatch(histories, slates, user_ids, user_ids=user_ids), exclude)


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
    prepared: Place | str,
    split: Period,
    history_length: int,
    batch_size: int,
    reads: Reads = Reads(),  # noqa: B008  immutable
) -> Iterator[EvaluationBatch]:
    """Streams the held-out users of ``split`` with their last ``history_length`` earlier events."""
    return iter(HeldOutBatches(Prepared.open(prepared), split, history_length, batch_size, Rank(), reads=reads))
