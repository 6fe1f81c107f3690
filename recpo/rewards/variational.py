"""Variational Bayesian factorization of graded events: factors with a posterior, and priors learned from the data.

``g = mean + p_u · q_i + b_u + b_i + e`` with ``e ~ N(0, noise)``, ``z_u = (p_u, b_u) ~ N(m_z, S_z)`` and ``w_i = (q_i,
b_i) ~ N(m_w, S_w)`` (Lim and Teh, "Variational Bayesian Approach to Movie Rating Prediction", KDD Cup 2007). The
posterior is approximated by a product of one Gaussian per user and one per item. Given the items, a user's Gaussian is
the posterior of a linear regression with uncertain rows: their covariances are added to the normal matrix, so an
uncertain item has little influence. A sweep updates every user, then every item, then the means and covariances of both
priors and the noise (empirical Bayes). The prior means may be linear in features of users and items:
``m_z + W_zᵀ x_u`` and ``m_w + W_wᵀ y_i``, with slopes ``W`` that have a prior of
their own, ``tr(W S^-1 Wᵀ) / 2``, and are ridge regressions of the posterior means on the features. Only the maximum
rank remains to be chosen: a full covariance drives factors that the data do not support to 0.

At the end, users are expressed in units of their prior (``z = m_z + L z'`` with ``S_z = L Lᵀ``; ``L`` is folded into
the items), which turns ``Factors.fold_in`` into a ridge regression with a ridge of ``noise``.

Both sides use the same code: with ``a_u = (p, b, 1)`` and ``ã_i = (q, 1, b)`` a grade is ``mean + a_u · ã_i``, and the
other side only needs the moments ``E[ã ãᵀ]`` of an item. Memory holds one shard and the moments of the items' users,
``V (r + 2) (r + 3) / 2`` numbers.

Features that prior means of factors are linear in: consumption, and the features of the items.

**Consumption** is who was shown what, whatever the grades were. Of the matrix of users by items that is 1 where an item
was shown to a user, rows and columns are divided by ``sqrt(degree + DAMPING)``. Its first singular vectors are what
activity and popularity explain; the next ``n`` become vectors of the items, divided by ``sqrt(degree + DAMPING)`` once
more, as in correspondence analysis.

**The features of the items** (category, tags, numbers, vectors of the item table) are one matrix of items by columns,
of which the principal components remain.

The features of a user are in both cases the damped mean of the vectors of the history
(``recpo.ops.linear_algebra.damped_mean``), so a history is all that is needed to compute them: for a training user, for
a new one, and in an exported program.

The vectors come from subspace iterations, over the shards and over pieces of the table. Memory holds one shard, one
piece and some columns per item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array, hstack

from recpo.base.features import Categories, Category, Feature, of_type
from recpo.base.types import Features
from recpo.log.prepared import Period, Prepared
from recpo.ops.linear_algebra import DAMPING
from recpo.rewards.factors import Factors
from recpo.rewards.graded import (
    Chunk,
    Equations,
    FactorOptions,
    Items,
    chunks,
    first_items,
    no_equations,
    normal_matrices,
    repeated,
    user_weights,
)

#: principal components of the features of the items
TABLE_COLUMNS: Final = 64
# products with a matrix, and columns beyond those that are kept: with these, a subspace iteration converges
_PRODUCTS: Final = 8
_MORE_COLUMNS: Final = 16
# items whose table is a matrix at a time
_ROWS: Final = 1 << 14
#: times that ``of_consumption`` and ``of_table`` read all chunks
CONSUMPTION_PASSES, TABLE_PASSES = _PRODUCTS + 3, 1


class PriorFeatures(NamedTuple):
    """What prior means are linear in.

    Attributes:
        items: ``[V, m]``, features of the items.
        history: ``[V, n]``; the damped mean over a history is the features of its user.
    """

    items: np.ndarray
    history: np.ndarray

    @classmethod
    def none(cls, num_items: int) -> PriorFeatures:
        """No feature: prior means that are equal for all users, and for all items."""
        return cls(np.zeros((num_items, 0)), np.zeros((num_items, 0)))

    def beside(self, other: PriorFeatures) -> PriorFeatures:
        """The features of both."""
        return PriorFeatures(*(np.concatenate(columns, 1) for columns in zip(self, other, strict=True)))


def user_features(chunk: Chunk, history: np.ndarray) -> np.ndarray:
    """``[n, columns]``: damped means of the rows of ``history [V, columns]`` over the events of the chunk's users."""
    if not history.shape[1]:
        return np.zeros((len(chunk.users), 0))
    counts = np.diff(chunk.pairs.starts)[:, None]
    shape = (len(chunk.users), len(chunk.items))
    events = csr_array((np.ones(len(chunk.item)), chunk.item, chunk.pairs.starts), shape)
    means: np.ndarray = events @ history[chunk.items] / (counts + DAMPING)
    return means


def of_consumption(parts: Callable[[], Iterable[Chunk]], num_items: int, columns: int, seed: int) -> PriorFeatures:
    """Features from the events of chunks, each of mean square 1 among items with events, and among users.

    Args:
        parts: all chunks, as often as it is called.
        num_items: V.
        columns: number of singular vectors; fewer where there are no more.
        seed: of the start of the iteration.
    """
    if not columns:
        return PriorFeatures.none(num_items)
    degree = np.zeros(num_items)
    for chunk in parts():
        degree[chunk.items] += _exposures(chunk).sum(0)
    damped = 1 / np.sqrt(degree + DAMPING)

    def squared(basis: np.ndarray) -> np.ndarray:
        result = np.zeros_like(basis)
        for chunk in parts():
            matrix, of_items = _exposures(chunk), damped[chunk.items, None]
            users = matrix @ (of_items * basis[chunk.items]) / (matrix.sum(1)[:, None] + DAMPING)
            result[chunk.items] += of_items * (matrix.T @ users)
        return result

    vectors = _leading(squared, num_items, columns + 1, seed)[:, 1:] * damped[:, None]
    of_users = np.sqrt(_user_squares(parts(), vectors))
    return PriorFeatures(vectors / np.sqrt(np.square(vectors).sum(0) / (degree > 0).sum()), vectors / of_users)


def of_table(
    parts: Callable[[], Iterable[Chunk]], schema: Sequence[Feature], features: Features, seed: int
) -> PriorFeatures:
    """Features from those of the items: at most ``TABLE_COLUMNS`` principal components, in their relative sizes.

    A category is one column per code, of size 1 where the item has it; of a set of categories, an item's columns have a
    squared length of 1 together; a number is a column, and a vector has a squared length of 1 on average. A missing
    value is 0. The largest component has the mean square 1 among items, and among users.

    Args:
        parts: all chunks, as often as it is called.
        schema: fitted features of items.
        features: their values for the items 1..V.
        seed: of the start of the iteration.
    """
    count = len(features.codes)
    sizes = [float(vector.nan_to_num().square().sum(1).double().mean().sqrt()) for vector in features.vectors]

    def pieces() -> Iterator[csr_array]:
        for begin in range(0, count, _ROWS):
            yield _columns(schema, _rows(features, begin), sizes)

    center = np.sum([piece.sum(0) for piece in pieces()], 0) / count

    def squared(basis: np.ndarray) -> np.ndarray:
        products = sum(piece.T @ (piece @ basis) for piece in pieces())
        result: np.ndarray = products - count * np.outer(center, center @ basis)
        return result

    axes = _leading(squared, len(center), TABLE_COLUMNS, seed)
    found = np.concatenate([piece @ axes for piece in pieces()]) - center @ axes
    if not found.shape[1]:
        return PriorFeatures.none(count)
    of_users = np.sqrt(_user_squares(parts(), found).max())
    return PriorFeatures(found / np.sqrt(np.square(found).mean(0).max()), found / of_users)


def _rows(features: Features, begin: int) -> Features:
    return features.map(lambda column: column[begin : begin + _ROWS])


def _columns(schema: Sequence[Feature], features: Features, sizes: Sequence[float]) -> csr_array:
    """Some items by columns; ``sizes`` are those of the vectors."""
    count, blocks = len(features.codes), list[csr_array]()
    coded: list[Category | Categories] = [*of_type(schema, Category), *of_type(schema, Categories)]
    for one, codes in zip(coded, [*features.codes.T[:, :, None], *features.lists], strict=True):
        row, place = codes.numpy().nonzero()
        share = 1 / np.sqrt(np.bincount(row, minlength=count)[row])
        blocks.append(csr_array((share, (row, codes.numpy()[row, place])), (count, int(one.num_codes or 0))))
    dense = [features.numbers, *(v / size if size else v for v, size in zip(features.vectors, sizes, strict=True))]
    blocks += [csr_array(column.double().nan_to_num().numpy()) for column in dense]
    return hstack(blocks, format="csr")


def _exposures(chunk: Chunk) -> csr_array:
    """1 where an item was shown to a user, however often."""
    shape = (len(chunk.users), len(chunk.items))
    # a copy, because repeats are removed in place
    matrix = csr_array((np.ones(len(chunk.item)), chunk.item, chunk.pairs.starts), shape, copy=True)
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def _user_squares(parts: Iterable[Chunk], history: np.ndarray) -> np.ndarray:
    """Mean square of every feature of the users."""
    squares, count = np.zeros(history.shape[1]), 0
    for chunk in parts:
        squares += np.square(user_features(chunk, history)).sum(0)
        count += len(chunk.users)
    return squares / count


def _leading(squared: Callable[[np.ndarray], np.ndarray], size: int, columns: int, seed: int) -> np.ndarray:
    """The eigenvectors ``[size, columns]`` with the largest eigenvalues, without those that are only rounding.

    Args:
        squared: the product with a positive semidefinite matrix ``[size, size]``.
        size: its size.
        columns: number of vectors; fewer where there are no more.
        seed: of the start of the iteration.
    """
    start = np.random.default_rng(seed).normal(size=(size, min(size, columns + _MORE_COLUMNS)))
    basis, _ = np.linalg.qr(start)
    for _ in range(_PRODUCTS):
        basis, _ = np.linalg.qr(squared(basis))
    values, rotation = np.linalg.eigh(basis.T @ squared(basis))
    vectors = basis @ rotation[:, ::-1][:, :columns]
    vectors = vectors[:, values[::-1][:columns] > 1e-9 * values[-1]]
    return vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(vectors.shape[1])])


#: sweeps before the priors are learned: the initial factors contain no evidence for them
WARM_UP: Final = 3
#: weight of the squared slopes of prior means, in units of the prior's precision
SLOPE_RIDGE: Final = 1.0
# the initial prior is a ridge of this many events
_FIRST_RIDGE: Final = 2.0


class Gaussians(NamedTuple):
    """One Gaussian per user or item: ``mean [n, d]`` of (factors, bias), ``covariance [n, d, d]``."""

    mean: np.ndarray
    covariance: np.ndarray


class Prior(NamedTuple):
    """The prior of the users or of the items: ``N(mean + slopesᵀ x, covariance)`` of one with the features ``x``.

    Attributes:
        mean: ``[d]``.
        covariance: ``[d, d]``.
        slopes: ``[f, d]``.
    """

    mean: np.ndarray
    covariance: np.ndarray
    slopes: np.ndarray


class Fit(NamedTuple):
    """A fitted model: the items, the prior of the users, the variance of the noise, and ``PriorFeatures.history``."""

    items: Gaussians
    users: Prior
    noise: float
    history: np.ndarray


def moments(side: Gaussians) -> Equations:
    """``E[ã ãᵀ]`` of ``ã = (factors, 1, bias)`` as upper triangles, and the means ``ã``: ``[n, d + 1]``."""
    count, width = side.mean.shape
    mean = np.insert(side.mean, width - 1, 1.0, axis=1)
    full = mean[:, :, None] * mean[:, None, :]
    uncertain = [*range(width - 1), width]  # the 1 has no variance
    full[np.ix_(range(count), uncertain, uncertain)] += side.covariance
    first, second = np.triu_indices(width + 1)
    return Equations(full[:, first, second], mean)


def posterior(sums: Equations, prior: Prior, features: np.ndarray, noise: float) -> Gaussians:
    """The Gaussians of one side, given the other.

    Args:
        sums: for every user or item, sums over its events of the moments of the other side, and of ``(g - mean) ã``.
        prior: the prior of this side.
        features: ``[n, f]``.
        noise: variance of a grade around its expectation.
    """
    width = sums.right.shape[1] - 1
    full = normal_matrices(sums.left, width + 1, 0.0)
    precision = np.linalg.inv(prior.covariance)
    right = sums.right[:, :width] - full[:, :width, width] + noise * precision @ prior.mean
    right += features @ (prior.slopes @ (noise * precision))
    inverse = np.linalg.inv(full[:, :width, :width] + noise * precision)
    return Gaussians(np.einsum("nij,nj->ni", inverse, right), noise * inverse)


def squared_errors(sums: Equations, side: Gaussians) -> float:
    """``E[sum over the events of (g - mean - a · ã)^2]`` minus ``sum (g - mean)^2``."""
    width = side.mean.shape[1]
    full = normal_matrices(sums.left, width + 1, 0.0)
    own = np.concatenate([side.mean, np.ones((len(side.mean), 1))], 1)
    second = own[:, :, None] * own[:, None, :]
    second[:, :width, :width] += side.covariance
    return float((second * full).sum() - 2 * (own * sums.right).sum())


class Summed:
    """Sums over the Gaussians of one side, from which its prior is learned.

    Args:
        width: d.
        columns: number of features f.
    """

    def __init__(self, width: int, columns: int) -> None:
        self.count, self.means, self.second = 0, np.zeros(width), np.zeros((width, width))
        self.features, self.squares = np.zeros(columns), np.zeros((columns, columns))
        self.products = np.zeros((columns, width))

    def add(self, side: Gaussians, features: np.ndarray) -> None:
        """Adds Gaussians and their features ``[n, f]``."""
        self.count += len(side.mean)
        self.means += side.mean.sum(0)
        self.second += side.mean.T @ side.mean + side.covariance.sum(0)
        self.features += features.sum(0)
        self.squares += features.T @ features
        self.products += features.T @ side.mean

    def prior(self) -> Prior:
        """The prior that maximizes the likelihood, with ``- SLOPE_RIDGE / 2 tr(slopes covariance^-1 slopesᵀ)``.

        That is a ridge regression of the means on the features, whatever the covariance is.
        """
        mean, center = self.means / self.count, self.features / self.count
        squares = self.squares - np.outer(center, center) * self.count
        products = self.products - np.outer(center, mean) * self.count
        slopes = np.linalg.solve(squares + SLOPE_RIDGE * np.eye(len(center)), products)
        explained = slopes.T @ products / self.count
        # an unsupported factor may shrink, but not to a singular matrix
        covariance = self.second / self.count - np.outer(mean, mean) - explained + 1e-9 * np.eye(len(mean))
        return Prior(mean - center @ slopes, covariance, slopes)


def fit_items(
    data: Prepared,
    mean: float,
    rank: int,
    options: FactorOptions,
    finished: Callable[[int], object],
    period: Period = "train",
    features: PriorFeatures | None = None,
) -> Fit:
    """All sweeps over the events of a period.

    Args:
        data: prepared data.
        mean: mean of the grades.
        rank: maximum number of factors.
        options: number of sweeps and seed.
        finished: called with the number of events that were read.
        period: the period.
        features: what the prior means are linear in; None = nothing.
    """
    features = PriorFeatures.none(data.num_items) if features is None else features
    width, start = rank + 1, first_items(data.num_items, rank, options.seed)
    items = Gaussians(
        np.concatenate([start.rows[:, :-1], start.bias[:, None]], 1), np.zeros((data.num_items, width, width))
    )
    noise = grade_variance(data, mean, period)
    first = noise / _FIRST_RIDGE * np.eye(width)
    of_items, users = (Prior(np.zeros(width), first, np.zeros((side.shape[1], width))) for side in features)
    parts = repeated(partial(chunks, data, finished, period), finished)
    for sweep in range(options.sweeps):
        table, total = moments(items), no_equations(data.num_items, width + 1)
        summed, among = Summed(width, features.history.shape[1]), Summed(width, features.items.shape[1])
        squared, events = 0.0, 0
        for chunk in parts():
            sums, own = user_sums(chunk, table, mean), user_features(chunk, features.history)
            part = posterior(sums, users, own, noise)
            add_item_sums(total, chunk, part, mean)
            summed.add(part, own)
            squared += float(np.square(chunk.grade - mean).sum())
            events += len(chunk.grade)
        items = posterior(total, of_items, features.items, noise)
        if sweep >= WARM_UP:
            among.add(items, features.items)
            users, of_items = summed.prior(), among.prior()
        noise = (squared + squared_errors(total, items)) / events
    return Fit(items, users, noise, features.history)


def user_sums(chunk: Chunk, table: Equations, mean: float) -> Equations:
    """Sums over the events of the chunk's users: moments of their items, and ``(g - mean) ã``."""
    return chunk.pairs.of_moments(Equations(table.left[chunk.items], table.right[chunk.items]), chunk.grade - mean)


def add_item_sums(total: Equations, chunk: Chunk, users: Gaussians, mean: float) -> None:
    """Adds the events of a chunk to the sums of the items."""
    table = moments(users)
    part = chunk.pairs.of_moments(table, chunk.grade - mean, of_items=True)
    total.left[chunk.items] += part.left
    total.right[chunk.items] += part.right


def grade_variance(data: Prepared, mean: float, period: Period) -> float:
    """Variance of the known grades of a period."""
    squared, count = 0.0, 0
    for chunk in chunks(data, period=period):
        squared, count = squared + float(np.square(chunk.grade - mean).sum()), count + len(chunk.grade)
    # if all grades are equal, any noise explains the data
    return max(squared / count, 1e-6)


def plain_factors(data: Prepared, fit: Fit, mean: float, options: FactorOptions) -> Factors:
    """The fitted model with users in units of their prior, without training users.

    With ``z = m + L z'``, ``L`` lower triangular: ``p · q + b_u + b_i = p' · (L_ppᵀ q + l_b) + L_bb b' + (b_i + m_p · q
    + m_b)``, where ``l_b`` is the last row of ``L`` without ``L_bb``. The factors are rotated until the mean covariance
    of the items is diagonal, so that one variance per factor contains most of it.
    """
    lower = np.linalg.cholesky(fit.users.covariance)
    # (q, b_i) -> (q', b_i'): a linear map and a shift
    change, shift = np.eye(len(lower)), np.zeros(len(lower))
    change[:-1, :-1], shift[:-1], change[-1, :-1] = lower[:-1, :-1].T, lower[-1, :-1], fit.users.mean[:-1]
    _, rotation = np.linalg.eigh((change @ fit.items.covariance.mean(0) @ change.T)[:-1, :-1])
    change[:-1], shift[:-1] = rotation.T @ change[:-1], rotation.T @ shift[:-1]
    centers = np.linalg.solve(lower, fit.users.slopes.T)
    centers = np.concatenate([rotation.T @ centers[:-1], lower[-1:, -1:] * centers[-1:]])
    items, covariance = fit.items.mean @ change.T + shift, change @ fit.items.covariance @ change.T
    variances = np.diagonal(covariance, 0, 1, 2)[:, :-1]
    factors, bias, variance, uncertainty, history_prior = (
        torch.from_numpy(values.astype(np.float32))
        for values in (items[:, :-1], items[:, -1], variances, covariance / fit.noise, fit.history @ centers.T)
    )
    return Factors(
        mean=mean + float(fit.users.mean[-1]),
        item_factors=factors,
        item_bias=bias,
        factor_variance=variance,
        history_prior=history_prior,
        ridge=fit.noise,
        bias_ridge=fit.noise / float(lower[-1, -1]) ** 2,
        user_factors=None,
        item_covariance=uncertainty if options.uncertainty else None,
        noise=fit.noise,
        catalog_checksum=data.catalog_checksum,
        max_history=options.max_history or int(data.manifest["max_context"]),
        feedback=data.feedback,
        lower_bound=options.lower_bound,
    )


def finish(
    data: Prepared, model: Factors, finished: Callable[[int], object] = lambda _: None, period: Period = "train"
) -> Factors:
    """The model with the users of a period, each folded in from all of their events in it."""
    rows = np.concatenate([model.item_factors.double().numpy(), np.ones((model.num_items, 1))], 1)
    items, variance = Items(rows, model.item_bias.double().numpy()), model.factor_variance.double().numpy()
    history = model.history_prior.double().numpy()
    prior = np.array([model.ridge] * model.rank + [model.bias_ridge])
    users = np.zeros((int(data.manifest["num_users"]), model.rank + 1), np.float32)
    for chunk in chunks(data, finished, period):
        uncertain = np.zeros((len(chunk.users), model.rank + 1))
        np.add.at(uncertain[:, :-1], chunk.user, variance[chunk.items][chunk.item])
        pull = prior * user_features(chunk, history)
        users[chunk.users] = user_weights(chunk, items, model.mean, prior + uncertain, pull)
    return replace(model, user_factors=torch.from_numpy(users), users_checksum=data.users_checksum)
