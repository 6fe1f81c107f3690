"""The device of a verb."""

from __future__ import annotations

import torch

from recpo.base.errors import RecpoError


def compute_device(name: str) -> torch.device:
    """The device with this name; ``auto`` is a GPU if there is one, else the CPU.

    Raises:
        RecpoError: there is no such device, or torch was built without it.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # no such device, or torch without CUDA
        raise RecpoError(
            f"device {name!r} cannot be used here ({error})", code="unsupported", field="device"
        ) from error
