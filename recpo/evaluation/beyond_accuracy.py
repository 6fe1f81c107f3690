"""Properties of lists beyond accuracy: exposure, novelty, diversity, popularity, and similarity to the history.

Means over a list are over its filled places; an empty list has none of these metrics (nan). The history is what the
user saw before the period, ``EvaluationBatch.past``, even if the recommender reads less of it. The facts about items
that the metrics use, ``ItemFacts``, are counts, durations, and tags and vectors from a file; place 0 of every tensor is
unused.

The metrics of ``TupleLists`` are item metrics for lists of code tuples that several items may share. A hit of a tuple
is not a hit of an item: a system that shows items must put the items of a tuple into some order. Without another rule,
this order is uniformly random, and the metrics are the expectations over it, in closed form: the items of the first
tuple come first, in random order, then those of the second, and so on. Counting a tuple's hit as a hit of each item
instead inflates HitRate by up to the number of items in a tuple. recpo's own policies give every item a unique tuple
and rank items; these metrics are for lists of other systems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.evaluation.measures import Measure, Observed
from recpo.lists.reranking import SMOOTHING, ItemAttributes, Tags
from recpo.log.id_map import read_rows
from recpo.log.prepared import Prepared
from recpo.ops.ranking import is_member, named

_CELLS_AT_ONCE = 1 << 24  # of users x tags


class Exposure(Measure):
    """How often every item is listed: ``coverage@k``, ``gini@k`` and ``overlap@k`` over all lists.

    ``coverage@k`` is the share of the candidates among the first k items of at least one list. ``overlap@k`` is the
    expected share of a list that another user's list has too, see ``list_overlap``. Memory: one count per item and k,
    for any number of users.
    """

    def __init__(self, num_items: int, ks: Sequence[int], is_candidate: Tensor | None = None) -> None:
        """``is_candidate [V + 1]`` bool: the items that could be listed; None = all."""
        self._ks, self._is_candidate = tuple(ks), is_candidate
        self._shown = torch.zeros(len(self._ks), num_items + 1, dtype=torch.int64)
        self._lists = 0

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """Adds the lists; no per-user metric."""
        self.add(observed.lists.item_ids)
        return {}

    def add(self, item_ids: Tensor) -> None:
        """Adds the lists ``[B, K]``."""
        item_ids = item_ids.to(self._shown.device)
        self._lists += int((item_ids > 0).any(1).sum())
        for shown, k in zip(self._shown, self._ks, strict=True):
            places = item_ids[:, :k].reshape(-1)
            shown.index_add_(0, places, torch.ones_like(places))

    def totals(self) -> dict[str, float]:
        """Coverage, Gini and overlap for each k."""
        shown = self._shown[:, 1:] if self._is_candidate is None else self._shown[:, self._is_candidate]
        coverage = {f"coverage@{k}": (row > 0).double().mean().item() for k, row in zip(self._ks, shown, strict=True)}
        both = {"gini": gini, "overlap": lambda row: list_overlap(row, self._lists)}
        rows = list(zip(self._ks, shown, strict=True))
        return coverage | {f"{name}@{k}": of(row) for name, of in both.items() for k, row in rows}


def gini(counts: Tensor) -> float:
    """Gini coefficient of ``counts [V]``: 0 = all items are listed equally often, close to 1 = a single item is.

    ``sum_i (2 i - V - 1) x_(i) / (V sum_i x_i)`` over the ascending counts ``x_(1) <= ... <= x_(V)``; nan if all are 0.
    """
    ascending = counts.sort().values.double()
    total, size = ascending.sum(), len(ascending)
    place = torch.arange(1, size + 1, dtype=torch.float64, device=counts.device)
    return ((2 * place - size - 1) @ ascending / (size * total)).item()


def list_overlap(counts: Tensor, lists: int) -> float:
    """Expected share of a random list's items that another random list has too: 1 = every user gets the same items.

    ``sum_i c_i (c_i - 1) / ((n - 1) sum_i c_i)`` for ``counts [V]``, the number of the ``n`` lists that have item i.
    Lists of k random items out of V have ``k / V``. nan for fewer than two lists.
    """
    counts = counts.double()
    pairs = (lists - 1) * counts.sum().item()
    return (counts * (counts - 1)).sum().item() / pairs if pairs > 0 else math.nan


class BeyondAccuracy(Measure):
    """Per-user metrics ``[B]`` at every k of the lists alone, without held-out events.

    With training counts ``c_i`` of the items, ``N`` their sum and ``V`` items:

    - ``novelty@k``: mean of ``-log2((c_i + 1) / (N + V))``, bits (Zhou et al., 2010; one more event per item, so that
      items without events have a value).
    - ``popularity_lift@k``: mean of ``c_i`` over the list / mean of ``c_i`` over the history - 1, per user, so 0 = as
      popular as the user's history (Abdollahpouri et al., 2020, use the ratio of means over a group instead); nan
      without a history, or if none of its items has a training event.
    - ``tail_share@k``: share of the list in the tail or unseen in training, see ``popularity_bins``.
    - ``repeat_rate@k``: share of the list that is in the history; 0 if lists may not repeat items.
    - ``diversity@k``, with vectors: ``1 -`` mean cosine over the pairs of the list; items without a vector are left
      out; nan for fewer than two (Ziegler et al., 2005).
    - ``tag_diversity@k``, with tags: the same with ``|A & B| / sqrt(|A| |B|)`` of the items' tags A, B as the cosine,
      which is 1 - mean Jaccard if every item has one tag; items without tags are left out.
    - ``tag_entropy@k``, with tags: see ``tag_entropy``.
    - ``miscalibration@k``, with tags: see ``miscalibration``.
    """

    def __init__(self, facts: ItemFacts, ks: Sequence[int]) -> None:
        counts = facts.train_count.double()
        self._ks, self._tags, self._counts = tuple(ks), facts.tags, counts
        self._bits = -torch.log2((counts + 1) / (counts[1:].sum() + len(counts) - 1))
        self._is_tail = popularity_bins(facts.train_count) >= 2
        self._vectors = None if facts.vectors is None else torch.nn.functional.normalize(facts.vectors.float(), dim=1)

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """See ``Measure.update``."""
        item_ids, history = observed.lists.item_ids.cpu(), observed.batch.past.cpu()
        of_history = self._counts[history].sum(1) / (history > 0).sum(1)
        of_history = of_history.masked_fill(of_history == 0, torch.nan)
        by_name = {
            "novelty": mean_to_k(self._bits[item_ids], item_ids, self._ks),
            "popularity_lift": mean_to_k(self._counts[item_ids], item_ids, self._ks) / of_history[:, None] - 1,
            "tail_share": mean_to_k(self._is_tail[item_ids].double(), item_ids, self._ks),
            "repeat_rate": mean_to_k(is_member(item_ids, history).double(), item_ids, self._ks),
        }
        if self._vectors is not None:
            by_name["diversity"] = diversity(self._vectors[item_ids], self._ks)
        if self._tags is not None:
            by_name["tag_diversity"] = tag_diversity(item_ids, self._tags, self._ks)
            by_name["tag_entropy"] = tag_entropy(item_ids, self._tags, self._ks)
            by_name["miscalibration"] = miscalibration(item_ids, history, self._tags, self._ks)
        return named(self._ks, **by_name)


def mean_to_k(values: Tensor, item_ids: Tensor, ks: Sequence[int]) -> Tensor:
    """Mean of ``values [B, K]`` over the filled ones of the first k places, ``[B, len(ks)]``; nan if all are empty."""
    filled = _within(item_ids, ks)
    return (values[..., None] * filled).sum(1) / filled.sum(1)


def diversity(vectors: Tensor, ks: Sequence[int]) -> Tensor:
    """``1 -`` mean cosine over the pairs of the first k places, ``[B, len(ks)]``; nan for fewer than two vectors.

    Pairs are not formed: the sum of all cosines is the squared length of the sum of the unit vectors.

    Args:
        vectors: ``[B, K, d]`` of length 1; a row of zeros = none, and is left out.
        ks: list lengths.
    """
    within = _within(vectors.square().sum(2) > 0, ks).to(vectors.dtype)
    sums = torch.einsum("bkd,bkn->bnd", vectors, within)
    return _one_minus_mean_cosine(sums.double().square().sum(2), within.sum(1).double())


def tag_diversity(item_ids: Tensor, tags: Tags, ks: Sequence[int]) -> Tensor:
    """``diversity`` of the items' sets of tags, ``|A & B| / sqrt(|A| |B|)`` for the cosine: ``[B, len(ks)]``."""
    lengths = _per_k(lambda first: _tag_sums(first, tags, power=0.5).square().sum(1), item_ids, tags, ks)
    tagged = torch.from_numpy(np.diff(tags.offsets))[item_ids] > 0
    return _one_minus_mean_cosine(lengths, _within(tagged, ks).sum(1).double())


def tag_entropy(item_ids: Tensor, tags: Tags, ks: Sequence[int]) -> Tensor:
    """``- sum_g q_g ln q_g`` of the shares q of the tags in the first k places, ``[B, len(ks)]``; nan without tags.

    In nats: 0 = a single tag, ``ln n`` = n tags in equal shares. Shares as in ``miscalibration``.
    """
    return _per_k(lambda first: torch.special.entr(_shares(first, tags)).sum(1), item_ids, tags, ks)


def miscalibration(item_ids: Tensor, history: Tensor, tags: Tags, ks: Sequence[int]) -> Tensor:
    """Difference between the tags of the first k items and of the history, ``[B, len(ks)]``: 0 = the same shares.

    ``sum_g p_g ln(p_g / ((1 - alpha) q_g + alpha p_g))``, ``alpha = 0.01``, in nats, with the shares p of the tags in
    the history and q in the list. Every item with tags has weight 1, divided equally among its tags (Steck, 2018). nan
    if the history or the list has no tags.

    Args:
        item_ids: ``[B, K]`` lists, 0 = empty place.
        history: ``[B, M]`` items of the past, padded with 0; repeats count.
        tags: tags of the items.
        ks: list lengths.
    """
    parts = []
    for part, past in zip(_chunks(item_ids, tags), _chunks(history, tags), strict=True):
        wanted = _shares(past, tags)
        columns = []
        for k in ks:
            smoothed = (1 - SMOOTHING) * _shares(part[:, :k], tags) + SMOOTHING * wanted
            columns.append(torch.where(wanted == 0, 0.0, wanted * (wanted / smoothed).log()).sum(1))
        parts.append(torch.stack(columns, 1))
    return torch.cat(parts)


def _within(filled: Tensor, ks: Sequence[int]) -> Tensor:
    """``[B, K, len(ks)]`` bool: the filled ones of the first k places."""
    place = torch.arange(filled.shape[1])[:, None]
    return (filled > 0)[..., None] & (place < torch.tensor(ks))


def _one_minus_mean_cosine(squared_length: Tensor, count: Tensor) -> Tensor:
    """From the squared length of the sum of ``count`` unit vectors; every vector's cosine with itself is left out."""
    return (1 - (squared_length - count) / (count * (count - 1))).masked_fill(count < 2, torch.nan)


def _chunks(item_ids: Tensor, tags: Tags) -> tuple[Tensor, ...]:
    return item_ids.split(max(1, _CELLS_AT_ONCE // tags.num_tags))


def _per_k(of: Callable[[Tensor], Tensor], item_ids: Tensor, tags: Tags, ks: Sequence[int]) -> Tensor:
    """``of`` the first k items, ``[B, len(ks)]``, some lists at a time."""
    return torch.cat([torch.stack([of(part[:, :k]) for k in ks], 1) for part in _chunks(item_ids, tags)])


def _tag_sums(item_ids: Tensor, tags: Tags, power: float) -> Tensor:
    """``[B, G]`` float64: sum over a row's items of ``1 / (number of its tags) ** power``, for each of their tags."""
    place, tag = map(torch.from_numpy, tags.of(item_ids.flatten().numpy()))
    cell = place // max(1, item_ids.shape[1]) * tags.num_tags + tag
    weight = place.bincount()[place].double() ** -power
    sums = weight.new_zeros(len(item_ids) * tags.num_tags).index_add_(0, cell, weight)
    return sums.view(len(item_ids), tags.num_tags)


def _shares(item_ids: Tensor, tags: Tags) -> Tensor:
    sums = _tag_sums(item_ids, tags, power=1.0)
    return sums / sums.sum(1, keepdim=True)


#: Bins of ``popularity_bins``, the most popular first.
POPULARITY_BINS = ("head", "torso", "tail", "unseen in training")


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
    tags: Tags | None = None
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
            message = f"item_features: name the column of the tags or of the vectors in {self.file}, or both"
            raise RecpoError(message, code="missing_option", field="item_features")


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
        rows = read_rows(features.file, features.item_id, [features.vectors], items)
        vectors = _with_place_0(torch.from_numpy(rows.values))
    if features.tags is None:
        return facts._replace(vectors=vectors)
    found = ItemAttributes.read(features.file, items, names=[features.tags], item_id=features.item_id)
    return facts._replace(vectors=vectors, tags=found.tags[features.tags])


def _with_place_0(values: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(values[:1]), values])


class TupleLists(NamedTuple):
    """Lists of code tuples, best first.

    Attributes:
        num_items: ``[B, W]`` int64, number of items that share the tuple; 0 = empty place.
        num_hits: ``[B, W]`` int64, number of targets among them.
        num_targets: ``[B]`` int64, distinct targets of the user, listed or not.
    """

    num_items: Tensor
    num_hits: Tensor
    num_targets: Tensor


def expected_recall(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """Recall@k of items: ``sum_w hits_w (share of tuple w's items among the first k) / targets``. ``[B, len(ks)]``."""
    shown = _shown(lists, ks)
    found = (lists.num_hits[..., None] * shown / lists.num_items.clamp_min(1)[..., None]).sum(1)
    return found / lists.num_targets.double()[:, None]


def expected_hit_rate(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """HitRate@k of items: probability that a target is among the first k. ``[B, len(ks)]``.

    A tuple of m items, t of them targets, of which j come among the first k, hides all its targets with probability
    ``C(m - t, j) / C(m, j)``.
    """
    items, hits, shown = lists.num_items.double()[..., None], lists.num_hits.double()[..., None], _shown(lists, ks)
    possible = shown <= items - hits
    log_hidden = _log_choose(items - hits, shown.clamp(max=items - hits)) - _log_choose(items, shown)
    hidden = torch.where(possible, log_hidden.exp(), 0.0).prod(1)
    return (1 - hidden).masked_fill(lists.num_targets[:, None] == 0, torch.nan)


def expected_ndcg(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """NDCG@k of items: a target of a tuple is at each of the tuple's places equally often. ``[B, len(ks)]``.

    The ideal list has ``min(k, targets)`` hits, as in ``recpo.ops.ranking.ndcg``.
    """
    longest = max(ks)
    gained = torch.cat([torch.zeros(1), 1 / torch.log2(torch.arange(2, longest + 2))]).double().cumsum(0)
    gained = gained.to(lists.num_items.device)
    cut = torch.tensor(ks, device=gained.device)
    end = lists.num_items.cumsum(1)
    begin = end - lists.num_items
    of_places = gained[end[..., None].minimum(cut)] - gained[begin[..., None].minimum(cut)]
    dcg = (lists.num_hits[..., None] * of_places / lists.num_items.clamp_min(1)[..., None]).sum(1)
    return (dcg / gained[lists.num_targets[:, None].minimum(cut)]).masked_fill(
        lists.num_targets[:, None] == 0, torch.nan
    )


def _shown(lists: TupleLists, ks: Sequence[int]) -> Tensor:
    """``[B, W, len(ks)]`` float64: how many items of each tuple are among the first k."""
    before = lists.num_items.cumsum(1) - lists.num_items
    left = torch.tensor(ks, device=before.device) - before[..., None]
    return left.clamp_min(0).minimum(lists.num_items[..., None]).double()


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
