"""The parser of a verb, made from the fields of its dataclass: flags, YAML keys, types, defaults and help.

Importing a verb takes seconds, because torch comes with it; help and spelling read ``options.json`` instead, which has
the options of every verb and of every class that an option may name. It is made from the real types of the options:
``python -m recpo.cli.parser`` writes it again, and a test says when it has to be.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from jsonargparse._parameter_resolvers import get_signature_parameters

from recpo.artifacts.artifact import Artifact
from recpo.base.errors import RecpoError
from recpo.cli.main import VERBS
from recpo.cli.spelling import INDEX, PACKAGES
from recpo.verbs.verb import UNRECORDED, Verb

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def verb_class(name: str) -> type[Verb[Any]]:
    """The dataclass of a verb, ``recpo.verbs.NAME.Name``."""
    found: type[Verb[Any]] = getattr(importlib.import_module(f"recpo.verbs.{name}"), name.capitalize())
    return found


@contextmanager
def without_help(words: Sequence[str]) -> Iterator[None]:
    """Parsers made inside read no help from source files, unless ``words`` ask for that of a class.

    It takes longer than the parsing, for every training and every policy that is built.
    """
    asked = any(word.partition("=")[0].endswith(".help") for word in words)
    set_parsing_settings(docstring_parse_attribute_docstrings=asked)
    try:
        yield
    finally:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parser_of(verb: type[Verb[Any]]) -> ArgumentParser:
    """The parser of a verb. Rejects abbreviations and unknown keys; shows progress unless told otherwise."""
    if own := getattr(verb, "parser", None):
        parser: ArgumentParser = own()
        return parser
    parser = ArgumentParser(
        prog=f"recpo {verb.__name__.lower()}",
        description=(verb.__doc__ or "").partition("\n\n    Raises:")[0],
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the options below.")
    hints, helps = typing.get_type_hints(verb), documentation(verb)
    for one in sorted(dataclasses.fields(verb), key=lambda one: one.name in UNRECORDED):
        if not one.metadata.get("python_only"):
            parser.add_argument(f"--{one.name}", type=hints[one.name], help=helps.get(one.name, ""), **_default(one))
    return parser


@functools.cache
def documentation(declared: type) -> Mapping[str, str]:
    """Option -> its help: docstrings of fields, and entries of ``Args`` and ``Attributes``, inherited ones too."""
    found: dict[str, str] = {}
    for base in reversed(declared.__mro__):
        if base.__module__.startswith("recpo."):
            found |= {one.arg_name: " ".join((one.description or "").split()) for one in parse_from_object(base).params}
    return found


def _default(option: dataclasses.Field[Any]) -> dict[str, Any]:
    if option.name == "progress":
        return {"default": True}  # a terminal shows it unless told otherwise; Python does not
    if option.default is not dataclasses.MISSING:
        return {"default": option.default}
    if option.default_factory is not dataclasses.MISSING:
        return {"default": option.default_factory()}
    return {"required": True}


def parse(verb: type[Verb[Any]], words: Sequence[str]) -> Verb[Any]:
    """The verb that a command line describes: flags, and ``--config FILE.yaml``.

    Raises:
        ArgumentError: an unknown option, or a value of a wrong type.
        RecpoError: a value is refused.
    """
    if own := getattr(verb, "parse", None):
        made: Verb[Any] = own(words)
        return made
    words = joined_lists(verb, words)
    parser = parser_of(verb)
    given = parser.parse_args(words, defaults=False)
    parser.set_defaults(dict(verb.presets(given.as_dict())))
    configuration = parser.parse_args(words)
    configuration.pop("config", None)
    _validate_local_paths(configuration)
    try:
        return verb(**parser.instantiate(configuration).as_dict())
    except ValueError as error:
        if isinstance(error.__cause__, RecpoError):  # the reason, for options that may be null
            raise error.__cause__ from error
        raise


def joined_lists(verb: type[Verb[Any]], words: Sequence[str]) -> list[str]:
    """A command line in which every list is one word of JSON, and the first option has its name.

    ``logs/*.csv`` at the beginning is the value of the verb's first option. ``--ks 10 50`` and ``--ks 10 --ks 50`` are
    ``--ks [10, 50]``.
    """
    hints = typing.get_type_hints(verb)
    options = [one.name for one in dataclasses.fields(verb)]
    takes_list = {f"--{name}" for name in options if _takes_list(hints[name], any)}
    takes_nothing_else = {f"--{name}" for name in options if _takes_list(hints[name], all)}
    rest, others = list(words), list[str]()
    lists: dict[str, list[str]] = {}
    if rest and not rest[0].startswith("-"):
        first = next((one.name for one in dataclasses.fields(verb) if not one.kw_only), None)
        rest = rest if first is None else [f"--{first}", *rest]
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in takes_list:
            others.append(flag + equals + value)
            continue
        values = [value] if equals else list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
        del rest[: 0 if equals else len(values)]
        lists.setdefault(flag, []).extend(values)
    for flag, values in lists.items():
        is_whole = len(values) == 1 and (flag not in takes_nothing_else or values[0][:1] == "[" or values[0] == "null")
        others += [flag, values[0] if is_whole else _as_list(values)]
    return others


def _as_list(values: Sequence[str]) -> str:
    """Values of a command line, some of them lists themselves, as one list."""
    entries: list[str] = []
    for value in values:
        if value.startswith("["):
            entries += [json.dumps(one) for one in yaml.safe_load(value)]
        else:
            entries.append(value if _is_yaml(value) else json.dumps(value))
    return "[" + ", ".join(entries) + "]"


def _takes_list(hint: Any, quantifier: Callable[[Iterable[bool]], bool]) -> bool:
    """Whether any, or all, of the types of an option are lists; null does not count."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return quantifier(_takes_list(part, quantifier) for part in typing.get_args(hint) if part is not NoneType)
    return typing.get_origin(hint) in (list, tuple, Sequence)


def _is_yaml(text: str) -> bool:
    """A mapping, a list, or a number as it would be written again; an id such as 007 is text."""
    return text[:1] in ("{", "[") or re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text) is not None


def _validate_local_paths(configuration: Namespace) -> None:
    """Rejects ``s3://...`` for local path options, which would otherwise become a local directory of that name."""
    for name, value in vars(configuration.as_flat()).items():
        if isinstance(value, Path) and _ADDRESS.match(str(value)):
            raise RecpoError(
                f"--{name} {value}: a local path is expected; only the log, the output of prepare, and the "
                "prepared directory that other verbs read can be in an object store",
                code="not_local",
                field=name,
            )


_Entry = dict[str, Any]
#: Where the classes are whose options and subclasses the index has.
_DESCRIBED = ("recpo.", "torch.optim.", "lightning.pytorch.callbacks.", "lightning.pytorch.strategies.")


class _Index:
    """Collects the classes that the described options name."""

    def __init__(self) -> None:
        self.classes: dict[str, _Entry] = {}

    def verb(self, name: str) -> _Entry:
        """The options of a verb, with their help."""
        from recpo.training.configuration import train_parser  # with torch, which no other use of this module needs
        from recpo.training.trainer import TrainOptions

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
        return {
            one.name: self.described(hints.get(one.name, one.annotation), one.default)
            for one in get_signature_parameters(declared, None)
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
