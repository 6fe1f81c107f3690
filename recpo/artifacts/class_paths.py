"""Values and classes by name: what a configuration records of a Python value, and which class a document may name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from os import PathLike, fspath
from typing import Any

from jsonargparse._util import get_import_path

from recpo.base.errors import RecpoError


def as_configuration(value: Any) -> Any:
    """A Python value in the form that YAML would have.

    Directories that recpo wrote become their paths. Classes, ``functools.partial`` of classes, and dataclasses that
    derive from a base (objectives, rewards, layouts, methods) become class paths; others become their fields.

    Raises:
        RecpoError: an object that no configuration can name (code ``wrong_file``).
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)  # also those of a range
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(root := getattr(value, "root", None), PathLike):
        return fspath(root)
    if isinstance(value, Mapping):
        return {str(name): as_configuration(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_configuration(part) for part in value]
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or torch
        return value.item()
    return _of_object(value)


def _of_object(value: Any) -> Any:
    if isinstance(value, functools.partial) and not value.args:
        return {"class_path": _import_path(value.func), "init_args": as_configuration(value.keywords)}
    if inspect.isclass(value):
        return {"class_path": _import_path(value)}
    if is_dataclass(value):
        arguments = {f.name: as_configuration(getattr(value, f.name)) for f in fields(value) if f.init}
        by_class = type(value).__base__ is not object
        return {"class_path": _import_path(type(value)), "init_args": arguments} if by_class else arguments
    raise RecpoError(
        f"{value!r} cannot be written into a configuration: give a class path with its init_args, e.g. "
        '{"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 32}}, or functools.partial(Class, option=value)',
        code="wrong_file",
    )


def _import_path(value: Any) -> str:
    try:
        return str(get_import_path(value))
    except (ValueError, AttributeError) as error:
        raise RecpoError(
            f"{value!r} cannot be imported by name, so no configuration can name it: define it in a module",
            code="wrong_file",
        ) from error


def named_class(name: str, base: type | tuple[type, ...], packages: Sequence[str]) -> type:
    """The class at ``package.module.Class``, if a document may name it.

    The part before the class must be a module of one of ``packages``; only such a module is imported. It is never an
    attribute of a module: ``recpo.cli.main.os.system`` would otherwise be ``os.system``. The class itself must be
    defined in one of ``packages`` too, so what a module imports from elsewhere cannot be named.

    Args:
        name: the full path of a class.
        base: the class is a subclass of it, or of one of them.
        packages: packages that may be named, such as ``recpo`` or ``torch.optim``.

    Raises:
        ValueError: the name is not that of such a class; the message is the reason, as the end of a sentence.
        ImportError: the module needs something that is not installed.
    """
    module_name, _, own_name = name.rpartition(".")
    if not any(lies_in(name, package) for package in packages) or not module_name:
        raise ValueError(f"is not a part of {', '.join(packages)}")
    if any(part.startswith("__") for part in name.split(".")[1:]):
        raise ValueError("is not public")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and lies_in(module_name, error.name):
            raise ValueError(f"is not a class, because {error.name} is not a module") from error
        raise
    found = getattr(module, own_name, None)
    if not inspect.isclass(found):
        raise ValueError("is not a class")
    if not any(lies_in(found.__module__, package) for package in packages):
        raise ValueError(f"is {found.__module__}.{found.__qualname__}, which is not a part of {', '.join(packages)}")
    if not issubclass(found, base):
        bases = base if isinstance(base, tuple) else (base,)
        raise ValueError(f"is not a subclass of {' or '.join(one.__name__ for one in bases)}")
    return found


def lies_in(name: str, package: str) -> bool:
    """Whether a dotted name is that of a package or of something in it."""
    return name == package or name.startswith(package + ".")
