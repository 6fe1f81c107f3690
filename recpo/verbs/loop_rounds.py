"""One round of the loop: a day under the policy of the previous round, then training, evaluation and an estimate.

The training is a recipe: a list of training configurations that start from each other. The estimate is that of the next
policy under its own exploration, a contender of ``evaluate``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jsonargparse import ArgumentError
from torch import Tensor

from recpo.artifacts.checksums import kind_of
from recpo.artifacts.documents import read_yaml
from recpo.base.errors import PositiveInt, RecpoError
from recpo.base.types import FeedbackBatch, Histories, Recommendations
from recpo.evaluation.candidates import HeldOut
from recpo.evaluation.contenders import Contender
from recpo.evaluation.evaluation import Evaluation
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.measure import rewarded
from recpo.evaluation.off_policy.results import POLICY
from recpo.evaluation.reading import Document
from recpo.evaluation.true_rewards import ORACLE
from recpo.lists.exploration import Exploration, Pool
from recpo.log.prepared import Prepared
from recpo.log.splits import TemporalSplit
from recpo.policies.grade_factors import validate_temperature
from recpo.rewards.factors import Factors
from recpo.rewards.rewards import LoggedReward
from recpo.serving.bundle import Bundle
from recpo.training.fit import as_arguments, train_parser
from recpo.training.run import Run
from recpo.verbs.contenders import contenders_of
from recpo.verbs.evaluate import evaluate
from recpo.verbs.export import export
from recpo.verbs.factorize import factorize
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import BEST, WorldOptions, simulate
from recpo.verbs.tilt import tilt
from recpo.verbs.train import continued
from recpo.worlds.log import DayReport, Simulation
from recpo.worlds.parameters import MILLISECONDS_PER_DAY, SimulationParameters
from recpo.worlds.truth import Truth

LOG: Final = "log"
PREPARED: Final = "prepared"
BUNDLE: Final = "bundle"
EVALUATION: Final = "evaluation"
FACTORS: Final = "factors"
RUNS: Final = "runs"
#: Name of the contender in the evaluation of a round.
NEXT: Final = "next policy"
#: The estimator whose value is recorded.
ESTIMATOR: Final = "SNIPS"
_REWARD: Final = "FactorReward"
_DEFAULT_OBJECTIVE: Final = "Likelihood"

_LEAST_K: Final = 100  # length of a bundle's lists: the default shortlist of exploration
SEEDS_PER_LOOP: Final = 1000
_NOT_LOGGED: Final = ("propensity", "is_random")
_LOGGED: Final = LoggedReward()


@dataclass(frozen=True)
class ListValue:
    """True value of the best k items of a trained policy, over the users of the log's last day.

    Attributes:
        true_reward: mean true expected reward of the items of the lists.
        half_width: half-width of its 95 % interval over users.
        oracle: the same for the best possible lists, without items of the users' pasts unless they may be repeated.
        true_dislike: mean true probability of a dislike.
        ndcg: NDCG of the lists on logged positives; None = no user has any.
        coverage: share of the catalog on at least one list.
    """

    true_reward: float
    half_width: float | None
    oracle: float
    true_dislike: float
    ndcg: float | None
    coverage: float

    @classmethod
    def of(cls, document: Document, k: int) -> ListValue:
        """Reads the values of the next policy and of the oracle from the evaluation of a round."""
        contenders = {one["name"]: one for one in document["contenders"]}
        own, best = contenders[NEXT]["metrics"], contenders[ORACLE]["metrics"]
        value = own[f"true_reward@{k}"]
        return cls(
            true_reward=value["mean"],
            half_width=value["half_width"],
            oracle=best[f"true_reward@{k}"]["mean"],
            true_dislike=own[f"true_dislike@{k}"]["mean"],
            ndcg=own[f"NDCG@{k}"]["mean"],
            coverage=contenders[NEXT]["totals"][f"coverage@{k}"],
        )


@dataclass(frozen=True)
class Round:
    """A round in numbers.

    Attributes:
        number: 0 = the start, whose log is the world's own.
        last_day: number of the last day of the log that was used for training and evaluation.
        served: true value of that day under the bundle of the previous round; None in round 0.
        items: size of the catalog.
        warm_start: whether the first training started from the previous round.
        lists: true value of the trained policy, which serves next.
        estimate: its expected earnings, from the last day's log; None = the log has no propensities.
        earned: mean logged reward of the last day's exposures, by the labels of this round.
        earned_before: the same for the day before, by the same labels.
    """

    number: int
    last_day: int
    served: DayReport | None
    items: int
    warm_start: bool
    lists: ListValue
    estimate: NextEstimate | None
    earned: float | None
    earned_before: float | None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Round:
        """Reads the output of ``dataclasses.asdict``."""
        parts = dict(content)
        served, estimate = parts.pop("served"), parts.pop("estimate")
        return cls(
            **{**parts, "lists": ListValue(**parts["lists"])},
            served=None if served is None else DayReport(**served),
            estimate=None if estimate is None else NextEstimate(**{**estimate, "warnings": (*estimate["warnings"],)}),
        )


@dataclass(frozen=True, kw_only=True)
class RoundOptions(WorldOptions):
    """What every round does: its world, its training and its service."""

    recipe: Sequence[Path | str | Mapping[str, Any]]
    """training configurations, as files or their contents. The first one trains from scratch, or from its own run of
    the previous round if there is one; each of the others starts from the run of the one before it. Data,
    ``init_from``, ``out`` and seeds are set by the round. A ``FactorReward`` reads a factorization of the round's
    log, which is fitted if the recipe names one"""
    log_propensities: bool = True
    """whether the logs have the columns ``propensity`` and ``is_random``. Without them, nothing is estimated
    off-policy, and no objective can train on them"""
    tilt: float | Literal["auto"] | None = None
    """temperature with which the last policy of the recipe is tilted by the round's factorization; "auto" = selected on
    the validation period, where the untilted policy may be the best; None = not tilted"""
    warm_start: bool = True
    """whether the first configuration starts from the previous round. If the catalog has changed, it starts from
    scratch in any case"""
    warm_epochs: PositiveInt | None = None
    """epochs of the first configuration after a warm start; None = as configured"""
    k: PositiveInt = 10
    """length of the lists whose true value is reported"""
    trust: Sequence[str] = ()
    """packages besides recpo whose classes the configurations may name"""
    progress: bool = False
    """show progress bars on a terminal"""

    @cached_property
    def configs(self) -> tuple[dict[str, Any], ...]:
        """The contents of the recipe, without what the loop sets itself (``data.prepared``, ...).

        Raises:
            RecpoError: there are none, one cannot be read, or an option is out of range.
        """
        if isinstance(self.recipe, str | Path | Mapping) or not self.recipe:
            raise RecpoError(
                f"loop: recipe is {self.recipe!r}, expected a list of training configurations, such as "
                "[configs/pretrain.yaml, configs/mpo.yaml]",
                code="wrong_type",
                field="recipe",
            )
        if self.tilt is not None and self.tilt != "auto":
            validate_temperature(float(self.tilt))
        configs = tuple(_own_part(one) for one in self.recipe)
        for number, config in enumerate(configs):
            _validate(number, config)
        return configs

    @property
    def needs_factors(self) -> bool:
        """Whether a reward or the tilt reads a factorization of each round's log."""
        return self.tilt is not None or any(_factor_rewards(config) for config in self.configs)

    @property
    def run_names(self) -> list[str]:
        """Directories of the runs: number and objective of every configuration."""
        return [f"{number}-{_objective(config)}" for number, config in enumerate(self.configs)]


def make_round(root: Path, number: int, options: RoundOptions) -> Round:
    """Makes ``root/rounds/NN``. Completed parts are not repeated.

    Args:
        root: directory of the loop.
        number: number of the round; the earlier rounds are complete.
        options: the options of all rounds.
    """
    here = round_directory(root, number)
    before = round_directory(root, number - 1) if number else None
    days = [Simulation.open(round_directory(root, one) / LOG) for one in range(number)]
    days.append(_log(here / LOG, before, days, options))
    truth, last_day = days[0].truth, days[-1].days[-1]
    data = _prepared(here / PREPARED, days, last_day, options)
    start = _start(data, before, options)
    run = _policy(here, data, start, SEEDS_PER_LOOP * options.seed + number, options)
    bundle = _bundle(here / BUNDLE, run, truth, options)
    found = _evaluation(here / EVALUATION, bundle, data, days[0], options).document
    served = days[-1].served
    return Round(
        number,
        last_day,
        served=None if served is None else served.days[-1],
        items=data.num_items,
        warm_start=start is not None,
        lists=ListValue.of(found, min(options.k, data.num_items)),
        estimate=NextEstimate.of(found),
        earned=logged_reward(data, "test", _LOGGED),
        earned_before=logged_reward(data, "valid", _LOGGED),
    )


def round_directory(root: Path, number: int) -> Path:
    """``rounds/NN``."""
    return root / "rounds" / f"{number:02d}"


def _log(out: Path, before: Path | None, days: Sequence[Simulation], options: RoundOptions) -> Simulation:
    """The world's own log, or a day that the bundle of the previous round serves."""
    if kind_of(out) == "simulation":
        return Simulation.open(out)
    shared: dict[str, Any] = {"seed": options.seed, "progress": options.progress}
    if before is None:
        parameters = {one.name: getattr(options, one.name) for one in dataclasses.fields(SimulationParameters)}
        return simulate(out, world=options.world, matrix=options.matrix, **{**parameters, **shared})
    served: dict[str, Any] = {"exploration": options.exploration, "repeat_after": options.repeat_after}
    return simulate(out, policy=Bundle.open(before / BUNDLE), after=days, **served, **shared)


def _prepared(out: Path, days: Sequence[Simulation], last_day: int, options: RoundOptions) -> Prepared:
    """Prepares all days so far: the last one is the test period, the one before it the validation period."""
    if kind_of(out) == "prepared":
        return Prepared.open(out)
    start = days[0].truth.preferences.parameters.start_ms
    split = TemporalSplit(valid_start=_midnight(start, last_day - 1), test_start=_midnight(start, last_day))
    logs: Any = [day.log for day in days]
    if not options.log_propensities:
        logs = pa.concat_tables([pq.read_table(log) for log in logs]).drop_columns([*_NOT_LOGGED])
    repeats = options.repeat_after is not None
    return prepare(logs, out, split=split, repeats=repeats, progress=options.progress)


def _bundle(out: Path, run: Run, truth: Truth, options: RoundOptions) -> Bundle:
    if kind_of(out) == "bundle":
        return Bundle.open(out)
    longest = max(
        _LEAST_K, options.k, (options.exploration or BEST).shortlist, truth.preferences.parameters.request_size
    )
    export(run, out=out, k=longest, repeats=options.repeat_after is not None, trust=options.trust)
    return Bundle.open(out)


def _evaluation(out: Path, bundle: Bundle, data: Prepared, world: Simulation, options: RoundOptions) -> Evaluation:
    if kind_of(out) == "evaluation":
        return Evaluation.open(out)
    k, size = (min(one, data.num_items) for one in (options.k, world.truth.preferences.parameters.request_size))
    ks = list(dict.fromkeys([k, size]))
    return evaluate(
        data,
        [as_served(bundle, data, options.exploration or BEST, size, ks)],
        out=out,
        ks=ks,
        repeats=options.repeat_after is not None,
        reward=_LOGGED,
        truth=world.root,
        baselines=False,
        segments=False,
        device="cpu",
        progress=options.progress,
    )


def _midnight(start_ms: int, day: int) -> str:
    return datetime.fromtimestamp((start_ms + day * MILLISECONDS_PER_DAY) / 1000, UTC).isoformat()


def _start(data: Prepared, before: Path | None, options: RoundOptions) -> Run | None:
    """The run of the previous round that the first configuration starts from; None = it starts from scratch."""
    if before is None or not options.warm_start:
        return None
    run = Run.open(before / RUNS / options.run_names[0], options.trust)
    return run if run.items.equals(data.item_ids()) else None


def _policy(here: Path, data: Prepared, start: Run | None, seed: int, options: RoundOptions) -> Run:
    """Trains the policy of a round, which serves next; completed parts are not repeated."""
    run, fitted = start, here / FACTORS
    if options.needs_factors and kind_of(fitted) != "factors":
        factorize(data, fitted, seed=seed, progress=options.progress)
    for number, (name, given) in enumerate(zip(options.run_names, options.configs, strict=True)):
        out = here / RUNS / name
        how: dict[str, Any] = {"seed": seed, "data.seed": seed, "trust": options.trust, "progress": options.progress}
        if number == 0 and start is not None and options.warm_epochs is not None:
            how["trainer.max_epochs"] = options.warm_epochs
        if (out / Run.FINISHED).is_file():
            run = Run.open(out, options.trust)
        else:
            run = continued(out, data=data, config=_with_factors(given, fitted), init_from=run, **how)
    assert run is not None
    return run if options.tilt is None else _tilted(here / RUNS / "tilted", run, Factors.open(fitted), data, options)


def _tilted(out: Path, run: Run, factors: Factors, data: Prepared, options: RoundOptions) -> Run:
    """The tilted run; the run itself where no temperature is better."""
    if (out / Run.FINISHED).is_file():
        return Run.open(out, options.trust)
    how: dict[str, Any] = {"temperature": options.tilt, "trust": options.trust, "progress": options.progress}
    found = tilt(run, factors, data, out=out, **how).run
    return run if found is None else found


def _own_part(named: Path | str | Mapping[str, Any]) -> dict[str, Any]:
    content = named if isinstance(named, Mapping) else read_yaml(Path(named), "name a training configuration")
    config = {key: copy.deepcopy(value) for key, value in content.items() if key not in ("out", "init_from", "resume")}
    if isinstance(config.get("data"), dict):
        config["data"].pop("prepared", None)
    return config


def _validate(number: int, config: Mapping[str, Any]) -> None:
    """Checks names and types before the simulation. Training checks what depends on the data when it begins."""
    try:
        arguments = [*as_arguments(_with_factors(config, Path(FACTORS))), "--out", "run", "--data.prepared", "prepared"]
        train_parser().parse_args(arguments, defaults=False)
    except ArgumentError as error:
        raise RecpoError(
            f"loop: recipe, configuration {number} ({_objective(config)}): {error}",
            code="bad_value",
            field=f"recipe[{number}]",
        ) from error


def _objective(config: Mapping[str, Any]) -> str:
    objective = config.get("objective")
    named = objective.get("class_path", _DEFAULT_OBJECTIVE) if isinstance(objective, Mapping) else objective
    return str(named or _DEFAULT_OBJECTIVE).rsplit(".", 1)[-1]


def _with_factors(config: Mapping[str, Any], factors: Path) -> dict[str, Any]:
    """The configuration, in which every ``FactorReward`` reads ``factors``."""
    found = copy.deepcopy(dict(config))
    for reward in _factor_rewards(found):
        reward.setdefault("init_args", {})["factors"] = str(factors)
    return found


def _factor_rewards(part: Any) -> list[dict[str, Any]]:
    """Every ``FactorReward`` of a configuration, at any depth."""
    if isinstance(part, list):
        return [found for one in part for found in _factor_rewards(one)]
    if not isinstance(part, Mapping):
        return []
    own = [part] if str(part.get("class_path", "")).rsplit(".", 1)[-1] == _REWARD else []
    return [*own, *(found for value in part.values() for found in _factor_rewards(value))]  # type: ignore[list-item]


@dataclass(frozen=True)
class NextEstimate:
    """The expected earnings of the next policy before it serves, from the log of the policy before it.

    Attributes:
        value: mean logged reward per exposure of slates drawn as they will be served; None = not known.
        low: lower end of the 95 % bootstrap interval over users.
        high: its upper end.
        effective_rows: the number of equally weighted exposures with the same information.
        warnings: reasons why the number may be wrong.
    """

    value: float | None
    low: float | None
    high: float | None
    effective_rows: float | None
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, document: Document) -> NextEstimate | None:
        """Reads the estimate from the document of an evaluation; None if the log has no propensities."""
        (contender,) = (one for one in document["contenders"] if one["name"] == NEXT)
        for entry in contender["off_policy"]:
            if (entry["target"], entry["estimator"]) == (POLICY, ESTIMATOR):
                ends = entry["intervals"]["bootstrap"]
                effective = entry["effective_sample_size"]
                return cls(entry["value"], ends["low"], ends["high"], effective, tuple(entry["warnings"]))
        return None


def as_served(bundle: Bundle, data: Prepared, exploration: Exploration, size: int, ks: list[int]) -> Contender:
    """The bundle as a contender whose log-probabilities are those of its slates, including exploration.

    The target ``policy`` of the off-policy values is therefore an item at a random place of a slate as it will be
    served. Lists are the bundle's best items. Slates of ``size`` items stand for all slates, including the shorter last
    ones of a session.

    Args:
        bundle: the bundle that serves next.
        data: prepared log with the bundle's items.
        exploration: how slates are drawn.
        size: items of a slate.
        ks: list lengths of the evaluation.
    """
    (plain,) = contenders_of([bundle], data, ks)

    def load() -> Recommender:
        loaded = plain.load()
        slates = _Slates(loaded, bundle, exploration, min(size, data.num_items))
        return replace(loaded, recommend=slates.recommend, log_prob=slates.log_prob, name=NEXT, scores_are_logp=True)

    return replace(plain, name=NEXT, load=load)


@dataclass
class _Slates:
    """The lists of a bundle, and the probabilities of its slates for the batch of the latest lists."""

    bundle: Recommender
    of: Bundle
    exploration: Exploration
    size: int
    exclude: Tensor | None = None
    shortlists: Recommendations | None = None

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        """The k best items. Keeps the whole shortlist for ``log_prob``."""
        assert self.bundle.recommend is not None
        width = min(max(self.size, self.exploration.shortlist), self.of.k)
        found = self.bundle.recommend(histories, max(k, width), exclude)
        self.exclude = exclude
        self.shortlists = Recommendations(found.item_ids[:, :width], found.scores[:, :width])
        return Recommendations(found.item_ids[:, :k], found.scores[:, :k])

    def log_prob(self, batch: FeedbackBatch) -> Tensor:
        """``[B, S, 1]``; -inf = slates of this context never show the item."""
        assert self.shortlists is not None
        items, scores = (part.numpy() for part in self.shortlists)
        barred = items[:, :0] if self.exclude is None else self.exclude.numpy()
        pools = [Pool.of(len(self.of.items), exclude=row) for row in barred]
        filled = np.where(items > 0, scores, -np.inf)
        found = self.exploration.probabilities(items, filled, self.size, batch.slates.item_ids.numpy(), pools)
        return torch.from_numpy(found).log()[:, :, None]


def logged_reward(data: Prepared, split: HeldOut, reward: LoggedReward) -> float | None:
    """Mean reward of the exposures of a held-out period; None if no exposure has a reward."""
    total = count = 0.0
    for shard in range(data.num_shards(split)):
        values = rewarded(data, split, shard, reward).reward
        known = values[~np.isnan(values)]
        total, count = total + float(known.sum()), count + len(known)
    return total / count if count else None
