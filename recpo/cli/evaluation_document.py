"""The document of ``recpo evaluate``: metrics, comparisons, and where everything comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recpo.cli.training_curves import Curves
from recpo.cli.true_rewards import TrueRewards
from recpo.data.label_summary import label_summary
from recpo.data.prepared import Period, Prepared
from recpo.data.schema import PERIODS
from recpo.evaluation.cautions import cautions
from recpo.evaluation.comparison import with_holm
from recpo.evaluation.held_out import RankingResult
from recpo.evaluation.off_policy.result import LOGGING_POLICY, OffPolicyResult
from recpo.evaluation.report import Contender, metrics_document

Document = dict[str, Any]

_OF_A_PERIOD = {"events": "targets", "users": "users"}


def evaluation_document(
    contenders: Sequence[Contender],
    values: Mapping[str, OffPolicyResult],
    *,
    data: Prepared,
    runs: Document,
    training: Mapping[str, Curves],
    setting: Document,
    bootstrap_resamples: int = 0,
) -> Document:
    """What ``metrics.json`` holds: ``metrics_document``, and what is listed here.

    ::

        differences     also p_value, p_holm and survives_holm per metric, and off_policy: [{target, estimator, value,
                        intervals, p_value, p_holm, survives_holm}]; pairs that have nothing in common are left out
        labels          {threshold, periods: {period: [{name, events, positive, neutral, negative, unlabeled,
                        histogram}]}}: labels by duration of the item
        training        {run: {metric: [[step, value]]}}
        provenance      {data: {...}, runs: {name: {...}}}

    Args:
        contenders: everybody, with the logging policy where it is known.
        values: off-policy results by contender.
        data: the prepared directory.
        runs: where the runs and bundles come from.
        training: curves of the runs.
        setting: what every number depends on.
        bootstrap_resamples: see ``metrics_document``.
    """
    document = metrics_document(contenders, setting=setting, bootstrap_resamples=bootstrap_resamples)
    for difference in document["differences"]:
        difference["off_policy"] = _off_policy_differences(difference, values)
    split: Period = setting["split"]
    periods: tuple[Period, ...] = ("train", split)
    document |= {
        "differences": with_holm([pair for pair in document["differences"] if pair["metrics"] or pair["off_policy"]]),
        "labels": {
            "threshold": data.feedback.rule.positive_threshold,
            "periods": {period: label_summary(data, period) for period in periods},
        },
        "training": dict(training),
        "provenance": {"data": _data_facts(data), "runs": runs},
    }
    document["warnings"] = cautions(document)
    return document


def logging_policy(
    ranked: RankingResult, values: Mapping[str, OffPolicyResult], truth: TrueRewards | None
) -> list[Contender]:
    """The policy that made the log, where something is known of it: what it earned, and its true value."""
    earned = next(iter(values.values()), None)
    estimates = [] if earned is None else [e.as_json() for e in earned.estimates if e.target == LOGGING_POLICY]
    per_user = {} if truth is None else truth.of_logging_policy(ranked.user_ids)
    if not estimates and not per_user:
        return []
    result = RankingResult(ranked.user_ids, per_user, totals={}, counts={}, user_segments={}, item_segments={})
    return [Contender(LOGGING_POLICY, "baseline", result, estimates)]


def _off_policy_differences(difference: Document, values: Mapping[str, OffPolicyResult]) -> list[Document]:
    one, other = difference["contender"], difference["against"]
    if LOGGING_POLICY in (one, other):
        name = other if one == LOGGING_POLICY else one
        found = [] if name not in values else [d.as_json() for d in values[name].over_logging_policy()]
        found = [_negated(entry) for entry in found] if one == LOGGING_POLICY else found
    elif one in values and other in values:
        found = [d.as_json() for d in values[one].differences(values[other])]
    else:
        found = []
    return sorted(found, key=lambda entry: (entry["target"], entry["estimator"]))


def _negated(entry: Document) -> Document:
    intervals = {
        kind: {"low": _minus(ends["high"]), "high": _minus(ends["low"])} for kind, ends in entry["intervals"].items()
    }
    return {**entry, "value": _minus(entry["value"]), "intervals": intervals}


def _minus(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else -value


def _data_facts(data: Prepared) -> Document:
    manifest = data.manifest
    splits = manifest["counts"]["splits"]
    return {
        "prepared": str(data.root),
        "items": data.num_items,
        "users": manifest["num_users"],
        "events read": manifest["counts"]["read"],
        **{f"{name} {of}": splits[name][key] for of, key in _OF_A_PERIOD.items() for name in PERIODS},
        **{f"dropped: {reason}": count for reason, count in manifest["counts"]["dropped"].items()},
        "label": manifest["label"]["class_path"].rsplit(".", 1)[-1],
        **{name: value for name, value in manifest["boundaries"].items() if isinstance(value, str)},
        "prepared by recpo": manifest["recpo_version"],
    }
