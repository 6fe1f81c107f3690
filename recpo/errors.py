"""The one error that a user is meant to read."""

from __future__ import annotations


class RecpoError(Exception):
    """A mistake in what the user handed over: a file, a column, an option, a combination of them.

    The message stands alone: it names the file, column, key or count, what was expected, and how to fix it. The
    command line prints it without a traceback and exits with status 1.
    """
