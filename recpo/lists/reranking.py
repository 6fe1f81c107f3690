"""Re-ranking: lists chosen jointly from a shortlist of relevant items, to be diverse, capped or calibrated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpo.base.errors import ClosedUnitInterval, PositiveInt, RecpoError, validate_ranges
from recpo.base.features import is_list
from recpo.base.frames import FrameOrPath, id_column, read_frame, require_columns
from recpo.log.id_map import IdMap, read_rows

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.int64]


class Tags(NamedTuple):
    """One attribute of every item, such as the author or the categories; one flat list cut by offsets.

    Attributes:
        offsets: ``[V + 2]`` item i owns ``tags[offsets[i] : offsets[i + 1]]``; item 0 owns nothing.
        tags: ``[N]`` 0 .. ``num_tags`` - 1, no tag twice in an item.
        num_tags: G, at least 1.
    """

    offsets: IntArray
    tags: IntArray
    num_tags: int

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
        owner, distinct = np.divmod(np.unique(items[items > 0] * size + tags[items > 0]), size)
        counts = np.bincount(owner, minlength=num_items + 1)
        return cls(np.concatenate([[0], np.cumsum(counts)]), distinct, size)


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
            message = f"{where}: column {item_id} names no item of the catalog; it holds the item ids of the log"
            raise RecpoError(message, code="mismatch", field=item_id)
        require_columns(table, names, where)
        tags = {name: _tags(table.column(name).combine_chunks(), index, len(items)) for name in names}
        if vectors is None:
            return cls(tags)
        rows = read_rows(table.select([item_id, vectors]), item_id, [vectors], items)
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
            message = (
                f"re-ranking: no attribute {name!r} of the items is known, there are "
                f"{', '.join(self.tags) or 'none'}; name a file with such a column (attributes)"
            )
            raise RecpoError(message, code="unknown_name", field=name)
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

    shortlist: PositiveInt = 100
    attributes: Path | None = None
    item_id: str = "item_id"
    vectors: str | None = None

    def __post_init__(self) -> None:
        validate_ranges(self)
        if self.vectors is not None and self.attributes is None:
            message = f"re-ranking: vectors names the column {self.vectors!r}; name its file too (attributes)"
            raise RecpoError(message, code="missing_option", field="attributes")

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
    if is_list(kind):
        owner, column = index[pc.list_parent_indices(column).to_numpy()], pc.list_flatten(column)
    valid = pc.and_(column.is_valid(), pa.array(owner > 0))
    encoded = column.filter(valid).dictionary_encode()
    tags = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return Tags.from_pairs(owner[valid.to_numpy(zero_copy_only=False)], tags, num_items)


class Reranker(ABC):
    """Chooses a slate from a shortlist, one item after the other; implementations are frozen dataclasses.

    Attributes:
        name: a short name with its options, for tables: a format string of its fields.
        reads_vectors: it reads item vectors.
    """

    name: ClassVar[str]
    reads_vectors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        validate_ranges(self)

    @property
    def label(self) -> str:
        """Its name, for tables."""
        return self.name.format_map(vars(self))

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the item attributes that it reads: its option ``attribute``, if it has one."""
        return (self.attribute,) if hasattr(self, "attribute") else ()

    @abstractmethod
    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """The slate as places of the shortlist.

        Args:
            items: ``[M]`` internal ids, distinct.
            scores: ``[M]`` relevance, higher = better, finite.
            k: length of the slate.
            known: tags and vectors of the items.
            history: ``[H]`` internal ids of the user's past, 0 pads; None = not known.

        Returns:
            ``[min(k, M)]`` distinct places, first item first.

        Raises:
            RecpoError: an attribute or the vectors that it reads are not known.
        """


def reranked(
    reranker: Reranker,
    items: IntArray,
    scores: FloatArray,
    ks: Iterable[int],
    known: ItemAttributes,
    histories: IntArray,
    shortlist: int,
) -> IntArray:
    """The new order of lists: of each the slate, the rest of its shortlist by relevance, and what follows as it was.

    The i-th item may keep the i-th largest score. So scores fall along the list, as in any ranking, and their
    distribution is the policy's own. Exploration of the re-ranked list has exact propensities, because the re-ranked
    list is a deterministic function of the request.

    Args:
        reranker: chooses the slates.
        items: ``[B, M]`` internal ids, best first; 0 = an empty place, at the end.
        scores: ``[B, M]`` log-probabilities; -inf where the place is empty.
        ks: ``[B]`` lengths of the slates.
        known: tags and vectors of the items.
        histories: ``[B, H]`` internal ids of the users' past, 0 pads.
        shortlist: how many of the best items are re-ranked, or as many as the slate has.

    Returns:
        ``[B, M]`` places.
    """
    order = np.tile(np.arange(items.shape[1]), (len(items), 1))
    for row, (k, history) in enumerate(zip(ks, histories, strict=True)):
        first = (row, slice(max(shortlist, k)))
        filled = np.flatnonzero((items[first] > 0) & (scores[first] > -np.inf))
        slate = reranker.order(items[row, filled], scores[row, filled], k, known, history)
        rest = np.setdiff1d(np.arange(len(filled)), slate)
        order[row, : len(filled)] = filled[np.concatenate([slate, rest])]
    return order


def relevance(scores: FloatArray) -> FloatArray:
    """Scores of a shortlist, scaled to similarities: 0 = the worst, 1 = the best; all 0 if all scores are equal."""
    low, high = scores.min(initial=np.inf), scores.max(initial=-np.inf)
    return np.asarray((scores - low) / (high - low) if high > low else np.zeros(len(scores)), np.float64)


def by_score(scores: FloatArray) -> IntArray:
    """Places by falling score, ties in their order."""
    return np.argsort(-scores, kind="stable")


def vectors_of(known: ItemAttributes, items: IntArray) -> NDArray[np.float64]:
    """Unit vectors ``[M, d]`` of items.

    Raises:
        RecpoError: there are none.
    """
    if known.vectors is None:
        message = (
            "re-ranking by similarity needs item vectors: name a column of vectors in a file of item attributes, or "
            "take a policy that has item vectors of its own"
        )
        raise RecpoError(message, code="missing_option", field="vectors")
    return np.asarray(known.vectors[items], np.float64)


SMOOTHING = 0.01  # of the shares in the slate, so that the divergence is finite; that of the metric `miscalibration`


@dataclass(frozen=True)
class Calibration(Reranker):
    """A slate whose categories have the shares that they have in the user's history.

    Greedily the largest

        w sum_(i in Y) relevance_i - (1 - w) sum_g p_g ln(p_g / ((1 - .01) q_g(Y) + .01 p_g))

    where p are the shares in the history and q those in the slate; every item with categories has weight 1, divided
    equally among them. A user without such a history gets the most relevant items. Time is proportional to ``k M``
    times the categories of the history.

    Attributes:
        attribute: column of the item attributes, such as category.
        relevance_weight: w in [0, 1]; 1 = only relevance.
    """

    name: ClassVar[str] = "calibrated {attribute} {relevance_weight:g}"

    attribute: str
    relevance_weight: ClosedUnitInterval = 0.5

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        tags, size = known.attribute(self.attribute), min(k, len(items))
        wanted, shares = _shares(tags, items, np.zeros(0, np.int64) if history is None else history)
        if not len(wanted):
            return by_score(scores)[:size]
        relevant, tagged = relevance(scores), np.diff(tags.offsets)[items] > 0
        chosen, free = np.zeros(size, np.int64), np.ones(len(items), bool)
        total, count = np.zeros(len(wanted)), 0
        for place in range(size):
            filled = np.maximum(count + tagged, 1)[:, None]
            smoothed = (1 - SMOOTHING) * (total + shares) / filled + SMOOTHING * wanted
            divergence = np.log(wanted / smoothed) @ wanted
            value = self.relevance_weight * relevant - (1 - self.relevance_weight) * divergence
            chosen[place] = best = int(np.where(free, value, -np.inf).argmax())
            free[best] = False
            total, count = total + shares[best], count + int(tagged[best])
        return chosen


def _shares(tags: Tags, items: IntArray, history: IntArray) -> tuple[FloatArray, FloatArray]:
    """Shares ``[G]`` of the history's tags, and ``[M, G]`` the weights of the items on the same tags."""
    owner, of_history = tags.of(history[history > 0])
    names, column = np.unique(of_history, return_inverse=True)
    wanted = np.bincount(column, _equal(owner), len(names))
    owner, of_items = tags.of(items)
    place = np.minimum(np.searchsorted(names, of_items), max(0, len(names) - 1))
    known = names[place] == of_items if len(names) else np.zeros(len(of_items), bool)
    shares = np.zeros((len(items), len(names)))
    shares[owner[known], place[known]] = _equal(owner)[known]
    return wanted / max(wanted.sum(), 1e-300), shares


def _equal(owner: IntArray) -> FloatArray:
    """The weight of every tag of an item: 1 / their number."""
    return np.asarray(1.0 / np.bincount(owner)[owner]) if len(owner) else np.zeros(0)


@dataclass(frozen=True)
class AttributeCap(Reranker):
    """The most relevant items such that at most ``at_most`` of them share a value of an attribute.

    An item with several values counts for each of them. An item without a value is never capped. If the shortlist has
    too few such items, the most relevant other items complete the slate.

    Attributes:
        attribute: column of the item attributes, such as author or category.
        at_most: largest number of items of a slate that may share a value.
    """

    name: ClassVar[str] = "{attribute} at most {at_most}"

    attribute: str
    at_most: PositiveInt = 2

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        owner, tags = known.attribute(self.attribute).of(items)
        first = np.searchsorted(owner, np.arange(len(items) + 1))
        shown: Counter[int] = Counter()
        chosen: list[int] = []
        left: list[int] = []
        for place in by_score(scores).tolist():
            if len(chosen) == k:
                break
            own = tags[first[place] : first[place + 1]].tolist()
            fits = all(shown[tag] < self.at_most for tag in own)
            (chosen if fits else left).append(place)
            if fits:
                shown.update(own)
        return np.array([*chosen, *left[: k - len(chosen)]], np.int64)


@dataclass(frozen=True)
class _BySimilarity(Reranker):
    """A compromise between relevance and the similarity of items, by their vectors.

    Attributes:
        relevance_weight: w in [0, 1]; 1 = only relevance.
    """

    reads_vectors: ClassVar[bool] = True

    relevance_weight: ClosedUnitInterval = 0.7


_DEPENDENT = 1e-10  # squared distance below which an item lies in the span of those above


@dataclass(frozen=True)
class Determinantal(_BySimilarity):
    """A slate Y of relevant items that span a large volume.

    Greedily the largest

        w sum_(i in Y) relevance_i + (1 - w) log det S_Y,    S_ij = (1 + cos(v_i, v_j)) / 2

    which is the most probable slate of a determinantal point process with the kernel ``q_i S_ij q_j``, ``q_i = exp(w
    relevance_i / (2 (1 - w)))``. The gain of an item in the log-determinant is the logarithm of its squared distance
    from the span of the items above, which one more column of a Cholesky factor updates. Time is proportional to ``k M
    (k + d)``. Items in that span come last, by relevance.
    """

    name: ClassVar[str] = "dpp {relevance_weight:g}"

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        vectors, relevant, size = vectors_of(known, items), relevance(scores), min(k, len(items))
        if self.relevance_weight == 1:
            return by_score(scores)[:size]
        columns = np.zeros((size, len(items)))
        distance, free = np.ones(len(items)), np.ones(len(items), bool)
        chosen: list[int] = []
        while len(chosen) < size and (open_ := free & (distance > _DEPENDENT)).any():
            gain = np.full(len(items), -np.inf)
            gain[open_] = self.relevance_weight * relevant[open_]
            gain[open_] += (1 - self.relevance_weight) * np.log(distance[open_])
            best = int(gain.argmax())
            similarity = (1 + vectors @ vectors[best]) / 2
            above = columns[: len(chosen)]
            column = (similarity - above[:, best] @ above) / np.sqrt(distance[best])
            columns[len(chosen)] = column
            distance = distance - column**2
            chosen.append(best)
            free[best] = False
        rest = by_score(scores)
        return np.array([*chosen, *rest[free[rest]][: size - len(chosen)]], np.int64)


@dataclass(frozen=True)
class MaximalMarginalRelevance(_BySimilarity):
    """A slate of items that are relevant and not similar to the items above them.

    The next item has the largest

        w relevance_i - (1 - w) max over the items j above of cos(v_i, v_j)

    where relevance is scaled from 0 (the worst of the shortlist) to 1 (the best). The first item is the most relevant
    one. Time is proportional to ``k M d``.
    """

    name: ClassVar[str] = "mmr {relevance_weight:g}"

    def order(
        self, items: IntArray, scores: FloatArray, k: int, known: ItemAttributes, history: IntArray | None = None
    ) -> IntArray:
        """See ``Reranker``."""
        vectors, weight = vectors_of(known, items), self.relevance_weight
        relevant = relevance(scores)
        nearest, chosen = np.full(len(items), -np.inf), np.zeros(min(k, len(items)), np.int64)
        value = relevant.copy()
        for place in range(len(chosen)):
            chosen[place] = best = int(value.argmax())
            nearest = np.maximum(nearest, vectors @ vectors[best])
            value = weight * relevant - (1 - weight) * nearest
            value[chosen[: place + 1]] = -np.inf
        return chosen
