"""Checksums of files and of the values of documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from recpo.base.errors import RecpoError


def sha256(file: Path | bytes | Any) -> str:
    """Checksum of a file, of bytes, or of the rest of an open file."""
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
        remedy: what to do if they differ; the end of the message.

    Raises:
        RecpoError: a file is missing or its bytes differ (all of them are named), or a name leads out of ``root``.
    """
    wrong = []
    for name, expected in sorted(checksums.items()):
        if not is_inside(name):
            raise RecpoError(f"{root}: the file name {name!r} leads out of the directory; {remedy}")
        if not (root / name).is_file():
            wrong.append(f"{name} (missing)")
        elif sha256(root / name) != expected:
            wrong.append(f"{name} (changed)")
    if wrong:
        raise RecpoError(f"{root} is not as it was written: {', '.join(wrong)}; {remedy}")


def is_inside(name: object) -> bool:
    """Whether a name is a plain relative path, so that no file outside of a directory can be named."""
    if type(name) is not str or {"", ".", ".."} & set(name.split("/")) or {"\\", "\0"} & set(name):
        return False
    return not PureWindowsPath(name).drive


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the checksum of the values of ``content`` under ``sha256``, to detect changed bits in a manifest."""
    return {**content, "sha256": _checksum_of_values(content)}


def unseal(content: Mapping[str, Any], shown: object, remedy: str) -> dict[str, Any]:
    """The content that was passed to ``seal``.

    Raises:
        RecpoError: there is no checksum, or it does not match the values.
    """
    values = {key: value for key, value in content.items() if key != "sha256"}
    try:
        same = content.get("sha256") == _checksum_of_values(values)
    except (ValueError, RecursionError):  # nan, which Python reads although JSON lacks it; lists nested a thousand deep
        same = False
    if not same:
        raise RecpoError(f"{shown} is not as it was written (its checksum differs); {remedy}")
    return values


def _checksum_of_values(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content, allow_nan=False))  # as read back from the file, where keys are strings
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
