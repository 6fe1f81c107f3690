"""Reads JSON and YAML files, with one error message for damaged ones."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from recpo.artifacts.os_errors import describe_os_error
from recpo.errors import RecpoError


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        file: the file.
        remedy: what to do where it is damaged; ends the message.

    Raises:
        RecpoError: the file cannot be read, is not JSON, or is not an object.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, file)}; {remedy}") from error
    return parse_json(content, file, remedy)


def read_yaml(file: Path, remedy: str) -> dict[str, Any]:
    """Reads a YAML mapping without building objects from its tags.

    Args:
        file: the file.
        remedy: what to do where it is damaged; ends the message.

    Raises:
        RecpoError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        json.dumps(content, default=str, skipkeys=True)  # raises if an anchor contains itself
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, file)}; {remedy}") from error
    except (ValueError, RecursionError, AttributeError, yaml.YAMLError) as error:  # PyYAML passes on all of these
        raise RecpoError(f"{file} is damaged: not YAML ({' '.join(str(error).split())}); {remedy}") from error
    if not isinstance(content, dict):
        raise RecpoError(f"{file} is damaged: expected a mapping; {remedy}")
    return content


def parse_json(content: bytes, shown: object, remedy: str) -> dict[str, Any]:
    """Like ``read_json``, for bytes that are already read; ``shown`` is the name for messages."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecpoError(f"{shown} is damaged: not JSON ({error}); {remedy}") from error
    if not isinstance(value, dict):
        raise RecpoError(f"{shown} is damaged: expected a JSON object, not {type(value).__name__}; {remedy}")
    return value


def validate_configuration_files(arguments: Sequence[str]) -> None:
    """Raises ``RecpoError`` if a ``--config`` file is not YAML. The option parser would end in a traceback."""
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        name = value if equals else next(iter(arguments[place + 1 : place + 2]), "")
        if flag == "--config" and os.path.isfile(name):
            read_yaml(Path(name), "expected a YAML mapping of options")
