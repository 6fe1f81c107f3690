"""Turns the files of a log into a prepared directory: checked, indexed, split, labeled, sorted and cut into shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import ibis.expr.types as ir
import pyarrow as pa
from tqdm import tqdm

from recpo import __version__
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import SIDES, Categories, Category, Feature, FeatureSchema, Side, plain_type
from recpo.base.feedback import FEEDBACK_KINDS, FeedbackDefinition, FeedbackRule
from recpo.base.ranges import NonNegativeInt, PositiveFloat, PositiveInt, validate_ranges
from recpo.log.csv_files import CsvFormat
from recpo.log.engine import DuckDBEngine, Engine, EngineOptions, Place, locate
from recpo.log.events import (
    CatalogScope,
    add_positions,
    available_from,
    count_dropped,
    item_indices,
    item_table,
    place_events,
    select_columns,
    standardize,
    time_order,
    timestamp_ms,
    user_indices,
)
from recpo.log.feature_columns import (
    CONTEXT,
    PRESET_FEATURES,
    EventColumns,
    FeatureColumns,
    behaviors_to_json,
    event_columns,
)
from recpo.log.feature_tables import (
    AVAILABLE,
    ID,
    FeatureTable,
    TableSide,
    describe_table,
    fit_context,
    open_table,
    table_faults,
    write_table,
)
from recpo.log.files import Log, find_files, open_log, write_frame
from recpo.log.prepared import (
    FORMAT_VERSION,
    HELD_OUT,
    ITEM_FEATURES,
    TRAIN_PAST,
    USER_FEATURES,
    vocabulary_file,
    write_manifest,
)
from recpo.log.schema import (
    PAST_SCHEMA,
    PERIODS,
    PRESETS,
    QUANTILE_SCHEMA,
    TRAIN,
    Columns,
    Derived,
    Fault,
    FlagColumn,
    LogColumns,
    PresetName,
    held_out_schema,
    history_schema,
    item_schema,
    user_schema,
    validate_no_faults,
)
from recpo.log.shaping import (
    Label,
    WatchQuantiles,
    bucket_counts,
    cutoff_table,
    definition,
    quantile_table,
    watch_ties,
)
from recpo.log.splits import (
    Split,
    TemporalSplit,
    held_out_events,
    last_events,
    outside_events,
    past_items,
    period_rows,
    train_items,
)
from recpo.log.validate import check_rows, unmatched_flags
from recpo.log.writing import prepared_directory, without_repeats, work_directory, write_past, write_rows, write_shards

#: From this share of equal watch times, no quantile separates a quarter of the events from the rest.
_MANY_TIES: Final = 0.25
_LEAST_RATIO, _MOST_RATIO = 0.005, 10.0  # of the median watch time to the duration
_STAGES: Final = ("reading", "checking", "splitting", "shaping", "features", *PERIODS, "histories")
Source: TypeAlias = str | Sequence[str] | pa.Table


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The options that determine a prepared directory."""

    preset: PresetName = "plain"
    """column names and units to start from, including features and behaviors"""
    columns: Columns = Columns()  # noqa: RUF009  frozen
    """columns and units that differ from the preset"""
    split: Split = TemporalSplit()  # noqa: RUF009  frozen
    """TemporalSplit or LeaveLastOut"""
    label: Label = WatchQuantiles()  # noqa: RUF009  frozen
    """how the preference label is made: WatchQuantiles, WatchRatio, D2Q, WatchTimeGain, BinaryColumn, NumericColumn
    or EveryEvent"""
    feedback: FeedbackRule = FeedbackRule()  # noqa: RUF009  frozen
    """which labels make an event positive or skipped; training and evaluation on this log use this definition"""
    max_context: PositiveInt = 200
    """number of earlier events that a held-out user keeps as context, and number of events in a serving history"""
    rows_per_shard: PositiveInt = 500_000
    """a shard ends with the user who reaches this number of rows"""
    min_user_events: NonNegativeInt = 0
    """drop users with fewer train events; 0 keeps users who first appear later"""
    min_item_events: NonNegativeInt = 1
    """drop items with fewer events in the period that ``catalog`` names; counted before users"""
    catalog: CatalogScope = "train"
    """the items of the train period (train), so that the catalog contains no information about the future; of the
    full log (log); or of the train period and of the item table, whose items can be recommended before their first
    event (items)"""
    max_watch_time: PositiveFloat = 86_400.0
    """maximum possible watch time in seconds"""
    strict: bool = False
    """reject impossible values and exact duplicates instead of neutralizing or dropping them"""
    features: FeatureColumns = FeatureColumns()  # noqa: RUF009  frozen
    """features of items, users and requests, and the columns that they are read from"""
    behaviors: Mapping[str, str | FlagColumn] | None = None
    """named feedback besides label and dislike: name -> column of the log (bool or 0/1), such as ``{"like":
    "is_like"}``, or name -> ``{column: thumb, equals: up}``; null = the preset's"""
    csv: CsvFormat = CsvFormat()  # noqa: RUF009  frozen
    """format of text files: their delimiter, such as ``::``, and their column names if the first line has none"""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise RecpoError(
                f"preset {self.preset!r}: expected one of {', '.join(PRESETS)}", code="unknown_name", field="preset"
            )
        validate_ranges(self)
        self.more  # noqa: B018 checks the names of behaviors

    @property
    def mapping(self) -> Columns:
        """The user's columns, completed by the preset."""
        return self.columns.over(PRESETS[self.preset])

    @property
    def more(self) -> EventColumns:
        """Behaviors and request features: the user's, completed by the preset."""
        return event_columns(self.preset, self.features, self.behaviors)

    @property
    def table_columns(self) -> FeatureColumns:
        """Features and other columns of tables: the user's, completed by the preset."""
        return self.features.over(PRESET_FEATURES[self.preset])

    def describe(self, log: Log) -> dict[str, Any]:
        """The arguments for the manifest, with the complete mapping and the names of the log's files."""
        plain = ("preset", "max_context", "rows_per_shard", "min_user_events", "min_item_events", "catalog")
        return {
            **{name: getattr(self, name) for name in (*plain, "max_watch_time", "strict")},
            "log": sorted(file.shown for file in log.files),
            "columns": self.mapping.to_json(),
            "split": describe(self.split),
            "label": describe(self.label),
            "feedback": asdict(self.feedback),
            "features": self.features.to_json(),
            "behaviors": None if self.behaviors is None else behaviors_to_json(self.behaviors),
            "csv": asdict(self.csv),
        }

    def run(
        self,
        log: Source,
        out: str | Path,
        *,
        items: Source | None = None,
        users: Source | None = None,
        engine: EngineOptions = EngineOptions(),  # noqa: B008  frozen
        work: str | Path | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> dict[str, Any]:
        """Writes the prepared directory ``out`` and returns its manifest.

        Args:
            log: names of files, directories and patterns, or a table of rows, which is first written to a file in
                ``work``.
            out: output directory, local or in an object store.
            items: item table, in the forms of ``log``; None = there is none.
            users: user table, in the forms of ``log``; None = there is none.
            engine: what runs the expressions.
            work: directory for temporary files; None = beside ``out``.
            overwrite: replace ``out``, if it is a prepared directory.
            progress: show a bar on a terminal.

        Raises:
            RecpoError: the log has faults (all of them in one message), cannot be split, or ``out`` exists.
        """
        self._validate_tables(items, users)
        return write_directory(
            {"log": log, "items": items, "users": users},
            out,
            partial(PrepareRun, self),
            engine=engine,
            work=work,
            overwrite=overwrite,
            progress=progress,
        )

    def _validate_tables(self, items: Source | None, users: Source | None) -> None:
        given = {"item": items is not None, "user": users is not None}
        for side in ("item", "user"):
            if self.features.of(side) and not given[side]:
                raise RecpoError(
                    f"features.{side} names features, but there is no table of {side}s: pass --{side}s FILE",
                    code="missing_option",
                    field=f"{side}s",
                )
        if self.catalog == "items" and not given["item"]:
            raise RecpoError(
                "catalog items takes the items of a table, and there is none: pass --items FILE",
                code="missing_option",
                field="items",
            )


def write_directory(
    sources: Mapping[str, Source | None],
    out: str | Path,
    run_with: Callable[[Engine, int, Path, Place, tqdm[Any]], PrepareRun],
    *,
    engine: EngineOptions,
    work: str | Path | None,
    overwrite: bool,
    progress: bool,
    inputs: Sequence[Place] = (),
) -> dict[str, Any]:
    """Writes the prepared directory ``out`` and returns its manifest.

    Args:
        sources: ``log``, ``items`` and ``users``; a frame is first written to a file in ``work``.
        out: output directory, local or in an object store.
        run_with: creates the run from the engine, the number of writers, the unfinished directory, the directory for
            temporary files, and the progress bar.
        engine: what runs the expressions.
        work: directory for temporary files; None = beside ``out``.
        overwrite: replace ``out``, if it is a prepared directory.
        progress: show a bar on a terminal.
        inputs: further inputs besides the sources, which must lie outside ``out``.
    """
    names = {what: _names(source) for what, source in sources.items()}
    named = {what: listed for what, listed in names.items() if listed is not None}
    found = {what: find_files(listed, what) for what, listed in named.items()}
    place = None if work is None else locate(work)
    read = [path for paths in found.values() for path in paths]
    read += [*(locate(name) for listed in named.values() for name in listed), *inputs]
    with prepared_directory(locate(out), place, overwrite=overwrite, inputs=read) as directory:
        with (
            work_directory(place, directory) as temporary,
            start_engine(engine, temporary) as started,
            tqdm(total=len(_STAGES), desc="prepare", unit="stage", disable=None if progress else True) as bar,
        ):
            for what, source in sources.items():
                if isinstance(source, pa.Table):
                    frame = "frame.parquet" if what == "log" else f"{what}-frame.parquet"
                    found[what] = [write_frame(source, temporary, frame)]
            run = run_with(started, engine.writers, directory, temporary, bar)
            manifest = run.manifest(found["log"], {"item": found.get("items", []), "user": found.get("users", [])})
        return write_manifest(directory, manifest, run.checksums)


class PrepareRun:
    """One pass from files to shards. An extension (``recpo.log.extension``) overrides some of its steps."""

    def __init__(
        self, choice: Preparation, engine: Engine, writers: int, partial: Path, work: Place, bar: tqdm[Any]
    ) -> None:
        self.choice, self.engine, self.partial, self.work, self.bar = choice, engine, partial, work, bar
        self.writers = writers
        self.stages = iter(_STAGES)
        self.tables: dict[TableSide, FeatureTable] = {}
        self.more = choice.more
        self.features = FeatureSchema()
        self.feature_tables: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.dropped: dict[str, int] = {}
        self.rows_written = 0
        self.checksums: dict[str, str] = {}  # checksums of files that are not written now

    def manifest(self, paths: Sequence[Place], tables: Mapping[TableSide, Sequence[Place]]) -> dict[str, Any]:
        """Writes all files except the manifest, and returns the content of the manifest.

        Args:
            paths: files of the log.
            tables: files of the feature tables.
        """
        self._stage()
        log, events = self._read(paths, tables)
        self._stage()
        events, boundaries = self._split(events)
        items, users, kept = self._keep(events)
        self._stage()
        shaped, feedback = self._shape(kept, log)
        outside = self._outside(events, items, users)
        sizes = self._write_tables(log, items, users, shaped)
        self._stage()
        context = self._write_features(items, users, shaped)
        shards = {name: self._write_period(shaped, number, feedback, context) for number, name in enumerate(PERIODS)}
        self._write_histories(log, items, users, shaped)
        later = self._write_for_extension(log, outside, shaped, items, users)
        past = [shard["past"] for listed in shards.values() for shard in listed if "past" in shard]
        files = ("items.parquet", "users.parquet", "quantiles.parquet", "histories.parquet", *past, *later)
        return {
            "format_version": FORMAT_VERSION,
            "recpo_version": __version__,
            "config": self.choice.describe(log),
            "columns": {column: log.columns.get(column) for column in LogColumns.ALL},
            "max_context": self.choice.max_context,
            "boundaries": boundaries,
            "label": describe(self.choice.label),
            "feedback": feedback.to_json(),
            "counts": {**self.counts, "dropped": self.dropped, "splits": totals(shards, self.more.behaviors)},
            "warnings": [
                *tie_warnings(self.choice.label, self.counts["watch_time_ties"]),
                *unit_warnings(feedback),
                *self._file_warnings(log),
            ],
            "shards": shards,
            "segments": [len(shards["train"])],
            "files": (*files, *self._feature_files()),
            **self._feature_entries(),
            **sizes,
        }

    def _stage(self) -> None:
        name = next(self.stages)
        if name != _STAGES[0]:
            self.bar.update()
        self.bar.set_description(f"prepare: {name}")

    def _read(self, paths: Sequence[Place], tables: Mapping[TableSide, Sequence[Place]]) -> tuple[Log, ir.Table]:
        choice, mapping = self.choice, self.choice.mapping
        log, faults = open_log(paths, mapping, choice.columns, self.work, self.more, choice.csv)
        self.more = self.more.among(log.columns)
        faults += _label_faults(choice.label, log)
        for side, files in tables.items():
            faults += self._read_table(side, files, log)
        self._stage()
        if log.files and log.columns:
            used = list(dict.fromkeys(log.columns.values()))
            rows = self.engine.read_parquet([file.path for file in log.files], used)
            raw = select_columns(rows, log.columns, log.flags)
            read, neutralized, row_faults = check_rows(
                self.engine, raw, log, mapping, choice.label, choice.max_watch_time, choice.strict, self.more
            )
            faults += row_faults + self._unmatched_flags(rows, raw, log)
        validate_no_faults(faults, self._file_warnings(log))
        distinct = self.engine.materialize("distinct", raw.drop(Engine.FILE, Engine.ROW).distinct())
        kept = self.engine.row(distinct.aggregate(rows=distinct.count()))["rows"]
        self.counts = {"read": read, "empty_files": len(log.empty_files), "neutralized": neutralized}
        if read > kept:
            self.dropped["exact duplicate of another event"] = read - kept
        return log, standardize(distinct, mapping, choice.max_watch_time, self.more)

    def _file_warnings(self, log: Log) -> list[str]:
        """Warnings about the files of the log and of the feature tables."""
        return [text for one in (log, *(table.log for table in self.tables.values())) for text in one.warnings]

    def _unmatched_flags(self, rows: ir.Table, raw: ir.Table, log: Log) -> list[Fault]:
        return unmatched_flags(self.engine, rows, raw, log)

    def _read_table(self, side: TableSide, files: Sequence[Place], log: Log) -> list[Fault]:
        """Opens a feature table, if there is one."""
        if not files:
            return []
        choice, key = self.choice, LogColumns.ITEM_ID if side == "item" else LogColumns.USER_ID
        columns = choice.table_columns
        name, kind = choice.mapping.named()[key], log.types.get(key)
        table, faults = open_table(files, side, name, kind, columns, choice.features, self.work)
        if table is None:
            return faults
        self.tables[side] = table
        return faults + table_faults(self.engine, table, columns.available_from_unit)

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
        listed = self.tables["item"].rows(engine)[ID] if choice.catalog == "items" else None
        items = engine.materialize("items", item_indices(events, choice.catalog, choice.min_item_events, listed))
        known = events.semi_join(items, LogColumns.ITEM_ID)
        users = engine.materialize("users", user_indices(known, choice.min_user_events))
        self.dropped |= count_dropped(engine, events, known, "item outside the catalog")
        if choice.min_user_events:
            active = known.semi_join(users, LogColumns.USER_ID)
            self.dropped |= count_dropped(engine, known, active, "user below min_user_events")
        return items, users, place_events(events, items, users)

    def _shape(self, events: ir.Table, log: Log) -> tuple[ir.Table, FeedbackDefinition]:
        engine, base = self.engine, self.choice.label.duration_base
        counts = engine.materialize("counts", bucket_counts(events, base))
        quantiles = quantile_table(counts)
        self._write_rows(quantiles.order_by(quantiles.columns[:2]), QUANTILE_SCHEMA, "quantiles.parquet")
        self.counts["watch_time_ties"] = engine.row(watch_ties(quantiles))
        placed, label = add_positions(events, time_order(events)), self.choice.label
        if not label.reads_events_once:
            placed = engine.materialize("placed", placed)
        shaped = engine.materialize("shaped", label.add_counted(placed, counts))
        if not label.reads_events_once:
            engine.drop("placed")
        fitted = engine.table(cutoff_table(quantiles))
        described = _described_label(label, log)
        return shaped, definition(fitted, self.choice.feedback, base, self.choice.max_watch_time, described)

    def _outside(self, events: ir.Table, items: ir.Table, users: ir.Table) -> ir.Table | None:
        """The dropped events that an extension needs; None = the split cannot be extended.

        After this step, the rows of the log are no longer needed.
        """
        if not self.choice.split.is_per_event:
            self.engine.drop("distinct", "events")
            return None
        outside = self.engine.materialize("outside", outside_events(events, items, users))
        self.engine.drop("distinct")
        return outside

    def _write_tables(self, log: Log, items: ir.Table, users: ir.Table, events: ir.Table) -> dict[str, int]:
        item_ids, user_ids = log.types[LogColumns.ITEM_ID], log.types[LogColumns.USER_ID]
        user_rows = users.order_by(Derived.USER_INDEX)
        available = self._available(items, events)
        rows = item_table(items, events, self.choice.feedback, available)
        return {
            "num_items": self._write_rows(rows, item_schema(item_ids, available is not None), "items.parquet"),
            "num_users": self._write_rows(user_rows, user_schema(user_ids), "users.parquet"),
        }

    def _available(self, items: ir.Table, events: ir.Table) -> ir.Table | None:
        given = self._given_times()
        if given is None:
            return None
        found = self.engine.materialize("available", available_from(items, events, given))
        count = self.engine.row(found.aggregate(earlier=found["earlier"].cast("int64").sum().fill_null(0)))["earlier"]
        self.counts["shown_before_available_from"] = int(count)
        return found

    def _given_times(self) -> ir.Table | None:
        """The times of the item table from which items may be recommended: ``item_id``, ``available_from`` in ms."""
        table = self.tables.get("item")
        if table is None or not table.has_available:
            return None
        rows, unit = table.rows(self.engine), self.choice.table_columns.available_from_unit
        return rows.select(
            rows[ID].name(LogColumns.ITEM_ID), timestamp_ms(rows[AVAILABLE], unit).name(Derived.AVAILABLE_FROM)
        )

    def _write_features(self, items: ir.Table, users: ir.Table, events: ir.Table) -> FittedFeatures | None:
        """Writes the feature tables; returns the fitted request features."""
        found: dict[str, tuple[Feature, ...]] = {}
        for side, indices in (("item", items), ("user", users)):
            table = self.tables.get(side)  # type: ignore[call-overload]
            if table is not None:
                fitted, counts = write_table(self.engine, table, indices, events, self.partial)
                found[side], self.feature_tables[side] = fitted.features, describe_table(table, counts)
        context = None
        if self.more.context:
            context = fit_context(self.engine, self.more.context, events, self.partial)
            found["context"] = context.features
        self.features = FeatureSchema(**found)
        return context

    def _feature_files(self) -> list[str]:
        tables: tuple[tuple[Side, str], ...] = (("item", ITEM_FEATURES), ("user", USER_FEATURES))
        files = [name for side, name in tables if self.features.of(side)]
        coded = [
            (side, one) for side in SIDES for one in self.features.of(side) if isinstance(one, Category | Categories)
        ]
        return files + [vocabulary_file(side, feature.name) for side, feature in coded]

    def _feature_entries(self) -> dict[str, Any]:
        """The entries of the manifest about features and behaviors; empty if there are none."""
        entries: dict[str, Any] = {}
        if self.features or self.tables:
            entries |= {"features": self.features.to_json(), "feature_tables": self.feature_tables}
        if self.more.behaviors:
            entries["behaviors"] = list(self.more.behaviors)
        return entries

    def _write_histories(self, log: Log, items: ir.Table, users: ir.Table, events: ir.Table) -> None:
        self._stage()
        schema = self._history_schema(log)
        rows = last_events(events, items, users, self.choice.max_context, self.more.behaviors)
        self._written(self._write_rows(rows, schema, "histories.parquet"))
        self.bar.update()

    def _history_schema(self, log: Log) -> pa.Schema:
        ids = log.types[LogColumns.USER_ID], log.types[LogColumns.ITEM_ID]
        return history_schema(*ids, self.more.behaviors, self._plain_context(log))

    def _write_for_extension(
        self, log: Log, outside: ir.Table | None, shaped: ir.Table, items: ir.Table, users: ir.Table
    ) -> list[str]:
        """Writes the files that ``prepare --extends`` reads instead of train shards, if the split can be extended."""
        if outside is None:
            return []
        (self.partial / TRAIN_PAST).mkdir()
        past = f"{TRAIN_PAST}/00000.parquet"
        self._write_train_past(shaped, past)
        self._write_rows(held_out_events(outside, shaped, items, users), self._held_out_schema(log), HELD_OUT)
        return [HELD_OUT, past]

    def _held_out_schema(self, log: Log) -> pa.Schema:
        request_id = log.types.get(LogColumns.REQUEST_ID, pa.int64())
        ids = log.types[LogColumns.USER_ID], log.types[LogColumns.ITEM_ID], request_id
        context = {CONTEXT + name: kind for name, kind in self._plain_context(log).items()}
        return held_out_schema(*ids, bool(self.more.behaviors), context)

    def _plain_context(self, log: Log) -> dict[str, pa.DataType]:
        """Types of the plain request features, by name."""
        return {one.name: plain_type(one, log.types[CONTEXT + one.name]) for one in self.more.context}

    def _write_train_past(self, shaped: ir.Table, file: str) -> None:
        write_rows(without_repeats(self.engine.stream(train_items(shaped))), PAST_SCHEMA, self.partial / file)

    def _write_rows(self, rows: ir.Table, schema: pa.Schema, file: str) -> int:
        return write_rows(self.engine.stream(rows), schema, self.partial / file)

    def _write_period(
        self, events: ir.Table, period: int, feedback: FeedbackDefinition, context: FittedFeatures | None = None
    ) -> list[dict[str, Any]]:
        self._stage()
        rows = period_rows(events, period, self.choice.max_context)
        directory = self.partial / PERIODS[period]
        shards = write_shards(
            self.engine.stream(rows),
            directory,
            self.choice.rows_per_shard,
            feedback,
            self._written,
            self.writers,
            tuple(self.more.behaviors),
            context,
        )
        if not any(shard["targets"] for shard in shards):
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
            raise RecpoError(
                f"the {PERIODS[period]} period has no events (dropped: {dropped or 'nothing'}): choose another split, "
                "a smaller min_item_events or min_user_events, or catalog log",
                code="empty",
                field=PERIODS[period],
            )
        if period == TRAIN:
            return shards
        return write_past(self.engine.stream(self._past(events, period)), shards, self.partial)

    def _past(self, events: ir.Table, period: int) -> ir.Table:
        return past_items(events, period)

    def _written(self, rows: int) -> None:
        self.rows_written += rows
        self.bar.set_postfix_str(f"{self.rows_written:,} rows written")


def describe(choice: Any) -> dict[str, Any]:
    """A dataclass instance as class path and arguments."""
    kind = type(choice)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": asdict(choice)}


def _described_label(label: Label, log: Log) -> str:
    """The label with its options, and the column that it reads; two logs whose labels mean the same agree in it."""
    column = log.columns.get(LogColumns.LABEL) if LogColumns.LABEL in label.needs else None
    return repr(label) if column is None else f"{label!r} of {column}"


def totals(shards: dict[str, list[dict[str, Any]]], behaviors: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The numbers of rows, targets and users, and of each kind of feedback and behavior, per period over all shards."""
    keys = ("rows", "targets", "users", *FEEDBACK_KINDS)
    found: dict[str, dict[str, Any]] = {
        period: {key: sum(shard[key] for shard in own) for key in keys} for period, own in shards.items()
    }
    if behaviors:
        for period, own in shards.items():
            by_shard = zip(*(shard[Derived.BEHAVIORS] for shard in own), strict=True)
            found[period][Derived.BEHAVIORS] = dict(zip(behaviors, map(sum, by_shard), strict=True))
    return found


def _names(source: Source | None) -> list[str] | None:
    """The names of the files of a source; None = it has no files."""
    if source is None or isinstance(source, pa.Table):
        return None
    return [source] if isinstance(source, str) else list(source)


def tie_warnings(label: Label, ties: dict[str, int]) -> list[str]:
    """A warning if so many train watch times are equal that labels from their ranks contain little information.

    Args:
        label: the label method.
        ties: the result of ``recpo.log.shaping.watch_ties``.
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


def unit_warnings(feedback: FeedbackDefinition) -> list[str]:
    """A warning if watch times and durations are so different that one of their units is probably wrong.

    The median watch time of each duration bucket is compared with the bucket's shortest duration. Plausible is a median
    ratio of 1/200 to 10 over the buckets, so a mistake of seconds for milliseconds is always outside.

    Args:
        feedback: with the fitted quantiles of the watch times.
    """
    medians = {bucket: quantiles[1] for bucket, quantiles in feedback.cutoffs.items()}
    ratios = [watched / feedback.duration_base**bucket for bucket, watched in medians.items() if watched > 0]
    if not ratios or _LEAST_RATIO <= (ratio := median(ratios)) <= _MOST_RATIO:
        return []
    return [
        f"the median watch time is about {ratio:.3g} times the duration: the unit of one is probably wrong; check "
        "--columns.watch_time_unit and --columns.duration_unit (seconds by default)"
    ]


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
        options: which engine to use, and its resources.
        work: an existing directory for temporary files, which the caller removes. Spark on a cluster needs a directory
            that every executor and this process can access.

    Raises:
        RecpoError: an option cannot be parsed, or the engine is not installed.
    """
    if options.engine == "spark":
        from recpo.log.spark_engine import SparkEngine  # imported here because Spark is optional

        return SparkEngine(work, options)
    return DuckDBEngine(work, options.memory_limit, options.threads)
