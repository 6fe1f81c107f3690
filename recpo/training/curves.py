"""The curves that the CSV logger of a training wrote, and what they say about it."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from recpo.base.errors import RecpoError

#: Metric to its points ``[step, value]``.
Curves = dict[str, list[list[float]]]

_SHOWN: Final = ("train/loss", "val/")
_MOST_POINTS: Final = 200
# from here on, a share is worth a sentence
_ZERO_GROUPS: Final = 0.5
_SKIPPED_STEPS: Final = 0.2
_CLIPPED: Final = 0.3
_STILL_RISING: Final = 0.1  # share of the whole gain that the last validation adds
_LEAST_VALIDATIONS: Final = 3
_SAME_LISTS: Final = 2  # lists of all users come from fewer items than this many lists hold
_LISTS_OF_A_SMALL_CATALOG: Final = 10


def training_curves(run: Path) -> Curves:
    """The loss and the validation metrics over optimizer steps, thinned to 200 points each.

    A resumed run logs into another file, which continues where the first one ended. Empty where the run has no CSV log.

    Raises:
        RecpoError: a log is no table of numbers.
    """
    return {name: _thinned(points) for name, points in _logged(run).items() if name.startswith(_SHOWN)}


def advice(run: Path, monitor: str | None, *, num_items: int, lower_is_better: bool, on_policy: bool) -> list[str]:
    """What went wrong in a training that finished, as sentences that name the option to change.

    Rewards that are constant in most groups, a policy at its KL bound, clipped ratios, a monitor that was best at the
    first or still improving at the last validation, and lists that hardly differ between users.

    Args:
        run: run directory.
        monitor: metric that selected the best checkpoint, such as ``val/NDCG@10``; None = unknown.
        num_items: catalog size.
        lower_is_better: of the monitor.
        on_policy: whether the training drew its candidates (``rollout``).
    """
    curves = _logged(run)
    late = {name: _late_mean(points) for name, points in curves.items() if name.startswith("train/")}
    said = []
    if on_policy and late.get("train/zero_group_share", 0.0) > _ZERO_GROUPS:
        said.append(
            f"The reward was constant in {late['train/zero_group_share']:.0%} of the groups in the second half of the "
            "training, and such a group teaches nothing: enlarge rollout.group_size, or choose a finer reward."
        )
    if late.get("train/step_skipped", 0.0) > _SKIPPED_STEPS:
        said.append(
            f"{late['train/step_skipped']:.0%} of the late steps were skipped, because the policy was farther from its "
            "snapshot than rollout.max_kl: lower the learning rate or rollout.epochs, or raise the bound."
        )
    if late.get("train/clip_fraction", 0.0) > _CLIPPED:
        said.append(
            f"{late['train/clip_fraction']:.0%} of the late ratios were clipped, so they had no gradient: lower the "
            "learning rate, rollout.batches or rollout.epochs."
        )
    if monitor in curves:
        said += _of_monitor(monitor, [value for _, value in curves[monitor]], lower_is_better)
    return said + _of_lists(curves, num_items)


def _of_monitor(name: str, values: Sequence[float], lower_is_better: bool) -> list[str]:
    if len(values) < _LEAST_VALIDATIONS:
        return []
    signed = -np.asarray(values) if lower_is_better else np.asarray(values)
    gain = signed.max() - signed.min()
    if not gain > 0:
        return []
    if signed.argmax() == 0:
        return [
            f"{name} was best at the first of {len(values)} validations: lower the learning rate, or validate earlier "
            "(trainer.val_check_interval)."
        ]
    if signed.argmax() == len(signed) - 1 and signed[-1] - signed[:-1].max() > _STILL_RISING * gain:
        return [f"{name} was still improving at the last of {len(values)} validations: train longer."]
    return []


def _of_lists(curves: Curves, num_items: int) -> list[str]:
    for name, points in curves.items():
        if name.startswith("val/coverage@"):
            k, items = int(name.partition("@")[2]), round(points[-1][1] * num_items)
            if num_items > _LISTS_OF_A_SMALL_CATALOG * k and items < _SAME_LISTS * k:
                return [
                    f"Lists hardly differ between users: those of the validation period come from {items:,} of "
                    f"{num_items:,} items. Compare the policy with the baseline popularity."
                ]
    return []


def _logged(run: Path) -> Curves:
    """Every metric of the CSV logs, in the order of the steps."""
    curves: dict[str, dict[float, float]] = defaultdict(dict)
    for file in sorted((run / "logs").glob("version_*/metrics.csv"), key=lambda file: _number(file.parent.name)):
        try:
            with file.open(encoding="utf-8", newline="") as handle:
                for row in csv.DictReader(handle):
                    for name, text in row.items():
                        if text and name.startswith(("train/", "val/")) and math.isfinite(float(text)):
                            curves[name][float(row["step"])] = float(text)
        except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
            raise RecpoError(
                f"{file} is no CSV log of a training ({error}): copy the run again, or remove this file, which only "
                "its curves need",
                code="damaged",
                field=file.name,
            ) from error
    return {name: [list(point) for point in sorted(points.items())] for name, points in curves.items()}


def _late_mean(points: Sequence[Sequence[float]]) -> float:
    """The mean over the second half of the points."""
    return float(np.mean([value for _, value in points[len(points) // 2 :]]))


def _number(directory: str) -> int:
    digits = directory.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1


def _thinned(points: list[list[float]]) -> list[list[float]]:
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    return points[::stride] if (len(points) - 1) % stride == 0 else [*points[::stride], points[-1]]
