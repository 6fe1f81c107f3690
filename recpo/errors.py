"""Errors whose message is written for the user."""

from __future__ import annotations

MAX_SEED = 2**32 - 1
"""The largest seed that NumPy, scikit-learn and torch all take."""


class RecpoError(Exception):
    """An error in the user's input: a file, a column, an option, or a combination of them.

    The message is complete: it names the file, column, key or count, says what was expected, and how to fix it. The
    command line prints it without a traceback and exits with status 1.

    Attributes:
        code: what kind of error it is, for programs and tests, such as ``out_of_range``; stays the same when the
            message is worded differently.
        field: the option, column, file or key that it is about; None = it is about several.
    """

    def __init__(self, message: str, *, code: str = "invalid", field: str | None = None) -> None:
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
    if not 0 <= seed <= MAX_SEED:
        raise RecpoError(f"{name} must be between 0 and {MAX_SEED}, got {seed}")
