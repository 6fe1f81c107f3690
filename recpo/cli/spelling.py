"""Checks the names of options, keys and classes before anything heavy is imported, and suggests the right ones.

``jsonargparse`` would refuse the same names, seconds later and without a suggestion. What the index of the options does
not decide, such as the options of a class of the user's own, is left to it.
"""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Self

import yaml
from jsonargparse import ArgumentError
from yaml import MappingNode, Node, ScalarNode, SequenceNode

INDEX: Final = Path(__file__).with_name("options.json")
"""The options of every verb and class (``docs/option_index.py``)."""
PACKAGES: Final = ("recpo", "torch", "lightning")
"""Where the classes of options come from, besides the user's own."""
_OF_TERMINALS = ("quiet", "json", "track")
_OF_PARSERS = ("config", "help", "print_config", "print_shtab", *_OF_TERMINALS)
_OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
_MOST_SHOWN = 12
_MOST_SUGGESTED = 3
_LARGEST = 2**63 - 1

_Trail = tuple[str, ...]
_Entry = Mapping[str, Any]  # an option, or the type of an element, as the index has it


class _Options(NamedTuple):
    """The options of a verb, of a class or of several.

    Attributes:
        named: every option by name, as each of the classes has it.
        is_complete: False if the index does not say which others there are.
        is_foreign: a library declares some of them, so its other versions may have others, of quite different names.
    """

    named: Mapping[str, Sequence[_Entry]]
    is_complete: bool = True
    is_foreign: bool = False

    @classmethod
    def of(cls, classes: Iterable[str]) -> Self:
        """All options of all classes."""
        named: dict[str, list[_Entry]] = {}
        found = [index()["classes"][path] for path in classes]
        for one in found:
            for name, entry in one.get("options", {}).items():
                named.setdefault(name, []).append(entry)
        return cls(named, all("options" in one for one in found), any(one["foreign"] for one in found))


_UNKNOWN: Final = _Options({}, is_complete=False)


@cache
def index() -> dict[str, Any]:
    """The content of ``INDEX``: ``verbs`` and ``classes``."""
    found: dict[str, Any] = json.loads(INDEX.read_text(encoding="utf-8"))
    return found


def check_spelling(verb: str, words: Sequence[str]) -> None:
    """Checks the names in the arguments of a verb and in the YAML files that they name.

    Raises:
        ArgumentError: an unknown option, key or class, or a value that is no mapping for a group of options. The
            message says where it is and what was probably meant.
    """
    if not {"-h", "--help"}.isdisjoint(words) or any(word.partition("=")[0].endswith(".help") for word in words):
        return
    options = _Options({name: [entry] for name, entry in index()["verbs"][verb]["options"].items()})
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

    def __init__(self, options: _Options, given: Iterable[_Source]) -> None:
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

    def mapping(self, source: _Source, trail: _Trail, node: MappingNode, options: _Options) -> None:
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

    def _value(self, source: _Source, trail: _Trail, key: Node, value: Node, entries: Sequence[_Entry]) -> None:
        elements = [entry["items"] for entry in entries if "items" in entry]
        if isinstance(value, SequenceNode) and elements:
            for part in value.value:
                self._value(source, trail, part, part, elements)
        elif isinstance(value, MappingNode):
            if not any("unknown" in entry for entry in entries):
                self._mapping_value(source, trail, value, entries)
        elif value.tag.endswith(":null"):
            if not any("null" in entry for entry in entries):
                self._report_fault(source, trail, key, "null is no value of it; leave it out for its default")
        else:
            has_text = any("text" in one for one in [*entries, *elements])
            if value.tag.endswith(":int") and abs(_number(value.value)) > _LARGEST and not has_text:
                self._report_fault(
                    source, trail, key, f"{value.value} is too large; expected a whole number below 2^63"
                )
            if not any({"scalar", "unknown", "values"} & one.keys() for one in [*entries, *elements]):
                self._name_or_group(source, trail, key, value, _classes(entries))

    def _mapping_value(self, source: _Source, trail: _Trail, value: MappingNode, entries: Sequence[_Entry]) -> None:
        if classes := _classes(entries):
            self.mapping(source, trail, value, self._options_at(source, trail, value, classes))
            return
        elements = [entry["values"] for entry in entries if "values" in entry]
        for key, part in value.value if elements else []:
            self._value(source, (*trail, str(key.value)), key, part, elements)

    def _options_at(self, source: _Source, trail: _Trail, node: MappingNode, classes: Sequence[str]) -> _Options:
        """The options of the class that a mapping names; without a name, of every class that it may be."""
        for key, value in node.value:
            if key.value == "class_path" and isinstance(value, ScalarNode):
                found = self._named(source, trail, value, classes)
                return _Options.of(found) if found else _UNKNOWN
        named = self._words.get(tuple(part for part in trail if part not in _OF_CLASSES), set())
        if all(map(_is_group, classes)):
            return _Options.of(classes)
        if not named:  # with trust, the class may be one that only the run of init_from names
            return _UNKNOWN if self._trusts else _Options.of(_known(classes))
        meant = [_named_classes(name, classes) for name in named]
        return _Options.of(path for one in meant for path in one) if all(meant) else _UNKNOWN

    def _name_or_group(self, source: _Source, trail: _Trail, key: Node, value: Node, classes: Sequence[str]) -> None:
        is_text = isinstance(value, ScalarNode) and value.tag.endswith(":str")
        if not classes or (is_text and os.path.isfile(value.value)):
            return
        if all(map(_is_group, classes)):
            names = sorted(_Options.of(classes).named)
            shown = ", ".join(names[:_MOST_SHOWN]) + ", ..." * (len(names) > _MOST_SHOWN)
            given = value.value if isinstance(value, ScalarNode) else "a list"
            self._report_fault(source, trail, key, f"{given} is no mapping; expected one with the keys {shown}")
        elif is_text:
            self._named(source, trail, value, classes)

    def _named(self, source: _Source, trail: _Trail, value: ScalarNode, classes: Sequence[str]) -> list[str]:
        """The classes that a class path may name; none if the index does not have it, as one of the user's own."""
        found = _named_classes(value.value, classes)
        module, _, name = value.value.rpartition(".")
        is_known = _Options.of(classes).is_complete and (not module or module.split(".")[0] in PACKAGES)
        if not found and is_known:
            meant = nearest(name, {path.rpartition(".")[2] for path in _known(classes)})
            if meant or all(one.startswith("recpo") for one in ([module] if module else classes)):
                full = [f"{module}.{one}" if module else one for one in meant]
                self._report_fault(source, trail, value, f"there is no class {value.value}{_suggestion(full)}")
        return found

    def _unknown_key(self, source: _Source, trail: _Trail, key: Node, name: str, options: _Options) -> None:
        known = [*options.named, *(_OF_CLASSES if trail else _OF_TERMINALS if source.file is None else ())]
        found, path = nearest(name, known), ".".join(trail)
        if not found and not trail:
            found = self._elsewhere(name)
        if not found and options.is_foreign:
            return
        if source.file is None:
            full = ["--" + f"{path}.{one}".lstrip(".") for one in found]
            raise ArgumentError(None, f"--{path}{'.' * bool(path)}{name}: unknown option{_suggestion(full)}")
        group = ".".join(part for part in trail if part not in _OF_CLASSES)
        what = f"key {name!r}" + (f" of {group}" if group else "") + " is unknown"
        raise ArgumentError(None, f"{_line(source.file, key)}: {what}{_suggestion(found)}")

    def _elsewhere(self, name: str) -> list[str]:
        """The nested options of this name, for one that the verb itself does not have."""
        groups = {group: _known(_classes(entries)) for group, entries in self._options.named.items()}
        found = [f"{group}.{name}" for group, classes in groups.items() if name in _Options.of(classes).named]
        return found[:_MOST_SUGGESTED]

    def _report_fault(self, source: _Source, trail: _Trail, key: Node, fault: str) -> NoReturn:
        if source.file is None:
            raise ArgumentError(None, f"--{'.'.join(trail)}: {fault}")
        raise ArgumentError(None, f"{_line(source.file, key)}: {'.'.join(trail)}: {fault}")


def _classes(entries: Iterable[_Entry]) -> list[str]:
    """The classes among the forms of a value, and those of its elements."""
    elements = [one["items"] for one in entries if "items" in one]
    return [path for one in [*entries, *elements] for path in one.get("classes", ())]


def _known(classes: Iterable[str]) -> list[str]:
    """The paths of the classes and their subclasses."""
    return [path for one in classes for path in index()["classes"][one].get("known", ())]


def _is_group(path: str) -> bool:
    return bool(index()["classes"][path]["group"])


def _named_classes(name: str, classes: Iterable[str]) -> list[str]:
    """The paths of the classes that a class path may name, from whatever module of their package."""
    module, _, last = name.rpartition(".")
    found = [path for path in _known(classes) if path.endswith(f".{last}")]
    return [path for path in found if not module or module.split(".")[0] == path.split(".")[0]]


def _number(text: str) -> int:
    try:
        return int(text.replace("_", ""), 0)
    except ValueError:  # other notations of YAML, such as 1:30
        return 0


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
