"""Warnings of an evaluation, in sentences that are generated from its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from recpo.evaluation.disagreement import disagreement
from recpo.evaluation.reading import Document

_FEW_USERS = 100
_TOO_FEW_FOR_INTERVALS = 30
_MANY_REMOVED = 0.25
_ALIKE = 0.4  # overlap; personalized policies of simulated worlds have .05 to .3, unpersonalized lists .6 to .8
_LISTS_OF_A_SMALL_CATALOG = 10  # a catalog of so many lists: there, lists overlap by chance
_OF_NO_USER = ("baseline", "oracle")


def cautions(document: Document) -> list[str]:
    """Warnings about the held-out users, the runs and the comparison, the most serious first.

    Args:
        document: the content of ``metrics.json``, with ``setting``, ``provenance``, ``contenders`` and ``differences``.
    """
    ranked = [contender for contender in document["contenders"] if contender["counts"]]
    counts = ranked[0]["counts"] if ranked else {}
    return [
        *_selected_on_this_period(document),
        *_few_users(counts),
        *_removed(counts),
        *(sentence for contender in ranked if contender["kind"] == "lists" for sentence in _lists(contender)),
        *disagreement(document),
        *_hardly_personalized(document, ranked),
        *_unsupported_values(document),
        *_unlike(document),
        *_exported(document),
        *_identical(document),
    ]


def _selected_on_this_period(document: Document) -> list[str]:
    setting = document["setting"]
    if setting["split"] != "valid" or setting["checkpoint"] != "best" or not _trained(document):
        return []
    return [
        "The runs' best checkpoints were chosen by a metric of this very period (valid): their numbers are "
        "optimistic, and more so the longer a run was validated. Compare them on the test period."
    ]


def _trained(document: Document) -> Document:
    """The origin of runs and bundles, by name."""
    runs = document["provenance"]["runs"]
    return {name: run for name, run in runs.items() if run.get("kind", "run") in ("run", "bundle")}


def _few_users(counts: dict[str, int]) -> list[str]:
    said = []
    for key, kind, metrics in (
        ("users_with_positives", "positives", "accuracy metrics"),
        ("users_with_dislikes", "disliked items", "disliked@k and related metrics"),
    ):
        users = counts.get(key, 0)
        if users == 0:
            said.append(f"No user has {kind} in the period: {metrics} have no value.")
        elif users < _TOO_FEW_FOR_INTERVALS:
            said.append(f"Only {users} users have {kind}: too few for the intervals of {metrics} to be trusted.")
        elif users < _FEW_USERS:
            said.append(f"Only {users} users have {kind}: {metrics} can show only large differences.")
    return said


def _removed(counts: dict[str, int]) -> list[str]:
    """A warning if many positive events were removed."""
    events, said = counts.get("positive_events", 0), []
    for key, why in (
        (
            "positive_events_excluded",
            "repeats of items in the user's history and were removed, so repeated use is not measured. exclude_past "
            "false keeps them.",
        ),
        (
            "positive_events_unavailable",
            "events of items that were no candidates when lists were made, and were removed, so items that appear "
            "within the period are not measured. A shorter period removes fewer events.",
        ),
    ):
        if events and (share := counts.get(key, 0) / events) > _MANY_REMOVED:
            said.append(f"{share:.0%} of the positive events are {why}")
    return said


def _lists(contender: Document) -> list[str]:
    """A warning about faults in the lists of another system."""
    name, counts = contender["name"], contender["counts"]
    short = {key.rpartition("@")[2]: n for key, n in counts.items() if key.startswith("users_with_short_list@") and n}
    said = [
        (
            counts["list_rows_of_unknown_users"],
            "rows are left out: the prepared data do not know their user ({list_unknown_users:,} users)",
        ),
        (
            counts["list_rows_of_unknown_items"],
            "rows are left out: the prepared data do not know their item ({list_unknown_items:,} items)",
        ),
        (counts["list_rows_repeated"], "rows repeat an item of the same list: its best place counts"),
        (counts["list_rows_against_scores"], "rows have a higher score than the row one rank better: the ranks count"),
        (counts["list_items_excluded"], "listed items are left out: they are of the user's past (exclude_past)"),
        (
            counts["users_without_list"],
            "of {users:,} held-out users have no list: theirs is empty, scores 0 in the accuracy metrics, and is left "
            "out of means over filled places and of SNIPS",
        ),
        *((n, f"users have a list shorter than {k}: its other places are empty") for k, n in short.items()),
    ]
    return [f"{name}: {number:,} {what.format(**counts)}." for number, what in said if number]


def alike(name: str, *, k: int, users: int, items: int, coverage: float | None, overlap: float | None) -> str | None:
    """A warning if the lists of different users are almost the same; None if they are not.

    They are if a list shares on average more than 40 % of its items with that of another user, in a catalog of more
    than ten lists.

    Args:
        name: name of the policy or reward.
        k: length of the lists.
        users: number of lists.
        items: number of items that could be listed.
        coverage: share of these items that are on a list; None = unknown.
        overlap: see ``recpo.evaluation.beyond_accuracy.list_overlap``; None = unknown.
    """
    if coverage is None or overlap is None or not overlap > _ALIKE or items <= _LISTS_OF_A_SMALL_CATALOG * k:
        return None
    return (
        f"{name}: lists hardly differ between users. The first {k} places of {users:,} users come from "
        f"{round(coverage * items):,} of {items:,} items, and two users share {overlap:.0%} of their lists on average. "
        "Compare it with the baseline popularity: that is what lists without personalization are worth."
    )


def _hardly_personalized(document: Document, ranked: Sequence[Document]) -> list[str]:
    setting, candidates = document["setting"], document.get("candidates")
    k, items = setting["ks"][0], setting["num_items"] if candidates is None else candidates["items"]
    said = [
        alike(
            one["name"],
            k=k,
            users=one["counts"]["users"],
            items=items,
            coverage=one["totals"].get(f"coverage@{k}"),
            overlap=one["totals"].get(f"overlap@{k}"),
        )
        for one in ranked
        if one["kind"] not in _OF_NO_USER
    ]
    return [sentence for sentence in said if sentence is not None]


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
    lengths = {name: run["max_history"] for name, run in _trained(document).items()}
    if len(set(lengths.values())) < 2:
        return []
    listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return [f"The runs read histories of different lengths ({listed} events): they do not know equally much."]


def _exported(document: Document) -> list[str]:
    """A warning that a run and its bundle are the same policy, even if their numbers differ."""
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
