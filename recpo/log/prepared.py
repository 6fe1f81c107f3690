"""Reads prepared data: the manifest and, one at a time, the shards.

Altered files are never used as data. The manifest has a checksum of its own values and of every file. A file is
verified when a process first reads it, from the same bytes that are then decoded. SHA-256 takes 9 ms for the 8.6 MB of
a shard of 500,000 events, and decoding takes 65 ms (AMD EPYC, one core). Checksums of Parquet pages would not protect
the headers and the footer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts.artifact import Artifact, facts_in
from recpo.artifacts.checksums import is_inside, sha256
from recpo.artifacts.documents import describe_os_error, parse_json
from recpo.base.errors import Code, RecpoError, reading
from recpo.base.feature_encoding import FittedFeatures, of_side, vocabulary_file
from recpo.base.features import FeatureArrays, FeatureSchema, Reads, Side, missing_features, read_features
from recpo.base.feedback import FEEDBACK_KINDS, FeedbackDefinition
from recpo.log.feature_columns import CONTEXT
from recpo.log.id_map import IdMap
from recpo.log.locations import Place, locate, readable
from recpo.log.schema import EVENT_SCHEMA, RETIRED, Derived, LogColumns

if TYPE_CHECKING:
    from recpo.base.types import Features

Period = Literal["train", "valid", "test"]
MANIFEST = "manifest.json"
ITEMS, USERS, HISTORIES, QUANTILES = "items.parquet", "users.parquet", "histories.parquet", "quantiles.parquet"
#: Feature tables: row v - 1 is item v, row u is user u.
ITEM_FEATURES: Final = "item_features.parquet"
USER_FEATURES: Final = "user_features.parquet"
FEATURE_FILES: Final[dict[Side, str]] = {"item": ITEM_FEATURES, "user": USER_FEATURES}
#: Inputs of ``prepare --extends``: the events of the held-out periods, and the pairs of users and items before them.
HELD_OUT, TRAIN_PAST = "held_out.parquet", "train_past"
_Source: TypeAlias = Path | pa.NativeFile | pa.BufferReader
#: files that this process has verified: path, size and modification time, checksum
_COMPARED: set[tuple[object, ...]] = set()
#: columns of shards that are for people and in no batch
_FOR_PEOPLE: Final = (LogColumns.WATCH_TIME, LogColumns.DURATION)


class Events(NamedTuple):
    """The events of one shard as flat arrays of equal length, sorted by user, then time.

    ``offsets [U + 1]`` divides them into users: user ``u`` owns ``offsets[u] : offsets[u + 1]``. ``request_start[i]``
    is the index of the first event of event i's request: when i was shown, the events from there on were not known.
    ``by_request`` lists the events in the order of requests (``request_order``), which slates use; it differs from the
    order of time if requests of a user overlap. ``positive`` and ``skipped`` follow the directory's ``FeedbackRule``.
    ``is_random`` is read only for the held-out periods, because training does not use it. ``behaviors [N]`` are bit
    sets, ``context [N]`` features of requests, ``users [U]`` features of users; each is None if it was not requested or
    does not exist.
    """

    user_index: np.ndarray
    item_index: np.ndarray
    timestamp: np.ndarray
    label: np.ndarray
    dislike: np.ndarray
    positive: np.ndarray
    skipped: np.ndarray
    feedback: np.ndarray
    propensity: np.ndarray
    is_target: np.ndarray
    request_start: np.ndarray
    by_request: np.ndarray
    offsets: np.ndarray
    is_random: np.ndarray | None = None
    behaviors: np.ndarray | None = None
    context: FeatureArrays | None = None
    users: FeatureArrays | None = None

    @property
    def keys(self) -> Keys:
        """The columns that windows are cut by."""
        order = self.by_request
        return Keys(self.user_index, self.request_start[order], self.positive[order], self.is_target[order])


class Keys(NamedTuple):
    """The columns that windows are cut by, each ``[N]``, in the order of requests (``Events.by_request``).

    ``request_start`` is ascending. ``positive`` is None if it was not requested, ``is_target`` if all events are
    targets.
    """

    user: np.ndarray
    request_start: np.ndarray
    positive: np.ndarray | None = None
    is_target: np.ndarray | None = None


@dataclass(frozen=True)
class Prepared(Artifact):
    """A prepared directory.

    Attributes:
        root: the directory.
        manifest: the parsed ``manifest.json``.
    """

    kind: ClassVar = "prepared"
    version: ClassVar = 8
    made_by: ClassVar = "recpo prepare"

    root: Place
    manifest: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, root: Prepared | Place | str) -> Prepared:
        """Opens a directory written by ``recpo prepare``, here or in an object store (``recpo.log.locations``).

        Prepared data that are open already are returned as they are.

        Raises:
            RecpoError: no manifest (not a prepared directory, or an unfinished preparation), another format version, a
                shard that is missing or truncated, or a manifest, item table or user table that was changed.
        """
        if isinstance(root, Artifact):
            return super().open(root)
        root = locate(root)
        cls.recognize(root)
        file = root / MANIFEST
        opened = cls(root, facts_in(parse_json(_read(file), file, cls.remedy()), file, cls.version, cls.remedy()))
        opened._check_names()
        opened._check_sizes()
        if isinstance(root, Path):  # in an object store, files are verified when they are read
            for name in {ITEMS, USERS} & opened.checksums.keys():
                opened._compared(name)
        return opened

    @cached_property
    def checksums(self) -> dict[str, str]:
        """File, relative to the directory -> SHA-256, for every file except the manifest."""
        shards = [shard for period in self.manifest["shards"].values() for shard in period]
        return self.manifest["files"] | {shard["file"]: shard["sha256"] for shard in shards}

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Verifies the checksums of files.

        Args:
            names: the files; None = every file.

        Raises:
            RecpoError: a file is missing or its bytes differ.
        """
        for name in sorted(self.checksums if names is None else names):
            self._compared(name, again=True)

    def _check_names(self) -> None:
        """Refuses a manifest that names files outside of the directory."""
        shards = [shard for period in self.manifest["shards"].values() for shard in period]
        names = [*self.checksums, *(shard["past"] for shard in shards if "past" in shard)]
        if strange := [name for name in names if not is_inside(name)]:
            raise _damage(f"{self.root / MANIFEST}: {strange[0]!r} leads out of the directory", "untrusted", MANIFEST)

    def _check_sizes(self) -> None:
        """Detects missing and truncated shards now instead of an epoch later."""
        shards = {shard["file"]: shard["bytes"] for period in self.manifest["shards"].values() for shard in period}
        found = _sizes(self.root, shards)
        missing = [name for name in shards if name not in found]
        if missing:
            raise _damage(
                f"{self.root}: {len(missing)} shards are missing, the first is {missing[0]}", "missing_file", missing[0]
            )
        wrong = [name for name, size in shards.items() if found[name] != size]
        if wrong:
            sizes = f"{found[wrong[0]]:,} bytes, it was written with {shards[wrong[0]]:,}"
            raise _damage(f"{self.root}: {wrong[0]} has {sizes}", "damaged", wrong[0])

    def _compared(self, name: str, again: bool = False) -> _Source:
        """The file, for pyarrow's readers. It is verified if this process has not done so yet."""
        place, expected = self.root / name, self.checksums.get(name)
        if expected is None:
            raise _damage(f"{self.root / MANIFEST} knows no file {name}", "missing_file", name)
        key = (str(place), expected, *_stamp(place))
        if key in _COMPARED and not again:
            return readable(place)
        content = _read(place)
        if sha256(content) != expected:
            raise _damage(f"{place} is not as it was written (its checksum differs)", "damaged", name)
        _COMPARED.add(key)
        return pa.BufferReader(content)

    @cached_property
    def feedback(self) -> FeedbackDefinition:
        """Defines positive, skipped, disliked and unknown events, and the feedback levels of raw events."""
        return FeedbackDefinition.from_json(self.manifest.get("feedback"), f"{self.root / MANIFEST}, feedback")

    @property
    def feedback_counts(self) -> dict[Period, dict[str, int]]:
        """Number of events of each of ``FEEDBACK_KINDS`` in each period."""
        splits = self.manifest["counts"]["splits"]
        return {period: {kind: int(counts[kind]) for kind in FEEDBACK_KINDS} for period, counts in splits.items()}

    @property
    def holds_out(self) -> bool:
        """Whether there are events of a validation period; none with the split ``TrainOnly``."""
        return any(self.feedback_counts["valid"].values())

    @property
    def ends_at_once(self) -> bool:
        """Whether the train period of all users ends at one time, the start of the validation period."""
        return "valid_start_ms" in self.manifest["boundaries"]

    @property
    def num_items(self) -> int:
        """Catalog size V; item indices are 1..V."""
        return int(self.manifest["num_items"])

    def item_counts(self, column: Literal["train_count", "train_positives"] = "train_count") -> np.ndarray:
        """Training events, or training positives, of the items 1..V: ``[V]`` int64, writable."""
        return self.table(ITEMS, [column]).column(0).to_numpy().copy()

    def table(self, file: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A file of the directory, or some of its columns, in memory.

        Raises:
            RecpoError: it is missing, or was changed.
        """
        return _decoded(self._compared(file), self.root / file, columns)

    def item_ids(self) -> IdMap:
        """Maps external item ids to 1..V and back. An item that has not been idle long enough may still be shown."""
        return IdMap.load(self._compared(ITEMS), self.manifest["boundaries"]["last_ms"] if self.idle_days else None)

    @cached_property
    def retired_items(self) -> np.ndarray:
        """Internal ids of retired items, ascending. They are no longer candidates, and remain in histories."""
        place = self.root / ITEMS
        with _decoding(place), pq.ParquetFile(self._compared(ITEMS)) as file:
            if RETIRED not in file.schema_arrow.names:
                return np.zeros(0, np.int64)
            return np.flatnonzero(file.read([RETIRED]).column(0).to_numpy()) + 1

    @property
    def repeats(self) -> bool:
        """Whether lists may have items of a user's past (``recpo prepare --repeats``)."""
        return bool(self.manifest["config"]["repeats"])

    @property
    def idle_days(self) -> float:
        """After so many days without an event items have ended; 0 = they do not (``recpo prepare --idle_days``)."""
        return float(self.manifest["config"]["idle_days"])

    @property
    def repeated_share(self) -> float:
        """Share of the positive events of the validation period that are of items which the user had before."""
        return float(self.manifest["counts"]["repeated_positives"] / max(1, self.feedback_counts["valid"]["positive"]))

    @property
    def catalog_checksum(self) -> str:
        """Identifies the id map. A policy serves only the catalog that it was trained on."""
        return str(self.manifest["files"][ITEMS])

    @property
    def user_id_type(self) -> Literal["integer", "string"]:
        """Type of the external user ids. Reads the schema of the users' file, not its rows."""
        place = self.root / USERS
        with _decoding(place):
            kind = pq.read_schema(readable(place)).field("user_id").type
        return "integer" if pa.types.is_integer(kind) else "string"

    @property
    def item_column(self) -> str:
        """The user's name for the column of item ids: in the item table, if there is one, or else in the log."""
        table = self.manifest.get("feature_tables", {}).get("item")
        return str(self.manifest["columns"]["item_id"] if table is None else table["columns"]["id"])

    @property
    def users_checksum(self) -> str:
        """Identifies the users by their index (``FeedbackBatch.user_ids``)."""
        return str(self.manifest["files"][USERS])

    @cached_property
    def feature_schema(self) -> FeatureSchema:
        """The features of items, users and requests, fitted on the train period; empty if there are none."""
        return FeatureSchema.from_json(self.manifest.get("features"), f"{self.root / MANIFEST}, features")

    @property
    def behaviors(self) -> tuple[str, ...]:
        """Names of the behaviors. Behavior b is bit b of the bit sets in shards and batches."""
        return tuple(self.manifest.get("behaviors", ()))

    def item_features(self) -> Features:
        """The features of the catalog, leading shape ``[V + 1]``. Row 0 is padding: all features are missing."""
        features = self.feature_schema.item
        if not features:
            return missing_features(features, (self.num_items + 1,)).tensors()
        names = [feature.name for feature in features]
        return read_features(features, self.table(ITEM_FEATURES, names), first_missing=True).tensors()

    def user_features(self, users: np.ndarray | None = None) -> FeatureArrays:
        """The features of some users, leading shape ``[U]``. One row group at a time is in memory.

        Args:
            users: ``[U]`` ascending user indices; None = all.
        """
        features = self.feature_schema.user
        users = np.arange(self.manifest["num_users"]) if users is None else users
        if not features:
            return missing_features(features, (len(users),))
        file, begin, parts = self.root / USER_FEATURES, 0, list[pa.Table]()
        with _decoding(file):
            parquet = pq.ParquetFile(self._compared(USER_FEATURES))
            names = [feature.name for feature in features]
            for number in range(parquet.num_row_groups):
                end = begin + parquet.metadata.row_group(number).num_rows
                first, last = np.searchsorted(users, [begin, end])
                if last > first:
                    parts.append(parquet.read_row_group(number, columns=names).take(users[first:last] - begin))
                begin = end
            table = pa.concat_tables(parts or [parquet.schema_arrow.empty_table()])
        return read_features(features, table)

    def vocabulary(self, side: Side, name: str) -> pa.Array:
        """The values of a category: the value at index i has code i + 2.

        Args:
            side: items, users or context.
            name: a ``Category`` or ``Categories`` of ``feature_schema``.
        """
        return self.table(vocabulary_file(side, name), ["value"]).column(0).combine_chunks()

    def fitted_features(self, side: Side) -> FittedFeatures:
        """Encodes the raw features of further items, users or requests in the same way as this directory."""
        schema = self.feature_schema
        return of_side(schema.of(side), {name: self.vocabulary(side, name) for name in schema.coded(side)})

    def features_checksum(self, side: Side) -> str:
        """Identifies the features of a side: equal checksums encode equal values in the same way."""
        fitted = [feature.to_json() for feature in self.feature_schema.of(side)]
        files = [self.manifest["files"][vocabulary_file(side, name)] for name in self.feature_schema.coded(side)]
        return hashlib.sha256(json.dumps([fitted, files], sort_keys=True).encode()).hexdigest()

    def num_shards(self, split: Period) -> int:
        """Number of shards of ``split``."""
        return len(self.manifest["shards"][split])

    @property
    def segments(self) -> list[int]:
        """Training shards of the first preparation and of every later extension, in this order."""
        return list(self.manifest.get("segments", [self.num_shards("train")]))

    def load(self, split: Period, shard: int, reads: Reads = Reads()) -> Events:  # noqa: B008  immutable
        """Reads one shard into memory.

        Args:
            split: the period.
            shard: index of the shard.
            reads: what to read beyond the columns that every batch has.
        """
        left_out = (*_FOR_PEOPLE, LogColumns.IS_RANDOM) if split == "train" else _FOR_PEOPLE
        names = [name for name in EVENT_SCHEMA.names if name not in left_out]
        names += [Derived.BEHAVIORS] * bool(reads.behaviors and self.behaviors)
        context = self.feature_schema.context if reads.context else ()
        of_context = [CONTEXT + feature.name for feature in context]
        table = self.table(self._shard_file(split, shard), names + of_context)
        plain = table.select(of_context).rename_columns([feature.name for feature in context])
        columns = {name: table.column(name).to_numpy() for name in names}
        user, request = columns["user_index"], columns["request"]
        label, dislike, rule = columns["label"], columns["dislike"], self.feedback.rule
        offsets, request_start = run_offsets(user), request_starts(user, request)
        return Events(
            user_index=user,
            item_index=columns["item_index"].astype(np.int64),
            timestamp=columns["timestamp"],
            label=label,
            dislike=dislike,
            positive=rule.positive(label, dislike),
            skipped=rule.skipped(label, dislike),
            feedback=columns["feedback"].astype(np.int64),
            propensity=columns["propensity"],
            is_target=columns["is_target"],
            request_start=request_start,
            by_request=request_order(request_start),
            offsets=offsets,
            is_random=columns.get("is_random"),
            behaviors=columns[Derived.BEHAVIORS].astype(np.int64) if Derived.BEHAVIORS in columns else None,
            context=read_features(context, plain) if context else None,
            users=self.user_features(user[offsets[:-1]]) if reads.user and self.feature_schema.user else None,
        )

    def keys(self, split: Period, shard: int, positive: bool = False) -> Keys:
        """The keys of one shard: enough to plan an epoch without reading the rest.

        With ``positive``, they include which events are positive.
        """
        has_context = split == "train" and shard >= self.segments[0]
        names = ["user_index", "request"] + ["label", "dislike"] * positive + ["is_target"] * has_context
        # Not verified: that would read all bytes of all shards before the first step. Loading a shard verifies it.
        file = self.root / self._shard_file(split, shard)
        table = _decoded(readable(file), file, names)
        columns = {name: table.column(name).to_numpy() for name in names}
        start = request_starts(columns["user_index"], columns["request"])
        order = request_order(start)
        liked = self.feedback.rule.positive(columns["label"], columns["dislike"])[order] if positive else None
        is_target = columns["is_target"][order] if has_context else None
        return Keys(columns["user_index"], start[order], liked, is_target)

    def past_items(self, split: Period, shard: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items that some users of a held-out shard had before the period: distinct, however long ago.

        Only the row groups that contain one of the users are read, one at a time.

        Args:
            split: "valid" or "test".
            shard: index of the shard.
            users: ``[B]`` ascending user indices.

        Returns:
            ``[B]`` number of items of each user, and the items of all users, user by user, ascending.
        """
        counts, items = np.zeros(len(users), np.int64), [np.zeros(0, np.int64)]
        name = self.manifest["shards"][split][shard]["past"]
        for table, _ in self.pairs(name, users, self._compared(name)):
            user = table.column(0).to_numpy()
            place = np.minimum(np.searchsorted(users, user), len(users) - 1)
            wanted = users[place] == user
            counts += np.bincount(place[wanted], minlength=len(users))
            items.append(table.column(1).to_numpy()[wanted].astype(np.int64))
        return counts, np.concatenate(items)

    def held_out_sizes(self, split: Period, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """For each user of a held-out shard, ``[U]`` each: events in the period, and distinct items before it."""
        entry = self.manifest["shards"][split][shard]
        file, past_file = self.root / entry["file"], self.root / entry["past"]
        # as for keys, files are verified when they are loaded later
        table = _decoded(readable(file), file, [Derived.USER_INDEX, Derived.IS_TARGET])
        user, is_target = (column.to_numpy() for column in table.columns)
        starts = run_offsets(user)[:-1]
        users, past = user[starts], np.zeros(len(starts), np.int64)
        for pairs, _ in self.pairs(entry["past"], users, readable(past_file)):
            past += np.bincount(np.searchsorted(users, pairs.column(0).to_numpy()), minlength=len(users))
        return np.add.reduceat(is_target.astype(np.int64), starts), past

    def pairs(self, name: str, users: np.ndarray, source: _Source) -> Iterator[tuple[pa.Table, int]]:
        """The row groups of a ``PAST_SCHEMA`` file that may contain one of ``users``, with their sizes in bytes.

        Args:
            name: the file.
            users: ascending user indices.
            source: what is read of it.
        """
        with _decoding(self.root / name), pq.ParquetFile(source) as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                extent = group.column(0).statistics
                first = 0 if extent is None else int(np.searchsorted(users, extent.min))
                if extent is None or (first < len(users) and users[first] <= extent.max):
                    size = sum(group.column(column).total_compressed_size for column in range(2))
                    yield file.read_row_group(number), size

    def train_columns(self, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        """Some columns of the training events, each event once, in pieces that contain all events of their users.

        A piece is a shard. If the data was extended, the events of the same users in several segments come together, in
        the order of time, and a shard of every segment is in memory.
        """
        segments, first = list[Iterator[int]](), 0
        for count in self.segments:
            segments.append(iter(range(first, first + count)))
            first += count
        if len(segments) == 1:
            yield from (self.columns("train", shard, names) for shard in segments[0])
            return
        wanted = list(dict.fromkeys([Derived.USER_INDEX, Derived.IS_TARGET, *names]))
        held: list[dict[str, np.ndarray] | None] = [None] * len(segments)
        while True:
            for number, shards in enumerate(segments):
                if held[number] is None and (shard := next(shards, None)) is not None:
                    held[number] = self.columns("train", shard, wanted)
            loaded = [columns for columns in held if columns is not None]
            if not loaded:
                return
            last = min(columns[Derived.USER_INDEX][-1] for columns in loaded)
            pieces = []
            for number, columns in enumerate(held):
                if columns is not None:
                    stop = int(np.searchsorted(columns[Derived.USER_INDEX], last, side="right"))
                    pieces.append({name: values[:stop] for name, values in columns.items()})
                    rest = {name: values[stop:] for name, values in columns.items()}
                    held[number] = rest if stop < len(columns[Derived.USER_INDEX]) else None
            yield _merged(pieces, names)

    def columns(self, split: Period, shard: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Some columns of one shard, by name (``recpo.log.schema.EVENT_SCHEMA``), including its context rows."""
        table = self.table(self._shard_file(split, shard), names)
        return {name: table.column(name).to_numpy() for name in names}

    def _shard_file(self, split: Period, shard: int) -> str:
        return str(self.manifest["shards"][split][shard]["file"])


def _sizes(root: Place, files: Iterable[str]) -> dict[str, int]:
    """Total size in bytes of the existing files among ``files``."""
    if isinstance(root, Path):
        return {file: (root / file).stat().st_size for file in files if (root / file).is_file()}
    return {file.removeprefix(root.inside).strip("/"): size for file, size in root.sizes().items()}


def _stamp(place: Place) -> tuple[int, ...]:
    try:
        return (place.stat().st_size, place.stat().st_mtime_ns) if isinstance(place, Path) else ()
    except OSError:
        return ()


def _damage(message: str, code: Code, field: str) -> RecpoError:
    """An error about a file of the directory, with the remedy."""
    return RecpoError(f"{message}; {Prepared.remedy()}", code=code, field=field)


def _read(place: Place) -> bytes:
    try:
        return place.read_bytes()
    except OSError as error:
        raise _damage(describe_os_error(error, str(place)), "missing_file", place.name) from error


def _decoded(source: _Source, place: Place, columns: Sequence[str] | None) -> pa.Table:
    with _decoding(place):
        return pq.read_table(source, columns=None if columns is None else list(columns))


def _decoding(place: Place) -> AbstractContextManager[None]:
    return reading(place, OSError, pa.ArrowException, remedy=Prepared.remedy())


def _merged(pieces: list[dict[str, np.ndarray]], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The targets of ``pieces`` by user, with the targets of earlier pieces first."""
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    order = np.argsort(whole[Derived.USER_INDEX], kind="stable")
    order = order[whole[Derived.IS_TARGET][order]]
    return {name: whole[name][order] for name in names}


def run_change(*keys: np.ndarray) -> np.ndarray:
    """True at the first row of every run of rows with equal ``keys``."""
    change = np.ones(len(keys[0]), dtype=bool)
    change[1:] = False
    for key in keys:
        change[1:] |= key[1:] != key[:-1]
    return change


def run_offsets(*keys: np.ndarray) -> np.ndarray:
    """Where the runs of rows with equal ``keys`` begin, and the number of rows."""
    return np.append(np.flatnonzero(run_change(*keys)), len(keys[0]))


def request_starts(user: np.ndarray, request: np.ndarray) -> np.ndarray:
    """For every event, sorted by user and time, the index of the first event of its request.

    Requests of a user may overlap in time. A request then consists of several runs of events and starts with the first.
    """
    change = run_change(user, request)
    starts = np.flatnonzero(change)
    # requests are named in the order in which they start, so a decreasing name is a repeated one
    again = (np.diff(request[starts]) <= 0) & (np.diff(user[starts]) == 0)
    if not again.any():
        return starts[np.cumsum(change) - 1]
    order = np.lexsort((request, user))  # stable: of equal names, the first one is the first in time
    change = run_change(user[order], request[order])
    begins = np.empty_like(order)
    begins[order] = order[change][np.cumsum(change) - 1]
    return begins


def request_order(request_start: np.ndarray) -> np.ndarray:
    """The events in the order of their requests; the events of one request are in the order of time."""
    return np.argsort(request_start, kind="stable")
