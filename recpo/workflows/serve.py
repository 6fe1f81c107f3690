"""The verb ``serve``: answers HTTP requests from a bundle and logs impressions and outcomes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recpo.errors import RecpoError
from recpo.server.options import ServerOptions

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(bundle: Path | str, **options: Any) -> None:
    """Answers HTTP requests until the process receives SIGTERM or Ctrl-C; docs/server.md describes the interface.

    ``recpo.serve("demo/bundle", log="impressions", port=8000)``; the files in ``impressions`` are a log for
    ``recpo.prepare``.

    Args:
        bundle: directory written by ``recpo export``, or a directory of such directories, whose names are versions.
        **options: those of ``recpo.server.options.ServerOptions``: host, port, workers, log, api_keys, ...

    Raises:
        RecpoError: the server's packages are missing, an option is out of range, the bundle cannot serve, the log
            cannot be written, or the address is taken.
    """
    chosen = ServerOptions(**options)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise RecpoError(f"serve needs {', '.join(missing)}: pip install recpo[serve]")
    from recpo.server.processes import run_server

    run_server(Path(bundle), chosen)
