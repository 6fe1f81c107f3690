"""Processes that are forked from one that has imported recpo: an import takes eight seconds of a core, a fork none."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
_OF_RECPO = ["torchrec", "recpo.cli.main", "recpo.training.fit", "recpo.sharding.strategy", "pyarrow.dataset"]
_OF_TESTS = ["pytest", "hypothesis", "scipy.stats", "recpo.policies.catalog_search", "recpo.sharding.row_tables"]
FORKS.set_forkserver_preload(_OF_RECPO + _OF_TESTS)


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """What ``function(*arguments)`` returns in a process of its own; it is a top-level function."""
    with ProcessPoolExecutor(1, FORKS) as own:
        return own.submit(function, *arguments).result()


class Command:
    """``recpo WORDS`` in a process of its own.

    Args:
        words: the verb and its options.
        folder: an existing one for what it prints.
    """

    def __init__(self, words: list[str], folder: Path) -> None:
        self._files = folder / "stdout.txt", folder / "stderr.txt"
        self.process = FORKS.Process(target=_main, args=(words, *self._files))
        self.process.start()

    @property
    def printed(self) -> tuple[str, str]:
        """What it has printed so far, and its messages."""
        out, err = (file.read_text("utf-8") if file.is_file() else "" for file in self._files)
        return out, err

    def until(self, holds: Callable[[], bool], timeout: float = 600) -> None:
        """Waits until something holds, while the command runs."""
        deadline = time.monotonic() + timeout
        while not holds():
            assert self.process.exitcode is None, self.printed
            assert time.monotonic() < deadline, f"not after {timeout} s: {self.printed}"
            time.sleep(0.005)

    def send(self, signal: int) -> None:
        """Sends a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal)

    def ended(self, timeout: float = 600) -> int:
        """Waits for its end. Its status; the negative number of a signal that it did not handle."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running after {timeout} s"
        return self.process.exitcode


def script(command: list[str], *, check: bool = False, env: dict[str, str] | None = None, **options: Any) -> Any:
    """``subprocess.run`` for a Python script that imports recpo; what nobody captures is printed here."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout.txt"), Path(folder, "stderr.txt")
        process = FORKS.Process(target=_script, args=(command[1:], {**(os.environ if env is None else env)}, *files))
        process.start()
        process.join()
        out, err = (file.read_text("utf-8") if file.is_file() else "" for file in files)
    if not options.get("capture_output"):
        sys.stdout.write("" if "stdout" in options else out)
        sys.stderr.write("" if "stderr" in options else err)
    assert process.exitcode is not None
    done = subprocess.CompletedProcess(command, process.exitcode, out, err)
    if check:
        done.check_returncode()
    return done


def _script(words: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    import torch

    _printing(out, err)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv, sys.path = words, [str(Path(words[0]).parent), *sys.path]
    runpy.run_path(words[0], run_name="__main__")


def _main(words: list[str], out: Path, err: Path) -> None:
    _printing(out, err)
    sys.argv = [str(Path(sys.executable).with_name("recpo")), *words]  # a run starts its second rank with them
    from recpo.cli.main import main

    sys.exit(main(words))


def _printing(out: Path, err: Path) -> None:
    for file, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
