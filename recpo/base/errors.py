"""Errors whose message is written for the user."""

from __future__ import annotations

from typing import Literal

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


def validate_seed(seed: int, name: str = "seed") -> None:
    """Raises ``RecpoError`` if the option ``name`` is not a seed from 0 to ``MAX_SEED``."""
    validate_range(0 <= seed <= MAX_SEED, name, f"must be between 0 and {MAX_SEED}", seed)


def validate_range(fits: bool, name: str, rule: str, value: object) -> None:
    """Raises ``RecpoError`` unless the option ``name`` fits its range; ``rule`` says it, such as "must be above 0"."""
    if not fits:
        raise RecpoError(f"{name} {rule}, got {value}", code="out_of_range", field=name)


def first_line(error: object) -> str:
    """The first line of another program's message, at most 300 characters; the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
