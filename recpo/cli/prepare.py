"""``recpo prepare``: turns an interaction log into training, validation and test shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from rich.table import Table

from recpo.base.features import SIDES, Categories, Category, Feature, Vector
from recpo.base.feedback import FEEDBACK_KINDS
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_extend, after_prepare
from recpo.log.prepared import Period, Prepared
from recpo.log.schema import LogColumns
from recpo.verbs.prepare import Prepare


def show(verb: Prepare, data: Prepared) -> VerbResult:
    """Prints what happened to the events; a policy is pre-trained next, or the one of the days before continued."""
    _report(data)
    facts = {name: data.manifest[name] for name in ("num_users", "num_items", "counts", "warnings")}
    return after_prepare(data.root, facts) if verb.extends is None else after_extend(data.root, facts)


def _report(data: Prepared) -> None:
    counts, terminal = data.manifest["counts"], console()
    columns = [(column, data.manifest["columns"][column]) for column in LogColumns.ALL]
    found = ", ".join(column if column == name else f"{column} (from {name})" for column, name in columns if name)
    absent = ", ".join(column for column, name in columns if not name)
    terminal.print(f"columns: {found}" + (f"; absent: {absent}" if absent else ""), soft_wrap=True)
    terminal.print(_events_table(counts))
    terminal.print(_periods_table(counts["splits"]))
    terminal.print(_feedback_table(counts["splits"]))
    if data.behaviors:
        terminal.print(_behaviors_table(counts["splits"], data.behaviors))
    if data.feature_schema or "feature_tables" in data.manifest:
        terminal.print(_features_table(data))
    for warning in data.manifest["warnings"]:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    users, items = data.manifest["num_users"], data.num_items
    terminal.print(f"{data.root}: {users:,} users, {items:,} items", soft_wrap=True)


def _events_table(counts: dict[str, Any]) -> Table:
    table = Table(title="events of the log", title_justify="left")
    table.add_column("outcome")
    table.add_column("events", justify="right")
    table.add_row("read", f"{counts['read']:,}")
    for reason, count in sorted(counts["dropped"].items()):
        table.add_row(f"dropped: {reason}", f"{count:,}")
    table.add_row("kept", f"{counts['read'] - sum(counts['dropped'].values()):,}", end_section=True)
    for reason, count in sorted(counts["neutralized"].items()):
        table.add_row(f"value neutralized: {reason}", f"{count:,}")
    if counts["empty_files"]:
        table.add_row("empty files skipped", f"{counts['empty_files']:,}")
    return table


def _periods_table(periods: dict[str, dict[str, int]]) -> Table:
    columns = ("users", "events", "rows, with histories")
    counts = {name: [period[key] for key in ("users", "targets", "rows")] for name, period in periods.items()}
    return _by_period("periods", columns, counts)


def _behaviors_table(periods: dict[str, dict[str, Any]], behaviors: Sequence[str]) -> Table:
    counts = {name: [period["behaviors"][behavior] for behavior in behaviors] for name, period in periods.items()}
    return _by_period("behaviors of the events", behaviors, counts)


def _features_table(data: Prepared) -> Table:
    table = Table(title="features", title_justify="left")
    for name in ("of", "features", "left alone", "rows", "not in the data", "without a row"):
        table.add_column(name, justify="left" if name in ("of", "features", "left alone") else "right")
    for side in SIDES:
        shown = ", ".join(_shown(feature) for feature in data.feature_schema.of(side))
        found = data.manifest["feature_tables"].get(side)
        if found is not None:
            cells = (f"{found['counts'][key]:,}" for key in ("rows", "unused", "without"))
            table.add_row(f"{side}s", shown, ", ".join(found["left_alone"]), *cells)
        elif shown:
            table.add_row(side, shown, "", "", "", "")
    return table


def _shown(feature: Feature) -> str:
    if isinstance(feature, Category | Categories):
        return f"{feature.name} ({feature.num_codes:,} codes)"
    return f"{feature.name} ({feature.width} wide)" if isinstance(feature, Vector) else feature.name


def _feedback_table(periods: dict[str, dict[str, int]]) -> Table:
    counts = {name: [period[kind] for kind in FEEDBACK_KINDS] for name, period in periods.items()}
    return _by_period("feedback of the events", FEEDBACK_KINDS, counts)


def _by_period(title: str, columns: Sequence[str], counts: dict[str, list[int]]) -> Table:
    """A row of counts per period, in the order of time."""
    table = Table(title=title, title_justify="left")
    table.add_column("period")
    for name in columns:
        table.add_column(name, justify="right")
    for period, cells in sorted(counts.items(), key=lambda one: get_args(Period).index(one[0])):
        table.add_row(period, *(f"{cell:,}" for cell in cells))
    return table
