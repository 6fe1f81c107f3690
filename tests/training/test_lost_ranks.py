"""A rank dies: rank 0 ends with status 1 and a message; Lightning's own monitor would kill it without one."""

import subprocess
import sys

import pytest

from recpo.training.fit import parse_arguments

CHILD = """
import subprocess, sys, time
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
import os
from pathlib import Path
from recpo.training import callbacks as lost_ranks
lost_ranks.GRACE_S = {grace}
other = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
_ChildProcessObserver(os.getpid(), [other], sleep_period=0.1).start()
lost_ranks.ReportLostRanks(Path("runs/x")).setup(None, None, "fit")
{rest}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grace", "rest", "status", "said"),
    [
        (0.1, "time.sleep(600)", 1, "--resume true (process"),  # it hangs in a collective
        (30, "time.sleep(1); sys.exit('said by itself')", 1, "said by itself"),
    ],
)
def test_rank_0_ends_with_a_message(grace, rest, status, said):
    code = CHILD.format(grace=grace, rest=rest)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert ended.returncode == status, ended.stderr[-2000:]
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


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
