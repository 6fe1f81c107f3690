"""Where files are.

Local files are plain paths. A name with a scheme (``s3://``, ``gs://``, ``abfs://``, ``hdfs://``, ``file://``) is a
``Location``. All access goes through Arrow's filesystems: they read columns of Parquet files in parallel without
another package, and they wrap any filesystem that fsspec has for a scheme. These libraries find credentials themselves
(environment variables, profiles, the machine's role); recpo does not handle them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

import pyarrow as pa
from pyarrow.fs import FileSelector, FileSystem, FileType

from recpo.base.errors import RecpoError, first_line

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_COLLAPSED: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
#: schemes that Arrow's own filesystems read; all others use fsspec
_ARROW: Final = frozenset({"file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"})
#: other tools' schemes for the same store
_SAME: Final = {"s3a": "s3", "s3n": "s3"}


@dataclass(frozen=True)
class Location:
    """A file or directory behind a URI.

    Attributes:
        root: URI of the store and of a path in it; its query has the store's options.
        inside: path below ``root``, empty for ``root`` itself.
    """

    root: str
    inside: str = ""

    def __truediv__(self, name: str) -> Location:
        return Location(self.root, f"{self.inside}/{name}".strip("/"))

    def __str__(self) -> str:
        base = self.root.partition("?")[0].rstrip("/")
        return f"{base}/{self.inside}" if self.inside else base

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(str(self)).name

    @property
    def filesystem(self) -> FileSystem:
        """The store. Every process has its own client, because clients do not survive a fork."""
        return _store(self.root, os.getpid())[0]

    @property
    def path(self) -> str:
        """The path that ``filesystem`` understands."""
        base = _store(self.root, os.getpid())[1]
        return f"{base.rstrip('/')}/{self.inside}" if self.inside else base

    def kind(self) -> FileType:
        """File, directory, or not found."""
        with _reported(self):
            return self.filesystem.get_file_info(self.path).type

    def is_file(self) -> bool:
        """Whether the file exists."""
        return self.kind() == FileType.File

    def size(self) -> int:
        """Bytes of the file."""
        with _reported(self):
            return int(self.filesystem.get_file_info(self.path).size)

    def files(self) -> list[Location]:
        """Every file below this directory, ordered by path. Empty if the directory does not exist."""
        return [Location(self.root, inside) for inside in self.sizes()]

    def sizes(self) -> dict[str, int]:
        """``inside`` and size in bytes of every file below this directory, ordered by path."""
        with _reported(self):
            base = self.path
            found = self.filesystem.get_file_info(FileSelector(base, allow_not_found=True, recursive=True))
        sizes = {info.path.strip("/"): int(info.size) for info in found if info.type == FileType.File}
        named = {path.removeprefix(base.strip("/")).strip("/"): size for path, size in sizes.items()}
        return {(self / name).inside: size for name, size in sorted(named.items())}

    def open_input(self) -> pa.NativeFile:
        """The file for random access.

        Raises:
            OSError: it does not exist, or cannot be read.
        """
        return self.filesystem.open_input_file(self.path)

    def open_output(self) -> pa.NativeFile:
        """A stream that writes the file. Its directory is created if the store has directories."""
        self.filesystem.create_dir(self.path.rpartition("/")[0], recursive=True)
        return self.filesystem.open_output_stream(self.path)

    def read_bytes(self) -> bytes:
        """The whole file."""
        with _reported(self), self.open_input() as source:
            content: bytes = source.read()
        return content

    def unlink(self) -> None:
        """Removes the file if it exists."""
        if self.is_file():
            self.filesystem.delete_file(self.path)

    def check_writable(self) -> None:
        """Writes and removes an empty file in this directory, so that missing permissions are found early."""
        probe = self / ".writable"
        with _reported(self):
            probe.open_output().close()
            probe.unlink()

    def upload(self, file: Path) -> None:
        """Copies a local file to this location."""
        with _reported(self), file.open("rb") as source, self.open_output() as target:
            while piece := source.read(1 << 22):
                target.write(piece)


Place = Path | Location


def locate(name: str | Path | Location) -> Place:
    """A plain path, or a ``Location`` if ``name`` has a scheme.

    Raises:
        RecpoError: a local path in which a scheme's ``//`` was collapsed to ``/``.
    """
    if isinstance(name, str) and _SCHEME.match(name):
        scheme, _, rest = name.partition("://")
        return Location(f"{_SAME.get(scheme.lower(), scheme.lower())}://{rest}")
    if isinstance(name, Path) and _COLLAPSED.match(str(name)):
        raise RecpoError(
            f"{name}: only local paths are written or read here, not an object store", code="not_local", field=str(name)
        )
    return name if isinstance(name, Location) else Path(name)


def readable(place: Place) -> Path | pa.NativeFile:
    """The argument for pyarrow's readers that stands for ``place``."""
    return place if isinstance(place, Path) else place.open_input()


def writable(place: Place) -> pa.NativeFile:
    """A stream that writes the file ``place``."""
    return pa.OSFile(str(place), "wb") if isinstance(place, Path) else place.open_output()


def remove_directory(place: Place) -> None:
    """Removes a directory and everything in it."""
    if isinstance(place, Path):
        shutil.rmtree(place, ignore_errors=True)
    elif place.kind() == FileType.Directory:
        place.filesystem.delete_dir(place.path)


@lru_cache(maxsize=64)
def _store(root: str, process: int) -> tuple[FileSystem, str]:
    scheme = root.partition("://")[0]
    try:
        return FileSystem.from_uri(root if scheme in _ARROW else f"fsspec+{root}")
    except (pa.ArrowException, OSError, ValueError, ImportError) as error:
        raise RecpoError(
            f"{root.partition('?')[0]}: {first_line(error)}", code="failed", field=root.partition("?")[0]
        ) from error


@contextmanager
def _reported(place: Location) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecpoError(
            f"{place}: the store did not answer as expected ({first_line(error)}); check the address, and the "
            "credentials in the environment",
            code="failed",
            field=place.name,
        ) from error
