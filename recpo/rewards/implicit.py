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
from scipy.linalg.lapack import dpotrf, dpotri
from scipy.sparse import csr_array
from torch import Tensor
from tqdm import tqdm

from recpo.artifacts.checksums import sha256
from recpo.artifacts.documents import describe_os_error
from recpo.artifacts.outputs import output_file
from recpo.base.errors import PositiveFloat, PositiveInt, RecpoError, Seed, validate_range, validate_ranges
from recpo.base.types import EvaluationBatch
from recpo.log.prepared import Prepared
from recpo.ops.exposures import mixed_auc
from recpo.ops.ranking import is_member, ndcg, ranked_hits
from recpo.policies.baseline import EasePolicy, ImplicitPolicy, options_of
from recpo.rewards.factors import plain
from recpo.rewards.graded import Chunk, chunks, chunks_of, mean_grade, no_equations, repeated, solve
from recpo.rewards.selection import VALIDATION_USERS, close_to_best, validation_batches

#: A policy that is fitted, and kept with an evaluation in one safetensors file with a checksum.
FittedPolicy = ImplicitPolicy | EasePolicy
_KINDS: Final = {own.__name__: own for own in (ImplicitPolicy, EasePolicy)}
_FILE_REMEDY: Final = "remove the file, it will be made again"
_K: Final = 10
_NDCG: Final = f"NDCG@{_K}"


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
    lists, order = list[Tensor](), list[Tensor]()
    graded = [model for model in models if isinstance(model, ImplicitPolicy) and model.graded]
    k = min(_K, data.num_items)
    for batch in validation_batches(data, models[0].max_history, VALIDATION_USERS):
        lists.append(torch.stack([_ndcg(model, batch, k).double() for model in models]))
        if graded:
            order.append(torch.stack([_mixed_auc(model, batch).double() for model in graded]))
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


def _ndcg(model: FittedPolicy, batch: EvaluationBatch, k: int) -> Tensor:
    """NDCG@k ``[B]`` on the positives of the period that may be listed; nan for a user without one."""
    slates = batch.feedback.slates
    assert slates.positive is not None
    new = slates.mask & slates.positive & ~is_member(slates.item_ids, batch.exclude)
    lists = model.recommend(batch.feedback.histories, k, batch.exclude).item_ids
    return ndcg(ranked_hits(lists, slates.item_ids, new), [_K])[:, 0]


def _mixed_auc(model: ImplicitPolicy, batch: EvaluationBatch) -> Tensor:
    """``AUC_mixed`` ``[B]``; nan for a user without a positive and another exposure."""
    users = model.fold_in(batch.feedback.histories)

    def score(items: Tensor) -> Tensor:
        return torch.einsum("br,bnr->bn", users, model.item_factors[(items - 1).clamp_min(0)])

    return mixed_auc(batch, model.num_items, score)


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
    """

    graded: ClassVar = False
    ranks: tuple[PositiveInt, ...] = (16, 64)
    unobserved: tuple[PositiveFloat, ...] = (0.03, 0.1, 0.3)
    ridges: tuple[PositiveFloat, ...] = (0.003, 0.01, 0.03)
    nu: float = 1.0
    sweeps: PositiveInt = 10
    seed: Seed = 0
    max_history: PositiveInt | None = None

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
    graded = options.graded
    if graded:
        mean_grade(data)  # refuses a log without grades
    name, read = ("allrank", chunks) if graded else ("implicit_als", positive_chunks)
    grid = list(product(options.unobserved, options.ridges))
    first, others = options.ranks[0], options.ranks[1:]
    events = sum(int(shard["targets"]) for shard in data.manifest["shards"]["train"])
    read_per_model = events * options.sweeps
    total = read_per_model * len(grid)
    with tqdm(total=total, desc=name, unit="event", unit_scale=True, disable=None if progress else True) as bar:
        parts = repeated(partial(read, data, bar.update), bar.update)

        def fit(rank: int, unobserved: float, ridge: float) -> ImplicitPolicy:
            """One model."""
            items = np.random.default_rng(options.seed).normal(0.0, 0.1 / np.sqrt(rank), (data.num_items, rank))
            users = int(data.manifest["num_users"])
            for _ in range(options.sweeps):
                items = sweep(parts(), items, unobserved, ridge, options.nu, users)
            model = ImplicitPolicy(
                data.num_items,
                rank=rank,
                unobserved=unobserved,
                ridge=ridge,
                nu=options.nu,
                max_history=options.max_history or int(data.manifest["max_context"]),
                graded=graded,
            )
            model.item_factors = torch.from_numpy(items.astype(np.float32))
            return model.eval()

        models = [fit(first, *pair) for pair in grid]
        best, values = best_on_validation(data, models)
        chosen, tried = models[best], _tried(models, values)
        if others:
            weights = sorted(weight for weight in options.unobserved if weight >= chosen.unobserved)[:2]
            bar.total += read_per_model * len(others) * len(weights)
            larger = [chosen, *(fit(rank, weight, chosen.ridge) for rank, weight in product(others, weights))]
            best, values = best_on_validation(data, larger)
            chosen = larger[best]
            tried += _tried(larger[1:], values[1:])
    chosen.facts = {"options": plain(options), "tried": tried}
    return chosen


def _tried(models: Sequence[ImplicitPolicy], values: Sequence[Mapping[str, float | None]]) -> list[dict[str, Any]]:
    """The options of the models that were selected from, and what they are selected by."""
    selected = [{name: getattr(model, name) for name in ("rank", "unobserved", "ridge")} for model in models]
    return [options | dict(value) for options, value in zip(selected, values, strict=True)]


def positive_chunks(data: Prepared, finished: Callable[[int], object] = lambda _: None) -> Iterator[Chunk]:
    """The positive pairs of the training period, each with the target 1, in chunks with all pairs of their users."""
    for user, item, read in positive_pairs(data):
        yield from chunks_of(user, item, np.ones(len(user)), data.num_items)
        finished(read)


def sweep(
    parts: Iterator[Chunk], items: np.ndarray, unobserved: float, ridge: float, nu: float, num_users: int
) -> np.ndarray:
    """One alternation: every user given the items, then every item given the users.

    Args:
        parts: positive pairs.
        items: ``[V, r]``.
        unobserved: weight of the pairs without a positive event.
        ridge: before it is scaled by frequencies.
        nu: exponent of the frequencies.
        num_users: U, users without a positive included.
    """

    def scaled(counts: np.ndarray, others: int) -> np.ndarray:
        """The ridge of users or items with ``counts [n]`` positives of ``others``, ``[n, 1]``."""
        return np.asarray(ridge * (counts + unobserved * others) ** nu)[:, None]

    total, counts = no_equations(*items.shape), np.zeros(len(items))
    of_items, of_users = items.T @ items, np.zeros((items.shape[1],) * 2)
    for chunk in parts:
        mine = chunk.of_users(items[chunk.items], chunk.grade)
        users = solve(mine, scaled(np.diff(chunk.starts), len(items)), unobserved * of_items)
        of_users += users.T @ users
        total.add(chunk.items, chunk.of_items(users, chunk.grade))
        counts[chunk.items] += np.bincount(chunk.item, minlength=len(chunk.items))
    return solve(total, scaled(counts, num_users), unobserved * of_users)


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
