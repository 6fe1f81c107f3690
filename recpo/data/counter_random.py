"""Random numbers that are a function of what they are for, not of how many were drawn before.

A number is a hash of its keys, such as (seed, epoch, row, place). So neither ranks nor workers nor the batch size nor a
resume changes it, and a whole batch is drawn at once.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniform(*keys: np.ndarray | int) -> np.ndarray:
    """Uniform numbers in [0, 1) of the broadcast shape of ``keys``: integers of 64 bits, negative ones included.

    The keys are folded in one after the other by the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mixed(state ^ _mixed(np.asarray(key).astype(np.int64).view(np.uint64)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        state = state + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
