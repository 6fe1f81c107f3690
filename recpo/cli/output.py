"""Terminal output of the verbs. Names of items, files and runs are text, never markup; ``--quiet`` prints nothing."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_WIDEST = 10_000  # characters of a line that does not go to a terminal


def console() -> Console:
    """The terminal, or the file that the output goes to.

    Ids and paths such as ``[/x]`` or ``:smile:`` are printed as they are: markup, emoji codes and highlighting are off,
    also in the cells, titles and captions of tables. Numbers in tables are never cut: off a terminal, a table is as
    wide as it needs; on a narrow terminal, headings and names are folded first, and then its lines are longer.
    """
    from rich.console import Console  # imported here so that the help of other verbs does not wait for it
    from rich.table import Table

    class WholeNumbers(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            width = self.width
            for table in (one for one in objects if isinstance(one, Table)):
                self.width = max(self.width, _least_width(self, table))
            super().print(*objects, **options)
            self.width = width

    terminal = WholeNumbers(markup=False, emoji=False, highlight=False)
    if not terminal.is_terminal:
        terminal.width = _WIDEST
    return terminal


def _least_width(terminal: Console, table: Table) -> int:
    """Lets names and headings fold, but not the numbers, which are justified right, and returns the width for that."""
    wide = terminal.options.update(width=_WIDEST)
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
        if column.justify == "right":
            cells = [wide_cell.maximum for wide_cell in (terminal.measure(cell, options=wide) for cell in column.cells)]
            column.min_width = max([*cells, terminal.measure(column.header, options=wide).minimum])
    return terminal.measure(table, options=wide).minimum


@dataclass(frozen=True)
class TerminalOptions:
    """Options of every verb, in addition to its own.

    Attributes:
        quiet: print nothing but errors.
        as_json: print the result as one JSON document on stdout, and nothing else there.
        track: where runs are tracked (``recpo.tracked``); None = where ``RECPO_TRACK`` says, or nowhere.
    """

    quiet: bool = False
    as_json: bool = False
    track: str | None = None

    HELP = (
        "Every verb also takes --quiet (nothing but errors), --json (one JSON document with the result on stdout) and "
        "--track\nKIND:WHERE (mlflow:ADDRESS, wandb:PROJECT or tensorboard:DIRECTORY)."
    )


def terminal_options(options: Sequence[str]) -> tuple[TerminalOptions, list[str]]:
    """Separates ``--quiet``, ``--json`` and ``--track WHERE`` from the other arguments of a command line."""
    kept, track, words = list[str](), None, iter(options)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--track":
            track = value if equals else next(words, "")
        elif word not in ("--quiet", "--json"):
            kept.append(word)
    return TerminalOptions("--quiet" in options, "--json" in options, track), kept


class _Nowhere(io.TextIOBase):
    """A stream that drops its input. It is not a terminal, so progress bars are hidden. It is never closed."""

    def write(self, text: str) -> int:
        """Drops the text."""
        return len(text)

    def writable(self) -> bool:
        """Always true."""
        return True


_NOWHERE = _Nowhere()


@contextmanager
def printing(options: TerminalOptions) -> Iterator[None]:
    """Redirects prints inside the block: a quiet verb prints nothing, a verb with JSON prints nothing to stdout."""
    with ExitStack() as streams:
        if options.quiet or options.as_json:
            streams.enter_context(redirect_stdout(_NOWHERE))
        if options.quiet:
            streams.enter_context(redirect_stderr(_NOWHERE))
        yield
