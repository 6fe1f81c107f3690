"""The parser of a verb, made from the fields of its dataclass: flags, YAML keys, types, defaults and help."""

import dataclasses
import functools
import importlib
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

from recpo.base.errors import RecpoError
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
