"""Processes of a group that run test functions. The files of a folder share theirs: every process imports for seconds.

    @pytest.fixture(scope="session")
    def two():
        with shared(2) as ranks:
            yield ranks

    def sum_of_ranks(summand):                      # at the top level of the test file: the processes import it
        total = torch.tensor(dist.get_rank() + summand)
        dist.all_reduce(total)
        return total

    def test_sum(two):
        assert two.run(sum_of_ranks, 10) == [21, 21]

What a function is given and returns is pickled. An error of any rank is raised here with that rank's traceback. If
another still waits for it then, all processes are ended, and the next function starts new ones.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[2]


class Ranks:
    """A group of processes, one thread each.

    Args:
        world_size: how many.
        backend: of their collectives.
        timeout: seconds that one function may take; a rank waits for the others a little less, but at least 60.
    """

    def __init__(self, world_size: int, backend: str = "gloo", timeout: float = 600) -> None:
        self.world_size, self.backend, self.timeout = world_size, backend, timeout
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _start(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | threads | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": path}
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            store = f"file://{self._folder.name}/store"
            group = [self.backend, store, str(rank), str(self.world_size), str(max(0.8 * self.timeout, 60))]
            command = [sys.executable, __file__, *group]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
        # a busy machine may take long to import torch; that is not the time of the first function
        self._ask_all((__file__, _ready.__name__, ()), max(self.timeout, 600))

    def _end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        if self._processes:
            self._folder.cleanup()
        self._processes = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank; it is a top-level function of a file."""
        if not self._processes:
            self._start()
        return self._ask_all((inspect.getsourcefile(function), function.__name__, arguments), self.timeout)

    def _ask_all(self, call: tuple[Any, ...], timeout: float) -> list[Any]:
        pool = ThreadPoolExecutor(self.world_size)
        answers = [pool.submit(_ask, process, call) for process in self._processes]
        wait(answers, timeout, FIRST_EXCEPTION)
        wait(answers, 2)  # the others of a rank that failed: if they come to an end, they can go on together
        failed = [answer for answer in answers if answer.done() and answer.exception()]
        late = [rank for rank, answer in enumerate(answers) if not answer.done()]
        if late or any(process.poll() is not None for process in self._processes):
            self._end()
        pool.shutdown()
        if failed:
            raise AssertionError("\n".join(str(answer.exception()) for answer in failed))
        if late:
            raise TimeoutError(f"{call[1]} takes ranks {late} over {timeout} s")
        return [answer.result() for answer in answers]


@cache
def shared(world_size: int) -> Ranks:
    """The group of this size that the folders of tests have in common."""
    return Ranks(world_size)


def _ask(process: subprocess.Popen[bytes], call: tuple[Any, ...]) -> Any:
    pickle.dump(call, process.stdin)  # type: ignore[arg-type]
    process.stdin.flush()  # type: ignore[union-attr]
    try:
        result, error = pickle.load(process.stdout)  # type: ignore[arg-type]
    except EOFError:
        raise AssertionError(f"a rank ended or was ended, exit status {process.wait()}") from None
    if error:
        raise AssertionError(error)
    return result


def _ready() -> None:
    """Nothing to do."""


@cache
def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _serve(calls: BinaryIO, answers: BinaryIO, backend: str, store: str, rank: int, ranks: int, limit: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit))
    while True:
        try:
            path, name, arguments = pickle.load(calls)
        except EOFError:
            return
        try:
            answer = getattr(_load(path), name)(*arguments), ""
        except BaseException:
            answer = None, f"rank {rank} of {ranks}:\n{traceback.format_exc()}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # what a function prints must not get between the answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _serve(sys.stdin.buffer, answers, *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
