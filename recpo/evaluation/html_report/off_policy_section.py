"""The report section on off-policy value."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.blocks import Block, Cell, Details, Figure, Figures, Lines, Row, Table, Text
from recpo.evaluation.html_report.tables import color
from recpo.evaluation.off_policy.results import LOGGING_POLICY
from recpo.evaluation.reading import Document

_SHOWN = ("SNIPS", "DR")  # one without and one with a reward model
_MEANING = {
    "policy": "an item drawn from the policy's own probabilities",
    "top": "an item of the list, each place equally likely",
}


def value_blocks(document: Document) -> list[Block]:
    """Values, intervals and diagnostics of every target. Empty if there are no estimates."""
    targets = _targets(document)
    if not targets:
        return []
    found: list[Block] = [Text(_logging_policy(document)), Text(_HOW_TO_READ, "soft")]
    for target in targets:
        charts = [_chart(document, target, estimator) for estimator in _SHOWN]
        found.append(Figures(charts))
        found.append(_values(document, target))
        found.append(
            Details(
                f"{target}: weights, support, differences",
                [_diagnostics(document, target), *_differences(document, target)],
            )
        )
    if said := _said(document):
        found.append(Details(f"{len(said)} warnings of single estimates", [Lines(said)]))
    return found


_HOW_TO_READ = (
    "An estimate is the mean reward per exposure that the contender would have earned in the period, had it chosen the "
    "items. SNIPS weighs the logged rewards; DR adds a reward model, corrected by its errors on the log; the naive "
    "average is confounded and DM believes the model: both are there to compare with. Believe nothing that is marked "
    "!, and no interval whose effective rows are few."
)


def _targets(document: Document) -> list[str]:
    listed = dict.fromkeys(entry["target"] for contender in document["contenders"] for entry in contender["off_policy"])
    return sorted((target for target in listed if target != LOGGING_POLICY), key=lambda t: (t != "policy", len(t), t))


def _estimates(contender: Document, target: str) -> dict[str, Document]:
    return {entry["estimator"]: entry for entry in contender["off_policy"] if entry["target"] == target}


def _logged(document: Document) -> Document | None:
    found = [e for c in document["contenders"] for e in c["off_policy"] if e["target"] == LOGGING_POLICY]
    return found[0] if found else None


def _logging_policy(document: Document) -> str:
    entry = _logged(document)
    if entry is None:
        return "Nothing is known of what the logging policy earned."
    low, high = _ends(entry)
    interval = "" if low is None else f" (95 % interval {svg.number_text(low)} to {svg.number_text(high or 0.0)})"
    return (
        f"The logging policy earned {svg.number_text(entry['value'])} per exposure{interval} over {entry['rows']:,} "
        f"exposures of {entry['users']:,} users: the value to beat. Propensities: {entry['propensity']}."
    )


def _chart(document: Document, target: str, estimator: str) -> Figure:
    rows = []
    for place, contender in enumerate(document["contenders"]):
        entry = _estimates(contender, target).get(estimator)
        if entry is not None:
            rows.append(svg.IntervalRow(contender["name"], entry["value"], *_ends(entry), color(place)))
    logged = _logged(document)
    if logged is not None:
        rows.append(svg.IntervalRow(LOGGING_POLICY, logged["value"], *_ends(logged), "reference"))
    title = f"{estimator}, {target}"
    drawn = svg.interval_chart(title, f"value by {estimator} with bootstrap intervals", rows)
    return Figure(title, Markup(drawn), "mean reward per exposure")


def _values(document: Document, target: str) -> Table:
    estimators = _estimators(document, target)
    rows = []
    for place, contender in enumerate(document["contenders"]):
        found = _estimates(contender, target)
        if not found and contender["kind"] in ("baseline", "oracle"):
            continue
        cells = [_value_cell(found.get(estimator)) for estimator in estimators]
        any_entry = next(iter(found.values()), None)
        cells.append(Cell("-") if any_entry is None else Cell(f"{any_entry['effective_sample_size']:,.0f}"))
        rows.append(Row(contender["name"], cells, color(place)))
    meaning = _MEANING[target.split("_")[0]]
    caption = (
        f"{target}: {meaning}; value and bootstrap 95 % interval; ! the estimate carries a warning; - no probabilities"
    )
    return Table(caption, ["contender", *estimators, "effective rows"], rows)


def _estimators(document: Document, target: str) -> list[str]:
    return list(dict.fromkeys(name for contender in document["contenders"] for name in _estimates(contender, target)))


def _value_cell(entry: Document | None) -> Cell:
    if entry is None:
        return Cell("-")
    if entry["value"] is None:
        return Cell("refused")
    low, high = _ends(entry)
    warned = " !" if entry["warnings"] else ""
    interval = "" if low is None or high is None else f"{svg.number_text(low)} to {svg.number_text(high)}"
    return Cell(svg.number_text(entry["value"]) + warned, interval, "stacked")


def _diagnostics(document: Document, target: str) -> Table:
    rows = []
    for place, contender in enumerate(document["contenders"]):
        entry = next(iter(_estimates(contender, target).values()), None)
        if entry is None:
            continue
        found, tail = entry["diagnostics"], entry["diagnostics"]["tail"]
        numbers = [
            found["rows"],
            found["effective_rows"],
            found["effective_users"],
            found["mean_weight"],
            tail["quantile_99"],
            tail["largest"],
            tail["largest_share"],
            tail["pareto_k"],
            tail["zero_share"],
            found["unsupported_share"],
        ]
        rows.append(Row(contender["name"], [Cell(_number(value)) for value in numbers], color(place)))
    head = ["rows", "effective rows", "effective users", "mean weight", "99 % weight", "largest weight"]
    head += ["its share", "Pareto k", "zero weights", "unsupported"]
    caption = f"{target}: the weights; mean weight 1 is expected; unsupported: share of choices that no row shows"
    return Table(caption, ["contender", *head], rows)


def _differences(document: Document, target: str) -> list[Block]:
    """Differences to the logging policy, and of every other pair."""
    rows = []
    for difference in document["differences"]:
        found = {e["estimator"]: e for e in difference["off_policy"] if e["target"] == target}
        if found:
            sign = -1 if difference["contender"] == LOGGING_POLICY else 1
            names = [difference["contender"], difference["against"]][::sign]
            rows.append(Row(" - ".join(names), [_difference_cell(found.get(name), sign) for name in _SHOWN]))
    caption = f"{target}: paired differences of values, bootstrap intervals; * survives Holm's correction at 5 %"
    return [Table(caption, ["contender - against", *_SHOWN], rows)] if rows else []


def _difference_cell(entry: Document | None, sign: int) -> Cell:
    if entry is None or entry["value"] is None:
        return Cell("-")
    low, high = _ends(entry)
    ends = sorted(sign * end for end in (low, high) if end is not None)
    interval = " to ".join(svg.number_text(end) for end in ends)
    survives = entry["survives_holm"]
    text = f"{sign * entry['value']:+.4f}".replace("-", "\u2212")
    return Cell(text + (" *" if survives else ""), interval, "survives" if survives else "")


def _said(document: Document) -> list[str]:
    """The warnings about weights, once per contender and target."""
    return [
        f"{contender['name']}, {target}: {warning}."
        for contender in document["contenders"]
        for target in _targets(document)
        for warning in _estimates(contender, target).get("SNIPS", {"warnings": []})["warnings"]
    ]


def _ends(entry: Document) -> tuple[float | None, float | None]:
    ends: dict[str, Any] = entry["intervals"]["bootstrap"]
    return ends["low"], ends["high"]


def _number(value: float | None) -> str:
    return "-" if value is None else svg.number_text(value)
