"""The verb ``train``: pre-trains or aligns a policy; only the objective differs.

Its options are ``TrainOptions`` and where a run goes and starts from. They are a tree of class paths that is recorded
before anything is built, so ``Train`` holds the parsed tree instead of a field for each option.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch.callbacks import Callback

from recpo.artifacts.documents import as_configuration
from recpo.base.contracts import Objective, Policy, RewardFunction
from recpo.base.errors import RecpoError, range_error
from recpo.log.prepared import Prepared
from recpo.training.fit import as_arguments, parse_arguments, resolved, run_configuration, train_parser
from recpo.training.run import Run, checkpoint_path
from recpo.verbs.tracking import metrics_of_training, run_tracked
from recpo.verbs.verb import Verb


@dataclass(frozen=True)
class Train(Verb[Run]):
    """Trains a policy on prepared data, or aligns a trained one."""

    first_day: ClassVar = ("data", "out", "objective", "policy", "init_from", "reward", "advantage", "trainer", "seed")

    configuration: Namespace
    """every option, as ``parse_arguments`` gives them"""
    callbacks: Sequence[Callback] = ()
    """further callbacks, which observe training"""

    @classmethod
    def parser(cls) -> ArgumentParser:
        """The parser of the options."""
        return train_parser()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        """The training that a command line describes."""
        return cls(parse_arguments(words))

    def execute(self) -> Run:
        """Checks everything before it changes ``out``, and trains."""
        return run_configuration(self.configuration, self.callbacks, metrics_of_training())

    def recorded(self) -> dict[str, Any]:
        """Every option, including defaults, as ``resolved.yaml`` of the run has it."""
        return resolved(self.configuration)


def train(
    data: Prepared | Path | str | None = None,
    *,
    config: Path | str | Mapping[str, Any] | Sequence[Path | str] | None = None,
    out: Path | str,
    objective: Objective | type | Mapping[str, Any] | str | None = None,
    policy: Callable[[int], Policy] | Mapping[str, Any] | str | None = None,
    reward: RewardFunction | Mapping[str, Any] | str | None = None,
    init_from: Run | Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Run:
    """Trains a policy on prepared data, or aligns a trained one.

    The same options give the same run as ``recpo train``, and the ``resolved.yaml`` in it reproduces it. Without
    ``config``, a ``CatalogSoftmaxPolicy`` is pre-trained (``Likelihood``).

    ::

        base = recpo.train(data, out="runs/pretrain", trainer={"max_epochs": 5})
        run = recpo.train(data, objective=recpo.GBPO(), init_from=base, out="runs/gbpo", trainer={"max_epochs": 3})

    Args:
        data: prepared directory; None = ``data.prepared`` of ``config``.
        config: YAML file, or its content; several files: each changes what those before it say.
        out: output run directory.
        objective: the objective to minimize.
        policy: the policy to train: a class path, ``functools.partial(CatalogSoftmaxPolicy, dim=32)``, or some options
            of the policy of ``init_from``.
        reward: turns feedback into rewards.
        init_from: run whose best policy training starts from. Its policy options and data layout are the defaults. Its
            items are those of ``data``, or the first of them (``prepare(..., extends=...)``); rows of new items start
            from the mean of the known ones. ``init_training`` also copies the critic heads and the state of the
            optimizer; None = if the catalog has grown, and objective and optimizers are the same.
        callbacks: Lightning callbacks that observe training; they are not part of the configuration.
        options: any other option of ``recpo train``. Those of ``TrainOptions``, as a dict or by a dotted name, such as
            ``advantage``, ``trainer`` or ``module``, which is a subclass of ``PreferenceModule`` that changes a step of
            training, or its import path. ``resume``: continue from the last checkpoint in ``out``. ``overwrite``:
            replace a run in ``out`` after the first step of the new run. ``trust``: packages, in addition to recpo,
            whose classes the run of ``init_from`` may name.

    Returns:
        The finished run.

    Raises:
        RecpoError: options, data or directories do not fit, in which case nothing has been changed; or training
            diverged or collapsed.
        Interrupted: training was stopped by a signal.
    """
    given: dict[str, Any] = {"objective": objective, "policy": policy, "reward": reward}
    given |= {"init_from": init_from, "data.prepared": data}
    if isinstance(options.get("module"), type):  # an import path; other classes have options, so they are class paths
        options["module"] = as_configuration(options["module"])["class_path"]
    tree = {"progress": False, "out": out, **options}
    tree |= {name: value for name, value in given.items() if value is not None}
    if isinstance(config, Mapping):
        start = as_arguments(config)
    else:
        files = [config] if isinstance(config, Path | str) else config or []
        start = [word for file in files for word in ("--config", str(file))]
    try:
        configuration = parse_arguments([*start, *as_arguments(tree)])
    except ArgumentError as error:
        raise range_error(str(error)) or RecpoError(str(error), code="wrong_type") from error
    return run_tracked(Train(configuration, callbacks))


def continued(out: Path, **options: Any) -> Run:
    """``train``, which continues a run in ``out`` from its last checkpoint, or replaces one that has none."""
    goes_on = checkpoint_path(out, "last").exists()
    return train(out=out, resume=goes_on, overwrite=not goes_on and (out / Run.RESOLVED).is_file(), **options)
