"""The verb ``prepare``: turns an interaction log into training, validation and test shards."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path as FilePath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.data.csv_files import CsvFormat, header, is_text_file, read_ids
from recpo.data.engine import EngineOptions
from recpo.data.extension import extend
from recpo.data.feature_columns import FeatureColumns
from recpo.data.locations import locate
from recpo.data.prepare import Preparation
from recpo.data.prepared import Prepared
from recpo.data.schema import Columns, FlagColumn, LogColumns, PresetName
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
from recpo.errors import RecpoError
from recpo.features.schema import Categories, Category, Number, Vector
from recpo.feedback import FeedbackRule
from recpo.frames import Frame, to_arrow

# Imported so that their short names work as class paths on the command line.
__all__ = [
    "D2Q",
    "BinaryColumn",
    "Categories",
    "Category",
    "EveryEvent",
    "LeaveLastOut",
    "Number",
    "NumericColumn",
    "Vector",
    "WatchRatio",
    "WatchTimeGain",
    "prepare",
]

Path = str | PathLike[str]


def prepare(
    log: Path | Sequence[Path] | Frame,
    out: Path,
    *,
    items: Path | Sequence[Path] | Frame | None = None,
    users: Path | Sequence[Path] | Frame | None = None,
    extends: Prepared | Path | None = None,
    retire: list[int] | list[str] | Path = [],  # noqa: B006  never changed
    preset: PresetName = "plain",
    columns: Columns = Columns(),  # noqa: B008 frozen
    split: Split = TemporalSplit(),  # noqa: B008 frozen
    label: Label = WatchQuantiles(),  # noqa: B008 frozen
    feedback: FeedbackRule = FeedbackRule(),  # noqa: B008 frozen
    max_context: int = 200,
    rows_per_shard: int = 500_000,
    min_user_events: int = 0,
    min_item_events: int = 1,
    catalog: Literal["train", "log", "items"] = "train",
    max_watch_time: float = 86_400.0,
    strict: bool = False,
    features: FeatureColumns = FeatureColumns(),  # noqa: B008 frozen
    behaviors: dict[str, FlagColumn | str] | None = None,
    csv: CsvFormat = CsvFormat(),  # noqa: B008 frozen
    engine: Literal["duckdb", "spark"] = "duckdb",
    memory_limit: str = "4GB",
    threads: int | None = None,
    spark_master: str = "local[*]",
    spark_conf: dict[str, str | int | float | bool] = {},  # noqa: B006  never changed
    work: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Prepared:
    """Checks an interaction log and writes indexed, labeled, split and sorted shards.

    One error lists every fault of the log. Rejected: files that cannot be read, missing columns, wrong types, null
    users, items or times, times that do not parse. Neutralized and counted (the event stays, without that value):
    missing or impossible watch times, durations, labels and propensities. Dropped and counted: exact duplicates (equal
    in every column that is used), events of items outside the catalog. ``manifest.json`` has the counts. Everything is
    fitted on the train period only. Equal logs give equal bytes, for any order of rows and any engine.

    Args:
        log: Parquet or CSV file (``.csv``, ``.csv.gz``), directory of such files, or glob pattern; or a list of these.
            A name with a scheme (s3://, gs://, abfs://, hdfs://) is in an object store. Or a frame (pandas, polars,
            pyarrow), which is first written to a temporary file in ``work``, because the engines read the log several
            times.
        out: output directory, local or in an object store.
        items: item table with features, one row per item; files or a frame, as in ``log``. ``features`` maps columns to
            features; the default is the preset's mapping, or the types of the columns (docs/features.md). Rows of items
            outside the catalog are counted in the manifest. With ``extends``, rows of new and changed items are enough.
        users: user table with features, one row per user; files or a frame, as in ``log``.
        extends: prepared directory of the days before ``log``. ``out`` then holds both: items and users keep their
            numbers, the periods roll forward, and fitted values are kept (``recpo.data.extension.extend``). The other
            options are taken from that directory.
        retire: with ``extends``, items that are no longer candidates: their ids, or a Parquet or CSV file with a column
            ``item_id``, or your own name of it. They keep their numbers and stay in histories; no evaluation and no
            bundle lists them.
        preset: column names and units to start from, including features and behaviors.
        columns: columns and units that differ from the preset.
        split: TemporalSplit or LeaveLastOut.
        label: how the preference label is made: WatchQuantiles, WatchRatio, D2Q, WatchTimeGain, BinaryColumn,
            NumericColumn or EveryEvent.
        feedback: which labels make an event positive or skipped; training and evaluation on this log use this
            definition.
        max_context: number of earlier events that a held-out user keeps as context, and number of events in a serving
            history.
        rows_per_shard: a shard ends with the user who reaches this number of rows.
        min_user_events: drop users with fewer train events; 0 keeps users who first appear later.
        min_item_events: drop items with fewer events in the period that ``catalog`` names; counted before users.
        catalog: the items of the train period (train), so that the catalog contains no information about the future; of
            the full log (log); or of the train period and of the item table, whose items can be recommended before
            their first event (items).
        max_watch_time: maximum possible watch time in seconds.
        strict: reject impossible values and exact duplicates instead of neutralizing or dropping them.
        features: features of items, users and requests, and the columns that they are read from.
        behaviors: named feedback besides label and dislike: name -> column of the log (bool or 0/1), such as ``{"like":
            "is_like"}``, or name -> ``{column: thumb, equals: up}``; null = the preset's.
        csv: format of text files: their delimiter, such as ``::``, and their column names if the first line has none.
        engine: duckdb inside this process, or spark for logs that do not fit on one machine; the result is the same.
        memory_limit: memory of DuckDB, of Spark's local process or of each Spark executor, before it spills to disk.
        threads: worker threads of DuckDB or of Spark's local process; null = one per core.
        spark_master: where Spark runs: local[*], spark://host:port, yarn, k8s://...
        spark_conf: further Spark settings by name, as a dictionary.
        work: directory for temporary files; null = next to ``out``, or the system's if ``out`` is in an object store.
            Spark on a cluster needs a directory that all its machines can access (hdfs://, s3://, a network mount).
        overwrite: replace ``out`` if it is a prepared directory.
        progress: show a progress bar on a terminal.

    Returns:
        The prepared directory; ``manifest["counts"]`` says what happened to the events.

    Raises:
        RecpoError: the log has faults (all of them in one message), or cannot be split; an option is out of range, or
            differs from that of ``extends``; ``log`` is not later than ``extends``; ``out`` exists and ``overwrite`` is
            False, or it is not a prepared directory, or it contains the log.
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
        features=features,
        behaviors=behaviors,
        csv=csv,
    )
    options = EngineOptions(engine, memory_limit, threads, spark_master, spark_conf)
    place = fspath(out)
    common: dict[str, Any] = {"engine": options, "work": work, "overwrite": overwrite, "progress": progress}
    common |= {"items": None if items is None else _source(items, "items")}
    common |= {"users": None if users is None else _source(users, "users")}
    if extends is None:
        if retire != []:
            raise RecpoError(
                "retire: items can be retired only when a catalog is extended: name the directory with --extends"
            )
        preparation.run(_source(log, "log"), place, **common)
    else:
        kept = extends if isinstance(extends, Prepared) else Prepared.open(fspath(extends))
        extend(kept, preparation, _source(log, "log"), place, retire=_item_ids(retire, kept), **common)
    return Prepared.open(locate(place))


def _item_ids(given: list[int] | list[str] | Path, data: Prepared) -> list[Any]:
    """The given ids, or the column of ids of a file, in the type of the item ids of ``data``."""
    if isinstance(given, list):
        return list(given)
    file, known = FilePath(given), data.item_ids()
    try:
        names = header(file) if is_text_file(file) else pq.read_schema(file).names
        column = data.item_column if data.item_column in names else LogColumns.ITEM_ID
        found = read_ids(file, column, known.type) if is_text_file(file) else pq.read_table(file)[column]
        known.to_internal(found)  # refuses ids of another type
    except (OSError, KeyError, pa.ArrowException) as error:
        raise RecpoError(f"retire: {file} is not a Parquet or CSV file with a column item_id ({error})") from error
    except RecpoError as error:
        raise RecpoError(f"retire: {file}: {error}") from error
    ids: list[Any] = found.to_pylist()
    return ids


def _source(log: Path | Sequence[Path] | Frame, what: str) -> list[str] | pa.Table:
    """Names of files, or the table of a frame."""
    if isinstance(log, str | PathLike):
        return [fspath(log)]
    if isinstance(log, Sequence):
        if not all(isinstance(name, str | PathLike) for name in log):
            raise RecpoError(f"{what}: a list may hold only file names; give a frame without a list")
        if not log:
            raise RecpoError(f"{what} []: an empty list; name at least one file, directory or pattern")
        return [fspath(name) for name in log]
    return to_arrow(log, what)
