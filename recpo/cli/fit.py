"""``recpo fit``: from a log to the policy that should ship."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command
from recpo.verbs.demo import Demo
from recpo.verbs.fit import Decision, Fit, tested_metrics


def watch(verb: Fit | Demo) -> dict[str, Any]:
    """Prints every step with the time that is left."""
    return {"on_step": lambda text: print(text, flush=True)}


def show(verb: Fit, done: Decision) -> VerbResult:
    """Prints the leaderboard and the answer; the bundle is served next."""
    show_decision(done)
    wrote = (str(done.root / "decision.json"), str(done.report), str(done.root / "bundle"))
    facts = {name: done.facts[name] for name in ("chosen", "reason", "strongest_baseline", "gain", "p_value")}
    return VerbResult(wrote, command("serve", "--bundle", done.root / "bundle"), facts)


def show_decision(done: Decision) -> None:
    """Prints the leaderboard and the answer."""
    console().print(_table(done))
    print(f"ship {done.chosen}: {done.reason}")


def _table(done: Decision) -> Table:
    metric, rows = done.facts["criterion"]["metric"], done.facts["leaderboard"]
    tested = tested_metrics(done.facts)
    table = Table(title="contenders, the best first", title_justify="left", caption="± half of the 95 % interval")
    table.add_column("contender")
    for heading in (f"{metric}, validation", "behind the best", *(f"{name}, test" for name in tested)):
        table.add_column(heading, justify="right")
    for row in rows:
        behind = "" if not row["behind"] else f"{row['behind']:.4f} ± {row['behind_half_width']:.4f}"
        name = f"{row['name']} (ships)" if row["name"] == done.chosen else row["name"]
        own = _number(row["value"], row["half_width"])
        measured = (row["test"].get(name) for name in tested)
        cells = [own, behind, *("-" if one is None else _number(one["mean"], one["half_width"]) for one in measured)]
        table.add_row(name, *cells)
    if (oracle := done.facts["oracle"]) is not None:
        known = (oracle.get(name) for name in tested)
        measured = ("-" if one is None else _number(one["mean"], one["half_width"]) for one in known)
        table.add_row("oracle", "", "", *measured)
    return table


def _number(value: float | None, half_width: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if half_width is None else f"{value:.4f} ± {half_width:.4f}"
