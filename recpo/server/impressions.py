"""Impressions and outcomes, as records of the write-ahead files and as rows of the log.

A request id is the address of the impression's record: the file, the offset, and a random number that the record
repeats. So any worker finds an impression that another worker wrote, now or before a restart, without an index in
memory.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa

from recpo.artifacts import MARKER, kind_of, write_json
from recpo.artifacts.documents import WRITING, os_errors
from recpo.artifacts.outputs import locked_parent
from recpo.base.errors import RecpoError
from recpo.server.feature_values import arrow_type
from recpo.server.segments import Address, SegmentWriter, Slot, read_record

JOURNAL: Final = "_journal"  # `recpo prepare` ignores names that start with an underscore
IMPRESSION, OUTCOME, HEADER = b"i", b"o", b"h"
ID_PATTERN: Final = "^[0-9a-f]{44}$"
_ROUNDING: Final = 1e-6  # above the errors of the propensities of exploration, 1e-9 each

IdType = Literal["integer", "string"]
_ID_TYPES: Final[Mapping[str, pa.DataType]] = {"integer": pa.int64(), "string": pa.string()}


@dataclass(frozen=True)
class LogLayout:
    """Types and columns of the log's files.

    Attributes:
        user_id: type of the user ids.
        item_id: type of the item ids.
        graded: outcomes are labels, not watch times, because the bundle's feedback levels come from labels.
        behaviors: further outcomes, one flag each.
        context: name and kind (``recpo.server.feature_values``) of the features of requests.
    """

    user_id: IdType
    item_id: IdType
    graded: bool = False
    behaviors: tuple[str, ...] = ()
    context: tuple[tuple[str, str], ...] = ()

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The fields that an outcome may contain."""
        return (*(("label", "dislike") if self.graded else ("watch_time", "duration", "dislike")), *self.behaviors)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the Parquet files, with the names and units that ``recpo prepare`` reads."""
        flags = ("dislike", *self.behaviors)
        outcomes = [(name, pa.bool_() if name in flags else pa.float64()) for name in self.outcomes]
        return pa.schema(
            [
                pa.field("user_id", _ID_TYPES[self.user_id], nullable=False),
                pa.field("item_id", _ID_TYPES[self.item_id], nullable=False),
                pa.field("timestamp", pa.int64(), nullable=False),
                *(pa.field(name, kind) for name, kind in outcomes),
                pa.field("propensity", pa.float64(), nullable=False),
                pa.field("is_random", pa.bool_(), nullable=False),
                pa.field("request_id", pa.string(), nullable=False),
                *(pa.field(name, arrow_type(kind)) for name, kind in self.context),
            ]
        )

    def header(self) -> bytes:
        """The first record of every segment."""
        return HEADER + json.dumps(asdict(self)).encode()

    @classmethod
    def from_header(cls, payload: bytes) -> LogLayout:
        """Parses the result of ``header``.

        Raises:
            RecpoError: the header has other fields, so another version of recpo wrote it.
        """
        found = json.loads(payload[1:])
        names = [one.name for one in fields(cls)]
        if sorted(found) != sorted(names):
            raise RecpoError(
                f"{JOURNAL}: the header of a segment has the fields {', '.join(found)}, expected {', '.join(names)}: "
                "start the recpo version that wrote it again, which completes its log"
            )
        context = tuple((name, kind) for name, kind in found["context"])
        return cls(**{**found, "behaviors": tuple(found["behaviors"]), "context": context})


class Impression(NamedTuple):
    """One slate that was shown.

    Attributes:
        nonce: the random part of its request id.
        time_ms: time of the request, milliseconds since the epoch.
        user_id: the user.
        items: external ids, best first.
        propensity: probability of each item at a uniformly drawn place of the slate.
        is_random: the item was drawn uniformly.
        context: the known features of the request, by name.
    """

    nonce: str
    time_ms: int
    user_id: Any
    items: Sequence[Any]
    propensity: Sequence[float]
    is_random: Sequence[bool]
    context: Mapping[str, Any] | None = None

    def payload(self) -> bytes:
        """Serializes it as a record."""
        return IMPRESSION + json.dumps(self).encode()

    @classmethod
    def from_payload(cls, payload: bytes) -> Impression:
        """Parses the result of ``payload``."""
        return cls(*json.loads(payload[1:]))


@dataclass(frozen=True)
class Outcome:
    """The outcome of one item of a slate.

    Attributes:
        address: the address of the impression.
        time_ms: time of the report. Of several reports, the later one wins, value by value.
        item_id: the item.
        values: the known values among ``LogLayout.outcomes``.
    """

    address: Address
    time_ms: int
    item_id: Any
    values: Mapping[str, float | bool] = field(default_factory=dict)

    def payload(self) -> bytes:
        """Serializes it as a record."""
        return OUTCOME + json.dumps([*self.address, self.time_ms, self.item_id, dict(self.values)]).encode()

    @classmethod
    def from_payload(cls, payload: bytes) -> Outcome:
        """Parses the result of ``payload``."""
        slot, segment, offset, time_ms, item_id, values = json.loads(payload[1:])
        return cls(Address(slot, segment, offset), time_ms, item_id, values)


def validate_log_directory(root: Path, bundle: Path) -> None:
    """Raises if a log must not be written to ``root``. Writes nothing.

    Args:
        root: the log's directory.
        bundle: the bundle that serves, or the directory of its versions.

    Raises:
        RecpoError: it is or lies in a bundle or ``bundle``, or contains files and is not a log.
    """
    place, served = Path(os.path.realpath(root)), Path(os.path.realpath(bundle))
    for parent in (place, *place.parents):
        if parent == served or kind_of(parent) == "bundle":
            raise RecpoError(
                f"log: {root} {'is' if parent == place else 'lies in'} a bundle or a directory of versions ({parent}), "
                "which the files of a log would damage: choose a directory outside"
            )
    if place.exists():
        with os_errors(place, WRITING), locked_parent(place / JOURNAL):
            _validate_files(place, root)


def _validate_files(place: Path, root: Path) -> None:
    if kind_of(place / JOURNAL) != "impressions" and any(path.is_file() for path in place.rglob("*")):
        raise RecpoError(
            f"log: {root} contains files and is not a log of `recpo serve` ({JOURNAL}/{MARKER} is missing): choose a "
            "new directory, an empty one, or such a log"
        )


class ImpressionLog:
    """Appends impressions and outcomes. Several instances may write to one directory; each has its own files.

    Args:
        root: the log's directory.
        layout: types and columns.
        outcome_window_s: how long outcomes of an impression are accepted.
        max_bytes, max_age_s, sync: see ``SegmentWriter``.

    Raises:
        RecpoError: ``root`` contains files and is not a log, or it cannot be written.
    """

    def __init__(
        self,
        root: Path,
        layout: LogLayout,
        *,
        outcome_window_s: float,
        max_bytes: int = 1 << 26,
        max_age_s: float = 300.0,
        sync: bool = True,
    ) -> None:
        self.root, self.layout, self.outcome_window_s = root, layout, outcome_window_s
        self._journal = root / JOURNAL
        with os_errors(root, WRITING):
            self._journal.mkdir(parents=True, exist_ok=True)
            with locked_parent(self._journal):
                _validate_files(root, root)
                if kind_of(self._journal) is None:
                    write_json(self._journal / MARKER, {"kind": "impressions"})
        self._slot = Slot.claim(self._journal)
        self._slot.complete_segments()
        self._writer = SegmentWriter(self._slot, layout.header(), max_bytes=max_bytes, max_age_s=max_age_s, sync=sync)

    @property
    def writable(self) -> bool:
        """False after a failure, until a record has been written again."""
        return not self._writer.failed

    def add(
        self,
        user_id: object,
        items: Sequence[Any],
        propensity: Sequence[float],
        is_random: Sequence[bool],
        context: Mapping[str, Any] | None = None,
    ) -> tuple[str, Future[None]]:
        """Appends an impression and returns its request id, which is valid once the future is done.

        Raises:
            RecpoError: the log is closed.
        """
        now, nonce = int(time.time() * 1000), secrets.token_hex(4)
        impression = Impression(nonce, now, user_id, items, propensity, is_random, context)
        address, written = self._writer.append(impression.payload())
        return request_id(address, nonce), written

    def find(self, identifier: str) -> tuple[Address, Impression] | None:
        """The impression of a request id; None if there is none that still accepts outcomes."""
        address, nonce = _parsed(identifier)
        payload = read_record(self._journal, address)
        if payload is None or payload[:1] != IMPRESSION:
            return None
        impression = Impression.from_payload(payload)
        late = time.time() * 1000 > impression.time_ms + self.outcome_window_s * 1000
        return None if impression.nonce != nonce or late else (address, impression)

    def add_outcomes(self, address: Address, outcomes: Mapping[Any, Mapping[str, float | bool]]) -> Future[None]:
        """Appends outcomes by item to the impression at ``address``. They are stored once the future is done.

        Ask ``still_open`` after that: only outcomes that were on disk before the impression was published are joined.

        Raises:
            RecpoError: the log is closed.
        """
        now = int(time.time() * 1000)
        written = Future[None]()
        written.set_result(None)
        for item, values in outcomes.items():  # records are written in order, so the future of the last one covers all
            _, written = self._writer.append(Outcome(address, now, item, values).payload())
        return written

    def still_open(self, address: Address) -> bool:
        """Whether the impression at ``address`` still accepts outcomes."""
        return read_record(self._journal, address) is not None

    def close(self) -> None:
        """Writes waiting records and releases the slot."""
        self._writer.close()
        self._slot.release()


def request_id(address: Address, nonce: str) -> str:
    """The id in the answer, in the outcomes that a client reports, and in the rows of the log."""
    return f"{address.slot:04x}{address.segment:016x}{address.offset:016x}{nonce}"


def joined_rows(
    address: Address, impression: Impression, outcomes: Sequence[Outcome], layout: LogLayout
) -> list[dict[str, Any]]:
    """The rows of a slate, one per item, with null values if the outcome is not known."""
    identifier = request_id(address, impression.nonce)
    known: dict[Any, dict[str, float | bool]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.time_ms):
        known.setdefault(outcome.item_id, {}).update(outcome.values)
    return [
        {
            "user_id": impression.user_id,
            "item_id": item,
            "timestamp": impression.time_ms,
            **{name: known.get(item, {}).get(name) for name in layout.outcomes},
            "propensity": propensity,
            "is_random": is_random,
            "request_id": identifier,
            **{name: (impression.context or {}).get(name) for name, _ in layout.context},
        }
        for item, propensity, is_random in zip(
            impression.items, impression.propensity, impression.is_random, strict=True
        )
    ]


def validate_propensities(items: Sequence[Any], propensity: Sequence[float]) -> None:
    """Raises if rows of a slate could not be weighted by their propensities.

    Args:
        items: external ids.
        propensity: probability of each item at a uniformly drawn place of the slate.

    Raises:
        RecpoError: a propensity is not a probability above 0, their sum is above 1, or an item is listed twice.
    """
    if wrong := [value for value in propensity if not 0.0 < value <= 1.0]:  # nan is wrong as well
        raise RecpoError(f"propensity {wrong[0]} of a shown item, expected a probability in (0, 1]")
    if (total := math.fsum(propensity)) > 1.0 + _ROUNDING:
        raise RecpoError(f"propensities of a slate sum to {total}, expected at most 1")
    if len(items) != len(propensity) or len(set(items)) < len(items):
        raise RecpoError(
            f"{len(items)} items of a slate, {len(set(items))} of them distinct, with {len(propensity)} "
            "propensities, expected one each"
        )


def _parsed(identifier: str) -> tuple[Address, str]:
    slot, segment, offset = (int(part, 16) for part in (identifier[:4], identifier[4:20], identifier[20:36]))
    return Address(slot, segment, offset), identifier[36:]
