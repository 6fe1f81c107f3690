"""Writes tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors as safetensors, with the permissions that a new file gets (umask, inherited ACL).

    safetensors itself creates files that only their owner can read: a server under another account could not.

    Args:
        file: the file.
        tensors: contiguous tensors by name.
        metadata: text for the header of the file.
    """
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata)
    file.chmod(mode & 0o777)
