"""What recpo writes: it appears whole or not at all, and takes the place of nothing that recpo did not write itself.

Every output is made under a name of its own beside its target and renamed in the end. A directory carries
``recpo.json`` from the first moment, which says what kind it is (``kind_of``). So a later call can tell its own kind,
which it may replace, from a directory of somebody else's, which it may not, and the leavings of a killed process from
the work of a living one: that one holds a lock on its working directory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal, get_args

import yaml

from recpo.errors import RecpoError

Kind = Literal[
    "simulation",
    "prepared",
    "codes",
    "run",
    "checkpoint",
    "evaluation",
    "bundle",
    "demo",
    "factors",
    "comparison",
    "loop",
    "triton",
]

MARKER: Final = "recpo.json"
#: YAML of every option of the running verb, defaults included; None when a verb is called from Python
RESOLVED: ContextVar[str | None] = ContextVar("resolved_configuration", default=None)
_UNFINISHED: Final = ".recpo-unfinished-"
_REPLACED: Final = ".recpo-replaced-"
_ASIDE: Final = ".recpo-aside-"  # stands for what is filled in its place until that is worth keeping
_LEAVINGS: Final = (_REPLACED, _ASIDE, _UNFINISHED)
#: ends the name of a file that is written beside its target by something that names its own files, such as Lightning
PARTIAL: Final = ".partial"
_EXCHANGE: Final = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD: Final = -100

_REMEDIES: Final = {
    errno.ENOSPC: "the disk is full: free space, or write elsewhere",
    errno.EDQUOT: "your disk quota is used up: free space, or write elsewhere",
    errno.EACCES: "permission denied: change the permissions, or choose another path",
    errno.EPERM: "not permitted: change the permissions, or choose another path",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.ENAMETOOLONG: "the path is too long: choose a shorter one",
    errno.ELOOP: "symbolic links run in a circle: choose another path",
    errno.ENOTDIR: "a part of this path is a file: choose another path",
    errno.EEXIST: "a file of this name is in the way: choose another path",
    errno.ENOENT: "there is no such file or directory: check the path",
    errno.EISDIR: "this is a directory where a file is expected: name a file",
    errno.EIO: "the device reports an error: check the disk",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENOMEM: "out of memory",
}
#: what goes wrong in writing; others may come from something that is read meanwhile
_WRITING: Final = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EEXIST),
)


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

    A directory that exists is replaced in one step (Linux; where the file system knows no exchange, the old one has
    another name for an instant, under which the next call finds it again should the process die there). What a killed
    process left behind is removed by the next call for the same target. An empty directory counts as none.

    Args:
        target: the directory to make; of a symbolic link, what it points to.
        kind: what the directory will be.
        overwrite: replace a ``target`` of the same kind; the old one goes only after the new one is complete.
        inputs: files and directories that are read meanwhile; what is no path (an object store) is left alone.
        sealed: names of files whose checksums ``recpo.json`` shall hold, for ``verify_sealed``.

    Raises:
        RecpoError: before anything is touched, ``target`` exists and ``overwrite`` is False; is a file, or a directory
            that recpo did not write as this kind; is, holds or lies in one of ``inputs``; or another process writes it.
            Later, it cannot be written (a full disk, permissions).
    """
    place = Path(os.path.realpath(target))
    _check_directory(place, target, kind, overwrite)
    _check_inputs(place, target, inputs)
    with _os_errors(place, _WRITING), _parents(place), _claimed(place, target, kind, overwrite) as working:
        yield working
        if names := [name for name in sealed if (working / name).is_file()]:
            content = seal({"kind": kind, "files": {name: sha256(working / name) for name in names}})
            with output_file(working / MARKER) as whole:  # half of it would be nobody's
                whole.write_text(json.dumps(content) + "\n", encoding="utf-8")
        _flush_tree(working)
        _publish(working, place, target, kind, overwrite)


@contextmanager
def output_file(target: Path | str, *, overwrite: bool = True, inputs: Iterable[object] = ()) -> Iterator[Path]:
    """Yields a path beside ``target`` that replaces ``target`` when the block ends without an error.

    Args:
        target: the file to write; of a symbolic link, what it points to.
        overwrite: replace an existing file.
        inputs: files and directories that are read meanwhile; what is no path (an object store) is left alone.

    Raises:
        RecpoError: before anything is touched, ``target`` is a directory or a device, is or lies in one of ``inputs``,
            or exists and ``overwrite`` is False. Later, it cannot be written.
    """
    place = Path(os.path.realpath(target))
    if place.is_dir():
        raise RecpoError(f"{target} is a directory, a file is to be written: name a file in it")
    if place.exists() and not place.is_file():
        raise RecpoError(f"{target} is a device or a pipe, not a file: choose another output")
    if place.exists() and not overwrite:
        raise RecpoError(f"{target} exists already: choose another output, or remove it")
    _check_inputs(place, target, inputs)
    with _os_errors(place, _WRITING), _parents(place):
        working = _unused(place, _UNFINISHED)
        lock = os.open(working, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        try:
            _try_lock(lock)
            _remove_leavings(place, working)
            yield working
            flush(working)
            os.replace(working, place)
            flush(place.parent)
        finally:
            working.unlink(missing_ok=True)
            _unlock(lock)


@contextmanager
def directory_in_place(
    target: Path | str,
    *,
    kind: Kind,
    start: Callable[[Path], None] | None,
    check: Callable[[], object],
) -> Iterator[Callable[[], None]]:
    """Keeps other writers out of a directory that is filled where it stands, such as a run while it is trained.

    A new one takes the place of what stands there, which is kept aside and comes back where the block fails or the
    process is killed (then by the next call for the same target) before the function that is yielded was called.

    Args:
        target: the directory; of a symbolic link, what it points to.
        kind: what the directory will be.
        start: writes the first files of a new directory; None = ``target`` exists and is gone on with.
        check: raises where ``target`` may not be made, replaced or gone on with; called once nobody else can write it.

    Yields:
        A function to call once the new directory is worth keeping: what it replaces is removed.

    Raises:
        RecpoError: another process writes the directory, or it cannot be written.
    """
    place = Path(os.path.realpath(target))
    with _os_errors(place, _WRITING), _parents(place), ExitStack() as locks:
        with _locked_parent(place):
            _settle_leavings(place)
            check()
            if start is None:
                _lock(place, place, locks)
                _remove_unfinished(place)
                aside = None
            else:
                aside = _begin(place, kind, start, locks)
        kept = False

        def keep() -> None:
            nonlocal kept
            kept = True
            if aside is not None:
                _discard(aside, place)

        try:
            yield keep
        except BaseException:
            if start is not None and not kept:
                with suppress(OSError):
                    _discard(place, place, aside)
            raise


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Keeps other processes that ask for this lock out of a directory that is written in place, such as a run.

    Raises:
        RecpoError: another process holds it.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        if not _try_lock(handle):
            raise _taken(directory)
        yield
    finally:
        _unlock(handle)


def kind_of(directory: Path | str) -> Kind | None:
    """What recpo wrote there, from ``recpo.json``; None where there is no such file, or none that recpo wrote."""
    try:
        kind = json.loads((Path(directory) / MARKER).read_bytes())["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind if kind in get_args(Kind) else None


def marker(kind: Kind) -> str:
    """Content of ``recpo.json``."""
    return json.dumps({"kind": kind}) + "\n"


def verify_sealed(directory: Path, names: Iterable[str], remedy: str) -> None:
    """Compares files of a directory with the checksums that ``recpo.json`` in it holds.

    A directory without that file is a part of something else, which has checksums of its own.

    Args:
        directory: as ``output_directory`` made it with ``sealed``.
        names: the files; one that was not written is not there either.
        remedy: what to do where they differ; ends the message.

    Raises:
        RecpoError: ``recpo.json`` has no checksums or was changed, or a file is missing or differs.
    """
    file = directory / MARKER
    if not file.exists():
        return
    content = read_json(file, remedy)
    if not isinstance(content.get("files"), dict):
        raise RecpoError(f"{file} holds no checksums: it was written by an older recpo, or is damaged; {remedy}")
    files = unseal(content, file, remedy)["files"]
    wanted = [name for name in names if name in files or (directory / name).exists()]
    verify(directory, {name: str(files.get(name)) for name in wanted}, remedy)


def write_json(target: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON with sorted keys, whole or not at all; nan and infinities are refused."""
    content = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with output_file(target) as working:
        working.write_text(content, encoding="utf-8")


def write_resolved(file: Path) -> None:
    """Writes the running verb's options to ``file``; nothing where a verb was called from Python."""
    resolved = RESOLVED.get()
    if resolved is not None:
        with output_file(file) as partial:
            partial.write_text(resolved, encoding="utf-8")


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        file: the file.
        remedy: what to do where it is damaged; ends the message.

    Raises:
        RecpoError: it cannot be read, is no JSON, or is no object.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, file)}; {remedy}") from error
    return parse_json(content, file, remedy)


def read_yaml(file: Path, remedy: str) -> dict[str, Any]:
    """Reads a YAML mapping; no object is made of its tags.

    Args:
        file: the file.
        remedy: what to do where it is damaged; ends the message.

    Raises:
        RecpoError: it cannot be read, is no YAML, or is no mapping.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        json.dumps(content, default=str, skipkeys=True)  # raises where an anchor holds itself
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, file)}; {remedy}") from error
    except (ValueError, RecursionError, AttributeError, yaml.YAMLError) as error:  # PyYAML lets them all through
        raise RecpoError(f"{file} is damaged: no YAML ({' '.join(str(error).split())}); {remedy}") from error
    if not isinstance(content, dict):
        raise RecpoError(f"{file} is damaged: a mapping is expected; {remedy}")
    return content


def validate_configuration_files(arguments: Sequence[str]) -> None:
    """Raises ``RecpoError`` where a file of ``--config`` is no YAML: the parser of options would end in a traceback."""
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        name = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
        if flag == "--config" and os.path.isfile(name):
            read_yaml(Path(name), "expected a YAML mapping of options")


def parse_json(content: bytes, shown: object, remedy: str) -> dict[str, Any]:
    """As ``read_json``, of bytes that are read already; ``shown`` is the name for messages."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecpoError(f"{shown} is damaged: no JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise RecpoError(f"{shown} is damaged: a JSON object is expected, not {type(value).__name__}; {remedy}")
    return value


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` and, under ``sha256``, the checksum of its values: a changed bit in a manifest is noticed as well."""
    return {**content, "sha256": _checksum_of_values(content)}


def unseal(content: Mapping[str, Any], shown: object, remedy: str) -> dict[str, Any]:
    """What was given to ``seal``.

    Raises:
        RecpoError: there is no checksum, or that of other values.
    """
    values = {key: value for key, value in content.items() if key != "sha256"}
    try:
        same = content.get("sha256") == _checksum_of_values(values)
    except (ValueError, RecursionError):  # nan, which JSON has not and Python reads; lists a thousand deep
        same = False
    if not same:
        raise RecpoError(f"{shown} is not as it was written (its checksum differs); {remedy}")
    return values


def _checksum_of_values(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content, allow_nan=False))  # as it comes back from the file: keys are strings
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def sha256(file: Path | bytes | Any) -> str:
    """Checksum of a file, of bytes, or of what is left to read of an open file."""
    if isinstance(file, bytes):
        return hashlib.sha256(file).hexdigest()
    if not isinstance(file, Path):
        return hashlib.file_digest(file, "sha256").hexdigest()  # such as a pyarrow.NativeFile
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def verify(root: Path, checksums: Mapping[str, str], remedy: str) -> None:
    """Compares files with their SHA-256.

    Args:
        root: the directory.
        checksums: file, relative to ``root`` -> SHA-256.
        remedy: what to do where they differ; ends the message.

    Raises:
        RecpoError: a file is missing or its bytes differ (all of them are named), or a name leads out of ``root``.
    """
    wrong = []
    for name, expected in sorted(checksums.items()):
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise RecpoError(f"{root}: the file name {name!r} leads out of the directory; {remedy}")
        if not (root / name).is_file():
            wrong.append(f"{name} (missing)")
        elif sha256(root / name) != expected:
            wrong.append(f"{name} (changed)")
    if wrong:
        raise RecpoError(f"{root} is not as it was written: {', '.join(wrong)}; {remedy}")


def describe_os_error(error: OSError, path: Path | str | None = None) -> str:
    """One line for a user: the path, what happened, and what to do about it.

    Args:
        error: what the operating system, or a library on top of it, reported.
        path: what was read or written, where ``error`` does not name it.
    """
    named = error.filename if isinstance(error.filename, (str, Path)) else path
    place = "" if named is None else f"{named}: "
    first = str(error.strerror or error).strip().partition("\n")[0][:300] or type(error).__name__
    return place + _REMEDIES.get(error.errno or 0, first)


def _check_directory(place: Path, target: Path | str, kind: Kind, overwrite: bool) -> None:
    """Refuses a ``place`` that may not be made or replaced."""
    try:
        if not os.path.lexists(place):
            return
        if not place.is_dir():
            raise RecpoError(f"{target} is a file or a device, a directory is to be made: choose another output")
        if not any(place.iterdir()):
            return
    except OSError as error:
        raise RecpoError(describe_os_error(error, target)) from error
    found = kind_of(place)
    if found != kind and overwrite:
        content = "what recpo did not write" if found is None else f"a {found} directory"
        raise RecpoError(
            f"{target} holds {content}, and only a {kind} directory would be replaced: choose another output, or "
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
            raise RecpoError(f"{target} is read and would be overwritten: choose another output")
        if place in source.parents:
            raise RecpoError(f"{target} holds {given}, which is read: choose another output")
        if source in place.parents:
            raise RecpoError(f"{target} lies in {given}, which is read: choose an output outside of it")


@contextmanager
def _parents(place: Path) -> Iterator[None]:
    """Makes the directories above ``place``, and removes those again where the block fails."""
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
    """Yields a new working directory, whose lock keeps other writers of ``place`` out."""
    working = _unused(place, _UNFINISHED)
    with ExitStack() as locks:
        try:
            with _locked_parent(place):
                _settle_leavings(place)
                _check_directory(place, target, kind, overwrite)
                working.mkdir()
                _lock(working, place, locks)
                (working / MARKER).write_text(marker(kind), encoding="utf-8")
            yield working
        finally:
            _remove_tree(working)


@contextmanager
def _locked_parent(place: Path) -> Iterator[None]:
    """Of two processes that claim ``place`` one sees what the other has done."""
    parent = os.open(place.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(parent, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(parent)


def _lock(directory: Path, place: Path, locks: ExitStack) -> None:
    """Locks a directory until ``locks`` ends; ``place`` is its name for messages."""
    handle = os.open(directory, os.O_RDONLY)
    locks.callback(_unlock, handle)
    if not _try_lock(handle):
        raise _taken(place)


def _taken(place: Path) -> RecpoError:
    return RecpoError(f"{place}: another process is writing it; wait for its end, or choose another output")


def _begin(place: Path, kind: Kind, start: Callable[[Path], None], locks: ExitStack) -> Path | None:
    """Puts a new directory into ``place``; where what stood there was set aside, None if nothing did."""
    working, aside = _unused(place, _UNFINISHED), None
    working.mkdir()
    try:
        _lock(working, place, locks)
        (working / MARKER).write_text(marker(kind), encoding="utf-8")
        start(working)
        _flush_tree(working)
        if place.exists() and any(place.iterdir()):
            _lock(place, place, locks)  # so that nobody takes it for what a dead process has left
            aside = _unused(place, _ASIDE)
            os.rename(place, aside)
        try:
            os.rename(working, place)
        except OSError:
            if aside is not None:
                os.rename(aside, place)
            raise
        flush(place.parent)
    except BaseException:
        _remove_tree(working)
        raise
    return aside


def _discard(directory: Path, place: Path, successor: Path | None = None) -> None:
    """Removes a directory, which ``successor`` follows in its place; a kill in between leaves no part of it there."""
    unfinished = _unused(place, _UNFINISHED)
    os.rename(directory, unfinished)
    if successor is not None:
        os.rename(successor, directory)
    _remove_tree(unfinished)


def _remove_tree(directory: Path) -> None:
    """Removes a directory of recpo's, ``recpo.json`` last: after a kill in between, the next call knows what it is."""
    with suppress(OSError):
        for entry in directory.iterdir():
            if entry.name == MARKER:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _remove_unfinished(directory: Path) -> None:
    """Removes what a killed process had begun to write in a directory that is locked."""
    for entry in list(directory.rglob("*")):
        if _UNFINISHED in entry.name or entry.name.endswith(PARTIAL):
            with suppress(OSError):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _settle_leavings(place: Path) -> None:
    """Brings back what a killed process had set aside, removes what it left, and refuses a second writer."""
    for entry in [*_siblings(place), place]:
        if entry.is_symlink() or (kind_of(entry) is None and not (entry != place and _is_barely_begun(entry))):
            continue
        handle = os.open(entry, os.O_RDONLY)
        try:
            if not _try_lock(handle):
                raise _taken(place)
            if entry == place:
                continue
            if _REPLACED in entry.name and not place.exists():
                entry.rename(place)
            elif _ASIDE in entry.name:
                _discard(place, place, entry) if place.exists() else entry.rename(place)
            else:
                _remove_tree(entry)
        finally:
            _unlock(handle)


def _is_barely_begun(entry: Path) -> bool:
    """Whether a process was killed before it had said in ``recpo.json`` that the directory is its own."""
    return entry.is_dir() and all(path.name == MARKER for path in entry.iterdir())


def _siblings(place: Path) -> list[Path]:
    """What stands beside ``place`` under the names that are made here, what was set aside first."""
    found = [entry for entry in place.parent.iterdir() if entry.name.startswith(place.name + ".recpo-")]
    parts = [[entry for entry in found if entry.name.startswith(place.name + part)] for part in _LEAVINGS]
    return [entry for part in parts for entry in part]


def _remove_leavings(place: Path, own: Path) -> None:
    """Removes the unfinished files of dead processes beside the file ``place``."""
    for entry in _siblings(place):
        if entry == own or entry.is_symlink() or not entry.is_file():
            continue
        with suppress(OSError):
            handle = os.open(entry, os.O_RDONLY)
            try:
                if _try_lock(handle):
                    entry.unlink()
            finally:
                _unlock(handle)


def _try_lock(handle: int) -> bool:
    """Locks an open file; False where another process holds it. A file system without locks locks nobody out."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _unlock(handle: int) -> None:
    """Frees the lock also where a forked child still holds the file open."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _unused(place: Path, suffix: str) -> Path:
    return place.with_name(f"{place.name}{suffix}{os.getpid()}-{secrets.token_hex(4)}")


def _publish(working: Path, place: Path, target: Path | str, kind: Kind, overwrite: bool) -> None:
    """Renames ``working`` to ``place``; what was there is removed afterwards."""
    try:
        _check_directory(place, target, kind, overwrite)
        if not place.exists() or not any(place.iterdir()):
            os.rename(working, place)  # also over an empty directory, which cannot fill up in between
            flush(place.parent)
            return
    except (RecpoError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        kept = _unused(place, ".recpo-kept-")
        os.rename(working, kept)
        raise RecpoError(
            f"{target} was made by somebody else meanwhile; what was to go there is whole in {kept}"
        ) from error
    if _exchange(working, place):
        flush(place.parent)
        return  # ``working`` is now the old one, which ``_claimed`` removes
    old = _unused(place, _REPLACED)
    os.rename(place, old)
    try:
        os.rename(working, place)
    except OSError:
        os.rename(old, place)
        raise
    flush(place.parent)
    _remove_tree(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step; False where the system or its file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_EXCHANGE)) == 0)


def _flush_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file() or path.is_dir():
            flush(path)
    flush(directory)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot flush directories
            raise
    finally:
        os.close(handle)


@contextmanager
def _os_errors(path: Path, errors: Container[int]) -> Iterator[None]:
    """Turns those of ``errors`` that the operating system reports into a message that names ``path``."""
    try:
        yield
    except Exception as error:
        reported = error if isinstance(error, OSError) else _reported_by(error)
        if reported is None or reported.errno not in errors:
            raise
        raise RecpoError(describe_os_error(reported, path)) from error


def _reported_by(error: Exception) -> OSError | None:
    """What the operating system told a library that raises no ``OSError``: safetensors."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None or type(error).__name__ != "SafetensorError" else OSError(int(number[1]), "")
