"""The parts of a report: cells, tables and figures, the rows of contenders, and the page that templates fill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from recpo.evaluation.html_report import svg
from recpo.evaluation.reading import (
    Document,
)


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


class Table(NamedTuple):
    """A table that scrolls within its own frame. An empty ``head`` is omitted."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Row]


class Figure(NamedTuple):
    """A chart: heading, SVG, note beside the heading."""

    title: str
    svg: Markup
    remark: str = ""


class Contenders(NamedTuple):
    """A row of the main tables: one contender, or the training seeds of one recipe.

    Attributes:
        name: of the contender, or of the recipe.
        members: entries of the document.
        style: CSS class of its color; from the ninth row on, colors repeat, dashed.
    """

    name: str
    members: Sequence[Document]
    style: str

    @property
    def kind(self) -> str:
        """As in the document."""
        return str(self.members[0]["kind"])


class Spread(NamedTuple):
    """A number of a row, with its 95 % interval over users, or the range over the training seeds."""

    mean: float
    low: float | None
    high: float | None
    note: str

    @classmethod
    def of(cls, values: Sequence[Document | None]) -> Spread | None:
        """The estimate of a contender, or those of several seeds; None if there is no number."""
        known = [value for value in values if value is not None and value["mean"] is not None]
        if not known:
            return None
        if len(values) > 1:
            means = [value["mean"] for value in known]
            ends = min(means), max(means)
            return cls(fmean(means), *ends, f"{ends[0]:.4f} to {ends[1]:.4f}".replace("-", "\u2212"))
        (value,) = known
        mean, half_width = value["mean"], value["half_width"]
        if half_width is None:
            return cls(mean, None, None, "")
        return cls(mean, mean - half_width, mean + half_width, f"±{half_width:.4f}")


def render(template: str, **context: Any) -> str:
    """A page: a template that extends ``page.html.jinja``, which needs title, subtitle, version and numbers (a file).

    Every string is escaped.
    """
    return environment().get_template(template).render(nav=[], **context)


def environment() -> Environment:
    """Loads the templates of this package."""
    return Environment(
        loader=PackageLoader("recpo.evaluation", "html_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def interval_figure(
    title: str, about: str, rows: Sequence[svg.IntervalRow], remark: str, *, with_zero: bool = False
) -> Figure:
    """A chart of dots with whiskers."""
    return Figure(title, Markup(svg.interval_chart(title, about, rows, with_zero=with_zero)), remark)


def ends_of(mean: float | None, half_width: float | None) -> tuple[float | None, float | None]:
    """Both ends of an interval; None if there is none."""
    return (None, None) if mean is None or half_width is None else (mean - half_width, mean + half_width)


def rows_of(document: Document) -> list[Contenders]:
    """The rows of the main tables, each with its name and color."""
    groups = seeds_of_recipes(document)
    names = [_name_of(members) for members in groups]
    return [
        Contenders(
            name if names.count(name) == 1 else ", ".join(one["name"] for one in members),
            members,
            f"s{place % 8}" + (" again" if place >= 8 else ""),
        )
        for place, (name, members) in enumerate(zip(names, groups, strict=True))
    ]


def seeds_of_recipes(document: Document) -> list[list[Document]]:
    """The contenders in order; the training seeds of one recipe are together, at the place of the first.

    Runs are seeds of one recipe if their configurations differ in nothing but their seeds, their output and the runs
    that they start from, which are seeds of one recipe themselves.
    """
    runs = {name: run for name, run in document["provenance"]["runs"].items() if run.get("configuration")}
    configurations = {name: _parsed(run["configuration"]) for name, run in runs.items()}
    by_path = {str(run.get("path")): name for name, run in runs.items()}

    def recipe(value: Any, above: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {str(key): recipe(part, above) for key, part in value.items() if key not in ("seed", "out")}
        if isinstance(value, list):
            return [recipe(part, above) for part in value]
        name = by_path.get(str(value))
        return value if name is None or name in above else ["run", recipe(configurations[name], (*above, name))]

    found: dict[str, list[Document]] = {}
    for contender in document["contenders"]:
        name = contender["name"]
        known = contender["kind"] == "run" and isinstance(configurations.get(name), Mapping)
        key = (
            json.dumps(recipe(configurations[name], (name,)), sort_keys=True, default=str) if known else f"name {name}"
        )
        members = found.setdefault(key, [])
        seeds = {str(configurations[one["name"]].get("seed")) for one in members}
        if known and str(configurations[name].get("seed")) in seeds:  # a copy, not a seed of its own
            found[f"name {name}"] = [contender]
        else:
            members.append(contender)
    return list(found.values())


def _parsed(configuration: str) -> Any:
    try:
        return yaml.safe_load(configuration)
    except yaml.YAMLError:
        return None


def _name_of(members: Sequence[Document]) -> str:
    if len(members) == 1:
        return str(members[0]["name"])
    names = [str(one["name"]) for one in members]
    common = "".join(letters[0] for letters in takewhile(lambda one: len(set(one)) == 1, zip(*names, strict=False)))
    return f"{common.rstrip('-_ .') or names[0]} ({len(names)} seeds)"
