"""The contenders of an evaluation, each a recommender over internal ids: baselines, the oracle, and lists.

Rows of users and items of another system are read as the lists of the held-out users (``Lists``). Re-ranked lists show
the effect of diversity, caps and calibration in the same tables as the lists that they are chosen from. Fitted
baselines are kept with the evaluation (``BaselineCache``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import torch
from torch import Tensor

from recpo.artifacts.checksums import sha256
from recpo.artifacts.documents import path_of
from recpo.base.errors import PositiveFloat, RecpoError, validate_ranges
from recpo.base.features import Reads
from recpo.base.feedback import UNKNOWN
from recpo.base.frames import FrameOrPath, first_values, id_column, number_column, require_columns, to_arrow
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations
from recpo.evaluation.candidates import internal_ids
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.results import LOGGING_POLICY
from recpo.evaluation.true_rewards import ORACLE, TrueRewards
from recpo.lists.reranking import FloatArray, ItemAttributes, Reranker, reranked
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.log.schema import LogColumns
from recpo.ops.ranking import first_allowed, is_member
from recpo.rewards import implicit
from recpo.rewards.counted import (
    SequentialRulesOptions,
    fit_sequential_rules,
    item_scores,
    personal_popularity,
    popularity_of,
    segment_policy,
    segments_of,
)
from recpo.rewards.factors import Factors
from recpo.rewards.graded import FactorOptions
from recpo.rewards.implicit import AllRankOptions, EaseOptions, FittedPolicy, ImplicitOptions
from recpo.rewards.selection import fit_factors

#: A trained run, an exported bundle, a factor model, the lists of another system, a baseline, the oracle, or one of the
#: first three with re-ranked lists.
Kind = Literal["run", "bundle", "factors", "lists", "baseline", "oracle", "reranked"]

Baseline = Literal[
    "popularity",
    "personal_popularity",
    "positives",
    "item_rate",
    "recency",
    "recent_rate",
    "segment_popularity",
    "segment_rate",
    "sequential_rules",
    "factorization",
    "implicit_als",
    "allrank",
    "ease",
    "random",
]

#: Names of all baselines.
BASELINES: tuple[Baseline, ...] = get_args(Baseline)

#: The default baselines. The factorization is included only if there are grades to fit and select it.
DEFAULT_BASELINES: tuple[Baseline, ...] = ("popularity", "recency", "sequential_rules", "factorization", "random")


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
    load: Callable[[], Recommender]
    facts: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BaselineOptions:
    """Options of the baselines.

    Attributes:
        recency_half_life: days after which a training event counts half; null = a tenth of the training period.
        sequential_rules: which items followed which.
        factorization: the matrix factorization of grades.
        implicit_als: alternating least squares on positives.
        allrank: alternating least squares on the grades of what was shown, and 0 for all other items.
        ease: the linear item-to-item model.
    """

    recency_half_life: PositiveFloat | None = None
    sequential_rules: SequentialRulesOptions = field(default_factory=SequentialRulesOptions)
    factorization: FactorOptions = field(default_factory=lambda: FactorOptions(method="als"))
    implicit_als: ImplicitOptions = field(default_factory=ImplicitOptions)
    allrank: AllRankOptions = field(default_factory=AllRankOptions)
    ease: EaseOptions = field(default_factory=EaseOptions)

    def __post_init__(self) -> None:
        validate_ranges(self, "baseline_options.")


#: Directory of fitted baselines within that of an evaluation.
BASELINES_DIRECTORY: Final = "baselines"
#: The baselines whose models are fitted, and kept.
FITTED: Final = ("factorization", "implicit_als", "allrank", "ease")
_VERSION: Final = 3  # version of the fitting methods and files; a new version fits again


@dataclass(frozen=True)
class BaselineCache:
    """The directories of fitted baselines.

    Attributes:
        reads: directory to read existing ones from; None = there is none.
        writes: directory to keep the used ones in; None = they are not kept.
    """

    reads: Path | None = None
    writes: Path | None = None


def baseline(
    name: Baseline,
    data: Prepared,
    options: BaselineOptions,
    cache: BaselineCache = BaselineCache(),
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

    def load() -> Recommender:
        if name == "random":
            return Recommender(UniformlyRandom(data.num_items).recommend, name=name)
        return loaded_model(baseline_model(name, data, options, cache, progress), name)

    # no library that we know has AllRank, so it is not among what a team has without recpo
    return Contender(name, "factors" if name == "allrank" else "baseline", load)


def oracle(truth: TrueRewards) -> Contender:
    """The oracle, which knows the taste of every user: an upper bound, not a competitor."""
    return Contender(ORACLE, "oracle", truth.oracle)


def default_baselines(data: Prepared) -> list[Baseline]:
    """``DEFAULT_BASELINES``, without the factorization if the train or validation period has no graded event.

    If lists may repeat items, also personal popularity.
    """
    graded = _has_grades(data, "train") and _has_grades(data, "valid")
    found = [name for name in DEFAULT_BASELINES if graded or name != "factorization"]
    return [*found, "personal_popularity"] if data.repeats else found


def segment_baselines(data: Prepared) -> list[Baseline]:
    """Popularity and rate of segments, if the table of users has a category that they may be values of."""
    return ["segment_popularity", "segment_rate"] if segments_of(data) else []


def _has_grades(data: Prepared, period: Literal["train", "valid"]) -> bool:
    names = ["feedback", "is_target"]
    shards = (data.columns(period, shard, names) for shard in range(data.num_shards(period)))
    return any(bool(((shard["feedback"] > UNKNOWN) & shard["is_target"]).any()) for shard in shards)


def validate_names(contenders: Sequence[Contender]) -> None:
    """Raises ``RecpoError`` if two contenders have the same name, or one has the name of the logging policy."""
    names = [LOGGING_POLICY, *(contender.name for contender in contenders)]
    if again := sorted({name for name in names if names.count(name) > 1}):
        message = f"two contenders have the name {again[0]}: rename a directory, or leave one out"
        raise RecpoError(message, code="duplicate", field=again[0])


class _Scoring(Protocol):
    """The policies of baselines (``recpo.policies.baseline``)."""

    max_history: int
    reads: Reads

    def scores(self, histories: Histories) -> Tensor: ...

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations: ...


class UniformlyRandom:
    """A random list per user: every allowed item is equally likely at every place.

    One random order of the catalog is drawn, and every list starts at a different place in it, so the cost of a list of
    distinct items does not grow with the catalog. Scores are ``-log V``.
    """

    def __init__(self, num_items: int, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(num_items, generator=self._generator) + 1

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. Every call draws new lists."""
        num_items, batch = len(self._order), len(histories.item_ids)
        depth = min(num_items, k + (0 if exclude is None else exclude.shape[1]))
        begin = torch.randint(num_items, (batch, 1), generator=self._generator)
        candidates = self._order[(begin + torch.arange(depth)) % num_items].to(histories.item_ids.device)
        item_ids = first_allowed(candidates, k, exclude)
        score = -torch.log(torch.tensor(float(num_items), device=item_ids.device))
        return Recommendations(item_ids, torch.where(item_ids > 0, score, -torch.inf))


def fitted_model(
    name: str, data: Prepared, options: Any, cache: BaselineCache, progress: bool = False
) -> Factors | FittedPolicy:
    """The model of a baseline of ``FITTED``: an existing one of the cache, or a new one.

    Args:
        name: name of the baseline.
        data: prepared data; its manifest, which has the checksums of all files, identifies it.
        options: its options, a dataclass; a model with any other value is not reused.
        cache: where it is kept.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: the existing model is damaged.
    """
    in_one_file = implicit.save_fitted, implicit.open_fitted, ".safetensors"
    recipes: dict[str, tuple[Callable[..., Any], Callable[[Any, Path], None], Callable[[Path], Any], str]] = {
        "factorization": (fit_factors, Factors.save, Factors.open, ""),  # a directory
        "implicit_als": (implicit.fit_implicit, *in_one_file),
        "allrank": (implicit.fit_implicit, *in_one_file),
        "ease": (implicit.fit_ease, *in_one_file),
    }
    fit, save, opened, suffix = recipes[name]
    content = {"version": _VERSION, "baseline": name, "options": asdict(options), "prepared": data.manifest}
    file = f"{name}-{sha256(json.dumps(content, sort_keys=True, default=str).encode())[:16]}{suffix}"
    kept = None if cache.reads is None else cache.reads / file
    model: Factors | FittedPolicy
    if kept is None or not kept.exists():
        model = fit(data, options, progress=progress)
    else:
        try:
            model = opened(kept)
        except RecpoError as error:
            message = f"the baseline that was kept in {kept} cannot be read: remove it to fit it again ({error})"
            raise RecpoError(message, code="damaged", field=file) from error
    if cache.writes is not None and not (cache.writes / file).exists():
        cache.writes.mkdir(parents=True, exist_ok=True)
        save(model, cache.writes / file)
    return model


def baseline_model(
    name: Baseline, data: Prepared, options: BaselineOptions, cache: BaselineCache, progress: bool = False
) -> Factors | _Scoring:
    """The model of a baseline, other than ``random``: factors, or a policy. The arguments are those of ``baseline``."""
    if name in FITTED:
        return fitted_model(name, data, getattr(options, name), cache, progress)
    if name == "sequential_rules":
        return fit_sequential_rules(data, options.sequential_rules)
    if name == "personal_popularity":
        return personal_popularity(data)
    if name in ("segment_popularity", "segment_rate"):
        return segment_policy(name, data)
    return popularity_of(item_scores(name, data, options.recency_half_life))


def loaded_model(model: Factors | _Scoring, name: str) -> Recommender:
    """A fitted model, run on the CPU; histories may be on any device.

    Factors list the items with the highest predicted grade, or lower bound of it, for users folded in from their
    history. Held-out slates are scored by what the model ranks by.
    """

    def recommend(histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        device = histories.item_ids.device
        found = model.recommend(histories.map(Tensor.cpu), k, None if exclude is None else exclude.cpu())
        return Recommendations(*(part.to(device) for part in found))

    def score(batch: FeedbackBatch) -> Tensor:
        histories, items = batch.histories.map(Tensor.cpu), batch.slates.item_ids
        if isinstance(model, Factors):
            return model.bounded_grades(histories, items.cpu()).to(items.device)
        return model.scores(histories).gather(1, (items.cpu() - 1).clamp_min(0)).to(items.device)

    return Recommender(recommend, name=name, score=score, max_history=model.max_history, reads=model.reads)


USER_ID, ITEM_ID, RANK, SCORE = LogColumns.USER_ID, LogColumns.ITEM_ID, "rank", "score"

_CSV: Final = (".csv", ".csv.gz")


@dataclass(frozen=True)
class Lists:
    """Recommendations of another system, to be evaluated as a contender.

    One row per user and recommended item, with the external ids of the log: ``user_id``, ``item_id``, and ``rank`` (1 =
    best) or ``score`` (higher = better). If there are both, ``rank`` orders the list. Other columns are ignored. Ties
    in rank or score are ordered by item index, as in every other list.

    Attributes:
        name: name of the contender.
        source: any frame (pandas, polars, pyarrow, or a dictionary of columns), a Parquet file, a directory of such
            files, or a CSV file (``.csv``, ``.csv.gz``) whose first line names the columns.
    """

    name: str
    source: FrameOrPath

    def __post_init__(self) -> None:
        if not self.name:
            message = "lists need a name: NAME=file.parquet, or Lists('name', frame) in Python"
            raise RecpoError(message, code="missing_value", field="name")

    @classmethod
    def parse(cls, text: str) -> Self:
        """``NAME=file.parquet``.

        Raises:
            RecpoError: there is no name, or no file.
        """
        name, _, file = text.partition("=")
        if not name or not file:
            message = f"lists are given as NAME=FILE, such as als=als.parquet; got {text!r}"
            raise RecpoError(message, code="bad_value", field="contenders")
        return cls(name, file)


class ListedItems(NamedTuple):
    """The lists of all known users, best first, as one table with offsets.

    Attributes:
        users: ``[N]`` int64 user indices, ascending.
        offsets: ``[N + 1]`` int64; the list of the n-th user is ``items[offsets[n] : offsets[n + 1]]``.
        items: ``[R]`` int32, 1..V, distinct within a list.
        counts: number of rows, and of rows that were dropped, by reason.
    """

    users: np.ndarray
    offsets: np.ndarray
    items: np.ndarray
    counts: Mapping[str, int]


def lists_contender(given: Lists, data: Prepared, ks: Sequence[int]) -> Contender:
    """The contender with the lists ``given``, which are read now, once.

    Raises:
        RecpoError: see ``read_lists``.
    """
    listed = read_lists(given, data)
    path = path_of(given.source)
    facts: dict[str, Any] = {"kind": "lists", "path": path or "a frame in memory"}
    if path is not None and Path(path).is_file():
        facts["sha256"] = sha256(Path(path))

    def load() -> Recommender:
        answers = _Answers(listed, tuple(ks), data.num_items)
        return Recommender(recommend_to_batch=answers.recommend, name=given.name, counts=answers.counts)

    return Contender(given.name, "lists", load, facts)


def read_lists(given: Lists, data: Prepared) -> ListedItems:
    """Reads, checks and orders the rows.

    ``counts`` of the result: ``list_rows``; ``list_rows_of_unknown_users`` and ``list_unknown_users``, rows and users
    that are not in the prepared data; ``list_rows_of_unknown_items`` and ``list_unknown_items``, of the other rows;
    ``list_rows_repeated``, repeated items of a list (the best place is kept); ``list_rows_against_scores``, if there
    are both ranks and scores, rows with a higher score than the row one rank better.

    Raises:
        RecpoError: the source cannot be read, a column is missing or of another type, an id, rank or score is missing,
            or no row names both a user and an item of ``data``.
    """
    import pandas as pd  # imports 35 MB, and only lists need it

    name = path_of(given.source) or f"lists {given.name}"
    users_known, items_known = IdMap(data.table("users.parquet", [USER_ID]).column(0).combine_chunks()), data.item_ids()
    table = _table(given, {USER_ID: users_known.type, ITEM_ID: items_known.type})
    users, items = (id_column(table, column, name) for column in (USER_ID, ITEM_ID))
    order, score = _order(table, name)
    user, item = internal_ids(users_known, users, USER_ID, name), internal_ids(items_known, items, ITEM_ID, name)
    strange_users, strange_items = user == 0, (user > 0) & (item == 0)
    counts = {
        "list_rows": len(user),
        "list_rows_of_unknown_users": int(strange_users.sum()),
        "list_unknown_users": len(users.filter(pa.array(strange_users)).unique()),
        "list_rows_of_unknown_items": int(strange_items.sum()),
        "list_unknown_items": len(items.filter(pa.array(strange_items)).unique()),
    }
    known = (user > 0) & (item > 0)
    if not known.any():
        few = [first_values(ids.listed(np.arange(min(len(ids), 4)) + 1)) for ids in (users_known, items_known)]
        raise RecpoError(
            f"{name}: none of its {len(table):,} rows names a user and an item of {data.root}; its users are "
            f"{first_values(users[:4].to_pylist())}, those of the data {few[0]}; its items are "
            f"{first_values(items[:4].to_pylist())}, those of the data {few[1]}: give the external ids of the "
            "same log",
            code="mismatch",
            field=name,
        )
    best_first = np.flatnonzero(known)[np.lexsort((item[known], order[known], user[known]))]
    user, item, against = user[best_first] - 1, item[best_first], 0
    if score is not None:
        rises = score[best_first][1:] > score[best_first][:-1]
        against = int((rises & (user[1:] == user[:-1])).sum())
    repeated = pd.DataFrame({USER_ID: user, ITEM_ID: item}).duplicated().to_numpy()  # the best place is the first
    user, item = user[~repeated], item[~repeated]
    owners, starts = np.unique(user, return_index=True)
    counts = {**counts, "list_rows_repeated": int(repeated.sum()), "list_rows_against_scores": against}
    return ListedItems(owners.astype(np.int64), np.append(starts, len(user)), item.astype(np.int32), counts)


def _table(given: Lists, ids: Mapping[str, pa.DataType]) -> pa.Table:
    """Reads the used columns; the ids of a CSV file in their type in the log, so that 007 keeps its zeros."""
    if (path := path_of(given.source)) is None:
        return to_arrow(given.source, f"lists {given.name}")  # type: ignore[arg-type]  # no path
    types = {**ids, RANK: pa.float64(), SCORE: pa.float64()}
    csv = ds.CsvFileFormat(convert_options=pyarrow.csv.ConvertOptions(column_types=types))
    try:
        found = ds.dataset(path, format=csv if path.endswith(_CSV) else "parquet")
        require_columns(found.schema, [USER_ID, ITEM_ID], path)
        used = [column for column in (USER_ID, ITEM_ID, RANK, SCORE) if column in found.schema.names]
        return to_arrow(found.to_table(columns=used), path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        message = f"{path}: expected lists in a Parquet file, a directory of them, or a CSV file ({reason})"
        raise RecpoError(message, code="wrong_file", field=path) from error


def _order(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The ascending sort key of lists: the rank, or minus the score; and, if there are ranks, the scores to compare."""
    rank, score = number_column(table, RANK, name), number_column(table, SCORE, name)
    if rank is None and score is None:
        message = f"{name}: there is neither a column 'rank' (1 = best) nor a column 'score' (higher = better)"
        raise RecpoError(message, code="missing_column", field=RANK)
    column, values = (SCORE, score) if rank is None else (RANK, rank)
    assert values is not None
    if missing := int(np.isnan(values).sum()):
        raise RecpoError(
            f"{name}: column {column!r} is missing (null or nan) in {missing:,} of {len(values):,} rows, the first is "
            f"row {int(np.isnan(values).argmax())}: drop these rows",
            code="missing_value",
            field=column,
        )
    return (-values, None) if rank is None else (values, score)


class _Answers:
    """Answers one pass from the table, and counts missing lists."""

    def __init__(self, listed: ListedItems, ks: tuple[int, ...], num_items: int) -> None:
        self._listed, self._ks, self._num_items = listed, ks, num_items
        self._without = self._excluded = 0
        self._short = dict.fromkeys(ks, 0)

    def counts(self) -> dict[str, int]:
        """Counts of the rows, and of the held-out users who were requested so far."""
        short = {f"users_with_short_list@{k}": number for k, number in self._short.items()}
        found = {"users_without_list": self._without, "list_items_excluded": self._excluded, **short}
        return {**self._listed.counts, **found}

    def recommend(self, batch: EvaluationBatch, k: int, exclude: Tensor) -> Recommendations:
        """Lists ``[B, k]``, padded with 0; scores are minus the places."""
        users = batch.user_ids
        listed = self._rows(users.cpu().numpy()).to(users.device)
        items = first_allowed(listed, k, exclude)
        length = (items > 0).sum(1)
        has_list = (listed > 0).any(1)
        self._without += int((~has_list).sum())
        self._excluded += int(is_member(listed, exclude).sum())
        for wanted in self._ks:
            self._short[wanted] += int((has_list & (length < min(wanted, self._num_items))).sum())
        return Recommendations.by_place(items)

    def _rows(self, users: np.ndarray) -> Tensor:
        """The complete lists ``[B, L]`` int64, padded with 0."""
        owners, offsets, items, _ = self._listed
        place = np.searchsorted(owners, users).clip(max=len(owners) - 1)
        begin = offsets[place]
        length = np.where(owners[place] == users, offsets[place + 1] - begin, 0)
        column = np.arange(max(1, int(length.max(initial=0))))
        row = np.minimum(begin[:, None] + column, len(items) - 1)
        return torch.from_numpy(np.where(column < length[:, None], items[row], 0).astype(np.int64))


#: The item vectors ``[V + 1, d]`` of a contender in memory; None = it has none.
VectorsOf = Callable[[Recommender], FloatArray | None]


def reranked_contender(
    base: Contender, reranker: Reranker, known: ItemAttributes, vectors_of: VectorsOf, *, k: int, shortlist: int
) -> Contender:
    """``base`` with a slate of ``k`` items chosen from its ``shortlist`` best ones; the rest follows by relevance.

    For calibration, the history is the complete past of the user, or the events that the policy reads if the past is
    not excluded.

    Args:
        base: the contender that ranks.
        reranker: chooses the slate.
        known: the tags that the method reads, and vectors unless the contender's own vectors are used.
        vectors_of: the contender's own vectors.
        k: length of the slate.
        shortlist: maximum number of items to re-rank.
    """

    def load() -> Recommender:
        ranked, attributes = base.load(), known
        if reranker.reads_vectors and known.vectors is None:
            vectors = vectors_of(ranked)
            if vectors is None:
                raise RecpoError(
                    f"{base.name} has no item vectors of its own, which {reranker.label} reads: name a column of "
                    "vectors in a file (rerank_options.attributes and rerank_options.vectors)",
                    code="missing_option",
                    field="rerank_options.vectors",
                )
            attributes = known.with_vectors(vectors)

        def recommend(batch: EvaluationBatch, length: int, exclude: Tensor) -> Recommendations:
            assert ranked.recommend is not None
            lists = ranked.recommend(batch.feedback.histories, max(length, shortlist), exclude)
            items, scores, past = (part.cpu().numpy() for part in (*lists, batch.past))
            places = reranked(reranker, items, scores, [k] * len(items), attributes, past, shortlist)
            order = torch.from_numpy(places).to(lists.item_ids.device)
            return Recommendations(lists.item_ids.gather(1, order)[:, :length], lists.scores[:, :length])

        return replace(ranked, recommend=None, recommend_to_batch=recommend, log_prob=None, score=None, policy=None)

    return Contender(f"{base.name} + {reranker.label}", "reranked", load)
