"""``recpo.json``: the kind of a directory that recpo wrote, and the checksums of its files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, get_args

from recpo.artifacts.checksums import unseal, verify
from recpo.artifacts.documents import read_json
from recpo.base.errors import RecpoError

Kind = Literal[
    "simulation",
    "prepared",
    "codes",
    "run",
    "checkpoint",
    "evaluation",
    "bundle",
    "demo",
    "factors",
    "comparison",
    "loop",
    "impressions",
]
MARKER: Final = "recpo.json"


def kind_of(directory: Path | str) -> Kind | None:
    """The kind of a directory, from its ``recpo.json``; None if there is no such file, or recpo did not write it."""
    try:
        kind = json.loads((Path(directory) / MARKER).read_bytes())["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kind if kind in get_args(Kind) else None


def other_kind(directory: Path | str, expected: Kind) -> str | None:
    """What a directory is instead, for messages: " but a run"; None if it is as expected, or recpo did not write it."""
    kind = kind_of(directory)
    names = {
        "prepared": "prepared data",
        "codes": "semantic codes",
        "factors": "factors",
        "impressions": "a log of impressions",
    }
    article = "an" if kind == "evaluation" else "a"
    return None if kind in (None, expected) else f" but {names.get(kind, f'{article} {kind}')}"


def marker(kind: Kind) -> str:
    """Content of ``recpo.json``."""
    return json.dumps({"kind": kind}) + "\n"


def verify_sealed(directory: Path, names: Iterable[str], remedy: str) -> None:
    """Compares files of a directory with the checksums in its ``recpo.json``.

    A directory without that file is part of another output, which has its own checksums.

    Args:
        directory: written by ``output_directory`` with ``sealed``.
        names: the files. A file without a checksum must not exist.
        remedy: what to do if they differ; the end of the message.

    Raises:
        RecpoError: ``recpo.json`` has no checksums or was changed, or a file is missing or differs.
    """
    file = directory / MARKER
    if not file.exists():
        return
    content = read_json(file, remedy)
    if not isinstance(content.get("files"), dict):
        raise RecpoError(f"{file} has no checksums: it was written by an older recpo, or is damaged; {remedy}")
    files = unseal(content, file, remedy)["files"]
    wanted = [name for name in names if name in files or (directory / name).exists()]
    verify(directory, {name: str(files.get(name)) for name in wanted}, remedy)
