"""Reads JSON and YAML files, with one error message for damaged ones."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from recpo.artifacts.os_errors import describe_os_error
from recpo.base.errors import RecpoError

_MOST_VALUES = 1_000_000


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
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecpoError(f"{describe_os_error(error, file)}; {remedy}") from error
    except (ValueError, RecursionError, AttributeError, yaml.YAMLError) as error:  # PyYAML passes on all of these
        raise RecpoError(f"{file} is damaged: not YAML ({' '.join(str(error).split())}); {remedy}") from error
    if not isinstance(content, dict):
        raise RecpoError(f"{file} is damaged: expected a mapping; {remedy}")
    return content


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Parses YAML without building objects from its tags.

    Args:
        text: YAML.
        loader: ``yaml.SafeLoader`` or ``yaml.CSafeLoader``.

    Raises:
        ValueError, RecursionError, AttributeError, yaml.YAMLError: not YAML; an anchor that contains itself; or anchors
            that multiply into more than a million values ("billion laughs").
    """
    content = yaml.load(text, loader)
    _count(content, {})
    return content


def _count(value: Any, counted: dict[int, int]) -> int:
    """Number of values in ``value``, where an anchor counts as often as it is used."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counted:
        counted[id(value)] = _MOST_VALUES + 1  # stays if it contains itself
        counted[id(value)] = 1 + sum(
            _count(one, counted) for one in (value.values() if isinstance(value, dict) else value)
        )
    if counted[id(value)] > _MOST_VALUES:
        raise ValueError(f"its anchors contain themselves, or multiply into more than {_MOST_VALUES:,} values")
    return counted[id(value)]


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
