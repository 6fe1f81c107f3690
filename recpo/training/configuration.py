"""The configuration of a run: the same from flags, YAML files and Python objects (``parse_arguments``).

A parsed configuration is a tree of options and class paths, which ``resolved`` records before anything is built, and of
which ``instantiate`` makes ``TrainOptions``.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

import recpo.batches.preference_lists
import recpo.evaluation.true_rewards
import recpo.objectives
import recpo.objectives.advantages
import recpo.objectives.gae
import recpo.policies.semantic_id
import recpo.rewards.rewards
import recpo.training.learned_reward  # noqa: F401  these imports are why a class path may be the bare class name
from recpo.artifacts.documents import as_configuration, parse_yaml, validate_configuration_files
from recpo.base.contracts import Objective
from recpo.base.errors import RecpoError
from recpo.objectives.advantages import TernaryAdvantage
from recpo.training.class_names import without_trust
from recpo.training.run import Run, built
from recpo.training.trainer import DEFAULT_EPOCHS, TrainOptions, says_when_to_stop

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
