"""Describes errors of the operating system in one line."""

from __future__ import annotations

import errno
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from recpo.base.errors import RecpoError

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
WRITING: Final = (
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
def os_errors(path: Path, errors: Container[int]) -> Iterator[None]:
    """Turns ``errors`` that come from the operating system into a ``RecpoError`` that names ``path``."""
    try:
        yield
    except Exception as error:
        reported = error if isinstance(error, OSError) else _reported_by(error)
        if reported is None or reported.errno not in errors:
            raise
        raise RecpoError(describe_os_error(reported, path)) from error


def _reported_by(error: Exception) -> OSError | None:
    """The operating system's error behind an error of safetensors, which does not raise ``OSError``."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None or type(error).__name__ != "SafetensorError" else OSError(int(number[1]), "")
