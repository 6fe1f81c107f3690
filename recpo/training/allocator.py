"""Keeps the memory of large tensors inside the process between training steps."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest values that mallopt takes as int: blocks below 1 GiB come from the heap, the heap's end is not given back.
_MMAP_BYTES = 1 << 30
_TRIM_BYTES = (1 << 31) - 1


def tune_allocator() -> bool:
    """Tells glibc to keep freed memory instead of returning it to the kernel after every step.

    A training step frees and asks for the same tensors of megabytes again and again; by default each of them is mapped
    again and page-faulted in, which costs up to a third of a step on a CPU. The price is a resident size that stays at
    its peak. Call it before the first large tensor. Linux with glibc only; elsewhere nothing happens.

    Returns:
        True if the allocator took both settings.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
