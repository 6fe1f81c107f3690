"""Single-file models in safetensors with a checksum, which an evaluation keeps for its baselines."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from recpo.artifacts import describe_os_error, output_file, sha256
from recpo.base.errors import RecpoError

_VERSION: Final = 1
_REMEDY: Final = "remove the file, it will be made again"
_Model = TypeVar("_Model")


def plain(options: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    return values


class ModelInOneFile:
    """A dataclass that is stored in one file.

    Attributes:
        kind: the kind of model, also stored in the file.
    """

    kind: ClassVar[str]

    def save(self, path: Path | str) -> None:
        """Writes one safetensors file, which appears complete or not at all. An existing file is replaced."""
        write_model(Path(path), self.kind, self)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Reads a file that ``save`` wrote.

        Raises:
            RecpoError: there is no such file, it contains something else, or it is damaged.
        """
        return read_model(Path(path), cls.kind, cls)


def write_model(path: Path, kind: str, model: Any) -> None:
    """Writes a dataclass: its tensors as tensors, all other fields as JSON, and a checksum of both.

    Args:
        path: the file to write; an existing one is replaced.
        kind: the kind of model, for ``read_model``.
        model: a dataclass.
    """
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in values.items() if name not in tensors}
    content = json.dumps({"kind": kind, "version": _VERSION, **others}, sort_keys=True, allow_nan=False)
    kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    checksum = sha256(save(kept) + content.encode())
    with output_file(path) as working:
        working.write_bytes(save(kept, {"model": content, "sha256": checksum}))


def read_model(path: Path, kind: str, model: type[_Model]) -> _Model:
    """Reads a file that ``write_model`` wrote.

    Raises:
        RecpoError: there is no such file, it has another kind or version, or it was changed.
    """
    try:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        described, tensors = json.loads(header["model"]), load(content)
        if sha256(save(tensors) + header["model"].encode()) != header["sha256"]:
            raise RecpoError(f"{path} is not as it was written (its checksum differs); {_REMEDY}")
    except OSError as error:
        raise RecpoError(describe_os_error(error, path)) from error
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise RecpoError(f"{path} is damaged or no model of recpo ({error!r}); {_REMEDY}") from error
    if (described.pop("kind", None), described.pop("version", None)) != (kind, _VERSION):
        raise RecpoError(f"{path} holds no {kind} of this version of recpo; {_REMEDY}")
    try:
        return model(**described, **tensors)
    except TypeError as error:
        raise RecpoError(f"{path} is damaged ({error}); {_REMEDY}") from error
