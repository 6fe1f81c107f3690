"""The verb ``prepare``: turns an interaction log into training, validation and test shards."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.base.frames import Frame, to_arrow
from recpo.log.csv_files import header, is_text_file, read_ids
from recpo.log.engine import EngineOptions
from recpo.log.extension import extend
from recpo.log.locations import locate
from recpo.log.prepare import Preparation
from recpo.log.prepared import Prepared
from recpo.log.schema import LogColumns
from recpo.log.writing import Output, Sources
from recpo.verbs.verb import WritingVerb, function_of


@dataclass(frozen=True)
class Prepare(Preparation, EngineOptions, WritingVerb[Prepared]):
    """Checks an interaction log and writes indexed, labeled, split and sorted shards.

    One error lists every fault of the log. Rejected: files that cannot be read, missing columns, wrong types, null
    users, items or times, times that do not parse (``skip_incomplete`` leaves these rows out). Neutralized and counted
    (the event stays, without that value): missing or impossible watch times, durations, labels and propensities.
    Dropped and counted: exact duplicates (equal in every column that is used), events of items outside the catalog.
    ``manifest.json`` has the counts. Everything is fitted on the train period only. Equal logs give equal bytes, for
    any order of rows and any engine.

    Raises:
        RecpoError: the log has faults (all of them in one message), or cannot be split; an option is out of range, or
            differs from that of ``extends``; ``log`` is not later than ``extends``; ``out`` exists and ``overwrite`` is
            False, or it is not a prepared directory, or it contains the log.
    """

    first_day: ClassVar = (
        "log",
        "out",
        "columns",
        "preset",
        "split",
        "label",
        "items",
        "users",
        "extends",
        "overwrite",
    )

    log: str | Path | Sequence[str | Path] | Frame
    """Parquet or CSV file (``.csv``, ``.csv.gz``), directory of such files, or glob pattern; or a list of these. A
    name with a scheme (s3://, gs://, abfs://, hdfs://) is in an object store. Or a frame (pandas, polars, pyarrow),
    which is first written to a temporary file in ``work``, because the engines read the log several times"""
    out: str | Path
    """output directory, local or in an object store"""
    _: KW_ONLY
    items: str | Path | Sequence[str | Path] | Frame | None = None
    """item table with features, one row per item; files or a frame, as in ``log``. ``features`` maps columns to
    features; the default is the preset's mapping, or the types of the columns (docs/features.md). Rows of items
    outside the catalog are counted in the manifest. With ``extends``, rows of new and changed items are enough"""
    users: str | Path | Sequence[str | Path] | Frame | None = None
    """user table with features, one row per user; files or a frame, as in ``log``"""
    extends: Prepared | str | Path | None = None
    """prepared directory of the days before ``log``. ``out`` then holds both: items and users keep their numbers, the
    periods roll forward, and fitted values are kept (``recpo.log.extension.extend``). The other options are taken
    from that directory"""
    retire: list[int] | list[str] | str | Path = field(default_factory=list)
    """with ``extends``, items that are no longer candidates: their ids, or a Parquet or CSV file with a column
    ``item_id``, or your own name of it. They keep their numbers and stay in histories; no evaluation and no bundle
    lists them"""
    work: str | Path | None = None
    """directory for temporary files; null = next to ``out``, or the system's if ``out`` is in an object store. Spark
    on a cluster needs a directory that all its machines can access (hdfs://, s3://, a network mount)"""

    def __post_init__(self) -> None:
        Preparation.__post_init__(self)
        EngineOptions.__post_init__(self)

    def execute(self) -> Prepared:
        """Checks the whole log, then writes the directory."""
        place, choice = fspath(self.out), self.part(Preparation)
        items, users = (
            None if table is None else source_of(table, what)
            for what, table in (("items", self.items), ("users", self.users))
        )
        sources = Sources(source_of(self.log, "log"), items, users)
        output = Output(place, self.part(EngineOptions), self.work, self.overwrite, self.progress)
        if self.extends is not None:
            kept = Prepared.open(self.extends)
            extend(kept, choice, sources, output, retire=_item_ids(self.retire, kept))
        elif self.retire != []:
            raise RecpoError(
                "retire: items can be retired only when a catalog is extended: name the directory with --extends",
                field="retire",
                code="missing_option",
            )
        else:
            choice.write(sources, output)
        return Prepared.open(locate(place))


prepare = function_of(Prepare)


def _item_ids(given: list[int] | list[str] | str | Path, data: Prepared) -> list[Any]:
    """The given ids, or the column of ids of a file, in the type of the item ids of ``data``."""
    if isinstance(given, list):
        return list(given)
    file, known = Path(given), data.item_ids()
    try:
        names = header(file) if is_text_file(file) else pq.read_schema(file).names
        column = data.item_column if data.item_column in names else LogColumns.ITEM_ID
        found = read_ids(file, column, known.type) if is_text_file(file) else pq.read_table(file)[column]
        known.to_internal(found)  # refuses ids of another type
    except (OSError, KeyError, pa.ArrowException) as error:
        raise RecpoError(
            f"retire: {file} is not a Parquet or CSV file with a column item_id ({error})",
            code="wrong_file",
            field="retire",
        ) from error
    except RecpoError as error:
        raise RecpoError(f"retire: {file}: {error}", code="wrong_type", field="retire") from error
    ids: list[Any] = found.to_pylist()
    return ids


def source_of(log: str | Path | Sequence[str | Path] | Frame, what: str) -> list[str] | pa.Table:
    """Names of files, or the table of a frame."""
    if isinstance(log, str | PathLike):
        return [fspath(log)]
    if isinstance(log, Sequence):
        if not all(isinstance(name, str | PathLike) for name in log):
            raise RecpoError(
                f"{what}: a list may hold only file names; give a frame without a list", code="wrong_type", field=what
            )
        if not log:
            raise RecpoError(
                f"{what}: an empty list names no file; expected files, directories or patterns",
                field=what,
                code="empty",
            )
        return [fspath(name) for name in log]
    return to_arrow(log, what)
