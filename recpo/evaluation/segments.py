"""Segments divide users by the length of their history, and targets by properties of the items, such as the age.

New items are candidates that no user was shown in the training period (the cold start).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.base.types import EvaluationBatch
from recpo.evaluation.beyond_accuracy import POPULARITY_BINS, ItemFacts, mean_to_k, popularity_bins
from recpo.evaluation.candidates import NEVER, Candidates, HeldOut, has_positions
from recpo.evaluation.measures import Measure, Observed
from recpo.evaluation.true_rewards import TrueRewards
from recpo.log.prepared import Prepared
from recpo.log.schema import ALWAYS, MILLISECONDS_PER_DAY
from recpo.ops.ranking import RankedHits, accuracy_of_bin, named, ranked_hits

#: Label of an item that is in no bin.
NO_BIN = -1


class ItemSegment(NamedTuple):
    """Divides items into bins. HitRate, Recall and NDCG are computed for each bin's targets alone.

    Attributes:
        name: name, such as ``item popularity``.
        bins: names of the bins.
        label: ``[V + 1]`` int64, index of the bin of item 1, 2, ..., V (place 0 is unused), ``NO_BIN`` for none.
    """

    name: str
    bins: tuple[str, ...]
    label: Tensor

    def split(self, hits: RankedHits, item_ids: Tensor) -> Iterator[RankedHits]:
        """The hits of each bin's targets in the unchanged lists ``item_ids [B, K]``; ranks do not change."""
        label = self.label.to(item_ids.device)
        shown, wanted = label[item_ids], label[hits.targets].masked_fill(hits.targets == 0, NO_BIN)
        for index in range(len(self.bins)):
            inside = wanted == index
            yield RankedHits(hits.hit * (shown == index), inside.sum(1), hits.targets * inside)


#: The segment of the users, by the number of distinct items in their past, and its bins.
HISTORY_LENGTH: Final = "history length"
HISTORY_BINS: Final = ("new users", "1-4", "5-19", "20-49", "50 and more")


def history_bin(batch: EvaluationBatch) -> Tensor:
    """``[B]`` int64, the index of every user's bin among ``HISTORY_BINS``, by ``EvaluationBatch.past``."""
    edges = torch.tensor([1, 5, 20, 50], device=batch.past.device)
    return torch.bucketize((batch.past > 0).sum(1), edges, right=True)


def item_segments(facts: ItemFacts, ages: Tensor | None = None) -> list[ItemSegment]:
    """The item segments: by popularity and, if known, by duration and by age (``item_ages``)."""
    found = [ItemSegment("item popularity", POPULARITY_BINS, popularity_bins(facts.train_count))]
    found += [] if facts.duration is None else [item_duration(facts.duration)]
    return found + ([] if ages is None else [item_age(ages)])


def item_duration(duration: Tensor) -> ItemSegment:
    """Items by the quartiles of the catalog's durations ``[V + 1]``, seconds; nan = unknown, a bin of its own."""
    known = ~duration.isnan()
    known[0] = False
    values = duration[known].double().numpy()  # torch.quantile accepts at most 16 million values
    bounds = np.unique(np.quantile(values, [0.25, 0.5, 0.75])).tolist() if len(values) else []
    label = torch.bucketize(duration.double(), torch.tensor(bounds, dtype=torch.float64), right=True)
    label = label.masked_fill(~known, len(bounds) + 1)
    label[0] = NO_BIN
    names = [f"under {bounds[0]:.4g} s"] if bounds else ["known"]
    names += [f"{low:.4g} to {high:.4g} s" for low, high in pairwise(bounds)]
    names += [f"{bounds[-1]:.4g} s and more"] if bounds else []
    names += ["unknown"] if not bool(known[1:].all()) else []
    return ItemSegment("item duration", tuple(names), label)


_BOUNDS: Final = (1.0, 3.0, 7.0, 30.0)
_BINS: Final = ("under 1 day", "1 to 3 days", "3 to 7 days", "7 to 30 days", "30 days and more", "no event in training")


def item_ages(data: Prepared, split: HeldOut, candidates: Candidates | None) -> Tensor | None:
    """Ages ``[V + 1]`` of the items in days, float64, at the start of the period; nan = unknown; place 0 is unused.

    An item's age counts from ``available_from`` if the candidates have it for any item (inf if it was always
    available), otherwise from the item's first event in the training period. If every user has a separate period, ages
    are those at the end of the log.

    Returns:
        None if the log has positions instead of times.
    """
    if has_positions(data):
        return None
    boundaries = data.manifest["boundaries"]
    at = int(boundaries.get(f"{split}_start_ms", boundaries["last_ms"]))
    born = np.full(1, ALWAYS) if candidates is None else candidates.available_from
    if ((born[1:] != ALWAYS) & (born[1:] != NEVER)).any():
        days = (at - born.astype(np.float64)) / MILLISECONDS_PER_DAY
        days[born == ALWAYS], days[born == NEVER] = np.inf, np.nan
    else:
        first = np.full(data.num_items + 1, NEVER)
        for shard in range(data.num_shards("train")):
            item, time = data.columns("train", shard, ["item_index", "timestamp"]).values()
            np.minimum.at(first, item, time)
        days = np.where(first == NEVER, np.nan, (at - first.astype(np.float64)) / MILLISECONDS_PER_DAY)
    return torch.from_numpy(days)


def item_age(days: Tensor) -> ItemSegment:
    """Items by age.

    Args:
        days: ``[V + 1]``; nan = unknown, which is a separate bin; items below 0 are in no bin.
    """
    label = torch.bucketize(days.double(), torch.tensor(_BOUNDS, dtype=torch.float64), right=True)
    label = label.masked_fill(days.isnan(), len(_BINS) - 1).masked_fill(days < 0, NO_BIN)
    label[0] = NO_BIN
    used = [index for index in range(len(_BINS)) if bool((label == index).any())]
    place = torch.full((len(_BINS) + 1,), NO_BIN)
    place[used] = torch.arange(len(used))
    return ItemSegment("item age", tuple(_BINS[index] for index in used), place[label])


#: Metrics of new items, without the list length.
NEW_METRICS: Final = ("new_share", "new_Recall", "new_NDCG", "new_HitRate", "new_true_reward")
#: The lists of new items alone exclude everything else, which takes a matrix of users by items.
LARGEST_CATALOG: Final = 50_000


@dataclass(frozen=True)
class NewItems(Measure):
    """Per-user metrics ``[B]`` at every k of new items: candidates without an event in the training period.

    - ``new_share@k``: share of new items among the filled ones of the first k places; nan for an empty list.
    - ``new_Recall@k``, ``new_NDCG@k``, ``new_HitRate@k``: with the new items among the held-out positives as targets,
      on the unchanged list; nan without such positives.
    - ``new_true_reward@k``, if the truth is known: mean true reward of the contender's k best items among the new ones,
      regardless of other items above them; nan if it lists none.

    Attributes:
        is_new: ``[V + 1]`` bool, the new items; place 0 is False.
        ks: list lengths.
        truth: truth of a simulation; None = not known.
    """

    is_new: Tensor
    ks: Sequence[int]
    truth: TrueRewards | None = None

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """See ``Measure.update``."""
        lists, targets = observed.lists.item_ids, observed.targets
        is_new = self.is_new.to(lists.device)
        share = mean_to_k(is_new[lists].double(), lists, self.ks)
        segment = ItemSegment("new", ("new",), is_new.long() - 1)
        (hits,) = segment.split(ranked_hits(lists, targets.item_ids, targets.positive), lists)
        metrics = named(self.ks, new_share=share)
        metrics |= {f"new_{name}": values for name, values in accuracy_of_bin(hits, self.ks).items()}
        if observed.new_lists is not None and self.truth is not None:
            worth = self.truth.of_lists(observed.batch.user_ids, observed.new_lists.item_ids)
            metrics |= {f"new_{name}": values for name, values in worth.items() if name.startswith("true_reward@")}
        return metrics

    @property
    def others(self) -> Tensor | None:
        """``[O]`` all other items, to exclude from lists of new items alone; None = no such lists are needed."""
        if self.truth is None or self._too_large or not self.is_new.any():
            return None
        return torch.arange(1, len(self.is_new))[~self.is_new[1:]]

    @property
    def _too_large(self) -> bool:
        return self.truth is not None and len(self.is_new) - 1 > LARGEST_CATALOG

    def as_json(self) -> dict[str, Any]:
        """The entry of the document."""
        remark = f"no lists of new items alone: the catalog has more than {LARGEST_CATALOG:,} items"
        return {"items": int(self.is_new.sum()), "remark": remark if self._too_large else None}


def new_items(train_count: Tensor, is_candidate: Tensor | None) -> Tensor:
    """``[V + 1]`` bool, candidates without an event in the training period.

    Args:
        train_count: ``[V + 1]`` training events of the items, place 0 is unused.
        is_candidate: ``[V + 1]`` bool; None = every item is one.
    """
    found = train_count == 0
    found[0] = False
    return found if is_candidate is None else found & is_candidate
