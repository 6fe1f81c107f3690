"""The users: search by id, and what one user did before the held-out period and in it.

A user's events are read from the one shard that has them; the last shards stay in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import duckdb
import numpy as np

from recpo.base.errors import RecpoError
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch
from recpo.batches.held_out import held_out_batch
from recpo.evaluation.held_out_pass import HeldOut
from recpo.log.prepared import Events, Prepared
from recpo.log.schema import LogColumns

_MOST_FOUND: Final = 50
_SHARDS_IN_MEMORY: Final = 4


class Event(NamedTuple):
    """One exposure of a user.

    Attributes:
        item: internal id.
        time_ms: milliseconds since the epoch.
        kind: positive, neutral, skipped, disliked or unknown.
        label: in [0, 1]; None = unknown.
        watch_time: seconds; None = unknown.
        duration: seconds; None = unknown.
        behaviors: what else the user did.
        propensity: with which the logging policy showed it; None = not logged.
        is_random: it was shown at random.
    """

    item: int
    time_ms: int
    kind: str
    label: float | None
    watch_time: float | None
    duration: float | None
    behaviors: tuple[str, ...]
    propensity: float | None
    is_random: bool


class Person(NamedTuple):
    """A user, before the held-out period and in it.

    Attributes:
        user: index in the prepared data.
        user_id: id in the log.
        history: events before the period, the newest first.
        later: events of the period, the first one first.
        batch: input of a contender that reads so many events of the history; None = the user has no event in the
            held-out period.
    """

    user: int
    user_id: Any
    history: list[Event]
    later: list[Event]
    batch: Callable[[int], EvaluationBatch] | None


@dataclass(frozen=True)
class People:
    """The users of prepared data.

    Attributes:
        data: the prepared data, in a directory.
        split: the held-out period.
        reads: what contenders read besides items, feedback and times.
    """

    data: Prepared
    split: HeldOut
    reads: Reads = Reads()  # noqa: RUF009  immutable
    _lock: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.data.root, Path):
            message = f"{self.data.root} is in an object store: copy the prepared data to a directory to look at them"
            raise RecpoError(message, code="unsupported", field="prepared")
        object.__setattr__(self, "_loaded", lru_cache(_SHARDS_IN_MEMORY)(self._load))

    def search(self, text: str) -> list[tuple[int, Any]]:
        """Index and id of the users whose id is the text or begins with it; at most 50, an equal id first."""
        query = "SELECT user_index, user_id FROM read_parquet(?) WHERE starts_with(CAST(user_id AS VARCHAR), ?) "
        query += f"ORDER BY length(CAST(user_id AS VARCHAR)), user_index LIMIT {_MOST_FOUND}"
        return [(int(user), user_id) for user, user_id in self._query(query, text)]

    def ids(self, users: Iterable[int]) -> dict[int, Any]:
        """Index to id in the log."""
        query = "SELECT user_index, user_id FROM read_parquet(?) WHERE user_index IN (SELECT unnest(?))"
        return dict(self._query(query, [int(user) for user in users]))

    def person(self, user: int) -> Person | None:
        """A user, or None if there is no such index. Users without held-out events have their training events."""
        with self._lock:
            user_id = self.ids([user]).get(user)
            if user_id is None:
                return None
            if (place := self._place(self.split, user)) is not None:
                return self._held_out(user, user_id, *place)
            history: list[Event] = []
            if (place := self._place("train", user)) is not None:
                events, raw, row = place[1:]
                history = self._events(events, raw, range(int(events.offsets[row]), int(events.offsets[row + 1])))
            return Person(user, user_id, history[::-1], [], None)

    def _held_out(
        self, user: int, user_id: Any, shard: int, events: Events, raw: dict[str, np.ndarray], row: int
    ) -> Person:
        batch = partial(held_out_batch, self.data, self.split, shard, events, np.array([row]))
        start, stop = int(events.offsets[row]), int(events.offsets[row + 1])
        targets = [place for place in range(start, stop) if events.is_target[place]]
        before = [place for place in range(start, stop) if not events.is_target[place]]
        history, later = (self._events(events, raw, places) for places in (before, targets))
        return Person(user, user_id, history[::-1], later, batch)

    def _events(self, events: Events, raw: dict[str, np.ndarray], places: Sequence[int]) -> list[Event]:
        return [self._event(events, raw, place) for place in places]

    def _event(self, events: Events, raw: dict[str, np.ndarray], place: int) -> Event:
        label = _known(events.label[place])
        kind = "unknown" if label is None else "neutral"
        for name, holds in (("skipped", events.skipped), ("positive", events.positive), ("disliked", events.dislike)):
            kind = name if holds[place] else kind
        bits = 0 if events.behaviors is None else int(events.behaviors[place])
        return Event(
            int(events.item_index[place]),
            int(events.timestamp[place]),
            kind,
            label,
            _known(raw[LogColumns.WATCH_TIME][place]),
            _known(raw[LogColumns.DURATION][place]),
            tuple(name for bit, name in enumerate(self.data.behaviors) if bits >> bit & 1),
            _known(events.propensity[place]),
            bool(events.is_random is not None and events.is_random[place]),
        )

    def _place(self, split: HeldOut | str, user: int) -> tuple[int, Events, dict[str, np.ndarray], int] | None:
        """The shard with a user, its events, and the user's row in it; of training, the newest segment's."""
        for shard in self._shards_of(split, user):
            events, raw = self._loaded(split, shard)  # type: ignore[attr-defined]  # set in __post_init__
            users = events.user_index[events.offsets[:-1]]
            row = int(np.searchsorted(users, user))
            if row < len(users) and users[row] == user:
                return shard, events, raw, row
        return None

    def _shards_of(self, split: str, user: int) -> list[int]:
        """The one shard of each segment that may have a user: shards are sorted, and name their last user."""
        last = [int(shard["last_user"]) for shard in self.data.manifest["shards"][split]]
        sizes = self.data.segments if split == "train" else [len(last)]
        ends = np.cumsum(sizes).tolist()
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        found = [bisect_left(last, user, start, end) for start, end in zip(starts, ends, strict=True)]
        return [shard for shard, end in zip(found, ends, strict=True) if shard < end][::-1]

    def _load(self, split: Any, shard: int) -> tuple[Events, dict[str, np.ndarray]]:
        reads = Reads(behaviors=bool(self.data.behaviors)) | self.reads
        raw = self.data.columns(split, shard, (LogColumns.WATCH_TIME, LogColumns.DURATION))
        return self.data.load(split, shard, reads), raw

    @cached_property
    def _database(self) -> duckdb.DuckDBPyConnection:
        return duckdb.connect()

    def _query(self, query: str, value: Any) -> list[tuple[Any, ...]]:
        cursor = self._database.cursor()  # of this thread
        return cursor.execute(query, [str(self.data.root / "users.parquet"), value]).fetchall()


def _known(value: Any) -> float | None:
    number = float(value)
    return None if np.isnan(number) else number
