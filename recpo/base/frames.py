"""Frames in the public interface: input is any Arrow-compatible table, output is a pandas frame.

``to_arrow`` accepts pandas, polars, pyarrow, DuckDB relations, any other object with ``__arrow_c_stream__``, and plain
dictionaries of columns. Internally, frames are ``pyarrow.Table``. Functions that return a frame return a
``pandas.DataFrame`` whose external ids keep their type.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError

#: pandas' name for an unnamed index. Selected or sorted rows have one; it contains no information.
_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
#: Times outside 1971-01-01 .. 2100-01-01 UTC indicate a wrong unit: seconds read as milliseconds lie in 1970.
EARLIEST_MS: Final = 31_536_000_000
LATEST_MS: Final = 4_102_444_800_000
_SECONDS_FROM: Final = 100_000_000  # smaller integers may be event counters ("order")
_SHOWN_VALUES = 3
_SHOWN_NAMES = 20


@runtime_checkable
class ArrowStream(Protocol):
    """A table of any library that exports the Arrow C stream interface (pandas, polars, pyarrow, DuckDB, ...)."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """A capsule with an ``ArrowArrayStream``."""


#: A frame: anything with ``__arrow_c_stream__``, or a dictionary of columns.
Frame = ArrowStream | Mapping[str, Any]
#: A frame, or the path of a Parquet file or of a directory of such files.
FrameOrPath = Frame | str | PathLike[str]


def to_arrow(frame: Frame, name: str = "frame") -> pa.Table:
    """The columns of ``frame`` as an Arrow table of plain types.

    Dictionary columns (categories) are decoded and string views become strings, so the result has a single text type.
    An unnamed pandas index is dropped; a named one becomes a column.

    Args:
        frame: any object with ``__arrow_c_stream__``, or a dictionary of columns.
        name: the caller's name for it, for messages.

    Raises:
        RecpoError: ``frame`` is not a frame, a column has values of several types, or two columns share a name.
    """
    if not isinstance(frame, ArrowStream | pa.RecordBatch | Mapping):
        raise RecpoError(
            f"{name}: expected a frame (pandas, polars, pyarrow, or a dictionary of columns), got "
            f"{type(frame).__name__}; read a file first, for example with pandas.read_parquet",
            code="wrong_type",
            field=name,
        )
    try:
        table = pa.Table.from_batches([frame]) if isinstance(frame, pa.RecordBatch) else pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RecpoError(
            f"{name}: its columns do not form an Arrow table ({_one_line(error)})", code="wrong_type", field=name
        ) from error
    table = table.select(
        [index for index, column in enumerate(table.column_names) if not _UNNAMED_INDEX.fullmatch(str(column))]
    )
    twice = sorted(column for column, count in Counter(table.column_names).items() if count > 1)
    if twice:
        raise RecpoError(f"{name}: two columns are called {twice[0]!r}: rename one", code="duplicate", field=twice[0])
    columns = [_plain(column) for column in table.columns]
    return pa.Table.from_arrays(columns, names=table.column_names)


def read_frame(source: FrameOrPath, name: str = "frame") -> pa.Table:
    """Reads a frame (see ``to_arrow``), or the Parquet file or directory of Parquet files at a path.

    Raises:
        RecpoError: ``source`` is neither, or it cannot be read.
    """
    if not isinstance(source, str | PathLike):
        return to_arrow(source, name)
    try:
        return to_arrow(pq.read_table(source), str(source))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RecpoError(
            f"{source}: expected a Parquet file or a directory of them ({_one_line(error)})", code="wrong_file"
        ) from error


def some_of(names: Sequence[str]) -> str:
    """Names for a message; of many, the first 20 and the number of the others."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def require_columns(table: pa.Table | pa.Schema, columns: Iterable[str], name: str = "frame") -> None:
    """Raises ``RecpoError`` unless ``table`` has all ``columns``. The message lists the columns that exist."""
    schema = table if isinstance(table, pa.Schema) else table.schema
    missing = [column for column in columns if column not in schema.names]
    if missing:
        raise RecpoError(
            f"{name}: column {', '.join(map(repr, missing))} is missing; there are {some_of(schema.names) or 'none'}",
            code="missing_column",
            field=missing[0],
        )


def id_column(table: pa.Table, column: str, name: str = "frame") -> pa.Array:
    """External ids of users or items: integers or strings, without nulls.

    Raises:
        RecpoError: the column is missing, of another type, or has nulls.
    """
    require_columns(table, [column], name)
    values = table.column(column).combine_chunks()
    kind = values.type
    is_id = pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not is_id and not (pa.types.is_null(kind) and not len(values)):
        raise RecpoError(
            f"{name}: column {column!r} is {kind}, expected integers or strings", code="wrong_type", field=column
        )
    if values.null_count:
        raise RecpoError(
            f"{name}: column {column!r} has {values.null_count} nulls, the first in row "
            f"{int(np.flatnonzero(values.is_null())[0])}: drop these rows",
            code="missing_value",
            field=column,
        )
    return values


def number_column(table: pa.Table, column: str, name: str = "frame") -> np.ndarray | None:
    """Float64 values ``[N]``, nan = null; None if the table has no such column.

    Raises:
        RecpoError: the column does not contain numbers.
    """
    if column not in table.column_names:
        return None
    values, kind = table.column(column), table.schema.field(column).type
    if not (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)
    ):
        raise RecpoError(f"{name}: column {column!r} is {kind}, expected numbers", code="wrong_type", field=column)
    return values.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy()  # large integers are rounded


def flag_column(table: pa.Table, column: str, name: str = "frame") -> np.ndarray | None:
    """Bool values ``[N]``, False = null; None if the table has no such column.

    Raises:
        RecpoError: the column contains values other than true and false, or 1 and 0.
    """
    if column not in table.column_names:
        return None
    values, kind = table.column(column), table.schema.field(column).type
    if not pa.types.is_boolean(kind):
        numbers = number_column(table, column, name)
        if numbers is None or not np.isin(numbers[~np.isnan(numbers)], (0, 1)).all():
            raise RecpoError(
                f"{name}: column {column!r} must hold true and false, or 1 and 0", code="wrong_type", field=column
            )
        return numbers == 1
    return values.fill_null(False).to_numpy()


def time_column(table: pa.Table, column: str, name: str = "frame") -> np.ndarray:
    """Milliseconds since the epoch ``[N]`` int64, from times (any unit and time zone) or integers (milliseconds).

    Raises:
        RecpoError: the column is missing, of another type, or has nulls.
    """
    require_columns(table, [column], name)
    values, kind = table.column(column), table.schema.field(column).type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        values = values.cast(pa.timestamp("ms", getattr(kind, "tz", None)), safe=False).cast(pa.int64())
    elif not (pa.types.is_integer(kind) or (pa.types.is_null(kind) and not len(values))):
        raise RecpoError(
            f"{name}: column {column!r} is {kind}, expected times, or integer milliseconds since 1970",
            code="wrong_type",
            field=column,
        )
    if values.null_count:
        raise RecpoError(
            f"{name}: column {column!r} has {values.null_count} nulls: every event needs a time",
            code="missing_value",
            field=column,
        )
    try:
        return values.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise RecpoError(
            f"{name}: column {column!r}: {_one_line(error)}; expected milliseconds since 1970",
            code="bad_value",
            field=column,
        ) from error


def optional_times(table: pa.Table, column: str, missing: int, name: str = "frame") -> np.ndarray:
    """``time_column`` with ``missing`` for nulls, and everywhere if there is no such column."""
    times = np.full(len(table), missing)
    if column in table.column_names:
        given = pc.is_valid(table.column(column)).to_numpy()
        times[given] = time_column(table.filter(table.column(column).is_valid()), column, name)
    return times


def are_seconds(times: Any) -> Any:
    """Whether a number, or each of an array, is a time in seconds that was mistaken for milliseconds."""
    return (times >= _SECONDS_FROM) & (times < EARLIEST_MS)


def are_no_times(times: np.ndarray) -> np.ndarray:
    """Which integers are neither plausible milliseconds since 1970 nor event counters."""
    wrong: np.ndarray = (times < 0) | (times >= LATEST_MS) | are_seconds(times)
    return wrong


def first_values(values: Iterable[Any]) -> str:
    """The first values, for a message, and an ellipsis if there are more: ``'a', 'b', 'c', ...``."""
    listed = list(values)
    return ", ".join(map(repr, listed[:_SHOWN_VALUES])) + (", ..." if len(listed) > _SHOWN_VALUES else "")


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same values without dictionaries, run-length codes and views."""
    kind = column.type
    simpler: list[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], pa.DataType]]] = [
        (pa.types.is_dictionary, lambda k: k.value_type),
        (pa.types.is_run_end_encoded, lambda k: k.value_type),
        (pa.types.is_string_view, lambda _: pa.large_string()),
        (pa.types.is_binary_view, lambda _: pa.large_binary()),
    ]
    for holds, target in simpler:
        if holds(kind):
            return _plain(pc.cast(column, target(kind)))
    return column


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
