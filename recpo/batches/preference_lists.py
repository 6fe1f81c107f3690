"""Preference lists: one chosen item and its rejected items, for DPO, its list-wise forms and reward models."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from recpo.base.errors import NonNegativeInt, RecpoError
from recpo.base.types import FeedbackBatch, SlateTraits
from recpo.batches.slates import BatchMaker, Layout, Windows, histories_of, logged_slates, padded, preceding
from recpo.log.prepared import Events, Keys, Prepared

# How often a place is redrawn after it got an item that the user likes or that is already in the list.
_ATTEMPTS = 8
_DISLIKES, _SKIPPED, _EXPOSED, _UNIFORM, _POPULARITY, _IN_BATCH = range(6)

# of SplitMix64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class PreferenceListLayout(Layout):
    """The slate is ``[chosen, rejected, ...]``: one context per positive event of the training period.

    The prepared log defines positive and skipped events (``FeedbackRule``). A context contains the events before the
    positive event's request. The rejected items come from the sources below, with a number for each. No list contains
    an item twice. No rejected item is one of the user's positives of the training period, even if the user disliked it
    another time. If a few draws find no such item, the place stays empty.

    A draw depends only on (seed, epoch, row, place), except that ``in_batch`` depends on the other rows of the batch.

    Attributes:
        history_length: H, number of events before the request that the policy sees.
        dislikes: items that the user disliked at any time in the training period.
        skipped: items that the user was shown and skipped.
        exposed: items that the user was shown, labeled or disliked, and never positive. Neutral, skipped and disliked
            items count alike, so use it in place of ``dislikes`` and ``skipped``. The same logging policy chose these
            items and the ones that the user liked, so its preferences cancel.
        uniform: items drawn uniformly from the catalog.
        popularity: items drawn in proportion to ``train_count ** popularity_power``.
        in_batch: chosen items of other rows of the batch.
        hard: the policy's own top-ranked items, which training appends. The better the policy, the more of them the
            user would have liked.
        popularity_power: 1 = as often as in the log, 0 = uniformly over the items that occur in it.
        fill: if a user has fewer dislikes, skipped or exposed items than requested, fill up with uniformly drawn items,
            so that all lists have equal length; false = these places stay empty.
    """

    history_length: int = 50
    dislikes: NonNegativeInt = 4
    skipped: NonNegativeInt = 4
    uniform: NonNegativeInt = 8
    popularity: NonNegativeInt = 4
    in_batch: NonNegativeInt = 0
    hard: NonNegativeInt = 0
    popularity_power: float = 0.75
    fill: bool = True
    exposed: NonNegativeInt = 0

    cuts_by_label: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("dislikes", "skipped", "exposed", "uniform", "popularity", "in_batch", "hard")
        counts = {name: getattr(self, name) for name in names}
        if not any(counts.values()):
            raise RecpoError(
                f"PreferenceListLayout: every source is 0; give at least one of {', '.join(counts)} a number of "
                "rejected items",
                code="missing_option",
            )
        if self.exposed and (self.dislikes or self.skipped):
            raise RecpoError(
                "PreferenceListLayout: exposed holds disliked and skipped items already, and no list holds an item "
                "twice: set dislikes and skipped to 0",
                code="conflicting_options",
                field="exposed",
            )

    @property
    def traits(self) -> SlateTraits:
        """See ``Layout.traits``."""
        return SlateTraits(is_preference_list=True, hard_negatives=self.hard, resampled=True)

    def windows(self, keys: Keys) -> Windows:
        """See ``Layout.windows``. The slate range is the chosen event."""
        assert keys.positive is not None
        chosen = np.flatnonzero(keys.positive)
        return Windows(*preceding(keys, chosen, self.history_length), chosen, chosen + 1)

    def batch_maker(self, prepared: Prepared, seed: int) -> BatchMaker:
        """See ``Layout.batch_maker``."""
        return _PreferenceBatches(self, prepared, seed)


class _Pairs(NamedTuple):
    """Distinct (user, item) pairs of a shard, sorted: ``key`` = user * (V + 1) + item; ``event`` is one of each."""

    key: np.ndarray
    event: np.ndarray

    def holds(self, keys: np.ndarray) -> np.ndarray:
        """Whether each of ``keys``, of any shape, is one of the pairs."""
        if not len(self.key):
            return np.zeros(keys.shape, bool)
        return self.key[np.minimum(np.searchsorted(self.key, keys), len(self.key) - 1)] == keys


class _ShardIndex(NamedTuple):
    """The items that the users of a shard like, disliked, skipped, and were shown without ever liking them."""

    events: Events
    positives: _Pairs
    dislikes: _Pairs
    skipped: _Pairs
    exposed: _Pairs


class _PreferenceBatches:
    """Gathers preference lists, with items of the catalog of ``prepared``; keeps facts about the current shard."""

    def __init__(self, layout: PreferenceListLayout, prepared: Prepared, seed: int) -> None:
        self._layout, self._stride, self._seed = layout, prepared.num_items + 1, seed
        numbers = [layout.dislikes, layout.skipped, layout.exposed, layout.uniform, layout.popularity, layout.in_batch]
        self._source = np.repeat(np.arange(len(numbers)), numbers)
        self._cdf: np.ndarray | None = None
        if layout.popularity:
            counts = prepared.item_counts()
            total = np.cumsum(np.where(counts > 0, counts.astype(float) ** layout.popularity_power, 0.0))
            self._cdf = total / total[-1]
        self._index: _ShardIndex | None = None

    def __call__(self, events: Events, windows: Windows, context_ids: np.ndarray, epoch: int) -> FeedbackBatch:
        """See ``BatchMaker``."""
        if self._index is None or self._index.events is not events:
            self._index = self._index_of(events)
        valid = windows.slate_stop > windows.slate_start
        event = events.by_request[np.where(valid, windows.slate_start, 0)]
        chosen = events.item_index[event] * valid
        user = events.user_index[event].astype(np.int64)
        rejected, rejected_events = self._rejected(self._index, user, chosen, context_ids, epoch)
        items = np.concatenate([chosen[:, None], rejected * valid[:, None]], 1)
        source = np.concatenate([np.where(valid, event, -1)[:, None], rejected_events], 1)
        source = np.where(items > 0, source, -1)
        lengths, real = (windows.history_stop - windows.history_start)[:, None], items > 0
        slates = logged_slates(events, source, source >= 0, lengths)._replace(
            item_ids=torch.from_numpy(items),
            visible=padded(lengths, real),
            mask=torch.from_numpy(real),
            logp_behavior=None,
            chosen=torch.from_numpy(real & (np.arange(items.shape[1]) == 0)),
        )
        histories = histories_of(events, windows.history_start, windows.history_stop)
        known = torch.from_numpy(self._positives_of(self._index, user)) if self._layout.hard else None
        rows, users = torch.from_numpy(context_ids), torch.from_numpy(user)
        return FeedbackBatch(histories, slates, rows, known_positives=known, user_ids=users)

    def _index_of(self, events: Events) -> _ShardIndex:
        positives = self._pairs(events, events.positive)
        liked = positives.holds(self._keys(events.user_index, events.item_index))
        dislikes = self._pairs(events, events.dislike & ~liked)
        disliked = dislikes.holds(self._keys(events.user_index, events.item_index))
        skipped = self._pairs(events, events.skipped & ~liked & ~disliked)
        shown = self._pairs(events, (events.dislike | ~np.isnan(events.label)) & ~liked)
        return _ShardIndex(events, positives, dislikes, skipped, shown)

    def _pairs(self, events: Events, which: np.ndarray) -> _Pairs:
        rows = np.flatnonzero(which)
        key, first = np.unique(self._keys(events.user_index[rows], events.item_index[rows]), return_index=True)
        return _Pairs(key, rows[first])

    def _keys(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        return user.astype(np.int64) * self._stride + item

    def _rejected(
        self, index: _ShardIndex, user: np.ndarray, chosen: np.ndarray, context_ids: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rejected items ``[B, L]``, 0 = empty, and the event that each comes from, -1 = sampled."""
        logged, event = self._logged(index, user, context_ids, epoch)
        items, place = logged, np.arange(len(self._source))
        wanted = (self._source > _EXPOSED) | self._layout.fill
        for attempt in range(_ATTEMPTS):
            empty = (items == 0) & wanted
            if not empty.any():
                break
            numbers = uniform(self._seed, epoch, context_ids[:, None], place, attempt)
            candidates = self._candidates(numbers, chosen)
            is_liked = index.positives.holds(self._keys(user[:, None], candidates))
            items = np.where(empty & ~is_liked, candidates, items)
            items = _without_repeats(items, empty)
        return items, np.where(logged > 0, event, -1)

    def _logged(
        self, index: _ShardIndex, user: np.ndarray, context_ids: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Dislikes, skipped and exposed items: consecutive items of each kind, from a random start."""
        items = np.zeros((len(user), len(self._source)), np.int64)
        event = np.full_like(items, -1)
        logged = ((_DISLIKES, index.dislikes), (_SKIPPED, index.skipped), (_EXPOSED, index.exposed))
        for source, pairs in logged:
            places = np.flatnonzero(self._source == source)
            if not len(places) or not len(pairs.key):
                continue
            first = np.searchsorted(pairs.key, user * self._stride)[:, None]
            count = np.searchsorted(pairs.key, (user + 1) * self._stride)[:, None] - first
            start = (uniform(self._seed, epoch, context_ids, -1 - source)[:, None] * count).astype(np.int64)
            offset = (start + np.arange(len(places))) % np.maximum(count, 1)
            has = np.arange(len(places)) < count
            event[:, places] = np.where(has, pairs.event[np.where(has, first + offset, 0)], -1)
            items[:, places] = np.where(has, index.events.item_index[event[:, places]], 0)
        return items, event

    def _candidates(self, numbers: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """An item for every place, from one uniform number each; 0 if there are no items to draw from."""
        candidates = 1 + (numbers * (self._stride - 1)).astype(np.int64)
        popular, others = self._source == _POPULARITY, self._source == _IN_BATCH
        if self._cdf is not None:
            candidates[:, popular] = 1 + np.searchsorted(self._cdf, numbers[:, popular], side="right")
        if others.any():
            rows, away = len(chosen), (numbers[:, others] * (len(chosen) - 1)).astype(np.int64)
            candidates[:, others] = chosen[(np.arange(rows)[:, None] + 1 + away) % rows] if rows > 1 else 0
        return candidates

    def _positives_of(self, index: _ShardIndex, user: np.ndarray) -> np.ndarray:
        """Every item that the user is known to like, ``[B, M]``, padded with 0."""
        keys = index.positives.key
        first = np.searchsorted(keys, user * self._stride)
        count = np.searchsorted(keys, (user + 1) * self._stride) - first
        place = np.arange(max(1, int(count.max(initial=0))))
        has = place < count[:, None]
        return np.where(has, keys[np.where(has, first[:, None] + place, 0)] % self._stride, 0)


def _without_repeats(items: np.ndarray, is_new: np.ndarray) -> np.ndarray:
    """Replaces repeated items in a row with 0. Items that were there before are kept."""
    order = np.argsort(items * 2 + is_new, axis=1, kind="stable")
    ascending = np.take_along_axis(items, order, 1)
    repeats = np.zeros_like(items, bool)
    np.put_along_axis(repeats, order[:, 1:], ascending[:, 1:] == ascending[:, :-1], 1)
    return np.where(repeats, 0, items)


def uniform(*keys: np.ndarray | int) -> np.ndarray:
    """Uniform numbers in [0, 1) in the broadcast shape of ``keys``, which are 64-bit integers (negative ones included).

    A number is a hash of its keys, such as (seed, epoch, context, place). It does not depend on earlier draws, so
    ranks, workers, batch size and resuming do not change it, and a complete batch is drawn at once.

    The keys are combined one after the other with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mixed(state ^ _mixed(np.asarray(key).astype(np.int64).view(np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        state = state + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
