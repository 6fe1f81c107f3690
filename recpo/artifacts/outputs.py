"""Outputs: a file or directory appears complete or not at all, and never replaces foreign files.

Locks that allow one writer per output. They end with the process that holds them.

Directories that are filled in place, such as a run during training.
"""

import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from recpo.artifacts.checksums import MARKER, Kind, kind_of, marker
from recpo.artifacts.documents import describe_os_error, flush, flush_tree, path_of, writing_errors
from recpo.base.errors import RecpoError

UNFINISHED: Final = ".recpo-unfinished-"
REPLACED: Final = ".recpo-replaced-"
ASIDE: Final = ".recpo-aside-"  # a replaced directory, until the new one in its place is worth keeping
_LEAVINGS: Final = (REPLACED, ASIDE, UNFINISHED)
#: suffix of temporary files beside their target whose writer chooses file names itself, such as Lightning
PARTIAL: Final = ".partial"


def unused(place: Path, suffix: str) -> Path:
    """An unused name next to ``place``."""
    return place.with_name(f"{place.name}{suffix}{os.getpid()}-{secrets.token_hex(4)}")


def finish_or_remove_leftovers(place: Path) -> None:
    """Restores what a killed process had set aside, removes its leftovers, and rejects a second writer."""
    for entry in [*_siblings(place), place]:
        if entry.is_symlink() or (kind_of(entry) is None and not (entry != place and _is_barely_begun(entry))):
            continue
        with ExitStack() as locks:
            lock(entry, place, locks)
            if entry == place:
                continue
            if REPLACED in entry.name and not place.exists():
                entry.rename(place)
            elif ASIDE in entry.name:
                discard(place, place, entry) if place.exists() else entry.rename(place)
            else:
                remove_tree(entry)


def _is_barely_begun(entry: Path) -> bool:
    """Whether a process was killed before it had written the directory's ``recpo.json``."""
    return entry.is_dir() and all(path.name == MARKER for path in entry.iterdir())


def _siblings(place: Path) -> list[Path]:
    """The files and directories beside ``place`` with temporary names, those that were set aside first."""
    found = [entry for entry in place.parent.iterdir() if entry.name.startswith(place.name + ".recpo-")]
    parts = [[entry for entry in found if entry.name.startswith(place.name + part)] for part in _LEAVINGS]
    return [entry for part in parts for entry in part]


def remove_leftovers(place: Path, own: Path) -> None:
    """Removes unfinished files of dead processes beside the file ``place``."""
    for entry in _siblings(place):
        if entry == own or entry.is_symlink() or not entry.is_file():
            continue
        with suppress(OSError, RecpoError), ExitStack() as locks:
            lock(entry, place, locks)
            entry.unlink()


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
    """Locks a directory or a file until ``locks`` ends; raises if another writer of ``place`` holds it."""
    handle = os.open(path, os.O_RDONLY)
    locks.callback(unlock, handle)
    if not try_lock(handle):
        raise RecpoError(
            f"{place}: another process is writing it; wait until it ends, or choose another output", code="in_use"
        )


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


_EXCHANGE: Final = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD: Final = -100


@contextmanager
def output_directory(
    target: Path | str, *, kind: Kind, overwrite: bool = False, inputs: Iterable[object] = ()
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

    Raises:
        RecpoError: before anything is touched, ``target`` exists and ``overwrite`` is False; is a file, or a directory
            that recpo did not write as this kind; is, holds or lies in one of ``inputs``; or another process writes it.
            Later, it cannot be written (a full disk, permissions).
    """
    place = validate_output_directory(target, kind=kind, overwrite=overwrite, inputs=inputs)
    with writing_errors(place), parents(place), _claimed(place, target, kind, overwrite) as working:
        yield working
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


def validate_output_file(target: Path | str, *, overwrite: bool = True, inputs: Iterable[object] = ()) -> Path:
    """Raises if ``output_file`` would refuse these arguments; for long computations that come before it.

    Returns:
        The real path of ``target``.
    """
    place = Path(os.path.realpath(target))
    if place.is_dir():
        raise RecpoError(f"{target} is a directory, expected a file: name a file in it", code="wrong_file")
    if place.exists() and not place.is_file():
        raise RecpoError(f"{target} is a device or a pipe, not a file: choose another output", code="wrong_file")
    if place.exists() and not overwrite:
        raise RecpoError(f"{target} exists already: choose another output, or remove it", code="exists")
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
    place = validate_output_file(target, overwrite=overwrite, inputs=inputs)
    with writing_errors(place), parents(place):
        working = unused(place, UNFINISHED)
        lock = os.open(working, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        try:
            try_lock(lock)
            remove_leftovers(place, working)
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
            raise RecpoError(
                f"{target} is a file or a device, expected a directory: choose another output", code="wrong_file"
            )
        if not any(place.iterdir()):
            return
    except OSError as error:
        raise RecpoError(describe_os_error(error, target), code="failed") from error
    found = kind_of(place)
    if found != kind and overwrite:
        content = "files that recpo did not write" if found is None else f"a {found} directory"
        raise RecpoError(
            f"{target} contains {content}, and only a {kind} directory would be replaced: choose another output, or "
            "remove it yourself",
            code="wrong_file",
            field=kind,
        )
    if not overwrite:
        remedy = ", or pass --overwrite true (Python: overwrite=True)" if found == kind else ""
        raise RecpoError(f"{target} exists already: choose another output, remove it{remedy}", code="exists")


def _check_inputs(place: Path, target: Path | str, inputs: Iterable[object]) -> None:
    for given in filter(None, map(path_of, inputs)):
        source = Path(os.path.realpath(given))
        for is_so, what in (
            (place == source, "is an input and would be overwritten: choose another output"),
            (place in source.parents, f"contains {given}, which is an input: choose another output"),
            (source in place.parents, f"is inside {given}, which is an input: choose an output outside that directory"),
        ):
            if is_so:
                raise RecpoError(f"{target} {what}", code="conflicting_options")


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
                finish_or_remove_leftovers(place)
                _check_directory(place, target, kind, overwrite)
                _make_marked(working, place, kind, locks)
            yield working
        finally:
            remove_tree(working)


def _make_marked(working: Path, place: Path, kind: Kind, locks: ExitStack) -> None:
    working.mkdir()
    lock(working, place, locks)
    (working / MARKER).write_text(marker(kind), encoding="utf-8")


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
            f"another process made {target} in the meantime; the complete new output is in {kept}", code="in_use"
        ) from error
    if _exchange(working, place):
        flush(place.parent)
        return  # ``working`` is now the old one, which ``_claimed`` removes
    old = unused(place, REPLACED)
    _move_in(working, place, old)
    remove_tree(old)


def _move_in(working: Path, place: Path, aside: Path | None) -> None:
    """Renames ``working`` to ``place``, and first what is there to ``aside`` (None = nothing is)."""
    if aside is not None:
        os.rename(place, aside)
    try:
        os.rename(working, place)
    except OSError:
        if aside is not None:
            os.rename(aside, place)
        raise
    flush(place.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step; False if the operating system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_EXCHANGE)) == 0)


@contextmanager
def directory_in_place(
    target: Path | str,
    *,
    kind: Kind,
    start: Callable[[Path], None] | None,
    check: Callable[[], object],
) -> Iterator[Callable[[], None]]:
    """Keeps other writers out of a directory that is filled in place, such as a run during training.

    A new directory replaces the existing one, which is kept under another name. If the block fails before the yielded
    function was called, the old directory is restored; if the process is killed, the next call for the same target
    restores it.

    Args:
        target: the directory, or a symbolic link to it.
        kind: what the directory will be.
        start: writes the first files of a new directory; None = ``target`` exists and is continued.
        check: raises if ``target`` may not be created, replaced or continued; called when no other process can write
            it.

    Yields:
        A function to call when the new directory should be kept; it removes the replaced directory.

    Raises:
        RecpoError: another process writes the directory, or it cannot be written.
    """
    place = Path(os.path.realpath(target))
    with writing_errors(place), parents(place), ExitStack() as locks:
        with locked_parent(place):
            finish_or_remove_leftovers(place)
            check()
            if start is None:
                lock(place, place, locks)
                remove_unfinished(place)
                aside = None
            else:
                aside = _begin(place, kind, start, locks)
        kept = False

        def keep() -> None:
            nonlocal kept
            kept = True
            if aside is not None:
                discard(aside, place)

        try:
            yield keep
        except BaseException:
            if start is not None and not kept:
                with suppress(OSError):
                    discard(place, place, aside)
            raise


@contextmanager
def directory_of_steps(
    target: Path | str,
    *,
    kind: Kind,
    overwrite: bool,
    start: Callable[[Path], object] | None = lambda working: None,
    inputs: Iterable[object] = (),
) -> Iterator[None]:
    """A directory that other outputs fill one by one, such as a demo. One process at a time may fill it.

    The lock is on its ``recpo.json`` instead of the directory, because those outputs lock their parent directory.

    Args:
        target: the directory; a symbolic link is followed.
        kind: what the directory will be.
        overwrite: replace a ``target`` of the same kind immediately.
        start: writes the first files of a new directory; None = ``target`` exists and is continued.
        inputs: as of ``output_directory``.

    Raises:
        RecpoError: another process fills it, or it may not be created or replaced.
    """
    place = Path(os.path.realpath(target))
    with ExitStack() as locks:
        if (place / MARKER).is_file():
            lock(place / MARKER, place, locks)
        if start is not None:
            with output_directory(place, kind=kind, overwrite=overwrite, inputs=inputs) as working:
                start(working)
            lock(place / MARKER, place, locks)
        yield


def _begin(place: Path, kind: Kind, start: Callable[[Path], None], locks: ExitStack) -> Path | None:
    """Moves a new directory to ``place``. Returns where the existing directory was moved, None if there was none."""
    working, aside = unused(place, UNFINISHED), None
    try:
        _make_marked(working, place, kind, locks)
        start(working)
        flush_tree(working)
        if place.exists() and any(place.iterdir()):
            lock(place, place, locks)  # so that it is not mistaken for the leftovers of a dead process
            aside = unused(place, ASIDE)
        _move_in(working, place, aside)
    except BaseException:
        remove_tree(working)
        raise
    return aside


def write_json(target: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON with sorted keys, completely or not at all. Rejects nan and infinities."""
    content = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with output_file(target) as working:
        working.write_text(content, encoding="utf-8")
