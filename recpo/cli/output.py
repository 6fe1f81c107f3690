"""How the verbs print: what users called their items, files and runs is text, never markup."""

from __future__ import annotations

from rich.console import Console


def console() -> Console:
    """The terminal, or the file that the output goes to.

    Ids and paths such as ``[/x]`` or ``:smile:`` are printed as they are: markup, emoji codes and highlighting are off,
    also in the cells, titles and captions of tables.
    """
    return Console(markup=False, emoji=False, highlight=False)
