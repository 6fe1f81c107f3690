"""Samples the files of a log: all rows, or evenly spaced rows of a large log, as tables with typed columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.log import csv_files
from recpo.log.csv_files import CsvFormat
from recpo.log.engine import Place, readable
from recpo.log.files import find_files, first_line

#: maximum number of inspected rows per table
MOST_ROWS: Final = 500_000
_LEAST_ROWS: Final = 1_000  # per file
_DELIMITERS: Final = (",", "\t", ";", "::", "|")
_LINES: Final = 20
_RATINGS: Final = ("userId", "movieId", "rating", "timestamp")  # MovieLens 100K, 1M and 10M, in this order


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
    """

    files: tuple[Place, ...]
    table: pa.Table
    rows: int
    form: CsvFormat
    skipped: int
    nested: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all rows were inspected."""
        return self.rows <= self.table.num_rows + self.skipped

    @property
    def has_names(self) -> bool:
        """Whether the columns have names, from the files or of a known layout."""
        return self.form.names is None or self.form.names == _RATINGS


def sample_tables(
    log: str | Sequence[str],
    form: CsvFormat = CsvFormat(),  # noqa: B008  frozen
    most_rows: int = MOST_ROWS,
) -> list[TableSample]:
    """Samples the files of a log, grouped by their columns.

    Args:
        log: a file, a directory, a pattern, or a list of them.
        form: delimiter and column names of text files, if known.
        most_rows: maximum number of inspected rows of all files.

    Raises:
        RecpoError: there is no file, or one cannot be read.
    """
    files = find_files(log)
    if not files:
        raise RecpoError(
            "log: an empty list names no file; expected files, directories or patterns", code="empty", field="log"
        )
    share = max(_LEAST_ROWS, most_rows // len(files))
    groups: dict[tuple[str, ...], list[TableSample]] = {}
    for file in files:
        try:
            one = _text_sample(file, form, share) if csv_files.is_text_file(file) else _parquet_sample(file, share)
        except RecpoError as error:
            raise RecpoError(f"{file}: {error}", code="failed", field="log") from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RecpoError(
                f"{file}: not readable as Parquet or CSV ({first_line(error)})", code="wrong_file", field="log"
            ) from error
        groups.setdefault((*one.table.column_names, one.form.of(file)), []).append(one)
    return [_together(samples) for samples in groups.values()]


def _together(samples: list[TableSample]) -> TableSample:
    tables = [one.table for one in samples if one.table.num_rows] or [samples[0].table]
    return TableSample(
        tuple(file for one in samples for file in one.files),
        pa.concat_tables(tables, promote_options="permissive"),
        sum(one.rows for one in samples),
        samples[0].form,
        sum(one.skipped for one in samples),
        samples[0].nested,
    )


def _parquet_sample(file: Place, most_rows: int) -> TableSample:
    """The rows of a Parquet file, or of evenly spaced row groups."""
    with pq.ParquetFile(readable(file)) as parquet:
        schema, rows, groups = parquet.schema_arrow, parquet.metadata.num_rows, parquet.num_row_groups
        nested = tuple(column.name for column in schema if pa.types.is_nested(column.type))
        plain = [name for name in schema.names if name not in nested]
        wanted = max(1, min(groups, groups * most_rows // max(1, rows)))
        chosen = [number * groups // wanted for number in range(wanted)]
        read = [parquet.read_row_group(number, columns=plain) for number in chosen] if groups else []
    table = pa.concat_tables(read) if read else schema.empty_table().select(plain)
    return TableSample((file,), table.slice(0, max(most_rows, _LEAST_ROWS)), rows, CsvFormat(), 0, nested)


def _text_sample(file: Place, form: CsvFormat, most_rows: int) -> TableSample:
    form = text_format(csv_files.first_lines(file, _LINES), replace(form, delimiter=form.delimiter or form.of(file)))
    if form.delimiter == CsvFormat().of(file):
        form = replace(form, delimiter=None)
    table, skipped, size = csv_files.first_rows(file, form, most_rows)
    rows = table.num_rows + skipped
    if rows >= most_rows and isinstance(file, Path):  # uncompressed text is about four times as long
        length = file.stat().st_size * (4 if file.name.endswith(".gz") else 1)
        rows = max(rows + 1, int(rows * length / max(1, size)))
    return TableSample((file,), table, rows, form, skipped)


def text_format(lines: Sequence[str], form: CsvFormat) -> CsvFormat:
    """Infers the format of a text file from its first lines: the delimiter, and whether there is a header line.

    If the delimiter that the file's name implies does not split the lines, another one is used. The first line is a
    header if none of its values is a number.

    Args:
        lines: the first lines of the file.
        form: known delimiter and names; the delimiter is tried first.
    """
    delimiter = form.of(Path("log.csv"))
    if not lines or (len(csv_files.line_values(lines[0], delimiter)) < 3 and form.names is None):
        delimiter = next((one for one in _DELIMITERS if _cuts(lines, one)), delimiter)
    first = csv_files.line_values(lines[0], delimiter) if lines else []
    names = form.names
    if names is None and any(_is_number(value) for value in first):
        names = tuple(f"column_{number}" for number in range(1, len(first) + 1))
        names = _RATINGS if _is_ratings([csv_files.line_values(line, delimiter) for line in lines]) else names
    return CsvFormat(delimiter, names)


def _cuts(lines: Sequence[str], delimiter: str) -> bool:
    widths = {len(csv_files.line_values(line, delimiter)) for line in lines}
    return len(widths) == 1 and widths.pop() >= 3


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
