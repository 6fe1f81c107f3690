"""Processes that are forked from one that has imported recpo: an import takes eight seconds of a core, a fork none."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socketserver
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
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


#: what a shell file finds as ``recpo``
_PROGRAM = """#!{python} -IS
import json, os, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect({address!r})
with asked.makefile("rw") as lines:
    print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]), file=lines, flush=True)
    status, out, err = json.loads(lines.readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(status)
"""


@contextmanager
def program() -> Iterator[Path]:
    """A directory with a program ``recpo`` for shell files: every call is forked from a process that imported recpo."""
    with tempfile.TemporaryDirectory() as folder:  # not that of a test: the address of a socket must be short
        address, file = str(Path(folder, "socket")), Path(folder, "recpo")
        file.write_text(_PROGRAM.format(python=sys.executable, address=address))
        file.chmod(0o755)
        with socketserver.ThreadingUnixStreamServer(address, _Asked) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            yield Path(folder)
            server.shutdown()


class _Asked(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        words, where, environment = json.loads(self.rfile.readline())
        done = _ended(_verb, words, where, environment)
        self.wfile.write(json.dumps([done.returncode, done.stdout, done.stderr]).encode() + b"\n")


def script(command: list[str], *, check: bool = False, env: dict[str, str] | None = None, **options: Any) -> Any:
    """``subprocess.run`` for a Python script that imports recpo; what nobody captures is printed here."""
    done = _ended(_script, command[1:], {**(os.environ if env is None else env)})
    if not options.get("capture_output"):
        sys.stdout.write("" if "stdout" in options else done.stdout)
        sys.stderr.write("" if "stderr" in options else done.stderr)
    if check:
        done.check_returncode()
    return done


def _ended(target: Callable[..., Any], words: list[str], *arguments: Any) -> subprocess.CompletedProcess[str]:
    """How a process with these words ended, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout.txt"), Path(folder, "stderr.txt")
        process = FORKS.Process(target=target, args=(words, *arguments, *files))
        process.start()
        process.join()
        out, err = (file.read_text("utf-8") if file.is_file() else "" for file in files)
    assert process.exitcode is not None
    return subprocess.CompletedProcess(words, process.exitcode, out, err)


def _script(words: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    _printing(out, err)
    _replace_environment(environment)
    sys.argv, sys.path = words, [str(Path(words[0]).parent), *sys.path]
    runpy.run_path(words[0], run_name="__main__")


def _verb(words: list[str], where: str, environment: dict[str, str], out: Path, err: Path) -> None:
    os.chdir(where)
    _replace_environment(environment)
    _main(words, out, err)


def _replace_environment(environment: dict[str, str]) -> None:
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def _main(words: list[str], out: Path, err: Path) -> None:
    _printing(out, err)
    sys.argv = [str(Path(sys.executable).with_name("recpo")), *words]  # a run starts its second rank with them
    from recpo.cli.main import main

    sys.exit(main(words))


def _printing(out: Path, err: Path) -> None:
    for file, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
