"""``manifest.json`` of a prepared directory: what it holds, how it was made, and a checksum of every file."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from recpo.data.locations import Place
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError


def sha256(file: Place) -> str:
    """Checksum of a file, read in pieces."""
    with file.open("rb") if isinstance(file, Path) else file.open_input() as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def describe(choice: Any) -> dict[str, Any]:
    """A dataclass instance as the class path and arguments that make it again."""
    if not is_dataclass(choice) or isinstance(choice, type):
        raise TypeError(f"{choice!r} is no dataclass instance")
    kind = type(choice)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": asdict(choice)}


def verify_checksums(prepared: Place | str) -> None:
    """Compares every file with the manifest.

    Raises:
        RecpoError: a file is missing or its bytes differ; all of them are named.
    """
    data = Prepared.open(prepared)
    expected = dict(data.manifest["files"])
    for shards in data.manifest["shards"].values():
        expected |= {shard["file"]: shard["sha256"] for shard in shards}
    wrong = [
        f"{name} ({'changed' if (data.root / name).is_file() else 'missing'})"
        for name, checksum in sorted(expected.items())
        if not (data.root / name).is_file() or sha256(data.root / name) != checksum
    ]
    if wrong:
        raise RecpoError(f"{prepared}: {', '.join(wrong)}; run recpo prepare again")
