"""The verb ``tilt``: combines a policy with a second model, at a temperature chosen on held-out users."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, Literal

import torch

from recpo.artifacts.outputs import output_directory, validate_output_directory
from recpo.base.contracts import RewardFunction
from recpo.base.errors import NonNegativeFloat, PositiveFloat, PositiveInt, RecpoError
from recpo.evaluation.candidates import candidates_of
from recpo.evaluation.contenders import BaselineOptions
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.log.prepared import Prepared
from recpo.policies.grade_factors import validate_temperature
from recpo.policies.tilted import PolicyWithBase
from recpo.rewards.factors import Factors
from recpo.rewards.graded import FactorOptions
from recpo.rewards.rewards import LoggedReward, validate_identity
from recpo.rewards.selection import fit_factors
from recpo.training import tilting
from recpo.training.run import Run
from recpo.verbs.contenders import SERVED, ModelOptions, is_baseline, served_baseline, validate_factors
from recpo.verbs.verb import WritingVerb, compute_device, function_of

#: Baselines that can be tilted: the policies among them that are no grades themselves.
_TILTED: Final = tuple(name for name in SERVED if name != "factorization")
#: Factors of the events of the validation period, which grade the lists of every temperature.
_HELD_OUT: Final = FactorOptions(period="valid", uncertainty=False, lower_bound=0.0)


@dataclass(frozen=True)
class Tilt(ModelOptions, WritingVerb[tilting.TiltResult]):
    """Tilts a policy toward the grades of a factor model, or the scores of a baseline, and writes it as a run.

    The new run is self-contained: ``evaluate``, ``export``, ``recommend`` and ``recpo.load`` take it like any other
    run. Its policy is ``pi(i | h) ∝ base(i | h) exp(grade(h, i) / temperature)``, the optimum of ``E_pi[grade] -
    temperature KL(pi || base)``. Logs of positives alone have no grades: sequential rules, which remember what followed
    which, take their place (docs/training.md#sequential-rules).

    If temperature is auto and no temperature is better than the untilted policy, nothing is written.

    Raises:
        RecpoError: run, factors and data have different items; the run is already tilted; options are out of range; no
            user gives a value for a temperature; ``out`` exists.
    """

    first_day: ClassVar = ("run", "factors", "prepared", "out", "temperature", "lower_bound", "criterion")

    run: Run | Path | str
    """the run to tilt, its directory, or the name of a baseline that is a policy: allrank, implicit_als, ease,
    popularity and others (``recpo export``). Tilted AllRank, which knows who was shown what, is the best policy of
    sparse logs that we measured (docs/serving.md)"""
    factors: Factors | Path | str
    """factors that ``recpo factorize`` fitted for the same items, their directory, or the name of a baseline whose
    scores take the place of grades, e.g. sequential_rules"""
    prepared: Prepared | Path | str | None = None
    """prepared data of the same items. Temperature is chosen on its validation period, by lists of the items that were
    candidates at its start; null = temperature is given, and the factors read no features of users"""
    _: KW_ONLY
    out: Path | str
    """output run directory"""
    temperature: float | Literal["auto"] = "auto"
    """difference in grade that moves the log-odds of two items by 1; auto = with the criterion auc_mixed, the best one
    of those that rank a user's own exposures as well as any, within one standard error; with another criterion, the
    largest (the closest to the base) whose value is within one standard error of the best. The error is that of the
    difference on the same users; the untilted policy counts as an infinite temperature. A number is written whatever
    its value"""
    temperatures: Sequence[PositiveFloat] | None = None
    """values to try if temperature is auto; null = 0.0125 to 0.4, or to 0.2 with a baseline"""
    criterion: tilting.Criterion | None = None
    """value of a temperature: auc_mixed (mean per-user AUC of positives against other exposures, with positives against
    items never shown), auc (the first of the two), ndcg (of its lists, on logged positives), grade (mean grade of its
    lists, as a factorization of the validation period's own events predicts it; it shares no noise with the factors),
    top_k (off-policy value of its lists, SNIPS), policy (of items drawn from it) or monitor_reward. null =
    monitor_reward if it is given, else ndcg with a baseline and auc_mixed with factors"""
    k: PositiveInt = 10
    """list length"""
    candidates: PositiveInt = 200
    """for policies of semantic ids, how many items of the beam are re-ranked"""
    lower_bound: NonNegativeFloat = 0.0
    """number of standard deviations to subtract from the grade, so that items with few events are listed less often.
    Each request then costs a second product with the catalog, of ``(r + 1) (r + 2)`` columns"""
    off_policy: OffPolicyOptions = OffPolicyOptions()  # noqa: RUF009  frozen
    """how values are estimated from the log"""
    reward: RewardFunction = LoggedReward()  # noqa: RUF009  frozen
    """reward of logged items, for the off-policy value"""
    monitor_reward: RewardFunction | None = None
    """scores the lists; prefer a reward that the factors do not use"""
    baseline_cache: Path | str | None = None
    """directory of fitted baselines, as in ``recpo evaluate``; null = a baseline is fitted again"""
    baseline_options: BaselineOptions = BaselineOptions()  # noqa: RUF009  frozen
    """options of the baselines"""
    batch_size: PositiveInt = 512
    """users scored at once"""
    max_users: PositiveInt | None = 5000
    """number of validation users, evenly spaced, on which temperatures are tried; null = all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._temperatures:
            raise RecpoError(
                "temperatures is empty: name at least one number above 0, or temperature",
                code="empty",
                field="temperatures",
            )
        for one in self._temperatures:
            validate_temperature(one)
        if self.lower_bound and self._by_baseline:
            raise RecpoError(
                f"{self.factors} gives scores without standard deviations: leave lower_bound out, or name factors",
                code="unused_option",
                field="lower_bound",
            )

    @property
    def _temperatures(self) -> Sequence[float]:
        if self.temperature != "auto":
            return [float(self.temperature)]
        default = tilting.TEMPERATURES_OF_SCORES if self._by_baseline else tilting.TEMPERATURES
        return sorted({*map(float, default if self.temperatures is None else self.temperatures)}, reverse=True)

    @property
    def _by_baseline(self) -> bool:
        return str(self.factors) in _TILTED

    def execute(self) -> tilting.TiltResult:
        """Tries every temperature on the validation period, then writes the run."""
        data = None if self.prepared is None else Prepared.open(self.prepared)
        factors = None if self._by_baseline else Factors.open(self.factors)
        inputs = [one for one in (self.run, self.prepared, self.factors) if str(one) not in _TILTED]
        validate_output_directory(self.out, kind="run", overwrite=self.overwrite, inputs=inputs)
        by = self._by(data, factors)
        base = self._base(data, factors, by.user_features)
        measures = data is not None and data.holds_out
        if self.temperature == "auto" and not measures:
            raise RecpoError(
                "temperature is auto, and there is no validation period to choose it on: name prepared data that hold "
                "one out, or give a temperature",
                code="missing_option",
                field="prepared",
            )
        used: tilting.Criterion | None = None
        trials: tuple[tilting.TiltTrial, ...] = ()
        if data is not None and measures:
            shared, device = self._trials(data), compute_device(self.device)
            used, options = shared.criterion, (self._temperatures, self.progress)
            trials = shared.trials(base.policy.to(device), by.to(device), *options)
        chosen = tilting.chosen_temperature(trials, used) if self.temperature == "auto" else float(self.temperature)
        result = tilting.TiltResult(None, chosen, self.lower_bound, used, self.k, trials)
        if chosen == math.inf:
            return result
        with output_directory(self.out, kind="run", overwrite=self.overwrite, inputs=inputs) as target:
            tilting.write_tilted(target, by.to(torch.device("cpu"))(base.policy.cpu(), chosen), base, by, result, data)
        return replace(result, run=Run.open(self.out, self.trust))

    def _by(self, data: Prepared | None, factors: Factors | None) -> tilting.ByFactors | tilting.ByBaseline:
        """What tilts."""
        if factors is not None:
            return tilting.ByFactors(factors, self.candidates, self.lower_bound)
        named = str(self.factors)
        data = self._for_baseline(named, data)
        served = served_baseline(named, data, self.baseline_cache, self.baseline_options)
        return tilting.ByBaseline(named, served.policy.eval(), served.configuration, self.candidates)

    def _base(self, data: Prepared | None, factors: Factors | None, reads_users: bool) -> tilting.TiltBase:
        """What is tilted, after everything that is given was checked."""
        named = self.run
        if not isinstance(named, Run) and is_baseline(named):
            return self._baseline(str(named), data, factors)
        run = Run.open(named, self.trust)
        if factors is not None:
            factors.validate_feedback(run.feedback, run.root)
            factors.validate_items(run.catalog_checksum, run.root)
        if data is None and reads_users:
            raise RecpoError(
                "what tilts it reads features of users, whose vocabularies are in the prepared data: name them",
                code="missing_option",
                field="prepared",
            )
        base = tilting.TiltBase.of_run(run, self.checkpoint)
        if isinstance(base.policy, PolicyWithBase):
            raise RecpoError(
                f"{run.root} is tilted already: name the run that it was made from",
                code="unsupported",
                field="run",
            )
        if data is not None and reads_users and run.features_that_differ(base.policy, data):
            raise RecpoError(
                f"{data.root} has other vocabularies or means of features than those that {run.root} was trained "
                "with, and what tilts it reads its features of users: train the run on these data, or tilt by what "
                "reads none",
                code="mismatch",
                field="user_features",
            )
        if data is not None:
            run.validate_data(data)
            if factors is not None:
                factors.validate_features(data)
        return base

    def _baseline(self, named: str, data: Prepared | None, factors: Factors | None) -> tilting.TiltBase:
        if named not in _TILTED:
            raise RecpoError(
                f"{named} is no policy to tilt: name a run, or one of {', '.join(_TILTED)}",
                code="unsupported",
                field="run",
            )
        data = self._for_baseline(named, data)
        if factors is not None:
            validate_factors(factors, data)
        served = served_baseline(named, data, self.baseline_cache, self.baseline_options)
        return tilting.TiltBase(named, served.policy.eval(), served.configuration, data, None)

    @staticmethod
    def _for_baseline(named: str, data: Prepared | None) -> Prepared:
        if data is None:
            raise RecpoError(
                f"{named} is a baseline, which is fitted on prepared data: name them",
                code="missing_option",
                field="prepared",
            )
        return data

    def _trials(self, data: Prepared) -> tilting.TemperatureTrials:
        """What all temperatures are measured with."""
        if self.monitor_reward is not None:
            validate_identity(self.monitor_reward, "monitor_reward", data)
        graded = tilting.has_grades(data)
        default: tilting.Criterion = tilting.NDCG if self._by_baseline else "auc_mixed"
        criterion = self.criterion or ("monitor_reward" if self.monitor_reward is not None else default)
        return tilting.TemperatureTrials(
            data,
            criterion,
            k=min(self.k, data.num_items),
            setting=tilting.value_setting(data, criterion, self.off_policy, self.reward, self.k),
            held_out=fit_factors(data, _HELD_OUT) if graded or criterion == "grade" else None,
            candidates=candidates_of(data, "valid", None),
            monitor_reward=self.monitor_reward,
            batch_size=self.batch_size,
            max_users=self.max_users,
            device=compute_device(self.device),
        )


tilt = function_of(Tilt)
