"""The default engine: DuckDB inside this process, out of core."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.log.engine import Engine
from recpo.log.locations import Location, Place

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
            raise RecpoError(f"work {work}: DuckDB writes its temporary files to a local directory")
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
                f"DuckDB could not start with memory_limit {memory_limit!r} in {work}: {_first_line(error)}"
            ) from error
        self._work, self._given = work, dict[str, str]()
        # Time strings without an offset are UTC, regardless of the machine's time zone.
        self._connection.raw_sql("SET TimeZone = 'UTC'")
        # In a notebook without ipywidgets, DuckDB has no progress bar and raises an error if it is turned off.
        with suppress(duckdb.InvalidInputException):
            self._connection.raw_sql("SET enable_progress_bar = false")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See ``Engine.__exit__``."""
        with suppress(duckdb.Error):
            self._connection.disconnect()
        # Ibis reads through Arrow. If pages are damaged, DuckDB interrupts Arrow with a bare RuntimeError.
        interrupted = type(error) is RuntimeError and "interrupted" in str(error)
        if not (interrupted or isinstance(error, duckdb.Error | pa.ArrowException)):
            return
        said = _first_line(error)
        if fault := next((text for known, text in _DISK_FAULTS.items() if known in said), None):
            raise RecpoError(f"{self._work}: {fault}, or choose another --work ({said})") from error
        if isinstance(error, duckdb.OutOfMemoryException):
            raise RecpoError(f"the engine ran out of memory: raise memory_limit ({said})") from error
        raise RecpoError(f"the engine could not read the log, a file of which may be damaged: {said}") from error

    def read_parquet(self, files: Sequence[Place], columns: Sequence[str]) -> ir.Table:
        """See ``Engine.read_parquet``. Used columns of files in an object store are first copied into ``work``."""
        first = len(self._given)  # the files of an earlier call keep their names
        paths = [
            self._linked(file, number)
            if isinstance(file, Path)
            else self._copied(file, columns, self._work / f"copy-{number}.parquet")
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

    def _copied(self, file: Location, columns: Sequence[str], copy: Path) -> Path:
        """Copied because the log is read several times, and reading it over the network once is enough."""
        with file.open_input() as source, pq.ParquetFile(source, pre_buffer=True) as parquet:
            chosen = [name for name in parquet.schema_arrow.names if name in set(columns)]
            schema = pa.schema([parquet.schema_arrow.field(name) for name in chosen])
            with pq.ParquetWriter(copy, schema) as writer:
                for batch in parquet.iter_batches(_BATCH_ROWS, columns=chosen):
                    writer.write_batch(batch)
        return copy

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


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0]
