"""Many paired differences at once: which of them survive the correction for their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from recpo.evaluation.held_out import Estimate

LEVEL = 0.05
_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


def p_value(difference: Estimate) -> float:
    """Two-sided p-value of "the mean difference is 0", ``erfc(|mean| / (s / sqrt(n)) / sqrt(2))``.

    nan where the difference or its interval is not defined; 1 for contenders that do not differ for any user.
    """
    if math.isnan(difference.mean) or math.isnan(difference.half_width):
        return math.nan
    if difference.half_width == 0:
        return float(difference.mean == 0)
    return math.erfc(abs(difference.mean) / difference.half_width * _Z95 / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm's step-down procedure (Scandinavian Journal of Statistics 6, 1979).

    ``p'_(i) = max_{j <= i} min(1, (m - j + 1) p_(j))`` with ``p_(1) <= p_(2) <= ...``. Those at most 5 % hold together:
    the probability that any of them is an accident is at most 5 %, however the comparisons depend on each other. Never
    weaker than Bonferroni's ``m p``. nan stays nan and is not counted in m.
    """
    defined = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(defined):
        largest = max(largest, min(1.0, (len(defined) - rank) * p))
        adjusted[place] = largest
    return adjusted


def with_holm(differences: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds ``p_value``, ``p_holm`` and ``survives_holm`` to every metric of the document's ``differences``.

    The comparisons of one metric, all pairs of contenders, are one family.
    """
    marked = [{**difference, "metrics": dict(difference["metrics"])} for difference in differences]
    for metric in {metric: None for difference in differences for metric in difference["metrics"]}:
        pairs = [difference["metrics"] for difference in marked if metric in difference["metrics"]]
        p_values = [p_value(_estimate(pair[metric])) for pair in pairs]
        for pair, p, adjusted in zip(pairs, p_values, holm(p_values), strict=True):
            pair[metric] = {
                **pair[metric],
                "p_value": None if math.isnan(p) else p,
                "p_holm": None if math.isnan(adjusted) else adjusted,
                "survives_holm": adjusted <= LEVEL,
            }
    return marked


def _estimate(value: dict[str, Any]) -> Estimate:
    mean, half_width = (math.nan if value[key] is None else value[key] for key in ("mean", "half_width"))
    return Estimate(mean, half_width, value["n"])
