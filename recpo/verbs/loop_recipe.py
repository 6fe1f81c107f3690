"""The training of a round of the loop: a list of training configurations that start from each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from jsonargparse import ArgumentError

from recpo.artifacts import kind_of, read_yaml
from recpo.base.errors import RecpoError
from recpo.log.prepared import Prepared
from recpo.policies.tilted import validate_temperature
from recpo.rewards.factors import Factors
from recpo.training.fit import as_arguments, train_parser
from recpo.training.run import FINISHED, RESOLVED, Run, checkpoint_path
from recpo.verbs.factorize import factorize
from recpo.verbs.tilt import tilt
from recpo.verbs.train import train

FACTORS: Final = "factors"
RUNS: Final = "runs"

_REWARD: Final = "FactorReward"
_DEFAULT_OBJECTIVE: Final = "Likelihood"


@dataclass(frozen=True)
class Recipe:
    """The training of a round's policy.

    Attributes:
        configs: contents of training configurations. The first starts from its own run of the previous round if
            ``warm_start`` is set and the items are the same, otherwise from scratch; each of the others starts from the
            run of the one before it in the same round.
        tilt: temperature with which the last policy is tilted by a factorization of the round; "auto" = selected on the
            validation period, where the untilted policy may be the best; None = not tilted.
        warm_start: see ``configs``.
        warm_epochs: epochs of the first configuration after a warm start; None = as configured.
    """

    configs: tuple[Mapping[str, Any], ...]
    tilt: float | Literal["auto"] | None = None
    warm_start: bool = True
    warm_epochs: int | None = None

    @classmethod
    def of(
        cls,
        named: Sequence[Path | str | Mapping[str, Any]],
        tilt: float | Literal["auto"] | None,
        warm_start: bool,
        warm_epochs: int | None,
    ) -> Recipe:
        """Reads the configurations. Options that the loop sets itself (``data.prepared``, ...) are dropped.

        Raises:
            RecpoError: there are none, one cannot be read, or an option is out of range.
        """
        if isinstance(named, str | Path | Mapping) or not named:
            raise RecpoError(
                f"loop: recipe is {named!r}, expected a list of training configurations, such as "
                "[configs/pretrain.yaml, configs/mpo.yaml]",
                code="wrong_type",
                field="recipe",
            )
        if tilt is not None and tilt != "auto":
            validate_temperature(float(tilt))
        if warm_epochs is not None and warm_epochs < 1:
            raise RecpoError(
                f"loop: warm_epochs is {warm_epochs}, expected at least 1, or null",
                code="out_of_range",
                field="warm_epochs",
            )
        configs = tuple(_own_part(one) for one in named)
        for number, config in enumerate(configs):
            _validate(number, config)
        return cls(configs, tilt, warm_start, warm_epochs)

    @property
    def needs_factors(self) -> bool:
        """Whether a reward or the tilt reads a factorization of each round's log."""
        return self.tilt is not None or any(_factor_rewards(config) for config in self.configs)

    @property
    def names(self) -> list[str]:
        """Directories of the runs: number and objective of every configuration."""
        return [f"{number}-{_objective(config)}" for number, config in enumerate(self.configs)]

    def train(
        self, root: Path, data: Prepared, before: Path | None, *, seed: int, trust: Sequence[str], progress: bool
    ) -> Training:
        """Trains the policy of a round. Completed parts are not repeated.

        Args:
            root: directory of the round.
            data: its prepared log.
            before: directory of the previous round; None = this is the first one.
            seed: seed of all random numbers.
            trust: packages whose classes the configurations may name.
            progress: show progress bars on a terminal.
        """
        factors = self._factors(root / FACTORS, data, seed, progress) if self.needs_factors else None
        start = self._start(data, before, trust)
        run = start
        for number, (name, given) in enumerate(zip(self.names, self.configs, strict=True)):
            config = _with_factors(given, root / FACTORS)
            options: dict[str, Any] = {"seed": seed, "data.seed": seed, "progress": progress}
            if number == 0 and start is not None and self.warm_epochs is not None:
                options["trainer.max_epochs"] = self.warm_epochs
            run = _trained(root / RUNS / name, data, config, run, options, trust)
        assert run is not None
        if self.tilt is not None:
            assert factors is not None
            run = self._tilted(root / RUNS / "tilted", run, factors, data, trust, progress)
        return Training(run, start is not None)

    def _start(self, data: Prepared, before: Path | None, trust: Sequence[str]) -> Run | None:
        """The run of the previous round that the first configuration starts from; None = it starts from scratch."""
        if before is None or not self.warm_start:
            return None
        run = Run.open(before / RUNS / self.names[0], trust)
        return run if run.items.equals(data.item_ids()) else None

    @staticmethod
    def _factors(out: Path, data: Prepared, seed: int, progress: bool) -> Factors:
        if kind_of(out) == "factors":
            return Factors.open(out)
        return factorize(data, out, seed=seed, progress=progress)

    def _tilted(
        self, out: Path, run: Run, factors: Factors, data: Prepared, trust: Sequence[str], progress: bool
    ) -> Run:
        if (out / FINISHED).is_file():
            return Run.open(out, trust)
        temperature = self.tilt if self.tilt is not None else "auto"
        tilted = tilt(run, factors, data, out=out, temperature=temperature, trust=trust, progress=progress).run
        return run if tilted is None else tilted


@dataclass(frozen=True)
class Training:
    """The result of a round's training.

    Attributes:
        run: the policy that serves next.
        warm_start: whether its first run started from the previous round.
    """

    run: Run
    warm_start: bool


def _trained(
    out: Path, data: Prepared, config: Mapping[str, Any], start: Run | None, options: Mapping[str, Any], trust: Any
) -> Run:
    """A finished run, a run that continues from its last checkpoint, or a new run."""
    if (out / FINISHED).is_file():
        return Run.open(out, trust)
    goes_on = checkpoint_path(out, "last").exists()
    again = not goes_on and (out / RESOLVED).is_file()
    return train(data, config=config, out=out, init_from=start, resume=goes_on, overwrite=again, trust=trust, **options)


def _own_part(named: Path | str | Mapping[str, Any]) -> Mapping[str, Any]:
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
            f"loop: recipe, configuration {number} ({_objective(config)}): {error}", code="bad_value", field="recipe"
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
