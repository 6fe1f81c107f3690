"""The one error that a user is meant to read."""

from __future__ import annotations


class RecpoError(Exception):
    """A mistake in what the user handed over: a file, a column, an option, a combination of them.

    The message stands alone: it names the file, column, key or count, what was expected, and how to fix it. The
    command line prints it without a traceback and exits with status 1.
    """


class GateClosedError(RecpoError):
    """The gate of ``recpo compare`` is closed: the comparison was made, and the new bundle should not take over.

    The command line prints the reason and exits with status 3, so that a script can tell it from a mistake.
    """


class Interrupted(KeyboardInterrupt):
    """Training was told to stop, by Ctrl-C or a signal; the message says what was kept and how to go on.

    Attributes:
        status: exit status of a command: 130 (SIGINT) or 143 (SIGTERM).
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
