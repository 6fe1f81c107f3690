"""Charts of the report, built from the evaluation's document."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.blocks import Figure, Figures
from recpo.evaluation.html_report.tables import color, compared_pairs, metrics_at, ranked
from recpo.evaluation.reading import Document, lower_is_better, paired

_DOTTED = ("NDCG", "Recall", "MRR", "disliked", "true_reward", "true_dislike")
_OVER_K = ("NDCG", "Recall", "HitRate", "disliked")
SHARES = (
    ("positive", "+1: watched long, not disliked"),
    ("neutral", "0: in between"),
    ("negative", "-1: disliked"),
    ("unlabeled", "no label"),
)


def metric_charts(document: Document) -> Figures:
    """One chart of dots and whiskers per main metric at the first k."""
    k = document["setting"]["ks"][0]
    figures = []
    for metric in metrics_at(document, _DOTTED, k):
        rows = [
            _interval(contender["name"], contender["metrics"][metric], color(place))
            for place, contender in ranked(document)
            if metric in contender["metrics"]
        ]
        remark = f"{'lower' if lower_is_better(metric, document) else 'higher'} is better"
        drawn = svg.interval_chart(metric, f"{metric} of every contender with its 95 % interval", rows)
        figures.append(Figure(metric, Markup(drawn), remark))
    return Figures(figures)


def difference_chart(document: Document, metric: str) -> Figure:
    """Paired differences of one metric with their intervals around 0."""
    pairs = compared_pairs(document)
    leaders = {one for one, _ in pairs}
    rows = [
        _interval(f"- {other}" if len(leaders) == 1 else f"{one} - {other}", value, "s0")
        for one, other in pairs
        if (value := paired(document, one, other, metric)) is not None
    ]
    drawn = svg.interval_chart(
        f"paired differences of {metric}", "means with 95 % intervals; the dashed line is 0", rows, with_zero=True
    )
    return Figure(metric, Markup(drawn), f"of {leaders.pop()}, uncorrected" if len(leaders) == 1 else "uncorrected")


def over_k_charts(document: Document) -> Figures:
    """Metrics over the list length, one line per contender."""
    ks = sorted(document["setting"]["ks"])
    figures = []
    for name in _OVER_K:
        lines = [
            svg.Line(contender["name"], points, color(place))
            for place, contender in ranked(document)
            if (points := _points([(k, contender["metrics"].get(f"{name}@{k}")) for k in ks]))
        ]
        if lines:
            drawn = svg.line_chart(f"{name}@k", f"{name} over the list length k", lines, x_label="k")
            figures.append(Figure(f"{name}@k", Markup(drawn)))
    return Figures(figures, legend(document))


def segment_charts(document: Document, metric: str) -> Figures:
    """A metric by the bins of every segment."""
    figures = []
    for segment, bins in document["setting"]["segments"].items():
        lines = []
        for place, contender in ranked(document):
            found = contender["segments"].get(segment, {})
            points = _points([(index, found.get(name, {}).get(metric)) for index, name in enumerate(bins)])
            lines += [svg.Line(contender["name"], points, color(place))] if points else []
        if lines:
            title = f"{metric} by {segment}"
            drawn = svg.line_chart(title, f"{title}, with 95 % intervals", lines, x_label=segment, x_names=bins)
            figures.append(Figure(title, Markup(drawn)))
    return Figures(figures, legend(document))


def label_share_charts(labels: Document) -> Figures:
    """Shares of +1, 0 and -1 by duration, one chart per period."""
    figures = []
    for period, groups in _periods(labels):
        rows = [
            svg.Shares(
                group["name"],
                [(style, name, group[style] / max(1, group["events"])) for style, name in SHARES],
                f"{group['events']:,}",
            )
            for group in groups
        ]
        drawn = svg.shares_chart(f"labels, {period} period", "share of each label by duration of the item", rows)
        figures.append(Figure(f"{period} period", Markup(drawn), "by duration, and number of events"))
    return Figures(figures, SHARES)


def _periods(labels: Document) -> list[tuple[str, list[Document]]]:
    """Periods in order, training first, for any order of the document's keys."""
    return sorted(labels["periods"].items(), key=lambda period: period[0] != "train")


def quantile_charts(labels: Document) -> Figures:
    """Distribution of watch quantiles by duration, one chart per period."""
    figures = []
    for period, groups in _periods(labels):
        rows = [svg.Histogram(group["name"], group["histogram"], f"{sum(group['histogram']):,}") for group in groups]
        drawn = svg.histogram_chart(
            f"watch quantiles, {period} period", "distribution of watch quantiles by duration of the item", rows
        )
        figures.append(Figure(f"{period} period", Markup(drawn), "dashed: evenly spread"))
    return Figures(figures)


def training_charts(document: Document) -> Figures:
    """Validation metrics of all runs in one chart; a chart per run for losses, which are not comparable."""
    curves = document["training"]
    place = {contender["name"]: number for number, contender in enumerate(document["contenders"])}
    metrics = list(dict.fromkeys(metric for run in curves.values() for metric in run))
    figures = []
    for metric in (metric for metric in metrics if metric.startswith("val/")):
        lines = [_curve(run, points[metric], place) for run, points in curves.items() if metric in points]
        drawn = svg.line_chart(metric, f"{metric} over optimizer steps", lines, x_label="step")
        figures.append(Figure(metric, Markup(drawn)))
    for run, points in curves.items():
        if "train/loss" in points:
            line = _curve(run, points["train/loss"], place)
            drawn = svg.line_chart(f"loss of {run}", "training loss over optimizer steps", [line], x_label="step")
            figures.append(Figure("train/loss", Markup(drawn), run))
    return Figures(figures, [(color(place[run]), run) for run in curves])


def legend(document: Document) -> list[tuple[str, str]]:
    """Color and name of every contender that made lists."""
    return [(color(place), contender["name"]) for place, contender in ranked(document) if contender["totals"]]


def _curve(run: str, points: Sequence[tuple[float, float]], place: dict[str, int]) -> svg.Line:
    return svg.Line(run, [svg.Point(step, value) for step, value in points], color(place[run]))


def _interval(label: str, value: Document | None, style: str) -> svg.IntervalRow:
    if value is None or value["mean"] is None:
        return svg.IntervalRow(label, None, None, None, style)
    mean, half_width = value["mean"], value["half_width"]
    low, high = (None, None) if half_width is None else (mean - half_width, mean + half_width)
    return svg.IntervalRow(label, mean, low, high, style)


def _points(values: Sequence[tuple[float, Document | None]]) -> list[svg.Point]:
    found = [(x, _interval("", value, "")) for x, value in values]
    return [svg.Point(x, v.mean, v.low, v.high) for x, v in found if v.mean is not None]
