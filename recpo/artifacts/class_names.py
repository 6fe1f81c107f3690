"""Finds the class that a document names, without running code of anyone else."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module


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
