"""``recpo VERB --help``: what a user sets on the first day, on one screen, read from the source without an import."""

from __future__ import annotations

import ast
import re
import shutil
import textwrap

from recpo.cli.signatures import Definition, entry, find, options_of, resolve

_SECTION = re.compile(r"\n\s*(?:Args|Attributes):\n(.*?)(?=\n\s*(?:Returns|Raises):\n|\Z)", re.DOTALL)
_ENTRY = re.compile(r"^ *\*{0,2}(\w+): (.*?)(?=\n *\w+: |\Z)", re.DOTALL | re.MULTILINE)
_COLUMN = 20


def short_help(verb: str, summary: str) -> str:
    """The options of the first day with the first sentence of their help, and the names of the others."""
    width = min(100, shutil.get_terminal_size().columns)
    options, docs = options_of(entry(verb)).named, documentation(entry(verb))
    explained = [name for name in _first_day(verb) if name in options] or list(options)
    lines = [f"recpo {verb}: {summary}", ""]
    for name in explained:
        required = all(one.default is None for one in options[name]) and verb != "train"  # a file gives most of these
        text = _first_sentence(docs.get(name, "")) + (" (required)" if required else "")
        wrapped = textwrap.wrap(text, width - _COLUMN) or [""]
        lines.append(f"  --{name:<{_COLUMN - 5}} {wrapped[0]}")
        lines += [" " * _COLUMN + line for line in wrapped[1:]]
    if others := [name for name in options if name not in explained and name != "config"]:
        lines += [
            "",
            *textwrap.wrap("also: " + ", ".join(f"--{name}" for name in others), width, break_on_hyphens=False),
        ]
    lines += ["", f"--config FILE.yaml reads options from a file; recpo {verb} --help all explains every option."]
    return "\n".join(lines)


def _first_day(verb: str) -> tuple[str, ...]:
    found = find(f"recpo.verbs.{verb}", verb.capitalize())
    fields = found.node.body if found is not None and isinstance(found.node, ast.ClassDef) else []
    named = [one.value for one in fields if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "first_day"]
    return tuple(ast.literal_eval(named[0])) if named and named[0] is not None else ()


def documentation(definition: Definition | None) -> dict[str, str]:
    """Option -> its help: docstrings of fields, entries of ``Args`` and ``Attributes``, and helps of a parser."""
    if definition is None:
        return {}
    module, node = definition
    found: dict[str, str] = {}
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            parent = resolve(module, base.value if isinstance(base, ast.Subscript) else base)
            found |= documentation(parent)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _text(text) is not None:
                found[field.target.id] = str(_text(text))
    if isinstance(node, ast.FunctionDef):
        found |= _of_parser(definition)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        for section in _SECTION.findall(ast.get_docstring(node) or ""):
            found |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}
    return found


def _of_parser(definition: Definition) -> dict[str, str]:
    found: dict[str, str] = {}
    for call in ast.walk(definition.node):
        method = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
        if isinstance(call, ast.Call) and method == "add_class_arguments":
            part = resolve(definition.module, call.args[0])
            found |= documentation(part)
        elif isinstance(call, ast.Call) and method == "add_argument" and isinstance(call.args[0], ast.Constant):
            texts = [key.value for key in call.keywords if key.arg == "help"]
            found[str(call.args[0].value).lstrip("-")] = str(ast.literal_eval(texts[0])) if texts else ""
    return found


def _text(node: ast.stmt) -> str | None:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return " ".join(node.value.value.split()) if is_text else None  # type: ignore[attr-defined]


def _first_sentence(text: str) -> str:
    plain = text.replace("``", "")
    return re.split(r"(?<=[^.\d])\. |; ", plain)[0].rstrip(".")
