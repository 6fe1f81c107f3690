"""The items as people know them: titles, pictures and attributes from a table, counts from the prepared data.

Nothing of the table is held in memory: DuckDB reads the rows of the items that a page shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.log.prepared import Prepared

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
_MOST_FOUND: Final = 50
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
        if self.columns.file is not None:
            _ = self._shown

    def items(self, indices: Iterable[int]) -> dict[int, Item]:
        """The items with the given internal ids; repeated ids and those of no item are ignored."""
        wanted = sorted({int(index) for index in indices if 1 <= index <= self.data.num_items})
        ids = self._ids.listed(np.array(wanted, np.int64))
        rows = self._rows(ids)
        return {
            index: self._item(index, item_id, rows.get(item_id, {})) for index, item_id in zip(wanted, ids, strict=True)
        }

    def index_of(self, text: str) -> int | None:
        """The internal id of an item id that is given as text; None = unknown."""
        if pa.types.is_integer(self._ids.type):
            if not re.fullmatch(r"-?\d{1,18}", text):
                return None
            return int(self._ids.to_internal([int(text)])[0]) or None
        return int(self._ids.to_internal([text])[0]) or None

    def search(self, text: str) -> list[int]:
        """Internal ids of the item with that id, and of items whose title contains the text; at most 50."""
        exact = self.index_of(text)
        found = [] if exact is None else [exact]
        if self.columns.file is not None and (title := self._shown["title"]) is not None and text:
            query = f"SELECT {_quoted(self._item_id)} FROM read_parquet(?) WHERE contains(lower({_quoted(title)}), ?)"
            rows = self._query(f"{query} LIMIT {_MOST_FOUND}", [str(self.columns.file), text.lower()])
            known = self._ids.to_internal([row[0] for row in rows]) if rows else []
            found += [int(index) for index in known if index and index != exact]
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
        return list(self._shown["attributes"]) if self.columns.file is not None else []

    def values(self, attribute: str, indices: Sequence[int]) -> dict[int, list[str]]:
        """The values of an attribute of some items; lists have several, missing values none."""
        wanted = sorted({int(index) for index in indices} - {0})
        ids = self._ids.listed(np.array(wanted, np.int64))
        rows = self._rows(ids, [attribute])
        found = {}
        for index, item_id in zip(wanted, ids, strict=True):
            value = rows.get(item_id, {}).get(attribute)
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
        ranks = np.empty(len(self.events), np.int64)
        ranks[np.argsort(-self.events, kind="stable")] = np.arange(1, len(self.events) + 1)
        return ranks

    def _item(self, index: int, item_id: Any, row: dict[str, Any]) -> Item:
        shown = self._shown if self.columns.file is not None else {"title": None, "picture": None, "attributes": []}
        title, picture = (row.get(shown[name]) if shown[name] else None for name in ("title", "picture"))
        duration = float(self._durations[index - 1])
        return Item(
            index,
            item_id,
            _text(title) if title not in (None, "") else str(item_id),
            str(picture) if picture else None,
            {name: _text(row[name]) for name in shown["attributes"] if row.get(name) is not None},
            int(self.events[index - 1]),
            int(self.positives[index - 1]),
            int(self.ranks[index - 1]),
            None if np.isnan(duration) else duration,
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
        assert file is not None
        try:
            schema = pq.read_schema(file)
        except (OSError, pa.ArrowException) as error:
            message = f"{file} cannot be read as Parquet ({error}): name a table with one row per item"
            raise RecpoError(message, code="damaged", field="item_table") from error
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

    def _rows(self, ids: Sequence[Any], columns: Sequence[str] | None = None) -> dict[Any, dict[str, Any]]:
        if self.columns.file is None or not ids:
            return {}
        shown = self._shown
        roles = [shown["title"], shown["picture"], *shown["attributes"]]
        names = [name for name in roles if name is not None] if columns is None else list(columns)
        names = list(dict.fromkeys(names))
        selected = ", ".join(map(_quoted, [self._item_id, *names]))
        query = f"SELECT {selected} FROM read_parquet(?) WHERE {_quoted(self._item_id)} IN (SELECT unnest(?))"
        rows = self._query(query, [str(self.columns.file), list(ids)])
        return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}

    @cached_property
    def _database(self) -> duckdb.DuckDBPyConnection:
        return duckdb.connect()

    def _query(self, query: str, values: list[Any]) -> list[tuple[Any, ...]]:
        try:
            return self._database.cursor().execute(query, values).fetchall()  # a cursor of this thread
        except duckdb.Error as error:
            message = f"{self.columns.file} cannot be read ({str(error).splitlines()[0]}): name a table of items"
            raise RecpoError(message, code="damaged", field="item_table") from error


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
