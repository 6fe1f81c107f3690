"""Variational Bayesian factorization of graded events: factors with a posterior, and priors learned from the data.

``g = mean + p_u · q_i + b_u + b_i + e`` with ``e ~ N(0, noise)``, ``z_u = (p_u, b_u) ~ N(m_z, S_z)`` and ``w_i = (q_i,
b_i) ~ N(m_w, S_w)`` (Lim and Teh, "Variational Bayesian Approach to Movie Rating Prediction", KDD Cup 2007). The
posterior is approximated by a product of one Gaussian per user and one per item. Given the items, a user's Gaussian is
the posterior of a linear regression with uncertain rows: their covariances are added to the normal matrix, so an
uncertain item has little influence. A sweep updates every user, then every item, then the means and covariances of both
priors and the noise (empirical Bayes). The prior means may be linear in features of users and items:
``m_z + W_zᵀ x_u`` and ``m_w + W_wᵀ y_i``, with slopes ``W`` that have a prior of
their own, ``tr(W S^-1 Wᵀ) / 2``, and are ridge regressions of the posterior means on the features. Only the maximum
rank remains to be chosen: a full covariance drives factors that the data do not support to 0. It also prunes factors
that the data support weakly, because a product of two posteriors overstates what is unknown (Nakajima and Sugiyama,
"Theoretical Analysis of Bayesian Matrix Factorization", JMLR 12, 2011); after more sweeps without learned priors
(``warm_up``), it prunes them later.

At the end, users are expressed in units of their prior (``z = m_z + L z'`` with ``S_z = L Lᵀ``; ``L`` is folded into
the items), which turns ``Factors.fold_in`` into a ridge regression with a ridge of ``noise``.

Both sides use the same code: with ``a_u = (p, b, 1)`` and ``ã_i = (q, 1, b)`` a grade is ``mean + a_u · ã_i``, and the
other side only needs the moments ``E[ã ãᵀ]`` of an item. Memory holds one shard and the moments of the items' users,
``V (r + 2) (r + 3) / 2`` numbers.

Where users have a table, their factors may also be given by it: ``m_z`` of the factors is the components of the table
themselves (``factors_by_table``). Every item is then a regression on what is known of its users, which needs no taste
of a single user: it is what a log with few positives, or few events per user, can tell. In the same way the factors of
items may be given by their table: every user is then a regression on what is known of the items, where a single item
has too few events to tell its factors.

Features: ``recpo.rewards.prior_features``.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch

from recpo.base.features import SIDES, FeatureSchema
from recpo.log.feature_columns import TableSide
from recpo.log.prepared import Period, Prepared
from recpo.policies.grade_factors import linear_in_features
from recpo.rewards import graded
from recpo.rewards.factors import Factors
from recpo.rewards.prior_features import PriorFeatures, user_features

#: sweeps before the priors are learned: the initial factors contain no evidence for them
WARM_UP: Final = 3
#: the same, to keep factors that would be pruned
LATE_WARM_UP: Final = 10
#: variance of ``p · q``, in units of the noise, below which factors may have been pruned
_LEAST_VARIANCE: Final = 0.03
#: weight of the squared slopes of prior means, in units of the prior's precision
SLOPE_RIDGE: Final = 1.0
# the initial prior is a ridge of this many events
_FIRST_RIDGE: Final = 2.0
# variance of factors around the components of a table, where these are the factors; that of the largest one is 1
_AROUND_TABLE: Final = 0.01


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
    """A fitted model.

    Attributes:
        items: the posterior of the items.
        users: the prior of the users.
        of_items: the prior of the items from which the last sweep computed ``items``.
        noise: variance of the noise.
        features: what the prior means are linear in.
    """

    items: Gaussians
    users: Prior
    of_items: Prior
    noise: float
    features: PriorFeatures


def moments(side: Gaussians) -> graded.Equations:
    """``E[ã ãᵀ]`` of ``ã = (factors, 1, bias)`` as upper triangles, and the means ``ã``: ``[n, d + 1]``."""
    width, covariance, begin = side.mean.shape[1], side.covariance, 0
    mean = np.insert(side.mean, width - 1, 1.0, axis=1)
    products = graded.products(mean)
    for row in range(width - 1):  # the 1 has no variance
        end = begin + width - row
        products[:, begin : end - 1] += covariance[:, row, row:-1]
        products[:, end] += covariance[:, row, -1]
        begin = end + 1
    products[:, -1] += covariance[:, -1, -1]
    return graded.Equations(products, mean)


def posterior(sums: graded.Equations, prior: Prior, features: np.ndarray, noise: float) -> Gaussians:
    """The Gaussians of one side, given the other.

    Args:
        sums: for every user or item, sums over its events of the moments of the other side, and of ``(g - mean) ã``.
        prior: the prior of this side.
        features: ``[n, f]``.
        noise: variance of a grade around its expectation.
    """
    width = sums.right.shape[1] - 1
    full = graded.normal_matrices(sums.left, width + 1)
    precision = np.linalg.inv(prior.covariance)
    right = sums.right[:, :width] - full[:, :width, width] + noise * precision @ prior.mean
    right += features @ (prior.slopes @ (noise * precision))
    system = torch.from_numpy(full[:, :width, :width] + noise * precision)  # positive definite
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(system)).numpy()
    return Gaussians(np.einsum("nij,nj->ni", inverse, right), noise * inverse)


def squared_errors(sums: graded.Equations, side: Gaussians) -> float:
    """``E[sum over the events of (g - mean - a · ã)^2]`` minus ``sum (g - mean)^2``."""
    width = side.mean.shape[1]
    full = graded.normal_matrices(sums.left, width + 1)
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


@graded.one_thread()
def fit_items(
    parts: graded.Parts,
    num_items: int,
    mean: float,
    rank: int,
    options: graded.FactorOptions,
    features: PriorFeatures | None = None,
    *,
    of_table: TableSide | None = None,
) -> Fit:
    """All sweeps over the events.

    Args:
        parts: the events.
        num_items: V.
        mean: mean of the grades.
        rank: maximum number of factors.
        options: numbers of sweeps and seed.
        features: what the prior means are linear in; None = nothing.
        of_table: the side whose factors are the ``rank`` components of its table (``factors_by_table``); None = both
            sides are learned.
    """
    features = PriorFeatures.none(num_items) if features is None else features
    width, start = rank + 1, graded.first_factors(num_items, rank, options.seed) * (of_table is None)
    start = start if of_table != "item" else features.items[:, -rank:]
    items = Gaussians(np.pad(start, ((0, 0), (0, 1))), np.zeros((num_items, width, width)))
    noise = grade_variance(parts(), mean)
    first = noise / _FIRST_RIDGE * np.eye(width)
    columns = features.items.shape[1], features.num_user_columns
    of_items, users = (Prior(np.zeros(width), first, np.zeros((number, width))) for number in columns)
    users, of_items = _given(users, of_items, of_table)
    before = of_items
    for sweep in range(options.sweeps):
        table, total = moments(items), graded.no_equations(num_items, width + 1)
        among, summed = (Summed(width, number) for number in columns)
        squared, events = 0.0, 0
        for chunk in parts():
            shown = graded.Equations(table.left[chunk.items], table.right[chunk.items])
            sums, own = chunk.of_moments(shown, chunk.grade - mean), features.of_users(chunk)
            of_users = graded.no_equations(len(own), width + 1)
            for part in graded.in_cache(len(own)):
                of_part = graded.Equations(sums.left[part], sums.right[part])
                side = posterior(of_part, users, own[part], noise)
                of_users.left[part], of_users.right[part] = moments(side)
                summed.add(side, own[part])
            total.add(chunk.items, chunk.of_moments(of_users, chunk.grade - mean, of_items=True))
            squared += float(np.square(chunk.grade - mean).sum())
            events += len(chunk.grade)
        items, before = posterior(total, of_items, features.items, noise), of_items
        if sweep >= (options.warm_up or WARM_UP):
            among.add(items, features.items)
            users, of_items = _given(summed.prior(), among.prior(), of_table)
        noise = (squared + squared_errors(total, items)) / events
    return Fit(items, users, before, noise, features)


def _given(users: Prior, items: Prior, of_table: TableSide | None) -> tuple[Prior, Prior]:
    """The priors of users and items, of which one may have the factors of its table."""
    if of_table == "user":
        return factors_by_table(users), items
    return users, factors_by_table(items) if of_table == "item" else items


def factors_by_table(prior: Prior) -> Prior:
    """The prior of a side whose factors are the components of its table, the last features; with the same bias."""
    rank = len(prior.mean) - 1
    slopes = np.concatenate([np.zeros((len(prior.slopes), rank)), prior.slopes[:, -1:]], 1)
    slopes[len(slopes) - rank :, :rank] = np.eye(rank)
    variances = [*[_AROUND_TABLE] * rank, prior.covariance[-1, -1]]
    return Prior(np.append(np.zeros(rank), prior.mean[-1]), np.diag(variances), slopes)


def grade_variance(parts: Iterator[graded.Chunk], mean: float) -> float:
    """Variance of the known grades."""
    squared, count = 0.0, 0
    for chunk in parts:
        squared, count = squared + float(np.square(chunk.grade - mean).sum()), count + len(chunk.grade)
    # if all grades are equal, any noise explains the data
    return max(squared / count, 1e-6)


def plain_factors(data: Prepared, fit: Fit, mean: float, options: graded.FactorOptions) -> Factors:
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
    centers = np.concatenate([rotation.T @ centers[:-1], lower[-1:, -1:] * centers[-1:]]).T
    known = fit.features
    of_history, of_users = np.split(centers, [known.history.shape[1]])
    items, covariance = fit.items.mean @ change.T + shift, change @ fit.items.covariance @ change.T
    of_new = change @ fit.of_items.covariance @ change.T
    schema = FeatureSchema(
        item=() if known.table is None else known.table.schema,
        user=() if known.users is None else known.users.table.schema,
    )
    return Factors(
        mean=mean + float(fit.users.mean[-1]),
        item_factors=graded.float_tensor(items[:, :-1]),
        item_bias=graded.float_tensor(items[:, -1]),
        factor_variance=graded.float_tensor(np.diagonal(covariance, 0, 1, 2)[:, :-1]),
        history_prior=graded.float_tensor(known.history @ of_history),
        user_prior=None if known.users is None else graded.float_tensor(known.users.table.weights(of_users)),
        item_prior=graded.float_tensor(_item_prior(fit, change, shift, of_history)),
        prior_variance=graded.float_tensor(np.diag(of_new)[:-1]),
        prior_covariance=graded.float_tensor(of_new / fit.noise) if options.uncertainty else None,
        features=schema,
        feature_checksums={side: data.features_checksum(side) for side in SIDES if schema.of(side)},
        ridge=fit.noise,
        bias_ridge=fit.noise / float(lower[-1, -1]) ** 2,
        user_factors=None,
        item_covariance=graded.float_tensor(covariance / fit.noise) if options.uncertainty else None,
        noise=fit.noise,
        catalog_checksum=data.catalog_checksum,
        max_history=options.max_history or int(data.manifest["max_context"]),
        feedback=data.feedback,
        lower_bound=options.bound,
    )


def is_pruned(model: Factors) -> bool:
    """Whether no factor is left, or hardly one: the variance of ``p · q`` is less than 3 % of that of the noise.

    Around its prior mean, a user's factor has a variance of about 1, and the mean is one of ``history_prior``.
    """
    of_users = 1 + model.history_prior[:, :-1].square().mean(0)
    return float((model.item_factors.square().mean(0) * of_users).sum()) <= _LEAST_VARIANCE * model.noise


def _item_prior(fit: Fit, change: np.ndarray, shift: np.ndarray, of_history: np.ndarray) -> np.ndarray:
    """``Factors.item_prior``: prior means of an item without events, in the units of the stored factors.

    Its consumption features are 0, as those of the fitted items without events.
    """
    table, slopes = fit.features.table, fit.of_items.slopes
    constant = np.concatenate([change @ fit.of_items.mean + shift, np.zeros(of_history.shape[1])])
    if table is None:
        return constant[None]
    columns = table.axes.shape[1]
    of_items, of_history = slopes[-columns:] @ change.T, fit.features.history_scale * of_history[-columns:]
    both = np.concatenate([of_items, of_history], 1)
    return np.concatenate([table.weights(both), (constant - table.center @ both)[None]])


def finish(
    data: Prepared, model: Factors, finished: Callable[[int], object] = lambda _: None, period: Period = "train"
) -> Factors:
    """The model with the users of a period, each folded in from all events in it; the others have their prior means."""
    rows = np.concatenate([model.item_factors.double().numpy(), np.ones((model.num_items, 1))], 1)
    items, variance = graded.Items(rows, model.item_bias.double().numpy()), model.factor_variance.double().numpy()
    history = model.history_prior.double().numpy()
    prior = np.array([model.ridge] * model.rank + [model.bias_ridge])
    users = prior_means(data, model, np.arange(int(data.manifest["num_users"]))).astype(np.float32)
    for chunk in graded.chunks(data, finished, period):
        uncertain = np.zeros((len(chunk.users), model.rank + 1))
        np.add.at(uncertain[:, :-1], chunk.user, variance[chunk.items][chunk.item])
        pull = prior * (user_features(chunk, history) + prior_means(data, model, chunk.users))
        users[chunk.users] = graded.user_weights(chunk, items, model.mean, prior + uncertain, pull)
    return replace(model, user_factors=graded.float_tensor(users), users_checksum=data.users_checksum)


def prior_means(data: Prepared, model: Factors, users: np.ndarray) -> np.ndarray:
    """``[n, r + 1]``: the part of the prior means of some users that the user table gives; 0 if it is not read."""
    if model.user_prior is None:
        return np.zeros((len(users), model.rank + 1))
    features = data.user_features(users).tensors()
    return linear_in_features(model.features.user, features, model.user_prior.double()).numpy()
