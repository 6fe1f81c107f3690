"""One round of the loop: a day under the policy of the previous round, then training, evaluation and an estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts import kind_of
from recpo.evaluation.evaluation import Evaluation
from recpo.evaluation.reading import Document
from recpo.evaluation.true_rewards import ORACLE
from recpo.lists.exploration import Exploration
from recpo.log.prepared import Prepared
from recpo.log.splits import TemporalSplit
from recpo.rewards.rewards import LoggedReward
from recpo.serving.bundle import Bundle
from recpo.training.run import Run
from recpo.verbs.evaluate import evaluate
from recpo.verbs.export import export
from recpo.verbs.loop_estimates import NEXT, NextEstimate, as_served, logged_reward
from recpo.verbs.loop_recipe import Recipe
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import simulate
from recpo.worlds.log import DayReport, Simulation
from recpo.worlds.parameters import MILLISECONDS_PER_DAY, World
from recpo.worlds.truth import Truth

LOG: Final = "log"
PREPARED: Final = "prepared"
BUNDLE: Final = "bundle"
EVALUATION: Final = "evaluation"

_LEAST_K: Final = 100  # length of a bundle's lists: the default shortlist of exploration
SEEDS_PER_LOOP: Final = 1000
_NOT_LOGGED: Final = ("propensity", "is_random")


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


@dataclass(frozen=True)
class RoundOptions:
    """The options that all rounds share; see ``recpo.verbs.loop.Loop``."""

    world: World
    parameters: Mapping[str, Any]
    seed: int
    exploration: Exploration | None
    log_propensities: bool
    k: int
    repeat_after: float | None
    reward: LoggedReward


def make_round(
    root: Path, number: int, options: RoundOptions, recipe: Recipe, trust: Sequence[str], progress: bool
) -> Round:
    """Makes ``root/rounds/NN``. Completed parts are not repeated.

    Args:
        root: directory of the loop.
        number: number of the round; the earlier rounds are complete.
        options: the options of all rounds.
        recipe: the training.
        trust: packages whose classes the recipe may name.
        progress: show progress bars on a terminal.
    """
    here = round_directory(root, number)
    before = round_directory(root, number - 1) if number else None
    days = [Simulation.open(round_directory(root, one) / LOG) for one in range(number)]
    days.append(_log(here / LOG, before, days, options, progress))
    truth, last_day = days[0].truth, days[-1].days[-1]
    data = _prepared(here / PREPARED, days, last_day, options.log_propensities, progress)
    seed = SEEDS_PER_LOOP * options.seed + number
    trained = recipe.train(here, data, before, seed=seed, trust=trust, progress=progress)
    bundle = _bundle(here / BUNDLE, trained.run, options, truth, trust)
    found = _evaluation(here / EVALUATION, bundle, data, days[0], options, progress).document
    served = days[-1].served
    return Round(
        number=number,
        last_day=last_day,
        served=None if served is None else served.days[-1],
        items=data.num_items,
        warm_start=trained.warm_start,
        lists=ListValue.of(found, min(options.k, data.num_items)),
        estimate=NextEstimate.of(found),
        earned=logged_reward(data, "test", options.reward),
        earned_before=logged_reward(data, "valid", options.reward),
    )


def round_directory(root: Path, number: int) -> Path:
    """``rounds/NN``."""
    return root / "rounds" / f"{number:02d}"


def _log(
    out: Path, before: Path | None, days: Sequence[Simulation], options: RoundOptions, progress: bool
) -> Simulation:
    """The world's own log, or a day that the bundle of the previous round serves."""
    if kind_of(out) == "simulation":
        return Simulation.open(out)
    if before is None:
        parameters = {**options.parameters, "seed": options.seed}
        return simulate(out, world=options.world, progress=progress, **parameters)
    bundle = Bundle.load(before / BUNDLE)
    return simulate(
        out,
        policy=bundle,
        after=days,
        exploration=options.exploration,
        repeat_after=options.repeat_after,
        seed=options.seed,
        progress=progress,
    )


def _prepared(out: Path, days: Sequence[Simulation], last_day: int, log_propensities: bool, progress: bool) -> Prepared:
    """Prepares all days so far: the last one is the test period, the one before it the validation period."""
    if kind_of(out) == "prepared":
        return Prepared.open(out)
    start = days[0].truth.preferences.parameters.start_ms
    split = TemporalSplit(valid_start=_midnight(start, last_day - 1), test_start=_midnight(start, last_day))
    logs = [day.log for day in days]
    if log_propensities:
        return prepare(logs, out, split=split, progress=progress)
    whole = pa.concat_tables([pq.read_table(log) for log in logs])
    return prepare(whole.drop_columns([*_NOT_LOGGED]), out, split=split, progress=progress)


def _bundle(out: Path, run: Run, options: RoundOptions, truth: Truth, trust: Sequence[str]) -> Bundle:
    if kind_of(out) == "bundle":
        return Bundle.load(out)
    shortlist = 1 if options.exploration is None else options.exploration.shortlist
    longest = max(_LEAST_K, options.k, shortlist, truth.preferences.parameters.request_size)
    export(run, out=out, k=longest, repeats=options.repeat_after is not None, trust=trust)
    return Bundle.load(out)


def _evaluation(
    out: Path, bundle: Bundle, data: Prepared, world: Simulation, options: RoundOptions, progress: bool
) -> Evaluation:
    if kind_of(out) == "evaluation":
        return Evaluation.open(out)
    k, size = (min(one, data.num_items) for one in (options.k, world.truth.preferences.parameters.request_size))
    ks = list(dict.fromkeys([k, size]))
    return evaluate(
        data,
        [as_served(bundle, data, options.exploration, size, ks)],
        out=out,
        ks=ks,
        exclude_past=options.repeat_after is None,
        reward=options.reward,
        truth=world.root,
        baselines=False,
        segments=False,
        device="cpu",
        progress=progress,
    )


def _midnight(start_ms: int, day: int) -> str:
    return datetime.fromtimestamp((start_ms + day * MILLISECONDS_PER_DAY) / 1000, UTC).isoformat()


def as_json(one: Round) -> dict[str, Any]:
    """The input of ``Round.from_json``."""
    return dataclasses.asdict(one)
