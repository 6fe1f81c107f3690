"""What makes the numbers of an evaluation weaker than they look, said before the numbers."""

from __future__ import annotations

from typing import Any

_FEW_USERS = 100
_TOO_FEW_FOR_INTERVALS = 30
_MANY_REMOVED = 0.25


def cautions(document: dict[str, Any]) -> list[str]:
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
        *_identical(document),
    ]


def _selected_on_this_period(document: dict[str, Any]) -> list[str]:
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
    events, removed = counts.get("positive_events", 0), counts.get("positive_events_removed_as_seen", 0)
    if not events or removed / events <= _MANY_REMOVED:
        return []
    return [
        f"{removed / events:.0%} of the positive events are of items that the user had seen before and were removed: "
        "what users come back to is not measured. --exclude_seen false keeps it."
    ]


def _unsupported_values(document: dict[str, Any]) -> list[str]:
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


def _unlike(document: dict[str, Any]) -> list[str]:
    lengths = {name: run["max_history"] for name, run in document["provenance"]["runs"].items()}
    if len(set(lengths.values())) < 2:
        return []
    listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return [f"The runs read histories of different lengths ({listed} events): they do not know equally much."]


def _identical(document: dict[str, Any]) -> list[str]:
    trained = {c["name"] for c in document["contenders"] if c["kind"] != "baseline"}
    same = [
        f"{difference['contender']} and {difference['against']}"
        for difference in document["differences"]
        if {difference["contender"], difference["against"]} <= trained and _all_zero(difference["metrics"])
    ]
    return [f"{pair} have exactly the same metrics for every user: are they the same policy?" for pair in same]


def _all_zero(metrics: dict[str, Any]) -> bool:
    defined = [value for value in metrics.values() if value["mean"] is not None and value["half_width"] is not None]
    return bool(defined) and all(value["mean"] == 0 and value["half_width"] == 0 for value in defined)
