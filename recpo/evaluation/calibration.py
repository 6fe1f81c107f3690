"""Predictions compared with outcomes: how well they rank, and how well they are calibrated.

NumPy arrays over the events of a period: ``probability [N]`` (or any score, if only the order counts), ``happened [N]``
bool, and optional ``weight [N]``, the multiplicity of an event. For rewards and grades: ``predicted [N]`` and ``grade
[N]`` in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.evaluation.estimates import as_json, estimate
from recpo.evaluation.measures import auc

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

_STEPS, _HALVINGS, _TOLERANCE, _RIDGE = 100, 40, 1e-10, 1e-12


class Platt(NamedTuple):
    """``probability = sigmoid(scale * score + shift)``."""

    scale: float
    shift: float

    def probability(self, score: FloatArray) -> FloatArray:
        """The probabilities of any scores."""
        return np.exp(-np.logaddexp(0.0, -(self.scale * score + self.shift)))


def fit_platt(score: FloatArray, target: FloatArray | BoolArray) -> Platt:
    """Platt's scaling (1999): the logistic regression of the outcome on the score, by Newton's method.

    It has two parameters, so a short validation period is enough, and it is strictly increasing (for a positive scale),
    so no two candidates become equal, as they would with isotonic regression. The targets are Platt's, ``(P + 1) / (P +
    2)`` for the P events and ``1 / (N + 2)`` for the N others, so the minimum exists even if the score separates them
    perfectly or one kind is missing. A target between 0 and 1, such as a grade, counts for both kinds by its share. The
    problem is convex; a step is halved until it descends (Lin, Lin and Weng, 2007).

    Args:
        score: ``[N]``.
        target: ``[N]`` in [0, 1]: whether it happened, or a soft label.

    Raises:
        RecpoError: there is no event, or a score is not finite.
    """
    score = np.asarray(score, np.float64)
    if not len(score) or not np.isfinite(score).all():
        raise RecpoError(
            f"a calibration needs finite scores of at least one event, got {len(score)}",
            code="bad_value",
            field="score",
        )
    target = np.asarray(target, np.float64)
    positives = float(target.sum())
    target = target * (positives + 1) / (positives + 2) + (1 - target) / (len(score) - positives + 2)
    center, spread = score.mean(), score.std() or 1.0
    design = np.stack([(score - center) / spread, np.ones_like(score)])

    def loss(weights: FloatArray) -> float:
        logit = weights @ design
        return float(np.mean(np.logaddexp(0.0, logit) - target * logit))

    weights = np.array([0.0, np.log(target.mean() / (1 - target.mean()))])
    for _ in range(_STEPS):
        probability = Platt(1.0, 0.0).probability(weights @ design)
        gradient = design @ (probability - target) / len(score)
        if np.abs(gradient).max() < _TOLERANCE:
            break
        curvature = (design * (probability * (1 - probability))) @ design.T / len(score) + _RIDGE * np.eye(2)
        step, before, rate = np.linalg.solve(curvature, gradient), loss(weights), 1.0
        for _ in range(_HALVINGS):
            if loss(weights - rate * step) <= before:
                break
            rate /= 2
        weights = weights - rate * step
    scale = float(weights[0] / spread)
    return Platt(scale, float(weights[1] - scale * center))


def roc_auc(score: FloatArray, happened: BoolArray, weight: FloatArray | None = None) -> float:
    """Probability that an event scores above a non-event, with ties counting one half; nan if either is missing."""
    return _Ranking.of(score, happened).auc(np.ones(len(score)) if weight is None else weight)


class _Ranking(NamedTuple):
    """Events ranked by score: one sort serves every resample."""

    rank: IntArray
    happened: BoolArray

    @classmethod
    def of(cls, score: FloatArray, happened: BoolArray) -> _Ranking:
        return cls(np.unique(score, return_inverse=True)[1], np.asarray(happened, bool))

    def auc(self, weight: FloatArray) -> float:
        levels = int(self.rank.max(initial=-1)) + 1
        positive = np.bincount(self.rank, weight * self.happened, levels)
        negative = np.bincount(self.rank, weight * ~self.happened, levels)
        pairs = positive.sum() * negative.sum()
        return float(positive @ (negative.cumsum() - negative / 2) / pairs) if pairs > 0 else float("nan")


def log_loss(probability: FloatArray, happened: BoolArray, weight: FloatArray | None = None) -> float:
    """Mean of ``-log`` of the predicted probability of the outcome, nats; clipped 1e-15 away from 0 and 1."""
    certain = np.clip(np.where(happened, probability, 1.0 - probability), 1e-15, 1.0)
    return float(np.average(-np.log(certain), weights=weight))


class Bins(NamedTuple):
    """The bin of each event, by its probability. All bins have the same number of events."""

    bin_of: IntArray
    number: int

    @classmethod
    def of(cls, probability: FloatArray, bins: int = 10) -> Bins:
        """Cuts bins at the quantiles of the probabilities."""
        cuts = np.quantile(probability, np.linspace(0, 1, bins + 1)[1:-1])
        return cls(np.searchsorted(cuts, probability), bins)

    def error(self, probability: FloatArray, happened: BoolArray, weight: FloatArray | None = None) -> float:
        """Expected calibration error: ``sum_b n_b / n |mean probability of b - share of b that happened|``.

        A perfect model has a value above 0 by chance, about ``sqrt(bins rate (1 - rate) / n)``. A bootstrap interval
        adds this chance a second time.
        """
        weight = np.ones(len(probability)) if weight is None else weight
        gap = np.bincount(self.bin_of, weight * (probability - happened), self.number)
        return float(np.abs(gap).sum() / weight.sum())


def calibration_error(probability: FloatArray, happened: BoolArray, bins: int = 10) -> float:
    """See ``Bins.error``."""
    return Bins.of(probability, bins).error(probability, happened)


class BootstrapEstimate(NamedTuple):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, values: Tensor) -> BootstrapEstimate:
        """The mean of the values that are not nan, with its normal interval."""
        mean, half_width, _ = estimate(values.double())
        return cls(mean, mean - half_width, mean + half_width)


def assess(
    probability: FloatArray, happened: BoolArray, user: IntArray, *, resamples: int = 200, seed: int = 0
) -> dict[str, BootstrapEstimate]:
    """``base_rate``, ``auc``, ``log_loss`` and ``calibration_error`` with percentile bootstrap intervals over users.

    A resample draws users with replacement, each with all of their events, because events of a user are similar.

    Raises:
        RecpoError: there is no event.
    """
    if not len(probability):
        raise RecpoError(
            "no event to measure: the period is empty, or its events have no label", code="empty", field="label"
        )
    ranking, bins = _Ranking.of(probability, happened), Bins.of(probability)
    statistics: dict[str, Callable[[FloatArray], float]] = {
        "base_rate": lambda weight: float(np.average(happened, weights=weight)),
        "auc": ranking.auc,
        "log_loss": lambda weight: log_loss(probability, happened, weight),
        "calibration_error": lambda weight: bins.error(probability, happened, weight),
    }
    rows = np.unique(user, return_inverse=True)[1]
    users, generator = int(rows.max()) + 1, np.random.default_rng(seed)
    everyone = np.ones(len(rows))
    drawn: dict[str, list[float]] = {name: [] for name in statistics}
    for _ in range(resamples):
        weight = generator.multinomial(users, np.full(users, 1 / users))[rows].astype(np.float64)
        for name, statistic in statistics.items():
            drawn[name].append(statistic(weight))
    return {name: _interval(statistic(everyone), drawn[name]) for name, statistic in statistics.items()}


def _interval(value: float, drawn: list[float]) -> BootstrapEstimate:
    known = np.array(drawn)[~np.isnan(drawn)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (np.nan, np.nan)
    return BootstrapEstimate(value, float(low), float(high))


def assess_grades(
    predicted: FloatArray, grade: FloatArray, user: IntArray, *, resamples: int = 200, seed: int = 0
) -> dict[str, BootstrapEstimate]:
    """Accuracy of predicted grades: ``rmse``, ``rank_correlation`` and ``rank_correlation_per_user``.

    ``rmse`` is the root of the mean squared error, in units of the grade. ``rank_correlation`` is Spearman's (ties have
    their mean rank) over all events, and the last one is its mean over the users for whom it is defined. The first two
    have percentile bootstrap intervals over users (events keep their ranks), the last one a normal interval.

    Args:
        predicted: ``[N]``.
        grade: ``[N]``, the outcome.
        user: ``[N]``.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Raises:
        RecpoError: there is no event.
    """
    if not len(predicted):
        raise RecpoError(
            "no event to measure: the period is empty, or its events have no grade", code="empty", field="grade"
        )
    one, two = rankdata(predicted), rankdata(grade)
    one, two = (ranks - ranks.mean() for ranks in (one, two))
    terms = np.stack([np.ones_like(one), (predicted - grade) ** 2, one, two, one * one, two * two, one * two])
    rows = np.unique(user, return_inverse=True)[1]
    sums = np.stack([np.bincount(rows, term) for term in terms], axis=1)
    users, generator = len(sums), np.random.default_rng(seed)
    drawn = generator.multinomial(users, np.full(users, 1 / users), size=resamples).astype(np.float64) @ sums

    def error(totals: FloatArray) -> FloatArray:
        return np.sqrt(totals[..., 1] / totals[..., 0])

    within = [
        _correlation(_moments(rankdata(predicted[events]), rankdata(grade[events])))
        for events in np.split(np.argsort(rows, kind="stable"), np.cumsum(np.bincount(rows))[:-1])
    ]
    everybody = sums.sum(0)
    return {
        "rmse": _interval(float(error(everybody)), error(drawn).tolist()),
        "rank_correlation": _interval(float(_correlation(everybody)), _correlation(drawn).tolist()),
        "rank_correlation_per_user": BootstrapEstimate.of_mean(torch.tensor(np.array(within))),
    }


def _moments(one: FloatArray, two: FloatArray) -> FloatArray:
    one, two = one - one.mean(), two - two.mean()
    return np.array([len(one), 0.0, 0.0, 0.0, one @ one, two @ two, one @ two])


def _correlation(moments: FloatArray) -> FloatArray:
    """From ``[..., 7]``: number, squared error, both sums, both sums of squares, and the product; nan without variance.

    A variance below the rounding error of its sum counts as none.
    """
    number, _, one, two, squares_one, squares_two, products = np.moveaxis(moments, -1, 0)
    variances = (squares_one - one * one / number, squares_two - two * two / number)
    known = (variances[0] > 1e-9 * number) & (variances[1] > 1e-9 * number)
    scale = np.sqrt(np.where(known, variances[0] * variances[1], 1.0))
    return np.where(known, (products - one * two / number) / scale, np.nan)


def fit_line(predicted: FloatArray, grade: FloatArray) -> tuple[float, float]:
    """Scale and shift of the least squares ``grade = scale * predicted + shift``; a constant has the scale 0.

    Rewards have different units. After this map, their errors can be compared.
    """
    centered = predicted - predicted.mean()
    variance = float(centered @ centered)
    scale = float(centered @ (grade - grade.mean()) / variance) if variance > 0 else 0.0
    return scale, float(grade.mean() - scale * predicted.mean())


class Exposures(NamedTuple):
    """Held-out exposures that a reward model scored.

    Attributes:
        score: ``[N, K]``, one column per target.
        target: ``[N, K]`` float64 in [0, 1], the outcome; 0 or 1 for a target that is an event.
        known: ``[N, K]`` bool, the log contains the outcome.
        user: ``[N]`` int64.
        is_random: ``[N]`` bool, shown at random.
    """

    score: FloatArray
    target: FloatArray
    known: BoolArray
    user: IntArray
    is_random: BoolArray


_Columns = TypeVar("_Columns", bound=tuple[Any, ...])


def selected(columns: _Columns, which: BoolArray) -> _Columns:
    """The exposures ``which [N]`` of a named tuple of columns."""
    return type(columns)(*(column[which] for column in columns))


def assess_target(test: Exposures, k: int, fitted: Platt, *, resamples: int, seed: int) -> dict[str, Any]:
    """Ranking and calibration of event k, before and after calibration, as JSON values.

    Args:
        test: exposures of a period that nothing was fitted on.
        k: the target.
        fitted: its calibration.
        resamples: number of bootstrap resamples of users.
        seed: seed of the bootstrap.
    """
    test = selected(test, test.known[:, k])
    score, happened = test.score[:, k], test.target[:, k] > 0.5
    before = assess(Platt(1.0, 0.0).probability(score), happened, test.user, resamples=resamples, seed=seed)
    after = assess(fitted.probability(score), happened, test.user, resamples=resamples, seed=seed)
    intervals = {
        **{name: after[name] for name in ("base_rate", "auc", "log_loss", "calibration_error")},
        "auc_per_user": _auc_per_user(score, happened, test.user),
        "log_loss_uncalibrated": before["log_loss"],
        "calibration_error_uncalibrated": before["calibration_error"],
    }
    counts = {"exposures": len(score), "happened": int(happened.sum()), "users": len(np.unique(test.user))}
    return {**counts, **as_json(intervals)}


def assess_grade_target(test: Exposures, k: int, fitted: Platt, *, resamples: int, seed: int) -> dict[str, Any]:
    """Like ``assess_target``, for a target k that is a grade: error and rank correlation after calibration."""
    test = selected(test, test.known[:, k])
    score, grade = test.score[:, k], test.target[:, k]
    before = assess_grades(Platt(1.0, 0.0).probability(score), grade, test.user, resamples=resamples, seed=seed)
    after = assess_grades(fitted.probability(score), grade, test.user, resamples=resamples, seed=seed)
    counts = {"exposures": len(score), "users": len(np.unique(test.user))}
    return {**counts, **as_json({**after, "rmse_uncalibrated": before["rmse"]})}


def _auc_per_user(scores: FloatArray, happened: BoolArray, user: IntArray) -> BootstrapEstimate:
    """Mean over the users with events of both kinds."""
    order = np.argsort(user, kind="stable")
    counts = np.unique(user, return_counts=True)[1]
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    score = torch.zeros(len(counts), int(counts.max(initial=1)), dtype=torch.float64)
    positive, negative = torch.zeros_like(score, dtype=torch.bool), torch.zeros_like(score, dtype=torch.bool)
    score[row, place] = torch.from_numpy(scores[order])
    positive[row, place] = torch.from_numpy(happened[order])
    negative[row, place] = torch.from_numpy(~happened[order])
    return BootstrapEstimate.of_mean(auc(score, positive, negative))


def calibrate_targets(
    targets: Sequence[str], valid: Exposures, test: Exposures, *, resamples: int, seed: int
) -> dict[str, Any]:
    """Fits the calibration of every target on the validation period, and assesses it on the test period.

    Returns:
        ``{exposures: {valid, test, test_random}, targets: {name: {calibration, test: {all | random: ...}}}}``.

    Raises:
        RecpoError: no exposure of the validation period has the target.
    """
    found = {}
    for column, name in enumerate(targets):
        known = valid.known[:, column]
        if not known.any():
            raise RecpoError(
                f"target {name}: no exposure of the validation period is graded, so nothing can be fitted",
                code="empty",
                field=name,
            )
        fitted = fit_platt(valid.score[known, column], valid.target[known, column])
        report = assess_grade_target if name == "grade" else assess_target  # a probability, except for the grade
        found[name] = {
            "calibration": fitted._asdict(),
            "test": {
                group: report(selected(test, shown), column, fitted, resamples=resamples, seed=seed)
                for group, shown in groups(test.is_random)
                if (test.known[:, column] & shown).any()
            },
        }
    exposures = {"valid": len(valid.user), "test": len(test.user), "test_random": int(test.is_random.sum())}
    return {"exposures": exposures, "targets": found}


def groups(is_random: BoolArray) -> tuple[tuple[str, BoolArray], ...]:
    """All exposures, and the random ones among them, as masks."""
    return ("all", np.ones(len(is_random), bool)), ("random", is_random)
