"""Reads the document of an evaluation: its estimates and differences, and which contender is best by which measure.

``disagreement`` compares NDCG on logged positives with value: which contenders they rank differently, and which metric
to believe. All other warnings are in ``recpo.evaluation.cautions``.
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


def further_metrics(document: Document) -> Document:
    """Metrics of measures that the user passed in, including totals: ``{metric: "higher" or "lower" is better}``."""
    found: Document = document["setting"].get("further_metrics", {})
    return found


def further_at(document: Document, k: int) -> list[str]:
    """Further metrics that have an estimate: at ``k``, or without a list length."""
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
