"""Which items could be listed at which time. An item that did not exist yet is neither a candidate nor a target.

Lists are made once per user, at the start of the held-out period or, if each user has a separate period, at the user's
first held-out event. An item is a candidate for a user if

    available_from <= begin < available_until

and lists, targets and baselines use only candidates.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from recpo.artifacts.documents import path_of
from recpo.base.errors import RecpoError
from recpo.base.frames import FrameOrPath, first_values, id_column, optional_times, read_frame, require_columns
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.log.schema import ALWAYS, AVAILABILITY, NEVER, POSITIONS, LogColumns

#: Every item is a candidate.
ALL: Final = "all"
ITEM_ID, (AVAILABLE_FROM, AVAILABLE_UNTIL) = LogColumns.ITEM_ID, AVAILABILITY

HeldOut = Literal["valid", "test"]


@dataclass(frozen=True)
class CandidateTable:
    """A table of the available items, with their times.

    Items that it does not list are not candidates. Listed items that the prepared data do not have are ignored.

    Attributes:
        source: Parquet file, directory of such files, or any frame; one row per item.
        item_id: column of the item ids, as in the log.
        available_from: column of the times from which items are available (times, or milliseconds since the epoch;
            missing = always); null = the column available_from, if there is one.
        available_until: column of the first times at which items are no longer available (missing = forever); null =
            the column available_until, if there is one.
    """

    source: FrameOrPath
    item_id: str = ITEM_ID
    available_from: str | None = None
    available_until: str | None = None


@dataclass(frozen=True)
class Candidates:
    """When each item may be listed, and when each user's list is made.

    Attributes:
        available_from: ``[V + 1]`` int64, milliseconds since the epoch, of item 1, 2, ..., V (place 0 is unused).
        available_until: ``[V + 1]`` int64, the first time at which the item may no longer be listed.
        begin: milliseconds since the epoch at which lists are made: one number, or ``[users]`` int64.
        source: the origin of these times, for the document.
    """

    available_from: NDArray[np.int64]
    available_until: NDArray[np.int64]
    begin: int | NDArray[np.int64]
    source: str

    @cached_property
    def is_candidate(self) -> Tensor:
        """``[V + 1]`` bool, the items that may be listed for at least one user; place 0 is False."""
        first, last = np.min(self.begin), np.max(self.begin)
        found = torch.from_numpy((self.available_from <= last) & (self.available_until > first))
        found[0] = False
        return found

    @property
    def most_unavailable(self) -> int:
        """An upper bound on the columns of ``unavailable``."""
        return len(self._doubtful)

    def unavailable(self, users: Tensor) -> Tensor:
        """The items ``[B, N]`` that may not be listed for ``users [B]``, padded with 0."""
        items = torch.from_numpy(self._doubtful).to(users.device)
        if isinstance(self.begin, int):
            return items.expand(len(users), -1)
        at = self.begin[users.cpu().numpy()][:, None]
        gone = (self.available_from[self._doubtful] > at) | (self.available_until[self._doubtful] <= at)
        return items * torch.from_numpy(gone).to(users.device)

    @cached_property
    def _doubtful(self) -> NDArray[np.int64]:
        """Items that are unavailable for at least one user."""
        first, last = np.min(self.begin), np.max(self.begin)
        doubtful = (self.available_from > first) | (self.available_until <= last)
        doubtful[0] = False
        return np.flatnonzero(doubtful)

    def as_json(self) -> dict[str, Any]:
        """The entry of the document."""
        return {
            "source": self.source,
            "begin": self.begin if isinstance(self.begin, int) else "the first held-out event of every user",
            "items": int(self.is_candidate.sum()),
            "items_left_out": len(self.is_candidate) - 1 - int(self.is_candidate.sum()),
        }


#: Candidates as given by the user: a table, "all", or None for the times of the prepared data.
Given: TypeAlias = CandidateTable | FrameOrPath | None


def table_of(given: Given) -> CandidateTable | None:
    """The table; None for "all" and for the times of the prepared data."""
    if given is None or isinstance(given, CandidateTable):
        return given
    return None if path_of(given) == ALL else CandidateTable(given)


def candidates_of(data: Prepared, split: HeldOut, given: Given) -> Candidates | None:
    """The candidates of a held-out period; None = every item of the catalog.

    Args:
        data: prepared data.
        split: the period.
        given: a table; "all" = every item; None = the times of the prepared item table, or every item if it has none.

    Raises:
        RecpoError: the table cannot be read, lacks a column, names an item twice, or names no item of the catalog; or
            the log has positions instead of times.
    """
    table = table_of(given)
    available = data.item_ids().available if given is None else None
    if table is not None:
        times, until = _read(table, data)
        source = path_of(table.source) or "a frame in memory"
    elif available is not None:
        times, until = (np.insert(limits, 0, limit) for limits, limit in zip(available, (ALWAYS, NEVER), strict=True))
        source = "availability of the items in the prepared data"
    else:
        return None
    if has_positions(data) and ((times[1:] > ALWAYS) & (times[1:] < NEVER)).any():
        raise RecpoError(
            f"candidates: {source} has times, but the log of {data.root} has positions (by its time_unit): name a "
            "table without times, or prepare the log with its clock",
            code="mismatch",
            field="candidates",
        )
    return Candidates(times, until, begin_of(data, split), source)


def has_positions(data: Prepared) -> bool:
    """The log has positions instead of times, so items have no age."""
    return bool(data.manifest["config"]["columns"].get("time_unit") in POSITIONS)


def begin_of(data: Prepared, split: HeldOut) -> int | NDArray[np.int64]:
    """When lists are made, in milliseconds since the epoch: the start of the period, or ``[users]`` separate times."""
    begin = data.manifest["boundaries"].get(f"{split}_start_ms")
    if begin is not None:
        return int(begin)
    found = np.full(int(data.manifest["num_users"]), NEVER)
    for shard in range(data.num_shards(split)):
        columns = data.columns(split, shard, ["user_index", "timestamp", "is_target"])
        held_out = columns["is_target"]
        np.minimum.at(found, columns["user_index"][held_out], columns["timestamp"][held_out])
    # a user without held-out events makes no request
    found[found == NEVER] = int(data.manifest["boundaries"]["last_ms"])
    return found


def internal_ids(known: IdMap, values: pa.Array, column: str, name: str) -> NDArray[np.int64]:
    """Internal ids of the external ids in a column of the table ``name``; 0 = unknown.

    Raises:
        RecpoError: strings if ids are integers, or the other way round.
    """
    try:
        return known.to_internal(values)
    except RecpoError as error:
        message = f"{name}: column {column!r} is {values.type}, in the prepared data it is {known.type}: cast it"
        raise RecpoError(message, code="wrong_type", field=column) from error


def _read(table: CandidateTable, data: Prepared) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``available_from`` and ``available_until`` ``[V + 1]``."""
    name = path_of(table.source) or "candidates"
    frame, size = read_frame(table.source, name), data.num_items + 1
    require_columns(frame, [one for one in (table.available_from, table.available_until) if one is not None], name)
    ids = id_column(frame, table.item_id, name)
    index = internal_ids(data.item_ids(), ids, table.item_id, name)
    if not (index > 0).any():
        raise RecpoError(
            f"{name}: none of its {len(ids):,} rows names an item of {data.root}; its items are "
            f"{first_values(ids[:4].to_pylist())}: give the external ids of the same log",
            code="mismatch",
            field=table.item_id,
        )
    known = index[index > 0]
    if (again := np.flatnonzero(np.bincount(known, minlength=size) > 1)).size:
        which = data.item_ids().to_external(again[:1])[0].as_py()
        message = f"{name}: item {which!r} has several rows, expected one per item: keep one of them"
        raise RecpoError(message, code="duplicate", field=table.item_id)
    begin, end = np.full(size, NEVER), np.full(size, ALWAYS)
    begin[index] = optional_times(frame, table.available_from or AVAILABLE_FROM, ALWAYS, name)
    end[index] = optional_times(frame, table.available_until or AVAILABLE_UNTIL, NEVER, name)
    begin[0], end[0] = ALWAYS, NEVER  # place 0 received the rows of items that are not in the data
    return begin, end
