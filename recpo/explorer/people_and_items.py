"""Items and users as people know them.

Items have titles, pictures and attributes from a table, of which nothing is held in memory: DuckDB reads the rows that
a page shows. The events of a user are read from the one shard that has them; the last shards stay in memory.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import rankdata

from recpo.base.errors import RecpoError, reading
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch
from recpo.batches.slates import held_out_batch
from recpo.evaluation.candidates import HeldOut
from recpo.log.prepared import Events, Prepared
from recpo.log.schema import LogColumns

_TITLES: Final = ("title", "name", "item_name", "track_name", "caption", "headline")
_PICTURES: Final = ("picture", "image", "image_url", "picture_url", "cover", "cover_url", "thumbnail", "poster")
#: Files that are shown as pictures, and their types; SVG is left out, because it can contain scripts.
PICTURE_TYPES: Final = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}
_MOST_FOUND: Final = 50  # items or users of a search
_MOST_ATTRIBUTES: Final = 8
_LONGEST: Final = 80


@dataclass(frozen=True, kw_only=True)
class ItemColumns:
    """The table of items, and which of its columns are shown."""

    item_table: Path | str | None = None
    """Parquet file with one row per item: its titles, pictures and attributes"""
    item_column: str | None = None
    """column of ``item_table`` with the item ids of the log; null = as in the log"""
    title: str | None = None
    """column of titles; null = title, name, caption and the like"""
    picture: str | None = None
    """column of pictures: addresses, or files beside the table; null = picture, image, cover and the like"""
    attributes: Sequence[str] | None = None
    """columns to show; null = the first eight that are not vectors"""

    @property
    def file(self) -> Path | None:
        """The table; None = items have ids only."""
        return None if self.item_table is None else Path(self.item_table)


@dataclass(frozen=True)
class Item:
    """What is known about an item.

    Attributes:
        index: internal id, from 1.
        item_id: id in the log.
        title: its title; the id if it has none.
        picture: address or file; None = it has none.
        attributes: column to text.
        events: training events.
        positives: training positives.
        rank: 1 = the most training events.
        duration: seconds; None = unknown.
        is_retired: it is no longer listed.
    """

    index: int
    item_id: Any
    title: str
    picture: str | None
    attributes: dict[str, str]
    events: int
    positives: int
    rank: int
    duration: float | None
    is_retired: bool

    @property
    def is_new(self) -> bool:
        """Whether it has no training event."""
        return not self.events

    @property
    def has_remote_picture(self) -> bool:
        """Whether its picture is an address of the web, not a file."""
        return self.picture is not None and self.picture.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Catalog:
    """The items 1..V of prepared data.

    Attributes:
        data: the prepared data.
        columns: where titles, pictures and attributes are.

    Raises:
        RecpoError: the table cannot be read, or lacks a column.
    """

    data: Prepared
    columns: ItemColumns = field(default_factory=ItemColumns)

    def __post_init__(self) -> None:
        _ = self._shown

    def items(self, indices: Iterable[int]) -> dict[int, Item]:
        """The items with the given internal ids; repeated ids and those of no item are ignored."""
        shown = self._shown
        names = [name for name in (shown["title"], shown["picture"], *shown["attributes"]) if name is not None]
        return {index: self._item(index, item_id, row) for index, item_id, row in self._rows(indices, names)}

    def search(self, text: str) -> list[int]:
        """Internal ids of the item with that id, and of items whose title contains the text; at most 50."""
        is_number, found = pa.types.is_integer(self._ids.type), []
        if not is_number or re.fullmatch(r"-?\d{1,18}", text):
            found = np.trim_zeros(self._ids.to_internal([int(text) if is_number else text])).tolist()
        if (title := self._shown["title"]) is not None and text:
            query = f"SELECT {_quoted(self._item_id)} FROM read_parquet(?) WHERE contains(lower({_quoted(title)}), ?)"
            rows = self._query(f"{query} LIMIT {_MOST_FOUND}", [str(self.columns.file), text.lower()])
            titled = self._ids.to_internal([row[0] for row in rows]) if rows else []
            found += [int(index) for index in titled if index and index not in found]
        return found

    def picture(self, index: int) -> tuple[bytes, str] | None:
        """The picture of an item that lies beside the table, and its type; None = there is none.

        Only files inside the directory of the table with the name of a picture are read.
        """
        item = self.items([index]).get(index)
        if item is None or item.picture is None or self.columns.file is None or item.has_remote_picture:
            return None
        root = self.columns.file.resolve().parent
        path = (root / item.picture).resolve()
        kind = PICTURE_TYPES.get(path.suffix.lower())
        if kind is None or not path.is_relative_to(root) or not path.is_file():
            return None
        return path.read_bytes(), kind

    @property
    def attributes(self) -> list[str]:
        """Columns of the table that are shown as attributes."""
        return list(self._shown["attributes"])

    def values(self, attribute: str, indices: Sequence[int]) -> dict[int, list[str]]:
        """The values of an attribute of some items; lists have several, missing values none."""
        found = {}
        for index, _, row in self._rows(indices, [attribute]):
            value = row.get(attribute)
            listed = value if isinstance(value, list) else [] if value is None else [value]
            found[index] = [_text(one) for one in listed if one is not None]
        return found

    @cached_property
    def events(self) -> np.ndarray:
        """``[V]`` int64 training events of the items 1..V."""
        return self.data.item_counts("train_count")

    @cached_property
    def positives(self) -> np.ndarray:
        """``[V]`` int64 training positives of the items 1..V."""
        return self.data.item_counts("train_positives")

    @cached_property
    def ranks(self) -> np.ndarray:
        """``[V]`` ranks by training events, 1 = the most, ties by id."""
        return rankdata(-self.events, "ordinal")

    def _item(self, index: int, item_id: Any, row: dict[str, Any]) -> Item:
        shown = self._shown
        title, picture = (row.get(shown[name]) if shown[name] else None for name in ("title", "picture"))
        return Item(
            index,
            item_id,
            _text(title) if title not in (None, "") else str(item_id),
            str(picture) if picture else None,
            {name: _text(row[name]) for name in shown["attributes"] if row.get(name) is not None},
            int(self.events[index - 1]),
            int(self.positives[index - 1]),
            int(self.ranks[index - 1]),
            known(self._durations[index - 1]),
            index in self._retired,
        )

    @cached_property
    def _ids(self) -> Any:
        return self.data.item_ids()

    @cached_property
    def _retired(self) -> frozenset[int]:
        return frozenset(self.data.retired_items.tolist())

    @cached_property
    def _durations(self) -> np.ndarray:
        column: np.ndarray = self.data.table("items.parquet", ["duration"]).column(0).to_numpy()
        return column

    @property
    def _item_id(self) -> str:
        return self.columns.item_column or self.data.item_column

    @cached_property
    def _shown(self) -> dict[str, Any]:
        """The columns of the table by their role, given or guessed."""
        file = self.columns.file
        if file is None:
            return {"title": None, "picture": None, "attributes": []}
        remedy = "name a Parquet file with one row per item"
        with reading(file, OSError, pa.ArrowException, remedy=remedy, field="item_table"):
            schema = pq.read_schema(file)
        named = [("item_column", self._item_id), ("title", self.columns.title), ("picture", self.columns.picture)]
        named += [("attributes", name) for name in self.columns.attributes or ()]
        for option, name in named:
            if name is not None and name not in schema.names:
                message = f"{file} has no column {name!r} ({option}); its columns are {', '.join(schema.names)}"
                raise RecpoError(message, code="missing_column", field=option)
        title = self.columns.title or next((name for name in _TITLES if name in schema.names), None)
        picture = self.columns.picture or next((name for name in _PICTURES if name in schema.names), None)
        plain = [one.name for one in schema if one.name not in (self._item_id, title, picture) and _is_plain(one.type)]
        attributes = plain[:_MOST_ATTRIBUTES] if self.columns.attributes is None else list(self.columns.attributes)
        return {"title": title, "picture": picture, "attributes": attributes}

    def _rows(self, indices: Iterable[int], columns: Sequence[str]) -> list[tuple[int, Any, dict[str, Any]]]:
        """Index, id and columns of items; no columns where the table does not have the item."""
        wanted = sorted({int(index) for index in indices if 1 <= index <= self.data.num_items})
        ids, rows = self._ids.listed(np.array(wanted, np.int64)), {}
        if self.columns.file is not None and ids:
            names = list(dict.fromkeys(columns))
            selected = ", ".join(map(_quoted, [self._item_id, *names]))
            query = f"SELECT {selected} FROM read_parquet(?) WHERE {_quoted(self._item_id)} IN (SELECT unnest(?))"
            found = self._query(query, [str(self.columns.file), list(ids)])
            rows = {row[0]: dict(zip(names, row[1:], strict=True)) for row in found}
        return [(index, item_id, rows.get(item_id, {})) for index, item_id in zip(wanted, ids, strict=True)]

    def _query(self, query: str, values: list[Any]) -> list[tuple[Any, ...]]:
        with reading(self.columns.file, duckdb.Error, remedy="name a table of items", field="item_table"):
            return duckdb.cursor().execute(query, values).fetchall()  # a cursor of this thread


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_plain(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_plain(kind.value_type) and not pa.types.is_floating(kind.value_type)  # vectors are not for people
    return not (pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return _shortened(", ".join(_text(one) for one in value if one is not None))
    return _shortened(f"{value:g}" if isinstance(value, float) else str(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


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
            held_out = self._place(self.split, user)
            place = held_out or self._place("train", user)
            if place is None:
                return Person(user, user_id, [], [], None)
            shard, events, raw, row = place
            history: list[Event] = []
            later: list[Event] = []
            for one in range(int(events.offsets[row]), int(events.offsets[row + 1])):
                is_later = held_out is not None and events.is_target[one]
                (later if is_later else history).append(self._event(events, raw, one))
            batch = partial(held_out_batch, self.data, self.split, shard, events, np.array([row]))
            return Person(user, user_id, history[::-1], later, None if held_out is None else batch)

    def _event(self, events: Events, raw: dict[str, np.ndarray], place: int) -> Event:
        label = known(events.label[place])
        kind = "unknown" if label is None else "neutral"
        for name, holds in (("skipped", events.skipped), ("positive", events.positive), ("disliked", events.dislike)):
            kind = name if holds[place] else kind
        bits = 0 if events.behaviors is None else int(events.behaviors[place])
        return Event(
            int(events.item_index[place]),
            int(events.timestamp[place]),
            kind,
            label,
            known(raw[LogColumns.WATCH_TIME][place]),
            known(raw[LogColumns.DURATION][place]),
            tuple(name for bit, name in enumerate(self.data.behaviors) if bits >> bit & 1),
            known(events.propensity[place]),
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
        found, end = [], 0
        for size in self.data.segments if split == "train" else [len(last)]:
            start, end = end, end + size
            shard = bisect_left(last, user, start, end)
            found += [shard] if shard < end else []
        return found[::-1]

    def _load(self, split: Any, shard: int) -> tuple[Events, dict[str, np.ndarray]]:
        reads = Reads(behaviors=bool(self.data.behaviors)) | self.reads
        raw = self.data.columns(split, shard, (LogColumns.WATCH_TIME, LogColumns.DURATION))
        return self.data.load(split, shard, reads), raw

    def _query(self, query: str, value: Any) -> list[tuple[Any, ...]]:
        return duckdb.cursor().execute(query, [str(self.data.root / "users.parquet"), value]).fetchall()


def known(value: Any) -> float | None:
    """A number; None for nan."""
    number = float(value)
    return None if np.isnan(number) else number
