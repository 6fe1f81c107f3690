"""Features and behaviors in the JSON of requests: the values that a bundle accepts, and their columns in the log."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import pyarrow as pa

from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import Categories, Category, Feature, Number, Side, Vector
from recpo.serving.manifest import BundleFeatures

_INT64: Final = 2**63
_TYPES: Final[Mapping[str, pa.DataType]] = {
    "integer": pa.int64(),
    "string": pa.string(),
    "number": pa.float64(),
    "integers": pa.list_(pa.int64()),
    "strings": pa.list_(pa.string()),
    "vector": pa.list_(pa.float32()),
}


def feature_kinds(fitted: FittedFeatures | None) -> tuple[tuple[str, str], ...]:
    """Name and kind of value of each feature, in JSON and in the log."""
    return () if fitted is None else tuple((one.name, _kind(one, fitted)) for one in fitted.features)


def arrow_type(kind: str) -> pa.DataType:
    """The type of a log column for values of a kind."""
    return _TYPES[kind]


def known_features(
    known: BundleFeatures, side: Side, values: Mapping[str, Any] | None, where: str
) -> dict[str, Any] | None:
    """The features of a request by name, in the form of columns; None if none are given or read.

    Args:
        known: the fitted features of the bundle.
        side: whose features.
        values: the values of the request; features that are not named are missing.
        where: the field of the request, for messages.

    Raises:
        RecpoError: a feature that the bundle does not read, or an invalid value.
    """
    fitted = known.of(side)
    if values is None:
        return None
    kinds = dict(feature_kinds(fitted))
    if strange := [name for name in values if name not in kinds]:
        raise RecpoError(f"{where}.{strange[0]:.80}: {_read(kinds, 'features')}")
    widths = {one.name: one.width for one in fitted.features if isinstance(one, Vector)} if fitted else {}
    return {name: _value(kinds[name], value, widths.get(name), f"{where}.{name}") for name, value in values.items()}


def known_behaviors(names: Collection[str], values: Mapping[str, bool] | None, where: str) -> Mapping[str, bool]:
    """The behaviors of an event.

    Raises:
        RecpoError: a behavior that the bundle does not read.
    """
    if not values:
        return {}
    if strange := [name for name in values if name not in names]:
        raise RecpoError(f"{where}.{strange[0]:.80}: {_read(names, 'behaviors')}")
    return values


def _read(names: Collection[str], what: str) -> str:
    return f"this bundle reads the {what} {', '.join(names)}" if names else f"this bundle reads no such {what}"


def _kind(feature: Feature, fitted: FittedFeatures) -> str:
    if isinstance(feature, Number):
        return "number"
    if isinstance(feature, Vector):
        return "vector"
    kind = "string" if pa.types.is_string(fitted.vocabularies[feature.name].values.type) else "integer"
    if isinstance(feature, Category):
        return kind
    assert isinstance(feature, Categories)
    return f"{kind}s" if feature.separator is None else "string"


def _value(kind: str, value: Any, width: int | None, where: str) -> Any:
    if value is None:
        return None
    if kind in ("integers", "strings", "vector"):
        if not isinstance(value, list) or (width is not None and len(value) != width):
            raise RecpoError(f"{where}: expected a list{'' if width is None else f' of {width} numbers'}")
        one = {"integers": "integer", "strings": "string", "vector": "number"}[kind]
        return [_single(one, part, where) for part in value]
    return _single(kind, value, where)


def _single(kind: str, value: Any, where: str) -> Any:
    if kind == "string" and isinstance(value, str):
        return value
    if kind == "integer" and isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)  # true and false are 1 and 0, as in a column of flags
    if kind == "number" and isinstance(value, int | float) and abs(value) < 1e38:
        return float(value)
    raise RecpoError(f"{where}: expected {'an integer' if kind == 'integer' else f'a {kind}'}")
