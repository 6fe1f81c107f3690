"""Writes documents completely or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recpo.artifacts.outputs import output_file


def write_json(target: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON with sorted keys, completely or not at all. Rejects nan and infinities."""
    content = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with output_file(target) as working:
        working.write_text(content, encoding="utf-8")
