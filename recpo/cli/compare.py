"""``recpo compare``: compares a new bundle with the old one on logged requests, before a swap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from recpo.base.errors import GateClosedError
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command, path_of
from recpo.evaluation.comparison import Comparison
from recpo.verbs.compare import Compare

_SHOWN_ESTIMATORS = ("IPS", "SNIPS", "DR")
_COUNTS = ("short_lists", "unknown_items", "places_of_items_not_in_data")


def show(verb: Compare, comparison: Comparison) -> VerbResult:
    """Prints the numbers; the new bundle is served next.

    Raises:
        GateClosedError: it violates a limit.
    """
    print_comparison(comparison)
    if comparison.failures:
        raise GateClosedError("; ".join(comparison.failures))
    wrote = () if comparison.path is None else (str(comparison.path),)
    return VerbResult(wrote, command("serve", "--bundle", path_of(verb.new)), comparison.document)


def print_comparison(comparison: Comparison) -> None:
    """Prints the warnings, one table, and the path of all numbers."""
    document, terminal = comparison.document, console()
    for warning in comparison.warnings:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    terminal.print(comparison_table(document))
    items = document["items"]
    terminal.print(
        f"items: {items['shared']:,} in both bundles, {items['only_old']:,} in the old one only, "
        f"{items['only_new']:,} in the new one only",
        soft_wrap=True,
    )
    if comparison.path is not None:
        terminal.print(str(comparison.path), soft_wrap=True)


def comparison_table(document: Mapping[str, Any]) -> Table:
    """Rows of agreement, value, ranking and lists: old, new, and new - old with its 95 % interval."""
    setting = document["setting"]
    title = f"{setting['split']} period, {setting['requests']:,} users, lists of {setting['k']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for name in ("old", "new", "new - old (95 %)"):
        table.add_column(name, justify="right")
    for name, value in document["agreement"].items():
        table.add_row(name, "", "", _number(value["mean"]))
    for name, row in (document["value"] or {}).items():
        if name in _SHOWN_ESTIMATORS:
            difference = row["difference"]
            sides = (_number(row[side]["value"]) for side in ("old", "new"))
            table.add_row(
                f"value, {name}", *sides, _interval(difference["value"], difference["low"], difference["high"])
            )
    for name, row in document["ranking"].items():
        mean, half = row["difference"]["mean"], row["difference"]["half_width"]
        ends = (None, None) if mean is None or half is None else (mean - half, mean + half)
        table.add_row(name, *(_number(row[side]["mean"]) for side in ("old", "new")), _interval(mean, *ends))
    old, new = document["lists"]["old"], document["lists"]["new"]
    for name in (one for one, value in old.items() if not isinstance(value, int)):
        table.add_row(name, _number(old[name]), _number(new[name]), "")
    for name in _COUNTS:
        table.add_row(name.replace("_", " "), f"{old[name]:,}", f"{new[name]:,}", "")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.4f}" + ("" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]")
