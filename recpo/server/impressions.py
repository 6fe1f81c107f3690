"""Impressions and outcomes: records of the write-ahead files, and rows of the log that are published from them.

A request id is the address of the impression's record: the file, the offset, and a random number that the record
repeats. So any worker finds an impression that another worker wrote, now or before a restart, without an index in
memory.

``settle`` publishes write-ahead files as Parquet files: impressions joined with their outcomes, each row once. A
segment is due when its last record is older than the outcome window. It is first renamed to closing, so that no worker
accepts outcomes for it. Then the outcomes in all segments are read, and the Parquet file appears under a name that
depends only on the segment. Only then is the segment done. If the process dies in between, the next pass repeats this
segment and writes the same file.
"""

import json
import logging
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts.checksums import MARKER, kind_of
from recpo.artifacts.documents import writing_errors
from recpo.artifacts.outputs import locked_parent, output_file, write_json
from recpo.base.errors import RecpoError, validate_range
from recpo.lists.interleaving import Interleaving
from recpo.server import write_ahead

JOURNAL: Final = "_journal"  # `recpo prepare` ignores names that start with an underscore
IMPRESSION, OUTCOME, HEADER = b"i", b"o", b"h"
ID_PATTERN: Final = "^[0-9a-f]{44}$"
_ROUNDING: Final = 1e-6  # above the errors of the propensities of exploration, 1e-9 each

_OF_VARIANTS: Final = ("experiment", "interleaving")  # fields of a header that a server without variants leaves out
_PLAIN: Final = 7  # fields of an impression of such a server

IdType = Literal["integer", "string"]
_ID_TYPES: Final[Mapping[str, pa.DataType]] = {"integer": pa.int64(), "string": pa.string()}
_CONTEXT_TYPES: Final[Mapping[str, pa.DataType]] = {
    "integer": pa.int64(),
    "string": pa.string(),
    "number": pa.float64(),
    "integers": pa.list_(pa.int64()),
    "strings": pa.list_(pa.string()),
    "vector": pa.list_(pa.float32()),
}


@dataclass(frozen=True)
class LogLayout:
    """Types and columns of the log's files.

    Attributes:
        user_id: type of the user ids.
        item_id: type of the item ids.
        graded: outcomes are labels, not watch times, because the bundle's feedback levels come from labels.
        behaviors: further outcomes, one flag each.
        context: name and kind (``recpo.server.bundles.feature_kinds``) of the features of requests.
        experiment: name of the experiment if the server has variants; the log then has the columns ``experiment`` and
            ``variant``.
        interleaving: how lists of two variants are interleaved; the log then has the columns ``team`` and ``credit``.
    """

    user_id: IdType
    item_id: IdType
    graded: bool = False
    behaviors: tuple[str, ...] = ()
    context: tuple[tuple[str, str], ...] = ()
    experiment: str | None = None
    interleaving: Interleaving | None = None

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
                pa.field("propensity", pa.float64(), nullable=self.interleaving == "probabilistic"),
                pa.field("is_random", pa.bool_(), nullable=False),
                pa.field("request_id", pa.string(), nullable=False),
                *(pa.field(name, _CONTEXT_TYPES[kind]) for name, kind in self.context),
                *(pa.field(name, pa.string()) for name in ("experiment", "variant") if self.experiment is not None),
                *((pa.field("team", pa.string()), pa.field("credit", pa.float64())) if self.interleaving else ()),
            ]
        )

    def header(self) -> bytes:
        """The first record of every segment."""
        return HEADER + json.dumps({name: value for name, value in asdict(self).items() if value is not None}).encode()

    @classmethod
    def from_header(cls, payload: bytes) -> Self:
        """Parses the result of ``header``.

        Raises:
            RecpoError: the header has other fields, so another version of recpo wrote it.
        """
        found, names = json.loads(payload[1:]), [one.name for one in fields(cls)]
        if {*_OF_VARIANTS, *found} != set(names):
            message = (
                f"{JOURNAL}: the header of a segment has the fields {', '.join(found)}, expected {', '.join(names)}: "
                "start the recpo version that wrote it again, which completes its log"
            )
            raise RecpoError(message, code="old_format", field=JOURNAL)
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
        variant: the variant that served; None = no variants, or an interleaved list.
        team: the variant that contributed each item of an interleaved list.
        credit: what a success of each item says for the second variant, -1 to 1 (``recpo.lists.interleaving``).
    """

    nonce: str
    time_ms: int
    user_id: Any
    items: Sequence[Any]
    propensity: Sequence[float | None]
    is_random: Sequence[bool]
    context: Mapping[str, Any] | None = None
    variant: str | None = None
    team: Sequence[str] | None = None
    credit: Sequence[float] | None = None

    def payload(self) -> bytes:
        """Serializes it as a record, without the last three fields if there are no variants."""
        plain = self.variant is None and self.team is None
        return IMPRESSION + json.dumps(self[:_PLAIN] if plain else self).encode()

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Parses the result of ``payload``."""
        return cls(*json.loads(payload[1:]))


class Outcome(NamedTuple):
    """The outcome of one item of a slate.

    Attributes:
        address: the address of the impression.
        time_ms: time of the report. Of several reports, the later one wins, value by value.
        item_id: the item.
        values: the known values among ``LogLayout.outcomes``.
    """

    address: write_ahead.Address
    time_ms: int
    item_id: Any
    values: Mapping[str, float | bool]

    def payload(self) -> bytes:
        """Serializes it as a record."""
        return OUTCOME + json.dumps([*self.address, self.time_ms, self.item_id, dict(self.values)]).encode()

    @classmethod
    def from_payload(cls, payload: bytes) -> Self:
        """Parses the result of ``payload``."""
        slot, segment, offset, time_ms, item_id, values = json.loads(payload[1:])
        return cls(write_ahead.Address(slot, segment, offset), time_ms, item_id, values)


def validate_log_directory(root: Path, bundles: Iterable[Path]) -> None:
    """Raises if a log must not be written to ``root``. Writes nothing.

    Args:
        root: the log's directory.
        bundles: the bundles that serve, or the directories of their versions.

    Raises:
        RecpoError: it is or lies in a bundle or in one of ``bundles``, or contains files and is not a log.
    """
    place, served = Path(os.path.realpath(root)), {Path(os.path.realpath(bundle)) for bundle in bundles}
    for parent in (place, *place.parents):
        if parent in served or kind_of(parent) == "bundle":
            message = (
                f"log: {root} {'is' if parent == place else 'lies in'} a bundle or a directory of versions ({parent}), "
                "which the files of a log would damage: choose a directory outside"
            )
            raise RecpoError(message, code="conflicting_options", field="log")
    if place.exists():
        with writing_errors(place), locked_parent(place / JOURNAL):
            _validate_files(place, root)


def _validate_files(place: Path, root: Path) -> None:
    if kind_of(place / JOURNAL) != "impressions" and any(path.is_file() for path in place.rglob("*")):
        message = (
            f"log: {root} contains files and is not a log of `recpo serve` ({JOURNAL}/{MARKER} is missing): choose a "
            "new directory, an empty one, or such a log"
        )
        raise RecpoError(message, code="wrong_file", field="log")


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
        with writing_errors(root):
            self._journal.mkdir(parents=True, exist_ok=True)
            with locked_parent(self._journal):
                _validate_files(root, root)
                if kind_of(self._journal) is None:
                    write_json(self._journal / MARKER, {"kind": "impressions"})
        self._slot = write_ahead.Slot.claim(self._journal)
        self._slot.complete_segments()
        self._writer = write_ahead.SegmentWriter(
            self._slot, layout.header(), max_bytes=max_bytes, max_age_s=max_age_s, sync=sync
        )

    @property
    def writable(self) -> bool:
        """False after a failure, until a record has been written again."""
        return not self._writer.failed

    def add(
        self,
        user_id: object,
        items: Sequence[Any],
        propensity: Sequence[float | None],
        is_random: Sequence[bool],
        context: Mapping[str, Any] | None = None,
        **of_variants: Any,
    ) -> tuple[str, Future[None]]:
        """Appends an impression and returns its request id, which is valid once the future is done.

        Args:
            user_id: as in ``Impression``, like the other arguments.
            items: external ids, best first.
            propensity: probability of each item at a uniformly drawn place.
            is_random: the item was drawn uniformly.
            context: the known features of the request.
            of_variants: ``variant``, ``team`` and ``credit``.

        Raises:
            RecpoError: the log is closed.
        """
        now, nonce = int(time.time() * 1000), secrets.token_hex(4)
        impression = Impression(nonce, now, user_id, items, propensity, is_random, context, **of_variants)
        address, written = self._writer.append(impression.payload())
        return request_id(address, nonce), written

    def find(self, identifier: str) -> tuple[write_ahead.Address, Impression] | None:
        """The impression of a request id; None if there is none that still accepts outcomes."""
        places = identifier[:4], identifier[4:20], identifier[20:36]
        address = write_ahead.Address(*(int(part, 16) for part in places))
        payload = write_ahead.read_record(self._journal, address)
        if payload is None or payload[:1] != IMPRESSION:
            return None
        impression = Impression.from_payload(payload)
        late = time.time() * 1000 > impression.time_ms + self.outcome_window_s * 1000
        return None if impression.nonce != identifier[36:] or late else (address, impression)

    def add_outcomes(
        self, address: write_ahead.Address, outcomes: Mapping[Any, Mapping[str, float | bool]]
    ) -> Future[None]:
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

    def still_open(self, address: write_ahead.Address) -> bool:
        """Whether the impression at ``address`` still accepts outcomes."""
        return write_ahead.read_record(self._journal, address) is not None

    def close(self) -> None:
        """Writes waiting records and releases the slot."""
        self._writer.close()
        self._slot.release()


def request_id(address: write_ahead.Address, nonce: str) -> str:
    """The id in the answer, in the outcomes that a client reports, and in the rows of the log."""
    return f"{address.slot:04x}{address.segment:016x}{address.offset:016x}{nonce}"


def joined_rows(
    address: write_ahead.Address, impression: Impression, outcomes: Sequence[Outcome], layout: LogLayout
) -> list[dict[str, Any]]:
    """The rows of a slate, one per item, with null values if the outcome is not known."""
    identifier = request_id(address, impression.nonce)
    known: dict[Any, dict[str, float | bool]] = {}
    unknown: list[None] = [None] * len(impression.items)
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
            **({} if layout.experiment is None else {"experiment": layout.experiment, "variant": impression.variant}),
            **({"team": team, "credit": credit} if layout.interleaving else {}),
        }
        for item, propensity, is_random, team, credit in zip(
            impression.items,
            impression.propensity,
            impression.is_random,
            impression.team or unknown,
            impression.credit or unknown,
            strict=True,
        )
    ]


def validate_propensities(items: Sequence[Any], propensity: Sequence[float | None]) -> None:
    """Raises if rows of a slate could not be weighted by their propensities.

    Args:
        items: external ids.
        propensity: probability of each item at a uniformly drawn place of the slate; None = not known.

    Raises:
        RecpoError: a propensity is not a probability above 0, their sum is above 1, or an item is listed twice.
    """
    known = [value for value in propensity if value is not None]
    if wrong := [value for value in known if not 0.0 < value <= 1.0]:  # nan is wrong as well
        message = f"propensity {wrong[0]} of a shown item, expected a probability in (0, 1]"
        raise RecpoError(message, code="bad_value", field="propensity")
    total = math.fsum(known)
    validate_range(total <= 1.0 + _ROUNDING, "propensity", "of a slate must sum to at most 1", total)
    if len(items) != len(propensity) or len(set(items)) < len(items):
        message = (
            f"{len(items)} items of a slate, {len(set(items))} of them distinct, with {len(propensity)} "
            "propensities, expected one each"
        )
        raise RecpoError(message, code="duplicate", field="items")


_LOG = logging.getLogger("recpo.server")


class Settled(NamedTuple):
    """What a pass wrote.

    Attributes:
        files: Parquet files.
        rows: items in them.
        lost_bytes: bytes that are not a complete record: unacknowledged data of a killed process, or damage.
    """

    files: int = 0
    rows: int = 0
    lost_bytes: int = 0


#: A segment: its slot and its number.
_Segment = tuple[int, int]


def settle(root: Path | str, outcome_window_s: float = 0.0) -> Settled:
    """Publishes the segments of a log that are due, including segments of dead processes.

    One process publishes at a time; a second call meanwhile does nothing. Segments that a running server still writes
    are not touched.

    Args:
        root: the log's directory.
        outcome_window_s: how long outcomes may still arrive; 0 = publish everything that is complete.

    Raises:
        RecpoError: a file cannot be written.
    """
    root, journal = Path(root), Path(root) / JOURNAL
    if not journal.is_dir():
        return Settled()
    alone = write_ahead.locked_handle(journal / "settling.lock", os.O_CREAT | os.O_RDWR)
    if alone is None:
        return Settled()
    try:
        _complete_orphans(journal)
        for segment in list(_segments(journal, write_ahead.COMPLETE)):
            written = write_ahead.segment_path(journal, *segment, write_ahead.COMPLETE)
            if time.time() >= written.stat().st_mtime + outcome_window_s:
                written.rename(written.with_suffix(write_ahead.CLOSING))
        closing = list(_segments(journal, write_ahead.CLOSING))
        if not closing:
            return Settled()
        outcomes, targets = _outcomes(journal, set(closing))
        published = [_publish(root, segment, outcomes) for segment in closing]
        _remove_done(journal, targets)
        return Settled(*map(sum, zip(*published, strict=True)))
    finally:
        os.close(alone)


def _publish(root: Path, segment: _Segment, outcomes: Mapping[write_ahead.Address, Sequence[Outcome]]) -> Settled:
    place = write_ahead.segment_path(root / JOURNAL, *segment, write_ahead.CLOSING)
    layout, rows, whole = None, [], len(write_ahead.MAGIC)
    for offset, payload in write_ahead.read_records(place):
        whole += 8 + len(payload)
        if payload[:1] == HEADER:
            layout = LogLayout.from_header(payload)
        elif layout is not None and payload[:1] == IMPRESSION:
            impression = Impression.from_payload(payload)
            address = write_ahead.Address(*segment, offset)
            rows += joined_rows(address, impression, outcomes.get(address, ()), layout)
    lost = max(0, place.stat().st_size - whole)
    if lost:
        _LOG.warning("%s: %d bytes of an incomplete record are skipped", place, lost)
    if lost and layout is None:
        place.rename(place.with_suffix(write_ahead.DAMAGED))
        return Settled(lost_bytes=lost)
    if layout is not None and rows:
        slot, number = segment
        begun = datetime.fromtimestamp(number / 1000, UTC)
        name = f"{begun:%Y%m%dT%H%M%S}.{number % 1000:03d}Z-{slot:03d}.parquet"
        with output_file(root / name) as working:
            pq.write_table(pa.Table.from_pylist(rows, layout.schema), working)
    place.rename(place.with_suffix(write_ahead.DONE))
    return Settled(int(bool(rows)), len(rows), lost)


def _outcomes(
    journal: Path, closing: set[_Segment]
) -> tuple[dict[write_ahead.Address, list[Outcome]], dict[_Segment, set[_Segment]]]:
    """The outcomes of closing segments by impression, and for every segment the segments of its outcomes."""
    found: dict[write_ahead.Address, list[Outcome]] = defaultdict(list)
    targets: dict[_Segment, set[_Segment]] = defaultdict(set)
    for suffix in write_ahead.STATES:
        for segment in _segments(journal, suffix):
            for payload in _records_of(journal, segment):
                if payload[:1] != OUTCOME:
                    continue
                outcome = Outcome.from_payload(payload)
                target = outcome.address[:2]
                targets[segment].add(target)
                if target in closing and outcome not in found[outcome.address]:
                    found[outcome.address].append(outcome)
    return found, targets


def _records_of(journal: Path, segment: _Segment) -> Iterator[bytes]:
    """The records of a segment in any of its states; a writer may complete it meanwhile."""
    for suffix in write_ahead.STATES:
        with suppress(FileNotFoundError):
            yield from (
                payload for _, payload in write_ahead.read_records(write_ahead.segment_path(journal, *segment, suffix))
            )
            return


def _remove_done(journal: Path, targets: Mapping[_Segment, set[_Segment]]) -> None:
    """Removes published segments whose outcomes are all published as well."""
    waiting = {
        segment
        for suffix in (write_ahead.OPEN, write_ahead.COMPLETE, write_ahead.CLOSING)
        for segment in _segments(journal, suffix)
    }
    for segment in list(_segments(journal, write_ahead.DONE)):
        if not targets.get(segment, set()) & waiting:
            write_ahead.segment_path(journal, *segment, write_ahead.DONE).unlink(missing_ok=True)


def _complete_orphans(journal: Path) -> None:
    """Completes the open segments of slots whose process has died."""
    for path in sorted(journal.glob("slot-*")):
        if any(path.glob(f"*{write_ahead.OPEN}")) and (number := _number(path.name)) is not None:
            slot = write_ahead.Slot.try_claim(journal, number)
            if slot is not None:
                slot.complete_segments()
                slot.release()


def _segments(journal: Path, suffix: str) -> Iterator[_Segment]:
    for path in sorted(journal.glob(f"slot-*/*{suffix}")):
        slot = _number(path.parent.name)
        with suppress(ValueError):
            if slot is not None:
                yield slot, int(path.stem, 16)


def _number(name: str) -> int | None:
    text = name.removeprefix("slot-")
    return int(text) if text.isdecimal() and int(text) < write_ahead.MAX_SLOTS else None
