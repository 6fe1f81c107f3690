"""``recpo serve``: a bundle behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recpo.workflows.serve import serve as _serve


def serve(bundle: Path, **options: Any) -> None:
    """Answers requests with a bundle until it is told to stop (SIGTERM, Ctrl-C); docs/server.md has the interface.

    Needs neither torch nor lightning, and ``pip install recpo[serve]``.

    Args:
        bundle: directory written by ``recpo export``, or a directory of such directories, whose names are versions.
        **options: those of ``recpo.server.options.ServerOptions``.
    """
    _serve(bundle, **options)
