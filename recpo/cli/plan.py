"""``recpo plan``: counts the memory of training and shards its tables before it runs."""

from __future__ import annotations

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command, configuration
from recpo.sharding.memory import NOT_COUNTED, Needs
from recpo.verbs.plan import Plan


def show(verb: Plan, needs: Needs) -> VerbResult:
    """Prints the needs; training comes next.

    Raises:
        RecpoError: the run does not fit.
    """
    copies = needs.workload.copies
    title = "tables" + (f"; their {copies} frozen copies are placed the same way" if copies else "")
    _print(title, ("", "size", "sharding", "on ranks", "block"), _table_rows(needs))
    lines = [(name, _bytes(size)) for name, size in needs.memory.items() if size]
    _print("memory of the fullest rank", ("", ""), [*lines, ("sum", _bytes(sum(needs.memory.values())))])
    print()
    if needs.milliseconds is not None and needs.workload.ranks > 1:
        print(f"looked-up tables: {needs.milliseconds:,.2f} ms per step, estimated by torchrec's planner")
    print("not counted: " + "; ".join(NOT_COUNTED[:-1]))
    if needs.fault is not None:
        raise needs.fault
    data = ("--data.prepared", "prepared", "--out", "runs/sharded")
    following = command("train", "--config", configuration("sharded_pretrain.yaml"), *data)
    return VerbResult(() if verb.out is None else (str(verb.out),), following, needs.document)


def _print(title: str, headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    print(f"\n{title}")
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=any(headings))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console().print(table)


def _table_rows(needs: Needs) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for spec in needs.workload.tables():
        if spec.copy_of is None:
            placement = needs.placements[spec.name]
            blocks = [block for block in placement.blocks if block.num_rows]
            first, last = blocks[0], blocks[-1].rank
            on = f"{first.rank}" if len(blocks) == 1 else f"{first.rank}-{last}"
            held = f"{first.num_rows:,} x {first.num_columns}"
            lines.append((spec.name, f"{spec.num_rows:,} x {spec.dim}", placement.sharding, on, held))
    return lines


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"
