"""The steps of ``fit`` from prepared data to measured contenders, within a budget of time.

Every step is a verb with options, so its command repeats it by hand. A step whose output is complete is not repeated.
What depends on the clock (how long to train, how much to search) is decided once and kept in ``plan.json``, so a fit
that was stopped decides as it would have, and its commands give the same result on any machine.
"""

import itertools
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from recpo.artifacts.documents import read_json
from recpo.artifacts.outputs import write_json
from recpo.base.errors import PositiveFloat, PositiveInt, RecpoError, Seed
from recpo.evaluation.contenders import (
    BASELINES,
    BASELINES_DIRECTORY,
    FITTED,
    Baseline,
    BaselineCache,
    BaselineOptions,
    Contender,
    fitted_model,
    segment_baselines,
)
from recpo.evaluation.decision import CRITERION, criterion_of
from recpo.evaluation.held_out_pass import Evaluated, HeldOutPass, RankingOptions, held_out_users
from recpo.evaluation.off_policy.estimators import OffPolicyOptions, PropensitySource
from recpo.evaluation.off_policy.measure import propensity_share
from recpo.log.inspection import LogCounts
from recpo.log.prepared import Prepared
from recpo.log.splits import LeaveLastOut, TemporalSplit
from recpo.rewards.factors import Factors
from recpo.rewards.implicit import EaseOptions
from recpo.training import recipes
from recpo.training.recipes import counts_of
from recpo.training.run import Run
from recpo.training.tilting import has_grades
from recpo.verbs.contenders import ModelOptions, contenders_of
from recpo.verbs.factorize import Factorize
from recpo.verbs.tilt import Tilt
from recpo.verbs.tracking import run_tracked
from recpo.verbs.train import continued
from recpo.verbs.verb import PYTHON_ONLY, Verb, compute_device, configurations

PLAN: Final = "plan.json"
#: Directories and files of a fit.
PREPARE: Final = "prepare.yaml"  # beside the prepared data: the options that made them
#: What ships, made again on all events; it has the same directories.
FINAL: Final = "final"
#: The baseline that tilts policies where there are no grades.
RULES: Final = "sequential_rules"
#: The same where lists may repeat items.
PERSONAL: Final = "personal_popularity"
#: A factor model that is named, like a baseline, and needs no directory.
ALLRANK: Final[Baseline] = "allrank"
#: In front of the name of what is tilted.
TILTED: Final = "tilted-"
_ENOUGH_EVENTS: Final = 10_000  # of the validation period, to tell contenders apart
_LARGEST_SHARE: Final = 0.25  # of the log that decides, at most
MOST_USERS: Final = 20_000  # on whom contenders are compared
_VALIDATED_USERS: Final = 10_000  # after an epoch
_EASE_SHARE: Final = 0.15  # of the budget, at most: it takes the cube of the number of items
_EASE_RATE: Final = 2e10  # operations per second, of one core
_TRAINING_SHARE: Final = 0.6  # of the time that is left goes to the first training of every recipe
_EFFORTS: Final = (1.0, 0.5, 0.25, 0.125, 1 / 16, 1 / 32)
_OVERHEAD: Final = 1.3  # validation and checkpoints, per second of training steps
_PROBE_STEPS: Final = 12
_NOT_LIKED: Final = ("neutral", "skipped", "disliked")
_LOGGED_SHARE: Final = 0.5  # of the exposures: with fewer logged propensities, all are estimated
_DEPTH: Final = 1000  # places of the lists whose reward is estimated
_LOWER_BOUND: Final = 1.0  # standard deviations, as in mpo.yaml


@dataclass
class Plan:
    """What a fit has done, and what it decided by the clock.

    Attributes:
        spent: seconds of earlier, interrupted calls and of all steps of this one.
        effort: share of the recommended training steps; None = not decided yet.
        recipes: the recipes that are trained, in order.
        left_out: recipes for which the time is too short.
        trials: number of trials of the search; None = not decided yet.
        failed: runs that diverged or collapsed, or the search, and why.
        steps: of the finished steps, the ``command`` that repeats it, and the ``seconds`` that it took.
    """

    spent: float = 0.0
    effort: float | None = None
    recipes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    trials: int | None = None
    failed: dict[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, root: Path) -> Self:
        """The plan of a fit that was stopped, or a new one."""
        if not (root / PLAN).is_file():
            return cls()
        return cls(**read_json(root / PLAN, "run the fit again with --overwrite true"))

    def seconds_of(self, last: Path) -> float | None:
        """Seconds of the step whose command ends with this path; None = it was not done."""
        return next((step["seconds"] for step in self.steps if shlex.split(step["command"])[-1] == str(last)), None)

    def save(self, root: Path) -> None:
        """Writes ``plan.json``."""
        write_json(root / PLAN, asdict(self))


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of all steps."""

    minutes: PositiveFloat = 30.0
    """budget of time. Less than ten minutes train shorter and leave recipes out"""
    k: PositiveInt = 10
    """length of the lists that are compared"""
    seed: Seed = 0
    """seed of all random numbers"""
    device: str = "auto"
    """where models are evaluated: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on"""
    progress: bool = False
    """show progress bars on a terminal"""
    on_step: Callable[[str], None] = field(default=lambda text: None, metadata=PYTHON_ONLY)
    """called with a sentence about every step as it begins, with the time that is left"""


def deciding_split(split: TemporalSplit | LeaveLastOut, counts: LogCounts) -> TemporalSplit | LeaveLastOut:
    """The split by which contenders are compared: its valid period has 10,000 events, or a quarter of a smaller log.

    A day of a small log cannot tell contenders apart. On ratings of real people (290 users, 6,960 events), judged by
    uniformly random exposures, a tenth of the log let the wrong one ship (docs/fit.md#small-logs).
    Each user's last event stays what it is: more of them ask another question.

    Args:
        split: the split of what ships.
        counts: size of the log.
    """
    if isinstance(split, TemporalSplit):
        return replace(split, valid_days=max(split.valid_days, _deciding_days(split, counts)))
    share = min(_ENOUGH_EVENTS / counts.events, _LARGEST_SHARE)
    return replace(split, valid_share=max(split.valid_share, round(share, 3))) if split.valid_share else split


def _deciding_days(split: TemporalSplit, counts: LogCounts) -> int:
    """Days before the test period with 10,000 events, but at most a quarter of the days, or of what precedes it."""
    most = round(_LARGEST_SHARE * (counts.days or 0.0))
    if len(counts.by_day) <= split.test_days:  # not all events were inspected: days count alike
        return min(math.ceil(_ENOUGH_EVENTS * (counts.days or 0.0) / counts.events), most)
    events = np.cumsum(counts.by_day[split.test_days :])
    enough = int(np.searchsorted(events, _ENOUGH_EVENTS)) + 1
    return min(enough, max(most, int(np.searchsorted(events, _LARGEST_SHARE * events[-1], side="right"))))


def place_of(root: Path, name: str) -> Path | str:
    """Where a fit in ``root`` has a contender: its directory, or its name if it is a baseline, which needs none."""
    if name in BASELINES:
        return name
    return root / (recipes.FACTORS if name == recipes.FACTORS else f"{recipes.RUNS}/{name}")


def leaves_out(error: RecpoError) -> bool:
    """Whether a training that failed so is left out, and the fit continues without it.

    It diverged or collapsed, or no user of its validation has the events that its monitor needs.
    """
    return error.code == "diverged" or (error.code, error.field) == ("empty", "monitor")


class FitSteps:
    """The steps of one fit.

    Args:
        root: its directory.
        options: options of all steps.
        first: the steps that decided, if these make their contender again on all events: they share plan and clock.
            None = these decide.

    Attributes:
        data: the prepared data, after the step that makes them.
        baseline_options: options of the baselines; where contenders are made again, those that were chosen before.
    """

    data: Prepared
    baseline_options: BaselineOptions = BaselineOptions()

    def __init__(self, root: Path, options: StepOptions, first: "FitSteps | None" = None) -> None:
        self.root, self.options, self._first = root, options, first or self
        self.plan: Plan = first.plan if first else Plan.open(root)
        self._began: float = first._began if first else time.monotonic() - self.plan.spent
        self._asked: dict[str, tuple[recipes.Recipe, Mapping[str, Any]]] = {}  # recipe and changed options by name
        self._measured: dict[str, Evaluated] = {}
        self.measuring_seconds = 0.0

    @property
    def left(self) -> float:
        """Seconds until the budget is spent; negative afterwards."""
        return self.options.minutes * 60 - (time.monotonic() - self._began)

    def run(self, verb: Verb[Any], command: Sequence[object] | None = None) -> None:
        """Runs a verb, unless its output exists: it appears when it is complete.

        Args:
            verb: what is done.
            command: the words of the command that repeats it; None = ``verb.command``.
        """
        if not Path(getattr(verb, verb.output_option)).exists():
            self._do(verb.command() if command is None else command, partial(run_tracked, verb))

    def _do(self, command: Sequence[object], work: Callable[[], object]) -> None:
        text = shlex.join(["recpo", *map(str, command)])
        self.say(text)
        began = time.monotonic()
        work()
        self.plan.steps.append({"command": text, "seconds": round(time.monotonic() - began, 2)})
        self.save()

    def save(self) -> None:
        """Keeps the plan, with the time that was spent."""
        self.plan.spent = round(time.monotonic() - self._began, 2)
        self.plan.save(self._first.root)

    def say(self, text: str) -> None:
        """Shows a sentence with the time that is left."""
        minutes, seconds = divmod(max(0, round(self.left)), 60)
        self.options.on_step(f"{minutes:3d}:{seconds:02d} left  {text}")

    @cached_property
    def baselines(self) -> list[Baseline]:
        """The baselines that a team would use and a bundle can serve."""
        found: list[Baseline] = ["popularity", "item_rate", RULES, "implicit_als"]
        found += [PERSONAL] if self.data.repeats else []
        found += segment_baselines(self.data)[: 1 + self.graded]
        found += [] if not self.data.ends_at_once else ["recent_rate"] if self.graded else ["recency"]
        ease, items = EaseOptions(), self.data.num_items
        seconds = ease.operations(items) / _EASE_RATE
        fits = items <= ease.max_items and 2 * ease.memory(items) <= _memory()  # one half is for the rest
        found += ["ease"] if fits and seconds <= _EASE_SHARE * 60 * self.options.minutes else []
        return [*found, "positives", "factorization"] if self.graded else found

    @property
    def named(self) -> list[Baseline]:
        """The contenders that are fitted by their names."""
        return [*self.baselines, ALLRANK] if self.graded else self.baselines

    @property
    def left_out(self) -> list[str]:
        """EASE and recipes for which time or memory are too short."""
        return [*([] if "ease" in self.baselines else ["ease"]), *self.plan.left_out]

    @cached_property
    def graded(self) -> bool:
        """Whether the log has graded feedback to fit and select a reward model with."""
        counts = self.data.feedback_counts["train"]
        return bool(counts["skipped"] + counts["disliked"]) and has_grades(self.data)

    @cached_property
    def sides(self) -> dict[str, bool]:
        """The options of a policy for what it can read of users and requests, and whether the data have it."""
        schema = self.data.feature_schema
        return {
            "user_features": bool(schema.user),
            "context_features": bool(schema.context),
            "behaviors": bool(self.data.behaviors),
        }

    @property
    def has_features(self) -> bool:
        """Whether the data have features, or behaviors, beside ids."""
        return bool(self.data.feature_schema.item) or any(self.sides.values())

    def train(self, name: str, recipe: recipes.Recipe, changed: Mapping[str, Any] | None = None) -> bool:
        """Trains a recipe, or continues its training.

        Args:
            name: of the run.
            recipe: its configurations.
            changed: options that differ from them, by dotted name.

        Returns:
            False if its training diverged or collapsed, or nothing says which checkpoint is best: it is no contender
            then.
        """
        self._asked[name] = recipe, changed or {}
        if self._key(name) in self.plan.failed or (recipe.after and self._key(recipe.after) in self.plan.failed):
            return False
        out, files = self.root / recipes.RUNS / name, self._files(recipe)
        options = {**self.options_of(recipe), **(changed or {})}
        flags = [*(("config", file) for file in files), *options.items(), ("out", out)]
        given = ((f"--{name}", "null" if value is None else value) for name, value in flags)
        words = ["train", *itertools.chain.from_iterable(given)]
        if (out / Run.FINISHED).exists():
            return True
        try:
            self._do(words, partial(self._train, out, files, options))
        except RecpoError as error:
            if not leaves_out(error):
                raise
            why = self.plan.failed[self._key(name)] = str(error).partition(". ")[0]
            self.say(f"{self._key(name)} is left out: {why}")
            self.save()
            return False
        return True

    def _key(self, name: str) -> str:
        """The name of a run in the plan."""
        return str((self.root / name).relative_to(self._first.root))

    def factorize(self) -> None:
        """Fits the reward model."""
        out, before = self.root / recipes.FACTORS, self._first.root / recipes.FACTORS
        verb = Factorize(self.data, out, seed=self.options.seed, progress=self.options.progress)
        self.run(verb if before == out else verb.of(Factors.open(before)))

    def tilt(self, base: str, temperature: float | Literal["auto"] = "auto") -> bool:
        """Tilts a run or a baseline by the reward model, or by sequential rules where AUC says nothing of grades.

        Args:
            base: what is tilted; the run is called ``tilted-BASE``.
            temperature: auto = it is chosen, and nothing is written if none is better than the base.

        Returns:
            Whether there is a tilted run.
        """
        out = self.root / recipes.RUNS / f"{TILTED}{base}"
        if self.plan.seconds_of(out) is None:  # else it was tried, and perhaps no temperature is better
            cache = self.root / BASELINES_DIRECTORY if base in BASELINES else None
            how: dict[str, Any] = {"k": self.options.k, "temperature": temperature}
            how |= {"baseline_cache": cache, "baseline_options": self.baseline_options}
            if self.by_grades:
                how["lower_bound"] = _LOWER_BOUND
            by = self.root / recipes.FACTORS if self.by_grades else PERSONAL if self.data.repeats else RULES
            self.run(Tilt(place_of(self.root, base), by, self.data, out=out, **how))
        return out.exists()

    def on_all_events(self, data: Prepared) -> "FitSteps":
        """Steps that make a contender again, in ``final``: on all events, with the plan and the clock of these steps.

        No events are held out there to choose options by, so fitted models keep the options that were chosen here.
        """
        steps = FitSteps(self.root / FINAL, self.options, first=self)
        steps.data = data
        chosen: dict[str, Any] = {}
        for name in (one for one in FITTED if one in self.named):
            options = getattr(self.baseline_options, name)
            chosen[name] = options.of(fitted_model(name, self.data, options, self._baseline_cache))
        steps.baseline_options = replace(self.baseline_options, **chosen)
        return steps

    def remake(self, name: str) -> bool:
        """Makes a contender of the first steps again, with the same options; False if its training diverged."""
        if name in BASELINES:
            return True
        if name == recipes.FACTORS:
            self.factorize()
            return True
        if name.startswith(TILTED):
            base, run = name.removeprefix(TILTED), self._first.run_of(name)
            made = run is not None and self.remake(base) and (not self.by_grades or self.remake(recipes.FACTORS))
            return run is not None and made and self.tilt(base, run.results["tilt/temperature"] or "auto")
        recipe, changed = self._first._asked[name]
        needed = [one for one in (recipe.after, recipe.reward) if one is not None]
        return all(map(self.remake, needed)) and self.train(name, recipe, {**changed, **self._as_long(name)})

    @property
    def seconds_again(self) -> float:
        """Seconds to make a contender again: preparation, reward model, pre-training and the longest other training."""
        shared = (PREPARE, recipes.FACTORS, f"{recipes.RUNS}/{recipes.PRETRAIN}")
        others = (f"{recipes.RUNS}/{name}" for name in self._asked if name != recipes.PRETRAIN)
        seconds, longest = ([self.plan.seconds_of(self.root / one) or 0.0 for one in outs] for outs in (shared, others))
        return sum(seconds) + max(longest, default=0.0)

    def measure(self, name: str) -> Evaluated:
        """One pass over the validation period, once per contender: of ``named``, ``factors`` or the name of a run."""
        if name not in self._measured:
            began = time.monotonic()
            self._measured[name] = self._validation.evaluate(self._contender(name))
            self.measuring_seconds += time.monotonic() - began
            criterion = criterion_of([self._measured[name]], self.k)
            value = self._measured[name].result.estimate(criterion)
            self.say(f"{name}: {criterion} {value.mean:.4f} ± {value.half_width:.4f}")
        return self._measured[name]

    def show_list(self) -> None:
        """Shows the list of one user by the best contender so far, long before the decision."""
        criterion = self.criterion
        best = max(self.measured, key=lambda one: one.result.estimate(criterion).mean).name
        user, items = self._validation.one_list(self._contender(best), self.k)
        name = self.data.table("users.parquet", ["user_id"]).column(0)[user].as_py()
        listed = ", ".join(map(str, self.data.item_ids().listed(np.array(items, np.int64))))
        self.say(f"a first list, by {best}, for user {name}: {listed or 'empty, as every item is in the past'}")

    @property
    def measured(self) -> list[Evaluated]:
        """All contenders so far."""
        return list(self._measured.values())

    @property
    def criterion(self) -> str:
        """By which all contenders so far can be compared."""
        return criterion_of(self.measured, self.k)

    @property
    def propensity(self) -> PropensitySource | None:
        """Where the propensities of the estimated rewards come from; None = rewards are not estimated."""
        estimated = self._validation.off_policy
        return None if estimated is None else estimated.options.propensity

    @property
    def by_grades(self) -> bool:
        """Whether policies are tilted by the reward model, and not by sequential rules.

        Its temperature is chosen by users with a positive and another exposure.
        """
        metric = self._first.measured[0].result.per_user.get(CRITERION)
        return self._first.graded and metric is not None and bool(metric.isfinite().any())

    def value(self, name: str) -> float:
        """The criterion of a contender on the validation period."""
        return self.measure(name).result.estimate(self.criterion).mean

    @property
    def k(self) -> int:
        """Length of the lists that are compared."""
        return min(self.options.k, self.data.num_items)

    def run_of(self, name: str) -> Run | None:
        """The run of this name; None of a baseline and of the reward model."""
        root = self.root / recipes.RUNS / name
        return Run.open(root) if (root / Run.FINISHED).is_file() else None

    def _contender(self, name: str) -> Contender:
        named, models = [place_of(self.root, name)], ModelOptions(device=self.options.device)
        options, cache = self.baseline_options, self._baseline_cache
        (found,) = contenders_of(named, self.data, [self.options.k], models, options, cache)
        return found

    @property
    def _baseline_cache(self) -> BaselineCache:
        return BaselineCache(self.root / BASELINES_DIRECTORY, self.root / BASELINES_DIRECTORY)

    @cached_property
    def _validation(self) -> HeldOutPass:
        how: dict[str, Any] = {"off_policy": self._off_policy, "segments": False, "max_users": MOST_USERS}
        options = RankingOptions(split="valid", ks=[self.k], progress=self.options.progress, **how)
        return HeldOutPass.of(self.data, options, compute_device(self.options.device))

    @property
    def _off_policy(self) -> OffPolicyOptions | None:
        """How the reward of lists is estimated from exposures; None = the log has only those that were liked."""
        counts = self.data.feedback_counts
        if not all(sum(counts[period][kind] for kind in _NOT_LIKED) for period in ("train", "valid")):
            return None
        is_logged = propensity_share(self.data, "valid") >= _LOGGED_SHARE
        # only SNIPS and its normal interval are read: no draws from the policy, no resampled users
        return OffPolicyOptions("logged" if is_logged else "estimated", depth=_DEPTH, samples=1, resamples=1)

    # the length of training

    def decide_effort(self, choices: Sequence[recipes.Recipes], twice: bool = False) -> None:
        """Decides which recipes are trained, and for which share of their recommended steps.

        A few steps of pre-training and MPO are timed. The first recipes are taken of which enough fits into the budget;
        if there are none, the last ones, shortened. Shares are powers of one half, so that small differences in speed
        decide the same.

        Args:
            choices: the most wanted first (``recipes_of``).
            twice: whether what ships is trained again: pre-training, and perhaps the longest other one.
        """
        if self.plan.effort is not None:
            return
        self.say("timing a few training steps")
        named = list(dict.fromkeys(name for one in choices for name in one.names))
        costs, budget, fitting = self._costs(named), _TRAINING_SHARE * self.left, list[float]()
        for names, enough in choices:
            again = costs[names[0]] + max((costs[name] for name in names[1:]), default=0.0)
            total = sum(costs[name] for name in names) + twice * again
            fitting = [effort for effort in _EFFORTS if effort * total <= budget]
            if fitting and fitting[0] >= enough:
                break
        self.plan.effort = fitting[0] if fitting else _EFFORTS[-1]
        self.plan.recipes, self.plan.left_out = list(names), [name for name in named if name not in names]
        self.save()
        told = f"; left out: {', '.join(self.plan.left_out)}" if self.plan.left_out else ""
        self.say(f"training {', '.join(self.plan.recipes)}, each for {self.plan.effort:.3g} of its full length{told}")

    def _costs(self, wanted: Sequence[str]) -> dict[str, float]:
        """Predicted seconds of every recipe at its full length; a step that is not timed costs one of pre-training."""
        probes, seconds = self.root / "probe", {}
        shutil.rmtree(probes, ignore_errors=True)
        for name in (recipes.PRETRAIN, recipes.PRETRAIN_RANKING, recipes.MPO, recipes.MPO_MODEL):
            if name in wanted:
                clock, recipe = _Clock(), recipes.RECIPES[name]
                options = self.options_of(recipe)
                options |= {"trainer.max_steps": _PROBE_STEPS, "trainer.limit_val_batches": 1}
                if recipe.after is not None:
                    options["init_from"] = probes / recipe.after
                try:
                    self._train(probes / name, self._files(recipe), options, [clock])
                except RecpoError as error:  # it starts from a policy of a few steps; those that it took are timed
                    if not leaves_out(error):
                        raise
                seconds[name] = clock.seconds
        shutil.rmtree(probes, ignore_errors=True)
        return {
            name: _OVERHEAD
            * seconds.get(name, seconds[recipes.PRETRAIN])
            * recipes.RECIPES[name].full_length(self._counts)
            for name in wanted
        }

    def _files(self, recipe: recipes.Recipe) -> list[Path]:
        """The configurations; where the data have features of the items, pre-training reads them."""
        names = list(recipe.configs)
        if recipe.after is None and recipe.sizes is not None and self.data.feature_schema.item:
            names.append("features_pretrain")
        return [configurations() / f"{name}.yaml" for name in names]

    def options_of(self, recipe: recipes.Recipe) -> dict[str, Any]:
        """The options of a recipe that differ from its configurations, by dotted name.

        Args:
            recipe: what is trained; at its full length, while no effort is decided.
        """
        seed = self.options.seed
        options: dict[str, Any] = {"data.prepared": self.data.root, "seed": seed, "data.seed": seed}
        if held_out_users(self.data, "valid") > _VALIDATED_USERS:
            options["data.max_validation_users"] = _VALIDATED_USERS
        if recipe.after is None:
            # pre-training reads what there is; the configuration of the reward model reads everything
            reads_all = recipe.sizes is None
            changed = {name: has for name, has in self.sides.items() if has != reads_all}
            options |= {f"policy.init_args.{name}": str(has).lower() for name, has in changed.items()}
            if reads_all and not self.data.feature_schema.item:
                options["policy.init_args.item_features"] = None
        label = self.data.manifest["label"]["class_path"].rpartition(".")[2]
        # what is made again has the sizes that were decided on
        return {**options, **recipe.options(self.root, self._first._counts, label, self.plan.effort or 1.0)}

    @cached_property
    def _counts(self) -> LogCounts:
        return counts_of(self.data)

    def _as_long(self, name: str) -> dict[str, Any]:
        """Options for as many epochs as the run of the same name in the first steps needed for its best checkpoint."""
        trained = self._first.run_of(name)
        assert trained is not None
        now, then = (sum(one.data.feedback_counts["train"].values()) for one in (self, self._first))
        steps = math.ceil(trained.best_step * now / then)
        return {"trainer.max_steps": steps, "trainer.limit_val_batches": 0, "patience": None}

    def _train(
        self, out: Path, files: Sequence[Path], options: Mapping[str, Any], callbacks: Sequence[Callback] = ()
    ) -> None:
        continued(out, config=list(files), callbacks=callbacks, progress=self.options.progress, **options)


def _memory() -> int:
    """Bytes of memory of the machine, or of the container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # there is none, or it is "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


class _Clock(Callback):
    """Median seconds of a training step, without the first ones."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the time."""
        self._ends.append(time.monotonic())

    @property
    def seconds(self) -> float:
        """0.05 if there were fewer than two steps."""
        gaps = np.diff(self._ends)[2:]
        return float(np.median(gaps)) if len(gaps) else 0.05
