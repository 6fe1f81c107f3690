"""The only path for histories: from raw events with external ids, through feedback levels, to padded arrays.

Training runs, bundles and servers all use this module. NumPy and Arrow only; it does not import torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures, PolicyFeatures
from recpo.base.features import FeatureArrays, missing_features
from recpo.base.feedback import UNKNOWN, FeedbackDefinition
from recpo.base.frames import Frame, are_no_times, flag_column, id_column, number_column, time_column, to_arrow
from recpo.log.id_map import IdMap
from recpo.log.schema import LogColumns

USER_ID, ITEM_ID, TIMESTAMP = LogColumns.REQUIRED
#: The columns that are read for every event (``HistoryReader.columns`` has more for some policies); others are ignored.
EVENT_COLUMNS = (USER_ID, ITEM_ID, TIMESTAMP, "watch_time", "duration", "dislike", "label")
_LONGEST_S = 1e9  # 30 years: no event lasts longer
_NUMBERS = ("watch_time", "duration", "label")
#: the types that JSON has for ids, and for the values of an event
_TEXT, _INTEGER = frozenset([str]), frozenset([int])
_FLAG = frozenset([bool, type(None)])
_JSON_TYPES = {TIMESTAMP: _INTEGER, **dict.fromkeys(_NUMBERS, frozenset([int, float, type(None)])), "dislike": _FLAG}


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


class PerUser(NamedTuple):
    """Columns of all users, concatenated: the values of user u are ``values[name][offsets[u] : offsets[u + 1]]``."""

    values: dict[str, np.ndarray]
    offsets: np.ndarray

    @classmethod
    def of(cls, num_users: int, user: np.ndarray, **values: np.ndarray) -> PerUser:
        """From values sorted by ``user [N]``."""
        return cls(values, np.concatenate([[0], np.cumsum(np.bincount(user, minlength=num_users))]))

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Number of values of the users ``begin .. end - 1``."""
        return self.offsets[begin + 1 : end + 1] - self.offsets[begin:end]

    def padded(self, begin: int, end: int, width: int | None = None) -> dict[str, np.ndarray]:
        """The last ``width`` values of the users ``begin .. end - 1``: ``[end - begin, width]`` of each column.

        Without a width all values, and at least one column.
        """
        first, last, lengths = self.offsets[begin], self.offsets[end], self.lengths(begin, end)
        width = max(1, int(lengths.max(initial=0))) if width is None else width
        begins = self.offsets[begin + 1 : end + 1] - np.minimum(lengths, width)
        place = np.arange(first, last) - begins.repeat(lengths)
        kept = place >= 0
        target = (np.arange(end - begin) * width).repeat(lengths)[kept] + place[kept]
        tables = {}
        for name, column in self.values.items():
            table = np.zeros((end - begin) * width, np.int64)
            table[target] = column[first:last][kept]
            tables[name] = table.reshape(end - begin, width)
        return tables


@dataclass(frozen=True)
class UserHistories:
    """The histories of a number of users, ready to be read in batches.

    Attributes:
        users: external ids, in the order in which they are served.
        counts: what was read and what was left out.
        events: ``item_ids`` and ``feedback`` of every known event, sorted by user and time; also its ``timestamps``,
            ``behaviors`` and row of ``context`` if the policy reads them.
        exclude: items that must not be listed, including items that are too old to be read; distinct and ascending.
        max_history: H.
        unlisted: items that are listed for no user.
        user: features of the users ``[U]``; None = the policy does not read them.
        context: features of requests: one row for no event, the rows of ``events``, and the rows of the users' current
            requests; None as above.
    """

    users: pa.Array
    counts: ServingCounts
    events: PerUser
    exclude: PerUser
    max_history: int
    unlisted: np.ndarray
    user: FeatureArrays | None = None
    context: FeatureArrays | None = None

    def batches(self, size: int) -> Iterator[tuple[slice, EncodedHistories]]:
        """Yields ``size`` users at a time: their indices, and the input of the policy."""
        for begin in range(0, len(self.users), size):
            end = min(begin + size, len(self.users))
            columns: dict[str, Any] = {**self.events.padded(begin, end, self.max_history)}
            if self.context is not None:  # the rows of the events, followed by that of the user's current request
                rows = np.pad(columns["context"], ((0, 0), (0, 1)))
                lengths = np.minimum(self.events.lengths(begin, end), self.max_history)
                now = 1 + self.events.offsets[-1] + np.arange(begin, end)
                np.put_along_axis(rows, lengths[:, None], now[:, None], 1)
                columns["context"] = self.context.rows(rows)
            if self.user is not None:
                columns["user"] = self.user.rows(np.arange(begin, end))
            exclude = self.exclude.padded(begin, end)["item_ids"]
            if len(self.unlisted):
                exclude = np.concatenate([exclude, np.tile(self.unlisted, (end - begin, 1))], 1)
            yield slice(begin, end), EncodedHistories(exclude=exclude, **columns)


class _Events(NamedTuple):
    """Columns of events, ``[N]`` each, in any order.

    Attributes:
        user: index of the user; -1 is not served.
        item: internal id; 0 is unknown.
        time: milliseconds since the epoch.
        level: feedback level.
        impossible: number of values that cannot be true, of watch time and duration.
        behaviors: bit sets.
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    level: np.ndarray
    impossible: np.ndarray
    behaviors: np.ndarray


@dataclass(frozen=True)
class Request:
    """What a policy reads of a user, for a server that has it as Python objects.

    Attributes:
        history: the user's past, in any order; keys are the columns of a history without ``user_id``; may be empty.
        exclude: external ids that must not be listed.
        user: features of the user, by the columns of the prepared user table.
        context: features of the request, by name.
    """

    history: Sequence[Mapping[str, Any]]
    exclude: Sequence[Any] = ()
    user: Mapping[str, Any] | None = None
    context: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class HistoryReader:
    """Reads histories for one policy, given its items, its feedback definition and its length.

    A history is a frame of events, one per row, in any order: ``user_id``, ``item_id``, ``timestamp`` (times, or
    integer milliseconds since 1970) and, if the log had them, ``watch_time`` and ``duration`` in seconds, ``dislike``
    (true and false, or 1 and 0) and ``label`` in [0, 1]; also flags of behaviors and features of requests by their
    names, if the policy reads them. Other columns are ignored. Without ``timestamp``, a policy that reads no times
    takes the events in the order of the rows. Feedback levels are computed here, exactly as ``recpo prepare`` computed
    them for training.

    Attributes:
        items: external ids of the catalog. Items that are retired or not available are read in histories and excluded
            from every list.
        feedback: the definition that prepare fitted.
        max_history: H, the number of events that the policy reads; the most recent ones count.
        reads_timestamps: the policy reads the time of events, not only their order.
        features: the behaviors, and the features of users and requests, that it reads.
        repeats: items of the history may be listed again, including those that are too old to be read.
    """

    items: IdMap
    feedback: FeedbackDefinition
    max_history: int
    reads_timestamps: bool = False
    features: PolicyFeatures = field(default_factory=PolicyFeatures)
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
            user_features: ``user_id`` and columns as in the prepared user table. For users without a row, the features
                are missing. Ignored if the policy does not read features of users.
            context: ``user_id`` and features of the current request by name; missing as above.
            at: when the lists are made, milliseconds since the epoch: items that are not available then are excluded.
                None = items are available at any time.

        Raises:
            RecpoError: a column is missing or of a wrong type, an id or a time is null, a label is outside [0, 1], or a
                user is named twice.
        """
        table = to_arrow(histories, "histories")
        self._validate_columns(table, user_features, context)
        self._warn_without_feedback(table)
        owner = id_column(table, USER_ID, "histories")
        served = owner.unique() if users is None else _asked_for(users)
        events = self._events(
            rows_of_users(owner, served, "histories"),
            self.known_items(table, "histories"),
            self._times(table),
            [number_column(table, name, "histories") for name in _NUMBERS],
            [flag_column(table, name, "histories") for name in ("dislike", *self.features.behaviors)],
        )
        named = to_arrow({USER_ID: [], ITEM_ID: []} if exclude is None else exclude, "exclude")
        places = rows_of_users(id_column(named, USER_ID, "exclude"), served, "exclude")
        excluded = places, self.known_items(named, "exclude")
        return self._assembled(served, events, excluded, table, user_features=user_features, context=context, at=at)

    def _times(self, table: pa.Table) -> np.ndarray:
        """The times of events; without them, the numbers of the rows, if the policy reads only the order."""
        if TIMESTAMP not in table.column_names and not self.reads_timestamps:
            return np.arange(table.num_rows)
        return time_column(table, TIMESTAMP, "histories")

    def _assembled(
        self,
        served: pa.Array,
        events: _Events,
        excluded: tuple[np.ndarray, np.ndarray],
        contexts: Frame,
        *,
        user_features: Frame | None,
        context: Frame | None,
        at: int | None,
    ) -> UserHistories:
        """The histories of the users ``served``.

        ``excluded`` has users and items as in ``_Events``, ``contexts`` features of requests, a row for each event.
        """
        fitted, is_served = self.features, events.user >= 0
        known = is_served & (events.item > 0)
        rows = np.flatnonzero(known)
        rows = rows[np.lexsort((events.time[rows], events.user[rows]))]
        user, item, level = events.user[rows], events.item[rows], events.level[rows].astype(np.int64)
        lengths = np.bincount(user, minlength=len(served))
        pairs, unknown = self._excluded(user, item, lengths, excluded)
        counts = ServingCounts(
            users=len(served),
            events=int(np.count_nonzero(is_served)),
            unknown_items=int(np.count_nonzero(is_served & ~known)),
            impossible_values=int(events.impossible[is_served].sum()),
            events_without_feedback=int(np.count_nonzero(level == UNKNOWN)),
            empty_histories=int(np.count_nonzero(lengths == 0)),
            truncated_histories=int(np.count_nonzero(lengths > self.max_history)),
            unknown_excluded=unknown,
        )
        columns = {"item_ids": item, "feedback": level}
        if self.reads_timestamps:
            columns["timestamps"] = events.time[rows]
        if fitted.behaviors:
            columns["behaviors"] = events.behaviors[rows]
        if fitted.context:
            columns["context"] = np.arange(1, len(user) + 1)
        return UserHistories(
            served,
            counts,
            PerUser.of(len(served), user, **columns),
            pairs,
            self.max_history,
            self.items.unlisted(at),
            _of_users(fitted.user, user_features, served, "user_features") if fitted.user else None,
            _contexts(fitted.context, contexts, rows, context, served) if fitted.context else None,
        )

    def read_request(self, request: Request, at: int | None = None) -> EncodedHistories:
        """The input of the policy for the user of one request.

        Raises:
            RecpoError: as in ``read``.
        """
        ((_, encoded),) = self.read_requests([request], at).batches(1)
        return encoded

    def read_requests(self, requests: Sequence[Request], at: int | None = None) -> UserHistories:
        """The input of the policy for the users of several requests, who are numbered in this order.

        Args:
            requests: the requests.
            at: as in ``read``.

        Raises:
            RecpoError: as in ``read``; a fault in one request fails all of them.
        """
        events = [event for request in requests for event in request.history]
        named = [item for request in requests for item in request.exclude]
        numbers = np.arange(len(requests))
        owner = numbers.repeat([len(request.history) for request in requests])
        named_owner = numbers.repeat([len(request.exclude) for request in requests])
        features = _rows([request.user or {} for request in requests], self._user_columns)
        now = _rows([request.context or {} for request in requests], self._context_names)
        plain, barred = self._plain_events(owner, events), self._plain_items(named)
        if plain is not None and barred is not None:
            contexts = {name: [event.get(name) for event in events] for name in self._context_names}
            given = pa.array(numbers), plain, (named_owner, barred), contexts
            return self._assembled(*given, user_features=features, context=now, at=at)
        return self.read(
            {USER_ID: owner, **{name: [event.get(name) for event in events] for name in self.columns[1:]}},
            exclude={USER_ID: named_owner, ITEM_ID: named},
            users=numbers,
            user_features=features,
            context=now,
            at=at,
        )

    def _plain_events(self, owner: np.ndarray, events: Sequence[Mapping[str, Any]]) -> _Events | None:
        """The events of requests without a detour through a frame, which would cost most of a small request.

        None if some value is not of the types that JSON has for it: ``read`` converts it, or says what is wrong.
        """
        present = set().union(*events)
        columns = {name: [event.get(name) for event in events] for name in self.columns[1:] if name in present}
        expected = {**_JSON_TYPES, **dict.fromkeys(self.features.behaviors, _FLAG)}
        if any(not expected[name].issuperset(map(type, columns[name])) for name in expected if name in columns):
            return None
        item = self._plain_items(columns.get(ITEM_ID, []))
        try:
            time = np.array(columns.get(TIMESTAMP, []), np.int64)
        except OverflowError:
            return None
        if item is None or not len(item) == len(time) == len(events):
            return None
        numbers, flags = (  # None is nan, and False
            [np.array(columns[name], kind) if name in columns else None for name in names]
            for kind, names in ((np.float64, _NUMBERS), (bool, ("dislike", *self.features.behaviors)))
        )
        return self._events(owner, item, time, numbers, flags)

    def _plain_items(self, items: Sequence[Any]) -> np.ndarray | None:
        """Internal ids of ids of the catalog's type; None if one is of another type."""
        if not (_TEXT if self.items.is_text else _INTEGER).issuperset(map(type, items)):
            return None
        try:
            return self.items.find(np.array(items, object if self.items.is_text else np.int64))
        except OverflowError:
            return None

    def known_items(self, table: pa.Table, name: str) -> np.ndarray:
        """Internal ids ``[N]`` of the column ``item_id`` of a table called ``name``; 0 for unknown items.

        Raises:
            RecpoError: the column is missing, has nulls, or has ids of another type than the catalog.
        """
        ids = id_column(table, ITEM_ID, name)
        try:
            return self.items.to_internal(ids)
        except (RecpoError, OverflowError, pa.ArrowException) as error:
            message = f"{name}: column {ITEM_ID!r}: {error}"
            raise RecpoError(message, code="wrong_type", field=ITEM_ID) from error

    def _warn_without_feedback(self, histories: pa.Table) -> None:
        names, expected = histories.column_names, "label" if self.feedback.levels_from == "labels" else "watch_time"
        if len(histories) and not (self.feedback.every_event or expected in names or "dislike" in names):
            warnings.warn(
                f"histories have no column {expected}, so it is not known which events were liked, and many policies "
                f"list what is popular (columns: {', '.join(names)})",
                stacklevel=4,
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read for an event."""
        return (*EVENT_COLUMNS, *self.features.behaviors, *self._context_names)

    def _validate_columns(self, histories: pa.Table, user_features: Frame | None, context: Frame | None) -> None:
        """Raises ``RecpoError`` if frames lack columns that the policy reads, with one message for all of them.

        A null says that a value is unknown. A column must not be missing silently.
        """
        lacking = []
        for name, frame, wanted in (
            ("histories", histories, [*self.features.behaviors, *self._context_names]),
            ("user_features", user_features, self._user_columns),
            ("context", context, self._context_names),
        ):
            columns = [] if frame is None or not wanted else to_arrow(frame, name).column_names
            if missing := [one for one in wanted if one not in columns]:
                lacking.append(f"{name}: {', '.join(missing)}")
        if lacking:
            message = (
                f"the policy reads columns that are not there ({'; '.join(lacking)}): add them, with nulls where a "
                "value is not known"
            )
            raise RecpoError(message, code="missing_column", field=lacking[0])

    @property
    def _user_columns(self) -> tuple[str, ...]:
        return tuple(feature.source for feature in self.features.user.features)

    @property
    def _context_names(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.features.context.features)

    def _events(
        self,
        user: np.ndarray,
        item: np.ndarray,
        time: np.ndarray,
        numbers: Sequence[np.ndarray | None],
        flags: Sequence[np.ndarray | None],
    ) -> _Events:
        """From the columns ``_NUMBERS`` and ``dislike`` and the behaviors; None = there is no such column."""
        wrong = are_no_times(time)
        if wrong.any():
            message = (
                f"histories: {int(wrong.sum())} timestamps are no plausible milliseconds since 1970, the first is "
                f"{time[wrong.argmax()]} in row {int(wrong.argmax())}: pass times, or convert to milliseconds"
            )
            raise RecpoError(message, code="out_of_range", field="timestamp")
        dislike, *behaviors = (np.zeros(len(user), bool) if column is None else column for column in flags)
        watch_time, duration, label = (np.full(len(user), np.nan) if column is None else column for column in numbers)
        outside = (label < 0) | (label > 1)  # False for nan
        if outside.any():
            message = (
                f"histories: {int(outside.sum())} labels lie outside [0, 1], the first is {label[outside.argmax()]:g} "
                f"in row {int(outside.argmax())}: a label says how good an event was, from 0 to 1; drop the column "
                "where watch times say it"
            )
            raise RecpoError(message, code="out_of_range", field="label")
        false_watch = (watch_time < 0) | (watch_time > self.feedback.max_watch_time)
        false_duration = (duration < 0) | (duration > _LONGEST_S)
        watch_time, duration = np.where(false_watch, np.nan, watch_time), np.where(false_duration, np.nan, duration)
        level = self.feedback.levels(watch_time, duration, dislike, label)
        bits = np.zeros(len(user), np.int64)
        for bit, column in enumerate(behaviors):
            bits |= column.astype(np.int64) << bit
        return _Events(user, item, time, level, false_watch.astype(np.int64) + false_duration, bits)

    def _excluded(
        self, user: np.ndarray, item: np.ndarray, lengths: np.ndarray, excluded: tuple[np.ndarray, np.ndarray]
    ) -> tuple[PerUser, int]:
        """What must not be listed: ``excluded`` and, unless items may repeat, the items too old to be read.

        Also the number of excluded items that are unknown.
        """
        from_the_end = lengths.cumsum()[user] - np.arange(len(user))
        older = (from_the_end > self.max_history) & (not self.repeats)
        owner, named = excluded
        kept = (owner >= 0) & (named > 0)
        unknown = int(np.count_nonzero((owner >= 0) & (named == 0)))
        user, item = np.concatenate([user[older], owner[kept]]), np.concatenate([item[older], named[kept]])
        stride = len(self.items) + 1
        pairs = np.unique(user.astype(np.int64) * stride + item)
        return PerUser.of(len(lengths), pairs // stride, item_ids=pairs % stride), unknown


def _asked_for(users: Iterable[Any]) -> pa.Array:
    """The users to serve as an array of ids."""
    if isinstance(users, str | bytes) or not isinstance(users, Iterable):
        message = f"users: expected ids of users, such as a list, got {type(users).__name__}"
        raise RecpoError(message, code="wrong_type", field="users")
    values = users if isinstance(users, pa.Array | pa.ChunkedArray | np.ndarray | pd.Series) else list(users)
    asked = id_column(to_arrow({USER_ID: values}, "users"), USER_ID, "users")
    if len(asked.unique()) < len(asked):
        message = f"users: {len(asked) - len(asked.unique())} users are named twice; name each once"
        raise RecpoError(message, code="duplicate", field="users")
    return asked


def _rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """A frame of the named facts about users 0, 1, ..."""
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


def _contexts(
    fitted: FittedFeatures, contexts: Frame, rows: np.ndarray, context: Frame | None, served: pa.Array
) -> FeatureArrays:
    """Features of requests: one row for no event, the events at ``rows`` of ``contexts``, the current requests."""
    of_events = fitted.read(to_arrow(contexts, "histories").take(pa.array(rows)), "histories", by_name=True)
    now = _of_users(fitted, context, served, "context", by_name=True)
    return missing_features(fitted.features, (1,)).joined(of_events, now)


def rows_of_users(owner: pa.Array, served: pa.Array, name: str) -> np.ndarray:
    """The index of every ``owner`` among the users ``served``; -1 if that user is not served."""
    if not len(owner) or not len(served):
        return np.full(len(owner), -1, np.int64)
    if pa.types.is_integer(owner.type) != pa.types.is_integer(served.type):
        message = f"{name}: user_id is {owner.type}, users are {served.type}: cast one of them"
        raise RecpoError(message, code="wrong_type", field="user_id")
    kind = pa.int64() if pa.types.is_integer(owner.type) else pa.large_string()
    try:
        rows = pc.index_in(owner.cast(kind), value_set=served.cast(kind))
    except pa.ArrowInvalid as error:
        message = f"{name}: user_id does not fit 64 bits with a sign ({error})"
        raise RecpoError(message, code="out_of_range", field="user_id") from error
    return rows.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
