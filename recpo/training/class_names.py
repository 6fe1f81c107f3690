"""The classes that the configuration of a run names, and which of them it may name.

``resolved.yaml`` is a document, and somebody else may have written it. Every class in it is looked up by
``named_class`` before jsonargparse sees the configuration, which imports whatever it finds and follows the attributes
of modules.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_type_hints

import yaml

from recpo.artifacts.documents import lies_in, named_class, parse_yaml
from recpo.base.errors import RecpoError

TRUSTED: Final = ("recpo", "torch.optim", "lightning")
"""Packages whose classes the configuration of a run may always name."""

_CONTRACTS, _LIGHTNING = "recpo.base.contracts.", "lightning.pytorch."
#: What the classes of an option inherit from. They are imported when needed: Lightning takes seconds.
_BASES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("policy", "base"), (_CONTRACTS + "Policy",)),
    **dict.fromkeys(("advantage", "estimator"), (_CONTRACTS + "AdvantageEstimator",)),
    **dict.fromkeys(
        ("reward", "rewards", "members", "validation_reward", "monitor_reward"), (_CONTRACTS + "RewardFunction",)
    ),
    **dict.fromkeys(("optimizer", "sparse_optimizer"), ("torch.optim.Optimizer",)),
    **dict.fromkeys(("lr_scheduler", "table_scheduler"), ("torch.optim.lr_scheduler.LRScheduler",)),
    "objective": (_CONTRACTS + "Objective",),
    "block": ("recpo.policies.blocks.Block",),
    "layout": ("recpo.batches.slates.Layout",),
    "module": (_LIGHTNING + "LightningModule",),
    "data": ("recpo.batches.datamodule.FeedbackDataModule",),
    "trainer": ("recpo.training.trainer.TrainerOptions",),
    "strategy": (_LIGHTNING + "strategies.Strategy",),
    "callbacks": (_LIGHTNING + "callbacks.Callback",),
    "logger": (_LIGHTNING + "loggers.Logger",),
    "profiler": (_LIGHTNING + "profilers.Profiler",),
    "accelerator": (_LIGHTNING + "accelerators.Accelerator",),
    "plugins": (
        *(_LIGHTNING + f"plugins.{name}" for name in ("Precision", "ClusterEnvironment", "CheckpointIO", "LayerSync")),
    ),
}
#: Options whose class is recpo's own in almost every run, and which options of it are groups: it is not imported, and
#: Lightning with it, to know that it may be named.
_OWN: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("data", "recpo.batches.datamodule.FeedbackDataModule"): ("layout",),
    ("trainer", "recpo.training.trainer.TrainerOptions"): (),
}
_BUILT: Final = (("policy",), ("objective",), ("critic",), ("data", "layout"))
"""The parts of a run that other runs and verbs build; the rest of its configuration is only read."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
#: options that hold paths: nothing there is ever imported
_PATHS = frozenset({"prepared", "out", "init_from", "codes", "run", "truth", "dirpath", "save_dir", "default_root_dir"})
_LONGEST_TEXT: Final = 4_000


class ClassName(NamedTuple):
    """A name in a configuration that an option parser would import.

    Attributes:
        keys: the options that it stands in, from the outermost.
        name: the name.
        arguments: the ``init_args`` beside it.
    """

    keys: tuple[str, ...]
    name: str
    arguments: Mapping[str, Any] = MappingProxyType({})

    @property
    def option(self) -> str:
        """The option, for messages."""
        return ".".join(self.keys)

    @property
    def is_built(self) -> bool:
        """Whether recpo builds this part of somebody else's run."""
        return any(self.keys[: len(part)] == part for part in _BUILT)


def class_names(configuration: Any, keys: tuple[str, ...] = ()) -> Iterator[ClassName]:
    """Every ``class_path``, and everything else that looks like a dotted name, except in options that hold paths.

    Raises:
        RecpoError: an option says whom to trust, or is a text that is too long to be one.
    """
    if isinstance(configuration, Mapping):
        for name, value in configuration.items():
            own = keys if name == "init_args" else (*keys, str(name))
            if name == "class_path":
                arguments = configuration.get("init_args")
                yield ClassName(keys, str(value), arguments if isinstance(arguments, Mapping) else {})
            elif name == "trust" and isinstance(value, str | list | tuple | Mapping) and value:
                raise RecpoError(
                    f"{'.'.join(own)} is {value!r}, but whom you trust is never read from a run: remove it, and allow "
                    "packages on your command line (--trust)",
                    code="untrusted",
                    field=".".join(own),
                )
            else:
                yield from class_names(value, own)
    elif isinstance(configuration, list | tuple):
        for value in configuration:
            yield from class_names(value, keys)
    elif isinstance(configuration, str) and keys[-1:] and keys[-1] not in _PATHS:
        if _DOTTED.fullmatch(configuration.strip()):
            yield ClassName(keys, configuration.strip())
        elif not isinstance(options := _options_in(configuration, keys), str):
            yield from class_names(options, keys)


def validate_class_names(configuration: Mapping[str, Any], trust: Sequence[str], file: Path) -> None:
    """Raises ``RecpoError`` unless every name in a configuration is that of a class that it may name there.

    It must be a class, never a function or an attribute of another module; a subclass of what its option expects; and
    defined in ``TRUSTED`` or ``trust``. Other packages are refused before anything is imported. Whom to trust is never
    read from a configuration.

    Args:
        configuration: parsed YAML of a run.
        trust: packages besides ``TRUSTED``, from the command line or the Python call of the user.
        file: for the message.
    """
    try:
        names, packages = list(class_names(configuration)), (*TRUSTED, *trust)
    except RecpoError as error:
        raise RecpoError(f"{file}: {error}", code=error.code, field=error.field) from error
    for given in names:
        if "." in given.name and not any(lies_in(given.name, package) for package in packages):
            package = given.name.partition(".")[0]
            raise RecpoError(
                f"{file} names {given.name}, which is not a part of {', '.join(TRUSTED)}: loading it would run its "
                f"code. If you trust it, allow the package: --trust '[\"{package}\"]' on the command line "
                f'(--reward.trust and --vectors.trust for the runs that those name), trust=["{package}"] in Python',
                code="untrusted",
                field=given.option,
            )
    if not isinstance(configuration.get("critic", {}), Mapping):  # the option parser would read a file of this name
        raise RecpoError(
            f"{file}: critic is {configuration['critic']!r}, expected a mapping of options",
            code="wrong_type",
            field="critic",
        )
    for given in names:
        _validate(given, packages, file)


@cache
def _bases(option: str) -> tuple[type, ...]:
    """What the classes that an option names inherit from; of an option of somebody's own class, any of these."""
    names = _BASES.get(option) or {name for bases in _BASES.values() for name in bases}
    parts = [name.rpartition(".") for name in names]
    return tuple(getattr(import_module(module), own) for module, _, own in parts)


def _validate(given: ClassName, packages: Sequence[str], file: Path) -> None:
    if not given.is_built and not any(lies_in(given.name, package) for package in TRUSTED):
        return  # in a package of the user, which may be missing where the run is only served
    says = f"{file}: {given.option} names {given.name}"
    groups = _OWN.get((given.option, given.name))
    if groups is None:
        try:
            own = named_class(given.name, _bases(given.keys[-1] if given.keys else ""), packages)
        except ValueError as error:
            raise RecpoError(
                f"{says}, which {error}; a run names its classes by their full path, and nothing but classes",
                code="untrusted",
                field=given.option,
            ) from error
        except ImportError as error:
            if given.is_built:
                raise RecpoError(
                    f"{says}, which cannot be imported: {' '.join(str(error).split())}",
                    code="unknown_name",
                    field=given.option,
                ) from error
            return
        groups = tuple(name for name in given.arguments if _is_group(own, name))
    for name, value in given.arguments.items():
        if isinstance(value, str) and name in groups:
            raise RecpoError(
                f"{says}, with the text {value[:60]!r} as {name}: expected a mapping of options",
                code="wrong_type",
                field=name,
            )


def _is_group(own: type, name: str) -> bool:
    """Whether an option of a class is a dataclass. The option parser reads text there as the path of a YAML file."""
    hints: dict[str, Any] = {}
    with suppress(NameError, TypeError):  # annotations that only type checkers can resolve
        hints = get_type_hints(own.__init__)  # type: ignore[misc]
    parameter = inspect.signature(own).parameters.get(name)
    return is_dataclass(hints.get(name)) or (parameter is not None and is_dataclass(parameter.default))


def _options_in(text: str, keys: tuple[str, ...]) -> Any:
    """What an option parser would read in a text: a mapping or a list of options, or a plain value."""
    if len(text) > _LONGEST_TEXT:
        raise RecpoError(
            f"{'.'.join(keys)} is a text of {len(text):,} characters, a run has at most {_LONGEST_TEXT:,} in an option",
            code="out_of_range",
            field=".".join(keys),
        )
    with suppress(yaml.YAMLError, ValueError, RecursionError, AttributeError):
        return parse_yaml(text)
    return None


def without_trust(configuration: Any) -> Any:
    """A configuration without its options ``trust``, which a run does not record."""
    if isinstance(configuration, dict):
        return {name: without_trust(value) for name, value in configuration.items() if name != "trust"}
    return [without_trust(value) for value in configuration] if isinstance(configuration, list) else configuration
