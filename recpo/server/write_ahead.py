"""Write-ahead files: records with length and checksum, on disk before they are acknowledged.

A writer owns a slot, which is a directory that it keeps locked, so no two processes write the same file. A slot
contains segments::

    slot-000/01789abcdef0.open     being written
    slot-000/01789abcdef0.wal      complete: no further records
    slot-000/01789abcdef0.closing  being published (recpo.server.impressions): no further outcomes are accepted for it
    slot-000/01789abcdef0.done     published; kept while outcomes in it belong to unpublished segments
    slot-000/01789abcdef0.damaged  its start cannot be read, so nothing of it is published; kept for inspection

The number of a segment is its start time in milliseconds. A file starts with ``MAGIC``. A record is its length, its
CRC-32 (4 bytes each, little-endian) and its bytes. A process that dies leaves at most one truncated record at the end
of its ``.open`` file; that record was never acknowledged and is dropped.
"""

import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from recpo.artifacts.documents import describe_os_error, flush
from recpo.base.errors import RecpoError, validate_range

OPEN, COMPLETE, CLOSING, DONE, DAMAGED = ".open", ".wal", ".closing", ".done", ".damaged"
STATES: Final = (OPEN, COMPLETE, CLOSING, DONE)
MAGIC: Final = b"recpo-segment-1\n"
MAX_SLOTS: Final = 512
_FRAME: Final = struct.Struct("<II")
_LARGEST_RECORD: Final = 1 << 22  # limits the bytes that are read for a wrong address
_TICK_S: Final = 0.5  # how often an idle writer checks the age of its segment


class Address(NamedTuple):
    """The address of a record.

    Attributes:
        slot: number of the writer's directory.
        segment: number of the segment.
        offset: bytes from the start of the file.
    """

    slot: int
    segment: int
    offset: int


class Slot(NamedTuple):
    """A writer's directory, locked until ``release``.

    Attributes:
        number: number of the slot.
        path: its directory.
        lock: an open, locked handle of it.
    """

    number: int
    path: Path
    lock: int

    @classmethod
    def claim(cls, journal: Path) -> Self:
        """The first slot that no living process holds.

        Raises:
            RecpoError: all slots are taken, or the directory cannot be written.
        """
        for number in range(MAX_SLOTS):
            slot = cls.try_claim(journal, number)
            if slot is not None:
                return slot
        message = f"{journal}: {MAX_SLOTS} processes write here already: give this server a log of its own"
        raise RecpoError(message, code="resources", field="log")

    @classmethod
    def try_claim(cls, journal: Path, number: int) -> Self | None:
        """The slot; None if a living process holds it."""
        path = journal / f"slot-{number:03d}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            handle = locked_handle(path, os.O_RDONLY)
        except OSError as error:
            raise RecpoError(describe_os_error(error, path), code="failed", field=str(path)) from error
        return None if handle is None else cls(number, path, handle)

    def complete_segments(self) -> None:
        """Completes the segments that a dead process left open."""
        for left in self.path.glob(f"*{OPEN}"):
            left.rename(left.with_suffix(COMPLETE))

    def release(self) -> None:
        """Releases the slot."""
        os.close(self.lock)


class SegmentWriter:
    """Appends records to the segments of a slot. One thread writes and syncs all records that are waiting.

    Args:
        slot: the slot; its first record starts a segment.
        header: first record of every segment.
        max_bytes: a segment ends with the record that reaches this size.
        max_age_s: a segment also ends at this age.
        sync: wait for the disk and not only for the operating system. Without it, a record survives the end of the
            process but not of the machine.
    """

    def __init__(self, slot: Slot, header: bytes, *, max_bytes: int, max_age_s: float, sync: bool = True) -> None:
        self.slot = slot
        self._begin = MAGIC + _framed(header)
        self._max_bytes, self._max_age_s, self._sync = max_bytes, max_age_s, sync
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, bytes, Future[None]]] = []
        earlier = [int(file.stem, 16) for file in slot.path.iterdir() if file.suffix in STATES]
        self._segment, self._offset, self._begun_at = max(earlier, default=0), 0, 0.0
        self._file: int | None = None
        self._file_segment, self._file_size = 0, 0
        self._closed = False
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="recpo-segments", daemon=True)
        self._thread.start()

    def append(self, payload: bytes) -> tuple[Address, Future[None]]:
        """Appends a record. The future is done when the record is on disk, and fails if it cannot be written.

        Raises:
            RecpoError: the writer is closed, or the record is too large.
        """
        rule = f"must be fewer: their record may have at most {_LARGEST_RECORD} bytes"
        validate_range(len(payload) <= _LARGEST_RECORD, "items", rule, len(payload))
        record, written = _framed(payload), Future[None]()
        with self._changed:
            if self._closed:
                message = f"{self.slot.path}: the log is closed: send the request to a living server"
                raise RecpoError(message, code="unsupported", field="log")
            if self._offset >= self._max_bytes or self._offset == 0 or self._is_old():
                self._segment = max(self._segment + 1, int(time.time() * 1000))
                self._offset, self._begun_at = len(self._begin), time.monotonic()
            address = Address(self.slot.number, self._segment, self._offset)
            self._offset += len(record)
            self._waiting.append((self._segment, record, written))
            self._changed.notify()
        return address, written

    def close(self) -> None:
        """Writes waiting records and completes the segment. The slot stays locked."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _is_old(self) -> bool:
        return time.monotonic() - self._begun_at >= self._max_age_s

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._closed:
                    self._changed.wait(_TICK_S)
                group, self._waiting = self._waiting, []
                if not group and self._offset and self._is_old():
                    self._offset = 0  # the next record starts a new one
                ended, closed = not self._offset, self._closed
            self._write(group)
            if not group and (ended or closed):
                self._end_file()
            if closed and not group:
                return

    def _write(self, group: list[tuple[int, bytes, Future[None]]]) -> None:
        done = 0
        for segment, records in groupby(group, itemgetter(0)):
            part = list(records)
            try:
                self._write_to(segment, b"".join(record for _, record, _ in part))
            except OSError as error:
                self._fail(group[done:], error)
                return
            self.failed = False
            for _, _, written in part:
                written.set_result(None)
            done += len(part)

    def _write_to(self, segment: int, content: bytes) -> None:
        if self._file is None or self._file_segment != segment:
            self._end_file()
            place = self.slot.path / f"{segment:012x}{OPEN}"
            self._file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self._file_segment, self._file_size = segment, 0
            content = self._begin + content
            if self._sync:
                flush(self.slot.path)
        view = memoryview(content)
        while view:
            view = view[os.write(self._file, view) :]
        if self._sync:
            os.fdatasync(self._file)
        self._file_size += len(content)

    def _fail(self, group: list[tuple[int, bytes, Future[None]]], error: OSError) -> None:
        """After a failure, the addresses of later records in this segment would be wrong, so waiting records fail."""
        if self._file is not None:
            with suppress(OSError):  # readers stop at the truncated record
                os.ftruncate(self._file, self._file_size)
        self._end_file()
        with self._changed:
            group, self._waiting, self._offset = group + self._waiting, [], 0
            self.failed = True
        fault = RecpoError(describe_os_error(error, self.slot.path), code="failed", field="log")
        for _, _, written in group:
            written.set_exception(fault)

    def _end_file(self) -> None:
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        place = self.slot.path / f"{self._file_segment:012x}{OPEN}"
        try:
            place.rename(place.with_suffix(COMPLETE))
        except OSError:
            self.failed = True  # it stays open, and is completed when the slot is claimed again


def locked_handle(path: Path, flags: int) -> int | None:
    """An open file or directory whose lock ends with the handle or the process; None if another process holds it."""
    handle = os.open(path, flags, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def segment_path(journal: Path, slot: int, segment: int, suffix: str) -> Path:
    """The file of a segment in one of its states."""
    return journal / f"slot-{slot:03d}" / f"{segment:012x}{suffix}"


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of the records of a segment, starting with its header.

    Bytes that are not a complete record are skipped: the truncated end of a dead process, and disk damage, which may be
    followed by acknowledged records.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        offset: int | None = len(MAGIC)
        while offset is not None:
            while (payload := _next_record(file)) is not None:
                yield offset, payload
                offset += _FRAME.size + len(payload)
            file.seek(offset)
            offset = _next_whole(file.read(), offset)
            if offset is not None:
                file.seek(offset)


def read_record(journal: Path, address: Address) -> bytes | None:
    """The record at an address; None if there is none, or if its segment accepts no more outcomes."""
    for suffix in (OPEN, COMPLETE, OPEN, COMPLETE):  # twice: the segment may be completed between two attempts
        try:
            with segment_path(journal, address.slot, address.segment, suffix).open("rb") as file:
                if address.offset >= os.fstat(file.fileno()).st_size:
                    return None
                file.seek(address.offset)
                return _next_record(file)
        except FileNotFoundError:
            continue
    return None


def _next_whole(content: bytes, begin: int) -> int | None:
    """Offset in the file of the first complete record in ``content``, whose first bytes are not one."""
    for place in range(1, len(content) - _FRAME.size):
        length = int.from_bytes(content[place : place + 4], "little")
        if not 0 < length <= min(_LARGEST_RECORD, len(content) - place - _FRAME.size):
            continue
        checksum = int.from_bytes(content[place + 4 : place + 8], "little")
        if zlib.crc32(content[place + 8 : place + 8 + length]) == checksum:
            return begin + place
    return None


def _framed(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _next_record(file: BinaryIO) -> bytes | None:
    frame = file.read(_FRAME.size)
    if len(frame) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(frame)
    if not 0 < length <= _LARGEST_RECORD:
        return None
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == checksum else None
