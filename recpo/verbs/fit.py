"""The verb ``fit``: from a log to the policy that should ship, within a budget of time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa
import pyarrow.parquet as pq

from recpo import __version__
from recpo.artifacts.artifact import Artifact
from recpo.artifacts.checksums import kind_of
from recpo.artifacts.documents import read_yaml
from recpo.artifacts.outputs import directory_of_steps, output_file, validate_output_directory
from recpo.base.errors import Interrupted, RecpoError
from recpo.base.frames import Frame, to_arrow
from recpo.base.ranges import PositiveFloat, PositiveInt, Seed
from recpo.evaluation.decision import CRITERIA, Choice, choose, criterion_of
from recpo.evaluation.estimates import as_json
from recpo.evaluation.evaluation import Evaluation
from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.parts import Cell, Row, Table, render
from recpo.evaluation.reading import ends_of
from recpo.log.csv_files import CsvFormat
from recpo.log.inspection import Inspection, inspect_log
from recpo.log.prepared import Prepared
from recpo.log.schema import Columns
from recpo.serving.bundle import Bundle
from recpo.training.run import Run
from recpo.verbs.evaluate import evaluate
from recpo.verbs.export import export
from recpo.verbs.fit_road import (
    BASELINES,
    FACTORS,
    GBPO,
    MPO,
    MPO_MODEL,
    PLAN,
    PREPARED,
    PRETRAIN,
    RECIPES,
    VALUE_DPO,
    VALUE_DPO_LIKELIHOOD,
    Road,
    RoadOptions,
)
from recpo.verbs.fit_search import search
from recpo.verbs.init import preparation_of, write_preparation
from recpo.verbs.prepare import prepare
from recpo.verbs.verb import PYTHON_ONLY, Verb, function_of
from recpo.worlds.log import Simulation

if TYPE_CHECKING:
    import pandas as pd

DECISION: Final = "decision.json"
RESOLVED: Final = "resolved.yaml"
REPORT: Final = "report.html"
_BUNDLE: Final = "bundle"
_EVALUATION: Final = "evaluation"
_FRAME: Final = "log.parquet"
_MAY_CHANGE: Final = frozenset({"minutes", "out", "device"})  # when a fit is resumed
_TILTED: Final = "tilted"
_IMPLICIT: Final = "implicit_als"
_METRICS: Final = ("true_reward", "true_dislike", "NDCG", "disliked")  # of the test period, at k
#: What the temperatures of the leaderboard mean.
TEMPERATURE: Final = (
    "temperature: of the target of MPO, and of tilting. It is a choice: no criterion of a log finds the best one in "
    "every world. A smaller one follows the reward model, a larger one the log"
)
_RESERVE: Final = 2.0  # seconds of the last evaluation and the export, per second of measuring so far


@dataclass(frozen=True)
class Decision(Artifact):
    """What ``fit`` decided, on disk.

    Attributes:
        root: the directory: ``decision.json``, ``report.html``, ``bundle/`` and everything that led to them.
        facts: the content of ``decision.json``.
    """

    kind: ClassVar = "decision"
    version: ClassVar = 1
    made_by: ClassVar = "recpo fit"

    root: Path
    facts: Mapping[str, Any] = field(repr=False)

    @classmethod
    def open(cls, root: Path | str) -> Decision:
        """Opens a directory that ``fit`` finished.

        Raises:
            RecpoError: it is none, is unfinished, has another version, or is damaged.
        """
        return cls(Path(root), cls.facts_of(root))

    @property
    def chosen(self) -> str:
        """The name of the contender that the bundle serves."""
        return str(self.facts["chosen"])

    @property
    def reason(self) -> str:
        """Why it was chosen: one sentence."""
        return str(self.facts["reason"])

    @property
    def commands(self) -> list[str]:
        """The commands that repeat every step by hand, in order."""
        return [step["command"] for step in self.facts["steps"]]

    @property
    def bundle(self) -> Bundle:
        """The bundle to serve."""
        return Bundle.open(self.root / _BUNDLE)

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation on the test period."""
        return Evaluation.open(self.root / _EVALUATION)

    @property
    def report(self) -> Path:
        """One HTML file that opens offline."""
        return self.root / REPORT

    def to_pandas(self) -> pd.DataFrame:
        """The leaderboard, best first: one row per contender, see ``recpo.evaluation.decision.Standing``."""
        import pandas as pd

        return pd.DataFrame(self.facts["leaderboard"])


@dataclass(frozen=True)
class Fit(Verb[Decision]):
    """Finds the policy that should ship, from a log: prepares, trains, compares, decides and exports a bundle.

    Fits the baselines that a team would use, selects a reward model, pre-trains, aligns in the ways that the feedback
    allows, and searches the options that matter in what is left of the budget. Contenders are compared on the
    validation period, on the same users. A policy ships if it beats the strongest baseline beyond doubt; otherwise the
    bundle serves that baseline, and the decision says so. The test period is evaluated once, at the end.

    Writes decision.json, report.html, bundle/, and every step's output with the command that repeats it. The time is a
    budget for training and search, not a limit: preparation, reward model and baselines are always complete. A fit that
    was stopped continues with ``resume``. One seed and one plan (plan.json) give one decision.

    Raises:
        RecpoError: the log leaves a question open, or cannot be prepared; ``out`` exists; an option is out of range.
        Interrupted: training was stopped; the fit continues with ``resume``.
    """

    first_day: ClassVar = ("log", "out", "minutes", "columns", "csv", "truth", "seed", "resume", "overwrite")

    log: str | Path | Sequence[str | Path] | Frame | Prepared | Simulation
    """Parquet or text files, a directory of them, or a pattern, read as ``recpo init`` reads them; prepared data, for
    full control; a simulation; in Python also a frame"""
    out: str | Path = Path("fit")
    """directory to create"""
    _: KW_ONLY
    minutes: PositiveFloat = 30.0
    """budget of time. Less than ten minutes train shorter and leave recipes out"""
    k: PositiveInt = 10
    """length of the lists that are compared"""
    columns: Columns = Columns()  # noqa: RUF009  frozen
    """known column names and units; recpo does not guess these"""
    csv: CsvFormat = CsvFormat()  # noqa: RUF009  frozen
    """delimiter and column names of text files, if known"""
    truth: Path | str | None = None
    """directory written by ``recpo simulate``: the report then also shows true values. They never decide"""
    seed: Seed = 0
    """seed of all random numbers"""
    device: str = "auto"
    """where models are evaluated: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on"""
    resume: bool = False
    """continue a fit in ``out`` that was started with the same options"""
    overwrite: bool = False
    """replace a fit in ``out``"""
    progress: bool = False
    """show progress bars on a terminal"""
    on_step: Callable[[str], None] = field(default=lambda text: None, metadata=PYTHON_ONLY)
    """called with a sentence about every step as it begins, with the time that is left"""

    def execute(self) -> Decision:
        """Runs the missing steps, decides, evaluates, exports and reports."""
        root = Path(self.out)
        with self._directory(root):
            options = RoadOptions(
                minutes=self.minutes,
                k=self.k,
                seed=self.seed,
                device=self.device,
                progress=self.progress,
                on_step=self.on_step,
            )
            road = Road(root, options)
            understood, truth = self._prepare(road)
            names = self._contenders(road)
            measured = [road.measure(name) for name in names]
            criterion = criterion_of(measured, min(self.k, road.data.num_items))
            choice = choose(measured, criterion)
            road.say(choice.reason)
            self._finish(road, choice, truth)
            facts = self._facts(road, criterion, choice, understood)
            Decision.write_facts(root, facts)
            with output_file(root / REPORT) as working:
                working.write_text(decision_report(facts), encoding="utf-8")
        return Decision.open(root)

    def measured(self, result: Decision) -> Mapping[str, float | str]:
        """The leaderboard on the validation and the test period, the chosen contender, and why."""
        facts = result.facts
        found: dict[str, float | str] = {"chosen": result.chosen, "reason": result.reason}
        for row in facts["leaderboard"]:
            means = {f"test {name}": value["mean"] for name, value in row["test"].items()}
            means[f"validation {facts['criterion']['metric']}"] = row["value"]
            found |= {f"{row['name']}/{name}": mean for name, mean in means.items() if mean is not None}
        return found

    @contextmanager
    def _directory(self, root: Path) -> Iterator[None]:
        """Creates the directory, or checks the one to resume, and keeps other processes out."""
        if again := self.resume and kind_of(root) == "decision":
            self._validate_same(root)
        validate_output_directory(root, kind="decision", overwrite=self.overwrite or again, inputs=self._inputs)
        with directory_of_steps(root, kind="decision", overwrite=self.overwrite, resume=again):
            try:
                self.write_resolved(root / RESOLVED)
                yield
            except Interrupted as error:
                message = f"stopped; {root} continues with the same options and --resume true"
                raise Interrupted(message, error.status) from error
            except RecpoError:
                if not again and not (root / PLAN).exists():  # the log was refused: nothing is worth keeping
                    shutil.rmtree(root, ignore_errors=True)
                raise

    def _validate_same(self, root: Path) -> None:
        stands, now = read_yaml(root / RESOLVED, Decision.remedy()), self.recorded()
        changed = sorted(name for name in {*now, *stands} - _MAY_CHANGE if now.get(name) != stands.get(name))
        if changed:
            raise RecpoError(
                f"{root} was started with other options: {', '.join(changed)} differ. Resume it with the same ones "
                "(minutes may be more), or choose another output",
                code="conflicting_options",
                field=changed[0],
            )

    @property
    def _inputs(self) -> list[object]:
        given = self.log
        if isinstance(given, Prepared | Simulation):
            return [given.root]
        return [given] if isinstance(given, str | Path) and Path(given).exists() else []

    def _prepare(self, road: Road) -> tuple[list[str], Path | str | None]:
        """Prepares the log. Returns what it understood of it, and where the truth is."""
        given, truth = self.log, self.truth
        if isinstance(given, str | Path) and kind_of(given) == "prepared":
            given = Prepared.open(given)
        if isinstance(given, str | Path) and kind_of(given) == "simulation":
            given = Simulation.open(Path(given))
        if isinstance(given, Prepared):
            road.use(given)
            return [f"prepared data in {given.root}"], truth
        if isinstance(given, Simulation):
            truth = truth or given.root
            log = [str(one) for one in (given.log, given.items) if one is not None]
        elif isinstance(given, str | Path):
            log = [str(given)]
        elif isinstance(given, Sequence) and not isinstance(given, pa.Table):
            log = [str(one) for one in given]
        else:
            log = [str(self._kept_frame(road.root, given))]
        found = inspect_log(log, columns=self.columns, csv=self.csv)
        files = write_preparation(found, road.root)
        out = road.root / PREPARED
        options = preparation_of(found)
        tables: dict[str, Any] = {f"{side}s": file for side, file in found.tables.items()}
        work = partial(prepare, out=out, progress=self.progress, **options, **tables)
        words = [word for name, file in tables.items() for word in (f"--{name}", file)]
        road.step(["prepare", "--config", files["prepare"], *words], out, work)
        road.use(Prepared.open(out))
        return _understood(found), truth

    @staticmethod
    def _kept_frame(root: Path, frame: Any) -> Path:
        """The frame as a file, so that the commands can read it."""
        file = root / _FRAME
        if not file.is_file():
            with output_file(file) as working:
                pq.write_table(to_arrow(frame, "log"), working)
        return file

    def _contenders(self, road: Road) -> list[str]:
        """Fits, trains, tilts and searches; returns the names of all contenders."""
        names: list[str] = list(road.baselines)
        wanted = [PRETRAIN]
        counts = road.data.feedback_counts["train"]
        if road.graded:
            road.fit_factors()
            names.append(FACTORS)
            wanted.append(MPO)
            if road.has_features and road.fit_reward_model():
                wanted.append(MPO_MODEL)
        if counts["disliked"] or counts["skipped"]:
            wanted += [GBPO, VALUE_DPO, VALUE_DPO_LIKELIHOOD]
        for name in names:
            road.measure(name)
        if road.graded:  # who chose what, and the grades
            names += self._tilted(road, _IMPLICIT)
        road.show_list()
        road.decide_effort(wanted)
        for name in road.plan.recipes:
            if not road.train(name, RECIPES[name]):
                continue
            road.measure(name)
            names.append(name)
            if road.graded and name in (PRETRAIN, MPO, MPO_MODEL):
                names += self._tilted(road, name)
        found = search(road, reserve=_RESERVE * road.measuring_seconds)
        names += found
        if road.graded and found:
            criterion = criterion_of(road.measured, min(self.k, road.data.num_items))
            names += self._tilted(road, max(found, key=lambda name: road.measure(name).result.estimate(criterion).mean))
        return names

    @staticmethod
    def _tilted(road: Road, base: str) -> list[str]:
        name = f"{_TILTED}-{base}"
        road.tilt(name, base)
        if not road.finished(name):
            return []
        road.measure(name)
        return [name]

    def _finish(self, road: Road, choice: Choice, truth: Path | str | None) -> None:
        """Evaluates the contenders that have not lost on the test period, and the baselines; exports the chosen one."""
        shown = [row.name for row in choice.standings if row.is_baseline or not row.lost]
        paths = [road.path_of(name) for name in shown]
        out, cache = road.root / _EVALUATION, road.root / BASELINES
        words: list[object] = ["evaluate", "--prepared", road.data.root, "--contenders", *paths]
        words += ["--baseline_cache", cache]
        words += ["--ks", self.k, "--baselines", "false", *([] if truth is None else ["--truth", truth]), "--out", out]
        road.step(words, out, partial(self._evaluate, road.data, paths, out, cache, truth))
        bundle, chosen = road.root / _BUNDLE, road.path_of(choice.name)
        words = ["export", "--run", chosen, "--prepared", road.data.root, "--evaluation", out, "--out", bundle]
        words += ["--baseline_cache", cache]
        ask: dict[str, Any] = {"prepared": road.data, "evaluation": out, "baseline_cache": cache}
        road.step(words, bundle, partial(export, chosen, out=bundle, **ask))

    def _evaluate(
        self, data: Prepared, paths: list[Path | str], out: Path, cache: Path, truth: Path | str | None
    ) -> None:
        evaluate(
            data,
            paths,
            out=out,
            ks=[min(self.k, data.num_items)],
            baselines=False,
            baseline_cache=cache,
            truth=truth,
            device=self.device,
            progress=self.progress,
        )

    def _facts(self, road: Road, criterion: str, choice: Choice, understood: list[str]) -> dict[str, Any]:
        tested = {one["name"]: one for one in Evaluation.open(road.root / _EVALUATION).document["contenders"]}
        wanted = [criterion, *(f"{name}@{min(self.k, road.data.num_items)}" for name in _METRICS)]
        rows = []
        for row in choice.standings:
            measured = tested.get(row.name, {}).get("metrics", {})
            test = {name: measured[name] for name in wanted if name in measured}
            rows.append({**_finite(row._asdict()), "temperature": _temperature(road.run_of(row.name)), "test": test})
        shipped = road.run_of(choice.name)
        advice = [
            *(f"{name} is left out: {why}." for name, why in road.plan.failed.items()),
            *choice.advice,
            *(f"{choice.name}: {said}" for said in (() if shipped is None else shipped.advice)),
        ]
        return {
            "recpo_version": __version__,
            "chosen": choice.name,
            "reason": choice.reason,
            "criterion": {"metric": criterion, "why": CRITERIA[criterion.partition("@")[0]]},
            "strongest_baseline": choice.strongest_baseline,
            "policy": choice.policy,
            "gain": as_json(choice.gain),
            "p_value": choice.p_value,
            "leaderboard": rows,
            "understood": understood,
            "advice": advice,
            "warnings": [*advice, *Evaluation.open(road.root / _EVALUATION).warnings],
            "minutes": self.minutes,
            "seconds": road.plan.spent,
            "effort": road.plan.effort,
            "left_out": road.plan.left_out,
            "trials": road.plan.trials,
            "oracle": {name: tested["oracle"]["metrics"].get(name) for name in wanted} if "oracle" in tested else None,
            "seed": self.seed,
            "steps": [step._asdict() for step in road.plan.steps],
        }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null instead of nan."""
    return {name: None if isinstance(value, float) and value != value else value for name, value in row.items()}


def _temperature(run: Run | None) -> float | None:
    """The temperature at which a run follows a reward model; None of other contenders."""
    if run is None:
        return None
    mpo = run.configuration.get("objective", {}).get("init_args", {}).get("temperature")
    found = run.results.get("tilt/temperature", mpo)
    return None if found is None else float(found)


def _understood(found: Inspection) -> list[str]:
    """What was read from the log, in sentences."""
    counts = found.counts
    size = f"{counts.events:,} events of {counts.users:,} users on {counts.items:,} items"
    columns = ", ".join(f"{one.role} = {one.source}" for one in found.findings)
    said = [size if counts.is_whole else f"about {size}", columns, f"label: {found.label.why}"]
    for side, file in found.tables.items():
        said.append(f"the table of {side}s {file}: its columns are features of the {side}s")
    return [*said, *found.doubts]


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
    figure = svg.interval_chart(
        f"{metric} on the validation period", f"{metric} of every contender, the best first", drawn, "95 % intervals"
    )
    return render(
        "decision.html.jinja",
        title=f"The decision: {facts['chosen']} ships",
        subtitle="; ".join(facts["understood"][:1]),
        version=facts["recpo_version"],
        numbers=DECISION,
        facts=facts,
        figure=figure,
        legend=[("s2", "ships"), ("s0", "policy"), ("s7", "baseline")],
        table=_leaderboard_table(facts),
        commands="\n".join(step["command"] for step in facts["steps"]),
    )


def tested_metrics(facts: Mapping[str, Any]) -> list[str]:
    """The metrics of the test period, in the order in which they are read: the criterion, true values, the others."""
    known = {name for row in facts["leaderboard"] for name in row["test"]}
    first = [facts["criterion"]["metric"], *_METRICS]
    return sorted(known, key=lambda name: first.index(name) if name in first else first.index(name.partition("@")[0]))


def _style(row: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    return "s2" if row["name"] == facts["chosen"] else "s7" if row["is_baseline"] else "s0"


def _leaderboard_table(facts: Mapping[str, Any]) -> Table:
    metric = facts["criterion"]["metric"]
    tested = tested_metrics(facts)
    rows = []
    for row in facts["leaderboard"]:
        behind = row["behind"]
        apart = Cell("-" if not behind else f"{behind:.4f}", f"± {row['behind_half_width']:.4f}" if behind else "")
        warmth = Cell("" if row["temperature"] is None else f"{row['temperature']:g}")
        cells = [_cell(row["value"], row["half_width"]), apart, Cell("yes" if row["lost"] else ""), warmth]
        cells += [_measured(row["test"].get(name)) for name in tested]
        rows.append(Row(row["name"], cells, _style(row, facts)))
    if facts["oracle"] is not None:
        blank = [Cell("")] * 4
        rows.append(Row("oracle", [*blank, *(_measured(facts["oracle"].get(name)) for name in tested)], "s3"))
    head = ["contender", f"{metric}, validation", "behind the best", "lost", "temperature"]
    head += [f"{name}, test" for name in tested]
    said = f"lost = behind the best beyond doubt; such policies are not evaluated on the test period. {TEMPERATURE}"
    return Table(said, head, rows)


def _measured(value: Mapping[str, Any] | None) -> Cell:
    return Cell("-") if value is None else _cell(value["mean"], value["half_width"])


def _cell(value: float | None, half_width: float | None) -> Cell:
    return Cell("-") if value is None else Cell(f"{value:.4f}", "" if half_width is None else f"± {half_width:.4f}")


fit = function_of(Fit)
