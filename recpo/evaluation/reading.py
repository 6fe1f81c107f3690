"""What the numbers of an evaluation say, and what makes them weaker than they look, in sentences written from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recpo.evaluation.off_policy.results import LOGGING_POLICY

Document = dict[str, Any]

_LOWER_IS_BETTER = {"disliked", "disliked_hit_rate", "disliked_MRR", "true_dislike", "gini", "miscalibration"}
_TOLD = ("NDCG", "disliked", "true_reward")
_NAMED_AT_MOST = 5
_ESTIMATOR = "SNIPS"
_FEW_USERS = 100
_TOO_FEW_FOR_INTERVALS = 30
_MANY_REMOVED = 0.25


def lower_is_better(metric: str) -> bool:
    """True of metrics such as ``disliked@10`` that a better recommender has less of."""
    return metric.split("@")[0] in _LOWER_IS_BETTER


def reading(document: Document) -> list[str]:
    """One sentence or two per main metric: who is best, by how much, and from whom that can be told apart.

    Args:
        document: as written to ``metrics.json``.
    """
    k = document["setting"]["ks"][0]
    present = {metric for contender in document["contenders"] for metric in contender["metrics"]}
    sentences = [_on(document, f"{name}@{k}") for name in _TOLD if f"{name}@{k}" in present]
    return [*sentences, *_against_baselines(document, f"NDCG@{k}"), *_off_policy(document)]


def paired(document: Document, contender: str, against: str, metric: str) -> Document | None:
    """The paired difference ``contender - against`` of a metric, whichever way round the document has it."""
    for difference in document["differences"]:
        names = (difference["contender"], difference["against"])
        value = difference["metrics"].get(metric)
        if value is None or value["mean"] is None or set(names) != {contender, against}:
            continue
        found: Document = value if names == (contender, against) else {**value, "mean": -value["mean"]}
        return found
    return None


def best_first(document: Document, metric: str) -> list[Document]:
    """The contenders that have a value of ``metric``, the best first."""
    scored = [c for c in document["contenders"] if c["metrics"].get(metric, {}).get("mean") is not None]
    sign = 1 if lower_is_better(metric) else -1
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
    direction = "lower" if lower_is_better(metric) else "higher"
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
    trained = [contender for contender in ranked if contender["kind"] != "baseline"]
    if not baselines or not trained:
        return []
    strongest = baselines[0]["name"]
    differences = {c["name"]: paired(document, c["name"], strongest, metric) for c in trained}
    better = [name for name, d in differences.items() if d is not None and d["survives_holm"] and d["mean"] > 0]
    if not better:
        verdict = "no trained contender is better"
    elif len(better) == len(trained):
        verdict = "every trained contender is better" if len(trained) > 1 else f"{better[0]} is better"
    else:
        verdict = f"{len(better)} of {len(trained)} trained contenders are better: {_listed(better)}"
    return [f"The strongest baseline on {metric} is {strongest}; {verdict}, after the correction."]


def _off_policy(document: Document) -> list[str]:
    """The best off-policy value that may be believed, against what the logging policy earned."""
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


def cautions(document: Document) -> list[str]:
    """Warnings about the held-out users, the runs and the comparison, the gravest first.

    Args:
        document: as written to ``metrics.json``, with ``setting``, ``provenance``, ``contenders`` and ``differences``.
    """
    ranked = [contender for contender in document["contenders"] if contender["counts"]]
    counts = ranked[0]["counts"] if ranked else {}
    return [
        *_selected_on_this_period(document),
        *_few_users(counts),
        *_removed(counts),
        *_unsupported_values(document),
        *_unlike(document),
        *_exported(document),
        *_identical(document),
    ]


def _selected_on_this_period(document: Document) -> list[str]:
    setting, runs = document["setting"], document["provenance"]["runs"]
    if setting["split"] != "valid" or setting["checkpoint"] != "best" or not runs:
        return []
    return [
        "The runs' best checkpoints were chosen by their NDCG on this very period (valid): their numbers are "
        "optimistic, and more so the longer a run was validated. Compare them on the test period."
    ]


def _few_users(counts: dict[str, int]) -> list[str]:
    said = []
    for key, kind, metrics in (
        ("users_with_positives", "positives", "accuracy metrics"),
        ("users_with_dislikes", "disliked items", "disliked@k and its like"),
    ):
        users = counts.get(key, 0)
        if users == 0:
            said.append(f"No user has {kind} in the period: {metrics} have no value.")
        elif users < _TOO_FEW_FOR_INTERVALS:
            said.append(f"Only {users} users have {kind}: too few for the intervals of {metrics} to be trusted.")
        elif users < _FEW_USERS:
            said.append(f"Only {users} users have {kind}: {metrics} can tell large differences only.")
    return said


def _removed(counts: dict[str, int]) -> list[str]:
    events, removed = counts.get("positive_events", 0), counts.get("positive_events_excluded", 0)
    if not events or removed / events <= _MANY_REMOVED:
        return []
    return [
        f"{removed / events:.0%} of the positive events are of items of the user's past and were removed: "
        "what users come back to is not measured. exclude_past false keeps it."
    ]


def _unsupported_values(document: Document) -> list[str]:
    entries = [
        (contender["name"], entry["target"], warning)
        for contender in document["contenders"]
        for entry in contender["off_policy"]
        if entry["estimator"] == "SNIPS"
        for warning in entry["warnings"]
        if warning.startswith(("means nothing", "refused"))
    ]
    if not entries:
        return []
    listed = "; ".join(dict.fromkeys(f"{name} ({target})" for name, target, _ in entries))
    return [f"Off-policy values that mean nothing, because the log hardly speaks of these policies: {listed}."]


def _unlike(document: Document) -> list[str]:
    lengths = {name: run["max_history"] for name, run in document["provenance"]["runs"].items()}
    if len(set(lengths.values())) < 2:
        return []
    listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return [f"The runs read histories of different lengths ({listed} events): they do not know equally much."]


def _exported(document: Document) -> list[str]:
    """A run and its bundle are one policy, whatever their numbers say."""
    kinds = {contender["name"]: contender["kind"] for contender in document["contenders"]}
    said = []
    for pair in document.get("same_weights", []):
        run, bundle = sorted(pair, key=lambda name: kinds[name] == "bundle")
        what = f"{bundle} is {run}, exported" if kinds[bundle] == "bundle" else f"{run} and {bundle} have equal weights"
        said.append(f"{what}: they are one policy, are not compared, and whatever differs between them is rounding.")
    return said


def _identical(document: Document) -> list[str]:
    trained = {c["name"] for c in document["contenders"] if c["kind"] != "baseline"}
    same = [
        f"{difference['contender']} and {difference['against']}"
        for difference in document["differences"]
        if {difference["contender"], difference["against"]} <= trained and _all_zero(difference["metrics"])
    ]
    return [f"{pair} have exactly the same metrics for every user: are they the same policy?" for pair in same]


def _all_zero(metrics: Document) -> bool:
    defined = [value for value in metrics.values() if value["mean"] is not None and value["half_width"] is not None]
    return bool(defined) and all(value["mean"] == 0 and value["half_width"] == 0 for value in defined)
