"""The connection behind the Ibis expressions: DuckDB on one machine, or Spark on many.

Nothing outside the two implementations knows which engine runs: an expression is read, materialized, streamed or
reduced to a row, and the result is the same.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal

import ibis.expr.types as ir
import pyarrow as pa

from recpo.data.locations import Place
from recpo.errors import RecpoError

_MOST_THREADS: Final = 1024
_MEMORY: Final = re.compile(r"0*[1-9]\d*(\.\d+)?\s*([kmgt]i?)?b", re.IGNORECASE)


class Engine(ABC):
    """Runs Ibis expressions.

    Attributes:
        FILE: column of a log that tells a row's file.
        ROW: column of a log that tells a row's number in its file, from 0.
    """

    FILE: Final = "__file"
    ROW: Final = "__row"

    def __enter__(self) -> Engine:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnects; what the engine could not do becomes a ``RecpoError``."""

    @abstractmethod
    def read_parquet(self, files: Sequence[Place], columns: Sequence[str]) -> ir.Table:
        """All rows of ``files`` with ``columns``, ``FILE`` and ``ROW``.

        Columns of several numeric types get one type that holds them all.
        """

    @abstractmethod
    def file_of(self, value: str) -> str:
        """The name, as it was given to ``read_parquet``, of the file that ``FILE`` calls ``value``."""

    @abstractmethod
    def materialize(self, name: str, expression: ir.Table) -> ir.Table:
        """Computes ``expression`` once and returns it as a table of the engine."""

    @abstractmethod
    def drop(self, *names: str) -> None:
        """Frees materialized tables."""

    @abstractmethod
    def table(self, expression: ir.Table) -> pa.Table:
        """The whole result in memory; for small results."""

    @abstractmethod
    def stream(self, expression: ir.Table) -> Iterator[pa.RecordBatch]:
        """The result batch by batch, in its order; finish it before the next expression runs."""

    def row(self, expression: ir.Table) -> dict[str, Any]:
        """The only row of ``expression``, as Python values."""
        return self.table(expression).to_pylist()[0]


@dataclass(frozen=True)
class EngineOptions:
    """Which engine runs, and what it may use.

    Attributes:
        engine: DuckDB inside this process, or Spark.
        memory_limit: what DuckDB, Spark's local process or each executor of a Spark cluster may hold in memory before
            it writes to disk, for example ``"4GB"``.
        threads: worker threads of DuckDB or of Spark's local process; None = one for each core.
        spark_master: where Spark runs: ``local[*]`` (this machine), ``spark://host:port``, ``yarn``, ``k8s://...``.
        spark_conf: more settings of Spark, by their names.
    """

    engine: Literal["duckdb", "spark"] = "duckdb"
    memory_limit: str = "4GB"
    threads: int | None = None
    spark_master: str = "local[*]"
    spark_conf: dict[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= _MOST_THREADS:
            raise RecpoError(f"threads {self.threads}: expected 1 to {_MOST_THREADS}, or null for one for each core")
        if not _MEMORY.fullmatch(self.memory_limit.strip()):
            raise RecpoError(f"memory_limit {self.memory_limit!r}: expected something like 4GB or 512MB")

    @property
    def writers(self) -> int:
        """Threads of this process that encode shards."""
        return self.threads or os.cpu_count() or 1
