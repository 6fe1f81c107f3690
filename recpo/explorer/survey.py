"""What every contender lists for the same held-out users, and what a server logged: the numbers of the pages.

The sample of users is the same for all comparisons: which users, items and attributes a change of the policy moves, how
lists cover the catalog, and the items near an item, by the factors of the reward model or by the users who had both.

Of the log of ``recpo serve``: exposures, exploration, outcomes and their value, over time and by variant. DuckDB
aggregates its Parquet files; only sums per user are in memory.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import duckdb
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from tqdm import tqdm

from recpo.base.errors import RecpoError, reading
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch
from recpo.batches.slates import HeldOutBatches, Rank
from recpo.evaluation.candidates import Candidates, HeldOut, candidates_of
from recpo.evaluation.catalog_ranking import Ranking, RankingResult, evaluate_ranking
from recpo.evaluation.comparison import overlap
from recpo.evaluation.contenders import Contender
from recpo.evaluation.estimates import Estimate, estimate
from recpo.evaluation.measures import Measure, Observed, Recommender
from recpo.evaluation.variants import clustered_mean
from recpo.explorer.people_and_items import Catalog, Person, known
from recpo.log.prepared import Prepared
from recpo.log.schema import LogColumns
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
_NEIGHBORS: Final = 12
_VALUES: Final = 8  # values of an attribute that are shown
_HEAD: Final = 100  # one item of so many is popular
_LIKED: Final = 20_000  # items that most of the positives are of
_MOST_VALUES: Final = 500  # an attribute with more is a name, not a kind


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
        recommender: it, in memory.
        result: metrics of every user of the sample.
        lists: ``[S, k]`` int64, padded with 0.
        curves: training curves.
        advice: what went wrong in its training.
    """

    name: str
    recommender: Recommender
    result: RankingResult
    lists: np.ndarray
    curves: Mapping[str, Sequence[Sequence[float]]]
    advice: Sequence[str] = ()


class _Lists(Measure):
    """Keeps the lists of a pass."""

    def __init__(self) -> None:
        self.items: list[np.ndarray] = []

    def update(self, observed: Observed) -> Mapping[str, Tensor]:
        self.items.append(observed.lists.item_ids.cpu().numpy())
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
    ) -> Self:
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
            recommender, kept = contender.load(), _Lists()
            batches = HeldOutBatches(data, split, recommender.max_history, _BATCH, Rank(), users, recommender.reads)
            shown = tqdm(batches, f"explore {contender.name}", unit="batch", leave=False, disable=not progress or None)
            result = evaluate_ranking(recommender, shown, ranking, [kept])
            items, said = np.concatenate(kept.items), advice.get(contender.name, ())
            surveyed.append(Surveyed(contender.name, recommender, result, items, contender.curves, said))
        width = max(one.recommender.max_history for one in surveyed)
        width = width if grades is None else max(width, grades.max_history)
        reads = Reads() if grades is None else grades.reads
        batches = HeldOutBatches(data, split, width, _BATCH, Rank(), users, reads)
        lengths, tastes = [], []
        for batch in batches:
            lengths.append(batch.feedback.histories.lengths.numpy())
            if grades is not None:
                tastes.append(grades.fold_in(batch.feedback.histories))
        seen = None if grades is None else torch.cat(tastes)
        return cls(data, split, k, surveyed, grades, candidates, np.concatenate(lengths), seen, total)

    @property
    def users(self) -> np.ndarray:
        """``[S]`` the users of the sample, by their index, ascending."""
        found: np.ndarray = self.contenders[0].result.user_ids.numpy()
        return found

    @property
    def metrics(self) -> list[str]:
        """Metrics that users are compared by, the one that first says who is helped and who is harmed first."""
        names = [f"NDCG@{self.k}", "AUC_mixed", f"disliked@{self.k}"]
        defined = [name for name in names if all(name in one.result.per_user for one in self.contenders)]
        return [*defined, GRADE] if self.grades is not None else defined

    def values(self, place: int, metric: str) -> np.ndarray:
        """``[S]`` a metric of every user for one contender, the higher the better; nan = not defined."""
        if metric == GRADE:
            return self._mean_grades[place]
        found: np.ndarray = self.contenders[place].result.per_user[metric].double().numpy()
        return -found if metric.startswith("disliked") else found

    def overlap(self, one: int, other: int) -> np.ndarray:
        """``[S]`` share of places in the lists of two contenders that hold items of both; 1 of two empty lists."""
        mine, theirs = (torch.from_numpy(self.contenders[place].lists) for place in (one, other))
        return overlap(mine, theirs).numpy()

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
        defined = difference[~np.isnan(difference)]
        count = max(1, len(defined))
        helped, harmed = float((defined > 0).sum() / count), float((defined < 0).sum() / count)
        return Shares(metric, helped, harmed, len(defined), estimate(torch.from_numpy(difference)))

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
        batch = batch_of(one.recommender.max_history)
        absent = None if self.candidates is None else self.candidates.unavailable(batch.user_ids)
        lists = one.recommender.lists(batch, min(self.k, self.data.num_items), absent)
        grades = deviations = torch.full_like(lists.scores, torch.nan)
        if (model := self.grades) is not None:
            users, covariance = model.fold_in_with_covariance(batch_of(model.max_history).feedback.histories)
            grades = model.grades(users, lists.item_ids)
            if model.item_covariance is not None:
                deviations = posterior_variance(model, users, covariance, lists.item_ids).sqrt()
        columns = (part[0].tolist() for part in (lists.item_ids, lists.scores, grades, deviations))
        is_policy = one.recommender.scores_are_logp
        return [
            Listed(item, score, float(np.exp(score)) if is_policy else None, known(grade), known(deviation))
            for item, score, grade, deviation in zip(*columns, strict=True)
            if item
        ]

    @cached_property
    def listed(self) -> list[np.ndarray]:
        """``[V + 1]`` for every contender: how many lists of the sample hold each item."""
        size = self.data.num_items + 1
        return [np.bincount(one.lists[one.lists > 0], minlength=size) for one in self.contenders]

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
        of_grades = Reads() if self.grades is None else self.grades.reads
        return reduce(or_, (one.recommender.reads for one in self.contenders), of_grades)

    def neighbors(self, item: int) -> tuple[str, list[tuple[int, float]]]:
        """What near means, as the end of a sentence, and the nearest items with their nearness, the nearest first.

        By the factors of the reward model; without them, in the same lists.
        """
        model = self.grades
        if model is None:
            last = self.contenders[-1]
            having = last.lists[(last.lists == item).any(1)]
            counts = Counter(having[having != item].tolist())
            counts.pop(0, None)
            together = [(int(one), count / len(having)) for one, count in counts.most_common(_NEIGHBORS)]
            return f"listed to the same users by {last.name}: share of its lists", together
        near = cosine_similarity(model.item_factors, model.item_factors[item - 1][None], dim=1)
        near[item - 1] = -torch.inf
        best = near.topk(min(_NEIGHBORS, len(near)))
        found = zip((best.indices + 1).tolist(), best.values.tolist(), strict=True)
        return "cosine of the factors of the reward model", [(one, value) for one, value in found if np.isfinite(value)]

    def moved_items(self, catalog: Catalog, order: str, other: int, count: int) -> list[int]:
        """Items in an order of the items page, the first ``count``; ``other`` replaces the first contender."""
        before, after = self.listed[0].astype(np.int64), self.listed[other].astype(np.int64)
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

    def overlaps(self) -> list[tuple[str, list[float]]]:
        """Mean overlap of the lists of every pair of contenders."""
        count = range(len(self.contenders))
        return [
            (self.contenders[one].name, [float(self.overlap(one, other).mean()) for other in count]) for one in count
        ]

    def coverage(self, catalog: Catalog) -> list[tuple[str, int, list[float]]]:
        """How the lists of every contender spread over the catalog.

        Returns:
            Name, distinct items in the lists, and shares: these items of the catalog, places that hold one of the most
            popular hundredth of the items, places that hold items without training events, users with a short list.
        """
        items = self.data.num_items
        is_popular = np.append(False, catalog.ranks <= max(1, items // _HEAD))
        is_new = np.append(False, catalog.events == 0)
        found = []
        for place, one in enumerate(self.contenders):
            count = self.listed[place]
            total, covered = max(1, int(count.sum())), int((count > 0).sum())
            short = float((one.lists == 0).any(1).mean())
            popular, new = (float(count[which].sum()) / total for which in (is_popular, is_new))
            found.append((one.name, covered, [covered / items, popular, new, short]))
        return found

    def calibration(self, catalog: Catalog) -> list[tuple[str, list[tuple[str, float, list[float]]]]]:
        """Of every attribute with few values, how often lists hold them and how often users liked them before.

        What users liked are the training positives of the whole log.

        Returns:
            Attributes with rows: value, share among the items liked before, shares in the lists by contender.
        """
        liked = np.append(0, catalog.positives).astype(np.int64)
        shown = np.flatnonzero(sum(self.listed))
        some = np.union1d(shown, np.argsort(-liked, kind="stable")[:_LIKED])
        some = some[some > 0]
        found = []
        for attribute in catalog.attributes:
            values = catalog.values(attribute, some.tolist())
            before = _shares(values, liked)
            if not 1 < len(before) <= _MOST_VALUES:
                continue
            of_lists = [_shares(values, count) for count in self.listed]
            most = sorted(before, key=before.__getitem__, reverse=True)[:_VALUES]
            rows = [(value, before[value], [shares.get(value, 0.0) for shares in of_lists]) for value in most]
            found.append((attribute, rows))
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


_HOUR_MS: Final = 3_600_000
_MOST_HOURS: Final = 72  # longer logs are shown by day
#: The column of a log that was written with several policies in production.
VARIANT: Final = "variant"


class Rates(NamedTuple):
    """A group of exposures.

    Attributes:
        name: when they were, or which variant made them.
        requests: number of lists.
        exposures: number of items shown.
        users: number of users.
        explored: share of exposures that were drawn uniformly.
        answered: share of exposures with an outcome.
        disliked: share of exposures that were disliked.
        value: mean over the exposures with an outcome: the label, or the watched share (at most 1); None = none.
        half_width: half of its 95 % interval, with users as clusters; None = fewer than two users.
        short_lists: share of lists that are shorter than the longest one of the group.
        unknown_items: share of exposures whose items the prepared data do not know.
    """

    name: str
    requests: int
    exposures: int
    users: int
    explored: float
    answered: float
    disliked: float
    value: float | None
    half_width: float | None
    short_lists: float
    unknown_items: float


class Traffic(NamedTuple):
    """A server's log.

    Attributes:
        over_time: by hour, or by day if the log is longer than three days, oldest first.
        by_variant: one group per variant, and one of the exposures without any; without variants, one of all exposures.
        unit: ``hour`` or ``day``.
        value_of: what ``value`` is a mean of.
    """

    over_time: list[Rates]
    by_variant: list[Rates]
    unit: str
    value_of: str


def traffic(log: Path, data: Prepared) -> Traffic:
    """Reads the log of a server.

    Args:
        log: directory with the Parquet files that ``recpo serve --log`` published.
        data: prepared data; items that are not in them are unknown.

    Raises:
        RecpoError: there are no published exposures, or a file is not a log of exposures.
    """
    files = sorted(str(file) for file in log.rglob("*.parquet"))
    if not files:
        message = f"{log} has no published exposures (*.parquet): wait until the outcome window of the first is over"
        raise RecpoError(message, code="empty", field="server_log")
    remedy = "name the directory that `recpo serve --log` writes"
    with reading(log, duckdb.Error, OSError, remedy=remedy, field="server_log"), duckdb.connect() as database:
        names = {str(row[0]) for row in database.execute(_COLUMNS, [files]).fetchall()}
        if missing := sorted({LogColumns.REQUEST_ID, *LogColumns.REQUIRED} - names):
            message = f"{log} has no column {missing[0]!r}: {remedy}"
            raise RecpoError(message, code="missing_column", field="server_log")
        value, value_of = _value(names)
        variant = f"coalesce(log.{VARIANT}, 'no variant')" if VARIANT in names else "'all exposures'"
        is_random, dislike = (f"coalesce(log.{name}, false)" if name in names else "false" for name in _FLAGS)
        exposures = _EXPOSURES.format(value=value, variant=variant, is_random=is_random, dislike=dislike)
        database.execute(exposures, [files, str(data.root / "items.parquet")])
        first, last = database.execute("SELECT min(timestamp), max(timestamp) FROM exposures").fetchall()[0]
        unit, length = ("hour", _HOUR_MS) if last - first <= _MOST_HOURS * _HOUR_MS else ("day", 24 * _HOUR_MS)
        over_time = _groups(database, f"timestamp // {length} * {length}")
        variants = _groups(database, "variant")
    return Traffic([one._replace(name=_time(int(one.name), unit)) for one in over_time], variants, unit, value_of)


_FLAGS: Final = ("is_random", "dislike")
_COLUMNS: Final = "DESCRIBE SELECT * FROM read_parquet(?, union_by_name = true)"
_EXPOSURES: Final = """
CREATE TEMP TABLE exposures AS
SELECT log.timestamp, log.user_id, log.request_id, {variant} AS variant, {value} AS value,
       {is_random} AS is_random, {dislike} AS dislike, known.item_id IS NULL AS is_unknown
FROM read_parquet(?, union_by_name = true) AS log
LEFT JOIN (SELECT item_id FROM read_parquet(?)) AS known ON known.item_id = log.item_id
"""
_GROUPS: Final = """
WITH grouped AS (SELECT {group} AS name, * FROM exposures),
lists AS (SELECT name, request_id, count(*) AS length FROM grouped GROUP BY ALL),
longest AS (SELECT name, max(length) AS longest FROM lists GROUP BY ALL),
short AS (
    SELECT name, avg((length < longest)::DOUBLE) AS share FROM lists JOIN longest USING (name) GROUP BY ALL
)
SELECT grouped.name::VARCHAR AS name, count(DISTINCT request_id) AS requests, count(*) AS exposures,
       count(DISTINCT user_id) AS users, avg(is_random::DOUBLE) AS explored,
       avg((value IS NOT NULL)::DOUBLE) AS answered, avg(dislike::DOUBLE) AS disliked,
       any_value(share) AS short_lists, avg(is_unknown::DOUBLE) AS unknown_items
FROM grouped JOIN short USING (name)
GROUP BY grouped.name ORDER BY grouped.name
"""
_USERS: Final = """
SELECT {group} AS name, sum(value) AS total, count(value) AS n FROM exposures
WHERE value IS NOT NULL GROUP BY name, user_id
"""


def _groups(database: duckdb.DuckDBPyConnection, group: str) -> list[Rates]:
    users = database.execute(_USERS.format(group=group)).df()
    means = {str(name): clustered_mean(own["total"], own["n"]) for name, own in users.groupby("name")}
    groups = []
    row: Any
    for row in database.execute(_GROUPS.format(group=group)).df().itertuples(index=False):
        mean = means.get(row.name, clustered_mean([], []))
        groups.append(Rates(**row._asdict(), value=known(mean.mean), half_width=known(mean.half_width)))
    return groups


def _value(names: set[str]) -> tuple[str, str]:
    """The SQL of the value of an exposure, and what it is."""
    if LogColumns.LABEL in names:
        return f"log.{LogColumns.LABEL}", "label"
    if {LogColumns.WATCH_TIME, LogColumns.DURATION} <= names:
        share = f"log.{LogColumns.WATCH_TIME} / nullif(log.{LogColumns.DURATION}, 0)"
        return f"CASE WHEN {share} > 1 THEN 1 ELSE {share} END", "watched share of an item, at most 1"
    if LogColumns.WATCH_TIME in names:
        return f"log.{LogColumns.WATCH_TIME}", "seconds watched"
    return "NULL::DOUBLE", "nothing: the log has no outcomes"


def _time(milliseconds: int, unit: str) -> str:
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return f"{moment:%Y-%m-%d %H:%M}" if unit == "hour" else f"{moment:%Y-%m-%d}"
