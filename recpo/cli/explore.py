"""``recpo explore``: pages over prepared data and the lists of policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recpo.cli.verb_results import VerbResult
from recpo.verbs.explore import Explore


def watch(verb: Explore) -> dict[str, Any]:
    """Prints the address once the server listens."""
    return {"on_ready": lambda url: print(f"open {url}   (Ctrl-C ends it)", flush=True)}


def show(verb: Explore, written: Path | None) -> VerbResult:
    """The file, if one was asked for."""
    return VerbResult(() if written is None else (str(written),))
