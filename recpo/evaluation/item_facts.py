"""Facts about the items besides held-out events: counts, durations, and tags and vectors from a file.

Place 0 of every tensor is unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.items.columns import read_vectors
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared

#: Bins of ``popularity_bins``, the most popular first.
POPULARITY_BINS = ("head", "torso", "tail", "unseen in training")


class ItemTags(NamedTuple):
    """The tags of every item, as one flat list with offsets.

    Attributes:
        offsets: ``[V + 2]`` int64; item i owns ``tags[offsets[i] : offsets[i + 1]]``, item 0 owns nothing.
        tags: ``[N]`` int64, 0 .. ``num_tags`` - 1, distinct within an item.
        num_tags: G.
    """

    offsets: Tensor
    tags: Tensor
    num_tags: int


class ItemFacts(NamedTuple):
    """The facts that item segments and beyond-accuracy metrics use, on the CPU.

    Attributes:
        train_count: ``[V + 1]`` int64, training events of every item.
        duration: ``[V + 1]`` float, seconds, nan = unknown.
        tags: genres, topics and so on.
        vectors: ``[V + 1, d]`` float, item embeddings; a row of zeros = none.
    """

    train_count: Tensor
    duration: Tensor | None = None
    tags: ItemTags | None = None
    vectors: Tensor | None = None


def popularity_bins(train_count: Tensor) -> Tensor:
    """Bins of items by share of the training events: ``[V + 1]`` int64 indices of ``POPULARITY_BINS``, place 0 is -1.

    Items are sorted by their number of events, ties by id. The head is the smallest set of items with at least half of
    all events, the torso the next ones up to at least 80 %, and the tail the remaining items with events.
    """
    counts = train_count[1:].long()
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    label = torch.bucketize(10 * before, counts.sum() * torch.tensor([5, 8]), right=True)
    bins = torch.full_like(train_count, -1, dtype=torch.int64)
    bins[order + 1] = label
    bins[1:][counts == 0] = len(POPULARITY_BINS) - 1
    return bins


@dataclass(frozen=True)
class ItemFeatures:
    """A file of item side information, for diversity and calibration.

    Attributes:
        file: Parquet file with one row per item; items of other catalogs are ignored.
        item_id: column of the item ids of the log.
        tags: column of genres, topics and so on: a value, or a list of values, per item; null = no tags.
        vectors: column of lists of numbers; null = no vectors.
    """

    file: Path
    item_id: str = "item_id"
    tags: str | None = None
    vectors: str | None = None

    def __post_init__(self) -> None:
        if self.tags is None and self.vectors is None:
            raise RecpoError(f"item_features: name the column of the tags or of the vectors in {self.file}, or both")


def item_facts(data: Prepared, features: ItemFeatures | None) -> ItemFacts:
    """The facts about the items 1..V; place 0 is unused.

    Raises:
        RecpoError: the file cannot be read, lacks a column, or names no item of the catalog.
    """
    table = data.table("items.parquet", ["train_count", "duration"])
    count, duration = (_with_place_0(torch.from_numpy(column.to_numpy().copy())) for column in table.columns)
    facts = ItemFacts(count, duration.double() if bool((~duration[1:].isnan()).any()) else None)
    if features is None:
        return facts
    items = data.item_ids()
    vectors = None
    if features.vectors is not None:
        rows = read_vectors(features.file, features.item_id, [features.vectors], items.to_internal, data.num_items)
        vectors = _with_place_0(torch.from_numpy(rows.values))
    return facts._replace(vectors=vectors, tags=None if features.tags is None else _tags(features, items))


def _with_place_0(values: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(values[:1]), values])


def _tags(features: ItemFeatures, items: IdMap) -> ItemTags:
    """Tags of the items, numbered in the order of their first appearance."""
    ids, tags = _columns(features)
    try:
        index = items.to_internal(ids)
    except RecpoError as error:
        raise RecpoError(f"{features.file}, column {features.item_id}: {error}") from error
    if not (index > 0).any():
        raise RecpoError(f"{features.file}: column {features.item_id} names no item of the catalog")
    if pa.types.is_list(tags.type) or pa.types.is_large_list(tags.type) or pa.types.is_fixed_size_list(tags.type):
        owner, values = index[pc.list_parent_indices(tags).to_numpy()], pc.list_flatten(tags)
    else:
        owner, values = index, tags
    kept = pc.and_(pa.array(owner > 0), values.is_valid())
    encoded = values.filter(kept).dictionary_encode()
    number = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    owner = owner[kept.to_numpy(zero_copy_only=False)]
    size = max(1, len(encoded.dictionary))
    distinct = np.unique(owner * size + number)
    counts = np.bincount(distinct // size, minlength=len(items) + 1)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
    return ItemTags(offsets, torch.from_numpy(distinct % size), len(encoded.dictionary))


def _columns(features: ItemFeatures) -> tuple[pa.Array, pa.Array]:
    assert features.tags is not None
    try:
        names = pq.read_schema(features.file).names
        for name in (features.item_id, features.tags):
            if name not in names:
                raise RecpoError(f"{features.file} has no column {name}; it has {', '.join(names)}")
        table = pq.read_table(features.file, columns=[features.item_id, features.tags])
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise RecpoError(f"{features.file} cannot be read as Parquet ({error})") from error
    ids, tags = (table.column(name).combine_chunks() for name in (features.item_id, features.tags))
    return ids, tags
