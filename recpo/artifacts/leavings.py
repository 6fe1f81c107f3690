"""Temporary names of outputs, and the leftovers of killed processes under these names."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from recpo.artifacts.kinds import MARKER, kind_of
from recpo.artifacts.locks import taken, try_lock, unlock

UNFINISHED: Final = ".recpo-unfinished-"
REPLACED: Final = ".recpo-replaced-"
ASIDE: Final = ".recpo-aside-"  # a replaced directory, until the new one in its place is worth keeping
_LEAVINGS: Final = (REPLACED, ASIDE, UNFINISHED)
#: suffix of temporary files beside their target whose writer chooses file names itself, such as Lightning
PARTIAL: Final = ".partial"


def unused(place: Path, suffix: str) -> Path:
    """An unused name next to ``place``."""
    return place.with_name(f"{place.name}{suffix}{os.getpid()}-{secrets.token_hex(4)}")


def settle_leavings(place: Path) -> None:
    """Restores what a killed process had set aside, removes its leftovers, and rejects a second writer."""
    for entry in [*_siblings(place), place]:
        if entry.is_symlink() or (kind_of(entry) is None and not (entry != place and _is_barely_begun(entry))):
            continue
        handle = os.open(entry, os.O_RDONLY)
        try:
            if not try_lock(handle):
                raise taken(place)
            if entry == place:
                continue
            if REPLACED in entry.name and not place.exists():
                entry.rename(place)
            elif ASIDE in entry.name:
                discard(place, place, entry) if place.exists() else entry.rename(place)
            else:
                remove_tree(entry)
        finally:
            unlock(handle)


def _is_barely_begun(entry: Path) -> bool:
    """Whether a process was killed before it had written the directory's ``recpo.json``."""
    return entry.is_dir() and all(path.name == MARKER for path in entry.iterdir())


def _siblings(place: Path) -> list[Path]:
    """The files and directories beside ``place`` with temporary names, those that were set aside first."""
    found = [entry for entry in place.parent.iterdir() if entry.name.startswith(place.name + ".recpo-")]
    parts = [[entry for entry in found if entry.name.startswith(place.name + part)] for part in _LEAVINGS]
    return [entry for part in parts for entry in part]


def remove_leavings(place: Path, own: Path) -> None:
    """Removes unfinished files of dead processes beside the file ``place``."""
    for entry in _siblings(place):
        if entry == own or entry.is_symlink() or not entry.is_file():
            continue
        with suppress(OSError):
            handle = os.open(entry, os.O_RDONLY)
            try:
                if try_lock(handle):
                    entry.unlink()
            finally:
                unlock(handle)


def remove_unfinished(directory: Path) -> None:
    """Removes unfinished files of a killed process in a locked directory."""
    for entry in list(directory.rglob("*")):
        if UNFINISHED in entry.name or entry.name.endswith(PARTIAL):
            with suppress(OSError):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def remove_tree(directory: Path) -> None:
    """Removes a directory that recpo wrote, ``recpo.json`` last, so that a call after a kill still knows its kind."""
    with suppress(OSError):
        for entry in directory.iterdir():
            if entry.name == MARKER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def discard(directory: Path, place: Path, successor: Path | None = None) -> None:
    """Replaces a directory by ``successor``. If the process is killed, no part of the old directory remains."""
    unfinished = unused(place, UNFINISHED)
    os.rename(directory, unfinished)
    if successor is not None:
        os.rename(successor, directory)
    remove_tree(unfinished)
