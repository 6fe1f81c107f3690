"""The parts of a report: cells, tables and figures, the rows of contenders, and the page that templates fill.

What the report shows of off-policy values: intervals, tables and the diagnostics of the weights. The report of a fit.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from statistics import fmean
from typing import Any, Final, NamedTuple, Self

import yaml
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.svg import number_text
from recpo.evaluation.off_policy.results import LOGGING_POLICY
from recpo.evaluation.reading import Document, ends_of, off_policy_of


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
    def of(cls, values: Sequence[Document | None]) -> Self | None:
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
        return cls(mean, *ends_of(mean, half_width), "" if half_width is None else f"±{half_width:.4f}")


def render(template: str, **context: Any) -> str:
    """A page: a template that extends ``page.html.jinja``, which needs title, subtitle, version and numbers (a file).

    Every string is escaped.
    """
    return environment().get_template(template).render(nav=[], **context)


def environment(*packages: tuple[str, str]) -> Environment:
    """Loads the templates of directories of other packages, and those of this one."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(*one) for one in (*packages, ("recpo.evaluation", "html_report"))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


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


_ESTIMATORS = ("SNIPS", "DR")  # one without and one with a reward model
_TARGETS = {
    "policy": "an item drawn from the policy's own probabilities",
    "top": "an item of the list, each place equally likely",
    "discounted": "an item of the deep list, the first places more likely",
}


class OffPolicyView:
    """The off-policy values of the document as the template reads them; ``narrow``: by the main estimators alone."""

    def __init__(self, document: Document, style: Mapping[str, str], *, narrow: bool = False) -> None:
        self.document = document
        self.style = style
        self.narrow = narrow

    @cached_property
    def targets(self) -> list[str]:
        """Targets of the off-policy estimates, that of the policy itself first."""
        found = {e["target"] for one in self.document["contenders"] for e in one["off_policy"]} - {LOGGING_POLICY}
        return sorted(found, key=lambda target: (target != "policy", len(target), target))

    def charts(self, target: str) -> list[svg.Figure]:
        """Values with intervals, one chart per main estimator."""
        figures = []
        for estimator in _ESTIMATORS:
            rows = []
            for contender in self.document["contenders"]:
                if (entry := _estimates(contender, target).get(estimator)) is not None:
                    name = contender["name"]
                    rows.append(svg.IntervalRow(name, entry["value"], *_ends(entry), self.style[name]))
            if (logged := self.logged) is not None:
                rows.append(svg.IntervalRow(LOGGING_POLICY, logged["value"], *_ends(logged), "reference"))
            about = f"value by {estimator} with bootstrap intervals"
            figures.append(svg.interval_chart(f"{estimator}, {target}", about, rows, "mean reward per exposure"))
        return figures

    def values(self, target: str) -> Table:
        """Values, intervals and effective rows of every contender, the logging policy among them."""
        found = {one["name"]: _estimates(one, target) for one in self.document["contenders"]}
        every = dict.fromkeys(name for entries in found.values() for name in entries)
        estimators = [name for name in every if name in _ESTIMATORS or not self.narrow]
        if (logged := self.logged) is not None:
            found[LOGGING_POLICY] = dict.fromkeys(estimators, logged)
        rows = []
        for contender in self.document["contenders"]:
            entries = found[contender["name"]]
            if not entries and contender["kind"] in ("baseline", "oracle"):
                continue
            effective = f"{next(iter(entries.values()))['effective_sample_size']:,.0f}" if entries else "-"
            cells = [*(_value_cell(entries.get(estimator)) for estimator in estimators), Cell(effective)]
            rows.append(Row(contender["name"], cells, self.style[contender["name"]]))
        meaning = _TARGETS[target.split("_")[0]]
        told = "mean reward per exposure and its bootstrap 95 % interval; ! read its warning in the report; - not known"
        return Table(f"{target}: {meaning}; {told}", ["contender", *estimators, "effective rows"], rows)

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
            found = _estimates(pair, target)
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
    def logged(self) -> Document | None:
        """What the logging policy earned."""
        entries = (e for one in self.document["contenders"] for e in one["off_policy"])
        return next((entry for entry in entries if entry["target"] == LOGGING_POLICY), None)


def _estimates(entry: Document, target: str) -> dict[str, Document]:
    """The estimates of a contender, or of a pair, by estimator."""
    return {estimator: found for (of, estimator), found in off_policy_of(entry).items() if of == target}


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


TESTED: Final = ("true_reward", "true_dislike", "NDCG", "disliked")  # of a decision's test period, at k


def decision_report(facts: Mapping[str, Any]) -> str:
    """The report of a fit: the answer and a picture first, then the leaderboard and the commands.

    Args:
        facts: the content of ``decision.json``.
    """
    metric, rows = facts["criterion"]["metric"], facts["leaderboard"]
    drawn = [
        svg.IntervalRow(row["name"], row["value"], *ends_of(row["value"], row["half_width"]), _style(row, facts))
        for row in rows
    ]
    return render(
        "decision.html.jinja",
        title=f"The decision: {facts['chosen']} ships",
        subtitle="; ".join(facts["understood"][:1]),
        version=facts["recpo_version"],
        numbers="decision.json",
        facts=facts,
        figure=svg.interval_chart(
            f"{metric} on the validation period",
            f"{metric} of every contender, the best first",
            drawn,
            "95 % intervals",
        ),
        legend=[("s2", "ships"), ("s0", "policy"), ("s7", "baseline")],
        table=leaderboard_table(facts),
        commands="\n".join(step["command"] for step in facts["steps"]),
    )


def _style(row: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    return "s2" if row["name"] == facts["chosen"] else "s7" if row["is_baseline"] else "s0"


def leaderboard_table(facts: Mapping[str, Any]) -> Table:
    """The contenders of ``decision.json``, the best first; of the test period, the criterion and true values first."""
    metric = facts["criterion"]["metric"]
    known, first = {name for row in facts["leaderboard"] for name in row["test"]}, [metric, *TESTED]
    tested = sorted(known, key=lambda one: first.index(one if one in first else one.partition("@")[0]))
    rows, has_rewards = [], any(row["reward"] is not None for row in facts["leaderboard"])
    for row in facts["leaderboard"]:
        behind = row["behind"]
        apart = _measured({"mean": behind or None, "half_width": row["behind_half_width"]})
        warmth = Cell("" if row["temperature"] is None else f"{row['temperature']:g}")
        value = _measured({"mean": row["value"], "half_width": row["half_width"]})
        cells = [value, apart, Cell("yes" if row["lost"] else ""), warmth]
        cells += [_measured({"mean": row["reward"], "half_width": row["reward_half_width"]})] * has_rewards
        cells += [_measured(row["test"].get(name)) for name in tested]
        name = f"{row['name']} (ships)" if row["name"] == facts["chosen"] else row["name"]
        rows.append(Row(name, cells, _style(row, facts)))
    if facts["oracle"] is not None:
        blank = [Cell("")] * (4 + has_rewards)
        rows.append(Row("oracle", [*blank, *(_measured(facts["oracle"].get(name)) for name in tested)], "s3"))
    head = ["contender", f"{metric}, validation", "behind the best", "lost", "temperature"]
    head += ["estimated reward"] * has_rewards
    head += [f"{name}, test" for name in tested]
    said = (
        "± half of the 95 % interval; lost = behind the best beyond doubt (one-sided, 5 %); such policies are not "
        "evaluated on the test period, unless they ship; temperature: of the target of MPO, and of tilting. It is a "
        "choice: no criterion of a log finds the best one in every world. A smaller one follows the reward model, a "
        "larger one the log"
    )
    if has_rewards:
        said += "; estimated reward: of the lists, from the exposures of the validation period and their propensities"
    return Table(said, head, rows)


def _measured(value: Mapping[str, Any] | None) -> Cell:
    if value is None or value["mean"] is None:
        return Cell("-")
    return Cell(f"{value['mean']:.4f}", "" if value["half_width"] is None else f"± {value['half_width']:.4f}")
