"""Micro-batching: requests that arrive while a batch runs form the next batch.

A single thread does the work, so a program has all cores to itself, and requests wait in the event loop. Without load,
a request is processed at once; ``max_wait_ms`` makes it wait for other requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class QueueFullError(Exception):
    """More requests are waiting than the options allow."""


class ClosedError(Exception):
    """The batcher was closed."""


@dataclass(eq=False)
class _Waiting(Generic[Query, Answer]):
    """A query and the future of its answer. Instances compare by identity."""

    query: Query
    future: asyncio.Future[Answer]
    taken: bool = False


class Batcher(Generic[Query, Answer]):
    """Passes batches of queries to a function that runs in its own thread.

    Args:
        work: returns one answer per query, in order; an answer that is an exception is raised for that query only.
        max_batch: maximum number of queries in a batch.
        max_wait_ms: how long the first query of a batch waits for others.
        max_queue: maximum number of waiting queries; further queries are rejected.
        on_batch: called with the size of every batch.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Query]], Sequence[Answer | Exception]],
        *,
        max_batch: int,
        max_wait_ms: float = 0.0,
        max_queue: int = 1024,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._work, self._on_batch = work, on_batch
        self._max_batch, self._max_wait_s, self._max_queue = max_batch, max_wait_ms / 1000, max_queue
        self._queue: deque[_Waiting[Query, Answer]] = deque()
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "recpo-batch")
        self._task: asyncio.Task[None] | None = None
        self._unanswered = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of queries that are not in a batch yet."""
        return len(self._queue)

    def start(self) -> None:
        """Starts accepting queries. Call it in the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, query: Query) -> Answer:
        """The answer to one query. A canceled query leaves the queue.

        Raises:
            ClosedError: ``close`` was called.
            QueueFullError: too many queries are waiting.
            Exception: the answer was this exception.
        """
        if self._closed:
            raise ClosedError
        if len(self._queue) >= self._max_queue:
            raise QueueFullError
        waiting = _Waiting[Query, Answer](query, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._unanswered += 1
        self._arrived.set()
        if len(self._queue) >= self._max_batch:
            self._full.set()
        try:
            return await waiting.future
        finally:
            self._unanswered -= 1
            if not waiting.taken:
                self._queue.remove(waiting)

    async def close(self) -> None:
        """Rejects further queries, and returns when every submitted query has its answer."""
        self._closed = True
        while self._unanswered:
            await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            if self._max_wait_s and len(self._queue) < self._max_batch:
                await self._wait_for_others()
            if batch := self._take():
                queries = [waiting.query for waiting in batch]
                self._on_batch(len(batch))
                answers = await asyncio.shield(loop.run_in_executor(self._thread, self._answers, queries))
                _resolve(batch, answers)

    async def _wait_for_others(self) -> None:
        self._full.clear()
        try:
            await asyncio.wait_for(self._full.wait(), self._max_wait_s)
        except TimeoutError:
            return

    def _take(self) -> list[_Waiting[Query, Answer]]:
        batch: list[_Waiting[Query, Answer]] = []
        while self._queue and len(batch) < self._max_batch:
            waiting = self._queue.popleft()
            waiting.taken = True
            if not waiting.future.done():  # its client has given up
                batch.append(waiting)
        if not self._queue:
            self._arrived.clear()
        return batch

    def _answers(self, queries: Sequence[Query]) -> Sequence[Answer | Exception]:
        try:
            return self._work(queries)
        except Exception as error:  # the queue continues; every client of this batch gets the error
            return [error] * len(queries)


def _resolve(batch: Sequence[_Waiting[Query, Answer]], answers: Sequence[Answer | Exception]) -> None:
    for waiting, answer in zip(batch, answers, strict=True):
        if waiting.future.done():
            continue
        if isinstance(answer, Exception):
            waiting.future.set_exception(answer)
        else:
            waiting.future.set_result(answer)
