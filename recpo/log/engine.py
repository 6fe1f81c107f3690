"""The connection behind the Ibis expressions: DuckDB on one machine, or Spark on many.

Only the two implementations know which engine runs. Everything else reads files, and materializes, streams or reduces
expressions, with the same result on both.
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

from recpo.base.errors import RecpoError
from recpo.log.locations import Place

_MOST_THREADS: Final = 1024
_MEMORY: Final = re.compile(r"0*[1-9]\d*(\.\d+)?\s*([kmgt]i?)?b", re.IGNORECASE)


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

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnects. Turns errors of the engine into ``RecpoError``."""

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
        if self.threads is not None and not 1 <= self.threads <= _MOST_THREADS:
            raise RecpoError(f"threads {self.threads}: expected 1 to {_MOST_THREADS}, or null for one per core")
        if not _MEMORY.fullmatch(self.memory_limit.strip()):
            raise RecpoError(f"memory_limit {self.memory_limit!r}: expected something like 4GB or 512MB")

    @property
    def writers(self) -> int:
        """Number of threads of this process that encode shards."""
        return self.threads or os.cpu_count() or 1
