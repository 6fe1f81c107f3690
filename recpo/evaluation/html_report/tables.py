"""Tables of the report, built from the evaluation's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from recpo.evaluation.headroom import shares_at
from recpo.evaluation.html_report.blocks import Cell, Details, Row, Table
from recpo.evaluation.reading import (
    Document,
    best_first,
    further_at,
    further_metrics,
    lower_is_better,
    paired,
    with_interval,
)

ACCURACY = ("NDCG", "Recall", "HitRate", "MRR", "MAP", "Precision", "gNDCG")
DISLIKES = ("disliked", "disliked_hit_rate", "disliked_MRR", "disliked_rank")
TRUE = ("true_reward", "true_dislike")
_MAIN = ("NDCG", "Recall", "HitRate", "MRR", *DISLIKES[:1], *TRUE)
_COMPARED = ("NDCG", "Recall", "HitRate", "disliked", "true_reward")
_NOTHING = Cell("-")
_MOST_FOR_ALL_PAIRS = 4


def color(place: int) -> str:
    """CSS class of the color of the contender at ``place``. From the ninth on, colors repeat, dashed."""
    return f"s{place % 8}" + (" again" if place >= 8 else "")


def metrics_at(document: Document, names: Sequence[str], k: int) -> list[str]:
    """The metrics among ``names`` at ``k`` that at least one contender has."""
    present = {metric for contender in document["contenders"] for metric in contender["metrics"]}
    return [f"{name}@{k}" for name in names if f"{name}@{k}" in present]


def main_table(document: Document) -> Table:
    """The main metrics of every ranked contender at the first k, with the best of a column marked."""
    k = document["setting"]["ks"][0]
    metrics = [*metrics_at(document, _MAIN, k), *further_at(document, k)]
    return metrics_table(document, metrics, f"lists of {k}")


def metrics_table(document: Document, metrics: Sequence[str], about: str, *, is_ranked: bool = True) -> Table:
    """``metrics`` with intervals, for every contender that has at least one of them.

    Args:
        document: the evaluation.
        metrics: metrics of one list length, or without one.
        about: beginning of the caption.
        is_ranked: mark the best of a column; False if a larger value is neither better nor worse.
    """
    best = {metric: best_first(document, metric)[:1] if is_ranked else [] for metric in metrics}
    rows = []
    for place, contender in ranked(document):
        found = [contender["metrics"].get(metric) for metric in metrics]
        if any(found):
            cells = [
                _estimate_cell(value, "best" if contender in best[metric] else "")
                for metric, value in zip(metrics, found, strict=True)
            ]
            rows.append(Row(contender["name"], cells, color(place)))
    arrows = [f" {'↓' if lower_is_better(metric, document) else '↑'}" if is_ranked else "" for metric in metrics]
    head = [metric.split("@")[0] + arrow for metric, arrow in zip(metrics, arrows, strict=True)]
    caption = f"{about}; mean ± half of the 95 % interval over users"
    caption += "; ↑ higher is better, ↓ lower; shaded: the best" if is_ranked else ""
    return Table(caption, ["contender", *head], rows)


def all_metrics_tables(document: Document) -> list[Details]:
    """All accuracy metrics of every contender: one table per list length, and one for metrics without a length."""
    names = every_metric(document)
    known = (*ACCURACY, *DISLIKES, *TRUE)
    own = further_metrics(document)
    groups = {f"all metrics, lists of {k}": metrics_at(document, known, k) for k in document["setting"]["ks"]}
    groups["scores of the exposed items"] = [name for name in names if "@" not in name and name not in own]
    groups["further metrics"] = [name for name in names if name in own]
    return [Details(title, [metrics_table(document, group, title)]) for title, group in groups.items() if group]


def every_metric(document: Document) -> list[str]:
    """Names of all metrics, in the order of the contenders."""
    return list(dict.fromkeys(metric for contender in document["contenders"] for metric in contender["metrics"]))


def totals_table(document: Document, names: Sequence[str]) -> Table:
    """Metrics of all lists together, such as coverage."""
    rows = [
        Row(contender["name"], [_number_cell(contender["totals"].get(name)) for name in names], color(place))
        for place, contender in ranked(document)
        if contender["totals"]
    ]
    return Table("of all lists together", ["contender", *names], rows)


def differences_table(document: Document, pairs: Sequence[tuple[str, str]] | None = None) -> Table:
    """Paired differences at the first k.

    Args:
        document: the evaluation.
        pairs: contenders to compare; None = all pairs of up to four contenders, otherwise the best one with every
            other.
    """
    k = document["setting"]["ks"][0]
    metrics = [*metrics_at(document, _COMPARED, k), *further_at(document, k)]
    rows = []
    for one, other in pairs or compared_pairs(document):
        cells = [_difference_cell(paired(document, one, other, metric)) for metric in metrics]
        rows.append(Row(f"{one} - {other}", cells))
    caption = (
        f"lists of {k}; mean of the per-user difference ± half of its 95 % interval; * survives Holm's correction at "
        "5 % for all pairs of contenders on that metric"
    )
    return Table(caption, ["contender - against", *metrics], rows)


def headroom_tables(document: Document) -> list[Table]:
    """The shares of the true value between the start and the oracle, one table per list length."""
    found = document.get("headroom") or {}
    place = {one["name"]: number for number, one in enumerate(document["contenders"])}
    tables = []
    for k in document["setting"]["ks"]:
        rows = [Row(name, [_share_cell(value)], color(place[name])) for name, value in shares_at(document, k)]
        if rows:
            ends = found["metrics"][f"true_reward@{k}"]
            caption = (
                f"lists of {k}; (true reward - start) / (oracle - start) ± half of the 95 % interval over users; "
                f"start: {found['start']}, {ends['start']:.4f} ({found['start_is']}); oracle: every user's best items "
                f"by true reward among those that may be listed, {ends['oracle']:.4f}"
            )
            tables.append(Table(caption, ["contender", "share of the headroom"], rows))
    return tables


def _share_cell(value: Mapping[str, Any]) -> Cell:
    width = "" if value["half_width"] is None else f"±{100 * value['half_width']:.1f}"
    return Cell(f"{100 * value['mean']:.1f} %".replace("-", "\u2212"), width)


def compared_pairs(document: Document) -> list[tuple[str, str]]:
    """All pairs, the better one first; if there are many, the best contender with each of the others."""
    k = document["setting"]["ks"][0]
    names = [contender["name"] for contender in best_first(document, f"NDCG@{k}")]
    others = [contender["name"] for _, contender in ranked(document) if contender["kind"] != "oracle"]
    names += [name for name in others if name not in names]
    if len(names) <= _MOST_FOR_ALL_PAIRS:
        return list(combinations(names, 2))
    return [(names[0], name) for name in names[1:]]


def all_pairs(document: Document) -> list[tuple[str, str]]:
    """Every pair of contenders as in the document."""
    return [(difference["contender"], difference["against"]) for difference in document["differences"]]


def segment_table(document: Document, segment: str, metric: str) -> Table:
    """One metric by the bins of a segment."""
    bins = document["setting"]["segments"][segment]
    rows = []
    for place, contender in ranked(document):
        found = contender["segments"].get(segment)
        if found:
            cells = [_estimate_cell(found.get(name, {}).get(metric)) for name in bins]
            rows.append(Row(contender["name"], cells, color(place)))
    sizes = ranked(document)[0][1]["segments"].get(segment, {})
    head = [f"{name} (n = {sizes.get(name, {}).get(metric, {}).get('n', 0):,})" for name in bins]
    return Table(f"{metric} by {segment}", ["contender", *head], rows)


def ranked(document: Document) -> list[tuple[int, Document]]:
    """The contenders that made lists, with their places."""
    return [(place, c) for place, c in enumerate(document["contenders"]) if c["metrics"]]


def facts_table(caption: str, facts: dict[str, Any]) -> Table:
    """A table of two columns: name and value."""
    return Table(caption, [], [Row(name, [Cell(_plain(value), style="words")]) for name, value in facts.items()])


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _estimate_cell(value: Document | None, style: str = "") -> Cell:
    if value is None or value["mean"] is None:
        return _NOTHING
    mean, _, half_width = with_interval(value).partition(" ")
    return Cell(mean, half_width.replace(" ", ""), style)


def _difference_cell(value: Document | None) -> Cell:
    if value is None:
        return _NOTHING
    mean, _, half_width = with_interval(value, signed=True).partition(" ")
    survives = value["survives_holm"]
    return Cell(mean + (" *" if survives else ""), half_width.replace(" ", ""), "survives" if survives else "")


def _number_cell(value: float | None) -> Cell:
    return _NOTHING if value is None else Cell(f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}")
