"""Converts CSV files of a log to Parquet: every used column gets the one type that fits all of its values.

The whole file determines the types, not its first block: everything is read as text, then cast. So text in a column of
numbers is reported with its row, wherever it is, and ids such as 007 keep their zeros.
"""

import codecs
import csv
import io
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.base.features import is_text
from recpo.log.column_facts import rank_as
from recpo.log.feature_columns import BEHAVIOR, CONTEXT, FEATURE, or_map_values
from recpo.log.locations import Place, writable
from recpo.log.schema import DATED, EXAMPLES, Example, Fault, FlagColumn, LogColumns, name_of

#: text files that are found in directories
SUFFIXES: Final = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".inter", ".inter.gz")
#: text files that are read only if the log names them, because directories may contain other files with these endings
_NAMED_SUFFIXES: Final = tuple(name + end for name in (".dat", ".data", ".txt") for end in ("", ".gz"))
_TABBED: Final = (".tsv", ".tsv.gz", ".inter", ".inter.gz")  # .inter: RecBole's files
_ONE_BYTE: Final = b"\x1f"  # replaces a delimiter of several characters, because Arrow only accepts a single one

#: feature columns may have any type that fits all of their values
_ANY_TYPE: Final = (CONTEXT, FEATURE)
_WHOLE: Final = r"^-?(0|[1-9][0-9]{0,17}|[1-8][0-9]{18})$"  # integers that int64 holds, without leading zeros
_ZERO_LED: Final = r"^0[0-9]+$"  # ids such as 007
_LONG: Final = r"^[0-9]{19,}$"  # of which floating-point numbers keep the first digits
_POINTED: Final = r"^-?[0-9]{1,15}\.0$"  # integers as they are written beside missing values, which made them floats
_NUMBER: Final = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(inf|Inf|INF|infinity|Infinity)$"
#: texts that mean that there is no value; the last one is that of dumps of databases
_ABSENT: Final = pa.array(
    ["", "nan", "NaN", "NAN", "NA", "N/A", "#N/A", "n/a", "<NA>", "NaT", "null", "NULL", "Null", "None", "none", r"\N"]
)
_TRUE: Final = pa.array(["true", "True", "TRUE"])
_FALSE: Final = pa.array(["false", "False", "FALSE"])
_HEADER_BYTES: Final = 1 << 20
_DELIMITERS: Final = (",", "\t", ";", "::", "|", "\x01", "^", " ")  # \x01: Hive
_RATINGS: Final = ("userId", "movieId", "rating", "timestamp")  # MovieLens 100K, 1M and 10M, in this order


@dataclass(frozen=True)
class CsvFormat:
    """How the text files of a log are written.

    Args:
        delimiter: separates two values, such as ``;`` or ``::``; null = a tab in ``.tsv`` and ``.inter`` files, a comma
            in all others. Values that contain a delimiter of one character must be quoted; values cannot be quoted if
            the delimiter has several characters.
        names: column names for files without a header line; null = the first line has the names.
    """

    delimiter: str | None = None
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.delimiter is not None and (not self.delimiter or set(self.delimiter) & set('\n\r"')):
            raise RecpoError(
                f"csv.delimiter {self.delimiter!r}: expected characters other than quotes and line ends",
                code="bad_value",
                field="csv.delimiter",
            )
        if self.delimiter is not None and not self.delimiter.isascii():
            raise RecpoError(
                f"csv.delimiter {self.delimiter!r}: expected ASCII characters",
                code="unsupported",
                field="csv.delimiter",
            )
        if self.names is not None and (not self.names or len(set(self.names)) < len(self.names)):
            raise RecpoError(
                f"csv.names {list(self.names)}: expected a name for every column, each once",
                code="duplicate",
                field="csv.names",
            )

    def of(self, path: Place) -> str:
        """The delimiter of one file."""
        tabbed = path.name.lower().endswith(_TABBED)
        return self.delimiter if self.delimiter is not None else "\t" if tabbed else ","


def is_text_file(path: Place) -> bool:
    """Whether a file is read as text, by its name. All other files are read as Parquet."""
    return path.name.lower().endswith((*SUFFIXES, *_NAMED_SUFFIXES))


@dataclass
class _ColumnFacts:
    """Counts the kinds of values of one column over a file. Words are what no number, flag or numeric id is.

    Attributes:
        column: its standard name, which tells whether it has ids or flags.
    """

    column: str
    values: int = 0
    whole: int = 0
    numbers: int = 0
    flags: int = 0
    words: int = 0
    pointed: int = 0
    first_words: list[tuple[int, str]] = field(default_factory=list)

    def add(self, text: pa.Array, first_row: int) -> None:
        """Counts a batch of trimmed text, whose first row is ``first_row``."""
        known = pc.invert(_absent(text))
        whole = pc.fill_null(pc.match_substring_regex(text, _WHOLE), False)
        number = pc.or_(whole, pc.fill_null(pc.match_substring_regex(text, _NUMBER), False))
        flag = pc.or_(pc.is_in(text, _TRUE), pc.is_in(text, _FALSE))
        if self.column in LogColumns.IDS:
            expected = pc.or_(whole, pc.fill_null(pc.match_substring_regex(text, _ZERO_LED), False))
        else:
            expected = pc.or_(number, flag) if _takes_flags(self.column) else number
        word = pc.and_not(known, expected)
        pointed = pc.match_substring_regex(text, _POINTED)
        counted = {"values": known, "whole": whole, "numbers": number, "flags": flag, "words": word, "pointed": pointed}
        for name, found in counted.items():
            setattr(self, name, getattr(self, name) + found.true_count)
        missing = EXAMPLES - len(self.first_words)
        rows = pc.indices_nonzero(word)[:missing].to_pylist()
        self.first_words += [(first_row + row, text[row].as_py()) for row in rows]


def csv_to_parquet(
    path: Place,
    staged: Place,
    sources: Mapping[str, str | FlagColumn],
    form: CsvFormat,
    texts: Collection[str] = (),
) -> tuple[list[str], list[Fault], list[int], list[str]]:
    """Writes some columns of a CSV file to a Parquet file.

    Args:
        path: the file; UTF-8, may be compressed with gzip.
        staged: the Parquet file to write.
        sources: standard name -> name in the log, or flag that is read from values: its column is kept as texts, unless
            another standard column reads numbers from it.
        form: its delimiter, and its column names if it has no header line.
        texts: standard names of columns that stay texts.

    Returns:
        The file's column names; faults (rows with too few or too many values, text in columns of numbers); the numbers
        of omitted rows, from 0; warnings about columns of integer ids that a few words turn into strings.

    Raises:
        RecpoError: the file is not in UTF-8, or has no line of names.
    """
    names = header(path, form)
    used = {column: name for column, one in sources.items() if names.count(name := name_of(one)) == 1}
    flags = {column for column in used if isinstance(sources[column], FlagColumn) or column in texts}
    reader = _Reader(path, names, sorted({names.index(name) for name in used.values()}), form)
    facts = {name: _ColumnFacts(column) for column, name in used.items()}
    row = 0
    for batch in reader.batches():
        for name in facts:
            facts[name].add(pc.utf8_trim_whitespace(batch.column(f"c{names.index(name)}")), row)
        row += batch.num_rows
    ragged = sorted(reader.ragged)
    kinds = {name: pa.string() for column, name in used.items() if column in flags}
    kinds |= {name: _kind(column, facts[name]) for column, name in used.items() if column not in flags}
    known = {name for column, name in used.items() if column in (*flags, *LogColumns.IDS) and is_text(kinds[name])}
    reader = _Reader(path, names, reader.positions, form)
    schema = pa.schema([(name, kinds[name]) for name in facts])
    with writable(staged) as sink, pq.ParquetWriter(sink, schema) as writer:
        for batch in reader.batches():
            read = {name: batch.column(f"c{names.index(name)}") for name in facts}
            columns = [_known(text) if name in known else _cast(text, kinds[name]) for name, text in read.items()]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    faults, warnings = _ragged_faults(path, names, reader.ragged), []
    for column, name in used.items():
        fault = _word_fault(path, column, name, kinds[name], facts[name], ragged)
        if fault is not None and column in LogColumns.IDS:
            warnings.append(str(fault))
        elif fault is not None:
            faults.append(fault)
    return names, faults, ragged, warnings


def first_rows(path: Place, form: CsvFormat, most_rows: int) -> tuple[pa.Table, int, int]:
    """The first rows of a text file. Every column has the one type that fits all of its values in these rows.

    Args:
        path: the file; UTF-8, may be compressed with gzip.
        form: its delimiter and column names.
        most_rows: reading stops at the end of the block that reaches this number of rows.

    Returns:
        The rows; how many further rows have a wrong number of values; number of characters read.

    Raises:
        RecpoError: the file is not in UTF-8, or has no line of names.
    """
    names = header(path, form)
    reader = _Reader(path, names, list(range(len(names))), form)
    batches, rows = [], 0
    for batch in reader.batches():
        batches.append(batch)
        rows += batch.num_rows
        if rows >= most_rows:
            break
    schema = pa.schema([(f"c{place}", pa.string()) for place in reader.positions])
    text = pa.Table.from_batches(batches, schema).slice(0, most_rows)
    columns: dict[str, pa.Array] = {}
    size = 0
    for name, column in zip(names, text.columns, strict=True):
        values = column.combine_chunks()
        facts = _ColumnFacts(FEATURE)
        facts.add(pc.utf8_trim_whitespace(values), 0)
        size += (pc.sum(pc.binary_length(values)).as_py() or 0) + len(values)
        kind = _kind(FEATURE, facts)
        is_id = any(rank_as(role, name) is not None for role in (LogColumns.USER_ID, LogColumns.ITEM_ID))
        is_long = pc.any(pc.match_substring_regex(values, _LONG)).as_py()
        is_long = is_long or (is_id and facts.values > facts.whole + facts.pointed)
        kind = pa.string() if is_long and pa.types.is_floating(kind) else kind
        columns.setdefault(name, _known(values) if is_text(kind) else _cast(values, kind))
    return pa.table(columns), len(reader.ragged), size


def read_ids(path: Place, column: str, kind: pa.DataType) -> pa.Array:
    """The ids of one column of a CSV file: strings as they stand, with their zeros, or whole numbers.

    Args:
        path: the file; UTF-8, may be compressed with gzip.
        column: name of the column.
        kind: type of the ids in the catalog, an integer type or strings.

    Raises:
        RecpoError: there is no such column, a row has a wrong number of values, or an id is not of this type.
    """
    names = header(path)
    if names.count(column) != 1:
        raise RecpoError(
            f"{path.name}: expected one column {column}; the file has {', '.join(names)}",
            code="missing_column",
            field=column,
        )
    reader = _Reader(path, names, [names.index(column)], CsvFormat())
    ids = pa.chunked_array([batch.column(0) for batch in reader.batches()], pa.string()).combine_chunks()
    if faults := _ragged_faults(path, names, reader.ragged):
        raise RecpoError(str(faults[0]), code="wrong_shape", field=path.name)
    if not pa.types.is_integer(kind):
        return ids
    ids = pc.utf8_trim_whitespace(ids)
    other = pc.indices_nonzero(pc.invert(pc.fill_null(pc.match_substring_regex(ids, _WHOLE), False)))
    if len(other):
        first = other[0].as_py()
        raise RecpoError(
            f"{path.name}, column {column}: {len(other):,} of {len(ids):,} ids are not integers as in the catalog, the "
            f"first is {ids[first].as_py()!r} in row {first}: remove or correct them",
            code="wrong_type",
            field=column,
        )
    return ids.cast(pa.int64())


def row_in_file(row: int, left_out: list[int] | tuple[int, ...]) -> int:
    """The number in the file of the ``row``-th kept row. ``left_out`` is ascending."""
    for gone in left_out:
        if gone > row:
            break
        row += 1
    return row


class _Reader:
    """Batches of some columns as text, named ``c`` and their position. Rows of a wrong width are set aside."""

    def __init__(self, path: Place, names: list[str], positions: list[int], form: CsvFormat) -> None:
        self.path, self.names, self.positions, self.form = path, names, positions, form
        self.skipped = 1 if form.names is None else 0
        self.ragged: dict[int, tuple[int, str]] = {}

    def batches(self) -> Iterator[pa.RecordBatch]:
        names = [f"c{position}" for position in range(len(self.names))]
        chosen = [f"c{position}" for position in self.positions] or names[:1]
        delimiter = self.form.of(self.path)
        several = len(delimiter) > 1
        with (
            _quiet_decoding(),
            closing(open_text(self.path)) as opened,
            closing(_replaced(opened, delimiter) if several else opened) as source,
            pa.csv.open_csv(
                source,
                # one thread: with more, Arrow does not report row numbers
                read_options=pa.csv.ReadOptions(use_threads=False, column_names=names, skip_rows=self.skipped),
                parse_options=pa.csv.ParseOptions(
                    delimiter=_ONE_BYTE.decode() if several else delimiter,
                    quote_char=False if several else '"',
                    newlines_in_values=not several,
                    invalid_row_handler=self._set_aside,
                ),
                convert_options=pa.csv.ConvertOptions(
                    include_columns=chosen,
                    column_types=dict.fromkeys(chosen, pa.string()),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=True,
                ),
            ) as reader,
        ):
            yield from reader

    def _set_aside(self, row: Any) -> str:
        # Arrow counts from 1 and includes the header line
        self.ragged[row.number - 1 - self.skipped] = (row.actual_columns, row.text)
        return "skip"


@contextmanager
def _quiet_decoding() -> Iterator[None]:
    """Arrow decodes a malformed row before it passes it on, and Python prints a traceback if that fails.

    The file is rejected in that case anyway, so the traceback is suppressed.
    """
    before = sys.unraisablehook

    def report(fault: "sys.UnraisableHookArgs") -> None:  # a name that only type checkers know
        if not isinstance(fault.exc_value, UnicodeDecodeError):
            before(fault)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def open_text(path: Place) -> Any:
    """The bytes of a file, decompressed if they are compressed with gzip."""
    with path.open("rb") if isinstance(path, Path) else path.open_input() as handle:
        is_gzip = handle.read(2) == b"\x1f\x8b"
    source = pa.OSFile(str(path)) if isinstance(path, Path) else path.open_input()
    return pa.CompressedInputStream(source, "gzip") if is_gzip else source


def _replaced(source: Any, delimiter: str) -> Any:
    """Replaces each delimiter of several characters by a single byte, also across block boundaries."""
    text, held = delimiter.encode(), b""

    def replace(block: Any) -> bytes:
        nonlocal held
        content = (held + bytes(block)).replace(text, _ONE_BYTE)
        # a partial delimiter at the end of a block is kept for the next block; no file ends with a delimiter
        cut = next((n for n in range(len(text) - 1, 0, -1) if content.endswith(text[:n])), 0)
        held = content[len(content) - cut :]
        return content[: len(content) - cut]

    return pa.TransformInputStream(source, replace)


def header(path: Place, form: CsvFormat = CsvFormat()) -> list[str]:
    """The column names of a file: those of ``form``, or those of the first line.

    Raises:
        RecpoError: the line is empty, or not UTF-8 text.
    """
    if form.names is not None:
        return list(form.names)
    lines = first_lines(path, 1)
    delimiter = form.of(path)
    try:
        split = line_values(lines[0], delimiter) if lines else []
    except csv.Error as error:
        raise RecpoError(
            f"its first line, the column names, is not UTF-8 text ({error})", code="bad_value", field="first line"
        ) from error
    if not any(name.strip() for name in split):
        raise RecpoError("its first line, the column names, is empty", code="empty", field="first line")
    return split


def line_values(line: str, delimiter: str) -> list[str]:
    """Splits one line into values."""
    if len(delimiter) > 1:
        return line.split(delimiter)
    return next(csv.reader(io.StringIO(line), delimiter=delimiter), [])


def text_format(lines: Sequence[str], form: CsvFormat) -> CsvFormat:
    """Infers the format of a text file from its first lines: the delimiter, and whether there is a header line.

    If the delimiter that the file's name implies does not split the lines, another one is used. The first line is a
    header if none of its values is a number or a date.

    Args:
        lines: the first lines of the file.
        form: known delimiter and names; the delimiter is tried first.
    """
    delimiter = form.of(Path("log.csv"))
    wanted = (range(3, sys.maxsize), (2,)) if form.names is None else ((len(form.names),),)
    if not lines or len(line_values(lines[0], delimiter)) not in wanted[0]:
        found = (one for widths in wanted for one in _DELIMITERS if _cuts(lines, one, widths))
        delimiter = next(found, delimiter)
    first = line_values(lines[0], delimiter) if lines else []
    names = form.names
    if names is None and any(_is_number(value) or re.match(DATED, value) for value in first):
        names = tuple(f"column_{number}" for number in range(1, len(first) + 1))
        names = _RATINGS if _is_ratings([line_values(line, delimiter) for line in lines]) else names
    return CsvFormat(delimiter, names)


def table_format(path: Place) -> CsvFormat:
    """The format of a table of items or users: the delimiter that gives most names in its first line."""
    lines, usual = first_lines(path, 1), CsvFormat().of(path)
    tried = (usual, *_DELIMITERS[:-1])  # names have spaces
    return CsvFormat(max(tried, key=lambda one: sum(len(line_values(line, one)) for line in lines)))


def _cuts(lines: Sequence[str], delimiter: str, widths: Sequence[int]) -> bool:
    """Whether a delimiter splits every line into the same number of values, one of ``widths``."""
    found = {len(line_values(line, delimiter)) for line in lines}
    return len(found) == 1 and found.pop() in widths


def _is_ratings(rows: Iterable[Sequence[str]]) -> bool:
    """Whether lines have a user, an item, a rating up to 10, and a time in seconds."""
    return all(
        len(row) == 4
        and row[0].isdigit()
        and row[1].isdigit()
        and _is_number(row[2])
        and 0 <= float(row[2]) <= 10
        and row[3].isdigit()
        and 7.9e8 < float(row[3]) < 2.2e9
        for row in rows
    )


def _is_number(value: str) -> bool:
    with suppress(ValueError):
        float(value)
        return True
    return False


def first_lines(path: Place, number: int) -> list[str]:
    """The first lines of a text file.

    Raises:
        RecpoError: they are not UTF-8 text.
    """
    with closing(open_text(path)) as source:
        start = source.read(_HEADER_BYTES)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in start[:100]:
        raise RecpoError("text in UTF-16 or another wide encoding, not UTF-8", code="unsupported", field="encoding")
    lines = start.removeprefix(codecs.BOM_UTF8).splitlines()[:number] if start.strip() else []
    try:
        return [line.decode("utf-8") for line in lines]
    except UnicodeDecodeError as error:
        raise RecpoError(f"not UTF-8 text: {wrong_byte(path)}", code="bad_value", field="encoding") from error


def wrong_byte(path: Place) -> str:
    """The first line and byte of a file that are not UTF-8 text, and what to do; empty if there are none."""
    with closing(io.BufferedReader(open_text(path))) as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"line {number:,} has 0x{line[error.start]:02x} as its byte {error.start + 1:,}"
                return f"{place}; if the text is latin-1, write it again with iconv -f latin1 -t utf-8"
    return ""


def _takes_flags(column: str) -> bool:
    return column in LogColumns.FLAGS_OR_LABEL or column.startswith((BEHAVIOR, *_ANY_TYPE))


def _kind(column: str, facts: _ColumnFacts) -> pa.DataType:
    if column in LogColumns.IDS:
        return pa.int64() if facts.values and facts.values in (facts.whole, facts.pointed) else pa.string()
    if column == LogColumns.TIMESTAMP and 2 * facts.numbers < facts.values:
        return pa.string()
    if column.startswith(_ANY_TYPE) and facts.words:
        return pa.string()
    if _takes_flags(column) and facts.values and facts.flags == facts.values:
        return pa.bool_()
    return pa.int64() if facts.values and facts.whole == facts.values else pa.float64()


def _cast(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Values that are not of ``kind`` become null: they are missing, or reported as faults already."""
    if pa.types.is_string(kind):
        return text
    text = pc.utf8_trim_whitespace(text)
    true, false = pc.is_in(text, _TRUE), pc.is_in(text, _FALSE)
    if pa.types.is_boolean(kind):
        return pc.if_else(pc.or_(true, false), true, pa.scalar(None, pa.bool_()))
    if pa.types.is_integer(kind):
        text = pc.replace_substring_regex(text, r"\.0$", "")
        return pc.if_else(pc.match_substring_regex(text, _WHOLE), text, pa.scalar(None, pa.string())).cast(kind)
    fits = pc.match_substring_regex(text, _NUMBER)
    numbers = pc.ascii_ltrim(pc.if_else(fits, text, pa.scalar(None, pa.string())), characters="+").cast(kind)
    return pc.if_else(true, 1.0, pc.if_else(false, 0.0, numbers))


def _known(text: pa.Array) -> pa.Array:
    """Texts without the words for missing values, which become null."""
    return pc.if_else(_absent(pc.utf8_trim_whitespace(text)), pa.scalar(None, pa.string()), text)


def _absent(text: pa.Array) -> pa.Array:
    return pc.or_(pc.is_null(text), pc.is_in(text, _ABSENT))


def _ragged_faults(path: Place, names: list[str], ragged: dict[int, tuple[int, str]]) -> list[Fault]:
    if not ragged:
        return []
    first = [Example(path.name, row, f"{ragged[row][0]} values") for row in sorted(ragged)[:EXAMPLES]]
    problem = f"another number of values than the {len(names)} columns of the first line"
    fix = "fix these rows, or quote values that contain commas"
    return [Fault(path.name, None, problem, fix, len(ragged), first, "wrong_shape")]


def _word_fault(
    path: Place, column: str, name: str, kind: pa.DataType, facts: _ColumnFacts, ragged: list[int]
) -> Fault | None:
    """The fault of words in a column of numbers, or among ids most of which are integers."""
    if column in LogColumns.IDS:
        is_wrong = 2 * facts.whole > facts.values
        problem = f"not an integer, and the other {facts.values - facts.words:,} ids are; so all are read as strings"
        fix = "correct these rows if ids are integers"
    else:
        is_wrong, problem = not pa.types.is_string(kind), "not a number"
        expected = "a number, or true and false" if _takes_flags(column) else "a number"
        fix = f"expected {expected}: fix or empty these values{or_map_values(column, name)}"
    if not facts.words or not is_wrong:
        return None
    examples = [Example(path.name, row_in_file(row, ragged), value) for row, value in facts.first_words]
    return Fault(path.name, name, problem, fix, facts.words, examples, "wrong_type")
