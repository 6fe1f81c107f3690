"""``manifest.json`` of a prepared directory: what it holds, how it was made, and a checksum of every file."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from recpo.data.prepared import Prepared
from recpo.errors import RecpoError


def sha256(file: Path) -> str:
    """Checksum of a file, read in pieces."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def describe(choice: Any) -> dict[str, Any]:
    """A dataclass instance as the class path and arguments that make it again."""
    if not is_dataclass(choice) or isinstance(choice, type):
        raise TypeError(f"{choice!r} is no dataclass instance")
    kind = type(choice)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": asdict(choice)}


def verify_checksums(prepared: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        RecpoError: a file is missing or its bytes differ; all of them are named.
    """
    manifest = Prepared.open(prepared).manifest
    expected = dict(manifest["files"])
    for shards in manifest["shards"].values():
        expected |= {shard["file"]: shard["sha256"] for shard in shards}
    root = Path(prepared)
    wrong = [
        f"{name} ({'changed' if (root / name).is_file() else 'missing'})"
        for name, checksum in sorted(expected.items())
        if not (root / name).is_file() or sha256(root / name) != checksum
    ]
    if wrong:
        raise RecpoError(f"{prepared}: {', '.join(wrong)}; run recpo prepare again")
