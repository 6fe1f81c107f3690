"""Sources of item vectors and of ready-made codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.frames import Frame, to_arrow
from recpo.items.codebooks import Codebooks
from recpo.items.columns import ItemRows, read_codes, read_vectors, shown
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared

_LARGEST_CODEBOOK = 1 << 20


class ItemVectors(NamedTuple):
    """Vectors ``[V, d]`` float32 of the items 1..V, and facts about them for the manifest."""

    values: np.ndarray
    facts: dict[str, Any]


class EarlierCodes(NamedTuple):
    """The codebooks and codes of an earlier catalog.

    Attributes:
        codebooks: the frozen codebooks.
        codes: ``[V, T]``, the earlier codes of the items; -1 for new items.
        is_new: ``[V]`` bool.
    """

    codebooks: Codebooks
    codes: Tensor
    is_new: Tensor


class VectorSource(ABC):
    """A source of item vectors, from which residual k-means makes codes; implementations are frozen dataclasses."""

    @abstractmethod
    def read(self, data: Prepared, items: IdMap, seed: int) -> ItemVectors:
        """The vectors of all items."""

    @abstractmethod
    def read_new(self, data: Prepared, items: IdMap, earlier: EarlierCodes) -> ItemVectors:
        """Vectors of the new items in the space of earlier, frozen codebooks; the rows of other items are not used.

        Raises:
            RecpoError: this source cannot make such vectors.
        """


class _GivenVectors(VectorSource):
    """Vectors from outside recpo: rows of item ids and vectors."""

    item_id: str
    vector: str | list[str]
    missing: Literal["error", "mean", "zero"]

    @abstractmethod
    def _source(self) -> Path | pa.Table: ...

    def read(self, data: Prepared, items: IdMap, seed: int) -> ItemVectors:
        """See ``VectorSource.read``."""
        return self._read(items, np.ones(len(items), dtype=bool))

    def read_new(self, data: Prepared, items: IdMap, earlier: EarlierCodes) -> ItemVectors:
        """See ``VectorSource.read_new``. The vectors must come from the model that made those of the codebooks."""
        return self._read(items, earlier.is_new.numpy())

    def _read(self, items: IdMap, needed: np.ndarray) -> ItemVectors:
        """Vectors of all items, with a substitute for the ``needed [V]`` items that have none.

        Raises:
            RecpoError: ``missing`` is "error", and a needed item has no vector.
        """
        source, columns = self._source(), [self.vector] if isinstance(self.vector, str) else self.vector
        rows = read_vectors(source, self.item_id, columns, items.to_internal, len(items))
        absent = needed & ~rows.found
        if absent.any() and self.missing == "error":
            first = items.to_external([int(absent.argmax()) + 1])[0]
            raise RecpoError(
                f"{shown(source)} has no vector for {int(absent.sum())} of {int(needed.sum())} items, the first is "
                f"{first}: add them, or give them the mean or the zero vector (missing: mean, missing: zero)"
            )
        if self.missing == "mean":
            rows.values[absent] = rows.values[rows.found].mean(0, dtype=np.float64)
        return ItemVectors(rows.values, _file_facts(rows, absent))


@dataclass(frozen=True)
class VectorsFromParquet(_GivenVectors):
    """Vectors from a file, for example text or image embeddings.

    Attributes:
        file: Parquet file, or a directory of such files; rows of items outside the catalog are ignored and counted.
        item_id: column of the item ids of the log.
        vector: a column of lists of equal length, or a list of columns of numbers, one for each dimension.
        missing: what an item that the file does not contain gets: an error, the mean vector, or the zero vector.
    """

    file: Path
    item_id: str = "item_id"
    vector: str | list[str] = "vector"
    missing: Literal["error", "mean", "zero"] = "error"

    def _source(self) -> Path:
        return self.file


@dataclass(frozen=True)
class VectorsFromFrame(_GivenVectors):
    """Vectors in memory; from Python only.

    Attributes:
        frame: any frame (pandas, polars, pyarrow, or a dictionary of columns); rows of items outside the catalog are
            ignored and counted.
        item_id: column of the item ids of the log.
        vector: a column of lists of equal length, or a list of columns of numbers, one for each dimension.
        missing: what an item that the frame does not contain gets: an error, the mean vector, or the zero vector.
    """

    frame: Frame
    item_id: str = "item_id"
    vector: str | list[str] = "vector"
    missing: Literal["error", "mean", "zero"] = "error"

    def _source(self) -> pa.Table:
        return to_arrow(self.frame, "vectors")


@dataclass(frozen=True)
class CodesFromFile:
    """Ready-made codes; every item of the catalog needs a row.

    Attributes:
        file: Parquet file, or a directory of such files; rows of items outside the catalog are ignored and counted.
        item_id: column of the item ids of the log.
        codes: one column for each level, first level first: integers from 0, or text with one number in it, such as
            ``<a_183>``.
        codebook_size: number of codes per level; null = the largest code of the level in the file, plus one.
    """

    file: Path
    codes: list[str]
    item_id: str = "item_id"
    codebook_size: int | None = None

    def read(self, items: IdMap) -> tuple[np.ndarray, tuple[int, ...], dict[str, Any]]:
        """Codes ``[V, T]`` int64, codebook sizes, and facts about them for the manifest.

        Raises:
            RecpoError: items without codes, or codes outside the codebook.
        """
        rows = read_codes(self.file, self.item_id, self.codes, items.to_internal, len(items))
        if not rows.found.all():
            first = items.to_external([int((~rows.found).argmax()) + 1])[0]
            raise RecpoError(
                f"{self.file} has no codes for {int((~rows.found).sum())} items, the first is {first}: add them"
            )
        largest = rows.values.max(0)
        if largest.max() >= _LARGEST_CODEBOOK:
            raise RecpoError(
                f"{self.file}, column {self.codes[int(largest.argmax())]}: code {largest.max()} is beyond any codebook "
                f"(at most {_LARGEST_CODEBOOK} codes): does the column hold codes?"
            )
        if self.codebook_size is not None and largest.max() >= self.codebook_size:
            raise RecpoError(
                f"{self.file}, column {self.codes[int(largest.argmax())]}: code {largest.max()} does not fit into a "
                f"codebook of {self.codebook_size}: codes count from 0"
            )
        sizes = tuple(self.codebook_size or int(code) + 1 for code in largest)
        return rows.values, sizes, _file_facts(rows, ~rows.found)


def _file_facts(rows: ItemRows, absent: np.ndarray) -> dict[str, Any]:
    return {"items_missing": int(absent.sum()), "rows_of_other_items": rows.ignored}
