"""Decodes features to columns of raw values, which encode to the same features again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from recpo.features.arrays import FeatureArrays
from recpo.features.encoding import FittedFeatures, Vocabulary
from recpo.features.schema import FIRST_CODE, MISSING, Categories, Category, Feature, Number, Vector, of_type


def decoded(fitted: FittedFeatures, arrays: FeatureArrays) -> dict[str, pa.Array]:
    """Plain columns of ``arrays`` with the leading shape ``[N]``, by feature name.

    Missing values are null. An unknown value becomes a value that is not in the vocabulary.
    """
    columns: dict[str, pa.Array] = {}
    for place, category in enumerate(of_type(fitted.features, Category)):
        columns[category.name] = _values(fitted.vocabularies[category.name], arrays.codes[:, place])
    for codes, listed in zip(arrays.lists, of_type(fitted.features, Categories), strict=True):
        columns[listed.name] = _lists(fitted.vocabularies[listed.name], codes, listed)
    for place, number in enumerate(of_type(fitted.features, Number)):
        columns[number.name] = pa.array(_numbers(number, arrays.numbers[:, place]), from_pandas=True)
    for rows, vector in zip(arrays.vectors, of_type(fitted.features, Vector), strict=True):
        known = ~np.isnan(rows).any(1)
        columns[vector.name] = pa.array([row.tolist() if kept else None for row, kept in zip(rows, known, strict=True)])
        columns[vector.name] = columns[vector.name].cast(pa.list_(pa.float32()))
    return columns


def by_source(fitted: FittedFeatures, columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """Renames columns from feature names to the column names of the prepared table."""
    sources = {feature.name: feature.source for feature in fitted.features}
    return {sources[name]: column for name, column in columns.items()}


def _values(vocabulary: Vocabulary, codes: np.ndarray) -> pa.Array:
    """Values of the vocabulary ``[N]``; null where missing."""
    with_unknown = pa.concat_arrays([pa.array([_strange(vocabulary)], vocabulary.values.type), vocabulary.values])
    return with_unknown.take(pa.array(codes - FIRST_CODE + 1, mask=codes == MISSING))


def _lists(vocabulary: Vocabulary, codes: np.ndarray, feature: Categories) -> pa.Array:
    kept = codes != MISSING
    offsets = np.concatenate([[0], np.cumsum(kept.sum(1))]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), _values(vocabulary, codes[kept]))
    if feature.separator is None:
        return lists
    return pa.array([feature.separator.join(map(str, row)) for row in lists.to_pylist()], pa.string())


def _numbers(feature: Feature, values: np.ndarray) -> np.ndarray:
    assert isinstance(feature, Number)
    assert feature.mean is not None
    assert feature.std is not None
    raw: np.ndarray = values.astype(np.float64) * feature.std + feature.mean
    return np.sign(raw) * np.expm1(np.abs(raw)) if feature.log else raw


def _strange(vocabulary: Vocabulary) -> Any:
    """A value that is not in the vocabulary."""
    known = set(vocabulary.values.to_pylist())
    if pa.types.is_string(vocabulary.values.type):
        value = "?"
        while value in known:
            value += "?"
        return value
    number = -(2**62)
    while number in known:
        number += 1
    return number
