"""Maps external item ids to internal ids 1..V; 0 is padding and means unknown.

``read_rows`` reads vectors or codes of items from columns of Parquet files, in the order of the catalog.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recpo.artifacts.outputs import output_file
from recpo.base.errors import RecpoError, validate_range
from recpo.base.features import is_list, is_text
from recpo.base.frames import require_columns
from recpo.log.schema import AVAILABILITY, NEVER, RETIRED as RETIRED

_FEW: Final = 4096


class IdMap:
    """External ids of the items 1..V.

    Args:
        external: the external ids (integers or strings) of item 1, item 2 and so on; distinct, without nulls.
        retired: internal ids of the retired items, which are no longer candidates, ascending; None = none.
        available: ``[2, V]`` int64, milliseconds since the epoch from which and until which item 1, item 2 and so on
            may be listed (``ALWAYS``, ``NEVER``: no limit); None = every item at every time.

    Attributes:
        is_text: the external ids are strings.

    Raises:
        RecpoError: nulls, repeated ids, or ids that are neither integers nor strings.
    """

    def __init__(
        self, external: pa.Array, retired: np.ndarray | None = None, available: np.ndarray | None = None
    ) -> None:
        self.retired = np.zeros(0, np.int64) if retired is None else retired
        self.available = available
        self._changes = np.unique([] if available is None else available).astype(np.int64)
        self._unlisted: tuple[int, np.ndarray] | None = None
        if not pa.types.is_integer(external.type) and not is_text(external.type):
            raise RecpoError(
                f"item ids are integers or strings, got {external.type}", code="wrong_type", field="item_id"
            )
        if external.null_count:
            raise RecpoError(
                f"item ids: {external.null_count} nulls among {len(external)} items",
                code="missing_value",
                field="item_id",
            )
        self._external = external
        self.is_text = is_text(external.type)
        # An object index keeps its hash table, so looking up a few ids does not cost a pass over the catalog.
        import pandas as pd  # imports 35 MB, and training does not look up external ids

        self._values = values = external.to_numpy(zero_copy_only=False)  # strings as objects
        self._index = pd.Index(values, dtype=object if self.is_text else None)
        self._ascending = not self.is_text and len(values) > 0 and self._index.is_monotonic_increasing
        if not self._index.is_unique:
            raise RecpoError(
                f"item ids: {int(self._index.duplicated().sum())} ids occur twice among {len(external)} items",
                code="duplicate",
                field="item_id",
            )

    @classmethod
    def load(cls, path: Path | pa.NativeFile, known_until: int | None = None) -> Self:
        """Reads ``items.parquet``, as ``save`` writes it; other columns are ignored.

        Args:
            path: the file.
            known_until: an end after this time is not known yet, so it is no limit; None = all are known.

        Raises:
            RecpoError: the file cannot be read or its indices are not 1..V.
        """
        try:
            with pq.ParquetFile(path) as file:
                columns = ("item_index", "item_id", RETIRED, *AVAILABILITY)
                named = [name for name in columns if name in file.schema_arrow.names]
                table = file.read(named)
            if wrong := [name for name in AVAILABILITY if name in named and table[name].type != pa.int64()]:
                raise pa.ArrowTypeError(f"{wrong[0]} is {table[wrong[0]].type}, not int64")
            if not {"item_index", "item_id"} <= set(named):
                raise pa.ArrowKeyError(f"it has {', '.join(file.schema_arrow.names)}")
        except (OSError, pa.ArrowException) as error:
            raise RecpoError(
                f"{path}: expected a Parquet file with item_index and item_id ({error})",
                code="wrong_file",
                field=path.name,
            ) from error
        index = table["item_index"].to_numpy()
        if not np.array_equal(index, np.arange(1, len(index) + 1)):
            raise RecpoError(
                f"{path}: item_index must count 1..{len(index)} in ascending order",
                code="bad_value",
                field="item_index",
            )
        retired = np.flatnonzero(table[RETIRED].to_numpy()) + 1 if RETIRED in named else None
        times = [
            table[name].fill_null(limit).to_numpy() if name in named else np.full(len(index), limit)
            for name, limit in AVAILABILITY.items()
        ]
        available = np.stack(times) if set(AVAILABILITY) & set(named) else None
        if available is not None and known_until is not None:
            available[1, available[1] > known_until] = NEVER
        return cls(table["item_id"].combine_chunks(), retired, available)

    def save(self, path: Path) -> None:
        """Writes ``item_index`` int32 (1..V) and ``item_id`` in its own type.

        Where there are such items, also ``retired`` bool, and ``available_from`` and ``available_until``, int64 with
        nulls for no limit.
        """
        index = np.arange(1, len(self) + 1, dtype=np.int32)
        columns = {"item_index": pa.array(index), "item_id": self._external}
        if len(self.retired):
            columns[RETIRED] = pa.array(np.isin(index, self.retired))
        if self.available is not None:
            for times, (name, limit) in zip(self.available, AVAILABILITY.items(), strict=True):
                if (times != limit).any():
                    columns[name] = pa.array(times, mask=times == limit)
        with output_file(path) as partial:
            pq.write_table(pa.table(columns), partial)

    def __len__(self) -> int:
        return len(self._external)

    @property
    def type(self) -> pa.DataType:
        """Type of the external ids."""
        return self._external.type

    def unlisted(self, at: int | None) -> np.ndarray:
        """Internal ids, ascending, of the items that may not be listed at a time: retired, or not available.

        Computed once for all times between two changes.

        Args:
            at: milliseconds since the epoch; None = only the retired ones.
        """
        if at is None or self.available is None:
            return self.retired
        period, last = int(np.searchsorted(self._changes, at, side="right")), self._unlisted
        if last is None or last[0] != period:
            begin, end = self.available
            last = period, np.union1d(self.retired, np.flatnonzero((begin > at) | (end <= at)) + 1)
            self._unlisted = last
        return last[1]

    def equals(self, other: Self) -> bool:
        """Whether both maps assign the same ids to item 1, item 2 and so on."""
        return self.is_text == other.is_text and self._index.equals(other._index)

    def to_internal(self, values: Iterable[Any]) -> np.ndarray:
        """Internal ids, int64, one per value; 0 for unknown and null values.

        Raises:
            RecpoError: strings if ids are integers, or the other way round.
        """
        given = _to_array(values)
        if not len(given) or pa.types.is_null(given.type):
            return np.zeros(len(given), dtype=np.int64)
        if is_text(given.type) != self.is_text or not (is_text(given.type) or pa.types.is_integer(given.type)):
            raise RecpoError(
                f"item ids of this catalog are {self.type}, got {given.type}: cast them",
                code="wrong_type",
                field="item_id",
            )
        known = given.is_valid().to_numpy(zero_copy_only=False)
        found = np.zeros(len(given), dtype=np.int64)
        plain = given.filter(given.is_valid()).to_numpy(zero_copy_only=False)
        found[known] = self.find(plain.astype(object) if self.is_text else plain)
        return found

    def find(self, values: np.ndarray) -> np.ndarray:
        """Internal ids, int64, of ids of the catalog's own type (strings as objects); 0 for unknown ones."""
        if self._ascending and len(values) <= _FEW and values.dtype == self._values.dtype:  # an index costs more
            place = np.minimum(np.searchsorted(self._values, values), len(self) - 1)
            return np.where(self._values[place] == values, place + 1, 0)
        found: np.ndarray = self._index.get_indexer(values) + 1
        return found

    def listed(self, item_ids: np.ndarray) -> list[Any]:
        """External ids of items 1..V as Python objects. The ids are not checked: 0 and beyond V have no meaning."""
        found: list[Any] = self._values[item_ids - 1].tolist()
        return found

    def to_external(self, item_ids: np.ndarray | Iterable[int]) -> pa.Array:
        """External ids in their own type, flattened in order; null for internal id 0.

        Raises:
            RecpoError: an id outside 0..V.
        """
        flat = np.asarray(item_ids, dtype=np.int64).ravel()
        if flat.size:
            least, most, rule = flat.min(), flat.max(), f"of this catalog is internally 0 to {len(self)}"
            validate_range(least >= 0 and most <= len(self), "item_id", rule, f"{least}..{most}")
        return self._external.take(pa.array(flat - 1, mask=flat == 0))


def _to_array(values: Iterable[Any]) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks()
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values if isinstance(values, np.ndarray) else list(values))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise RecpoError(
            f"item ids must all be integers or all be strings ({error})", code="wrong_type", field="item_id"
        ) from error


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
