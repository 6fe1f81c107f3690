"""Finds the files of a log and checks each of them before any row is read."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from recpo.data.faults import Fault
from recpo.data.locations import Location, Place, locate, readable, writable
from recpo.data.schema import Columns, LogColumns
from recpo.errors import RecpoError

_SUFFIXES: Final = (".parquet", ".csv")
_LIKE: Final = 0.6  # share of common letters at which two column names are alike


@dataclass(frozen=True)
class LogFile:
    """A Parquet file that the engine reads: ``path``, and ``shown``, the name that the user knows it by."""

    path: Place
    shown: str


@dataclass(frozen=True)
class Log:
    """The files of a log and the columns to read.

    Attributes:
        files: Parquet files with at least one row, in order of their names.
        empty_files: names of files without rows, which are skipped.
        columns: standard name -> name in the log, only of columns that the log has with a type that suits.
        types: standard name -> type of the column; of ids the one that holds those of all files.
    """

    files: tuple[LogFile, ...]
    empty_files: tuple[str, ...]
    columns: dict[str, str]
    types: dict[str, pa.DataType]

    @property
    def name(self) -> str:
        """The file's name, or how many files there are."""
        return self.files[0].shown if len(self.files) == 1 else f"the log ({len(self.files)} files)"


def find_files(log: str | Sequence[str]) -> list[Place]:
    """The files that ``log`` means: files, directories (their .parquet and .csv files) and glob patterns.

    Hidden files and those whose name begins with an underscore are left out of directories. A name with a scheme, such
    as ``s3://``, is one of an object store (``recpo.data.locations``).

    Raises:
        RecpoError: something named does not exist, or holds no file.
    """
    found: dict[Place, None] = {}
    for name in [log] if isinstance(log, str) else log:
        place = locate(name)
        files = _local_files(place) if isinstance(place, Path) else _stored_files(name)
        if not files:
            raise RecpoError(
                f"log {name}: no such file, directory with {' or '.join(_SUFFIXES)} files, or matching glob"
            )
        found.update(dict.fromkeys(files))
    return list(found)


def _local_files(path: Path) -> Sequence[Place]:
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if _belongs(file.relative_to(path)) and file.is_file()]
    if path.is_file():
        return [path]
    return [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]


def _stored_files(name: str) -> Sequence[Place]:
    base, query_mark, query = name.partition("?")
    parts = base.split("/")
    first = next((place for place, part in enumerate(parts) if "*" in part or "[" in part), len(parts))
    root = locate("/".join(parts[:first]) + query_mark + query)
    if not isinstance(root, Location):
        raise RecpoError(f"log {name}: a pattern begins after the bucket or host")
    if parts[first:]:
        return [file for file in root.files() if _matches(file.inside.split("/"), parts[first:])]
    if root.is_file():
        return [root]
    return [file for file in root.files() if _belongs(PurePosixPath(file.inside))]


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """As ``glob``: a wildcard matches no hidden name, and ``**`` any number of directories."""
    if not path or not pattern:
        return not path and all(part == "**" for part in pattern)
    hidden = path[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (not hidden and _matches(path[1:], pattern))
    return not hidden and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _belongs(file: PurePath) -> bool:
    return file.suffix.lower() in _SUFFIXES and not any(part[0] in "._" for part in file.parts)


def open_log(paths: Sequence[Place], mapping: Columns, chosen: Columns, work: Place) -> tuple[Log, list[Fault]]:
    """Reads the schema of every file and settles which columns are used.

    CSV files (first line: the names; types are inferred) are turned into Parquet under ``work`` first.

    Args:
        paths: the files of the log.
        mapping: what the columns are called, with the preset's names.
        chosen: what the user named; these columns must exist.
        work: a directory for temporary files.

    Returns:
        The log, and the faults of its files and columns. With faults, the log is as complete as it can be.
    """
    faults: list[Fault] = []
    files, empty, schemas = [], [], []
    for number, path in enumerate(paths):
        try:
            file = LogFile(_as_parquet(path, work / f"csv-{number}.parquet"), path.name)
            with pq.ParquetFile(readable(file.path)) as parquet:
                rows, schema = parquet.metadata.num_rows, parquet.schema_arrow
        except (pa.ArrowException, OSError) as error:
            faults.append(_unreadable(path, error))
            continue
        schemas.append((file.shown, schema))
        if rows:
            files.append(file)
        else:
            empty.append(file.shown)
    if schemas and not files:
        faults.append(Fault(", ".join(empty), None, "the file is empty: it has no rows", "give a log with events"))
    columns: dict[str, str] = {}
    types: dict[str, pa.DataType] = {}
    if schemas:
        columns, missing = _settle_columns(schemas, mapping, chosen)
        types, mistyped = _settle_types(schemas, columns)
        columns = {column: name for column, name in columns.items() if column in types}
        faults += missing + mistyped
    return Log(tuple(files), tuple(empty), columns, types), faults


def _as_parquet(path: Place, staged: Place) -> Place:
    if path.suffix.lower() != ".csv":
        return path
    with (
        pa.csv.open_csv(readable(path)) as reader,
        writable(staged) as sink,
        pq.ParquetWriter(sink, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
    return staged


def _unreadable(path: Place, error: Exception) -> Fault:
    size = path.stat().st_size if isinstance(path, Path) else path.size()
    if size == 0:
        problem = "the file is empty: 0 bytes"
    elif path.suffix.lower() == ".csv":
        problem = f"not a readable CSV file ({_first_line(error)})"
    else:
        with path.open("rb") if isinstance(path, Path) else path.open_input() as handle:
            starts_well = handle.read(4) == b"PAR1"
        kind = "a truncated or damaged Parquet file" if starts_well else "not a Parquet file"
        problem = f"{kind}, {size:,} bytes ({_first_line(error)})"
    return Fault(path.name, None, problem, "write or copy the file again, or leave it out")


def _settle_columns(
    schemas: Sequence[tuple[str, pa.Schema]], mapping: Columns, chosen: Columns
) -> tuple[dict[str, str], list[Fault]]:
    columns, faults = {}, []
    needed = {column for column in LogColumns.ALL if column in LogColumns.REQUIRED or column in chosen.named()}
    for column, name in mapping.named().items():
        lacking = [(shown, schema) for shown, schema in schemas if name not in schema.names]
        if not lacking:
            columns[column] = name
        elif column in needed or len(lacking) < len(schemas):
            shown, schema = lacking[0]
            where = shown if len(lacking) == 1 else f"{shown} and {len(lacking) - 1} more"
            free = [known for known in schema.names if known not in mapping.named().values()]
            fix = _mend_missing(column, name, schema, free)
            faults.append(Fault(where, name, f"no such column (wanted as {column})", fix))
    return columns, faults


def _mend_missing(column: str, name: str, schema: pa.Schema, free: Sequence[str]) -> str:
    wanted = (name.lower(), column.lower(), column.removesuffix("_id"))
    likeness = {
        known: max(difflib.SequenceMatcher(None, known.lower(), word).ratio() for word in wanted) for known in free
    }
    near = sorted((known for known in free if likeness[known] >= _LIKE), key=lambda known: -likeness[known])
    hint = f"near: {', '.join(near)}; " if near else ""
    return f"{hint}the file has {', '.join(schema.names)}; choose another preset or pass --columns.{column} NAME"


def _settle_types(
    schemas: Sequence[tuple[str, pa.Schema]], columns: dict[str, str]
) -> tuple[dict[str, pa.DataType], list[Fault]]:
    types: dict[str, pa.DataType] = {}
    faults = []
    mistyped: set[str] = set()
    for column, name in columns.items():
        for shown, schema in schemas:
            kind = schema.field(name).type
            expected = _expected_type(column, kind)
            if expected is not None:
                mistyped.add(column)
                faults.append(Fault(shown, name, f"type {kind}, wanted as {column}", f"expected {expected}: cast it"))
            elif column in types and _is_text(kind) != _is_text(types[column]):
                mistyped.add(column)
                fix = f"{schemas[0][0]} has {types[column]}: cast one of them"
                faults.append(Fault(shown, name, f"type {kind} differs between files", fix))
            else:
                types[column] = _wider(types.get(column, kind), kind)
    return {column: kind for column, kind in types.items() if column not in mistyped}, faults


def _wider(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds the values of both; ``first`` where there is none."""
    if _is_text(first):
        return pa.string()
    try:
        both = [pa.schema([("column", kind)]) for kind in (first, second)]
        return pa.unify_schemas(both, promote_options="permissive").field("column").type
    except pa.ArrowTypeError:
        return first


def _expected_type(column: str, kind: pa.DataType) -> str | None:
    """None where ``kind`` suits ``column``, otherwise what would."""
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if column in (LogColumns.USER_ID, LogColumns.ITEM_ID, LogColumns.REQUEST_ID):
        return None if pa.types.is_integer(kind) or _is_text(kind) else "integers or strings"
    if column == LogColumns.TIMESTAMP:
        suits = number or _is_text(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        return None if suits else "a number, a time or a string"
    if column in (LogColumns.DISLIKE, LogColumns.IS_RANDOM, LogColumns.LABEL) and pa.types.is_boolean(kind):
        return None
    return None if number else "a number"


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error) else type(error).__name__
