"""From the files of a log to a prepared directory: checked, indexed, split, labeled, sorted and cut into shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import ibis.expr.types as ir
import pyarrow as pa
from tqdm import tqdm

from recpo import __version__
from recpo.data.catalog import (
    CatalogScope,
    add_positions,
    count_dropped,
    item_indices,
    item_table,
    place_events,
    user_indices,
)
from recpo.data.duckdb_engine import DuckDBEngine
from recpo.data.engine import Engine, EngineOptions
from recpo.data.events import select_columns, standardize, time_order
from recpo.data.faults import Fault, validate_no_faults
from recpo.data.files import Log, find_files, open_log, write_frame
from recpo.data.locations import Place, locate
from recpo.data.prepared import FORMAT_VERSION, write_manifest
from recpo.data.publishing import prepared_directory, work_directory
from recpo.data.schema import (
    PERIODS,
    PRESETS,
    QUANTILE_SCHEMA,
    TRAIN,
    Columns,
    Derived,
    LogColumns,
    PresetName,
    history_schema,
    item_schema,
    user_schema,
)
from recpo.data.shaping import Label, WatchQuantiles, cutoff_table, definition, quantile_table, watch_ties
from recpo.data.splits import Split, TemporalSplit, last_events, past_items, period_rows
from recpo.data.validate import check_rows
from recpo.data.writing import write_past, write_rows, write_shards
from recpo.errors import RecpoError
from recpo.feedback import FEEDBACK_KINDS, FeedbackDefinition, FeedbackRule

#: From this share of equal watch times on, no quantile separates a quarter of the events from the rest.
_MANY_TIES: Final = 0.25
_STAGES: Final = ("reading", "checking", "splitting", "shaping", *PERIODS, "histories")


@dataclass(frozen=True)
class Preparation:
    """Everything that decides what a prepared directory holds: the arguments of ``recpo.workflows.prepare.prepare``."""

    preset: PresetName = "plain"
    columns: Columns = field(default_factory=Columns)
    split: Split = field(default_factory=TemporalSplit)
    label: Label = field(default_factory=WatchQuantiles)
    feedback: FeedbackRule = field(default_factory=FeedbackRule)
    max_context: int = 200
    rows_per_shard: int = 500_000
    min_user_events: int = 0
    min_item_events: int = 1
    catalog: CatalogScope = "train"
    max_watch_time: float = 86_400.0
    strict: bool = False

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise RecpoError(f"preset {self.preset!r}: expected one of {', '.join(PRESETS)}")
        for name, least in (("max_context", 1), ("rows_per_shard", 1), ("min_user_events", 0), ("min_item_events", 0)):
            if getattr(self, name) < least:
                raise RecpoError(f"{name} {getattr(self, name)} must be at least {least}")
        if not self.max_watch_time > 0:
            raise RecpoError(f"max_watch_time {self.max_watch_time} must be positive (seconds)")

    @property
    def mapping(self) -> Columns:
        """The preset with the user's columns over it."""
        return self.columns.over(PRESETS[self.preset])

    def describe(self, log: Log) -> dict[str, Any]:
        """The arguments as they are, with the mapping in full and the log's files by name."""
        plain = ("preset", "max_context", "rows_per_shard", "min_user_events", "min_item_events", "catalog")
        return {
            **{name: getattr(self, name) for name in (*plain, "max_watch_time", "strict")},
            "log": sorted(file.shown for file in log.files),
            "columns": asdict(self.mapping),
            "split": describe(self.split),
            "label": describe(self.label),
            "feedback": asdict(self.feedback),
        }

    def run(
        self,
        log: str | Sequence[str] | pa.Table,
        out: str | Path,
        *,
        engine: EngineOptions = EngineOptions(),  # noqa: B008  frozen
        work: str | Path | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> dict[str, Any]:
        """Writes the prepared directory ``out`` and returns its manifest.

        Args:
            log: names of files, directories and patterns, or the rows themselves, which go through a file in ``work``.
            out: directory to make, here or in an object store.
            engine: what runs the expressions.
            work: where temporary files go; None = beside ``out``.
            overwrite: replace ``out``, if it is a prepared directory.
            progress: show a bar on a terminal.

        Raises:
            RecpoError: the log has faults (all of them in one message), cannot be split, or ``out`` exists.
        """
        names = [] if isinstance(log, pa.Table) else [log] if isinstance(log, str) else log
        paths = find_files(names)
        place = None if work is None else locate(work)
        inputs = [*paths, *map(locate, names)]
        with prepared_directory(locate(out), place, overwrite=overwrite, inputs=inputs) as partial:
            with (
                work_directory(place, partial) as temporary,
                start_engine(engine, temporary) as started,
                tqdm(total=len(_STAGES), desc="prepare", unit="stage", disable=None if progress else True) as bar,
            ):
                if isinstance(log, pa.Table):
                    paths = [write_frame(log, temporary)]
                manifest = _Run(self, started, engine.writers, partial, temporary, bar).manifest(paths)
            return write_manifest(partial, manifest)


class _Run:
    """One pass from files to shards."""

    def __init__(
        self, choice: Preparation, engine: Engine, writers: int, partial: Path, work: Place, bar: tqdm[Any]
    ) -> None:
        self.choice, self.engine, self.partial, self.work, self.bar = choice, engine, partial, work, bar
        self.writers = writers
        self.stages = iter(_STAGES)
        self.counts: dict[str, Any] = {}
        self.dropped: dict[str, int] = {}
        self.rows_written = 0

    def manifest(self, paths: Sequence[Place]) -> dict[str, Any]:
        self._stage()
        log, events = self._read(paths)
        self._stage()
        events, boundaries = self._split(events)
        items, users, events = self._keep(events)
        self._stage()
        events, feedback = self._shape(events)
        sizes = self._write_tables(log, items, users, events)
        shards = {name: self._write_period(events, number, feedback) for number, name in enumerate(PERIODS)}
        self._write_histories(log, items, users, events)
        past = [shard["past"] for listed in shards.values() for shard in listed if "past" in shard]
        files = ("items.parquet", "users.parquet", "quantiles.parquet", "histories.parquet", *past)
        return {
            "format_version": FORMAT_VERSION,
            "recpo_version": __version__,
            "config": self.choice.describe(log),
            "columns": {column: log.columns.get(column) for column in LogColumns.ALL},
            "max_context": self.choice.max_context,
            "boundaries": boundaries,
            "label": describe(self.choice.label),
            "feedback": feedback.to_json(),
            "counts": {**self.counts, "dropped": self.dropped, "splits": _totals(shards)},
            "warnings": tie_warnings(self.choice.label, self.counts["watch_time_ties"]),
            "shards": shards,
            "files": files,
            **sizes,
        }

    def _stage(self) -> None:
        name = next(self.stages)
        if name != _STAGES[0]:
            self.bar.update()
        self.bar.set_description(f"prepare: {name}")

    def _read(self, paths: Sequence[Place]) -> tuple[Log, ir.Table]:
        choice, mapping = self.choice, self.choice.mapping
        log, faults = open_log(paths, mapping, choice.columns, self.work)
        faults += _label_faults(choice.label, log)
        self._stage()
        if log.files and log.columns:
            rows = self.engine.read_parquet([file.path for file in log.files], list(log.columns.values()))
            raw = select_columns(rows, log.columns)
            read, neutralized, row_faults = check_rows(
                self.engine, raw, log, mapping, choice.label, choice.max_watch_time, choice.strict
            )
            faults += row_faults
        validate_no_faults(faults)
        distinct = self.engine.materialize("distinct", raw.drop(Engine.FILE, Engine.ROW).distinct())
        kept = self.engine.row(distinct.aggregate(rows=distinct.count()))["rows"]
        self.counts = {"read": read, "empty_files": len(log.empty_files), "neutralized": neutralized}
        if read > kept:
            self.dropped["exact duplicate of another event"] = read - kept
        return log, standardize(distinct, mapping, choice.max_watch_time)

    def _split(self, events: ir.Table) -> tuple[ir.Table, dict[str, Any]]:
        time = events[LogColumns.TIMESTAMP]
        ends = self.engine.row(events.aggregate(first=time.min(), last=time.max()))
        has_clock = self.choice.mapping.time_unit != "order"
        boundaries = self.choice.split.boundaries(ends["first"], ends["last"], has_clock)
        events = self.choice.split.assign(events, boundaries)
        if not self.choice.split.is_per_event:
            events = self.engine.materialize("events", events)
        return events, {"first_ms": ends["first"], "last_ms": ends["last"], **boundaries}

    def _keep(self, events: ir.Table) -> tuple[ir.Table, ir.Table, ir.Table]:
        choice, engine = self.choice, self.engine
        items = engine.materialize("items", item_indices(events, choice.catalog, choice.min_item_events))
        known = events.semi_join(items, LogColumns.ITEM_ID)
        users = engine.materialize("users", user_indices(known, choice.min_user_events))
        self.dropped |= count_dropped(engine, events, known, "item outside the catalog")
        if choice.min_user_events:
            active = known.semi_join(users, LogColumns.USER_ID)
            self.dropped |= count_dropped(engine, known, active, "user below min_user_events")
        return items, users, place_events(events, items, users)

    def _shape(self, events: ir.Table) -> tuple[ir.Table, FeedbackDefinition]:
        engine, base = self.engine, self.choice.label.duration_base
        placed = engine.materialize("placed", add_positions(events, time_order(events)))
        quantiles = engine.materialize("quantiles", quantile_table(placed, base))
        self._write_rows(quantiles.order_by(quantiles.columns[:2]), QUANTILE_SCHEMA, "quantiles.parquet")
        self.counts["watch_time_ties"] = engine.row(watch_ties(quantiles))
        shaped = engine.materialize("shaped", self.choice.label.add(placed))
        engine.drop("placed")
        fitted = engine.table(cutoff_table(quantiles))
        return shaped, definition(fitted, self.choice.feedback, base, self.choice.max_watch_time)

    def _write_tables(self, log: Log, items: ir.Table, users: ir.Table, events: ir.Table) -> dict[str, int]:
        item_ids, user_ids = log.types[LogColumns.ITEM_ID], log.types[LogColumns.USER_ID]
        user_rows = users.select(Derived.USER_INDEX, LogColumns.USER_ID).order_by(Derived.USER_INDEX)
        return {
            "num_items": self._write_rows(
                item_table(items, events, self.choice.feedback), item_schema(item_ids), "items.parquet"
            ),
            "num_users": self._write_rows(user_rows, user_schema(user_ids), "users.parquet"),
        }

    def _write_histories(self, log: Log, items: ir.Table, users: ir.Table, events: ir.Table) -> None:
        self._stage()
        schema = history_schema(log.types[LogColumns.USER_ID], log.types[LogColumns.ITEM_ID])
        rows = last_events(events, items, users, self.choice.max_context)
        self._written(self._write_rows(rows, schema, "histories.parquet"))
        self.bar.update()

    def _write_rows(self, rows: ir.Table, schema: pa.Schema, file: str) -> int:
        return write_rows(self.engine.stream(rows), schema, self.partial / file)

    def _write_period(self, events: ir.Table, period: int, feedback: FeedbackDefinition) -> list[dict[str, Any]]:
        self._stage()
        rows = period_rows(events, period, self.choice.max_context)
        directory = self.partial / PERIODS[period]
        shards = write_shards(
            self.engine.stream(rows), directory, self.choice.rows_per_shard, feedback, self._written, self.writers
        )
        if not any(shard["targets"] for shard in shards):
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
            raise RecpoError(
                f"the {PERIODS[period]} period has no events (dropped: {dropped or 'nothing'}): choose another split, "
                "a smaller min_item_events or min_user_events, or catalog log"
            )
        if period == TRAIN:
            return shards
        return write_past(self.engine.stream(past_items(events, period)), shards, self.partial)

    def _written(self, rows: int) -> None:
        self.rows_written += rows
        self.bar.set_postfix_str(f"{self.rows_written:,} rows written")


def describe(choice: Any) -> dict[str, Any]:
    """A dataclass instance as the class path and arguments that make it again."""
    kind = type(choice)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": asdict(choice)}


def _totals(shards: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, int]]:
    keys = ("rows", "targets", "users", *FEEDBACK_KINDS)
    return {period: {key: sum(shard[key] for shard in own) for key in keys} for period, own in shards.items()}


def tie_warnings(label: Label, ties: dict[str, int]) -> list[str]:
    """What to say where so many train watch times are equal that a label out of their ranks tells little.

    Args:
        label: what makes labels.
        ties: of ``recpo.data.shaping.watch_ties``.
    """
    watched = ties["watched"]
    if LogColumns.WATCH_TIME not in label.needs or not watched:
        return []
    zero, tied = ties["zero"] / watched, ties["tied"] / watched
    if zero > _MANY_TIES:
        return [
            f"{zero:.0%} of the train watch times are zero seconds: their label is 0, and nothing tells them apart. If "
            "such items were never played, leave them out of the log; or take another --label, such as BinaryColumn"
        ]
    if tied > _MANY_TIES:
        return [
            f"{tied:.0%} of the train watch times equal the most frequent one of their duration bucket, so that labels "
            "out of their ranks are coarse: log finer watch times, or take --label WatchRatio or BinaryColumn"
        ]
    return []


def _label_faults(label: Label, log: Log) -> list[Fault]:
    lacking = [column for column in label.needs if column not in log.columns and column not in log.faulty]
    if not lacking or not log.files:
        return []
    name = type(label).__name__
    fix = (
        "name the column with --columns.NAME, or choose another --label: WatchQuantiles, WatchRatio, D2Q and "
        "WatchTimeGain read watch_time and duration; BinaryColumn and NumericColumn read label; EveryEvent none"
    )
    return [Fault(log.name, None, f"label {name} needs {' and '.join(lacking)}, which the log has not", fix)]


def start_engine(options: EngineOptions, work: Place) -> Engine:
    """Connects to the engine that ``options`` names.

    Args:
        options: which engine, and what it may use.
        work: an existing directory for temporary files; the caller removes it. Spark on a cluster needs one that every
            executor and this process can reach.

    Raises:
        RecpoError: an option cannot be read, or the engine is not installed.
    """
    if options.engine == "spark":
        from recpo.data.spark_engine import SparkEngine  # Spark need not be installed

        return SparkEngine(work, options)
    return DuckDBEngine(work, options.memory_limit, options.threads)
