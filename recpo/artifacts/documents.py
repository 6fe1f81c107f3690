"""JSON, YAML and tensor files: one error message for damaged ones, flushed to disk before they count as output.

Also what a configuration records of a Python value, and which class a document may name.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zipfile import ZIP_STORED, ZipFile

import yaml
from jsonargparse._util import get_import_path

from recpo.base.errors import RecpoError

if TYPE_CHECKING:
    from torch import Tensor


def flush_tree(directory: Path) -> None:
    """Waits until all files below a directory, and their names, are on disk."""
    for path in directory.rglob("*"):
        if path.is_file() or path.is_dir():
            flush(path)
    flush(directory)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot flush directories
            raise
    finally:
        os.close(handle)


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
#: errors of writing; other errors may come from files that are read in the meantime
_WRITING: Final = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EEXIST),
)


def describe_os_error(error: OSError, path: Path | str | None = None) -> str:
    """Describes an error in one line: the path, what happened, and what to do about it.

    Args:
        error: the error of the operating system, or of a library that uses it.
        path: the file that was read or written; used if ``error`` does not name it.
    """
    named = error.filename if isinstance(error.filename, (str, Path)) else path
    place = "" if named is None else f"{named}: "
    first = str(error.strerror or error).strip().partition("\n")[0][:300] or type(error).__name__
    return place + _REMEDIES.get(error.errno or 0, first)


@contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """Turns errors of the operating system in writing into a ``RecpoError`` that names ``path``."""
    try:
        yield
    except Exception as error:
        reported = error if isinstance(error, OSError) else _reported_by(error)
        if reported is None or reported.errno not in _WRITING:
            raise
        raise RecpoError(describe_os_error(reported, path), code="failed") from error


def _reported_by(error: Exception) -> OSError | None:
    """The operating system's error behind an error of safetensors, which does not raise ``OSError``."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None or type(error).__name__ != "SafetensorError" else OSError(int(number[1]), "")


_MOST_VALUES = 1_000_000
_DEEPEST = 5_000
#: what jsonargparse reads text with, eight times as fast; it recurses in C, where deep text overflows the stack
_FAST_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        file: the file.
        remedy: what to do where it is damaged; ends the message.

    Raises:
        RecpoError: the file cannot be read, is not JSON, or is not an object.
    """
    return parse_json(_content(file, remedy), file, remedy)


def read_yaml(file: Path, remedy: str) -> dict[str, Any]:
    """Reads a YAML mapping without building objects from its tags.

    Args:
        file: the file.
        remedy: what to do where it is damaged; ends the message.

    Raises:
        RecpoError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        content = parse_yaml(_content(file, remedy).decode("utf-8"))
    except (ValueError, RecursionError, AttributeError, yaml.YAMLError) as error:  # PyYAML passes on all of these
        raise _damage(file, f"not YAML ({' '.join(str(error).split())})", remedy) from error
    if not isinstance(content, dict):
        raise _damage(file, "expected a mapping", remedy)
    return content


def _content(file: Path, remedy: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, file)}; {remedy}", code="missing_file", field=file.name) from error


def _damage(shown: object, problem: str, remedy: str) -> RecpoError:
    return RecpoError(f"{shown} is damaged: {problem}; {remedy}", code="damaged", field=Path(str(shown)).name)


def parse_yaml(text: str) -> Any:
    """Parses YAML without building objects from its tags.

    Raises:
        ValueError, RecursionError, AttributeError, yaml.YAMLError: not YAML; an anchor that contains itself; or anchors
            that multiply into more than a million values ("billion laughs").
    """
    # each level opens a bracket, or is further right than the one but one around it
    deepest = text.count("[") + text.count("{") + 2 * max(map(len, text.splitlines()), default=0)
    content = yaml.load(text, _FAST_LOADER if min(len(text), deepest) < _DEEPEST else yaml.SafeLoader)
    _count(content, {})
    return content


def _count(value: Any, counted: dict[int, int]) -> int:
    """Number of values in ``value``, where an anchor counts as often as it is used."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counted:
        counted[id(value)] = _MOST_VALUES + 1  # stays if it contains itself
        counted[id(value)] = 1 + sum(
            _count(one, counted) for one in (value.values() if isinstance(value, dict) else value)
        )
    if counted[id(value)] > _MOST_VALUES:
        raise ValueError(f"its anchors contain themselves, or multiply into more than {_MOST_VALUES:,} values")
    return counted[id(value)]


def parse_json(content: bytes, shown: object, remedy: str) -> dict[str, Any]:
    """Like ``read_json``, for bytes that are already read; ``shown`` is the name for messages."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damage(shown, f"not JSON ({error})", remedy) from error
    if not isinstance(value, dict):
        raise _damage(shown, f"expected a JSON object, not {type(value).__name__}", remedy)
    return value


def validate_configuration_files(arguments: Sequence[str]) -> None:
    """Raises ``RecpoError`` if a ``--config`` file is not YAML. The option parser would end in a traceback."""
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        name = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
        if flag == "--config" and os.path.isfile(name):
            read_yaml(Path(name), "expected a YAML mapping of options")


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors as safetensors, with the permissions that a new file gets (umask, inherited ACL).

    safetensors itself creates files that only their owner can read: a server under another account could not.

    Args:
        file: the file.
        tensors: contiguous tensors by name.
        metadata: text for the header of the file.
    """
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata)
    file.chmod(mode & 0o777)


def validate_archive(file: Path, *, contents: bool) -> None:
    """Raises unless torch reads an archive as it is here, and none of its records is larger than the archive.

    torch stores records as they are. A compressed record could become thousands of times its size in memory (a "zip
    bomb"), and a memory-mapped one would be read as the bytes that it was compressed to. A record that its attributes
    mark as a directory gives torch nothing to read: the tensor would keep whatever its memory contained.

    Args:
        file: the archive.
        contents: also compare the CRC-32 of every record, which torch does not do. This reads the whole file.

    Raises:
        ValueError, OSError, zipfile.BadZipFile, EOFError, NotImplementedError: it is no such archive, or is damaged.
    """
    with ZipFile(file) as archive:
        names = set[str]()
        for record in archive.infolist():
            if record.compress_type != ZIP_STORED or record.compress_size != record.file_size:
                raise ValueError(f"{record.filename} is compressed")
            if record.filename in names:
                raise ValueError(f"{record.filename}: two records have this name")
            if record.external_attr or record.is_dir():
                raise ValueError(f"{record.filename}: its attributes have changed")
            names.add(record.filename)
        if sum(record.file_size for record in archive.infolist()) > file.stat().st_size:
            raise ValueError("its records are larger than the file")
        for record in archive.infolist() if contents else ():
            with archive.open(record) as content:
                while content.read(1 << 20):
                    pass


def path_of(value: object) -> str | None:
    """The path that a value is, or the one of a directory that recpo opened; None = neither, such as a frame."""
    if isinstance(value, str):
        return value
    place = value if isinstance(value, PathLike) else getattr(value, "root", None)
    return fspath(place) if isinstance(place, PathLike) else None


def as_configuration(value: Any) -> Any:
    """A Python value in the form that YAML would have.

    Directories that recpo wrote become their paths. Classes, ``functools.partial`` of classes, and dataclasses that
    derive from a base (objectives, rewards, layouts, methods) become class paths; others become their fields.

    Raises:
        RecpoError: an object that no configuration can name (code ``wrong_file``).
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)  # also those of a range
    if (path := path_of(value)) is not None:
        return path
    if isinstance(value, Mapping):
        return {str(name): as_configuration(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_configuration(part) for part in value]
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or torch
        return value.item()
    return _of_object(value)


def _of_object(value: Any) -> Any:
    if isinstance(value, functools.partial) and not value.args:
        return {"class_path": _import_path(value.func), "init_args": as_configuration(value.keywords)}
    if inspect.isclass(value):
        return {"class_path": _import_path(value)}
    if is_dataclass(value):
        arguments = {f.name: as_configuration(getattr(value, f.name)) for f in fields(value) if f.init}
        by_class = type(value).__base__ is not object
        return {"class_path": _import_path(type(value)), "init_args": arguments} if by_class else arguments
    raise RecpoError(
        f"{value!r} cannot be written into a configuration: give a class path with its init_args, e.g. "
        '{"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 32}}, or functools.partial(Class, option=value)',
        code="wrong_file",
    )


def _import_path(value: Any) -> str:
    try:
        return str(get_import_path(value))
    except (ValueError, AttributeError) as error:
        raise RecpoError(
            f"{value!r} cannot be imported by name, so no configuration can name it: define it in a module",
            code="wrong_file",
        ) from error


def named_class(name: str, base: type | tuple[type, ...], packages: Sequence[str]) -> type:
    """The class at ``package.module.Class``, if a document may name it.

    The part before the class must be a module of one of ``packages``; only such a module is imported. It is never an
    attribute of a module: ``recpo.cli.main.os.system`` would otherwise be ``os.system``. The class itself must be
    defined in one of ``packages`` too, so what a module imports from elsewhere cannot be named.

    Args:
        name: the full path of a class.
        base: the class is a subclass of it, or of one of them.
        packages: packages that may be named, such as ``recpo`` or ``torch.optim``.

    Raises:
        ValueError: the name is not that of such a class; the message is the reason, as the end of a sentence.
        ImportError: the module needs something that is not installed.
    """
    module_name, _, own_name = name.rpartition(".")
    if not any(lies_in(name, package) for package in packages) or not module_name:
        raise ValueError(f"is not a part of {', '.join(packages)}")
    if any(part.startswith("__") for part in name.split(".")[1:]):
        raise ValueError("is not public")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and lies_in(module_name, error.name):
            raise ValueError(f"is not a class, because {error.name} is not a module") from error
        raise
    found = getattr(module, own_name, None)
    if not inspect.isclass(found):
        raise ValueError("is not a class")
    if not any(lies_in(found.__module__, package) for package in packages):
        raise ValueError(f"is {found.__module__}.{found.__qualname__}, which is not a part of {', '.join(packages)}")
    if not issubclass(found, base):
        bases = base if isinstance(base, tuple) else (base,)
        raise ValueError(f"is not a subclass of {' or '.join(one.__name__ for one in bases)}")
    return found


def lies_in(name: str, package: str) -> bool:
    """Whether a dotted name is that of a package or of something in it."""
    return name == package or name.startswith(package + ".")
