"""The evaluation of several contenders as one JSON document and as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from recpo.evaluation.comparison import LEVEL, holm, p_value
from recpo.evaluation.held_out import RankingResult
from recpo.evaluation.intervals import Estimate, bootstrap_interval

SCHEMA_VERSION = 2
_LOWER_IS_BETTER = {"disliked", "disliked_hit_rate", "disliked_MRR", "true_dislike", "gini", "miscalibration"}
_HEADINGS = ("NDCG", "Recall", "HitRate", "MRR", "disliked", "true_reward")
_MOST_FOR_ALL_PAIRS = 4


class Contender(NamedTuple):
    """A recommender and how it did.

    Attributes:
        name: unique among the contenders.
        kind: a trained run, an exported bundle or a baseline.
        result: its metrics.
        off_policy: its off-policy estimates, JSON objects that go into the document as they are.
    """

    name: str
    kind: Literal["run", "bundle", "baseline"]
    result: RankingResult
    off_policy: Sequence[Mapping[str, Any]] = ()


def metrics_document(
    contenders: Sequence[Contender],
    *,
    setting: Mapping[str, Any],
    warnings: Sequence[str] = (),
    bootstrap_resamples: int = 0,
) -> dict[str, Any]:
    """What ``metrics.json`` holds; numbers that are not defined (no user, one user, no list) are null.

    ::

        schema_version  2
        setting         split, ks, positive_threshold, exclude_seen, ... as given
        conventions     {topic: how to read the numbers, in words}
        warnings        [sentence], what a reader must know before the numbers
        contenders      [{name, kind: "run" | "bundle" | "baseline",
                          counts: {users, users_with_positives, users_with_dislikes, positive_events,
                                   positive_events_removed_as_seen, disliked_events, disliked_events_removed_as_seen},
                          metrics: {metric: estimate},            per-user metrics, such as NDCG@10, AUC_other
                          totals: {metric: number},               of all lists together, such as coverage@10, gini@10
                          segments: {segment: {bin: {metric: estimate}}},
                          off_policy: [...]}]
        differences     [{contender, against, metrics: {metric: estimate}}]   paired, contender - against, every pair
                        (i, j) with i < j as against = contender i; only metrics that both have

    where ``estimate`` is ``{mean, half_width, n}``: mean over the n users for whom the metric is defined, and half of
    its normal 95 % interval. With ``bootstrap_resamples`` the estimates under ``metrics`` of contenders also have
    ``low`` and ``high``, the 95 % percentile interval of ``bootstrap_interval``. Segments are ``history length`` and
    other divisions of the users, with every metric of the users of a bin, and ``item popularity`` and other divisions
    of the items, with NDCG, Recall and HitRate of the targets of a bin. JSON keys are sorted; the order of bins is in
    ``setting["segments"]``: ``{segment: [bin]}``.

    Args:
        contenders: all evaluated on the same users.
        setting: ``exclude_seen``, ``positive_threshold`` and whatever else describes the evaluation.
        warnings: sentences.
        bootstrap_resamples: resamples of the users; 0 = no bootstrap intervals.
    """
    first = contenders[0].result
    bins = {name: list(users.bins) for name, users in first.user_segments.items()}
    bins |= {name: list(metrics) for name, metrics in first.item_segments.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "setting": {**setting, "segments": bins},
        "conventions": conventions(bool(setting["exclude_seen"]), float(setting["positive_threshold"])),
        "warnings": list(warnings),
        "contenders": [_as_entry(contender, bootstrap_resamples) for contender in contenders],
        "differences": [
            {"contender": later.name, "against": earlier.name, "metrics": _paired(later.result, earlier.result)}
            for earlier, later in combinations(contenders, 2)
        ],
    }


def lower_is_better(metric: str) -> bool:
    """True of metrics such as ``disliked@10`` that a better recommender has less of."""
    return metric.split("@")[0] in _LOWER_IS_BETTER


def _as_entry(contender: Contender, resamples: int) -> dict[str, Any]:
    result = contender.result
    metrics = {metric: _as_json(result.estimate(metric)) for metric in result.per_user}
    if resamples and metrics:  # the logging policy has none
        ends = bootstrap_interval(torch.stack(list(result.per_user.values()), 1), resamples=resamples)
        for value, low, high in zip(metrics.values(), *(end.tolist() for end in ends), strict=True):
            value |= {"low": _defined(low), "high": _defined(high)}
    return {
        "name": contender.name,
        "kind": contender.kind,
        "counts": result.counts,
        "metrics": metrics,
        "totals": {metric: _defined(value) for metric, value in result.totals.items()},
        "segments": {
            segment: {
                bin_name: {metric: _as_json(value) for metric, value in metrics.items()}
                for bin_name, metrics in bins.items()
            }
            for segment, bins in result.segments().items()
        },
        "off_policy": list(contender.off_policy),
    }


def _paired(later: RankingResult, earlier: RankingResult) -> dict[str, dict[str, float | int | None]]:
    return {m: _as_json(later.difference(earlier, m)) for m in later.per_user if m in earlier.per_user}


def conventions(exclude_seen: bool, positive_threshold: float) -> dict[str, str]:
    """How the numbers are to be read, in words, for the document and beside the table."""
    seen = (
        "excluded from the lists; held-out events of seen items are removed from the targets and counted"
        if exclude_seen
        else "kept: they may be recommended, and held-out events of seen items are targets"
    )
    return {
        "catalog": "every item is ranked, no sampled negatives",
        "seen_items": f"the items of a user's last max_context events before the period are {seen}",
        "positives": f"distinct held-out items with label >= {positive_threshold:g} that were not disliked",
        "disliked": "distinct held-out items that were disliked; disliked@k is their share of the k places",
        "ndcg": "binary gains, divided by the DCG of an ideal list of min(k, number of targets) items",
        "map": "divided by min(k, number of targets)",
        "gNDCG": "gains are the watch quantiles of held-out items, 0 of disliked ones; ideal list of the user's own",
        "disliked_rank": "mean rank of the disliked items, k + 1 for one that is not in the list; higher is better",
        "AUC": "positives against other or disliked exposures by log-probability, per user; ties count one half",
        "segments": "users by their past, targets by their item; ranks are always those among all items",
        "popularity": "head: fewest items with half of the training events, torso: up to 80 %, tail: the rest",
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
        table.add_row(Text(contender.name), *cells, f"{contender.result.totals[f'coverage@{k}']:.3f}")
    return table


def differences_table(contenders: Sequence[Contender], k: int) -> Table:
    """Paired differences of metrics at ``k``, bold where they survive Holm's correction for all pairs of contenders.

    Every pair up to four contenders, from there on each against the first; the document has every pair.
    """
    names = _shown(contenders, ("NDCG", "Recall", "disliked", "true_reward", "true_dislike"), k)
    pairs = list(combinations(contenders, 2))
    values = {name: [later.result.difference(earlier.result, name) for earlier, later in pairs] for name in names}
    adjusted = {name: holm([p_value(value) for value in column]) for name, column in values.items()}
    family = "interval excludes 0" if len(pairs) == 1 else f"survives Holm's correction for {len(pairs)} comparisons"
    caption = f"bold: {family} (5 %)"
    table = _table(f"paired differences on the same users; lists of {k}", caption)
    table.add_column("contender - against")
    for name in names:
        table.add_column(_heading(name), justify="right")
    shown = len(pairs) if len(contenders) <= _MOST_FOR_ALL_PAIRS else len(contenders) - 1
    for row, (earlier, later) in enumerate(pairs[:shown]):
        cells = [_cell(values[name][row], bold=adjusted[name][row] <= LEVEL, signed=True) for name in names]
        table.add_row(Text(f"{later.name} - {earlier.name}"), *cells)
    return table


def value_table(document: Mapping[str, Any]) -> Table | None:
    """Off-policy values of the policies and of their lists of the first k; None where the document has none."""
    k = document["setting"]["ks"][0]
    shown = [(target, estimator) for target in ("policy", f"top_{k}") for estimator in ("SNIPS", "DR")]
    rows = {
        contender["name"]: {(entry["target"], entry["estimator"]): entry for entry in contender["off_policy"]}
        for contender in document["contenders"]
    }
    columns = [column for column in shown if any(column in row for row in rows.values())]
    if not columns:
        return None
    caption = "mean reward per exposure ± half of the 95 % interval; ! read the warnings in the report; - not known"
    table = _table("off-policy value", caption)
    table.add_column("contender")
    for target, estimator in columns:
        table.add_column(f"{target}\n{estimator}", justify="right")
    for name, entries in rows.items():
        earned = [entry for (_, estimator), entry in entries.items() if estimator == "mean"]
        cells = [_value_cell(entries.get(column, earned[0] if earned else None)) for column in columns]
        table.add_row(Text(name), *cells)
    return table


def _value_cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None or entry["value"] is None:
        return "-"
    ends = entry["intervals"]["normal"]
    half_width = "" if ends["low"] is None else f"\n±{(ends['high'] - ends['low']) / 2:.4f}"
    return f"{entry['value']:.4f}{' !' if entry['warnings'] else ''}{half_width}"


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
    return min(defined)[1] if lower_is_better(metric) else max(defined)[1]


def _cell(value: Estimate, *, bold: bool = False, signed: bool = False) -> Text:
    if math.isnan(value.mean):
        return Text("-")
    text = f"{value.mean:{'+' if signed else ''}.4f}"
    text += "" if math.isnan(value.half_width) else f"\n±{value.half_width:.4f}"
    return Text(text, style="bold" if bold else "")


def _as_json(value: Estimate) -> dict[str, float | int | None]:
    return {"mean": _defined(value.mean), "half_width": _defined(value.half_width), "n": value.n}


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
