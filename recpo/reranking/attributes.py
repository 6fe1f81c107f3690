"""Item attributes for re-ranking: tags and vectors, as NumPy arrays by internal id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpo.data.id_map import IdMap
from recpo.errors import RecpoError
from recpo.frames import FrameOrPath, id_column, read_frame, require_columns
from recpo.tokenizer.columns import read_vectors

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.int64]


class Tags(NamedTuple):
    """One attribute of every item, such as the author or the categories; one flat list cut by offsets.

    Attributes:
        offsets: ``[V + 2]`` item i owns ``tags[offsets[i] : offsets[i + 1]]``; item 0 owns nothing.
        tags: ``[N]`` numbers of tags from 0 on, no tag twice in an item.
    """

    offsets: IntArray
    tags: IntArray

    def of(self, items: IntArray) -> tuple[IntArray, IntArray]:
        """Every tag of ``items [n]``: the place of its item, and the tag."""
        count = self.offsets[items + 1] - self.offsets[items]
        owner = np.repeat(np.arange(len(items)), count)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return owner, self.tags[self.offsets[items][owner] + nth]

    @classmethod
    def from_pairs(cls, items: IntArray, tags: IntArray, num_items: int) -> Tags:
        """From pairs of an item and a tag, ``[N]`` each, in any order, repeats allowed; item 0 is left out."""
        size = int(tags.max(initial=0)) + 1
        distinct = np.unique(items[items > 0] * size + tags[items > 0])
        counts = np.bincount(distinct // size, minlength=num_items + 1)
        return cls(np.concatenate([[0], np.cumsum(counts)]), distinct % size)


@dataclass(frozen=True, eq=False)
class ItemAttributes:
    """Tags and vectors of the items 1..V of a catalog; index 0 is not an item.

    Attributes:
        tags: attribute name to the items' tags.
        vectors: ``[V + 1, d]`` of length 1; a row of zeros = no vector. None = there are none.
    """

    tags: Mapping[str, Tags] = field(default_factory=dict)
    vectors: FloatArray | None = None

    @classmethod
    def read(
        cls,
        source: FrameOrPath,
        items: IdMap,
        *,
        names: Iterable[str] = (),
        vectors: str | None = None,
        item_id: str = "item_id",
    ) -> ItemAttributes:
        """Reads a frame, or a Parquet file, with one row per item; rows of other items are ignored.

        Args:
            source: frame or file with the external ids of the log.
            items: the catalog.
            names: columns of attributes: a value, or a list of values, per item; null = unknown.
            vectors: column of lists of numbers; None = none are read.
            item_id: column of the item ids.

        Raises:
            RecpoError: it cannot be read, a column is missing or of a wrong type, or no item of the catalog is named.
        """
        table = read_frame(source, "item attributes")
        where = str(source) if isinstance(source, str | Path) else "item attributes"
        index = items.to_internal(id_column(table, item_id, where))
        if not (index > 0).any():
            raise RecpoError(
                f"{where}: column {item_id} names no item of the catalog; it holds the item ids of the log"
            )
        require_columns(table, names, where)
        tags = {name: _tags(table.column(name).combine_chunks(), index, len(items)) for name in names}
        if vectors is None:
            return cls(tags)
        rows = read_vectors(table.select([item_id, vectors]), item_id, [vectors], items.to_internal, len(items))
        return cls(tags).with_vectors(np.concatenate([np.zeros_like(rows.values[:1]), rows.values]))

    def with_vectors(self, vectors: FloatArray) -> ItemAttributes:
        """These tags, with vectors ``[V + 1, d]`` of any length; row 0 is not read."""
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit = np.divide(vectors, length, out=np.zeros(vectors.shape, np.float64), where=length > 0)
        unit[0] = 0.0
        return ItemAttributes(self.tags, unit)

    def attribute(self, name: str) -> Tags:
        """The tags of an attribute.

        Raises:
            RecpoError: there is no attribute of this name.
        """
        if name not in self.tags:
            raise RecpoError(
                f"re-ranking: no attribute {name!r} of the items is known, there are "
                f"{', '.join(self.tags) or 'none'}; name a file with such a column (attributes)"
            )
        return self.tags[name]


@dataclass(frozen=True)
class RerankOptions:
    """Options that all re-ranking of an evaluation or a server shares.

    Attributes:
        shortlist: how many of the best items are re-ranked.
        attributes: Parquet file (or a directory of such files) with one row per item and the columns that methods name.
        item_id: its column with the item ids of the log.
        vectors: its column with lists of numbers; null = the item vectors of the policy itself.
    """

    shortlist: int = 100
    attributes: Path | None = None
    item_id: str = "item_id"
    vectors: str | None = None

    def __post_init__(self) -> None:
        if self.shortlist < 1:
            raise RecpoError(f"re-ranking: shortlist is {self.shortlist}, expected at least 1")
        if self.vectors is not None and self.attributes is None:
            raise RecpoError(f"re-ranking: vectors names the column {self.vectors!r}; name its file too (attributes)")

    def read(self, names: Iterable[str], items: IdMap) -> ItemAttributes:
        """The attributes ``names``, and the vectors if a column has them.

        Raises:
            RecpoError: see ``ItemAttributes.read``; or an attribute is requested and there is no file.
        """
        wanted = sorted(set(names))
        if self.attributes is None:
            known = ItemAttributes()
            for name in wanted:
                known.attribute(name)
            return known
        return ItemAttributes.read(self.attributes, items, names=wanted, vectors=self.vectors, item_id=self.item_id)


def _tags(column: pa.Array, index: IntArray, num_items: int) -> Tags:
    kind, owner = column.type, index
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        owner, column = index[pc.list_parent_indices(column).to_numpy()], pc.list_flatten(column)
    valid = column.is_valid()
    encoded = column.filter(valid).dictionary_encode()
    tags = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return Tags.from_pairs(owner[valid.to_numpy(zero_copy_only=False)], tags, num_items)
