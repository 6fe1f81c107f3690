"""Estimators of a policy's value from a log of single items or of slates, each one formula over rows, and their model.

Every row is one exposure: the context x, the item a that the logging policy showed with probability ``p(a | x)``, and
its reward r. The estimated value is ``V = E_x E_{a ~ pi(. | x)}[r(x, a)]``, the mean reward per exposure if the target
policy ``pi`` had chosen the items. All estimators here are sums of ratios of sums over rows,

    V = sum_j (sum_i numerator_ij) / (sum_i denominator_ij),

so a log is read in chunks, and only the sums are kept; for intervals and the coefficients of control variates, per
user.

For logs with a reward for each of several positions, ``SlateEstimator`` estimates the value of whole slates, ``V =
E[sum_s r_s]``, the expected sum of a slate's rewards. These estimators differ in their assumption about what the reward
of a position depends on, and so in how many weights of single positions, ``w_s = pi(a_s | x, a_<s) / p(a_s | x,
a_<s)``, they multiply. The weaker the assumption, the larger the variance.

``AdditiveRewardModel`` is the reward model of the direct method and the doubly robust estimators: fast, and without a
users x items matrix.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recpo.base.errors import (
    NonNegativeFloat,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    RecpoError,
    Seed,
    validate_range,
    validate_ranges,
)

FloatArray = NDArray[np.floating]
PropensitySource = Literal["logged", "uniform", "estimated"]

_USERS_PER_CONTROL = 10


class Rows(NamedTuple):
    """Logged exposures.

    Attributes:
        reward: ``[N]`` the reward r of the exposure.
        target: ``[N]`` probability ``pi(a | x)`` of the logged item under the target policy.
        propensity: ``[N]`` probability ``p(a | x) > 0`` of the logged item under the logging policy.
        q_hat: ``[N]`` a reward model's prediction for the logged item; None = there is no model.
        v_hat: ``[N]`` the model's value of the target policy in the row's context, ``E_{a ~ pi}[q_hat(x, a)]``, exact
            or as an unbiased Monte-Carlo estimate whose draws do not depend on the logged item. If the probabilities of
            the items sum to less than 1, the rest earns 0.
    """

    reward: FloatArray
    target: FloatArray
    propensity: FloatArray
    q_hat: FloatArray | None = None
    v_hat: FloatArray | None = None

    @property
    def weight(self) -> FloatArray:
        """Importance weights ``w = pi(a | x) / p(a | x)``, ``[N]``.

        Raises:
            RecpoError: a propensity is not above 0; an item that the logging policy never shows has no weight.
        """
        least = self.propensity.min(initial=np.inf)
        validate_range(least > 0, "propensity", "must be above 0 (leave other rows out)", least)
        return np.asarray(self.target / self.propensity)


#: Numerators and denominators ``[N]`` of an estimator's J ratios, per row; a denominator of None counts the rows.
Ratios = list[tuple[FloatArray, FloatArray | None]]


@dataclass(frozen=True)
class Estimator:
    """A sum of ratios of sums.

    Attributes:
        name: name in results and tables.
        ratios: the ratios whose sum is the estimate, of some rows.
        num_ratios: number of ratios, J.
        num_controls: how many of them, the last ones, are control variates: their expectation is 0, and each is
            subtracted with the coefficient that minimizes the variance over users (``with_coefficients``).
        reads_weights: whether it uses importance weights, so that it is only as good as they are.
        self_normalized: whether it divides by the sum of the weights, as if their mean were 1.
        clip: the largest weight, if larger ones are cut.
    """

    name: str
    ratios: Callable[[Rows], Ratios] = field(compare=False, repr=False)
    num_ratios: int = 1
    num_controls: int = 0
    reads_weights: bool = True
    self_normalized: bool = False
    clip: float = math.inf

    def terms(self, rows: Rows) -> FloatArray:
        """The numerators and then the denominators of every row, ``[N, 2 J]`` float64."""
        numerators, denominators = zip(*self.ratios(rows), strict=True)
        ones = np.ones(len(numerators[0]))
        return np.stack([*numerators, *(ones if one is None else one for one in denominators)], 1, dtype=np.float64)

    def __call__(self, rows: Rows) -> float:
        """The estimate over ``rows``; nan without rows, or for a self-normalized estimator if all weights are 0."""
        sums = self.with_coefficients(self.terms(rows))
        return float(sum_of_ratios(sums.sum(0)))

    def with_coefficients(self, sums: FloatArray) -> FloatArray:
        """The sums ``[U, 2 J]`` of users with each control variate times its negated coefficient.

        The coefficients are the least-squares regression of the users' influences on the estimate on those on the
        control variates, so the estimate is the one of least variance among all with the same expectation. They are
        estimated on the same users, which biases the estimate by the order of 1/U. With fewer than ``10 num_controls``
        users they are 0.
        """
        if not self.num_controls:
            return sums
        first = self.num_ratios - self.num_controls
        numerator, denominator = np.split(sums, 2, axis=1)
        coefficients = np.zeros(self.num_controls)
        if len(sums) >= _USERS_PER_CONTROL * self.num_controls:
            own = influences_of(sums)
            coefficients = np.linalg.lstsq(own[:, first:], own[:, :first].sum(1), rcond=None)[0]
        numerator = np.concatenate([numerator[:, :first], -coefficients * numerator[:, first:]], axis=1)
        return np.concatenate([numerator, denominator], axis=1)


def _given(rows: Rows, name: Literal["q_hat", "v_hat"]) -> FloatArray:
    values = rows.q_hat if name == "q_hat" else rows.v_hat
    if values is None:
        raise RecpoError(f"this estimator needs the reward model's {name}", code="missing_value", field=name)
    return values


def _corrections(rows: Rows) -> FloatArray:
    return rows.weight * (rows.reward - _given(rows, "q_hat"))


IPS: Final = Estimator("IPS", lambda rows: [(rows.weight * rows.reward, None)])
"""Inverse propensity score, ``mean(w r)`` (Horvitz and Thompson, 1952).

Unbiased if the propensities are correct and no item that the target policy may choose has propensity 0. Its variance
grows with the largest weights, without bound."""


def clipped_ips(limit: float = 100.0) -> Estimator:
    """IPS with weights clipped at M, ``mean(min(w, M) r)`` (Ionides, 2008; Bottou et al., 2013).

    Bounded, so it has intervals that hold for every sample size. Biased: for rewards >= 0 its mean lies below the
    value.

    Args:
        limit: M, the largest weight.
    """
    return Estimator("clipped IPS", lambda rows: [(np.minimum(rows.weight, limit) * rows.reward, None)], clip=limit)


SNIPS: Final = Estimator("SNIPS", lambda rows: [(rows.weight * rows.reward, rows.weight)], self_normalized=True)
"""Self-normalized IPS, ``sum(w r) / sum(w)`` (Swaminathan and Joachims, NeurIPS 2015).

Stays within the range of the rewards, does not change if all propensities are wrong by the same factor, and shifts with
the rewards if a constant is added to them. Its bias falls as 1/N."""

BASELINE_IPS: Final = Estimator(
    "beta-IPS", lambda rows: [(rows.weight * rows.reward, None), (rows.weight - 1, None)], num_ratios=2, num_controls=1
)
"""IPS with the best additive baseline, ``mean(w (r - beta)) + beta`` (Jeunen and Gupta, 2026, arXiv 2602.14914).

``w - 1`` has expectation 0. SNIPS is asymptotically this estimator with ``beta`` = the value itself, which is not the
coefficient of least variance."""

COMBINED_IPS: Final = Estimator(
    "combined",
    lambda rows: [
        *BASELINE_IPS.ratios(rows),
        (rows.weight * _given(rows, "q_hat") - _given(rows, "v_hat"), None),
    ],
    num_ratios=3,
    num_controls=2,
)
"""The linear combination of IPS, beta-IPS and DR of least variance.

``mean(w r - beta (w - 1) - gamma (w q_hat - v_hat))``: IPS has ``beta = gamma = 0`` and DR ``gamma = 1``. Every
combination of these with weights that sum to 1 has this form, so it is their best linear unbiased estimate (Jeunen,
RecSys 2025, arXiv 2508.07914), whose coefficients need no covariances of estimators."""

DM: Final = Estimator("DM", lambda rows: [(_given(rows, "v_hat"), None)], reads_weights=False)
"""Direct method, ``mean(v_hat)``: the value that the reward model predicts.

Needs no propensities and has little variance; its bias is that of the model, and no interval contains it."""

DR: Final = Estimator("DR", lambda rows: [(_given(rows, "v_hat") + _corrections(rows), None)])
"""Doubly robust, ``mean(v_hat + w (r - q_hat))`` (Dudik, Langford and Li, ICML 2011, arXiv 1103.4601).

Unbiased if the propensities or the model are correct, also with a Monte-Carlo ``v_hat``, whose noise has mean 0 and
only adds to the variance. A model with accurate predictions lowers the variance below that of IPS."""

SNDR: Final = Estimator(
    "SNDR",
    lambda rows: [(_given(rows, "v_hat"), None), (_corrections(rows), rows.weight)],
    num_ratios=2,
    self_normalized=True,
)
"""Self-normalized doubly robust, ``mean(v_hat) + sum(w (r - q_hat)) / sum(w)`` (Thomas and Brunskill, 2016)."""


def switch_dr(threshold: float = 100.0) -> Estimator:
    """Doubly robust up to a weight of tau, direct method beyond, ``mean(v_hat + w [w <= tau] (r - q_hat))``.

    Wang, Agarwal and Dudik, ICML 2017, arXiv 1612.01205. Between DM (tau = 0) and DR (tau = infinity): the model is
    used for items that the log rarely shows.

    Args:
        threshold: tau.
    """

    def ratios(rows: Rows) -> Ratios:
        return [(_given(rows, "v_hat") + np.where(rows.weight <= threshold, _corrections(rows), 0.0), None)]

    return Estimator("Switch-DR", ratios)


LOGGED_MEAN: Final = Estimator("mean", lambda rows: [(rows.reward, None)], reads_weights=False)
"""``mean(r)``: the value of the logging policy, on-policy and unbiased."""

NAIVE_AVERAGE: Final = Estimator(
    "naive average", lambda rows: [(rows.target * rows.reward, rows.target)], reads_weights=False
)
"""``sum(pi r) / sum(pi)``: the mean logged reward of items that the target policy would show. For comparison only.

For a list, it is the mean reward of the rows whose item is in the list. It ignores why an item was shown, and so
attributes the merit of the logging policy to the target policy: an item that was shown to users who like it looks good
for everybody. It is confounded, and no amount of data fixes that."""


def sum_of_ratios(totals: FloatArray) -> FloatArray:
    """``sum_j numerator_j / denominator_j`` of totals ``[..., 2 J]``, numerators first; nan for division by 0."""
    numerator, denominator = np.split(totals, 2, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(denominator == 0, np.nan, numerator / denominator)
    return np.asarray(ratio.sum(-1))


def influences_of(sums: FloatArray) -> FloatArray:
    """How much each user moves each of the J ratios of ``sums [U, 2 J]``: ``[U, J]``, by the delta method."""
    numerator, denominator = np.split(sums, 2, axis=1)
    total = denominator.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((numerator - numerator.sum(0) / total * denominator) / total)


class SlateRows(NamedTuple):
    """Logged slates.

    Attributes:
        reward: ``[N, S]`` reward of every position.
        weight: ``[N, S]`` importance weight of every position.
        mask: ``[N, S]`` bool, False if the slate has no such position; its values are not read.
    """

    reward: FloatArray
    weight: FloatArray
    mask: NDArray[np.bool_]


@dataclass(frozen=True)
class SlateEstimator:
    """A sum over positions of weighted rewards. A position that a slate lacks has reward 0.

    Attributes:
        slate_weights: the factor of each reward, ``[N, S]``, from the weights of single positions (1 if there is no
            position).
        self_normalized: divide the sum of each position by its sum of weights instead of by the number of slates: lower
            variance, with a bias that falls as 1/N.
    """

    slate_weights: Callable[[FloatArray], FloatArray]
    self_normalized: bool = False

    def terms(self, rows: SlateRows) -> FloatArray:
        """The numerators and then the denominators of every slate, ``[N, 2 S]``: one ratio per position."""
        weight = self.slate_weights(np.where(rows.mask, rows.weight, 1.0))
        gained = weight * np.where(rows.mask, rows.reward, 0.0)
        return np.concatenate([gained, weight if self.self_normalized else np.ones_like(gained)], axis=1)

    def __call__(self, rows: SlateRows) -> float:
        """The estimate over ``rows``; nan without slates, or for a self-normalized estimator if all weights are 0."""
        return float(sum_of_ratios(self.terms(rows).sum(0)))


StandardIPS: Final = partial(
    SlateEstimator, lambda weight: np.broadcast_to(weight.prod(axis=1, keepdims=True), weight.shape)
)
"""``mean((prod_s w_s) sum_s r_s)``: a reward may depend on the whole slate (Precup et al., 2000).

Unbiased for any user behavior, but only useful for very short slates, because the weights multiply."""

IndependentIPS: Final = partial(SlateEstimator, lambda weight: weight)
"""``mean(sum_s w_s r_s)``: a reward depends only on its own item and position.

The item-position model of Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay and Wen (KDD 2018, arXiv 1804.10488). Its
weights are those of single items, ``pi(a_s | x) / p(a_s | x)``."""

RewardInteractionIPS: Final = partial(SlateEstimator, lambda weight: np.cumprod(weight, axis=1))
"""``mean(sum_s (prod_{t <= s} w_t) r_s)``: a reward depends on its own item and on the items above it.

McInerney, Brost, Chandar, Mehrotra and Carterette (KDD 2020, arXiv 2007.12986): users read a slate from the top, and
earlier positions influence their behavior at later ones."""


class RewardedExposures(NamedTuple):
    """Exposures of the training period.

    Attributes:
        users: ``[N]`` int64, 0..U-1, ``EvaluationBatch.user_ids``.
        items: ``[N]`` int64, 1..V.
        reward: ``[N]``; rows with nan (unknown) are skipped.
    """

    users: NDArray[np.integer]
    items: NDArray[np.integer]
    reward: NDArray[np.floating]


@dataclass(frozen=True)
class AdditiveRewardModel:
    """``q_hat(u, i) = mean + user_effect_u + item_effect_i``, with effects shrunk toward 0.

    It models generous users and good items, but no tastes. It is fitted on the training period alone, so its
    predictions are for rewards that it was not fitted to.

    Attributes:
        mean: mean of all training rewards.
        user_effect: ``[U]`` float64; a user without training events has 0.
        item_effect: ``[V + 1]`` float64, item 0 has 0.
    """

    mean: float
    user_effect: Tensor
    item_effect: Tensor

    @classmethod
    def fit(
        cls,
        exposures: Callable[[], Iterable[RewardedExposures]],
        *,
        num_users: int,
        num_items: int,
        rounds: int = 3,
    ) -> Self:
        """Fits by backfitting in streaming passes: item effects given user effects, then the other way round.

        An effect is ``sum of residuals / (n + s^2 / t^2)``, the empirical-Bayes estimate under a normal prior: s^2 is
        the variance of the residuals, t^2 that of the true effects, estimated by moments (DerSimonian and Laird, 1986).

        Args:
            exposures: each call yields the training period chunk by chunk.
            num_users: U.
            num_items: V.
            rounds: number of rounds, of two passes each.

        Raises:
            RecpoError: no exposure has a reward.
        """
        totals = np.zeros(3)
        for chunk in exposures():
            reward = _known(chunk).reward
            totals += [len(reward), reward.sum(), (reward.astype(np.float64) ** 2).sum()]
        if not totals[0]:
            message = "the reward model has nothing to learn from: no training event has a reward"
            raise RecpoError(message, code="empty", field="reward")
        mean = totals[1] / totals[0]
        noise = totals[2] / totals[0] - mean**2
        users, items = np.zeros(num_users), np.zeros(num_items + 1)
        for _ in range(rounds):
            items, noise = _effects(exposures, mean, users, items, noise, of_items=True)
            users, noise = _effects(exposures, mean, users, items, noise, of_items=False)
        items[0] = 0.0
        return cls(float(mean), torch.from_numpy(users), torch.from_numpy(items))

    def __call__(self, users: Tensor, items: Tensor) -> Tensor:
        """Predictions ``[B, S]`` float64 for ``users [B]`` and ``items [B, S]``."""
        known = users < len(self.user_effect)
        user = self.user_effect.to(users.device)[users.where(known, 0)].where(known, 0.0)
        return self.mean + user[:, None] + self.item_effect.to(items.device)[items]


def _effects(
    exposures: Callable[[], Iterable[RewardedExposures]],
    mean: float,
    users: NDArray[np.float64],
    items: NDArray[np.float64],
    noise: float,
    *,
    of_items: bool,
) -> tuple[NDArray[np.float64], float]:
    """New effects of one side given the other, and the variance of the residuals."""
    size = len(items) if of_items else len(users)
    count, total, squares = np.zeros(size), np.zeros(size), 0.0
    for chunk in map(_known, exposures()):
        residual = chunk.reward - mean - (users[chunk.users] if of_items else items[chunk.items])
        rows = chunk.items if of_items else chunk.users
        count += np.bincount(rows, minlength=size)
        total += np.bincount(rows, residual, size)
        squares += float((residual**2).sum())
    seen, rows_in_all = count > 0, count.sum()
    between = (total[seen] ** 2 / count[seen]).sum() - (seen.sum() - 1) * noise
    between /= max(rows_in_all - (count**2).sum() / rows_in_all, 1.0)
    effect = total / (count + noise / between) if between > 0 else np.zeros(size)
    explained = (2 * effect * total - count * effect**2).sum()
    return effect, float(max(squares - explained, 0.0) / rows_in_all)


def _known(chunk: RewardedExposures) -> RewardedExposures:
    known = ~np.isnan(chunk.reward)
    return RewardedExposures(*(column[known] for column in chunk))


@dataclass(frozen=True)
class OffPolicyOptions:
    """How the value of a policy is estimated from the log of another one.

    Attributes:
        propensity: where the probability of a logged item comes from: logged (the log's propensity column), uniform
            (rows that the log marks as random, each item of the pool equally likely; other rows are skipped) or
            estimated (from who was shown what, ``ExposureModel``; labeled in every result).
        pool_size: number of items that random exposures were drawn from; null = the full catalog.
        top_k: list lengths whose value is estimated, for a random item of the list; null = those of the ranking.
        average: exposure = every exposure has the same weight, as in an online test; user = every user has the same
            weight, as in the ranking metrics.
        clip: maximum weight of clipped IPS.
        switch_threshold: Switch-DR uses the reward model for rows with a larger weight.
        samples: number of items drawn per user for the reward model's value of the policy.
        level: probability that an interval contains the value.
        resamples: number of bootstrap resamples of users.
        reward_range: least and largest possible reward, for the empirical Bernstein interval; null = no such interval.
        seed: seed of the bootstrap and of the draws.
        depth: number of places from which the targets ``discounted_k`` draw an item, each with a probability that falls
            with its place; null = there are no such targets.
    """

    propensity: PropensitySource = "logged"
    pool_size: PositiveInt | None = None
    top_k: tuple[PositiveInt, ...] | None = None
    average: Literal["exposure", "user"] = "exposure"
    clip: PositiveFloat = 100.0
    switch_threshold: NonNegativeFloat = 100.0
    samples: PositiveInt = 32
    level: OpenUnitInterval = 0.95
    resamples: PositiveInt = 1000
    reward_range: tuple[float, float] | None = None
    seed: Seed = 0
    depth: PositiveInt | None = None

    def __post_init__(self) -> None:
        validate_ranges(self, "off_policy.")
        if self.top_k == ():
            raise RecpoError("off_policy.top_k names no list length", code="empty", field="off_policy.top_k")
        low, high = self.reward_range or (0, 1)
        validate_range(low < high, "off_policy.reward_range", "must be low < high", self.reward_range)

    def estimators(self, with_model: bool) -> list[Estimator]:
        """All estimators, or those that need no reward model."""
        found = [NAIVE_AVERAGE, IPS, clipped_ips(self.clip), SNIPS, BASELINE_IPS]
        return found + ([DM, DR, SNDR, switch_dr(self.switch_threshold), COMBINED_IPS] if with_model else [])
