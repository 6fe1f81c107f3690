"""How the tensors of checkpoints are read, in every format, without unpickling.

A checkpoint is one file, or a directory that the ranks of a sharded run wrote. A directory has safetensors files, each
with one rank's blocks of the tensors and their positions. This module combines the blocks on demand, without torchrec
and without other ranks.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from recpo.artifacts.documents import describe_os_error, validate_archive
from recpo.base.errors import RecpoError

META = "meta.pt"
"""The file for everything that is not a tensor. A directory without it is not a checkpoint."""
RUN = "run"
"""Entry of a checkpoint: the run that wrote it (``RunDirectory.identity``)."""
SHAPES = "shapes"
"""Entry of ``meta.pt``: the shape of every tensor, by name, so that no lost file goes unnoticed."""
_REMEDY = "copy it again, or train again with --overwrite true"


class _Block(NamedTuple):
    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class LazyRows:
    """Rows of a tensor that are read, or computed, when they are asked for.

    Args:
        shape: of the complete tensor.
        read: the rows from ``begin`` to ``end``.
    """

    def __init__(self, shape: torch.Size, read: Callable[[int, int], Tensor]) -> None:
        self.shape, self._read = shape, read

    def __getitem__(self, rows: slice) -> Tensor:
        """The rows of a range with step 1, like indexing a tensor."""
        begin, end, _ = rows.indices(self.shape[0])
        return self._read(begin, max(begin, end))

    def whole(self) -> Tensor:
        """The complete tensor."""
        return self[:] if self.shape else self._read(0, 0)


def _read_rows(name: str, blocks: list[_Block], shape: torch.Size, begin: int, end: int) -> Tensor:
    """The rows of a tensor in the files of a checkpoint; a number as it is."""
    if not shape:
        with safe_open(blocks[0].file, framework="pt") as file:
            number: Tensor = file.get_tensor(name)
        return number
    whole: Tensor | None = None
    for block in blocks:
        low, high = max(begin, block.offset[0]), min(end, block.offset[0] + block.shape[0])
        if low >= high:
            continue
        with safe_open(block.file, framework="pt") as file:
            part = file.get_slice(name)[low - block.offset[0] : high - block.offset[0]]
        whole = part.new_empty(end - begin, *shape[1:]) if whole is None else whole
        places = [slice(low - begin, high - begin)]
        places += [slice(o, o + s) for o, s in zip(block.offset[1:], block.shape[1:], strict=True)]
        whole[tuple(places)] = part
    return torch.empty(0, *shape[1:]) if whole is None else whole


def saved_tensors(checkpoint: Path) -> dict[str, Tensor | LazyRows]:
    """The weights in a checkpoint, by name. Nothing is unpickled, and large tensors stay on disk.

    Raises:
        RecpoError: there is no checkpoint, or it is damaged.
    """
    if checkpoint.is_file():
        return dict(_weights(load_plain(checkpoint), checkpoint))
    if not (checkpoint / META).is_file():
        raise RecpoError(
            f"{checkpoint} is missing: the run kept no such checkpoint", code="missing_file", field=checkpoint.name
        )
    content, blocks = load_plain(checkpoint / META), defaultdict[str, list[_Block]](list)
    with _damage(checkpoint):
        shapes = {name: torch.Size(shape) for name, shape in content[SHAPES].items()}
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for name in file.keys():  # noqa: SIM118  it is no dictionary
                    shape = tuple(file.get_slice(name).get_shape())
                    blocks[name].append(_Block(path, tuple(places[name]["saved_offsets"]), shape))
    sizes = {name: sum(prod(block.shape) for block in blocks[name]) for name in shapes}
    holes = sorted(name for name, shape in shapes.items() if sizes[name] != shape.numel())
    if holes:
        raise RecpoError(
            f"{checkpoint} has lost files: parts of {', '.join(holes[:5])} are missing; copy all of it",
            code="damaged",
            field=checkpoint.name,
        )
    weights = {name: shape for name, shape in shapes.items() if not name.startswith("optimizer_states.")}
    return {name: LazyRows(shape, partial(_read_rows, name, blocks[name], shape)) for name, shape in weights.items()}


def validate_checkpoint(checkpoint: Path, run: str | None = None) -> None:
    """Raises if a checkpoint to resume from was changed, or is not one of the run.

    The checkpoint of an unfinished run is not in any ``run.json``, and torch does not verify the checksums of its own
    format. Without this check, training would continue from a weight with a flipped bit.

    Args:
        checkpoint: the file; for the directory of a sharded run, only missing files are detected.
        run: the run that must have written it (``RunDirectory.identity``); None = any.

    Raises:
        RecpoError: it is damaged, or another run wrote it.
    """
    if checkpoint.is_dir():
        saved_tensors(checkpoint)
        content = load_plain(checkpoint / META)
    else:
        with _damage(checkpoint):
            validate_archive(checkpoint, contents=True)
        content = load_plain(checkpoint, "meta")
        _weights(content, checkpoint)
    if run is not None and (not isinstance(content, dict) or content.get(RUN) != run):
        raise RecpoError(
            f"{checkpoint} was written by another run than {checkpoint.parents[1]}, with other options or data, or by "
            f"another version of recpo; {_REMEDY}",
            code="mismatch",
            field=checkpoint.name,
        )


def load_plain(file: Path, device: Literal["cpu", "meta"] = "cpu") -> Any:
    """What torch saved in a file, without unpickling objects.

    Raises:
        RecpoError: it is damaged.
    """
    with _damage(file):
        validate_archive(file, contents=False)
        return torch.load(file, map_location=device, weights_only=True, mmap=True)


def _weights(content: Any, checkpoint: Path) -> dict[str, Tensor]:
    weights = content.get("state_dict") if isinstance(content, dict) else None
    dense = isinstance(weights, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for name, value in weights.items()
    )
    if not dense:
        raise RecpoError(
            f"{checkpoint} is damaged (state_dict is no mapping of names to tensors); {_REMEDY}",
            code="damaged",
            field=checkpoint.name,
        )
    return dict(weights)  # type: ignore[arg-type]  # a mapping, as checked


@contextmanager
def _damage(checkpoint: Path) -> Iterator[None]:
    """Reports in one message what zipfile, pickle, safetensors and torch raise, each its own exceptions."""
    try:
        yield
    except OSError as error:
        raise RecpoError(
            f"{describe_os_error(error, checkpoint)}; {_REMEDY}", code="wrong_file", field=checkpoint.name
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise RecpoError(
            f"{checkpoint} is damaged ({type(error).__name__}: {reason}); {_REMEDY}",
            code="damaged",
            field=checkpoint.name,
        ) from error
