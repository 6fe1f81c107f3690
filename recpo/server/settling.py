"""Publishes write-ahead files as Parquet files of the log: impressions joined with their outcomes, each row once.

A segment is due when its last record is older than the outcome window. It is first renamed to closing, so that no
worker accepts outcomes for it. Then the outcomes in all segments are read, and the Parquet file appears under a name
that depends only on the segment. Only then is the segment done. If the process dies in between, the next pass repeats
this segment and writes the same file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts import output_file
from recpo.server.impressions import (
    HEADER,
    IMPRESSION,
    JOURNAL,
    OUTCOME,
    Impression,
    LogLayout,
    Outcome,
    joined_rows,
)
from recpo.server.segments import (
    CLOSING,
    COMPLETE,
    DAMAGED,
    DONE,
    MAGIC,
    MAX_SLOTS,
    OPEN,
    Address,
    Slot,
    read_records,
    segment_path,
)

_LOG = logging.getLogger("recpo.server")


@dataclass(frozen=True)
class Settled:
    """What a pass wrote.

    Attributes:
        files: Parquet files.
        impressions: slates in them.
        rows: items in them.
        outcomes: rows with an outcome.
        lost_bytes: bytes that are not a complete record: unacknowledged data of a killed process, or damage.
    """

    files: int = 0
    impressions: int = 0
    rows: int = 0
    outcomes: int = 0
    lost_bytes: int = 0

    def __add__(self, other: Settled) -> Settled:
        """The sum of two passes."""
        return Settled(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class _Segment(NamedTuple):
    slot: int
    number: int


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
    root = Path(root)
    if not (root / JOURNAL).is_dir():
        return Settled()
    with _only_one(root / JOURNAL) as alone:
        if not alone:
            return Settled()
        _complete_orphans(root / JOURNAL)
        due = [segment for segment in _segments(root / JOURNAL, COMPLETE) if _is_due(root, segment, outcome_window_s)]
        for segment in due:
            _rename(root, segment, COMPLETE, CLOSING)
        closing = list(_segments(root / JOURNAL, CLOSING))
        if not closing:
            return Settled()
        outcomes, targets = _outcomes(root / JOURNAL, set(closing))
        result = sum((_publish(root, segment, outcomes) for segment in closing), Settled())
        _remove_done(root / JOURNAL, targets)
        return result


def file_name(slot: int, segment: int) -> str:
    """Name of the Parquet file of a segment: its start time and its slot."""
    begun = datetime.fromtimestamp(segment / 1000, UTC)
    return f"{begun:%Y%m%dT%H%M%S}.{segment % 1000:03d}Z-{slot:03d}.parquet"


def _publish(root: Path, segment: _Segment, outcomes: Mapping[Address, Sequence[Outcome]]) -> Settled:
    place = segment_path(root / JOURNAL, *segment, CLOSING)
    layout, rows, impressions, whole = None, [], 0, len(MAGIC)
    for offset, payload in read_records(place):
        whole += 8 + len(payload)
        if payload[:1] == HEADER:
            layout = LogLayout.from_header(payload)
        elif layout is not None and payload[:1] == IMPRESSION:
            impressions += 1
            impression = Impression.from_payload(payload)
            address = Address(*segment, offset)
            rows += joined_rows(address, impression, outcomes.get(address, ()), layout)
    lost = max(0, place.stat().st_size - whole)
    if lost:
        _LOG.warning("%s: %d bytes of an incomplete record are skipped", place, lost)
    if lost and layout is None:
        _rename(root, segment, CLOSING, DAMAGED)
        return Settled(lost_bytes=lost)
    if layout is not None and rows:
        with output_file(root / file_name(*segment)) as working:
            pq.write_table(pa.Table.from_pylist(rows, layout.schema), working)
    _rename(root, segment, CLOSING, DONE)
    joined = sum(any(row[name] is not None for name in layout.outcomes) for row in rows) if layout is not None else 0
    return Settled(int(bool(rows)), impressions, len(rows), joined, lost)


def _outcomes(
    journal: Path, closing: set[_Segment]
) -> tuple[dict[Address, list[Outcome]], dict[_Segment, set[_Segment]]]:
    """The outcomes of closing segments by impression, and for every segment the segments of its outcomes."""
    found: dict[Address, list[Outcome]] = defaultdict(list)
    targets: dict[_Segment, set[_Segment]] = defaultdict(set)
    for suffix in (OPEN, COMPLETE, CLOSING, DONE):
        for segment in _segments(journal, suffix):
            for payload in _records_of(journal, segment):
                if payload[:1] != OUTCOME:
                    continue
                outcome = Outcome.from_payload(payload)
                target = _Segment(*outcome.address[:2])
                targets[segment].add(target)
                if target in closing and outcome not in found[outcome.address]:
                    found[outcome.address].append(outcome)
    return found, targets


def _records_of(journal: Path, segment: _Segment) -> Iterator[bytes]:
    """The records of a segment in any of its states; a writer may complete it meanwhile."""
    for suffix in (OPEN, COMPLETE, CLOSING, DONE):
        with suppress(FileNotFoundError):
            yield from (payload for _, payload in read_records(segment_path(journal, *segment, suffix)))
            return


def _remove_done(journal: Path, targets: Mapping[_Segment, set[_Segment]]) -> None:
    """Removes published segments whose outcomes are all published as well."""
    waiting = {segment for suffix in (OPEN, COMPLETE, CLOSING) for segment in _segments(journal, suffix)}
    for segment in list(_segments(journal, DONE)):
        if not targets.get(segment, set()) & waiting:
            segment_path(journal, *segment, DONE).unlink(missing_ok=True)


def _complete_orphans(journal: Path) -> None:
    """Completes the open segments of slots whose process has died."""
    for path in sorted(journal.glob("slot-*")):
        if any(path.glob(f"*{OPEN}")) and (number := _number(path.name)) is not None:
            slot = Slot.try_claim(journal, number)
            if slot is not None:
                slot.complete_segments()
                slot.release()


def _segments(journal: Path, suffix: str) -> Iterator[_Segment]:
    for path in sorted(journal.glob(f"slot-*/*{suffix}")):
        slot = _number(path.parent.name)
        with suppress(ValueError):
            if slot is not None:
                yield _Segment(slot, int(path.stem, 16))


def _number(name: str) -> int | None:
    text = name.removeprefix("slot-")
    return int(text) if text.isdecimal() and int(text) < MAX_SLOTS else None


def _is_due(root: Path, segment: _Segment, outcome_window_s: float) -> bool:
    written = segment_path(root / JOURNAL, *segment, COMPLETE).stat().st_mtime
    return time.time() >= written + outcome_window_s


def _rename(root: Path, segment: _Segment, before: str, after: str) -> None:
    place = segment_path(root / JOURNAL, *segment, before)
    place.rename(place.with_suffix(after))


@contextmanager
def _only_one(journal: Path) -> Iterator[bool]:
    """True for the single process that may publish now. The lock ends with the process."""
    handle = os.open(journal / "settling.lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
