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
VERBS = ["train", "prepare"]


def test_verbs_that_are_ended_leave_nothing_by_halves(request, tmp_path):
    """Every verb is killed once and its disk is full once, every other time over an old output."""
    options = ["--kills", str(len(VERBS)), "--faults", str(len(VERBS)), "--verbs", *VERBS, "--work", str(tmp_path)]
    command = [sys.executable, "-m", "tests.robustness.crashes", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=request.config.rootpath)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert ended.stdout.count(f"{len(VERBS)} trials passed, 0 failed") == 2
    assert "over an old one" in ended.stdout
