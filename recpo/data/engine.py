"""The connection behind the Ibis expressions: an embedded DuckDB that works out of core.

Nothing outside this file knows which engine runs: an expression is read, materialised, streamed or reduced to a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import duckdb
import ibis
import ibis.expr.types as ir
import pyarrow as pa

from recpo.errors import RecpoError

_BATCH_ROWS: Final = 1 << 17


class Engine:
    """Runs Ibis expressions on DuckDB, whose tables and spilled data live in ``work``.

    Args:
        work: an existing directory for temporary files; the caller removes it.
        memory_limit: how much the engine may hold in memory before it writes to ``work``, for example ``"4GB"``.
        threads: worker threads; None = one for each core.

    Raises:
        RecpoError: ``memory_limit`` cannot be read.
    """

    FILE: Final = "__file"
    ROW: Final = "__row"

    def __init__(self, work: Path, memory_limit: str = "4GB", threads: int | None = None) -> None:
        settings: dict[str, Any] = {
            "memory_limit": memory_limit,
            "temp_directory": str(work / "spill"),
            # Output is ordered explicitly where order matters; keeping the input's order costs memory.
            "preserve_insertion_order": False,
        }
        if threads is not None:
            settings["threads"] = threads
        try:
            self._connection = ibis.duckdb.connect(work / "events.duckdb", **settings)
        except duckdb.Error as error:
            raise RecpoError(
                f"memory_limit {memory_limit!r}: expected something like 4GB or 512MB ({error})"
            ) from error
        # Strings without an offset are UTC whatever the machine's zone is.
        self._connection.raw_sql("SET TimeZone = 'UTC'")
        # In a notebook without ipywidgets DuckDB has no bar to turn off, and says so with an error.
        with suppress(duckdb.InvalidInputException):
            self._connection.raw_sql("SET enable_progress_bar = false")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.disconnect()
        if isinstance(error, duckdb.OutOfMemoryException):
            raise RecpoError(f"the engine ran out of memory: raise memory_limit ({_first_line(error)})") from error
        if isinstance(error, (duckdb.IOException, duckdb.InvalidInputException, duckdb.ConversionException)):
            raise RecpoError(f"the engine could not read the log: {_first_line(error)}") from error

    def read_parquet(self, files: Sequence[Path]) -> ir.Table:
        """All rows of ``files`` with the columns ``FILE`` (path) and ``ROW`` (row number in the file, from 0)."""
        log = self._connection.read_parquet(
            [str(file) for file in files], filename=True, file_row_number=True, union_by_name=True
        )
        return log.rename({self.FILE: "filename", self.ROW: "file_row_number"})

    def materialise(self, name: str, expression: ir.Table) -> ir.Table:
        """Computes ``expression`` once and returns it as a table of the engine."""
        return self._connection.create_table(name, expression)

    def drop(self, *names: str) -> None:
        """Frees materialised tables."""
        for name in names:
            # Ibis 12 writes a DROP without the table's name with recent versions of sqlglot.
            self._connection.raw_sql(f'DROP TABLE "{name}"')

    def row(self, expression: ir.Table) -> dict[str, Any]:
        """The only row of ``expression``, as Python values."""
        return self.table(expression).to_pylist()[0]

    def table(self, expression: ir.Table) -> pa.Table:
        """The whole result in memory; for small results."""
        return self._connection.to_pyarrow(expression)

    def stream(self, expression: ir.Table) -> Iterator[pa.RecordBatch]:
        """The result batch by batch, in its order; finish it before the next expression runs."""
        # Ibis 12 calls a method that DuckDB 2 renamed; the relation's reader streams in every version.
        sql = self._connection.compile(expression)
        yield from self._connection.con.sql(sql).to_arrow_reader(_BATCH_ROWS)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
