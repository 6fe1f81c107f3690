"""Intervals over training seeds, of which there are few."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import t as student

from recpo.evaluation.intervals import Estimate


def estimate_over_seeds(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean and half-width of Student's interval ``t_{n-1} s / sqrt(n)``; one value per seed, at least two.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"an interval over seeds needs at least two, got {len(values)}")
    n = len(values)
    half_width = float(student.ppf((1 + level) / 2, n - 1)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(float(np.mean(values)), half_width, n)
