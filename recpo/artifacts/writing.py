"""Writes documents completely or not at all."""

from __future__ import annotations

import json
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from recpo.artifacts.outputs import output_file

#: YAML of every option of the running verb, including defaults; None if a verb is called from Python
RESOLVED: ContextVar[str | None] = ContextVar("resolved_configuration", default=None)


def write_json(target: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON with sorted keys, completely or not at all. Rejects nan and infinities."""
    content = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with output_file(target) as working:
        working.write_text(content, encoding="utf-8")


def write_resolved(file: Path) -> None:
    """Writes the running verb's options to ``file``; writes nothing if the verb was called from Python."""
    resolved = RESOLVED.get()
    if resolved is not None:
        with output_file(file) as partial:
            partial.write_text(resolved, encoding="utf-8")
