"""The files of a log: finds them, checks each of them before any row is read, and samples their rows.

``open_log`` serves ``recpo prepare``, which reads every row; ``sample_tables`` serves ``recpo init``, which reads all
rows of a small log and at evenly spaced rows of a large one.
"""

import difflib
import glob
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts.checksums import MARKER, kind_of
from recpo.base.errors import Code, RecpoError, first_line
from recpo.base.features import expected_type, is_list, is_text
from recpo.base.frames import some_of
from recpo.log import csv_files
from recpo.log.csv_files import CsvFormat, wrong_byte
from recpo.log.engine import Engine, copy_columns
from recpo.log.feature_columns import BEHAVIOR, CONTEXT, EventColumns, or_map_values
from recpo.log.locations import Location, Place, locate, readable
from recpo.log.schema import ANY, Columns, Fault, FlagColumn, LogColumns, name_of

_SUFFIXES: Final = (".parquet", *csv_files.SUFFIXES)
#: directories of recpo in which logs are; None: not one of recpo
_KINDS_WITH_LOGS: Final = (None, "simulation", "impressions", "loop", "demo")
#: columns that the engines add when they read files
_RESERVED: Final = frozenset({"filename", "file_row_number", Engine.FILE, Engine.ROW})
#: how pandas reads other files, by the endings of their names
_READERS: Final = {
    **dict.fromkeys(("json", "jsonl", "ndjson"), "read_json(FILE, lines=True)"),
    **dict.fromkeys(("xls", "xlsx"), "read_excel(FILE)"),
    **dict.fromkeys(("pkl", "pickle"), "read_pickle(FILE)"),
    **{name: f"read_{name}(FILE)" for name in ("feather", "orc")},
}
_LIKE: Final = 0.6  # similarity from which a column name is suggested for another


@dataclass(frozen=True)
class LogFile:
    """A Parquet file that the engine reads.

    Attributes:
        path: location of the file.
        shown: the user's name of the file.
        schema: the columns of the user's file; unused ones of text files have no type.
        rows: number of rows.
        left_out: rows of the user's file that ``path`` lacks, ascending.
        warnings: what its values suggest, for the user.
    """

    path: Place
    shown: str
    schema: pa.Schema
    rows: int
    left_out: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Log:
    """The files of a log and the columns to read.

    Attributes:
        files: Parquet files with at least one row, in order of their names.
        empty_files: number of files without rows, which are skipped.
        columns: standard name -> name in the log, only for columns that exist and have a suitable type.
        types: standard name -> type of the column; for ids, a type that holds the ids of all files.
        faulty: standard names of columns that already have a fault.
        flags: standard name -> flag that is read from values, for columns that exist.
        what: the log, or a table of features.
    """

    files: tuple[LogFile, ...]
    empty_files: int
    columns: dict[str, str]
    types: dict[str, pa.DataType]
    faulty: frozenset[str] = frozenset()
    flags: Mapping[str, FlagColumn] = field(default_factory=dict)
    what: str = "log"

    @property
    def name(self) -> str:
        """The file's name, or the number of files."""
        return self.files[0].shown if len(self.files) == 1 else f"the {self.what} ({len(self.files)} files)"

    @property
    def warnings(self) -> list[str]:
        """The warnings of its files."""
        return [text for file in self.files for text in file.warnings]


def find_files(log: str | Sequence[str], what: str = "log") -> list[Place]:
    """The files that ``log`` names: files, directories (their Parquet and text files) and glob patterns.

    In directories, hidden files, files whose name begins with an underscore, and what recpo wrote (prepared data, runs,
    fits) are ignored. A name with a scheme, such as ``s3://``, refers to an object store (``recpo.log.locations``).

    Raises:
        RecpoError: a name does not exist, or is a directory without such files.
    """
    found: dict[object, Place] = {}
    for name in [log] if isinstance(log, str) else log:
        place = locate(name)
        files = _local_files(place) if isinstance(place, Path) else _stored_files(name)
        if not files:
            problem = "no such file, or nothing matches this glob"
            if isinstance(place, Path) and place.is_dir():
                inside = sorted(file.name for file in place.iterdir())
                texts = [str(place / file) for file in inside if csv_files.is_text_file(place / file)]
                remedy = f"name the files ({some_of(texts)})" if texts else "write one"
                problem = f"the directory has no {', '.join(_SUFFIXES)} file: {remedy}; it has "
                problem += some_of(inside) or "nothing"
            raise RecpoError(f"{what} {name}: {problem}", code="missing_file", field=what)
        # A file under two names is read once.
        found |= {os.path.realpath(file) if isinstance(file, Path) else file: file for file in files}
    return list(found.values())


def _local_files(path: Path) -> Sequence[Place]:
    if path.is_dir():
        files = sorted(path.rglob("*"))
        written = {file.parent for file in files if file.name == MARKER and file.parent != path}
        written = {root for root in written if kind_of(root) not in _KINDS_WITH_LOGS}
        files = [file for file in files if _belongs(file.relative_to(path)) and file.is_file()]
        return [file for file in files if written.isdisjoint(file.parents)]
    if path.is_file():
        return [path]
    return [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]


def _stored_files(name: str) -> Sequence[Place]:
    base, query_mark, query = name.partition("?")
    parts = base.split("/")
    first = next((place for place, part in enumerate(parts) if "*" in part or "[" in part), len(parts))
    root = locate("/".join(parts[:first]) + query_mark + query)
    if not isinstance(root, Location):
        raise RecpoError(f"log {name}: a pattern begins after the bucket or host", code="bad_value", field="log")
    if parts[first:]:
        return [file for file in root.files() if _matches(file.inside.split("/"), parts[first:])]
    if root.is_file():
        return [root]
    return [file for file in root.files() if _belongs(PurePosixPath(file.inside))]


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Like ``glob``: a wildcard does not match hidden names, and ``**`` matches any number of directories."""
    if not path or not pattern:
        return not path and all(part == "**" for part in pattern)
    hidden = path[0].startswith(".") and not pattern[0].startswith(".")
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (not hidden and _matches(path[1:], pattern))
    return not hidden and fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _belongs(file: PurePath) -> bool:
    return file.name.lower().endswith(_SUFFIXES) and not any(part[0] in "._" for part in file.parts)


def open_log(
    paths: Sequence[Place],
    mapping: Columns,
    chosen: Columns,
    work: Place,
    more: EventColumns,
    form: CsvFormat,
) -> tuple[Log, list[Fault]]:
    """Reads the schema of every file and selects the columns to use.

    CSV files are first converted to Parquet in ``work``. The same applies to Parquet files with column names that an
    engine would confuse (``_readable_by_engines``).

    Args:
        paths: the files of the log.
        mapping: names of the columns, including those of the preset.
        chosen: the columns that the user named; they must exist.
        work: a directory for temporary files.
        more: behaviors and request features.
        form: delimiter and column names of text files.

    Returns:
        The log, and the faults of its files and columns. If there are faults, the log is as complete as possible.
    """
    sources = mapping.sources() | more.sources()
    wanted = {column: name_of(source) for column, source in sources.items()}
    needed = {*mapping.required, *chosen.named(), *more.chosen}
    opened, faults = open_files(paths, sources, work, "log", form)
    names = set(wanted.values())
    # the rows of a file without a wanted column were not counted
    files = tuple(file for file in opened if file.rows or file.left_out or not names & set(file.schema.names))
    if opened and not files:
        where, problem = ", ".join(file.shown for file in opened), "the file is empty: it has no rows"
        faults.append(Fault(where, None, problem, "give a log with events", code="empty"))
    context = {CONTEXT + feature.name: feature for feature in more.context}

    def expected(column: str, kind: pa.DataType) -> str | None:
        if column in context:
            return expected_type(context[column], kind)
        source = sources[column]
        return _expected_type(column, kind, source if isinstance(source, FlagColumn) else None)

    columns, missing = settle_columns(opened, wanted, needed, _remedy)
    types, mistyped = settle_types(files or opened, columns, expected)
    types |= {column: pa.int64() for column in LogColumns.IDS if pa.types.is_floating(types.get(column, pa.null()))}
    faulty = missing.keys() | (columns.keys() - types.keys())
    columns = {column: name for column, name in columns.items() if column in types}
    faults += [*missing.values(), *mistyped]
    flags = {column: flag for column in columns if isinstance(flag := sources[column], FlagColumn)}
    return Log(files, len(opened) - len(files), columns, types, frozenset(faulty), flags), faults


def open_files(
    paths: Sequence[Place],
    sources: Mapping[str, str | FlagColumn],
    work: Place,
    what: str,
    form: CsvFormat | None = None,
    texts: Set[str] = frozenset(),
) -> tuple[list[LogFile], list[Fault]]:
    """The readable files of a log or table.

    Ids that are words in one text file and numbers in another are texts in both.

    Args:
        paths: the files.
        sources: standard name -> name in the files, or flag that is read from values, for the requested columns.
        work: a directory for temporary files.
        what: name of the log or table in messages.
        form: delimiter and column names of text files; None = those of a table, each file by its first line.
        texts: standard names of ids that are texts in all text files.

    Returns:
        The files whose rows can be used, and all faults.
    """
    opened, faults = list[LogFile](), list[Fault]()
    for number, path in enumerate(paths):
        try:
            file, found = _open_file(path, sources, work / f"{what}-{number}.parquet", form, texts)
        except RecpoError as error:
            faults.append(Fault(path.name, None, str(error), "write the file again, or leave it out", code=error.code))
            continue
        except (pa.ArrowException, OSError, ValueError) as error:
            faults.append(unreadable(path, error))
            continue
        faults += found
        opened += [file] if file is not None else []
    mixed = _mixed_ids(opened, sources)
    return open_files(paths, sources, work, what, form, mixed | texts) if mixed - texts else (opened, faults)


def _mixed_ids(files: Sequence[LogFile], sources: Mapping[str, str | FlagColumn]) -> set[str]:
    """Standard names of ids that are texts in some of the text files only."""
    schemas = [file.schema for file in files if file.rows and csv_files.is_text_file(Path(file.shown))]
    found = set()
    for column in sources.keys() & set(LogColumns.IDS):
        name = name_of(sources[column])
        kinds = {is_text(schema.field(name).type) for schema in schemas if name in schema.names}
        found |= {column} if len(kinds) > 1 else set()
    return found


def _open_file(
    path: Place, sources: Mapping[str, str | FlagColumn], staged: Place, form: CsvFormat | None, texts: Set[str]
) -> tuple[LogFile | None, list[Fault]]:
    """Opens one file as ``open_files`` does; a text file is first converted to the Parquet file ``staged``."""
    read, names, faults, left_out, warnings = path, None, list[Fault](), list[int](), list[str]()
    if csv_files.is_text_file(path):
        read, form = staged, form or csv_files.table_format(path)
        names, faults, left_out, warnings = csv_files.csv_to_parquet(path, staged, sources, form, texts)
    with pq.ParquetFile(readable(read)) as parquet:
        rows, schema = parquet.metadata.num_rows, parquet.schema_arrow
    used = [name for name in dict.fromkeys(map(name_of, sources.values())) if name in (names or schema.names)]
    confused = _name_faults(path.name, used, names or schema.names)
    if confused:
        return None, faults + confused
    if not _readable_by_engines(schema.names):
        read = copy_columns(path, used, staged)
    if names is not None:  # includes unused columns, for messages
        schema = pa.schema([*schema, *(pa.field(name, pa.null()) for name in names if name not in schema.names)])
    return LogFile(read, path.name, schema, rows, tuple(left_out), tuple(warnings)), faults


def _name_faults(shown: str, used: Sequence[str], names: Sequence[str]) -> list[Fault]:
    found: list[tuple[str | None, str, str, Code]] = []
    for name in used:
        if (number := names.count(name)) > 1:
            found.append((name, f"{number} columns of this name", "rename or remove the others", "duplicate"))
        elif not name:
            found.append(("''", "a column without a name cannot be used", "name the column", "bad_value"))
        elif name.lower() in _RESERVED:
            found.append((name, "a name that the engines use themselves", "rename the column", "unsupported"))
    if len({name.lower() for name in used}) < len(set(used)):
        found.append((None, "columns that are used differ in capitals only", "rename one of them", "duplicate"))
    return [Fault(shown, column, problem, fix, code=code) for column, problem, fix, code in found]


def _readable_by_engines(names: Sequence[str]) -> bool:
    """Engines ignore case in column names, and add their own columns to what they read."""
    lower = [name.lower() for name in names]
    return len(set(lower)) == len(lower) and not _RESERVED & set(lower)


def unreadable(path: Place, error: Exception) -> Fault:
    """The fault of a file that cannot be opened."""
    size = path.stat().st_size if isinstance(path, Path) else path.size()
    if size == 0:
        problem = "the file is empty: 0 bytes"
    elif csv_files.is_text_file(path):
        is_encoding = isinstance(error, UnicodeError) or "UTF8" in str(error)
        why = wrong_byte(path) if is_encoding else first_line(error)
        problem = f"{'not UTF-8 text' if is_encoding else 'not a readable CSV file'} ({why})"
    else:
        with path.open("rb") if isinstance(path, Path) else path.open_input() as handle:
            starts_well = handle.read(4) == b"PAR1"
        kind = "a truncated or damaged Parquet file" if starts_well else "not a Parquet file"
        problem = f"{kind}, {size:,} bytes ({first_line(error)})"
        reader = next((_READERS[part] for part in path.name.lower().split(".") if part in _READERS), None)
        if reader is not None and not starts_well:
            problem = f"recpo reads Parquet and delimited text: write it as Parquet (pandas.{reader}.to_parquet)"
    fix = "write or copy the file again, or leave it out"
    return Fault(path.name, None, problem, fix, code="wrong_file" if size else "empty")


def settle_columns(
    files: Sequence[LogFile],
    wanted: Mapping[str, str],
    needed: Collection[str],
    remedy: Callable[[str], str],
) -> tuple[dict[str, str], dict[str, Fault]]:
    """Which columns of a log or table exist.

    Args:
        files: its files.
        wanted: standard name -> name in the files.
        needed: standard names of columns that must exist; the others may be missing in all files.
        remedy: what to do about a missing column, by its standard name.

    Returns:
        Standard name -> name in the files, and a fault for each missing required column.
    """
    columns, faults = {}, {}
    for column, name in wanted.items():
        lacking = [file for file in files if name not in file.schema.names]
        if not lacking:
            columns[column] = name
        elif column in needed or len(lacking) < len(files):
            first, others = lacking[0], len(lacking) - 1
            where = f"{first.shown} and {others} more" if others else first.shown
            faults[column] = _missing_column(where, name, column, first.schema, remedy(column), set(wanted.values()))
    return columns, faults


def _remedy(column: str) -> str:
    if column in LogColumns.ALL:
        return f"choose another preset or pass --columns.{column} NAME"
    return "name its column in --behaviors or --features.context"


def _missing_column(where: str, name: str, wanted_as: str, schema: pa.Schema, remedy: str, used: Set[str]) -> Fault:
    """The fault of a missing required column. Suggests columns with similar names that are not ``used``."""
    wanted = (name.lower(), wanted_as.lower(), wanted_as.removesuffix("_id"))
    free = [known for known in schema.names if known not in used]
    likeness = {
        known: max(difflib.SequenceMatcher(None, known.lower(), word).ratio() for word in wanted) for known in free
    }
    near = sorted((known for known in free if likeness[known] >= _LIKE), key=lambda known: -likeness[known])
    hint = f"near: {', '.join(near)}; " if near else ""
    fix = f"{hint}the file has {', '.join(schema.names)}; {remedy}"
    return Fault(where, name, f"no such column (wanted as {wanted_as})", fix, code="missing_column")


def settle_types(
    files: Sequence[LogFile],
    columns: Mapping[str, str],
    expected: Callable[[str, pa.DataType], str | None],
) -> tuple[dict[str, pa.DataType], list[Fault]]:
    """The types of the columns of a log or table, which hold the values of all files.

    Args:
        files: its files.
        columns: standard name -> name in the files.
        expected: the types that suit a standard column, in words; None = the given type does.

    Returns:
        Standard name -> type, for columns without a fault; and the faults.
    """
    types: dict[str, pa.DataType] = {}
    faults = []
    mistyped: set[str] = set()
    for column, name in columns.items():
        for file in files:
            kind = file.schema.field(name).type
            suits = expected(column, kind)
            if suits is not None:
                mistyped.add(column)
                fix = f"expected {suits}: cast it{or_map_values(column, name) if is_text(kind) else ''}"
                faults.append(Fault(file.shown, name, f"type {kind}, wanted as {column}", fix, code="wrong_type"))
            elif column in types and _holds_text(kind) != _holds_text(types[column]):
                mistyped.add(column)
                fix = f"{files[0].shown} has {types[column]}: cast one of them"
                faults.append(Fault(file.shown, name, f"type {kind} differs between files", fix, code="mismatch"))
            else:
                types[column] = wider_type(types.get(column, kind), kind)
    return {column: kind for column, kind in types.items() if column not in mistyped}, faults


def _holds_text(kind: pa.DataType) -> bool:
    return is_text(kind.value_type if is_list(kind) else kind)


def wider_type(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds the values of both; ``first`` if there is none."""
    if is_text(first):
        return pa.string()
    try:
        both = [pa.schema([("column", kind)]) for kind in (first, second)]
        return pa.unify_schemas(both, promote_options="permissive").field("column").type
    except pa.ArrowTypeError:
        return first


def _expected_type(column: str, kind: pa.DataType, flag: FlagColumn | None) -> str | None:
    """None if ``kind`` is suitable for ``column``, else a description of the suitable types."""
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if flag is not None:
        is_time = flag.values == (ANY,) and pa.types.is_temporal(kind)
        suits = number or is_text(kind) or pa.types.is_boolean(kind) or is_time
        return None if suits else "strings, numbers or booleans"
    if column in LogColumns.IDS:
        is_whole = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        return None if is_whole or is_text(kind) else "integers or strings"
    if column == LogColumns.TIMESTAMP:
        suits = number or is_text(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        return None if suits else "a number, a time or a string"
    is_flag = column in LogColumns.FLAGS_OR_LABEL or column.startswith(BEHAVIOR)
    if is_flag and pa.types.is_boolean(kind):
        return None
    return None if number else "a number"


#: maximum number of inspected rows per table
MOST_ROWS: Final = 500_000
_LEAST_ROWS: Final = 1_000  # per file
_LINES: Final = 20


@dataclass(frozen=True)
class TableSample:
    """Files with the same columns.

    Attributes:
        files: those files.
        table: the inspected rows.
        rows: number of rows of all files; an estimate if a text file was not read completely.
        form: delimiter and column names of text files.
        skipped: number of inspected rows with a wrong number of values.
        nested: columns of structs, lists or maps, which ``table`` lacks.
        lists: those of lists, which can be features of items and users.
        partial: columns that only some of the files have, which ``table`` lacks.
        repeated: names that several columns of a file have; ``table`` has the first of these.
    """

    files: tuple[Place, ...]
    table: pa.Table
    rows: int
    form: CsvFormat
    skipped: int
    nested: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    repeated: frozenset[str] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether all rows were inspected."""
        return self.rows <= self.table.num_rows + self.skipped


def sample_tables(log: Sequence[str], form: CsvFormat) -> list[TableSample]:
    """Samples at most ``MOST_ROWS`` rows of the files of a log, grouped by their columns, in any order.

    Args:
        log: files, directories and patterns.
        form: delimiter and column names of text files, if known.

    Raises:
        RecpoError: there is no file, or one cannot be read.
    """
    files = find_files(log)
    if not files:
        raise RecpoError(
            "log: an empty list names no file; expected files, directories or patterns", code="empty", field="log"
        )
    share = max(_LEAST_ROWS, MOST_ROWS // len(files))
    groups: dict[tuple[frozenset[str], CsvFormat], list[TableSample]] = {}
    for file in files:
        try:
            one = _text_sample(file, form, share) if csv_files.is_text_file(file) else _parquet_sample(file, share)
        except RecpoError as error:
            raise RecpoError(f"{file}: {error}", code="wrong_file", field=file.name) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RecpoError(
                f"{file}: {unreadable(file, error).problem}", code="wrong_file", field=file.name
            ) from error
        groups.setdefault((frozenset((*one.table.column_names, *one.nested)), one.form), []).append(one)
    return [together(samples) for samples in groups.values()]


def together(samples: Sequence[TableSample]) -> TableSample:
    """The files of all samples as one, with the columns that all of them have."""
    known = [one.table.column_names for one in samples]
    names = [name for name in known[0] if all(name in one for one in known)]
    tables = [one.table.select(names) for one in samples if one.table.num_rows] or [samples[0].table.select(names)]
    texts = {column.name for one in tables for column in one.schema if is_text(column.type)}
    schemas = [
        [column.with_type(pa.string()) if column.name in texts else column for column in one.schema] for one in tables
    ]
    tables = [one.cast(pa.schema(schema)) for one, schema in zip(tables, schemas, strict=True)]
    return replace(
        samples[0],
        files=tuple(file for one in samples for file in one.files),
        table=pa.concat_tables(tables, promote_options="permissive"),
        rows=sum(one.rows for one in samples),
        skipped=sum(one.skipped for one in samples),
        partial=tuple(dict.fromkeys(name for one in known for name in one if name not in names)),
        repeated=frozenset().union(*(one.repeated for one in samples)),
    )


def _parquet_sample(file: Place, most_rows: int) -> TableSample:
    """The rows of a Parquet file, or of evenly spaced row groups."""
    with pq.ParquetFile(readable(file)) as parquet:
        schema, rows, groups = parquet.schema_arrow, parquet.metadata.num_rows, parquet.num_row_groups
        nested = tuple(column.name for column in schema if pa.types.is_nested(column.type))
        lists = tuple(column.name for column in schema if is_list(column.type))
        plain = [name for name in schema.names if name not in nested]
        wanted = max(1, min(groups, groups * most_rows // max(1, rows)))
        chosen = [number * groups // wanted for number in range(wanted)]
        read = [parquet.read_row_group(number, columns=plain) for number in chosen] if groups else []
    table = pa.concat_tables(read) if read else schema.empty_table()
    table = table.select([table.column_names.index(name) for name in dict.fromkeys(plain)])
    found = TableSample((file,), table.slice(0, max(most_rows, _LEAST_ROWS)), rows, CsvFormat(), 0, nested, lists)
    return replace(found, repeated=_repeated(schema.names))


def _text_sample(file: Place, form: CsvFormat, most_rows: int) -> TableSample:
    form = csv_files.text_format(csv_files.first_lines(file, _LINES), replace(form, delimiter=form.of(file)))
    if form.delimiter == CsvFormat().of(file):
        form = replace(form, delimiter=None)
    table, skipped, size = csv_files.first_rows(file, form, most_rows)
    rows = table.num_rows + skipped
    if rows >= most_rows and isinstance(file, Path):  # uncompressed text is about four times as long
        length = file.stat().st_size * (4 if file.name.endswith(".gz") else 1)
        rows = max(rows + 1, int(rows * length / max(1, size)))
    return TableSample((file,), table, rows, form, skipped, repeated=_repeated(csv_files.header(file, form)))


def _repeated(names: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in names if names.count(name) > 1)
