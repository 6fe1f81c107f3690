"""The verb ``fit``: from a log to the policy that should ship, within a budget of time."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self, cast

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from recpo import __version__
from recpo.artifacts.artifact import Artifact, load
from recpo.artifacts.checksums import kind_of
from recpo.artifacts.outputs import output_file
from recpo.base.errors import RecpoError
from recpo.base.feedback import FEEDBACK_KINDS
from recpo.base.frames import Frame, some_of
from recpo.evaluation.contenders import BASELINES_DIRECTORY
from recpo.evaluation.decision import CRITERIA, Choice, choose
from recpo.evaluation.estimates import as_json
from recpo.evaluation.evaluation import Evaluation
from recpo.evaluation.html_report.parts import TESTED, decision_report
from recpo.evaluation.off_policy.measure import propensity_share
from recpo.log.csv_files import CsvFormat
from recpo.log.inspection import SNAPSHOTS, Inspection, inspect_log
from recpo.log.prepared import Prepared
from recpo.log.recognition import UNLABELED
from recpo.log.schema import PERIODS, Columns
from recpo.log.splits import LeaveLastOut, TemporalSplit, TrainOnly
from recpo.serving.bundle import Bundle
from recpo.training import recipes
from recpo.training.recipes import Recipes, recipes_of
from recpo.training.run import Run
from recpo.verbs import fit_steps
from recpo.verbs.evaluate import Evaluate
from recpo.verbs.export import Export
from recpo.verbs.fit_search import search
from recpo.verbs.fit_steps import FitSteps, StepOptions, deciding_split, place_of
from recpo.verbs.init import preparation_of
from recpo.verbs.prepare import Prepare, source_of
from recpo.verbs.verb import ResumableVerb, function_of
from recpo.worlds.log import Simulation

REPORT: Final = "report.html"
_BUNDLE: Final = "bundle"
_EVALUATION: Final = "evaluation"
_FRAME: Final = "log.parquet"
_REPEATED: Final = 0.1  # from this share of positives on items of the past, the summary says whether lists repeat items
_MOSTLY_REPEATED: Final = 0.5  # from this share the decision says it again
_RESERVE: Final = 2.0  # seconds of the last evaluation and the export, per second of measuring so far


@dataclass(frozen=True)
class Decision(Artifact):
    """What ``fit`` decided, on disk.

    Attributes:
        root: the directory: ``decision.json``, ``report.html``, ``bundle/`` and everything that led to them.
        facts: the content of ``decision.json``.
    """

    kind: ClassVar = "decision"
    version: ClassVar = 4
    made_by: ClassVar = "recpo fit"

    root: Path
    facts: Mapping[str, Any] = field(repr=False)

    @classmethod
    def _read(cls, root: Path) -> Self:
        return cls(root, cls.facts_of(root))

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
    def prepared(self) -> Prepared:
        """The prepared data that contenders were compared on: in this directory, or as passed to ``fit``."""
        given = self.facts["prepared"]
        return Prepared.open(self.root / recipes.PREPARED if given is None else given)

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
        return pd.DataFrame(self.facts["leaderboard"])


@dataclass(frozen=True)
class Fit(StepOptions, ResumableVerb[Decision]):
    """Finds the policy that should ship, from a log: prepares, trains, compares, decides and exports a bundle.

    Fits the baselines that a team would use, selects a reward model, pre-trains, aligns in the ways that the feedback
    allows, and searches the options that matter in what is left of the budget. Contenders are compared on the
    validation period, on the same users. A policy ships if it beats the strongest baseline beyond doubt; otherwise the
    bundle serves that baseline, and the decision says so. The test period is evaluated once, at the end. Then what
    ships is made again on all events, with the options that were chosen: nothing is held out from what is served. Data
    that were prepared before keep their split, and ship what was evaluated.

    Writes decision.json, report.html, bundle/, and every step's output with the command that repeats it. The time is a
    budget for training and search, not a limit: preparation, reward model and baselines are always complete. A fit that
    was stopped continues with ``resume``. One seed and one plan (plan.json) give one decision.

    Raises:
        RecpoError: the log leaves a question open, or cannot be prepared; ``out`` exists; an option is out of range.
        Interrupted: training was stopped; the fit continues with ``resume``.
    """

    first_day: ClassVar = ("log", "out", "minutes", "columns", "csv", "truth", "seed", "resume", "overwrite")
    artifact: ClassVar = Decision
    may_change: ClassVar = ("minutes", "out", "device")

    log: str | Path | Sequence[str | Path] | Frame | Prepared | Simulation
    """Parquet or text files, a directory of them, or a pattern, read as ``recpo init`` reads them; prepared data, for
    full control; a simulation; in Python also a frame"""
    out: str | Path = Path("fit")
    """directory to create"""
    _: KW_ONLY
    columns: Columns = Columns()  # noqa: RUF009  frozen
    """known column names and units; recpo does not guess these"""
    csv: CsvFormat = CsvFormat()  # noqa: RUF009  frozen
    """delimiter and column names of text files, if known"""
    repeats: bool | None = None
    """whether lists may have items of a user's past, as in music or groceries; null = if most positives of the
    validation period are of such items and, where not all events are positive, these are liked more than new ones"""
    truth: Path | str | None = None
    """directory written by ``recpo simulate``: the report then also shows true values. They never decide"""

    def execute(self) -> Decision:
        """Runs the missing steps, decides, evaluates, exports and reports."""
        root = Path(self.out)
        with self._directory(root):
            steps, given = FitSteps(root, self), self._given()
            understood, again = self._prepare(steps, given)
            for text in understood:
                steps.say(text)
            self._compare(steps, twice=again is not None)
            choice = choose(steps.measured, steps.criterion, steps.k)
            steps.say(choice.reason)
            truth = given.root if self.truth is None and isinstance(given, Simulation) else self.truth
            self._evaluate(steps, choice.tested, truth)
            final = steps if again is None else self._remake(steps, again, choice.name)
            self._export(steps, final, choice.name)
            facts = self._facts(steps, final, choice, understood)
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
        # a directory with log files is no input, because the fit may be created inside it
        is_plain = isinstance(self.log, str | Path) and Path(self.log).is_dir() and kind_of(self.log) is None
        with self.directory(root, inputs=[] if is_plain else [self.log]) as again:
            try:
                yield
            except RecpoError:
                if not again and not (root / fit_steps.PLAN).exists():  # the log was refused: there is nothing to keep
                    shutil.rmtree(root, ignore_errors=True)
                raise

    def _given(self) -> pa.Table | list[str] | Prepared | Simulation:
        """What ``log`` names: files or a frame, or what is in a directory of prepared data or of a simulation."""
        if isinstance(self.log, Prepared | Simulation):
            return self.log
        if isinstance(self.log, str | Path) and kind_of(self.log) in ("prepared", "simulation"):
            return cast(Prepared | Simulation, load(self.log))
        return source_of(self.log, "log")

    def _prepare(
        self, steps: FitSteps, given: pa.Table | list[str] | Prepared | Simulation
    ) -> tuple[list[str], Prepare | None]:
        """Prepares the log.

        Returns:
            What it found in the log, in sentences; and the preparation on all events, to make the chosen contender
            again; None = it ships as it was evaluated.
        """
        if isinstance(given, Prepared):
            if self.repeats not in (None, given.repeats):
                raise RecpoError(
                    f"repeats: {given.root} was prepared with repeats {str(given.repeats).lower()}: leave the option "
                    "out, or prepare the log again with it",
                    code="conflicting_options",
                    field="repeats",
                )
            steps.data = given
            return [f"prepared data in {given.root}"], None
        if isinstance(given, Simulation):
            log = [str(one) for one in (given.log, given.items, given.users) if one]
        else:
            log = given if isinstance(given, list) else [self._saved_frame(steps.root, given)]
        found = inspect_log(log, columns=self.columns, csv=self.csv)
        tables: dict[str, Any] = {f"{side}s": file for side, file in found.tables.items()}
        options = {**preparation_of(found, steps.root), **tables, "progress": self.progress}
        options |= {} if self.repeats is None else {"repeats": self.repeats}
        split, why = _decided_by(found, options["split"])
        verb = Prepare(out=steps.root / recipes.PREPARED, **options)
        steps.data = self._prepared(steps, replace(verb, split=split))
        understood = [*_understood(found), _counted(steps.data), *_repeated(steps.data), *why]
        again: dict[str, Any] = {"repeats": steps.data.repeats, "idle_days": steps.data.idle_days, "split": TrainOnly()}
        return understood, replace(verb, out=steps.root / fit_steps.FINAL / recipes.PREPARED, **again)

    @staticmethod
    def _prepared(steps: FitSteps, verb: Prepare) -> Prepared:
        """The data, with the file that repeats their preparation beside them."""
        out = Path(verb.out)
        out.parent.mkdir(exist_ok=True)
        verb.write_resolved(out.parent / fit_steps.PREPARE)
        steps.run(verb, ["prepare", "--config", out.parent / fit_steps.PREPARE])
        return Prepared.open(out)

    def _remake(self, steps: FitSteps, verb: Prepare, name: str) -> FitSteps:
        """Makes the chosen contender again on all events; returns ``steps`` if its training fails."""
        steps.say(f"{name} is made again on all events")
        final = steps.on_all_events(self._prepared(steps, verb))
        return final if final.remake(name) else steps

    @staticmethod
    def _saved_frame(root: Path, frame: pa.Table) -> str:
        """The frame as a file, so that the commands can read it."""
        file = root / _FRAME
        if not file.is_file():
            with output_file(file) as working:
                pq.write_table(frame, working)
        return str(file)

    def _compare(self, steps: FitSteps, twice: bool) -> None:
        """Fits, trains, tilts, searches and measures all contenders.

        Args:
            steps: the steps so far.
            twice: whether the chosen contender is made again on all events.
        """
        names: list[str] = list(steps.named)
        if steps.graded:
            steps.factorize()
            names.append(recipes.FACTORS)
        choices = self._recipes(steps)
        for name in names:
            steps.measure(name)
        if steps.by_grades:  # who chose what, and the grades
            self._tilt(steps, fit_steps.ALLRANK)
        steps.show_list()
        steps.decide_effort(choices, twice)
        for name in steps.plan.recipes:
            if steps.train(name, recipes.RECIPES[name]):
                steps.measure(name)
                if name in recipes.TILTED:
                    self._tilt(steps, name)
        found = search(steps, reserve=_RESERVE * steps.measuring_seconds + twice * steps.seconds_again)
        if found:
            self._tilt(steps, max(found, key=steps.value))

    @staticmethod
    def _recipes(steps: FitSteps) -> Sequence[Recipes]:
        """The recipes that can learn from the feedback of the log, the most wanted first."""
        wanted = [recipes.PRETRAIN]
        counts = steps.data.feedback_counts["train"]
        if steps.graded:
            wanted.append(recipes.MPO)
            model = recipes.REWARD_MODEL
            if steps.has_features and steps.train(model, recipes.RECIPES[model]):
                wanted.append(recipes.MPO_MODEL)
        if counts["disliked"] or counts["skipped"]:
            wanted += [recipes.GBPO, recipes.VALUE_DPO, recipes.VALUE_DPO_LIKELIHOOD]
        if len(wanted) == 1:
            return recipes.POSITIVES
        return recipes_of(wanted, [recipes.GSPO] if steps.graded else [])

    @staticmethod
    def _tilt(steps: FitSteps, base: str) -> None:
        if steps.tilt(base):
            steps.measure(f"{fit_steps.TILTED}{base}")

    def _evaluate(self, steps: FitSteps, names: Sequence[str], truth: Path | str | None) -> None:
        """Evaluates contenders on the test period, once."""
        how: dict[str, Any] = {"truth": truth, "device": self.device, "progress": self.progress, "baselines": False}
        how["max_users"] = fit_steps.MOST_USERS
        how |= {"baseline_cache": steps.root / BASELINES_DIRECTORY, "baseline_options": steps.baseline_options}
        if not propensity_share(steps.data, "test"):  # or the report would advise an option of evaluate
            how["off_policy"] = None
        named = [place_of(steps.root, name) for name in names]
        steps.run(Evaluate(steps.data, named, out=steps.root / _EVALUATION, ks=[steps.k], **how))

    @staticmethod
    def _export(steps: FitSteps, final: FitSteps, name: str) -> None:
        """Exports the chosen contender, with its metrics on the test period."""
        how: dict[str, Any] = {"evaluation": steps.root / _EVALUATION, "prepared": final.data}
        how |= {"baseline_cache": final.root / BASELINES_DIRECTORY, "baseline_options": final.baseline_options}
        final.run(Export(place_of(final.root, name), out=steps.root / _BUNDLE, **how))

    def _facts(self, steps: FitSteps, final: FitSteps, choice: Choice, understood: list[str]) -> dict[str, Any]:
        criterion, evaluation = steps.criterion, Evaluation.open(steps.root / _EVALUATION)
        tested = {one["name"]: one for one in evaluation.document["contenders"]}
        wanted = [criterion, *(f"{name}@{steps.k}" for name in TESTED)]
        rows = []
        for row in choice.standings:
            measured = tested.get(row.name, {}).get("metrics", {})
            test = {name: measured[name] for name in wanted if name in measured}
            rows.append({**as_json(row), "temperature": _temperature(steps.run_of(row.name)), "test": test})
        shipped = final.run_of(choice.name)
        advice = [
            *(f"{name} is left out: {why}." for name, why in steps.plan.failed.items()),
            *choice.advice,
            *(one for one in understood if one.startswith(UNLABELED)),
            *([] if steps.data.repeats else _repeated(steps.data, _MOSTLY_REPEATED)),
            *(f"{choice.name}: {said}" for said in (() if shipped is None else shipped.advice)),
        ]
        return {
            "recpo_version": __version__,
            "chosen": choice.name,
            "reason": choice.reason,
            "criterion": {"metric": criterion, "why": CRITERIA[criterion.partition("@")[0]]},
            "propensity": steps.propensity,
            "strongest_baseline": choice.strongest_baseline,
            "policy": choice.policy,
            "measure": choice.measure,
            "gain": as_json(choice.gain),
            "p_value": choice.p_value,
            "leaderboard": rows,
            "prepared": _outside_directory(steps),
            "made_again": final is not steps,
            "understood": understood,
            "advice": advice,
            "warnings": [*advice, *evaluation.warnings],
            "minutes": self.minutes,
            "seconds": steps.plan.spent,
            "effort": steps.plan.effort,
            "left_out": steps.left_out,
            "trials": steps.plan.trials,
            "oracle": {name: tested["oracle"]["metrics"].get(name) for name in wanted} if "oracle" in tested else None,
            "seed": self.seed,
            "steps": steps.plan.steps,
        }


def _outside_directory(steps: FitSteps) -> str | None:
    """The directory of the prepared data; None = inside the directory of the fit, which may be moved."""
    root = steps.data.root
    if root == steps.root / recipes.PREPARED:
        return None
    return str(root.absolute() if isinstance(root, Path) else root)


def _temperature(run: Run | None) -> float | None:
    """The temperature at which a run follows a reward model; None of other contenders."""
    if run is None:
        return None
    mpo = run.configuration.get("objective", {}).get("init_args", {}).get("temperature")
    found = run.results.get("tilt/temperature", mpo)
    return None if found is None else float(found)


def _understood(found: Inspection) -> list[str]:
    """What was found in the log, in sentences."""
    counts = found.counts
    size = f"{counts.events:,} events of {counts.users:,} users on {counts.items:,} items"
    columns = ", ".join(f"{one.role} = {one.said}" for one in found.findings)
    said = [size if counts.is_whole else f"about {size}", columns, f"label: {found.label.why}"]
    for side, file in found.tables.items():
        said.append(f"the table of {side}s {file}: its columns are features of the {side}s")
    if found.has_snapshots:
        said.append(f"{SNAPSHOTS} (repeats true: they may)")
    if found.unused:
        said.append(f"not read: {some_of(list(found.unused))}")
    return [*said, *found.doubts]


def _decided_by(
    found: Inspection, split: TemporalSplit | LeaveLastOut
) -> tuple[TemporalSplit | LeaveLastOut, list[str]]:
    """The split by which contenders are compared, of users who are known before; and why, if it is not the log's."""
    decided = deciding_split(split, found.counts)
    if isinstance(decided, TemporalSplit):
        last = found.where_users_are_new(decided.valid_days + decided.test_days)
        if last is not None:
            return deciding_split(LeaveLastOut(**last.init_args), found.counts), [last.why]
    return decided, [f"small log: decided by {_changed(split, decided)}"] if decided != split else []


def _counted(data: Prepared) -> str:
    """How many events have each kind of feedback, and how many were left out."""
    kinds = {name: sum(data.feedback_counts[period][name] for period in PERIODS) for name in FEEDBACK_KINDS}
    said = ", ".join(f"{count:,} {name}" for name, count in kinds.items() if count)
    dropped = sum(data.manifest["counts"]["dropped"].values())
    ended = f"; items end {data.idle_days:g} days after their last event (idle_days)" if data.idle_days else ""
    return f"events: {said}; {dropped:,} left out{ended}"


def _repeated(data: Prepared, least: float = _REPEATED) -> list[str]:
    """The share of positives on items of the user's past, and whether lists repeat items; empty if it is small."""
    if data.repeated_share < least and not data.repeats:
        return []
    follows = "may repeat items" if data.repeats else "do not repeat items (repeats true: they may)"
    return [
        f"{data.repeated_share:.0%} of the positives of validation are of items that the user had before: "
        f"lists {follows}"
    ]


def _changed(one: Any, other: Any) -> str:
    """The options of ``other`` that differ from those of ``one``."""
    before = asdict(one)
    differing = [(name, value, before[name]) for name, value in asdict(other).items() if value != before[name]]
    return ", ".join(f"{name} {value:g} instead of {old:g}" for name, value, old in differing)


fit = function_of(Fit)
