"""The evaluation of several contenders as one JSON document and as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from recpo.evaluation.held_out import Estimate, RankingResult

SCHEMA_VERSION = 1
_LOWER_IS_BETTER = ("disliked", "true_dislike")
_HEADINGS = ("NDCG", "Recall", "HitRate", "MRR", "disliked", "true_reward")
_MOST_FOR_ALL_PAIRS = 4


class Contender(NamedTuple):
    """A recommender and how it did.

    Attributes:
        name: unique among the contenders.
        kind: a trained run or a baseline.
        result: its metrics.
    """

    name: str
    kind: Literal["run", "baseline"]
    result: RankingResult


def metrics_document(contenders: Sequence[Contender], *, setting: dict[str, Any]) -> dict[str, Any]:
    """What ``metrics.json`` holds; numbers that are not defined (no user, one user) are null.

    Args:
        contenders: all evaluated on the same users.
        setting: split, threshold and the like; it goes into the document as it is.

    Returns:
        ``schema_version``, ``setting``, ``conventions``; ``contenders``: for each its ``name``, ``kind``, ``counts``,
        ``metrics`` (name to ``mean``, ``half_width``, ``n``) and ``coverage``; ``differences``: for each pair
        ``contender``, ``against`` and the paired ``metrics`` of contender - against.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "setting": setting,
        "conventions": conventions(bool(setting["exclude_seen"]), float(setting["positive_threshold"])),
        "contenders": [
            {
                "name": contender.name,
                "kind": contender.kind,
                "counts": contender.result.counts,
                "coverage": contender.result.coverage,
                "metrics": {
                    metric: _as_json(contender.result.estimate(metric)) for metric in contender.result.per_user
                },
            }
            for contender in contenders
        ],
        "differences": [
            {
                "contender": later.name,
                "against": earlier.name,
                "metrics": {m: _as_json(later.result.difference(earlier.result, m)) for m in later.result.per_user},
            }
            for earlier, later in combinations(contenders, 2)
        ],
    }


def conventions(exclude_seen: bool, positive_threshold: float) -> dict[str, str]:
    """How the numbers are to be read, in words, for the document and beside the table."""
    seen = (
        "excluded from the lists; held-out events of seen items are removed from the targets and counted"
        if exclude_seen
        else "kept: they may be recommended, and held-out events of seen items are targets"
    )
    return {
        "catalogue": "every item is ranked, no sampled negatives",
        "seen_items": f"the items of a user's last max_context events before the period are {seen}",
        "positives": f"distinct held-out items with watch_quantile >= {positive_threshold:g} that were not disliked",
        "disliked": "distinct held-out items that were disliked; disliked@k is their share of the k places",
        "ndcg": "binary gains, divided by the DCG of an ideal list of min(k, number of targets) items",
        "map": "divided by min(k, number of targets)",
        "users": "means over the users who have such targets (n); half_width is the normal 95 % interval of the mean",
    }


def metrics_table(contenders: Sequence[Contender], k: int, *, title: str) -> Table:
    """One row per contender: the main metrics at ``k`` with 95 % half-widths; the best mean of a column is bold."""
    names = _shown(contenders, _HEADINGS, k)
    table = _table(f"{title}; lists of {k}", "mean ± half of the 95 % interval over users")
    table.add_column("contender")
    for name in names:
        table.add_column(_heading(name), justify="right")
    table.add_column("coverage", justify="right")
    estimates = {name: [contender.result.estimate(name) for contender in contenders] for name in names}
    best = {name: _best(name, [e.mean for e in column]) for name, column in estimates.items()}
    for row, contender in enumerate(contenders):
        cells = [_cell(estimates[name][row], bold=row == best[name]) for name in names]
        table.add_row(contender.name, *cells, f"{contender.result.coverage[f'coverage@{k}']:.3f}")
    return table


def differences_table(contenders: Sequence[Contender], k: int) -> Table:
    """Paired differences of metrics at ``k``, bold where the interval excludes 0.

    Every pair up to four contenders, from there on each against the first; the document has every pair.
    """
    names = _shown(contenders, ("NDCG", "Recall", "disliked", "true_reward", "true_dislike"), k)
    table = _table(f"paired differences on the same users; lists of {k}", "bold: the interval excludes 0")
    table.add_column("contender - against")
    for name in names:
        table.add_column(_heading(name), justify="right")
    pairs = list(combinations(contenders, 2))
    for earlier, later in pairs if len(contenders) <= _MOST_FOR_ALL_PAIRS else pairs[: len(contenders) - 1]:
        values = [later.result.difference(earlier.result, name) for name in names]
        cells = [_cell(value, bold=abs(value.mean) > value.half_width, signed=True) for value in values]
        table.add_row(f"{later.name} - {earlier.name}", *cells)
    return table


def _shown(contenders: Sequence[Contender], headings: Sequence[str], k: int) -> list[str]:
    return [f"{heading}@{k}" for heading in headings if f"{heading}@{k}" in contenders[0].result.per_user]


def _heading(metric: str) -> str:
    return metric.split("@")[0].replace("_", "\n")


def _table(title: str, caption: str) -> Table:
    # narrow enough for a terminal of 80 columns
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _best(metric: str, means: list[float]) -> int | None:
    defined = [(mean, row) for row, mean in enumerate(means) if not math.isnan(mean)]
    if len(defined) < 2:
        return None
    return min(defined)[1] if metric.startswith(_LOWER_IS_BETTER) else max(defined)[1]


def _cell(value: Estimate, *, bold: bool = False, signed: bool = False) -> str:
    if math.isnan(value.mean):
        return "-"
    text = f"{value.mean:{'+' if signed else ''}.4f}"
    text += "" if math.isnan(value.half_width) else f"\n±{value.half_width:.4f}"
    return f"[bold]{text}[/bold]" if bold else text


def _as_json(value: Estimate) -> dict[str, float | int | None]:
    return {
        "mean": None if math.isnan(value.mean) else value.mean,
        "half_width": None if math.isnan(value.half_width) else value.half_width,
        "n": value.n,
    }
