"""A rank dies: rank 0 ends with status 1 and a message; Lightning's own monitor would kill it without one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recpo.training.fit import parse_arguments
from tests.forks import FORKS


def rank_0(grace, rest, said):
    """Rank 0 of a run whose other rank was killed, in a process of its own; ``said``: the file of its messages."""
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

    from recpo.training import callbacks as lost_ranks

    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    lost_ranks.GRACE_S = grace
    other = subprocess.Popen([sys.executable, "-S", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
    _ChildProcessObserver(os.getpid(), [other], sleep_period=0.1).start()
    lost_ranks.ReportLostRanks(Path("runs/x")).setup(None, None, "fit")
    rest()


def hangs_in_a_collective():
    time.sleep(600)


def says_it_itself():
    time.sleep(1)
    sys.exit("said by itself")


@pytest.mark.slow
def test_rank_0_ends_with_a_message(tmp_path):
    said = []
    for grace, rest in ((0.1, hangs_in_a_collective), (30, says_it_itself)):
        process = FORKS.Process(target=rank_0, args=(grace, rest, tmp_path / rest.__name__))
        process.start()
        process.join(600)
        said.append((tmp_path / rest.__name__).read_text("utf-8"))
        assert process.exitcode == 1, said
    hung, other = said
    assert "--resume true (process" in hung
    assert "said by itself" in other
    assert "said by itself" not in hung
    assert "Traceback" not in hung + other


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
