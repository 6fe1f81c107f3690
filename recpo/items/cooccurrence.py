"""Item vectors from the log alone: they describe which items are close to each other in users' sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

from recpo.base.errors import RecpoError
from recpo.items.sources import EarlierCodes, ItemVectors, VectorSource
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared, run_change


class Sequences(NamedTuple):
    """The events of one shard: user u has ``item_ids[offsets[u] : offsets[u + 1]]``, items 1..V in time order."""

    item_ids: np.ndarray
    offsets: np.ndarray


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

    dim: int = 64
    window: int = 5
    shift: float = 1.0
    max_pairs: int = 50_000_000

    def __post_init__(self) -> None:
        """Refuses invalid options."""
        for name in ("dim", "window", "max_pairs"):
            if getattr(self, name) < 1:
                raise RecpoError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.shift > 0:
            raise RecpoError(f"shift must be positive, got {self.shift}")

    def read(self, data: Prepared, items: IdMap, seed: int) -> ItemVectors:
        """See ``VectorSource.read``."""
        pairs = self.count(_sequences(data), data.num_items)
        vectors = self.vectors(pairs, seed)
        return ItemVectors(vectors, _facts(pairs, vectors))

    def read_new(self, data: Prepared, items: IdMap, earlier: EarlierCodes) -> ItemVectors:
        """See ``VectorSource.read_new``.

        Another factorization has other axes. A new item therefore gets the mean of the points that the codes of its
        close items represent, weighted by mutual information.
        """
        pairs = self.count(_sequences(data), data.num_items)
        given = earlier.codebooks.reconstruct(earlier.codes.clamp_min(0)).numpy()
        is_new = earlier.is_new.numpy()
        points = self.fold_in(pairs, given, is_new)
        raw = points * earlier.codebooks.scale.numpy() + earlier.codebooks.shift.numpy()
        return ItemVectors(raw, _facts(pairs, points[is_new]))

    def count(self, shards: Iterable[Sequences], num_items: int) -> Pairs:
        """Sums the pairs of all shards. One shard and at most twice ``max_pairs`` pairs are in memory at a time."""
        upper, dropped = sparse.csr_matrix((num_items, num_items), dtype=np.float32), 0
        for shard in shards:
            upper = upper + self._pairs(shard, num_items)
            if upper.nnz > self.max_pairs:
                weakest = np.argpartition(upper.data, upper.nnz - self.max_pairs)[: upper.nnz - self.max_pairs]
                upper.data[weakest] = 0
                upper.eliminate_zeros()
                dropped += len(weakest)
        return Pairs((upper + upper.T).tocsr(), dropped)

    def _pairs(self, shard: Sequences, num_items: int) -> sparse.csr_matrix:
        items, user = shard.item_ids - 1, np.repeat(np.arange(len(shard.offsets) - 1), np.diff(shard.offsets))
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
                f"{self.shift}), so co-occurrence makes no vectors; give item vectors from a file (VectorsFromParquet)"
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


def _sequences(data: Prepared) -> Iterator[Sequences]:
    for columns in data.train_columns(["user_index", "item_index"]):
        changes = np.flatnonzero(run_change(columns["user_index"]))
        yield Sequences(columns["item_index"].astype(np.int64), np.append(changes, len(columns["user_index"])))


def _facts(pairs: Pairs, vectors: np.ndarray) -> dict[str, Any]:
    alone = int((~vectors.any(1)).sum())
    return {"pairs": pairs.weights.nnz // 2, "pairs_forgotten": pairs.dropped, "zero_vectors": alone}
