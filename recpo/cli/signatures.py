"""The options of functions and classes and their help on one screen, read from the source without importing it.

Importing a verb takes seconds, because torch comes with it; parsing the few files that declare its options takes a
tenth of one. What the source does not say is reported as unknown, never guessed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

_WITHOUT_OPTIONS = frozenset({"ABC", "Generic", "Protocol", "NamedTuple", "TypedDict", "object", "Module"})
NUMBERS = frozenset(
    {"int", "float", "bool", "PositiveInt", "NonNegativeInt", "Seed", "PositiveFloat", "NonNegativeFloat"}
    | {"ClosedUnitInterval", "OpenUnitInterval"}
)
"""Types of numbers and booleans; the ranges are those of ``recpo.base.ranges``."""
_SCALARS = NUMBERS | {"str", "Path", "PathLike", "Literal"}
_LISTS = frozenset({"list", "List", "Sequence", "Iterable", "tuple", "set", "frozenset"})
PACKAGES = ("recpo", "torch", "lightning")
"""Where the classes of options come from, besides the user's own."""
_LONGEST_CHAIN = 12  # of imports from one module to the next
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A source file: ``names`` has what it defines, and ``(module, name)`` of what it imports."""

    name: str
    file: Path
    names: dict[str, ast.AST | tuple[str, str]]


class Definition(NamedTuple):
    """A class, a function, or an expression such as the alias of a type, and the module that it is in."""

    module: Module
    node: ast.AST


class Option(NamedTuple):
    """A parameter or field; None = not stated."""

    module: Module
    annotation: ast.AST | None
    default: ast.AST | None


class Options(NamedTuple):
    """The options of a function or class; ``is_complete`` is False if it may have others."""

    named: dict[str, list[Option]]
    is_complete: bool

    @classmethod
    def union(cls, parts: Iterable[Options]) -> Options:
        """All options of all parts."""
        named: dict[str, list[Option]] = {}
        is_complete = True
        for part in parts:
            is_complete &= part.is_complete
            for name, options in part.named.items():
                named.setdefault(name, []).extend(options)
        return cls(named, is_complete)


class Form(NamedTuple):
    """One form that a value may have; ``of`` is the class, or the type of the elements."""

    kind: Literal["class", "list", "dict", "null", "scalar", "unknown"]
    of: Definition | None = None


_UNKNOWN = Options({}, is_complete=False)


@cache
def read(module: str) -> Module | None:
    """The names of a module; None if it is not found, or not written in Python."""
    package, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(place, *rest) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    if not rest and not places and spec.origin is not None and spec.origin.endswith(".py"):
        files = [Path(spec.origin)]  # a module that is no package
    file = next(filter(Path.is_file, files), None)
    try:
        return None if file is None else Module(module, file, _names(module, file))
    except (OSError, SyntaxError, ValueError):
        return None


def _names(module: str, file: Path) -> dict[str, ast.AST | tuple[str, str]]:
    stub = file.with_suffix(".pyi")  # of a package whose names are imported when they are first used
    sources = [file, stub] if stub.is_file() else [file]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names: dict[str, ast.AST | tuple[str, str]] = {}
    pending: list[ast.AST] = [node for source in sources for node in ast.parse(source.read_text("utf-8")).body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If | ast.Try):
            pending += ast.iter_child_nodes(node)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*parents, *filter(None, [node.module])])
            names.update({alias.asname or alias.name: (source, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            bound = [(alias.asname, alias.name) for alias in node.names]
            names.update(
                {known or name.split(".")[0]: (name if known else name.split(".")[0], "") for known, name in bound}
            )
        elif isinstance(node, ast.ClassDef | _Function):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names.update({target.id: node.value} if isinstance(target, ast.Name) else {})
    return names


@cache
def find(module: str, name: str, chain: int = 0) -> Definition | None:
    """What ``name`` is in a module, through its imports; None if the source does not tell."""
    source = read(module) if chain < _LONGEST_CHAIN else None
    found = None if source is None else source.names.get(name)
    if source is None or found is None:
        return None
    return find(*found, chain + 1) if isinstance(found, tuple) else Definition(source, found)


def entry(verb: str) -> Definition | None:
    """What declares the options of a verb: its dataclass, or the function that builds the parser of ``train``."""
    if verb == "train":
        return find("recpo.training.fit", "train_parser")
    return find(f"recpo.verbs.{verb}", verb.capitalize())


def resolve(module: Module, expression: ast.AST | None) -> Definition | None:
    """The definition that a name such as ``Adam`` or ``torch.optim.Adam`` refers to."""
    if isinstance(expression, ast.Name):
        return find(module.name, expression.id)
    if isinstance(expression, ast.Attribute):
        first, *rest = ast.unparse(expression).split(".")
        imported = module.names.get(first)
        if isinstance(imported, tuple):
            return find(".".join([*filter(None, imported), *rest[:-1]]), rest[-1])
    return None


def options_of(definition: Definition | None, callers: tuple[ast.AST, ...] = ()) -> Options:
    """The options of a function, of a class, or of a function that builds a parser."""
    if definition is None or definition.node in callers:
        return _UNKNOWN
    module, node = definition
    if isinstance(node, ast.ClassDef):
        return _of_class(module, node, (*callers, node))
    if isinstance(node, _Function):
        return _of_parser(module, node) or _of_function(module, node, node, (*callers, node))
    return _UNKNOWN


def _of_parser(module: Module, node: _Function) -> Options | None:
    """The options that a function adds to a parser; None if it builds none."""
    parts = []
    for call in ast.walk(node):
        method = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
        if not isinstance(call, ast.Call) or method not in ("add_argument", "add_class_arguments"):
            continue
        first, given = call.args[0], {keyword.arg: keyword.value for keyword in call.keywords}
        if method == "add_class_arguments":
            parts.append(options_of(resolve(module, first)))
        elif isinstance(first, ast.Constant):
            option = Option(module, given.get("type"), given.get("default"))
            parts.append(Options({str(first.value).lstrip("-"): [option]}, is_complete=True))
    return Options.union(parts) if parts else None


def _of_function(module: Module, node: _Function, scope: ast.AST, callers: tuple[ast.AST, ...]) -> Options:
    """Parameters, with those of the calls in ``scope`` that get the function's ``**options``."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.AST | None] = [None] * (len(positional) - len(given.defaults))
    pairs = [*zip(positional, [*defaults, *given.defaults], strict=True)]
    pairs = [*pairs[scope is not node :], *zip(given.kwonlyargs, given.kw_defaults, strict=True)]  # no self of a class
    own = Options({one.arg: [Option(module, one.annotation, default)] for one, default in pairs}, is_complete=True)
    return own if given.kwarg is None else Options.union([own, _forwarded(module, node, scope, callers)])


def _forwarded(module: Module, node: _Function, scope: ast.AST, callers: tuple[ast.AST, ...]) -> Options:
    """The options that the calls with ``**options``, or ``**self._options`` where that is the same, leave open."""
    assert node.args.kwarg is not None
    passed = {node.args.kwarg.arg}
    for statement in ast.walk(node):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value) in passed:
            passed.add(ast.unparse(statement.targets[0]))
    parts = []
    for call in ast.walk(scope):
        if isinstance(call, ast.Call) and any(k.arg is None and ast.unparse(k.value) in passed for k in call.keywords):
            if ast.unparse(call.func) == "super().__init__" and isinstance(scope, ast.ClassDef):
                options = _of_bases(module, scope, callers)
            else:
                target = resolve(module, call.func)
                if target is not None and target.node is scope:
                    continue  # the class itself, made again
                options = options_of(target, callers)
            taken = {*list(options.named)[: len(call.args)], *(keyword.arg for keyword in call.keywords)}
            parts.append(options._replace(named={k: v for k, v in options.named.items() if k not in taken}))
    return Options.union(parts) if parts else _UNKNOWN


def _of_class(module: Module, node: ast.ClassDef, callers: tuple[ast.AST, ...]) -> Options:
    for method in reversed(node.body):
        if isinstance(method, _Function) and method.name == "__init__":
            return _of_function(module, method, node, callers)
    inherited = _of_bases(module, node, callers)
    return Options.union([inherited, _fields(module, node)]) if _has_fields(node) else inherited


def _of_bases(module: Module, node: ast.ClassDef, callers: tuple[ast.AST, ...]) -> Options:
    bases = [base for base in map(_head, node.bases) if ast.unparse(base).split(".")[-1] not in _WITHOUT_OPTIONS]
    return Options.union(options_of(resolve(module, base), callers) for base in bases)


def _head(expression: ast.AST) -> ast.AST:
    return expression.value if isinstance(expression, ast.Subscript) else expression


def _has_fields(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base) for base in node.bases}
    return is_dataclass(node) or bool(bases & {"NamedTuple", "TypedDict"})


def is_dataclass(node: ast.AST) -> bool:
    """Whether a class has the decorator ``dataclass``."""
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list)


def _fields(module: Module, node: ast.ClassDef) -> Options:
    named = {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            text = ast.unparse(line.annotation), "" if line.value is None else ast.unparse(line.value)
            is_option = line.target.id != "_" and "PYTHON_ONLY" not in text[1]
            if is_option and not text[0].startswith("ClassVar") and "init=False" not in text[1]:
                named[line.target.id] = [Option(module, line.annotation, line.value)]
    return Options(named, is_complete=True)


def is_group(definition: Definition) -> bool:
    """Whether the options of a class are a group: a dataclass that inherits from dataclasses at most."""
    module, node = definition
    if not isinstance(node, ast.ClassDef) or not is_dataclass(node):
        return False
    bases = [resolve(module, base) for base in node.bases]
    return all(base is not None and is_group(base) for base in bases)


def default_of(option: Option) -> Definition | None:
    """The class of an option's default: of ``SequenceLayout()``, ``Adam`` or ``field(default_factory=Columns)``."""
    default = option.default
    if isinstance(default, ast.Call):
        made = [keyword.value for keyword in default.keywords if keyword.arg == "default_factory"]
        default = made[0] if made and ast.unparse(default.func) == "field" else default.func
    found = resolve(option.module, default)
    return found if found is not None and isinstance(found.node, ast.ClassDef) else None


def forms(module: Module, annotation: ast.AST | None) -> Iterator[Form]:
    """The forms that values of an annotation may have."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Constant):
        yield Form("null" if annotation.value is None else "unknown")
    elif isinstance(annotation, ast.BinOp):
        yield from (form for side in (annotation.left, annotation.right) for form in forms(module, side))
    elif isinstance(annotation, ast.Subscript):
        yield from _forms_of_generic(module, annotation)
    else:
        yield from _forms_of_name(module, annotation)


def _forms_of_generic(module: Module, annotation: ast.Subscript) -> Iterator[Form]:
    head, inner = ast.unparse(annotation.value).split(".")[-1], annotation.slice
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if head in _LISTS:
        yield from (Form("list", Definition(module, part)) for part in parts if ast.unparse(part) != "...")
    elif head in ("dict", "Mapping"):
        yield Form("dict", Definition(module, parts[-1]))
    elif head in ("Optional", "Union"):
        yield from (form for part in parts for form in forms(module, part))
        yield Form("null")
    elif head == "Callable":
        yield from forms(module, parts[-1])  # a class path whose objects are what the function returns
    else:
        yield Form("scalar" if head in _SCALARS else "unknown")


def _forms_of_name(module: Module, annotation: ast.AST | None) -> Iterator[Form]:
    if isinstance(annotation, ast.Name) and annotation.id in _SCALARS and annotation.id not in _aliases(module):
        yield Form("scalar")
        return
    found = resolve(module, annotation)
    if found is None:
        yield Form("unknown")
    elif isinstance(found.node, ast.ClassDef):
        is_enum = any("Enum" in ast.unparse(base) for base in found.node.bases)
        is_known = found.module.name.split(".")[0] in PACKAGES and not is_enum
        yield Form("class", found) if is_known else Form("unknown")
    else:
        yield from forms(*found)


def _aliases(module: Module) -> set[str]:
    return {name for name, value in module.names.items() if not isinstance(value, tuple)}


@cache
def subclasses(name: str, module: str) -> dict[str, str]:
    """Name -> module of a class and its subclasses, in recpo and in the directory of its own module."""
    found, pending = {name: module}, [name]
    while pending:
        base = pending.pop()
        children = [child for package in {"recpo", _package(module)} for child in _children(package).get(base, ())]
        new = {child: where for child, where in children if child not in found}
        found |= new
        pending += new
    return found


@cache
def _children(package: str) -> dict[str, list[tuple[str, str]]]:
    """Name of a class -> the names and modules of the classes in the package that inherit from one of this name."""
    source = read(package)
    assert source is not None
    children: dict[str, list[tuple[str, str]]] = {}
    place = source.file.parent
    for file in place.rglob("*.py"):
        where = ".".join([package, *file.relative_to(place).with_suffix("").parts]).removesuffix(".__init__")
        text = file.read_text(encoding="utf-8", errors="replace")
        for child, bases in re.findall(r"^class (\w+)\(([^)]*)\)", text, re.MULTILINE):
            for base in re.findall(r"(\w+)(?=\s*(?:,|\[|$))", bases):
                children.setdefault(base, []).append((child, where))
    return children


def _package(module: str) -> str:
    source = read(module)
    assert source is not None
    return (
        "recpo"
        if module.startswith("recpo.")
        else module
        if source.file.name == "__init__.py"
        else module.rpartition(".")[0]
    )


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
        found |= _parser_helps(definition)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        for section in _SECTION.findall(ast.get_docstring(node) or ""):
            found |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}
    return found


def _parser_helps(definition: Definition) -> dict[str, str]:
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
