"""``recpo demo``: every step on a simulated log, printed as commands."""

from __future__ import annotations

import shlex
import time
from typing import Any

from rich.table import Table

from recpo.cli.main import run
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command
from recpo.evaluation.estimates import Estimate
from recpo.verbs.demo import METRICS_SHOWN, Demo, DemoSummary


def watch(verb: Demo) -> dict[str, Any]:
    """Prints every step as a command before it runs."""
    return {"step": _step}


def show(verb: Demo, summary: DemoSummary) -> VerbResult:
    """Prints the table; next comes the user's own log."""
    console().print(_table(summary.rows, summary.seeds))
    print(f"everything that the demo wrote is in {summary.out}")
    return VerbResult((str(summary.out),), command("init", "YOUR_LOG"), {"summary": summary.rows})


def _step(verb: str, words: list[str]) -> None:
    started = time.monotonic()
    print(f"\n$ recpo {verb} {shlex.join(words)}", flush=True)
    run(verb, words)
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


def _table(summary: dict[str, Any], seeds: int) -> Table:
    caption = f"mean ± half of the 95 % interval, over {seeds} seeds (baselines, oracle: over users)"
    table = Table(title="test period", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("policy")
    for heading in METRICS_SHOWN.values():
        table.add_column(heading, justify="right")
    for row, values in summary.items():
        cells = [Estimate(**values[name]) for name in METRICS_SHOWN]
        table.add_row(row, *map(_cell, cells))
    return table


def _cell(value: Estimate) -> str:
    """With few users, means or intervals may be undefined; they are null in the evaluation."""
    if value.mean is None or value.half_width is None:
        return "-" if value.mean is None else f"{value.mean:.4f}"
    return f"{value.mean:.4f} ± {value.half_width:.4f}"
