"""``recpo init``: inspects a log and writes configurations for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult
from recpo.log.feature_columns import behaviors_to_json
from recpo.log.inspection import Inspection
from recpo.log.schema import FlagColumn, name_of
from recpo.verbs.init import Init


def watch(verb: Init) -> dict[str, Any]:
    """Prints what was found before anything is asked."""
    return {"on_inspected": _print_found}


def show(verb: Init, done: Inspection) -> VerbResult:
    """Prints the files and the commands to run; the first of these is next."""
    terminal = console()
    for step, file in done.written.items():
        terminal.print(f"{file}: {_purpose(done, step)}", soft_wrap=True)
    terminal.print("\nwhat to run, in this order:\n")
    for command in done.commands:
        terminal.print(f"  {command}", soft_wrap=True)
    terminal.print()
    return VerbResult(tuple(map(str, done.written.values())), next(iter(done.commands), None), _result(done))


def _print_found(found: Inspection) -> None:
    """Prints columns with their evidence, counts, and what to check; text of the log is never read as markup."""
    terminal, counts = console(), found.counts
    about = "" if counts.is_whole else "about "
    preset = found.recognition.preset
    log = f"{about}{counts.events:,} events"
    if counts.users and counts.items:  # 0 = not counted, because no column was recognized
        log += f" of {counts.users:,} users and {counts.items:,} items"
    terminal.print(f"{', '.join(found.log)}: {log}{'' if preset == 'plain' else f'; preset {preset}'}", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("column", "is", "unit", "evidence"):
        table.add_column(heading, overflow="fold")
    for one in found.findings:
        role = f"{one.role}: {', '.join(one.texts)}" if one.texts else one.role
        table.add_row(one.column, role, one.unit or "", one.evidence)
    for name, column in found.recognition.behaviors.items():
        texts = f": {', '.join(column.values)}" if isinstance(column, FlagColumn) else ""
        table.add_row(name_of(column), f"behavior {name}{texts}", "", found.facts[name_of(column)].evidence)
    for column in found.recognition.unused:
        table.add_row(column, "(not read)", "", found.facts[column].evidence)
    terminal.print(table)
    for side, file in found.tables.items():
        terminal.print(f"{file}: a table with one row for each {side}", soft_wrap=True)
    for doubt in found.doubts:
        terminal.print(f"check: {doubt}", style="yellow", soft_wrap=True)


def _result(found: Inspection) -> dict[str, Any]:
    return {
        "preset": found.recognition.preset,
        "columns": found.columns.to_json(),
        "behaviors": behaviors_to_json(found.recognition.behaviors),
        "label": found.label.class_name,
        "counts": asdict(found.counts),
        "check": found.doubts,
        "commands": found.commands,
    }


def _purpose(found: Inspection, step: str) -> str:
    named = {"prepare": f"the log, with label {found.label.class_name}", "pretrain": "imitates the log"}
    return named.get(step) or found.objectives[step]
