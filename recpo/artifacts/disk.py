"""Flushes written files to disk before they count as output."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
