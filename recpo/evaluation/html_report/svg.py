"""Small charts as inline SVG: no script, no external reference, colors by the classes of the page's style sheet.

Elements are built as a tree, so labels are always escaped. Every chart is 380 wide, which is readable on a phone and in
a grid of several columns, and has a title and a description for screen readers.
"""

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple, Self
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

WIDTH = 380
_LABELS, _VALUES = 118, 66  # columns left and right of horizontal rows
_ROW, _AXIS = 24, 30
_LONGEST_LABEL = 18  # characters
_LONGEST_NAME = 12  # width of a place on the x axis
_MOST_WITH_WHISKERS = 4


class Figure(NamedTuple):
    """A chart: heading, SVG, note beside the heading."""

    title: str
    svg: Markup
    remark: str = ""


class IntervalRow(NamedTuple):
    """One row of a chart of intervals.

    Attributes:
        label: label of the row.
        mean: the dot; a row without a number (None) keeps its place and shows a note instead.
        low: lower end of the whisker; None = there is no interval.
        high: upper end.
        style: CSS class of the color.
    """

    label: str
    mean: float | None
    low: float | None
    high: float | None
    style: str


class Point(NamedTuple):
    """A point of a line, with the lower and upper end of its whisker, or None."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """A line, its label, and the CSS class of its color."""

    label: str
    points: Sequence[Point]
    style: str


class Shares(NamedTuple):
    """A stacked bar: label, ``(class, name, share)`` from left to right, and a note at its right end."""

    label: str
    parts: Sequence[tuple[str, str, float]]
    remark: str


class Histogram(NamedTuple):
    """Counts of equally wide bins over [0, 1]: label, counts, and a note at the right end."""

    label: str
    counts: Sequence[int]
    remark: str


def interval_chart(
    title: str, description: str, rows: Sequence[IntervalRow], remark: str = "", *, with_zero: bool = False
) -> Figure:
    """Dots with whiskers, one row each, over a common axis. ``with_zero`` includes and marks 0."""
    height = _ROW * len(rows) + _AXIS + 4
    svg = _svg(title, description, height)
    known = [x for row in rows for x in (row.mean, row.low, row.high) if x is not None]
    axis = _Axis.over([*known, 0.0] if with_zero else known, _LABELS + 8, WIDTH - _VALUES - 8)
    bottom = height - _AXIS
    for tick in axis.ticks():
        _line(svg, axis(tick), 2, axis(tick), bottom, "grid")
        _text(svg, _tick_text(tick), axis(tick), bottom + 16, "tick middle")
    if with_zero and known:
        _line(svg, axis(0), 2, axis(0), bottom, "zero")
    for number, row in enumerate(rows):
        middle = _ROW * number + _ROW / 2 + 2
        _row_label(svg, row.label, middle)
        if row.mean is None:
            _text(svg, "no value", WIDTH - _VALUES, middle + 4, "value muted")
            continue
        group = SubElement(svg, "g", {"class": row.style})
        said = f"{row.label}: {number_text(row.mean)}"
        if row.low is not None and row.high is not None:
            said += f", 95 % interval {number_text(row.low)} to {number_text(row.high)}"
            _line(group, axis(row.low), middle, axis(row.high), middle, "whisker")
            for end in (row.low, row.high):
                _line(group, axis(end), middle - 4, axis(end), middle + 4, "whisker")
        SubElement(group, "circle", {"cx": _n(axis(row.mean)), "cy": _n(middle), "r": "4"})
        SubElement(group, "title").text = said
        _text(svg, number_text(row.mean), WIDTH - _VALUES, middle + 4, "value")
    return Figure(title, Markup(tostring(svg, encoding="unicode")), remark)


def line_chart(
    title: str, description: str, lines: Sequence[Line], remark: str = "", *, x_label: str, x_names: Sequence[str] = ()
) -> Figure:
    """Lines over a common x, which is logarithmic if it spans more than a factor of 20 and is never 0.

    With ``x_names``, x is an index into them. Whiskers are drawn for up to four lines, because more would overlap.
    """
    height = 210
    svg = _svg(title, description, height)
    points = [point for line in lines for point in line.points]
    xs = [point.x for point in points]
    logarithmic = bool(xs) and not x_names and min(xs) > 0 and max(xs) / min(xs) > 20
    with_whiskers = len(lines) <= _MOST_WITH_WHISKERS
    ys = [y for point in points for y in (point[1:] if with_whiskers else point[1:2]) if y is not None]
    x_axis = _Axis.over(xs, 58, WIDTH - (30 if x_names else 12), logarithmic=logarithmic, padding=0.03)
    y_axis = _Axis.over(ys, height - 40, 10)
    for tick in y_axis.ticks():
        _line(svg, 52, y_axis(tick), WIDTH - 6, y_axis(tick), "grid")
        _text(svg, _tick_text(tick), 47, y_axis(tick) + 4, "tick end")
    for place, name in enumerate(x_names):
        for row, part in enumerate(_two_lines(name)):
            _text(svg, part, x_axis(place), height - 24 + 11 * row, "tick middle")
    if not x_names:
        for tick in sorted(set(xs)) if len(set(xs)) <= 6 else x_axis.ticks():
            _text(svg, _tick_text(tick), x_axis(tick), height - 24, "tick middle")
        _text(svg, x_label, (58 + WIDTH - 12) / 2, height - 6, "tick middle")
    for number, line in enumerate(lines):
        if not with_whiskers:
            line = line._replace(points=[Point(point.x, point.y) for point in line.points])
        aside = (number - (len(lines) - 1) / 2) * 4 if with_whiskers and len(xs) > len(lines) else 0.0
        _draw_line(svg, line, x_axis, y_axis, aside)
    return Figure(title, Markup(tostring(svg, encoding="unicode")), remark)


def shares_chart(title: str, description: str, rows: Sequence[Shares], remark: str = "") -> Figure:
    """Stacked bars of shares that sum to 1, one row each. Shares of at least 12 % are labeled."""
    svg = _svg(title, description, _ROW * len(rows) + 4)
    left, right = _LABELS + 4, WIDTH - _VALUES - 4
    for number, row in enumerate(rows):
        top = _ROW * number + 4
        _row_label(svg, row.label, top + 8)
        begin = float(left)
        for style, name, share in row.parts:
            width = share * (right - left)
            group = SubElement(svg, "g", {"class": style})
            bar = {"x": _n(begin), "y": _n(top), "width": _n(width), "height": str(_ROW - 7)}
            SubElement(group, "rect", bar)
            SubElement(group, "title").text = f"{row.label}, {name}: {share:.1%}"
            if share >= 0.12:
                _text(group, f"{share:.0%}", begin + width / 2, top + 12, "inside middle")
            begin += width
        _text(svg, row.remark, WIDTH - _VALUES, top + 12, "value muted")
    return Figure(title, Markup(tostring(svg, encoding="unicode")), remark)


def histogram_chart(title: str, description: str, rows: Sequence[Histogram], remark: str = "") -> Figure:
    """One histogram over [0, 1] per row. The dashed line is the height of equally full bins."""
    row_height = 40
    height = row_height * len(rows) + _AXIS
    svg = _svg(title, description, height)
    axis = _Axis(0.0, 1.0, _LABELS + 4, WIDTH - _VALUES - 4)
    for number, row in enumerate(rows):
        base = row_height * (number + 1) - 2
        _row_label(svg, row.label, base - 12)
        _text(svg, row.remark, WIDTH - _VALUES, base - 8, "value muted")
        bins, total = len(row.counts), sum(row.counts)
        tallest = max(3 / bins, *(count / max(total, 1) for count in row.counts))
        scale = (row_height - 6) / tallest
        group = SubElement(svg, "g", {"class": "bars"})
        for place, count in enumerate(row.counts):
            share = count / max(total, 1)
            left = axis(place / bins)
            bar = {"x": _n(left + 0.5), "y": _n(base - share * scale), "height": _n(share * scale)}
            SubElement(group, "rect", {**bar, "width": _n(axis((place + 1) / bins) - left - 1)})
        SubElement(group, "title").text = f"{row.label}: share of events in {bins} bins, largest {tallest:.1%}"
        _line(svg, axis(0), base, axis(1), base, "grid")
        _line(svg, axis(0), base - scale / bins, axis(1), base - scale / bins, "zero")
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        _text(svg, f"{tick:g}", axis(tick), height - 14, "tick middle")
    return Figure(title, Markup(tostring(svg, encoding="unicode")), remark)


def number_text(value: float) -> str:
    """A number for a label: four significant digits, at most four decimals, with thousands separators."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    if abs(value) < 5e-5:
        text = f"{value:.0e}"
    else:
        decimals = min(4, max(0, 3 - math.floor(math.log10(abs(value)))))
        text = f"{value:,.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if decimals and abs(value) >= 1 else text
    return text.replace("-", "\u2212")


def _tick_text(value: float) -> str:
    return f"{value:g}".replace("-", "\u2212")


class _Axis(NamedTuple):
    """A linear scale from numbers to positions: ``low`` at ``begin``, ``high`` at ``end``."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    @classmethod
    def over(
        cls, values: Sequence[float], begin: float, end: float, *, logarithmic: bool = False, padding: float = 0.06
    ) -> Self:
        finite = [math.log(value) if logarithmic else value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        room = (high - low) * padding or abs(high) * 0.1 or 0.5
        return cls(low - room, high + room, begin, end, logarithmic)

    def __call__(self, value: float) -> float:
        """The position of ``value``."""
        value = math.log(value) if self.logarithmic else value
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """About five round numbers within the axis."""
        if self.logarithmic:
            ends = math.ceil(self.low / math.log(10)), math.floor(self.high / math.log(10))
            least, most = max(ends[0], sys.float_info.min_10_exp), min(ends[1], sys.float_info.max_10_exp)
            return [10.0**power for power in range(least, most + 1)]
        raw = (self.high - self.low) / 5
        power = 10 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
        first = math.ceil(self.low / step)
        return [round(place * step, 12) for place in range(first, math.floor(self.high / step) + 1)]


def _draw_line(svg: Element, line: Line, x_axis: _Axis, y_axis: _Axis, aside: float) -> None:
    group = SubElement(svg, "g", {"class": line.style})
    places = [(x_axis(point.x) + aside, y_axis(point.y)) for point in line.points]
    SubElement(group, "polyline", {"points": " ".join(f"{_n(x)},{_n(y)}" for x, y in places), "class": "curve"})
    for point, (x, y) in zip(line.points, places, strict=True):
        if point.low is not None and point.high is not None:
            _line(group, x, y_axis(point.low), x, y_axis(point.high), "whisker")
        if len(line.points) <= 30:
            dot = SubElement(group, "circle", {"cx": _n(x), "cy": _n(y), "r": "3"})
            SubElement(dot, "title").text = f"{line.label}, {number_text(point.x)}: {number_text(point.y)}"
    SubElement(group, "title").text = line.label


def _svg(title: str, description: str, height: float) -> Element:
    box = {"viewBox": f"0 0 {WIDTH} {_n(height)}", "role": "img", "aria-label": title, "class": "chart"}
    svg = Element("svg", box)
    SubElement(svg, "title").text = title
    SubElement(svg, "desc").text = description
    return svg


def _row_label(svg: Element, label: str, middle: float) -> None:
    SubElement(_text(svg, _shortened(label), _LABELS, middle + 4, "row end"), "title").text = label


def _two_lines(name: str) -> list[str]:
    """Breaks a long name at the space nearest to its middle."""
    spaces = [place for place, character in enumerate(name) if character == " "]
    if len(name) <= _LONGEST_NAME or not spaces:
        return [_shortened(name, _LONGEST_NAME)]
    middle = min(spaces, key=lambda place: abs(place - len(name) / 2))
    return [_shortened(name[:middle], _LONGEST_NAME), _shortened(name[middle + 1 :], _LONGEST_NAME)]


def _shortened(label: str, longest: int = _LONGEST_LABEL) -> str:
    """Shortens a long name in the middle, because contenders often differ in the last characters."""
    half = (longest - 1) // 2
    return label if len(label) <= longest else f"{label[:half]}…{label[-half:]}"


def _line(parent: Element, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
    SubElement(parent, "line", {"x1": _n(x1), "y1": _n(y1), "x2": _n(x2), "y2": _n(y2), "class": style})


def _text(parent: Element, text: str, x: float, y: float, style: str) -> Element:
    element = SubElement(parent, "text", {"x": _n(x), "y": _n(y), "class": style})
    element.text = text
    return element


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
