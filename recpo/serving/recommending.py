"""What a run and a bundle answer with: frames of raw events become frames of lists and scores; filters of requests.

A bundle's ``attributes.parquet`` has ``item_id`` and one column per attribute, with a value or a list of values per
item. Re-ranking reads the same file (``recpo.lists.reranking.ItemAttributes``). Without torch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError, validate_range
from recpo.base.features import is_list
from recpo.base.frames import EARLIEST_MS, LATEST_MS, Frame, id_column, optional_times, to_arrow
from recpo.log.id_map import IdMap
from recpo.serving.histories import (
    ITEM_ID,
    TIMESTAMP,
    USER_ID,
    HistoryReader,
    PerUser,
    ServingCounts,
    UserHistories,
    rows_of_users,
)
from recpo.serving.manifest import readable
from recpo.serving.runtimes import Runtime

if TYPE_CHECKING:
    from recpo.training.run import Run

ATTRIBUTES: Final = "attributes.parquet"
_INT64: Final = 2**63
Wanted = Mapping[str, Sequence[Any]]
"""Attribute -> values."""


@dataclass(frozen=True)
class _Attribute:
    """The items of each value: the items with value c are ``items[offsets[c] : offsets[c + 1]]``."""

    values: pd.Index
    is_text: bool
    offsets: np.ndarray
    items: np.ndarray

    @classmethod
    def of(cls, column: pa.Array) -> _Attribute:
        owner = np.arange(1, len(column) + 1)
        if pa.types.is_list(column.type):
            owner, column = owner[pc.list_parent_indices(column).to_numpy()], pc.list_flatten(column)
        owner = owner[column.is_valid().to_numpy(zero_copy_only=False)]
        encoded = column.drop_null().dictionary_encode()
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(codes, kind="stable")
        offsets = np.searchsorted(codes[order], np.arange(len(encoded.dictionary) + 1))
        values = encoded.dictionary.to_numpy(zero_copy_only=False)
        is_text = pa.types.is_string(encoded.dictionary.type)
        return cls(pd.Index(values.astype(object) if is_text else values), is_text, offsets, owner[order])

    def items_of(self, wanted: Sequence[Any], where: str) -> np.ndarray:
        if isinstance(wanted, str | bytes) or not isinstance(wanted, Sequence):
            message = f"{where}: expected a list of values, such as [{wanted!r:.40}]"
            raise RecpoError(message, code="wrong_type", field=where)
        if wrong := [value for value in wanted if not isinstance(value, str if self.is_text else int)]:
            kind = "strings" if self.is_text else "integers"
            message = f"{where}: values of this attribute are {kind}, got {wrong[0]!r:.80}"
            raise RecpoError(message, code="wrong_type", field=where)
        known = [value for value in dict.fromkeys(wanted) if self.is_text or -_INT64 <= value < _INT64]
        place = self.values.get_indexer(pd.Index(known, dtype=object if self.is_text else np.int64))
        parts = [self.items[self.offsets[one] : self.offsets[one + 1]] for one in place[place >= 0].tolist()]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True)
class ItemFilters:
    """Applies the ``allow`` and ``deny`` filters of a request to the items 1..V.

    Attributes:
        num_items: V.
        attributes: by name; none for a run, and for a bundle that was exported without them.
    """

    num_items: int = 0
    attributes: Mapping[str, _Attribute] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path, items: IdMap) -> ItemFilters:
        """Reads the attributes of a bundle whose files are already verified.

        Raises:
            RecpoError: the file is damaged, or belongs to other items.
        """
        if not (root / ATTRIBUTES).is_file():
            return cls()
        with readable(root / ATTRIBUTES, OSError, pa.ArrowException):
            table = pq.read_table(root / ATTRIBUTES)
        if ITEM_ID not in table.column_names or len(table) != len(items):
            message = f"{root / ATTRIBUTES} is not of the {len(items)} items of the bundle: export it again"
            raise RecpoError(message, code="mismatch", field=ATTRIBUTES)
        names = [name for name in table.column_names if name != ITEM_ID]
        return cls(len(items), {name: _Attribute.of(table[name].combine_chunks()) for name in names})

    def allowed(self, allow: Wanted | None, deny: Wanted | None) -> np.ndarray | None:
        """The items that may be listed, bool ``[V + 1]`` (place 0 is not an item, and true); None = all.

        An item must have one of the given values for every attribute in ``allow``, and none of the values in ``deny``.
        A value that no item has allows and denies nothing.

        Raises:
            RecpoError: an unknown attribute, values of another type, or there are no attributes.
        """
        if not allow and not deny:
            return None
        if not self.attributes:
            message = (
                f"{'allow' if allow else 'deny'}: this bundle has no attributes of its items: export it with "
                "--attributes"
            )
            raise RecpoError(message, code="missing_option", field="attributes")
        kept = np.ones(self.num_items + 1, bool)
        for name, wanted in (allow or {}).items():
            has = np.zeros_like(kept)
            has[self._attribute(name, "allow").items_of(wanted, f"allow.{name}")] = True
            kept &= has
        for name, wanted in (deny or {}).items():
            kept[self._attribute(name, "deny").items_of(wanted, f"deny.{name}")] = False
        kept[0] = True
        return kept

    def _attribute(self, name: str, where: str) -> _Attribute:
        if name not in self.attributes:
            message = f"{where}.{name:.80}: attributes of this bundle are {', '.join(self.attributes)}"
            raise RecpoError(message, code="unknown_name", field=where)
        return self.attributes[name]


def attribute_columns(table: pa.Table, items: IdMap, where: str) -> pa.Table:
    """The attributes of the items 1..V, in this order, from a table with one row per item; null = unknown.

    Attributes are integers, strings and booleans, and lists of them. Other columns are ignored.

    Raises:
        RecpoError: no column ``item_id``, no attribute, missing items of the catalog, or several rows for one item.
    """
    index = items.to_internal(id_column(table, ITEM_ID, where))
    known = np.flatnonzero(index > 0)
    if not len(known) or len(np.unique(index[known])) < len(known):
        message = f"{where}: expected one row for each item of the catalog, found {len(known)} of {len(items)}"
        raise RecpoError(message, code="mismatch", field=where)
    place = np.full(len(items), -1, np.int64)
    place[index[known] - 1] = known
    rows = pa.array(place, mask=place < 0)
    columns = {ITEM_ID: items.to_external(np.arange(1, len(items) + 1))}
    for name in table.column_names:
        plain = None if name == ITEM_ID else _plain(table[name].combine_chunks())
        if plain is not None:
            columns[name] = plain.take(rows)
    if len(columns) == 1:
        message = f"{where} has no attributes: columns of integers, strings or booleans, or lists of them"
        raise RecpoError(message, code="empty", field=where)
    return pa.table(columns)


def _plain(column: pa.Array) -> pa.Array | None:
    """The column as int64 or strings, or lists of them; None if it is not an attribute."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    listed = is_list(column.type)
    kind = column.type.value_type if listed else column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        plain = pa.int64()
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        plain = pa.string()
    else:
        return None
    return column.cast(pa.list_(plain) if listed else plain)


BATCH_SIZE = 256

#: An ISO time, a time, or milliseconds since the epoch.
Moment: TypeAlias = str | datetime | int


class Served(NamedTuple):
    """An answer, and counts of skipped events.

    Attributes:
        table: of ``recommend``: ``user_id`` as given, ``rank`` int32 from 1, ``item_id`` external, ``score`` float32
            (natural-log probability); users in the order in which they were served, best item first. Of ``score``: the
            candidates' ``user_id`` and ``item_id`` as given, ``score``.
        counts: see ``ServingCounts``.
    """

    table: pa.Table
    counts: ServingCounts

    def to_pandas(self) -> pd.DataFrame:
        """The table; the counts are in ``attrs["counts"]``, by name."""
        frame = self.table.to_pandas()
        frame.attrs["counts"] = asdict(self.counts)
        return frame


def recommend_lists(
    runtime: Runtime,
    known: IdMap,
    read: UserHistories,
    *,
    k: int,
    allowed: np.ndarray | None = None,
    batch_size: int = BATCH_SIZE,
) -> Served:
    """The best items of every user, without those of the history and those to exclude.

    Args:
        runtime: ranks.
        known: the items of the catalog.
        read: the users to serve, from ``HistoryReader.read``.
        k: list length, see ``validate_k``.
        allowed: ``[V + 1]`` bool, which items may be listed (``ItemFilters``); None = every one.
        batch_size: users ranked at once.
    """
    items, scores = [np.zeros((0, k), np.int64)], [np.zeros((0, k), np.float32)]
    for _, inputs in read.batches(batch_size):
        if allowed is not None:
            inputs = inputs._replace(allowed=np.tile(allowed, (len(inputs.item_ids), 1)))
        top_items, top_scores = runtime.recommend(inputs, k)
        items.append(top_items)
        scores.append(top_scores)
    listed = np.concatenate(items)
    filled = listed > 0
    row, rank = np.nonzero(filled)
    columns = {
        USER_ID: read.users.take(pa.array(row)),
        "rank": pa.array((rank + 1).astype(np.int32)),
        ITEM_ID: known.to_external(listed[filled]),
        "score": pa.array(np.concatenate(scores)[filled].astype(np.float32)),
    }
    return Served(pa.table(columns), replace(read.counts, short_lists=int((~filled).any(1).sum())))


def score_candidates(
    runtime: Runtime,
    reader: HistoryReader,
    histories: Frame,
    candidates: Frame,
    *,
    user_features: Frame | None = None,
    context: Frame | None = None,
) -> Served:
    """Log-probabilities of given items after the users' whole histories.

    Args:
        runtime: scores.
        reader: reads the histories.
        histories: events in long format, see ``HistoryReader``.
        candidates: ``user_id`` and ``item_id``; users without an event are scored as new ones. An item that is not in
            the catalog scores nan and counts as ``unknown_candidates``.
        user_features: features of users, see ``HistoryReader.read``.
        context: features of the requests, see ``HistoryReader.read``.

    Returns:
        One row per candidate, in the order given.

    Raises:
        RecpoError: see ``HistoryReader.read``, or the runtime only ranks.
    """
    table = to_arrow(candidates, "candidates")
    owner, items = id_column(table, USER_ID, "candidates"), reader.known_items(table, "candidates")
    read = reader.read(histories, users=owner.unique(), user_features=user_features, context=context)
    user = rows_of_users(owner, read.users, "candidates")
    order = np.argsort(user, kind="stable")
    asked = PerUser.of(len(read.users), user[order], items=items[order], row=order + 1)
    scores = np.full(len(user) + 1, np.nan, np.float32)  # of the rows from 1 on; the places that only pad have row 0
    for part, inputs in read.batches(BATCH_SIZE):
        padded = asked.padded(part.start, part.stop)
        scores[padded["row"]] = runtime.score(inputs, padded["items"])
    result = pa.table({USER_ID: owner, ITEM_ID: table[ITEM_ID], "score": scores[1:]})
    return Served(result, replace(read.counts, unknown_candidates=int((items == 0).sum())))


def runtime_of(run: Run) -> tuple[Runtime, HistoryReader]:
    """What ranks and scores with the best checkpoint of a run, and reads the histories for it."""
    from recpo.serving.saved_policy import PolicyRuntime  # a bundle is served without torch and training

    policy = run.policy()
    known, features = (run.items, run.feedback), run.kept_features(policy)
    reader = HistoryReader(*known, policy.max_history, policy.reads_timestamps, features, run.repeats)
    return PolicyRuntime(policy, repeats=run.repeats), reader


def score(
    run: Run | Path | str,
    histories: Frame,
    candidates: Frame,
    *,
    user_features: Frame | None = None,
    context: Frame | None = None,
    trust: Sequence[str] = (),
) -> pd.DataFrame:
    """Log-probabilities of given items under the best checkpoint of a run. Of a bundle: ``Bundle.score``.

    Args:
        run: the run, or its directory.
        histories: raw events, one per row, as in ``recpo.recommend``.
        candidates: ``user_id`` and ``item_id``.
        user_features: ``user_id`` and columns as in the prepared user table, if the policy reads it.
        context: ``user_id`` and the features of the current requests, if the policy reads them.
        trust: packages, in addition to recpo, whose classes the configuration of the run may name.

    Returns:
        ``user_id``, ``item_id``, ``score``, in the order of the candidates; nan for unknown items.
    """
    from recpo.training.run import Run

    runtime, reader = runtime_of(Run.open(run, trust))
    return score_candidates(
        runtime, reader, histories, candidates, user_features=user_features, context=context
    ).to_pandas()


def milliseconds(at: Moment | None) -> int:
    """Milliseconds since the epoch of an ISO time or date (UTC without a zone), or of such a number; None = now.

    Raises:
        RecpoError: it is not a time.
    """
    if at is None:
        return int(time.time() * 1000)
    if isinstance(at, int) and not isinstance(at, bool) and EARLIEST_MS <= at < LATEST_MS:
        return at
    try:
        moment = datetime.fromisoformat(str(at))  # also of a datetime
    except ValueError as error:
        message = f"at is {at!r}, expected an ISO time such as 2026-11-23T18:00:00+01:00, or milliseconds since 1970"
        raise RecpoError(message, code="bad_value", field="at") from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def moment_of_lists(at: Moment | None, items: IdMap, histories: Callable[[], Frame]) -> int:
    """When lists are made: as ``milliseconds``, but of a log that ended before all of its items did, with a warning.

    Args:
        at: as in ``milliseconds``.
        items: the items, with the times at which they are available.
        histories: reads the events of the users, with their ``timestamp``.
    """
    chosen = milliseconds(at)
    if at is not None or len(items.unlisted(chosen)) < len(items):
        return chosen
    times = optional_times(to_arrow(histories(), "histories"), TIMESTAMP, 0, "histories")
    if not times.any():
        return chosen
    newest = datetime.fromtimestamp(times.max() / 1000, UTC).isoformat(timespec="seconds")
    warnings.warn(
        f"no item is available any more, so the lists are those of {newest}, when the newest event happened: for other "
        "lists name the time (at), or give the bundle today's items (recpo export --refresh)",
        stacklevel=2,
    )
    return int(times.max())


def validate_k(k: object, longest: int) -> int:
    """Returns ``k``; raises ``RecpoError`` if it is not an integer from 1 to ``longest``."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise RecpoError(f"k is {k!r}, expected a whole number from 1 to {longest}", code="wrong_type", field="k")
    validate_range(1 <= int(k) <= longest, "k", f"must be 1 to {longest} (of a bundle: export with a larger --k)", k)
    return int(k)
