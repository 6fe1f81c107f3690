"""What the report shows of off-policy values: intervals, tables and the diagnostics of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.parts import (
    Cell,
    Figure,
    Row,
    Table,
    interval_figure,
)
from recpo.evaluation.html_report.svg import number_text
from recpo.evaluation.off_policy.results import LOGGING_POLICY
from recpo.evaluation.reading import (
    Document,
)

_ESTIMATORS = ("SNIPS", "DR")  # one without and one with a reward model
_TARGETS = {
    "policy": "an item drawn from the policy's own probabilities",
    "top": "an item of the list, each place equally likely",
}


class OffPolicyView:
    """The off-policy values of the document as the template reads them."""

    def __init__(self, document: Document, style: Mapping[str, str]) -> None:
        self.document = document
        self.style = style

    @cached_property
    def targets(self) -> list[str]:
        """Targets of the off-policy estimates, that of the policy itself first."""
        found = {e["target"] for one in self.document["contenders"] for e in one["off_policy"]} - {LOGGING_POLICY}
        return sorted(found, key=lambda target: (target != "policy", len(target), target))

    @property
    def logging_policy(self) -> str:
        """The earnings of the logging policy, in a sentence."""
        entry = self._logged
        if entry is None:
            return "Nothing is known of what the logging policy earned."
        low, high = _ends(entry)
        interval = "" if low is None else f" (95 % interval {number_text(low)} to {number_text(high or 0.0)})"
        return (
            f"The logging policy earned {number_text(entry['value'])} per exposure{interval} over {entry['rows']:,} "
            f"exposures of {entry['users']:,} users: the value to beat. Propensities: {entry['propensity']}."
        )

    def charts(self, target: str) -> list[Figure]:
        """Values with intervals, one chart per main estimator."""
        figures = []
        for estimator in _ESTIMATORS:
            rows = []
            for contender in self.document["contenders"]:
                if (entry := _estimates(contender, target).get(estimator)) is not None:
                    name = contender["name"]
                    rows.append(svg.IntervalRow(name, entry["value"], *_ends(entry), self.style[name]))
            if (logged := self._logged) is not None:
                rows.append(svg.IntervalRow(LOGGING_POLICY, logged["value"], *_ends(logged), "reference"))
            about = f"value by {estimator} with bootstrap intervals"
            figures.append(interval_figure(f"{estimator}, {target}", about, rows, "mean reward per exposure"))
        return figures

    def values(self, target: str) -> Table:
        """Values, intervals and effective rows of every contender."""
        found = {one["name"]: _estimates(one, target) for one in self.document["contenders"]}
        estimators = list(dict.fromkeys(name for entries in found.values() for name in entries))
        rows = []
        for contender in self.document["contenders"]:
            entries = found[contender["name"]]
            if not entries and contender["kind"] in ("baseline", "oracle"):
                continue
            effective = f"{next(iter(entries.values()))['effective_sample_size']:,.0f}" if entries else "-"
            cells = [*(_value_cell(entries.get(estimator)) for estimator in estimators), Cell(effective)]
            rows.append(Row(contender["name"], cells, self.style[contender["name"]]))
        meaning = _TARGETS[target.split("_")[0]]
        caption = f"{target}: {meaning}; value and bootstrap 95 % interval; ! carries a warning; - no probabilities"
        return Table(caption, ["contender", *estimators, "effective rows"], rows)

    def diagnostics(self, target: str) -> Table:
        """The importance weights of every contender."""
        rows = []
        for contender in self.document["contenders"]:
            entry = next(iter(_estimates(contender, target).values()), None)
            if entry is None:
                continue
            found = entry["diagnostics"]
            numbers = [found[name] for name in ("rows", "effective_rows", "effective_users", "mean_weight")]
            tail = ("quantile_99", "largest", "largest_share", "pareto_k", "zero_share")
            numbers += [*(found["tail"][name] for name in tail), found["unsupported_share"]]
            cells = [Cell("-" if value is None else number_text(value)) for value in numbers]
            rows.append(Row(contender["name"], cells, self.style[contender["name"]]))
        head = ["rows", "effective rows", "effective users", "mean weight", "99 % weight", "largest weight"]
        head += ["its share", "Pareto k", "zero weights", "unsupported"]
        caption = f"{target}: the weights; mean weight 1 is expected; unsupported: share of choices that no row shows"
        return Table(caption, ["contender", *head], rows)

    def differences(self, target: str) -> list[Table]:
        """Differences to the logging policy, and of every other pair."""
        rows = []
        for pair in self.document["differences"]:
            found = {e["estimator"]: e for e in pair["off_policy"] if e["target"] == target}
            if found:
                sign = -1 if pair["contender"] == LOGGING_POLICY else 1
                names = [pair["contender"], pair["against"]][::sign]
                cells = [_value_difference_cell(found.get(name), sign) for name in _ESTIMATORS]
                rows.append(Row(" - ".join(names), cells))
        caption = f"{target}: paired differences of values, bootstrap intervals; * survives Holm's correction at 5 %"
        return [Table(caption, ["contender - against", *_ESTIMATORS], rows)] if rows else []

    @property
    def warnings(self) -> list[str]:
        """The warnings about weights, once per contender and target."""
        return [
            f"{contender['name']}, {target}: {warning}."
            for contender in self.document["contenders"]
            for target in self.targets
            for warning in _estimates(contender, target).get("SNIPS", {"warnings": []})["warnings"]
        ]

    @property
    def _logged(self) -> Document | None:
        entries = (e for one in self.document["contenders"] for e in one["off_policy"])
        return next((entry for entry in entries if entry["target"] == LOGGING_POLICY), None)


def _estimates(contender: Document, target: str) -> dict[str, Document]:
    return {entry["estimator"]: entry for entry in contender["off_policy"] if entry["target"] == target}


def _ends(entry: Document) -> tuple[float | None, float | None]:
    ends: dict[str, Any] = entry["intervals"]["bootstrap"]
    return ends["low"], ends["high"]


def _value_cell(entry: Document | None) -> Cell:
    if entry is None or entry["value"] is None:
        return Cell("-" if entry is None else "refused")
    low, high = _ends(entry)
    interval = "" if low is None or high is None else f"{number_text(low)} to {number_text(high)}"
    return Cell(number_text(entry["value"]) + (" !" if entry["warnings"] else ""), interval, "stacked")


def _value_difference_cell(entry: Document | None, sign: int) -> Cell:
    if entry is None or entry["value"] is None:
        return Cell("-")
    interval = " to ".join(number_text(end) for end in sorted(sign * end for end in _ends(entry) if end is not None))
    survives = entry["survives_holm"]
    text = f"{sign * entry['value']:+.4f}".replace("-", "\u2212")
    return Cell(text + (" *" if survives else ""), interval, "survives" if survives else "")
