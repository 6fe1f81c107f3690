"""Spark on this machine or a cluster, for logs beyond one machine: the same expressions, the same result.

Executors read the log, shuffle, sort and write; this process holds one batch of the result at a time. Every
materialized table and every stream is written as Parquet files into the work directory, in their order, and read back
from there, so the driver never collects more than small tables.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.log.engine import Engine, EngineOptions
from recpo.log.locations import Location, Place, readable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_ROWS: Final = 1 << 17
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


class SparkEngine(Engine):
    """Runs Ibis expressions on a Spark session: the existing one of this process, or a new one.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See ``Engine.__exit__``."""
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
            _remove(self._tables.pop(name))

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
        _remove(place)

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
    is_local = master.startswith("local")
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
    return sorted((f for f in place.files() if f.name.startswith("part-") and f.suffix == ".parquet"), key=_order)


def _order(part: Place) -> tuple[int, str]:
    return int(part.name.split("-")[1]), part.name


def _remove(place: Place) -> None:
    if isinstance(place, Path):
        shutil.rmtree(place)
    else:
        place.delete_directory()


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
