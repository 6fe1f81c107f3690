"""Allocator tuning works where it can and is harmless where it cannot."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from recpo.training import callbacks as allocator

_PROGRAM = """
import resource, torch
from recpo.training.callbacks import tune_allocator
assert tune_allocator()
def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    logits = torch.ones(6 << 20)
    loss = (logits * 2).sum()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults = [faults_of_a_step() for _ in range(30)]
assert max(faults[-5:]) < 100 < faults[0], faults
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_stays_in_the_process() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)


def test_does_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.platform, "system", lambda: "Darwin")
    assert allocator.tune_allocator() is False
