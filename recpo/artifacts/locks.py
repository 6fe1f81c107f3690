"""Locks that allow one writer per output. They end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from recpo.base.errors import RecpoError


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Keeps other processes that ask for this lock out of a directory that is written in place, such as a run.

    Raises:
        RecpoError: another process holds it.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        if not try_lock(handle):
            raise taken(directory)
        yield
    finally:
        unlock(handle)


@contextmanager
def locked_parent(place: Path) -> Iterator[None]:
    """Serializes processes that claim ``place``, so that each sees the changes of the other."""
    parent = os.open(place.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(parent, fcntl.LOCK_EX)
        yield
    finally:
        unlock(parent)


def lock(path: Path, place: Path, locks: ExitStack) -> None:
    """Locks a directory or a file until ``locks`` ends; ``place`` is its name for messages."""
    handle = os.open(path, os.O_RDONLY)
    locks.callback(unlock, handle)
    if not try_lock(handle):
        raise taken(place)


def taken(place: Path) -> RecpoError:
    """The error of a second writer."""
    return RecpoError(f"{place}: another process is writing it; wait until it ends, or choose another output")


def try_lock(handle: int) -> bool:
    """Locks an open file; False if another process holds it. A file system without locks excludes no process."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def unlock(handle: int) -> None:
    """Releases the lock even if a forked child still holds the file open."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
