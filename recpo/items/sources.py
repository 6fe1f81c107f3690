"""Sources of item vectors and of ready-made codes: files, frames, the item table, or the log alone."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

from recpo.base.errors import PositiveFloat, PositiveInt, RecpoError, validate_ranges
from recpo.base.features import Vector, of_type, read_features
from recpo.base.frames import Frame, to_arrow
from recpo.items.residual_kmeans import Codebooks
from recpo.log.id_map import IdMap, read_rows, shown
from recpo.log.prepared import ITEM_FEATURES, Prepared

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
    def read(self, data: Prepared, items: IdMap, seed: int, earlier: EarlierCodes | None = None) -> ItemVectors:
        """The vectors of all items.

        Args:
            data: the prepared data.
            items: the catalog.
            seed: seed of all random numbers.
            earlier: only the rows of its new items are used, in the space of its codebooks; the vectors have to come
                from the model that made those of the codebooks.

        Raises:
            RecpoError: an item has no vector, or this source cannot make vectors in the space of earlier codebooks.
        """


Missing = Literal["error", "mean", "zero"]


def _substituted(
    values: np.ndarray,
    absent: np.ndarray,
    how: Missing,
    items: IdMap,
    earlier: EarlierCodes | None,
    shown: str,
    field: str,
) -> int:
    """Gives the ``absent [V]`` items the mean or the zero vector, in place; the number of those that are needed.

    Raises:
        RecpoError: ``how`` is "error", and a needed item has no vector.
    """
    needed = np.ones(len(absent), bool) if earlier is None else earlier.is_new.numpy()
    lacking = absent & needed
    if lacking.any() and how == "error":
        first = items.to_external([int(lacking.argmax()) + 1])[0]
        raise RecpoError(
            f"{shown} has no vector for {int(lacking.sum())} of {int(needed.sum())} items, the first is {first}: add "
            "them, or give them the mean or the zero vector (missing: mean, missing: zero)",
            code="missing_value",
            field=field,
        )
    values[absent] = values[~absent].mean(0, dtype=np.float64) if how == "mean" and not absent.all() else 0.0
    return int(lacking.sum())


@dataclass(frozen=True, kw_only=True)
class _GivenVectors(VectorSource):
    """Vectors from outside recpo: rows of item ids and vectors; rows of items outside the catalog are counted."""

    item_id: str = "item_id"
    """column of the item ids of the log"""
    vector: str | list[str] = "vector"
    """a column of lists of equal length, or a list of columns of numbers, one for each dimension"""
    missing: Missing = "error"
    """what an item without a row gets: an error, the mean vector, or the zero vector"""

    @abstractmethod
    def _source(self) -> Path | pa.Table: ...

    def read(self, data: Prepared, items: IdMap, seed: int, earlier: EarlierCodes | None = None) -> ItemVectors:
        """See ``VectorSource``."""
        source, columns = self._source(), [self.vector] if isinstance(self.vector, str) else self.vector
        rows = read_rows(source, self.item_id, columns, items)
        lacking = _substituted(rows.values, ~rows.found, self.missing, items, earlier, shown(source), "vectors")
        return ItemVectors(rows.values, {"items_missing": lacking, "rows_of_other_items": rows.ignored})


@dataclass(frozen=True)
class VectorsFromParquet(_GivenVectors):
    """Vectors from a file, for example text or image embeddings."""

    file: Path
    """Parquet file, or a directory of such files"""

    def _source(self) -> Path:
        return self.file


@dataclass(frozen=True)
class VectorsFromFrame(_GivenVectors):
    """Vectors in memory; from Python only."""

    frame: Frame
    """any frame (pandas, polars, pyarrow, or a dictionary of columns)"""

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
        rows = read_rows(self.file, self.item_id, self.codes, items, "codes")
        if not rows.found.all():
            first = items.to_external([int((~rows.found).argmax()) + 1])[0]
            raise RecpoError(
                f"{self.file} has no codes for {int((~rows.found).sum())} items, the first is {first}: add them",
                code="missing_value",
                field="codes",
            )
        largest, most = rows.values.max(0), min(self.codebook_size or _LARGEST_CODEBOOK, _LARGEST_CODEBOOK)
        if largest.max() >= most:
            column = self.codes[int(largest.argmax())]
            raise RecpoError(
                f"{self.file}, column {column}: code {largest.max()} does not fit into a codebook of {most} codes, "
                "which count from 0: does the column hold codes?",
                code="out_of_range",
                field="codebook_size" if most < _LARGEST_CODEBOOK else column,
            )
        sizes = tuple(self.codebook_size or int(code) + 1 for code in largest)
        return rows.values, sizes, {"items_missing": 0, "rows_of_other_items": rows.ignored}


class Pairs(NamedTuple):
    """How often items are close to each other.

    Attributes:
        weights: ``[V, V]`` symmetric, zero diagonal; row i is item i + 1.
        dropped: number of pairs that were dropped to limit the memory.
    """

    weights: sparse.csr_matrix
    dropped: int


@dataclass(frozen=True)
class VectorsFromCooccurrence(VectorSource):
    """Vectors from the training events alone: ``U sqrt(S)``, a factorization of the co-occurrences of items.

    The truncated SVD of the shifted positive pointwise mutual information
    ``ppmi(i, j) = max(0, log(n_ij n / (n_i n_j)) - log shift)`` with ``n_ij`` the sum of ``1 / distance`` over the
    places where i and j are at most ``window`` events apart in a user's sequence. Levy and Goldberg, "Neural word
    embedding as implicit matrix factorization" (NIPS 2014); the weights by distance are those of GloVe. Items
    without a close item get a zero vector and are counted.

    Attributes:
        dim: width d of the vectors, at most the number of items less one.
        window: largest distance, in events of a user's sequence, of two items that count as a pair; the weight of the
            pair is one over the distance.
        shift: 1 = plain mutual information. A larger value k keeps fewer, stronger pairs, as k negative samples do in
            word2vec.
        max_pairs: largest number of pairs in memory (about 12 bytes each, in a few copies). Beyond it, the weakest are
            dropped and counted.
    """

    dim: PositiveInt = 64
    window: PositiveInt = 5
    shift: PositiveFloat = 1.0
    max_pairs: PositiveInt = 50_000_000

    def __post_init__(self) -> None:
        """Refuses invalid options."""
        validate_ranges(self)

    def read(self, data: Prepared, items: IdMap, seed: int, earlier: EarlierCodes | None = None) -> ItemVectors:
        """See ``VectorSource``.

        Another factorization has other axes. With earlier codebooks, a new item therefore gets the mean of the points
        that the codes of its close items represent, weighted by mutual information.
        """
        pairs = self.count(data.train_columns(["user_index", "item_index"]), data.num_items)
        if earlier is None:
            vectors = self.vectors(pairs, seed)
            return ItemVectors(vectors, _facts(pairs, vectors))
        given = earlier.codebooks.reconstruct(earlier.codes.clamp_min(0)).numpy()
        is_new = earlier.is_new.numpy()
        points = self.fold_in(pairs, given, is_new)
        raw = points * earlier.codebooks.scale.numpy() + earlier.codebooks.shift.numpy()
        return ItemVectors(raw, _facts(pairs, points[is_new]))

    def count(self, shards: Iterable[Mapping[str, np.ndarray]], num_items: int) -> Pairs:
        """Sums the pairs of all shards. One shard and at most twice ``max_pairs`` pairs are in memory at a time.

        Args:
            shards: ``user_index`` and ``item_index`` of the events of each shard, by user and time.
            num_items: V.
        """
        upper, dropped = sparse.csr_matrix((num_items, num_items), dtype=np.float32), 0
        for shard in shards:
            upper = upper + self._pairs(shard, num_items)
            if upper.nnz > self.max_pairs:
                weakest = np.argpartition(upper.data, upper.nnz - self.max_pairs)[: upper.nnz - self.max_pairs]
                upper.data[weakest] = 0
                upper.eliminate_zeros()
                dropped += len(weakest)
        return Pairs((upper + upper.T).tocsr(), dropped)

    def _pairs(self, shard: Mapping[str, np.ndarray], num_items: int) -> sparse.csr_matrix:
        user, items = shard["user_index"], shard["item_index"].astype(np.int64) - 1
        total = sparse.csr_matrix((num_items, num_items), dtype=np.float32)
        for distance in range(1, self.window + 1):
            together = (user[distance:] == user[:-distance]) & (items[distance:] != items[:-distance])
            one, other = items[:-distance][together], items[distance:][together]
            weight = np.full(len(one), 1 / distance, dtype=np.float32)
            places = (np.minimum(one, other), np.maximum(one, other))
            total = total + sparse.csr_matrix((weight, places), shape=total.shape)
        return total

    def vectors(self, pairs: Pairs, seed: int) -> np.ndarray:
        """``[V, d]`` float32; zero for items without a close item.

        Raises:
            RecpoError: no two items are close to each other more often than by chance.
        """
        information = self.information(pairs.weights)
        if not information.nnz:
            raise RecpoError(
                "no two items of the training period stand near each other more often than by chance (shift "
                f"{self.shift}), so co-occurrence makes no vectors; give item vectors from a file (VectorsFromParquet)",
                code="empty",
                field="shift",
            )
        width = min(self.dim, information.shape[0] - 1)
        left, singular, _ = randomized_svd(information, width, n_iter=4, random_state=seed)
        vectors = (left * np.sqrt(singular)).astype(np.float32)
        vectors[np.diff(information.indptr) == 0] = 0  # exactly, not up to rounding
        return vectors

    def fold_in(self, pairs: Pairs, points: np.ndarray, is_new: np.ndarray) -> np.ndarray:
        """Points of new items: the mean of the given items close to them, weighted by mutual information.

        Args:
            pairs: of all items.
            points: ``[V, d]``; the rows of new items are not read.
            is_new: ``[V]`` bool.

        Returns:
            ``[V, d]`` float32; zero for new items without a close given item.
        """
        near = self.information(pairs.weights)[is_new][:, ~is_new]
        total = np.asarray(near.sum(1)).ravel()
        folded = points.astype(np.float32, copy=True)
        folded[is_new] = (near @ points[~is_new]) / np.where(total > 0, total, 1)[:, None]
        return folded

    def information(self, weights: sparse.csr_matrix) -> sparse.csr_matrix:
        """The shifted positive pointwise mutual information ``[V, V]`` of the pairs, zeros not stored."""
        coordinates = weights.tocoo()
        marginal = np.asarray(weights.sum(1), dtype=np.float64).ravel()
        expected = marginal[coordinates.row] * marginal[coordinates.col] / max(marginal.sum(), 1e-300)
        value = np.log(coordinates.data / expected) - np.log(self.shift)
        matrix = sparse.csr_matrix(
            (np.maximum(value, 0).astype(np.float32), (coordinates.row, coordinates.col)), shape=weights.shape
        )
        matrix.eliminate_zeros()
        return matrix


def _facts(pairs: Pairs, vectors: np.ndarray) -> dict[str, Any]:
    alone = int((~vectors.any(1)).sum())
    return {"pairs": pairs.weights.nnz // 2, "pairs_forgotten": pairs.dropped, "zero_vectors": alone}


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
    missing: Missing = "error"

    def read(self, data: Prepared, items: IdMap, seed: int, earlier: EarlierCodes | None = None) -> ItemVectors:
        """See ``VectorSource``.

        Raises:
            RecpoError: the data have no such feature, or ``missing`` is "error" and a needed item has none.
        """
        feature = self._found(data)
        values = read_features([feature], data.table(ITEM_FEATURES, [feature.name])).vectors[0]
        absent, shown_as = np.any(np.isnan(values), 1), f"{data.root}: {feature.name}"
        lacking = _substituted(values, absent, self.missing, items, earlier, shown_as, feature.name)
        return ItemVectors(values, {"feature": feature.name, "items_missing": lacking})

    def _found(self, data: Prepared) -> Vector:
        vectors = of_type(data.feature_schema.item, Vector)
        found = [one for one in vectors if self.feature in (None, one.name)]
        if len(found) == 1:
            return found[0]
        names = ", ".join(one.name for one in vectors)
        if not vectors:
            raise RecpoError(
                f"{data.root}: its items have no feature of type Vector: prepare the log with --items, or take vectors "
                "from a file (VectorsFromParquet)",
                code="missing_option",
                field="items",
            )
        wrong = "name one of them" if self.feature is None else f"{self.feature!r} is none of them"
        raise RecpoError(
            f"{data.root}: its items have the vectors {names}: {wrong} (vectors.feature)",
            code="unknown_name",
            field="vectors.feature",
        )
