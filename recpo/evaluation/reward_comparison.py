"""Rewards compared on later data: their errors on held-out exposures, and the value of their greedy lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.base.contracts import RewardFunction
from recpo.base.errors import PositiveInt, RecpoError, Seed
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch, FeedbackBatch, Recommendations, Slates
from recpo.evaluation.calibration import (
    BoolArray,
    BootstrapEstimate,
    FloatArray,
    IntArray,
    assess,
    assess_grades,
    fit_line,
    groups,
    selected,
)
from recpo.evaluation.candidates import Candidates, candidates_of
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.estimates import as_json
from recpo.evaluation.held_out_pass import HeldOut, PassOptions, held_out_batches
from recpo.evaluation.measures import Measure, Observed, Recommender
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.evaluation.off_policy.measure import OffPolicySetting, has_propensities
from recpo.evaluation.off_policy.results import LOGGING_POLICY, OffPolicyEstimate
from recpo.evaluation.reading import alike
from recpo.evaluation.true_rewards import TrueRewards, true_rewards
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward

if TYPE_CHECKING:
    import pandas as pd

_MOST_CANDIDATES = 1 << 22  # maximum of users times items per batch
_NO_PROPENSITIES = (
    "the log of the test period has no propensities, so the value of the greedy lists is not estimated from the log"
)


class RatedExposures(NamedTuple):
    """A reward's predictions of graded exposures, ``[N]`` each; dislike scores are nan without a head for them."""

    reward: FloatArray
    grade: FloatArray
    dislike: BoolArray
    dislike_score: FloatArray
    user: IntArray
    is_random: BoolArray


class ComparedReward(NamedTuple):
    """A reward to compare.

    Attributes:
        reward: the reward.
        dislike_score: scores of dislikes ``[B, S]`` of a batch's slates; None = it has no head for them.
    """

    reward: RewardFunction
    dislike_score: Callable[[FeedbackBatch], Tensor] | None = None

    def columns(self, feedback: FeedbackBatch) -> list[Tensor]:
        """The columns of ``RatedExposures``, without users and random flags."""
        slates = feedback.slates
        assert slates.grade is not None
        assert slates.dislike is not None
        value = self.reward(feedback, slates).double()
        score = torch.full_like(value, torch.nan) if self.dislike_score is None else self.dislike_score(feedback)
        return [value, slates.grade.double(), slates.dislike, score.double()]


class ExposureColumns(Measure):
    """Collects columns of the held-out exposures: those of a function, their users and their random flags.

    Args:
        columns: columns ``[B, S, ...]`` of the exposures of a batch.
    """

    def __init__(self, columns: Callable[[FeedbackBatch], list[Tensor]]) -> None:
        self._columns = columns
        self._parts: list[list[Any]] = []

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """Adds a batch; there are no per-user metrics."""
        self.add(observed.batch)
        return {}

    def add(self, batch: EvaluationBatch) -> None:
        """Adds a batch."""
        slates = batch.feedback.slates
        user = batch.user_ids[:, None].expand_as(slates.mask)
        is_random = torch.zeros_like(slates.mask) if slates.is_random is None else slates.is_random
        every = [*self._columns(batch.feedback), user, is_random]
        self._parts.append([column[slates.mask].cpu().numpy() for column in every])

    def arrays(self) -> list[Any]:
        """The columns of all batches so far, as arrays.

        Raises:
            RecpoError: there was no batch.
        """
        if not self._parts:
            raise RecpoError(
                "no user has an event in a held-out period, so nothing can be calibrated",
                code="empty",
                field="prepared",
            )
        return [np.concatenate(column) for column in zip(*self._parts, strict=True)]


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
        estimates_value: the log has propensities, so the value of lists is estimated from it.
        candidates: items that may be listed at the start of the test period; None = all that are not retired.
    """

    data: Prepared
    options: CalibrationOptions
    device: torch.device
    k: int
    truth: TrueRewards | None
    estimates_value: bool
    candidates: Candidates | None

    @classmethod
    def of(cls, data: Prepared, options: CalibrationOptions, device: torch.device) -> RewardComparison:
        """Reads what all rewards share."""
        k = min(options.k, data.num_items)
        truth = None if options.truth is None else true_rewards(Path(options.truth), data, "test", [k])
        return cls(data, options, device, k, truth, has_propensities(data, "test"), candidates_of(data, "test", None))

    def exposures(self, split: HeldOut, columns: Callable[[FeedbackBatch], list[Tensor]]) -> list[Any]:
        """The ``columns [B, S, ...]`` of a period's exposures, followed by their users and random flags, as arrays."""
        collected = ExposureColumns(columns)
        for batch in self._batches(split, self.options):
            collected.add(batch)
        return collected.arrays()

    def compare(self, rewards: Mapping[str, ComparedReward]) -> dict[str, Any]:
        """The content of a ``CalibrationReport``."""
        exposures, found, notes = {}, {}, [] if self.estimates_value else [_NO_PROPENSITIES]
        logging: dict[str, Any] = {}
        for name, compared in rewards.items():
            valid = _rated(name, "valid", self.exposures("valid", compared.columns))
            test, lists, logging = self._test(name, compared)
            scale, shift = fit_line(valid.reward, valid.grade)
            shown = {group: selected(test, which) for group, which in groups(test.is_random) if which.any()}
            caution = alike(
                name, k=self.k, items=self._num_candidates, **{of: lists[of] for of in ("users", "coverage", "overlap")}
            )
            notes += [] if caution is None else [caution]
            found[name] = {
                "kind": type(compared.reward).__name__,
                "scale": scale,
                "shift": shift,
                "test": {group: self._errors(one, scale, shift) for group, one in shown.items()},
                "lists": lists,
            }
            random = int(test.is_random.sum())
            exposures[name] = {"valid": len(valid.user), "test": len(test.user), "test_random": random}
        return {"k": self.k, "exposures": exposures, "logging_policy": logging, "rewards": found, "notes": notes}

    def _test(self, name: str, compared: ComparedReward) -> tuple[RatedExposures, dict[str, Any], dict[str, Any]]:
        """One pass over the test period: its exposures, and the value of the greedy lists and of the logging policy."""
        num_items, exposures = self.data.num_items, ExposureColumns(compared.columns)
        estimation = OffPolicyOptions(resamples=self.options.resamples, seed=self.options.seed)
        setting = OffPolicySetting(estimation, self.options.logged_reward, num_items, [self.k])
        value = setting.measure() if self.estimates_value else None
        at_once = max(1, min(self.options.batch_size, _MOST_CANDIDATES // num_items))
        result = evaluate_ranking(
            Recommender(
                name=name,
                recommend_to_batch=lambda batch, k, exclude, _: greedy_lists(
                    compared.reward, batch, num_items, k, exclude
                ),
            ),
            self._batches("test", PassOptions(batch_size=at_once, progress=self.options.progress)),
            Ranking(num_items=num_items, ks=[self.k], candidates=self.candidates),
            measures=[exposures, *(one for one in (value, self.truth) if one is not None)],
        )
        lists, logging = {}, {}
        if value is not None:
            estimated = value.result()
            lists["off_policy"] = _interval_of(estimated.estimate(f"top_{self.k}", "SNIPS"))
            logging["off_policy"] = _interval_of(estimated.estimate(LOGGING_POLICY, "mean"))
        if self.truth is not None:
            known = result.per_user | {"logging": next(iter(self.truth.of_logging_policy(result.user_ids).values()))}
            lists["true_reward"], lists["true_dislike"] = (
                BootstrapEstimate.of_mean(known[f"true_{part}@{self.k}"]) for part in ("reward", "dislike")
            )
            logging["true_reward"] = BootstrapEstimate.of_mean(known["logging"])
        totals = {total: result.totals[f"{total}@{self.k}"] for total in ("coverage", "overlap")}
        found = {**as_json(lists), "users": result.counts["users"], **as_json(totals)}
        return _rated(name, "test", exposures.arrays()), found, as_json(logging)

    def _batches(self, split: HeldOut, options: PassOptions) -> Iterator[EvaluationBatch]:
        """Held-out users with the longest history in the data. Models take the part that they read."""
        length, reads = int(self.data.manifest["max_context"]), Reads(True, True, True)
        return held_out_batches(self.data, split, length, reads, options, self.device, f"calibrate: {split}")

    def _errors(self, test: RatedExposures, scale: float, shift: float) -> dict[str, Any]:
        """Error and rank correlations of one group of exposures."""
        options = {"resamples": self.options.resamples, "seed": self.options.seed}
        intervals = assess_grades(scale * test.reward + shift, test.grade, test.user, **options)
        if not np.isnan(test.dislike_score).any():
            intervals["dislike_auc"] = assess(test.dislike_score, test.dislike, test.user, **options)["auc"]
        return {"exposures": len(test.user), "users": len(np.unique(test.user)), **as_json(intervals)}

    @property
    def _num_candidates(self) -> int:
        """How many items may be listed."""
        return self.data.num_items if self.candidates is None else int(self.candidates.is_candidate.sum())


def _rated(name: str, split: HeldOut, columns: list[Any]) -> RatedExposures:
    """The exposures with a grade and a reward."""
    rated = RatedExposures(*columns)
    known = np.isfinite(rated.reward) & np.isfinite(rated.grade)
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
    histories = batch.feedback.histories
    users = len(histories.lengths)
    items = torch.arange(1, num_items + 1, device=histories.lengths.device).expand(users, -1).contiguous()
    visible = histories.lengths[:, None].expand_as(items).contiguous()
    catalog = Slates(items, visible, torch.ones_like(items, dtype=torch.bool))
    rewards = reward(batch.feedback._replace(slates=catalog), catalog).double()
    rewards = rewards.masked_fill(rewards.isnan(), -torch.inf)
    if exclude is not None:
        padded = torch.nn.functional.pad(rewards, (1, 0))  # column 0 receives the padding
        rewards = padded.scatter(1, exclude, -torch.inf)[:, 1:]
    best, place = rewards.sort(dim=1, descending=True, stable=True)
    best, place = best[:, :k], place[:, :k]
    return Recommendations((place + 1).masked_fill(best == -torch.inf, 0), best)


def _interval_of(found: OffPolicyEstimate) -> BootstrapEstimate:
    interval = found.intervals["normal"]
    return BootstrapEstimate(found.value, interval.low, interval.high)


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
        import pandas as pd

        rows = [
            (name, group, metric, number["value"], number["low"], number["high"])
            for name, entry in self.content["rewards"].items()
            for group, found in (*entry["test"].items(), ("lists", entry["lists"]))
            for metric, number in found.items()
            if isinstance(number, dict)
        ]
        return pd.DataFrame(rows, columns=["reward", "shown", "metric", "value", "low", "high"])
