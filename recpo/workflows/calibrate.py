"""The verb ``calibrate``: makes a reward model's scores probabilities, and says on later data how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from recpo.artifacts import write_json
from recpo.data.datamodule import evaluation_batches
from recpo.data.prepared import Period, Prepared
from recpo.errors import RecpoError
from recpo.evaluation.calibration import CalibrationReport, Exposures, Platt, assess_target, fit_platt
from recpo.objectives.reward_model import TARGETS, PointwiseReward
from recpo.training.learned_reward import CALIBRATION, Checkpoint, RewardModel, checkpoint_sha256, load_reward_model
from recpo.training.run import Run
from recpo.workflows.devices import compute_device


def calibrate(
    run: Run | Path | str,
    prepared: Prepared | Path | str,
    *,
    checkpoint: Checkpoint = "best",
    batch_size: int = 512,
    resamples: int = 200,
    seed: int = 0,
    device: str = "auto",
    trust: Sequence[str] = (),
) -> CalibrationReport:
    """Calibrates a pointwise reward model on the validation period and measures it on the test period.

    Per target, ``probability = sigmoid(scale * score + shift)`` (Platt, 1999) is fitted to the exposures of the
    validation period. On the exposures of the test period, and on those among them that the log showed at random, it
    reports the AUC (of all exposures, and the mean over users), the expected calibration error and the log loss before
    and after, and the base rate, with 95 % intervals over users. Writes calibration.json into the run, which
    LearnedReward reads.

    Args:
        run: a run of the PointwiseReward objective, or its directory.
        prepared: prepared data of the same items, or its directory.
        checkpoint: which checkpoint of the run.
        batch_size: users scored at once.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        device: where the model runs: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on.
        trust: packages beside recpo whose classes the configuration of the run may name.

    Raises:
        RecpoError: the run is none of a pointwise reward model or knows other items, a period has no labeled exposure,
            or an option is out of range.
    """
    if batch_size < 1 or resamples < 1:
        raise RecpoError(f"batch_size is {batch_size} and resamples is {resamples}, expected at least 1 each")
    data = prepared if isinstance(prepared, Prepared) else Prepared.open(prepared)
    run = Run.open(run, trust)
    run.validate_items(data)
    model = load_reward_model(run, checkpoint)
    if not isinstance(model.objective, PointwiseReward):
        raise RecpoError(
            f"{run.root} is a pairwise reward model: its scores only compare items of one context, there is nothing to "
            "calibrate; LearnedReward takes it as it is"
        )
    model.to(compute_device(device))
    valid, test = (_exposures(model, model.objective, data, split, batch_size) for split in ("valid", "test"))
    targets = {}
    for k, name in enumerate(TARGETS):
        fitted = _fit(valid, k, name)
        report = {
            group: assess_target(test.only(shown), k, fitted, resamples=resamples, seed=seed)
            for group, shown in (("all", np.ones(len(test.user), bool)), ("random", test.is_random))
            if (test.known[:, k] & shown).any()
        }
        targets[name] = {"calibration": fitted._asdict(), "test": report}
    content: dict[str, Any] = {
        "checkpoint": checkpoint,
        "checkpoint_sha256": checkpoint_sha256(run.root, checkpoint),
        "exposures": {"valid": len(valid.user), "test": len(test.user), "test_random": int(test.is_random.sum())},
        "targets": targets,
    }
    write_json(run.root / CALIBRATION, content)
    return CalibrationReport(content, run.root / CALIBRATION)


def _exposures(
    model: RewardModel, objective: PointwiseReward, data: Prepared, split: Period, batch_size: int
) -> Exposures:
    """Every exposure of a period, scored from what was known when the period began."""
    device = model.head.bias.device
    parts: list[list[Any]] = []
    for batch in evaluation_batches(data.root, split, model.policy.max_history, batch_size):
        feedback, users = move_data_to_device((batch.feedback, batch.user_ids), device)
        slates, mask = feedback.slates, feedback.slates.mask
        scores = model(feedback.histories, slates)
        happened, known = objective.targets(slates.label, slates.dislike)
        user = users[:, None].expand_as(mask)
        is_random = torch.zeros_like(mask) if slates.is_random is None else slates.is_random
        columns = (scores.double(), happened, known, user, is_random)
        parts.append([column[mask].cpu().numpy() for column in columns])
    if not parts:
        raise RecpoError(f"{data.root}: nobody has an event in the {split} period, so there is nothing to calibrate by")
    return Exposures(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _fit(valid: Exposures, k: int, name: str) -> Platt:
    known = valid.known[:, k]
    if not known.any():
        raise RecpoError(f"target {name}: no exposure of the validation period has a label, so nothing can be fitted")
    return fit_platt(valid.score[known, k], valid.happened[known, k])
