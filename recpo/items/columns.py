"""Vectors or codes of items from columns of Parquet files, in the order of the catalog, read in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.errors import RecpoError
from recpo.base.features import is_list
from recpo.base.frames import require_columns
from recpo.log.id_map import IdMap


class ItemRows(NamedTuple):
    """The rows of a file for the items 1..V.

    Attributes:
        values: ``[V, d]``; zero if the file does not contain the item.
        found: ``[V]`` bool, true if the file contains the item.
        ignored: number of rows for items outside the catalog.
    """

    values: np.ndarray
    found: np.ndarray
    ignored: int


def read_rows(
    source: Path | pa.Table,
    item_id: str,
    columns: Sequence[str],
    items: IdMap,
    kind: Literal["vectors", "codes"] = "vectors",
) -> ItemRows:
    """Vectors or codes of the items of a catalog.

    Vectors are float32, from one column of lists of equal length or from one column of numbers for each dimension.
    Codes are int64, from one column for each level: integers from 0, or text with one number in it, such as
    ``<a_183>``.

    Args:
        source: Parquet file, a directory of such files, or a table.
        item_id: column of the external ids.
        columns: the columns to read.
        items: the catalog.
        kind: what they contain.

    Raises:
        RecpoError: invalid file, column or value; the message names it.
    """
    file, block_of = shown(source), _vector_block if kind == "vectors" else _code_block
    values, found, ignored = np.zeros((len(items), 0)), np.zeros(len(items), dtype=bool), 0
    for batch in _batches(source, [item_id, *columns]):
        try:
            index = items.to_internal(batch.column(item_id))
        except RecpoError as error:
            raise RecpoError(f"{file}, column {item_id}: {error}", code="bad_value", field=item_id) from error
        ignored += int((index == 0).sum())
        batch = batch.filter(pa.array(index > 0))
        rows = index[index > 0] - 1
        twice = found[rows] | (np.bincount(rows, minlength=len(items))[rows] > 1)
        if twice.any():
            first = batch.column(item_id)[int(twice.argmax())]
            raise RecpoError(
                f"{file}: item {first} occurs twice in column {item_id}: keep one row for each item",
                code="duplicate",
                field=item_id,
            )
        if not len(rows):
            continue
        block = block_of(batch, columns, file)
        if not values.shape[1]:
            values = np.zeros((len(items), block.shape[1]), block.dtype)
        _validate_equal(file, columns[0], values.shape[1], block.shape[1])
        values[rows], found[rows] = block, True
    if not found.any():
        raise RecpoError(
            f"{file}: none of its {ignored} rows names an item of the catalog; does column {item_id} hold the item "
            "ids of the log?",
            code="mismatch",
            field=item_id,
        )
    return ItemRows(values, found, ignored)


def shown(source: Path | pa.Table) -> str:
    """Name of a source in messages."""
    return "the table of vectors" if isinstance(source, pa.Table) else str(source)


def _batches(source: Path | pa.Table, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    file = shown(source)
    if len(columns) < 2:
        raise RecpoError(
            f"{file}: name at least one column beside {columns[0]}", code="missing_column", field=columns[0]
        )
    try:
        from pyarrow import dataset as ds  # it imports pandas, which training does not need

        dataset = ds.dataset(source) if isinstance(source, pa.Table) else ds.dataset(source, format="parquet")
        require_columns(dataset.schema, columns, str(file))
        yield from dataset.to_batches(columns=list(columns), batch_size=65_536)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise RecpoError(f"{file} cannot be read as Parquet ({error})", code="wrong_file", field=str(file)) from error


def _vector_block(batch: pa.RecordBatch, columns: Sequence[str], file: str) -> np.ndarray:
    """``[n, d]`` float32, finite."""
    listed = batch.column(columns[0])
    if len(columns) == 1 and is_list(listed.type):
        _validate_no_nulls(listed, columns[0], file)
        lengths = pc.list_value_length(listed).to_numpy()
        _validate_equal(file, columns[0], lengths[0], lengths[(lengths != lengths[0]).argmax()])
        if not lengths[0]:
            raise RecpoError(f"{file}, column {columns[0]}: the vectors are empty", code="empty", field=columns[0])
        block = _numbers(listed.flatten(), columns[0], file).reshape(len(batch), lengths[0])
    else:
        block = np.stack([_numbers(batch.column(name), name, file) for name in columns], 1)
    bad = ~np.isfinite(block).all(1)
    if bad.any():
        raise RecpoError(
            f"{file}: vectors with nan or infinite values, the first is that of item "
            f"{batch.column(0)[int(bad.argmax())]}: fix or remove them",
            code="bad_value",
            field=columns[0],
        )
    return block


def _code_block(batch: pa.RecordBatch, columns: Sequence[str], file: str) -> np.ndarray:
    """``[n, T]`` int64, not negative."""
    block = np.stack([_whole_numbers(batch.column(name), name, file) for name in columns], 1)
    if block.min() < 0:
        level = int((block < 0).any(0).argmax())
        raise RecpoError(
            f"{file}, column {columns[level]}: codes count from 0, found {block.min()}",
            code="out_of_range",
            field=columns[level],
        )
    return block


def _numbers(values: pa.Array, column: str, file: str) -> np.ndarray:
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
        raise RecpoError(
            f"{file}, column {column}: expected numbers or lists of numbers, found {values.type}",
            code="wrong_type",
            field=column,
        )
    _validate_no_nulls(values, column, file)
    return values.to_numpy(zero_copy_only=False).astype(np.float32)


def _whole_numbers(values: pa.Array, column: str, file: str) -> np.ndarray:
    _validate_no_nulls(values, column, file)
    if pa.types.is_integer(values.type):
        return values.to_numpy().astype(np.int64)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise RecpoError(
            f"{file}, column {column}: expected integers, or text such as <a_183>, found {values.type}",
            code="wrong_type",
            field=column,
        )
    number = pc.extract_regex(values, r"^\D*(?P<code>\d{1,9})\D*$")
    if number.null_count:
        first = values.filter(number.is_null())[0].as_buffer().to_pybytes().decode(errors="replace")
        raise RecpoError(
            f"{file}, column {column}: expected text with one number, such as <a_183>, found {first}",
            code="bad_value",
            field=column,
        )
    return pc.struct_field(number, "code").cast(pa.int64()).to_numpy()


def _validate_no_nulls(values: pa.Array, column: str, file: str) -> None:
    if values.null_count:
        raise RecpoError(
            f"{file}, column {column}: {values.null_count} values are missing: fill or remove them",
            code="missing_value",
            field=column,
        )


def _validate_equal(file: str, column: str, one: int, other: int) -> None:
    if one != other:
        message = f"{file}, column {column}: vectors have unequal lengths, {one} and {other}; all items need the same"
        raise RecpoError(message, code="wrong_shape", field=column)
