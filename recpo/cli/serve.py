"""``recpo serve``: answers HTTP requests from a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recpo.workflows.serve import serve as _serve


def serve(bundle: Path, **options: Any) -> None:
    """Answers HTTP requests from a bundle until it receives SIGTERM or Ctrl-C; docs/server.md describes the interface.

    Needs ``pip install recpo[serve]``, but neither torch nor lightning.

    Args:
        bundle: directory written by ``recpo export``, or a directory of such directories, whose names are versions.
        **options: those of ``recpo.server.options.ServerOptions``.
    """
    _serve(bundle, **options)
