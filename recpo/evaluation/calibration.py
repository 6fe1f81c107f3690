"""Predictions compared with outcomes: how well they rank, how well they are calibrated, and what greedy lists earn.

NumPy arrays over the events of a period: ``probability [N]`` (or any score, if only the order counts), ``happened [N]``
bool, and optional ``weight [N]``, the multiplicity of an event. For rewards and grades: ``predicted [N]`` and ``grade
[N]`` in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from recpo.base.contracts import RewardFunction
from recpo.base.errors import PositiveInt, RecpoError, Seed
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch, FeedbackBatch, Recommendations, catalog_slates
from recpo.evaluation.candidates import Candidates, HeldOut, candidates_of
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.cautions import similar_lists_warning
from recpo.evaluation.estimates import as_json, estimate, percentile_interval, resampled
from recpo.evaluation.held_out_pass import PassOptions, held_out_batches
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.evaluation.off_policy.measure import OffPolicySetting, propensity_share
from recpo.evaluation.off_policy.results import LOGGING_POLICY
from recpo.evaluation.true_rewards import TrueRewards, true_rewards
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward

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
        message = f"a calibration needs finite scores of at least one event, got {len(score)}"
        raise RecpoError(message, code="bad_value", field="score")
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
    """
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
    """
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
    drawn = [
        [statistic(times[rows].astype(np.float64)) for statistic in statistics.values()]
        for part in resampled(int(rows.max()) + 1, resamples, seed)
        for times in part
    ]
    intervals = map(percentile_interval, np.array(drawn).reshape(resamples, len(statistics)).T)
    plain = np.ones(len(rows))
    return {
        name: BootstrapEstimate(statistic(plain), *interval)
        for (name, statistic), interval in zip(statistics.items(), intervals, strict=True)
    }


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
    """Held-out exposures that a reward scored.

    Attributes:
        score: ``[N, K]``, one column per target; of a reward that is compared, that of the grade and that of dislikes.
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


def selected(exposures: Exposures, which: BoolArray) -> Exposures:
    """The exposures ``which [N]``."""
    return Exposures._make(column[which] for column in exposures)


def _assess_target(
    test: Exposures, k: int, fitted: Platt, *, is_grade: bool, resamples: int, seed: int
) -> dict[str, Any]:
    """Accuracy of target k before and after calibration: ranking and calibration of an event, errors of a grade."""
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
            message = f"target {name}: no exposure of the validation period is graded, so nothing can be fitted"
            raise RecpoError(message, code="empty", field=name)
        fitted = fit_platt(valid.score[known, column], valid.target[known, column])
        options: dict[str, Any] = {"is_grade": name == "grade", "resamples": resamples, "seed": seed}
        found[name] = {
            "calibration": fitted._asdict(),
            "test": {
                group: _assess_target(selected(test, shown), column, fitted, **options)
                for group, shown in groups(test.is_random)
                if (test.known[:, column] & shown).any()
            },
        }
    return {"exposures": _sizes(valid, test), "targets": found}


def _sizes(valid: Exposures, test: Exposures) -> dict[str, int]:
    return {"valid": len(valid.user), "test": len(test.user), "test_random": int(test.is_random.sum())}


def groups(is_random: BoolArray) -> tuple[tuple[str, BoolArray], ...]:
    """All exposures, and the random ones among them, as masks."""
    return ("all", np.ones(len(is_random), bool)), ("random", is_random)


_GRADE, _DISLIKE = 0, 1  # columns of compared rewards
_MOST_CANDIDATES = 1 << 22  # maximum of users times items per batch
_NO_PROPENSITIES = (
    "the log of the test period has no propensities, so the value of the greedy lists is not estimated from the log"
)


class ComparedReward(NamedTuple):
    """A reward to compare.

    Attributes:
        reward: the reward.
        dislike_score: scores of dislikes ``[B, S]`` of a batch's slates; None = it has no head for them.
    """

    reward: RewardFunction
    dislike_score: Callable[[FeedbackBatch], Tensor] | None = None

    def columns(self, feedback: FeedbackBatch) -> list[Tensor]:
        """The columns of ``Exposures``, without users and random flags: rewards of grades, and scores of dislikes."""
        slates = feedback.slates
        assert slates.grade is not None
        assert slates.dislike is not None
        value = self.reward(feedback, slates).double()
        score = torch.full_like(value, torch.nan) if self.dislike_score is None else self.dislike_score(feedback)
        scores = torch.stack([value, score.double()], -1)
        targets = torch.stack([slates.grade.double(), slates.dislike.double()], -1)
        return [scores, targets, scores.isfinite() & targets.isfinite()]


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(PassOptions):
    """How rewards are compared."""

    k: PositiveInt = 10
    """length of the greedy lists"""
    truth: Path | str | None = None
    """directory written by ``recpo simulate``; adds the true value of the lists on the first day of the period"""
    logged_reward: LoggedReward = LoggedReward()  # noqa: RUF009  frozen
    """reward of logged items, for the value that is estimated from the log"""
    resamples: PositiveInt = 200
    """number of resamples of the bootstrap over users"""
    seed: Seed = 0
    """seed of the bootstrap"""


@dataclass(frozen=True)
class RewardComparison:
    """The data and options that all rewards share.

    Attributes:
        data: the log.
        options: how rewards are compared.
        device: where rewards are computed.
        k: length of the greedy lists, at most the catalog.
        truth: the truth of a simulated log.
        value: estimates the value of lists from the log; None = the log has no propensities.
        candidates: items that may be listed at the start of the test period; None = all that are not retired.
    """

    data: Prepared
    options: CalibrationOptions
    device: torch.device
    k: int
    truth: TrueRewards | None
    value: OffPolicySetting | None
    candidates: Candidates | None

    @classmethod
    def of(cls, data: Prepared, options: CalibrationOptions, device: torch.device) -> RewardComparison:
        """Reads what all rewards share."""
        k = min(options.k, data.num_items)
        truth = None if options.truth is None else true_rewards(Path(options.truth), data, "test", [k])
        value = None
        if propensity_share(data, "test"):
            estimation = OffPolicyOptions(resamples=options.resamples, seed=options.seed)
            value = OffPolicySetting(estimation, options.logged_reward, data.num_items, [k])
        return cls(data, options, device, k, truth, value, candidates_of(data, "test", None))

    def exposures(self, split: HeldOut, columns: Callable[[FeedbackBatch], list[Tensor]]) -> list[Any]:
        """The ``columns [B, S, ...]`` of a period's exposures, followed by their users and random flags, as arrays.

        Raises:
            RecpoError: nobody has one.
        """
        parts = [_columns_of(batch, columns) for batch in self._batches(split, self.options)]
        if not parts:
            message = "no user has an event in a held-out period, so nothing can be calibrated"
            raise RecpoError(message, code="empty", field="prepared")
        return _joined(parts)

    def compare(self, rewards: Mapping[str, ComparedReward]) -> dict[str, Any]:
        """The content of a ``CalibrationReport``."""
        exposures, found, notes = {}, {}, [] if self.value is not None else [_NO_PROPENSITIES]
        logging: dict[str, Any] = {}
        candidates = self.candidates
        num_candidates = self.data.num_items if candidates is None else int(candidates.is_candidate.sum())
        for name, compared in rewards.items():
            valid = _rated(name, "valid", self.exposures("valid", compared.columns))
            test, lists, logging = self._test(name, compared)
            scale, shift = fit_line(valid.score[:, _GRADE], valid.target[:, _GRADE])
            shown = {group: selected(test, which) for group, which in groups(test.is_random) if which.any()}
            seen = {of: lists[of] for of in ("users", "coverage", "overlap")}
            caution = similar_lists_warning(name, k=self.k, items=num_candidates, **seen)
            notes += [] if caution is None else [caution]
            found[name] = {
                "kind": type(compared.reward).__name__,
                "scale": scale,
                "shift": shift,
                "test": {group: self._errors(one, scale, shift) for group, one in shown.items()},
                "lists": lists,
            }
            exposures[name] = _sizes(valid, test)
        return {"k": self.k, "exposures": exposures, "logging_policy": logging, "rewards": found, "notes": notes}

    def _test(self, name: str, compared: ComparedReward) -> tuple[Exposures, dict[str, Any], dict[str, Any]]:
        """One pass over the test period: its exposures, and the value of the greedy lists and of the logging policy."""
        num_items, exposures = self.data.num_items, []
        value = None if self.value is None else self.value.measure()
        at_once = max(1, min(self.options.batch_size, _MOST_CANDIDATES // num_items))

        def batches() -> Iterator[EvaluationBatch]:
            for batch in self._batches("test", replace(self.options, batch_size=at_once)):
                exposures.append(_columns_of(batch, compared.columns))
                yield batch

        result = evaluate_ranking(
            Recommender(
                name=name,
                recommend_to_batch=lambda batch, k, exclude: greedy_lists(
                    compared.reward, batch, num_items, k, exclude
                ),
            ),
            batches(),
            Ranking(num_items=num_items, ks=[self.k], candidates=self.candidates),
            measures=[one for one in (value, self.truth) if one is not None],
        )
        lists: dict[str, Any] = {}
        logging: dict[str, Any] = {}
        if value is not None:
            estimated = value.result()
            for of, target, estimator in ((lists, f"top_{self.k}", "SNIPS"), (logging, LOGGING_POLICY, "mean")):
                one = estimated.estimate(target, estimator)
                of["off_policy"] = BootstrapEstimate(one.value, *one.intervals["normal"])
        if self.truth is not None:
            for metric in ("true_reward", "true_dislike"):
                lists[metric] = BootstrapEstimate.of_mean(result.per_user[f"{metric}@{self.k}"])
            (earned,) = self.truth.of_logging_policy(result.user_ids).values()
            logging["true_reward"] = BootstrapEstimate.of_mean(earned)
        totals = {total: result.totals[f"{total}@{self.k}"] for total in ("coverage", "overlap")}
        found = {**as_json(lists), "users": result.counts["users"], **as_json(totals)}
        return _rated(name, "test", _joined(exposures)), found, as_json(logging)

    def _batches(self, split: HeldOut, options: PassOptions) -> Iterator[EvaluationBatch]:
        """Held-out users with the longest history in the data. Models take the part that they read."""
        length, reads = int(self.data.manifest["max_context"]), Reads(True, True, True)
        return held_out_batches(self.data, split, length, reads, options, self.device, f"calibrate: {split}")

    def _errors(self, test: Exposures, scale: float, shift: float) -> dict[str, Any]:
        """Error and rank correlations of one group of exposures."""
        options = {"resamples": self.options.resamples, "seed": self.options.seed}
        predicted = scale * test.score[:, _GRADE] + shift
        intervals = assess_grades(predicted, test.target[:, _GRADE], test.user, **options)
        if test.known[:, _DISLIKE].all():
            rank, disliked = ranks(test.score[:, _DISLIKE]), test.target[:, _DISLIKE] > 0.5
            auc = {"dislike_auc": lambda weight: roc_auc(rank, disliked, weight)}
            intervals |= _over_resampled_users(auc, test.user, **options)
        return {"exposures": len(test.user), "users": len(np.unique(test.user)), **as_json(intervals)}


def _columns_of(batch: EvaluationBatch, columns: Callable[[FeedbackBatch], list[Tensor]]) -> list[NDArray[Any]]:
    slates = batch.feedback.slates
    user = batch.user_ids[:, None].expand_as(slates.mask)
    is_random = torch.zeros_like(slates.mask) if slates.is_random is None else slates.is_random
    return [column[slates.mask].cpu().numpy() for column in (*columns(batch.feedback), user, is_random)]


def _joined(parts: Sequence[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _rated(name: str, split: HeldOut, columns: list[Any]) -> Exposures:
    """The exposures with a grade and a reward."""
    rated = Exposures(*columns)
    known = rated.known[:, _GRADE]
    if not known.any():
        raise RecpoError(
            f"{name}: no exposure of the {split} period has both a grade and a reward, so there is nothing to "
            "compare; grades come from watch times, labels and dislikes (recpo prepare)",
            code="empty",
            field=name,
        )
    return selected(rated, known)


def greedy_lists(
    reward: RewardFunction, batch: EvaluationBatch, num_items: int, k: int, exclude: Tensor | None = None
) -> Recommendations:
    """The k items of the catalog with the highest reward; ties go to the smaller id.

    Scores are rewards. If fewer than k items are left or known, the remaining ids are 0 and their scores -inf.

    Args:
        reward: the reward to maximize.
        batch: users.
        num_items: catalog size V.
        k: length of the greedy lists.
        exclude: ``[B, N]`` items that may not be listed, 0 pads; None = every item may be.
    """
    catalog = catalog_slates(batch.feedback.histories, num_items)
    rewards = reward(batch.feedback._replace(slates=catalog), catalog).double()
    rewards = rewards.masked_fill(rewards.isnan(), -torch.inf)
    if exclude is not None:
        padded = torch.nn.functional.pad(rewards, (1, 0))  # column 0 receives the padding
        rewards = padded.scatter(1, exclude, -torch.inf)[:, 1:]
    best, place = rewards.sort(dim=1, descending=True, stable=True)
    best, place = best[:, :k], place[:, :k]
    return Recommendations((place + 1).masked_fill(best == -torch.inf, 0), best)


@dataclass(frozen=True)
class CalibrationReport:
    """The quality of several rewards, on data that is later than everything they learned from.

    Attributes:
        content: ``{exposures: {valid, test, test_random}, k, notes, constant: {test: ...}, logging_policy: {...},
            rewards: {name: {kind, scale, shift, test: {all | random: {exposures, users, rmse: {value, low, high},
            rank_correlation, rank_correlation_per_user, dislike_auc}}, lists: {off_policy, true_reward,
            true_dislike, users, coverage, overlap}}}}``; the last three are numbers, of all lists together.
        calibrations: for every run among them, the content of its ``calibration.json``, by name.
        path: JSON file with ``content``; None = it was not written.
    """

    content: dict[str, Any]
    calibrations: dict[str, dict[str, Any]]
    path: Path | None = None

    def to_pandas(self) -> pd.DataFrame:
        """One row per reward, group of exposures (``lists`` = its greedy lists) and metric: ``value low high``."""
        rows = [
            (name, group, metric, number["value"], number["low"], number["high"])
            for name, entry in self.content["rewards"].items()
            for group, found in (*entry["test"].items(), ("lists", entry["lists"]))
            for metric, number in found.items()
            if isinstance(number, dict)
        ]
        return pd.DataFrame(rows, columns=["reward", "shown", "metric", "value", "low", "high"])
