"""Faults in a log, collected so that one error message lists all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from recpo.base.errors import RecpoError

_FILES: Final = 3  # names of files with the same fault that are shown
_EXAMPLES: Final = 3


@dataclass(frozen=True)
class Example:
    """One offending row: its file, its number in that file (data rows, from 0), and the value."""

    file: str
    row: int
    value: Any


@dataclass(frozen=True)
class Fault:
    """One reason why a log cannot be prepared.

    Attributes:
        where: the file, or the log if a fault spans files.
        column: name of the column in the log; None if the fault concerns a whole file.
        problem: what was found.
        fix: how to fix it.
        count: number of offending rows; None if the fault does not concern rows.
        examples: the first offending rows.
    """

    where: str
    column: str | None
    problem: str
    fix: str
    count: int | None = None
    examples: Sequence[Example] = ()

    def __str__(self) -> str:
        place = self.where if self.column is None else f"{self.where}, column {self.column}"
        number = "" if self.count is None else f"{self.count:,} {'row' if self.count == 1 else 'rows'}: "
        return f"{place}: {number}{self.problem}{self._first_rows()}; {self.fix}"

    def _first_rows(self) -> str:
        if not self.examples:
            return ""
        several = len({example.file for example in self.examples}) > 1
        rows = (
            f"{example.file + ' ' if several else ''}row {example.row} ({_shown(example.value)})"
            for example in self.examples
        )
        return f" [first: {', '.join(rows)}]"


def validate_no_faults(faults: Sequence[Fault], warnings: Sequence[str] = ()) -> None:
    """Raises one error that lists all ``faults``; does nothing if there are none.

    Args:
        faults: what is wrong.
        warnings: about the same files; they may explain a fault.

    Raises:
        RecpoError: there is at least one fault.
    """
    if not faults:
        return
    faults = _merged(faults)
    lines = [f"  {number}. {fault}" for number, fault in enumerate(faults, start=1)]
    noun = "fault" if len(faults) == 1 else "faults"
    raise RecpoError(
        "\n".join(
            [
                f"the log cannot be prepared: {len(faults)} {noun} (rows count from 0), nothing written",
                *lines,
                *(f"  warning: {text}" for text in warnings),
            ]
        )
    )


def _merged(faults: Sequence[Fault]) -> list[Fault]:
    """The faults, with one for the same problem of the same column in several files."""
    alike: dict[tuple[str | None, str, str], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((fault.column, fault.problem, fault.fix), []).append(fault)
    return [found[0] if len(found) == 1 else _together(found) for found in alike.values()]


def _together(faults: Sequence[Fault]) -> Fault:
    files = list(dict.fromkeys(fault.where for fault in faults))
    more = f" and {len(files) - _FILES} more files" if len(files) > _FILES else ""
    count = None if faults[0].count is None else sum(fault.count or 0 for fault in faults)
    examples = [example for fault in faults for example in fault.examples][:_EXAMPLES]
    return replace(faults[0], where=", ".join(files[:_FILES]) + more, count=count, examples=examples)


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
