"""Features as arrays, from the columns of a prepared file to a policy's input. NumPy and Arrow only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from recpo.features.schema import Categories, Category, Feature, Number, Vector, of_type

if TYPE_CHECKING:
    from recpo.types import Features


class FeatureArrays(NamedTuple):
    """``recpo.types.Features`` in NumPy: each field in the order of the schema, with the same leading shape.

    Attributes:
        codes: ``[..., C]`` int64, one for each ``Category``; 0 missing, 1 unknown.
        lists: for each ``Categories`` ``[..., L]`` int64, 0 pads.
        numbers: ``[..., N]`` float32, standardized; nan = missing.
        vectors: for each ``Vector`` ``[..., w]`` float32; a row of nan = missing.
    """

    codes: np.ndarray
    lists: tuple[np.ndarray, ...]
    numbers: np.ndarray
    vectors: tuple[np.ndarray, ...]

    def rows(self, index: np.ndarray) -> FeatureArrays:
        """The rows ``index``, of any shape."""
        return FeatureArrays(
            self.codes[index],
            tuple(one[index] for one in self.lists),
            self.numbers[index],
            tuple(one[index] for one in self.vectors),
        )

    def where(self, kept: np.ndarray) -> FeatureArrays:
        """Keeps the rows where ``kept`` (bool, of the leading shape) is true. Other rows have only missing features."""
        by_row = kept[..., None]
        return FeatureArrays(
            np.where(by_row, self.codes, 0),
            tuple(np.where(by_row, one, 0) for one in self.lists),
            np.where(by_row, self.numbers, np.float32(np.nan)),
            tuple(np.where(by_row, one, np.float32(np.nan)) for one in self.vectors),
        )

    def joined(self, *others: FeatureArrays) -> FeatureArrays:
        """These rows, followed by the rows of ``others``."""
        every = (self, *others)
        return FeatureArrays(
            np.concatenate([one.codes for one in every]),
            tuple(map(np.concatenate, zip(*(one.lists for one in every), strict=True))),
            np.concatenate([one.numbers for one in every]),
            tuple(map(np.concatenate, zip(*(one.vectors for one in every), strict=True))),
        )

    def tensors(self) -> Features:
        """Tensors that share the memory of the arrays."""
        import torch  # imported here because servers without torch read features too

        from recpo.types import Features

        return Features(
            torch.from_numpy(self.codes),
            tuple(map(torch.from_numpy, self.lists)),
            torch.from_numpy(self.numbers),
            tuple(map(torch.from_numpy, self.vectors)),
        )


def missing_features(features: Sequence[Feature], shape: tuple[int, ...]) -> FeatureArrays:
    """Features that are all missing, with the leading ``shape``."""
    nan = np.float32(np.nan)
    return FeatureArrays(
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
