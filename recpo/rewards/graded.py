"""Alternating least squares on graded events, with biases, one shard at a time.

Minimizes ``sum over the events of (g - mean - b_u - b_i - p_u · q_i)^2 + ridge (sum_u |(p_u, b_u)|^2 + sum_i |(q_i,
b_i)|^2)``. Given the items, every user is a ridge regression on ``[q_i, 1]``; given the users, every item is one on
``[p_u, 1]``. A sweep solves both exactly, so the objective never increases. The ridge is one constant, not one per
event: it is the weight of a prior that does not grow with the data. A sweep is one pass over the shards. All events of
a user are in one shard, so the users of a chunk are solved, added to the equations of their items, and dropped. Memory
holds one shard and the equations of the items, ``V (r + 1) (r + 4) / 2`` numbers.

This is our own code because the `implicit` library (0.7.2, 2023) gives every unobserved pair the target 0, has no
biases, and keeps the complete matrix in memory.

The normal equations of a user are ``A_u = sum over the events of y_i y_iᵀ`` and ``b_u = sum of residual y_i``. Each
outer product is computed once per item, not once per event, and only its upper triangle (``Chunk``): a sparse matrix of
users by items times a matrix of items by ``d (d + 1) / 2`` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final, Literal, NamedTuple, Self

import numpy as np
import torch
from scipy.sparse import csr_array
from threadpoolctl import ThreadpoolController

from recpo.base.errors import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RecpoError,
    Seed,
    validate_ranges,
)
from recpo.base.feedback import GRADES
from recpo.log.prepared import Period, Prepared, run_change
from recpo.rewards.factors import Factors

# options of priors that features of items or users join
SIDE_OPTIONS: Final = ("item_features", "item_factors", "user_features", "user_factors")
# events in one chunk of users; a user is never split
CHUNK_EVENTS: Final = 1 << 18
# a period of at most so many events, some 50 MB, stays in memory between the sweeps; else each sweep reads the shards
KEPT_EVENTS: Final = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FactorOptions:
    """Options of a factor model. The validation period selects among several ranks and ridges."""

    method: Literal["variational", "als"] = "variational"
    """variational keeps a posterior of every user and item and learns their priors from the data (Lim and Teh, 2007;
    ``recpo.rewards.variational``); als is alternating least squares with one ridge
    (``recpo.rewards.graded``)"""
    ranks: Sequence[NonNegativeInt] | None = None
    """numbers of factors ``r`` to try; null = 8, 16 and 0, with als 4, 8 and 16; for a held-out period, 8. With 0, a
    grade is the sum of the averages of user and item, shrunk toward the mean or what their features say"""
    ridges: Sequence[PositiveFloat] = (1.0, 2.0, 4.0, 8.0)
    """ridges that als tries: the weight of the squared factors and biases, relative to a weight of 1 per event"""
    consumption: Sequence[NonNegativeInt] | None = None
    """numbers of consumption features to try (``recpo.rewards.prior_features``): who was shown what, whatever the
    grades were, gives every user and item a prior mean. The first rank is fitted without and with them, and the
    validation period decides. null = 0 and 16; with als, and for a held-out period, 0. Only for variational"""
    item_features: bool | None = None
    """features of the items give every user and item a prior mean, beside consumption: true or false; null = where the
    prepared data have features of items, both are tried; with als, and for a held-out period, false. Only for
    variational"""
    user_features: bool | None = None
    """features of the users give every user a prior mean, beside the history: true or false; null = where the prepared
    data have features of users, they are tried with the best of the other priors; with als, and for a held-out period,
    false. Only for variational"""
    item_factors: NonNegativeInt | None = None
    """so many components of the features of the items are the factors of an item, and none are learned; 0 = they are
    learned; null = where the prepared data have features of items, 8 and 32 are tried, too; with als, and for a
    held-out period, 0. Only for variational"""
    user_factors: NonNegativeInt | None = None
    """the same of users: so many components of their features are the factors of a user"""
    sweeps: PositiveInt = 20
    """passes over the training events per model"""
    warm_up: PositiveInt | None = None
    """passes before the priors are learned, for which the first factors contain no evidence; null = 3, and where a
    learned prior hardly leaves a factor, also 10. Only for variational"""
    selection_events: PositiveInt = 500_000
    """of a larger log, models are tried on users with so many training events, evenly spaced, and the best one is
    fitted again to all. Not with als, whose best ridge depends on the number of events"""
    seed: Seed = 0
    """seed of the initial item factors"""
    max_history: PositiveInt | None = None
    """number of history events that a fold-in reads; null = as many as the prepared data keep per user
    (``max_context``)"""
    uncertainty: bool = True
    """keep the covariances that bounds need: ``V (r + 1)^2`` numbers"""
    lower_bound: NonNegativeFloat | None = None
    """the model's own lists rank by the expected grade minus this many standard deviations of its posterior. null = 1,
    with als 2 (its ridges do not estimate the uncertainty), without ``uncertainty`` 0: constants for all data, because
    estimates of their gain from a log are noisier than the gain (docs/rewards.md). ``tilt`` and ``FactorReward`` have
    separate options for bounds"""
    period: Period = "train"
    """period whose events are fitted. A model of valid or test has not seen the events that policies and rewards
    learned from (train), so it can compare their lists as a ``FactorReward``. No period is left to select its rank,
    so there is one rank, and the method is variational"""

    def __post_init__(self) -> None:
        validate_ranges(self)
        if self.method not in ("variational", "als"):
            raise RecpoError(
                f"method is {self.method!r}; it is variational or als", field="method", code="unknown_name"
            )
        for name in ("ranks", "ridges", "consumption"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise RecpoError(f"{name} is empty; give at least one", field=name, code="empty")
        given_priors = {"consumption": any(self.consumption or ())}
        given_priors |= {name: bool(getattr(self, name)) for name in (*SIDE_OPTIONS, "warm_up")}
        for name, given in given_priors.items():
            if self.method == "als" and given:
                raise RecpoError(
                    f"{name} is an option of priors, and als has one ridge toward 0: set method to variational, or "
                    f"{name} to null",
                    field=name,
                    code="conflicting_options",
                )
        if self.user_factors and self.item_factors:
            raise RecpoError(
                "user_factors and item_factors are both true: one side is a regression on the factors of the other, so "
                "set one of them to null",
                field="item_factors",
                code="conflicting_options",
            )
        if self.lower_bound and not self.uncertainty:
            raise RecpoError(
                f"lower_bound {self.lower_bound:g} needs uncertainty: true; set one of the two",
                field="lower_bound",
                code="conflicting_options",
            )
        if self.period not in ("train", "valid", "test"):
            raise RecpoError(
                f"period is {self.period!r}; it is train, valid or test", field="period", code="unknown_name"
            )
        several = len(self.grid) > 1 or len(self.consumption or (0,)) > 1
        if self.period != "train" and (self.method != "variational" or several):
            raise RecpoError(
                f"period is {self.period}: what is tried is compared on the validation period, which is no comparison "
                "for a model of held-out events; set method to variational, and one rank and consumption, or null",
                field="period",
                code="conflicting_options",
            )

    def of(self, model: Factors) -> Self:
        """The options that fit a model like this one, without a choice."""
        chosen = model.facts["chosen"]
        priors = {name: chosen[name] for name in SIDE_OPTIONS}
        if chosen["ridge"] is not None:
            return replace(self, ranks=(chosen["rank"],), ridges=(chosen["ridge"],), **priors)
        priors |= {"consumption": (chosen["consumption"],), "warm_up": chosen["warm_up"]}
        return replace(self, ranks=(chosen["rank"],), **priors)

    @property
    def bound(self) -> float:
        """``lower_bound``, or its default."""
        if self.lower_bound is not None:
            return self.lower_bound
        return 0.0 if not self.uncertainty else 2.0 if self.method == "als" else 1.0

    @property
    def grid(self) -> list[tuple[int, float | None]]:
        """The pairs of rank and ridge to try; None = the ridge is learned."""
        if self.user_factors or self.item_factors:
            return [(0, None)]
        if self.method == "variational":
            return [(rank, None) for rank in self.ranks or ((8, 16, 0) if self.period == "train" else (8,))]
        return list(product(self.ranks or (4, 8, 16), self.ridges))

    def priors(self, has_features: bool) -> list[tuple[int, bool]]:
        """Pairs of a number of consumption features and whether the features of the items join them.

        All are tried with the first rank, and the best one with the others.

        Args:
            has_features: there are features of items.
        """
        if self.item_factors:
            return [(0, True)]
        joined: Sequence[bool] = (False, True) if has_features and self._tries_priors else (False,)
        if self.item_features is not None:
            joined = (self.item_features,)
        return list(product(self.consumption or ((0, 16) if self._tries_priors else (0,)), joined))

    def tries_items(self, has_features: bool) -> bool:
        """Whether the features of the items are tried as their factors.

        Args:
            has_features: there are features of items.
        """
        is_open = self.item_factors is None and self.item_features is not False and not self.user_factors
        return is_open and has_features and self._tries_priors

    def tries_users(self, has_features: bool) -> bool:
        """Whether the features of the users are tried beside a prior without them.

        Args:
            has_features: there are features of users.
        """
        return self.user_features is None and not self.user_factors and has_features and self._tries_priors

    @property
    def tries_late_priors(self) -> bool:
        """Whether the first rank is fitted once more if hardly a factor is left."""
        return self._tries_priors and self.warm_up is None and self.grid[0][0] > 0 and len(self.grid) > 1

    @property
    def _tries_priors(self) -> bool:
        return self.method == "variational" and self.period == "train"


class Chunk(NamedTuple):
    """Graded events of some users, with all events of each, user by user.

    Attributes:
        users: the users.
        starts: ``[n + 1]``; the events of the n-th user are ``starts[n] .. starts[n + 1]``.
        items: the items that occur.
        item: ``[N]``, indices into ``items``.
        grade: ``[N]``.
    """

    users: np.ndarray
    starts: np.ndarray
    items: np.ndarray
    item: np.ndarray
    grade: np.ndarray

    def of(self, rows: np.ndarray) -> Chunk:
        """The events of the users ``rows``, ascending indices into ``users``."""
        counts, inside = np.diff(self.starts), np.zeros(len(self.users), bool)
        inside[rows] = True
        kept = np.repeat(inside, counts)
        present, place = np.unique(self.item[kept], return_inverse=True)
        starts = np.append(0, np.cumsum(counts[rows])).astype(np.int32)
        return Chunk(self.users[rows], starts, self.items[present], place.astype(np.int32), self.grade[kept])

    @property
    def user(self) -> np.ndarray:
        """``[N]``, indices into ``users``."""
        return np.repeat(np.arange(len(self.users)), np.diff(self.starts))

    def matrix(self, values: np.ndarray) -> csr_array:
        """Users by items, with the ``values [N]`` of the events, whose arrays it shares; an event is an entry."""
        return csr_array((values, self.item, self.starts), (len(self.users), len(self.items)))

    def of_users(self, items: np.ndarray, target: np.ndarray) -> Equations:
        """Equations of the users: sums over their events of ``row rowᵀ`` and ``target row``.

        Args:
            items: rows of the items that occur, ``[len(items), d]``.
            target: ``[N]``.
        """
        return self.of_moments(Equations(products(items), items), target)

    def of_items(self, users: np.ndarray, target: np.ndarray) -> Equations:
        """Equations of the items, from the rows ``[n, d]`` of the users."""
        return self.of_moments(Equations(products(users), users), target, of_items=True)

    def of_moments(self, table: Equations, target: np.ndarray, *, of_items: bool = False) -> Equations:
        """Sums, over the events of every user or item, of a table with one row per item or user.

        Args:
            table: the values to sum, and the values to sum after multiplication with the target.
            target: ``[N]``.
            of_items: the table has one row per user, and the sums are per item.
        """
        ones, targets = self.matrix(np.ones(len(target))), self.matrix(target)
        if of_items:
            return Equations(ones.T @ table.left, targets.T @ table.right)
        return Equations(ones @ table.left, targets @ table.right)


#: Reads all chunks, as often as it is called.
Parts = Callable[[], Iterator[Chunk]]


class Items(NamedTuple):
    """``[q_i, 1]`` as ``rows [V, r + 1]``, and ``bias [V]``, float64."""

    rows: np.ndarray
    bias: np.ndarray


def chunks(
    data: Prepared, finished: Callable[[int], object] = lambda _: None, period: Period = "train"
) -> Iterator[Chunk]:
    """The events of a period with known grades, in chunks that contain all events of their users.

    Args:
        data: prepared data.
        finished: called with the number of events that were read.
        period: the period; events that a held-out period only has as context do not count.
    """
    grades, names = np.array(GRADES), ["user_index", "item_index", "feedback", "is_target"]
    held_out = (data.columns(period, shard, names) for shard in range(data.num_shards(period)))
    for columns in data.train_columns(names) if period == "train" else held_out:
        user, item, level, is_target = columns.values()
        grade = grades[level]
        known = ~np.isnan(grade) & is_target
        yield from chunks_of(user[known], item[known] - 1, grade[known], data.num_items)
        finished(len(user))


def repeated(parts: Parts, finished: Callable[[int], object]) -> Parts:
    """The same chunks as often as the result is called; those of a small period are only read once.

    Args:
        parts: reads all chunks.
        finished: called with the number of events of a chunk that was not read again.
    """
    kept: list[Chunk] = []

    def again() -> Iterator[Chunk]:
        if kept:
            for chunk in kept:
                yield chunk
                finished(len(chunk.grade))
            return
        passed, events = list[Chunk](), 0
        for chunk in parts():
            events += len(chunk.grade)
            passed.append(chunk)
            if events > KEPT_EVENTS:
                passed.clear()
            yield chunk
        kept.extend(passed)

    return again


def of_some_users(parts: Parts, share: float) -> Iterator[Chunk]:
    """Chunks with a share of the users of every chunk, evenly spaced."""
    for chunk in parts():
        count = max(1, round(share * len(chunk.users)))
        yield chunk.of(np.arange(count) * len(chunk.users) // count)


def chunks_of(user: np.ndarray, item: np.ndarray, grade: np.ndarray, num_items: int) -> Iterator[Chunk]:
    """Yields chunks with all events of their users, at most ``CHUNK_EVENTS`` unless one user has more.

    Args:
        user: ``[N]``, with the events of a user next to each other.
        item: ``[N]``, 0 .. V - 1.
        grade: ``[N]``.
        num_items: V.
    """
    starts = np.append(np.flatnonzero(run_change(user)), len(user)) if len(user) else np.zeros(1, np.int64)
    begin = 0
    while begin < len(starts) - 1:
        end = int(np.searchsorted(starts, starts[begin] + CHUNK_EVENTS, side="right")) - 1
        end = max(end, begin + 1)
        part = slice(starts[begin], starts[end])
        # the index of each item in this chunk: a table of the size of the catalog is cheaper than sorting the events
        present = np.zeros(num_items, bool)
        present[item[part]] = True
        items, place = np.flatnonzero(present), (np.cumsum(present, dtype=np.int32) - 1)[item[part]]
        own = (starts[begin : end + 1] - starts[begin]).astype(np.int32)
        yield Chunk(user[starts[begin:end]], own, items, place, grade[part])
        begin = end


def user_weights(
    chunk: Chunk, items: Items, mean: float, ridge: float | np.ndarray, pull: float | np.ndarray = 0.0
) -> np.ndarray:
    """``[p_u, b_u]`` of the chunk's users given the items, ``[n, r + 1]``; ``pull`` as in ``ridge_regression``."""
    target = chunk.grade - mean - items.bias[chunk.items][chunk.item]
    system = chunk.of_users(items.rows[chunk.items], target)
    return solve(Equations(system.left, system.right + pull), ridge)


def sweep(parts: Iterator[Chunk], items: Items, mean: float, ridge: float) -> Items:
    """One alternation: every user given the items, then every item given the users."""
    total = no_equations(*items.rows.shape)
    for chunk in parts:
        users = user_weights(chunk, items, mean, ridge)
        target = chunk.grade - mean - users[chunk.user, -1]
        total.add(chunk.items, chunk.of_items(_with_one(users[:, :-1]), target))
    weights = solve(total, ridge)
    return Items(_with_one(weights[:, :-1]), weights[:, -1])


@contextmanager
def one_thread() -> Iterator[None]:
    """Work on many small matrices takes longer by several threads than by one: they wait for each other.

    Where other processes use the cores, too, it can take ten times as long. Holds for PyTorch, NumPy and SciPy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _linear_algebra().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


@lru_cache
def _linear_algebra() -> ThreadpoolController:
    """The BLAS libraries of this process."""
    return ThreadpoolController().select(user_api="blas")


def first_factors(num_items: int, rank: int, seed: int) -> np.ndarray:
    """Small random factors ``[V, r]``."""
    return np.random.default_rng(seed).normal(0.0, 0.1, (num_items, rank))


def _with_one(factors: np.ndarray) -> np.ndarray:
    return np.concatenate([factors, np.ones((len(factors), 1))], 1)


def float_tensor(values: np.ndarray) -> torch.Tensor:
    """A tensor of float32."""
    return torch.from_numpy(values.astype(np.float32, copy=False))


def plain_factors(data: Prepared, items: Items, mean: float, ridge: float, options: FactorOptions) -> Factors:
    """A model that can fold in and predict, without training users and without bounds."""
    return Factors(
        mean=mean,
        item_factors=float_tensor(items.rows[:, :-1]),
        item_bias=float_tensor(items.bias),
        factor_variance=torch.zeros(items.rows.shape[0], items.rows.shape[1] - 1),
        history_prior=torch.zeros(items.rows.shape),
        ridge=ridge,
        bias_ridge=ridge,
        user_factors=None,
        item_covariance=None,
        noise=0.0,
        catalog_checksum=data.catalog_checksum,
        max_history=options.max_history or int(data.manifest["max_context"]),
        feedback=data.feedback,
    )


def mean_grade(data: Prepared, period: Period = "train") -> tuple[float, int]:
    """Mean and number of the known grades of a period.

    Raises:
        RecpoError: no grade is known.
    """
    total, count = 0.0, 0
    for chunk in chunks(data, period=period):
        total, count = total + float(chunk.grade.sum()), count + len(chunk.grade)
    if not count:
        raise RecpoError(
            f"{data.root}: no event of the period {period} has a grade, so there is nothing to fit: prepare the log "
            "with watch times or labels",
            code="empty",
            field=str(data.root),
        )
    return total / count, count


def fit_items(parts: Parts, num_items: int, mean: float, rank: int, ridge: float, options: FactorOptions) -> Items:
    """Item factors and biases after all sweeps over ``parts``."""
    first = first_factors(num_items, rank, options.seed)
    items = Items(_with_one(first), np.zeros(len(first)))
    for _ in range(options.sweeps):
        items = sweep(parts(), items, mean, ridge)
    return items


def finish(
    data: Prepared, items: Items, model: Factors, options: FactorOptions, finished: Callable[[int], object]
) -> Factors:
    """The model completed: one more pass computes the users, the noise and the covariances of the items."""
    width, mean, ridge = items.rows.shape[1], model.mean, model.ridge
    users = np.zeros((int(data.manifest["num_users"]), width), np.float32)
    left = no_equations(len(items.rows), width).left if options.uncertainty else None
    squared, count = 0.0, 0
    for chunk in chunks(data, finished):
        weights = user_weights(chunk, items, mean, ridge)
        users[chunk.users] = weights
        rows = items.rows[chunk.items][chunk.item]
        predicted = mean + items.bias[chunk.items][chunk.item] + np.einsum("nd,nd->n", weights[chunk.user], rows)
        squared, count = squared + float(np.square(chunk.grade - predicted).sum()), count + len(chunk.grade)
        if left is not None:
            left[chunk.items] += chunk.of_items(_with_one(weights[:, :-1]), chunk.grade).left
    return replace(
        model,
        user_factors=torch.from_numpy(users),
        item_covariance=None if left is None else torch.from_numpy(inverses(left, width, ridge)),
        noise=squared / max(1, count),
        users_checksum=data.users_checksum,
        lower_bound=options.bound,
    )


# number of regressions whose full matrices are in memory at a time: they stay in the cache
_MATRICES: Final = 1 << 10


class Equations(NamedTuple):
    """Equations of ``n`` regressions, float64: ``left [n, d (d + 1) / 2]`` (upper triangles) and ``right [n, d]``."""

    left: np.ndarray
    right: np.ndarray

    def add(self, rows: np.ndarray, part: Equations) -> None:
        """Adds the equations of the regressions ``rows``, which are distinct."""
        self.left[rows] += part.left
        self.right[rows] += part.right


def no_equations(count: int, width: int) -> Equations:
    """Zeros for ``count`` regressions of ``width`` weights."""
    return Equations(np.zeros((count, width * (width + 1) // 2)), np.zeros((count, width)))


def products(rows: np.ndarray) -> np.ndarray:
    """Upper triangles ``[m, d (d + 1) / 2]`` of ``row rowᵀ``, in the order of ``np.triu_indices``."""
    width = rows.shape[1]
    found, begin = np.empty((len(rows), width * (width + 1) // 2)), 0
    for column in range(width):
        end = begin + width - column
        np.multiply(rows[:, column, None], rows[:, column:], out=found[:, begin:end])
        begin = end
    return found


def normal_matrices(left: np.ndarray, width: int, ridge: float | np.ndarray = 0.0) -> np.ndarray:
    """``A + ridge I`` as ``[n, d, d]``; a ridge ``[n, d]`` is one for every weight of each."""
    matrices = np.take(left, _places(width), axis=1)  # several times as fast as two assignments to triangles
    matrices.reshape(len(left), -1)[:, :: width + 1] += ridge
    return matrices


@lru_cache
def _places(width: int) -> np.ndarray:
    """``[d, d]``: where an upper triangle has the entries of a symmetric matrix."""
    places, (first, second) = np.empty((width, width), np.intp), np.triu_indices(width)
    places[first, second] = places[second, first] = np.arange(len(first))
    return places


def solve(system: Equations, ridge: float | np.ndarray) -> np.ndarray:
    """The weights ``[n, d]``; 0 where a regression has no event.

    Args:
        system: the equations.
        ridge: one, one for every weight ``[d]``, or those of every regression, ``[n, d]``.
    """
    weights = np.empty_like(system.right)
    for part in in_cache(len(weights)):
        own = ridge[part] if isinstance(ridge, np.ndarray) and ridge.ndim == 2 else ridge
        matrices = normal_matrices(system.left[part], weights.shape[1], own)
        weights[part] = np.linalg.solve(matrices, system.right[part, :, None])[..., 0]
    return weights


def inverses(left: np.ndarray, width: int, ridge: float) -> np.ndarray:
    """``(A + ridge I)^-1`` as ``[n, d, d]`` float32."""
    result = np.empty((len(left), width, width), np.float32)
    for part in in_cache(len(left)):
        result[part] = np.linalg.inv(normal_matrices(left[part], width, ridge))
    return result


def in_cache(count: int) -> Iterator[slice]:
    """So many regressions, a few at a time."""
    return (slice(begin, begin + _MATRICES) for begin in range(0, count, _MATRICES))
