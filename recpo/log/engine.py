"""The engine behind the Ibis expressions that read a log.

Only the two implementations know which engine runs. Everything else reads files, and materializes, streams or reduces
expressions, with the same result on both. The default is DuckDB inside this process, out of core. Spark, on this
machine or a cluster, is for logs beyond one machine.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, unquote

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError, first_line, validate_range
from recpo.log.locations import Location, Place, readable, remove_directory, writable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The engines flatten nested selects themselves; Ibis would take a fifth of the time of a small log.
ibis.options.sql.fuse_selects = False

_MOST_THREADS: Final = 1024
_MEMORY: Final = re.compile(r"(0*[1-9]\d*(?:\.\d+)?)\s*(?:([kmgt])(i?))?b", re.IGNORECASE)


class Engine(ABC):
    """Runs Ibis expressions.

    Attributes:
        FILE: column with the file of each row of a log.
        ROW: column with the number of each row in its file, from 0.
    """

    FILE: Final = "__file"
    ROW: Final = "__row"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close(failure[1])

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Disconnects. Turns an error of the engine into ``RecpoError``."""

    @abstractmethod
    def read_parquet(self, files: Sequence[Place], columns: Sequence[str]) -> ir.Table:
        """All rows of ``files``, with the columns ``columns``, ``FILE`` and ``ROW``.

        If a column has several numeric types, it gets one type that can hold all values.
        """

    @abstractmethod
    def file_of(self, value: str) -> str:
        """Translates a value of ``FILE`` to the name of the file as it was given to ``read_parquet``."""

    @abstractmethod
    def materialize(self, name: str, expression: ir.Table) -> ir.Table:
        """Computes ``expression`` once and returns the result as a table of the engine."""

    @abstractmethod
    def drop(self, *names: str) -> None:
        """Frees materialized tables."""

    @abstractmethod
    def table(self, expression: ir.Table) -> pa.Table:
        """The whole result in memory; for small results."""

    @abstractmethod
    def stream(self, expression: ir.Table) -> Iterator[pa.RecordBatch]:
        """The result in order, batch by batch. Read it to the end before the next expression runs."""

    def count(self, rows: ir.Table) -> int:
        """Number of rows."""
        return int(self.row(rows.aggregate(rows=rows.count()))["rows"])

    def row(self, expression: ir.Table) -> dict[str, Any]:
        """The only row of ``expression``, as Python values."""
        return self.table(expression).to_pylist()[0]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine to use, and its resources."""

    engine: Literal["duckdb", "spark"] = "duckdb"
    """DuckDB inside this process, or Spark"""
    memory_limit: str = "4GB"
    """how much memory DuckDB, Spark's local process or each executor of a Spark cluster may use before it writes to
    disk, for example ``"4GB"``"""
    threads: int | None = None
    """number of worker threads of DuckDB or of Spark's local process; None = one per core"""
    spark_master: str = "local[*]"
    """where Spark runs: ``local[*]`` (this machine), ``spark://host:port``, ``yarn``, ``k8s://...``"""
    spark_conf: dict[str, str | int | float | bool] = field(default_factory=dict)
    """further Spark settings by name"""

    def __post_init__(self) -> None:
        rule = f"must be 1 to {_MOST_THREADS}, or null for one per core"
        validate_range(self.threads is None or 1 <= self.threads <= _MOST_THREADS, "threads", rule, self.threads)
        if not _MEMORY.fullmatch(self.memory_limit.strip()):
            raise RecpoError(
                f"memory_limit {self.memory_limit!r}: expected something like 4GB or 512MB",
                code="bad_value",
                field="memory_limit",
            )

    @property
    def memory_bytes(self) -> int:
        """The bytes of ``memory_limit``."""
        number, unit, is_binary = _MEMORY.fullmatch(self.memory_limit.strip()).groups()  # type: ignore[union-attr]
        power = "kmgt".index(unit.lower()) + 1 if unit else 0
        return int(float(number) * (1024 if is_binary else 1000) ** power)

    @property
    def writers(self) -> int:
        """Number of threads of this process that encode shards."""
        return self.threads or os.cpu_count() or 1


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
        return SparkEngine(work, options)
    return DuckDBEngine(work, options.memory_limit, options.threads)


_BATCH_ROWS: Final = 1 << 17
_PATTERN: Final = frozenset("*?[]{}")
#: DuckDB's messages about a disk that it cannot write to, and recpo's message for each
_DISK_FAULTS: Final = {
    "No space left": "the disk is full: free space",
    "Disk quota exceeded": "your disk quota is used up: free space",
    "Read-only file system": "the file system is read-only: make it writable",
    "Permission denied": "permission denied: change the permissions",
}


class DuckDBEngine(Engine):
    """Runs Ibis expressions on DuckDB. Tables are in memory up to ``memory_limit``, and beyond it in ``work``.

    Args:
        work: an existing local directory for temporary files; the caller removes it.
        memory_limit: how much memory the engine may use before it writes to ``work``, for example ``"4GB"``.
        threads: number of worker threads; None = one per core.

    Raises:
        RecpoError: ``memory_limit`` cannot be parsed, or ``work`` is not local.
    """

    def __init__(self, work: Place, memory_limit: str = "4GB", threads: int | None = None) -> None:
        if isinstance(work, Location):
            raise RecpoError(
                f"work {work}: DuckDB writes its temporary files to a local directory", code="not_local", field="work"
            )
        settings: dict[str, Any] = {
            "memory_limit": memory_limit,
            "temp_directory": str(work / "spill"),
            # The expressions order their output where it matters. Keeping the input's order would cost memory.
            "preserve_insertion_order": False,
        }
        if threads is not None:
            settings["threads"] = threads
        try:
            # A database file would compress and write every table. An in-memory database writes only what exceeds
            # memory_limit.
            self._connection = ibis.duckdb.connect(**settings)
        except duckdb.Error as error:
            raise RecpoError(
                f"DuckDB could not start with memory_limit {memory_limit!r} in {work}: {first_line(error)}",
                code="failed",
                field="memory_limit",
            ) from error
        self._work, self._given = work, dict[str, str]()
        # Time strings without an offset are UTC, regardless of the machine's time zone.
        self._connection.raw_sql("SET TimeZone = 'UTC'")
        # In a notebook without ipywidgets, DuckDB has no progress bar and raises an error if it is turned off.
        with suppress(duckdb.InvalidInputException):
            self._connection.raw_sql("SET enable_progress_bar = false")

    def close(self, error: BaseException | None) -> None:
        """See ``Engine.close``."""
        with suppress(duckdb.Error):
            self._connection.disconnect()
        # Ibis reads through Arrow. If pages are damaged, DuckDB interrupts Arrow with a bare RuntimeError.
        interrupted = type(error) is RuntimeError and "interrupted" in str(error)
        if not (interrupted or isinstance(error, duckdb.Error | pa.ArrowException)):
            return
        said = first_line(error)
        if fault := next((text for known, text in _DISK_FAULTS.items() if known in said), None):
            raise RecpoError(
                f"{self._work}: {fault}, or choose another --work ({said})", code="resources", field="work"
            ) from error
        if isinstance(error, duckdb.OutOfMemoryException):
            raise RecpoError(
                f"the engine ran out of memory: raise memory_limit ({said})", code="resources", field="memory_limit"
            ) from error
        raise RecpoError(
            f"the engine could not read the log, a file of which may be damaged: {said}", code="damaged", field="log"
        ) from error

    def read_parquet(self, files: Sequence[Place], columns: Sequence[str]) -> ir.Table:
        """See ``Engine.read_parquet``.

        Used columns of files in an object store are first copied into ``work``: the log is read several times, and
        reading it over the network once is enough.
        """
        first = len(self._given)  # the files of an earlier call keep their names
        paths = [
            self._linked(file, number)
            if isinstance(file, Path)
            else copy_columns(file, columns, self._work / f"copy-{number}.parquet")
            for number, file in enumerate(files, first)
        ]
        self._given |= {str(path): str(file) for path, file in zip(paths, files, strict=True)}
        # Parquet's statistics ignore nan. Without this setting, DuckDB takes isnan as false if the statistics are
        # finite.
        options = {"filename": True, "file_row_number": True, "union_by_name": True, "can_have_nan": True}
        options["hive_partitioning"] = False  # names of directories are not columns
        log = self._connection.read_parquet([str(path) for path in paths], **options)
        return log.rename({self.FILE: "filename", self.ROW: "file_row_number"})

    def _linked(self, file: Path, number: int) -> Path:
        """A path that DuckDB neither completes nor reads as a pattern."""
        path = Path(os.path.realpath(file))
        if not _PATTERN & set(str(path)):
            return path
        link = self._work / f"link-{number}.parquet"
        link.symlink_to(path)
        return link

    def file_of(self, value: str) -> str:
        """See ``Engine.file_of``."""
        return self._given[value]

    def materialize(self, name: str, expression: ir.Table) -> ir.Table:
        """See ``Engine.materialize``."""
        return self._connection.create_table(name, expression)

    def drop(self, *names: str) -> None:
        """See ``Engine.drop``."""
        for name in names:
            # With recent versions of sqlglot, Ibis 12 writes a DROP without the table's name.
            self._connection.raw_sql(f'DROP TABLE "{name}"')

    def table(self, expression: ir.Table) -> pa.Table:
        """See ``Engine.table``."""
        return self._connection.to_pyarrow(expression)

    def stream(self, expression: ir.Table) -> Iterator[pa.RecordBatch]:
        """See ``Engine.stream``."""
        # Ibis 12 calls a method that DuckDB 2 renamed. The relation's own reader works in every version.
        sql = self._connection.compile(expression)
        yield from self._connection.con.sql(sql).to_arrow_reader(_BATCH_ROWS)


_JAVA: Final = 17
#: settings that the result depends on
_SQL: Final = {
    # as in DuckDB, an overflow is an error and names are not reinterpreted
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "true",
    "spark.sql.session.timeZone": "UTC",
    # nanoseconds are read as integers, and _column converts them to times
    "spark.sql.legacy.parquet.nanosAsLong": "true",
}
_REMEDY: Final = f"Spark needs Java {_JAVA} or newer (set JAVA_HOME, or put java on the PATH)"


def copy_columns(file: Place, columns: Collection[str], copy: Place) -> Place:
    """Writes those of ``columns`` that a Parquet file has to the file ``copy``, and returns ``copy``."""
    with pq.ParquetFile(readable(file), pre_buffer=True) as parquet:
        chosen = [name for name in parquet.schema_arrow.names if name in columns]
        schema = pa.schema([parquet.schema_arrow.field(name) for name in chosen])
        with writable(copy) as sink, pq.ParquetWriter(sink, schema) as writer:
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=chosen):
                writer.write_batch(batch)
    return copy


class SparkEngine(Engine):
    """Runs Ibis expressions on a Spark session: the existing one of this process, or a new one.

    Executors read the log, shuffle, sort and write; this process holds one batch of the result at a time. Every
    materialized table and every stream is written as Parquet files into the work directory, in their order, and read
    back from there, so the driver never collects more than small tables.

    Args:
        work: an existing directory for temporary files; on a cluster, one that the executors and this process share.
        options: master, memory and settings; an existing session keeps its own.

    Raises:
        RecpoError: pyspark or Java is missing, or an option cannot be parsed.
    """

    def __init__(self, work: Place, options: EngineOptions) -> None:
        self._work, self._given, self._tables = work, dict[str, str](), dict[str, Place]()
        self._streams, self._reads = 0, 0
        self._session, self._is_ours = _session(work, options)
        self._connection = ibis.pyspark.connect(self._session)

    def close(self, error: BaseException | None) -> None:
        """See ``Engine.close``."""
        for name in self._tables:
            self._session.catalog.dropTempView(name)
        if self._is_ours:
            self._session.stop()
        _report(error)

    def read_parquet(self, files: Sequence[Place], columns: Sequence[str]) -> ir.Table:
        """See ``Engine.read_parquet``; executors read the files where they are."""
        self._reads += 1
        self._given |= {_plain(quote(_spark_uri(file), safe=":/")): str(file) for file in files}
        alike: dict[pa.Schema, list[Place]] = {}
        for file in files:
            with pq.ParquetFile(readable(file)) as parquet:
                found = parquet.schema_arrow
            kinds = pa.schema([found.field(name).remove_metadata() for name in sorted(set(columns) & set(found.names))])
            alike.setdefault(kinds.remove_metadata(), []).append(file)
        # Spark reads files of one schema at a time; the union widens numbers as DuckDB does.
        log, *others = (self._read_alike(schema, group) for schema, group in alike.items())
        for other in others:
            log = log.unionByName(other, allowMissingColumns=True)
        return self._view(f"log_{self._reads}", log)

    def _read_alike(self, schema: pa.Schema, files: Sequence[Place]) -> DataFrame:
        rows = self._session.read.parquet(*[_pattern(file) for file in files])
        columns = [_column(field) for field in schema]
        return rows.selectExpr(
            *columns, f"_metadata.file_path AS `{self.FILE}`", f"_metadata.row_index AS `{self.ROW}`"
        )

    def file_of(self, value: str) -> str:
        """See ``Engine.file_of``."""
        return self._given[_plain(value)]

    def materialize(self, name: str, expression: ir.Table) -> ir.Table:
        """See ``Engine.materialize``."""
        self._tables[name] = self._written(name, expression)
        return self._view(name, self._session.read.parquet(_pattern(self._tables[name])))

    def drop(self, *names: str) -> None:
        """See ``Engine.drop``."""
        for name in names:
            self._session.catalog.dropTempView(name)
            remove_directory(self._tables.pop(name))

    def table(self, expression: ir.Table) -> pa.Table:
        """See ``Engine.table``."""
        return self._run(expression).toArrow()

    def stream(self, expression: ir.Table) -> Iterator[pa.RecordBatch]:
        """See ``Engine.stream``. The executors sort and write; this process reads one file after the other."""
        self._streams += 1
        place = self._written(f"stream-{self._streams}", expression)
        for part in _parts(place):
            with pq.ParquetFile(readable(part)) as parquet:
                yield from parquet.iter_batches(_BATCH_ROWS)
        remove_directory(place)

    def _run(self, expression: ir.Table) -> DataFrame:
        return self._session.sql(self._connection.compile(expression))

    def _view(self, name: str, rows: DataFrame) -> ir.Table:
        rows.createOrReplaceTempView(name)
        return self._connection.table(name)

    def _written(self, name: str, expression: ir.Table) -> Place:
        place = self._work / name
        self._run(expression).write.parquet(_spark_uri(place))
        if not _parts(place):
            raise RecpoError(
                f"work {self._work}: Spark's executors wrote {name} and this process cannot see it; on a cluster give "
                "--work a directory that all of them share (hdfs://, s3://, a network mount)",
                code="not_local",
                field="work",
            )
        return place


def _session(work: Place, options: EngineOptions) -> tuple[SparkSession, bool]:
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise RecpoError(
            "engine spark: pyspark is missing: `pip install recpo[spark]`", code="not_installed", field="pyspark"
        ) from error
    running = SparkSession.getActiveSession()
    if running is not None:
        session = running.newSession()  # the same cluster, but with separate settings and tables
        for name, value in _SQL.items():
            session.conf.set(name, value)
        return session, False
    if not _has_java():
        raise RecpoError(f"engine spark: no Java was found; {_REMEDY}", code="not_installed", field="java")
    builder = SparkSession.builder.appName("recpo prepare")
    for name, value in _settings(work, options).items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate(), True
    except PySparkException as error:
        raise RecpoError(
            f"engine spark: Spark does not start ({_first_line(error)}); {_REMEDY}", code="failed", field="engine"
        ) from error


def _settings(work: Place, options: EngineOptions) -> dict[str, Any]:
    # Spark does not start with less memory
    memory, master = f"{max(512, options.memory_bytes >> 20)}m", options.spark_master
    is_local = master == "local" or master.startswith("local[")  # a local-cluster has executors of their own
    if is_local and options.threads is not None:
        master = f"local[{options.threads}]"
    settings: dict[str, Any] = {
        "spark.master": master,
        "spark.driver.memory" if is_local else "spark.executor.memory": memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        **_SQL,
    }
    if is_local:
        settings["spark.sql.shuffle.partitions"] = str(4 * (options.threads or os.cpu_count() or 1))
        if isinstance(work, Path):
            settings["spark.local.dir"] = str((work / "spill").absolute())
    return settings | options.spark_conf


def _has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return bool(home and (Path(home) / "bin" / "java").exists()) or shutil.which("java") is not None


def _column(field: pa.Field) -> str:
    name = "`" + field.name.replace("`", "``") + "`"
    if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
        return f"timestamp_micros(({name} + 500) div 1000) AS {name}"  # rounded to the nearest, as in DuckDB
    return name


def _spark_uri(place: Place) -> str:
    """The URI with which Spark writes to ``place``. Every character is literal."""
    if isinstance(place, Path):
        return f"file://{place.absolute()}"
    # Hadoop's scheme for the maintained connector
    return f"s3a{str(place).removeprefix('s3')}" if str(place).startswith("s3://") else str(place)


def _pattern(place: Place) -> str:
    """The pattern with which Spark reads ``place``; it only matches this file."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", _spark_uri(place))


def _plain(uri: str) -> str:
    """Normalizes the several spellings that Spark has for a file."""
    return re.sub(r"^file:/+", "/", unquote(uri))


def _parts(place: Place) -> list[Path] | list[Location]:
    """The files that Spark wrote (part-<number>-...), in the order of their rows. Numbers may differ in length."""
    if isinstance(place, Path):
        return sorted(place.glob("part-*.parquet"), key=_order)
    return sorted((file for file in place.files() if fnmatchcase(file.name, "part-*.parquet")), key=_order)


def _order(part: Place) -> tuple[int, str]:
    return int(part.name.split("-")[1]), part.name


def _report(error: BaseException | None) -> None:
    """Turns errors that the user can fix into ``RecpoError``."""
    text = str(error)
    kind = type(error).__module__.partition(".")[0]
    if kind not in ("pyspark", "py4j"):
        return
    if "OutOfMemoryError" in text or "exceeded memory limits" in text:
        raise RecpoError(
            "Spark ran out of memory: raise memory_limit", code="resources", field="memory_limit"
        ) from error
    if "No FileSystem for scheme" in text or "FileSystem not found" in text:
        raise RecpoError(
            "Spark has no connector for this object store: add it with --spark_conf, for example spark.jars.packages: "
            f"org.apache.hadoop:hadoop-aws ({_first_line(text)})",
            code="not_installed",
            field="spark_conf",
        ) from error
    if any(word in text for word in ("FAILED_READ_FILE", "CANNOT_READ", "INCOMPATIBLE_COLUMN_TYPE", "CAST_")):
        raise RecpoError(f"Spark could not read the log: {_first_line(text)}", code="failed", field="engine") from error


def _first_line(error: Any) -> str:
    lines = [line.strip(": ") for line in str(error).strip().splitlines()]
    return next((line for line in lines if line and "An error occurred while calling" not in line), "no reason given")[
        :300
    ]
