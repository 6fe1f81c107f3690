"""A sample of ``crashes.py``: verbs that are killed, or whose disk is full, at some of their operations."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler"),
]
FAST = ["simulate", "prepare", "tokenize", "factorize"]


@pytest.mark.parametrize(
    ("options", "verbs"),
    [
        (["--kills", "3"], FAST),
        (["--kills", "2"], ["train"]),
        (["--faults", "3"], FAST),
        (["--faults", "2"], ["train"]),
    ],
)
def test_verbs_that_are_ended_leave_nothing_by_halves(request, tmp_path_factory, options, verbs):
    work = tmp_path_factory.getbasetemp() / "crashes"  # the inputs are made once
    command = [sys.executable, "-m", "tests.robustness.crashes", *options, "--verbs", *verbs, "--work", str(work)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=request.config.rootpath)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert ", 0 failed" in ended.stdout
