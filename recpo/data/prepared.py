"""Reading what ``recpo prepare`` wrote: the manifest and, one at a time, the shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.data.id_map import IdMap
from recpo.data.locations import Place, locate, readable
from recpo.errors import RecpoError
from recpo.feedback import FeedbackDefinition

Period = Literal["train", "valid", "test"]
MANIFEST = "manifest.json"
FORMAT_VERSION = 2
# what training batches are made of; shards also hold columns for people: watch_time, duration
_EVENT_COLUMNS = (
    "user_index",
    "item_index",
    "timestamp",
    "label",
    "dislike",
    "feedback",
    "propensity",
    "is_target",
    "request",
)
_HELD_OUT_COLUMNS = (*_EVENT_COLUMNS, "is_random")


class Events(NamedTuple):
    """The events of one shard as flat arrays of equal length, sorted by user, then time.

    ``offsets [U + 1]`` cuts them into users: user ``u`` owns ``offsets[u] : offsets[u + 1]``. ``request_start[i]`` is
    the index of the first event of event i's request: what happened from there on was not known when i was shown.
    ``by_request`` lists the events in the order of requests (``request_order``), as slates take them; it differs from
    the order of time where requests of a user overlap.
    ``positive`` and ``skipped`` are those of the directory's ``FeedbackRule``.
    ``is_random`` is read for the held-out periods only: no training batch uses it.
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


@dataclass(frozen=True)
class Prepared:
    """A prepared directory.

    Attributes:
        root: the directory.
        manifest: the parsed ``manifest.json``.
    """

    root: Place
    manifest: dict[str, Any]

    @classmethod
    def open(cls, root: Place | str) -> Prepared:
        """Opens a directory written by ``recpo prepare``, here or in an object store (``recpo.data.locations``).

        Raises:
            RecpoError: no manifest (not a prepared directory, or a preparation that did not end), another format
                version, or a shard that is missing.
        """
        root = locate(root)
        file = root / MANIFEST
        if not file.is_file():
            raise RecpoError(f"{root} is no prepared directory: {MANIFEST} is missing; make it with `recpo prepare`")
        manifest = json.loads(file.read_bytes())
        if manifest.get("format_version") != FORMAT_VERSION:
            raise RecpoError(
                f"{file}: format_version {manifest.get('format_version')!r}, this recpo reads {FORMAT_VERSION}; "
                "prepare the log again"
            )
        missing = _missing(root, shard_files(manifest))
        if missing:
            raise RecpoError(
                f"{root}: {len(missing)} shards are missing, the first is {missing[0]}; prepare the log again"
            )
        return cls(root, manifest)

    @cached_property
    def feedback(self) -> FeedbackDefinition:
        """What counts as positive, skipped, disliked and unknown here, and the feedback levels of raw events."""
        return FeedbackDefinition.from_json(self.manifest.get("feedback"), f"{self.root / MANIFEST}, feedback")

    @property
    def num_items(self) -> int:
        """Catalog size V; item indices are 1..V."""
        return int(self.manifest["num_items"])

    def item_counts(self, column: Literal["train_count", "train_positives"] = "train_count") -> np.ndarray:
        """Training events, or training positives, of the items 1..V: ``[V]`` int64, writable."""
        return self.table("items.parquet", [column]).column(0).to_numpy().copy()

    def table(self, file: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A file of the directory, or some of its columns, in memory."""
        return pq.read_table(readable(self.root / file), columns=None if columns is None else list(columns))

    def item_ids(self) -> IdMap:
        """The bridge between external item ids and 1..V."""
        return IdMap.load(readable(self.root / "items.parquet"))

    @property
    def catalog_checksum(self) -> str:
        """Identifies the id map: a policy serves only the catalog it was trained on."""
        return str(self.manifest["files"]["items.parquet"])

    def num_shards(self, split: Period) -> int:
        """Number of shards of ``split``."""
        return len(self.manifest["shards"][split])

    def load(self, split: Period, shard: int) -> Events:
        """Reads one shard into memory."""
        columns = self.columns(split, shard, _EVENT_COLUMNS if split == "train" else _HELD_OUT_COLUMNS)
        user, request = columns["user_index"], columns["request"]
        label, dislike, rule = columns["label"], columns["dislike"], self.feedback.rule
        offsets, request_start = _run_offsets(user), request_starts(user, request)
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
        )

    def keys(self, split: Period, shard: int, positive: bool = False) -> tuple[np.ndarray, ...]:
        """``(user_index, request_start)`` of one shard, by request: enough to plan an epoch without reading the rest.

        With ``positive``, also which events are positive.
        """
        names = ["user_index", "request"] + ["label", "dislike"] * positive
        user, request, *feedback = self.columns(split, shard, names).values()
        start = request_starts(user, request)
        order = request_order(start)
        return (user, start[order], self.feedback.rule.positive(*feedback)[order]) if positive else (user, start[order])

    def columns(self, split: Period, shard: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Some columns of one shard, by name (``recpo.data.schema.EVENT_SCHEMA``)."""
        table = self.table(self.manifest["shards"][split][shard]["file"], names)
        return {name: table.column(name).to_numpy() for name in names}


def shard_files(manifest: dict[str, Any]) -> list[str]:
    """The shards that a manifest names, relative to its directory."""
    return [shard["file"] for shards in manifest["shards"].values() for shard in shards]


def _missing(root: Place, files: Sequence[str]) -> list[str]:
    if isinstance(root, Path):
        return [file for file in files if not (root / file).is_file()]
    there = {file.inside.removeprefix(root.inside).strip("/") for file in root.files()}
    return [file for file in files if file not in there]


def run_change(*keys: np.ndarray) -> np.ndarray:
    """True at the first row of every run of rows with equal ``keys``."""
    change = np.ones(len(keys[0]), dtype=bool)
    change[1:] = False
    for key in keys:
        change[1:] |= key[1:] != key[:-1]
    return change


def _run_offsets(*keys: np.ndarray) -> np.ndarray:
    return np.append(np.flatnonzero(run_change(*keys)), len(keys[0]))


def request_starts(user: np.ndarray, request: np.ndarray) -> np.ndarray:
    """For every event, sorted by user and time, the index of the first event of its request.

    Requests of a user may overlap in time: then a request is several runs of events, and begins with the first.
    """
    change = run_change(user, request)
    starts = np.flatnonzero(change)
    # requests are named in the order in which they begin, so a name that falls is one that comes again
    again = (np.diff(request[starts]) <= 0) & (np.diff(user[starts]) == 0)
    if not again.any():
        return starts[np.cumsum(change) - 1]
    order = np.lexsort((request, user))  # stable: the first of equals is the first in time
    change = run_change(user[order], request[order])
    begins = np.empty_like(order)
    begins[order] = order[change][np.cumsum(change) - 1]
    return begins


def request_order(request_start: np.ndarray) -> np.ndarray:
    """The events in the order of their requests, those of one request in the order of time."""
    return np.argsort(request_start, kind="stable")
