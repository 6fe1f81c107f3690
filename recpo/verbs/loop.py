"""The verb ``loop``: rounds of serve, prepare, train, evaluate and export on simulated users, and their report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self

import pandas as pd

from recpo import __version__
from recpo.artifacts.artifact import Artifact
from recpo.artifacts.documents import as_configuration, read_yaml
from recpo.artifacts.outputs import output_file
from recpo.base.errors import MAX_SEED, PositiveInt, RecpoError, reading, validate_range
from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.parts import Cell, Row, Table, render
from recpo.evaluation.html_report.svg import Figure
from recpo.serving.bundle import Bundle
from recpo.verbs.loop_rounds import BUNDLE, SEEDS_PER_LOOP, Round, RoundOptions, make_round, round_directory
from recpo.verbs.verb import PYTHON_ONLY, RESOLVED, ResumableVerb, function_of
from recpo.worlds.replay import validate_files

LOOP: Final = "loop.json"
REPORT: Final = "report.html"

_MAX_SEED: Final = MAX_SEED // SEEDS_PER_LOOP - 1  # the rounds have seeds of their own
_LEAST_DAYS: Final = 3  # for training, validation and test


@dataclass(frozen=True)
class LoopResult(Artifact):
    """Rounds of the loop, on disk, all of them or those that were finished.

    Attributes:
        root: the directory: ``rounds/NN/``, ``resolved.yaml``, ``loop.json`` and ``report.html``.
        options: the options of the loop (``resolved.yaml``).
        rounds: the completed rounds, in order.
    """

    kind: ClassVar = "loop"
    version: ClassVar = 4
    made_by: ClassVar = "recpo loop"

    root: Path
    options: Mapping[str, Any]
    rounds: tuple[Round, ...]

    @classmethod
    def _read(cls, root: Path) -> Self:
        content = cls.facts_of(root)
        with reading(root / LOOP, KeyError, TypeError, remedy=cls.remedy()):
            rounds = tuple(Round.from_json(one) for one in content["rounds"])
        return cls(root, read_yaml(root / RESOLVED, cls.remedy()), rounds)

    @property
    def bundle(self) -> Bundle:
        """The bundle of the last round.

        Raises:
            RecpoError: no round is complete.
        """
        if not self.rounds:
            raise RecpoError(
                f"{self.root}: no round is complete: continue with resume", code="unfinished", field="resume"
            )
        return Bundle.open(round_directory(self.root, self.rounds[-1].number) / BUNDLE)

    @property
    def report(self) -> Path:
        """One HTML file that opens offline."""
        return self.root / REPORT

    @property
    def outcomes(self) -> list[Outcome]:
        """The policies that have served, from the estimates of their own rounds and the days of the next ones."""
        found = []
        for before, after in pairwise(self.rounds):
            known = None not in (before.earned, after.earned, after.earned_before)
            moved = (after.earned_before or 0.0) - (before.earned or 0.0)
            earned = (after.earned or 0.0) - moved if known else None
            ends = before.estimate
            expected = (None, None, None) if ends is None else (ends.value, ends.low, ends.high)
            found.append(Outcome(before.number, *expected, earned))
        return found

    def to_pandas(self) -> pd.DataFrame:
        """One row per round: ``round``, columns of the served day, of the lists and of the estimate."""
        rows = []
        for one in self.rounds:
            row: dict[str, Any] = {"round": one.number}
            row |= {} if one.served is None else dataclasses.asdict(one.served)
            row |= {f"lists_{name}": value for name, value in dataclasses.asdict(one.lists).items()}
            parts = {} if one.estimate is None else dataclasses.asdict(one.estimate)
            row |= {f"estimate_{name}": value for name, value in parts.items() if name != "warnings"}
            rows.append(row | {"earned": one.earned})
        return pd.DataFrame(rows)

    def write(self) -> None:
        """Writes ``loop.json``, then the report of it."""
        self.write_facts(self.root, {"rounds": [dataclasses.asdict(one) for one in self.rounds]})
        with output_file(self.root / REPORT) as working:
            working.write_text(loop_report(self), encoding="utf-8")


@dataclass(frozen=True)
class Loop(RoundOptions, ResumableVerb[LoopResult]):
    """Closes the loop on simulated users: each round trains a policy on the impressions of earlier policies.

    Round 0 simulates a world with its log, prepares it, trains a policy, exports it as a bundle and evaluates it. In
    every further round, the bundle of the previous round first serves the users for a day. The log so far, including
    that day, is then prepared, trained on, and so on. The loop writes ``out/rounds/NN/{log, prepared, factors, runs,
    bundle, evaluation}``, ``out/loop.json`` with all numbers, ``out/resolved.yaml`` with the options, and
    ``out/report.html``. Equal arguments give equal
    numbers, also if a loop was killed and resumed.

    The last day of a log is the test period and the day before it the validation period, so a day is trained on two
    rounds later.

    Raises:
        RecpoError: an option is out of range or does not fit; ``out`` exists, or is resumed with other options.
        Interrupted: training was stopped; the loop continues with ``resume``.
    """

    first_day: ClassVar = ("out", "recipe", "rounds", "world", "exploration", "tilt", "seed", "resume")
    artifact: ClassVar = LoopResult
    may_change: ClassVar = ("rounds", "out", "trust")

    out: Path | str
    """directory to create"""
    _: KW_ONLY
    rounds: PositiveInt = 8
    """number of served days, besides round 0; a resumed loop may have more"""
    on_round: Callable[[Round], None] | None = field(default=None, metadata=PYTHON_ONLY)
    """called with every completed round"""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_files("loop", self.world, {"matrix": self.matrix})
        validate_range(self.seed <= _MAX_SEED, "seed", f"must be at most {_MAX_SEED}", self.seed)
        rule = f"must be at least {_LEAST_DAYS}: train, validation, test"
        validate_range(self.days >= _LEAST_DAYS, "days", rule, self.days)

    def recorded(self) -> dict[str, Any]:
        """The options, with what the files of the recipe say now."""
        return {**super().recorded(), "recipe": as_configuration(self.configs)}

    def execute(self) -> LoopResult:
        """Makes the missing rounds, one after the other; every complete one is kept."""
        root = Path(self.out)
        with self.directory(root, start=lambda working: LoopResult.write_facts(working, {"rounds": []})):
            done = LoopResult.open(root)
            for number in range(len(done.rounds), self.rounds + 1):
                made = make_round(root, number, self)
                done = dataclasses.replace(done, rounds=(*done.rounds, made))
                done.write()
                if self.on_round is not None:
                    self.on_round(made)
        return done


class Outcome(NamedTuple):
    """Expected and actual earnings of a policy, both by the labels of the round that made the estimate.

    Attributes:
        number: number of the round whose policy it is.
        value: the estimate before the day; None = not known.
        low: lower end of its 95 % interval.
        high: upper end.
        earned: mean logged reward of the day that the policy then served. Labels are quantiles of the train period,
            which grows by a day per round; the shift that this causes on the previous day is subtracted.
    """

    number: int
    value: float | None
    low: float | None
    high: float | None
    earned: float | None


_SERVED, _LISTS, _LOGGING, _ORACLE = "s0", "s2", "s7", "s3"
_EXPECTED, _EARNED = "s1", "s0"
_LEGEND = ((_SERVED, "served"), (_LISTS, "best lists of the policy"), (_ORACLE, "oracle"), (_LOGGING, "logging policy"))
_ESTIMATES_LEGEND = ((_EXPECTED, "expected, 95 % interval"), (_EARNED, "earned"))


def loop_report(done: LoopResult) -> str:
    """The report of a loop: one HTML file that opens offline."""
    options, rounds, outcomes = done.options, done.rounds, done.outcomes
    return render(
        "loop.html.jinja",
        title="The loop: rounds of serving and training",
        subtitle=_subtitle(options, rounds),
        version=__version__,
        numbers=LOOP,
        options=json.dumps(options, indent=2),
        last=rounds[-1] if rounds else None,
        share=_share,
        value_charts=_value_charts(rounds) if len(rounds) > 1 else [],
        value_legend=_LEGEND,
        estimates_chart=_estimates_chart(rounds, outcomes),
        estimates_legend=_ESTIMATES_LEGEND,
        outcomes=_outcomes_table(rounds, outcomes),
        tables=[_days_table(rounds), _lists_table(rounds)] if rounds else [],
    )


def _subtitle(options: Mapping[str, Any], rounds: Sequence[Round]) -> str:
    exploration = options["exploration"]
    served = "the best items" if exploration is None else f"exploration {json.dumps(exploration)}"
    logged = "with" if options["log_propensities"] else "without"
    return (
        f"world {options['world']}, seed {options['seed']}: {options['users']:,} users, {options['items']:,} "
        f"items, {options['events']:,} events over {options['days']} days, then {max(0, len(rounds) - 1)} days "
        f"served by {served}, {logged} logged propensities"
    )


def _value_charts(rounds: Sequence[Round]) -> list[Figure]:
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
    return [_figure(title, remark, lines, rounds) for title, remark, lines in charts]


def _estimates_chart(rounds: Sequence[Round], outcomes: Sequence[Outcome]) -> Figure | None:
    """Expected and actual earnings by the round of the policy; None = nothing was estimated."""
    known = [one for one in outcomes if one.value is not None]
    if not known:
        return None
    expected = [svg.Point(one.number, one.value, one.low, one.high) for one in known if one.value is not None]
    earned = [svg.Point(one.number, one.earned) for one in known if one.earned is not None]
    lines = [svg.Line("expected", expected, _EXPECTED), svg.Line("earned", earned, _EARNED)]
    remark = "mean logged reward per exposure, by the round whose policy it is"
    return _figure("expected and earned", remark, lines, rounds[:-1])


def _outcomes_table(rounds: Sequence[Round], outcomes: Sequence[Outcome]) -> Table:
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


def _days_table(rounds: Sequence[Round]) -> Table:
    rows = []
    for one in rounds:
        if (day := one.served) is not None:
            numbers = [day.value, day.oracle_value, day.value / day.oracle_value if day.oracle_value else None]
            numbers += [day.regret, day.logging_value, day.dislikes, day.coverage, day.explored]
            cells = [Cell(str(day.day)), *(_cell(number) for number in numbers), Cell(f"{day.exposures:,}")]
            rows.append(Row(str(one.number), cells))
    head = ["round", "day", "true value", "oracle", "of the oracle", "regret", "logging policy", "dislikes", "coverage"]
    return Table("days as they were served", [*head, "explored", "exposures"], rows)


def _lists_table(rounds: Sequence[Round]) -> Table:
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
    return svg.line_chart(title, f"{title} over the rounds", lines, remark, x_label="round", x_names=names)


def _cell(value: float | None, form: str = ".4f") -> Cell:
    return Cell("-" if value is None else f"{value:{form}}")


def _share(value: float, oracle: float) -> str:
    return f"{value / oracle:.1%}" if oracle > 0 else "-"


loop = function_of(Loop)
