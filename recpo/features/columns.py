"""Feature columns of a table: the types that fit, the inferred kind of feature, and one plain form for each kind.

Features are fitted and encoded in the plain form: categories are int64 or string, sets of categories are lists of those
without nulls and repeated values, numbers are float64, vectors are lists of float32; null = missing.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.features.schema import Categories, Category, Feature, Number, Vector

_WHOLE_LIMIT: Final = 2.0**53
_UNNAMABLE: Final = re.compile(r"[^A-Za-z0-9_.-]+")


class Offense(NamedTuple):
    """Rows with values that the feature cannot have.

    Attributes:
        problem: the kind of values.
        fix: how to fix them.
        rows: their indices, ascending.
        values: the first of their values.
    """

    problem: str
    fix: str
    rows: np.ndarray
    values: list[object]


def inferred_feature(name: str, kind: pa.DataType) -> Feature | None:
    """The inferred feature of a column without a declaration; None = the column is ignored.

    Strings, booleans and integers give a ``Category``, floating-point numbers a ``Number``, lists of strings or
    integers ``Categories``, lists of floating-point numbers a ``Vector``. Times, structures and all other types are
    ignored.
    """
    plain, kind = _UNNAMABLE.sub("_", name).lstrip("_.-") or "column", _decoded(kind)
    column = None if plain == name else name
    if _is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return Category(plain, column)
    if pa.types.is_floating(kind):
        return Number(plain, column)
    if _is_list(kind):
        element = _decoded(kind.value_type)
        if pa.types.is_floating(element):
            return Vector(plain, column)
        if _is_text(element) or pa.types.is_integer(element):
            return Categories(plain, column)
    return None


def expected_type(feature: Feature, kind: pa.DataType) -> str | None:
    """None if a column of type ``kind`` fits the feature; otherwise the types that would."""
    kind = _decoded(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if pa.types.is_null(kind) and not isinstance(feature, Vector):
        return None
    if isinstance(feature, Category):
        return None if is_number or _is_text(kind) else "integers, strings or booleans"
    if isinstance(feature, Number):
        return None if is_number or pa.types.is_decimal(kind) else "a number"
    if isinstance(feature, Categories) and feature.separator is not None:
        return (
            None
            if _is_text(kind) or pa.types.is_integer(kind)
            else f"strings with values between {feature.separator!r}"
        )
    element = _decoded(kind.value_type) if _is_list(kind) else None
    if isinstance(feature, Vector):
        suits = element is not None and (pa.types.is_floating(element) or pa.types.is_integer(element))
        return None if suits else "lists of numbers"
    suits = element is not None and (_is_text(element) or pa.types.is_integer(element) or pa.types.is_floating(element))
    return None if suits else "lists of integers or strings (strings with a separator: set `separator`)"


def plain_type(feature: Feature, kind: pa.DataType) -> pa.DataType:
    """Type of the plain form of a column of type ``kind``, which must be suitable for the feature."""
    kind = _decoded(kind)
    if isinstance(feature, Number):
        return pa.float64()
    if isinstance(feature, Vector):
        return pa.list_(pa.float32())
    if isinstance(feature, Category):
        return pa.string() if _is_text(kind) else pa.int64()
    element = kind if not _is_list(kind) else _decoded(kind.value_type)
    return pa.list_(pa.string() if _is_text(element) else pa.int64())


def plain_column(feature: Feature, column: pa.Array) -> tuple[pa.Array, list[Offense]]:
    """The plain form of a column of a suitable type. Offending values become null.

    Args:
        feature: the feature; for a vector, with ``width``.
        column: the column of the table.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = plain_type(feature, column.type)
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind), []
    if isinstance(feature, Number):
        return _numbers(column)
    if isinstance(feature, Vector):
        return _vectors(column, feature.width or 0)
    if isinstance(feature, Categories):
        return _sets(feature, column, kind)
    values, offends = _values(column, kind)
    return values, _offenses(_NOT_WHOLE, offends, column)


_NOT_WHOLE: Final = ("a number that is not whole, in a category", "round it, or declare the column a Number")
_INFINITE: Final = ("an infinite number", "empty these values, or fix them")
_NOT_FINITE: Final = ("a vector with nan, infinite or missing numbers", "empty these vectors, or fix them")


def _numbers(column: pa.Array) -> tuple[pa.Array, list[Offense]]:
    column = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
    values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    infinite = np.isinf(values)
    absent = np.isnan(values) | infinite
    return pa.array(values, mask=absent), _offenses(_INFINITE, infinite, column)


def _values(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, np.ndarray]:
    """Single values as int64 or strings, and a mask of the values that are neither and became null."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(kind) or not pa.types.is_floating(column.type):
        return column.cast(kind), np.zeros(len(column), bool)
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    absent = np.isnan(values)
    whole = (np.abs(np.where(absent, 0.0, values)) < _WHOLE_LIMIT) & (np.floor(values) == values)
    return pa.array(np.where(whole, values, 0).astype(np.int64), mask=~whole), ~whole & ~absent


def _sets(feature: Categories, column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[Offense]]:
    if feature.separator is not None:
        column = pc.split_pattern(column.cast(pa.string()), feature.separator)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    row = np.repeat(np.arange(len(column)), lengths)
    flat, offends = _values(pc.list_flatten(column), kind.value_type)
    if feature.separator is not None:
        flat = pc.utf8_trim_whitespace(flat)
        flat = pc.if_else(pc.equal(flat, ""), pa.scalar(None, pa.string()), flat)
    known = np.flatnonzero(flat.is_valid().to_numpy(zero_copy_only=False))
    # keeps each value of a row once
    coded = flat.take(pa.array(known)).dictionary_encode()
    size = max(1, len(coded.dictionary))
    pairs = np.unique(row[known] * size + coded.indices.to_numpy().astype(np.int64))
    offsets = np.searchsorted(pairs // size, np.arange(len(column) + 1)).astype(np.int32)
    values = coded.dictionary.take(pa.array(pairs % size))
    found = np.zeros(len(column), bool)
    found[row[offends]] = True
    return pa.ListArray.from_arrays(pa.array(offsets), values), _offenses(_NOT_WHOLE, found, column)


def _vectors(column: pa.Array, width: int) -> tuple[pa.Array, list[Offense]]:
    present = column.is_valid().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    fits = present & (lengths == width)
    chosen = column.filter(pa.array(fits))
    flat = pc.list_flatten(chosen).cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False).reshape(-1, width)
    finite = np.isfinite(flat).all(1)
    kept = fits.copy()
    kept[fits] = finite
    offsets = np.concatenate([[0], np.cumsum(kept * width)]).astype(np.int32)
    mask = pa.array(~kept)
    values = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat[finite].ravel()), mask=mask)
    wrong = (f"a vector of another width than {width}", "all vectors of a column have one width, or are null")
    return values, _offenses(wrong, present & ~fits, column) + _offenses(_NOT_FINITE, fits & ~kept, column)


def first_width(column: pa.Array) -> int | None:
    """Length of the first list that is not null; None if there is none."""
    lengths = pc.drop_null(pc.list_value_length(column))
    return int(lengths[0].as_py()) if len(lengths) else None


def _offenses(said: tuple[str, str], offends: np.ndarray, column: pa.Array) -> list[Offense]:
    rows = np.flatnonzero(offends)
    return [Offense(*said, rows, [column[int(row)].as_py() for row in rows[:3]])] if len(rows) else []


def _decoded(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
