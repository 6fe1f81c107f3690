"""`recpo prepare`: from an interaction log to training, validation and test shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from recpo.cli.output import console
from recpo.data.engine import EngineOptions
from recpo.data.prepare import Preparation
from recpo.data.schema import Columns, PresetName
from recpo.data.shaping import (
    D2Q,
    BinaryColumn,
    EveryEvent,
    Label,
    NumericColumn,
    WatchQuantiles,
    WatchRatio,
    WatchTimeGain,
)
from recpo.data.splits import LeaveLastOut, Split, TemporalSplit
from recpo.feedback import FEEDBACK_KINDS, FeedbackRule

# Imported so that their short names work as class paths.
__all__ = [
    "D2Q",
    "BinaryColumn",
    "EveryEvent",
    "LeaveLastOut",
    "NumericColumn",
    "WatchRatio",
    "WatchTimeGain",
    "prepare",
]


def prepare(
    log: str | list[str],
    out: str | Path,
    preset: PresetName = "plain",
    columns: Columns = Columns(),  # noqa: B008 frozen
    split: Split = TemporalSplit(),  # noqa: B008 frozen
    label: Label = WatchQuantiles(),  # noqa: B008 frozen
    feedback: FeedbackRule = FeedbackRule(),  # noqa: B008 frozen
    max_context: int = 200,
    rows_per_shard: int = 500_000,
    min_user_events: int = 0,
    min_item_events: int = 1,
    catalog: Literal["train", "log"] = "train",
    max_watch_time: float = 86_400.0,
    strict: bool = False,
    engine: Literal["duckdb", "spark"] = "duckdb",
    memory_limit: str = "4GB",
    threads: int | None = None,
    spark_master: str = "local[*]",
    spark_conf: dict[str, str | int | float | bool] = {},  # noqa: B006  never changed
    work: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Checks an interaction log and writes it as indexed, labeled, split and sorted shards.

    One error lists every fault of the log. Refused: files that cannot be read, missing columns, wrong types, null
    users, items or times, times that do not parse. Neutralized and counted (the event stays, without that value):
    missing or impossible watch times, durations, labels and propensities. Dropped and counted: exact duplicates (equal
    in every column that is used), events of items outside the catalog. The counts stand in ``manifest.json``.
    Whatever is fitted is fitted on the train period. Equal logs give equal bytes, in whatever order their rows are, and
    whichever engine runs.

    Args:
        log: Parquet or CSV file, directory of such files, or glob pattern; or a list of them. With a scheme (s3://,
            gs://, abfs://, hdfs://) in an object store.
        out: directory to make, here or in an object store.
        preset: column names and units to start from.
        columns: columns and units that differ from the preset.
        split: TemporalSplit or LeaveLastOut.
        label: how the preference label is made: WatchQuantiles, WatchRatio, D2Q, WatchTimeGain, BinaryColumn,
            NumericColumn or EveryEvent.
        feedback: which labels make an event positive or skipped; whatever trains on or evaluates this log uses it.
        max_context: number of earlier events that a held-out user keeps as context, and of events in a serving history.
        rows_per_shard: a shard ends with the user who reaches this number of rows.
        min_user_events: drop users with fewer train events; 0 keeps users who first appear later.
        min_item_events: drop items with fewer events in the period that ``catalog`` names; counted before users.
        catalog: items of the train period, so that nothing is known of the future, or of the whole log.
        max_watch_time: longest possible watch time in seconds.
        strict: refuse impossible values and exact duplicates instead of neutralizing or dropping them.
        engine: duckdb inside this process, or spark for logs beyond one machine; the result is the same.
        memory_limit: what DuckDB, Spark's local process or each Spark executor may hold before it writes to disk.
        threads: worker threads of DuckDB or of Spark's local process; null = one for each core.
        spark_master: where Spark runs: local[*], spark://host:port, yarn, k8s://...
        spark_conf: more settings of Spark by their names, as a dictionary.
        work: directory for temporary files; null = beside ``out``, or the system's where ``out`` is in an object store.
            Spark on a cluster needs one that all its machines reach (hdfs://, s3://, a network mount).
        overwrite: replace ``out`` where it exists.
        progress: show a progress bar on a terminal.
    """
    preparation = Preparation(
        preset=preset,
        columns=columns,
        split=split,
        label=label,
        feedback=feedback,
        max_context=max_context,
        rows_per_shard=rows_per_shard,
        min_user_events=min_user_events,
        min_item_events=min_item_events,
        catalog=catalog,
        max_watch_time=max_watch_time,
        strict=strict,
    )
    engine_options = EngineOptions(engine, memory_limit, threads, spark_master, spark_conf)
    manifest = preparation.run(log, out, engine=engine_options, work=work, overwrite=overwrite, progress=progress)
    _report(manifest, out)


def _report(manifest: dict[str, Any], out: str | Path) -> None:
    counts, terminal = manifest["counts"], console()
    columns = manifest["columns"].items()
    found = ", ".join(column if column == name else f"{column} (from {name})" for column, name in columns if name)
    absent = ", ".join(column for column, name in columns if not name)
    terminal.print(f"columns: {found}" + (f"; absent: {absent}" if absent else ""))
    terminal.print(_events_table(counts))
    terminal.print(_periods_table(counts["splits"]))
    terminal.print(_feedback_table(counts["splits"]))
    for warning in manifest["warnings"]:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    terminal.print(f"{out}: {manifest['num_users']:,} users, {manifest['num_items']:,} items", soft_wrap=True)


def _events_table(counts: dict[str, Any]) -> Table:
    table = Table(title="events of the log", title_justify="left")
    table.add_column("what became of them")
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
    table = Table(title="periods", title_justify="left")
    for name in ("period", "users", "events", "rows with context"):
        table.add_column(name, justify="left" if name == "period" else "right")
    for name, period in periods.items():
        cells = (period[key] for key in ("users", "targets", "rows"))
        table.add_row(name, *(f"{cell:,}" for cell in cells))
    return table


def _feedback_table(periods: dict[str, dict[str, int]]) -> Table:
    table = Table(title="feedback of the events", title_justify="left")
    for name in ("period", *FEEDBACK_KINDS):
        table.add_column(name, justify="left" if name == "period" else "right")
    for name, period in periods.items():
        table.add_row(name, *(f"{period[kind]:,}" for kind in FEEDBACK_KINDS))
    return table
