"""Writes the resolved configuration of the running verb, so that every result records how it was made."""

from __future__ import annotations

from pathlib import Path

from recpo.artifacts import write_resolved


def save_resolved(result: Path) -> None:
    """Writes the running verb's options beside the file ``result``: ``metrics.json`` gets ``metrics.resolved.yaml``."""
    write_resolved(result.with_suffix(".resolved.yaml"))
