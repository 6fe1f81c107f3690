"""What every contender lists for the same held-out users: the sample that all comparisons of the pages are made of.

The items near an item: by the factors of the reward model, or by the users who had both.

What a change of the policy moves: users, items, coverage, and the attributes of what is listed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from tqdm import tqdm

from recpo.base.errors import RecpoError
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch, Recommendations
from recpo.batches.slates import HeldOutBatches, Rank
from recpo.evaluation.candidates import Candidates, candidates_of
from recpo.evaluation.catalog_ranking import Ranking, RankingResult, evaluate_ranking
from recpo.evaluation.contenders import Contender, Loaded
from recpo.evaluation.estimates import Estimate, estimate
from recpo.evaluation.held_out_pass import HeldOut
from recpo.evaluation.measures import Measure, Observed
from recpo.explorer.people_and_items import Catalog, Person
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors, posterior_variance

_BATCH: Final = 256
#: The mean grade that the reward model predicts for a list.
GRADE: Final = "predicted grade"
#: Orders of users, and what they are called.
ORDERS: Final[Mapping[str, str]] = {
    "differ": "where the lists differ most",
    "loses": "who loses most by the change",
    "gains": "who gains most by the change",
    "new": "new users",
    "short": "short histories",
}


class Shares(NamedTuple):
    """Who is helped and who is harmed by a change.

    Attributes:
        metric: what is compared.
        helped: share of the users whose metric rises.
        harmed: share of the users whose metric falls.
        users: number of users for whom the metric is defined.
        gain: mean improvement with its 95 % interval.
    """

    metric: str
    helped: float
    harmed: float
    users: int
    gain: Estimate

    @property
    def unchanged(self) -> float:
        """Share of the other users."""
        return max(0.0, 1 - self.helped - self.harmed)


class Listed(NamedTuple):
    """One place of a list.

    Attributes:
        item: internal id.
        score: of the contender; of a policy the log-probability.
        propensity: probability of the item under a policy; None = the contender has no probabilities.
        grade: predicted by the reward model; None = there is none.
        deviation: posterior standard deviation of the grade.
    """

    item: int
    score: float
    propensity: float | None
    grade: float | None
    deviation: float | None


@dataclass(frozen=True)
class Surveyed:
    """The lists of one contender.

    Attributes:
        name: of the contender.
        loaded: it.
        result: metrics of every user of the sample.
        lists: ``[S, k]`` int64, padded with 0.
        scores: ``[S, k]`` float32.
        curves: training curves.
        advice: what went wrong in its training.
    """

    name: str
    loaded: Loaded
    result: RankingResult
    lists: np.ndarray
    scores: np.ndarray
    curves: Mapping[str, Sequence[Sequence[float]]]
    advice: Sequence[str] = ()


class _Lists(Measure):
    """Keeps the lists of a pass."""

    def __init__(self) -> None:
        self.items: list[np.ndarray] = []
        self.scores: list[np.ndarray] = []

    def update(self, observed: Observed) -> Mapping[str, Tensor]:
        self.items.append(observed.lists.item_ids.cpu().numpy())
        self.scores.append(observed.lists.scores.float().cpu().numpy())
        return {}


@dataclass(frozen=True)
class Survey:
    """The lists of all contenders for a sample of held-out users.

    Attributes:
        data: the prepared data.
        split: the held-out period.
        k: length of the lists.
        contenders: what was compared; the first is the one that serves now.
        grades: predicts grades of listed items; None = there is no reward model.
        candidates: which items could be listed; None = all.
        histories: ``[S]`` number of events that each user of the sample had, at most as many as are read.
        tastes: ``[S, r + 1]`` the users as the reward model sees them; None = there is none.
        total: number of held-out users.
    """

    data: Prepared
    split: HeldOut
    k: int
    contenders: Sequence[Surveyed]
    grades: Factors | None
    candidates: Candidates | None
    histories: np.ndarray
    tastes: Tensor | None
    total: int

    @classmethod
    def of(
        cls,
        data: Prepared,
        contenders: Sequence[Contender],
        *,
        split: HeldOut,
        k: int,
        users: int,
        grades: Factors | None,
        advice: Mapping[str, Sequence[str]],
        progress: bool = False,
    ) -> Survey:
        """Asks every contender for the lists of the same users, evenly spaced over the held-out ones.

        Raises:
            RecpoError: the period has no users, or a contender gives no lists.
        """
        candidates = candidates_of(data, split, None)
        ranking = Ranking(num_items=data.num_items, ks=(k,), candidates=candidates)
        total = sum(int(shard["users"]) for shard in data.manifest["shards"][split])
        if not total:
            message = f"{data.root}: the {split} period has no users, so there is nothing to compare"
            raise RecpoError(message, code="empty", field="split")
        surveyed = []
        for contender in contenders:
            loaded, kept = contender.load(), _Lists()
            batches = HeldOutBatches(data, split, loaded.max_history, _BATCH, Rank(), users, loaded.reads)
            shown = tqdm(batches, f"explore {contender.name}", unit="batch", leave=False, disable=not progress or None)
            result = evaluate_ranking(loaded.recommender, shown, ranking, [kept])
            items, scores = np.concatenate(kept.items), np.concatenate(kept.scores)
            said = advice.get(contender.name, ())
            surveyed.append(Surveyed(contender.name, loaded, result, items, scores, contender.curves, said))
        width = max(one.loaded.max_history for one in surveyed)
        width = width if grades is None else max(width, grades.max_history)
        reads = Reads() if grades is None else grades.reads
        batches = HeldOutBatches(data, split, width, _BATCH, Rank(), users, reads)
        lengths, tastes = [], []
        for batch in batches:
            lengths.append(batch.feedback.histories.lengths.numpy())
            if grades is not None:
                tastes.append(grades.fold_in(batch.feedback.histories))
        known = None if grades is None else torch.cat(tastes)
        return cls(data, split, k, surveyed, grades, candidates, np.concatenate(lengths), known, total)

    @property
    def users(self) -> np.ndarray:
        """``[S]`` the users of the sample, by their index, ascending."""
        found: np.ndarray = self.contenders[0].result.user_ids.numpy()
        return found

    @property
    def metrics(self) -> list[str]:
        """Metrics that users are compared by, the one that first says who is helped and who is harmed first."""
        names = [f"NDCG@{self.k}", "AUC_mixed", f"disliked@{self.k}"]
        known = [name for name in names if all(name in one.result.per_user for one in self.contenders)]
        return [*known, GRADE] if self.grades is not None else known

    def values(self, place: int, metric: str) -> np.ndarray:
        """``[S]`` a metric of every user for one contender, the higher the better; nan = not defined."""
        if metric == GRADE:
            return self._mean_grades[place]
        found: np.ndarray = self.contenders[place].result.per_user[metric].double().numpy()
        return -found if metric.startswith("disliked") else found

    def overlap(self, one: int, other: int) -> np.ndarray:
        """``[S]`` share of places in the lists of two contenders that hold items of both."""
        mine, theirs = self.contenders[one].lists, self.contenders[other].lists
        both = ((mine[:, :, None] == theirs[:, None, :]) & (mine > 0)[:, :, None]).any(2).sum(1)
        longest = np.maximum(np.maximum((mine > 0).sum(1), (theirs > 0).sum(1)), 1)
        share: np.ndarray = both / longest
        return share

    def change(self, other: int) -> np.ndarray:
        """``[S]`` what a user gains if ``other`` replaces the first one: by the first metric defined for the user."""
        gain = np.full(len(self.users), np.nan)
        for metric in self.metrics:
            difference = self.values(other, metric) - self.values(0, metric)
            gain = np.where(np.isnan(gain) | (gain == 0), np.where(np.isnan(difference), gain, difference), gain)
        return gain

    def ordered(self, order: str, other: int, count: int) -> list[int]:
        """Rows of the sample in an order of ``ORDERS``, the first ``count``; ``other`` replaces the first contender."""
        if order in ("new", "short"):
            length = self.histories
            rows = np.argsort(length, kind="stable")
            kept = rows[length[rows] == 0] if order == "new" else rows[length[rows] > 0]
        elif order == "differ":
            kept = np.lexsort((-self.histories, self.overlap(0, other)))
        else:
            change = self.change(other) * (1 if order == "loses" else -1)
            rows = np.argsort(change, kind="stable")  # nan at the end
            kept = rows[change[rows] < 0]
        return [int(row) for row in kept[:count]]

    def shares(self, other: int, metric: str) -> Shares:
        """Who is helped and who is harmed by a metric if ``other`` replaces the first contender."""
        difference = self.values(other, metric) - self.values(0, metric)
        known = difference[~np.isnan(difference)]
        count = max(1, len(known))
        helped, harmed = float((known > 0).sum() / count), float((known < 0).sum() / count)
        return Shares(metric, helped, harmed, len(known), estimate(torch.from_numpy(difference)))

    def owners(self, place: int, item: int) -> list[int]:
        """Users of the sample to whom a contender lists an item."""
        return [int(user) for user in self.users[(self.contenders[place].lists == item).any(1)]]

    def lists_of(self, person: Person) -> list[list[Listed]]:
        """The lists of every contender for one user; empty for a user without held-out events."""
        if person.batch is None:
            return [[] for _ in self.contenders]
        with torch.inference_mode():
            return [self._list(one, person.batch) for one in self.contenders]

    def _list(self, one: Surveyed, batch_of: Callable[[int], EvaluationBatch]) -> list[Listed]:
        batch = batch_of(one.loaded.max_history)
        absent = None if self.candidates is None else self.candidates.unavailable(batch.user_ids)
        lists = one.loaded.recommender.lists(batch, min(self.k, self.data.num_items), batch.exclude, absent)
        grades, deviations = self._graded(batch_of, lists)
        is_policy = one.loaded.recommender.scores_are_logp
        found = []
        for place, (item, score) in enumerate(zip(lists.item_ids[0].tolist(), lists.scores[0].tolist(), strict=True)):
            if item:
                propensity = float(np.exp(score)) if is_policy else None
                found.append(Listed(item, score, propensity, *(_at(part, place) for part in (grades, deviations))))
        return found

    def _graded(
        self, batch_of: Callable[[int], EvaluationBatch], lists: Recommendations
    ) -> tuple[Tensor | None, Tensor | None]:
        model = self.grades
        if model is None:
            return None, None
        users, covariance = model.fold_in_with_covariance(batch_of(model.max_history).feedback.histories)
        known = model.item_covariance is not None
        deviations = posterior_variance(model, users, covariance, lists.item_ids).sqrt() if known else None
        return model.grades(users, lists.item_ids), deviations

    @cached_property
    def listed(self) -> list[np.ndarray]:
        """``[V + 1]`` for every contender: how many lists of the sample hold each item."""
        size = self.data.num_items + 1
        counts = [np.bincount(one.lists.ravel(), minlength=size) for one in self.contenders]
        for count in counts:
            count[0] = 0
        return counts

    @cached_property
    def _mean_grades(self) -> list[np.ndarray]:
        """``[S]`` for every contender: the mean grade that the reward model predicts for the list."""
        model, tastes = self.grades, self.tastes
        if model is None or tastes is None:
            return []
        found = []
        for one in self.contenders:
            items = torch.from_numpy(one.lists)
            grades = model.grades(tastes, items).where(items > 0, torch.nan)
            found.append(grades.nanmean(1).double().numpy())
        return found

    @property
    def reads(self) -> Reads:
        """What the contenders and the grades read of a batch."""
        found = Reads() if self.grades is None else self.grades.reads
        for one in self.contenders:
            found = found | one.loaded.reads
        return found


def _at(values: Tensor | None, place: int) -> float | None:
    return None if values is None else float(values[0, place])


_COUNT: Final = 12


def nearness(survey: Survey) -> str:
    """What near means for ``neighbors``, as the end of a sentence."""
    if survey.grades is None:
        return f"listed to the same users by {survey.contenders[-1].name}: share of its lists"
    return "cosine of the factors of the reward model"


def neighbors(survey: Survey, item: int) -> list[tuple[int, float]]:
    """The nearest items and how near they are, the nearest first: by factors, or in the same lists without them."""
    model = survey.grades
    if model is None:
        lists = survey.contenders[-1].lists
        having = lists[(lists == item).any(1)]
        counts = Counter(having[having != item].tolist())
        counts.pop(0, None)
        return [(int(one), count / len(having)) for one, count in counts.most_common(_COUNT)]
    near = cosine_similarity(model.item_factors, model.item_factors[item - 1][None], dim=1)
    near[item - 1] = -torch.inf
    best = near.topk(min(_COUNT, len(near)))
    found = zip((best.indices + 1).tolist(), best.values.tolist(), strict=True)
    return [(one, value) for one, value in found if np.isfinite(value)]


_VALUES: Final = 8  # values of an attribute that are shown
_HEAD: Final = 100  # one item of so many is popular
_LIKED: Final = 20_000  # items that most of the positives are of
_MOST_VALUES: Final = 500  # an attribute with more is a name, not a kind


class Coverage(NamedTuple):
    """How the lists of a contender spread over the catalog.

    Attributes:
        name: of the contender.
        items: number of distinct items in the lists.
        share: of the catalog.
        popular: share of places that hold one of the most popular hundredth of the items.
        new: share of places that hold items without training events.
        short: share of users whose list is not full.
    """

    name: str
    items: int
    share: float
    popular: float
    new: float
    short: float


class Calibrated(NamedTuple):
    """The shares of the values of one attribute.

    Attributes:
        attribute: its name.
        rows: value, share among the items that users liked before, shares in the lists of every contender.
    """

    attribute: str
    rows: list[tuple[str, float, list[float]]]


def moved_items(survey: Survey, catalog: Catalog, order: str, other: int, count: int) -> list[int]:
    """Items in an order of the items page, the first ``count``; ``other`` replaces the first contender."""
    before, after = survey.listed[0].astype(np.int64), survey.listed[other].astype(np.int64)
    moved = after - before
    if order == "listed":
        key = after
    elif order == "new":
        is_new = np.append(False, catalog.events == 0)
        key = np.where(is_new, after + 1, 0)
    else:
        key = moved if order == "gain" else -moved
    # only the items that are in a list, not the catalog, are sorted
    some = np.flatnonzero(key > 0)
    best = some[np.argsort(-key[some], kind="stable")][:count]
    return [int(item) for item in best]


def overlaps(survey: Survey) -> list[tuple[str, list[float]]]:
    """Mean overlap of the lists of every pair of contenders."""
    count = range(len(survey.contenders))
    return [
        (survey.contenders[one].name, [float(survey.overlap(one, other).mean()) for other in count]) for one in count
    ]


def coverage(survey: Survey, catalog: Catalog) -> list[Coverage]:
    """How the lists of every contender spread over the catalog."""
    items = survey.data.num_items
    is_popular = np.append(False, catalog.ranks <= max(1, items // _HEAD))
    is_new = np.append(False, catalog.events == 0)
    found = []
    for place, one in enumerate(survey.contenders):
        count = survey.listed[place]
        total, covered = max(1, int(count.sum())), int((count > 0).sum())
        short = float((one.lists == 0).any(1).mean())
        popular, new = (float(count[which].sum()) / total for which in (is_popular, is_new))
        found.append(Coverage(one.name, covered, covered / items, popular, new, short))
    return found


def calibration(survey: Survey, catalog: Catalog) -> list[Calibrated]:
    """Of every attribute with few values, how often lists hold them and how often users liked them before.

    What users liked are the training positives of the whole log.
    """
    liked = np.append(0, catalog.positives).astype(np.int64)
    shown = np.flatnonzero(sum(survey.listed))
    some = np.union1d(shown, np.argsort(-liked, kind="stable")[:_LIKED])
    some = some[some > 0]
    found = []
    for attribute in catalog.attributes:
        values = catalog.values(attribute, some.tolist())
        before = _shares(values, liked)
        if not 1 < len(before) <= _MOST_VALUES:
            continue
        of_lists = [_shares(values, count) for count in survey.listed]
        most = sorted(before, key=before.__getitem__, reverse=True)[:_VALUES]
        rows = [(value, before[value], [shares.get(value, 0.0) for shares in of_lists]) for value in most]
        found.append(Calibrated(attribute, rows))
    return found


def _shares(values: Mapping[int, Sequence[str]], counts: np.ndarray) -> dict[str, float]:
    """Share of each value among the counted items; an item with several values counts for each in equal parts."""
    found: dict[str, float] = defaultdict(float)
    for item, names in values.items():
        for name in names:
            if counts[item]:
                found[name] += float(counts[item]) / len(names)
    total = sum(found.values()) or 1.0
    return {name: count / total for name, count in found.items()}
