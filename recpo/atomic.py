"""Outputs appear whole or not at all: write under a temporary name beside the target, then rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recpo.errors import RecpoError

_SUFFIX = ".partial"


@contextmanager
def atomic_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory that becomes ``target`` when the block ends without an error.

    A killed process leaves at most ``<target>.partial``, which the next call removes; it is never taken for ``target``.

    Args:
        target: the directory to make.
        overwrite: replace an existing ``target``; the old one goes only after the new one is complete.

    Raises:
        RecpoError: ``target`` exists and ``overwrite`` is False.
    """
    target = Path(target)
    if target.exists() and not overwrite:
        raise RecpoError(f"{target} exists already: choose another output, remove it, or pass --overwrite true")
    partial = target.with_name(target.name + _SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                _flush_to_disk(file)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if target.exists():
        replaced = target.with_name(target.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yields a path beside ``target`` that replaces ``target`` when the block ends without an error."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + _SUFFIX)
    try:
        yield partial
        _flush_to_disk(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, target)


def write_json(target: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON with sorted keys, atomically; nan and infinities are refused."""
    with atomic_file(target) as partial:
        partial.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def _flush_to_disk(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
