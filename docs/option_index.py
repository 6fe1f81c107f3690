"""The options of every verb and of every class that an option may name, as ``recpo/cli/options.json``.

Importing a verb takes seconds, because torch comes with it; help and spelling read this file instead. It is made from
the real types of the options: ``python docs/option_index.py`` writes it again, and a test says when it has to be.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from jsonargparse._parameter_resolvers import get_signature_parameters

from recpo.artifacts.artifact import Artifact
from recpo.cli.main import VERBS, documentation, verb_class, without_help
from recpo.cli.spelling import INDEX, PACKAGES
from recpo.training.fit import train_parser
from recpo.training.trainer import TrainOptions
from recpo.verbs.verb import UNRECORDED

_Entry = dict[str, Any]
#: Where the classes are whose options and subclasses the index has.
_DESCRIBED = ("recpo.", "torch.optim.", "lightning.pytorch.callbacks.", "lightning.pytorch.strategies.")


class _Index:
    """Collects the classes that the described options name."""

    def __init__(self) -> None:
        self.classes: dict[str, _Entry] = {}

    def verb(self, name: str) -> _Entry:
        """The options of a verb, with their help."""
        declared = TrainOptions if name == "train" else verb_class(name)
        options, docs = self.options(declared), dict(documentation(declared))
        if name == "train":  # what its parser adds to the class
            for action in train_parser()._actions:
                if hasattr(action, "_typehint") and "." not in action.dest and action.dest not in options:
                    options[action.dest] = self.described(action._typehint, action.default)
                    docs[action.dest] = action.help or ""
        options = dict(sorted(options.items(), key=lambda one: one[0] in UNRECORDED))
        for option, entry in options.items():
            entry["help"] = " ".join(docs.get(option, "").split())
        return {"first_day": verb_class(name).first_day, "options": options}

    def options(self, declared: type) -> _Entry:
        """What ``declared`` takes, by name; ``jsonargparse`` finds the parameters behind ``**options``."""
        hints: Mapping[str, Any] = typing.get_type_hints(declared) if dataclasses.is_dataclass(declared) else {}
        fields = {one.name: one for one in dataclasses.fields(declared)} if hints else {}
        with without_help(()):  # `documentation` reads it once, for the verbs alone
            parameters = get_signature_parameters(declared, None)
        return {
            one.name: self.described(hints.get(one.name, one.annotation), one.default)
            for one in parameters
            if one.name not in fields or not fields[one.name].metadata.get("python_only")
        }

    def described(self, hint: Any, default: Any = inspect.Parameter.empty) -> _Entry:
        """The forms that a value may have: ``classes``, ``items`` of a list, ``values`` of a mapping, and others."""
        entry: _Entry = {}
        self._add(entry, hint)
        if default is None or not (hint is bool or _is_number(hint) or self._is_group(entry)):
            entry["null"] = True
        if default is inspect.Parameter.empty:
            entry["required"] = True
        return entry

    def _is_group(self, entry: _Entry) -> bool:
        return set(entry) == {"classes"} and all(self.classes[one]["group"] for one in entry["classes"])

    def _add(self, entry: _Entry, hint: Any) -> None:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        generic = origin if inspect.isclass(origin) and origin is not type else object
        if origin in (typing.Union, UnionType):
            for part in args:
                self._add(entry, part)
        elif issubclass(generic, Callable):  # type: ignore[arg-type]
            self._add(entry, args[-1] if args else Any)  # a class path whose objects are what the function returns
        elif issubclass(generic, Mapping):
            self._add(entry.setdefault("values", {}), args[-1] if args else Any)
        elif issubclass(generic, Iterable):
            for part in args:
                self._add(entry.setdefault("items", {}), part)
        elif hint is NoneType:
            entry["null"] = True
        elif hint is not ...:
            self._add_plain(entry, hint, origin)

    def _add_plain(self, entry: _Entry, hint: Any, origin: Any) -> None:
        if origin is typing.Literal or hint is bool or _is_number(hint) or hint in (str, Path):
            entry["scalar"] = True
            entry.update({"text": True} if hint is str else {})
        elif origin is None and inspect.isclass(hint) and _is_ours(hint) and not issubclass(hint, enum.Enum | Artifact):
            entry["classes"] = sorted({*entry.get("classes", ()), self.named(hint)})
        else:
            entry["unknown"] = True

    def named(self, one: type) -> str:
        """The path of a class, which is described together with its subclasses."""
        path = f"{one.__module__}.{one.__qualname__}"
        if path not in self.classes:
            is_foreign = any(_package(base) not in ("recpo", "builtins") for base in _bases(one))
            self.classes[path] = entry = dict[str, Any](group=_is_group(one), foreign=is_foreign)
            if one.__module__.startswith(_DESCRIBED):
                entry["known"] = [path, *sorted(map(self.named, _subclasses(one)))]
                entry["options"] = self.options(one)
        return path


def _subclasses(one: type) -> set[type]:
    """All described subclasses."""
    children: list[type] = one.__subclasses__()
    found = {deeper for child in children for deeper in (child, *_subclasses(child))}
    return {child for child in found if child.__module__.startswith(_DESCRIBED) and not child.__name__.startswith("_")}


def _bases(one: type) -> list[type]:
    plain = {"ABC", "Generic", "Protocol", "NamedTuple", "Module"}
    return [base for base in one.__mro__ if base.__name__ not in plain]


def _package(one: type) -> str:
    return one.__module__.partition(".")[0]


def _is_ours(one: type) -> bool:
    return _package(one) in PACKAGES


def _is_number(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, int | float)


def _is_group(one: type) -> bool:
    """Whether the options of a class are a group: a dataclass that inherits from dataclasses at most."""
    return all(dataclasses.is_dataclass(base) for base in one.__mro__[:-1])


def option_index() -> str:
    """The text of ``options.json``, with a line for every option. Needs torchrec, for the options of its strategy."""
    importlib.import_module("recpo.sharding.strategy")
    index = _Index()
    verbs = {name: index.verb(name) for name in VERBS}
    return _lines({"verbs": verbs, "classes": dict(sorted(index.classes.items()))}, 4) + "\n"


def _lines(value: Any, depth: int) -> str:
    if not depth or not value or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(one, depth - 1)}" for key, one in value.items()) + "\n}"


if __name__ == "__main__":
    INDEX.write_text(option_index(), encoding="utf-8")
