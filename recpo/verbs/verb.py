"""What all verbs are: a frozen dataclass of options with an ``execute``."""

from __future__ import annotations

import functools
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, ParamSpec, TypeVar

import yaml

import recpo
from recpo.artifacts.artifact import Artifact
from recpo.artifacts.checksums import kind_of
from recpo.artifacts.documents import as_configuration, read_yaml
from recpo.artifacts.outputs import directory_of_steps, output_file
from recpo.base.errors import Interrupted, RecpoError, validate_ranges
from recpo.verbs.tracking import run_tracked

if TYPE_CHECKING:
    import torch

R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")

#: Metadata of a field that only callers in Python can give, such as a callback; it is no flag and is not recorded.
PYTHON_ONLY: Mapping[str, Any] = {"python_only": True}
#: Options that say how to treat an earlier result or the terminal; they change no result and are not recorded.
UNRECORDED = ("overwrite", "progress", "resume")
#: The file of the recorded options in a directory that a verb wrote.
RESOLVED: Final = "resolved.yaml"
_CLASS: Final = "class_path"


@dataclass(frozen=True)
class Verb(ABC, Generic[R_co]):
    """One step of the road from a log to served lists.

    The fields of a verb are its options, their docstrings the help, their types the ranges. The command line, YAML
    keys, keywords in Python, the reference page and ``resolved.yaml`` are made from them. Options of Python that are
    paths may be ``str``.
    """

    #: Options that a user sets on the first day: ``recpo VERB --help`` explains them and only names the others.
    first_day: ClassVar[tuple[str, ...]] = ()
    #: Whether a tracker gets a run of this verb (``recpo.tracked``).
    is_tracked: ClassVar[bool] = True
    #: The option that names what the verb writes.
    output_option: ClassVar[str] = "out"

    def __post_init__(self) -> None:
        validate_ranges(self)

    @abstractmethod
    def execute(self) -> R_co:
        """Does the work and returns the result."""

    def measured(self, result: Any) -> Mapping[str, float | str]:
        """What a tracker records of a result: numbers become metrics, text becomes tags."""
        return {}

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The defaults that depend on the ``given`` options, such as those of a named world."""
        return {}

    def part(self, kind: type[T]) -> T:
        """The options of one dataclass that the verb derives from, as an instance of it."""
        return kind(**{one.name: getattr(self, one.name) for one in fields(kind)})  # type: ignore[arg-type]

    def recorded(self) -> dict[str, Any]:
        """Every option that the result depends on, as YAML has it: ``recpo VERB --config`` repeats the verb with it.

        Objects without a directory, such as frames, are only mentioned, so the verb cannot be repeated from the record.
        """
        kept = [one.name for one in fields(self) if one.name not in UNRECORDED and not one.metadata.get("python_only")]
        return {name: _recorded(getattr(self, name)) for name in kept}

    def command(self) -> list[str]:
        """The words of the command that repeats the verb: options that differ from their defaults, the output last."""
        recorded, words = self.recorded(), [type(self).__name__.lower()]
        for one in sorted(fields(self), key=lambda one: one.name == self.output_option):
            default = _recorded(one.default if one.default_factory is MISSING else one.default_factory())
            if one.name in recorded and (value := recorded[one.name]) != default:
                value = _changes(value, default) if is_dataclass(getattr(self, one.name)) else value
                values = value if isinstance(value, list) else [value]
                words += [f"--{one.name}", *(part if isinstance(part, str) else json.dumps(part) for part in values)]
        return words

    def write_resolved(self, file: Path) -> None:
        """Writes the recorded options as YAML, completely or not at all."""
        with output_file(file) as working:
            working.write_text(yaml.safe_dump(self.recorded(), sort_keys=False, allow_unicode=True), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class WritingVerb(Verb[R_co]):
    """A verb whose output is a directory or a file that only ``overwrite`` replaces."""

    overwrite: bool = False
    """replace an output of the same kind if it exists"""
    progress: bool = False
    """show progress bars on a terminal"""


@dataclass(frozen=True, kw_only=True)
class ResumableVerb(WritingVerb[R_co]):
    """A verb that fills its directory step by step, and continues with the same options after it was stopped."""

    #: What the directory becomes.
    artifact: ClassVar[type[Artifact]]
    #: Options that may differ when it continues; the first of them may be more.
    may_change: ClassVar[tuple[str, ...]]

    resume: bool = False
    """continue what ``out`` has, which was started with the same options; if there is nothing, start it"""

    @contextmanager
    def directory(
        self, root: Path, *, start: Callable[[Path], object] = lambda working: None, inputs: Iterable[object] = ()
    ) -> Iterator[bool]:
        """The directory, which no other process may fill meanwhile; its ``resolved.yaml`` has the options.

        Args:
            root: the directory.
            start: writes the other first files of a new directory.
            inputs: files and directories that are read meanwhile.

        Yields:
            Whether it continues.

        Raises:
            RecpoError: it was started with other options, may not be created or replaced, or another process fills it.
            Interrupted: training was stopped; the message says how the verb continues.
        """
        options, again = self.recorded(), self.resume and kind_of(root) == self.artifact.kind
        if again:
            begun = read_yaml(root / RESOLVED, self.artifact.remedy())
            names = sorted({*options, *begun}.difference(self.may_change))
            if changed := [name for name in names if options.get(name) != begun.get(name)]:
                raise RecpoError(
                    f"{root} was started with other options: {', '.join(changed)} differ. Resume it with the same ones "
                    f"({self.may_change[0]} may be more), or choose another output",
                    code="conflicting_options",
                    field=changed[0],
                )

        def begin(working: Path) -> None:
            self.write_resolved(working / RESOLVED)
            start(working)

        first = None if again else begin
        with directory_of_steps(root, kind=self.artifact.kind, overwrite=self.overwrite, start=first, inputs=inputs):
            if again:
                self.write_resolved(root / RESOLVED)  # with what may change
            try:
                yield again
            except Interrupted as error:
                message = f"stopped; {root} continues with the same options and --resume true"
                raise Interrupted(message, error.status) from error


def _changes(value: Any, default: Any) -> Any:
    """Of options within an option, those that differ from their defaults."""
    if not (isinstance(value, dict) and isinstance(default, dict)) or value.get(_CLASS) != default.get(_CLASS):
        return value
    kept = {name: one for name, one in value.items() if name == _CLASS or one != default.get(name)}
    return {name: _changes(one, default.get(name)) for name, one in kept.items()}


def _recorded(value: Any) -> Any:
    try:
        return as_configuration(value)
    except RecpoError:
        return f"{type(value).__name__} in memory"


def function_of(verb: Callable[P, Verb[R_co]]) -> Callable[P, R_co]:
    """The function ``recpo.verb(**options)`` of a verb: ``run_tracked(Verb(**options))``, with the verb's signature."""
    made: Any = verb  # a class, which has more than what the type of its constructor says

    def function(*args: P.args, **kwargs: P.kwargs) -> R_co:
        result: R_co = run_tracked(made(*args, **{**made.presets(kwargs), **kwargs}))
        return result

    functools.update_wrapper(function, verb, assigned=("__module__", "__doc__"), updated=())
    function.__name__ = function.__qualname__ = made.__name__.lower()
    function.__signature__ = inspect.signature(verb)  # type: ignore[attr-defined]
    return function


def configurations(here: Path = Path()) -> Path:
    """The directory of recpo's own configurations: ``configs`` in a clone, or where the package is installed."""
    own = Path(recpo.__file__).parent / "configs"
    return Path("configs") if (here / "configs").resolve() == own.resolve() else own


def compute_device(name: str) -> torch.device:
    """The device of a verb with this name; ``auto`` is a GPU if there is one, else the CPU.

    Raises:
        RecpoError: there is no such device, or torch was built without it.
    """
    import torch  # imported here, because some verbs need no torch

    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # no such device, or torch without CUDA
        raise RecpoError(
            f"device {name!r} cannot be used here ({error})", code="unsupported", field="device"
        ) from error
