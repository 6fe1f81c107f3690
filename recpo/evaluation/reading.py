"""Conclusions from the numbers of an evaluation, in generated sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recpo.evaluation.headroom import shares_at
from recpo.evaluation.off_policy.results import LOGGING_POLICY

Document = dict[str, Any]

_LOWER_IS_BETTER = {"disliked", "disliked_hit_rate", "disliked_MRR", "true_dislike", "gini", "miscalibration"}
_TOLD = ("NDCG", "disliked", "true_reward")
_NAMED_AT_MOST = 5
_ESTIMATOR = "SNIPS"


def further_metrics(document: Document) -> Document:
    """The metrics of the user's own measures, totals among them: ``{metric: "higher" or "lower"}``, which is better."""
    found: Document = document["setting"].get("further_metrics", {})
    return found


def further_at(document: Document, k: int) -> list[str]:
    """Those per user, with an estimate, at ``k`` or without a list length."""
    estimated = {metric for contender in document["contenders"] for metric in contender["metrics"]}
    own = [metric for metric in further_metrics(document) if metric in estimated]
    return [metric for metric in own if metric.partition("@")[2] in ("", str(k))]


def lower_is_better(metric: str, document: Document) -> bool:
    """True for metrics such as ``disliked@10`` for which lower is better, and for a user's own that say so."""
    direction = further_metrics(document).get(metric)
    return metric.split("@")[0] in _LOWER_IS_BETTER if direction is None else direction == "lower"


def reading(document: Document) -> list[str]:
    """One or two sentences per main metric: the best contender, by how much, and which others are significantly worse.

    Args:
        document: the content of ``metrics.json``.
    """
    k = document["setting"]["ks"][0]
    present = {metric for contender in document["contenders"] for metric in contender["metrics"]}
    sentences = [_on(document, f"{name}@{k}") for name in _TOLD if f"{name}@{k}" in present]
    told = [name for name in ("NDCG", "true_reward") if f"{name}@{k}" in present]
    against = [sentence for name in told for sentence in _against_baselines(document, f"{name}@{k}")]
    return [*sentences, *against, *_headroom(document, k), *_off_policy(document)]


def paired(document: Document, contender: str, against: str, metric: str) -> Document | None:
    """The paired difference ``contender - against`` of a metric, in either order of the document."""
    for difference in document["differences"]:
        names = (difference["contender"], difference["against"])
        value = difference["metrics"].get(metric)
        if value is None or value["mean"] is None or set(names) != {contender, against}:
            continue
        found: Document = value if names == (contender, against) else {**value, "mean": -value["mean"]}
        return found
    return None


def best_first(document: Document, metric: str) -> list[Document]:
    """The contenders with a value of ``metric``, best first. The oracle does not compete."""
    competing = [contender for contender in document["contenders"] if contender["kind"] != "oracle"]
    scored = [c for c in competing if c["metrics"].get(metric, {}).get("mean") is not None]
    sign = 1 if lower_is_better(metric, document) else -1
    return sorted(scored, key=lambda contender: sign * contender["metrics"][metric]["mean"])


def with_interval(value: Document, signed: bool = False) -> str:
    """``0.1234 ± 0.0056``."""
    text = f"{value['mean']:{'+' if signed else ''}.4f}".replace("-", "\u2212")
    return text if value["half_width"] is None else f"{text} ± {value['half_width']:.4f}"


def _on(document: Document, metric: str) -> str:
    ranked = best_first(document, metric)
    if not ranked:
        return f"{metric} has no value: no user has such targets."
    leader, others = ranked[0], ranked[1:]
    direction = "lower" if lower_is_better(metric, document) else "higher"
    value = leader["metrics"][metric]
    users = f"over {value['n']:,} users"
    if not others:
        return f"{metric} ({direction} is better) of {leader['name']} is {with_interval(value)} {users}."
    told = f"On {metric} ({direction} is better) {leader['name']} has the best mean, {with_interval(value)} {users}."
    apart: list[str] = []
    same: list[str] = []
    for other in others:
        difference = paired(document, leader["name"], other["name"], metric)
        if difference is not None and difference["survives_holm"]:
            apart.append(other["name"])
        else:
            same.append(other["name"] + (f" (difference {_signed(difference)})" if difference and not same else ""))
    if apart:
        told += f" Its lead survives the correction for many comparisons against {_listed(apart)}."
    if same and apart:
        told += f" It cannot be told apart from {_listed(same)}."
    elif same:
        told += f" But no other contender can be told apart from it: {_listed(same)}."
    return told


def _signed(value: Document) -> str:
    return with_interval(value, signed=True)


def _against_baselines(document: Document, metric: str) -> list[str]:
    ranked = best_first(document, metric)
    baselines = [contender for contender in ranked if contender["kind"] == "baseline"]
    others = [contender for contender in ranked if contender["kind"] != "baseline"]
    if not baselines or not others:
        return []
    strongest = baselines[0]["name"]
    differences = {c["name"]: paired(document, c["name"], strongest, metric) for c in others}
    better = [name for name, d in differences.items() if d is not None and d["survives_holm"] and d["mean"] > 0]
    if not better:
        verdict = "no other contender is better"
    elif len(better) == len(others):
        verdict = "every other contender is better" if len(others) > 1 else f"{better[0]} is better"
    else:
        verdict = f"{len(better)} of {len(others)} other contenders are better: {_listed(better)}"
    return [f"The strongest baseline on {metric} is {strongest}; {verdict}, after the correction."]


def _headroom(document: Document, k: int) -> list[str]:
    """The contender with the largest share of the oracle's gain over the start."""
    shares = [(name, value) for name, value in shares_at(document, k) if name != LOGGING_POLICY]
    if not shares:
        return []
    (name, share), start = shares[0], document["headroom"]["start"]
    ends = document["headroom"]["metrics"][f"true_reward@{k}"]
    width = "" if share["half_width"] is None else f" ± {100 * share['half_width']:.1f}"
    return [
        f"{name} captures most of the headroom, {100 * share['mean']:.1f}{width} % of what the oracle's lists earn "
        f"({ends['oracle']:.4f}) above those of {start} ({ends['start']:.4f})."
    ]


def _off_policy(document: Document) -> list[str]:
    """The best off-policy value without warnings, compared with the earnings of the logging policy."""
    estimates = [
        (contender["name"], entry)
        for contender in document["contenders"]
        for entry in contender["off_policy"]
        if entry["estimator"] == _ESTIMATOR
    ]
    if not estimates:
        return []
    believed = [(name, entry) for name, entry in estimates if entry["value"] is not None and not entry["warnings"]]
    if not believed:
        return ["The log does not tell the off-policy value of any contender: every estimate carries a warning."]
    target = min((entry["target"] for _, entry in believed), key=lambda name: (name != "policy", name))
    name, best = max(
        ((name, entry) for name, entry in believed if entry["target"] == target), key=lambda one: one[1]["value"]
    )
    low, high = best["intervals"]["bootstrap"]["low"], best["intervals"]["bootstrap"]["high"]
    told = (
        f"Of the off-policy values that may be believed ({_ESTIMATOR}, {target}), that of {name} is the highest: "
        f"{best['value']:.4f} per exposure, 95 % interval {low:.4f} to {high:.4f}."
    )
    return [told + _over_logging_policy(document, name, target)]


def _over_logging_policy(document: Document, name: str, target: str) -> str:
    for pair in document["differences"]:
        if {pair["contender"], pair["against"]} != {name, LOGGING_POLICY}:
            continue
        for entry in pair["off_policy"]:
            if (entry["target"], entry["estimator"]) == (target, _ESTIMATOR) and entry["value"] is not None:
                gain = entry["value"] if pair["contender"] == name else -entry["value"]
                more = "more" if gain > 0 else "less"
                verdict = "survives" if entry["survives_holm"] else "does not survive"
                return (
                    f" That is {abs(gain):.4f} {more} than the logging policy earned, which {verdict} the correction."
                )
    return ""


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_NAMED_AT_MOST])
    if len(names) > _NAMED_AT_MOST:
        shown.append(f"{len(names) - _NAMED_AT_MOST} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
