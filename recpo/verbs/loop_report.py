"""The report of a loop: one HTML file that opens offline, written from ``loop.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from recpo import __version__
from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.blocks import (
    Block,
    Cell,
    Details,
    Figure,
    Figures,
    Lines,
    Listing,
    Row,
    Section,
    Table,
    Text,
)
from recpo.evaluation.html_report.page import render_page

if TYPE_CHECKING:
    from recpo.verbs.loop_outcomes import Outcome
    from recpo.verbs.loop_rounds import Round

_SERVED, _LISTS, _LOGGING, _ORACLE = "s0", "s2", "s7", "s3"
_EXPECTED, _EARNED = "s1", "s0"


def loop_report(options: Mapping[str, Any], rounds: Sequence[Round], outcomes: Sequence[Outcome]) -> str:
    """The whole page.

    Args:
        options: the options of the loop.
        rounds: the completed rounds.
        outcomes: expected and actual earnings.
    """
    return render_page(
        "The loop: rounds of serving and training",
        _subtitle(options, rounds),
        [
            Section("summary", "Summary", _summary(rounds)),
            Section("value", "True value", [_value_charts(rounds)] if len(rounds) > 1 else []),
            Section("estimates", "Off-policy estimates", _estimates(rounds, outcomes)),
            Section("rounds", "Rounds", [_days_table(rounds), _lists_table(rounds)] if rounds else []),
            Section("options", "Options", [Details("options", [Listing(json.dumps(options, indent=2))])]),
        ],
        version=__version__,
        numbers="loop.json",
    )


def _subtitle(options: Mapping[str, Any], rounds: Sequence[Round]) -> str:
    parameters, exploration = options["parameters"], options["exploration"]
    served = "the best items" if exploration is None else f"exploration {json.dumps(exploration)}"
    logged = "with" if options["log_propensities"] else "without"
    return (
        f"world {options['world']}, seed {options['seed']}: {parameters['users']:,} users, {parameters['items']:,} "
        f"items, {parameters['events']:,} events over {parameters['days']} days, then {max(0, len(rounds) - 1)} days "
        f"served by {served}, {logged} logged propensities"
    )


def _summary(rounds: Sequence[Round]) -> list[Block]:
    if not rounds:
        return [Text("No round is whole yet.")]
    last = rounds[-1]
    lines = [
        f"The policy of round {last.number} has lists that are truly worth {last.lists.true_reward:.3f}, "
        f"{_share(last.lists.true_reward, last.lists.oracle)} of the oracle's {last.lists.oracle:.3f}."
    ]
    if last.served is not None:
        day = last.served
        lines.append(
            f"On day {day.day} the policy of the round before was worth {day.value:.3f} as it was served, "
            f"{_share(day.value, day.oracle_value)} of the oracle's {day.oracle_value:.3f}; the simulator's own "
            f"logging policy would have been worth {day.logging_value:.3f}."
        )
    return [Lines(lines)]


def _value_charts(rounds: Sequence[Round]) -> Figures:
    """True value, regret and coverage over the rounds."""
    value = [
        _line("served", _SERVED, rounds, _of_day("value")),
        _line("best lists of the policy", _LISTS, rounds, lambda one: one.lists.true_reward),
        _line("oracle, same requests", _ORACLE, rounds, _of_day("oracle_value")),
        _line("logging policy", _LOGGING, rounds, _of_day("logging_value")),
    ]
    regret = [_line("served", _SERVED, rounds, _of_day("regret"))]
    coverage = [
        _line("served", _SERVED, rounds, _of_day("coverage")),
        _line("best lists of the policy", _LISTS, rounds, lambda one: one.lists.coverage),
        _line("logging policy", _LOGGING, rounds, _of_day("logging_coverage")),
    ]
    charts = (
        ("true value", "mean true expected reward of what is shown", value),
        ("regret", "oracle minus served, same requests", regret),
        ("coverage", "share of the catalog", coverage),
    )
    legend = [
        (_SERVED, "served"),
        (_LISTS, "best lists of the policy"),
        (_ORACLE, "oracle"),
        (_LOGGING, "logging policy"),
    ]
    return Figures([_figure(title, remark, lines, rounds) for title, remark, lines in charts], legend)


def _estimates(rounds: Sequence[Round], outcomes: Sequence[Outcome]) -> list[Block]:
    known = [one for one in outcomes if one.value is not None]
    if not known:
        return [Text("None: the log has no propensities, or nothing was served yet.")]
    expected = [svg.Point(one.number, one.value, one.low, one.high) for one in known if one.value is not None]
    earned = [svg.Point(one.number, one.earned) for one in known if one.earned is not None]
    lines = [svg.Line("expected", expected, _EXPECTED), svg.Line("earned", earned, _EARNED)]
    remark = "mean logged reward per exposure, by the round whose policy it is"
    figure = _figure("expected and earned", remark, lines, rounds[:-1])
    return [
        Text(
            "Before a policy is served, its value is estimated (SNIPS) from the day that the policy before it served: "
            "of slates as they are going to be drawn, for the histories with which that day began. Beside it what the "
            "policy then earned on its own day, by the same labels. Both are means of the logged reward, which is no "
            "true value: a label is a quantile of the user's own watch times."
        ),
        Figures([figure], [(_EXPECTED, "expected, 95 % interval"), (_EARNED, "earned")]),
        _outcomes_table(rounds, outcomes),
    ]


def _outcomes_table(rounds: Sequence[Round], outcomes: Sequence[Outcome]) -> Block:
    rows = []
    for one in outcomes:
        estimate = rounds[one.number].estimate
        within = one.earned is not None and one.low is not None and one.high is not None
        inside = "" if not within else "inside" if one.low <= one.earned <= one.high else "outside"  # type: ignore[operator]
        effective = None if estimate is None else estimate.effective_rows
        warnings = "; ".join(() if estimate is None else estimate.warnings)
        ends = "-" if one.low is None or one.high is None else f"{one.low:.4f} to {one.high:.4f}"
        cells = [_cell(one.value), Cell(ends), _cell(one.earned), Cell(inside), _cell(effective, ".0f")]
        rows.append(Row(str(one.number), [*cells, Cell(warnings, style="words")]))
    head = ["policy of round", "expected", "95 % interval", "earned", "earned lies", "effective rows", "warnings"]
    return Table("expected before the day, and earned on it", head, rows)


def _days_table(rounds: Sequence[Round]) -> Block:
    rows = []
    for one in rounds:
        if (day := one.served) is not None:
            numbers = [day.value, day.oracle_value, day.value / day.oracle_value if day.oracle_value else None]
            numbers += [day.regret, day.logging_value, day.dislikes, day.coverage, day.explored]
            cells = [Cell(str(day.day)), *(_cell(number) for number in numbers), Cell(f"{day.exposures:,}")]
            rows.append(Row(str(one.number), cells))
    head = ["round", "day", "true value", "oracle", "of the oracle", "regret", "logging policy", "dislikes", "coverage"]
    return Table("days as they were served", [*head, "explored", "exposures"], rows)


def _lists_table(rounds: Sequence[Round]) -> Block:
    rows = []
    for one in rounds:
        lists = one.lists
        half_width = "" if lists.half_width is None else f"± {lists.half_width:.4f}"
        share = Cell(_share(lists.true_reward, lists.oracle))
        cells = [Cell(f"{lists.true_reward:.4f}", half_width), _cell(lists.oracle), share, _cell(lists.true_dislike)]
        cells += [_cell(lists.ndcg), _cell(lists.coverage), Cell("yes" if one.warm_start else "no")]
        rows.append(Row(str(one.number), cells))
    head = ["policy of round", "true value", "oracle", "of the oracle", "dislikes", "NDCG", "coverage", "warm start"]
    return Table("best lists of the trained policies, on the log's last day", head, rows)


def _of_day(name: str) -> Callable[[Round], float | None]:
    """A number about the served day; None in round 0."""
    return lambda one: None if one.served is None else float(getattr(one.served, name))


def _line(label: str, style: str, rounds: Sequence[Round], value: Callable[[Round], float | None]) -> svg.Line:
    found = [(one.number, value(one)) for one in rounds]
    return svg.Line(label, [svg.Point(x, y) for x, y in found if y is not None], style)


def _figure(title: str, remark: str, lines: Sequence[svg.Line], rounds: Sequence[Round]) -> Figure:
    names = [str(one.number) for one in rounds]
    drawn = svg.line_chart(title, f"{title} over the rounds", lines, x_label="round", x_names=names)
    return Figure(title, Markup(drawn), remark)


def _cell(value: float | None, form: str = ".4f") -> Cell:
    return Cell("-" if value is None else f"{value:{form}}")


def _share(value: float, oracle: float) -> str:
    return f"{value / oracle:.1%}" if oracle > 0 else "-"
