"""A policy tilted by factors of grades or by a baseline, and the choice of its temperature on validation events."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from recpo.artifacts.documents import read_yaml
from recpo.artifacts.outputs import write_json
from recpo.base.contracts import DotProductPolicy, Policy, RewardFunction
from recpo.base.errors import RecpoError
from recpo.base.types import Slates, on_device
from recpo.batches.slates import evaluation_batches
from recpo.evaluation import Z95
from recpo.evaluation.candidates import Candidates
from recpo.evaluation.catalog_ranking import Ranking, RankingPass, RankingResult
from recpo.evaluation.estimates import or_least
from recpo.evaluation.held_out_pass import held_out_users
from recpo.evaluation.measures import Measure, Observed, Recommender
from recpo.evaluation.off_policy.estimators import SNIPS, OffPolicyOptions
from recpo.evaluation.off_policy.measure import OffPolicySetting, off_policy_setting, propensity_share
from recpo.evaluation.off_policy.results import POLICY, OffPolicyResult, snips_of
from recpo.log.prepared import Prepared
from recpo.policies.baseline import BaselinePolicy
from recpo.policies.grade_factors import GradeFactors
from recpo.policies.tilted import PolicyWithBase, ProductPolicy, RerankedPolicy, RerankedProductPolicy, TiltedPolicy
from recpo.rewards.factors import Factors
from recpo.rewards.graded import chunks
from recpo.training import run
from recpo.training.learned_reward import Checkpoint
from recpo.training.run import Run

if TYPE_CHECKING:
    import pandas as pd

Criterion = Literal["grade", "top_k", "policy", "auc", "auc_mixed", "ndcg", "monitor_reward"]

#: Temperatures to try, in grades per nat: such a difference in grade moves the log-odds by 1.
TEMPERATURES = (0.0125, 0.025, 0.035, 0.05, 0.07, 0.1, 0.2, 0.4)
#: The same for the scores of a baseline, of which the value changes more slowly.
TEMPERATURES_OF_SCORES = (0.0125, 0.025, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class TiltTrial:
    """The value of a policy in the validation period; nan if it is not known.

    Attributes:
        temperature: of the tilt; inf = the untilted policy.
        value: value by the criterion.
        half_width: half-width of its 95 % interval over users.
        loss: value of the best tilted policy minus this value, on the same users.
        loss_error: standard error of that difference.
        auc_loss: with the criterion ``auc_mixed``, the highest ``auc`` of all temperatures minus this one, on the same
            users; else nan.
        auc_loss_error: standard error of that difference.
        top_k: off-policy value (SNIPS) of an item of the list of k.
        policy: off-policy value (SNIPS) of an item drawn from the policy.
        grade: mean grade of the lists of k, as a factorization of the validation period's own events predicts it.
        auc: mean over users of ``AUC_other``: their positives against their other exposures.
        auc_mixed: mean over users of ``AUC_mixed``: the former (.6) and positives against items never shown (.4).
        monitor_reward: mean reward of the lists of k.
        effective_rows: number of equally weighted exposures that would be as informative about ``top_k``.
        kl: mean of KL(tilted || base) over users, in nats.
        ndcg: NDCG of the lists of k on logged positives.
        coverage: share of the catalog that is on any list of k.
    """

    temperature: float
    value: float
    half_width: float
    loss: float
    loss_error: float
    auc_loss: float
    auc_loss_error: float
    top_k: float
    policy: float
    grade: float
    auc: float
    auc_mixed: float
    monitor_reward: float
    effective_rows: float
    kl: float
    ndcg: float
    coverage: float

    @property
    def keeps_order(self) -> bool:
        """Whether it ranks a user's own exposures as well as any temperature, within one standard error.

        ``auc_mixed`` also rewards items for being shown, so where exposures say little about taste it would trade the
        order of what was judged for them.
        """
        return not self.auc_loss > self.auc_loss_error


@dataclass(frozen=True)
class TiltResult:
    """A tilted run and how its temperature was chosen.

    Attributes:
        run: the tilted run; None = no temperature is better than the untilted policy, and nothing was written.
        temperature: of the tilt; inf = the untilted policy.
        lower_bound: number of standard deviations subtracted from the grade; 0 of scores.
        criterion: criterion that chose the temperature; None = it was given, and nothing was measured.
        k: length of the lists.
        trials: the untilted policy first, then every temperature, descending; empty if nothing was measured.
    """

    run: Run | None
    temperature: float
    lower_bound: float
    criterion: Criterion | None
    k: int
    trials: tuple[TiltTrial, ...]

    def to_pandas(self) -> pd.DataFrame:
        """The trials, one per row."""
        import pandas as pd

        return pd.DataFrame([asdict(trial) for trial in self.trials], columns=list(TiltTrial.__annotations__))


@dataclass(frozen=True)
class ByFactors:
    """Tilts by the grades that a factor model predicts.

    Attributes:
        factors: factors of the same items.
        candidates: for a base that cannot score the catalog, how many items of its own search are re-ranked.
        lower_bound: number of standard deviations of the posterior to subtract from the grade.
    """

    factors: Factors
    candidates: int = 200
    lower_bound: float = 0.0

    def __call__(self, base: Policy, temperature: float) -> TiltedPolicy | RerankedPolicy:
        """``base(i | h) exp(grade(h, i) / temperature)``, normalized; exact if the base is a ``DotProductPolicy``.

        Raises:
            RecpoError: temperature is not a number above 0, the factors have other items, or a lower bound is requested
                and the factors have none.
        """
        # new items need a vector of the base as well
        grows = self.factors.item_features and base.reads_item_features
        size, options = base.num_items, replace(self.factors.options, lower_bound=self.lower_bound, item_features=grows)
        policy: TiltedPolicy | RerankedPolicy
        if isinstance(base, DotProductPolicy):
            policy = TiltedPolicy(size, base=lambda _: base, factors=options, temperature=temperature)
        else:
            policy = RerankedPolicy(
                size, base=lambda _: base, factors=options, temperature=temperature, candidates=self.candidates
            )
        assign_factors(policy.factors, self.factors)
        return policy.eval()

    def to(self, device: torch.device) -> ByFactors:
        """The same on ``device``."""
        return replace(self, factors=self.factors.to(device))

    @property
    def facts(self) -> Mapping[str, Any]:
        """How the factors were fitted."""
        return self.factors.facts

    @property
    def user_features(self) -> bool:
        """Whether the factors read features of users."""
        return self.factors.user_features

    @staticmethod
    def arguments(policy: Any) -> dict[str, Any]:
        """Constructor arguments of a policy that it tilted, besides base, temperature and candidates."""
        return {"factors": asdict(policy.factors.options)}


@dataclass(frozen=True)
class ByBaseline:
    """Tilts by the scores of a baseline: the product of two policies.

    Attributes:
        name: of the baseline.
        policy: the fitted baseline.
        configuration: its ``class_path`` and ``init_args``.
        candidates: see ``ByFactors``.
    """

    name: str
    policy: BaselinePolicy
    configuration: Mapping[str, Any]
    candidates: int

    @property
    def user_features(self) -> bool:
        """Whether the baseline reads features of users."""
        return self.policy.reads.user

    def __call__(self, base: Policy, temperature: float) -> ProductPolicy | RerankedProductPolicy:
        """``base(i | h) exp(score(h, i) / temperature)``, normalized; exact if the base is a ``DotProductPolicy``."""
        scored, size = self.policy, base.num_items
        if isinstance(base, DotProductPolicy):
            made = ProductPolicy(size, base=lambda _: base, scored=lambda _: scored, temperature=temperature)
            return made.eval()
        return RerankedProductPolicy(
            size, base=lambda _: base, scored=lambda _: scored, temperature=temperature, candidates=self.candidates
        ).eval()

    def to(self, device: torch.device) -> ByBaseline:
        """The same on ``device``."""
        return replace(self, policy=self.policy.to(device))

    @property
    def facts(self) -> Mapping[str, Any]:
        """Which baseline it is."""
        return {"baseline": self.name}

    def arguments(self, policy: Any) -> dict[str, Any]:
        """Constructor arguments of a policy that it tilted, besides base, temperature and candidates."""
        return {"scored": dict(self.configuration)}


def assign_factors(module: GradeFactors, factors: Factors) -> None:
    """Gives the module of a policy the tensors of a factor model."""
    module.set_schema(factors.features)
    module.assign(factors.tensors, factors.noise)


def chosen_temperature(trials: Sequence[TiltTrial], criterion: Criterion | None = None) -> float:
    """The largest temperature, inf first, at most one standard error worse than the best; never an unknown value.

    With the criterion ``auc_mixed``, the one with the highest value of those that keep the order of a user's exposures
    (``keeps_order``).
    """
    known = [trial for trial in trials if math.isfinite(trial.value)]
    if criterion == "auc_mixed":
        return max((t for t in known if t.keeps_order), key=lambda t: t.value).temperature
    return next(t.temperature for t in known if t.loss <= 0 or t.loss <= t.loss_error)  # nan is neither


def has_grades(data: Prepared) -> bool:
    """Whether an event of the validation period is graded."""
    return any(len(chunk.grade) for chunk in chunks(data, period="valid"))


def value_setting(
    data: Prepared, criterion: Criterion, options: OffPolicyOptions, reward: RewardFunction, k: int
) -> OffPolicySetting | None:
    """The estimator of off-policy values; None if the log has no propensities."""
    if options.propensity == "logged" and not propensity_share(data, "valid"):
        if criterion in ("top_k", "policy"):
            raise RecpoError(
                f"criterion {criterion} needs propensities, and the validation period of {data.root} has none: take "
                "auc, name a monitor_reward, or set off_policy.propensity to uniform or estimated",
                code="missing_column",
                field="propensity",
            )
        return None
    return off_policy_setting(options, data, "valid", reward, [min(k, data.num_items)])


#: scores of items that are kept for all temperatures: 64 MiB of the base, and as much of what tilts it
_SCORES_AT_ONCE: Final = 1 << 24
#: criteria that are ranks of held-out events, by the name of their metric
_RANKS: Final = {"auc": "AUC_other", "auc_mixed": "AUC_mixed"}
#: the criterion that is the NDCG of the lists of k
NDCG: Final = "ndcg"
#: criteria whose metric of users, or target of an off-policy value, has another name
_METRICS: Final = _RANKS | {NDCG: "NDCG@{k}", "top_k": "top_{k}", "policy": POLICY}


class _Measured(NamedTuple):
    """One pass over the validation period."""

    temperature: float
    ranking: RankingResult
    off_policy: OffPolicyResult | None

    def value(self, metric: str) -> tuple[float, float]:
        """The mean of a metric over the users, or the off-policy value of a target, and half of its interval."""
        if metric in self.ranking.per_user:
            mean = self.ranking.estimate(metric)
            return mean.mean, mean.half_width
        return snips_of(self.off_policy, metric)

    def above(self, other: _Measured, metric: str) -> tuple[float, float]:
        """How much higher this value is on the same users, and the standard error of that difference."""
        if metric in self.ranking.per_user:
            mean = self.ranking.difference(other.ranking, metric)
            return mean.mean, mean.half_width / Z95
        differences = self.off_policy.differences(other.off_policy) if self.off_policy and other.off_policy else ()
        for found in differences:
            if (found.target, found.estimator) == (metric, SNIPS.name):
                return found.value, found.standard_error
        return math.nan, math.nan


@dataclass(frozen=True)
class TemperatureTrials:
    """The data and options that all temperatures share."""

    data: Prepared
    criterion: Criterion
    k: int
    setting: OffPolicySetting | None
    held_out: Factors | None
    candidates: Candidates | None
    monitor_reward: RewardFunction | None
    batch_size: int
    max_users: int | None
    device: torch.device

    def trials(
        self,
        base: Policy,
        tilts: Callable[[Policy, float], Policy],
        temperatures: Sequence[float],
        progress: bool,
    ) -> tuple[TiltTrial, ...]:
        """The base and every temperature, descending.

        Args:
            base: what is tilted.
            tilts: tilts it, at a temperature.
            temperatures: what to try.
            progress: show a progress bar on a terminal.

        Raises:
            RecpoError: no user of the validation period gives a value for a temperature.
        """
        users = held_out_users(self.data, "valid", self.max_users)
        hidden, total = None if progress else True, users * (1 + len(temperatures))
        with tqdm(total=total, desc="tilt", unit="user", disable=hidden) as bar:
            found = self._measured(base, [math.inf], bar)
            found += self._measured(tilts(base, temperatures[0]), temperatures, bar)
        metric = _METRICS.get(self.criterion, self.criterion).format(k=self.k)
        values = [one.value(metric) for one in found]
        auc_losses = self._auc_losses(found)
        keeping = [place for place, (loss, error) in enumerate(auc_losses) if place and not loss > error]
        best = max(keeping or [0], key=lambda place: or_least(values[place][0]))
        if not math.isfinite(values[best][0]):
            raise RecpoError(
                f"the validation period of {self.data.root} gives no value to a temperature by the criterion "
                f"{self.criterion}: it is undefined for every user; name another criterion, or a temperature",
                code="empty",
                field="criterion",
            )
        losses = [(0.0, 0.0) if one is found[best] else found[best].above(one, metric) for one in found]
        return tuple(map(self._trial, found, values, losses, auc_losses))

    def _measured(self, policy: Policy, temperatures: Sequence[float], bar: Any) -> list[_Measured]:
        """One pass over the validation period, in which the temperatures of a policy share what they read."""
        policy = policy.to(self.device).eval()
        values = [None if self.setting is None else self.setting.measure() for _ in temperatures]
        # of estimates, only the ranks within a user are used
        scores = self.criterion in _RANKS or (policy.has_exact_log_prob and self.criterion != NDCG)
        passes = [
            RankingPass(
                Recommender(policy.recommend, policy.log_prob if scores else None, f"temperature {temperature:g}"),
                Ranking(num_items=self.data.num_items, ks=[self.k], candidates=self.candidates),
                self._measures(policy, value),
            )
            for temperature, value in zip(temperatures, values, strict=True)
        ]
        size = max(1, min(self.batch_size, _SCORES_AT_ONCE // self.data.num_items))
        for batch in evaluation_batches(
            self.data.root, "valid", policy.max_history, size, policy.reads, max_users=self.max_users
        ):
            shown = on_device(batch, self.device)
            with policy.caching_histories() if isinstance(policy, PolicyWithBase) else nullcontext():
                for temperature, one in zip(temperatures, passes, strict=True):
                    if isinstance(policy, PolicyWithBase):
                        policy.temperature = temperature
                    one.add(shown)
            bar.update(len(batch.exclude) * len(passes))
        return [
            _Measured(temperature, one.result(), None if value is None else value.result())
            for temperature, one, value in zip(temperatures, passes, values, strict=True)
        ]

    def _measures(self, policy: Policy, value: Measure | None) -> list[Measure]:
        measures: list[Measure] = [_Divergence(policy)] if isinstance(policy, PolicyWithBase) else []
        measures += [_MonitorReward(self.monitor_reward, self.k)] if self.monitor_reward is not None else []
        measures += [] if self.held_out is None else [_Grade(self.held_out.to(self.device), self.k)]
        return measures if value is None else [*measures, value]

    def _auc_losses(self, found: Sequence[_Measured]) -> list[tuple[float, float]]:
        """``auc_loss`` of every temperature, and its standard error."""
        if self.criterion != "auc_mixed":
            return [(math.nan, math.nan)] * len(found)
        best = max(found, key=lambda one: or_least(one.value("AUC_other")[0]))
        return [best.above(one, "AUC_other") for one in found]

    def _trial(
        self, one: _Measured, value: tuple[float, float], loss: tuple[float, float], auc_loss: tuple[float, float]
    ) -> TiltTrial:
        of_list = None if one.off_policy is None else one.off_policy.estimate(f"top_{self.k}", SNIPS.name)
        return TiltTrial(
            one.temperature,
            *value,
            *loss,
            *auc_loss,
            top_k=one.value(f"top_{self.k}")[0],
            policy=one.value(POLICY)[0],
            grade=one.value("grade")[0],
            auc=one.value("AUC_other")[0],
            auc_mixed=one.value("AUC_mixed")[0],
            monitor_reward=one.value("monitor_reward")[0],
            effective_rows=math.nan if of_list is None else of_list.effective_sample_size,
            kl=0.0 if one.temperature == math.inf else one.value("kl")[0],
            ndcg=one.value(f"NDCG@{self.k}")[0],
            coverage=one.ranking.totals[f"coverage@{self.k}"],
        )


@dataclass(frozen=True)
class _Divergence(Measure):
    """Adds ``kl``, the divergence of a tilted policy from its base."""

    policy: PolicyWithBase

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """See ``Measure.update``."""
        return {"kl": self.policy.kl_from_base(observed.batch.feedback.histories)}


@dataclass(frozen=True)
class _Grade(Measure):
    """Adds ``grade``, the mean expected grade of the first k places by ``factors``; nan for unknown users."""

    factors: Factors
    k: int

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """See ``Measure.update``."""
        assert self.factors.user_factors is not None
        items, known = observed.lists.item_ids[:, : self.k], observed.batch.feedback.slates.grade
        grades = self.factors.grades(self.factors.user_factors[observed.batch.user_ids], items)
        mean = grades.masked_fill(items == 0, torch.nan).nanmean(1)
        assert known is not None
        return {"grade": mean.masked_fill(known.isnan().all(1), torch.nan)}


@dataclass(frozen=True)
class _MonitorReward(Measure):
    """Adds ``monitor_reward``, the mean reward of the first k places; nan if no item of a list has a reward."""

    reward: RewardFunction
    k: int

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """See ``Measure.update``."""
        batch, items = observed.batch.feedback, observed.lists.item_ids[:, : self.k]
        slates = Slates(items, batch.histories.lengths[:, None].expand_as(items), items > 0)
        return {"monitor_reward": self.reward(batch, slates).float().nanmean(1)}


@dataclass(frozen=True)
class TiltBase:
    """What is tilted: the policy of a run, or a baseline that was fitted on prepared data.

    Attributes:
        name: of the run or the baseline.
        policy: the policy.
        configuration: ``class_path`` and ``init_args`` of the policy.
        source: the run, or the prepared data.
        checkpoint: which one of the run; None = a baseline.
    """

    name: str
    policy: Policy
    configuration: Mapping[str, Any]
    source: Run | Prepared
    checkpoint: Checkpoint | None

    @classmethod
    def of_run(cls, run: Run, checkpoint: Checkpoint) -> TiltBase:
        """The policy of a checkpoint of a run."""
        configuration = read_yaml(run.root / Run.RESOLVED, Run.remedy())["policy"]
        return cls(run.root.resolve().name, run.policy(checkpoint), configuration, run, checkpoint)

    def write_files(self, root: Path) -> None:
        """Writes the files of a run that do not depend on the tilt: items, feedback, codes and features."""
        if isinstance(self.source, Prepared):
            run.write_items(root, self.source)
            run.write_features(root, self.policy, self.source)
            return
        for name in self.source.files:
            if name not in (Run.RESOLVED, Run.ORIGIN) and not name.startswith(Run.CHECKPOINTS):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.source.root / name, root / name)

    @property
    def origin(self) -> dict[str, Any]:
        """Its entries of ``origin.json``."""
        if isinstance(self.source, Prepared):
            return {"data": run.data_facts(self.source), "tilted": {"baseline": self.name}}
        assert self.checkpoint is not None
        weights = self.source.checkpoint_files(self.checkpoint)
        tilted = {"run": self.name, "checkpoint": self.checkpoint, "weights": weights}
        return {"data": self.source.origin.get("data"), "tilted": tilted}


def write_tilted(
    root: Path,
    policy: PolicyWithBase,
    base: TiltBase,
    by: ByFactors | ByBaseline,
    how: TiltResult,
    data: Prepared | None,
) -> None:
    """Writes the files of a run into ``root``; nothing of the base or what tilts it is needed afterwards.

    Args:
        root: the directory of the run.
        policy: the tilted policy.
        base: what it was made from.
        by: what tilted it.
        how: how the temperature was chosen.
        data: its prepared data, which factors that read features of users need; None = they read none.
    """
    base.write_files(root)
    if data is not None and by.user_features:
        run.write_features(root, policy, data)
    arguments = {"base": dict(base.configuration), **by.arguments(policy), "temperature": policy.temperature}
    arguments |= {"candidates": by.candidates} if isinstance(policy, RerankedPolicy | RerankedProductPolicy) else {}
    own = f"{type(policy).__module__}.{type(policy).__qualname__}"
    run.write_configuration(root, {"policy": {"class_path": own, "init_args": arguments}})
    origin = {
        "format_version": Run.version,
        "contexts_per_step": 0,  # because nothing was trained
        **base.origin,
        "tilted_by": by.facts,
        "choice": {
            "temperature": how.temperature,
            "lower_bound": how.lower_bound,
            "criterion": how.criterion,
            "k": how.k,
            "trials": [_finite(t) for t in how.trials],
        },
    }
    write_json(root / Run.ORIGIN, origin)
    (root / Run.CHECKPOINTS).mkdir()
    state = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    with run.checkpoint_path(root).open("wb") as file:  # torch itself does not report a full disk
        torch.save({"state_dict": state}, file)
    numbers: dict[str, float | None] = {"temperature": how.temperature}
    for trial in how.trials:
        numbers = _finite(trial) if trial.temperature == how.temperature else numbers
    results = {f"tilt/{name}": value for name, value in numbers.items()}
    run.mark_finished(root, policy, base.source, results, how.criterion)


def _finite(trial: TiltTrial) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(trial).items()}
