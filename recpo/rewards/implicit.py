"""Recommenders that know which items a user had, and not only how they were graded: implicit ALS, AllRank and EASE.

Implicit ALS and EASE read positives and nothing else. Training uses the log's own positive events
(``recpo.base.feedback.FeedbackRule``). A history only has feedback levels; there, events of the upper half of the
levels count as positive. That uses more of the history, and on the validation period of a simulated log (200,000
events) NDCG@10 is higher than with the highest quarter alone (implicit ALS .228 against .221, EASE .216 against .209)
or with all events (.204, .202).

Implicit alternating least squares: positives are ones, and all other pairs are zeros with a small weight.

Hu, Koren and Volinsky, "Collaborative Filtering for Implicit Feedback Datasets" (ICDM 2008), with the objective and the
tuning of Rendle, Krichene, Zhang and Koren, "Revisiting the Performance of iALS on Item Recommendation Benchmarks"
(RecSys 2022): over the set S of pairs (user, item) with a positive event

    sum over S of (1 - x_u · y_i)^2 + unobserved * sum over all pairs of (x_u · y_i)^2
        + ridge * (sum_u (|S_u| + unobserved V)^nu |x_u|^2 + sum_i (|S_i| + unobserved U)^nu |y_i|^2).

AllRank: the same with grades. S has every graded event, and its grade ``g`` (``recpo.base.feedback.GRADES``) instead of
1: ``(g - x_u · y_i)^2``. A factorization of grades alone (``recpo.rewards.graded``) does not know that an item which a
user never had is probably not to the user's taste; implicit ALS does not know what the user thought of the others.

Steck, "Training and Testing of Recommender Systems on Data Missing Not at Random" (KDD 2010): its AllRank-Regression,
with the imputed value 0, the grade of a dislike.

EASE: a linear model from all positives of a user to every item, in closed form.

Steck, "Embarrassingly Shallow Autoencoders for Sparse Data" (WWW 2019, arXiv 1905.03375). Let X be the matrix of users
by items with 1 for each positive pair. ``argmin_B |X - X B|^2 + ridge |B|^2`` with a diagonal of 0 is ``B = I - P
diag(1 / diag P)``, ``P = (Xᵀ X + ridge I)^-1``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from scipy.linalg.lapack import dposv, dpotrf, dpotri
from scipy.sparse import csr_array
from torch import Tensor
from tqdm import tqdm

from recpo.artifacts.checksums import sha256
from recpo.artifacts.documents import describe_os_error
from recpo.artifacts.outputs import output_file
from recpo.base.errors import PositiveFloat, PositiveInt, RecpoError, Seed, validate_range, validate_ranges
from recpo.base.types import EvaluationBatch
from recpo.log.prepared import Prepared
from recpo.ops.exposures import mixed_aucs
from recpo.ops.ranking import is_member, ndcg, ranked_hits
from recpo.policies import catalog_search
from recpo.policies.baseline import EasePolicy, ImplicitPolicy, options_of
from recpo.rewards.factors import plain
from recpo.rewards.graded import chunks, mean_grade, one_thread
from recpo.rewards.selection import close_to_best, validation_batches

#: A policy that is fitted, and kept with an evaluation in one safetensors file with a checksum.
FittedPolicy = ImplicitPolicy | EasePolicy
_KINDS: Final = {own.__name__: own for own in (ImplicitPolicy, EasePolicy)}
_FILE_REMEDY: Final = "remove the file, it will be made again"
_K: Final = 10
_NDCG: Final = f"NDCG@{_K}"
_SELECTION_USERS: Final = 5_000  # of the validation period, evenly spaced
_PIECE: Final = 1 << 14  # events of a row whose factors are in memory at a time
_ALIKE: Final = 1.25  # most events of a row of a block, by the fewest
_NUMBERS: Final = 1 << 18  # of a block: 2 MiB


def positive_events(data: Prepared) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Users and items of the positive training events, in the pieces of ``Prepared.train_columns``; events read."""
    for columns in data.train_columns(["user_index", "item_index", "label", "dislike"]):
        positive = data.feedback.rule.positive(columns["label"], columns["dislike"])
        yield columns["user_index"][positive], columns["item_index"][positive], len(positive)


def positive_pairs(data: Prepared) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Users and items (from 0) of the distinct positive pairs of ``positive_events``, and the number of events read."""
    for user, item, read in positive_events(data):
        pairs = np.unique(user.astype(np.int64) * data.num_items + item.astype(np.int64) - 1)
        yield pairs // data.num_items, pairs % data.num_items, read


def best_on_validation(data: Prepared, models: Sequence[FittedPolicy]) -> tuple[int, list[dict[str, float | None]]]:
    """The index of the best model on the validation period, and what every model is selected by.

    The best one has the highest NDCG@10 on positives that are not of the user's past. Models that know grades must also
    order what was shown: of them, those count whose ``AUC_mixed`` is at most one standard error below the highest, if
    users have it. By ``AUC_mixed`` alone, few users decide by noise; by NDCG@10 alone, what was likely to be shown
    counts more than its grades. For a single model without validation positives: 0 and None.

    Raises:
        RecpoError: there are several models and no validation positive.
    """
    lists, order, k = list[Tensor](), list[Tensor](), min(_K, data.num_items)
    for batch in validation_batches(data, models[0].max_history, _SELECTION_USERS):
        users = [
            model.fold_in(batch.feedback.histories) if isinstance(model, ImplicitPolicy) else None for model in models
        ]
        known = list(zip(models, users, strict=True))
        lists.append(torch.stack([_ndcg(*one, batch, k) for one in known]).double())
        graded = [partial(_scores, one, own) for one, own in known if isinstance(one, ImplicitPolicy) and one.graded]
        order += [mixed_aucs(batch, data.num_items, graded)] if graded else []
    ndcgs, mixed = (_of_all(parts, len(models)) for parts in (lists, order))
    if not ndcgs.shape[1]:
        if len(models) > 1:
            raise RecpoError(
                f"{data.root}: no validation user has a positive event with an item that is new to them, so nothing "
                f"says which of {len(models)} models is best: prepare more events, or give one value of each option",
                code="empty",
            )
        return 0, [{_NDCG: None}]
    values = [{_NDCG: value} for value in ndcgs.mean(1).tolist()]
    if mixed.shape[1]:
        values = [one | {"AUC_mixed": value} for one, value in zip(values, mixed.mean(1).tolist(), strict=True)]
    good = close_to_best(mixed).nonzero()[:, 0].tolist()
    return max(good, key=ndcgs.mean(1).tolist().__getitem__), values


def _of_all(parts: Sequence[Tensor], count: int) -> Tensor:
    """``[count, U]`` of the users who have a value."""
    every = torch.cat([*parts, torch.zeros(count, 0, dtype=torch.float64)], 1)
    return every[:, ~every.isnan().any(0)]


def _ndcg(model: FittedPolicy, users: Tensor | None, batch: EvaluationBatch, k: int) -> Tensor:
    """NDCG@k ``[B]`` on the positives of the period that may be listed; nan for a user without one."""
    slates = batch.feedback.slates
    assert slates.positive is not None
    new = slates.mask & slates.positive & ~is_member(slates.item_ids, batch.exclude)
    if isinstance(model, ImplicitPolicy) and users is not None:
        lists = catalog_search.top_k(users, model.output_vectors(), k, batch.exclude)
    else:
        lists = model.recommend(batch.feedback.histories, k, batch.exclude)
    return ndcg(ranked_hits(lists.item_ids, slates.item_ids, new), [_K])[:, 0]


def _scores(model: ImplicitPolicy, users: Tensor | None, items: Tensor) -> Tensor:
    assert users is not None
    return torch.einsum("br,bnr->bn", users, model.item_factors[(items - 1).clamp_min(0)])


@dataclass(frozen=True)
class ImplicitOptions:
    """Hyper-parameters of implicit ALS. The validation period selects among several values.

    Weights and ridges are selected together with the first rank, then the rank with these, as the paper advises: with a
    ridge scaled by frequencies, the best ridge hardly depends on the rank. The best weight may grow with it: a larger
    rank also tries the next larger weight.

    Args:
        ranks: numbers of factors to try.
        unobserved: weights of the pairs without a positive event to try (alpha_0 in the paper).
        ridges: ridges to try (lambda).
        nu: exponent of the frequencies that scale the ridge: 1 = per event, 0 = constant.
        sweeps: passes over the training events per model.
        seed: seed of the initial item factors.
        max_history: number of history events that a fold-in reads; null = as many as the prepared data keep per user.
        selection_events: of a larger log, models are tried on users with so many training events, and the best one is
            fitted again to all. Weight and ridge are per event, so they hardly depend on the number of users.
    """

    graded: ClassVar = False
    ranks: tuple[PositiveInt, ...] = (16, 64)
    unobserved: tuple[PositiveFloat, ...] = (0.03, 0.1, 0.3)
    ridges: tuple[PositiveFloat, ...] = (0.003, 0.01, 0.03)
    nu: float = 1.0
    sweeps: PositiveInt = 10
    seed: Seed = 0
    max_history: PositiveInt | None = None
    selection_events: PositiveInt = 200_000

    def __post_init__(self) -> None:
        _validate(self, "ranks", "unobserved", "ridges")

    def of(self, model: ImplicitPolicy) -> Self:
        """The options that fit a model like this one, without a choice."""
        return replace(self, ranks=(model.rank,), unobserved=(model.unobserved,), ridges=(model.ridge,))


@dataclass(frozen=True)
class AllRankOptions(ImplicitOptions):
    """Hyper-parameters of AllRank, as those of implicit ALS. There are more events, so the best weights are smaller."""

    graded: ClassVar = True
    unobserved: tuple[PositiveFloat, ...] = (0.003, 0.01, 0.03, 0.1)
    ridges: tuple[PositiveFloat, ...] = (0.01, 0.03, 0.1)


def _validate(options: ImplicitOptions | EaseOptions, *tried: str) -> None:
    """Raises ``RecpoError`` if an option is out of range, or there is no value to try of one of ``tried``."""
    validate_ranges(options)
    for name in tried:
        validate_range(getattr(options, name) != (), name, "must have at least one value", ())


def fit_implicit(
    data: Prepared,
    options: ImplicitOptions = ImplicitOptions(),
    *,
    progress: bool = False,
) -> ImplicitPolicy:
    """Fits implicit ALS on the positive pairs of the training period, or AllRank on its graded events.

    Args:
        data: prepared data.
        options: values to try, of which the best model is kept (``best_on_validation``); ``AllRankOptions`` = AllRank.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: there are several models and the validation period has no positive event; AllRank, and no event has
            a grade.
    """
    if options.graded:
        mean_grade(data)  # refuses a log without grades
    events = training_events(data, options.graded)
    grid = list(product(options.unobserved, options.ridges))
    first, others = options.ranks[0], options.ranks[1:]
    some = events if len(grid) == 1 and not others else events[_some_users(events, options.selection_events)]
    name = "allrank" if options.graded else "implicit_als"
    with tqdm(total=len(grid) * options.sweeps, desc=name, unit="sweep", disable=None if progress else True) as bar:
        fit = partial(_fitted, data, options, bar.update)
        models = [fit(some, first, *pair) for pair in grid]
        best, values = best_on_validation(data, models)
        chosen, tried = models[best], _tried(models, values)
        weights = sorted(weight for weight in options.unobserved if weight >= chosen.unobserved)[:2]
        larger = list(product(others, weights))
        bar.total += len(larger) * options.sweeps
        if larger:
            candidates = [chosen, *(fit(some, rank, weight, chosen.ridge) for rank, weight in larger)]
            best, values = best_on_validation(data, candidates)
            chosen = candidates[best]
            tried += _tried(candidates[1:], values[1:])
        if len(some.data) < len(events.data):
            bar.total += options.sweeps
            chosen = fit(events, chosen.rank, chosen.unobserved, chosen.ridge)
    chosen.facts = {"options": plain(options), "tried": tried}
    return chosen


def _tried(models: Sequence[ImplicitPolicy], values: Sequence[Mapping[str, float | None]]) -> list[dict[str, Any]]:
    """The options of the models that were selected from, and what they are selected by."""
    selected = [{name: getattr(model, name) for name in ("rank", "unobserved", "ridge")} for model in models]
    return [options | dict(value) for options, value in zip(selected, values, strict=True)]


def training_events(data: Prepared, graded: bool) -> csr_array:
    """Users by items: the graded training events with their grades, or the positive pairs with ones.

    An event is an entry, of 8 bytes; a user may have several of an item.
    """
    if graded:
        parts = [(part.users[part.user], part.items[part.item], part.grade) for part in chunks(data)]
    else:
        parts = [(user, item, np.ones(len(user))) for user, item, _ in positive_pairs(data)]
    user, item, target = (np.concatenate(column) for column in zip(*parts, strict=True))
    order, size = np.argsort(user, kind="stable"), (int(data.manifest["num_users"]), data.num_items)
    starts = np.append(0, np.cumsum(np.bincount(user, minlength=size[0])))
    index = np.int32 if len(user) < 2**31 else np.int64  # scipy takes the larger type of places and starts for both
    # made of rows, because entries of the same place would be added up otherwise
    return csr_array((target[order].astype(np.float32), item[order].astype(index), starts.astype(index)), shape=size)


def _some_users(events: csr_array, most: int) -> np.ndarray:
    """Users with about ``most`` events, evenly spaced among those who have any; all of them, if there are not more."""
    users = np.flatnonzero(np.diff(events.indptr))
    share = min(1.0, most / max(1, events.nnz))
    return users[np.arange(round(share * len(users))) * len(users) // max(1, round(share * len(users)))]


def _fitted(
    data: Prepared,
    options: ImplicitOptions,
    finished: Callable[[], object],
    events: csr_array,
    rank: int,
    unobserved: float,
    ridge: float,
) -> ImplicitPolicy:
    """One model of the events of some users; ``finished`` is called after every sweep."""
    items = np.random.default_rng(options.seed).normal(0.0, 0.1 / np.sqrt(rank), (data.num_items, rank))
    of_items = events.T.tocsr()
    for _ in range(options.sweeps):
        items = sweep(events, of_items, items, unobserved, ridge, options.nu)
        finished()
    model = ImplicitPolicy(
        data.num_items,
        rank=rank,
        unobserved=unobserved,
        ridge=ridge,
        nu=options.nu,
        max_history=options.max_history or int(data.manifest["max_context"]),
        graded=options.graded,
    )
    model.item_factors = torch.from_numpy(items.astype(np.float32))
    return model.eval()


def sweep(
    events: csr_array, of_items: csr_array, items: np.ndarray, unobserved: float, ridge: float, nu: float
) -> np.ndarray:
    """One alternation: every user given the items, then every item given the users.

    Args:
        events: users by items, with targets; an event is an entry.
        of_items: the same, items by users.
        items: ``[V, r]``.
        unobserved: weight of the pairs without an event.
        ridge: before it is scaled by frequencies.
        nu: exponent of the frequencies.
    """
    users = _side(events, items, unobserved, ridge, nu)
    return _side(of_items, users, unobserved, ridge, nu)


@one_thread()
def _side(events: csr_array, others: np.ndarray, unobserved: float, ridge: float, nu: float) -> np.ndarray:
    """The factors of all rows, given those of the columns; 0 without an event.

    Rows with about as many events are solved at once: sums of ``other otherᵀ`` are then products of dense matrices,
    which takes .4 of the time of a product with a sparse matrix and all outer products.
    """
    counts, factors = np.diff(events.indptr), np.zeros((events.shape[0], others.shape[1]))
    shared, order = unobserved * others.T @ others, np.argsort(counts, kind="stable")
    padded = np.pad(others, ((0, 1), (0, 0)))
    scaled = ridge * (counts + unobserved * events.shape[1]) ** nu
    for block in _blocks(counts[order], others.shape[1]):
        rows = order[block]
        left = np.repeat(shared[None], len(rows), 0)
        left.reshape(len(rows), -1)[:, :: len(shared) + 1] += scaled[rows, None]
        right = np.zeros((len(rows), len(shared)))
        for begin in range(0, int(counts[rows].max()), _PIECE):
            places = np.arange(begin, min(begin + _PIECE, int(counts[rows].max())))
            inside = places < counts[rows, None]
            places = np.where(inside, events.indptr[rows, None] + places, 0)
            known = np.take(padded, np.where(inside, events.indices[places], len(others)), 0)
            left += known.mT @ known
            right += np.einsum("nl,nld->nd", np.where(inside, events.data[places], 0.0), known)
        for row, matrix, vector in zip(rows, left, right, strict=True):  # a third of the time of torch.linalg
            factors[row] = dposv(matrix.T, vector, overwrite_a=1, overwrite_b=1)[1]
    return factors


def _blocks(counts: np.ndarray, rank: int) -> Iterator[slice]:
    """Cuts rows, ascending by their ``counts`` of events, into blocks of about as many; rows without one are left out.

    The matrices of a block, and the factors of its events, stay in the cache.
    """
    begin = int(np.searchsorted(counts, 1))
    while begin < len(counts):
        alike = int(np.searchsorted(counts, max(_ALIKE * counts[begin], counts[begin] + 2), side="right"))
        size = _NUMBERS // (rank * max(rank, int(counts[alike - 1])))
        end = min(alike, begin + max(1, size))
        yield slice(begin, end)
        begin = end


_FEW_ITEMS = 3_000


@dataclass(frozen=True)
class EaseOptions:
    """Hyper-parameters of EASE. The validation period selects the ridge.

    Args:
        ridges: ridges to try; null = 30, 100, 300 and 1000, or 100 alone above 3,000 items, where each takes long.
        max_items: a larger catalog is rejected: fitting needs about ``32 V^2`` bytes, which is 7.2 GB for 15,000 items,
            and each ridge takes ``V^3`` operations.
        max_history: number of history events that are read; null = as many as the prepared data keep per user.
    """

    ridges: tuple[PositiveFloat, ...] | None = None
    max_items: int = 15_000
    max_history: PositiveInt | None = None

    def __post_init__(self) -> None:
        _validate(self, "ridges")

    def of(self, model: EasePolicy) -> Self:
        """The options that fit a model like this one, without a choice."""
        chosen = max(model.facts["tried"], key=lambda one: one[_NDCG] or 0.0)
        return replace(self, ridges=(chosen["ridge"],))

    def ridges_for(self, num_items: int) -> tuple[float, ...]:
        """The ridges that are tried for a catalog of this size."""
        if self.ridges is not None:
            return self.ridges
        return (30.0, 100.0, 300.0, 1000.0) if num_items <= _FEW_ITEMS else (100.0,)

    def operations(self, num_items: int) -> float:
        """Multiplications and additions of a fit, nearly: those of the inverses."""
        return len(self.ridges_for(num_items)) * float(num_items) ** 3

    def memory(self, num_items: int) -> int:
        """Bytes that a fit needs, about: the co-occurrences, an inverse, and the weights of two ridges."""
        return 32 * num_items**2


def fit_ease(
    data: Prepared,
    options: EaseOptions = EaseOptions(),
    *,
    progress: bool = False,
) -> EasePolicy:
    """Fits on the positive pairs of the training period and keeps the ridge with the best validation NDCG@10.

    Args:
        data: prepared data.
        options: ridges to try, and the maximum catalog size.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: the catalog is too large, or there are several ridges and the validation period has no positive
            event.
    """
    if data.num_items > options.max_items:
        raise RecpoError(
            f"ease inverts a matrix of items by items, and {data.root} has {data.num_items:,} of them, above max_items "
            f"{options.max_items:,}: leave ease out, or raise max_items where 32 bytes * V^2 of memory are there",
            code="resources",
            field="max_items",
        )
    pairs, max_history = cooccurrences(data), options.max_history or int(data.manifest["max_context"])
    best: EasePolicy | None = None
    tried: list[float | None] = []
    ridges = options.ridges_for(data.num_items)
    for ridge in tqdm(ridges, desc="ease", unit="ridge", disable=None if progress else True):
        weights = torch.from_numpy(item_weights(pairs, ridge))
        model = EasePolicy(data.num_items, max_history=max_history).eval()
        model.weights = weights
        (value,) = (of_model[_NDCG] for of_model in best_on_validation(data, [model])[1])
        if value is None and len(ridges) > 1:
            raise RecpoError(
                f"{data.root}: no validation user has a positive event with an item that is new to them, so nothing "
                f"says which of {len(ridges)} ridges is best: prepare more events, or give one",
                code="empty",
                field="ridges",
            )
        # besides the best model, only one other is in memory: each is a matrix of items by items
        best = model if best is None or (value or 0.0) > max(known for known in tried if known is not None) else best
        tried.append(value)
    assert best is not None
    named = [{"ridge": ridge, _NDCG: value} for ridge, value in zip(ridges, tried, strict=True)]
    best.facts = {"options": plain(options), "tried": named}
    return best


def cooccurrences(data: Prepared) -> np.ndarray:
    """``Xᵀ X [V, V]``: the number of users with positive events of both items. One shard is in memory at a time."""
    total = np.zeros((data.num_items, data.num_items))
    for user, item, _ in positive_pairs(data):
        _, row = np.unique(user, return_inverse=True)
        pairs = csr_array((np.ones(len(user)), (row, item)), shape=(int(row.max(initial=-1)) + 1, data.num_items))
        total += (pairs.T @ pairs).toarray()
    return total


def item_weights(pairs: np.ndarray, ridge: float) -> np.ndarray:
    """``B [V, V]`` float32 of ``Xᵀ X``; its diagonal is 0."""
    matrix = pairs.copy(order="F")
    matrix[np.diag_indices_from(matrix)] += ridge
    # Cholesky in place: a third of the time of a general inverse, and no second matrix
    factor, wrong = dpotrf(matrix, lower=1, overwrite_a=1)
    inverse, also_wrong = dpotri(factor, lower=1, overwrite_c=1)
    assert not wrong
    assert not also_wrong
    diagonal = np.diag(inverse).copy()
    weights: np.ndarray = np.tril(inverse, -1).astype(np.float32)
    weights += weights.T
    weights /= -diagonal.astype(np.float32)
    return weights


def save_fitted(policy: FittedPolicy, path: Path | str) -> None:
    """Writes a file that appears complete or not at all: tensors, and options and facts as JSON.

    An existing file is replaced.
    """
    tensors = policy.state_dict()
    own = {"num_items": policy.num_items, **options_of(policy)}
    described = {"kind": type(policy).__name__, "options": own, "facts": policy.facts}
    content = json.dumps(described, sort_keys=True, allow_nan=False)
    checksum = sha256(save(tensors) + content.encode())
    with output_file(Path(path)) as working:  # one entry: safetensors writes several in any order
        working.write_bytes(save(tensors, {"recpo": f"{checksum} {content}"}))


def open_fitted(path: Path | str) -> FittedPolicy:
    """Reads a file that ``save_fitted`` wrote.

    Raises:
        RecpoError: there is no such file, it contains something else, or it is damaged.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        checksum, text = header["recpo"].split(" ", 1)
        described, tensors = json.loads(text), load(content)
        if sha256(save(tensors) + text.encode()) != checksum:
            raise RecpoError(
                f"{path} is not as it was written (its checksum differs); {_FILE_REMEDY}",
                code="damaged",
                field=str(path),
            )
        policy = _KINDS[described["kind"]](**described["options"])
        policy.load_state_dict(tensors, assign=True)  # a copy of a matrix of items by items may not fit
        policy.facts = described["facts"]
        return policy.eval()
    except OSError as error:
        raise RecpoError(describe_os_error(error, path), code="missing_file", field=str(path)) from error
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise RecpoError(
            f"{path} is damaged or no model of recpo ({error!r}); {_FILE_REMEDY}", code="damaged", field=str(path)
        ) from error
