"""Errors whose message is written for the user, and types whose values lie in a range.

A field of a dataclass of options has such a type instead of a check by hand. The command line and YAML files check them
while they parse; ``validate_ranges`` checks them for callers in Python.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from pathlib import PurePath
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

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

Code = Literal[
    "out_of_range",  # a number or a size outside its range
    "unknown_name",  # a name that is not one of those allowed: an option's value, a column, a metric, a contender
    "wrong_type",  # a value or a column of another type
    "wrong_shape",  # an array of another shape
    "wrong_class",  # a class of another base
    "bad_value",  # values of data that cannot be: negative, not finite, unsorted, not parsable
    "missing_value",  # nulls where every row needs a value
    "missing_option",  # an option that the others ask for
    "conflicting_options",  # options that exclude or contradict each other
    "unused_option",  # an option that would have no effect
    "missing_file",  # no such file or directory
    "wrong_file",  # a file or directory of another kind or format
    "missing_column",  # a column or a key that a file has to have
    "duplicate",  # ids, names or columns that occur twice
    "empty",  # nothing is left: no event, no user, no item
    "mismatch",  # inputs that do not belong together
    "old_format",  # written by another version
    "damaged",  # a checksum, a length or a structure that does not hold
    "unfinished",  # a result that is not complete yet
    "exists",  # an output that would be replaced
    "in_use",  # another process works there
    "untrusted",  # a name or a path that a file may not use
    "unsupported",  # right, but not possible here
    "not_local",  # a location that has to be on this machine
    "not_installed",  # an optional package that is missing
    "resources",  # memory, disk or a device that does not suffice
    "diverged",  # numbers that are no longer finite
    "failed",  # another program or service that failed
    "invalid",  # everything else
]
"""What kind of error it is: stays the same when the message is worded differently."""

MAX_SEED = 2**32 - 1
"""The largest seed that NumPy, scikit-learn and torch all take."""


class RecpoError(Exception):
    """An error in the user's input: a file, a column, an option, or a combination of them.

    The message is complete: it names the file, column, key or count, says what was expected, and how to fix it. The
    command line prints it without a traceback and exits with status 1.

    Attributes:
        code: what kind of error it is, for programs and tests.
        field: the option, column, file or key that it is about; None = it is about several.
    """

    def __init__(self, message: str, *, code: Code = "invalid", field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class GateClosedError(RecpoError):
    """``recpo compare`` finished, and its gate is closed: the new bundle should not replace the old one.

    The command line prints the reason and exits with status 3, so that a script can distinguish it from an error.
    """


class Interrupted(KeyboardInterrupt):
    """Training was stopped by Ctrl-C or a signal. The message says what was saved and how to resume.

    Attributes:
        status: exit status of a command: 130 (SIGINT) or 143 (SIGTERM).
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def validate_range(fits: bool, name: str, rule: str, value: object) -> None:
    """Raises ``RecpoError`` unless the option ``name`` fits its range; ``rule`` says it, such as "must be above 0"."""
    if not fits:
        raise RecpoError(f"{name} {rule}, got {value}", code="out_of_range", field=name)


def first_line(error: object) -> str:
    """The first line of another program's message, at most 300 characters; the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextmanager
def reading(what: object, *errors: type[Exception], remedy: str, field: str | None = None) -> Iterator[None]:
    """Turns errors about a file, of a library that reads it or of its content, into one that says what to do.

    Args:
        what: the file, or what is read.
        errors: that mean that it is damaged.
        remedy: what to do about it; the end of the message.
        field: what the error is about; None = the name of the file.

    Raises:
        RecpoError: one of ``errors`` was raised in the block (code ``damaged``).
    """
    try:
        yield
    except errors as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        name = PurePath(str(what)).name if field is None else field
        raise RecpoError(f"{what} cannot be read ({reason}): {remedy}", code="damaged", field=name) from error


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


def range_error(message: str) -> RecpoError | None:
    """The parser's message about a number outside its range, in a user's words; None = it is about something else."""
    pattern = r"Not of type \w+:(?: (\S+))? does not conform to restriction v?(.*?)(?=\. Got value|$)"
    refused = re.search(pattern, message, re.MULTILINE)
    if refused is None:
        return None
    before = message[: refused.start()]
    # the keys stand one inside the other, each indented further: off_policy, then clip
    within = len(before.rpartition("\n")[2])
    keys: list[tuple[int, str]] = []
    for indent, key in re.findall(r'^( *)(?:- |Type .*: )?Parser key "([^"]+)"', before, re.MULTILINE):
        keys = [(depth, name) for depth, name in keys if depth < len(indent)] + [(len(indent), key)]
    name = ".".join(key for depth, key in keys if depth <= within)
    values = re.findall(r"Given value: (?:NestedArg\(key='[^']*', val=)?'?([^\s',)]+)", message)
    given = refused[1] or (values or ["another"])[-1]
    text = f"{name}: expected a number {refused[2].replace('and v', 'and ')}, got {given}"
    return RecpoError(text, code="out_of_range", field=name)


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
