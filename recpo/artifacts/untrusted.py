"""What others wrote: archives checked before torch reads them, and classes named without running their code."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile


def validate_archive(file: Path, *, contents: bool) -> None:
    """Raises unless torch reads an archive as it is here, and none of its records is larger than the archive.

    torch stores records as they are. A compressed record could become thousands of times its size in memory (a "zip
    bomb"), and a memory-mapped one would be read as the bytes that it was compressed to. A record that its attributes
    mark as a directory gives torch nothing to read: the tensor would keep whatever its memory contained.

    Args:
        file: the archive.
        contents: also compare the CRC-32 of every record, which torch does not do. This reads the whole file.

    Raises:
        ValueError, OSError, zipfile.BadZipFile, EOFError, NotImplementedError: it is no such archive, or is damaged.
    """
    with ZipFile(file) as archive:
        names = set[str]()
        for record in archive.infolist():
            if record.compress_type != ZIP_STORED or record.compress_size != record.file_size:
                raise ValueError(f"{record.filename} is compressed")
            if record.filename in names:
                raise ValueError(f"{record.filename}: two records have this name")
            if record.external_attr or record.is_dir():
                raise ValueError(f"{record.filename}: its attributes have changed")
            names.add(record.filename)
        if sum(record.file_size for record in archive.infolist()) > file.stat().st_size:
            raise ValueError("its records are larger than the file")
        for record in archive.infolist() if contents else ():
            with archive.open(record) as content:
                while content.read(1 << 20):
                    pass


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
