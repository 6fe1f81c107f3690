"""Warnings to read before the numbers of an evaluation: what makes them weaker than they look."""

from collections.abc import Sequence
from typing import Final

from recpo.evaluation.reading import Document, disagreement

_FEW_USERS: Final = 100
_TOO_FEW_FOR_INTERVALS: Final = 30
_MANY_REMOVED: Final = 0.25  # of the positive events
_LARGE_OVERLAP: Final = 0.4  # personalized policies of simulated worlds have .05 to .3, unpersonalized lists .6 to .8
_SMALL_CATALOG: Final = 10  # lists: in a catalog with room for fewer, lists overlap by chance
_NOT_PERSONALIZED: Final = ("baseline", "oracle")  # kinds of contenders that are not expected to be


def cautions(document: Document) -> list[str]:
    """Warnings about the held-out users, the runs and the comparison, the most serious first.

    Args:
        document: the content of ``metrics.json``, with ``setting``, ``provenance``, ``contenders`` and ``differences``.
    """
    ranked = [contender for contender in document["contenders"] if contender["counts"]]
    counts = ranked[0]["counts"] if ranked else {}
    return [
        *_checkpoints_of_this_period(document),
        *_few_users(counts),
        *_removed_events(counts),
        *(warning for contender in ranked if contender["kind"] == "lists" for warning in _faulty_lists(contender)),
        *disagreement(document),
        *_similar_lists(document, ranked),
        *_unsupported_values(document),
        *_history_lengths(document),
        *_equal_weights(document),
        *_equal_metrics(document),
    ]


def _checkpoints_of_this_period(document: Document) -> list[str]:
    """A warning if runs chose their best checkpoints by the period that is evaluated."""
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
    """Warnings if few users have the events that a group of metrics needs."""
    warnings = []
    for key, kind, metrics in (
        ("users_with_positives", "positives", "accuracy metrics"),
        ("users_with_dislikes", "disliked items", "disliked@k and related metrics"),
    ):
        users = counts.get(key, 0)
        if users == 0:
            warnings.append(f"No user has {kind} in the period: {metrics} have no value.")
        elif users < _TOO_FEW_FOR_INTERVALS:
            warnings.append(f"Only {users} users have {kind}: too few for the intervals of {metrics} to be trusted.")
        elif users < _FEW_USERS:
            warnings.append(f"Only {users} users have {kind}: {metrics} can show only large differences.")
    return warnings


def _removed_events(counts: dict[str, int]) -> list[str]:
    """A warning if many positive events were removed."""
    events, warnings = counts.get("positive_events", 0), []
    for key, why in (
        (
            "positive_events_excluded",
            "repeats of items in the user's history and were removed, so repeated use is not measured. repeats true "
            "keeps them.",
        ),
        (
            "positive_events_unavailable",
            "events of items that were no candidates when lists were made, and were removed, so items that appear "
            "within the period are not measured. A shorter period removes fewer events.",
        ),
    ):
        if events and (share := counts.get(key, 0) / events) > _MANY_REMOVED:
            warnings.append(f"{share:.0%} of the positive events are {why}")
    return warnings


def _faulty_lists(contender: Document) -> list[str]:
    """Warnings about faults in the lists of another system."""
    name, counts = contender["name"], contender["counts"]
    short = {key.rpartition("@")[2]: n for key, n in counts.items() if key.startswith("users_with_short_list@") and n}
    faults = [
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
        (
            counts["list_items_excluded"],
            "listed items are left out: they are of the user's past, and lists may not repeat items",
        ),
        (
            counts["users_without_list"],
            "of {users:,} held-out users have no list: theirs is empty, scores 0 in the accuracy metrics, and is left "
            "out of means over filled places and of SNIPS",
        ),
        *((n, f"users have a list shorter than {k}: its other places are empty") for k, n in short.items()),
    ]
    return [f"{name}: {number:,} {what.format(**counts)}." for number, what in faults if number]


def similar_lists_warning(
    name: str, *, k: int, users: int, items: int, coverage: float | None, overlap: float | None
) -> str | None:
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
    if coverage is None or overlap is None or not overlap > _LARGE_OVERLAP or items <= _SMALL_CATALOG * k:
        return None
    return (
        f"{name}: lists hardly differ between users. The first {k} places of {users:,} users come from "
        f"{round(coverage * items):,} of {items:,} items, and two users share {overlap:.0%} of their lists on average. "
        "Compare it with the baseline popularity: that is what lists without personalization are worth."
    )


def _similar_lists(document: Document, ranked: Sequence[Document]) -> list[str]:
    setting, candidates = document["setting"], document.get("candidates")
    k, items = setting["ks"][0], setting["num_items"] if candidates is None else candidates["items"]
    warnings = [
        similar_lists_warning(
            one["name"],
            k=k,
            users=one["counts"]["users"],
            items=items,
            coverage=one["totals"].get(f"coverage@{k}"),
            overlap=one["totals"].get(f"overlap@{k}"),
        )
        for one in ranked
        if one["kind"] not in _NOT_PERSONALIZED
    ]
    return [warning for warning in warnings if warning is not None]


def _unsupported_values(document: Document) -> list[str]:
    """A warning if the log has hardly any exposures that a policy would have chosen."""
    names = [
        f"{contender['name']} ({entry['target']})"
        for contender in document["contenders"]
        for entry in contender["off_policy"]
        if entry["estimator"] == "SNIPS"
        and any(warning.startswith(("means nothing", "refused")) for warning in entry["warnings"])
    ]
    warning = "Off-policy values that mean nothing, because the log has hardly any exposures that these policies choose"
    return [f"{warning}: {'; '.join(names)}."] if names else []


def _history_lengths(document: Document) -> list[str]:
    """A warning if runs read histories of different lengths."""
    lengths = {name: run["max_history"] for name, run in _trained(document).items()}
    if len(set(lengths.values())) < 2:
        return []
    listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
    return [f"The runs read histories of different lengths ({listed} events): some know more about a user than others."]


def _equal_weights(document: Document) -> list[str]:
    """A warning that a run and its bundle are the same policy, even if their numbers differ."""
    kinds = {contender["name"]: contender["kind"] for contender in document["contenders"]}
    warnings = []
    for pair in document.get("same_weights", []):
        run, bundle = sorted(pair, key=lambda name: kinds[name] == "bundle")
        what = f"{bundle} is {run}, exported" if kinds[bundle] == "bundle" else f"{run} and {bundle} have equal weights"
        warnings.append(f"{what}: they are one policy and are not compared; any difference is rounding.")
    return warnings


def _equal_metrics(document: Document) -> list[str]:
    """A warning about contenders whose metrics are equal for every user."""
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
