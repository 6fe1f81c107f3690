"""``recpo calibrate``: makes a reward model's scores probabilities, and says on later data how good they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from rich.table import Table

from recpo.artifacts import write_json
from recpo.cli.output import console
from recpo.data.datamodule import evaluation_batches
from recpo.data.prepared import Period, Prepared
from recpo.errors import RecpoError
from recpo.evaluation.calibration import BootstrapEstimate, Platt, fit_platt, judge
from recpo.evaluation.estimates import estimate
from recpo.evaluation.exposures import auc
from recpo.objectives.reward_model import TARGETS, PointwiseReward
from recpo.training.learned_reward import CALIBRATION, Checkpoint, RewardModel, checkpoint_sha256, load_reward_model
from recpo.training.run import refuse_other_items
from recpo.workflows.devices import compute_device


def calibrate(
    run: Path,
    prepared: str | Path,
    checkpoint: Checkpoint = "best",
    batch_size: int = 512,
    resamples: int = 200,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Calibrates a pointwise reward model on the validation period and judges it on the test period.

    Per target, ``probability = sigmoid(scale * score + shift)`` (Platt, 1999) is fitted to the exposures of the
    validation period. On the exposures of the test period, and on those among them that the log showed at random, it
    reports the AUC (of all exposures, and the mean over users), the expected calibration error and the log loss before
    and after, and the base rate, with 95 % intervals over users. Writes calibration.json into the run, which
    LearnedReward reads.

    Args:
        run: run directory of a PointwiseReward objective, written by ``recpo train``.
        prepared: directory written by ``recpo prepare``, of the same items.
        checkpoint: which checkpoint of the run.
        batch_size: users scored at once.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        device: where the model runs: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on.
    """
    data = Prepared.open(prepared)
    refuse_other_items(run, data.catalog_checksum, data.root)
    model = load_reward_model(run, checkpoint)
    if not isinstance(model.objective, PointwiseReward):
        raise RecpoError(
            f"{run} is a pairwise reward model: its scores only compare items of one context, there is nothing to "
            "calibrate; LearnedReward takes it as it is"
        )
    model.to(compute_device(device))
    valid, test = (_exposures(model, model.objective, data, split, batch_size) for split in ("valid", "test"))
    targets = {}
    for k, name in enumerate(TARGETS):
        fitted = _fit(valid, k, name)
        report = {
            group: _judge(test.only(shown), k, fitted, resamples, seed)
            for group, shown in (("all", np.ones(len(test.user), bool)), ("random", test.is_random))
            if (test.known[:, k] & shown).any()
        }
        targets[name] = {"calibration": fitted._asdict(), "test": report}
    content: dict[str, Any] = {
        "checkpoint": checkpoint,
        "checkpoint_sha256": checkpoint_sha256(run, checkpoint),
        "exposures": {"valid": len(valid.user), "test": len(test.user), "test_random": int(test.is_random.sum())},
        "targets": targets,
    }
    write_json(run / CALIBRATION, content)
    _print(content, run)


class _Exposures(NamedTuple):
    """Held-out exposures: scores, targets and known ``[N, K]``, user and is_random ``[N]``."""

    score: np.ndarray
    happened: np.ndarray
    known: np.ndarray
    user: np.ndarray
    is_random: np.ndarray

    def only(self, which: np.ndarray) -> _Exposures:
        return _Exposures(*(column[which] for column in self))


def _exposures(
    model: RewardModel, objective: PointwiseReward, data: Prepared, split: Period, batch_size: int
) -> _Exposures:
    """Every exposure of a period, scored from what was known when the period began."""
    device, parts = model.head.bias.device, []
    for batch in evaluation_batches(data.root, split, model.policy.max_history, batch_size):
        feedback = move_data_to_device(batch.feedback, device)
        slates, mask = feedback.slates, feedback.slates.mask
        scores = model(feedback.histories, slates)
        happened, known = objective.targets(slates.label, slates.dislike)
        user = feedback.row_ids[:, None].expand_as(mask)
        is_random = torch.zeros_like(mask) if slates.is_random is None else slates.is_random
        columns = (scores.double(), happened, known, user, is_random)
        parts.append([column[mask].cpu().numpy() for column in columns])
    if not parts:
        raise RecpoError(f"{data.root}: nobody has an event in the {split} period, so there is nothing to calibrate by")
    return _Exposures(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _fit(valid: _Exposures, k: int, name: str) -> Platt:
    known = valid.known[:, k]
    if not known.any():
        raise RecpoError(f"target {name}: no exposure of the validation period has a label, so nothing can be fitted")
    return fit_platt(valid.score[known, k], valid.happened[known, k])


def _judge(test: _Exposures, k: int, fitted: Platt, resamples: int, seed: int) -> dict[str, object]:
    test = test.only(test.known[:, k])
    score, happened = test.score[:, k], test.happened[:, k]
    before = judge(Platt(1.0, 0.0).probability(score), happened, test.user, resamples=resamples, seed=seed)
    after = judge(fitted.probability(score), happened, test.user, resamples=resamples, seed=seed)
    intervals = {
        **{name: after[name] for name in ("base_rate", "auc", "log_loss", "calibration_error")},
        "auc_per_user": _auc_per_user(test, k),
        "log_loss_uncalibrated": before["log_loss"],
        "calibration_error_uncalibrated": before["calibration_error"],
    }
    counts = {"exposures": len(score), "happened": int(happened.sum()), "users": len(np.unique(test.user))}
    return {**counts, **{name: _numbers(interval) for name, interval in intervals.items()}}


def _numbers(interval: BootstrapEstimate) -> dict[str, float | None]:
    """JSON knows no nan: null where too few events tell."""
    return {name: None if np.isnan(number) else number for name, number in interval._asdict().items()}


def _auc_per_user(test: _Exposures, k: int) -> BootstrapEstimate:
    """Mean over the users with events of both kinds."""
    order = np.argsort(test.user, kind="stable")
    counts = np.unique(test.user, return_counts=True)[1]
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    score = torch.zeros(len(counts), int(counts.max(initial=1)), dtype=torch.float64)
    positive, negative = torch.zeros_like(score, dtype=torch.bool), torch.zeros_like(score, dtype=torch.bool)
    score[row, place] = torch.from_numpy(test.score[order, k])
    positive[row, place] = torch.from_numpy(test.happened[order, k])
    negative[row, place] = torch.from_numpy(~test.happened[order, k])
    mean, half_width, _ = estimate(auc(score, positive, negative))
    return BootstrapEstimate(mean, mean - half_width, mean + half_width)


def _print(content: dict[str, Any], run: Path) -> None:
    table = Table(title="test period", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("target", "shown"):
        table.add_column(column, no_wrap=True)
    for column in ("number", "rate", "AUC", "95 %", "per user", "ECE before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, target in content["targets"].items():
        for group, report in target["test"].items():
            value = {key: _shown(number["value"]) for key, number in report.items() if isinstance(number, dict)}
            interval = "-".join(_shown(report["auc"][end]) for end in ("low", "high"))
            ranks = value["auc"], interval, value["auc_per_user"]
            errors = value["calibration_error_uncalibrated"], value["calibration_error"]
            table.add_row(name, group, f"{report['exposures']:,}", value["base_rate"], *ranks, *errors)
    console().print(table)
    print(f"ECE: expected calibration error; every number with its interval: {run / CALIBRATION}")


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"
