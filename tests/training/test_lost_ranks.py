"""A rank dies: rank 0 ends with status 1 and a message; Lightning's own monitor would kill it without one."""

import subprocess
import sys

import pytest

from recpo.training.configuration import parse_arguments

RANK_0 = """
import os, subprocess, sys, time
from pathlib import Path
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from recpo.training import callbacks as lost_ranks


def rank_0(grace, rest):
    lost_ranks.GRACE_S = grace
    other = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    _ChildProcessObserver(os.getpid(), [other], sleep_period=0.1).start()
    lost_ranks.ReportLostRanks(Path("runs/x")).setup(None, None, "fit")
    rest()


def says_it_itself():
    time.sleep(1)
    sys.exit("said by itself")


for grace, rest in ((0.1, lambda: time.sleep(600)), (30, says_it_itself)):  # the first one hangs in a collective
    forked = os.fork()  # what takes seconds to import is there already
    if not forked:
        rank_0(grace, rest)
    print("status", os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_rank_0_ends_with_a_message():
    ended = subprocess.run([sys.executable, "-c", RANK_0], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    hung, other, rest = ended.stderr.split("status 1\n")
    assert "--resume true (process" in hung
    assert "said by itself" in other
    assert "said by itself" not in hung
    assert "Traceback" not in ended.stderr
    assert not rest


@pytest.mark.parametrize(
    "flags",
    [
        ["--rollout.collapse.min_unique_share", "null"],
        ["--rollout.collapse.min_unique_share=null"],
        ["--rollout.collapse.max_kl", "1.5", "--rollout.collapse.min_unique_share", "null", "--rollout.epochs", "3"],
    ],
)
def test_null_two_levels_below_an_option(flags):
    limits = parse_arguments(["--data.prepared", "x", "--out", "y", *flags]).rollout.collapse
    assert limits.min_unique_share is None
    assert limits.min_entropy == 0.1
    assert limits.max_kl == (1.5 if len(flags) > 2 else 2.0)
