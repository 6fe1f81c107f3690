"""``Preparation`` has the options of a prepared directory; ``write_directory`` starts the engine and writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from tqdm import tqdm

from recpo.base.errors import RecpoError
from recpo.base.features import Side
from recpo.base.feedback import FeedbackRule
from recpo.base.ranges import NonNegativeInt, PositiveFloat, PositiveInt, validate_ranges
from recpo.log.csv_files import CsvFormat
from recpo.log.engine import DuckDBEngine, Engine, EngineOptions, Place, locate
from recpo.log.events import CatalogScope
from recpo.log.feature_columns import PRESET_FEATURES, EventColumns, FeatureColumns, behaviors_to_json, event_columns
from recpo.log.files import Log, find_files, write_frame
from recpo.log.prepare_run import STAGES, PrepareRun, describe
from recpo.log.schema import PRESETS, Columns, FlagColumn, PresetName
from recpo.log.shaping import Label, WatchQuantiles
from recpo.log.splits import Split, TemporalSplit
from recpo.log.writing import prepared_directory, work_directory, write_manifest

Source: TypeAlias = str | Sequence[str] | pa.Table


@dataclass(frozen=True)
class Sources:
    """What a prepared directory is made from: names of files, directories and patterns, or tables of rows.

    Attributes:
        log: the events.
        items: item table; None = there is none.
        users: user table; None = there is none.
    """

    log: Source
    items: Source | None = None
    users: Source | None = None

    @property
    def tables(self) -> dict[Side, bool]:
        """Whether there is a table of items and of users."""
        return {"item": self.items is not None, "user": self.users is not None}


@dataclass(frozen=True)
class Output:
    """Where a prepared directory is written, and with which engine.

    Attributes:
        out: the directory, local or in an object store.
        engine: what runs the expressions.
        work: directory for temporary files; None = beside ``out``.
        overwrite: replace ``out``, if it is a prepared directory.
        progress: show a bar on a terminal.
    """

    out: str | Path
    engine: EngineOptions = EngineOptions()  # noqa: RUF009  frozen
    work: str | Path | None = None
    overwrite: bool = False
    progress: bool = True


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
        return self.write(Sources(log, items, users), Output(out, engine, work, overwrite, progress))

    def write(self, sources: Sources, output: Output) -> dict[str, Any]:
        """Like ``run``, with its arguments in two groups."""
        self._validate_tables(sources)
        return write_directory(sources, output, partial(PrepareRun, self))

    def _validate_tables(self, sources: Sources) -> None:
        given = sources.tables
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
    sources: Sources,
    output: Output,
    run_with: Callable[[Engine, int, Path, Place, tqdm[Any]], PrepareRun],
    inputs: Sequence[Place] = (),
) -> dict[str, Any]:
    """Writes a prepared directory and returns its manifest.

    Args:
        sources: what is read; a frame is first written to a file in the directory for temporary files.
        output: where the directory is written, and with which engine.
        run_with: creates the run from the engine, the number of writers, the unfinished directory, the directory for
            temporary files, and the progress bar.
        inputs: further inputs besides the sources, which must lie outside of the output.
    """
    given = {what: source for what, source in vars(sources).items() if source is not None}
    names = {what: _names(source) for what, source in given.items() if not isinstance(source, pa.Table)}
    found = {what: find_files(listed, what) for what, listed in names.items()}
    work, engine = None if output.work is None else locate(output.work), output.engine
    read = [path for paths in found.values() for path in paths]
    read += [*(locate(name) for listed in names.values() for name in listed), *inputs]
    with prepared_directory(locate(output.out), work, overwrite=output.overwrite, inputs=read) as directory:
        with (
            work_directory(work, directory) as temporary,
            start_engine(engine, temporary) as started,
            tqdm(total=len(STAGES), desc="prepare", unit="stage", disable=None if output.progress else True) as bar,
        ):
            for what, source in given.items():
                if isinstance(source, pa.Table):
                    frame = "frame.parquet" if what == "log" else f"{what}-frame.parquet"
                    found[what] = [write_frame(source, temporary, frame)]
            run = run_with(started, engine.writers, directory, temporary, bar)
            manifest = run.manifest(found["log"], {"item": found.get("items", []), "user": found.get("users", [])})
        return write_manifest(directory, manifest, run.checksums)


def _names(source: str | Sequence[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


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
