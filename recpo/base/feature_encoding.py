"""Encodes values: applies features that were fitted on the train period to any table of items, users or requests.

Prepare, extensions, refreshed bundles and servers all use this module. NumPy, pandas and Arrow only.

Decodes features to columns of raw values, which encode to the same features again. ``PolicyFeatures`` is what a policy
reads of all sides, as runs and bundles keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError, reading
from recpo.base.features import (
    FIRST_CODE,
    MISSING,
    SIDES,
    UNKNOWN,
    Categories,
    Category,
    Feature,
    FeatureArrays,
    FeatureSchema,
    Number,
    Side,
    Vector,
    expected_type,
    missing_features,
    of_type,
    plain_column,
    plain_type,
    read_features,
)

if TYPE_CHECKING:
    import pandas as pd


class Vocabulary:
    """The values of a category, in the order of their codes.

    Args:
        values: int64 or strings, distinct; the value at index i has code i + 2.
    """

    def __init__(self, values: pa.Array) -> None:
        self.values = values

    @cached_property
    def _index(self) -> pd.Index:
        # an index keeps its hash table, so a request with a few values does not cost a pass over the vocabulary
        return _hashable(self.values)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def num_codes(self) -> int:
        """Number of codes: missing, unknown, and the values."""
        return len(self) + FIRST_CODE

    def codes(self, values: pa.Array) -> np.ndarray:
        """``[N]`` int32 codes: 0 for null, 1 for values that are not in the vocabulary.

        Raises:
            RecpoError: strings although the vocabulary has integers, or the other way round.
        """
        known = values.is_valid().to_numpy(zero_copy_only=False)
        codes = np.full(len(values), MISSING, np.int32)
        if not known.any():
            return codes
        codes[known] = UNKNOWN
        if not len(self):
            return codes
        if pa.types.is_string(values.type) != pa.types.is_string(self.values.type):
            raise RecpoError(
                f"values are {values.type}, the vocabulary has {self.values.type}: cast them", code="wrong_type"
            )
        place = self._index.get_indexer(_hashable(values.filter(values.is_valid())))
        codes[known] = np.where(place >= 0, place + FIRST_CODE, UNKNOWN)
        return codes


def _hashable(values: pa.Array) -> pd.Index:
    import pandas as pd  # imports 35 MB, and training does not encode raw values

    found: np.ndarray = values.to_numpy(zero_copy_only=False)
    return pd.Index(found.astype(object) if pa.types.is_string(values.type) else found)


@dataclass(frozen=True)
class FittedFeatures:
    """The features of one side (item, user or context) and their fitted values.

    Attributes:
        features: fitted features.
        vocabularies: vocabulary of each ``Category`` and ``Categories``, by feature name.
    """

    features: tuple[Feature, ...] = ()
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)

    @property
    def schema(self) -> pa.Schema:
        """Columns of ``encode``."""
        return pa.schema([(feature.name, stored_type(feature)) for feature in self.features])

    def encode(self, plain: pa.Table | pa.RecordBatch) -> pa.Table:
        """Encodes plain columns (``recpo.base.features``), named by feature, as in prepared files."""
        columns = [self._encoded(feature, _one(plain[feature.name])) for feature in self.features]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def read(self, table: pa.Table, name: str, by_name: bool = False) -> FeatureArrays:
        """The features of the rows of a user's table. If the table lacks a column, its feature is missing in all rows.

        Args:
            table: columns as in the tables that were prepared.
            name: name of the table in messages.
            by_name: columns have the names of the features, instead of the names in the prepared tables.

        Raises:
            RecpoError: a column has an unsuitable type or values that the feature cannot have.
        """
        columns = [self._plain(one, table, name, one.name if by_name else one.source) for one in self.features]
        plain = pa.table(columns, names=[feature.name for feature in self.features]) if columns else pa.table({})
        return read_features(self.features, self.encode(plain)) if columns else missing_features((), (len(table),))

    def _plain(self, feature: Feature, table: pa.Table, name: str, source: str) -> pa.Array:
        vocabulary = self.vocabularies.get(feature.name)
        wanted = plain_type(feature, pa.null() if vocabulary is None else vocabulary.values.type)
        if source not in table.column_names or pa.types.is_null(table[source].type):
            return pa.nulls(len(table), wanted)
        column = _one(table[source])
        if pa.types.is_list(column.type) and pa.types.is_null(column.type.value_type):
            return pa.nulls(len(table), wanted)  # only empty lists, which a JSON request may contain
        expected = expected_type(feature, column.type)
        if expected is not None:
            raise RecpoError(
                f"{name}: column {source!r} is {column.type}, expected {expected}", code="wrong_type", field=source
            )
        plain, offenses = plain_column(feature, column)
        for offense in offenses:
            raise RecpoError(
                f"{name}: column {source!r}: {offense.problem} in {len(offense.rows)} rows, the first is row "
                f"{offense.rows[0]} ({offense.values[0]!r:.40}); {offense.fix}",
                code="bad_value",
                field=source,
            )
        if plain.type != wanted and plain.null_count < len(plain):
            raise RecpoError(
                f"{name}: column {source!r} is {column.type}, and it was {wanted} in training: cast it",
                code="mismatch",
                field=source,
            )
        return plain.cast(wanted) if plain.null_count == len(plain) else plain

    def agrees(self, other: FittedFeatures) -> bool:
        """Whether codes and numbers of ``other`` have the same meaning here. Its vocabularies may have grown."""
        if [_unsized(one) for one in self.features] != [_unsized(one) for one in other.features]:
            return False
        for name, vocabulary in self.vocabularies.items():
            values = other.vocabularies[name].values
            if values.type != vocabulary.values.type or not values.slice(0, len(vocabulary)).equals(vocabulary.values):
                return False
        return True

    def __bool__(self) -> bool:
        """Whether there is any feature."""
        return bool(self.features)

    def _encoded(self, feature: Feature, column: pa.Array) -> pa.Array:
        if isinstance(feature, Category):
            return pa.array(self.vocabularies[feature.name].codes(column))
        if isinstance(feature, Categories):
            return _lists(self.vocabularies[feature.name], column, feature.length)
        if isinstance(feature, Number):
            return pa.array(standardized(feature, column.cast(pa.float64()).to_numpy(zero_copy_only=False)))
        assert isinstance(feature, Vector)
        width = feature.width or 0
        rows = np.full((len(column), width), np.nan, np.float32)
        kept = column.is_valid().to_numpy(zero_copy_only=False)
        rows[kept] = column.filter(column.is_valid()).flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
        return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), width)


def _unsized(feature: Feature) -> dict[str, object]:
    return {key: value for key, value in feature.to_json().items() if key != "num_codes"}


def stored_type(feature: Feature) -> pa.DataType:
    """Type of a feature's column in prepared files."""
    if isinstance(feature, Category):
        return pa.int32()
    if isinstance(feature, Categories):
        return pa.list_(pa.int32())
    return pa.float32() if isinstance(feature, Number) else pa.list_(pa.float32(), feature.width or 0)  # type: ignore[attr-defined]


def scaled(feature: Number, values: np.ndarray) -> np.ndarray:
    """The numbers to fit mean and standard deviation to, float64."""
    return np.sign(values) * np.log1p(np.abs(values)) if feature.log else values


def standardized(feature: Number, values: np.ndarray) -> np.ndarray:
    """``(x - mean) / std`` in float32; nan = missing."""
    assert feature.mean is not None
    assert feature.std is not None
    result: np.ndarray = ((scaled(feature, values) - feature.mean) / feature.std).astype(np.float32)
    return result


class Moments:
    """Mean and standard deviation of numbers, with the same result for any order and any division into pieces.

    Sums are exact, because every float64 is an integer times a power of two, and the integers are summed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[int, int] = {}

    def add(self, values: np.ndarray) -> None:
        """Adds finite float64 ``[N]``."""
        self.count += len(values)
        for begin in range(0, len(values), 1 << 16):  # this many halves of 27 bits sum exactly in a float64
            fraction, exponent = np.frexp(values[begin : begin + (1 << 16)])
            whole = np.ldexp(fraction, 53).astype(np.int64)
            low = whole & ((1 << 26) - 1)
            found, place = np.unique(exponent, return_inverse=True)
            parts = (np.bincount(place, weights=part, minlength=len(found)) for part in ((whole - low) >> 26, low))
            for power, high, rest in zip(found.tolist(), *(part.tolist() for part in parts), strict=True):
                self._sums[power] = self._sums.get(power, 0) + (int(high) << 26) + int(rest)

    @property
    def mean(self) -> float:
        """The mean; 0 if there are no numbers."""
        total = sum((Fraction(whole) * Fraction(2) ** (power - 53) for power, whole in self._sums.items()), Fraction(0))
        return float(total / self.count) if self.count else 0.0


def _lists(vocabulary: Vocabulary, column: pa.Array, length: int) -> pa.Array:
    """The distinct codes of each row, the most frequent first and unknown last, at most ``length``."""
    lengths = column.value_lengths().fill_null(0).to_numpy()
    row = np.repeat(np.arange(len(column)), lengths)
    codes = vocabulary.codes(column.flatten()).astype(np.int64)
    row, codes = row[codes != MISSING], codes[codes != MISSING]
    stride = vocabulary.num_codes + 1
    pairs = np.unique(row * stride + np.where(codes == UNKNOWN, vocabulary.num_codes, codes))
    row, rank = pairs // stride, pairs % stride
    starts = np.searchsorted(row, np.arange(len(column)))
    kept = np.arange(len(row)) - starts[row] < length
    codes = np.where(rank == vocabulary.num_codes, UNKNOWN, rank)[kept].astype(np.int32)
    offsets = np.searchsorted(row[kept], np.arange(len(column) + 1)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(codes))


def _one(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


@dataclass(frozen=True)
class PolicyFeatures:
    """What a policy reads beside items and feedback. Its run and its bundle keep it in the same files.

    Attributes:
        item: for the vectors of new items; empty = not read, or a bundle without an item encoder.
        user: of the users; empty = not read.
        context: of the requests; empty = not read.
        behaviors: names of the behaviors that it reads, in the order of their bits.
    """

    item: FittedFeatures = FittedFeatures()
    user: FittedFeatures = FittedFeatures()
    context: FittedFeatures = FittedFeatures()
    behaviors: tuple[str, ...] = ()

    @property
    def schema(self) -> FeatureSchema:
        """The features of these sides."""
        return FeatureSchema(*(self.of(side).features for side in SIDES))

    def of(self, side: Side) -> FittedFeatures:
        """The fitted features of one side."""
        found: FittedFeatures = getattr(self, side)
        return found

    def save(self, root: Path) -> None:
        """Writes the vocabularies into a directory."""
        for side in SIDES:
            for name, vocabulary in self.of(side).vocabularies.items():
                file = root / vocabulary_file(side, name)
                file.parent.mkdir(exist_ok=True)
                pq.write_table(pa.table({"value": vocabulary.values}), file)

    @classmethod
    def load(cls, root: Path, schema: FeatureSchema, behaviors: tuple[str, ...] = (), *, remedy: str) -> PolicyFeatures:
        """Reads the vocabularies in a directory whose files are already verified.

        Args:
            root: the directory.
            schema: the features that are read.
            behaviors: the behaviors that are read.
            remedy: what to do about a damaged directory, for messages.

        Raises:
            RecpoError: a vocabulary is missing or damaged.
        """
        sides = {side: _fitted(root, side, schema, remedy) for side in SIDES}
        return cls(**sides, behaviors=behaviors)


def vocabulary_file(side: Side, name: str) -> str:
    """The vocabulary file of a category, relative to the directory: ``value`` by code; ``count`` in prepared data."""
    return f"vocabularies/{side}_{name}.parquet"


def _fitted(root: Path, side: Side, schema: FeatureSchema, remedy: str) -> FittedFeatures:
    values = {}
    for name in schema.coded(side):
        file = root / vocabulary_file(side, name)
        with reading(file, OSError, pa.ArrowException, remedy=remedy):
            values[name] = pq.read_table(file, columns=["value"]).column(0).combine_chunks()
    fitted = of_side(schema.of(side), values)
    for feature in fitted.features:
        known = fitted.vocabularies.get(feature.name)
        if isinstance(feature, Category | Categories) and known is not None and known.num_codes != feature.num_codes:
            raise RecpoError(
                f"{root / vocabulary_file(side, feature.name)} is no vocabulary of its schema: {remedy}",
                code="damaged",
                field=feature.name,
            )
    return fitted


def of_side(features: Sequence[Feature], vocabularies: Mapping[str, pa.Array]) -> FittedFeatures:
    """The features that have vocabularies, by name."""
    return FittedFeatures(tuple(features), {name: Vocabulary(values) for name, values in vocabularies.items()})


def decoded(fitted: FittedFeatures, arrays: FeatureArrays) -> dict[str, pa.Array]:
    """Plain columns of ``arrays`` with the leading shape ``[N]``, by feature name.

    Missing values are null. An unknown value becomes a value that is not in the vocabulary.
    """
    columns: dict[str, pa.Array] = {}
    for place, category in enumerate(of_type(fitted.features, Category)):
        columns[category.name] = _values(fitted.vocabularies[category.name], arrays.codes[:, place])
    for codes, listed in zip(arrays.lists, of_type(fitted.features, Categories), strict=True):
        columns[listed.name] = _decoded_lists(fitted.vocabularies[listed.name], codes, listed)
    for place, number in enumerate(of_type(fitted.features, Number)):
        columns[number.name] = pa.array(_numbers(number, arrays.numbers[:, place]), from_pandas=True)
    for rows, vector in zip(arrays.vectors, of_type(fitted.features, Vector), strict=True):
        columns[vector.name] = pa.array([None if np.isnan(row).any() else row.tolist() for row in rows])
        columns[vector.name] = columns[vector.name].cast(pa.list_(pa.float32()))
    return columns


def by_source(fitted: FittedFeatures, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """Renames columns from feature names to the column names of the prepared table."""
    sources = {feature.name: feature.source for feature in fitted.features}
    return {sources[name]: column for name, column in columns.items()}


def _values(vocabulary: Vocabulary, codes: np.ndarray) -> pa.Array:
    """Values of the vocabulary ``[N]``; null where missing."""
    unknown = _strange(vocabulary) if (codes == UNKNOWN).any() else None
    with_unknown = pa.concat_arrays([pa.array([unknown], vocabulary.values.type), vocabulary.values])
    return with_unknown.take(pa.array(codes - FIRST_CODE + 1, mask=codes == MISSING))


def _decoded_lists(vocabulary: Vocabulary, codes: np.ndarray, feature: Categories) -> pa.Array:
    kept = codes != MISSING
    offsets = np.concatenate([[0], np.cumsum(kept.sum(1))]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), _values(vocabulary, codes[kept]))
    if feature.separator is None:
        return lists
    return pa.array([feature.separator.join(map(str, row)) for row in lists.to_pylist()], pa.string())


def _numbers(feature: Number, values: np.ndarray) -> np.ndarray:
    assert feature.mean is not None
    assert feature.std is not None
    raw: np.ndarray = values.astype(np.float64) * feature.std + feature.mean
    return np.sign(raw) * np.expm1(np.abs(raw)) if feature.log else raw


def _strange(vocabulary: Vocabulary) -> Any:
    """A value that is not in the vocabulary."""
    known = set(vocabulary.values.to_pylist())
    if pa.types.is_string(vocabulary.values.type):
        return next(value for size in count(1) if (value := "?" * size) not in known)
    return next(value for value in count(-(2**62)) if value not in known)
