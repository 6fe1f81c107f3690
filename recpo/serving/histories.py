"""The only path for histories: from raw events with external ids, through feedback levels, to padded arrays.

Training runs, bundles and servers all use this module. NumPy and Arrow only; it does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import FeatureArrays, missing_features
from recpo.base.feedback import UNKNOWN, FeedbackDefinition
from recpo.base.frames import Frame, flag_column, id_column, number_column, time_column, to_arrow
from recpo.log.id_map import IdMap

USER_ID, ITEM_ID, TIMESTAMP = "user_id", "item_id", "timestamp"
#: The columns that are read for every event (``HistoryReader.columns`` has more for some policies); others are ignored.
EVENT_COLUMNS = (USER_ID, ITEM_ID, TIMESTAMP, "watch_time", "duration", "dislike", "label")
#: Integers between these are seconds that were mistaken for milliseconds (they would be in January 1970 or soon after),
#: and integers above the last one are microseconds. Smaller integers may be event counters ("order").
SECONDS_FROM, SECONDS_UNTIL, LATEST_MS = 100_000_000, 31_536_000_000, 4_102_444_800_000
_LONGEST_S = 1e9  # 30 years: no event lasts longer


class EncodedHistories(NamedTuple):
    """The input of a policy for some users, int64, padded with 0 on the right.

    Attributes:
        item_ids: ``[B, H]`` internal ids, oldest first.
        feedback: ``[B, H]`` feedback levels (``recpo.base.feedback``).
        exclude: ``[B, M]`` internal ids that must not be listed, in addition to ``item_ids``.
        timestamps: ``[B, H]`` milliseconds since the epoch; None if the policy does not read them.
        behaviors: ``[B, H]`` bit sets; None if the policy does not read them.
        user: features of the users, ``[B]``; None if the policy does not read them.
        context: features of requests, ``[B, H + 1]``, as in ``base.types.Histories``; None if the policy does not read
            them.
        allowed: ``[B, V + 1]`` bool, the items that may be listed; None = all.
    """

    item_ids: np.ndarray
    feedback: np.ndarray
    exclude: np.ndarray
    timestamps: np.ndarray | None = None
    behaviors: np.ndarray | None = None
    user: FeatureArrays | None = None
    context: FeatureArrays | None = None
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class ServingCounts:
    """Counts of what was served and what was left out. Events and items of users who are not served do not count.

    Attributes:
        users: number of users served.
        events: events of their histories, including the skipped ``unknown_items``.
        unknown_items: events whose item is not in the catalog.
        impossible_values: watch times and durations that cannot be true (negative, infinite); treated as missing.
        events_without_feedback: events of known items whose feedback level is 0 (unknown), because watch time, duration
            or label is missing.
        empty_histories: users without an event of a known item; they get the recommendations for an empty history.
        truncated_histories: users with more events than the policy reads. It reads the most recent ones; the older
            items are not listed either.
        unknown_excluded: items to exclude that are not in the catalog.
        unknown_candidates: candidates to score that are not in the catalog.
        short_lists: users with fewer than k items left.
    """

    users: int = 0
    events: int = 0
    unknown_items: int = 0
    impossible_values: int = 0
    events_without_feedback: int = 0
    empty_histories: int = 0
    truncated_histories: int = 0
    unknown_excluded: int = 0
    unknown_candidates: int = 0
    short_lists: int = 0

    def __add__(self, other: ServingCounts) -> ServingCounts:
        """The sum of two counts."""
        return ServingCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def to_dict(self) -> dict[str, int]:
        """By name, for JSON."""
        return asdict(self)


class _PerUser(NamedTuple):
    """Values of all users, concatenated: the values of user u are ``values[offsets[u] : offsets[u + 1]]``."""

    values: tuple[np.ndarray, ...]
    offsets: np.ndarray

    @classmethod
    def of(cls, num_users: int, user: np.ndarray, *values: np.ndarray) -> _PerUser:
        """From values sorted by ``user [N]``."""
        return cls(values, np.concatenate([[0], np.cumsum(np.bincount(user, minlength=num_users))]))

    def padded(self, begin: int, end: int, column: int, width: int) -> np.ndarray:
        """The last ``width`` values of the users ``begin .. end - 1``, ``[end - begin, width]``."""
        offsets = self.offsets[begin : end + 1]
        lengths = np.diff(offsets)
        row = np.repeat(np.arange(end - begin), lengths)
        place = np.arange(offsets[0], offsets[-1]) - np.repeat(offsets[1:] - np.minimum(lengths, width), lengths)
        kept = place >= 0
        table = np.zeros((end - begin, width), np.int64)
        table[row[kept], place[kept]] = self.values[column][offsets[0] : offsets[-1]][kept]
        return table


@dataclass(frozen=True)
class UserHistories:
    """The histories of a number of users, ready to be read in batches.

    Attributes:
        users: external ids, in the order in which they are served.
        counts: what was read and what was left out.
        events: item, feedback level and time of every known event, sorted by user and time.
        exclude: items that must not be listed, including items that are too old to be read; distinct and ascending.
        max_history: H.
        reads_timestamps: whether the batches have times.
        unlisted: items that are listed for no user.
        reads_behaviors: whether the batches have behaviors.
        user: features of the users ``[U]``; None = the policy does not read them.
        context: features of requests: one row for no event, the rows of ``events``, and the rows of the users' current
            requests; None as above.
    """

    users: pa.Array
    counts: ServingCounts
    events: _PerUser
    exclude: _PerUser
    max_history: int
    reads_timestamps: bool
    unlisted: np.ndarray
    reads_behaviors: bool = False
    user: FeatureArrays | None = None
    context: FeatureArrays | None = None

    def batches(self, size: int) -> Iterator[tuple[slice, EncodedHistories]]:
        """Yields ``size`` users at a time: their indices, and the input of the policy."""
        for begin in range(0, len(self.users), size):
            end = min(begin + size, len(self.users))
            yield slice(begin, end), self._encoded(begin, end)

    def _encoded(self, begin: int, end: int) -> EncodedHistories:
        item_ids, feedback, timestamps, behaviors = (
            self.events.padded(begin, end, column, self.max_history) for column in range(4)
        )
        width = max(1, int(np.diff(self.exclude.offsets[begin : end + 1]).max()))
        exclude = self.exclude.padded(begin, end, 0, width)
        if len(self.unlisted):
            exclude = np.concatenate([exclude, np.tile(self.unlisted, (end - begin, 1))], 1)
        return EncodedHistories(
            item_ids,
            feedback,
            exclude,
            timestamps if self.reads_timestamps else None,
            behaviors if self.reads_behaviors else None,
            None if self.user is None else self.user.rows(np.arange(begin, end)),
            None if self.context is None else self.context.rows(self._requests(begin, end)),
        )

    def _requests(self, begin: int, end: int) -> np.ndarray:
        """Rows of ``context``, ``[B, H + 1]``: the events, followed by the user's current request."""
        rows = np.pad(self.events.padded(begin, end, 4, self.max_history), ((0, 0), (0, 1)))
        lengths = np.minimum(np.diff(self.events.offsets[begin : end + 1]), self.max_history)
        now = 1 + len(self.events.values[0]) + np.arange(begin, end)
        np.put_along_axis(rows, lengths[:, None], now[:, None], 1)
        return rows


class _Events(NamedTuple):
    """Columns of the events of the served users, ``[N]`` each, sorted by user and time."""

    user: np.ndarray
    item: np.ndarray
    level: np.ndarray
    time: np.ndarray
    behaviors: np.ndarray
    row: np.ndarray


@dataclass(frozen=True)
class HistoryReader:
    """Reads histories for one policy, given its items, its feedback definition and its length.

    A history is a frame of events, one per row, in any order: ``user_id``, ``item_id``, ``timestamp`` (times, or
    integer milliseconds since 1970) and, if the log had them, ``watch_time`` and ``duration`` in seconds, ``dislike``
    (true and false, or 1 and 0) and ``label`` in [0, 1]; also flags of behaviors and features of requests by their
    names, if the policy reads them. Other columns are ignored. Feedback levels are computed here, exactly as ``recpo
    prepare`` computed them for training.

    Attributes:
        items: external ids of the catalog. Items that are retired or not available are read in histories and excluded
            from every list.
        feedback: the definition that prepare fitted.
        max_history: H, the number of events that the policy reads; the most recent ones count.
        reads_timestamps: the policy reads the time of events, not only their order.
        behaviors: names of the behaviors that it reads, in the order of their bits.
        user: encodes features of users; None = it does not read them.
        context: encodes features of requests; None = it does not read them.
        repeats: items of the history may be listed again, including those that are too old to be read.
    """

    items: IdMap
    feedback: FeedbackDefinition
    max_history: int
    reads_timestamps: bool = False
    behaviors: tuple[str, ...] = ()
    user: FittedFeatures | None = None
    context: FittedFeatures | None = None
    repeats: bool = False

    def read(
        self,
        histories: Frame,
        *,
        exclude: Frame | None = None,
        users: Iterable[Any] | None = None,
        user_features: Frame | None = None,
        context: Frame | None = None,
        at: int | None = None,
    ) -> UserHistories:
        """Sorts the events by user and time, and looks up items and feedback levels.

        Args:
            histories: events, see the class; events at the same time keep the order of the rows.
            exclude: ``user_id`` and ``item_id`` pairs that must not be listed, in addition to the items of the history.
            users: the users to serve, in this order; a user without events is served as a new user. None = the users of
                ``histories``, in the order of their first rows.
            user_features: ``user_id`` and columns as in the prepared user table. For users without a row, and for
                absent columns, the features are missing. Ignored if the policy does not read features of users.
            context: ``user_id`` and features of the current request by name; missing as above.
            at: when the lists are made, milliseconds since the epoch: items that are not available then are excluded.
                None = items are available at any time.

        Raises:
            RecpoError: a column is missing or of a wrong type, an id or a time is null, a label is outside [0, 1], or a
                user is named twice.
        """
        table = to_arrow(histories, "histories")
        owner = id_column(table, USER_ID, "histories")
        served = owner.unique() if users is None else _asked_for(users)
        events, counts = self._events(table, rows_of_users(owner, served, "histories"), len(served))
        lengths = np.bincount(events.user, minlength=len(served))
        excluded = self._excluded(events, lengths, exclude, served)
        counts = replace(
            counts,
            empty_histories=int((lengths == 0).sum()),
            truncated_histories=int((lengths > self.max_history).sum()),
            unknown_excluded=excluded[1],
        )
        number = np.arange(1, len(events.user) + 1)
        columns = (events.item, events.level, events.time, events.behaviors, number)
        by_user = _PerUser.of(len(served), events.user, *columns)
        return UserHistories(
            served,
            counts,
            by_user,
            excluded[0],
            self.max_history,
            self.reads_timestamps,
            self.items.unlisted(at),
            bool(self.behaviors),
            None if self.user is None else _of_users(self.user, user_features, served, "user_features"),
            None if self.context is None else self._contexts(self.context, table, events.row, context, served),
        )

    def read_request(
        self,
        events: Sequence[Mapping[str, Any]],
        exclude: Sequence[Any] = (),
        user: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        at: int | None = None,
    ) -> EncodedHistories:
        """The input of the policy for one user, for a server that has the request as Python objects.

        Args:
            events: the user's past, in any order; keys are the columns of a history without ``user_id``; may be empty.
            exclude: items that must not be listed.
            user: features of the user, by the columns of the prepared user table.
            context: features of the request, by name.
            at: as in ``read``.

        Raises:
            RecpoError: as in ``read``.
        """
        read = self.read_requests(
            [(events, exclude)],
            user_features=None if user is None else [user],
            context=None if context is None else [context],
            at=at,
        )
        ((_, encoded),) = read.batches(1)
        return encoded

    def read_requests(
        self,
        requests: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Any]]],
        *,
        user_features: Sequence[Mapping[str, Any]] | None = None,
        context: Sequence[Mapping[str, Any]] | None = None,
        at: int | None = None,
    ) -> UserHistories:
        """The input of the policy for the users of several requests, for a server that has them as Python objects.

        Args:
            requests: for each user, the events and the items to exclude, as in ``read_request``. The users of the
                result are numbered in this order.
            user_features: for each user, the features, by the columns of the prepared user table.
            context: for each request, its features by name.
            at: as in ``read``.

        Raises:
            RecpoError: as in ``read``; a fault in one request fails all of them.
        """
        events = [event for history, _ in requests for event in history]
        columns = {
            name: [event.get(name) for event in events]
            for name in self.columns[1:]
            if name in (ITEM_ID, TIMESTAMP) or any(name in event for event in events)
        }
        numbers = np.arange(len(requests))
        owner = np.repeat(numbers, [len(history) for history, _ in requests])
        excluded = {
            USER_ID: np.repeat(numbers, [len(items) for _, items in requests]),
            ITEM_ID: [item for _, items in requests for item in items],
        }
        return self.read(
            {USER_ID: owner, **columns},
            exclude=excluded,
            users=numbers,
            user_features=None if user_features is None else _rows(user_features),
            context=None if context is None else _rows(context),
            at=at,
        )

    def known_items(self, table: pa.Table, name: str) -> np.ndarray:
        """Internal ids ``[N]`` of the column ``item_id`` of a table called ``name``; 0 for unknown items.

        Raises:
            RecpoError: the column is missing, has nulls, or has ids of another type than the catalog.
        """
        try:
            return self.items.to_internal(id_column(table, ITEM_ID, name))
        except (RecpoError, OverflowError, pa.ArrowException) as error:
            shown = str(error) if str(error).startswith(name) else f"{name}: column {ITEM_ID!r}: {error}"
            raise RecpoError(shown, code="missing_column") from error

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read for an event."""
        return (*EVENT_COLUMNS, *self.behaviors, *self._context_names)

    def validate_columns(self, histories: Frame, user_features: Frame | None, context: Frame | None) -> None:
        """Raises ``RecpoError`` if frames lack columns that the policy reads, with one message for all of them.

        A null says that a value is unknown. A column must not be missing silently.
        """
        lacking = [
            f"{name}: {', '.join(missing)}"
            for name, frame, wanted in (
                ("histories", histories, (*self.behaviors, *self._context_names)),
                (
                    "user_features",
                    user_features,
                    () if self.user is None else tuple(f.source for f in self.user.features),
                ),
                ("context", context, self._context_names),
            )
            if wanted and (missing := [one for one in wanted if one not in _column_names(frame, name)])
        ]
        if lacking:
            raise RecpoError(
                f"the policy reads columns that are not there ({'; '.join(lacking)}): add them, with nulls where a "
                "value is not known",
                code="missing_column",
                field=lacking[0],
            )

    @property
    def _context_names(self) -> tuple[str, ...]:
        return () if self.context is None else tuple(feature.name for feature in self.context.features)

    @staticmethod
    def _contexts(
        fitted: FittedFeatures, table: pa.Table, rows: np.ndarray, context: Frame | None, served: pa.Array
    ) -> FeatureArrays:
        """Features of requests: one row for no event, the events at ``rows`` of ``table``, and the current requests."""
        of_events = fitted.read(table.take(pa.array(rows)), "histories", by_name=True)
        now = _of_users(fitted, context, served, "context", by_name=True)
        return missing_features(fitted.features, (1,)).joined(of_events, now)

    def _behaviors(self, table: pa.Table) -> np.ndarray:
        """Bit sets ``[N]``. A behavior without a column counts as not done."""
        bits = np.zeros(len(table), np.int64)
        for bit, name in enumerate(self.behaviors):
            flags = flag_column(table, name, "histories")
            if flags is not None:
                bits |= flags.astype(np.int64) << bit
        return bits

    def _events(self, table: pa.Table, user: np.ndarray, num_users: int) -> tuple[_Events, ServingCounts]:
        """The events of known items, sorted, and the counts of the others."""
        item = self.known_items(table, "histories")
        time = _times(table)
        level, impossible = self._levels(table)
        served, known = user >= 0, item > 0
        counts = ServingCounts(
            users=num_users,
            events=int(served.sum()),
            unknown_items=int((served & ~known).sum()),
            impossible_values=int(impossible[served].sum()),
            events_without_feedback=int((served & known & (level == UNKNOWN)).sum()),
        )
        kept = np.flatnonzero(served & known)
        kept = kept[np.lexsort((time[kept], user[kept]))]
        bits = self._behaviors(table)[kept]
        return _Events(user[kept], item[kept], level[kept].astype(np.int64), time[kept], bits, kept), counts

    def _levels(self, table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Feedback levels ``[N]``, and the number of impossible values ``[N]`` that were ignored."""
        missing = np.full(len(table), np.nan)
        label = _numbers(table, "label", missing)
        outside = ~np.isnan(label) & ~((label >= 0) & (label <= 1))
        if outside.any():
            raise RecpoError(
                f"histories: {int(outside.sum())} labels lie outside [0, 1], the first is {label[outside.argmax()]:g} "
                f"in row {int(outside.argmax())}: a label says how good an event was, from 0 to 1; drop the column "
                "where watch times say it",
                code="out_of_range",
                field="label",
            )
        watch_time, duration = (_numbers(table, name, missing) for name in ("watch_time", "duration"))
        longest = self.feedback.max_watch_time, _LONGEST_S
        false_watch, false_duration = (
            (s < 0) | (s > most) for s, most in zip((watch_time, duration), longest, strict=True)
        )
        dislike = flag_column(table, "dislike", "histories")
        dislike = np.zeros(len(table), bool) if dislike is None else dislike
        watch_time, duration = np.where(false_watch, np.nan, watch_time), np.where(false_duration, np.nan, duration)
        impossible = false_watch.astype(np.int64) + false_duration
        return self.feedback.levels(watch_time, duration, dislike, label), impossible

    def _excluded(
        self, events: _Events, lengths: np.ndarray, exclude: Frame | None, served: pa.Array
    ) -> tuple[_PerUser, int]:
        """The items of ``exclude`` and, unless items may repeat, the history items that are too old to be read."""
        from_the_end = np.cumsum(lengths)[events.user] - np.arange(len(events.user))
        older = (from_the_end > self.max_history) & (not self.repeats)
        user, item, unknown = events.user[older], events.item[older], 0
        if exclude is not None:
            table = to_arrow(exclude, "exclude")
            owner = rows_of_users(id_column(table, USER_ID, "exclude"), served, "exclude")
            named = self.known_items(table, "exclude")
            unknown = int(((owner >= 0) & (named == 0)).sum())
            kept = (owner >= 0) & (named > 0)
            user, item = np.concatenate([user, owner[kept]]), np.concatenate([item, named[kept]])
        stride = len(self.items) + 1
        pairs = np.unique(user.astype(np.int64) * stride + item)
        return _PerUser.of(len(served), pairs // stride, pairs % stride), unknown


def _column_names(frame: Frame | None, name: str) -> set[str]:
    return set() if frame is None else set(to_arrow(frame, name).column_names)


def _asked_for(users: Iterable[Any]) -> pa.Array:
    """The users to serve as an array of ids."""
    if isinstance(users, str | bytes) or not isinstance(users, Iterable):
        raise RecpoError(
            f"users: expected ids of users, such as a list, got {type(users).__name__}",
            code="wrong_type",
            field="users",
        )
    values = users if isinstance(users, pa.Array | pa.ChunkedArray | np.ndarray | pd.Series) else list(users)
    asked = id_column(to_arrow({USER_ID: values}, "users"), USER_ID, "users")
    if len(asked.unique()) < len(asked):
        raise RecpoError(
            f"users: {len(asked) - len(asked.unique())} users are named twice; name each once",
            code="duplicate",
            field="users",
        )
    return asked


def _rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A frame of the given facts about users 0, 1, ..."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {**{name: [row.get(name) for row in rows] for name in names}, USER_ID: np.arange(len(rows))}


def _of_users(
    fitted: FittedFeatures, frame: Frame | None, served: pa.Array, name: str, by_name: bool = False
) -> FeatureArrays:
    """The features of the users ``served [U]``; missing if ``frame`` has no row."""
    nothing = missing_features(fitted.features, (1,))
    if frame is None:
        return nothing.rows(np.zeros(len(served), np.int64))
    table = to_arrow(frame, name)
    owner = rows_of_users(id_column(table, USER_ID, name), served, name)
    known = np.flatnonzero(owner >= 0)
    if len(np.unique(owner[known])) < len(known):
        raise RecpoError(f"{name}: a user has several rows; give one row for each", code="duplicate", field="user_id")
    place = np.zeros(len(served), np.int64)
    place[owner[known]] = known + 1
    return nothing.joined(fitted.read(table, name, by_name)).rows(place)


def rows_of_users(owner: pa.Array, served: pa.Array, name: str) -> np.ndarray:
    """The index of every ``owner`` among the users ``served``; -1 if that user is not served."""
    if not len(owner) or not len(served):
        return np.full(len(owner), -1, np.int64)
    if pa.types.is_integer(owner.type) != pa.types.is_integer(served.type):
        raise RecpoError(
            f"{name}: user_id is {owner.type}, users are {served.type}: cast one of them",
            code="wrong_type",
            field="user_id",
        )
    kind = pa.int64() if pa.types.is_integer(owner.type) else pa.large_string()
    try:
        rows = pc.index_in(owner.cast(kind), value_set=served.cast(kind))
    except pa.ArrowInvalid as error:
        raise RecpoError(
            f"{name}: user_id does not fit 64 bits with a sign ({error})", code="out_of_range", field="user_id"
        ) from error
    return rows.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)


def _numbers(table: pa.Table, name: str, missing: np.ndarray) -> np.ndarray:
    values = number_column(table, name, "histories")
    return missing if values is None else values


def _times(table: pa.Table) -> np.ndarray:
    """Milliseconds since the epoch. Rejects numbers in another unit."""
    times = time_column(table, TIMESTAMP, "histories")
    if not len(times):
        return times
    wrong = (times < 0) | (times >= LATEST_MS) | ((times >= SECONDS_FROM) & (times < SECONDS_UNTIL))
    if wrong.any():
        raise RecpoError(
            f"histories: {int(wrong.sum())} timestamps are no plausible milliseconds since 1970, the first is "
            f"{times[wrong.argmax()]} in row {int(wrong.argmax())}: pass times, or convert to milliseconds",
            code="out_of_range",
            field="timestamp",
        )
    return times
