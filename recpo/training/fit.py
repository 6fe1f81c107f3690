"""From the options of a run to the finished run.

The configuration is the same from flags, YAML files and Python objects (``parse_arguments``): a tree of options and
class paths, which ``resolved`` records before anything is built, and of which ``instantiate`` makes ``TrainOptions``.
``run_configuration`` checks everything before the run directory changes; then it builds the module and the trainer, and
keeps what was trained.
"""

import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser, Namespace
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, LambdaCallback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

import recpo.batches.preference_lists
import recpo.evaluation.true_rewards
import recpo.objectives
import recpo.objectives.gae
import recpo.policies.semantic_id
import recpo.training.learned_reward  # noqa: F401  these imports are why a class path may be the bare class name
from recpo.artifacts.documents import as_configuration, describe_os_error, parse_yaml, validate_configuration_files
from recpo.base.contracts import Objective, Policy
from recpo.base.errors import Interrupted, RecpoError
from recpo.batches.datamodule import Phases
from recpo.objectives.advantages import TernaryAdvantage
from recpo.policies.item_table import tables_on_meta
from recpo.rewards.rewards import validate_identity
from recpo.training.callbacks import callbacks_of, lost_rank, tune_allocator
from recpo.training.checkpoints import validate_checkpoint
from recpo.training.class_names import class_names, validate_class_names, without_trust
from recpo.training.contradictions import feedback_warnings
from recpo.training.module import PreferenceModule
from recpo.training.options import rewards_of
from recpo.training.run import Run, built, checkpoint_path, hand_over
from recpo.training.run_directory import RunDirectory
from recpo.training.trainer import DEFAULT_EPOCHS, SentMetrics, TrainOptions, says_when_to_stop, trainer_error
from recpo.training.validation import HeldOutFacts, default_monitor, held_out_facts, validate_monitor
from recpo.training.warm_start import WarmStart, growth_of, same_training

DEFAULT_ADVANTAGE = TernaryAdvantage(positive_fraction=0.25)
"""Default advantage of objectives that weigh logged feedback only by advantages, such as GBPO."""
_UNRECORDED = ("config", "resume", "overwrite", "trust")


@cache  # reading the signatures again takes as long as parsing
def train_parser() -> ArgumentParser:
    """The parser of ``recpo train``: ``TrainOptions``, and where a run goes and starts from."""
    parser = ArgumentParser(
        prog="recpo train",
        description="Trains a policy on prepared data, or aligns a trained one. The result is a run directory: "
        "checkpoints, logs, the resolved configuration that repeats it, the item ids and everything else that "
        "recommending needs, and run.json, which marks it as finished. --resume true continues a killed run, with the "
        "same result.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the options below.")
    parser.add_class_arguments(TrainOptions, as_group=False, instantiate=False)
    parser.add_argument("--out", type=Path, required=True, help="run directory to write")
    parser.add_argument(
        "--init_from",
        type=Path | None,
        default=None,
        help="run directory whose best policy training starts from: the same items, or the first of today's (see "
        "recpo prepare --extends); options of policy that are not given, and data.layout, are those of that run",
    )
    parser.add_argument(
        "--init_training",
        type=bool | None,
        default=None,
        help="also copy the critic heads and the optimizer state of the run of init_from; null = only if the "
        "catalog has grown since, and objective and optimizers are the same",
    )
    parser.add_argument("--resume", type=bool, default=False, help="continue from last.ckpt in out")
    parser.add_argument("--overwrite", type=bool, default=False, help="replace the run in out once training has begun")
    parser.add_argument(
        "--trust",
        type=list[str],
        default=[],
        help="packages, in addition to recpo, torch.optim and lightning, whose classes the run of init_from may name",
    )
    return parser


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Parses the flags of ``recpo train`` and fills in missing ones.

    Options of ``policy`` that are not given, and ``data.layout``, come from ``init_from``. An objective that weighs
    logged feedback only by advantages (GBPO, Reinforce) gets ``DEFAULT_ADVANTAGE`` if none is given. Training without a
    given end uses ``DEFAULT_EPOCHS``.

    Raises:
        ArgumentError: an unknown option, or a value of a wrong type.
        RecpoError: the run of ``init_from`` cannot be opened.
    """
    validate_configuration_files(arguments)
    parser, arguments = train_parser(), _readable_nulls(arguments)
    given = parser.parse_args(arguments, defaults=False)
    if given.get("init_from") is not None:
        with suppress(*[RecpoError] * bool(given.get("resume"))):  # a resumed run no longer needs it
            base = Run.open(given.init_from, trust=given.get("trust") or ()).configuration
            if "data" not in base:
                raise RecpoError(
                    f"{given.init_from} was tilted, not trained: start from the run that it was made from",
                    code="unsupported",
                    field="init_from",
                )
            start: dict[str, Any] = {"policy": base["policy"]}
            if "layout" not in given.data.get("init_args", given.data):
                start["data"] = {"layout": base["data"]["init_args"]["layout"]}
            arguments = ["--config", json.dumps(start), *arguments]
    arguments = list(arguments)
    if given.get("objective") is not None and given.get("advantage") is None and given.get("reward") is None:
        requires = built("objective", Objective, given.objective).requires
        if "advantages" in requires and not requires & {"old", "value", "rewards", "chosen"}:
            arguments += ["--advantage", json.dumps(as_configuration(DEFAULT_ADVANTAGE))]
    if not says_when_to_stop(given.get("trainer.init_args") or {}):
        arguments += ["--trainer.max_epochs", str(DEFAULT_EPOCHS)]
    return parser.parse_args(arguments)


def _readable_nulls(arguments: Sequence[str]) -> list[str]:
    """Rewrites ``--a.b.c null`` as ``--a.b {c: null}``; jsonargparse reads the former as text at this depth."""
    readable: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        group, _, name = flag.rpartition(".")
        if not flag.startswith("--") or flag.count(".") < 2 or group.endswith(".init_args"):
            readable.append(word)
            continue
        value = value if equals else next(words, "")
        is_null = value in ("null", "~")
        readable += [group, json.dumps({name: None})] if is_null else [word] if equals else [flag, value]
    return readable


def instantiate(configuration: Namespace) -> TrainOptions:
    """Builds the options; each validates itself.

    Raises:
        RecpoError: a value is refused.
    """
    try:
        values = train_parser().instantiate(configuration)
        return TrainOptions(**{field.name: values[field.name] for field in fields(TrainOptions)})
    except RecpoError:
        raise
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        if isinstance(error.__cause__, RecpoError):  # of options that may be null, the parser says why as the cause
            raise error.__cause__ from error
        raise RecpoError(f"an option is refused: {' '.join(str(error).split())}", code="bad_value") from error


def resolved(configuration: Namespace) -> dict[str, Any]:
    """Every option, including defaults, except those on an existing run and on whom to trust, as YAML has them."""
    options = parse_yaml(train_parser().dump(configuration, skip_unset=False, skip_validation=True))
    recorded: dict[str, Any] = without_trust({name: options[name] for name in options if name not in _UNRECORDED})
    return recorded


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Options of Python, by their names (``trainer={"max_epochs": 1}`` or ``{"trainer.max_epochs": 1}``), as flags."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *groups, last = name.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        value, there = as_configuration(value), place.get(last)
        place[last] = {**there, **value} if isinstance(there, dict) and isinstance(value, dict) else value
    return ["--config", json.dumps(tree)] if tree else []


def run_configuration(
    configuration: Namespace,
    callbacks: Sequence[Callback] = (),
    metrics: Callable[[Mapping[str, Any], int | None], None] | None = None,
) -> Run:
    """Trains by the result of ``parse_arguments``. Checks everything before it changes ``out``.

    Args:
        configuration: every option.
        callbacks: additional callbacks that observe training.
        metrics: also called with the metrics that Lightning logs, and their step.
    """
    options, out = with_monitor(configuration), Path(configuration.out)
    recorded = resolved(configuration)
    # training with a class implies trust in it; without its package nobody could open the run
    packages = sorted({one.name.partition(".")[0] for one in class_names(recorded) if "." in one.name})
    validate_class_names(recorded, packages, out / Run.RESOLVED)
    if options.allocator:
        tune_allocator()
    starts = configuration.init_from is not None and not configuration.resume
    start = _warm_start(configuration, recorded, options) if starts else None
    module = _module(options, start)
    if start is not None and start.with_training:
        start.load_critic(module)
        callbacks = [*callbacks, LambdaCallback(on_train_start=start.load_optimizer)]
    if options.rollout is not None:
        options.data.phases = Phases(options.rollout.batches, options.rollout.epochs)
    callbacks = [*callbacks, *callbacks_of(options, module, out)]
    loggers = [] if metrics is None else [SentMetrics(metrics)]
    trainer = options.trainer.build(out, callbacks=callbacks, loggers=loggers, progress=options.progress)
    if options.patience is not None and not trainer.limit_val_batches:
        raise RecpoError(
            f"patience: {options.patience} counts validations, and trainer.limit_val_batches is 0: set patience to "
            "null, or validate",
            code="conflicting_options",
            field="patience",
        )
    directory = RunDirectory(configuration, recorded, options, trainer.world_size)
    last = directory.validate()
    if last is not None:
        validate_checkpoint(last, directory.identity)
    with directory.opened(module.policy) as opened:
        hooks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # after callbacks that may stop the first step, before callbacks that write its checkpoint
        hooks.insert(sum(not isinstance(hook, Checkpoint) for hook in hooks), opened)
        with _matmul_precision(trainer, options), _quiet_loggers(), _faults(out, trainer):
            trainer.fit(module, datamodule=options.data, ckpt_path=last, weights_only=True)
        if trainer.global_step == 0:
            raise RecpoError(
                f"no training step was taken: {options.data.prepared.root} gives this layout no batch, or max_epochs, "
                "max_steps or limit_train_batches of trainer is 0",
                code="empty",
            )
        if trainer.is_global_zero:
            directory.finish(module)
    trainer.strategy.barrier("run.json")
    return Run.open(out, trust=packages)


def with_monitor(configuration: Namespace) -> TrainOptions:
    """The options. If no monitor is given, sets a suitable one here and in ``configuration``.

    Raises:
        RecpoError: an option is invalid, or the monitor cannot be computed.
    """
    options = _for_behaviors(instantiate(configuration))
    # where nothing is validated, any monitor will do
    facts = held_out_facts(options.data.prepared) if options.trainer.validates else HeldOutFacts(1.0, 1)
    monitor = default_monitor(options, facts) if options.monitor is None else options.monitor
    validate_monitor(monitor, options, facts)
    configuration.monitor = monitor
    return replace(options, monitor=monitor)


def _for_behaviors(options: TrainOptions) -> TrainOptions:
    """The options, after objective and rewards were told the bits of the behaviors in the data."""
    names = options.data.prepared.behaviors
    known = {name: reward.for_behaviors(names) for name, reward in rewards_of(options).items()}
    monitor = known.pop("rollout.monitor_reward", None)
    rollout = None if options.rollout is None else replace(options.rollout, monitor_reward=monitor)
    objective = options.objective.for_behaviors(names)
    return replace(options, objective=objective, rollout=rollout, **known)  # type: ignore[arg-type]


def _warm_start(configuration: Namespace, recorded: Mapping[str, Any], options: TrainOptions) -> WarmStart:
    base = Run.open(configuration.init_from, trust=configuration.trust)
    growth, asked = growth_of(base, options.data.prepared), configuration.init_training
    has_state = not (options.trainer.shards_tables or checkpoint_path(base.root).is_dir())
    if asked and not has_state:
        raise RecpoError(
            "init_training: the optimizer state of sharded tables cannot be copied: leave it out, or train without "
            "ShardedStrategy",
            code="unsupported",
            field="init_training",
        )
    same = has_state and same_training(base, growth, recorded)
    return WarmStart(base, growth, same if asked is None else asked)


def _module(options: TrainOptions, start: WarmStart | None) -> PreferenceModule:
    """The Lightning module of the policy with its initial weights."""
    data = options.data
    torch.manual_seed(options.seed)
    with tables_on_meta() if options.trainer.shards_tables else nullcontext():
        model = options.policy(data.prepared.num_items)
    hand_over(model, data.prepared)
    _validate_identity(model, options)
    counts = data.prepared.feedback_counts["train"]
    for warning in feedback_warnings(options, counts):
        warnings.warn(warning, stacklevel=2)
    item_counts = torch.from_numpy(data.prepared.item_counts())
    if start is not None:
        start.validate_features(model, data.prepared)
        start.load_policy(model)
    model.set_item_counts(item_counts)  # features of this log, regardless of the origin of the weights
    kind = PreferenceModule if options.module is None else options.module
    if not issubclass(kind, PreferenceModule):
        raise RecpoError(
            f"module: {kind.__name__} does not derive from recpo.PreferenceModule, so it cannot train a policy",
            code="wrong_class",
            field="module",
        )
    module = kind(model, options, slates=data.layout.traits, item_counts=item_counts)
    try:
        module.configure_optimizers()  # created again when training begins
    except (ValueError, TypeError) as error:
        raise RecpoError(
            f"optimizer or lr_scheduler: {' '.join(str(error).split())}", code="bad_value", field="optimizer"
        ) from error
    return module


def _validate_identity(model: Policy, options: TrainOptions) -> None:
    """Raises if a reward or the policy was made for other items, or a reward for other users."""
    data = options.data.prepared
    for name, reward in rewards_of(options).items():
        validate_identity(reward, name, data)
    if model.catalog_checksum not in (None, data.catalog_checksum):
        raise RecpoError(
            f"policy: its codes were made for other items than those of {data.root} (items.parquet differs); make them "
            "for this directory with `recpo tokenize`",
            code="mismatch",
            field="policy",
        )


@contextmanager
def _matmul_precision(trainer: Trainer, options: TrainOptions) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if trainer.strategy.root_device.type == "cuda":
        torch.set_float32_matmul_precision(options.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Reports threads that cannot write their log (TensorBoard on a full disk) in one line instead of a traceback."""
    before = threading.excepthook

    def report(fault: threading.ExceptHookArgs) -> None:
        if isinstance(fault.exc_value, OSError):
            # one write: the thread of the log may end beside an error that is shown
            sys.stderr.write(f"a log is no longer written: {describe_os_error(fault.exc_value)}\n")
        else:
            before(fault)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _faults(out: Path, trainer: Trainer) -> Iterator[None]:
    """Reports in one line what ended a run: a signal, another rank, or a callback without its metric."""
    try:
        yield
    except SIGTERMException as error:
        raise Interrupted(_kept(out, "SIGTERM", trainer), 143) from error
    except SystemExit as error:  # how Lightning ends a run after Ctrl-C
        if not trainer.interrupted:
            raise
        raise Interrupted(_kept(out, "SIGINT", trainer), 130) from error
    except (MisconfigurationException, ValueError) as error:
        if not isinstance(error, MisconfigurationException) and "val_check_interval" not in str(error):
            raise
        raise trainer_error(error) from error
    except RuntimeError as error:
        if "find_unused_parameters" in str(error):
            raise RecpoError(
                "this objective leaves some parameters without a gradient, and the strategy has to know: set "
                "trainer.strategy to ddp_find_unused_parameters_true, or find_unused_parameters of ShardedStrategy",
                code="conflicting_options",
                field="strategy",
            ) from error
        if "Early stopping conditioned on metric" in str(error):
            raise RecpoError(f"trainer.callbacks: {str(error).strip()}", code="bad_value", field="callbacks") from error
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise RecpoError(f"{lost_rank(out, getattr(rank_zero_only, 'rank', 0))} ({reason})", code="failed") from error


def _kept(out: Path, signal: str, trainer: Trainer) -> str:
    last = out / Run.CHECKPOINTS / "last.ckpt"
    if not last.exists():
        return f"stopped by {signal} at step {trainer.global_step}: no checkpoint was written yet; start again"
    again = f"recpo train --config {out}/{Run.RESOLVED} --resume true"
    return f"stopped by {signal} at step {trainer.global_step}: {last} is kept; continue with {again}"
