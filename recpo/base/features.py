"""The features of items, users and requests: the meaning of a column, and the values that were fitted for it.

A feature is declared with a name and, if it differs, a column. ``recpo prepare`` fits it (vocabulary, mean and standard
deviation, width) on the train period alone and writes the result to the manifest. All readers of features take their
order, codes and sizes from there.

Codes of categories: 0 missing, 1 unknown (a value that the train period did not contain), from 2 on the values of the
vocabulary by descending count, then by value.

Features are fitted and encoded in a plain form: categories are int64 or string, sets of categories are lists of those
without nulls and repeated values, numbers are float64, vectors are lists of float32; null = missing.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.errors import RecpoError, reading

if TYPE_CHECKING:
    from recpo.base.types import Features


Side = Literal["item", "user", "context"]
"""The owner of a feature: an item, a user, or the request that showed an event."""
SIDES: Final[tuple[Side, ...]] = ("item", "user", "context")


class Reads(NamedTuple):
    """What batches contain besides items, feedback and times. Parts that are not read are not loaded.

    Attributes:
        behaviors: bit sets of behaviors.
        user: features of users.
        context: features of requests.
    """

    behaviors: bool = False
    user: bool = False
    context: bool = False

    def __or__(self, other: tuple[object, ...]) -> Reads:
        """The parts that at least one of the two reads."""
        return Reads(*(bool(own or their) for own, their in zip(self, other, strict=True)))


MISSING, UNKNOWN, FIRST_CODE = 0, 1, 2
_REMEDY: Final = "prepare the log again"
_F = TypeVar("_F", bound="Feature")
_Column = TypeVar("_Column", bound=Any)  # np.ndarray or Tensor
_Changed = TypeVar("_Changed", bound=Any)


@dataclass(frozen=True)
class Feature(ABC):
    """A column with a meaning. Implementations are frozen dataclasses.

    Attributes:
        name: name of the feature in the manifest and on disk.
        column: its column in the table or log; None = ``name``.
        fitted: fields that ``recpo prepare`` fills in and users must not give.
    """

    name: str
    column: str | None = None

    fitted: ClassVar[tuple[str, ...]] = ()

    @property
    def source(self) -> str:
        """The column that it is read from."""
        return self.name if self.column is None else self.column

    @property
    def is_fitted(self) -> bool:
        """Whether ``recpo prepare`` has filled in the fitted fields."""
        return all(getattr(self, field) is not None for field in self.fitted)

    def to_json(self) -> dict[str, Any]:
        """Type and fields, as ``FeatureSchema.from_json`` reads them."""
        return {"type": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Category(Feature):
    """One value from a vocabulary: an author, a language, a device; integers, strings or booleans.

    Args:
        name: name of the feature.
        column: its column; null = ``name``.
        min_count: values with fewer items (users, events) in the train period are unknown.
        num_codes: fitted, leave it out; missing, unknown and the vocabulary.
    """

    min_count: int = 1
    num_codes: int | None = None

    fitted: ClassVar[tuple[str, ...]] = ("num_codes",)


@dataclass(frozen=True)
class Categories(Feature):
    """A set of values from one vocabulary: genres, tags. An empty list is missing.

    Args:
        name: name of the feature.
        column: its column, of lists, or of strings with a separator; null = ``name``.
        separator: separator between the values of a string, such as ``|``; null = the column contains lists.
        length: maximum number of values to keep; the most frequent ones come first.
        min_count: values with fewer items (users, events) in the train period are unknown.
        num_codes: fitted, leave it out; missing, unknown and the vocabulary.
    """

    separator: str | None = None
    length: int = 16
    min_count: int = 1
    num_codes: int | None = None

    fitted: ClassVar[tuple[str, ...]] = ("num_codes",)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise RecpoError(
                f"feature {self.name}: length {self.length} must be at least 1", code="out_of_range", field="length"
            )
        if self.separator == "":
            raise RecpoError(
                f"feature {self.name}: the separator is empty; null = the column holds lists",
                code="bad_value",
                field="separator",
            )


@dataclass(frozen=True)
class Number(Feature):
    """A number, standardized: ``(x - mean) / std``; nan = missing.

    Args:
        name: name of the feature.
        column: its column; null = ``name``.
        log: apply ``sign(x) * log(1 + |x|)`` first, for counts and durations over several orders of magnitude.
        mean: fitted, leave it out.
        std: fitted, leave it out; standard deviation of the population, 1 if all values are equal.
    """

    log: bool = False
    mean: float | None = None
    std: float | None = None

    fitted: ClassVar[tuple[str, ...]] = ("mean", "std")


@dataclass(frozen=True)
class Vector(Feature):
    """A dense vector, such as a text or image embedding, unchanged; a row of nan = missing.

    Args:
        name: name of the feature.
        column: its column, with lists of numbers of equal length; null = ``name``.
        width: number of components; null = the length of the first vector.
    """

    width: int | None = None

    fitted: ClassVar[tuple[str, ...]] = ("width",)


FEATURE_TYPES: Final[tuple[type[Feature], ...]] = (Category, Categories, Number, Vector)


@dataclass(frozen=True)
class FeatureSchema:
    """The features of a prepared directory, in the order of ``recpo.base.types.Features``.

    Attributes:
        item: features of items.
        user: features of users.
        context: features of the request that showed an event.
    """

    item: tuple[Feature, ...] = ()
    user: tuple[Feature, ...] = ()
    context: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        for side in SIDES:
            names = [feature.name for feature in self.of(side)]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise RecpoError(
                    f"features: two {side} features have the name {twice[0]!r}; rename one",
                    code="duplicate",
                    field=twice[0],
                )

    def of(self, side: Side) -> tuple[Feature, ...]:
        """The features of one side."""
        found: tuple[Feature, ...] = getattr(self, side)
        return found

    def coded(self, side: Side) -> list[str]:
        """The names of the features of one side that have a vocabulary."""
        return [feature.name for feature in self.of(side) if isinstance(feature, Category | Categories)]

    def __bool__(self) -> bool:
        """Whether there is any feature."""
        return bool(self.item or self.user or self.context)

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """The input of ``from_json``: the features by side."""
        return {side: [feature.to_json() for feature in self.of(side)] for side in SIDES}

    @classmethod
    def from_json(cls, content: Any, source: str = "features") -> FeatureSchema:
        """Reads the output of ``to_json``; None gives a schema without features.

        Args:
            content: the parsed JSON.
            source: the name of its file, for messages.

        Raises:
            RecpoError: a key is missing, or a type or field is unknown.
        """
        if content is None:
            return cls()
        with reading(source, KeyError, TypeError, ValueError, AttributeError, remedy=_REMEDY, field="features"):
            return cls(**{side: tuple(_feature_from_json(one) for one in content[side]) for side in SIDES})


def _feature_from_json(content: dict[str, Any]) -> Feature:
    kinds = {kind.__name__: kind for kind in FEATURE_TYPES}
    if content["type"] not in kinds:
        raise ValueError(f"type {content['type']!r}, expected one of {', '.join(kinds)}")
    kind = kinds[content["type"]]
    known = {field.name for field in fields(kind)}
    if missing := known - content.keys():
        raise ValueError(f"{content['type']} without {', '.join(sorted(missing))}")
    return kind(**{name: value for name, value in content.items() if name != "type"})


def of_type(features: Sequence[Feature], kind: type[_F]) -> tuple[_F, ...]:
    """The features of one type, in order."""
    return tuple(feature for feature in features if isinstance(feature, kind))


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
    if is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return Category(plain, column)
    if pa.types.is_floating(kind):
        return Number(plain, column)
    if is_list(kind):
        element = _decoded(kind.value_type)
        if pa.types.is_floating(element):
            return Vector(plain, column)
        if is_text(element) or pa.types.is_integer(element):
            return Categories(plain, column)
    return None


def expected_type(feature: Feature, kind: pa.DataType) -> str | None:
    """None if a column of type ``kind`` fits the feature; otherwise the types that would."""
    kind = _decoded(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if pa.types.is_null(kind) and not isinstance(feature, Vector):
        return None
    if isinstance(feature, Category):
        return None if is_number or is_text(kind) else "integers, strings or booleans"
    if isinstance(feature, Number):
        return None if is_number or pa.types.is_decimal(kind) else "a number"
    if isinstance(feature, Categories) and feature.separator is not None:
        return (
            None if is_text(kind) or pa.types.is_integer(kind) else f"strings with values between {feature.separator!r}"
        )
    element = _decoded(kind.value_type) if is_list(kind) else None
    if isinstance(feature, Vector):
        suits = element is not None and (pa.types.is_floating(element) or pa.types.is_integer(element))
        return None if suits else "lists of numbers"
    suits = element is not None and (is_text(element) or pa.types.is_integer(element) or pa.types.is_floating(element))
    return None if suits else "lists of integers or strings (strings with a separator: set `separator`)"


def plain_type(feature: Feature, kind: pa.DataType) -> pa.DataType:
    """Type of the plain form of a column of type ``kind``, which must be suitable for the feature."""
    kind = _decoded(kind)
    if isinstance(feature, Number):
        return pa.float64()
    if isinstance(feature, Vector):
        return pa.list_(pa.float32())
    if isinstance(feature, Category):
        return pa.string() if is_text(kind) else pa.int64()
    element = kind if not is_list(kind) else _decoded(kind.value_type)
    return pa.list_(pa.string() if is_text(element) else pa.int64())


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


def is_list(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are text, in a dictionary or not."""
    kind = _decoded(kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


class FeatureColumns(NamedTuple, Generic[_Column]):
    """Features of items, users or requests, as NumPy arrays or as tensors. Each field follows the order of the schema.

    Attributes:
        codes: ``[..., C]`` int64, one column per ``Category``: 0 missing, 1 unknown, 2 and up the vocabulary.
        lists: one ``[..., L]`` int64 per ``Categories``: distinct codes of its vocabulary, padded with 0. All 0 means
            missing.
        numbers: ``[..., N]`` float32, one column per ``Number``, standardized; nan = missing.
        vectors: one ``[..., w]`` float32 per ``Vector``; a row of nan = missing.
    """

    codes: _Column
    lists: tuple[_Column, ...]
    numbers: _Column
    vectors: tuple[_Column, ...]

    def map(self, change: Callable[[_Column], _Changed]) -> FeatureColumns[_Changed]:
        """Applies ``change`` to every column."""
        return FeatureColumns(
            change(self.codes), tuple(map(change, self.lists)), change(self.numbers), tuple(map(change, self.vectors))
        )

    def rows(self, index: _Column) -> FeatureColumns[_Column]:
        """The rows ``index`` (any shape). Row 0 of item features belongs to no item; all its features are missing."""
        return self.map(lambda column: column[index])

    def where(self, kept: _Column) -> FeatureColumns[_Column]:
        """Keeps the rows in ``kept`` (bool, the leading shape) and sets every feature of the other rows to missing."""

        def masked(column: Any) -> Any:
            if isinstance(column, np.ndarray):
                missing = np.nan if column.dtype.kind == "f" else 0
                return np.where(kept[..., None], column, column.dtype.type(missing))
            return column.masked_fill(~kept[..., None], np.nan if column.is_floating_point() else 0)

        return self.map(masked)

    def joined(self: FeatureArrays, *others: FeatureArrays) -> FeatureArrays:
        """These rows, followed by the rows of ``others``."""
        codes, lists, numbers, vectors = zip(self, *others, strict=True)

        def each(parts: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
            return tuple(map(np.concatenate, zip(*parts, strict=True)))

        return FeatureColumns(np.concatenate(codes), each(lists), np.concatenate(numbers), each(vectors))

    def tensors(self: FeatureArrays) -> Features:
        """Tensors that share the memory of the arrays."""
        import torch  # imported here because servers without torch read features too

        return self.map(torch.from_numpy)


FeatureArrays = FeatureColumns[np.ndarray]


def missing_features(features: Sequence[Feature], shape: tuple[int, ...]) -> FeatureArrays:
    """Features that are all missing, with the leading ``shape``."""
    nan = np.float32(np.nan)
    return FeatureColumns(
        np.zeros((*shape, len(of_type(features, Category))), np.int64),
        tuple(np.zeros((*shape, one.length), np.int64) for one in of_type(features, Categories)),
        np.full((*shape, len(of_type(features, Number))), nan),
        tuple(np.full((*shape, one.width or 0), nan) for one in of_type(features, Vector)),
    )


def read_features(features: Sequence[Feature], table: pa.Table, first_missing: bool = False) -> FeatureArrays:
    """The features of the rows of a prepared file (``item_features.parquet``, ``user_features.parquet``).

    Args:
        features: fitted features, each with a column in ``table``.
        table: codes int32, lists of codes, standardized numbers float32, vectors float32 of one width.
        first_missing: add a first row in which all features are missing, for id 0.
    """
    skip = int(first_missing)
    arrays = missing_features(features, (table.num_rows + skip,))
    for place, category in enumerate(of_type(features, Category)):
        arrays.codes[skip:, place] = table[category.name].to_numpy()
    for padded, listed in zip(arrays.lists, of_type(features, Categories), strict=True):
        _fill_lists(padded[skip:], table[listed.name].combine_chunks())
    for place, number in enumerate(of_type(features, Number)):
        arrays.numbers[skip:, place] = table[number.name].to_numpy()
    for rows, vector in zip(arrays.vectors, of_type(features, Vector), strict=True):
        begin = skip
        for chunk in table[vector.name].chunks:  # one chunk at a time, which avoids a second copy of all vectors
            rows[begin : begin + len(chunk)] = chunk.flatten().to_numpy().reshape(len(chunk), -1)
            begin += len(chunk)
    return arrays


def _fill_lists(padded: np.ndarray, lists: pa.ListArray) -> None:
    lengths = lists.value_lengths().to_numpy()
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    padded[row, place] = lists.flatten().to_numpy()
