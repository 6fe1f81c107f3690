"""A trained reward model: loaded from its run directory, calibrated, and used as a reward."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from recpo.artifacts.checksums import unseal
from recpo.artifacts.documents import read_json
from recpo.base.contracts import Objective, RewardFunction, RewardScope, StatePolicy
from recpo.base.errors import RecpoError
from recpo.base.features import Reads
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.objectives.reward_model import PointwiseReward
from recpo.ops.kernels import without_autocast
from recpo.training.networks import ItemScore, item_scores
from recpo.training.options import CriticOptions
from recpo.training.run import Run, load_weights

CALIBRATION = "calibration.json"

Checkpoint = Literal["best", "last"]


class RewardModel(nn.Module):
    """The score head of a run on the states of its policy; frozen, in evaluation mode.

    Args:
        policy: the policy whose states and item vectors it reads.
        head: the scores.
        objective: the objective that trained them.
    """

    def __init__(self, policy: StatePolicy, head: ItemScore, objective: Objective) -> None:
        super().__init__()
        self.policy, self.head, self.objective = policy, head, objective
        self.requires_grad_(False).eval()

    def forward(self, histories: Histories, slates: Slates) -> Tensor:
        """Scores ``[B, S, K]`` in float32, in any training precision; 0 at masked positions.

        If a history is longer than the policy reads, the most recent events are used. Every position must then be
        scored after the complete history.
        """
        histories, slates = self._readable(histories, slates)
        with without_autocast(slates.item_ids.device):
            return item_scores(self.policy, self.head, histories, slates)

    def _readable(self, histories: Histories, slates: Slates) -> tuple[Histories, Slates]:
        most, lengths = self.policy.max_history, histories.lengths[:, None]
        dropped = (lengths - most).clamp_min(0)
        if histories.item_ids.shape[1] <= most:
            return histories, slates
        if bool((slates.mask & (dropped > 0) & (slates.visible < lengths)).any()):
            raise RecpoError(
                f"the reward model reads {most} events and is asked about positions in the middle of longer histories: "
                f"set data.layout.init_args.history_length to {most}, or train it with a larger max_history",
                code="unsupported",
                field="history_length",
            )
        return histories.recent(most), slates._replace(visible=(slates.visible - dropped).clamp_min(0))


class Calibration(NamedTuple):
    """``expected grade or probability = sigmoid(scale_k score_k + shift_k)`` (Platt, 1999), per target."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def probabilities(self, scores: Tensor) -> Tensor:
        """Of scores ``[..., K]``."""
        scale, shift = (torch.tensor(values, dtype=scores.dtype, device=scores.device) for values in self)
        return (scores * scale + shift).sigmoid()


def load_reward_model(run: Path | Run, checkpoint: Checkpoint = "best") -> RewardModel:
    """Rebuilds the reward model of a finished run of ``recpo train``; nothing is unpickled.

    Raises:
        RecpoError: the run did not finish, trained no score head, or the checkpoint does not fit.
    """
    run = Run.open(run)
    objective, policy = _objective_of(run), run.policy(checkpoint)
    assert isinstance(policy, StatePolicy)
    options: CriticOptions = run.option("critic", CriticOptions)
    head = ItemScore(policy.num_items, policy.dim, options.hidden, objective.num_scores)
    load_weights(head, run.checkpoint(checkpoint), "critic.score.")
    return RewardModel(policy, head, objective)


def _objective_of(run: Run) -> Objective:
    objective: Objective = run.option("objective", Objective)
    if "score" not in objective.requires:
        raise RecpoError(
            f"{run.root} trained {type(objective).__name__}, which is no reward model: name a run of PointwiseReward "
            "or PairwiseReward",
            code="wrong_class",
            field="run",
        )
    return objective


def load_calibration(run: Run, checkpoint: Checkpoint, names: tuple[str, ...]) -> Calibration:
    """The calibration that ``recpo calibrate`` fitted.

    Args:
        run: run of the reward model.
        checkpoint: the checkpoint of the run.
        names: its targets (``PointwiseReward.target_names``).

    Raises:
        RecpoError: there is no calibration, or it belongs to other weights.
    """
    fix = f"run `recpo calibrate --rewards {run.root} --checkpoint {checkpoint}` with the prepared directory it was "
    fix += "trained on"
    file = run.root / CALIBRATION
    if not file.is_file():
        raise RecpoError(
            f"{run.root} is not calibrated: its scores are no probabilities yet; {fix}",
            code="missing_file",
            field=CALIBRATION,
        )
    content = unseal(read_json(file, fix), file, fix)
    if content.get("weights") != run.checkpoint_files(checkpoint):
        raise RecpoError(
            f"{file} belongs to other weights than {run.checkpoint(checkpoint)}; {fix}",
            code="mismatch",
            field=CALIBRATION,
        )
    if set(content["targets"]) != set(names):
        found, expected = ", ".join(content["targets"]), ", ".join(names)
        raise RecpoError(
            f"{file} is of a reward model of other targets ({found}), expected {expected}; train it again",
            code="old_format",
            field=CALIBRATION,
        )
    fitted = [content["targets"][name]["calibration"] for name in names]
    return Calibration(tuple(f["scale"] for f in fitted), tuple(f["shift"] for f in fitted))


@dataclass(frozen=True)
class LearnedReward(RewardFunction):
    """The expectation of a trained reward model for a candidate, logged or generated. The model is not trained here.

    For a run of ``PointwiseReward``: ``grade_weight E[grade] + sum_b behaviors_b P(b) - dislike_cost P(dislike)``,
    calibrated by ``recpo calibrate``. If the run was trained for P(positive) (``target``), that replaces the grade. For
    a run of ``PairwiseReward``: its score, which has an arbitrary zero and unit, so only differences within a context
    are meaningful. A candidate that is not an item (id 0) has no reward (nan).

    Attributes:
        run: run directory of the reward model, for the same items.
        grade_weight: weight of the expected grade, in [0, 1] (``recpo.base.feedback.GRADES``).
        dislike_cost: what a certain dislike subtracts, in addition to its grade of 0; 1 is the full range of grades.
        behaviors: what a certain behavior adds, by its name, among those that the model was trained for.
        calibrated: false uses the model's raw outputs, so that no ``recpo calibrate`` is needed.
        checkpoint: the checkpoint of the run.
        trust: packages, in addition to recpo's, whose classes that run's configuration may name.
    """

    run: Path
    grade_weight: float = 1.0
    dislike_cost: float = 1.0
    behaviors: dict[str, float] = field(default_factory=dict)
    calibrated: bool = True
    checkpoint: Checkpoint = "best"
    trust: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # errors are reported before training starts
        objective = _objective_of(self._opened)
        predicted = objective.behaviors if isinstance(objective, PointwiseReward) else ()
        if unknown := sorted(self.behaviors.keys() - set(predicted)):
            raise RecpoError(
                f"LearnedReward weighs the behavior {unknown[0]!r}, and {self.run} predicts "
                f"{', '.join(predicted) or 'none'}: train it with objective.init_args.behaviors",
                code="unknown_name",
                field="behaviors",
            )
        if self.calibrated and isinstance(objective, PointwiseReward):
            self._opened.checkpoint(self.checkpoint)
            load_calibration(self._opened, self.checkpoint, objective.target_names)

    @property
    def scopes(self) -> tuple[RewardScope, ...]:
        """See ``RewardFunction.scopes``."""
        return (RewardScope(self._opened.catalog_checksum, feedback=self._opened.feedback),)

    @property
    def reads(self) -> Reads:
        """See ``RewardFunction.reads``."""
        return self.model.policy.reads

    @cached_property
    def _opened(self) -> Run:
        return Run.open(self.run, trust=self.trust)

    @cached_property
    def model(self) -> RewardModel:
        """The reward model."""
        return load_reward_model(self._opened, self.checkpoint)

    @cached_property
    def _calibration(self) -> Calibration:
        objective = self.model.objective
        assert isinstance(objective, PointwiseReward)
        if self.calibrated:
            return load_calibration(self._opened, self.checkpoint, objective.target_names)
        targets = objective.num_scores
        return Calibration((1.0,) * targets, (0.0,) * targets)

    @property
    def predicts_dislikes(self) -> bool:
        """Its model has a head for dislikes: it is one of ``PointwiseReward``."""
        return isinstance(self.model.objective, PointwiseReward)

    def predictions(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """Expected grade and probabilities ``[B, S, K]`` (``target_names``); a pairwise score ``[B, S, 1]``."""
        model = self.model.to(candidates.item_ids.device)
        is_item = candidates.mask & (candidates.item_ids > 0)
        scores: Tensor = model(batch.histories, candidates._replace(mask=is_item))
        return self._calibration.probabilities(scores) if self.predicts_dislikes else scores

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        predicted, objective = self.predictions(batch, candidates), self.model.objective
        reward = predicted[..., 0]
        if isinstance(objective, PointwiseReward):
            reward = self.grade_weight * reward - self.dislike_cost * predicted[..., 1]
            for name, weight in self.behaviors.items():
                reward = reward + weight * predicted[..., objective.target_names.index(name)]
        return reward.masked_fill(~candidates.mask | (candidates.item_ids == 0), torch.nan)
