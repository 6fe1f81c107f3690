"""The building blocks of report sections. The template renders each to HTML and escapes every string in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from markupsafe import Markup


class Cell(NamedTuple):
    """A table cell: text, a smaller note, and a CSS class."""

    text: str
    note: str = ""
    style: str = ""


class Row(NamedTuple):
    """A table row: heading, cells, and the CSS class of its color in charts."""

    name: str
    cells: Sequence[Cell]
    style: str = ""


class Figure(NamedTuple):
    """A chart: heading, note beside it, SVG from ``recpo.evaluation.html_report.svg``."""

    title: str
    svg: Markup
    remark: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    style: str = ""
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Lines:
    """A list of sentences."""

    lines: Sequence[str]
    kind: ClassVar[str] = "list"


@dataclass(frozen=True)
class Table:
    """A table that scrolls within its own frame. An empty ``head`` is omitted."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Row]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figures:
    """Charts side by side, under a common legend of ``(class, name)``."""

    figures: Sequence[Figure]
    legend: Sequence[tuple[str, str]] = ()
    kind: ClassVar[str] = "figures"


@dataclass(frozen=True)
class Listing:
    """Preformatted text."""

    text: str
    kind: ClassVar[str] = "listing"


@dataclass(frozen=True)
class Details:
    """Blocks that open on demand."""

    summary: str
    blocks: Sequence[Block] = field(default_factory=list)
    kind: ClassVar[str] = "details"


Block = Text | Lines | Table | Figures | Listing | Details


class Section(NamedTuple):
    """A section of the page: the name of its anchor, its heading, its blocks."""

    id: str
    heading: str
    blocks: Sequence[Block]
