"""From the events of a shard to ``FeedbackBatch``: which history a context sees and which positions are scored.

A *window* is one context: history events ``[history_start, history_stop)`` and slate events
``[slate_start, slate_stop)``, all indices into the shard's flat arrays. In the layouts of this module every event of
the training period is a slate position of exactly one window.
No position ever sees an event of its own request or a later one (``visible``). Layouts that sample other items into
their slates are in ``recpo.data.preference_lists``.
A session ends where the user's next event comes more than ``SESSION_GAP_MS`` later. After a user's last event of the
training period nothing is known: it ends no session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.data.prepared import Events, run_change
from recpo.types import EvaluationBatch, FeedbackBatch, Histories, Slates, SlateTraits

SESSION_GAP_MS = 30 * 60 * 1000


class Windows(NamedTuple):
    """Index ranges of contexts, each ``[N]`` int64."""

    history_start: np.ndarray
    history_stop: np.ndarray
    slate_start: np.ndarray
    slate_stop: np.ndarray

    def take(self, rows: np.ndarray) -> Windows:
        """The windows of ``rows``."""
        return Windows(*(column[rows] for column in self))

    def empty(self, count: int) -> Windows:
        """``count`` windows without history and without positions."""
        nothing = np.zeros(count, np.int64)
        return Windows(nothing, nothing, nothing, nothing)


BatchMaker = Callable[[Events, Windows, np.ndarray, int], FeedbackBatch]
"""Gathers windows of a shard: ``(events, windows, context_ids, epoch) -> batch``. It may keep facts of a shard."""


class Catalog(NamedTuple):
    """The items that a layout may sample.

    Attributes:
        num_items: V.
        train_counts: ``[V]`` events of the items 1..V in the training period; None where the layout asks for none.
    """

    num_items: int
    train_counts: np.ndarray | None = None


class Layout(ABC):
    """How a user's events are cut into contexts and slates.

    Attributes:
        history_length: H, the most history events of a context.
        cuts_by_label: ``windows`` reads which events are positive too.
    """

    history_length: int
    cuts_by_label: ClassVar[bool] = False

    @abstractmethod
    def windows(self, user: np.ndarray, request: np.ndarray, positive: np.ndarray | None = None) -> Windows:
        """Cuts the events of a shard, sorted by user and time.

        Args:
            user: ``[N]``, equal for the events of a user.
            request: ``[N]``, equal for the events of a request.
            positive: ``[N]`` bool, which events are positive; read where ``cuts_by_label``.
        """

    def windows_of(self, events: Events) -> Windows:
        """The windows of a shard that is in memory."""
        return self.windows(events.user_index, events.request_start, events.positive)

    @property
    def traits(self) -> SlateTraits:
        """What training has to know about the slates."""
        return SlateTraits()

    @property
    def samples_by_popularity(self) -> bool:
        """Whether ``batch_maker`` reads ``Catalog.train_counts``."""
        return False

    def batch_maker(self, catalog: Catalog, seed: int) -> BatchMaker:
        """What gathers windows into batches; ``seed`` is that of whatever it samples."""
        return _logged_batch


@dataclass(frozen=True)
class SequenceLayout(Layout):
    """The slate is the user's own sequence: every event is scored after the events before it, in one pass.

    A user with n events gives ``ceil(n / history_length)`` windows, cut from the end so that the most recent one is
    full; the S = H positions of a window share one encoding of at most H events. This is next-item pre-training, and,
    with the feedback of the same events, alignment from logs.

    Attributes:
        history_length: H, also the number of positions of a slate.
        last_window_only: keep only each user's most recent window (the convention of SASRec's evaluation protocol).
    """

    history_length: int = 50
    last_window_only: bool = False

    def windows(self, user: np.ndarray, request: np.ndarray, positive: np.ndarray | None = None) -> Windows:
        """See ``Layout.windows``."""
        starts = np.flatnonzero(run_change(user))
        stops = np.append(starts[1:], len(user))
        counts = (
            np.ones(len(starts), np.int64) if self.last_window_only else -(-(stops - starts) // self.history_length)
        )
        owner = np.repeat(np.arange(len(starts)), counts)
        from_end = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        slate_stop = stops[owner] - from_end * self.history_length
        slate_start = np.maximum(slate_stop - self.history_length, starts[owner])
        history_stop = slate_stop - 1
        return Windows(
            np.maximum(history_stop - self.history_length, starts[owner]), history_stop, slate_start, slate_stop
        )


@dataclass(frozen=True)
class ImpressionLayout(Layout):
    """The slate is one request: all its items are scored after the same history.

    Attributes:
        history_length: H, the events before the request that the policy sees.
        slate_length: S; a longer request is cut into several contexts with the same history.
    """

    history_length: int = 50
    slate_length: int = 20

    def windows(self, user: np.ndarray, request: np.ndarray, positive: np.ndarray | None = None) -> Windows:
        """See ``Layout.windows``."""
        starts = np.flatnonzero(run_change(user, request))
        stops = np.append(starts[1:], len(user))
        user_start = np.flatnonzero(run_change(user))[np.cumsum(run_change(user))[starts] - 1] if len(user) else starts
        counts = -(-(stops - starts) // self.slate_length)
        owner = np.repeat(np.arange(len(starts)), counts)
        part = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        slate_start = starts[owner] + part * self.slate_length
        slate_stop = np.minimum(slate_start + self.slate_length, stops[owner])
        history_start = np.maximum(starts[owner] - self.history_length, user_start[owner])
        return Windows(history_start, starts[owner], slate_start, slate_stop)

    @property
    def traits(self) -> SlateTraits:
        """See ``Layout.traits``."""
        return SlateTraits(one_request=True)


def _logged_batch(events: Events, windows: Windows, context_ids: np.ndarray, epoch: int) -> FeedbackBatch:
    return feedback_batch(events, windows, context_ids)


def feedback_batch(events: Events, windows: Windows, context_ids: np.ndarray) -> FeedbackBatch:
    """Gathers windows into right-padded tensors; H and S are the longest of these windows."""
    index, valid = _ranges(windows.slate_start, windows.slate_stop)
    lengths = windows.history_stop - windows.history_start
    # the history reaches to where the event's request began: what was shown together was chosen together
    visible = np.clip(events.request_start[index] - windows.history_start[:, None], 0, lengths[:, None])
    slates = Slates(
        item_ids=_padded(events.item_index[index], valid),
        visible=_padded(visible, valid),
        mask=torch.from_numpy(valid),
        label=_padded(events.label[index], valid, np.nan),
        dislike=_padded(events.dislike[index], valid),
        positive=_padded(events.positive[index], valid),
        logp_behavior=_padded(_logp_behavior(events, index), valid, np.nan),
        is_logged=torch.from_numpy(valid),
        ends_session=_padded(_ends_session(events, index), valid),
    )
    return FeedbackBatch(
        histories_of(events, windows.history_start, windows.history_stop),
        slates,
        torch.from_numpy(context_ids),
        user_ids=torch.from_numpy(events.user_index[windows.slate_start].astype(np.int64)),
    )


def _ends_session(events: Events, index: np.ndarray) -> np.ndarray:
    """Which of the events ``index`` end their session."""
    following = np.minimum(index + 1, len(events.timestamp) - 1)
    same_user = events.user_index[following] == events.user_index[index]
    ends: np.ndarray = same_user & (events.timestamp[following] - events.timestamp[index] > SESSION_GAP_MS)
    return ends


def evaluation_batch(events: Events, users: np.ndarray, history_length: int) -> EvaluationBatch:
    """Held-out users ``users`` (rows of ``events.offsets``): the context before the period and the period's events."""
    starts, stops = events.offsets[users], events.offsets[users + 1]
    targets_before = np.concatenate([[0], np.cumsum(events.is_target)])
    boundary = stops - (targets_before[stops] - targets_before[starts])
    histories = histories_of(events, np.maximum(starts, boundary - history_length), boundary)
    index, valid = _ranges(boundary, stops)
    slates = Slates(
        item_ids=_padded(events.item_index[index], valid),
        visible=histories.lengths[:, None].expand(-1, valid.shape[1]) * torch.from_numpy(valid),
        mask=torch.from_numpy(valid),
        label=_padded(events.label[index], valid, np.nan),
        dislike=_padded(events.dislike[index], valid),
        positive=_padded(events.positive[index], valid),
        logp_behavior=_padded(_logp_behavior(events, index), valid, np.nan),
        is_logged=torch.from_numpy(valid),
        is_random=None if events.is_random is None else _padded(events.is_random[index], valid),
    )
    seen_index, seen_valid = _ranges(starts, boundary)
    seen = _padded(events.item_index[seen_index], seen_valid)
    context_ids = torch.from_numpy(events.user_index[starts].astype(np.int64))
    return EvaluationBatch(FeedbackBatch(histories, slates, context_ids, user_ids=context_ids), seen)


def histories_of(events: Events, start: np.ndarray, stop: np.ndarray) -> Histories:
    """Gathers the events ``[start, stop)`` of every context."""
    index, valid = _ranges(start, stop)
    return Histories(
        item_ids=_padded(events.item_index[index], valid),
        lengths=torch.from_numpy(stop - start),
        feedback=_padded(events.feedback[index], valid),
        timestamps=_padded(events.timestamp[index], valid),
    )


def _logp_behavior(events: Events, index: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logp: np.ndarray = np.log(events.propensity[index]).astype(np.float32)
    return logp


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices ``[N, L]`` of the ranges, and which of them lie inside; L is the longest range, at least 1."""
    width = max(1, int((stop - start).max(initial=0)))
    index = start[:, None] + np.arange(width)
    valid = index < stop[:, None]
    # an index outside its range is masked below; it only has to be a legal index, and 0 is one in any non-empty shard
    return np.where(valid, index, 0), valid


def _padded(values: np.ndarray, valid: np.ndarray, fill: float = 0) -> Tensor:
    return torch.from_numpy(np.where(valid, values, np.asarray(fill, dtype=values.dtype)))
