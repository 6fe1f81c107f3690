"""Predictions compared with outcomes: how well they rank, and how well they are calibrated.

NumPy arrays over the events of a period: ``probability [N]`` (or any score, if only the order counts), ``happened [N]``
bool, and optional ``weight [N]``, the multiplicity of an event. For rewards and grades: ``predicted [N]`` and ``grade
[N]`` in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.evaluation.estimates import as_json, estimate

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

_BINS = 10  # of calibration errors


class Platt(NamedTuple):
    """``probability = sigmoid(scale * score + shift)``."""

    scale: float
    shift: float

    def probability(self, score: FloatArray) -> FloatArray:
        """The probabilities of any scores."""
        return np.exp(-np.logaddexp(0.0, -(self.scale * score + self.shift)))


def fit_platt(score: FloatArray, target: FloatArray | BoolArray) -> Platt:
    """Platt's scaling (1999): the logistic regression of the outcome on the score.

    It has two parameters, so a short validation period is enough, and it is strictly increasing (for a positive scale),
    so no two candidates become equal, as they would with isotonic regression. The targets are Platt's, ``(P + 1) / (P +
    2)`` for the P events and ``1 / (N + 2)`` for the N others, so the minimum exists even if the score separates them
    perfectly or one kind is missing. A target between 0 and 1, such as a grade, counts for both kinds by its share.

    Args:
        score: ``[N]``.
        target: ``[N]`` in [0, 1]: whether it happened, or a soft label.

    Raises:
        RecpoError: there is no event, or a score is not finite.
    """
    from sklearn.linear_model import LogisticRegression  # here, because evaluations without calibration need no sklearn

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
    design = np.tile((score - center) / spread, 2)[:, None]  # each event once for each kind
    # the ridge, 1 / C, is far below the rounding of the result; a constant score has no minimum without it
    model = LogisticRegression(C=1e12, solver="newton-cholesky", tol=1e-10)
    model.fit(design, np.repeat([1, 0], len(score)), np.concatenate([target, 1 - target]))
    scale = float(model.coef_[0, 0] / spread)
    return Platt(scale, float(model.intercept_[0] - scale * center))


def roc_auc(rank: IntArray, happened: BoolArray, weight: FloatArray | None = None) -> float:
    """Probability that an event scores above a non-event, with ties counting one half; nan if either is missing.

    Args:
        rank: ``[N]`` ranks of the scores from 0 on, equal for equal scores: one sort serves every resample.
        happened: ``[N]``.
        weight: ``[N]``; None = 1.
    """
    weight, levels = np.ones(len(rank)) if weight is None else weight, int(rank.max(initial=-1)) + 1
    positive, negative = (np.bincount(rank, weight * kind, levels) for kind in (happened, ~happened))
    pairs = positive.sum() * negative.sum()
    return float(positive @ (negative.cumsum() - negative / 2) / pairs) if pairs > 0 else math.nan


def ranks(values: NDArray[Any]) -> IntArray:
    """Ranks from 0 on, equal for equal values."""
    return np.unique(values, return_inverse=True)[1]


def log_loss(probability: FloatArray, happened: BoolArray, weight: FloatArray | None = None) -> float:
    """Mean of ``-log`` of the predicted probability of the outcome, nats; clipped 1e-15 away from 0 and 1."""
    certain = np.clip(np.where(happened, probability, 1.0 - probability), 1e-15, 1.0)
    return float(np.average(-np.log(certain), weights=weight))


def probability_bins(probability: FloatArray) -> IntArray:
    """The bin of each event among ten, cut at the quantiles of the probabilities, so all hold equally many events."""
    cuts = np.quantile(probability, np.linspace(0, 1, _BINS + 1)[1:-1])
    return np.searchsorted(cuts, probability)


def calibration_error(
    bins: IntArray, probability: FloatArray, happened: BoolArray, weight: FloatArray | None = None
) -> float:
    """Expected calibration error: ``sum_b n_b / n |mean probability of b - share of b that happened|``.

    A perfect model has a value above 0 by chance, about ``sqrt(bins rate (1 - rate) / n)``. A bootstrap interval adds
    this chance a second time.

    Args:
        bins: ``[N]`` from ``probability_bins``.
        probability: ``[N]``.
        happened: ``[N]``.
        weight: ``[N]``; None = 1.
    """
    weight = np.ones(len(probability)) if weight is None else weight
    gap = np.bincount(bins, weight * (probability - happened), _BINS)
    return float(np.abs(gap).sum() / weight.sum())


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
    rank, bins = ranks(probability), probability_bins(probability)
    statistics: dict[str, Callable[[FloatArray], float]] = {
        "base_rate": lambda weight: float(np.average(happened, weights=weight)),
        "auc": lambda weight: roc_auc(rank, happened, weight),
        "log_loss": lambda weight: log_loss(probability, happened, weight),
        "calibration_error": lambda weight: calibration_error(bins, probability, happened, weight),
    }
    return _over_resampled_users(statistics, user, resamples, seed)


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
    one, two, squares = rankdata(predicted), rankdata(grade), (predicted - grade) ** 2
    statistics: dict[str, Callable[[FloatArray], float]] = {
        "rmse": lambda weight: math.sqrt(np.average(squares, weights=weight)),
        "rank_correlation": lambda weight: _correlation(one, two, weight),
    }
    within = _mean_over_users(user, lambda own: _correlation(rankdata(predicted[own]), rankdata(grade[own])))
    return _over_resampled_users(statistics, user, resamples, seed) | {"rank_correlation_per_user": within}


def _over_resampled_users(
    statistics: Mapping[str, Callable[[FloatArray], float]], user: IntArray, resamples: int, seed: int
) -> dict[str, BootstrapEstimate]:
    """Functions of the weights of all events, with percentile bootstrap intervals."""
    rows = ranks(user)
    users, generator = int(rows.max()) + 1, np.random.default_rng(seed)
    drawn: dict[str, list[float]] = {name: [] for name in statistics}
    for _ in range(resamples):
        weight = generator.multinomial(users, np.full(users, 1 / users))[rows].astype(np.float64)
        for name, statistic in statistics.items():
            drawn[name].append(statistic(weight))
    found = {}
    for name, statistic in statistics.items():
        known = np.array(drawn[name])[~np.isnan(drawn[name])]
        low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (np.nan, np.nan)
        found[name] = BootstrapEstimate(statistic(np.ones(len(rows))), float(low), float(high))
    return found


def _mean_over_users(user: IntArray, statistic: Callable[[IntArray], float]) -> BootstrapEstimate:
    """Mean of a function of each user's events ``[n]``, over the users for whom it is not nan."""
    ends = np.cumsum(np.unique(user, return_counts=True)[1])
    events = np.split(np.argsort(user, kind="stable"), ends[:-1])
    return BootstrapEstimate.of_mean(torch.tensor([statistic(own) for own in events], dtype=torch.float64))


def _correlation(one: FloatArray, two: FloatArray, weight: FloatArray | None = None) -> float:
    """Pearson's; nan without variance, where a variance below the rounding error of its sum counts as none."""
    (variance, shared), (_, other) = np.cov(one, two, ddof=0, aweights=weight)
    return float(shared / math.sqrt(variance * other)) if min(variance, other) > 1e-9 else math.nan


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


def assess_target(
    test: Exposures, k: int, fitted: Platt, *, is_grade: bool, resamples: int, seed: int
) -> dict[str, Any]:
    """Accuracy of target k, before and after calibration, as JSON values.

    Ranking and calibration of an event; error and rank correlation of a grade.

    Args:
        test: exposures of a period that nothing was fitted on.
        k: the target.
        fitted: its calibration.
        is_grade: it is a grade, not an event.
        resamples: number of bootstrap resamples of users.
        seed: seed of the bootstrap.
    """
    test = selected(test, test.known[:, k])
    score, user = test.score[:, k], test.user
    outcome: NDArray[Any] = test.target[:, k] if is_grade else test.target[:, k] > 0.5
    measure = assess_grades if is_grade else assess
    raw, found = (
        measure(platt.probability(score), outcome, user, resamples=resamples, seed=seed)
        for platt in (Platt(1.0, 0.0), fitted)
    )
    counts = {"exposures": len(score), "users": len(np.unique(user))}
    if not is_grade:
        counts["happened"] = int(outcome.sum())
        found["auc_per_user"] = _mean_over_users(user, lambda own: roc_auc(ranks(score[own]), outcome[own]))
    uncalibrated = ("rmse",) if is_grade else ("log_loss", "calibration_error")
    return {**counts, **as_json(found | {f"{name}_uncalibrated": raw[name] for name in uncalibrated})}


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
        options: dict[str, Any] = {"is_grade": name == "grade", "resamples": resamples, "seed": seed}
        found[name] = {
            "calibration": fitted._asdict(),
            "test": {
                group: assess_target(selected(test, shown), column, fitted, **options)
                for group, shown in groups(test.is_random)
                if (test.known[:, column] & shown).any()
            },
        }
    exposures = {"valid": len(valid.user), "test": len(test.user), "test_random": int(test.is_random.sum())}
    return {"exposures": exposures, "targets": found}


def groups(is_random: BoolArray) -> tuple[tuple[str, BoolArray], ...]:
    """All exposures, and the random ones among them, as masks."""
    return ("all", np.ones(len(is_random), bool)), ("random", is_random)
