"""The verb ``calibrate``: calibrates reward models and compares rewards on later data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import isnan
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from tqdm import tqdm

from recpo.artifacts import kind_of, seal, write_json
from recpo.base.contracts import Objective, RewardFunction
from recpo.base.errors import RecpoError
from recpo.base.features import Reads
from recpo.base.ranges import PositiveInt, Seed
from recpo.base.types import EvaluationBatch, FeedbackBatch, Recommendations, Slates
from recpo.batches.datamodule import evaluation_batches
from recpo.evaluation.beyond_accuracy import Exposure
from recpo.evaluation.calibration import (
    BoolArray,
    BootstrapEstimate,
    CalibrationReport,
    Exposures,
    FloatArray,
    IntArray,
    assess,
    assess_grade_target,
    assess_grades,
    assess_target,
    fit_line,
    fit_platt,
    numbers,
)
from recpo.evaluation.candidates import Candidates, candidates_of
from recpo.evaluation.estimates import estimate
from recpo.evaluation.measures import Observed
from recpo.evaluation.off_policy.measure import OffPolicyMeasure
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.propensities import LoggedPropensities
from recpo.evaluation.off_policy.results import LOGGING_POLICY, OffPolicyEstimate
from recpo.evaluation.off_policy.setting import has_propensities
from recpo.evaluation.reading import alike
from recpo.evaluation.targets import held_out_targets
from recpo.evaluation.true_rewards import TrueRewards, true_rewards
from recpo.log.prepared import Period, Prepared
from recpo.objectives.reward_model import TARGETS, PointwiseReward
from recpo.rewards.rewards import FactorReward, LoggedReward, validate_identity
from recpo.training.learned_reward import (
    CALIBRATION,
    Checkpoint,
    LearnedReward,
    RewardModel,
    checkpoint_sha256,
    load_reward_model,
)
from recpo.training.run import Run
from recpo.verbs.devices import compute_device
from recpo.verbs.verb import Verb, function_of

Source = RewardFunction | Run | str | Path

_MOST_CANDIDATES = 1 << 22  # maximum of users times items per batch
_DISLIKE = TARGETS.index("dislike")
_NO_PROPENSITIES = (
    "the log of the test period has no propensities, so the value of the greedy lists is not estimated from the log"
)


@dataclass(frozen=True)
class Calibrate(Verb[CalibrationReport]):
    """Calibrates reward models on the validation period and compares rewards on the test period.

    For every run of the ``PointwiseReward`` objective, fits ``sigmoid(scale * score + shift)`` (Platt, 1999) to the
    exposures of the validation period, for the grade and for dislikes, and writes it into the run (calibration.json),
    where ``LearnedReward`` reads it. Then measures every reward on the exposures of the test period, scored from what
    was known at the start of the period, and on the random exposures among them: root mean squared error of the grade
    (after a linear fit on the validation period, so that units do not matter), Spearman's rank correlation with the
    grade over all exposures and within users, and the AUC of dislikes if the reward has a head for them. Finally
    measures the value of its greedy lists, the k items with the highest reward for each user without the user's past
    items: estimated from the log (SNIPS with logged propensities) and, for a simulated log, the true value.

    ::

        report = recpo.calibrate(data, {"encoder": "runs/reward_model", "factors": "factors"}, truth="world")
        report.to_pandas()

    Raises:
        RecpoError: an entry of rewards is not a reward or knows other items, a period has no graded exposure, or an
            option is out of range.
    """

    first_day: ClassVar = ("prepared", "rewards", "truth", "out", "k")

    prepared: Prepared | Path | str
    """prepared data, or its directory"""
    rewards: Sequence[Source] | Source | Mapping[str, Source] = ()
    """rewards to compare: runs of reward models, directories of ``recpo factorize`` (users are folded in from their
    history), or reward functions; one, several, or several by name"""
    _: KW_ONLY
    k: PositiveInt = 10
    """length of the greedy lists"""
    truth: Path | str | None = None
    """directory written by ``recpo simulate``; adds the true value of the lists on the first day of the period"""
    logged_reward: LoggedReward = LoggedReward()  # noqa: RUF009  frozen
    """reward of logged items, for the value that is estimated from the log"""
    out: Path | str | None = None
    """JSON file for the comparison; None = none"""
    checkpoint: Checkpoint = "best"
    """which checkpoint of the runs"""
    batch_size: PositiveInt = 512
    """users scored at once; fewer if full catalogs would not fit into memory"""
    resamples: PositiveInt = 200
    """number of resamples of the bootstrap over users"""
    seed: Seed = 0
    """seed of the bootstrap"""
    device: str = "auto"
    """where models run: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on"""
    trust: Sequence[str] = ()
    """packages, in addition to recpo, whose classes the configurations of the runs may name"""
    progress: bool = False
    """show progress bars on a terminal"""

    def execute(self) -> CalibrationReport:
        """Calibrates the runs, then compares all rewards."""
        data = Prepared.open(self.prepared)
        where = compute_device(self.device)
        named = _named(self.rewards)
        opened = {name: _opened(source, data, self.checkpoint, self.trust) for name, source in named.items()}
        setting = _Setting(
            data,
            where,
            self.batch_size,
            self.resamples,
            self.seed,
            min(self.k, data.num_items),
            None if self.truth is None else true_rewards(Path(self.truth), data, "test", [min(self.k, data.num_items)]),
            self.logged_reward if has_propensities(data, "test") else None,
            candidates_of(data, "test", None),
            self.progress,
        )
        calibrations = {
            name: _calibrate_run(one, setting, self.checkpoint) for name, one in opened.items() if _is_fitted(one)
        }
        functions = {name: _function(one, self.checkpoint, self.trust) for name, one in opened.items()}
        content = setting.compare(functions)
        if self.out is not None:
            write_json(Path(self.out), content)
        return CalibrationReport(content, calibrations, None if self.out is None else Path(self.out))


calibrate = function_of(Calibrate)


def _named(rewards: Source | Sequence[Source] | Mapping[str, Source]) -> dict[str, Source]:
    """Names directories by their last part if these differ, else by the whole path; reward functions by their class."""
    if isinstance(rewards, Mapping):
        named = dict(rewards)
    else:
        single = isinstance(rewards, RewardFunction | Run | Path | str)
        sources: list[Source] = [rewards] if single else list(rewards)  # type: ignore[list-item, arg-type]
        paths = [_directory(source) for source in sources]
        if again := [str(path) for path in paths if path is not None and paths.count(path) > 1]:
            raise RecpoError(f"the same directory is named twice: {again[0]}")
        names = [type(one).__name__ if path is None else path.name for one, path in zip(sources, paths, strict=True)]
        named = {}
        for number, (source, path, name) in enumerate(zip(sources, paths, names, strict=True)):
            own = name
            if names.count(name) > 1:
                own = f"{name} {names[: number + 1].count(name)}" if path is None else str(path)
            named[own] = source
    if not named:
        raise RecpoError(
            "nothing to calibrate: name at least one run of a reward model, one directory of factors, or one reward"
        )
    return named


def _directory(source: Source) -> Path | None:
    if isinstance(source, RewardFunction):
        return None
    return (source.root if isinstance(source, Run) else Path(source)).resolve()


def _opened(source: Source, data: Prepared, checkpoint: Checkpoint, trust: Sequence[str]) -> RewardFunction | Run:
    """A run or a reward function of the same items, checked before any of them is used."""
    if isinstance(source, str | Path):
        is_factors = kind_of(Path(source)) == "factors"
        source = FactorReward(Path(source), users="folded") if is_factors else Run.open(source, trust)
    if isinstance(source, Run):
        source.validate_data(data)
        LearnedReward(source.root, calibrated=False, checkpoint=checkpoint, trust=tuple(trust))  # raises if not a run
    else:
        validate_identity(source, type(source).__name__, data)
    return source


def _is_fitted(opened: RewardFunction | Run) -> bool:
    return isinstance(opened, Run) and isinstance(opened.option("objective", Objective), PointwiseReward)


def _function(opened: RewardFunction | Run, checkpoint: Checkpoint, trust: Sequence[str]) -> RewardFunction:
    if isinstance(opened, Run):
        return LearnedReward(opened.root, checkpoint=checkpoint, trust=tuple(trust))
    return opened


def _calibrate_run(run: RewardFunction | Run, setting: _Setting, checkpoint: Checkpoint) -> dict[str, Any]:
    """Fits the calibration of a run of ``PointwiseReward`` and writes it into the run."""
    assert isinstance(run, Run)
    model = load_reward_model(run, checkpoint).to(setting.device)
    assert isinstance(model.objective, PointwiseReward)
    model.objective = model.objective.for_behaviors(setting.data.behaviors)
    valid, test = (_exposures(model, setting, split) for split in ("valid", "test"))
    targets = {}
    for column, name in enumerate(model.objective.target_names):
        known = valid.known[:, column]
        if not known.any():
            raise RecpoError(f"target {name}: no exposure of the validation period is graded, so nothing can be fitted")
        fitted = fit_platt(valid.score[known, column], valid.target[known, column])
        report = assess_grade_target if name == "grade" else assess_target  # a probability, except for the grade
        targets[name] = {
            "calibration": fitted._asdict(),
            "test": {
                group: report(test.only(shown), column, fitted, resamples=setting.resamples, seed=setting.seed)
                for group, shown in _groups(test.is_random)
                if (test.known[:, column] & shown).any()
            },
        }
    content = {
        "checkpoint": checkpoint,
        "checkpoint_sha256": checkpoint_sha256(run.root, checkpoint),
        "exposures": {"valid": len(valid.user), "test": len(test.user), "test_random": int(test.is_random.sum())},
        "targets": targets,
    }
    write_json(run.root / CALIBRATION, seal(content))
    return content


def _exposures(model: RewardModel, setting: _Setting, split: Period) -> Exposures:
    """Every exposure of a period, scored from the information at the start of the period."""
    objective = model.objective
    assert isinstance(objective, PointwiseReward)

    def columns(feedback: FeedbackBatch) -> list[Tensor]:
        slates = feedback.slates
        assert slates.grade is not None
        assert slates.dislike is not None
        targets, known = objective.targets(slates.grade, slates.dislike, slates.behaviors, slates.positive)
        return [model(feedback.histories, slates).double(), targets.double(), known]

    return Exposures(*setting.collect(split, columns))


def _groups(is_random: BoolArray) -> tuple[tuple[str, BoolArray], ...]:
    return ("all", np.ones(len(is_random), bool)), ("random", is_random)


@dataclass(frozen=True)
class _Scored:
    """A reward's predictions of graded exposures, ``[N]`` each; ``dislike_score`` if it has a head for dislikes."""

    reward: FloatArray
    grade: FloatArray
    user: IntArray
    is_random: BoolArray
    dislike: BoolArray
    dislike_score: FloatArray

    def only(self, which: BoolArray) -> _Scored:
        return _Scored(*(column[which] for column in vars(self).values()))


@dataclass(frozen=True)
class _Setting:
    """The data and options that all rewards share.

    Attributes:
        data: the log.
        device: where rewards are computed.
        batch_size: users scored at once.
        resamples: number of resamples of the bootstrap.
        seed: seed of the bootstrap.
        k: length of the greedy lists.
        truth: the truth of a simulated log.
        logged_reward: reward of logged items, for the value; None = the log has no propensities.
        candidates: items that may be listed at the start of the test period; None = all that are not retired.
        progress: show a bar for every pass over the users of a period.
    """

    data: Prepared
    device: torch.device
    batch_size: int
    resamples: int
    seed: int
    k: int
    truth: TrueRewards | None
    logged_reward: LoggedReward | None
    candidates: Candidates | None
    progress: bool = False

    def batches(self, split: Period, batch_size: int) -> Iterator[EvaluationBatch]:
        """Held-out users with the longest history in the data. Models take the part that they read."""
        length = int(self.data.manifest["max_context"])
        users, hidden = int(self.data.manifest["counts"]["splits"][split]["users"]), None if self.progress else True
        with tqdm(total=users, desc=f"calibrate: {split}", unit="user", disable=hidden, leave=False) as bar:
            for batch in evaluation_batches(self.data.root, split, length, batch_size, Reads(True, True, True)):
                yield move_data_to_device(batch, self.device)
                bar.update(len(batch.user_ids))

    def collect(self, split: Period, columns: Callable[[FeedbackBatch], list[Tensor]]) -> list[Any]:
        """The ``columns [B, S, ...]`` of a period's exposures, followed by their users and random flags, as arrays."""
        parts: list[list[Any]] = []
        for batch in self.batches(split, self.batch_size):
            slates = batch.feedback.slates
            user = batch.user_ids[:, None].expand_as(slates.mask)
            is_random = torch.zeros_like(slates.mask) if slates.is_random is None else slates.is_random
            every = [*columns(batch.feedback), user, is_random]
            parts.append([column[slates.mask].cpu().numpy() for column in every])
        if not parts:
            raise RecpoError(
                f"{self.data.root}: no user has an event in the {split} period, so nothing can be calibrated"
            )
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def compare(self, rewards: Mapping[str, RewardFunction]) -> dict[str, Any]:
        """The content of a ``CalibrationReport``."""
        found, counts, notes = {}, {}, [] if self.logged_reward is not None else [_NO_PROPENSITIES]
        logging: dict[str, Any] = {}
        for name, reward in rewards.items():
            valid, test = (self.scored(name, reward, split) for split in ("valid", "test"))
            scale, shift = fit_line(valid.reward, valid.grade)
            lists, logging = self.lists(reward)
            shares = {part: lists[part] for part in ("users", "coverage", "overlap")}
            caution = alike(name, k=self.k, items=self.num_candidates, **shares)
            notes += [] if caution is None else [caution]
            found[name] = {
                "kind": type(reward).__name__,
                "scale": scale,
                "shift": shift,
                "test": {
                    group: self.errors(test.only(shown), scale, shift)
                    for group, shown in _groups(test.is_random)
                    if shown.any()
                },
                "lists": lists,
            }
            random = int(test.is_random.sum())
            counts[name] = {"valid": len(valid.user), "test": len(test.user), "test_random": random}
        return {
            "k": self.k,
            "exposures": counts,
            "logging_policy": logging,
            "rewards": found,
            "notes": notes,
        }

    def scored(self, name: str, reward: RewardFunction, split: Period) -> _Scored:
        """The exposures with a grade and a reward."""
        has_head = isinstance(reward, LearnedReward) and reward.predicts_dislikes

        def columns(feedback: FeedbackBatch) -> list[Tensor]:
            slates = feedback.slates
            assert slates.grade is not None
            assert slates.dislike is not None
            value = reward(feedback, slates).double()
            score = torch.full_like(value, torch.nan)
            if has_head:
                assert isinstance(reward, LearnedReward)
                score = reward.predictions(feedback, slates)[..., _DISLIKE].double()
            return [value, slates.grade.double(), slates.dislike, score]

        value, grade, dislike, score, user, is_random = self.collect(split, columns)
        scored = _Scored(value, grade, user, is_random, dislike, score)
        known = np.isfinite(value) & np.isfinite(grade)
        if not known.any():
            raise RecpoError(
                f"{name}: no exposure of the {split} period has both a grade and a reward, so there is nothing to "
                "compare; grades come from watch times, labels and dislikes (recpo prepare)"
            )
        return scored.only(known)

    def errors(self, test: _Scored, scale: float, shift: float) -> dict[str, Any]:
        """Error and rank correlations of one group of exposures."""
        predicted = scale * test.reward + shift
        intervals = assess_grades(predicted, test.grade, test.user, resamples=self.resamples, seed=self.seed)
        if not np.isnan(test.dislike_score).any():
            ranked = assess(test.dislike_score, test.dislike, test.user, resamples=self.resamples, seed=self.seed)
            intervals["dislike_auc"] = ranked["auc"]
        return {"exposures": len(test.user), "users": len(np.unique(test.user)), **numbers(intervals)}

    @property
    def num_candidates(self) -> int:
        """How many items may be listed."""
        return self.data.num_items if self.candidates is None else int(self.candidates.is_candidate.sum())

    def lists(self, reward: RewardFunction) -> tuple[dict[str, Any], dict[str, Any]]:
        """Value and exposure of the reward's greedy lists, and value of the logging policy, on the same users."""
        measure, users = self._off_policy(), 0
        is_candidate = None if self.candidates is None else self.candidates.is_candidate
        exposure = Exposure(self.data.num_items, [self.k], is_candidate)
        true: dict[str, list[Tensor]] = {}
        for batch in self.batches("test", max(1, min(self.batch_size, _MOST_CANDIDATES // self.data.num_items))):
            absent = None if self.candidates is None else self.candidates.unavailable(batch.user_ids)
            best = greedy_lists(reward, batch, self.data.num_items, self.k, absent)
            exposure.add(best.item_ids)
            users += len(best.item_ids)
            if measure is not None:
                measure.update(Observed(batch, best, held_out_targets(batch), None, unavailable=absent))
            if self.truth is not None:
                metrics = self.truth.of_lists(batch.user_ids, best.item_ids)
                metrics["logging"] = self.truth.of_logging_policy(batch.user_ids.cpu())[f"true_reward@{self.k}"]
                for metric, values in metrics.items():
                    true.setdefault(metric, []).append(values)
        ours, logging = {}, {}
        if measure is not None:
            result = measure.result()
            ours["off_policy"] = _interval_of(result.estimate(f"top_{self.k}", "SNIPS"))
            logging["off_policy"] = _interval_of(result.estimate(LOGGING_POLICY, "mean"))
        means = {name: _mean(torch.cat(values)) for name, values in true.items()}
        if means:
            ours["true_reward"], ours["true_dislike"] = (means[f"true_{n}@{self.k}"] for n in ("reward", "dislike"))
            logging["true_reward"] = means["logging"]
        totals = {metric: exposure.totals()[f"{metric}@{self.k}"] for metric in ("coverage", "overlap")}
        shares = {metric: None if isnan(value) else value for metric, value in totals.items()}
        return {**numbers(ours), "users": users, **shares}, dict(numbers(logging))

    def _off_policy(self) -> OffPolicyMeasure | None:
        if self.logged_reward is None:
            return None
        return OffPolicyMeasure(
            OffPolicyOptions(resamples=self.resamples, seed=self.seed),
            reward=self.logged_reward,
            propensities=LoggedPropensities(),
            num_items=self.data.num_items,
            ks=[self.k],
        )


def greedy_lists(
    reward: RewardFunction, batch: EvaluationBatch, num_items: int, k: int, unavailable: Tensor | None = None
) -> Recommendations:
    """The k items of the catalog with the highest reward, without the user's past items; ties go to the smaller id.

    Scores are rewards. If fewer than k items are left or known, the remaining ids are 0 and their scores -inf.

    Args:
        reward: the reward to maximize.
        batch: users.
        num_items: catalog size V.
        k: length of the greedy lists.
        unavailable: ``[B, N]`` items that are not candidates, 0 pads; None = every item is a candidate.
    """
    histories = batch.feedback.histories
    users = len(histories.lengths)
    items = torch.arange(1, num_items + 1, device=histories.lengths.device).expand(users, -1).contiguous()
    visible = histories.lengths[:, None].expand_as(items).contiguous()
    catalog = Slates(items, visible, torch.ones_like(items, dtype=torch.bool))
    rewards = reward(batch.feedback._replace(slates=catalog), catalog).double()
    rewards = rewards.masked_fill(rewards.isnan(), -torch.inf)
    padded = torch.nn.functional.pad(rewards, (1, 0))  # column 0 receives the padding of the past
    padded = padded.scatter(1, batch.exclude, -torch.inf)
    rewards = (padded if unavailable is None else padded.scatter(1, unavailable, -torch.inf))[:, 1:]
    best, place = rewards.sort(dim=1, descending=True, stable=True)
    best, place = best[:, :k], place[:, :k]
    return Recommendations((place + 1).masked_fill(best == -torch.inf, 0), best)


def _interval_of(found: OffPolicyEstimate) -> BootstrapEstimate:
    interval = found.intervals["normal"]
    return BootstrapEstimate(found.value, interval.low, interval.high)


def _mean(values: Tensor) -> BootstrapEstimate:
    mean, half_width, _ = estimate(values.double())
    return BootstrapEstimate(mean, mean - half_width, mean + half_width)
