"""What the report of an evaluation shows: rows, tables and charts from its document; the templates have the words.

The training seeds of one recipe are one row of the main tables and charts; the tables of all metrics and of all pairs
have every contender.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

from recpo.evaluation import reading
from recpo.evaluation.html_report import parts, svg
from recpo.evaluation.html_report.svg import Figure, number_text
from recpo.evaluation.reading import Document, Value, further_at, lower_is_better, paired, shares_at
from recpo.evaluation.segments import NEW_METRICS
from recpo.evaluation.variants import INTERVALS

_ACCURACY = ("NDCG", "Recall", "HitRate", "MRR", "MAP", "Precision", "gNDCG")
_DISLIKES = ("disliked", "disliked_hit_rate", "disliked_MRR", "disliked_rank")
_TRUE = ("true_reward", "true_dislike")
_MAIN = ("NDCG", "Recall", "HitRate", "MRR", "disliked", *_TRUE)
_COMPARED = ("NDCG", "Recall", "HitRate", "disliked", *_TRUE)
_NARROW_MAIN = ("NDCG", "Recall", "HitRate", "AUC_other", "disliked", "true_reward")
_NARROW_COMPARED = ("NDCG", "Recall", "disliked", *_TRUE)
_DRAWN = ("NDCG", "Recall", "MRR", "disliked", *_TRUE)
_OVER_K = ("NDCG", "Recall", "HitRate", "disliked")
_MOST_FOR_ALL_PAIRS = 4
_SHARES = (
    ("positive", "+1: watched long, not disliked"),
    ("neutral", "0: in between"),
    ("negative", "-1: disliked"),
    ("unlabeled", "no label"),
)


class Answer(NamedTuple):
    """Which contender is best by the evaluation's own criterion, and by how much.

    Attributes:
        metric: the criterion.
        why: its meaning.
        best: name of the best contender; the oracle does not compete.
        over_baselines: baselines do not compete, and the best is compared with the strongest one.
        value: its value.
        range: the 95 % interval of its value; with several training seeds, their range.
        against: the strongest baseline, or the next best contender; empty if there is none to compare with.
        difference: best - against, paired over users; the mean over training seeds.
        interval: its 95 % interval; with several training seeds, the widest one that covers theirs.
        beyond_doubt: the differences of all seeds have one sign and survive Holm's correction.
    """

    metric: str
    why: str
    best: str
    over_baselines: bool
    value: str
    range: str
    against: str = ""
    difference: str = ""
    interval: str = ""
    beyond_doubt: bool = False


def html_report(document: Document) -> str:
    """The whole page. Everything in it comes from ``document``; nothing is loaded from elsewhere.

    Args:
        document: see ``recpo.evaluation.document.evaluation_document``.
    """
    view = EvaluationView(document)
    setting = view.setting
    names, users = ", ".join(row.name for row in view.rows_of_all), view.ranked[0]["counts"]["users"]
    return parts.render(
        "evaluation.html.jinja",
        title=f"Offline evaluation, {setting['split']} period",
        subtitle=f"{names}: {users:,} users, {setting['num_items']:,} items, every item ranked",
        version=setting["recpo_version"],
        numbers="metrics.json",
        view=view,
    )


def html_table(document: Document) -> str:
    """The main table alone, for a notebook."""
    macros: Any = parts.environment().get_template("parts.html.jinja").module
    return str(macros.table(EvaluationView(document).main_table))


def variants_tables(document: Document, *, narrow: bool = False) -> list[parts.Table]:
    """The variants of a served log, and what users of interleaved lists prefer.

    Args:
        document: see ``recpo.evaluation.variants.variants_document``.
        narrow: for a terminal, without the difference of dislikes.
    """
    counts, tables = ("users", "impressions"), []
    heads = {"value": "value", "dislikes": "dislikes", "difference": "difference of value"}
    heads |= {} if narrow else {"dislikes_difference": "difference of dislikes"}
    if document["variants"]:
        rows = []
        for one in document["variants"]:
            cells = [parts.Cell(f"{one[name]:,}") for name in counts]
            cells += [_sequence_cell(one.get(name), signed="difference" in name) for name in heads]
            rows.append(parts.Row(one["variant"], cells))
        caption = f"control {document['control']}; {INTERVALS}"
        tables.append(parts.Table(caption, ["variant", *counts, *heads.values()], rows))
    if (found := document["preference"]) is not None:
        cells = [parts.Cell(f"{found[name]:,}") for name in counts] + [_sequence_cell(found, signed=True)]
        cells += [parts.Cell(f"{100 * found[name]:.1f} %") for name in ("wins", "losses")]
        rows = [parts.Row(f"{found['of']} over {found['over']}", cells)]
        head = ["preference", *counts, "credit", "won", "lost"]
        tables.append(parts.Table(f"interleaved lists; {INTERVALS}", head, rows))
    return tables


class EvaluationView:
    """The document of an evaluation as the template reads it, and, with fewer columns, as a terminal has room for it.

    Args:
        document: all numbers.
        narrow: the main tables have fewer columns; the main metrics of seeds of one recipe are in rows of their own.
    """

    def __init__(self, document: Document, *, narrow: bool = False) -> None:
        self.document = document
        self.narrow = narrow
        self.setting: Document = document["setting"]
        self.k: int = self.setting["ks"][0]
        self.shares = _SHARES
        self.rows_of_all = parts.rows_of(document)
        self.style = {one["name"]: row.style for row in self.rows_of_all for one in row.members}
        self.off_policy = parts.OffPolicyView(document, self.style, narrow=narrow)

    # the answer

    @cached_property
    def criterion(self) -> Value | None:
        """The measure of value by which the best contender is named."""
        return reading.criterion(self.document)

    @property
    def answer(self) -> Answer | None:
        """The best contender; None if no contender has a value."""
        value, ranked = self.criterion, self._by_criterion
        if value is None or not ranked:
            return None
        tested = [one for one in ranked if one[0].kind != "baseline"]
        baselines = [row for row, _ in ranked if row.kind == "baseline"]
        over_baselines = bool(tested and baselines)
        (best, (mean, low, high, _)), *others = tested or ranked
        ends = _ends("range of the seeds" if len(best.members) > 1 else "95 % interval", low, high)
        answer = Answer(value.name, value.why, best.name, over_baselines, number_text(mean), ends)
        for other in baselines if over_baselines else [row for row, _ in others]:
            names = [(one["name"], two["name"]) for one in best.members for two in other.members]
            pairs = [value.differences.get(pair) for pair in names]
            known = [pair for pair in pairs if pair is not None]
            if len(known) == len(pairs):
                lows, highs = [d.low for d in known if d.low is not None], [d.high for d in known if d.high is not None]
                what = "95 % interval" if len(known) == 1 else f"95 % intervals of {len(known)} pairs of seeds together"
                return answer._replace(
                    against=other.name,
                    difference=f"{fmean(d.mean for d in known):+.4f}".replace("-", "\u2212"),
                    interval=_ends(what, min(lows, default=None), max(highs, default=None)),
                    beyond_doubt=all(d.survives for d in known) and len({d.mean > 0 for d in known}) == 1,
                )
        return answer

    @property
    def picture(self) -> Figure:
        """All contenders by the criterion, best first, with their intervals."""
        value = self.criterion
        name = f"NDCG@{self.k}" if value is None else value.name
        rows = [_interval_row(row.name, spread, row.style) for row, spread in self._by_criterion]
        remark = "95 % intervals; seeds: range"
        return svg.interval_chart(name, f"{name} of every contender, the best first", rows, remark)

    @cached_property
    def _by_criterion(self) -> list[tuple[parts.Contenders, parts.Spread]]:
        of = {} if self.criterion is None else self.criterion.of
        found = []
        for row in self.rows_of_all:
            values = [of[one["name"]] for one in row.members if one["name"] in of]
            means = [value.mean for value in values]
            if len(values) == len(row.members):
                ends = values[0][1:3] if len(values) == 1 else (min(means), max(means))
                found.append((row, parts.Spread(fmean(means), *ends, "")))
        return sorted(found, key=lambda one: -one[1].mean)

    # metrics

    @property
    def ranked(self) -> list[Document]:
        """The contenders that made lists."""
        return [contender for contender in self.document["contenders"] if contender["metrics"]]

    @property
    def rows(self) -> list[parts.Contenders]:
        """Their rows."""
        return [row for row in self.rows_of_all if row.members[0]["metrics"]]

    @property
    def single(self) -> list[parts.Contenders]:
        """One row per contender that made lists, seeds or not."""
        return [parts.Contenders(one["name"], [one], self.style[one["name"]]) for one in self.ranked]

    @property
    def main_table(self) -> parts.Table:
        """The main metrics at the first k, that of the answer first, with the best of a column marked."""
        metrics = [*self._at(_NARROW_MAIN if self.narrow else _MAIN, self.k), *further_at(self.document, self.k)]
        metrics.sort(key=lambda metric: self.criterion is None or metric != self.criterion.name)
        return self._metrics_table(metrics, f"lists of {self.k}", self.single if self.narrow else self.rows)

    @property
    def all_metrics(self) -> list[tuple[str, parts.Table]]:
        """All metrics of every contender: a table per list length, and one for metrics without a length."""
        own = reading.further_metrics(self.document)
        known = (*_ACCURACY, *_DISLIKES, *_TRUE)
        groups = {f"all metrics, lists of {k}": self._at(known, k) for k in self.setting["ks"]}
        groups["scores of the exposed items"] = [name for name in self._every if "@" not in name and name not in own]
        groups["further metrics"] = [name for name in self._every if name in own]
        return [(title, self._metrics_table(group, title, self.single)) for title, group in groups.items() if group]

    @property
    def new_items_tables(self) -> list[parts.Table]:
        """Metrics on new items, a table per list length."""
        about = "new items, candidates without an event in training; true reward: of the best new items as ranked; "
        return self._tables_per_k(NEW_METRICS, about)

    @property
    def beyond_accuracy(self) -> list[parts.Table]:
        """The other metrics of lists, which are neither better nor worse when larger."""
        known = {*_ACCURACY, *_DISLIKES, *_TRUE, *NEW_METRICS}
        own = reading.further_metrics(self.document)
        names = (name.split("@")[0] for name in self._every if "@" in name and name not in own)
        return self._tables_per_k([name for name in dict.fromkeys(names) if name not in known], "", is_ranked=False)

    @property
    def totals(self) -> list[parts.Table]:
        """Metrics of all lists together, such as coverage."""
        names = list(dict.fromkeys(total for contender in self.ranked for total in contender["totals"]))
        rows = [
            parts.Row(one.name, [_total_cell(one.members[0]["totals"].get(name)) for name in names], one.style)
            for one in self.single
            if one.members[0]["totals"]
        ]
        return [parts.Table("of all lists together", ["contender", *names], rows)] if names else []

    @property
    def headroom(self) -> list[parts.Table]:
        """The shares of the true value between the start and the oracle, one table per list length."""
        found, tables = self.document.get("headroom") or {}, []
        metrics = {one["name"]: one["metrics"] for one in self.ranked}
        for k in self.setting["ks"]:
            rows = []
            for name, value in shares_at(self.document, k):
                reward = parts.Spread.of([metrics[name].get(f"true_reward@{k}")])
                rows.append(parts.Row(name, [_spread_cell(reward), _share_cell(value)], self.style[name]))
            if rows:
                ends = found["metrics"][f"true_reward@{k}"]
                caption = (
                    f"lists of {k}; (true reward - start) / (oracle - start) ± half of the 95 % interval over users; "
                    f"start: {found['start']}, {ends['start']:.4f} ({found['start_is']}); oracle: every user's best "
                    f"items by true reward among those that may be listed, {ends['oracle']:.4f}"
                )
                tables.append(parts.Table(caption, ["contender", "true_reward", "share of the headroom"], rows))
        return tables

    def segment_table(self, segment: str) -> parts.Table:
        """NDCG of every contender by the bins of a segment."""
        metric, bins = f"NDCG@{self.k}", self.setting["segments"][segment]
        rows = []
        for one in self.single:
            if found := one.members[0]["segments"].get(segment):
                cells = [_spread_cell(parts.Spread.of([found.get(name, {}).get(metric)])) for name in bins]
                rows.append(parts.Row(one.name, cells, one.style))
        sizes = self.ranked[0]["segments"].get(segment, {})
        head = [f"{name} (n = {sizes.get(name, {}).get(metric, {}).get('n', 0):,})" for name in bins]
        return parts.Table(f"{metric} by {segment}", ["contender", *head], rows)

    # differences

    @cached_property
    def compared_pairs(self) -> list[tuple[str, str]]:
        """All pairs, the better one by the criterion first; if there are many, the best with each of the others."""
        values = {} if self.criterion is None else self.criterion.of
        names = sorted(values, key=lambda name: -values[name].mean)
        others = [contender["name"] for contender in self.ranked if contender["kind"] != "oracle"]
        names += [name for name in others if name not in names]
        if len(names) <= _MOST_FOR_ALL_PAIRS:
            return list(combinations(names, 2))
        return [(names[0], name) for name in names[1:]]

    @property
    def all_pairs(self) -> list[tuple[str, str]]:
        """Every pair of contenders as in the document."""
        return [(pair["contender"], pair["against"]) for pair in self.document["differences"]]

    @property
    def comparisons(self) -> int:
        """The number of comparisons on NDCG."""
        return sum(f"NDCG@{self.k}" in pair["metrics"] for pair in self.document["differences"])

    def differences(self, pairs: Sequence[tuple[str, str]]) -> parts.Table:
        """Paired differences at the first k."""
        names = _NARROW_COMPARED if self.narrow else _COMPARED
        metrics = [*self._at(names, self.k), *further_at(self.document, self.k)]
        rows = [
            parts.Row(
                f"{one} - {other}", [_difference_cell(paired(self.document, one, other, name)) for name in metrics]
            )
            for one, other in pairs
        ]
        caption = (
            f"lists of {self.k}; mean of the per-user difference ± half of its 95 % interval; * survives Holm's "
            "correction at 5 % for all pairs of contenders on that metric"
        )
        return parts.Table(caption, ["contender - against", *(metric.split("@")[0] for metric in metrics)], rows)

    @property
    def difference_charts(self) -> list[Figure]:
        """Paired differences with their intervals around 0."""
        leaders = {one for one, _ in self.compared_pairs}
        remark = f"of {next(iter(leaders))}, uncorrected" if len(leaders) == 1 else "uncorrected"
        figures = []
        for metric in self._at(("NDCG", "disliked", "true_reward"), self.k):
            rows = [
                _interval_row(f"- {other}" if len(leaders) == 1 else f"{one} - {other}", parts.Spread.of([value]), "s0")
                for one, other in self.compared_pairs
                if (value := paired(self.document, one, other, metric)) is not None
            ]
            about = f"paired differences of {metric}: means with 95 % intervals; the dashed line is 0"
            figures.append(svg.interval_chart(metric, about, rows, remark, with_zero=True))
        return figures

    # charts

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Color and name of every row with lists."""
        return [(row.style, row.name) for row in self.rows if row.members[0]["totals"]]

    @property
    def metric_charts(self) -> list[Figure]:
        """One chart of dots and whiskers per main metric at the first k."""
        return [
            svg.interval_chart(
                metric,
                f"{metric} of every contender with its 95 % interval",
                [
                    _interval_row(row.name, parts.Spread.of(_values_of(row, metric)), row.style)
                    for row in self.rows
                    if metric in row.members[0]["metrics"]
                ],
                f"{'lower' if lower_is_better(metric, self.document) else 'higher'} is better",
            )
            for metric in self._at(_DRAWN, self.k)
        ]

    @property
    def over_k_charts(self) -> list[Figure]:
        """Metrics over the list length, one line per row."""
        ks, figures = sorted(self.setting["ks"]), []
        for name in _OVER_K:
            lines = [
                svg.Line(row.name, points, row.style)
                for row in self.rows
                if (points := _points((k, _values_of(row, f"{name}@{k}")) for k in ks))
            ]
            if lines:
                figures.append(svg.line_chart(f"{name}@k", f"{name} over the list length k", lines, x_label="k"))
        return figures

    @property
    def segment_charts(self) -> list[Figure]:
        """NDCG by the bins of every segment."""
        metric, figures = f"NDCG@{self.k}", []
        for segment, bins in self.setting["segments"].items():
            lines = []
            for row in self.rows:
                found = [one["segments"].get(segment, {}) for one in row.members]
                points = _points((i, [one.get(name, {}).get(metric) for one in found]) for i, name in enumerate(bins))
                lines += [svg.Line(row.name, points, row.style)] if points else []
            if lines:
                title = f"{metric} by {segment}"
                about = f"{title}, with 95 % intervals"
                figures.append(svg.line_chart(title, about, lines, x_label=segment, x_names=bins))
        return figures

    @property
    def label_charts(self) -> list[Figure]:
        """Shares of +1, 0 and -1 by duration, one chart per period."""
        figures = []
        for period, groups in self._periods:
            rows = [
                svg.Shares(
                    group["name"],
                    [(style, name, group[style] / max(1, group["events"])) for style, name in _SHARES],
                    f"{group['events']:,}",
                )
                for group in groups
            ]
            about, remark = "share of each label by duration of the item", "by duration, and number of events"
            figures.append(svg.shares_chart(f"labels, {period} period", about, rows, remark))
        return figures

    @property
    def quantile_charts(self) -> list[Figure]:
        """Distribution of watch quantiles by duration, one chart per period."""
        figures = []
        for period, groups in self._periods:
            rows = [
                svg.Histogram(group["name"], group["histogram"], f"{sum(group['histogram']):,}") for group in groups
            ]
            about = "distribution of watch quantiles by duration of the item"
            title = f"watch quantiles, {period} period"
            figures.append(svg.histogram_chart(title, about, rows, "dashed: evenly spread"))
        return figures

    @property
    def training_charts(self) -> list[Figure]:
        """Validation metrics of all runs in one chart; a chart per run for losses, which are not comparable."""
        runs = self.document["training"]
        drawn = [(metric, list(runs)) for metric in dict.fromkeys(metric for run in runs.values() for metric in run)]
        drawn = [one for one in drawn if one[0].startswith("val/")] + [("train/loss", [run]) for run in runs]
        figures = []
        for metric, shown in drawn:
            lines = [
                svg.Line(run, [svg.Point(*point) for point in runs[run][metric]], self.style[run])
                for run in shown
                if metric in runs[run]
            ]
            if lines:
                remark = "" if metric.startswith("val/") else shown[0]
                about = f"{metric} over optimizer steps"
                figures.append(svg.line_chart(metric, about, lines, remark, x_label="step"))
        return figures

    @property
    def training_legend(self) -> list[tuple[str, str]]:
        """Color and name of every run with curves."""
        return [(self.style[run], run) for run in self.document["training"]]

    # data

    @property
    def candidates(self) -> str:
        """Which items were candidates, in a sentence; empty = all were."""
        return "" if self.document["candidates"] is None else reading.candidates_sentence(self.document)

    @staticmethod
    def facts(caption: str, facts: Mapping[str, Any], *without: str) -> parts.Table:
        """A table of two columns: name and value."""
        rows = [
            parts.Row(name, [parts.Cell(_plain(fact), style="words")])
            for name, fact in facts.items()
            if name not in without
        ]
        return parts.Table(caption, [], rows)

    # helpers

    @cached_property
    def _every(self) -> list[str]:
        """Names of all metrics, in the order of the contenders."""
        return list(dict.fromkeys(metric for one in self.document["contenders"] for metric in one["metrics"]))

    def _at(self, names: Iterable[str], k: int) -> list[str]:
        """The metrics among ``names``, at ``k`` or without a list length, that at least one contender has."""
        return [one for name in names for one in (f"{name}@{k}", name) if one in self._every]

    @property
    def _periods(self) -> list[tuple[str, list[Document]]]:
        """Labels by period, training first."""
        return sorted(self.document["labels"]["periods"].items(), key=lambda period: period[0] != "train")

    def _tables_per_k(self, names: Iterable[str], about: str, *, is_ranked: bool = True) -> list[parts.Table]:
        return [
            self._metrics_table(found, f"{about}lists of {k}", self.single, is_ranked=is_ranked)
            for k in self.setting["ks"]
            if (found := self._at(names, k))
        ]

    def _metrics_table(
        self, metrics: Sequence[str], about: str, rows: Sequence[parts.Contenders], *, is_ranked: bool = True
    ) -> parts.Table:
        """``metrics`` with intervals, for every row that has at least one of them; the best is marked."""
        values = {row.name: [parts.Spread.of(_values_of(row, metric)) for metric in metrics] for row in rows}
        best = []
        for place, metric in enumerate(metrics):
            sign = -1 if lower_is_better(metric, self.document) else 1
            known = [(values[row.name][place], row.name) for row in rows if row.kind != "oracle" and is_ranked]
            leaders = [(sign * value.mean, name) for value, name in known if value is not None]
            best.append(max(leaders, key=lambda one: one[0])[1] if leaders else None)
        shown = [
            parts.Row(
                row.name,
                [_spread_cell(v, "best" if row.name == b else "") for v, b in zip(values[row.name], best, strict=True)],
                row.style,
            )
            for row in rows
            if any(metric in one["metrics"] for one in row.members for metric in metrics)
        ]
        arrows = [
            f" {'↓' if lower_is_better(metric, self.document) else '↑'}" if is_ranked else "" for metric in metrics
        ]
        head = [metric.split("@")[0] + arrow for metric, arrow in zip(metrics, arrows, strict=True)]
        caption = f"{about}; mean ± half of the 95 % interval over users"
        caption += "; seeds: mean, lowest to highest" if any(len(row.members) > 1 for row in rows) else ""
        caption += "; ↑ higher is better, ↓ lower; bold: the best" if is_ranked else ""
        return parts.Table(caption, ["contender", *head], shown)


def _values_of(row: parts.Contenders, metric: str) -> list[Document | None]:
    return [one["metrics"].get(metric) for one in row.members]


def _ends(what: str, low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{what} {number_text(low)} to {number_text(high)}"


def _interval_row(label: str, value: parts.Spread | None, style: str) -> svg.IntervalRow:
    if value is None:
        return svg.IntervalRow(label, None, None, None, style)
    return svg.IntervalRow(label, value.mean, value.low, value.high, style)


def _points(values: Iterable[tuple[float, Sequence[Document | None]]]) -> list[svg.Point]:
    spreads = [(x, parts.Spread.of(found)) for x, found in values]
    return [svg.Point(x, spread.mean, spread.low, spread.high) for x, spread in spreads if spread is not None]


def _spread_cell(value: parts.Spread | None, style: str = "") -> parts.Cell:
    return (
        parts.Cell("-") if value is None else parts.Cell(f"{value.mean:.4f}".replace("-", "\u2212"), value.note, style)
    )


def _share_cell(value: Mapping[str, Any]) -> parts.Cell:
    width = "" if value["half_width"] is None else f"±{100 * value['half_width']:.1f}"
    return parts.Cell(f"{100 * value['mean']:.1f} %".replace("-", "\u2212"), width)


def _difference_cell(value: Document | None) -> parts.Cell:
    if value is None:
        return parts.Cell("-")
    mean, _, half_width = reading.with_interval(value, signed=True).partition(" ")
    survives = value["survives_holm"]
    return parts.Cell(mean + (" *" if survives else ""), half_width.replace(" ", ""), "survives" if survives else "")


def _sequence_cell(value: Document | None, *, signed: bool) -> parts.Cell:
    if value is None or value["mean"] is None:
        return parts.Cell("-")
    mean, _, half_width = reading.with_interval(value, signed).partition(" ")
    sequence = "" if value["sequence"] is None else "\n[{:.4f}, {:.4f}]".format(*value["sequence"])
    return parts.Cell(mean, half_width.replace(" ", "") + sequence)


def _total_cell(value: float | None) -> parts.Cell:
    return parts.Cell("-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
