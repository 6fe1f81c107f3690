"""Checks the names of options, keys and classes before anything heavy is imported, and suggests the right ones.

``jsonargparse`` would refuse the same names, seconds later and without a suggestion. What the source of the package
does not decide, such as the options of a class of the user's own, is left to it.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import yaml
from jsonargparse import ArgumentError
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from recpo.cli.signatures import (
    NUMBERS,
    PACKAGES,
    Definition,
    Form,
    Option,
    Options,
    default_of,
    entry,
    find,
    forms,
    is_group,
    options_of,
    read,
    subclasses,
)

_OF_TERMINALS = ("quiet", "json", "track")
_OF_PARSERS = ("config", "help", "print_config", "print_shtab", *_OF_TERMINALS)
_OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
_MOST_SHOWN = 12
_MOST_SUGGESTED = 3
_LARGEST = 2**63 - 1

_Trail = tuple[str, ...]


def check_spelling(verb: str, words: Sequence[str]) -> None:
    """Checks the names in the arguments of a verb and in the YAML files that they name.

    Raises:
        ArgumentError: an unknown option, key or class, or a value that is no mapping for a group of options. The
            message says where it is and what was probably meant.
    """
    if not {"-h", "--help"}.isdisjoint(words) or any(word.partition("=")[0].endswith(".help") for word in words):
        return
    options = options_of(entry(verb))
    given = list(_given(words))
    check = _Check(options, given)
    for source in given:
        check.mapping(source, (), source.node, options)


class _Source(NamedTuple):
    """Options as a tree, from a file or (None) from one word of the command line."""

    file: str | None
    node: MappingNode


def _given(words: Sequence[str]) -> Iterator[_Source]:
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else None
        if not flag.startswith("--") or word == "--":
            continue
        text = value if equals else None if following is None or following.startswith("--") else following
        if flag == "--config" and text is not None:
            is_file = os.path.isfile(text)
            node = _composed(Path(text).read_text(encoding="utf-8") if is_file else text)
            if isinstance(node, MappingNode):
                yield _Source(text if is_file else None, node)
            continue
        yield _Source(None, _nested(flag[2:].split("."), _composed("{}" if text is None else text)))


def _composed(text: str) -> Node:
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except (ValueError, RecursionError, yaml.YAMLError):
        node = None
    return ScalarNode("tag:yaml.org,2002:str", text) if node is None else node


def _nested(names: Sequence[str], value: Node) -> MappingNode:
    for name in reversed(names):
        value = MappingNode("tag:yaml.org,2002:map", [(ScalarNode("tag:yaml.org,2002:str", name), value)])
    assert isinstance(value, MappingNode)
    return value


class _Check:
    """Walks the trees of all sources against the options of a verb."""

    def __init__(self, options: Options, given: Iterable[_Source]) -> None:
        self._options = options
        self._words: dict[_Trail, set[str]] = {}  # every text by the option that it belongs to
        for source in given:
            self._collect((), source.node)
        self._trusts = ("trust",) in self._words

    def _collect(self, trail: _Trail, node: Node) -> None:
        if isinstance(node, MappingNode):
            for key, value in node.value:
                inner = [part for part in str(key.value).split(".") if part not in _OF_CLASSES]
                self._collect((*trail, *inner), value)
        elif isinstance(node, SequenceNode):
            self._words.setdefault(trail, set())
            for value in node.value:
                self._collect(trail, value)
        elif isinstance(node, ScalarNode) and node.tag.endswith(":str"):
            self._words.setdefault(trail, set()).add(node.value)

    def mapping(self, source: _Source, trail: _Trail, node: MappingNode, options: Options) -> None:
        """Checks the keys of a mapping, and their values."""
        for key, value in node.value:
            first, *rest = str(key.value).split(".")
            value = _nested(rest, value) if rest else value
            name = first.removesuffix("+")
            if key.tag.endswith(":merge"):
                for part in value.value if isinstance(value, SequenceNode) else [value]:
                    self.mapping(source, trail, part, options)
            elif trail and name in _OF_CLASSES:
                if name == "init_args" and isinstance(value, MappingNode):
                    self.mapping(source, (*trail, name), value, options)
            elif name in options.named:
                self._value(source, (*trail, name), key, value, options.named[name])
            elif options.is_complete and (trail or name not in _OF_PARSERS):
                self._unknown_key(source, trail, key, name, options)

    def _value(self, source: _Source, trail: _Trail, key: Node, value: Node, options: Sequence[Option]) -> None:
        known = [form for option in options for form in forms(option.module, option.annotation)]
        elements = [Option(*form.of, None) for form in known if form.kind == "list" and form.of]
        kinds = {form.kind for form in known}
        if isinstance(value, SequenceNode) and "list" in kinds:
            for part in value.value:
                self._value(source, trail, part, part, elements)
        elif isinstance(value, MappingNode):
            if "unknown" not in kinds:
                self._mapping_value(source, trail, value, known, options)
        elif value.tag.endswith(":null"):
            if not any(map(_may_be_null, options)):
                self._report_fault(source, trail, key, "null is no value of it; leave it out for its default")
        else:
            if value.tag.endswith(":int") and abs(_number(value.value)) > _LARGEST and not _has_text(options):
                self._report_fault(
                    source, trail, key, f"{value.value} is too large; expected a whole number below 2^63"
                )
            known += [form for one in elements for form in forms(one.module, one.annotation)]
            if {"class"} <= {form.kind for form in known} <= {"class", "null", "list"}:
                self._name_or_group(source, trail, key, value, list(_classes(known)))

    def _mapping_value(
        self, source: _Source, trail: _Trail, value: MappingNode, known: Sequence[Form], options: Sequence[Option]
    ) -> None:
        classes = list(_classes(known))
        if classes:
            self.mapping(source, trail, value, self._options_at(source, trail, value, classes, options))
            return
        elements = [Option(*form.of, None) for form in known if form.kind == "dict" and form.of]
        for key, part in value.value if elements else []:
            self._value(source, (*trail, str(key.value)), key, part, elements)

    def _options_at(
        self,
        source: _Source,
        trail: _Trail,
        node: MappingNode,
        classes: Sequence[Definition],
        options: Sequence[Option],
    ) -> Options:
        """The options of the class that a mapping names; without a name, of every class that it may be."""
        for key, value in node.value:
            if key.value == "class_path" and isinstance(value, ScalarNode):
                return options_of(self._class(source, trail, value, classes))
        if all(map(is_group, classes)):
            return Options.union(map(options_of, classes))
        named = self._words.get(tuple(part for part in trail if part not in _OF_CLASSES), set())
        if not named and self._trusts:  # of a class that only the run of init_from names
            return Options({}, is_complete=False)
        found = [_named_class(name, classes) for name in named]
        found += [*classes, *filter(None, map(default_of, options))]
        if not named:
            found += [find(module, name) for name, module in _known_classes(classes).items()]
        return Options.union(map(options_of, found))

    def _name_or_group(
        self, source: _Source, trail: _Trail, key: Node, value: Node, classes: Sequence[Definition]
    ) -> None:
        is_text = isinstance(value, ScalarNode) and value.tag.endswith(":str")
        if is_text and os.path.isfile(value.value):
            return
        if all(map(is_group, classes)):
            names = sorted(Options.union(map(options_of, classes)).named)
            shown = ", ".join(names[:_MOST_SHOWN]) + ", ..." * (len(names) > _MOST_SHOWN)
            given = value.value if isinstance(value, ScalarNode) else "a list"
            self._report_fault(source, trail, key, f"{given} is no mapping; expected one with the keys {shown}")
        elif is_text:
            self._class(source, trail, value, classes)

    def _class(
        self, source: _Source, trail: _Trail, value: ScalarNode, classes: Sequence[Definition]
    ) -> Definition | None:
        """The class that a class path names; None if the source does not tell."""
        found = _named_class(value.value, classes)
        if found is None:
            self._validate_class(source, trail, value, classes)
        return found

    def _validate_class(self, source: _Source, trail: _Trail, value: ScalarNode, classes: Sequence[Definition]) -> None:
        """Refuses a class path that cannot be one, or that is close to one that is."""
        module, _, name = value.value.rpartition(".")
        place = read(module) if module.split(".")[0] in PACKAGES else None
        known = _known_classes(classes) if not module else {} if place is None else place.names
        meant = nearest(name, [one for one in known if not one.startswith("_")])
        places = [module] if module else [one.module.name for one in classes]
        is_ours = all(one.split(".")[0] == "recpo" for one in places) and bool(known)
        if is_ours or meant:
            full = [f"{module}.{one}" if module else one for one in meant]
            self._report_fault(source, trail, value, f"there is no class {value.value}{_suggestion(full)}")

    def _unknown_key(self, source: _Source, trail: _Trail, key: Node, name: str, options: Options) -> NoReturn:
        known = [*options.named, *(_OF_CLASSES if trail else _OF_TERMINALS if source.file is None else ())]
        found, path = nearest(name, known), ".".join(trail)
        if not found and not trail:
            found = self._elsewhere(name)
        if source.file is None:
            full = ["--" + f"{path}.{one}".lstrip(".") for one in found]
            raise ArgumentError(None, f"--{path}{'.' * bool(path)}{name}: unknown option{_suggestion(full)}")
        group = ".".join(part for part in trail if part not in _OF_CLASSES)
        what = f"key {name!r}" + (f" of {group}" if group else "") + " is unknown"
        raise ArgumentError(None, f"{_line(source.file, key)}: {what}{_suggestion(found)}")

    def _elsewhere(self, name: str) -> list[str]:
        """The nested options of this name, for one that the verb itself does not have."""
        found = []
        for group, options in self._options.named.items():
            known = [form for option in options for form in forms(option.module, option.annotation)]
            inside = Options.union(map(options_of, [*_classes(known), *filter(None, map(default_of, options))]))
            found += [f"{group}.{name}"] * (name in inside.named)
        return found

    def _report_fault(self, source: _Source, trail: _Trail, key: Node, fault: str) -> NoReturn:
        if source.file is None:
            raise ArgumentError(None, f"--{'.'.join(trail)}: {fault}")
        raise ArgumentError(None, f"{_line(source.file, key)}: {'.'.join(trail)}: {fault}")


def _classes(known: Iterable[Form]) -> Iterator[Definition]:
    """The classes among the forms of a value, and those of its elements."""
    for form in known:
        if form.of is not None and form.kind == "class":
            yield form.of
        elif form.of is not None and form.kind == "list":
            yield from _classes(forms(*form.of))


def _known_classes(classes: Iterable[Definition]) -> dict[str, str]:
    found: dict[str, str] = {}
    for module, node in classes:
        found |= subclasses(getattr(node, "name", ""), module.name)
    return found


def _named_class(name: str, classes: Iterable[Definition]) -> Definition | None:
    module, _, last = name.rpartition(".")
    module = module or _known_classes(classes).get(last, "")
    return find(module, last) if module else None


def _number(text: str) -> int:
    try:
        return int(text.replace("_", ""), 0)
    except ValueError:  # other notations of YAML, such as 1:30
        return 0


def _may_be_null(option: Option) -> bool:
    """False for numbers, booleans and groups that are not optional: null would reach the verb, and end it."""
    if isinstance(option.default, ast.Constant) and option.default.value is None:
        return True
    if option.annotation is not None and ast.unparse(option.annotation) in NUMBERS:
        return False
    known = list(forms(option.module, option.annotation))
    return not all(form.kind == "class" and form.of is not None and is_group(form.of) for form in known)


def _has_text(options: Sequence[Option]) -> bool:
    """Whether a value may be text, such as an id, which has no largest number."""
    return any(one.annotation is not None and "str" in ast.unparse(one.annotation) for one in options)


def _line(file: str, node: Node) -> str:
    return file if node.start_mark is None else f"{file}, line {node.start_mark.line + 1}"


def _suggestion(meant: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The most similar names, at most three, if at most one letter in three differs; swapped letters count once."""
    plain = word.lower().replace("-", "_")
    ranked = sorted(
        (_distance(plain, name.lower()), -difflib.SequenceMatcher(None, plain, name.lower()).ratio(), name)
        for name in known
    )
    least = ranked[0][0] if ranked else len(word)
    return [name for far, _, name in ranked if far == least <= max(1, len(word) // 3)][:_MOST_SUGGESTED]


def _distance(a: str, b: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbor (optimal string alignment)."""
    rows = [list(range(len(b) + 1))]
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and other == a[i - 2]:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
