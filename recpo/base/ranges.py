"""Types whose values lie in a range. A field of a dataclass of options has such a type instead of a check by hand.

The command line and YAML files check them while they parse; ``validate_ranges`` checks them for callers in Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from recpo.base.errors import RecpoError

if TYPE_CHECKING:
    PositiveInt = int
    NonNegativeInt = int
    Seed = int
    PositiveFloat = float
    NonNegativeFloat = float
    ClosedUnitInterval = float
    OpenUnitInterval = float
else:
    from jsonargparse import typing as parsed

    PositiveInt, NonNegativeInt = parsed.PositiveInt, parsed.NonNegativeInt
    PositiveFloat, NonNegativeFloat = parsed.PositiveFloat, parsed.NonNegativeFloat
    ClosedUnitInterval, OpenUnitInterval = parsed.ClosedUnitInterval, parsed.OpenUnitInterval
    Seed = parsed.restricted_number_type(
        "Seed", int, [(">=", 0), ("<", 2**32)], docstring="seed that NumPy and torch accept"
    )


def validate_ranges(options: Any, prefix: str = "") -> None:
    """Checks the fields of a dataclass whose type is one of this module, an optional one, or a sequence of them.

    Numbers that the parser made one of these types become plain ones.

    Args:
        options: an instance of a dataclass.
        prefix: the name of the group that it is, such as ``rollout.``.

    Raises:
        RecpoError: a value lies outside its range (code ``out_of_range``; ``field`` names the option).
    """
    kind_of_options: Any = type(options)
    hints = _hints(kind_of_options)
    for field in fields(options):
        for kind in _ranges(hints.get(field.name)):
            value = getattr(options, field.name)
            for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
                if one is not None and not isinstance(one, Mapping):
                    _validate(one, kind, prefix + field.name)
            if (plain := _plain(value)) is not value:  # of the parser: checkpoints and YAML know int and float alone
                object.__setattr__(options, field.name, plain)


def _plain(value: Any) -> Any:
    """A number of a range, or a sequence of them, as int or float; the value itself if there is none."""
    if type(value) in (list, tuple) and any(hasattr(one, "_restrictions") for one in value):
        return type(value)(map(_plain, value))
    return value._type(value) if hasattr(value, "_restrictions") else value


def _validate(value: Any, kind: Any, name: str) -> None:
    try:
        if isinstance(value, str) or not math.isfinite(kind(value)):
            raise ValueError
    except (ValueError, TypeError, OverflowError) as error:
        whole = "a whole number" if kind._type is int else "a number"
        limits = re.sub(r"v([<>=]+)", r"\1 ", kind._expression)
        message = f"{name} is {value!r}, expected {whole} {limits}"
        raise RecpoError(message, code="out_of_range", field=name) from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of the fields, except of a class with annotations that only a type checker can resolve."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        with suppress(NameError):
            found |= get_type_hints(base)
    return found


def _ranges(hint: Any) -> list[Any]:
    """The range of a type, of an optional type, or of the entries of a sequence: empty if there is none."""
    if get_origin(hint) in (Union, UnionType, tuple, list, Sequence):
        return [kind for part in get_args(hint) for kind in _ranges(part)]
    return [hint] if hasattr(hint, "_restrictions") else []
