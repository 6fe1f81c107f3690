"""``recpo plan``: computes the memory, communication and table placement of training before it runs."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command, configuration
from recpo.sharding.blocks import Exchange
from recpo.sharding.plan import Needs
from recpo.verbs.plan import Plan


def show(verb: Plan, needs: Needs) -> VerbResult:
    """Prints the needs; training comes next.

    Raises:
        RecpoError: the run does not fit.
    """
    _print(needs.document)
    if needs.fault is not None:
        raise needs.fault
    data = ("--data.prepared", "prepared", "--out", "runs/sharded")
    following = command("train", "--config", configuration("sharded_pretrain.yaml"), *data)
    return VerbResult(() if verb.out is None else (str(verb.out),), following, needs.document)


def _print(document: dict[str, Any]) -> None:
    terminal, ranks = console(), document["workload"]["ranks"]
    for rows in (_table_rows, _memory_rows, _exchange_rows, _operation_rows):
        title, headings, lines = rows(document)
        print(f"\n{title}")
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=any(headings))
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        terminal.print(table)
    seconds = document["exchange_seconds"]
    print()
    if ranks > 1:
        print(f"exchange: {seconds * 1000:,.2f} ms per step at the bandwidths given, if nothing hides it")
    if document["steps_per_epoch"] is not None:
        print(f"steps per epoch: {document['steps_per_epoch']:,}")


_Rows = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _table_rows(document: dict[str, Any]) -> _Rows:
    lines: list[tuple[str, ...]] = []
    for name, table in document["tables"].items():
        if table["copy_of"] is None:
            blocks = [block for block in table["blocks"] if block["num_rows"]]
            first, last = blocks[0], blocks[-1]["rank"]
            on = f"{first['rank']}" if len(blocks) == 1 else f"{first['rank']}-{last}"
            held = f"{first['num_rows']:,} x {first['num_columns']}"
            lines.append((name, f"{table['rows']:,} x {table['dim']}", table["sharding"], on, held))
    copies = document["workload"]["copies"]
    title = "tables" + (f"; their {copies} frozen copies are placed the same way" if copies else "")
    return title, ("", "size", "sharding", "on ranks", "block"), lines


def _memory_rows(document: dict[str, Any]) -> _Rows:
    lines = [(name, _bytes(size)) for name, size in document["memory_bytes"].items() if size]
    return "memory of the fullest rank", ("", ""), [*lines, ("sum", _bytes(document["memory_total"]))]


def _exchange_rows(document: dict[str, Any]) -> _Rows:
    parts = {name: Exchange(**part) for name, part in document["exchange_bytes"].items()}
    lines = [(name, *map(_bytes, part), _bytes(part.total)) for name, part in parts.items()]
    total = Exchange(*(sum(kind) for kind in zip(*parts.values(), strict=True)))
    headings = ("", "ids", "forward", "backward", "sum")
    return "sent by a rank per step", headings, [*lines, ("sum", *map(_bytes, total), _bytes(total.total))]


def _operation_rows(document: dict[str, Any]) -> _Rows:
    lines = [(name, f"{count:.2e}") for name, count in document["operations"].items()]
    total = ("sum", f"{document['operations_total']:.2e}")
    return "floating-point operations of a rank per step", ("", ""), [*lines, total]


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"
