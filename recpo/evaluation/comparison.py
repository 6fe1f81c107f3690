"""Many paired differences at once: which of them survive the correction for their number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from recpo.evaluation.intervals import Estimate

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
    """Adds ``p_value``, ``p_holm`` and ``survives_holm`` to the entries of the document's ``differences``.

    The comparisons of one metric, all pairs of contenders, are one family; so are those of one off-policy estimator of
    one target, whose p-values are those of its normal interval.
    """
    marked = [
        {
            **difference,
            "metrics": {name: dict(value) for name, value in difference["metrics"].items()},
            "off_policy": [dict(entry) for entry in difference.get("off_policy", [])],
        }
        for difference in differences
    ]
    families: dict[tuple[str, ...], list[tuple[dict[str, Any], Estimate]]] = defaultdict(list)
    for difference in marked:
        for name, value in difference["metrics"].items():
            families[name,].append((value, _estimate(value["mean"], value["half_width"])))
        for entry in difference["off_policy"]:
            normal = entry["intervals"]["normal"]
            half_width = None if normal["low"] is None else (normal["high"] - normal["low"]) / 2
            families[entry["target"], entry["estimator"]].append((entry, _estimate(entry["value"], half_width)))
    for family in families.values():
        p_values = [p_value(estimated) for _, estimated in family]
        for (entry, _), p, adjusted in zip(family, p_values, holm(p_values), strict=True):
            entry["p_value"] = None if math.isnan(p) else p
            entry["p_holm"] = None if math.isnan(adjusted) else adjusted
            entry["survives_holm"] = adjusted <= LEVEL
    return marked


def _estimate(mean: float | None, half_width: float | None) -> Estimate:
    return Estimate(math.nan if mean is None else mean, math.nan if half_width is None else half_width, 0)
