"""The manifest of a bundle: versions, shapes and a checksum of every file, written last."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from recpo.artifacts import MARKER, write_json
from recpo.errors import RecpoError

MANIFEST = "manifest.json"
ITEMS = "items.parquet"
TORCH_PROGRAM = "model.pt2"
ONNX_PROGRAM = "model.onnx"
FORMAT_VERSION = 1


def write_manifest(root: Path, content: dict[str, Any]) -> None:
    """Completes a bundle: adds the format version and the SHA-256 of every file that lies in ``root``."""
    files = {file.name: _sha256(file) for file in sorted(root.iterdir()) if file.name not in (MARKER, MANIFEST)}
    write_json(root / MANIFEST, {**content, "format_version": FORMAT_VERSION, "files": files})


def read_manifest(root: Path) -> dict[str, Any]:
    """Reads and verifies a bundle's manifest.

    Raises:
        RecpoError: no bundle, an export that did not end, another format version, or a file that is missing or is not
            the one that was exported.
    """
    path = Path(root) / MANIFEST
    if not path.is_file():
        raise RecpoError(f"{root} is no bundle: {MANIFEST} is missing; make one with `recpo export`")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecpoError(f"{path} is damaged ({error!r}): export the bundle again") from error
    if version != FORMAT_VERSION:
        raise RecpoError(
            f"{path}: format_version {version!r}, this recpo reads {FORMAT_VERSION}; export the bundle again"
        )
    for name, expected in {ITEMS: None, TORCH_PROGRAM: None, ONNX_PROGRAM: None, **files}.items():
        if expected is None or Path(name).name != name:
            raise RecpoError(f"{path} is damaged: no checksum of {name}; export the bundle again")
        _verify(Path(root) / name, expected)
    return manifest


def _verify(file: Path, expected: str) -> None:
    if not file.is_file():
        raise RecpoError(f"{file} is missing: the bundle is incomplete, copy or export it again")
    if _sha256(file) != expected:
        raise RecpoError(f"{file} is not the file that was exported (its checksum differs): copy or export it again")


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
