"""Headroom: each contender's share of the gain in true value from the pre-trained policy to the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import yaml

from recpo.evaluation.catalog_ranking import RankingResult
from recpo.evaluation.estimates import Z95, Estimate
from recpo.evaluation.off_policy.results import LOGGING_POLICY, influence, standard_error
from recpo.evaluation.true_rewards import ORACLE

_METRIC: Final = "true_reward@"


def headroom(results: Mapping[str, RankingResult], runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """``(value - start) / (oracle - start)`` of every contender: 0 = no better than the start, 1 = the oracle.

    The start is the pre-trained policy if exactly one run is pre-trained, that is, if its objective is the likelihood
    of every exposure; otherwise, it is the logging policy.

    Args:
        results: results by contender, including the oracle and the logging policy.
        runs: origin of the contenders; ``configuration`` of a run describes its training.

    Returns:
        ``{start, start_is, metrics: {true_reward@k: {start, oracle, contenders: {name: {mean, half_width, n}}}}}``;
        None without an oracle or a start. A share is null if the oracle is not better than the start.
    """
    trained = [name for name, facts in runs.items() if name in results and _is_pretrained(facts)]
    start = trained[0] if len(trained) == 1 else LOGGING_POLICY
    if ORACLE not in results or start not in results:
        return None
    said = {
        0: "no run is pre-trained, by the likelihood of every exposure",
        1: "the run that is pre-trained, by the likelihood of every exposure",
    }.get(len(trained), f"{len(trained)} runs are pre-trained, by the likelihood of every exposure, not one")
    metrics = [metric for metric in results[ORACLE].per_user if metric.startswith(_METRIC)]
    return {
        "start": start,
        "start_is": said,
        "metrics": {metric: _of_metric(results, start, metric) for metric in metrics},
    }


def _is_pretrained(facts: Mapping[str, Any]) -> bool:
    try:
        objective = yaml.safe_load(facts.get("configuration", "")).get("objective")
        name, options = objective["class_path"].rsplit(".", 1)[-1], objective.get("init_args") or {}
    except (yaml.YAMLError, AttributeError, TypeError, KeyError):
        return False
    return name == "Likelihood" and not options.get("positive_only")


def _of_metric(results: Mapping[str, RankingResult], start: str, metric: str) -> dict[str, Any]:
    first, best = (results[name].per_user[metric].double().numpy() for name in (start, ORACLE))
    shares = {
        name: share(result.per_user[metric].double().numpy(), first, best)
        for name, result in results.items()
        if name not in (start, ORACLE) and metric in result.per_user
    }
    ends = {"start": results[start].estimate(metric).mean, "oracle": results[ORACLE].estimate(metric).mean}
    return {**ends, "contenders": {name: value.as_json() for name, value in shares.items()}}


def share(value: np.ndarray, start: np.ndarray, oracle: np.ndarray) -> Estimate:
    """``sum_u (value_u - start_u) / sum_u (oracle_u - start_u)`` with the half-width of its 95 % interval.

    The interval is that of a ratio of means over the same users (delta method).

    Args:
        value: ``[U]`` value of the contender; nan here or in the next two = the user is skipped.
        start: ``[U]`` value of the start.
        oracle: ``[U]`` value of the oracle.

    Returns:
        nan if the oracle is not better than the start.
    """
    sums = np.stack([value - start, oracle - start], 1)
    sums = sums[~np.isnan(sums).any(1)]
    gained, possible = sums.sum(0)
    if not possible > 0:
        return Estimate(math.nan, math.nan, len(sums))
    return Estimate(float(gained / possible), Z95 * standard_error(influence(sums)), len(sums))


def shares_at(document: Mapping[str, Any], k: int) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Contenders and their shares at ``k``, the largest first; empty without a truth."""
    found = (document.get("headroom") or {"metrics": {}})["metrics"].get(f"{_METRIC}{k}", {"contenders": {}})
    known = [(name, value) for name, value in found["contenders"].items() if value["mean"] is not None]
    return sorted(known, key=lambda one: -one[1]["mean"])
