"""The resolved configuration of the running verb, so that every result can say how it was made."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

from recpo.artifacts import output_file

#: YAML of every option of the running verb, defaults included; None when a verb is called from Python.
RESOLVED: ContextVar[str | None] = ContextVar("resolved_configuration", default=None)


def save_resolved(result: Path) -> None:
    """Writes the running verb's options beside the file ``result``: ``metrics.json`` gets ``metrics.resolved.yaml``."""
    write_resolved(result.with_suffix(".resolved.yaml"))


def write_resolved(file: Path) -> None:
    """Writes the running verb's options to ``file``; nothing where a verb was called from Python."""
    resolved = RESOLVED.get()
    if resolved is not None:
        with output_file(file) as partial:
            partial.write_text(resolved, encoding="utf-8")
