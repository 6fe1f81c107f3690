"""NDCG on logged positives against value: which contenders they rank differently, and which metric to believe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from recpo.evaluation.reading import Document, best_first, paired

_ESTIMATORS = ("SNIPS", "DR")


class Value(NamedTuple):
    """The value of contenders by one measure.

    Attributes:
        name: name of the measure, for people.
        why: its meaning.
        of: contender to its value.
        apart: whether the difference of two contenders survives Holm's correction.
    """

    name: str
    why: str
    of: dict[str, float]
    apart: Callable[[str, str], bool]


def disagreement(document: Document) -> list[str]:
    """A warning if the best contender by NDCG is significantly not the best by value.

    Value is the true reward if it is known; else the off-policy value of the lists, by SNIPS or else DR, from estimates
    without warnings; else ``AUC_other``. The difference in value must survive Holm's correction.
    """
    k = document["setting"]["ks"][0]
    ranked = [contender["name"] for contender in best_first(document, f"NDCG@{k}")]
    for value in _values(document, k):
        known = [name for name in ranked if name in value.of]
        if len(known) < 2:
            continue
        best = max(known, key=lambda name: value.of[name])
        if best == known[0] or not value.apart(best, known[0]):
            return []
        return [
            f"NDCG@{k} and value rank the contenders differently: {known[0]} has the best NDCG@{k}, but {best} has the "
            f"best {value.name} ({value.of[best]:.4f} against {value.of[known[0]]:.4f}; the difference survives the "
            f"correction). Believe {value.name}: {value.why}. NDCG on logged positives rewards agreement with the "
            "logging policy, which chose the items that could become positives."
        ]
    return []


def best_by_value(document: Document, among: Sequence[str]) -> str | None:
    """The contender with the best value by the first measure that is known, as in ``disagreement``; else by NDCG.

    Args:
        document: of an evaluation.
        among: names of contenders.

    Returns:
        None if no contender among these has a value.
    """
    k = document["setting"]["ks"][0]
    for value in (*_values(document, k), _metric(document, f"NDCG@{k}", "")):
        known = [name for name in among if name in value.of]
        if known:
            return max(known, key=lambda name: value.of[name])
    return None


def _values(document: Document, k: int) -> list[Value]:
    """The measures of value, the most reliable first."""
    off_policy = [_off_policy(document, k, name) for name in _ESTIMATORS]
    return [_true_reward(document, k), *off_policy, _auc(document)]


def _true_reward(document: Document, k: int) -> Value:
    return _metric(document, f"true_reward@{k}", "it is what users get from the lists")


def _auc(document: Document) -> Value:
    why = "it compares a user's positives with other items that the same user was shown, so exposure cancels out"
    return _metric(document, "AUC_other", why)


def _metric(document: Document, metric: str, why: str) -> Value:
    values = {one["name"]: float(one["metrics"][metric]["mean"]) for one in best_first(document, metric)}

    def apart(one: str, other: str) -> bool:
        difference = paired(document, one, other, metric)
        return difference is not None and bool(difference["survives_holm"])

    return Value(metric, why, values, apart)


def _off_policy(document: Document, k: int, estimator: str) -> Value:
    target = f"top_{k}"
    values = {
        contender["name"]: float(entry["value"])
        for contender in document["contenders"]
        for entry in contender["off_policy"]
        if (entry["target"], entry["estimator"]) == (target, estimator)
        if entry["value"] is not None and not entry["warnings"]
    }

    def apart(one: str, other: str) -> bool:
        return any(
            bool(entry["survives_holm"])
            for pair in document["differences"]
            if {pair["contender"], pair["against"]} == {one, other}
            for entry in pair["off_policy"]
            if (entry["target"], entry["estimator"]) == (target, estimator)
        )

    why = "it estimates what users would get from the lists, from the log's propensities"
    return Value(f"off-policy value ({estimator}, {target})", why, values, apart)
