"""Terminal output of the verbs, and their results: the files that one wrote, its numbers, and the usual next command.

Names of items, files and runs are text, never markup; ``--quiet`` prints nothing. ``recpo.cli.main`` prints what the
functions ``show_VERB`` return, in words or as JSON.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from recpo.verbs.verb import configurations

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from recpo.evaluation.html_report import parts


_WIDEST = 10_000  # characters of a line that does not go to a terminal
_BOLD = ("best", "survives")  # styles of cells, as in the style sheet of the reports


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
    if (needed := terminal.measure(table, options=wide).maximum) <= terminal.width:
        return needed
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
        if column.justify == "right":
            cells = [wide_cell.maximum for wide_cell in (terminal.measure(cell, options=wide) for cell in column.cells)]
            column.width = max([*cells, terminal.measure(column.header, options=wide).minimum])
    return terminal.measure(table, options=wide).minimum


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, names: int = 1, caption: str = ""
) -> Table:
    """A table whose first ``names`` columns hold names, on the left and folded where needed, and the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # narrow enough for a terminal of 80 columns
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left", **style)
    for place, heading in enumerate(headings):
        made.add_column(heading, justify="left" if place < names else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def show_tables(title: str, *reported: parts.Table) -> None:
    """Prints tables of a report, each above its caption; in a narrow terminal, notes stand below the numbers."""
    terminal = console()
    for one in reported:
        made = _as_printed(title, one, " ")
        if terminal.measure(made, options=terminal.options.update(width=_WIDEST)).maximum > terminal.width:
            made = _as_printed(title, one, "\n")
        say(made, one.caption)


def _as_printed(title: str, reported: parts.Table, before_notes: str) -> Table:
    from rich.text import Text

    rows: list[list[str | Text]] = []
    for row in reported.rows:
        cells = [(before_notes.join(filter(None, (cell.text, cell.note))), cell.style in _BOLD) for cell in row.cells]
        rows.append([row.name, *(Text(text, "bold" if is_bold else "") for text, is_bold in cells)])
    return table(title, [name.replace("_", "\n") for name in reported.head], rows)


def say(*lines: str | Table, style: str = "") -> None:
    """Prints lines of text, which a terminal wraps, and tables."""
    terminal = console()
    for one in lines:
        terminal.print(one, style=style, soft_wrap=isinstance(one, str))


def warn(warnings: Iterable[str]) -> None:
    """Prints warnings."""
    say(*(f"warning: {one}" for one in warnings), style="yellow")


def decimals(value: float | None, digits: int = 4, *, sign: str = "") -> str:
    """A number with ``digits`` decimals; - if it is not known."""
    return "-" if value is None or math.isnan(value) else f"{value:{sign}.{digits}f}"


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


@cache
def _nowhere() -> TextIO:
    """A stream that drops its input; it is never closed, because loggers may keep it."""
    return open(os.devnull, "w", encoding="utf-8")


@contextmanager
def printing(options: TerminalOptions) -> Iterator[None]:
    """Redirects prints inside the block: a quiet verb prints nothing, a verb with JSON prints nothing to stdout."""
    with ExitStack() as streams:
        if options.quiet or options.as_json:
            streams.enter_context(redirect_stdout(_nowhere()))
        if options.quiet:
            streams.enter_context(redirect_stderr(_nowhere()))
        yield


@dataclass(frozen=True)
class VerbResult:
    """The end of a verb.

    Attributes:
        wrote: files and directories; None = it was not asked for.
        following: the usual next command; None = there is none.
        result: the main numbers, for machines.
    """

    wrote: Sequence[object] = ()
    following: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The last lines on a terminal."""
        wrote = [f"wrote {', '.join(self._wrote)}"] if self._wrote else []
        return wrote + ([f"next: {self.following}"] if self.following is not None else [])

    def document(self, verb: str) -> str:
        """One JSON document with the same content; nan and infinity are null."""
        content = {"verb": verb, "status": 0, "wrote": self._wrote, "next": self.following, **self.result}
        return json.dumps(_plain(content), ensure_ascii=False, allow_nan=False)

    @property
    def _wrote(self) -> list[str]:
        return [str(one) for one in self.wrote if one is not None]


def command(verb: str, *words: object) -> str:
    """A command line of recpo."""
    return shlex.join(["recpo", verb, *map(str, words)])


def configuration(name: str, here: Path = Path()) -> str:
    """Path of an objective's configuration: the one that ``recpo init`` wrote for the log, or recpo's own."""
    return name if (here / name).is_file() else str(configurations(here) / name)


def evaluation_of(run: object, prepared: object) -> str:
    """The command that evaluates a run."""
    return command("evaluate", "--prepared", prepared, "--contenders", run, "--out", "runs/evaluation")


def _plain(value: Any) -> Any:
    """A value for JSON: paths as text, tuples as lists, nan and infinity as null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else _number(value)


def _number(value: Any) -> Any:
    """NumPy scalars become numbers; everything else becomes text."""
    return _plain(value.item()) if hasattr(value, "item") and callable(value.item) else str(value)
