"""Features and behaviors of a bundle: the manifest has the fitted schema, and the vocabularies are files beside it.

::

    bundle/vocabularies/item_author.parquet   the values of a category, in the order of their codes
    bundle/item_encoders.safetensors          weights that compute vectors from the features of new items

NumPy and Arrow only; nothing is unpickled, and nothing names code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures, of_side
from recpo.base.features import SIDES, Categories, Category, Feature, FeatureSchema, Side

ITEM_ENCODERS: Final = "item_encoders.safetensors"
_REMEDY: Final = "copy or export the bundle again"


@dataclass(frozen=True)
class BundleFeatures:
    """The fitted features of each side that a bundle reads.

    Attributes:
        item: for the vectors of new items; None = the bundle has no item encoder.
        user: of the users; None = its policy does not read them.
        context: of the requests; None = its policy does not read them.
        behaviors: names of the behaviors that its policy reads, in the order of their bits.
    """

    item: FittedFeatures | None = None
    user: FittedFeatures | None = None
    context: FittedFeatures | None = None
    behaviors: tuple[str, ...] = ()

    @property
    def schema(self) -> FeatureSchema:
        """The features of these sides."""
        sides = ((self.of(side) or FittedFeatures((), {})).features for side in SIDES)
        return FeatureSchema(*sides)

    def of(self, side: Side) -> FittedFeatures | None:
        """The fitted features of one side."""
        found: FittedFeatures | None = getattr(self, side)
        return found

    def save(self, root: Path) -> None:
        """Writes the vocabularies into the directory of a bundle."""
        for side in SIDES:
            for name, vocabulary in (fitted.vocabularies if (fitted := self.of(side)) else {}).items():
                file = root / vocabulary_file(side, name)
                file.parent.mkdir(exist_ok=True)
                pq.write_table(pa.table({"value": vocabulary.values}), file)

    @classmethod
    def load(cls, root: Path, schema: FeatureSchema, behaviors: tuple[str, ...] = ()) -> BundleFeatures:
        """Reads the vocabularies of a bundle whose files are already verified.

        Raises:
            RecpoError: a vocabulary is missing or damaged.
        """
        found = {side: _fitted(root, side, schema.of(side)) for side in SIDES if schema.of(side)}
        return cls(found.get("item"), found.get("user"), found.get("context"), behaviors)


def vocabulary_files(schema: FeatureSchema) -> Iterator[str]:
    """The files of all vocabularies of a schema, relative to the directory."""
    return (vocabulary_file(side, name) for side in SIDES for name in _coded(schema.of(side)))


def vocabulary_file(side: Side, name: str) -> str:
    """The file of a vocabulary, relative to the directory, as in prepared data."""
    return f"vocabularies/{side}_{name}.parquet"


def _fitted(root: Path, side: Side, features: tuple[Feature, ...]) -> FittedFeatures:
    values = {}
    for feature in features:
        if isinstance(feature, Category | Categories):
            file = root / vocabulary_file(side, feature.name)
            try:
                values[feature.name] = pq.read_table(file, columns=["value"]).column(0).combine_chunks()
            except (OSError, pa.ArrowException) as error:
                raise RecpoError(f"{file} cannot be read ({error}): {_REMEDY}") from error
    fitted = of_side(features, values)
    for feature in features:
        if not isinstance(feature, Category | Categories):
            continue
        if fitted.vocabularies[feature.name].num_codes != feature.num_codes:
            raise RecpoError(f"{root / vocabulary_file(side, feature.name)} is no vocabulary of its schema: {_REMEDY}")
    return fitted


def _coded(features: Iterable[Feature]) -> list[str]:
    return [feature.name for feature in features if isinstance(feature, Category | Categories)]
