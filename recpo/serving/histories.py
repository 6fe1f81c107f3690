"""From a table of histories with external ids to the padded arrays that an exported program reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.errors import RecpoError

#: External ids to internal ones, 0 where unknown.
Lookup = Callable[[pa.Array], np.ndarray]


@dataclass
class ServingCounts:
    """What was served and what was left out.

    Attributes:
        users: rows of the table.
        empty_histories: users without a single known item; they get what the policy says when nothing is known.
        unknown_items: history items that are not in the catalog; skipped.
        unknown_blocked: blocked items that are not in the catalog; skipped.
        truncated_histories: users with more events than the policy reads; it reads the most recent ones, and the older
            items are still not recommended.
        short_lists: users for whom fewer than k items were allowed.
    """

    users: int = 0
    empty_histories: int = 0
    unknown_items: int = 0
    unknown_blocked: int = 0
    truncated_histories: int = 0
    short_lists: int = 0

    def add(self, other: ServingCounts) -> None:
        """Adds another table's counts."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class EncodedHistories(NamedTuple):
    """Inputs of an exported program, int64, 0 pads.

    Attributes:
        item_ids: ``[B, H]`` internal ids, oldest first.
        feedback: ``[B, H]`` feedback levels.
        blocked: ``[B, M]`` internal ids that must not be shown.
        timestamps: ``[B, H]`` milliseconds since the epoch; None where the program does not read them.
    """

    item_ids: np.ndarray
    feedback: np.ndarray
    blocked: np.ndarray
    timestamps: np.ndarray | None


class _Flat(NamedTuple):
    owner: np.ndarray
    values: pa.Array
    lengths: np.ndarray


def check_columns(schema: pa.Schema) -> None:
    """Raises ``RecpoError`` unless ``schema`` has ``user_id`` and the list columns of histories."""
    missing = [name for name in ("user_id", "item_ids") if name not in schema.names]
    if missing:
        raise RecpoError(f"histories: column {missing[0]} is missing; there are {', '.join(schema.names)}")
    for name in ("item_ids", "feedback", "timestamps", "blocked"):
        if name in schema.names and not _is_list(schema.field(name).type):
            raise RecpoError(f"histories: column {name} is {schema.field(name).type}, expected a list per user")


def encode_histories(
    table: pa.Table, lookup: Lookup, max_history: int, reads_timestamps: bool = False
) -> tuple[EncodedHistories, ServingCounts]:
    """Maps to internal ids, drops unknown items, keeps the most recent ``max_history`` events and pads.

    Args:
        table: ``user_id``, ``item_ids`` (oldest first), optionally ``feedback`` (one level per item) and ``blocked``.
        lookup: external to internal ids.
        max_history: H.
        reads_timestamps: the table must have ``timestamps`` (one per item; times, or milliseconds since the epoch).

    Raises:
        RecpoError: a column is missing or of a wrong type, or items and feedback differ in number.
    """
    check_columns(table.schema)
    users = table.num_rows
    history = _flatten(table, "item_ids")
    ids, feedback = lookup(history.values), _per_event(table, "feedback", history)
    if reads_timestamps and "timestamps" not in table.column_names:
        raise RecpoError("histories: this policy reads the time of events, and column timestamps is missing")
    timestamps = _per_event(table, "timestamps", history) if reads_timestamps else np.zeros_like(ids)
    known = ids > 0
    owner, ids, feedback, timestamps = (values[known] for values in (history.owner, ids, feedback, timestamps))
    lengths = np.bincount(owner, minlength=users)
    place = _places(owner, lengths) - np.maximum(lengths - max_history, 0)[owner]
    recent = place >= 0
    padded = np.zeros((3, users, max_history), np.int64)
    for target, values in zip(padded, (ids, feedback, timestamps), strict=True):
        target[owner[recent], place[recent]] = values[recent]
    blocked, unknown_blocked = _blocked(table, lookup, owner[~recent], ids[~recent])
    counts = ServingCounts(
        users=users,
        empty_histories=int((lengths == 0).sum()),
        unknown_items=int((~known).sum()),
        unknown_blocked=unknown_blocked,
        truncated_histories=int((lengths > max_history).sum()),
    )
    return EncodedHistories(padded[0], padded[1], blocked, padded[2] if reads_timestamps else None), counts


def _blocked(table: pa.Table, lookup: Lookup, owner: np.ndarray, older: np.ndarray) -> tuple[np.ndarray, int]:
    """``[B, M]``: the items of the blocked column and those of the history that the program does not read."""
    unknown = 0
    if "blocked" in table.column_names:
        column = _flatten(table, "blocked")
        ids = lookup(column.values)
        unknown = int((ids == 0).sum())
        owner = np.concatenate([owner, column.owner[ids > 0]])
        order = np.argsort(owner, kind="stable")
        owner, older = owner[order], np.concatenate([older, ids[ids > 0]])[order]
    lengths = np.bincount(owner, minlength=table.num_rows)
    blocked = np.zeros((table.num_rows, max(1, int(lengths.max(initial=0)))), np.int64)
    blocked[owner, _places(owner, lengths)] = older
    return blocked, unknown


def _per_event(table: pa.Table, name: str, history: _Flat) -> np.ndarray:
    """The values ``[N]`` of a column that has one whole number for each item of the histories; 0 where missing."""
    if name not in table.column_names:
        return np.zeros(len(history.owner), np.int64)
    column = _flatten(table, name)
    different = np.flatnonzero(column.lengths != history.lengths)
    if len(different):
        row = int(different[0])
        raise RecpoError(
            f"histories: {len(different)} users have another number of {name} than of item_ids, the first is user_id "
            f"{table.column('user_id')[row].as_py()!r} with {column.lengths[row]} and {history.lengths[row]}"
        )
    try:
        times = pa.types.is_timestamp(column.values.type)
        values = (column.values.cast(pa.timestamp("ms"), safe=False) if times else column.values).cast(pa.int64())
    except pa.ArrowException as error:
        raise RecpoError(f"histories: column {name} must hold whole numbers ({error})") from error
    return values.fill_null(0).to_numpy(zero_copy_only=False)


def _flatten(table: pa.Table, name: str) -> _Flat:
    """The lists of a column end to end; a null list is an empty one."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = pc.list_flatten(column)
    return _Flat(np.repeat(np.arange(len(column)), lengths), values, lengths)


def _places(owner: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Position of every value within its row, for values sorted by row."""
    return np.arange(len(owner)) - (np.cumsum(lengths) - lengths)[owner]


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
