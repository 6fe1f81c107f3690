"""Properties of lists beyond accuracy: exposure, novelty, diversity, popularity, and similarity to the history.

Means over a list are over its filled places; an empty list has none of these metrics (nan). The history is what the
user saw before the period, ``EvaluationBatch.exclude``, even if the recommender reads less of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from recpo.evaluation.item_facts import ItemFacts, ItemTags, popularity_bins
from recpo.evaluation.measures import Measure, Observed
from recpo.ops.ranking import is_member

_CELLS_AT_ONCE = 1 << 24  # of users x tags
_SMOOTHING = 0.01  # Steck's alpha


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
    - ``repeat_rate@k``: share of the list that is in the history; 0 if the past is excluded.
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
        item_ids, history = observed.lists.item_ids.cpu(), observed.batch.exclude.cpu()
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
        return {f"{name}@{k}": values[:, i] for name, values in by_name.items() for i, k in enumerate(self._ks)}


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


def tag_diversity(item_ids: Tensor, tags: ItemTags, ks: Sequence[int]) -> Tensor:
    """``diversity`` of the items' sets of tags, ``|A & B| / sqrt(|A| |B|)`` for the cosine: ``[B, len(ks)]``."""
    parts = []
    for part in _chunks(item_ids, tags):
        tagged = _num_tags(part, tags) > 0
        lengths = [_tag_sums(part[:, :k], tags, power=0.5).square().sum(1) for k in ks]
        parts.append(_one_minus_mean_cosine(torch.stack(lengths, 1), _within(tagged, ks).sum(1).double()))
    return torch.cat(parts)


def tag_entropy(item_ids: Tensor, tags: ItemTags, ks: Sequence[int]) -> Tensor:
    """``- sum_g q_g ln q_g`` of the shares q of the tags in the first k places, ``[B, len(ks)]``; nan without tags.

    In nats: 0 = a single tag, ``ln n`` = n tags in equal shares. Shares as in ``miscalibration``.
    """
    parts = []
    for part in _chunks(item_ids, tags):
        columns = [torch.special.entr(_shares(part[:, :k], tags)).sum(1) for k in ks]
        parts.append(torch.stack(columns, 1))
    return torch.cat(parts)


def miscalibration(item_ids: Tensor, history: Tensor, tags: ItemTags, ks: Sequence[int]) -> Tensor:
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
            smoothed = (1 - _SMOOTHING) * _shares(part[:, :k], tags) + _SMOOTHING * wanted
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


def _chunks(item_ids: Tensor, tags: ItemTags) -> tuple[Tensor, ...]:
    return item_ids.split(max(1, _CELLS_AT_ONCE // max(1, tags.num_tags)))


def _num_tags(item_ids: Tensor, tags: ItemTags) -> Tensor:
    return tags.offsets[item_ids + 1] - tags.offsets[item_ids]


def _tag_sums(item_ids: Tensor, tags: ItemTags, power: float) -> Tensor:
    """``[B, G]`` float64: sum over a row's items of ``1 / (number of its tags) ** power``, for each of their tags."""
    items = item_ids.flatten()
    count = _num_tags(items, tags)
    entry = torch.arange(len(items)).repeat_interleave(count)
    nth = torch.arange(len(entry)) - (count.cumsum(0) - count)[entry]
    cell = entry // max(1, item_ids.shape[1]) * tags.num_tags + tags.tags[tags.offsets[items][entry] + nth]
    weight = count[entry].double() ** -power
    sums = weight.new_zeros(len(item_ids) * tags.num_tags).index_add_(0, cell, weight)
    return sums.view(len(item_ids), tags.num_tags)


def _shares(item_ids: Tensor, tags: ItemTags) -> Tensor:
    sums = _tag_sums(item_ids, tags, power=1.0)
    return sums / sums.sum(1, keepdim=True)
