"""What the numbers of an evaluation say: which contender is best by which measure, and what to read before the numbers.

``cautions`` warns of what makes the numbers weaker than they look, and ``disagreement`` compares NDCG on logged
positives with value: which contenders they rank differently, and which metric to believe.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from recpo.evaluation.off_policy.results import DISCOUNTED

Document = dict[str, Any]

#: Metrics of the true value, up to their list length.
TRUE_REWARD: Final = "true_reward@"

_LOWER_IS_BETTER = {"disliked", "disliked_hit_rate", "disliked_MRR", "true_dislike", "gini", "miscalibration"}
_ESTIMATORS = ("SNIPS", "DR")
_FEW_USERS = 100
_TOO_FEW_FOR_INTERVALS = 30
_MANY_REMOVED = 0.25
_ALIKE = 0.4  # overlap; personalized policies of simulated worlds have .05 to .3, unpersonalized lists .6 to .8
_LISTS_OF_A_SMALL_CATALOG = 10  # a catalog of so many lists: there, lists overlap by chance
_OF_NO_USER = ("baseline", "oracle")


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


def paired(document: Document, contender: str, against: str, metric: str) -> Document | None:
    """The paired difference ``contender - against`` of a metric, in either order of the document."""
    for pair in document["differences"]:
        if {pair["contender"], pair["against"]} == {contender, against}:
            # + 0.0: without the sign of -0.0
            value, sign = pair["metrics"].get(metric), 1 if pair["contender"] == contender else -1
            return None if value is None or value["mean"] is None else {**value, "mean": sign * value["mean"] + 0.0}
    return None


def off_policy_of(entry: Document) -> dict[tuple[str, str], Document]:
    """The off-policy estimates of a contender, or those of a pair, by target and estimator."""
    return {(one["target"], one["estimator"]): one for one in entry["off_policy"]}


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


def ends_of(mean: float | None, half_width: float | None) -> tuple[float | None, float | None]:
    """Both ends of an interval; None if there is none."""
    return (None, None) if mean is None or half_width is None else (mean - half_width, mean + half_width)


def shares_at(document: Document, k: int) -> list[tuple[str, Document]]:
    """Contenders and their shares of the headroom at ``k``, the largest first; empty without a truth."""
    found = (document.get("headroom") or {"metrics": {}})["metrics"].get(f"{TRUE_REWARD}{k}", {"contenders": {}})
    known = [(name, value) for name, value in found["contenders"].items() if value["mean"] is not None]
    return sorted(known, key=lambda one: -one[1]["mean"])


class Number(NamedTuple):
    """A value, or a paired difference, with its 95 % interval, and whether a difference survives Holm's correction."""

    mean: float
    low: float | None
    high: float | None
    survives: bool


class Value(NamedTuple):
    """The value of contenders by one measure; the oracle does not compete.

    Attributes:
        name: name of the measure, for people.
        why: its meaning.
        of: contender to its value.
        differences: pair of contenders to the paired difference of the first to the second; without pairs that were not
            compared.
    """

    name: str
    why: str
    of: dict[str, Number]
    differences: dict[tuple[str, str], Number]


def disagreement(document: Document) -> list[str]:
    """A warning if the best contender by NDCG is significantly not the best by value.

    Value is the true reward if it is known; else the off-policy value of the lists (deep ones, if they were made, by
    SNIPS; else those of ``k``, by SNIPS or else DR), from estimates without warnings; else ``AUC_mixed``. The
    difference in value must survive Holm's correction.
    """
    k = document["setting"]["ks"][0]
    ranked = [contender["name"] for contender in best_first(document, f"NDCG@{k}")]
    for value in _values(document, k):
        known = [name for name in ranked if name in value.of]
        if len(known) < 2:
            continue
        best = max(known, key=lambda name: value.of[name].mean)
        difference = value.differences.get((best, known[0]))
        if best == known[0] or difference is None or not difference.survives:
            return []
        return [
            f"NDCG@{k} and value rank the contenders differently: {known[0]} has the best NDCG@{k}, but {best} has the "
            f"best {value.name} ({value.of[best].mean:.4f} against {value.of[known[0]].mean:.4f}; the difference "
            f"survives the correction). Believe {value.name}: {value.why}. NDCG on logged positives rewards agreement "
            "with the logging policy, which chose the items that could become positives."
        ]
    return []


def candidates_sentence(document: Document) -> str:
    """The candidates, the source of their times, and the number of removed events."""
    known = document["candidates"]
    counts = next(one["counts"] for one in document["contenders"] if one["counts"])
    begin = known["begin"]
    if not isinstance(begin, str):
        begin = datetime.fromtimestamp(begin / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    removed = " and ".join(
        f"{counts[f'{kind}_events_unavailable']:,} of {counts[f'{kind}_events']:,} {kind}"
        for kind in ("positive", "disliked")
    )
    return (
        f"{known['items']:,} items were candidates at {begin}, {known['items_left_out']:,} were not "
        f"({known['source']}). Removed from the targets: {removed} events."
    )


def best_by_value(document: Document, among: Sequence[str]) -> str | None:
    """The contender with the best value by the first measure that is known, as in ``disagreement``; else by NDCG.

    Args:
        document: of an evaluation.
        among: names of contenders.

    Returns:
        None if no contender among these has a value.
    """
    k = document["setting"]["ks"][0]
    for value in _values(document, k):
        known = [name for name in among if name in value.of]
        if known:
            return max(known, key=lambda name: value.of[name].mean)
    return None


def criterion(document: Document) -> Value | None:
    """The measure of value to name the best contender by: the first that compares two, as in ``best_by_value``."""
    values = _values(document, document["setting"]["ks"][0])
    return next((one for one in values if len(one.of) > 1), next((one for one in values if one.of), None))


def _values(document: Document, k: int) -> list[Value]:
    """The measures of value, the most reliable first: with deep lists, the estimate that `recpo fit` decides by.

    The last one is NDCG, which says something of value if nothing else does.
    """
    off_policy = [(DISCOUNTED.format(k=k), "SNIPS"), *((f"top_{k}", estimator) for estimator in _ESTIMATORS)]
    estimated = "it estimates what users would get from the lists, from the log's propensities"
    auc = (
        "it compares a user's positives with other items that the same user was shown, so exposure cancels out, and "
        "with items that the user was never shown"
    )
    return [
        _value(document, f"{TRUE_REWARD}{k}", "it is what users get from the lists"),
        *(_value(document, key, estimated, f"off-policy value ({key[1]}, {key[0]})") for key in off_policy),
        _value(document, "AUC_mixed", auc),
        _value(
            document, f"NDCG@{k}", "it rewards agreement with the logged positives, because nothing is known of value"
        ),
    ]


def _value(document: Document, key: str | tuple[str, str], why: str, name: str | None = None) -> Value:
    """The value by a metric, or by the off-policy estimates of a target and an estimator."""
    competing = [one for one in document["contenders"] if one["kind"] != "oracle"]
    of = {one["name"]: found for one in competing if (found := _number(one, key)) is not None}
    differences = {}
    for pair in document["differences"]:
        if (found := _number(pair, key)) is not None:
            low, high = (None if end is None else -end for end in (found.high, found.low))
            differences[pair["contender"], pair["against"]] = found
            differences[pair["against"], pair["contender"]] = Number(-found.mean, low, high, found.survives)
    return Value(name or str(key), why, of, differences)


def _number(entry: Document, key: str | tuple[str, str]) -> Number | None:
    """The number of a contender or of a pair; None = there is none, or its warnings say not to believe it."""
    if isinstance(key, str):
        found = entry["metrics"].get(key, {"mean": None})
        mean, (low, high) = found["mean"], ends_of(found["mean"], found.get("half_width"))
    else:
        found = off_policy_of(entry).get(key, {"value": None, "intervals": {"bootstrap": {}}})
        mean, (low, high) = found["value"], map(found["intervals"]["bootstrap"].get, ("low", "high"))
    is_known = mean is not None and not found.get("warnings")
    return Number(mean, low, high, bool(found.get("survives_holm"))) if is_known else None


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
    names = [
        f"{contender['name']} ({entry['target']})"
        for contender in document["contenders"]
        for entry in contender["off_policy"]
        if entry["estimator"] == "SNIPS"
        and any(warning.startswith(("means nothing", "refused")) for warning in entry["warnings"])
    ]
    said = "Off-policy values that mean nothing, because the log hardly speaks of these policies"
    return [f"{said}: {'; '.join(names)}."] if names else []


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
