"""Python values in the form that YAML gives them: what a configuration records, and what another call reads again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
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
