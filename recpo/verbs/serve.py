"""The verb ``serve``: answers HTTP requests from a bundle and logs impressions and outcomes."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from recpo.base.errors import Code, RecpoError
from recpo.server.options import ServerOptions
from recpo.verbs.verb import Verb, function_of

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class Serve(ServerOptions, Verb[None]):
    """Answers HTTP requests from a bundle until it receives SIGTERM or Ctrl-C; docs/server.md describes the interface.

    Needs ``pip install recpo[serve]``, but neither torch nor lightning. ``recpo.serve("fit/bundle", log="impressions",
    port=8000)``; the files in ``impressions`` are a log for ``recpo.prepare``.

    Raises:
        RecpoError: the server's packages are missing, an option is out of range, the bundle cannot serve, the log
            cannot be written, or the address is taken.
    """

    first_day: ClassVar = ("bundle", "host", "port", "log", "workers", "exploration", "variant", "api_keys")
    output_option: ClassVar = "log"

    bundle: Path | str | None = None
    """directory written by ``recpo export``, or a directory of such directories, whose names are versions; null = the
    bundles of ``variant``"""

    def execute(self) -> None:
        """Serves until the process is told to stop."""
        if missing := [name for name in _NEEDED if find_spec(name) is None]:
            message = f"serve needs {', '.join(missing)}: pip install recpo[serve]"
            raise RecpoError(message, code="not_installed", field=missing[0])
        if (self.bundle is None) == (not self.variant):
            message = "serve: give either a bundle, or at least two variants (--variant NAME=BUNDLE:SHARE)"
            code: Code = "missing_option" if self.bundle is None else "conflicting_options"
            raise RecpoError(message, code=code, field="bundle")
        from recpo.server.processes import run_server

        run_server(None if self.bundle is None else Path(self.bundle), self.part(ServerOptions))


serve = function_of(Serve)
