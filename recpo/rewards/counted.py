"""Baselines that are counted, without any fit: popularity, of all or of segments, personal popularity, and rules."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Final

import numpy as np
import torch
from scipy.sparse import csr_array

from recpo.base.errors import NonNegativeFloat, OpenUnitInterval, PositiveInt, RecpoError, validate_ranges
from recpo.base.features import FIRST_CODE, Category, of_type
from recpo.log.prepared import Prepared
from recpo.log.schema import MILLISECONDS_PER_DAY
from recpo.policies.baseline import PersonalPopularityPolicy, PopularityPolicy, SegmentPolicy, SequentialRulesPolicy
from recpo.rewards.implicit import positive_events

_RATE_EVENTS: Final = 10.0
_SEGMENT_POSITIVES: Final = 100.0
_MOST_SCORES: Final = 25_000_000  # of segments and items
_LOWEST: Final = 1e-6  # scores by popularity are below this, and below every rule and every chosen item


def popularity_of(scores: np.ndarray) -> PopularityPolicy:
    """The policy that lists the items with the largest of ``scores [V]``, which are 0 or above, for every user."""
    policy = PopularityPolicy(len(scores))
    policy.item_scores.copy_(torch.from_numpy(scores).double().add(1e-9).log())
    return policy.eval()


def item_scores(name: str, data: Prepared, half_life_days: float | None = None) -> np.ndarray:
    """Scores ``[V]`` of a baseline that ranks the same way for every user.

    ``item_rate`` is the share of positives among an item's events, shrunk toward that of all items as if ten more
    events had been seen: ``(positives + 10 rate) / (events + 10)``. ``recency`` and ``recent_rate`` are popularity and
    ``item_rate`` of events that are weighted by recency.

    Args:
        name: popularity, positives, item_rate, recency or recent_rate.
        data: prepared data.
        half_life_days: of recency and recent_rate; None = a tenth of the training period.
    """
    if name in ("recency", "recent_rate"):
        counts, positives = recent_counts(data, half_life_days)
    else:
        counts, positives = data.item_counts("train_count"), data.item_counts("train_positives")
    if name in ("popularity", "recency"):
        return counts
    if name == "positives":
        return positives
    rate = positives.sum() / max(1, counts.sum())
    shrunk: np.ndarray = (positives + _RATE_EVENTS * rate) / (counts + _RATE_EVENTS)
    return shrunk


def recent_counts(data: Prepared, half_life_days: float | None) -> np.ndarray:
    """Training events and positives of the items 1..V, weighted by recency: ``sum_e 2 ** ((t_e - end) / half_life)``.

    An event at the end of the training period has weight 1, and one that is a half-life older one half. Two passes with
    one piece in memory at a time; the first one finds the start and the end of the training period.

    Returns:
        ``[2, V]``.
    """
    first, last = np.inf, -np.inf
    for columns in data.train_columns(["timestamp"]):
        time = columns["timestamp"]
        if len(time):
            first, last = min(first, float(time.min())), max(last, float(time.max()))
    half_life = max(1.0, (last - first) / 10) if half_life_days is None else half_life_days * MILLISECONDS_PER_DAY
    sums = np.zeros((2, data.num_items))
    for columns in data.train_columns(["item_index", "timestamp", "label", "dislike"]):
        weight = np.exp2((columns["timestamp"] - int(last)) / half_life)
        positive = data.feedback.rule.positive(columns["label"], columns["dislike"])
        for total, of in zip(sums, (weight, weight * positive), strict=True):
            total += np.bincount(columns["item_index"], of, minlength=data.num_items + 1)[1:]
    return sums


def segment_policy(name: str, data: Prepared) -> SegmentPolicy:
    """What users with the same value of one category like: a country, a plan, a kind of account.

    ``segment_rate`` of an item i and a value v is the share of positives among the events of i with users of v, shrunk
    toward ``item_rate`` as if ten more events had been seen: ``(positives_iv + 10 rate_i) / (events_iv + 10)``.
    ``segment_popularity`` is the share of i among the positives of v, shrunk toward that of all users:
    ``(positives_iv + 100 share_i) / (positives_v + 100)``. Users without a known value get the item's own.

    Of several categories, the one with the largest sum of ``events (score - score of all)^2``, less what chance alone
    would give it.

    Args:
        name: segment_rate or segment_popularity.
        data: prepared data with a table of users.

    Raises:
        RecpoError: no category of users has few enough values.
    """
    categories = segments_of(data)
    if not categories:
        raise RecpoError(
            f"{name}: no table of users with a category of at most {_MOST_SCORES // data.num_items:,} values: prepare "
            "the log with --users, or take item_rate or popularity",
            code="missing_value",
            field="users",
        )
    counted = ((*_of_segments(name, data, place, codes), feature) for feature, (place, codes) in categories.items())
    _, scores, feature = max(counted, key=itemgetter(0))
    policy = SegmentPolicy(data.num_items, feature=feature, num_codes=len(scores))
    policy.set_schema(data.feature_schema)
    policy.segment_scores.copy_(torch.from_numpy(scores).add(1e-9).log())
    return policy.eval()


def segments_of(data: Prepared) -> dict[str, tuple[int, int]]:
    """The categories of users that segments may be values of: name -> place among the categories, and codes."""
    sizes = {one.name: int(one.num_codes or 0) for one in of_type(data.feature_schema.user, Category)}
    found = {name: (place, codes) for place, (name, codes) in enumerate(sizes.items())}
    return {name: one for name, one in found.items() if FIRST_CODE < one[1] <= _MOST_SCORES / data.num_items}


def _of_segments(name: str, data: Prepared, place: int, codes: int) -> tuple[float, np.ndarray]:
    """How much the values of a category differ, and the scores ``[codes, V]``."""
    code, size = data.user_features().codes[:, place].astype(np.int64), data.num_items + 1
    events, positives = np.zeros((2, codes * size))
    for columns in data.train_columns(["user_index", "item_index", "label", "dislike"]):
        cell = np.minimum(code[columns["user_index"]], codes - 1) * size + columns["item_index"]
        events += np.bincount(cell, minlength=codes * size)
        positive = data.feedback.rule.positive(columns["label"], columns["dislike"])
        positives += np.bincount(cell, positive, minlength=codes * size)
    events, positives = (counts.reshape(codes, size)[:, 1:] for counts in (events, positives))
    if name == "segment_rate":
        own, seen, added = item_scores("item_rate", data), events, _RATE_EVENTS
        variance = own * (1 - own)
    else:
        own = positives.sum(0) / max(1.0, positives.sum())
        seen, added = positives.sum(1, keepdims=True), _SEGMENT_POSITIVES
        variance = own
    scores = (positives + added * own) / (seen + added)
    scores[:FIRST_CODE] = own
    by_chance = variance * (seen / (seen + added)) ** 2
    return float((seen * (scores - own) ** 2 - by_chance)[FIRST_CODE:].sum()), scores


def personal_popularity(data: Prepared) -> PersonalPopularityPolicy:
    """What the user chose most often, and then what all users chose in the training period."""
    policy = PersonalPopularityPolicy(data.num_items)
    policy.popularity.copy_(_popularity(data.item_counts("train_positives")))
    return policy.eval()


def _popularity(counts: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(_LOWEST * counts / max(1.0, counts.max(initial=0.0)))


@dataclass(frozen=True)
class SequentialRulesOptions:
    """How rules are counted and weighted.

    Args:
        window: two events of a user make a rule if they are at most this many positive events apart.
        decay: factor per place, in a rule and along a history.
        shrinkage: reduces the weights of items with few events.
        neighbors: number of rules kept per item, the ones with the largest weights.
        max_history: number of most recent events of a history that are read.
        pairs_in_memory: pairs that are counted at once; more pairs are counted in several passes over the events.
    """

    window: PositiveInt = 10
    decay: OpenUnitInterval = 0.8
    shrinkage: NonNegativeFloat = 20.0
    neighbors: PositiveInt = 100
    max_history: PositiveInt = 50
    pairs_in_memory: PositiveInt = 1 << 24

    def __post_init__(self) -> None:
        validate_ranges(self, "baseline_options.sequential_rules.")


def fit_sequential_rules(
    data: Prepared, options: SequentialRulesOptions = SequentialRulesOptions()
) -> SequentialRulesPolicy:
    """Counts the rules of the training period: which items followed which in the histories of others.

    Ludewig and Jannach, "Evaluation of Session-based Recommendation Algorithms" (UMUAI 2018), with weights that decay
    along the history as well. A pair of positive events of one user, j before i and d places apart, counts
    ``decay^(d - 1)``:

        weight(j -> i) = sum of these over all users / (positive events of j + shrinkage).

    The rules of any catalog fit into memory, and on logs of positives alone they are the strongest baseline that we
    measured (docs/evaluation.md).

    Args:
        data: prepared data.
        options: window, decay and so on.
    """
    counts = data.item_counts("train_positives")
    lengths, followers, weights = rules_of(partial(positive_events, data), counts, options)
    policy = SequentialRulesPolicy(
        data.num_items,
        neighbors=max(1, int(lengths.max(initial=0))),
        decay=options.decay,
        max_history=options.max_history,
    )
    row = np.repeat(np.arange(data.num_items + 1), lengths)
    column = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    policy.followers[row, column] = torch.from_numpy(followers).int()
    policy.weights[row, column] = torch.from_numpy(weights).float()
    policy.popularity.copy_(_popularity(counts))
    return policy.eval()


def rules_of(
    events: Callable[[], Iterable[tuple[np.ndarray, np.ndarray, int]]],
    counts: np.ndarray,
    options: SequentialRulesOptions,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rules with the largest weights of every item, the largest first, ties by item id.

    Exact, in memory that does not grow with the log: each pass over the events counts the pairs of a group of items
    with at most ``pairs_in_memory`` pairs.

    Args:
        events: opens ``positive_events`` from the beginning, in chunks of users ``[N]`` and items ``[N]``, sorted by
            user and time; no user is in two chunks. Called once per group of items, plus once.
        counts: ``[V]``, positive training events of the items 1..V.
        options: window, decay and so on.

    Returns:
        The number of rules of every item ``[V + 1]``, and of all of them the items that they lead to and the weights.
    """
    size = len(counts) + 1
    pairs = np.zeros(size)
    for user, item, _ in events():
        for _, one, _ in _pairs(user, item, options.window):
            pairs += np.bincount(one, minlength=size)
    group = np.cumsum(pairs) // options.pairs_in_memory
    starts = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    parts = []
    for first, last in zip(starts, [*starts[1:], size], strict=True):
        total = csr_array((last - first, size))
        for user, item, _ in events():
            for distance, one, other in _pairs(user, item, options.window):
                kept = (one >= first) & (one < last)
                weight = np.full(kept.sum(), options.decay ** (distance - 1))
                total += csr_array((weight, (one[kept] - first, other[kept])), shape=total.shape)
        events_of = np.append(0.0, counts)[first:last]
        total.data /= np.repeat(events_of + options.shrinkage, np.diff(total.indptr))
        parts.append(_heaviest(total, options.neighbors))
    lengths, followers, weights = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return lengths, followers, weights


def _pairs(user: np.ndarray, item: np.ndarray, window: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Distances, and the pairs of different items of one user that are so many events apart, the earlier one first."""
    for distance in range(1, window + 1):
        near = (user[distance:] == user[:-distance]) & (item[distance:] != item[:-distance])
        yield distance, item[:-distance][near], item[distance:][near]


def _heaviest(weighed: csr_array, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The largest entries of every row: their number, columns and values, row by row."""
    row = np.repeat(np.arange(weighed.shape[0]), np.diff(weighed.indptr))
    order = np.lexsort((weighed.indices, -weighed.data, row))
    kept = np.arange(len(row)) - weighed.indptr[row] < most
    source = order[kept]
    return np.bincount(row[kept], minlength=weighed.shape[0]), weighed.indices[source].astype(int), weighed.data[source]
