"""A trained reward model: loaded from its run directory, calibrated, and used as a reward."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from recpo.contracts import Objective, RewardFunction, StatePolicy
from recpo.errors import RecpoError
from recpo.objectives.reward_model import TARGETS, PointwiseReward
from recpo.policies.critic import ItemScore
from recpo.training.networks import item_scores
from recpo.training.options import CriticOptions
from recpo.training.run import Run, checkpoint_path, load_weights
from recpo.types import FeedbackBatch, Histories, Slates

CALIBRATION = "calibration.json"

Checkpoint = Literal["best", "last"]


class RewardModel(nn.Module):
    """The score head of a run over the states of its policy; frozen, in evaluation mode.

    Args:
        policy: whose states and item vectors are read.
        head: the scores.
        objective: what they were trained for.
    """

    def __init__(self, policy: StatePolicy, head: ItemScore, objective: Objective) -> None:
        super().__init__()
        self.policy, self.head, self.objective = policy, head, objective
        self.requires_grad_(False).eval()

    def forward(self, histories: Histories, slates: Slates) -> Tensor:
        """Scores ``[B, S, K]`` in float32, whatever the precision of the training around it; 0 at masked positions."""
        with torch.autocast(slates.item_ids.device.type, enabled=False):
            return item_scores(self.policy, self.head, histories, slates)


class Calibration(NamedTuple):
    """``probability_k = sigmoid(scale_k score_k + shift_k)`` (Platt, 1999), per target."""

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
            "or PairwiseReward"
        )
    return objective


def checkpoint_sha256(run: Path, checkpoint: Checkpoint) -> str:
    """Identifies the weights that a calibration belongs to."""
    path, digest = checkpoint_path(run, checkpoint), hashlib.sha256()
    for part in sorted(path.iterdir()) if path.is_dir() else [path]:
        with part.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def load_calibration(run: Path, checkpoint: Checkpoint = "best") -> Calibration:
    """What ``recpo calibrate`` fitted.

    Raises:
        RecpoError: nothing was fitted, or to other weights.
    """
    fix = f"run `recpo calibrate --run {run} --checkpoint {checkpoint}` with the prepared directory it was trained on"
    file = Path(run) / CALIBRATION
    if not file.is_file():
        raise RecpoError(f"{run} is not calibrated: its scores are no probabilities yet; {fix}")
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["checkpoint_sha256"] != checkpoint_sha256(run, checkpoint):
        raise RecpoError(f"{file} belongs to other weights than {checkpoint_path(run, checkpoint)}; {fix}")
    fitted = [content["targets"][name]["calibration"] for name in TARGETS]
    return Calibration(tuple(f["scale"] for f in fitted), tuple(f["shift"] for f in fitted))


@dataclass(frozen=True)
class LearnedReward(RewardFunction):
    """What a trained reward model expects of a candidate, logged or generated; it is never trained here.

    Of a run of ``PointwiseReward``: ``long_watch P(long watch) + like P(like) - dislike_cost P(dislike)`` with the
    probabilities that ``recpo calibrate`` fitted. Of a run of ``PairwiseReward``: its score, whose zero and unit mean
    nothing; only differences within a context do. A candidate that is no item (id 0) has no reward (nan).

    Attributes:
        run: run directory of the reward model, of the same items.
        long_watch: weight of the probability that the item is watched for long.
        like: weight of the probability that it is liked.
        dislike_cost: what a certain dislike takes away.
        calibrated: false takes the model's own probabilities, so that no ``recpo calibrate`` is needed.
        checkpoint: which one of the run.
        trust: packages whose classes that run's configuration may name, besides those of recpo.
    """

    run: Path
    long_watch: float = 1.0
    like: float = 0.0
    dislike_cost: float = 1.0
    calibrated: bool = True
    checkpoint: Checkpoint = "best"
    trust: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # what is wrong is said before training starts
        objective = _objective_of(self._opened)
        if self.calibrated and isinstance(objective, PointwiseReward):
            load_calibration(self.run, self.checkpoint)

    @property
    def catalog_checksum(self) -> str | None:
        """See ``RewardFunction.catalog_checksum``."""
        return self._opened.catalog_checksum

    @cached_property
    def _opened(self) -> Run:
        return Run.open(self.run, trust=self.trust)

    @cached_property
    def model(self) -> RewardModel:
        """The reward model."""
        return load_reward_model(self._opened, self.checkpoint)

    @cached_property
    def _calibration(self) -> Calibration:
        if self.calibrated:
            return load_calibration(self.run, self.checkpoint)
        targets = len(TARGETS)
        return Calibration((1.0,) * targets, (0.0,) * targets)

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        is_item = candidates.mask & (candidates.item_ids > 0)
        model = self.model.to(candidates.item_ids.device)
        scores = model(batch.histories, candidates._replace(mask=is_item))
        if isinstance(model.objective, PointwiseReward):
            weights = torch.tensor([self.long_watch, self.like, -self.dislike_cost], device=scores.device)
            reward = (self._calibration.probabilities(scores) * weights).sum(-1)
        else:
            reward = scores[..., 0]
        return reward.masked_fill(~is_item, torch.nan)
