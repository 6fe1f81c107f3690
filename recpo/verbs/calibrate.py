"""The verb ``calibrate``: calibrates reward models and compares rewards on later data."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from recpo.artifacts.checksums import kind_of, seal
from recpo.artifacts.outputs import write_json
from recpo.base.contracts import Objective, RewardFunction
from recpo.base.errors import RecpoError
from recpo.base.types import FeedbackBatch
from recpo.evaluation import calibration
from recpo.log.prepared import Prepared
from recpo.objectives.reward_model import TARGETS, PointwiseReward
from recpo.rewards.rewards import FactorReward, validate_identity
from recpo.training.learned_reward import CALIBRATION, Checkpoint, LearnedReward, load_reward_model
from recpo.training.run import Run
from recpo.verbs.contenders import ModelOptions, directory_names
from recpo.verbs.verb import Verb, compute_device, function_of

Source = RewardFunction | Run | str | Path

_DISLIKE = TARGETS.index("dislike")


@dataclass(frozen=True)
class Calibrate(calibration.CalibrationOptions, ModelOptions, Verb[calibration.CalibrationReport]):
    """Calibrates reward models on the validation period and compares rewards on the test period.

    For every run of the ``PointwiseReward`` objective, fits ``sigmoid(scale * score + shift)`` (Platt, 1999) to the
    exposures of the validation period, for the grade and for dislikes, and writes it into the run (calibration.json),
    where ``LearnedReward`` reads it. Then measures every reward on the exposures of the test period, scored from what
    was known at the start of the period, and on the random exposures among them: root mean squared error of the grade
    (after a linear fit on the validation period, so that units do not matter), Spearman's rank correlation with the
    grade over all exposures and within users, and the AUC of dislikes if the reward has a head for them. Finally
    measures the value of its greedy lists, the k items with the highest reward for each user without the user's past
    items: estimated from the log (SNIPS with logged propensities) and, for a simulated log, the true value.

    ::

        report = recpo.calibrate(data, {"encoder": "runs/reward_model", "factors": "factors"}, truth="world")
        report.to_pandas()

    Raises:
        RecpoError: an entry of rewards is not a reward or knows other items, a period has no graded exposure, or an
            option is out of range.
    """

    first_day: ClassVar = ("prepared", "rewards", "truth", "out", "k")

    prepared: Prepared | Path | str
    """prepared data, or its directory"""
    rewards: Sequence[Source] | Source | Mapping[str, Source] = ()
    """rewards to compare: runs of reward models, directories of ``recpo factorize`` (users are folded in from their
    history), or reward functions; one, several, or several by name"""
    _: KW_ONLY
    out: Path | str | None = None
    """JSON file for the comparison; None = none"""

    def execute(self) -> calibration.CalibrationReport:
        """Calibrates the runs, then compares all rewards."""
        data = Prepared.open(self.prepared)
        models = self.part(ModelOptions)
        opened = {name: _opened(source, data, models) for name, source in _named(self.rewards).items()}
        shared = calibration.RewardComparison.of(data, self, compute_device(self.device))
        calibrations = {
            name: _calibrate_run(one, shared, self.checkpoint)
            for name, one in opened.items()
            if isinstance(one, Run) and isinstance(one.option("objective", Objective), PointwiseReward)
        }
        content = shared.compare({name: _compared(one, models) for name, one in opened.items()})
        if self.out is not None:
            write_json(Path(self.out), content)
        return calibration.CalibrationReport(content, calibrations, None if self.out is None else Path(self.out))


calibrate = function_of(Calibrate)


def _named(rewards: Source | Sequence[Source] | Mapping[str, Source]) -> dict[str, Source]:
    """Directories by ``directory_names``; reward functions by their class, with a number if there are several of it."""
    if isinstance(rewards, Mapping):
        named = dict(rewards)
    else:
        single = isinstance(rewards, RewardFunction | Run | Path | str)
        sources: list[Source] = [rewards] if single else list(rewards)  # type: ignore[list-item, arg-type]
        paths = [_directory(source) for source in sources]
        names = directory_names([path for path in paths if path is not None])
        classes = [type(source).__name__ for source in sources]
        named = {}
        for number, (source, path, name) in enumerate(zip(sources, paths, classes, strict=True), 1):
            own = f"{name} {classes[:number].count(name)}" if classes.count(name) > 1 else name
            named[own if path is None else names[path]] = source
    if not named:
        raise RecpoError(
            "nothing to calibrate: name at least one run of a reward model, one directory of factors, or one reward",
            code="empty",
            field="rewards",
        )
    return named


def _directory(source: Source) -> Path | None:
    if isinstance(source, RewardFunction):
        return None
    return (source.root if isinstance(source, Run) else Path(source)).resolve()


def _opened(source: Source, data: Prepared, options: ModelOptions) -> RewardFunction | Run:
    """A run or a reward function of the same items, checked before any of them is used."""
    if isinstance(source, str | Path):
        is_factors = kind_of(Path(source)) == "factors"
        source = FactorReward(Path(source), users="folded") if is_factors else Run.open(source, options.trust)
    if isinstance(source, Run):
        source.validate_data(data)
        _learned(source, options, calibrated=False)  # raises if it is no reward model
    else:
        validate_identity(source, type(source).__name__, data)
    return source


def _learned(run: Run, options: ModelOptions, calibrated: bool = True) -> LearnedReward:
    return LearnedReward(run.root, calibrated=calibrated, checkpoint=options.checkpoint, trust=tuple(options.trust))


def _compared(opened: RewardFunction | Run, options: ModelOptions) -> calibration.ComparedReward:
    reward = _learned(opened, options) if isinstance(opened, Run) else opened
    if not isinstance(reward, LearnedReward) or not reward.predicts_dislikes:
        return calibration.ComparedReward(reward)
    return calibration.ComparedReward(
        reward, lambda feedback: reward.predictions(feedback, feedback.slates)[..., _DISLIKE]
    )


def _calibrate_run(run: Run, shared: calibration.RewardComparison, checkpoint: Checkpoint) -> dict[str, Any]:
    """Fits the calibration of a run of ``PointwiseReward`` and writes it into the run."""
    model = load_reward_model(run, checkpoint).to(shared.device)
    assert isinstance(model.objective, PointwiseReward)
    model.objective = objective = model.objective.for_behaviors(shared.data.behaviors)

    def columns(feedback: FeedbackBatch) -> list[Tensor]:
        slates = feedback.slates
        assert slates.grade is not None
        assert slates.dislike is not None
        targets, known = objective.targets(slates.grade, slates.dislike, slates.behaviors, slates.positive)
        return [model(feedback.histories, slates).double(), targets.double(), known]

    valid, test = (calibration.Exposures(*shared.exposures(split, columns)) for split in ("valid", "test"))
    resampling = {"resamples": shared.options.resamples, "seed": shared.options.seed}
    content = {
        "checkpoint": checkpoint,
        "weights": run.checkpoint_files(checkpoint),
        **calibration.calibrate_targets(objective.target_names, valid, test, **resampling),
    }
    write_json(run.root / CALIBRATION, seal(content))
    return content
