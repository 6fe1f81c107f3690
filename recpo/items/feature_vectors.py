"""Item vectors from prepared data: a feature of type ``Vector`` of the item table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from recpo.base.errors import RecpoError
from recpo.base.features import Vector, of_type, read_features
from recpo.items.sources import EarlierCodes, ItemVectors, VectorSource
from recpo.log.id_map import IdMap
from recpo.log.prepared import ITEM_FEATURES, Prepared


@dataclass(frozen=True)
class VectorsFromFeatures(VectorSource):
    """A vector of the item table (``recpo prepare --items``), such as a text or image embedding.

    The vector of an item does not change from day to day. Codebooks made from such vectors therefore encode new items,
    which have no events, as well as known items.

    Attributes:
        feature: name of the feature; null = the only one of type ``Vector``.
        missing: what an item without a vector gets: an error, the mean vector, or the zero vector.
    """

    feature: str | None = None
    missing: Literal["error", "mean", "zero"] = "error"

    def read(self, data: Prepared, items: IdMap, seed: int) -> ItemVectors:
        """See ``VectorSource.read``."""
        return self._read(data, items, np.ones(len(items), dtype=bool))

    def read_new(self, data: Prepared, items: IdMap, earlier: EarlierCodes) -> ItemVectors:
        """See ``VectorSource.read_new``. The vectors must come from the model that made those of the codebooks."""
        return self._read(data, items, earlier.is_new.numpy())

    def _read(self, data: Prepared, items: IdMap, needed: np.ndarray) -> ItemVectors:
        """Vectors ``[V, w]``; items without a vector get zero or the mean.

        Raises:
            RecpoError: the data have no such feature, or ``missing`` is "error" and some of the ``needed [V]`` items
                have none.
        """
        feature = self._found(data)
        values = read_features([feature], data.table(ITEM_FEATURES, [feature.name])).vectors[0]
        absent = np.isnan(values).any(1)
        if (absent & needed).any() and self.missing == "error":
            first = items.to_external([int((absent & needed).argmax()) + 1])[0]
            raise RecpoError(
                f"{data.root}: {int((absent & needed).sum())} of {int(needed.sum())} items have no {feature.name}, the "
                f"first is {first}: add them to the table of items, or give them the mean or the zero vector (missing: "
                "mean, missing: zero)"
            )
        known = ~absent if self.missing == "mean" else np.zeros_like(absent)
        values[absent] = values[known].mean(0, dtype=np.float64) if known.any() else 0.0
        return ItemVectors(values, {"feature": feature.name, "items_missing": int((absent & needed).sum())})

    def _found(self, data: Prepared) -> Vector:
        vectors = of_type(data.feature_schema.item, Vector)
        found = [one for one in vectors if self.feature in (None, one.name)]
        if len(found) == 1:
            return found[0]
        names = ", ".join(one.name for one in vectors)
        if not vectors:
            raise RecpoError(
                f"{data.root}: its items have no feature of type Vector: prepare the log with --items, or take vectors "
                "from a file (VectorsFromParquet)"
            )
        wrong = "name one of them" if self.feature is None else f"{self.feature!r} is none of them"
        raise RecpoError(f"{data.root}: its items have the vectors {names}: {wrong} (vectors.feature)")
