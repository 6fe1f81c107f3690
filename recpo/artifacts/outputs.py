"""Outputs: a file or directory appears complete or not at all, and never replaces foreign files."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from recpo.artifacts.checksums import seal, sha256
from recpo.artifacts.disk import flush, flush_tree
from recpo.artifacts.kinds import MARKER, Kind, kind_of, marker
from recpo.artifacts.leavings import REPLACED, UNFINISHED, remove_leavings, remove_tree, settle_leavings, unused
from recpo.artifacts.locks import lock, locked_parent, try_lock, unlock
from recpo.artifacts.os_errors import WRITING, describe_os_error, os_errors
from recpo.base.errors import RecpoError

_EXCHANGE: Final = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD: Final = -100


@contextmanager
def output_directory(
    target: Path | str,
    *,
    kind: Kind,
    overwrite: bool = False,
    inputs: Iterable[object] = (),
    sealed: Iterable[str] = (),
) -> Iterator[Path]:
    """Yields an empty directory that becomes ``target`` when the block ends without an error.

    An existing directory is replaced in one step (Linux). If the file system cannot exchange names, the old directory
    has another name for an instant; if the process dies in that instant, the next call finds it there. The next call
    for the same target removes the leftovers of a killed process. An empty directory counts as absent.

    Args:
        target: the directory to make; a symbolic link is followed.
        kind: what the directory will be.
        overwrite: replace a ``target`` of the same kind; the old one is only removed after the new one is complete.
        inputs: files and directories that are read meanwhile; entries that are not paths (an object store) are ignored.
        sealed: names of files whose checksums go into ``recpo.json``, for ``verify_sealed``.

    Raises:
        RecpoError: before anything is touched, ``target`` exists and ``overwrite`` is False; is a file, or a directory
            that recpo did not write as this kind; is, holds or lies in one of ``inputs``; or another process writes it.
            Later, it cannot be written (a full disk, permissions).
    """
    place = validate_output_directory(target, kind=kind, overwrite=overwrite, inputs=inputs)
    with os_errors(place, WRITING), parents(place), _claimed(place, target, kind, overwrite) as working:
        yield working
        if names := [name for name in sealed if (working / name).is_file()]:
            content = seal({"kind": kind, "files": {name: sha256(working / name) for name in names}})
            with output_file(working / MARKER) as whole:  # half a marker would make it a foreign directory
                whole.write_text(json.dumps(content) + "\n", encoding="utf-8")
        flush_tree(working)
        _publish(working, place, target, kind, overwrite)


def validate_output_directory(
    target: Path | str, *, kind: Kind, overwrite: bool = False, inputs: Iterable[object] = ()
) -> Path:
    """Raises if ``output_directory`` would refuse these arguments; for long computations that may write nothing.

    Returns:
        The real path of ``target``.
    """
    place = Path(os.path.realpath(target))
    _check_directory(place, target, kind, overwrite)
    _check_inputs(place, target, inputs)
    return place


@contextmanager
def output_file(target: Path | str, *, overwrite: bool = True, inputs: Iterable[object] = ()) -> Iterator[Path]:
    """Yields a path beside ``target`` that replaces ``target`` when the block ends without an error.

    Args:
        target: the file to write; a symbolic link is followed.
        overwrite: replace an existing file.
        inputs: files and directories that are read meanwhile; entries that are not paths (an object store) are ignored.

    Raises:
        RecpoError: before anything is touched, ``target`` is a directory or a device, is or lies in one of ``inputs``,
            or exists and ``overwrite`` is False. Later, it cannot be written.
    """
    place = Path(os.path.realpath(target))
    if place.is_dir():
        raise RecpoError(f"{target} is a directory, expected a file: name a file in it")
    if place.exists() and not place.is_file():
        raise RecpoError(f"{target} is a device or a pipe, not a file: choose another output")
    if place.exists() and not overwrite:
        raise RecpoError(f"{target} exists already: choose another output, or remove it")
    _check_inputs(place, target, inputs)
    with os_errors(place, WRITING), parents(place):
        working = unused(place, UNFINISHED)
        lock = os.open(working, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        try:
            try_lock(lock)
            remove_leavings(place, working)
            yield working
            flush(working)
            os.replace(working, place)
            flush(place.parent)
        finally:
            working.unlink(missing_ok=True)
            unlock(lock)


def _check_directory(place: Path, target: Path | str, kind: Kind, overwrite: bool) -> None:
    """Raises if ``place`` may not be created or replaced."""
    try:
        if not os.path.lexists(place):
            return
        if not place.is_dir():
            raise RecpoError(f"{target} is a file or a device, expected a directory: choose another output")
        if not any(place.iterdir()):
            return
    except OSError as error:
        raise RecpoError(describe_os_error(error, target)) from error
    found = kind_of(place)
    if found != kind and overwrite:
        content = "files that recpo did not write" if found is None else f"a {found} directory"
        raise RecpoError(
            f"{target} contains {content}, and only a {kind} directory would be replaced: choose another output, or "
            "remove it yourself"
        )
    if not overwrite:
        remedy = ", or pass --overwrite true (Python: overwrite=True)" if found == kind else ""
        raise RecpoError(f"{target} exists already: choose another output, remove it{remedy}")


def _check_inputs(place: Path, target: Path | str, inputs: Iterable[object]) -> None:
    for given in inputs:
        if not isinstance(given, (str, Path)):
            continue
        source = Path(os.path.realpath(given))
        if place == source:
            raise RecpoError(f"{target} is an input and would be overwritten: choose another output")
        if place in source.parents:
            raise RecpoError(f"{target} contains {given}, which is an input: choose another output")
        if source in place.parents:
            raise RecpoError(f"{target} is inside {given}, which is an input: choose an output outside that directory")


@contextmanager
def parents(place: Path) -> Iterator[None]:
    """Creates the directories above ``place``, and removes them again if the block fails."""
    missing = [parent for parent in place.parents if not parent.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _claimed(place: Path, target: Path | str, kind: Kind, overwrite: bool) -> Iterator[Path]:
    """Yields a new working directory, whose lock keeps out other writers of ``place``."""
    working = unused(place, UNFINISHED)
    with ExitStack() as locks:
        try:
            with locked_parent(place):
                settle_leavings(place)
                _check_directory(place, target, kind, overwrite)
                working.mkdir()
                lock(working, place, locks)
                (working / MARKER).write_text(marker(kind), encoding="utf-8")
            yield working
        finally:
            remove_tree(working)


def _publish(working: Path, place: Path, target: Path | str, kind: Kind, overwrite: bool) -> None:
    """Renames ``working`` to ``place`` and then removes what was there."""
    try:
        _check_directory(place, target, kind, overwrite)
        if not place.exists() or not any(place.iterdir()):
            os.rename(working, place)  # also replaces an empty directory, which cannot be filled in between
            flush(place.parent)
            return
    except (RecpoError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        kept = unused(place, ".recpo-kept-")
        os.rename(working, kept)
        raise RecpoError(
            f"another process made {target} in the meantime; the complete new output is in {kept}"
        ) from error
    if _exchange(working, place):
        flush(place.parent)
        return  # ``working`` is now the old one, which ``_claimed`` removes
    old = unused(place, REPLACED)
    os.rename(place, old)
    try:
        os.rename(working, place)
    except OSError:
        os.rename(old, place)
        raise
    flush(place.parent)
    remove_tree(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step; False if the operating system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_EXCHANGE)) == 0)
