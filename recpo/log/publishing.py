"""Publishes prepared directories, which appear complete or not at all."""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from recpo.artifacts import MARKER, marker, output_directory
from recpo.base.errors import RecpoError
from recpo.log.locations import Location, Place
from recpo.log.prepared import MANIFEST
from recpo.log.schema import PERIODS

_SHARD: Final = re.compile(rf"({'|'.join(PERIODS)})/\d+\.parquet")
_UPLOADS: Final = 8  # parallel uploads, with 4 MB of memory each


@contextmanager
def prepared_directory(
    target: Place, work: Place | None = None, *, overwrite: bool = False, inputs: Sequence[Place] = ()
) -> Iterator[Path]:
    """Yields an empty local directory that becomes ``target`` when the block ends without an error.

    An object store has no rename, so all files are uploaded, the manifest last: without a manifest, nothing counts as a
    prepared directory. When a directory is replaced, its old manifest is removed first, and its other old files after
    the new manifest is written.

    Args:
        target: the output directory.
        work: local directory for files before they are uploaded; None = the system's directory for temporary files.
        overwrite: replace an existing ``target``, which must be a prepared directory.
        inputs: files and directories of the log.

    Raises:
        RecpoError: ``target`` exists and ``overwrite`` is False; it is not a prepared directory; it is, contains or
            lies in one of ``inputs``; or the store is not writable.
    """
    local = [place for place in inputs if isinstance(place, Path)]
    if isinstance(target, Path):
        with output_directory(target, kind="prepared", overwrite=overwrite, inputs=local) as partial:
            yield partial
        return
    _check_store(target, overwrite)
    near = work if isinstance(work, Path) else None
    if near is not None:
        near.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recpo-prepare-", dir=near) as folder:
        (Path(folder) / MARKER).write_text(marker("prepared"), encoding="utf-8")
        yield Path(folder)
        _upload(Path(folder), target)


def _check_store(target: Location, overwrite: bool) -> None:
    there = _inside(target)
    if there and (MARKER not in there or (target / MARKER).read_bytes() != marker("prepared").encode()):
        raise RecpoError(f"{target} contains files that recpo did not write as prepared data: choose another output")
    if MANIFEST in there and not overwrite:
        raise RecpoError(f"{target} exists already: choose another output, remove it, or pass --overwrite true")
    target.check_writable()


def _inside(target: Location) -> set[str]:
    return {Path(inside).relative_to(target.inside).as_posix() for inside in target.sizes()}


def _upload(folder: Path, target: Location) -> None:
    shards = {file for file in _inside(target) if _SHARD.fullmatch(file)}
    (target / MANIFEST).unlink()
    (target / MARKER).upload(folder / MARKER)  # first, so that the leftovers of an interrupted upload may be replaced
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files.remove(MANIFEST)
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(lambda file: (target / file).upload(folder / file), files))
    (target / MANIFEST).upload(folder / MANIFEST)
    for file in shards - set(files):
        (target / file).unlink()


@contextmanager
def work_directory(work: Place | None, partial: Path) -> Iterator[Place]:
    """Yields a new directory for temporary files, which is removed at the end.

    Args:
        work: parent directory; None = ``partial``.
        partial: the directory that is being prepared.
    """
    name = f"recpo-work-{uuid.uuid4().hex[:12]}"
    place = partial / ".work" if work is None else work / name
    if isinstance(place, Location):
        try:
            yield place
        finally:
            place.delete_directory()
        return
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
