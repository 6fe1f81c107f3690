"""Micro-batching: every query that was submitted gets an answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from recpo.server import ranking
from recpo.server.ranking import Batcher, ClosedError


def test_closing_answers_the_batch_that_is_computed_and_the_queries_behind_it():
    begun, go_on = threading.Event(), threading.Event()

    def work(queries):
        begun.set()
        assert go_on.wait(30)
        return [query * 2 for query in queries]

    async def run():
        batcher = Batcher(work, max_batch=1)
        batcher.start()
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.to_thread(begun.wait, 30)
        second = asyncio.create_task(batcher.submit(2))
        await asyncio.sleep(0)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        go_on.set()
        await asyncio.wait_for(closing, 30)
        return [await asyncio.wait_for(query, 1) for query in (first, second)]

    assert asyncio.run(run()) == [2, 4]


def test_a_closed_batcher_rejects_queries():
    async def run():
        batcher = Batcher(list, max_batch=1)
        batcher.start()
        await batcher.close()
        await batcher.submit(1)

    with pytest.raises(ClosedError):
        asyncio.run(asyncio.wait_for(run(), 30))


def test_short_batches_run_in_the_event_loop_and_long_ones_beside_it(monkeypatch):
    now, seconds, ran_in_loop = [0.0], [0.001], []
    monkeypatch.setattr(ranking.time, "perf_counter", lambda: now[0])

    def work(queries):
        ran_in_loop.append(threading.current_thread() is threading.main_thread())
        now[0] += seconds[0] * len(queries)
        return list(queries)

    async def run():
        batcher = Batcher(work, max_batch=8)
        batcher.start()
        for seconds[0] in (0.001, 0.001, 0.05, 0.001, 0.001):
            assert await batcher.submit(7) == 7
        assert await asyncio.gather(*map(batcher.submit, range(8))) == list(range(8))
        await batcher.close()

    asyncio.run(run())
    # the time of the first one is not known, that of a slow one only when it is over, and eight take longer than one
    assert ran_in_loop == [False, True, True, False, True, False]
