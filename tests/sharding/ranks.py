"""Processes of a group that run test functions. ``two`` of tests/conftest.py is a group of two, one for each file.

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
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forks import FORKS


class Ranks:
    """A group of processes, one thread each.

    Args:
        world_size: how many.
        backend: of their collectives.
        timeout: seconds that one function may take; a rank waits for the others a little less, but at least 60.
    """

    def __init__(self, world_size: int, backend: str = "gloo", timeout: float = 600) -> None:
        self.world_size, self.backend, self.timeout = world_size, backend, timeout
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        limit = max(0.8 * self.timeout, 60)
        for rank in range(self.world_size):
            ours, theirs = FORKS.Pipe()
            group = self.backend, f"file://{self._folder.name}/store", rank, self.world_size, limit
            process = FORKS.Process(target=_serve, args=(theirs, *group))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        # a busy machine may take long to import torch; that is not the time of the first function
        self._ask_all((__file__, _ready.__name__, ()), max(self.timeout, 600))

    def _end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank; it is a top-level function of a file."""
        if not self._processes:
            self._start()
        return self._ask_all((inspect.getsourcefile(function), function.__name__, arguments), self.timeout)

    def _ask_all(self, call: tuple[Any, ...], timeout: float) -> list[Any]:
        pool = ThreadPoolExecutor(self.world_size)
        answers = [pool.submit(_ask, pipe, call) for pipe in self._pipes]
        wait(answers, timeout, FIRST_EXCEPTION)
        wait(answers, 2)  # the others of a rank that failed: if they come to an end, they can go on together
        failed = [answer for answer in answers if answer.done() and answer.exception()]
        late = [rank for rank, answer in enumerate(answers) if not answer.done()]
        if late or any(process.exitcode is not None for process in self._processes):
            self._end()
        pool.shutdown()
        if failed:
            raise AssertionError("\n".join(str(answer.exception()) for answer in failed))
        if late:
            raise TimeoutError(f"{call[1]} takes ranks {late} over {timeout} s")
        return [answer.result() for answer in answers]


def _ask(pipe: Connection, call: tuple[Any, ...]) -> Any:
    pipe.send(call)
    try:
        result, error = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise AssertionError("a rank ended or was ended") from None
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


def _serve(calls: Connection, backend: str, store: str, rank: int, ranks: int, limit: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=limit))
    while True:
        try:
            path, name, arguments = calls.recv()
        except EOFError:
            return
        try:
            answer = getattr(_load(path), name)(*arguments), ""
        except BaseException:
            answer = None, f"rank {rank} of {ranks}:\n{traceback.format_exc()}"
        calls.send(answer)
