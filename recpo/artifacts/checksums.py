"""The kind of a directory that recpo wrote (``recpo.json``), and checksums of files and documents."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, Final, Literal, get_args

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
            raise RecpoError(
                f"{root}: the file name {name!r} leads out of the directory; {remedy}", code="untrusted", field=name
            )
        if not (root / name).is_file():
            wrong.append(f"{name} (missing)")
        elif sha256(root / name) != expected:
            wrong.append(f"{name} (changed)")
    if wrong:
        raise RecpoError(
            f"{root} is not as it was written: {', '.join(wrong)}; {remedy}",
            code="damaged",
            field=", ".join(one.rpartition(" (")[0] for one in wrong),
        )


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
        raise RecpoError(
            f"{shown} is not as it was written (its checksum differs); {remedy}",
            code="damaged",
            field=Path(str(shown)).name,
        )
    return values


def _checksum_of_values(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content, allow_nan=False))  # as read back from the file, where keys are strings
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


Kind = Literal[
    "simulation",
    "prepared",
    "codes",
    "run",
    "checkpoint",
    "evaluation",
    "variants",
    "bundle",
    "demo",
    "factors",
    "comparison",
    "loop",
    "decision",
    "impressions",
]
MARKER: Final = "recpo.json"
#: The JSON document with the facts of every kind of directory; its SHA-256 identifies the directory.
DOCUMENTS: Final[Mapping[Kind, str]] = {
    "simulation": "truth/truth.json",
    "prepared": "manifest.json",
    "codes": "manifest.json",
    "factors": "manifest.json",
    "run": "run.json",
    "evaluation": "metrics.json",
    "variants": "metrics.json",
    "bundle": "manifest.json",
    "comparison": "compare.json",
    "decision": "decision.json",
    "loop": "loop.json",
}


def kind_of(directory: Path | str) -> Kind | None:
    """The kind of a directory, from its ``recpo.json``; None if there is no such file, or recpo did not write it."""
    try:
        kind = json.loads((Path(directory) / MARKER).read_bytes())["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind if kind in get_args(Kind) else None


def described(kind: Kind) -> str:
    """A kind as a message names it: "a run"."""
    names = {
        "prepared": "prepared data",
        "codes": "semantic codes",
        "factors": "factors",
        "impressions": "a log of impressions",
        "variants": "an evaluation of variants",
    }
    return names.get(kind, f"{'an' if kind == 'evaluation' else 'a'} {kind}")


def marker(kind: Kind) -> str:
    """Content of ``recpo.json``."""
    return json.dumps({"kind": kind}) + "\n"
