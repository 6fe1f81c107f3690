"""The contenders of an evaluation, each a recommender over internal ids, and the baselines among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.features import Reads
from recpo.base.feedback import UNKNOWN
from recpo.base.types import FeedbackBatch
from recpo.evaluation.baselines import (
    BaselineCache,
    CooccurrenceBaseline,
    CooccurrenceOptions,
    EventChunk,
    Popularity,
    Recipe,
    UniformlyRandom,
    decayed_counts,
    factors_recommender,
    neighbors_of,
    of_items,
    recommender_of,
)
from recpo.evaluation.document import Kind
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.results import LOGGING_POLICY
from recpo.evaluation.true_rewards import ORACLE, TrueRewards
from recpo.log.prepared import Prepared
from recpo.rewards.ease import EASE, EaseOptions, fit_ease
from recpo.rewards.factors import Factors
from recpo.rewards.graded import FactorOptions
from recpo.rewards.implicit import ImplicitALS, ImplicitOptions, fit_implicit
from recpo.rewards.selection import fit_factors

Baseline = Literal[
    "popularity", "positives", "recency", "cooccurrence", "factorization", "implicit_als", "ease", "random"
]

#: Names of all baselines.
BASELINES: tuple[Baseline, ...] = get_args(Baseline)

#: The default baselines. The factorization is included only if there are grades to fit and select it.
DEFAULT_BASELINES: tuple[Baseline, ...] = ("popularity", "recency", "cooccurrence", "factorization", "random")

_MILLISECONDS_PER_DAY = 86_400_000


class Loaded(NamedTuple):
    """A contender in memory.

    Attributes:
        recommender: the recommender to evaluate.
        max_history: number of history events that it reads.
        policy: the policy whose items can be drawn; None = there are only lists.
        counts: after the pass, further counts besides users and events.
        reads: what batches must contain for it, besides items, feedback and times.
    """

    recommender: Recommender
    max_history: int
    policy: Policy | None = None
    counts: Callable[[], Mapping[str, int]] = dict
    reads: Reads = Reads()


@dataclass(frozen=True)
class Contender:
    """A contender to evaluate. It is loaded on demand, so that only one policy at a time is in memory.

    Attributes:
        name: unique among the contenders.
        kind: the kind of contender.
        load: loads it into memory.
        facts: its origin, for the document.
        curves: its training curves.
    """

    name: str
    kind: Kind
    load: Callable[[], Loaded]
    facts: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BaselineOptions:
    """Options of the baselines.

    Attributes:
        recency_half_life: days after which a training event counts half; null = a tenth of the training period.
        cooccurrence: the item co-occurrence.
        factorization: the matrix factorization of grades.
        implicit_als: alternating least squares on positives.
        ease: the linear item-to-item model.
    """

    recency_half_life: float | None = None
    cooccurrence: CooccurrenceOptions = field(default_factory=CooccurrenceOptions)
    factorization: FactorOptions = field(default_factory=lambda: FactorOptions(method="als"))
    implicit_als: ImplicitOptions = field(default_factory=ImplicitOptions)
    ease: EaseOptions = field(default_factory=EaseOptions)

    def __post_init__(self) -> None:
        if self.recency_half_life is not None and not self.recency_half_life > 0:
            raise RecpoError(f"recency_half_life is {self.recency_half_life}; it is a positive number of days")


def baseline(
    name: Baseline,
    data: Prepared,
    options: BaselineOptions,
    cache: BaselineCache = BaselineCache(),  # noqa: B008  frozen
    progress: bool = False,
) -> Contender:
    """A baseline, counted from the training shards, or fitted on them, when it is loaded.

    Args:
        name: which one.
        data: prepared data.
        options: options of all baselines.
        cache: where fitted baselines are kept.
        progress: show a progress bar on a terminal.
    """
    if name in ("factorization", "implicit_als", "ease"):
        return Contender(name, "baseline", partial(_load_fitted, name, data, options, cache, progress))
    return Contender(name, "baseline", partial(_load_baseline, name, data, options))


def oracle(truth: TrueRewards) -> Contender:
    """The oracle, which knows the taste of every user: an upper bound, not a competitor."""
    return Contender(ORACLE, "oracle", lambda: Loaded(truth.oracle(), 1))


def default_baselines(data: Prepared) -> list[Baseline]:
    """``DEFAULT_BASELINES``, without the factorization if the train or validation period has no graded event."""
    graded = _has_grades(data, "train") and _has_grades(data, "valid")
    return [name for name in DEFAULT_BASELINES if graded or name != "factorization"]


def _has_grades(data: Prepared, period: Literal["train", "valid"]) -> bool:
    names = ["feedback", "is_target"]
    shards = (data.columns(period, shard, names) for shard in range(data.num_shards(period)))
    return any(bool(((shard["feedback"] > UNKNOWN) & shard["is_target"]).any()) for shard in shards)


def validate_names(contenders: Sequence[Contender]) -> None:
    """Raises ``RecpoError`` if two contenders have the same name, or one has the name of the logging policy."""
    names = [LOGGING_POLICY, *(contender.name for contender in contenders)]
    if again := sorted({name for name in names if names.count(name) > 1}):
        raise RecpoError(f"two contenders have the name {again[0]}: rename a directory, or leave one out")


def _load_baseline(name: Baseline, data: Prepared, options: BaselineOptions) -> Loaded:
    if name == "random":
        return Loaded(Recommender(UniformlyRandom(data.num_items).recommend, name=name), 1)
    if name == "cooccurrence":
        neighbors = neighbors_of(partial(_training_events, data), data.num_items, options.cooccurrence)
        recent = options.cooccurrence.recent_events
        counts = torch.from_numpy(data.item_counts())
        return Loaded(Recommender(CooccurrenceBaseline(neighbors, counts, recent).recommend, name=name), recent)
    if name == "recency":
        counts = torch.from_numpy(recent_counts(data, options.recency_half_life))
    else:
        counts = torch.from_numpy(data.item_counts("train_count" if name == "popularity" else "train_positives"))
    popularity = Popularity(counts)
    return Loaded(Recommender(popularity.recommend, name=name, score=popularity.score), 1)


def _load_fitted(
    name: Baseline, data: Prepared, options: BaselineOptions, cache: BaselineCache, progress: bool
) -> Loaded:
    if name == "factorization":
        graded = Recipe(fit_factors, Factors.open, suffix="")
        factors = cache.model(name, data, options.factorization, graded, progress)
        return Loaded(factors_recommender(factors, name), factors.max_history)
    if name == "implicit_als":
        als = cache.model(name, data, options.implicit_als, Recipe(fit_implicit, ImplicitALS.open), progress)

        def score(batch: FeedbackBatch) -> Tensor:
            return of_items(als.fold_in(batch.histories) @ als.item_factors.T, batch)

        return Loaded(recommender_of(als, name, score), als.max_history)
    ease = cache.model(name, data, options.ease, Recipe(fit_ease, EASE.open), progress)
    return Loaded(
        recommender_of(ease, name, lambda batch: of_items(ease.scores(batch.histories), batch)), ease.max_history
    )


def _training_events(data: Prepared) -> Iterator[EventChunk]:
    for columns in data.train_columns(["user_index", "item_index"]):
        yield EventChunk(*columns.values())


def recent_counts(data: Prepared, half_life_days: float | None) -> np.ndarray:
    """Training events of the items 1..V, weighted by recency (``decayed_counts``): ``[V]``.

    Two passes with one piece in memory at a time; the first one finds the start and the end of the training period.
    """
    first, last = np.inf, -np.inf
    for columns in data.train_columns(["timestamp"]):
        time = columns["timestamp"]
        if len(time):
            first, last = min(first, float(time.min())), max(last, float(time.max()))
    half_life = max(1.0, (last - first) / 10) if half_life_days is None else half_life_days * _MILLISECONDS_PER_DAY
    counts = np.zeros(data.num_items)
    for item, time in (columns.values() for columns in data.train_columns(["item_index", "timestamp"])):
        counts += decayed_counts(item, time, num_items=data.num_items, end=int(last), half_life=half_life)
    return counts
