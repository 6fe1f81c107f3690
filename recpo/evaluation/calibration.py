"""Predicted probabilities against what happened: how well they rank, and whether they mean what they say.

NumPy arrays over the events of a period: ``probability [N]`` (or any score, where only the order counts), ``happened
[N]`` bool, and optional ``weight [N]``, how often an event counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpo.errors import RecpoError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

_STEPS, _HALVINGS, _TOLERANCE, _RIDGE = 100, 40, 1e-10, 1e-12


class Platt(NamedTuple):
    """``probability = sigmoid(scale * score + shift)``."""

    scale: float
    shift: float

    def probability(self, score: FloatArray) -> FloatArray:
        """Of any scores."""
        return np.exp(-np.logaddexp(0.0, -(self.scale * score + self.shift)))


def fit_platt(score: FloatArray, happened: BoolArray) -> Platt:
    """Platt's scaling (1999): the logistic regression of what happened on the score, by Newton's method.

    Two numbers, so that a short validation period is enough, and strictly increasing (for a positive scale), so that no
    two candidates become equal; isotonic regression would merge them. The targets are Platt's, ``(P + 1) / (P + 2)``
    for the P events and ``1 / (N + 2)`` for the N others: the minimum exists even where the score separates them
    perfectly or one kind is missing. Convex; a step is halved until it descends (Lin, Lin and Weng, 2007).

    Raises:
        RecpoError: there is no event, or a score is not finite.
    """
    score = np.asarray(score, np.float64)
    if not len(score) or not np.isfinite(score).all():
        raise RecpoError(f"a calibration needs finite scores of at least one event, got {len(score)}")
    positives = int(happened.sum())
    target = np.where(happened, (positives + 1) / (positives + 2), 1 / (len(score) - positives + 2))
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
    """Probability that an event scores above a non-event, ties counting one half; nan where either is missing."""
    return _Ranking.of(score, happened).auc(np.ones(len(score)) if weight is None else weight)


class _Ranking(NamedTuple):
    """Events by the rank of their score: one sort serves every resample."""

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
    """Mean of ``-log`` of the probability given to what happened, nats; probabilities are kept 1e-15 off 0 and 1."""
    certain = np.clip(np.where(happened, probability, 1.0 - probability), 1e-15, 1.0)
    return float(np.average(-np.log(certain), weights=weight))


class Bins(NamedTuple):
    """Which of the bins of equally many events each event belongs to, by its probability."""

    bin_of: IntArray
    number: int

    @classmethod
    def of(cls, probability: FloatArray, bins: int = 10) -> Bins:
        """Cuts at the quantiles of the probabilities."""
        cuts = np.quantile(probability, np.linspace(0, 1, bins + 1)[1:-1])
        return cls(np.searchsorted(cuts, probability), bins)

    def error(self, probability: FloatArray, happened: BoolArray, weight: FloatArray | None = None) -> float:
        """Expected calibration error: ``sum_b n_b / n |mean probability of b - share of b that happened|``.

        Of a perfect model it is above 0 by chance, about ``sqrt(bins rate (1 - rate) / n)``; a bootstrap interval of it
        adds that chance once more.
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


def judge(
    probability: FloatArray, happened: BoolArray, user: IntArray, *, resamples: int = 200, seed: int = 0
) -> dict[str, BootstrapEstimate]:
    """``base_rate``, ``auc``, ``log_loss`` and ``calibration_error`` with percentile bootstrap intervals over users.

    A resample draws users with replacement, each with all of its events: events of a user are alike.

    Raises:
        RecpoError: there is no event.
    """
    if not len(probability):
        raise RecpoError("no event to judge by: the period is empty, or its events have no label")
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
