"""Training curves of a run, out of what its CSV logger wrote."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path

from recpo.base.errors import RecpoError

_SHOWN = ("train/loss", "val/")
_MOST_POINTS = 200

#: Metric to its points ``[step, value]``.
Curves = dict[str, list[list[float]]]


def training_curves(run: Path) -> Curves:
    """The loss and the validation metrics over optimizer steps, thinned to 200 points each.

    A resumed run logs into another file, which continues where the first one ended. Empty where the run has no CSV log.

    Raises:
        RecpoError: a log is no table of numbers.
    """
    curves: dict[str, dict[float, float]] = defaultdict(dict)
    for file in sorted((run / "logs").glob("version_*/metrics.csv"), key=lambda file: _number(file.parent.name)):
        try:
            with file.open(encoding="utf-8", newline="") as handle:
                for row in csv.DictReader(handle):
                    for name, text in row.items():
                        if text and name.startswith(_SHOWN) and math.isfinite(float(text)):
                            curves[name][float(row["step"])] = float(text)
        except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
            raise RecpoError(
                f"{file} is no CSV log of a training ({error}): copy the run again, or remove this file, which only "
                "its curves need",
                field=file.name,
            ) from error
    return {name: _thinned([list(point) for point in sorted(points.items())]) for name, points in curves.items()}


def _number(directory: str) -> int:
    digits = directory.removeprefix("version_")
    return int(digits) if digits.isdigit() else -1


def _thinned(points: list[list[float]]) -> list[list[float]]:
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    return points[::stride] if (len(points) - 1) % stride == 0 else [*points[::stride], points[-1]]
