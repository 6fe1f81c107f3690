"""The options of every verb as Markdown, from the verb's own parser: what ``docs/hooks.py`` puts into the site.

``python docs/verb_options.py`` prints a JSON object, verb -> Markdown. It runs in the environment of recpo, which the
environment of the site does without.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from jsonargparse import ArgumentParser

from recpo.cli.main import VERBS, parser_of, verb_class

#: Options of every verb, said once in docs/reference/index.md.
_COMMON = {"help", "config", "print_config"}
_LONGEST_DEFAULT = 100


class Option(typing.NamedTuple):
    """An option as a reader sees it."""

    flags: tuple[str, ...]
    kind: str
    default: str | None
    required: bool
    text: str


def parser(verb: str) -> ArgumentParser:
    """The parser of ``recpo VERB``."""
    return parser_of(verb_class(verb))


def groups(verb: str) -> Iterator[tuple[str, list[Option]]]:
    """Title and options of every group of a verb's options; the first group has the title of the verb itself."""
    for group in parser(verb)._action_groups:
        options = [_option(action) for action in _shown(group._group_actions)]
        if options:
            yield str(group.title), options


def markdown(verb: str) -> str:
    """The options of a verb as definition lists, a heading for every group after the first."""
    parts = []
    for position, (title, options) in enumerate(groups(verb)):
        if position:
            parts.append(f"### {title[:1].upper()}{title[1:]}\n")
        parts += [_entry(option, verb) for option in options]
    return "\n".join(parts) or "None of its own: see [options of every verb](index.md#options-of-every-verb)."


def _shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    """Without options of every verb, ``--x.help`` and the heads of groups, whose options follow by name."""
    heads = {"_ActionConfigLoad", "_ActionHelpClassPath", "_HelpAction", "_ActionPrintConfig"}
    return [
        action
        for action in actions
        if type(action).__name__ not in heads and action.dest not in _COMMON and action.help != argparse.SUPPRESS
    ]


def _option(action: argparse.Action) -> Option:
    default = None if action.default in (None, argparse.SUPPRESS) else _value(action.default)
    text = re.sub(r"\s+", " ", (action.help or "").replace("%%", "%")).strip()
    kind = getattr(action, "_typehint", None) or action.type
    flags = tuple(action.option_strings) or (action.dest.upper(),)
    return Option(flags, _kind(kind), default, bool(getattr(action, "required", False)), text)


def _value(default: Any) -> str | None:
    if hasattr(default, "class_path"):
        default = {"class_path": default.class_path}
    if isinstance(default, dict) and set(default) <= {"class_path", "init_args"} and "class_path" in default:
        default = default["class_path"].rpartition(".")[2]
    if inspect.isroutine(default) or type(default).__repr__ is object.__repr__:
        return None
    text = json.dumps(default) if isinstance(default, bool | int | float | list | dict) else str(default)
    return text if text and len(text) <= _LONGEST_DEFAULT else None


def _kind(hint: Any) -> str:
    """A type as one reads it: the last part of dotted names, ``null`` for None, the words of a literal."""
    if hint is None:
        return ""
    text = hint.__name__ if inspect.isclass(hint) and not typing.get_args(hint) else str(hint)
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
    text = re.sub(r"Literal\[([^\]]*)\]", lambda match: match[1].replace("'", "").replace(", ", " or "), text)
    text = re.sub(r"Optional\[(.*)\]$", r"\1 or null", text)
    text = re.sub(r"Union\[(.*)\]$", lambda match: match[1].replace(", ", " or "), text)
    text = re.sub(r"Callable\[\[.*\], (\w+)\]", r"\1", text)
    return text.replace(" | ", " or ").replace("NoneType", "null").replace("None", "null").replace("PosixPath", "Path")


def _entry(option: Option, verb: str) -> str:
    name = option.flags[0]
    shown = ", ".join(f"`{flag}`" for flag in option.flags)
    facts = [
        part for part in (f"`{option.kind}`" if option.kind else "", "required" if option.required else "") if part
    ]
    if option.default is not None and not option.required:
        facts.append(f"default `{option.default}`")
    anchor = f'<span id="{verb}-{name.lstrip("-")}"></span>'
    body = option.text[:1].upper() + option.text[1:] or "No description."
    return f"{anchor}{shown} ({', '.join(facts)})\n:   {body}\n" if facts else f"{anchor}{shown}\n:   {body}\n"


if __name__ == "__main__":
    json.dump({verb: markdown(verb) for verb in VERBS}, sys.stdout)
