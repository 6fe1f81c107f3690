"""Handles the end of one process in a run of several.

Every five seconds, Lightning checks whether the ranks that rank 0 started are alive. If one is not, it kills all ranks,
including rank 0, by SIGKILL, so no process can report why. Usually rank 0 has noticed before, because its next
collective fails; on a busy machine it may not have.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from recpo.training.run import RESOLVED

_OBSERVER: Final = "child-process-observer"  # the name of Lightning's thread
#: in which rank 0 reports the failure by itself; one that waits in a collective for ever does not
GRACE_S: Final = 30.0


class ReportLostRanks(Callback):
    """Lets rank 0 report that another rank has ended, before Lightning would kill it silently.

    Rank 0 has ``GRACE_S`` seconds to end by itself, as it does if a collective fails. After that it reports what
    happened, and all ranks of this machine are ended.

    Args:
        out: the run directory.
    """

    def __init__(self, out: Path) -> None:
        self._out = out

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Once the ranks have been started."""
        for thread in threading.enumerate():
            if thread.name == _OBSERVER and hasattr(thread, "_terminate_all"):
                thread._terminate_all = lambda observer=thread: self._end(observer)

    def _end(self, observer: Any) -> None:
        children = observer._child_processes
        time.sleep(GRACE_S)
        ended = next((process for process in children if process.returncode), None)
        for process in children:
            with suppress(OSError):
                process.send_signal(signal.SIGKILL)
        how = "" if ended is None else f" (process {ended.pid} ended with status {ended.returncode})"
        print(f"error: {lost_rank(self._out, 0)}{how}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread hangs in a collective, where no exception reaches it


def lost_rank(out: Path, rank: int) -> str:
    """What to say where a rank has lost another one."""
    again = f"recpo train --config {out}/{RESOLVED} --resume true"
    return (
        f"rank {rank} has lost another rank of this run, which ended or does not answer (see what that one wrote, or "
        "whether its machine ran out of memory); once it is fixed, continue from the last checkpoint: " + again
    )
